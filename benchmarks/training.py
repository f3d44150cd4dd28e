"""Training speed beside sb3-contrib's RecurrentPPO: the same market, network size, epochs and batch, in one run.

    python benchmarks/training.py            both shapes, a few minutes on 2 cores
    python benchmarks/training.py --quick    three timed turns each

Episodes are staggered for both: environments that restart together let the peer take its fast path most of the time.
Run it on an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from sb3_contrib import RecurrentPPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import VecEnv

import tailguard as tg
from tailguard.data.prepare import PreparedBars, prepare
from tailguard.envs.gym_trading import TradingGymEnv
from tailguard.optim.config import VGSConfig

EPISODE = 256


class BatchedTradingVecEnv(VecEnv):
    """The tensor environment as an SB3 VecEnv: the peer steps all accounts at once too, without a loop in Python."""

    def __init__(self, env: tg.TradingEnv, single: TradingGymEnv) -> None:
        self.env = env
        super().__init__(env.num_envs, single.observation_space, single.action_space)

    def reset(self) -> np.ndarray:
        return self.env.reset(0).numpy()

    def step_async(self, actions: np.ndarray) -> None:
        self.actions = torch.as_tensor(actions)

    def step_wait(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[dict[str, Any]]]:
        step = self.env.step(self.actions)
        ended = step.ended.numpy()
        infos: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
        for index in np.flatnonzero(ended):
            infos[index] = {
                "terminal_observation": step.final_obs[index].numpy(),
                "TimeLimit.truncated": bool(step.truncated[index]),
            }
        return step.obs.numpy(), step.reward.numpy(), ended, infos

    def close(self) -> None: ...

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:  # noqa: ARG002
        return [None] * self.num_envs

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None: ...

    def env_method(self, method_name: str, *args: Any, indices: Any = None, **kwargs: Any) -> list[Any]:  # noqa: ARG002
        return [None] * self.num_envs

    def env_is_wrapped(self, wrapper_class: Any, indices: Any = None) -> list[bool]:  # noqa: ARG002
        return [False] * self.num_envs


def market(num_envs: int, prepared: PreparedBars, stagger: int) -> tg.TradingEnv:
    return tg.TradingEnv(prepared, num_envs=num_envs, episode_length=EPISODE, stagger=stagger)


def ours(prepared: PreparedBars, num_envs: int, n_steps: int, minibatch: int, stagger: int, **options: Any) -> Any:
    """Steps per second of our learner, an iteration at a time."""
    env = market(num_envs, prepared, stagger)
    agent = tg.DistributionalPPO(
        env, n_steps=n_steps, minibatch_size=minibatch, epochs=4, hidden=(64,), lstm_size=64, seed=0, **options
    )
    return agent.iterate, num_envs * n_steps


def peer(prepared: PreparedBars, num_envs: int, n_steps: int, minibatch: int, stagger: int) -> Any:
    """The same of sb3-contrib's, with its own loop."""
    single = TradingGymEnv(prepared, episode_length=EPISODE)
    env = BatchedTradingVecEnv(market(num_envs, prepared, stagger), single)
    model = RecurrentPPO(
        "MlpLstmPolicy",
        env,
        n_steps=n_steps,
        batch_size=minibatch,
        n_epochs=4,
        seed=0,
        device="cpu",
        policy_kwargs={"lstm_hidden_size": 64, "net_arch": {"pi": [64], "vf": [64]}},
    )
    steps = num_envs * n_steps
    # `learn` must not begin anew each time: that would reset the environments, and with them the stagger.
    model._setup_learn(10**9, callback=None)
    nothing = _Nothing()
    nothing.init_callback(model)

    def iterate() -> None:
        model.collect_rollouts(model.env, nothing, model.rollout_buffer, n_rollout_steps=n_steps)
        model._update_current_progress_remaining(0, 1)
        model.train()

    model._logger.output_formats = []
    return iterate, steps


class _Nothing(BaseCallback):
    def _on_step(self) -> bool:
        return True


def measure(
    group: dict[str, Callable[[], tuple[Callable[[], object], int]]], repeats: int
) -> dict[str, tuple[float, float]]:
    """Median steps per second of each candidate, and its spread (quartiles over median), after two turns to warm up.

    The candidates take turns, an iteration each, so that whatever else slows the machine slows all of them.
    """
    made = {name: prepare_run() for name, prepare_run in group.items()}
    rates: dict[str, list[float]] = {name: [] for name in group}
    for turn in range(repeats + 2):
        for name, (iterate, steps) in made.items():
            begin = time.perf_counter()
            iterate()
            if turn >= 2:
                rates[name].append(steps / (time.perf_counter() - begin))
    found = {}
    for name, values in rates.items():
        low, middle, high = np.quantile(values, (0.25, 0.5, 0.75))
        found[name] = (float(middle), float((high - low) / middle))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three timed turns instead of fifteen")
    parser.add_argument("--only", default="", help="only groups with a row whose name contains this")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="CPU threads of both")
    arguments = parser.parse_args()
    repeats = 3 if arguments.quick else 15
    torch.set_num_threads(arguments.threads)
    console = Console()
    console.print(f"torch {torch.__version__}, {torch.get_num_threads()} threads; medians of {repeats} turns")
    prepared = prepare(tg.make_market(20_000, seed=0).bars)
    all_on = {"twin_critics": True, "critic": "quantile", "value_clip": "mean_and_variance", "entropy_coef": 0.001}
    equal = (64, 64, 1024)
    groups: list[dict[str, Callable[[], Any]]] = [
        {
            "sb3-contrib, 64 × 64, minibatch 1,024": lambda: peer(prepared, *equal, 64),
            "Tailguard plain (scalar critic)": lambda: ours(prepared, *equal, 64, critic="scalar"),
            "Tailguard default (quantile critic)": lambda: ours(prepared, *equal, 64),
            "Tailguard twin quantile, clip, entropy": lambda: ours(prepared, *equal, 64, **all_on),
        },
        {
            "sb3-contrib, episodes end at any step": lambda: peer(prepared, *equal, 1),
            "Tailguard, episodes end at any step": lambda: ours(prepared, *equal, 1),
        },
        {
            "Tailguard's defaults, 256 × 64, 4,096": lambda: ours(prepared, 256, 64, 4096, 64),
            "without figures of health": lambda: ours(prepared, 256, 64, 4096, 64, monitor=False),
            "with a risk budget": lambda: ours(prepared, 256, 64, 4096, 64, risk=tg.RiskConfig(limit=-0.04)),
            "with variance gradient scaling": lambda: ours(prepared, 256, 64, 4096, 64, vgs=VGSConfig(enabled=True)),
            "with UPGDW": lambda: ours(prepared, 256, 64, 4096, 64, optimizer="upgdw"),
        },
        {
            "sb3-contrib as people run it, 8 × 128, 128": lambda: peer(prepared, 8, 128, 128, 64),
            "Tailguard's defaults, 256 × 64, 4,096": lambda: ours(prepared, 256, 64, 4096, 64),
        },
    ]
    table = Table("training, LSTM 64, 4 epochs", "steps/s", "spread", "ratio to the first", box=None)
    for group in groups:
        if not any(arguments.only in name for name in group):
            continue
        with console.status(next(iter(group))):
            found = measure(group, repeats)
        reference = next(iter(found.values()))[0]
        for name, (speed, spread) in found.items():
            table.add_row(
                name,
                f"{speed:,.0f}",
                f"{100 * spread:.0f} %",
                f"{speed / reference:.2f}×" if speed / reference < 2 else f"{speed / reference:.1f}×",
            )
    console.print(table)


if __name__ == "__main__":
    main()

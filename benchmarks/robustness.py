"""Plain agents and agents trained against attacks, under the strongest of five attacks.

    python benchmarks/robustness.py                        all tasks, 8 seeds; resumes from robustness.json
    python benchmarks/robustness.py --only market          one task
    python benchmarks/robustness.py --cost                 cost of the inner attack, as a multiple of a plain update

Each agent acts deterministically: clean, under noise at the corners of the ball, under PGD on the size of its action's
change (`pgd`), on its action's sign (`reverse`) and on its critic, and under an adversary that was trained against it
(`direction`). The strongest attack is the one that leaves least, chosen for each agent; `reverse_1.5`, of one and a
half times the size, is not among them. What an agent keeps is counted from what no skill earns: 0 in the market (no
trade), the return of random actions in Pendulum, 0 in InvertedPendulum.

InvertedPendulum-v5 stands for the MuJoCo tasks: Hopper-v5 needs hours of a CPU for 8 seeds (`pip install mujoco`).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import gymnasium
import torch

import tailguard as tg
from tailguard.algorithm.adversary_training import train_adversary
from tailguard.data.splits import Split
from tailguard.envs.gym import GymnasiumEnv
from tailguard.evaluate.held_out import episodes_on
from tailguard.robust.attacked_policy import AttackedPolicy
from tailguard.robust.attacks import Attack
from tailguard.robust.config import RobustConfig

ATTACKS = {
    "clean": ("random", "action", 0.0),
    "noise": ("random", "action", 1.0),
    "pgd": ("pgd", "action", 1.0),
    "reverse": ("pgd", "reverse", 1.0),
    "critic": ("pgd", "critic", 1.0),
    "reverse_1.5": ("pgd", "reverse", 1.5),
}
"""Kind and target, and the share of the task's epsilon."""


@dataclass(frozen=True)
class Task:
    """What is trained and how it is judged."""

    train: Callable[[int, RobustConfig], Any]
    evaluate: Callable[[Any, int], float]
    adversary: Callable[[Any, Attack, int], AttackedPolicy]
    epsilon: float
    robust: RobustConfig
    floor: float
    """What no skill earns."""


# --- the planted market, gradients through the market, LSTM ----------------------------------------------------------


@cache
def split() -> Split:
    market = tg.make_market(9_000, seed=1, signal=20.0)
    return tg.split_bars(market.bars, validation=0.1, test=0.3, embargo="7d")


def market_env(num_envs: int) -> tg.TradingEnv:
    return tg.TradingEnv(split().train, num_envs=num_envs, episode_length=64)


def train_market(seed: int, robust: RobustConfig) -> Any:
    agent = tg.PathwiseLearner(market_env(128), n_steps=32, seed=seed, robust=robust, learning_rate="linear:1e-2:1e-3")
    return agent.learn(128 * 32 * 60)


def evaluate_market(agent: Any, seed: int) -> float:  # noqa: ARG001 (the test part is the same for all)
    """Mean log-growth of episodes of 64 hours on the test part, net of costs."""
    (episodes,) = episodes_on(agent.spec, split().test)
    return float(episodes.trade(agent).growth.mean())


def attack_market(agent: Any, attack: Attack, seed: int) -> AttackedPolicy:
    options: dict[str, Any] = {"n_steps": 32, "minibatch_size": 512, "hidden": (32,), "lstm_size": 32}
    return train_adversary(
        agent,
        market_env(64),
        attack,
        timesteps=64 * 32 * 30,
        seed=seed,
        critic="scalar",
        learning_rate=3e-3,
        **options,
    )


# --- Gymnasium tasks, PPO ---------------------------------------------------------------------------------------------

PENDULUM: dict[str, Any] = {
    "n_steps": 200,
    "minibatch_size": 400,
    "epochs": 10,
    "gamma": 0.9,
    "learning_rate": "linear:3e-3:0",
    "hidden": (64,),
    "activation": "silu",
    "log_std_init": 0.3,
    "memory": "none",
    "critic": "scalar",
}
INVERTED: dict[str, Any] = {
    "n_steps": 128,
    "minibatch_size": 256,
    "epochs": 10,
    "learning_rate": "linear:1e-3:0",
    "hidden": (64,),
    "activation": "silu",
    "log_std_init": -0.5,
    "memory": "none",
    "critic": "scalar",
}


def copies(task: str, count: int) -> GymnasiumEnv:
    return GymnasiumEnv([partial(gymnasium.make, task)] * count)


def train_gym(task: str, options: dict[str, Any], steps: int, seed: int, robust: RobustConfig) -> Any:
    return tg.DistributionalPPO(copies(task, 10), seed=seed, robust=robust, **options).learn(steps)


def evaluate_gym(task: str, agent: Any, seed: int, episodes: int = 10) -> float:
    """Mean return of so many episodes, one in each copy."""
    env = copies(task, episodes)
    observation = env.reset(10_000 + seed)
    start, done = torch.ones(episodes, dtype=torch.bool), torch.zeros(episodes, dtype=torch.bool)
    total = torch.zeros(episodes)
    memories = agent.initial_memories(episodes)
    while not done.all():
        decision = agent.decide(observation, memories, start)
        memories, step = decision.memories, env.step(decision.action)
        total += torch.where(done | ~step.valid, 0.0, step.reward)
        done |= step.ended & step.valid
        observation, start = step.obs, step.ended
    env.close()
    return float(total.mean())


def attack_gym(task: str, options: dict[str, Any], steps: int, agent: Any, attack: Attack, seed: int) -> AttackedPolicy:
    return train_adversary(agent, copies(task, 10), attack, timesteps=steps, seed=seed, **options)


def gym_task(name: str, options: dict[str, Any], steps: int, adversary_steps: int, **rest: Any) -> Task:
    return Task(
        partial(train_gym, name, options, steps),
        partial(evaluate_gym, name),
        partial(attack_gym, name, {**options, "learning_rate": 3e-3}, adversary_steps),
        **rest,
    )


TASKS: dict[str, Task] = {
    "market": Task(train_market, evaluate_market, attack_market, 0.5, RobustConfig(coef=10.0, epsilon=0.75), floor=0.0),
    "InvertedPendulum-v5": gym_task(
        "InvertedPendulum-v5",
        INVERTED,
        40_000,
        20_000,
        epsilon=0.4,
        robust=RobustConfig(coef=0.3, epsilon=0.4, distance="action"),
        floor=0.0,
    ),
    "Pendulum-v1": gym_task(
        "Pendulum-v1",
        PENDULUM,
        100_000,
        40_000,
        epsilon=0.3,
        robust=RobustConfig(coef=0.02, epsilon=0.3, distance="action"),
        floor=-1_200.0,
    ),
}


def judge(task: Task, variant: str, seed: int) -> dict[str, float]:
    """Train an agent and let every attack at it."""
    begun = time.process_time()
    agent = task.train(seed, task.robust if variant == "regularised" else RobustConfig())
    found = {"train_seconds": time.process_time() - begun}
    for name, (kind, target, share) in ATTACKS.items():
        attack = Attack(kind, share * task.epsilon, target=target)  # type: ignore[arg-type]
        found[name] = task.evaluate(AttackedPolicy(agent, attack), seed)
    found["adversary"] = task.evaluate(task.adversary(agent, Attack(epsilon=task.epsilon), seed), seed)
    found["seconds"] = time.process_time() - begun
    return found


def summarise(results: dict[str, dict[str, float]], name: str, task: Task) -> None:
    rows = {}
    for variant in ("plain", "regularised"):
        runs = [run for key, run in results.items() if key.startswith(f"{name}/{variant}/")]
        if not runs:
            return
        worst = [min(run[attack] for attack in ("noise", "pgd", "reverse", "critic", "adversary")) for run in runs]
        rows[variant] = {kind: statistics.median(run[kind] for run in runs) for kind in (*ATTACKS, "adversary")}
        rows[variant] |= {"strongest": statistics.median(worst), "n": len(runs)}
    print(f"\n{name}: ε = {task.epsilon}, floor {task.floor:g}, medians")
    for variant, row in rows.items():
        print(f"  {variant:12s}", "  ".join(f"{kind} {value:.4g}" for kind, value in row.items()))
    plain, smooth = rows["plain"], rows["regularised"]
    kept = [(row["strongest"] - task.floor) / (plain["clean"] - task.floor) for row in (plain, smooth)]
    clean = (smooth["clean"] - task.floor) / (plain["clean"] - task.floor)
    ratio = f"{kept[1] / kept[0]:.2f}×" if kept[0] > 0 else "plain keeps nothing"
    print(f"  kept {kept[0]:.1%} and {kept[1]:.1%} of the plain clean result ({ratio}); clean {clean - 1:+.1%}")


def cost(rounds: int = 7) -> None:
    """CPU time of the updates on a rollout (attack and epochs), plain and with 10 steps of PGD, in turns."""
    market = tg.make_market(4_000, seed=0)
    kinds = {
        "plain": RobustConfig(),
        "rollout": RobustConfig(coef=1.0, schedule="constant"),
        "minibatch": RobustConfig(coef=1.0, schedule="constant", refresh="minibatch"),
        "through time": RobustConfig(coef=1.0, schedule="constant", through_time=True),
    }
    for learner in (tg.DistributionalPPO, tg.PathwiseLearner):
        agents = {
            name: learner(tg.TradingEnv(market.bars, num_envs=128, episode_length=256), n_steps=64, robust=robust)
            for name, robust in kinds.items()
        }
        seconds: dict[str, list[float]] = {name: [] for name in kinds}
        for _ in range(rounds):
            for name, agent in agents.items():
                begun = time.process_time()
                on_rollout: Any = None
                if learner is tg.DistributionalPPO:

                    def on_rollout(_: Any) -> bool:
                        nonlocal begun
                        begun = time.process_time()  # collecting is the same for all
                        return True

                agent.iterate(on_rollout)
                seconds[name].append(time.process_time() - begun)
        plain = statistics.median(seconds["plain"][2:])
        for name, taken in seconds.items():
            print(f"{learner.__name__:18s} {name:13s} {statistics.median(taken[2:]) / plain:.2f} × a plain update")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="tasks whose name contains this")
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--out", type=Path, default=Path("robustness.json"))
    parser.add_argument("--cost", action="store_true", help="measure the cost of the inner attack instead")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.cost:
        cost()
        return
    results = json.loads(arguments.out.read_text("utf-8")) if arguments.out.exists() else {}
    chosen = {name: task for name, task in TASKS.items() if arguments.only in name}
    for seed in range(arguments.seeds):
        for name, task in chosen.items():
            for variant in ("plain", "regularised"):
                key = f"{name}/{variant}/{seed}"
                if key not in results:
                    # Gymnasium seeds copies with seed, seed + 1, …: neighbours would share most of their episodes.
                    results[key] = judge(task, variant, 1_000 * seed)
                    arguments.out.write_text(json.dumps(results, indent=1), encoding="utf-8")
                    print(key, {kind: round(value, 4) for kind, value in results[key].items()}, flush=True)
    for name, task in chosen.items():
        summarise(results, name, task)


if __name__ == "__main__":
    main()

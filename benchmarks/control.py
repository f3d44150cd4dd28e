"""Control anchors: published tasks at their published budget, beside Stable-Baselines3 and sb3-contrib.

    python benchmarks/control.py             our agents, 100,000 steps, 3 seeds
    python benchmarks/control.py --peers     the peers too, with the RL Zoo's settings (an hour more)

Evaluation is deterministic, by SB3's own `evaluate_policy`. Seeds are 0, 1000 and 2000: Gymnasium seeds the copies of
an environment with seed, seed + 1, …, so neighbouring seeds would share most of their episodes.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from sb3_contrib import RecurrentPPO
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import DummyVecEnv
from tasks import make

import tailguard as tg
from tailguard.envs.gym import GymnasiumEnv

EPISODES = 30

CARTPOLE: dict[str, Any] = {
    "n_steps": 32,
    "minibatch_size": 64,
    "epochs": 10,
    "gamma": 0.99,
    "gae_lambda": 0.95,
    "learning_rate": "linear:1e-3:0",
    "memory": "none",
    "hidden": (64, 64),
}
CARTPOLE_MASKED: dict[str, Any] = {
    "n_steps": 128,
    "minibatch_size": 256,
    "epochs": 10,
    "gamma": 0.98,
    "gae_lambda": 0.95,
    "learning_rate": "linear:2e-3:0",
    "memory": "separate",
    "hidden": (64,),
    "lstm_size": 64,
    "activation": "silu",
}
PENDULUM: dict[str, Any] = {
    "n_steps": 200,
    "minibatch_size": 400,
    "epochs": 10,
    "gamma": 0.9,
    "gae_lambda": 0.95,
    "learning_rate": "linear:3e-3:0",
    "hidden": (64,),
    "activation": "silu",
    "log_std_init": 0.3,
    "normalise_observations": False,
    "memory": "none",
}
TASKS: dict[str, tuple[str, int, dict[str, Any], str]] = {
    "CartPole-v1, no memory": ("CartPole-v1", 8, CARTPOLE, "500"),
    "CartPole without velocities, LSTM": ("CartPole-masked", 8, CARTPOLE_MASKED, "≥ 490"),
    "CartPole without velocities, no memory": ("CartPole-masked", 8, CARTPOLE, "< 60"),
    "Pendulum-v1, no memory": (
        "Pendulum-v1",
        10,
        {**PENDULUM, "hidden": (64, 64), "minibatch_size": 200},
        "≥ -200",
    ),
    "Pendulum without velocities, LSTM": (
        "Pendulum-masked",
        10,
        {**PENDULUM, "memory": "separate", "lstm_size": 64},
        "≥ -230",
    ),
}

ZOO_CARTPOLE: dict[str, Any] = {"n_steps": 32, "batch_size": 256, "n_epochs": 20, "gamma": 0.98, "gae_lambda": 0.8}
"""With a learning rate of 1e-3 and a clip range of 0.2, both falling to 0."""
ZOO_PENDULUM: dict[str, Any] = {
    "n_steps": 1024,
    "n_epochs": 10,
    "gamma": 0.9,
    "gae_lambda": 0.95,
    "learning_rate": 1e-3,
    "use_sde": True,
    "sde_sample_freq": 4,
}
PEERS: dict[str, tuple[int, type[PPO] | type[RecurrentPPO], dict[str, Any]]] = {
    "CartPole-v1, no memory": (8, PPO, ZOO_CARTPOLE),
    "CartPole without velocities, LSTM": (8, RecurrentPPO, ZOO_CARTPOLE),
    "Pendulum-v1, no memory": (4, PPO, ZOO_PENDULUM),
    "Pendulum without velocities, LSTM": (4, RecurrentPPO, ZOO_PENDULUM),
}


def evaluate(model: Any, task: str, seed: int) -> float:
    env = DummyVecEnv([partial(make, task)] * 10)
    env.seed(10_000 + seed)
    mean, _ = evaluate_policy(model, env, n_eval_episodes=EPISODES, deterministic=True, warn=False)
    return float(np.mean(mean))


def ours(task: str, num_envs: int, options: dict[str, Any], steps: int, seed: int) -> float:
    env = GymnasiumEnv([partial(make, task)] * num_envs)
    agent = tg.DistributionalPPO(env, seed=seed, **options)
    agent.learn(steps)
    return evaluate(agent, task, seed)


def theirs(task: str, num_envs: int, kind: Any, options: dict[str, Any], steps: int, seed: int) -> float:
    settings = dict(options)
    if task.startswith("CartPole"):
        settings |= {"learning_rate": lambda left: 1e-3 * left, "clip_range": lambda left: 0.2 * left}
    env = make_vec_env(partial(make, task), num_envs, seed=seed)
    policy = "MlpLstmPolicy" if kind is RecurrentPPO else "MlpPolicy"
    model = kind(policy, env, seed=seed, device="cpu", **settings).learn(steps)
    return evaluate(model, task, seed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--peers", action="store_true", help="run Stable-Baselines3 and sb3-contrib too")
    parser.add_argument("--only", default="", help="run only tasks whose name contains this")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    console = Console()
    table = Table("task", "agent", "to reach", "returns by seed", "mean", "s per run", box=None)
    seeds = [1000 * index for index in range(arguments.seeds)]
    for name, (task, num_envs, options, anchor) in TASKS.items():
        if arguments.only not in name:
            continue
        runs: dict[str, Any] = {"Tailguard": partial(ours, task, num_envs, options)}
        if arguments.peers and name in PEERS:
            peer_envs, kind, settings = PEERS[name]
            runs["SB3" if kind is PPO else "sb3-contrib"] = partial(theirs, task, peer_envs, kind, settings)
        for agent, run in runs.items():
            begin = time.perf_counter()
            returns = []
            for seed in seeds:
                returns.append(run(arguments.steps, seed))
                console.print(f"{name}: {agent}, seed {seed}: {returns[-1]:.1f}", soft_wrap=True)
            each = (time.perf_counter() - begin) / len(seeds)
            shown = ", ".join(f"{value:.1f}" for value in returns)
            table.add_row(name, agent, anchor, shown, f"{np.mean(returns):.1f}", f"{each:.0f}")
    console.print(table)


if __name__ == "__main__":
    main()

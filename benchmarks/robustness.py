"""Plain agents and agents trained against attacks, under the strongest of several attacks.

    python benchmarks/robustness.py                            all cases, one after the other; resumes from its folder
    python benchmarks/robustness.py --jobs 9 --seconds 320     side by side, one thread each, for so long
    python benchmarks/robustness.py --only market Reacher      cases whose name contains one of these, in this order
    python benchmarks/robustness.py --table                    the tables of what is there, without running anything
    python benchmarks/robustness.py --cost                     cost of the inner attack, as a multiple of a plain update
    python benchmarks/robustness.py --only Reacher --seeds 1000 1001 --epsilon 0.4 --set coef=0.1 --out trials/a

A case is one agent of one seed: trained, then judged. Each is one line of OUT/cases.jsonl. Agents act
deterministically: on true observations, under noise at the corners of the ball, and under six attacks: FGSM, PGD and
SGLD on the size of the action's change, PGD on the action's sign (`reverse`), on the critic, and an adversary that was
trained against this very agent. The strongest is the one that leaves least, chosen for each agent. How far PGD and
noise move an action is compared at equal states: those of the agent that sees the truth. The ball has the same size in
raw observations for both kinds of agents: ε is in standard deviations of what a plain agent of a development seed sees,
in the market of the training bars.

What an agent keeps is counted from what no skill earns: 0 in the market (no trade), the return of standing still in
Reacher, that of random actions in Pendulum. Settings were chosen on seeds from 1000 on; seeds of the cases are 208 to
215 for the market, 0 to 7 for Reacher, and 20 to 27 for Pendulum. On Pendulum there is a seventh attack: the adversary
that dynamic programming finds against an agent without memory, which no other can surpass but by the grid's error.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import gymnasium
import torch
import yaml
from pendulum import UNITS, Pendulums, PlannedAttack
from torch import Tensor

import tailguard as tg
from tailguard.algorithm.adversary_training import train_adversary
from tailguard.data.splits import Split
from tailguard.envs.gym import GymnasiumEnv
from tailguard.evaluate.held_out import episodes_on
from tailguard.robust.attacked_policy import AttackedDecision, AttackedPolicy, Memories
from tailguard.robust.attacks import Attack, attackable
from tailguard.robust.config import RobustConfig

ATTACKS = {
    "fgsm": ("fgsm", "action"),
    "pgd": ("pgd", "action"),
    "sgld": ("sgld", "action"),
    "reverse": ("pgd", "reverse"),
    "critic": ("pgd", "critic"),
}
"""Kind and target of those that need no training."""
JUDGES = (*ATTACKS, "adversary", "planned")
VARIANTS = ("plain", "regularised")
FIRST_UNSEEN = 1_000_000
"""Random streams of the evaluation: no agent trains on them."""


@dataclass(frozen=True)
class Task:
    """What is trained and how it is judged."""

    train: Callable[[int, RobustConfig], Any]
    evaluate: Callable[[Any, int], float]
    adversary: Callable[[Any, Attack, torch.Tensor, int], AttackedPolicy]
    seeds: tuple[int, ...]
    epsilon: float
    robust: RobustConfig
    floor: float
    """What no skill earns."""
    planned: Callable[[Any, Attack, torch.Tensor], AttackedPolicy] | None = None
    """The strongest adversary that there is, where it can be computed."""
    units: tuple[float, ...] | None = None
    """Size of one unit of epsilon in each raw feature; none: 1, for features that are scaled already."""

    def mask(self, agent: Any) -> torch.Tensor:
        """Makes the ball of every agent the same, whatever it scales its observations by."""
        own = agent.scaled_networks()[0].units
        units = torch.ones_like(own) if self.units is None else torch.tensor(self.units)
        return attackable(agent.spec, len(own)) * units / own


class OnTrueStates(AttackedPolicy):
    """What an attack would do to each decision of an agent that sees the truth, acts on it and remembers it."""

    def decide(self, observation: Tensor, memories: Memories, episode_start: Tensor) -> AttackedDecision:
        decision = super().decide(observation, memories, episode_start)
        with torch.inference_mode(False), torch.no_grad():
            _, after = self.act(observation.clone(), memories[: len(self.networks)], episode_start.clone())
        return replace(decision, action=decision.clean, memories=after)


# --- the planted market, gradients through the market, LSTM ----------------------------------------------------------


@cache
def split(seed: int) -> Split:
    market = tg.make_market(9_000, seed=seed, signal=20.0)
    return tg.split_bars(market.bars, validation=0.1, test=0.3, embargo="7d")


def market_env(seed: int, num_envs: int) -> tg.TradingEnv:
    return tg.TradingEnv(split(seed).train, num_envs=num_envs, episode_length=64)


def train_market(seed: int, robust: RobustConfig) -> Any:
    options: dict[str, Any] = {"n_steps": 32, "learning_rate": "linear:1e-2:1e-3"}
    return tg.PathwiseLearner(market_env(seed, 128), seed=seed, robust=robust, **options).learn(128 * 32 * 100)


def evaluate_market(agent: Any, seed: int) -> float:
    """Mean log-growth of episodes of 64 hours on the test part, net of costs."""
    (episodes,) = episodes_on(agent.spec, split(seed).test)
    return float(episodes.trade(agent).growth.mean())


def attack_market(agent: Any, attack: Attack, mask: torch.Tensor, seed: int) -> AttackedPolicy:
    options: dict[str, Any] = {"n_steps": 32, "minibatch_size": 512, "hidden": (32,), "lstm_size": 32}
    options |= {"critic": "scalar", "learning_rate": 3e-3, "seed": seed, "mask": mask}
    return train_adversary(agent, market_env(seed, 64), attack, timesteps=64 * 32 * 40, **options)


# --- Gymnasium tasks, PPO ---------------------------------------------------------------------------------------------

NETWORK: dict[str, Any] = {"hidden": (64,), "activation": "silu", "memory": "none", "critic": "scalar"}
BATCH: dict[str, Any] = {"minibatch_size": 400, "epochs": 10}
PENDULUM = NETWORK | {"n_steps": 200, "minibatch_size": 1_600, "epochs": 10, "gamma": 0.95, "log_std_init": 0.3}
PENDULUM |= {"learning_rate": "linear:6e-3:0"}
REACHER = NETWORK | BATCH | {"n_steps": 100, "gamma": 0.95, "learning_rate": "linear:2e-3:0", "log_std_init": -0.5}


def copies(task: str, count: int) -> GymnasiumEnv:
    return GymnasiumEnv([partial(gymnasium.make, task)] * count)


def to_train_on(task: str, count: int) -> GymnasiumEnv:
    """Agents are judged on Gymnasium's own environments; pendulums can be simulated faster for training."""
    return GymnasiumEnv(Pendulums(count)) if task == "Pendulum-v1" else copies(task, count)


def train_gym(task: str, options: dict[str, Any], steps: int, num_envs: int, seed: int, robust: RobustConfig) -> Any:
    # Gymnasium seeds copies with seed, seed + 1, …: neighbours would share most of their episodes.
    return tg.DistributionalPPO(to_train_on(task, num_envs), seed=100 * seed, robust=robust, **options).learn(steps)


def evaluate_gym(task: str, agent: Any, seed: int, episodes: int = 40) -> float:
    """Mean return of so many episodes, one in each copy."""
    env = copies(task, episodes)
    observation = env.reset(FIRST_UNSEEN + 100 * seed)
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


def attack_gym(
    task: str, options: dict[str, Any], steps: int, num_envs: int, agent: Any, attack: Attack, mask: Any, seed: int
) -> AttackedPolicy:
    # The adversary remembers, also where the agent does not.
    options = {**options, **BATCH, "memory": "separate", "lstm_size": 32, "learning_rate": 3e-3, "mask": mask}
    options["seed"] = 100 * seed + 50
    return train_adversary(agent, to_train_on(task, num_envs), attack, timesteps=steps, **options)


def gym_task(name: str, options: dict[str, Any], steps: int, num_envs: int, **rest: Any) -> Task:
    """Trained for so many steps; its adversaries for 40,000 of no more than 16 environments."""
    return Task(
        partial(train_gym, name, options, steps, num_envs),
        partial(evaluate_gym, name),
        partial(attack_gym, name, options, 40_000, min(num_envs, 16)),
        **{"seeds": tuple(range(8)), **rest},
    )


TASKS: dict[str, Task] = {
    "market": Task(
        train_market,
        evaluate_market,
        attack_market,
        seeds=tuple(range(208, 216)),
        epsilon=0.35,
        robust=RobustConfig(coef=2.0, epsilon=0.5, through_time=True, steps=3),
        floor=0.0,
    ),
    "Reacher-v5": gym_task(
        "Reacher-v5",
        REACHER,
        steps=150_000,
        num_envs=16,
        epsilon=0.4,
        robust=RobustConfig(coef=0.03, epsilon=0.4),
        floor=-11.15,
        units=(0.67, 0.73, 0.61, 0.47, 0.1, 0.1, 3.2, 3.1, 0.11, 0.067),
    ),
    "Pendulum-v1": gym_task(
        "Pendulum-v1",
        PENDULUM,
        steps=640_000,
        num_envs=80,
        seeds=tuple(range(20, 28)),
        epsilon=0.16,
        # Epsilon grows to the very end: an adversary that is suddenly strong leaves nothing to learn from.
        robust=RobustConfig(epsilon=0.15, warmup=1.0, adversary="alternate", adversary_every=1, adversary_rollouts=1),
        floor=-1_200.0,
        planned=PlannedAttack,
        units=UNITS,
    ),
}


def judge(task: Task, variant: str, seed: int) -> dict[str, float]:
    """Train an agent and let every attack at it."""
    begun = time.process_time()
    agent = task.train(seed, task.robust if variant == "regularised" else RobustConfig())
    found = {"train_seconds": time.process_time() - begun}
    mask = task.mask(agent)

    def under(attack: Attack) -> AttackedPolicy:
        return AttackedPolicy(agent, attack, mask)

    found["clean"] = task.evaluate(under(Attack("random", 0.0)), seed)
    found["noise"] = task.evaluate(under(Attack("random", task.epsilon)), seed)
    for name, kind in (("noise", "random"), ("pgd", "pgd")):
        aside = OnTrueStates(agent, Attack(kind, task.epsilon), mask)  # type: ignore[arg-type]
        task.evaluate(aside, seed)
        found[f"{name}_change"] = aside.mean_shift
    for name, (kind, target) in ATTACKS.items():
        policy = under(Attack(kind, task.epsilon, target=target))  # type: ignore[arg-type]
        found[name] = task.evaluate(policy, seed)
        found[f"{name}_flips"] = policy.flips
    found["adversary"] = task.evaluate(task.adversary(agent, Attack(epsilon=task.epsilon), mask, seed), seed)
    if task.planned is not None:
        found["planned"] = task.evaluate(task.planned(agent, Attack(epsilon=task.epsilon), mask), seed)
    found["seconds"] = time.process_time() - begun
    return {name: round(value, 5) for name, value in found.items()}


# --- cases ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Changes:
    """What a trial changes in the tasks."""

    seeds: tuple[int, ...]
    epsilon: float | None
    settings: tuple[str, ...]
    """`key=value` of the regularised agent's RobustConfig."""

    def tasks(self) -> dict[str, Task]:
        """The tasks under these changes."""
        given = {name: yaml.safe_load(value) for name, _, value in (text.partition("=") for text in self.settings)}
        return {
            name: replace(
                task,
                seeds=self.seeds or task.seeds,
                epsilon=self.epsilon or task.epsilon,
                robust=replace(task.robust, **given),
            )
            for name, task in TASKS.items()
        }


def cases(tasks: dict[str, Task]) -> Iterator[str]:
    """`task/variant/seed`, the most important ones first."""
    for name, task in tasks.items():
        yield from (f"{name}/{variant}/{seed}" for seed in task.seeds for variant in VARIANTS)


def run_case(case: str, changes: Changes) -> dict[str, Any]:
    name, variant, seed = case.split("/")
    return {"case": case, **judge(changes.tasks()[name], variant, int(seed))}


def one_thread() -> None:
    torch.set_num_threads(1)


def run(todo: list[str], changes: Changes, jobs: int, seconds: float, file: Path) -> None:
    """Run cases side by side and add each to the file as it ends; those that are unfinished in time are lost."""
    os.environ["OMP_NUM_THREADS"] = "1"
    deadline = time.monotonic() + seconds
    with multiprocessing.get_context("spawn").Pool(jobs, one_thread) as pool, file.open("a") as out:
        results = pool.imap_unordered(partial(run_case, changes=changes), todo)
        for _ in todo:
            try:
                found = results.next(timeout=max(0.0, deadline - time.monotonic()))
            except multiprocessing.TimeoutError:
                print(f"{seconds:g} s are over; run again for what is missing", flush=True)
                return
            out.write(json.dumps(found) + "\n")
            out.flush()
            print(found["case"], f"{found.get('seconds', 0):.0f} s", flush=True)


# --- tables -----------------------------------------------------------------------------------------------------------


def summarise(found: dict[str, dict[str, Any]], name: str, task: Task) -> None:
    """Medians over seeds, and what is kept of the plain clean result."""
    runs = {
        variant: [found[case] for case in (f"{name}/{variant}/{seed}" for seed in task.seeds) if case in found]
        for variant in VARIANTS
    }
    if not any(runs.values()):
        return
    judges = [kind for kind in JUDGES if all(kind in run for own in runs.values() for run in own)]
    print(f"\n{name}: ε = {task.epsilon}, floor {task.floor:g}, medians; from, to: of the strongest attack")
    print("| agent |", " | ".join(("clean", "noise", *judges, "strongest", "from", "to", "PGD/noise", "n")), "|")
    medians = {}
    for variant, own in runs.items():
        if not own:
            continue
        worst = [min(run[attack] for attack in judges) for run in own]
        row = [statistics.median(run[kind] for run in own) for kind in ("clean", "noise", *judges)]
        ratio = statistics.median(run["pgd_change"] / run["noise_change"] for run in own)
        medians[variant] = row[0], statistics.median(worst)
        row += [medians[variant][1], min(worst), max(worst), ratio, len(own)]
        print(f"| {variant} |", " | ".join(f"{value:.4g}" for value in row), "|")
    if len(medians) < len(VARIANTS):
        return
    (clean, plain), (smooth_clean, smooth) = ([value - task.floor for value in medians[each]] for each in VARIANTS)
    ratio_kept = f"{smooth / plain:.1f} ×" if plain > 0 else "the plain one keeps nothing"
    print(f"kept {plain / clean:.0%} and {smooth / clean:.0%} of the plain clean result ({ratio_kept});", end=" ")
    print(f"clean {smooth_clean / clean - 1:+.1%}")


def tables(found: dict[str, dict[str, Any]], tasks: dict[str, Task]) -> None:
    for name, task in tasks.items():
        summarise(found, name, task)


# --- cost of the inner attack -----------------------------------------------------------------------------------------


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
    parser.add_argument("--only", nargs="+", default=[""], help="cases whose name contains one of these, in this order")
    parser.add_argument("--jobs", type=int, default=1, help="processes side by side, one thread each")
    parser.add_argument("--seconds", type=float, default=1e9, help="stop after so long")
    parser.add_argument("--out", type=Path, default=Path("robustness"), help="folder of cases.jsonl")
    parser.add_argument("--table", action="store_true", help="print the tables and run nothing")
    parser.add_argument("--seeds", nargs="+", type=int, default=[], help="in the place of the judged ones")
    parser.add_argument("--epsilon", type=float, help="size of the attacks, in the place of the tasks' own")
    parser.add_argument("--set", nargs="+", default=[], help="settings of the regularised agents, as coef=3 steps=5")
    parser.add_argument("--cost", action="store_true", help="measure the cost of the inner attack instead")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.cost:
        cost()
        return
    arguments.out.mkdir(parents=True, exist_ok=True)
    file = arguments.out / "cases.jsonl"

    def done() -> dict[str, dict[str, Any]]:
        lines = file.read_text("utf-8").splitlines() if file.exists() else []
        return {run["case"]: run for run in map(json.loads, lines)}

    changes = Changes(tuple(arguments.seeds), arguments.epsilon, tuple(arguments.set))
    tasks = changes.tasks()
    wanted = dict.fromkeys(case for part in arguments.only for case in cases(tasks) if part in case)
    todo = [case for case in wanted if case not in done()]
    if todo and not arguments.table:
        run(todo, changes, arguments.jobs, arguments.seconds, file)
    tables(done(), tasks)


if __name__ == "__main__":
    main()

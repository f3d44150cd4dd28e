"""Whether a population beats random search with the same steps: growth of the best member, over seeds.

    python benchmarks/population.py --first 100 --out population.jsonl
    python benchmarks/population.py --first 100 --out population.jsonl --show

For each seed a synthetic market is drawn, and eight members learn on it by each strategy: the same first values, bars
and steps, and nothing but the decisions differs. The best member on validation after the last round counts, by its
growth there and on the test part, which had no part in any choice. Beside it: the best score on validation of any
member in any round, which somebody would have who kept all checkpoints. A seed and strategy that is in the file is not
trained again, and one that was interrupted goes on after its last round.

    python benchmarks/population.py --first 100 --alone         one agent with the default rates, without a search
    python benchmarks/population.py --throughput 2              Ray against the ideal of two cores, about 3 minutes
    python benchmarks/population.py --noisy                     strategies on noisy quadratics, about a minute
    python benchmarks/population.py --exploit                   what a copy of state between members costs on the CPU

The noisy quadratics have a steep and a flat direction. A low rate pays at once, because it lowers the noise along the
steep one; a high rate pays in the end, because only it makes way along the flat one.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

import tailguard as tg
from tailguard.algorithm.member_learners import MemberLearners
from tailguard.config import RunConfig, load_config
from tailguard.experiment.build import build
from tailguard.population.ask_tell import PBT
from tailguard.population.evolution import evolve
from tailguard.population.executor import Executor, Job
from tailguard.population.executors import ExecutorOptions, make_executor
from tailguard.population.local import LocalExecutor
from tailguard.population.options import PopulationSettings, Strategy
from tailguard.population.space import SearchSpace
from tailguard.population.workshop import Workshop
from tailguard.runs.validation import Validation

MEMBERS, ROUNDS, STEPS, BARS = 8, 20, 81_920, 35_064
PROTOCOL = ("members", "rounds", "steps", "bars")
"""What all results of a file have in common."""
STRATEGIES: tuple[Strategy, ...] = ("random", "pbt", "mf_pbt")
T_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262, 20: 2.093}
"""97.5 % quantile of Student's t, by the number of seeds."""
SPACE = SearchSpace.parse(
    {
        "pathwise.learning_rate": {"log": [1e-5, 1.0]},
        "pathwise.critic_learning_rate": {"log": [1e-5, 1e-1]},
        "pathwise.max_grad_norm": {"log": [1e-2, 10.0]},
        "pathwise.gamma": {"linear": [0.5, 0.999]},
    }
)
"""Five decades around the default of 0.01: what somebody would search who knows nothing about it."""


def settings(seed: int, steps: int = STEPS, bars: int = BARS) -> RunConfig:
    return load_config(
        overrides=[
            f"data.synthetic_bars={bars}",
            "data.features=[return_1, return_24, taker_imbalance_6, range_volatility_24]",
            "env.num_envs=32",
            "env.episode_length=64",
            "pathwise.n_steps=32",
            "pathwise.learning_rate=0.01",
            "pathwise.critic_learning_rate=0.001",
            "pathwise.network.hidden=[16]",
            "pathwise.network.lstm_size=16",
            f"training.total_timesteps={steps}",
            f"training.seed={1000 * seed}",
            "training.threads=1",
            "pathwise.monitor=false",
        ]
    )


def compare(
    seed: int, strategy: Strategy, members: int, rounds: int, steps: int, bars: int, folder: Path
) -> dict[str, float | int | str]:
    """Train a population, and judge its best member on the test part."""
    chosen = PopulationSettings(members=members, rounds=rounds, strategy=strategy, seed=seed, metric="growth")
    config = settings(seed, steps, bars)
    experiment = build(config)
    workshop = Workshop.of(experiment, chosen, SPACE)
    folder.mkdir(parents=True, exist_ok=True)
    executor, begun = LocalExecutor(workshop, folder / "members", 1), time.process_time()
    pbt = evolve(executor, SPACE, chosen, config.training.total_timesteps, folder / "lineage.jsonl")
    best, step = pbt.best[0], pbt.lineage.rounds[-1].step
    agent = workshop.build(best.member, best.hyper)
    workshop.store(folder / "members", best.member).restore(agent, step)
    tested = Validation(experiment.learner, experiment.split.test).evaluate(agent)
    assert tested is not None
    return {
        "seed": seed,
        "strategy": strategy,
        "members": members,
        "rounds": rounds,
        "steps": steps,
        "bars": bars,
        "validation": best.score,
        "best of all rounds": max(each.score for finished in pbt.lineage.rounds for each in finished.standings),
        "test": tested.growth,
        "seconds": time.process_time() - begun,
    }


def alone(seed: int, steps: int, bars: int) -> tuple[float, float]:
    """Growth on the validation and the test part of one agent with the default rates and clip, after `steps`."""
    config, usual = settings(seed, steps, bars), RunConfig().pathwise
    rates = {name: getattr(usual, name) for name in ("learning_rate", "critic_learning_rate", "max_grad_norm", "gamma")}
    experiment = build(replace(config, pathwise=replace(config.pathwise, **rates)))
    agent, found = experiment.learner.learn(steps), []
    for part in (experiment.split.validation, experiment.split.test):
        judged = Validation(agent, part).evaluate(agent)
        assert judged is not None
        found.append(judged.growth)
    return found[0], found[1]


def show_alone(seeds: Sequence[int], steps: int, bars: int) -> None:
    """Mean growth a year of single agents."""
    found = [alone(seed, steps, bars) for seed in seeds]
    validation, test = (statistics.mean(part) for part in zip(*found, strict=True))
    print(
        f"{len(seeds)} agents with the default rates, {steps:,} steps: validation {validation:+.2f}, test {test:+.2f}"
    )
    print(found, flush=True)


def show(lines: Sequence[dict[str, float]]) -> None:
    """Mean growth a year by strategy, and the paired difference from random search with its 95 % interval."""
    table = {(int(line["seed"]), str(line["strategy"])): line for line in lines}
    known = [each for each in STRATEGIES if any(strategy == each for _, strategy in table)]
    seeds = sorted({seed for seed, _ in table if all((seed, each) in table for each in known)})
    if len(seeds) < 2:
        return
    size = {name: int(lines[0][name]) for name in PROTOCOL}
    print(
        f"{len(seeds)} seeds, {size['bars']:,} bars, {size['members']} members, {size['rounds']} rounds, "
        f"{size['steps']:,} steps each"
    )
    for part in ("validation", "best of all rounds", "test"):
        for strategy in known:
            growth = [table[seed, strategy][part] for seed in seeds]
            gains = [table[seed, strategy][part] - table[seed, "random"][part] for seed in seeds]
            half = T_95.get(len(seeds), 2.0) * statistics.stdev(gains) / len(gains) ** 0.5
            print(
                f"{part:18} {strategy:7} growth {statistics.mean(growth):+.2f} a year; against random "
                f"{statistics.mean(gains):+.2f} ± {half:.2f}, better in {sum(gain > 0 for gain in gains)}"
            )


@dataclass(frozen=True)
class Quadratic:
    """(x² + flat·y²)/2 with gradients whose noise has this deviation, from (1, far)."""

    flat: float
    far: float
    noise: float
    steps: int
    """Of gradient descent in a round."""

    def descend(self, state: tuple[float, float], rate: float, random: np.random.Generator) -> tuple[float, float]:
        x, y = state
        for first, second in self.noise * random.normal(size=(self.steps, 2)):
            x -= rate * (x + first)
            y -= rate * (self.flat * y + self.flat**0.5 * second)
        return x, y

    def loss(self, state: tuple[float, float]) -> float:
        return (state[0] ** 2 + self.flat * state[1] ** 2) / 2


QUADRATICS = (
    Quadratic(0.002, 30.0, 1.0, 20),
    Quadratic(0.001, 60.0, 2.0, 20),
    Quadratic(0.0005, 100.0, 1.0, 50),
)


def lowest_loss(case: Quadratic, strategy: Strategy, seed: int) -> float:
    """Of sixteen members, after 64 rounds."""
    chosen = PopulationSettings(members=16, rounds=64, strategy=strategy, seed=seed, explore="perturb")
    pbt, random = PBT(SearchSpace.parse({"rate": {"log": [1e-3, 1.0]}}), chosen), np.random.default_rng(seed)
    states = held = dict.fromkeys(range(16), (1.0, case.far))
    number = 0
    while (trial := pbt.ask()) is not None:
        if trial.round != number:
            held, number = dict(states), trial.round
        states[trial.member] = case.descend(held[trial.parent], float(trial.hyper["rate"]), random)
        pbt.tell(trial, -case.loss(states[trial.member]))
    return -pbt.best[0].score


def show_noisy(seeds: int) -> None:
    """Lowest loss by strategy: the median over the seeds."""
    for case in QUADRATICS:
        losses = {each: [lowest_loss(case, each, seed) for seed in range(seeds)] for each in STRATEGIES}
        words = ", ".join(f"{each} {statistics.median(found):.3f}" for each, found in losses.items())
        print(f"flat {case.flat}, noise {case.noise}, {case.steps} steps a round: {words}", flush=True)


def cpu_seconds() -> float:
    """Processor time of this process and of all that descend from it and live, from /proc (Linux)."""
    times, parents = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended
        parents[int(folder.name)] = int(fields[1])
        times[int(folder.name)] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    family, found = {os.getpid()}, 1
    while found:
        more = {each for each, parent in parents.items() if parent in family} - family
        family, found = family | more, len(more)
    return sum(times.get(each, 0.0) for each in family)


def throughput(workers: int, rounds: int = 3) -> None:
    """Seconds of a round of `2 · workers` members: by one process alone, and by workers of Ray at once."""
    config = settings(0, steps=rounds * 20_480)
    chosen = PopulationSettings(members=2 * workers, rounds=rounds, metric="growth")
    workshop = Workshop.of(build(config), chosen, SPACE)
    hyper = {"pathwise.learning_rate": 0.01, "pathwise.critic_learning_rate": 1e-3}
    hyper |= {"pathwise.max_grad_norm": 1.0, "pathwise.gamma": 0.9}
    times: dict[str, list[tuple[float, float]]] = {"alone": [], "ray": []}
    with tempfile.TemporaryDirectory() as name:
        executors: dict[str, Executor] = {
            "alone": LocalExecutor(workshop, Path(name) / "alone" / "members", 1),
            "ray": make_executor("ray", workshop, Path(name) / "ray" / "members", ExecutorOptions(workers)),
        }
        for number in range(rounds + 1):
            for kind, executor in executors.items():  # in turns, as the machine's speed changes
                count = 1 if kind == "alone" else 2 * workers
                start = max(number - 1, 0) * 20_480  # the first one starts the workers, and is done again
                jobs = [Job(member, hyper, member, start, start + 20_480) for member in range(count)]
                before, clock = cpu_seconds(), time.perf_counter()
                executor.run(jobs)
                times[kind].append((time.perf_counter() - clock, cpu_seconds() - before))
        for executor in executors.values():
            executor.close()
    members = 2 * workers
    (alone, alone_cpu), (ray, ray_cpu) = (
        [statistics.median(column) for column in zip(*times[kind][1:], strict=True)] for kind in ("alone", "ray")
    )
    print(f"load of the machine {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores")
    print(f"a member alone {alone:.2f} s; {members} members on {workers} workers of Ray {ray:.2f} s a round")
    print(f"throughput {2 * alone / ray:.2f} of the ideal of {workers} cores")
    print(
        f"processor time: a member alone {alone_cpu:.2f} s; on Ray, with all its processes, {ray_cpu / members:.2f} s: "
        f"{members * alone_cpu / ray_cpu:.2f} of it is the member's"
    )


def exploit(accounts: int, members: int = 64, repeats: int = 21) -> None:
    """Milliseconds of a core in which a quarter of the members, an LSTM of 128 each, take over others' state."""
    base = tg.TradingEnv(tg.make_market(5_000, seed=0).bars, num_envs=accounts, episode_length=64)
    learners = []
    for seed in range(members):
        env = copy.copy(base)
        env.generator = torch.Generator().manual_seed(seed)
        learners.append(
            tg.DistributionalPPO(
                env, n_steps=2, minibatch_size=2 * accounts, epochs=1, hidden=(128,), lstm_size=128, seed=seed
            )
        )
    together = MemberLearners(learners)
    together.iterate()  # from here on there are moments to be copied
    sources = {target: target - 3 * members // 4 for target in range(3 * members // 4, members)}
    times = []
    for _ in range(repeats):
        clock = time.process_time()
        together.exploit(sources)
        times.append(time.process_time() - clock)
    size = sum(value.nbytes for value in together.stacked.values()) / members
    print(
        f"{len(sources)} of {members} members with {accounts:,} accounts take over others in "
        f"{1e3 * statistics.median(times):.1f} ms of one core (least {1e3 * min(times):.1f}); a member's state is "
        f"{size / 2**20:.1f} MiB",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--members", type=int, default=MEMBERS)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--steps", type=int, default=STEPS, help="of each member, in all rounds")
    parser.add_argument("--bars", type=int, default=BARS, help="of each market")
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=["random", "pbt"])
    parser.add_argument("--out", type=Path, default=Path("population.jsonl"))
    parser.add_argument("--minutes", type=float, default=1e9, help="begin nothing new after so many")
    parser.add_argument("--show", action="store_true", help="the table of what is in the file")
    parser.add_argument("--alone", action="store_true", help="one agent a seed, with the default rates")
    parser.add_argument("--throughput", type=int, metavar="WORKERS")
    parser.add_argument("--noisy", action="store_true")
    parser.add_argument("--exploit", action="store_true")
    given = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    if given.noisy:
        show_noisy(given.seeds)
        return
    if given.exploit:
        for accounts in (64, 1_024):
            exploit(accounts)
        return
    if given.alone:
        show_alone(range(given.first, given.first + given.seeds), given.steps, given.bars)
        return
    if given.throughput:
        throughput(given.throughput)
        return
    lines = [json.loads(line) for line in given.out.read_text().splitlines()] if given.out.exists() else []
    protocol = {name: getattr(given, name) for name in PROTOCOL}
    if any({name: line.get(name) for name in protocol} != protocol for line in lines):
        parser.error(f"{given.out}: it has results of other --members, --rounds, --steps or --bars; give another --out")
    begun = time.perf_counter()
    for seed in range(given.first, given.first + given.seeds):
        for strategy in given.strategies:
            known = any(line["seed"] == seed and line["strategy"] == strategy for line in lines)
            if given.show or known or time.perf_counter() - begun > 60 * given.minutes:
                continue
            lines.append(compare(seed, strategy, **protocol, folder=given.out.with_suffix("") / f"{seed}-{strategy}"))
            print(lines[-1], flush=True)
            with given.out.open("a") as file:
                file.write(json.dumps(lines[-1]) + "\n")
    show(lines)


if __name__ == "__main__":
    main()

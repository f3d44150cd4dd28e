"""How fast a population trains on one GPU, next to its members one after the other.

    python benchmarks/population_gpu.py           64 members × 1,024 accounts, everything on; about 100 s
    python benchmarks/population_gpu.py --members 16 --memory separate

Needs torch and numpy only. One member trains alone, as a recorded CUDA graph, the fastest way there is; so do all
members as one computation. Both are compiled at the same time, in processes of their own, and then measured in turn,
so that neither slows the other. Times are medians; a step is one bar in one account, trained on for four epochs.

The equality is of float32 runs: weights of each member after 20 iterations next to those of its lone run.
"""

from __future__ import annotations

import argparse
import copy
import multiprocessing
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

from gpu import EPISODE, market, timed

import tailguard as tg
from tailguard.algorithm.config import PPOConfig
from tailguard.algorithm.member_learners import MemberLearners
from tailguard.models.policy import NetworkConfig
from tailguard.optim.config import VGSConfig

ACCOUNTS, STEPS = 1_024, 32
REPEATS = 7
Step = tuple[str, Callable[[], Any]]


def member(
    base: tg.TradingEnv, seed: int, *, hidden: int, memory: str, precision: str, mode: str, minibatches: int = 4
) -> tg.DistributionalPPO:
    """A learner with everything on, on its own copy of the environment; members differ in seed, rate, clip, limit."""
    env = copy.copy(base)
    env.generator = torch.Generator(base.device).manual_seed(seed)
    network = NetworkConfig(
        hidden=(hidden,),
        activation="silu",
        memory=memory,  # type: ignore[arg-type]
        lstm_size=hidden,
        quantiles=32,
        twin_critics=True,
        precision=precision,  # type: ignore[arg-type]
    )
    config = PPOConfig(
        n_steps=STEPS,
        minibatch_size=base.num_envs * STEPS // minibatches,
        network=network,
        runtime=mode,  # type: ignore[arg-type]
        learning_rate=3e-4 * (1 + seed % 4),
        clip_range=0.1 * (1 + seed % 3),
        optimizer="upgdw",
        vgs=VGSConfig(enabled=True),
        value_clip="mean_and_variance",
        entropy_coef=0.001,
        target_kl=1.0,
    )
    return tg.DistributionalPPO(env, config, seed=seed, risk=tg.RiskConfig(limit=-0.05 - 0.001 * seed))


def environment(accounts: int, features: int = 32) -> tg.TradingEnv:
    """Accounts on random bars on the GPU."""
    return tg.TradingEnv(
        market(50_000 if accounts >= ACCOUNTS else 5_000, features),
        num_envs=accounts,
        device="cuda",
        episode_length=EPISODE,
        stagger=STEPS,
    )


def alone(memory: str, minibatches: int) -> list[Step]:
    """One member by itself."""
    begun = time.perf_counter()
    learner = member(
        environment(ACCOUNTS), 0, hidden=128, memory=memory, precision="auto", mode="graph", minibatches=minibatches
    )
    for _ in range(4):
        learner.iterate()
    torch.cuda.synchronize()
    ready = time.perf_counter() - begun

    show("one member alone, while others compile", timed(learner.iterate, 2), ACCOUNTS * STEPS, ready)

    def rate() -> float:
        seconds = timed(learner.iterate, REPEATS)
        show("one member alone", seconds, ACCOUNTS * STEPS, ready)
        return ACCOUNTS * STEPS / seconds

    return [("alone", rate)]


def together(count: int, memory: str, minibatches: int, compiles: bool) -> list[Step]:
    """All members as one computation."""
    begun = time.perf_counter()
    base = environment(ACCOUNTS)
    options = {"hidden": 128, "memory": memory, "precision": "auto", "mode": "eager", "minibatches": minibatches}
    members = MemberLearners([member(base, seed, **options) for seed in range(count)], compiles=compiles)  # type: ignore[arg-type]
    built = time.perf_counter() - begun
    for _ in range(4):
        members.iterate()
    torch.cuda.synchronize()
    ready = time.perf_counter() - begun
    samples = count * ACCOUNTS * STEPS
    name = f"{count} members" + ("" if compiles else ", not compiled")
    show(f"{name}, while others compile", timed(members.iterate, 2), samples, ready)

    def rate() -> float:
        seconds = timed(members.iterate, REPEATS)
        show(name, seconds, samples, ready)
        device = timed(lambda: members._device_iteration()[1], REPEATS)
        print(
            f"  of that on the GPU {1e3 * device:.1f} ms; built in {built:.1f} s; "
            f"{torch.cuda.max_memory_allocated() / 2**30:.1f} GiB; failures {sum(map(bool, members.failures))}",
            flush=True,
        )
        return samples / seconds

    def exploit() -> float:
        sources = {target: (target + 1) % (count // 2) for target in range(3 * count // 4, count)}
        times = []
        for _ in range(REPEATS):
            torch.cuda.synchronize()
            start = time.perf_counter()
            members.exploit(sources)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        members.iterate()
        target, source = next(iter(sources.items()))
        print(
            f"exploit: {len(sources)} of {count} members take over others in {1e3 * statistics.median(times):.2f} ms "
            f"(first {1e3 * times[0]:.2f}); an iteration later {target} and {source} differ: "
            f"{bool((_weights(members.learners[target]) != _weights(members.learners[source])).any())}",
            flush=True,
        )
        return statistics.median(times)

    return [("together", rate), ("exploit", exploit)]


def equality(count: int = 3, iterations: int = 20) -> list[Step]:
    """Members next to their lone runs, in float32."""
    base = environment(64, 8)
    options: dict[str, Any] = {"hidden": 32, "memory": "separate", "precision": "float32", "mode": "eager"}
    lone = [member(base, seed, **options) for seed in range(count)]
    start = [_weights(learner) for learner in lone]
    members = MemberLearners([member(base, seed, **options) for seed in range(count)], compiles=False)

    for _ in range(iterations):
        members.iterate()
        for learner in lone:
            learner.iterate()

    def compare() -> float:
        gaps = [float((_weights(a) - _weights(b)).abs().max()) for a, b in zip(lone, members.learners, strict=True)]
        ways = [float((_weights(a) - b).abs().max()) for a, b in zip(lone, start, strict=True)]
        print(
            f"after {iterations} iterations in float32 the largest difference of a weight from the lone run's is "
            f"{max(gaps):.1e}; weights moved by up to {max(ways):.2f}",
            flush=True,
        )
        return max(gaps)

    return [("equality", compare)]


def _weights(learner: Any) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in learner.policy.parameters()])


def show(name: str, seconds: float, samples: int, ready: float) -> None:
    """One line of figures."""
    print(
        f"{name:48s} {1e3 * seconds:9.2f} ms an iteration {samples / seconds / 1e6:9.2f} M steps/s"
        f"   ready after {ready:.0f} s",
        flush=True,
    )


def work(prepare: Callable[..., list[Step]], arguments: tuple[Any, ...], pipe: Connection) -> None:
    """A process: prepare, then measure when asked to."""
    torch.set_num_threads(4)
    try:
        steps = prepare(*arguments)
        pipe.send("ready")
        for _, step in steps:
            pipe.recv()
            pipe.send(step())
    except Exception:
        pipe.send(traceback.format_exc(limit=-6))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", type=int, default=64)
    parser.add_argument("--memory", default="shared", help="shared or separate trunks")
    parser.add_argument("--minibatches", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=130.0, help="what is not ready by then is left out")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("population_gpu: no CUDA device here; benchmarks/population.py measures a CPU")
    ends = time.perf_counter() + given.seconds
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}; {given.members} members × {ACCOUNTS:,} × {STEPS}"
    )
    context = multiprocessing.get_context("spawn")
    shape = given.memory, given.minibatches
    plans: dict[str, tuple[Callable[..., list[Step]], tuple[Any, ...], int]] = {
        "equality": (equality, (), 1),
        "alone": (alone, shape, 1),
        "not compiled": (together, (given.members, *shape, False), 1),
        "together": (together, (given.members, *shape, True), 2),
    }
    workers = {}
    for name, (prepare, arguments, count) in plans.items():
        here, there = context.Pipe()
        process = context.Process(target=work, args=(prepare, arguments, there))
        process.start()
        workers[name] = process, here, count
    rates: dict[str, float] = {}
    ready = {}
    for name, (_, pipe, _) in workers.items():  # the figures that count are taken when nothing compiles
        if pipe.poll(max(0.1, ends - time.perf_counter())):
            ready[name] = pipe.recv()
        else:
            print(f"{name}: not ready in time", flush=True)
    for name, (process, pipe, count) in workers.items():
        if ready.get(name) != "ready":
            print(f"{name}: {ready.get(name, 'left out')}", flush=True)
            process.terminate()
            continue
        for number in range(count):
            pipe.send("go")
            found = pipe.recv()
            if isinstance(found, str):
                print(f"{name}: {found}", flush=True)
                break
            if number == 0:
                rates[name] = found
        process.terminate()
    for process, _, _ in workers.values():
        process.kill()  # the figures are out; a compiler's helpers would linger
    if "alone" in rates:
        for name in ("together", "not compiled"):
            if name in rates:
                print(f"{name}: {rates[name] / rates['alone']:.1f} × the members one after the other", flush=True)


if __name__ == "__main__":
    main()

"""Seconds until a learner has learned: from its first step to the first evaluation that passes a target.

The task is the planted market: three years of hourly bars with a signal in the order flow. The evaluation is one
deterministic episode in each of 64 accounts on a year of another market with the same law, always the same episodes.
Its return is the mean log-growth net of all costs, as a share of what the optimum reaches there that sees the planted
state.

The clock runs while a learner trains, not while it is evaluated. An evaluation is due when training has taken 3 %
longer than at the last one.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from plain_ppo import PlainPPO
from rich.table import Column, Table

import tailguard as tg
from tailguard.bench.own_learner import AS_PEOPLE_RUN_IT, DEFAULTS, EPISODE, Shape, our_learner, trading_env
from tailguard.bench.stable_baselines import RecurrentPeer
from tailguard.data.prepare import PreparedBars, prepare

SIGNAL = 8.0
FEATURES = ("return_24", "range_volatility_24", "taker_imbalance_1", "taker_imbalance_6", "taker_imbalance_24")
TRAINING_BARS, EVALUATION_BARS = 26_280, 8_760
ACCOUNTS = 64
EVALUATION_SEED = 1_000_000
REWARD_SCALE = 100.0
"""Rewards of the learners that do not normalise returns are in percent: about one a day, as value functions like it."""


class Learner(Protocol):
    """What is timed."""

    def iterate(self) -> object: ...

    @property
    def predict(self) -> Callable[..., tuple[np.ndarray, Any]]: ...


@dataclass(frozen=True)
class Task:
    """Bars to learn on, accounts to be evaluated in, and what is possible there."""

    prepared: PreparedBars
    evaluation: tg.TradingEnv
    best: float
    """Mean log-growth that the optimum reaches in the evaluation."""

    def share(self, learner: Learner) -> float:
        """What the learner reaches of it, acting deterministically."""
        memory: Any = None

        def act(obs: torch.Tensor, started: torch.Tensor) -> torch.Tensor:
            nonlocal memory
            action, memory = learner.predict(obs.numpy(), memory, started.numpy(), deterministic=True)
            return torch.as_tensor(action)

        return mean_growth(self.evaluation, act) / self.best


def mean_growth(env: tg.TradingEnv, act: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> float:
    """Mean log-growth of one episode in every account."""
    obs = env.reset(EVALUATION_SEED)
    growth, running = torch.zeros(env.num_envs), torch.ones(env.num_envs, dtype=torch.bool)
    started = torch.ones(env.num_envs, dtype=torch.bool)
    for _ in range(env.episode_length):
        step = env.step(act(obs, started))
        growth += torch.where(running, step.reward, 0.0)
        running &= ~step.ended
        obs, started = step.obs, step.ended
    return float(growth.mean())


def make_task(seed: int, train: PreparedBars | None = None) -> Task:
    """A market to learn on, unless it is given, and another one with the same law."""
    if train is None:
        train = prepare(tg.make_market(TRAINING_BARS, seed=seed, signal=SIGNAL).bars, FEATURES)
    other = tg.make_market(EVALUATION_BARS, seed=EVALUATION_SEED + seed, signal=SIGNAL)
    env = tg.TradingEnv(prepare(other.bars, scaler=train.scaler), num_envs=ACCOUNTS, episode_length=EPISODE)
    config = env.task.market.config
    weights = other.oracle_weights(config.fee + config.half_spread, config.leverage, config.funding_rate)
    targets = torch.as_tensor(weights / config.leverage, dtype=torch.float32)

    def oracle(obs: torch.Tensor, started: torch.Tensor) -> torch.Tensor:  # noqa: ARG001
        assert env.state is not None
        market = env.state.market
        target = targets[market.row]
        return torch.where(target.isnan(), market.weights / config.leverage, target)

    return Task(train, env, mean_growth(env, oracle))


CLIPPED: dict[str, Any] = {"squash": False, "log_std_init": 0.0}
"""The policy of the other learners: a Gaussian whose actions are clipped into the box, with a first deviation of 1."""

SHORT = Shape(256, 16, 1_024)
"""Short sequences: an update takes time in proportion to their length, so there are more updates a second."""

WINDOWS = Shape(256, 16, 4_096)
"""Windows of the learner that goes through the market: its defaults."""

SHORT_WINDOWS = Shape(256, 8, 2_048)
"""Half of them: an update is due after half of the bars."""

Contender = Callable[[Task, int], tuple[Learner, Shape]]


def contenders(learning_rate: float) -> dict[str, Contender]:
    """Learners by name. γ, λ, clip range and epochs are the defaults of each, and they agree."""

    def peer(task: Task, seed: int, whole: bool) -> tuple[Learner, Shape]:
        options: dict[str, Any] = {"reward_scale": REWARD_SCALE, "whole_sequences": whole}
        learner = RecurrentPeer(task.prepared, AS_PEOPLE_RUN_IT, seed=seed, learning_rate=learning_rate, **options)
        return learner, AS_PEOPLE_RUN_IT

    def own(task: Task, seed: int, shape: Shape = DEFAULTS, **options: Any) -> tuple[Learner, Shape]:
        return our_learner(task.prepared, shape, seed=seed, learning_rate=learning_rate, **options), shape

    def by_hand(task: Task, seed: int, shape: Shape) -> tuple[Learner, Shape]:
        env = trading_env(task.prepared, shape.envs, stagger=64)
        return PlainPPO(env, shape, seed=seed, learning_rate=learning_rate, reward_scale=REWARD_SCALE), shape

    def through_the_market(task: Task, seed: int, shape: Shape = WINDOWS, **options: Any) -> tuple[Learner, Shape]:
        env = trading_env(task.prepared, shape.envs, stagger=shape.steps)
        return tg.PathwiseLearner(env, n_steps=shape.steps, minibatch_size=shape.minibatch, seed=seed, **options), shape

    return {
        f"sb3-contrib as people run it, {AS_PEOPLE_RUN_IT}": partial(peer, whole=False),
        f"Tailguard's PPO, {DEFAULTS}": own,
        f"Tailguard, through the market, {WINDOWS}": through_the_market,
        f"Tailguard, through the market, {SHORT_WINDOWS}": partial(through_the_market, shape=SHORT_WINDOWS),
        "Tailguard, with dropout": partial(through_the_market, dropout=0.2),
        "Tailguard, four members": through_the_market,
        "Tailguard, four members with dropout": partial(through_the_market, dropout=0.2),
        "Tailguard, through the market, with critics": partial(through_the_market, critic_epochs=1),
        f"Tailguard, short sequences, {SHORT}": partial(own, shape=SHORT),
        f"Tailguard, the peer's policy, {DEFAULTS}": partial(own, **CLIPPED),
        f"Tailguard, both, {SHORT}": partial(own, shape=SHORT, **CLIPPED),
        f"sb3-contrib, whole sequences, {AS_PEOPLE_RUN_IT}": partial(peer, whole=True),
        f"by hand, {AS_PEOPLE_RUN_IT}": partial(by_hand, shape=AS_PEOPLE_RUN_IT),
        f"by hand, {DEFAULTS}": partial(by_hand, shape=DEFAULTS),
    }


@dataclass(frozen=True)
class Reached:
    """How one run went; `seconds` is infinite if it did not pass the target in time."""

    seconds: float
    steps: int
    share: float
    """The last evaluation."""


def times_to(
    targets: Sequence[float],
    task: Task,
    learner: Learner,
    steps: int,
    limit: float,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Reached]:
    """Train until evaluations have passed every target, or for `limit` seconds; `steps` in an iteration.

    `clock`: the seconds that count; `time.process_time` on a machine that is not idle.
    """
    elapsed, due, taken, found = 0.0, 0.0, 0, dict[float, Reached]()
    while True:
        begun = clock()
        learner.iterate()
        elapsed += clock() - begun
        taken += steps
        if elapsed >= due or elapsed >= limit:
            share = task.share(learner)
            for target in targets:
                if share >= target:
                    found.setdefault(target, Reached(elapsed, taken, share))
            if len(found) == len(targets) or elapsed >= limit:
                return [found.get(target, Reached(math.inf, taken, share)) for target in targets]
            due = 1.03 * elapsed


def time_to(target: float, task: Task, learner: Learner, steps: int, limit: float) -> Reached:
    """`times_to` for one target."""
    return times_to((target,), task, learner, steps, limit)[0]


def result_table(target: float, found: Mapping[str, list[Reached]]) -> Table:
    """Medians over the seeds; the ratio is that of the medians of seconds, the first over each."""
    table = Table(Column(f"time to {target:.0%} of the planted optimum", no_wrap=True), box=None, pad_edge=False)
    for heading in ("seconds", "each seed", "steps", "ratio"):
        table.add_column(heading, justify="right", no_wrap=True)
    reference = statistics.median(run.seconds for run in next(iter(found.values())))
    for name, runs in found.items():
        seconds = statistics.median(run.seconds for run in runs)
        each = ", ".join(f"{run.seconds:.3g}" if math.isfinite(run.seconds) else "–" for run in runs)
        cells = "–", each, "–", "–"
        if math.isfinite(seconds):
            steps = statistics.median(run.steps for run in runs)
            ratio = f"{reference / seconds:.1f}×" if math.isfinite(reference) else "–"
            cells = f"{seconds:.3g}", each, f"{steps:,.0f}", ratio
        table.add_row(name, *cells)
    return table


def race(
    chosen: Mapping[str, Contender], target: float, seeds: Iterable[int], limit: float, say: Callable[[str], None]
) -> dict[str, list[Reached]]:
    """All contenders on the same markets, one after the other for each seed."""
    found: dict[str, list[Reached]] = {name: [] for name in chosen}
    for seed in seeds:
        task = make_task(seed)
        say(f"seed {seed}: the optimum's log-growth in an episode of {EPISODE} bars is {task.best:+.4f}")
        for name, make in chosen.items():
            learner, shape = make(task, seed)
            run = time_to(target, task, learner, shape.samples, limit)
            found[name].append(run)
            passed = math.isfinite(run.seconds)
            outcome = f"passed after {run.seconds:.1f} s" if passed else f"not passed in {limit:.0f} s"
            say(f"seed {seed}, {name}: {outcome}, {run.share:.0%} after {run.steps:,} steps")
    return found

"""The agent of a run: one learner, or several that each leave out a fold, calibrated on held-out bars."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import torch
from rich.console import Console
from torch import Tensor

from tailguard.algorithm.ensemble import Ensemble
from tailguard.algorithm.learner import Learner
from tailguard.config import RunConfig
from tailguard.console import say
from tailguard.data.pace import DAY_MS
from tailguard.data.windows import size_in_bars
from tailguard.envs.feed_copies import RandomisedBars
from tailguard.envs.folds import EpisodeFold, cut_folds
from tailguard.envs.prepared_market import MappedBars
from tailguard.evaluate.formatting import describe_exposure
from tailguard.evaluate.held_out import HeldOutEpisodes, opening_times, spaced_starts, stride_of
from tailguard.experiment.build import build_learner, prepare_training, trading_env
from tailguard.risk.config import TAIL_EPISODES
from tailguard.risk.exposure import Exposure, calibrate_exposure, cvar_bound
from tailguard.risk.throttle import Throttle
from tailguard.robust.feed import Feed
from tailguard.runs.folder import RunFolder
from tailguard.runs.training import disk_error, save_result, train_learner
from tailguard.runs.validation import Validation

if TYPE_CHECKING:
    from tailguard.data.bars import Bars


@dataclass(frozen=True)
class Member:
    """A learner, and the fold it does not train on."""

    agent: Learner
    fold: EpisodeFold | None
    """None where it trains on the whole training part."""

    def held_out(self, feed: int = 0) -> HeldOutEpisodes:
        """Overlapping episodes of the fold, with the feed of this number; 0: the clean one."""
        env = trading_env(self.agent)
        assert self.fold is not None
        stride = stride_of(len(self.fold.inside), env.episode_length)
        starts = spaced_starts(self.fold.inside, stride)
        time = opening_times(env.prepared.panel, starts)
        if isinstance(env.prepared, RandomisedBars):
            starts = starts + feed * env.prepared.rows
        return HeldOutEpisodes(env.whole_task, starts, stride, time)


class Members:
    """The learners of a run, built one at a time on the same prepared bars."""

    def __init__(self, config: RunConfig, first: Learner, seed: int) -> None:
        self.config, self.first, self.seed, self.count = config, first, seed, config.members
        self.bars = trading_env(first).prepared
        self.folds = self._cut()
        """One for each member; none where a single agent trains on all bars."""

    @classmethod
    def on(cls, config: RunConfig, bars: Bars | MappedBars, seed: int) -> Members:
        """The learners of a run with these training bars."""
        return cls(config, build_learner(config, prepare_training(config, bars), seed), seed)

    def _cut(self) -> list[EpisodeFold]:
        if self.count == 1:
            return []
        env, panel = trading_env(self.first), self.bars.panel
        frequency = timedelta(milliseconds=panel.frequency_ms)
        embargo = size_in_bars("data.embargo", self.config.data.embargo, panel.rows, frequency, 0, panel.sessions)
        # In time: where the market closes, from bar to bar a multiple of their length.
        length = panel.frequency_ms if panel.sessions is None else math.ceil(panel.pace.bar_days * DAY_MS)
        return cut_folds(env, self.count, embargo * length)

    def build(self, number: int) -> Member:
        """The learner with this number, counted from 0, before its training."""
        agent = self.first if number == 0 else build_learner(self.config, self.bars, self.seed + number)
        if not self.folds:
            return Member(agent, None)
        env, fold = trading_env(agent), self.folds[number]
        env.restrict_starts(fold.outside)
        return Member(agent, fold)


def train_members(
    members: Members,
    run: RunFolder,
    validation: Validation | None,
    console: Console,
    *,
    resume: bool,
    again: str,
    ask: Callable[[str], bool],
    verbose: bool = False,
) -> Learner | Ensemble:
    """Train every learner of a run, calibrate the exposure where there is a limit, and save the result as its agent.

    The arguments are those of `train_learner`. Each of several learners has a folder of its own for its checkpoints,
    so that an interrupted run resumes with the one that was interrupted.
    """
    trained = []
    for number in range(members.count):
        member, place = members.build(number), run
        if member.fold is not None:
            place = RunFolder(run.member_path(number))
            resume = _opened(place, again)
            first, last = (_day(moment) for moment in (member.fold.first_ms, member.fold.last_ms))
            say(console, f"member   {number + 1} of {members.count}, trained without {first} to {last}")
        train_learner(
            member.agent,
            members.config,
            place,
            validation,
            console,
            resume=resume,
            again=again,
            ask=ask,
            verbose=verbose,
        )
        trained.append(member)
    agent = combine(trained, validation, members.config, console)
    save_result(agent, run, again)
    return agent


def combine(
    members: Sequence[Member], validation: Validation | None, config: RunConfig, console: Console
) -> Learner | Ensemble:
    """The learners as one agent, at an exposure that keeps the limit on held-out bars."""
    agents, risk = [member.agent for member in members], config.risk
    throttle = Throttle(risk.limit, risk.alpha) if risk.limit is not None and config.throttled else False
    if risk.limit is None or risk.confidence == 0:
        return agents[0] if len(agents) == 1 and not throttle else Ensemble(agents, throttled=throttle)
    calibrated = _calibrated(_held_out(members, validation, agents), config)
    if calibrated is None:
        say(console, "note     no bars are held out, so that the exposure stays as it was learned")
        return Ensemble(agents, throttled=throttle)
    reason, number = describe_exposure(calibrated), 1
    for draws in config.robust.feeds():
        # The limit must hold under each fault, not on average over them; the first draw of each stands for all.
        parts = _held_out(members, validation, agents, number, draws[0])
        faulty = None if _keeps_limit(parts, calibrated.factor, config) else _calibrated(parts, config)
        if faulty is not None and faulty.factor < calibrated.factor:
            calibrated, reason = faulty, f"{describe_exposure(faulty)}, with the feed {draws[0]}"
        number += len(draws)
    say(console, f"exposure {reason}")
    if risk.bound == "percentile" and calibrated.tail_episodes < TAIL_EPISODES:
        rest = "the throttle acts on what it misses" if throttle else "risk.bound=pivotal is wider and holds more often"
        say(
            console,
            "note     nominal: from so few tail episodes a 90 % bound holds in about three of four cases, "
            f"not in nine of ten; {rest}",
        )
    return Ensemble(agents, calibrated, throttled=throttle)


Parts = list[tuple[HeldOutEpisodes, Sequence[Learner]]]
"""Held-out episodes and the learners that have not seen them."""


def _held_out(
    members: Sequence[Member],
    validation: Validation | None,
    agents: Sequence[Learner],
    number: int = 0,
    feed: Feed | None = None,
) -> Parts:
    """What no learner has seen, with the feed of this number; 0: the clean one."""
    parts: Parts = [(member.held_out(number), [member.agent]) for member in members if member.fold is not None]
    if validation is not None:
        # No member has trained on the validation part, so that it shows the tail of their mean.
        parts += [(part, agents) for part in (validation.parts if feed is None else validation.parts_under(feed))]
    return parts


def _calibrated(parts: Parts, config: RunConfig) -> Exposure | None:
    """The exposure that keeps the limit on these episodes; None where there are none."""
    if not parts:
        return None
    risk = config.risk
    assert risk.limit is not None
    return calibrate_exposure(
        lambda exposure: _outcomes(parts, exposure, config),
        risk.limit,
        alpha=risk.alpha,
        level=risk.confidence,
        overlap=_overlap(parts),
        times=_times(parts),
        kind=risk.bound,
    )


def _keeps_limit(parts: Parts, exposure: float, config: RunConfig) -> bool:
    """Whether this exposure keeps the limit on these episodes with the confidence that a calibration asks for."""
    risk = config.risk
    assert risk.limit is not None
    outcomes, block = _outcomes(parts, exposure, config), 2 * _overlap(parts)
    bound = cvar_bound(outcomes, risk.alpha, risk.confidence, block=block, times=_times(parts), kind=risk.bound)
    return bound >= risk.limit


def _outcomes(parts: Parts, exposure: float, config: RunConfig) -> Tensor:
    """Outcomes of the budget's measure of all episodes, a row for each."""
    measure = config.risk.measure
    return torch.cat([part.trade(Ensemble(traders, exposure), measure).measured for part, traders in parts])


def _widest(parts: Parts) -> HeldOutEpisodes:
    """The part whose episodes begin least often."""
    return max((part for part, _ in parts), key=lambda part: part.stride)


def _overlap(parts: Parts) -> int:
    return _widest(parts).overlap


def _times(parts: Parts) -> Tensor:
    """Number of the stretch of time, a stride long, in which each episode begins, [n].

    Symbols with accounts of their own fall together: their episodes at one time are no independent evidence.
    """
    return torch.cat([part.time for part, _ in parts]) // _widest(parts).stride


def _opened(place: RunFolder, again: str) -> bool:
    """Make a member's folder; returns whether its training has begun there."""
    try:
        place.path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise disk_error(error, place, None, again) from error
    return place.metrics_path.exists()


def _day(moment_ms: int) -> str:
    return f"{datetime.fromtimestamp(moment_ms / 1000, UTC):%Y-%m-%d}"

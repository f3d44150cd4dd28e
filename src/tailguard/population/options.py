"""Settings of a population."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, Self, get_args

from tailguard.errors import ConfigError
from tailguard.population.executor import OptimizerState
from tailguard.validate import check_choice, check_count, check_range

Strategy = Literal["mf_pbt", "pbt", "random", "halving"]
Selection = Literal["truncation", "tournament"]
Explore = Literal["perturb", "resample", "both"]


@dataclass(frozen=True)
class PopulationSettings:
    """How members are chosen and changed. A round is a training of all members, and their judgement on validation."""

    members: int = 8
    """Agents that train at once."""
    rounds: int = 20
    """Judgements of every member; between two of them it trains a share 1/rounds of training.total_timesteps."""
    strategy: Strategy = "pbt"
    """pbt; mf_pbt, in groups of several frequencies; random: no member is ever changed; halving: the worst ones stop.
    """
    selection: Selection = "truncation"
    """truncation: the worst share exploits the best share; tournament: each member exploits a better opponent."""
    explore: Explore = "both"
    """What an exploiter does to its new values: perturb by a factor, resample, or both."""
    fraction: float = 0.25
    """Share of members that exploit, and of those that they exploit, above 0 to 0.5; for truncation."""
    factors: tuple[float, ...] = (0.8, 1.25)
    """Factors of which one perturbs a value."""
    resample: float = 0.25
    """Probability with which a value is drawn anew, 0 to 1; for resample and both."""
    ready: int = 1
    """Rounds that a member trains after it began or took over a state before it may do so again."""
    frequencies: tuple[int, ...] = ()
    """Rounds between two evolutions of each group, of mf_pbt; empty: 1 and 4 from 8 members on, 1, 2, 4 and 8 from 16.
    """
    eta: int = 3
    """Halving keeps the best 1/η at rounds ready, η·ready, η²·ready, …"""
    optimizer: OptimizerState = "copy"
    """Optimiser of an exploiter: copy its parent's moments, or reset them."""
    metric: str = "score"
    """What members are judged by on validation: score (growth subject to the budget), growth, cvar, or a metric of a
    plugin."""
    seed: int = 0
    """Of the decisions. Learners have the seeds training.seed + member."""

    def __post_init__(self) -> None:
        check_count("population.members", self.members)
        check_range("population.members", self.members, high=4096)
        check_count("population.rounds", self.rounds)
        check_choice("population.strategy", self.strategy, get_args(Strategy))
        check_choice("population.selection", self.selection, get_args(Selection))
        check_choice("population.explore", self.explore, get_args(Explore))
        check_choice("population.optimizer", self.optimizer, get_args(OptimizerState))
        check_range("population.fraction", self.fraction, low=0, low_open=True, high=0.5)
        check_range("population.resample", self.resample, low=0, high=1)
        check_count("population.ready", self.ready)
        check_count("population.eta", self.eta, low=2)
        check_count("population.seed", self.seed, low=0)
        if not self.factors:
            raise ConfigError("population.factors: none given; give one or more, as 0.8 and 1.25")
        for factor in self.factors:
            check_range("population.factors", factor, low=0, low_open=True)
        self._check_frequencies()

    def _check_frequencies(self) -> None:
        if self.frequencies and self.strategy != "mf_pbt":
            raise ConfigError("population.frequencies: only strategy mf_pbt has groups of several frequencies")
        for frequency in self.frequencies:
            check_count("population.frequencies", frequency)
        if len(set(self.frequencies)) < len(self.frequencies):
            raise ConfigError(f"population.frequencies: {list(self.frequencies)}; give different ones")
        groups = len(self.frequencies_used)
        if self.strategy == "mf_pbt" and self.members < 4 * groups:
            raise ConfigError(
                f"population.members: {self.members} in {groups} groups; each needs 4. Raise members to {4 * groups}, "
                "or choose strategy pbt"
            )

    @property
    def frequencies_used(self) -> tuple[int, ...]:
        """Rounds between two evolutions, of each group."""
        if self.strategy != "mf_pbt":
            return (1,)
        usual = (1, 2, 4, 8) if self.members >= 16 else (1, 4)
        return self.frequencies or usual

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, text and lists."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The settings that `to_dict` wrote."""
        given: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in data.items()
        }
        return cls(**given)

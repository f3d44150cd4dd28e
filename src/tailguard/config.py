"""A run's settings: one frozen dataclass per package, read from YAML and overrides. Unknown keys are errors."""

from __future__ import annotations

import copy
import dataclasses
import difflib
import importlib
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from tailguard.algorithm.config import LearnerConfig, PathwiseConfig, PPOConfig
from tailguard.data.stored_features import FeaturePrecision
from tailguard.envs.constraints import Constraints
from tailguard.envs.episodes import REWARDS, Reward
from tailguard.envs.randomisation import Randomisation
from tailguard.envs.shield import Shield
from tailguard.errors import ConfigError
from tailguard.field_docs import commented_yaml, field_docs
from tailguard.market.config import MarketConfig
from tailguard.market.presets import PRESETS, preset_settings
from tailguard.plain_yaml import as_yaml, parse_yaml, plain, read_yaml, shortened
from tailguard.plugins import load_plugins
from tailguard.risk.config import RiskConfig
from tailguard.robust.config import RobustConfig
from tailguard.validate import check_choice, check_count, check_range

LearnerKind = Literal["ppo", "pathwise"]
Select = Literal["auto", "best", "last", "ensemble"]
DEFAULT_MEMBERS = 4
"""Agents of a run with a risk limit, each trained without a quarter of the training part."""
TABLES = (
    *("market.per_symbol", "data.delistings"),
    *("env.constraints.asset_caps", "env.constraints.groups", "env.constraints.group_caps"),
)
"""Settings that are tables by names of the user's choice."""


@dataclass(frozen=True)
class DataConfig:
    """Which bars to use and how to split them by time."""

    path: str | None = None
    """File or folder of bars; null: a synthetic market, to try Tailguard without data."""
    symbols: tuple[str, ...] = ()
    """Symbols to use; empty: all of them."""
    calendar: str = "auto"
    """When the market trades: 24/7, auto (inferred from the bars), fx, a name of exchange_calendars like XNYS, or a
    .csv or .parquet file of sessions. Annualisation, durations and missing bars follow it."""
    universe: Literal["common", "ragged"] = "common"
    """Several symbols in one account: common trades the times that all have; in ragged ones members are listed, halted
    and delisted, and weights of absent ones are 0."""
    delistings: dict[str, float] = field(default_factory=dict, hash=False)
    """Price of a symbol after its last bar in a ragged universe, as {ENRON: 0.26}; else its last close."""
    gaps: Literal["error", "split"] = "error"
    """Missing bars: an error, or a split into segments, so that no episode crosses a gap."""
    volume_unit: Literal["base", "quote"] = "base"
    """What the volume column counts: coins (base) or money (quote)."""
    adjust: Literal["none", "splits", "dividends", "all"] = "none"
    """Adjust prices for splits, dividends or both, from columns of the bars or from events; none: as they are."""
    events: str | None = None
    """File of dividends and splits: the columns date, dividend, split and symbol; null: columns of the bars."""
    published: str | None = None
    """File of further values for features, with their publication times in a column `published`; null: none."""
    published_delay: str | None = None
    """How much later a published value is used, like 1d; null: from its publication on."""
    published_before: float | None = None
    """The value before the first publication; null: there is none, and features that need it are refused there."""
    validation: float | str = 0.15
    """Size of the validation part: a fraction, or a duration like 180d."""
    test: float | str = 0.15
    """Size of the test part, which training never sees: a fraction, or a duration like 180d."""
    embargo: str = "7d"
    """Time left unused between the parts."""
    features: tuple[str, ...] = ()
    """Features that the agent sees; empty: all that the bars allow."""
    feature_precision: FeaturePrecision = "float32"
    """How training holds scaled features: float32, or bfloat16, which takes half the memory and rounds each value by at
    most 0.39 %; evaluations use float32."""
    resident_bars: int = 0
    """Training bars that are on the device at a time, where not all of them fit; 0: all of them. The others come in
    blocks from memory or, if they were prepared, from disk, exchanged at the ends of episodes."""
    resident_blocks: int = 8
    """Blocks that the resident bars are divided into; an exchange replaces one of them."""
    synthetic_bars: int = 35_064
    """Bars of the synthetic market; 35,064 hourly bars are four years."""
    synthetic_signal: float = 8.0
    """Planted signal of the synthetic market: yearly Sharpe ratio, before costs, of a trader who sees it, 0 to 50."""

    def __post_init__(self) -> None:
        check_choice("data.gaps", self.gaps, ("error", "split"))
        check_choice("data.universe", self.universe, ("common", "ragged"))
        check_choice("data.adjust", self.adjust, ("none", "splits", "dividends", "all"))
        check_choice("data.volume_unit", self.volume_unit, ("base", "quote"))
        check_choice("data.feature_precision", self.feature_precision, get_args(FeaturePrecision))
        check_count("data.resident_bars", self.resident_bars, low=0)
        check_count("data.resident_blocks", self.resident_blocks, low=2)
        check_count("data.synthetic_bars", self.synthetic_bars, low=1_000)
        check_range("data.synthetic_signal", self.synthetic_signal, low=0, high=50)


@dataclass(frozen=True)
class EnvConfig:
    """The trading environment."""

    num_envs: int = 0
    """Number of parallel accounts; 0: 512 where rollouts are whole episodes, else 256."""
    episode_length: int = 256
    """Bars in an episode; a multiple of the learner's n_steps keeps episodes from ending inside a training sequence."""
    accounts: Literal["portfolio", "per_symbol"] = "portfolio"
    """All symbols in one account, or a separate account for each symbol."""
    reward: Reward = "log"
    """log of net equity growth, simple growth, or pnl as a share of the episode's first equity."""
    flat_by_close: bool = False
    """Sell everything at the open of each session's last bar, so that no position is carried over a night or weekend;
    for bars shorter than a day."""
    shield_shock: float = 0.0
    """Hard cap on exposure: a move of this size against all positions may not break shield_budget; 0 is off."""
    shield_budget: float = 0.04
    """Largest loss of an episode after such a shock, as a fraction of its starting equity."""
    constraints: Constraints = field(default_factory=Constraints)
    """Limits on target weights, kept at every decision; nothing is limited by default."""
    randomisation: Randomisation = field(default_factory=Randomisation)
    """Random variation of the training episodes; evaluations are without it."""

    def __post_init__(self) -> None:
        check_count("env.num_envs", self.num_envs, low=0)
        check_count("env.episode_length", self.episode_length)
        check_choice("env.accounts", self.accounts, ("portfolio", "per_symbol"))
        check_choice("env.reward", self.reward, REWARDS)
        check_range("env.shield_shock", self.shield_shock, low=0, high=1)
        check_range("env.shield_budget", self.shield_budget, low=0, low_open=True, high=1)
        self.constraints.check_fits(shielded=self.shield is not None, flat_by_close=self.flat_by_close)

    @property
    def shield(self) -> Shield | None:
        return Shield(self.shield_shock, self.shield_budget) if self.shield_shock > 0 else None


@dataclass(frozen=True)
class TrainingConfig:
    """Length, device and checkpoints of a run."""

    total_timesteps: int = 2_000_000
    """Environment steps, over all accounts."""
    seed: int = 0
    """Random seed of the weights, the actions, the minibatches and the environment."""
    device: str = "cpu"
    """Device for everything: cpu or cuda."""
    threads: int = 0
    """CPU threads; 0 uses PyTorch's default."""
    members: int = 0
    """Agents that are trained and act as their mean, each without one fold of the training part, which then shows its
    tail on bars it has not seen; 0: 4 where risk.limit is set or select is ensemble, else 1."""
    select: Select = "auto"
    """Which agent is the result: best on the validation part, last, or ensemble, the mean of several at their last
    states (members); auto: last where the exposure is calibrated on the validation part (risk.confidence), which must
    then have no part in the choice, else best."""
    evaluation_steps: int = 0
    """Environment steps between two evaluations on the validation part; 0: a tenth of the run."""
    patience: int = 0
    """Evaluations without a better score after which training ends early; 0: never."""
    checkpoint_steps: int = 0
    """Environment steps between two checkpoints; 0: a twentieth of the run. A new best score is saved at once."""
    checkpoint_minutes: float = 10.0
    """Maximum time between two checkpoints, in minutes."""
    keep_checkpoints: int = 3
    """Number of newest checkpoints to keep; the best on the validation part is kept as well."""

    def __post_init__(self) -> None:
        check_count("training.total_timesteps", self.total_timesteps)
        check_count("training.seed", self.seed, low=0)
        check_range("training.seed", self.seed, high=2**62)
        check_count("training.threads", self.threads, low=0)
        check_range("training.threads", self.threads, high=1024)
        check_count("training.members", self.members, low=0)
        check_range("training.members", self.members, high=64)
        check_choice("training.select", self.select, get_args(Select))
        if self.select == "ensemble" and self.members == 1:
            raise ConfigError(
                "training.select: ensemble is the mean of several agents, and training.members is 1; set it to 2 or "
                "more, or to 0 for 4"
            )
        check_count("training.evaluation_steps", self.evaluation_steps, low=0)
        check_count("training.patience", self.patience, low=0)
        check_count("training.checkpoint_steps", self.checkpoint_steps, low=0)
        check_range("training.checkpoint_minutes", self.checkpoint_minutes, low=0, low_open=True)
        check_count("training.keep_checkpoints", self.keep_checkpoints)


@dataclass(frozen=True)
class RunConfig:
    """All settings of a run."""

    data: DataConfig = field(default_factory=DataConfig)
    """Which bars to use and how to split them by time."""
    market: MarketConfig = field(default_factory=MarketConfig)
    """Costs, margin and size of the account."""
    env: EnvConfig = field(default_factory=EnvConfig)
    """The trading environment."""
    learner: LearnerKind = "pathwise"
    """Learning algorithm: pathwise, which uses gradients through the market, or ppo."""
    ppo: PPOConfig = field(default_factory=PPOConfig)
    """Recurrent distributional PPO and its network; used when learner is ppo."""
    pathwise: PathwiseConfig = field(default_factory=PathwiseConfig)
    """Gradients through the market and the network; used when learner is pathwise."""
    risk: RiskConfig = field(default_factory=RiskConfig)
    """The tail-risk (CVaR) budget."""
    robust: RobustConfig = field(default_factory=RobustConfig)
    """Training against attacks on the observations, and under faults of the feed; off by default."""
    training: TrainingConfig = field(default_factory=TrainingConfig)
    """Length, device and checkpoints of a run."""
    plugins: tuple[str, ...] = ()
    """Modules, or Python files relative to the working directory, with parts of your own such as features; each runs
    code with your rights."""

    def __post_init__(self) -> None:
        check_choice("learner", self.learner, get_args(LearnerKind))
        self.env.constraints.check_fits(throttled=self.throttled)
        other = self.ppo if self.learner == "pathwise" else self.pathwise
        if other.loss_terms:
            raise ConfigError(
                f"{other.section}.loss_terms: {', '.join(other.loss_terms)} would have no effect, because the learner "
                f"is {self.learner}; set learner to {other.section}, or name them in {self.learner}.loss_terms"
            )

    @property
    def chosen(self) -> LearnerConfig:
        """The settings of the chosen learner, completed by the environment and the budget."""
        given = self.pathwise if self.learner == "pathwise" else self.ppo
        return given.completed(self.risk, self.env.episode_length)

    @property
    def num_envs(self) -> int:
        """Number of parallel accounts."""
        whole_episodes = self.chosen.n_steps == self.env.episode_length
        return self.env.num_envs or (512 if whole_episodes else 256)

    @property
    def select(self) -> Select:
        """Which state of each agent is the result: best or last."""
        if self.training.select == "ensemble":
            return "last"
        if self.training.select != "auto":
            return self.training.select
        return "last" if self.risk.limit is not None and self.risk.confidence > 0 else "best"

    @property
    def throttled(self) -> bool:
        """Whether losses that the agent realises reduce its exposure."""
        return self.risk.limit is not None and self.risk.throttle and self.risk.measure == "episode"

    @property
    def members(self) -> int:
        """Number of agents to train."""
        several = self.risk.limit is not None or self.training.select == "ensemble"
        return self.training.members or (DEFAULT_MEMBERS if several else 1)


def load_config(
    path: Path | None = None,
    overrides: Sequence[str] = (),
    base: RunConfig | None = None,
    *,
    trust_plugins: bool = True,
) -> RunConfig:
    """Read a YAML file and apply overrides such as `ppo.gamma=0.995`; what is not given keeps its default.

    The plugins that the settings name are loaded, which runs their code, unless `trust_plugins` is False: then settings
    that name plugins are refused.
    """
    settings: dict[str, Any] = to_dict(base or RunConfig())
    source = "settings" if path is None else str(path)
    layers = [(source, {} if path is None else read_yaml(path))]
    for override in overrides:
        key, separator, value = override.partition("=")
        named = f"--set {shortened(override, quoted=False)}"
        if not separator or not key.strip():
            raise ConfigError(f"{named}: write it as section.key=value, for example ppo.gamma=0.995")
        nested: Any = parse_yaml(value, f"{named}: the value")
        for name in reversed(key.strip().split(".")):
            nested = {name: nested}
        layers.append((named, nested))
    # Below everything that is given, so that explicit settings win wherever they stand.
    settings["market"] |= _preset_below(given for _, given in layers)
    steps = []
    for source, given in layers:
        _merge(settings, given, source)
        steps.append((source, copy.deepcopy(settings)))
    plugins = settings["plugins"]
    named_by = next(source for source, so_far in steps if so_far["plugins"] == plugins)
    _load_plugins(plugins, named_by, trust_plugins)
    try:
        return _build(settings, source)
    except ConfigError:
        # A setting may be valid only together with a later one, so settings are checked after the last step. The error
        # then names the first step from which on they are invalid.
        for source, so_far in reversed(steps):
            try:
                _build(so_far, source)
            except ConfigError as error:
                failure = error
            else:
                break
        raise failure from None


def _preset_below(layers: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The settings of the market preset that the last of the layers names."""
    found: dict[str, Any] = {}
    for given in layers:
        market = given.get("market")
        name = market.get("preset") if isinstance(market, Mapping) else None
        if isinstance(name, str) and name in PRESETS:
            defaults = dataclasses.asdict(MarketConfig())
            found = {key: defaults[key] for usual in PRESETS.values() for key in usual} | preset_settings(name)
    return found


def differing_settings(then: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, str]:
    """Settings that have changed, by name, as `ppo.gamma was 0.99 and is 0.5`."""
    before, after = dict(flat_settings(then)), dict(flat_settings(now))
    return {
        key: f"{key} was {shortened(before.get(key))} and is {shortened(after.get(key))}"
        for key in before | after
        if before.get(key) != after.get(key)
    }


def flat_settings(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every setting by its full name, as `ppo.gamma`."""
    for name, value in settings.items():
        if isinstance(value, dict):
            yield from flat_settings(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def to_dict(config: RunConfig) -> dict[str, Any]:
    """Plain dicts, lists and numbers, as YAML writes them."""
    settings: dict[str, Any] = plain(dataclasses.asdict(config))
    return settings


def to_yaml(config: RunConfig, section: str | None = None) -> str:
    """The settings as YAML, each with its description as a comment."""
    if section is not None and section not in to_dict(config):
        raise ConfigError(_unknown(section, to_dict(config), section, "tailguard config"))
    lines: list[str] = []
    for item in dataclasses.fields(config):
        if section in (None, item.name):
            value = getattr(config, item.name)
            lines += [f"# {line}" for line in textwrap.wrap(field_docs(RunConfig)[item.name], 110)]
            if dataclasses.is_dataclass(value):
                lines += [f"{item.name}:", *commented_yaml(value, 1), ""]
            else:
                lines += [f"{item.name}: {as_yaml(value)}", ""]
    return "\n".join(lines)


OPEN_TABLES = ("market.extra_costs", "ppo.loss_terms", "pathwise.loss_terms")
"""Settings that hold what plugins register, by names that are checked when the plugins have been loaded."""


def _merge(settings: dict[str, Any], given: Mapping[Any, Any], source: str, prefix: str = "") -> None:
    """Overwrite settings with the given values, in place; every key must exist already, except in open tables."""
    for name, value in given.items():
        key = f"{prefix}{name}"
        if prefix.removesuffix(".") in OPEN_TABLES:
            settings[name] = value
            continue
        if name not in settings:
            command = f"tailguard config {prefix.split('.')[0]}".strip()
            raise ConfigError(f"{source}: {_unknown(str(name), settings, key, command)}")
        if isinstance(settings[name], dict):
            if not isinstance(value, dict):
                raise ConfigError(f"{source}: {key}: this is a section; give its settings, not {shortened(value)}")
            if key in TABLES:
                settings[name] = _joined(settings[name], value)
                continue
            _merge(settings[name], value, source, f"{key}.")
        else:
            settings[name] = _as_count(value) if type(settings[name]) is int else value


def _joined(table: Mapping[Any, Any], given: Mapping[Any, Any]) -> dict[Any, Any]:
    """Two tables of tables as one; what is given wins."""
    joined = dict(table)
    for name, value in given.items():
        both = isinstance(value, dict) and isinstance(joined.get(name), dict)
        joined[name] = {**joined[name], **value} if both else value
    return joined


def _as_count(value: Any) -> Any:
    """Accept 1e6 for a whole number: YAML reads it as text."""
    if not isinstance(value, str):
        return value
    try:
        number = float(value)
    except ValueError:
        return value
    return int(number) if number.is_integer() else value


def _unknown(name: str, known: Mapping[str, Any], key: str, command: str) -> str:
    near = difflib.get_close_matches(name, list(known), n=1)
    prefix = key.removesuffix(name)
    hint = f"Did you mean {prefix}{near[0]}?" if near else f"There are {', '.join(known)}."
    return f"{shortened(key, quoted=False)}: no such setting. {hint}  ({command} lists them)"


def _load_plugins(names: Any, source: str, trust: bool) -> None:
    """Load plugins before the settings are built, which may name what they register; wrong types are left to that."""
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return
    if names:
        # Built-in features come first, or the name clash of a plugin would be found in their module and not in its own.
        importlib.import_module("tailguard.data.features")
    try:
        load_plugins(names, trusted=trust)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from error


KINDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "string": "a text",
    "tuple": "a list, as [a, b]",
}
"""What a setting takes, in words, by the first word of pydantic's type of an error."""


def _build(settings: Mapping[str, Any], source: str) -> RunConfig:
    # Pydantic is for the boundary; the numeric core runs without it.
    from pydantic import TypeAdapter, ValidationError

    try:
        return TypeAdapter(RunConfig).validate_python(settings)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"] if isinstance(part, str) and part in _names(settings))
        wanted = KINDS.get(first["type"].partition("_")[0]) or first["msg"].removeprefix("Input should be ")
        raise ConfigError(f"{source}: {key}: {shortened(first['input'])} is not {wanted}") from None


def _names(settings: Mapping[str, Any]) -> set[str]:
    """All keys at any depth."""
    return set(settings) | {name for part in settings.values() if isinstance(part, dict) for name in _names(part)}

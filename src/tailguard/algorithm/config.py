"""Settings of the learner."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Literal, Self, TypeVar, get_args

from tailguard.algorithm.estimate import Baseline, DistributionTarget, EstimateConfig
from tailguard.algorithm.loss_terms import LOSS_TERMS
from tailguard.algorithm.runtime import RuntimeKind
from tailguard.algorithm.schedules import EntropySchedule, KLStopper, Schedule
from tailguard.errors import ConfigError
from tailguard.models.critics import ClipMode, LossSettings, TwinMode, ValueClip
from tailguard.models.policy import NetworkConfig
from tailguard.optim import OPTIMIZERS
from tailguard.optim.config import UPGDConfig, VGSConfig
from tailguard.returns import AdvantageMode
from tailguard.risk.config import RiskConfig
from tailguard.validate import check_choice, check_count, check_range, check_registered

WINDOW = 16
"""Bars of a window where nothing else asks for whole episodes."""
OtherConfig = TypeVar("OtherConfig", bound="LearnerConfig")


@dataclass(frozen=True)
class LearnerConfig:
    """What every learner needs. A schedule is a number, or `kind:start:end` over the run, like `linear:3e-4:0`."""

    section: ClassVar[str] = "learner"
    """Name of the learner's section in a run's settings, for messages."""
    fewest_steps: ClassVar[int] = 1
    """Lowest n_steps."""
    multiplier_gains: ClassVar[tuple[float, float]] = (0.5, 0.02)
    """kp and ki of the risk budget, where it does not give its own: they fit the number of rollouts in a run."""

    n_steps: int = 64
    """Steps in a rollout and in a training sequence; the episode length should be a multiple of it."""
    minibatch_size: int = 4096
    """Transitions in an optimiser step; with memory they are whole sequences of n_steps."""
    microbatches: int = 1
    """Number of parts a minibatch is processed in; saves memory and gives the same gradient."""
    optimizer: str = "adam"
    """adam, adamw, with utility gates upgd (plain descent), adaptive_upgd (Adam) or upgdw (AdamW), or one that a plugin
    registers."""
    learning_rate: float | str = 3e-4
    """Step size, a schedule; 1e-5 to 1e-2."""
    weight_decay: float = 0.0
    """Decoupled weight decay of every optimiser but adam, 0 to 0.1."""
    gamma: float = 0.99
    """Discount factor, above 0 to 1."""
    gae_lambda: float = 0.95
    """λ of the advantage estimate, 0 to 1."""
    distribution_lambda: float = 1.0
    """λ of the distribution's targets, 0 to 1. Below 1 samples bootstrap more often, and the tail of a long episode is
    underestimated: by 11 to 14 % at 0.95 and 256 steps, by 2 % at 1 (docs/cvar.md)."""
    distribution_target: DistributionTarget = "sr_lambda"
    """sr_lambda learns the distribution of the return; lambda_return that of the λ-return, whose tail is too light."""
    baseline: Baseline = "scalar"
    """Value that GAE uses: the scalar head, or the mean of the distribution, which misses crashes rarer than 1/(2N)."""
    twin_mode: TwinMode = "min"
    """Value of two critics for GAE: min is pessimistic, mean is unbiased."""
    value_coef: float = 0.5
    """Weight of the scalar value loss."""
    distribution_coef: float = 0.5
    """Weight of the distribution loss."""
    value_clip: ClipMode = "off"
    """Limit on a critic's change: off, mean_only, mean_and_variance or per_quantile."""
    value_clip_limit: float = 0.2
    """Largest change of the mean or of a quantile, in units of critic/return_std: standard deviations of the λ-return,
    which are smaller than those of the return by critic/return_spread."""
    value_clip_sd_ratio: float = 1.5
    """mean_and_variance: largest factor between the old and the new standard deviation."""
    huber_kappa: float = 0.0
    """κ of the quantile Huber loss, in units of critic/return_std as value_clip_limit; 0: pinball loss. Above 0.01 the
    tail is underestimated."""
    entropy_coef: float | str = 0.0
    """Weight of the entropy bonus, a schedule; 0 to 0.05."""
    max_grad_norm: float = 0.5
    """Gradient norm is clipped to this; 0 or less is off."""
    loss_terms: dict[str, float | str] = field(default_factory=dict, hash=False)
    """Further terms of the loss, registered with tailguard.algorithm.loss_terms.register_loss_term, by name: the
    coefficient of each, a schedule."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """Non-finite numbers: stop the run and name them, or skip and count them. A non-finite log-ratio, loss or gradient
    skips its minibatch; a reward, observation, measured outcome or estimate its rollout."""
    normalise_observations: bool = True
    """Scale observations by running statistics, updated between rollouts only."""
    observation_clip: float = 10.0
    """Scaled observations are clipped to ± this many standard deviations; without scaling there is no clip."""
    observation_noise: float = 0.0
    """Standard deviation of normal noise on the scaled observations that the policy sees while it learns, 0 (off)
    to 1."""
    return_decay: float = 0.99
    """Weight of the past in the return's running scale, per rollout; 1 counts all rollouts equally."""
    runtime: RuntimeKind = "auto"
    """How iterations run: eager, compile, graph (compiled, and recorded as CUDA graphs), or auto: graph on a GPU where
    everything can be recorded, eager elsewhere."""
    monitor: bool = True
    """Compute health metrics (gradients, LSTM states, distribution, trading) and raise alarms."""
    upgd: UPGDConfig = field(default_factory=UPGDConfig)
    """Gates and perturbations of the upgd optimisers."""
    vgs: VGSConfig = field(default_factory=VGSConfig)
    """Variance gradient scaling."""
    network: NetworkConfig = field(default_factory=NetworkConfig)
    """Shape of the network."""

    def __post_init__(self) -> None:
        self._check_ranges()
        self._check_optimizer()
        self._check_critic()
        self._check_loss_terms()

    def _check_loss_terms(self) -> None:
        setting = f"{self.section}.loss_terms"
        if not isinstance(self.loss_terms, dict):
            raise ConfigError(f"{setting}: {self.loss_terms!r} is not a table of terms and coefficients")
        for name, coefficient in self.loss_terms.items():
            check_registered(setting, name, LOSS_TERMS, "tailguard.algorithm.loss_terms.register_loss_term")
            learners = LOSS_TERMS[name].learners
            if self.section not in learners:
                raise ConfigError(
                    f"{setting}: {name} is a term for {' and '.join(learners)}, not for {self.section}; set learner to "
                    f"{learners[0]}, or remove it"
                )
            _check_schedule(f"{setting}.{name}", coefficient)

    def _check_critic(self) -> None:
        section, name, kind = self.section, self.network.critic, self.network.critic_kind
        if self.baseline == "distribution" and not kind.predicts_distribution:
            raise ConfigError(
                f"{section}.baseline: a {name} critic has no distribution; choose scalar, or another critic"
            )
        if self.huber_kappa > 0 and "huber_kappa" not in kind.loss_settings:
            raise ConfigError(
                f"{section}.huber_kappa: {self.huber_kappa:g} is for a quantile critic, and this one is {name}; set it "
                "to 0, or network.critic to quantile"
            )
        if self.value_clip not in kind.clip_modes:
            raise ConfigError(
                f"{section}.value_clip: a {name} critic has no {self.value_clip}; choose {' or '.join(kind.clip_modes)}"
            )

    def _check_ranges(self) -> None:
        section = self.section
        check_count(f"{section}.n_steps", self.n_steps, low=self.fewest_steps)
        check_count(f"{section}.minibatch_size", self.minibatch_size, low=2)
        check_count(f"{section}.microbatches", self.microbatches)
        check_registered(f"{section}.optimizer", self.optimizer, OPTIMIZERS, "tailguard.optim.register_optimizer")
        check_range(f"{section}.gamma", self.gamma, low=0, low_open=True, high=1)
        check_range(f"{section}.gae_lambda", self.gae_lambda, low=0, high=1)
        check_range(f"{section}.distribution_lambda", self.distribution_lambda, low=0, high=1)
        check_choice(f"{section}.distribution_target", self.distribution_target, get_args(DistributionTarget))
        check_choice(f"{section}.baseline", self.baseline, get_args(Baseline))
        check_choice(f"{section}.twin_mode", self.twin_mode, get_args(TwinMode))
        check_choice(f"{section}.on_nonfinite", self.on_nonfinite, ("stop", "skip"))
        check_choice(f"{section}.runtime", self.runtime, get_args(RuntimeKind))
        check_choice(f"{section}.value_clip", self.value_clip, get_args(ClipMode))
        for name in ("value_coef", "distribution_coef", "huber_kappa", "weight_decay"):
            check_range(f"{section}.{name}", getattr(self, name), low=0)
        check_range(f"{section}.value_clip_limit", self.value_clip_limit, low=0, low_open=True)
        check_range(f"{section}.value_clip_sd_ratio", self.value_clip_sd_ratio, low=1)
        check_range(f"{section}.max_grad_norm", self.max_grad_norm)
        check_range(f"{section}.observation_clip", self.observation_clip, low=0, low_open=True)
        check_range(f"{section}.observation_noise", self.observation_noise, low=0, high=10)
        check_range(f"{section}.return_decay", self.return_decay, low=0, low_open=True, high=1)
        _check_schedule(f"{section}.learning_rate", self.learning_rate)
        _check_schedule(f"{section}.entropy_coef", self.entropy_coef)

    def _check_optimizer(self) -> None:
        section, kind = self.section, OPTIMIZERS[self.optimizer]
        if self.weight_decay > 0 and not kind.decays:
            raise ConfigError(
                f"{section}.weight_decay: {kind.name} has none that is decoupled; set {section}.optimizer to adamw"
            )
        if self.upgd != UPGDConfig() and not kind.gates:
            gated = ", ".join(name for name, other in OPTIMIZERS.items() if other.gates)
            raise ConfigError(f"{section}.upgd: {kind.name} has no gates; set {section}.optimizer to one of {gated}")
        if self.vgs.enabled and self.vgs.moments == "optimizer" and not kind.adam_moments:
            raise ConfigError(f"{section}.vgs.moments: {kind.name} keeps no moments of the gradient; choose own")

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> Self:
        """The config from the output of `dataclasses.asdict`, also after a JSON round trip."""
        parts = dict(settings)
        network: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in parts["network"].items()
        }
        parts["network"] = NetworkConfig(**network)
        parts["upgd"], parts["vgs"] = UPGDConfig(**parts["upgd"]), VGSConfig(**parts["vgs"])
        return cls(**parts)

    def as_kind(self, kind: type[OtherConfig]) -> OtherConfig:
        """Another learner's default settings, with this one's network and scaling of observations."""
        kept = ("network", "normalise_observations", "observation_clip", "gamma", "on_nonfinite", "runtime", "monitor")
        return kind(**{name: getattr(self, name) for name in kept})

    def completed(self, risk: RiskConfig | None, episode_length: int | None) -> Self:  # noqa: ARG002
        """These settings with the ones that depend on the budget and the environment filled in."""
        return self

    @property
    def estimates(self) -> EstimateConfig:
        return EstimateConfig(
            gamma=self.gamma,
            lam=self.gae_lambda,
            distribution_lam=self.distribution_lambda,
            baseline=self.baseline,
            twin_mode=self.twin_mode,
            distribution_target=self.distribution_target,
            quantiles=self.network.quantiles,
        )

    @property
    def critic_loss(self) -> LossSettings:
        """What the critics' losses read."""
        clip = ValueClip(self.value_clip, self.value_clip_limit, self.value_clip_sd_ratio)
        return LossSettings(clip, self.huber_kappa)

    @property
    def uses_entropy(self) -> bool:
        """Whether the entropy takes part in the loss at any time; if not, it is not computed there."""
        return any(Schedule.parse(self.entropy_coef).values)

    def with_options(self, options: Mapping[str, Any]) -> Self:
        """This config with fields of the learner or of its network replaced; an unknown name is an error."""
        own = {item.name for item in fields(self)} - {"network"}
        net = {item.name for item in fields(NetworkConfig)}
        for name in options:
            if name not in own | net:
                near = difflib.get_close_matches(name, own | net, n=1)
                hint = f"Did you mean {near[0]}?" if near else f"There are {', '.join(sorted(own | net))}."
                raise ConfigError(f"{name}: no such setting. {hint}")
        network = replace(self.network, **{name: value for name, value in options.items() if name in net})
        return replace(self, network=network, **{name: value for name, value in options.items() if name in own})


@dataclass(frozen=True)
class PPOConfig(LearnerConfig):
    """Recurrent distributional PPO. A schedule is a number, or `kind:start:end` over the run, like `linear:3e-4:0`."""

    section: ClassVar[str] = "ppo"

    epochs: int = 4
    """Passes over a rollout, 1 to 20."""
    clip_range: float | str = 0.2
    """ε of the clipped surrogate, a schedule; 0.05 to 0.4."""
    normalise_advantages: AdvantageMode = "global"
    """global over the rollout, per_env (equal weight to every environment), or off."""
    entropy_floor: float = 0.0
    """Lower bound of the entropy weight."""
    entropy_window: int = 0
    """Iterations without a trend in the mean episode reward that count as a plateau; 0 is off."""
    entropy_boost: float = 2.0
    """Factor on the entropy weight after a plateau, fading over the next window."""
    target_kl: float | None = None
    """Stop the epochs when the smoothed exact KL from the rollout's policy passes 1.5 times this; none: no early
    stop."""
    kl_limit: float | None = None
    """Stop the epochs at once when a minibatch's exact KL passes this; none: no limit."""
    kl_penalty: float = 0.0
    """Initial weight of an adaptive KL penalty with target target_kl; 0 is off."""
    exploration: float | str = 1.0
    """Factor on the standard deviation of the actions, a schedule: exponential:1:0.1 ends at a tenth of the noise."""
    log_ratio_limit: float = 20.0
    """Log-ratios beyond ± this are clamped and counted."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("ppo.epochs", self.epochs)
        check_choice("ppo.normalise_advantages", self.normalise_advantages, get_args(AdvantageMode))
        check_range("ppo.entropy_floor", self.entropy_floor, low=0)
        check_range("ppo.kl_penalty", self.kl_penalty, low=0)
        check_count("ppo.entropy_window", self.entropy_window, low=0)
        check_range("ppo.entropy_boost", self.entropy_boost, low=1)
        check_range("ppo.log_ratio_limit", self.log_ratio_limit, low=0, low_open=True, high=80)
        _check_schedule("ppo.clip_range", self.clip_range)
        _check_schedule("ppo.exploration", self.exploration, zero=False)
        for name in ("target_kl", "kl_limit"):
            if getattr(self, name) is not None:
                check_range(f"ppo.{name}", getattr(self, name), low=0, low_open=True)
        if self.entropy_window in (1, 2):
            raise ConfigError(
                f"ppo.entropy_window: {self.entropy_window} iterations show no trend; give 0, or 3 or more"
            )
        if self.entropy_window > 0 and not self.uses_entropy:
            raise ConfigError(
                f"ppo.entropy_window: {self.entropy_window} looks for a plateau to raise the entropy weight, which is "
                "0 throughout; set ppo.entropy_coef or ppo.entropy_floor above 0, or the window to 0"
            )
        if self.kl_penalty > 0 and self.target_kl is None:
            raise ConfigError("ppo.kl_penalty: an adaptive penalty needs a target; set ppo.target_kl, 0.01 for example")

    @property
    def entropy_schedule(self) -> EntropySchedule:
        decay = Schedule.parse(self.entropy_coef)
        return EntropySchedule(decay, self.entropy_floor, self.entropy_window, self.entropy_boost)

    @property
    def kl_stopper(self) -> KLStopper | None:
        if self.target_kl is None and self.kl_limit is None:
            return None
        hard = math.inf if self.kl_limit is None else self.kl_limit
        return KLStopper(hard if self.target_kl is None else min(1.5 * self.target_kl, hard), hard)

    @property
    def uses_entropy(self) -> bool:
        return super().uses_entropy or self.entropy_floor > 0


@dataclass(frozen=True)
class PathwiseConfig(LearnerConfig):
    """Gradients through the market. A schedule is a number, or `kind:start:end` over the run, like `linear:3e-4:0`."""

    section: ClassVar[str] = "pathwise"
    fewest_steps: ClassVar[int] = 0
    multiplier_gains: ClassVar[tuple[float, float]] = (2.0, 0.1)

    n_steps: int = 0
    """Bars in a window that the gradient goes back through, 8 to 64, or the length of an episode; 0: whole episodes
    where a budget is on them, else 16."""
    learning_rate: float | str = "linear:2e-2:2e-3"
    """Step size of the policy, a schedule; 1e-3 to 2e-2. Larger ones learn sooner, and now and then nothing at all."""
    network: NetworkConfig = field(default_factory=lambda: NetworkConfig(hidden=(32,), lstm_size=32))
    """Shape of the network. It is small, because gradients through the market overfit a few years of bars in seconds.
    """
    critic_learning_rate: float | str = 3e-4
    """Step size of the critics, a schedule; 1e-4 to 1e-2."""
    critic_epochs: int | None = None
    """Passes of the critics over a window, 1 to 20; 0: no critics, so rewards after a window do not count; none: 1
    where a budget is on windows shorter than an episode, else 0 (docs/pathwise.md has the comparison)."""
    max_grad_norm: float = 1.0
    """Gradient norm is clipped to this; 0 or less is off."""
    stochastic: bool = False
    """Whether the policy acts with its noise while it learns; the gradient then goes through the noise too
    (reparameterisation), to the standard deviation as well."""
    dropout: float = 0.0
    """Share of the encoder's outputs, drawn for each account and window, that the policy's memory does not see while it
    learns, 0 (off) to 0.9."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_schedule("pathwise.critic_learning_rate", self.critic_learning_rate)
        check_range("pathwise.dropout", self.dropout, low=0, high=0.9)
        if self.critic_epochs is not None:
            check_count("pathwise.critic_epochs", self.critic_epochs, low=0)
        if self.uses_entropy and not self.stochastic:
            raise ConfigError(
                "pathwise.entropy_coef: a deterministic policy has no entropy; set pathwise.stochastic to true"
            )

    def completed(self, risk: RiskConfig | None, episode_length: int | None) -> Self:
        n_steps, critic_epochs = self.n_steps, self.critic_epochs
        has_budget = risk is not None and risk.enabled
        if n_steps == 0:
            # The gradient of an episode's tail is exact only where it goes through the whole episode.
            # An agent that is loaded without an environment has a stand-in, of episodes of one step.
            known = episode_length if episode_length is not None and episode_length > 1 else 0
            whole = has_budget and risk is not None and risk.measure != "bar"
            n_steps = known if whole and known else WINDOW
        if critic_epochs is None:
            critic_epochs = 1 if has_budget and n_steps != episode_length else 0
        return replace(self, n_steps=n_steps, critic_epochs=critic_epochs)


def _check_schedule(name: str, given: float | str, *, zero: bool = True) -> None:
    """Raise unless `given` is a schedule that is never negative, nor 0 where `zero` is false."""
    try:
        schedule = Schedule.parse(given)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from error
    check_range(name, min(schedule.values), low=0, low_open=not zero)

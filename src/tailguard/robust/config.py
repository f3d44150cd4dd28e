"""Settings of training against attacks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self, get_args

from tailguard.errors import ConfigError
from tailguard.robust.attacks import Attack, AttackKind, Norm
from tailguard.robust.feed_config import FeedConfig
from tailguard.validate import check_choice, check_count, check_range

EpsilonSchedule = Literal["constant", "linear", "cosine"]
Distance = Literal["auto", "kl", "action"]
Refresh = Literal["rollout", "minibatch"]
AdversaryMode = Literal["none", "alternate"]
AdversaryActs = Literal["perturbation", "direction"]


@dataclass(frozen=True)
class RobustConfig(FeedConfig):
    """Training against attacks on observations, and under faults of the feed.

    Decisions may not change much within epsilon of what is observed.
    """

    coef: float = 0.0
    """Weight of the regulariser, the largest change of the policy that the attack finds; 0 is off. 0.1 to 10 for ppo,
    0.1 to 3 for pathwise."""
    epsilon: float = 0.05
    """Size of the attack, in standard deviations of each observed feature, 0.01 to 0.3."""
    schedule: EpsilonSchedule = "linear"
    """How epsilon grows from 0: linear, cosine, or constant for no growth. A policy that must be smooth before it has
    learned anything learns nothing."""
    warmup: float = 0.5
    """Share of the training in which epsilon grows to its full size, above 0 to 1."""
    attack: AttackKind = "pgd"
    """Attack that finds the change: fgsm, pgd, sgld or random."""
    norm: Norm = "linf"
    """linf bounds each feature by epsilon, l2 the length of the whole perturbation."""
    steps: int = 10
    """Gradient steps of the attack, 1 to 20."""
    distance: Distance = "auto"
    """What may not change: kl, the distribution of the action; action, the deterministic one; auto: kl for ppo, action
    for pathwise."""
    through_time: bool = False
    """False: each observation is attacked given the clean memory; true: whole windows through the memory, slower."""
    refresh: Refresh = "rollout"
    """Find perturbations once a rollout, or for every minibatch anew as in the paper, which costs more."""
    detach: bool = True
    """The policy at the clean observation is a constant to the regulariser: only the attacked one is moved."""
    critic_coef: float = 0.0
    """Weight of the squared change of the value under the same perturbation, where there are critics; 0 is off."""
    adversary: AdversaryMode = "none"
    """alternate: learn on observations that a learned adversary perturbs, which is trained in turns with the agent by
    ppo; none: true observations."""
    adversary_share: float = 1.0
    """Share of the environments whose observations the adversary perturbs, above 0 to 1; the others show the truth, so
    that the agent learns from both."""
    adversary_every: int = 10
    """Rollouts of the agent between two turns of the adversary."""
    adversary_rollouts: int = 5
    """Rollouts of the adversary in a turn."""
    adversary_acts: AdversaryActs = "direction"
    """What the adversary chooses: the perturbation itself, or the direction in which the action is to be pushed, for
    which the gradient then finds the perturbation; a direction is learned sooner where features are many."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("robust.coef", self.coef, low=0)
        check_range("robust.epsilon", self.epsilon, low=0, low_open=True)
        check_choice("robust.schedule", self.schedule, get_args(EpsilonSchedule))
        check_range("robust.warmup", self.warmup, low=0, low_open=True, high=1)
        check_choice("robust.attack", self.attack, get_args(AttackKind))
        check_choice("robust.norm", self.norm, get_args(Norm))
        check_count("robust.steps", self.steps)
        check_choice("robust.distance", self.distance, get_args(Distance))
        check_choice("robust.refresh", self.refresh, get_args(Refresh))
        check_range("robust.critic_coef", self.critic_coef, low=0)
        check_choice("robust.adversary", self.adversary, get_args(AdversaryMode))
        check_choice("robust.adversary_acts", self.adversary_acts, get_args(AdversaryActs))
        check_range("robust.adversary_share", self.adversary_share, low=0, low_open=True, high=1)
        check_count("robust.adversary_every", self.adversary_every)
        check_count("robust.adversary_rollouts", self.adversary_rollouts)
        if self.critic_coef > 0 and self.coef == 0:
            raise ConfigError(
                "robust.critic_coef: the value is smoothed where the policy is attacked; set robust.coef above 0 too"
            )

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> Self:
        """The config that `dataclasses.asdict` took apart."""
        return cls(**{**settings, "feed": tuple(settings.get("feed", ()))})

    @property
    def enabled(self) -> bool:
        """Whether anything is trained against."""
        return self.coef > 0 or self.adversary != "none"

    def epsilon_at(self, progress: float) -> float:
        """Size of the attack when this share of the training is done: a function of it alone, which never compounds."""
        share = min(max(progress, 0.0) / self.warmup, 1.0)
        if self.schedule == "constant":
            return self.epsilon
        if self.schedule == "linear":
            return self.epsilon * share
        return self.epsilon * 0.5 * (1.0 - math.cos(math.pi * share))

    def attack_on(self, distance: Literal["kl", "action"]) -> Attack:
        """The attack that the regulariser uses; `distance` is what auto stands for."""
        target = distance if self.distance == "auto" else self.distance
        return Attack(self.attack, self.epsilon, self.norm, self.steps, target=target, through_time=self.through_time)

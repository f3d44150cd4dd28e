"""What a learner does against attacks on its observations, by its settings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tailguard.robust import RobustConfig, Smoothness, attackable

if TYPE_CHECKING:
    from tailguard.algorithm.adversary_training import Alternation
    from tailguard.algorithm.learner import Learner


def regulariser(learner: Learner, config: RobustConfig | None) -> tuple[RobustConfig, Smoothness | None]:
    """The settings, the default ones where there are none, and the regulariser if they ask for one."""
    config = RobustConfig() if config is None else config
    if config.coef == 0:
        return config, None
    return config, Smoothness(config, learner.policy, attackable(learner.env), learner.seed, learner.smooths)


def alternation(learner: Learner) -> Alternation | None:
    """The adversary that learns in turns with the agent, if the settings ask for one; the agent is complete."""
    if learner.robust.adversary == "none":
        return None
    from tailguard.algorithm.adversary_training import Alternation  # it trains an adversary by a learner

    return Alternation(learner)

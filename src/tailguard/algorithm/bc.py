"""Behaviour cloning towards given actions, plain or weighted by their advantage (AWR)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tailguard.algorithm.estimate import Estimates
from tailguard.algorithm.losses import awr_weights, bc_loss
from tailguard.algorithm.rollout import Rollout
from tailguard.algorithm.schedules import Schedule
from tailguard.algorithm.update import Batch
from tailguard.errors import ConfigError
from tailguard.models.policy import ActorCritic, PolicyOutput
from tailguard.validate import check_range

Teacher = Callable[[Tensor], Tensor]
"""Maps raw observations [T, N, O] to the actions to imitate, [T, N, A], in the environment's form."""


@dataclass(frozen=True)
class BehaviourCloning:
    """Adds −w·log π(a*|o) to the loss.

    With a `teacher`, a* is its action, and the weight w is 1 or, with `beta`, exp(A/β) of the action taken: imitate
    more where acting went well. Without a teacher, a* is the action taken itself: advantage-weighted regression (Peng
    et al. 2019), which needs `beta`.
    """

    coefficient: float | str = 0.1
    """Weight of the term, a schedule."""
    teacher: Teacher | None = None
    beta: float | None = None
    """Temperature of the weights in units of the advantages that the surrogate uses, which are standard deviations
    unless their normalisation is off; none: every weight is 1."""
    max_weight: float = 20.0
    """Largest weight; the exponent is clamped before it is taken."""
    name: str = "bc"

    def __post_init__(self) -> None:
        Schedule.parse(self.coefficient)
        check_range("bc.max_weight", self.max_weight, low=0, low_open=True)
        if self.beta is not None:
            check_range("bc.beta", self.beta, low=0, low_open=True)
        elif self.teacher is None:
            raise ConfigError("bc: without a teacher only the weights tell good actions from bad ones; give beta too")

    def prepare(self, rollout: Rollout, estimates: Estimates, batch: Batch, progress: float) -> Batch:  # noqa: ARG002
        """Add the weights, and the teacher's actions, to the batch."""
        coefficient = Schedule.parse(self.coefficient)(progress)
        weights = torch.ones_like(batch.advantages)
        if self.beta is not None:
            weights = awr_weights(batch.advantages, self.beta, self.max_weight)
        extra = {"bc/weight": coefficient * weights}
        if self.teacher is not None:
            with torch.no_grad():
                extra["bc/action"] = self.teacher(rollout.obs)
        return replace(batch, extra=batch.extra | extra)

    def loss(self, policy: ActorCritic, output: PolicyOutput, batch: Batch) -> Tensor:
        head = policy.action_head
        taken = batch.actions if self.teacher is None else head.from_env(batch.extra["bc/action"])
        return bc_loss(head.log_prob(output.dist_params, taken), batch.extra["bc/weight"])

"""UPGD: descent that protects useful weights and perturbs the others (Elsayed & Mahmood, ICLR 2024).

`UPGD` gates the gradient, `AdaptiveUPGD` Adam's direction, `UPGDW` the whole AdamW step. There is no other difference:
utilities, gates and perturbations are those of `tailguard.optim.utility`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from tailguard.optim.utility import Bucket, Normalisation, UtilityOptimizer
from tailguard.validate import check_range


class UPGD(UtilityOptimizer):
    """Utility-gated gradient descent: w ← (1 − lr·wd) w − c·lr·gate·(g + σ·noise)."""

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-2,
        *,
        weight_decay: float = 0.001,
        beta_utility: float = 0.999,
        sigma: float = 0.001,
        step_factor: int = 2,
        normalisation: Normalisation = "max",
        seed: int = 0,
    ) -> None:
        """Every setting but `seed` can also be given for a parameter group.

        params: parameters, or groups of them
        lr: learning rate; a number, or a 0-dim tensor that may be changed between steps
        weight_decay: decoupled: a step first shrinks every weight by lr · weight_decay
        beta_utility: decay of the utility's running average; 0.999 averages about 1,000 steps
        sigma: standard deviation of the perturbation, in units of the gradient
        step_factor: c: 2 lets a weight of no utility move as plain descent would (its gate is 0.5), 1 is the formula
            of the paper's experiments
        normalisation: `max` divides by the largest utility; `minmax` spreads the gates between 0.27 and 0.73 whatever
            the signs, and is sensitive to a single outlier
        seed: of the perturbations
        """
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "beta_utility": beta_utility,
            "sigma": sigma,
            "step_factor": step_factor,
            "normalisation": normalisation,
        }
        super().__init__(params, defaults, seed)

    def _direction(self, bucket: Bucket) -> Tensor:
        return bucket.row(bucket.gradients)


class AdaptiveUPGD(UtilityOptimizer):
    """Adam's direction under the gate: w ← (1 − lr·wd) w − c·lr·gate·(m̂ / (√v̂ + eps) + σ·noise)."""

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-5,
        weight_decay: float = 0.001,
        beta_utility: float = 0.999,
        sigma: float = 0.001,
        step_factor: int = 2,
        normalisation: Normalisation = "max",
        seed: int = 0,
    ) -> None:
        """As `UPGD`, and Adam's averages of the gradient and its square.

        betas: decay of the two averages
        eps: added to the root of the second, against division by zero
        sigma: standard deviation of the perturbation, in units of Adam's direction: mostly within ±1
        """
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "beta_utility": beta_utility,
            "sigma": sigma,
            "step_factor": step_factor,
            "normalisation": normalisation,
        }
        super().__init__(params, defaults, seed)

    def _check(self, group: dict[str, Any]) -> None:
        super()._check(group)
        check_range("eps", group["eps"], low=0, low_open=True)
        for name, beta in zip(("betas[0]", "betas[1]"), group["betas"], strict=True):
            check_range(name, beta, low=0, high=1, high_open=True)

    def _averages(self) -> tuple[str, ...]:
        return (*super()._averages(), "exp_avg", "exp_avg_sq")

    def _observe(self, bucket: Bucket) -> None:
        super()._observe(bucket)
        kept, kept_square = bucket.group["betas"]
        torch._foreach_lerp_(bucket.each("exp_avg"), bucket.gradients, 1 - kept)
        torch._foreach_mul_(bucket.each("exp_avg_sq"), kept_square)
        torch._foreach_addcmul_(bucket.each("exp_avg_sq"), bucket.gradients, bucket.gradients, value=1 - kept_square)

    def _direction(self, bucket: Bucket) -> Tensor:
        mean_correction, square_correction = map(bucket.bias_correction, bucket.group["betas"])
        mean = bucket.row(bucket.each("exp_avg")).div_(bucket.spread(mean_correction))
        square = bucket.row(bucket.each("exp_avg_sq")).div_(bucket.spread(square_correction))
        return mean.div_(square.sqrt_().add_(bucket.group["eps"]))


class UPGDW(AdaptiveUPGD):
    """The whole AdamW step under the gate: w ← w − c·lr·gate·(m̂ / (√v̂ + eps) + wd·w + σ·noise).

    The other two decay every weight equally, even the most useful one. But utility is the increase of the loss if a
    weight were set to zero, and decay moves it towards zero; so here the gate applies to the decay as well. With c = 2
    a weight of no utility decays and moves exactly as under AdamW, the most useful one decays 0.54 times as fast, a
    harmful one up to twice as fast. Decay is decoupled as in AdamW: it does not pass through the averages.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        beta_utility: float = 0.999,
        sigma: float = 0.001,
        step_factor: int = 2,
        normalisation: Normalisation = "max",
        seed: int = 0,
    ) -> None:
        """As `AdaptiveUPGD`, with AdamW's defaults for the shared settings."""
        super().__init__(
            params,
            lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            beta_utility=beta_utility,
            sigma=sigma,
            step_factor=step_factor,
            normalisation=normalisation,
            seed=seed,
        )

    def _decay(self, bucket: Bucket, gates: Tensor, updates: Tensor) -> None:
        updates.addcmul_(bucket.row(bucket.parameters), gates, value=bucket.group["weight_decay"])

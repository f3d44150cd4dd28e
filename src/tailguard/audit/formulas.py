"""Checks of formulas: losses, advantages, distributions, the tail, the multiplier and the optimisers, as installed."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor

from tailguard.algorithm.losses import clipped_surrogate, entropy_loss
from tailguard.audit.registry import Measurement, at_most, register_check, within, worst
from tailguard.audit.subject import Subject, Witness
from tailguard.models.critics import QuantileCritic
from tailguard.models.critics.base import LossSettings, ValueClip, midpoints
from tailguard.returns import normalise_advantages
from tailguard.risk.config import RiskConfig
from tailguard.risk.constraint import CVaRConstraint, Dual, dual_step
from tailguard.risk.cvar import cvar_from_quantiles


def f64(*values: float) -> Tensor:
    """Numbers in double precision."""
    return torch.tensor(values, dtype=torch.float64)


def largest_gap(found: Tensor, expected: Tensor) -> float:
    """Largest difference; infinite where a number is not finite."""
    return float((found.double() - expected.double()).abs().nan_to_num(math.inf).max())


# --- the policy's loss -----------------------------------------------------------------------------------------------


@register_check(
    "F1",
    "Are the clipped surrogate and the entropy what the paper says, with the right signs?",
    why="With a wrong sign the agent unlearns; with the maximum in place of the minimum the clip protects nothing; an "
    "entropy that is not summed to one number a sample counts once for every action.",
    remedy="Compare algorithm/losses.py with Schulman et al. 2017, equation 7.",
    fast=True,
)
def surrogate_is_the_papers(subject: Subject) -> Measurement:  # noqa: ARG001
    ratio, advantage = f64(1.0, 1.5, 1.5, 0.5, 0.5, 1.1), f64(2.0, 2.0, -2.0, 2.0, -2.0, -1.0)
    log_ratio = ratio.log().requires_grad_()
    loss = clipped_surrogate(log_ratio, advantage, 0.2).loss
    (gradient,) = torch.autograd.grad(loss.sum(), log_ratio)
    gaps = [
        largest_gap(loss.detach(), f64(-2.0, -2.4, 3.0, -1.0, 1.6, 1.1)),
        largest_gap(gradient, f64(-2.0, 0.0, 3.0, -1.0, 0.0, 1.1)),
        largest_gap(entropy_loss(f64(1.5), f64(0.0)), f64(-1.5)),
    ]
    try:
        entropy_loss(torch.ones(4, 2), torch.ones(4))
        gaps.append(math.inf)
    except ValueError:
        pass
    return at_most("largest gap to six samples worked out by hand, values and gradients", max(gaps), 1e-12)


@register_check(
    "F2",
    "Are advantages normalised once, without turning rounding into signal?",
    why="0.1 in float32 has a standard deviation by rounding alone; divided by it, nothing becomes a full-size signal. "
    "A floor in reward units makes the result depend on the unit of the reward.",
    remedy="Compute moments in float64 and return zeros where they show rounding alone; see returns/normalise.py.",
    fast=True,
)
def advantages_are_normalised(subject: Subject) -> Measurement:
    constant, degenerate = normalise_advantages(torch.full((2048,), 0.1))
    draw = torch.randn(16, 8, generator=torch.Generator().manual_seed(subject.seed)) * 3 + 5
    plain, small = normalise_advantages(draw)[0], normalise_advantages(draw * 1e-5)[0]
    wanted = (draw.double() - draw.double().mean()) / draw.double().std()
    valid = torch.ones_like(draw, dtype=torch.bool)
    valid[0] = False
    poisoned = draw.clone()
    poisoned[0] = math.nan
    masked = normalise_advantages(poisoned, valid)[0]
    gaps = [
        float(constant.abs().max()) + float(not bool(degenerate)),
        largest_gap(plain, wanted),
        largest_gap(small, wanted),
        largest_gap(masked[1:], (draw[1:].double() - draw[1:].double().mean()) / draw[1:].double().std()),
    ]
    # On the learner: the batch it trains on has mean 0 and standard deviation 1 over the whole rollout.
    witness = Witness()
    subject.learner(extensions=(witness,), normalise_advantages="global").iterate()
    rows = witness.batch.advantages[witness.batch.weights > 0].double()
    gaps += [abs(float(rows.mean())), abs(float(rows.std()) - 1)]
    return at_most("largest gap to zeros for a constant, to (A − mean)/sd at any scale, and of the learner's batch",
                   max(gaps), 1e-5)  # fmt: skip


# --- critics ---------------------------------------------------------------------------------------------------------


def fitted_quantiles(targets: Tensor, count: int, kappa: float = 0.0) -> Tensor:
    """What the installed quantile critic's loss learns of these targets, by gradient descent."""
    critic = QuantileCritic(1, count).double()
    settings = LossSettings(ValueClip("off", 0.2, 1.5), huber_kappa=kappa)
    encoded = critic.encode(targets)
    quantiles = torch.zeros(count, dtype=torch.float64, requires_grad=True)
    for step in range(300):
        (gradient,) = torch.autograd.grad(critic.loss(quantiles, encoded, settings).sum(), quantiles)
        with torch.no_grad():
            quantiles -= count * 8 / (1 + step / 16) * gradient
    return quantiles.detach()


@register_check(
    "F5",
    "Does the quantile loss learn the quantiles, tails included?",
    why="With the asymmetry turned round the critic learns the upper tail as the lower one. A Huber threshold of the "
    "order of the spread shrinks the tail by a fifth and nothing else looks wrong.",
    remedy="Midpoint levels, weight τ above and 1 − τ below, huber_kappa 0; see models/critics/quantile.py.",
    fast=True,
)
def quantile_loss_learns_tails(subject: Subject) -> Measurement:
    levels = midpoints(2001, dtype=torch.float64)
    # A lower tail that is heavier than the upper one, so that an exchange shows too.
    normal = torch.special.ndtri(levels)
    skewed = torch.where(normal < 0, 2 * normal, normal)
    kappa = subject.config.chosen.huber_kappa if subject.run is not None else 0.0
    found = []
    for name, targets, scale in (("a Normal", normal, 1.0), ("a Normal with a doubled lower half", skewed, 2.0)):
        quantiles = fitted_quantiles(targets, 21, kappa)
        exact = scale * float(torch.special.ndtri(f64(0.5 / 21))[0])
        gap = abs(float(quantiles[0]) - exact) / scale
        found.append(at_most(f"|lowest of 21 fitted quantiles − its true value| of {name}", gap, 0.02,
                             f"{float(quantiles[0]):.3f} against {exact:.3f}"))  # fmt: skip
    return worst(found)


# --- the tail --------------------------------------------------------------------------------------------------------


@register_check(
    "F8",
    "Is CVaR computed from quantiles without a bias, at these quantiles and this level?",
    why="The mean of the lowest quantiles understates the tail: by 4 % for a Normal and 15 % for Student's t with "
    "three degrees of freedom, at 32 quantiles and 5 %.",
    remedy="Use tailguard.risk.cvar.cvar_from_quantiles, and more quantiles for a smaller level.",
    fast=True,
)
def cvar_is_unbiased(subject: Subject) -> Measurement:
    count, alpha = subject.config.chosen.network.quantiles, subject.config.risk.alpha
    found = []
    for n, level in ((count, alpha), (21, 0.05), (32, 0.01), (51, 0.25)):
        quantiles = torch.special.ndtri(midpoints(n, dtype=torch.float64))
        z = torch.special.ndtri(f64(level))
        exact = -float(torch.exp(-0.5 * z.square())[0]) / math.sqrt(2 * math.pi) / level
        gap = abs(float(cvar_from_quantiles(2 * quantiles + 1, level)) - (2 * exact + 1))
        found.append(at_most(f"|CVaR − closed form| of a Normal from {n} quantiles at {level:g}", gap, 1e-6))
    quantiles = torch.special.ndtri(midpoints(count, dtype=torch.float64))
    course = [float(cvar_from_quantiles(quantiles, level)) for level in (0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0)]
    falls = max((low - high for low, high in pairwise(course)), default=0.0)
    found.append(at_most("largest fall of CVaR while its level grows", falls, 0.0))
    found.append(at_most("|CVaR at level 1 − mean|", abs(course[-1]), 1e-6))
    return worst(found)


@register_check(
    "F9",
    "Does the multiplier rise while the budget is broken, stop at its cap and fall back?",
    why="A multiplier in the wrong unit never acts; one that winds up beyond its cap keeps punishing for hundreds of "
    "updates after the budget is kept again.",
    remedy="See dual_step in risk/constraint.py: relative violation, conditional integration, clamp at 0 and the cap.",
    fast=True,
)
def multiplier_follows_the_budget(subject: Subject) -> Measurement:  # noqa: ARG001
    limit = 0.04
    config = RiskConfig(limit=-limit, alpha=0.5, window=40, margin=0.0, lambda_max=2.0)
    constraint = CVaRConstraint(config)
    counted = torch.ones(40, dtype=torch.bool)
    found = []
    # The window's losses: half of them nothing, half the loss itself, which is then the tail at 50 %.
    course = []
    for loss in [3 * limit] * 400 + [0.25 * limit] * 200:
        constraint.observe(torch.tensor([0.0, loss]).repeat(20), counted)
        course.append(float(constraint.multiplier))
    shortfall = float(constraint.shortfall)
    found.append(at_most("|measured tail − the realised loss of 1 %|", abs(shortfall - 0.25 * limit), 1e-8))
    found.append(within("multiplier after 400 updates with three times the allowed tail", course[399], 2.0, 2.0))
    found.append(at_most("multiplier 200 updates after the budget is kept again", course[-1], 0.0))
    # One step by hand: e = 0.5, λ = Kp·e + Ki·e.
    zero = torch.zeros((), dtype=torch.float64)
    moved = dual_step(Dual(zero, zero, torch.full_like(zero, 0.5)), torch.full_like(zero, 0.5), RiskConfig(limit=-0.04))
    found.append(at_most("|λ after one step − (Kp + Ki)/2|", abs(float(moved.multiplier) - 0.26), 1e-12))
    # In the user's units: the same relative violation moves λ alike whatever the limit is.
    other = CVaRConstraint(RiskConfig(limit=-0.4, alpha=0.5, window=40, margin=0.0, lambda_max=2.0))
    for _ in range(3):
        other.observe(torch.tensor([0.0, 3 * 0.4]).repeat(20), counted)
    found.append(at_most("|λ at a limit of 40 % − λ at 4 %| under the same relative violation",
                         abs(float(other.multiplier) - course[2]), 1e-9))  # fmt: skip
    # Between the limit and its margin λ rises already, and inside the margin it does not.
    for tail, wanted in ((0.92 * limit, True), (0.88 * limit, False)):
        inner = CVaRConstraint(RiskConfig(limit=-limit, alpha=0.5, window=40, margin=0.1, lambda_max=2.0))
        inner.observe(torch.tensor([0.0, tail]).repeat(20), counted)
        risen = float(inner.multiplier) > 0
        found.append(at_most(f"λ at a tail of {tail / limit:.0%} of the limit, margin 10 %, is on the wrong side",
                             float(risen != wanted), 0.0))  # fmt: skip
    # At rest: a normal bet's best weight under the limit, and the multiplier that goes with it.
    weight, multiplier = bet_at_rest()
    found.append(at_most(f"relative gap of the multiplier of a bet at rest to {BET_MULTIPLIER:g}",
                         abs(multiplier / BET_MULTIPLIER - 1), 0.02))  # fmt: skip
    found.append(at_most(f"relative gap of its weight to {BET_WEIGHT:g}", abs(weight / BET_WEIGHT - 1), 0.02))
    return worst(found)


BET_MEAN, BET_SPREAD, BET_LIMIT = 0.05, 0.2, 0.25
BET_WEIGHT, BET_MULTIPLIER = 0.68957, 0.13791
"""d / (σ·k − μ) and S / (k − S), with k = φ(z)/α = 2.06271 and S = μ/σ."""


def bet_at_rest(updates: int = 600, size: int = 2_000) -> tuple[float, float]:
    """Weight and multiplier that gradient steps and the real controller settle at, for outcomes w·(μ + σ·z)."""
    config = RiskConfig(limit=-BET_LIMIT, alpha=0.05, window=size, margin=0.0, kp=0.5, ki=0.02)
    constraint, counted = CVaRConstraint(config), torch.ones(size, dtype=torch.bool)
    # The whole distribution at its midpoints, so that no chance is in the answer.
    noise = torch.special.ndtri((torch.arange(size, dtype=torch.float64) + 0.5) / size)
    weight = torch.zeros((), dtype=torch.float64, requires_grad=True)
    course = []
    for _ in range(updates):
        outcome = weight * (BET_MEAN + BET_SPREAD * noise)
        constraint.observe(-outcome.detach(), counted)
        objective = constraint.combine(outcome.mean(), constraint.excess(-outcome).double().mean())
        (slope,) = torch.autograd.grad(objective, weight)
        weight.data += 0.5 * slope
        course.append((weight.item(), float(constraint.multiplier)))
    settled = torch.tensor(course[-updates // 3 :])
    return float(settled[:, 0].mean()), float(settled[:, 1].mean())

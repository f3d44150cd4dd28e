"""Checks of what critics learn: distributions of the return, projections on atoms, and a new scale of the return."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from tailguard.algorithm.estimate import evaluate_critics
from tailguard.audit.formulas import f64, largest_gap
from tailguard.audit.registry import Measurement, at_most, register_check, within, worst
from tailguard.audit.subject import Subject, Witness
from tailguard.models.critics import CategoricalCritic
from tailguard.models.critics.base import LossSettings, ValueClip
from tailguard.models.critics.categorical import HL_GAUSS_WIDTH, clip_categorical, hl_gauss, two_hot
from tailguard.returns import RunningMoments, bootstrap_samples, draw_continuations, sr_lambda_targets
from tailguard.risk.cvar import cvar_from_quantiles

# --- the distribution that is learned --------------------------------------------------------------------------------

HORIZON, DRIFT, ALPHA, QUANTILES = 20, 0.02, 0.05, 32


def chain_cvar(steps: int) -> float:
    """Of the return of a chain of this many steps with rewards N(0.02, 1): −8.82 of 20."""
    return steps * DRIFT - 2.062713 * math.sqrt(steps)


def quantiles_of(samples: Tensor, count: int) -> Tensor:
    """What minimises the pinball loss at the midpoint levels, of samples [T, S]."""
    ordered = samples.sort(-1).values
    ranks = ((torch.arange(count) + 0.5) * (samples.shape[-1] / count)).long()
    return (ordered[:, ranks - 1] + ordered[:, ranks]) / 2


def chain_quantiles(lam: float, seed: int, sweeps: int = 3, steps: int = HORIZON, rollout: int | None = None) -> Tensor:
    """Quantiles of the return at the start of the chain, fitted to the targets that the installed code makes, [Q].

    Each episode carries one sample of the quantile with its number: samples that share their rewards would say little
    more about the tail than one does. `rollout`: steps after which all samples bootstrap, as where a rollout ends;
    samples that bootstrap by λ then take the quantiles as they are, as in a learner.
    """
    draw = torch.Generator().manual_seed(seed)
    table = torch.zeros(steps + 1, QUANTILES)
    fits: list[Tensor] = []
    for sweep in range(steps + sweeps):
        envs = QUANTILES * (64 if sweep < steps else 1024)
        rewards = DRIFT + torch.randn(steps, envs, generator=draw)
        terminated = torch.zeros(steps, envs, dtype=torch.bool)
        terminated[-1] = True
        cut = torch.zeros_like(terminated)
        spread = bootstrap_samples(table[1:])
        if rollout is not None:
            cut[rollout - 1 : -1 : rollout] = True
            spread = torch.where(cut[:, :1], spread, table[1:])
        successors = spread[:, torch.arange(envs) % QUANTILES].unsqueeze(-1)
        coins = draw_continuations(successors.shape, lam, draw)
        targets = sr_lambda_targets(rewards, successors, terminated, cut, 1.0, coins)
        fits = [*(fits if sweep > steps else []), quantiles_of(targets.squeeze(-1), QUANTILES)]
        table[:-1] = torch.stack(fits).mean(0)
    return table[0]


@register_check(
    "F6",
    "Is the distribution that critics learn that of the return, and not that of the λ-return?",
    why="λ-returns replace what is far away by its mean. A quantile critic fitted to them reports a tail that is a "
    "third too mild at λ = 0.95, and its mean is right all the same.",
    remedy="Set distribution_target to sr_lambda; see returns/distributional.py.",
    fast=True,
)
def distribution_is_that_of_the_return(subject: Subject) -> Measurement:
    lam = max(0.95, subject.config.chosen.distribution_lambda)
    found = []
    for level in sorted({0.95, lam}):
        learned = float(cvar_from_quantiles(chain_quantiles(level, subject.seed), ALPHA))
        gap = abs(learned / chain_cvar(HORIZON) - 1)
        found.append(at_most(f"relative gap of CVaR₀.₀₅ of a chain of 20 steps to its closed form, λ {level:g}", gap,
                             0.06, f"{learned:.2f} against {chain_cvar(HORIZON):.2f}"))  # fmt: skip
    # On the learner: samples whose spread is that of whole returns. Without noise in the critics (they start at their
    # mean) λ-returns of the same rollout spread less, and all samples of a row would be one number.
    witness = Witness()
    learner = subject.learner(extensions=(witness,), critic="quantile", distribution_target="sr_lambda",
                              distribution_lambda=0.5, gamma=0.9)  # fmt: skip
    for _ in range(2):
        learner.iterate()
    targets = witness.estimates.distribution_targets
    spread = 0.0 if targets is None else float(targets.std(-1).mean())
    found.append(within("mean spread of the samples in a row of the learner's targets", spread, 1e-3, math.inf))
    return worst(found)


# --- atoms -----------------------------------------------------------------------------------------------------------


@register_check(
    "F7",
    "Do projections on atoms keep mass and mean, and does value clipping leave their targets alone?",
    why="A projection that loses the mass of samples on an atom trains towards smaller probabilities; targets that are "
    "shifted with the clip let the critic teach itself.",
    remedy="See two_hot, hl_gauss and clip_categorical in models/critics/categorical.py.",
    fast=True,
)
def projections_keep_mass_and_mean(subject: Subject) -> Measurement:
    atoms = torch.linspace(-10, 10, 51, dtype=torch.float64)
    draw = torch.Generator().manual_seed(subject.seed)
    # On atoms, between them, and away from the ends.
    samples = torch.cat((atoms[5:-5], 16 * torch.rand(400, generator=draw, dtype=torch.float64) - 8)).unsqueeze(-1)
    found = []
    # A Gaussian that is summed over bins misses its mean by the first term of Poisson's summation formula.
    aliasing = float(atoms[1] - atoms[0]) / math.pi * math.exp(-2 * (math.pi * HL_GAUSS_WIDTH) ** 2)
    for name, project, bound in (("two_hot", two_hot, 1e-12), ("hl_gauss", hl_gauss, 1.01 * aliasing)):
        mass = project(samples, atoms)
        found.append(at_most(f"|mass − 1| of {name}", largest_gap(mass.sum(-1), f64(1.0)), 1e-12))
        found.append(at_most(f"|mean − sample| of {name}", largest_gap(mass @ atoms, samples.squeeze(-1)), bound))
    outside = two_hot(f64(-30.0, 30.0), atoms)
    found.append(at_most("|mass − ½| at each end, of two samples beyond the support",
                         largest_gap(outside[[0, -1]], f64(0.5, 0.5)), 1e-12))  # fmt: skip
    spread = hl_gauss(f64(3.3), atoms)
    sd = float(((spread * (atoms - 3.3).square()).sum()).sqrt())
    found.append(at_most("|standard deviation of hl_gauss at 3.3 − 0.3215|", abs(sd - 0.3215), 1e-4))
    # N(3, 1) whose mean was 1: the clip at 0.2 gives the mean 1.2 and keeps the mass.
    normal = (-(atoms - 3).square() / 2).softmax(-1)
    before = (-(atoms - 1).square() / 2).softmax(-1)
    clip = ValueClip("mean_only", 0.2, 1.5)
    clipped = clip_categorical(normal, before, atoms, clip)
    found.append(at_most("gap of the clipped distribution's mean and mass to 1.2 and 1",
                         max(abs(float(clipped @ atoms) - 1.2), abs(float(clipped.sum()) - 1)), 1e-6))  # fmt: skip
    # The loss with the clip reads the target as it is: at 3, and not moved towards what is allowed.
    critic = CategoricalCritic(1, 51, projection="two_hot").double()
    target = critic.encode(f64(3.0).unsqueeze(0))
    loss = critic.clipped_loss(normal.log().unsqueeze(0), target, before.log().unsqueeze(0), LossSettings(clip))
    by_hand = -(target * clipped.clamp(min=1e-6).log()).sum(-1)
    found.append(at_most("gap of the clipped loss to cross-entropy with the target as it is",
                         largest_gap(loss.clipped_loss, by_hand.detach()), 1e-6))  # fmt: skip
    return worst(found)


# --- a new scale -----------------------------------------------------------------------------------------------------

EVERY_CRITIC = ("scalar", "quantile", "categorical")


def raw_predictions(subject: Subject, critic: str) -> tuple[Tensor, Tensor]:
    """Values and quantiles of every critic in raw units, before and after the return's scale changes, in float64."""
    witness = Witness()
    learner = subject.learner(extensions=(witness,), critic=critic, twin_critics=True, return_decay=0.5)
    for _ in range(2):
        learner.iterate()
    learner.policy.double()
    rollout = witness.rollout
    final = rollout.scale(rollout.final_obs).double()
    memory = tuple(tuple(part.double() for part in trunk) for trunk in rollout.start_state)
    rollout = replace(rollout, scaled_obs=rollout.scaled_obs.double(), start_state=memory)

    def predictions(moments: RunningMoments) -> Tensor:
        views, _ = evaluate_critics(learner.policy, rollout, moments, learner.config.estimates, final)
        parts = [view.value.flatten() for view in views]
        parts += [view.quantiles.flatten() for view in views if view.quantiles is not None]
        return torch.cat(parts)

    before = predictions(learner.return_moments)
    # Returns that are ten times as large and shifted, as after a change of regime.
    estimates = witness.estimates
    estimates.value_targets.mul_(10).add_(7)
    learner.targets.rescale(rollout, estimates)
    return before, predictions(learner.return_moments)


@register_check(
    "F13",
    "Does a new scale of the return leave every critic's raw predictions where they were?",
    why="Otherwise each change of the scale moves all values at once: advantages jump although nothing was learned, "
    "and the critics spend the next updates on repairing it.",
    remedy="See move_return_scale in algorithm/scale.py and Critic.rescale (PopArt, van Hasselt et al. 2016).",
    fast=True,
)
def scale_leaves_predictions(subject: Subject) -> Measurement:
    found = []
    for critic in EVERY_CRITIC:
        before, after = raw_predictions(subject, critic)
        gap = largest_gap(after, before) / max(1.0, float(before.abs().max()))
        found.append(at_most(f"largest change of raw predictions by a scale ten times as large, {critic} critics",
                             gap, 1e-6))  # fmt: skip
    return worst(found)

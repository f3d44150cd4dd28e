"""Checks of the losses: microbatches, value clipping, divergences, the entropy's weight, and cloning by advantage."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tailguard.algorithm.bc import BehaviourCloning
from tailguard.algorithm.losses import awr_weights, kl_k1, kl_k3
from tailguard.algorithm.nonfinite import NonFiniteError
from tailguard.algorithm.ppo import DistributionalPPO
from tailguard.algorithm.schedules import AdaptiveKL, EntropySchedule, EntropyState, Schedule
from tailguard.algorithm.update import Batch
from tailguard.audit.formulas import f64, largest_gap
from tailguard.audit.registry import Measurement, at_least, at_most, none_of, register_check, within, worst
from tailguard.audit.subject import ScriptedEnv, Subject, Witness
from tailguard.envs.protocol import Box
from tailguard.models.actions import GaussianHead
from tailguard.models.critics import ScalarCritic
from tailguard.models.critics.base import LossSettings, ValueClip, midpoints


def widen(learner: DistributionalPPO, batch: Batch) -> Batch:
    """Network and batch in double precision, so that rounding hides nothing."""
    learner.policy.double()

    def wide(rows: Tensor) -> Tensor:
        return rows.double() if rows.is_floating_point() else rows

    return batch._map(wide, tuple(tuple(part.double() for part in trunk) for trunk in batch.state))


@register_check(
    "F3",
    "Is the gradient of a minibatch the same, in however many microbatches it is processed?",
    why="Means of unequal parts that are averaged again weigh samples by the part they happen to be in: the gradient "
    "is off by a tenth, and depends on how much memory the machine has.",
    remedy="Divide every microbatch's sum by the weight of the whole minibatch; "
    "see masked_mean and Updates.accumulate.",
    fast=True,
)
def microbatches_add_up(subject: Subject) -> Measurement:
    witness = Witness()
    learner = subject.learner(ScriptedEnv(dead_rows=True, seed=subject.seed), extensions=(witness,), entropy_coef=0.01)
    learner.iterate()
    learner.iterate()
    batch = witness.batch if learner.policy.is_recurrent else witness.batch.rows_as_sequences()
    batch = widen(learner, batch)
    draw = torch.Generator().manual_seed(subject.seed)
    # A number of sequences that no part divides: the parts are of unequal weight.
    sequences = batch.log_probs.shape[1]
    index = torch.randperm(sequences, generator=draw)[: 5 if learner.policy.is_recurrent else 41]
    gradients = []
    for parts in (1, 2, 3):
        learner.updates.config = replace(learner.config, microbatches=parts)
        learner.updates.accumulate(batch, index, True)
        parameters = list(learner.policy.parameters())
        gradients.append(torch.cat([one.grad.flatten() for one in parameters if one.grad is not None]))
    whole = gradients[0]
    gap = max(largest_gap(whole, parts) for parts in gradients[1:]) / float(whole.abs().max())
    return at_most("largest gap of the gradient in 2 and 3 unequal parts, relative to its largest entry", gap, 1e-12)


# --- value clipping --------------------------------------------------------------------------------------------------


@register_check(
    "F4",
    "Does value clipping bound predictions, each critic around its own old one, and take the larger loss per sample?",
    why="Around the smaller of two critics' old values the other critic's gradient vanishes; with targets clipped in "
    "the place of predictions the critic learns wrong values; the mean taken before the maximum clips nothing.",
    remedy="See Critic.clipped_loss and larger_loss in models/critics/base.py, and old_values in algorithm/update.py.",
    fast=True,
)
def value_clip_bounds_predictions(subject: Subject) -> Measurement:
    critic = ScalarCritic(1)
    far, near, limit = math.sqrt(20.0), math.sqrt(10.0), 0.2
    settings = LossSettings(ValueClip("mean_only", limit, 1.5))
    # Targets 0; half the squared error is 10 and 5 without the clip, and 5 and 10 with it.
    value, old = f64(far, near), f64(near - limit, far + limit)
    zero = torch.zeros(2, 1, dtype=torch.float64)
    loss = critic.clipped_loss(value.unsqueeze(-1), zero, old.unsqueeze(-1), settings)
    found = [
        at_most("|mean loss of (10, 5) and (5, 10) − 10|", abs(float(loss.loss.mean()) - 10), 1e-12),
        at_most("gap to the losses with and without the clip worked out by hand", max(
            largest_gap(loss.unclipped_loss, f64(10.0, 5.0)), largest_gap(loss.clipped_loss, f64(5.0, 10.0)),
        ), 1e-12),
    ]  # fmt: skip
    # The case of twins: this critic says 1 and said 1, its twin said 0, the target is 1.5.
    one = torch.ones(1, 1, dtype=torch.float64, requires_grad=True)
    here = critic.clipped_loss(one, torch.full_like(one, 1.5), torch.ones_like(one), settings)
    (slope,) = torch.autograd.grad(here.loss.sum(), one)
    found.append(at_most("|slope of a critic at its own old value − (1 − 1.5)|", abs(float(slope) + 0.5), 1e-12))
    # On the learner, before any step: every critic stands at its own old output, so nothing is clipped.
    witness = Witness()
    options: dict[str, Any] = {"twin_critics": True, "value_clip": "mean_only", "value_clip_limit": 1e-3}
    learner = subject.learner(extensions=(witness,), **options)
    for _ in range(2):
        learner.iterate()
    output, batch = witness.first[-1]
    for number, (said, before) in enumerate(zip(output.critics, batch.old_values, strict=True)):
        found.append(at_most(f"gap of critic {number + 1} to its own old value before the first step",
                             largest_gap(said.value.detach(), before), 1e-5))  # fmt: skip
    plain, clipped = (
        _value_targets(subject, mode, {"twin_critics": True, "value_clip_limit": 1e-3}) for mode in ("off", "mean_only")
    )
    found.append(at_most("change of the value targets by clipping", largest_gap(plain, clipped), 0.0))
    return worst(found)


def _value_targets(subject: Subject, mode: str, options: dict[str, Any]) -> Tensor:
    witness = Witness()
    subject.learner(extensions=(witness,), value_clip=mode, **options).iterate()
    return witness.batch.value_targets


# --- divergence ------------------------------------------------------------------------------------------------------


class _SpoiltOldProbability:
    """A term without a loss that makes one old log-probability NaN."""

    name = "spoilt"

    def prepare(self, rollout: Any, estimates: Any, batch: Batch, progress: float) -> Batch:  # noqa: ARG002
        row, column = (batch.weights > 0).nonzero()[0].tolist()
        spoilt = batch.log_probs.clone()
        spoilt[row, column] = math.nan
        return replace(batch, log_probs=spoilt)

    def loss(self, policy: Any, output: Any, batch: Batch) -> Tensor:  # noqa: ARG002
        return torch.zeros_like(batch.weights)


@register_check(
    "F10",
    "Is the divergence KL(old‖new), its estimators unbiased, and a log-ratio that is not finite stopped?",
    why="The other direction differs by half at a KL of 0.2. A NaN in an old log-probability leaves every gradient "
    "finite, because the clamp's slope is 0 there: a check of gradients alone lets it pass.",
    remedy="See kl_k1, kl_k3 and guard_log_ratio in algorithm/losses.py, and FiniteGuard in algorithm/nonfinite.py.",
    fast=True,
)
def divergence_and_nonfinite_ratios(subject: Subject) -> Measurement:
    low = torch.tensor([-1.0])
    head = GaussianHead(3, Box(low, -low)).double()
    (m1, s1), (m2, s2) = (0.2, 0.7), (0.6, 0.6)
    old, new = f64(m1, math.log(s1)), f64(m2, math.log(s2))
    exact = math.log(s2 / s1) + (s1**2 + (m1 - m2) ** 2) / (2 * s2**2) - 0.5
    found = [
        at_most("|KL of the action head − closed form of KL(old‖new)|", abs(float(head.kl(old, new)) - exact), 1e-9)
    ]
    # Actions of the old policy at evenly spaced levels: expectations without the noise of a sample.
    raw = (m1 + s1 * torch.special.ndtri(midpoints(100_000, dtype=torch.float64))).unsqueeze(-1)
    log_ratio = head.log_prob(new.expand(len(raw), 2), raw) - head.log_prob(old.expand(len(raw), 2), raw)
    for name, estimator in (("k1", kl_k1), ("k3", kl_k3)):
        mean = float(estimator(log_ratio).mean())
        found.append(at_most(f"relative gap of the mean of {name} under the old policy to KL(old‖new)",
                             abs(mean / exact - 1), 1e-3))  # fmt: skip
    found.append(at_least("lowest k3 of a sample", float(kl_k3(log_ratio).min()), 0.0))
    found.append(none_of("ways in which a NaN of an old log-probability passes", _passing_nan(subject)))
    return worst(found)


def _passing_nan(subject: Subject) -> list[str]:
    wrong = []
    stopping = subject.learner(extensions=(_SpoiltOldProbability(),), on_nonfinite="stop")
    try:
        stopping.iterate()
        wrong.append("training goes on where it should stop")
    except NonFiniteError as error:
        if "log-ratio" not in str(error):
            wrong.append(f"the message does not name the log-ratio: {error}")
    skipping = subject.learner(
        extensions=(_SpoiltOldProbability(),), on_nonfinite="skip", minibatch_size=10_000, epochs=1
    )
    before = [weight.detach().clone() for weight in skipping.policy.trunks.parameters()]
    skipping.iterate()
    after = list(skipping.policy.trunks.parameters())
    if not all(torch.equal(one, other) for one, other in zip(before, after, strict=True)):
        wrong.append("the weights moved although the minibatch must be skipped")
    if skipping.state.skipped != 1:
        wrong.append(f"{skipping.state.skipped} minibatches counted as skipped, not 1")
    try:
        AdaptiveKL().update(1.0, math.nan)
        wrong.append("the adaptive penalty takes a KL that is NaN")
    except ValueError:
        pass
    return wrong


# --- entropy ---------------------------------------------------------------------------------------------------------


@register_check(
    "F11",
    "Do decay, plateau and floor of the entropy's weight work together?",
    why="A plateau detector that resets the decay, or a boost that compounds, keeps the policy noisy for ever; without "
    "the floor it stops exploring for good.",
    remedy="See EntropySchedule in algorithm/schedules.py: decay by progress, a boost that fades, the floor last.",
    fast=True,
)
def entropy_weight_follows_its_script(subject: Subject) -> Measurement:
    window, steps = 4, 20
    schedule = EntropySchedule(Schedule.parse("linear:0.1:0"), floor=0.03, window=window, boost=2.0)
    # A rising series, then a flat one, then a rising one. Of 6, 7, 7, 7 the slope is 0.30 and twice its standard error
    # 0.35: the third 7 makes the plateau. The extra is then 1 and fades by a quarter an update.
    series = [float(number) for number in range(8)] + [7.0] * 4 + [8.0 + number for number in range(8)]
    state, course = EntropyState(), []
    for step, value in enumerate(series):
        state = schedule.update(state, value)
        course.append(schedule.coefficient(state, step / steps))
    found_at = series.index(7.0) + 2
    extra = [max(0.0, 1 - (step - found_at) / window) if step >= found_at else 0.0 for step in range(steps)]
    wanted = [max(0.1 * (1 - step / steps) * (1 + extra[step]), 0.03) for step in range(steps)]
    found = [
        within("plateaus found in a rising, a flat and a rising series", state.plateaus, 1, 1),
        at_most("largest gap of the weight to decay × fading boost, not below the floor",
                max(abs(one - other) for one, other in zip(course, wanted, strict=True)), 1e-12),
    ]  # fmt: skip
    # A value that is not finite is no observation: no plateau can come of it.
    for _ in range(2 * window):
        state = schedule.update(state, math.nan)
    found.append(within("plateaus after values that are not finite", state.plateaus, 1, 1))
    learner = subject.learner(entropy_coef="linear:0.1:0", entropy_floor=0.03)
    learner.state.progress = 1.0
    in_force = float(learner.set_hyper().entropy_coef)
    found.append(at_most("|weight in force at the end of the decay − floor|", abs(in_force - 0.03), 1e-8))
    return worst(found)


# --- cloning by advantage --------------------------------------------------------------------------------------------


@register_check(
    "F12",
    "Is the exponent of an advantage's weight clamped before it is taken, and the weight without a gradient?",
    why="exp() overflows first: the weight itself looks right after a clamp, and its gradient is NaN. A weight with a "
    "gradient lets the policy raise its own advantages.",
    remedy="See awr_weights in algorithm/losses.py.",
    fast=True,
)
def cloning_weights_are_capped(subject: Subject) -> Measurement:
    advantages = torch.tensor([0.0, math.log(20.0), 1e6, -1e6], requires_grad=True)
    weights = awr_weights(advantages, 1.0)
    found = [
        at_most("gap of the weights of A/β = 0, log 20, 10⁶ and −10⁶ to 1, 20, 20 and 0",
                largest_gap(weights.detach(), f64(1.0, 20.0, 20.0, 0.0)), 1e-4),
        at_most("weights with a gradient", float(weights.requires_grad), 0.0),
    ]  # fmt: skip
    witness = Witness()
    cloning = BehaviourCloning(coefficient=0.5, beta=1e-6)
    learner = subject.learner(extensions=(cloning, witness), on_nonfinite="skip")
    metrics = learner.iterate()
    gap = abs(float(witness.batch.extra["bc/weight"].max()) - 10)
    found.append(at_most("|largest weight in training at β = 10⁻⁶ − coefficient × 20|", gap, 1e-4))
    finite = all(bool(weight.isfinite().all()) for weight in learner.policy.parameters())
    finite &= math.isfinite(metrics.get("train/bc_loss", math.nan))
    found.append(at_most("losses or weights that are not finite after it", float(not finite), 0.0))
    return worst(found)

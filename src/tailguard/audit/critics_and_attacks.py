"""Checks of connections: twin critics with the alarms on them, and the regulariser against attacks."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tailguard.algorithm.ppo import DistributionalPPO
from tailguard.algorithm.update import Batch
from tailguard.audit.registry import Measurement, at_least, at_most, none_of, register_check, worst
from tailguard.audit.subject import ScriptedEnv, Subject, Witness
from tailguard.robust import RobustConfig

PATIENCE = 6
"""Iterations after which an alarm on a critic must have been raised: its rule waits for five."""
ALARMS: dict[float, set[str]] = {
    1.0: set(),
    1e-3: {"critic_imbalanced"},
    0.0: {"critic_vanished", "critic_imbalanced"},
}
"""Alarms that must be raised, by the factor on the second critic's gradient."""


def critic_parameters(learner: DistributionalPPO, number: int) -> list[Tensor]:
    """The parameters of a critic, counted from 0, and of its trunk where no one else reads it."""
    policy, trunk = learner.policy, learner.policy.critic_trunks[number]
    own = trunk != 0 and policy.critic_trunks.count(trunk) == 1
    return [*policy.each_critic()[number].parameters(), *(policy.each_trunk()[trunk].parameters() if own else ())]


def twins(subject: Subject, trunk: str) -> DistributionalPPO:
    """A learner with two critics."""
    # Two trunks of the critics' own need one for the actor, too.
    chosen: dict[str, Any] = {"memory": "separate"} if subject.parts.get("memory") == "shared" else {}
    return subject.learner(twin_critics=True, twin_trunk=trunk, epochs=1, minibatch_size=72, **chosen)


def _norm_gaps(subject: Subject, trunk: str) -> list[Measurement]:
    """Reported norms of both critics, against the root of the summed squares of the gradients that reach them."""
    learner = twins(subject, trunk)  # one minibatch, whose gradient arrives in one piece
    arrived: dict[int, Tensor] = {}

    def keep(parameter: Tensor) -> None:
        parameter.register_hook(lambda gradient: arrived.update({id(parameter): gradient.norm().double()}))  # type: ignore[no-untyped-call]

    for parameter in learner.policy.parameters():
        keep(parameter)
    metrics = learner.iterate()
    found = []
    for number in (0, 1):
        mine = critic_parameters(learner, number)
        wanted = math.hypot(*(float(arrived.get(id(one), torch.zeros(()))) for one in mine))
        gap = abs(metrics[f"critic/grad_norm_{number + 1}"] / wanted - 1) if wanted > 0 else math.nan
        found.append(at_most(f"relative gap of the reported gradient norm of critic {number + 1}, {trunk} trunk", gap,
                             1e-4, f"it should be {wanted:.4g}"))  # fmt: skip
    return found


def _alarms(subject: Subject, factor: float) -> set[str]:
    """Alarms on the critics in a training in which the second one's gradient is multiplied by a factor."""
    learner = twins(subject, "own")
    for parameter in critic_parameters(learner, 1) if factor != 1 else ():
        parameter.register_hook(lambda gradient: gradient * factor)  # type: ignore[no-untyped-call]
    for _ in range(PATIENCE):
        learner.iterate()
    return {alarm.name for alarm in learner.alarms} & {"critic_vanished", "critic_imbalanced"}


def _unmoved(subject: Subject, trunk: str) -> list[str]:
    """Last layers of both critics that four iterations leave where they were, or move alike."""
    learner = twins(subject, trunk)
    layers = [[layer.weight for layer in critic.layers] for critic in learner.policy.each_critic()]
    before = [[weight.detach().clone() for weight in each] for each in layers]
    for _ in range(4):
        learner.iterate()
    moves = [
        [(now - then).detach() for now, then in zip(*each, strict=True)] for each in zip(layers, before, strict=True)
    ]
    wrong = [
        f"critic {number + 1}, layer {place}, {trunk} trunk: does not move"
        for number, each in enumerate(moves)
        for place, move in enumerate(each)
        if float(move.norm()) < 1e-6
    ]
    alike = [place for place, (one, two) in enumerate(zip(*moves, strict=True)) if torch.equal(one, two)]
    return wrong + [f"layer {place}, {trunk} trunk: both critics move alike" for place in alike]


@register_check(
    "C4",
    "Do both twin critics learn, does an alarm say so when one stops, and is their value the smaller one?",
    why="With one critic that has stopped, the smaller of two values is that of a network that knows nothing, and all "
    "advantages follow it.",
    remedy="Look at critic/grad_norm_1 and _2. The rules are critic_vanished and critic_imbalanced in "
    "monitor/health.py; the loss of both critics is averaged in algorithm/update.py, and their values are combined in "
    "models/critics/twins.py.",
    fast=True,
)
def twin_critics_learn(subject: Subject) -> Measurement:
    wrong = [line for trunk in ("own", "shared") for line in _unmoved(subject, trunk)]
    for factor, wanted in ALARMS.items():
        raised = _alarms(subject, factor)
        if raised != wanted:
            wrong.append(f"a critic's gradient times {factor:g}: alarms {sorted(raised)}, should be {sorted(wanted)}")
    gaps = [gap for trunk in ("own", "shared") for gap in _norm_gaps(subject, trunk)]
    return worst([none_of("layers that do not learn and alarms that are missing or false", wrong), *gaps,
                  *_combined_values(subject)])  # fmt: skip


def _combined_values(subject: Subject) -> list[Measurement]:
    """The values that the advantages are made of, beside both critics' own."""
    found = []
    for mode in ("min", "mean"):
        witness = Witness()
        subject.learner(twin_critics=True, twin_mode=mode, extensions=(witness,)).iterate()
        estimates = witness.estimates
        first, second = (view.baseline.double() for view in estimates.views)
        wanted = first.minimum(second) if mode == "min" else (first + second) / 2
        gap = float((estimates.values.double() - wanted).abs().max())
        found.append(at_most(f"gap of the twins' value to the {mode} of both", gap, 1e-6))
        found.append(at_least("mean distance of the two", float((first - second).abs().mean()), 1e-6))
    return found


# --- the regulariser against attacks ---------------------------------------------------------------------------------

SMOOTH = RobustConfig(coef=2.0, epsilon=0.3, schedule="constant", steps=3, distance="kl")


def _by_stepping(learner: DistributionalPPO, batch: Batch, moved: Tensor) -> Tensor:
    """κ·KL of each row, clean against moved, both read with the memory that the clean rows before it leave, [L, B]."""
    policy, memory, rows = learner.policy, batch.state[0], []
    head = policy.action_head
    with torch.no_grad():
        for row in range(len(batch.obs)):
            start = batch.episode_start[row]
            clean, after = policy.act(batch.obs[row], memory, start)
            attacked, _ = policy.act(moved[row], memory, start)
            rows.append(SMOOTH.coef * head.kl(clean, attacked))
            memory = after
    return torch.stack(rows)


@register_check(
    "C5",
    "Does the regulariser against attacks move the policy, and compare each state with itself?",
    why="An attack that starts at the clean observation finds a gradient of exactly 0, and never moves. One that "
    "compares different memories punishes the passage of time.",
    remedy="Start at a random point of the ball, read both sides from the memory before the row, and keep the gradient "
    "of the attacked side; see robust/smoothness.py.",
    fast=True,
)
def regulariser_is_connected(subject: Subject) -> Measurement:
    memory = subject.parts.get("memory", "separate")
    witness = Witness()
    memory = "separate" if memory == "none" else memory
    # In many dimensions noise finds little: |g·s| of random signs grows with √O, the largest change Σ|g| with O.
    env = ScriptedEnv(observation_size=16, seed=subject.seed)
    learner = subject.learner(env, robust=SMOOTH, memory=memory, extensions=(witness,))
    learner.iterate()
    smoothness = learner.smoothness
    assert smoothness is not None  # the regulariser's weight is above 0
    batch = smoothness.prepare(witness.rollout, witness.estimates, witness.batch, 1.0)
    moved = batch.extra["robust/obs"]
    output = learner.policy(batch.obs, batch.state, batch.episode_start)
    term = smoothness.loss(learner.policy, output, batch)
    same = replace(batch, extra=batch.extra | {"robust/obs": batch.obs})
    nothing = smoothness.loss(learner.policy, output, same).detach()
    expected = _by_stepping(learner, batch, moved)
    actor = {name: one for name, one in learner.policy.named_parameters() if name.startswith("trunks.0")}
    slopes = torch.autograd.grad(term.sum(), list(actor.values()), allow_unused=True, materialize_grads=True)
    # Beside rounding: an attack that does not move leaves a slope of its square.
    unreached = [name for name, slope in zip(actor, slopes, strict=True) if float(slope.abs().max()) < 1e-8]
    shifts = smoothness.metrics()
    ratio = float(shifts["robust/action_shift"] / shifts["robust/noise_shift"])
    reach = float((moved - batch.obs).abs().max())
    gap = (term.detach() - expected).abs().max() / expected.abs().max()
    return worst(
        [
            none_of("parameters of the actor's encoder and memory without gradient", unreached),
            # Measured: 2.4 to 4.4 over 100 learners of several kinds.
            at_least("change of the action by the attack, relative to noise of its size", ratio, 1.6),
            # The two sides are computed by other kernels: the square of float32's rounding.
            at_most("divergence of the policy by no perturbation", float(nothing.abs().max()), 1e-10),
            # float32 through an LSTM, relative to the largest row: rounding is at 1e-6.
            at_most("relative gap of the regulariser to the divergence step by step", float(gap), 1e-3),
            at_most("largest perturbation, as a share of its bound", reach / SMOOTH.epsilon, 1 + 1e-6),
        ]
    )

"""Non-finite numbers stop the run with their location, or their minibatch or rollout is skipped and counted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tailguard.algorithm.estimate import Estimates
from tailguard.algorithm.hindsight import MEASURED
from tailguard.algorithm.rollout import Rollout
from tailguard.algorithm.update import MinibatchLoss
from tailguard.errors import TailguardError

if TYPE_CHECKING:
    from tailguard.algorithm.learner import Learner


class NonFiniteError(TailguardError):
    """Training met a NaN or an infinity; the message names the tensor, the step and the environment."""


def check_finite(found: MinibatchLoss, index: Tensor, learner: Learner) -> bool:
    """Whether this microbatch may be used. `index` holds its sequences' numbers in the batch."""
    if bool(found.finite & found.total.isfinite()):
        return True
    bad = [name for name, term in found.terms.items() if not bool(term.isfinite())]
    place = ""
    if not bool(found.finite):
        rows, columns = (~found.log_ratio.isfinite()).nonzero(as_tuple=True)
        sequence = int(index[columns[0]])
        row, environment = int(rows[0]), sequence
        if not learner.agent.remembers:
            row, environment = divmod(sequence, learner.env.num_envs)
        value = float(found.log_ratio[rows[0], columns[0]])
        place = f" The log-ratio of environment {environment} at row {row} of the rollout is {value}."
    return _stop_or_skip(f"loss ({', '.join(bad) or 'log-ratio'})", place, learner)


def check_gradient(norm: Tensor, learner: Learner) -> bool:
    """Whether this gradient may be applied."""
    if bool(norm.isfinite()):
        return True
    bad = [
        name
        for name, parameter in learner.agent.named_parameters()
        if parameter.grad is not None and not bool(parameter.grad.isfinite().all())
    ]
    return _stop_or_skip(f"gradient of {', '.join(bad[:3]) or 'the network as a whole'}", "", learner)


def check_rollout(rollout: Rollout, learner: Learner) -> bool:
    """Whether this rollout may be used: one reward or observation that is not finite spoils all estimates before it."""
    for name, rows, values in _inputs(rollout):
        # One number for the whole tensor: a sum is finite only if every part of it is.
        if bool(values.sum().isfinite()):
            continue
        bad = (~values.isfinite()).nonzero()
        if len(bad) == 0:
            continue
        if learner.config.on_nonfinite == "skip":
            return False
        row, environment, column = bad[0].tolist()
        raise NonFiniteError(
            f"step {learner.num_timesteps:,}: {name} {column} of environment {environment} is "
            f"{float(values[row, environment, column])} at row {rows[row]} of the rollout. Look at the "
            "environment's data and at the actions it was given, or set on_nonfinite to skip to leave such rollouts "
            "out."
        )
    return True


def check_estimates(estimates: Estimates, valid: Tensor, learner: Learner) -> bool:
    """Whether these estimates may be used. If not, they must move neither the return's scale nor a head."""
    for name, values in (("value target", estimates.value_targets), ("advantage", estimates.advantages)):
        bad = ~values.isfinite() & valid
        if not bool(bad.any()):
            continue
        if learner.config.on_nonfinite == "skip":
            return False
        row, environment = bad.nonzero()[0].tolist()
        raise NonFiniteError(
            f"step {learner.num_timesteps:,}: the {name} of environment {environment} is "
            f"{float(values[row, environment])} at row {row} of the rollout, though rewards and observations are "
            "finite: the critic has diverged. Go on from the last checkpoint with a lower learning_rate"
        )
    return True


def finite_inputs(rollout: Rollout) -> Tensor:
    """Whether all that the environments gave is finite, a bool on the device; `check_rollout` names what is not."""
    return torch.stack([values.isfinite().all() for _, _, values in _inputs(rollout)]).all()


def not_finite_in_graph(learner: Learner) -> NonFiniteError:
    """What to raise after an iteration that was recorded, where minibatches are not looked at one by one."""
    return NonFiniteError(
        f"step {learner.num_timesteps:,}: a loss or gradient of the last iteration is not finite, and the weights are "
        f"spoilt. Go on from the last checkpoint with {learner.kind}.runtime=eager to see which one it is, lower the "
        "learning rate or max_grad_norm, or set on_nonfinite to skip to leave such minibatches out."
    )


def _inputs(rollout: Rollout) -> Iterator[tuple[str, Sequence[int], Tensor]]:
    """What the environments gave: a name, the numbers of the rows, and the values, [rows, N, columns]."""
    everywhere = range(len(rollout.rewards))
    yield "reward", everywhere, rollout.rewards.unsqueeze(-1)
    yield "observation", everywhere, rollout.obs
    rows = list(rollout.final_rows)
    # The last state of an episode that terminated is worth nothing, whatever it looks like.
    terminated = rollout.terminated if len(rows) == len(everywhere) else rollout.terminated[rows]
    unused = terminated.unsqueeze(-1)
    yield "final observation", rows, rollout.final_obs.masked_fill(unused, 0.0)
    for name in MEASURED:
        if name in rollout.outcome:
            yield f"outcome {name}", everywhere, rollout.outcome[name].masked_fill(~rollout.valid, 0.0).unsqueeze(-1)


def _stop_or_skip(what: str, place: str, learner: Learner) -> bool:
    if learner.config.on_nonfinite == "skip":
        return False
    raise NonFiniteError(
        f"step {learner.num_timesteps:,}: the {what} is not finite.{place} Lower the learning rate or max_grad_norm, "
        "or set on_nonfinite to skip to leave such minibatches out."
    )

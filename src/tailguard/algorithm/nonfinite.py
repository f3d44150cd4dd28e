"""Non-finite numbers stop the run with their location, or their minibatch or rollout is skipped and counted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tailguard.algorithm.estimate import Estimates
from tailguard.algorithm.learner_state import LearnerState
from tailguard.algorithm.rollout import MEASURED, Rollout
from tailguard.algorithm.update import MinibatchLoss
from tailguard.errors import TailguardError
from tailguard.models.policy import ActorCritic


class NonFiniteError(TailguardError):
    """Training produced a NaN or an infinity; the message names the tensor, the step and the environment."""


@dataclass(frozen=True)
class FiniteGuard:
    """Decides whether numbers may be used: raises with their location, or returns False where they are skipped."""

    on_nonfinite: Literal["stop", "skip"]
    """stop: raise; skip: return False."""
    policy: ActorCritic
    state: LearnerState
    """Supplies the step for error messages."""
    num_envs: int

    def loss(self, minibatch: MinibatchLoss, index: Tensor) -> bool:
        """Whether this microbatch may be used. `index` holds its sequences' numbers in the batch."""
        if bool(minibatch.finite & minibatch.total.isfinite()):
            return True
        bad = [name for name, term in minibatch.terms.items() if not bool(term.isfinite())]
        place = ""
        if not bool(minibatch.finite):
            rows, columns = (~minibatch.log_ratio.isfinite()).nonzero(as_tuple=True)
            sequence = int(index[columns[0]])
            row, environment = int(rows[0]), sequence
            if not self.policy.is_recurrent:
                row, environment = divmod(sequence, self.num_envs)
            value = float(minibatch.log_ratio[rows[0], columns[0]])
            place = f" The log-ratio of environment {environment} at row {row} of the rollout is {value}."
        return self._raise_or_skip(f"loss ({', '.join(bad) or 'log-ratio'})", place)

    def gradient(self, norm: Tensor) -> bool:
        """Whether the gradient with this norm may be applied."""
        if bool(norm.isfinite()):
            return True
        bad = [
            name
            for name, parameter in self.policy.named_parameters()
            if parameter.grad is not None and not bool(parameter.grad.isfinite().all())
        ]
        return self._raise_or_skip(f"gradient of {', '.join(bad[:3]) or 'the network as a whole'}", "")

    def rollout(self, rollout: Rollout) -> bool:
        """Whether this rollout may be used: one non-finite number invalidates all estimates before it."""
        for name, rows, values in _inputs(rollout):
            # One number for the whole tensor: a sum is finite only if every part of it is.
            if bool(values.sum().isfinite()):
                continue
            bad = (~values.isfinite()).nonzero()
            if len(bad) == 0:
                continue
            if self.on_nonfinite == "skip":
                return False
            row, environment, column = bad[0].tolist()
            raise NonFiniteError(
                f"step {self.state.num_timesteps:,}: {name} {column} of environment {environment} is "
                f"{float(values[row, environment, column])} at row {rows[row]} of the rollout. Look at the "
                "environment's data and at the actions it was given, or set on_nonfinite to skip to leave such "
                "rollouts out."
            )
        return True

    def estimates(self, estimates: Estimates, valid: Tensor) -> bool:
        """Whether these estimates may be used. If not, they must update neither the return's scale nor a head."""
        for name, values in (("value target", estimates.value_targets), ("advantage", estimates.advantages)):
            bad = ~values.isfinite() & valid
            if not bool(bad.any()):
                continue
            if self.on_nonfinite == "skip":
                return False
            row, environment = bad.nonzero()[0].tolist()
            raise NonFiniteError(
                f"step {self.state.num_timesteps:,}: the {name} of environment {environment} is "
                f"{float(values[row, environment])} at row {row} of the rollout, though rewards and observations are "
                "finite: the critic has diverged. Go on from the last checkpoint with a lower learning_rate"
            )
        return True

    def _raise_or_skip(self, what: str, place: str) -> bool:
        if self.on_nonfinite == "skip":
            return False
        raise NonFiniteError(
            f"step {self.state.num_timesteps:,}: the {what} is not finite.{place} Lower the learning rate or "
            "max_grad_norm, or set on_nonfinite to skip to leave such minibatches out."
        )


def finite_inputs(rollout: Rollout) -> Tensor:
    """Whether all inputs from the environments are finite, a bool on the device; the guard names those that are not."""
    return torch.stack([values.isfinite().all() for _, _, values in _inputs(rollout)]).all()


def not_finite_in_graph(step: int, learner: str) -> NonFiniteError:
    """The error to raise after a recorded iteration, in which minibatches are not checked one by one."""
    return NonFiniteError(
        f"step {step:,}: a loss or gradient of the last iteration is not finite, and the weights are "
        f"spoilt. Go on from the last checkpoint with {learner}.runtime=eager to see which one it is, lower the "
        "learning rate or max_grad_norm, or set on_nonfinite to skip to leave such minibatches out."
    )


def _inputs(rollout: Rollout) -> Iterator[tuple[str, Sequence[int], Tensor]]:
    """Inputs from the environments: a name, the numbers of the rows, and the values, [rows, N, columns]."""
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

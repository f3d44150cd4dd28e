"""The state-adversarial regulariser (SA-PPO, Zhang et al. 2020): the policy may not change within ε of what it sees.

    L = L(clean) + κ · mean over s of max_{‖δ‖ ≤ ε} D(π(·|s, m), π(·|s + δ, m))

D is the KL divergence, or the squared difference of the deterministic actions; m, the memory before the row, is the
same on both sides, so that D is exactly 0 at δ = 0. The gradient reaches the policy through the attacked side; the
clean side is a constant, as in the authors' code. Attacked observations are used here and nowhere else: PPO's ratio
compares the probabilities of one action under two policies at one observation, and mixing in another observation would
centre its clip on the wrong policy.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from tailguard.models.actions import GaussianHead
from tailguard.models.policy import ActorCritic, PolicyOutput, PolicyState
from tailguard.robust.attacks import (
    Ball,
    deterministic_action,
    distance,
    maximise,
    memory_before,
    row_objective,
    row_values,
    window_objective,
)
from tailguard.robust.config import RobustConfig

if TYPE_CHECKING:
    from tailguard.algorithm.estimate import Estimates
    from tailguard.algorithm.rollout import Rollout
    from tailguard.algorithm.update import Batch

METRICS = ("robust/epsilon", "robust/distance", "robust/action_shift", "robust/noise_shift")
"""Size of the attack, what it found, and what it and noise of the same size do to the deterministic action."""


@dataclass(frozen=True)
class AttackedRows:
    """Observations, what an attack made of them, and the memory with which both are read."""

    obs: Tensor
    """[L, B, O]"""
    moved: Tensor
    """[L, B, O]"""
    episode_start: Tensor
    """[L, B] bool"""
    state: PolicyState
    """Before each row, [layers, L·B, H]; of windows through time, before the first row, [layers, B, H]."""


class Smoothness:
    """The regulariser, as a term of PPO's loss and as a penalty on the objective of gradients through the market.

    `policy`: the network whose observations are attacked.
    `mask`: which columns of an observation can be attacked, [O].
    `auto`: what `robust.distance: auto` stands for.
    """

    name = "robust"

    def __init__(
        self, config: RobustConfig, policy: ActorCritic, mask: Tensor, seed: int, auto: Literal["kl", "action"] = "kl"
    ) -> None:
        device = next(policy.parameters()).device
        self.config, self.policy = config, policy
        self.attack = config.attack_on(auto)
        self.mask = mask.to(device)
        self.generator = torch.Generator(device).manual_seed(seed)
        """Of the random starts; a stream of its own, so that the regulariser changes no other draw."""
        self.epsilon = torch.zeros((), dtype=torch.float64, device=device)
        """Today's size of the attack, in the place where recorded graphs find it."""
        self._fresh_attack, self._window, self._window_values = self._attack_again, _read_window, _read_values
        if config.through_time or config.refresh == "minibatch":
            # A compiler of the loss can trace neither the attack's own gradients nor a look for episodes' starts.
            eager: Any = torch.compiler.disable
            self._fresh_attack, self._window, self._window_values = map(
                eager, (self._attack_again, _read_window, _read_values)
            )
        self._attacked: AttackedRows | None = None
        """Of the window that `penalty` attacked last."""
        self._found = torch.zeros(len(METRICS), dtype=torch.float64, device=device)

    def set_progress(self, progress: float) -> None:
        """Set the size of the attack for this share of the training."""
        self.epsilon.fill_(self.config.epsilon_at(progress))

    # --- PPO: a term of the loss ------------------------------------------------------------------------------------

    def prepare(self, rollout: Rollout, estimates: Estimates, batch: Batch, progress: float) -> Batch:  # noqa: ARG002
        """Attack the rollout's observations, or draw where the minibatches' attacks start."""
        self.set_progress(progress)
        rows, start = self._attack(self.policy, batch.obs, batch.state, batch.episode_start)
        self._found.copy_(self._measure(self.policy, rows, batch.weights))
        extra = {"robust/obs": rows.moved}
        if self.config.refresh == "minibatch":
            radius = self._ball(batch.obs).radius
            extra = {"robust/start": start, "robust/radius": radius.expand_as(batch.obs).contiguous()}
        if not self.config.through_time:
            extra |= _stored(rows.state, batch.obs.shape[:2])
        return replace(batch, extra=batch.extra | extra)

    def loss(self, policy: ActorCritic, output: PolicyOutput, batch: Batch) -> Tensor:
        """The weighted change of policy and value by the attack, per sample, [L, B]."""
        state = batch.state if self.config.through_time else _read(batch.extra, len(policy.trunks))
        moved = batch.extra.get("robust/obs")
        if moved is None:
            moved = self._fresh_attack(policy, batch, state)
        return self._term(policy, AttackedRows(batch.obs, moved, batch.episode_start, state), output)

    def _attack_again(self, policy: ActorCritic, batch: Batch, state: PolicyState) -> Tensor:
        """The attack on a minibatch by the policy of now, from the point that was drawn for each of its rows."""
        ball = Ball(self.attack.norm, batch.extra["robust/radius"])
        return self._perturb(policy, batch.obs, state, batch.episode_start, ball, batch.extra["robust/start"])

    # --- gradients through the market: a penalty on the objective ---------------------------------------------------

    def penalty(
        self, policy: ActorCritic, obs: Tensor, state: PolicyState, episode_start: Tensor, valid: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The weighted term, mean over the rows [T, N] that count, and its metrics."""
        rows, _ = self._attack(policy, obs.detach(), state, episode_start)
        self._attacked = rows
        weights = valid.float() / valid.float().sum().clamp(min=1)
        output = None
        if self.config.through_time:
            with torch.no_grad():
                output = policy(rows.obs, state, episode_start)
        found = self._measure(policy, rows, weights)
        term = self._policy_term(policy, rows, output)
        return (term * weights).sum(), dict(zip(METRICS, found, strict=True))

    def attach(self, batch: Batch) -> Batch:
        """The critics' batch of the window that `penalty` attacked last, with what the attack made of it."""
        rows = self._attacked
        assert rows is not None  # the policy's step comes first
        extra = {"robust/obs": rows.moved}
        if not self.config.through_time:
            extra |= _stored(rows.state, batch.obs.shape[:2])
        return replace(batch, extra=batch.extra | extra)

    def critic_loss(self, policy: ActorCritic, batch: Batch) -> Tensor:
        """The weighted change of the value by the attack that `attach` added, per sample, [L, B]."""
        state = batch.state if self.config.through_time else _read(batch.extra, len(policy.trunks))
        rows = AttackedRows(batch.obs, batch.extra["robust/obs"], batch.episode_start, state)
        before, after = self._both_values(policy, rows, None)
        return self.config.critic_coef * (after - before).square()

    # --- both -------------------------------------------------------------------------------------------------------

    def _ball(self, obs: Tensor) -> Ball:
        return Ball.of(self.attack, obs, self.mask, epsilon=self.epsilon)

    def _attack(
        self, policy: ActorCritic, obs: Tensor, state: PolicyState, episode_start: Tensor
    ) -> tuple[AttackedRows, Tensor]:
        """The attacked observations of a window, and where the attack started."""
        ball = self._ball(obs)
        draw = ball.draw_surface if self.attack.kind == "random" else ball.draw_inside
        start = draw(obs, self.generator)
        if not self.config.through_time:
            trunks = None if self.config.critic_coef > 0 else 1
            state = memory_before(policy, obs, state, episode_start, trunks)
        moved = self._perturb(policy, obs, state, episode_start, ball, start)
        return AttackedRows(obs, moved, episode_start, state), start

    def _perturb(
        self, policy: ActorCritic, obs: Tensor, state: PolicyState, episode_start: Tensor, ball: Ball, start: Tensor
    ) -> Tensor:
        if self.attack.kind == "random":
            return ball.displace(obs, start)
        if self.config.through_time:
            objective = window_objective(policy, obs, state, episode_start, self.attack.target)
            return maximise(objective, obs, self.attack, ball, self.generator, start)
        rows = obs.flatten(0, 1)
        radius = ball.radius if ball.radius.dim() == 1 else ball.radius.flatten(0, 1)
        objective = row_objective(policy, rows, state, episode_start.flatten(), self.attack.target)
        moved = maximise(objective, rows, self.attack, Ball(ball.norm, radius), self.generator, start.flatten(0, 1))
        return moved.view_as(obs)

    def _term(self, policy: ActorCritic, rows: AttackedRows, output: PolicyOutput | None) -> Tensor:
        """Of policy and value, [L, B]."""
        term = self._policy_term(policy, rows, output)
        if self.config.critic_coef > 0:
            before, after = self._both_values(policy, rows, output)
            term = term + self.config.critic_coef * (after - before).square()
        return term

    def _policy_term(self, policy: ActorCritic, rows: AttackedRows, output: PolicyOutput | None) -> Tensor:
        """[L, B]"""
        clean, moved = self._both_sides(policy, rows, output)
        if isinstance(policy.action_head, GaussianHead) and policy.action_head.free_log_std is not None:
            # A deviation that is the same in all states cannot be attacked. Left free, it would grow: noise hides any
            # change of the mean from the divergence.
            mean, log_std = moved.chunk(2, dim=-1)
            moved = torch.cat((mean, log_std.detach()), dim=-1)
        return self.config.coef * distance(policy.action_head, clean, moved, self.attack.target)

    def _both_sides(
        self, policy: ActorCritic, rows: AttackedRows, output: PolicyOutput | None
    ) -> tuple[Tensor, Tensor]:
        """Parameters of the policy at the clean and at the attacked observations, [L, B, P] each."""
        if self.config.through_time:
            assert output is not None  # what the policy makes of the clean window
            clean = output.dist_params.detach() if self.config.detach else output.dist_params
        else:
            with torch.no_grad() if self.config.detach else nullcontext():
                clean = self._moved_side(policy, replace(rows, moved=rows.obs))
        return clean, self._moved_side(policy, rows)

    def _moved_side(self, policy: ActorCritic, rows: AttackedRows) -> Tensor:
        """Parameters of the policy at the attacked observations, [L, B, P]."""
        if self.config.through_time:
            return self._window(policy, rows)
        start, shape, moved = rows.episode_start.flatten(), rows.obs.shape[:2], rows.moved.flatten(0, 1)
        if moved.device.type == "cpu" and not torch.compiler.is_compiling():
            # As windows of one row: of some thousand rows the fused LSTM takes 60 % of the time of the cell.
            trunk = policy.each_trunk()[0]
            features, _ = trunk.sequence(moved.unsqueeze(0), rows.state[0], start.unsqueeze(0), inner_resets=False)
            params: Tensor = policy.action_head(features)
            return params.reshape(*shape, -1)
        return policy.act(moved, rows.state[0], start)[0].reshape(*shape, -1)

    def _both_values(
        self, policy: ActorCritic, rows: AttackedRows, output: PolicyOutput | None
    ) -> tuple[Tensor, Tensor]:
        """Values at both, in normalised units, [L, B] each."""
        if self.config.through_time:
            if output is None:
                with torch.no_grad() if self.config.detach else nullcontext():
                    before = self._window_values(policy, replace(rows, moved=rows.obs))
            else:
                before = torch.stack([critic.value.squeeze(-1) for critic in output.critics]).mean(0)
            return before.detach() if self.config.detach else before, self._window_values(policy, rows)
        start, shape = rows.episode_start.flatten(), rows.obs.shape[:2]
        with torch.no_grad() if self.config.detach else nullcontext():
            before = row_values(policy, rows.obs.flatten(0, 1), rows.state, start).reshape(shape)
        return before, row_values(policy, rows.moved.flatten(0, 1), rows.state, start).reshape(shape)

    @torch.no_grad()
    def _measure(self, policy: ActorCritic, rows: AttackedRows, weights: Tensor) -> Tensor:
        """`METRICS`."""
        weights = weights / weights.sum().clamp(min=1e-30)
        ball = self._ball(rows.obs)
        noise = replace(rows, moved=ball.displace(rows.obs, ball.draw_surface(rows.obs, self.generator)))
        output = None
        if self.config.through_time:
            output = policy(rows.obs, rows.state, rows.episode_start)
        clean, moved = self._both_sides(policy, rows, output)
        noisy = self._moved_side(policy, noise)
        head = policy.action_head
        actions = [deterministic_action(head, params).float() for params in (clean, moved, noisy)]
        found = [
            self.epsilon,
            (distance(head, clean, moved, self.attack.target) * weights).sum(),
            ((actions[1] - actions[0]).abs().mean(-1) * weights).sum(),
            ((actions[2] - actions[0]).abs().mean(-1) * weights).sum(),
        ]
        return torch.stack([value.double() for value in found])

    def metrics(self) -> dict[str, Tensor]:
        """Of the last rollout that `prepare` attacked."""
        return dict(zip(METRICS, self._found, strict=True))

    def state_dict(self) -> dict[str, Any]:
        """The random stream."""
        return {"generator": self.generator.get_state(), "device": self.generator.device.type}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned; on another kind of device the stream stays where it is."""
        if state["device"] == self.generator.device.type:
            self.generator.set_state(state["generator"].cpu())


def _read_window(policy: ActorCritic, rows: AttackedRows) -> Tensor:
    """The policy's parameters after reading the attacked window; episodes inside it are found by looking.

    With a shared trunk by one product for all heads, as the clean side is computed: in floating point another order of
    operations is another number, and the change by no perturbation must be 0.
    """
    features, _ = policy.each_trunk()[0].sequence(rows.moved, rows.state[0], rows.episode_start)
    if policy.critic_trunks[0] == 0:
        return policy.heads((features,)).dist_params
    params: Tensor = policy.action_head(features)
    return params


def _read_values(policy: ActorCritic, rows: AttackedRows) -> Tensor:
    features = policy.critic_features(rows.moved, rows.state, rows.episode_start)
    shared = policy.critic_trunks[0] == 0
    outputs = policy.heads((features[0],)).critics if shared else policy.critic_heads(features)
    return torch.stack([output.value.squeeze(-1) for output in outputs]).mean(0)


def _stored(state: PolicyState, shape: torch.Size) -> dict[str, Tensor]:
    """Memories before each row as columns of a batch, [L, B, layers, H], which can be selected and flattened."""
    return {
        f"robust/memory.{trunk}.{part}": value.reshape(-1, *shape, value.shape[-1]).permute(1, 2, 0, 3).contiguous()
        for trunk, parts in enumerate(state)
        for part, value in enumerate(parts)
    }


def _read(extra: Mapping[str, Tensor], trunks: int) -> PolicyState:
    """What `_stored` put into a batch, as the trunks read it, [layers, L·B, H]."""
    state = []
    for trunk in range(trunks):
        parts = [extra[f"robust/memory.{trunk}.{part}"] for part in (0, 1) if f"robust/memory.{trunk}.{part}" in extra]
        state.append(tuple(value.flatten(0, 1).transpose(0, 1).contiguous() for value in parts))
    return tuple(state)

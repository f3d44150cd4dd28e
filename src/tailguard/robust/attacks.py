"""Attacks: the small change of an observation that changes an agent's decision most.

An attack moves an observation inside a ball around the true one. The ball is measured in units of each feature's own
scale, and features that nobody can falsify (the account's state, the clock) have no room in it. All attacks climb an
objective by its gradient in the observation; `random` is the control that uses none.

The divergence of a policy from itself has its minimum, and so a gradient of exactly 0, at the clean observation: an
attack that starts there never moves. So attacks start at a random point of the ball. Steps of 2ε/K reach the far side
of the ball from any start in K steps; with the ε/K of Zhang et al. (2020) a tenth of the divergence stays unfound.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from tailguard.envs.asset_layout import AssetLayout
from tailguard.envs.spec import TradingSpec
from tailguard.envs.trading import TradingEnv
from tailguard.errors import ConfigError
from tailguard.models.actions import ActionHead, GaussianHead
from tailguard.models.memory import MemoryState
from tailguard.models.policy import ActorCritic, PolicyState
from tailguard.validate import check_choice, check_count, check_range

AttackKind = Literal["fgsm", "pgd", "sgld", "random"]
Norm = Literal["linf", "l2"]
Target = Literal["action", "kl", "reverse", "critic", "return"]

CLOCK = ("time_of_", "closure", "session_bars")
"""How the names of features begin that show the clock and the calendar."""
INSIDE = 1.0 - 1e-6
"""A vector that is drawn back to the unit sphere ends this near to it: rounding must not take it out again."""

Objective = Callable[[Tensor], Tensor]
"""Observations [..., O] to what the attack wants to be large: [...], or [N] for observations [T, N, O]."""


@dataclass(frozen=True)
class Attack:
    """How observations are perturbed."""

    kind: AttackKind = "pgd"
    """fgsm: one step along the gradient; pgd: several, projected onto the ball; sgld: pgd with decaying noise; random:
    the surface of the ball at random, without a gradient."""
    epsilon: float = 0.05
    """Radius of the ball, in standard deviations of each feature, 0 or more."""
    norm: Norm = "linf"
    """linf bounds each feature by epsilon, l2 the length of the whole perturbation."""
    steps: int = 10
    """Steps of pgd and sgld; fgsm takes one, random none."""
    step_size: float | None = None
    """Length of a step, in the units of epsilon; none: 2 epsilon / steps, and 5 epsilon / steps for l2, where a step
    does not add up with the last one but turns the perturbation."""
    random_start: bool = True
    """Start at a random point of the ball; only targets reverse and critic can do without."""
    target: Target = "action"
    """What to spoil: action, the squared difference of deterministic actions; kl, the divergence of the policy from
    itself; reverse, the action's sign: it is pushed to the opposite side as far as possible; critic, the value (made as
    low as possible); return, the rewards of a whole window of a market."""
    through_time: bool = False
    """False: the current observation, given the memory; true: a whole window at once, through the memory."""
    seed: int = 0
    """Of random starts and noise."""

    def __post_init__(self) -> None:
        check_choice("attack.kind", self.kind, get_args(AttackKind))
        check_range("attack.epsilon", self.epsilon, low=0)
        check_choice("attack.norm", self.norm, get_args(Norm))
        check_count("attack.steps", self.steps)
        if self.step_size is not None:
            check_range("attack.step_size", self.step_size, low=0, low_open=True)
        check_choice("attack.target", self.target, get_args(Target))
        check_count("attack.seed", self.seed, low=0)
        if not self.random_start and self.target in ("action", "kl") and self.kind != "random":
            raise ConfigError(
                f"attack.random_start: the gradient of target {self.target} is 0 at the clean observation, so that "
                "the attack would not move; leave it true, or choose target reverse or critic"
            )
        if self.target == "return" and not self.through_time:
            raise ConfigError("attack.target: return is that of a whole window; set through_time too")

    @property
    def gradient_steps(self) -> int:
        """Gradients that the attack computes."""
        return {"fgsm": 1, "random": 0}.get(self.kind, self.steps)

    @property
    def relative_step(self) -> float:
        """Length of a step as a share of the radius."""
        if self.step_size is None or self.epsilon == 0:
            return (2.0 if self.norm == "linf" else 5.0) / max(self.gradient_steps, 1)
        return self.step_size / self.epsilon


@dataclass(frozen=True)
class Ball:
    """Perturbations δ = radius · u with u in the unit ball of the norm; a radius of 0 leaves a feature alone."""

    norm: Norm
    radius: Tensor
    """Of each feature, [O] or [..., O]."""

    @classmethod
    def of(
        cls,
        attack: Attack,
        obs: Tensor,
        mask: Tensor | None = None,
        scale: Tensor | None = None,
        epsilon: Tensor | None = None,
    ) -> Ball:
        """ε times the features' scales [O] (1 by default) where the mask [O] allows it (everywhere by default).

        `epsilon`: in the place of the attack's own, [], where it moves during training.
        """
        width = torch.ones(obs.shape[-1], dtype=torch.float64, device=obs.device)
        for factor in (mask, scale):
            if factor is not None:
                width = width * factor.to(width)
        return cls(attack.norm, rounded_down((attack.epsilon if epsilon is None else epsilon) * width, obs.dtype))

    @property
    def free(self) -> Tensor:
        """1 where a feature can be moved, [..., O]."""
        return (self.radius > 0).to(self.radius.dtype)

    def project(self, u: Tensor) -> Tensor:
        """The nearest point of the unit ball."""
        if self.norm == "linf":
            return u.clamp(-1.0, 1.0)
        return u * (INSIDE / _length(u).clamp(min=INSIDE))

    def direction(self, gradient: Tensor) -> Tensor:
        """The step of length 1 that climbs most."""
        if self.norm == "linf":
            return gradient.sign()
        return gradient / _length(gradient).clamp(min=torch.finfo(gradient.dtype).tiny)

    def draw_inside(self, like: Tensor, generator: torch.Generator | None) -> Tensor:
        """Uniform in the unit ball of the features that can be moved."""
        if self.norm == "linf":
            return (2.0 * _rand(like, generator) - 1.0) * self.free
        size = self.free.sum(-1, keepdim=True).clamp(min=1.0)
        share = _rand(like[..., :1], generator).clamp(min=1e-12) ** (1.0 / size)
        return self.draw_surface(like, generator) * share

    def draw_surface(self, like: Tensor, generator: torch.Generator | None) -> Tensor:
        """As large as the ball allows, in a random direction: a corner of the cube, a point of the sphere."""
        drawn = _randn(like, generator) * self.free
        return self.direction(drawn) if self.norm == "linf" else self.project(self.direction(drawn) * 2.0)

    def displace(self, obs: Tensor, u: Tensor) -> Tensor:
        """obs + radius · u, rounded towards obs: what comes out lies in the ball exactly, not up to rounding."""
        if self.norm == "l2":
            u = self.project(u.double()).to(u.dtype)
        delta = self.radius * u
        moved = obs + delta
        too_far = (moved.double() - obs.double()).abs() > delta.double().abs()
        return torch.where(too_far, torch.nextafter(moved, obs), moved)


def maximise(
    objective: Objective,
    obs: Tensor,
    attack: Attack,
    ball: Ball,
    generator: torch.Generator | None = None,
    start: Tensor | None = None,
) -> Tensor:
    """The observations in the ball around `obs` with the largest objective that the attack finds, [..., O].

    The best point on the way is returned, not the last one. `start`: where to begin, in units of the ball.
    """
    obs = _leaf(obs)
    if attack.kind == "random":
        return ball.displace(obs, ball.draw_surface(obs, generator))
    if start is None:
        start = ball.draw_inside(obs, generator) if attack.random_start else torch.zeros_like(obs)
    u = best = start
    best_value: Tensor | None = None
    with torch.inference_mode(False), torch.enable_grad():
        for step in range(attack.gradient_steps):
            u = u.detach().requires_grad_()
            value = objective(obs + ball.radius * u)
            (gradient,) = torch.autograd.grad(value.sum(), u)
            best, best_value = _better(best, best_value, u.detach(), value.detach())
            if attack.kind == "sgld":
                # Noise relative to the gradient, which may be tiny; it fades as the steps settle.
                size = gradient.square().mean(-1, keepdim=True).sqrt()
                gradient = gradient + size / (step + 2) * _randn(gradient, generator) * ball.free
            u = ball.project(u.detach() + attack.relative_step * ball.direction(gradient) * ball.free)
        with torch.no_grad():
            best, _ = _better(best, best_value, u, objective(obs + ball.radius * u))
    return ball.displace(obs, best)


def _better(best: Tensor, best_value: Tensor | None, u: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """The better of two points, row by row."""
    if best_value is None:
        return u, value
    better = value > best_value
    return torch.where(better.unsqueeze(-1), u, best), torch.where(better, value, best_value)


# --- attacks on a policy --------------------------------------------------------------------------------------------


def perturb(
    policy: ActorCritic,
    obs: Tensor,
    state: PolicyState,
    episode_start: Tensor,
    attack: Attack,
    *,
    mask: Tensor | None = None,
    scale: Tensor | None = None,
    generator: torch.Generator | None = None,
    start: Tensor | None = None,
) -> Tensor:
    """Perturbed observations of the same shape, each inside the ball around the true one.

    obs:            what the network reads (already scaled), one row [N, O] or a window [T, N, O]
    state:          memory of every trunk before the (first) row
    episode_start:  [N] or [T, N] bool: the memory is cleared before the row is read
    mask:           1 where a feature can be attacked, [O]; all of them by default
    scale:          size of one unit of ε in each feature, [O]; 1 by default
    start:          where the attack begins, in units of the ball; drawn from the generator by default

    Without `through_time` each row of a window is attacked by itself, given the memory that the clean rows before it
    leave. With it, all rows move together, and the objective is the sum over the rows.
    """
    if attack.target == "return":
        raise ConfigError("attack.target: the return depends on the market; use perturb_return, which trades it")
    if attack.through_time and obs.dim() != 3:
        raise ConfigError(f"attack.through_time: needs a window [T, N, O]; the observations are {tuple(obs.shape)}")
    with torch.inference_mode(False):
        obs = _leaf(obs)
        state = tuple(tuple(_leaf(part) for part in trunk) for trunk in state)
        episode_start = _leaf(episode_start)
        generator = generator or torch.Generator(obs.device).manual_seed(attack.seed)
        ball = Ball.of(attack, obs, mask, scale)
        if attack.through_time:
            objective = window_objective(policy, obs, state, episode_start, attack.target)
            return maximise(objective, obs, attack, ball, generator, start)
        if obs.dim() == 2:
            objective = row_objective(policy, obs, state, episode_start, attack.target)
            return maximise(objective, obs, attack, ball, generator, start)
        rows = obs.flatten(0, 1)
        before = memory_before(policy, obs, state, episode_start, None if attack.target == "critic" else 1)
        objective = row_objective(policy, rows, before, episode_start.flatten(), attack.target)
        start = None if start is None else start.flatten(0, 1)
        return maximise(objective, rows, attack, ball, generator, start).view_as(obs)


def memory_before(
    policy: ActorCritic, obs: Tensor, state: PolicyState, episode_start: Tensor, trunks: int | None = None
) -> PolicyState:
    """Memory of the first `trunks` (all by default) before each row of a window, [layers, T·N, H]; no gradient.

    obs [T, N, O], episode_start [T, N]; `state` is the one before the first row.
    """
    state = state[:trunks]
    if not policy.is_recurrent:
        return tuple(() for _ in state)
    before: list[MemoryState] = []
    with torch.no_grad():
        for trunk, first in zip(policy.each_trunk(), state, strict=False):
            _, after = trunk.every_state(obs, first, episode_start)
            rows = (
                torch.cat((part.unsqueeze(1), later[:, :-1]), dim=1) for part, later in zip(first, after, strict=True)
            )
            before.append(tuple(part.flatten(1, 2) for part in rows))
    return tuple(before)


def row_objective(
    policy: ActorCritic, obs: Tensor, state: PolicyState, episode_start: Tensor, target: Target
) -> Objective:
    """What an attack on single rows [N, O] wants to be large, [N]; the memory is the same for clean and attacked."""
    if target == "critic":
        return lambda moved: -row_values(policy, moved, state, episode_start)
    memory = policy.each_trunk()[0].memory.given(state[0], episode_start)
    with torch.enable_grad():  # the same operations as for `moved`: the divergence from itself is exactly 0
        clean = policy.act(obs, memory, episode_start)[0].detach()
    return lambda moved: distance(policy.action_head, clean, policy.act(moved, memory, episode_start)[0], target)


def row_values(policy: ActorCritic, obs: Tensor, state: PolicyState, episode_start: Tensor) -> Tensor:
    """Values of single rows [N, O], in normalised units, mean over the critics, [N]."""
    trunks = policy.each_trunk()
    features = {
        index: trunks[index].step(obs, state[index], episode_start)[0] for index in sorted(set(policy.critic_trunks))
    }
    return torch.stack([output.value.squeeze(-1) for output in policy.critic_heads(features)]).mean(0)


def window_objective(
    policy: ActorCritic, obs: Tensor, state: PolicyState, episode_start: Tensor, target: Target
) -> Objective:
    """As `row_objective` for windows [T, N, O] through the memory, summed over the rows, [N]."""

    def params(rows: Tensor) -> Tensor:
        features, _ = policy.each_trunk()[0].sequence(rows, state[0], episode_start)
        found: Tensor = policy.action_head(features)
        return found

    def values(rows: Tensor) -> Tensor:
        outputs = policy.critic_heads(policy.critic_features(rows, state, episode_start))
        return torch.stack([output.value.squeeze(-1) for output in outputs]).mean(0)

    if target == "critic":
        return lambda moved: -values(moved).sum(0)
    with torch.no_grad():
        clean = params(obs)
    return lambda moved: distance(policy.action_head, clean, params(moved), target).sum(0)


def distance(head: ActionHead, clean: Tensor, moved: Tensor, target: Target) -> Tensor:
    """How far the policy with parameters `moved` is from the one with `clean`, [...]; 0 where they are equal.

    action: squared difference of the deterministic actions, of choices the divergence; kl: KL(clean || moved); reverse:
    how far the deterministic action has moved to the side where it was not.
    """
    if target == "reverse" and isinstance(head, GaussianHead):
        before, after = deterministic_action(head, clean), deterministic_action(head, moved)
        return ((before - after) * before.sign()).sum(-1)
    if target == "action" and isinstance(head, GaussianHead):
        squares: Tensor = (deterministic_action(head, moved) - deterministic_action(head, clean)).square()
        return squares.sum(-1)
    return head.kl(clean, moved)


def deterministic_action(head: ActionHead, dist_params: Tensor) -> Tensor:
    """The mean action in [-1, 1], [..., A]; where the head does not squash, the mean itself."""
    mean = head.mode(dist_params)
    return torch.tanh(mean) if isinstance(head, GaussianHead) and head.squash else mean


# --- what can be attacked -------------------------------------------------------------------------------------------


def attackable(source: TradingEnv | TradingSpec | Any, observation_size: int | None = None) -> Tensor:
    """Which columns of an observation can be falsified, [O] of 0 and 1.

    `source`: an environment, or the spec of a trading agent with the size of its observations. Of a trading
    observation these are the features made of bars. The account's weights, gain, drawdown and remaining time are the
    agent's own books; the time of day and of the week is known without a feed; and a feature that was constant in
    training is always 0. Of any other environment every column can be attacked.
    """
    spec: Any = TradingSpec.of(source) if isinstance(source, TradingEnv) else source
    size = getattr(source, "observation_size", observation_size)
    if size is None:
        raise ConfigError("attackable: give the size of the observations with the spec")
    if not isinstance(spec, TradingSpec):
        return torch.ones(size)
    mask = torch.zeros(size)
    layout, columns = AssetLayout.of(spec.scaler), len(spec.scaler.names)
    if layout is not None:
        columns = layout.assets_in(size) * layout.own + layout.market_wide
    for column, entry in enumerate(spec.scaler.over_columns(columns)):
        name, scale = spec.scaler.names[entry], spec.scaler.scale[entry]
        mask[column] = float(not name.startswith(CLOCK) and scale > 0)
    return mask


def rounded_down(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Non-negative float64 values in another type, never larger than they were."""
    rounded = values.to(dtype)
    return torch.where(rounded.double() > values, torch.nextafter(rounded, torch.zeros_like(rounded)), rounded)


def _leaf(tensor: Tensor) -> Tensor:
    """A tensor that automatic differentiation accepts: inference tensors must be copied."""
    return tensor.clone() if tensor.is_inference() else tensor.detach()


def _length(vectors: Tensor) -> Tensor:
    """Euclidean, [..., 1]."""
    length: Tensor = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True)
    return length


def _rand(like: Tensor, generator: torch.Generator | None) -> Tensor:
    return torch.rand(like.shape, generator=generator, dtype=like.dtype, device=like.device)


def _randn(like: Tensor, generator: torch.Generator | None) -> Tensor:
    return torch.randn(like.shape, generator=generator, dtype=like.dtype, device=like.device)

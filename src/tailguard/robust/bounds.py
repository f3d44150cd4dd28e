"""Certificates: how far any perturbation inside the ball can move one decision.

Attacks show that a decision can be moved at least so far; intervals show that it cannot be moved further than so far.
The memory is known exactly, so that the intervals begin with the observation of the current bar and pass the encoder,
the cell of the LSTM and the last layer once. Two bounds are taken, and the smaller holds:

- Interval bound propagation (Gowal et al. 2018): every layer maps the box of its possible inputs to a box that holds
  all its outputs. It forgets that the inputs of a layer move together, and is several times too large.
- The mean value form: an action moves by at most ε times the l1 norm of its gradient, the largest in the box. The box
  of each layer bounds its slopes, and the chain rule in intervals bounds the gradient. It is exact for small ε.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tailguard.errors import ConfigError
from tailguard.models.actions import GaussianHead
from tailguard.models.memory import CellWeights, LSTMMemory, MemoryState
from tailguard.models.policy import ActorCritic
from tailguard.robust.attacked_policy import AttackableAgent, AttackedPolicy, Memories
from tailguard.robust.attacks import Attack, Norm

ROUNDING = 1e-6
"""Added to both sides of the bounds, as a share of half the action's range: the network computes in float32."""
SILU_MINIMUM = -1.2784645427610738
"""Where x·sigmoid(x) is lowest."""
SILU_STEEPEST = 2.3993572805154674
"""Where its slope is largest; it is lowest at minus this."""


@dataclass(frozen=True)
class Bounds:
    """All tensors between `low` and `high`."""

    low: Tensor
    high: Tensor

    @classmethod
    def around(cls, centre: Tensor, radius: Tensor) -> Bounds:
        return cls(centre - radius, centre + radius)

    def map(self, increasing: Callable[[Tensor], Tensor]) -> Bounds:
        """Through a function that increases."""
        return Bounds(increasing(self.low), increasing(self.high))

    def matmul(self, weight: Tensor) -> Bounds:
        """Times a known matrix."""
        centre, radius = 0.5 * (self.high + self.low), 0.5 * (self.high - self.low)
        return Bounds.around(centre @ weight, radius @ weight.abs())

    def __add__(self, other: Bounds | Tensor) -> Bounds:
        if isinstance(other, Tensor):
            return Bounds(self.low + other, self.high + other)
        return Bounds(self.low + other.low, self.high + other.high)

    def __mul__(self, other: Bounds) -> Bounds:
        ends = torch.stack([mine * theirs for mine in (self.low, self.high) for theirs in (other.low, other.high)])
        return Bounds(ends.amin(0), ends.amax(0))

    def chunk(self, parts: int) -> list[Bounds]:
        """Equal parts of the last dimension."""
        pairs = zip(self.low.chunk(parts, -1), self.high.chunk(parts, -1), strict=True)
        return [Bounds(low, high) for low, high in pairs]

    def for_each_action(self) -> Bounds:
        """[N, F] as [N, 1, F], to meet gradients [N, A, F]."""
        return Bounds(self.low.unsqueeze(-2), self.high.unsqueeze(-2))

    @property
    def size(self) -> Tensor:
        """Largest absolute value."""
        return torch.maximum(self.low.abs(), self.high.abs())

    def intersect(self, other: Bounds) -> Bounds:
        """What is in both."""
        return Bounds(torch.maximum(self.low, other.low), torch.minimum(self.high, other.high))


Pullback = Callable[[Bounds], Bounds]
"""Gradients of the actions by a layer's outputs, [N, A, out], to those by its inputs, [N, A, in]."""


@dataclass(frozen=True)
class Reached:
    """What a part of the network makes of the ball: its outputs, and the way back of gradients to its inputs."""

    outputs: Bounds
    """[N, F]"""
    pullbacks: tuple[Pullback, ...]
    """Of all layers so far, the first one first."""

    def then(self, outputs: Bounds, pullback: Pullback) -> Reached:
        return Reached(outputs, (*self.pullbacks, pullback))


def step_bounds(
    policy: ActorCritic, obs: Tensor, state: MemoryState, episode_start: Tensor, radius: Tensor, norm: Norm = "linf"
) -> Bounds:
    """Bounds of the deterministic action, in the environment's units, [N, A], over all observations in the ball.

    obs:            what the network reads (already scaled), [N, O]
    state:          the actor's memory before the row, known exactly
    episode_start:  [N] bool
    radius:         of each feature, [O]; 0 where it cannot be moved
    """
    head, trunk = policy.action_head, policy.each_trunk()[0]
    if not isinstance(head, GaussianHead):
        raise ConfigError("bounds: choices do not move by a distance; bounds are for continuous actions")
    if policy.layout is not None:
        raise ConfigError("bounds: certificates are for network.encoder=flat; attacks work with every encoder")
    with torch.no_grad():
        # A box around the ball; of a ball of l2 only the last norm below knows that it is smaller.
        reach = radius.double()
        reached = Reached(Bounds.around(obs.double(), reach.expand_as(obs)), ())
        for layer in trunk.encoder.layers:
            reached = _through(layer, reached)
        if isinstance(trunk.memory, LSTMMemory):
            hidden, cells = (part.double().masked_fill(episode_start[:, None], 0.0) for part in state)
            for weights, h, c in zip(trunk.memory.cell_weights(), hidden, cells, strict=True):
                reached = _through_cell(weights, reached, h, c)
        weight, bias = (part.double()[: head.raw_size] for part in (head.linear.weight, head.linear.bias))
        boxes = reached.outputs.matmul(weight.T) + bias
        gradient = Bounds(weight, weight)
        for pullback in reversed(reached.pullbacks):
            gradient = pullback(gradient)
        moved = gradient.size * reach
        shift = moved.sum(-1) if norm == "linf" else torch.linalg.vector_norm(moved, dim=-1)
        clean = head.mode(policy.act(obs, state, episode_start)[0]).double()
        return _to_env(head, boxes.intersect(Bounds.around(clean, shift)))


def _through(layer: nn.Module, reached: Reached) -> Reached:
    """A layer of the encoder."""
    inside = reached.outputs
    if isinstance(layer, nn.Linear):
        weight, bias = layer.weight.double(), layer.bias.double()
        return reached.then(inside.matmul(weight.T) + bias, lambda gradient: gradient.matmul(weight))
    slope = _slope(layer, inside).for_each_action()
    outputs = inside.map(layer)
    if isinstance(layer, nn.SiLU):  # it falls, then rises
        low, high = torch.minimum(outputs.low, outputs.high), torch.maximum(outputs.low, outputs.high)
        lowest = (inside.low <= SILU_MINIMUM) & (inside.high >= SILU_MINIMUM)
        outputs = Bounds(torch.where(lowest, layer(torch.full_like(low, SILU_MINIMUM)), low), high)
    return reached.then(outputs, lambda gradient: gradient * slope)


def _through_cell(weights: CellWeights, reached: Reached, h: Tensor, c: Tensor) -> Reached:
    """A cell of an LSTM whose memory h, c is known: h' = o·tanh(c'), c' = f·c + i·g."""
    w_ih, w_hh, b_ih, b_hh = (weight.double() for weight in weights)
    gates = reached.outputs.matmul(w_ih.T) + (h @ w_hh.T + b_ih + b_hh)
    before_i, before_f, before_g, before_o = gates.chunk(4)
    i, f, o = (gate.map(torch.sigmoid) for gate in (before_i, before_f, before_o))
    g, kept = before_g.map(torch.tanh), Bounds(c, c)
    cell = f * kept + i * g
    shown = cell.map(torch.tanh)
    of_cell = (o * _bell(cell, _tanh_slope)).for_each_action()
    # The chain rule for each gate's input: through the cell for i, f and g, directly for o.
    by_i, by_f, by_g, by_o = (
        part.for_each_action()
        for part in (
            g * _bell(before_i, _sigmoid_slope),
            kept * _bell(before_f, _sigmoid_slope),
            i * _bell(before_g, _tanh_slope),
            shown * _bell(before_o, _sigmoid_slope),
        )
    )

    def pullback(gradient: Bounds) -> Bounds:
        through_cell = gradient * of_cell
        parts = (through_cell * by_i, through_cell * by_f, through_cell * by_g, gradient * by_o)
        low, high = (torch.cat([getattr(part, end) for part in parts], dim=-1) for end in ("low", "high"))
        return Bounds(low, high).matmul(w_ih)

    return reached.then(o * shown, pullback)


def _slope(layer: nn.Module, inside: Bounds) -> Bounds:
    """Slopes that an activation may have there."""
    if isinstance(layer, nn.Tanh):
        return _bell(inside, _tanh_slope)
    if isinstance(layer, nn.ReLU):
        return Bounds((inside.low > 0).double(), (inside.high > 0).double())
    assert isinstance(layer, nn.SiLU)  # the encoder knows no other
    ends = torch.stack([_silu_slope(inside.low), _silu_slope(inside.high)])
    low, high = ends.amin(0), ends.amax(0)
    for place, largest in ((SILU_STEEPEST, True), (-SILU_STEEPEST, False)):
        within = (inside.low <= place) & (inside.high >= place)
        extreme = _silu_slope(torch.full_like(low, place))
        low, high = (low, torch.where(within, extreme, high)) if largest else (torch.where(within, extreme, low), high)
    return Bounds(low, high)


def _bell(inside: Bounds, slope: Callable[[Tensor], Tensor]) -> Bounds:
    """Slopes of a function whose slope is largest at 0 and falls on both sides alike."""
    nearest = torch.zeros_like(inside.low).clamp(inside.low, inside.high)
    return Bounds(slope(inside.size), slope(nearest))


def _tanh_slope(x: Tensor) -> Tensor:
    return 1.0 - torch.tanh(x).square()


def _sigmoid_slope(x: Tensor) -> Tensor:
    return torch.sigmoid(x) * torch.sigmoid(-x)


def _silu_slope(x: Tensor) -> Tensor:
    share = torch.sigmoid(x)
    return share * (1.0 + x * (1.0 - share))


def _to_env(head: GaussianHead, mean: Bounds) -> Bounds:
    """Bounds of the action from those of its raw mean."""
    low, high = head.low.double(), head.high.double()
    centre, half = 0.5 * (high + low), 0.5 * (high - low)
    bounds = mean.map(lambda raw: centre + half * torch.tanh(raw)) if head.squash else mean
    slack = ROUNDING * (half if head.squash else torch.ones_like(half))
    return Bounds((bounds.low - slack).clamp(low, high), (bounds.high + slack).clamp(low, high))


class CertifiedPolicy(AttackedPolicy):
    """An agent that sees the truth, and of each of whose decisions is known how far the ball could have moved it.

    It stands in for the agent as an `AttackedPolicy` does: run a backtest with it, then read `summary`.
    """

    def __init__(self, agent: AttackableAgent, attack: Attack, mask: Tensor | None = None) -> None:
        super().__init__(agent, attack, mask)
        self.shifts: list[Tensor] = []
        """Largest possible change of each decision, as a share of half the action's range, [N] each."""
        self.fixed: list[Tensor] = []
        """Whether its sign could not have turned in any action, [N] each."""

    def perturbed(
        self, obs: Tensor, memories: Memories, others: Memories, episode_start: Tensor
    ) -> tuple[Tensor, Memories]:
        bounds = self.bounds(obs, memories, episode_start)
        with torch.no_grad():
            clean = self.act(obs, memories, episode_start)[0].double()
        shift = torch.maximum(bounds.high - clean, clean - bounds.low) / self._half_width.double()
        self.shifts.append(shift.amax(-1))
        self.fixed.append(((bounds.low > 0) | (bounds.high < 0)).all(-1))
        return obs, others

    @torch.no_grad()
    def bounds(self, obs: Tensor, memories: Memories, episode_start: Tensor) -> Bounds:
        """Bounds of the agent's action on raw observations [N, O], in the environment's units, [N, A].

        Members of an ensemble are bounded one by one. Scaling clips, which can only bring two observations nearer.
        """
        radius = self.ball(obs).radius
        each = [
            step_bounds(
                member.network,
                member.scale(obs).nan_to_num(0.0, 0.0, 0.0),
                memory[0],
                episode_start,
                radius / member.units,
                self.attack.norm,
            )
            for member, memory in zip(self.networks, memories, strict=True)
        ]
        return Bounds(*(self.agent.combine([getattr(one, end) for one in each]) for end in ("low", "high")))

    def summary(self) -> dict[str, float]:
        """Largest possible changes over all decisions so far: their mean, 95th percentile and maximum, as shares of
        half the action's range, and the share of decisions whose sign could not have turned."""
        if not self.shifts:
            raise ConfigError("bounds: no decision has been made yet; run a backtest with this policy first")
        shifts, fixed = torch.cat(self.shifts), torch.cat(self.fixed)
        return {
            "mean": float(shifts.mean()),
            "p95": float(shifts.quantile(0.95)),
            "max": float(shifts.max()),
            "sign_fixed": float(fixed.double().mean()),
        }


def tightness(bounds: Bounds, clean: Tensor, attacked: Sequence[Tensor]) -> float:
    """Mean certified change over the mean of the largest change that attacks found: 1 is exact, more is loose."""
    certified = torch.maximum(bounds.high - clean, clean - bounds.low)
    found = torch.stack([(actions - clean).abs() for actions in attacked]).amax(0)
    return float(certified.mean() / found.mean())

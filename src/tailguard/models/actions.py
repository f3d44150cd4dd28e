"""Action heads: from features to a distribution over actions, and the quantities that PPO needs.

A head turns features into `dist_params`, one flat tensor [..., P] that a rollout can store. Everything else is a
function of `dist_params` and of the *raw* action [..., raw_size]: the one before squashing and scaling. Rollouts store
raw actions: the squashing is fixed, so its Jacobian cancels in PPO's ratio and in the KL divergence, whereas
undoing a tanh loses all digits near the bounds (in float32 atanh(tanh(10)) is infinite). Log-probabilities, entropies
and divergences are summed over the action's dimensions: one number per sample.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tailguard.envs.protocol import ActionSpace, Box, Discrete
from tailguard.errors import ConfigError
from tailguard.member_axis import is_logical
from tailguard.models.precision import full_precision

LOG_SQRT_2PI = 0.5 * math.log(2.0 * math.pi)

BOUND_MARGIN = 1e-3
"""`GaussianHead.from_env` moves an action that is closer to a bound than this share of the half-width to this
distance. The bounds themselves are at infinity before squashing; cloning them would drive the mean there. At 1e-3 the
target is atanh(0.999) = 3.8 and the action is off by at most 0.1 % of the half-width."""

AT_BOUND = 0.01
"""A squashed action that is nearer to a bound than this share of the half-width has a slope below 0.02."""

QUADRATURE_NODES = 32
QUADRATURE_RANGE = 5.5
"""Nodes of the squashed entropy's quadrature and their range in standard deviations."""


COLLAPSED = 0.01
"""Share of the range (of the largest entropy, for choices) below which a policy no longer explores."""


def gaussian_log_prob(mean: Tensor, log_std: Tensor, value: Tensor) -> Tensor:
    """Log density of N(mean, exp(log_std)²) at `value`, elementwise."""
    return -0.5 * ((value - mean) * torch.exp(-log_std)).square() - log_std - LOG_SQRT_2PI


def gaussian_kl(mean_old: Tensor, log_std_old: Tensor, mean_new: Tensor, log_std_new: Tensor) -> Tensor:
    """KL(old || new) between Gaussians, elementwise; exactly 0 for equal ones.

    expm1 keeps precision when the policies are close, as in PPO.
    """
    log_ratio = log_std_new - log_std_old
    shift = (mean_new - mean_old) * torch.exp(-log_std_new)
    return log_ratio + 0.5 * torch.expm1(-2.0 * log_ratio) + 0.5 * shift.square()


def log_tanh_slope(raw: Tensor) -> Tensor:
    """log(1 - tanh²(raw)), elementwise, without cancellation at large |raw|."""
    return 2.0 * (math.log(2.0) - raw - F.softplus(-2.0 * raw))


def squashed_gaussian_entropy(mean: Tensor, log_std: Tensor, nodes: int = QUADRATURE_NODES) -> Tensor:
    """Entropy of tanh(u), u ~ N(mean, exp(log_std)²), elementwise: H(u) + E[log(1 - tanh²(u))].

    The expectation has no closed form. The trapezoidal rule in (u - mean)/std converges geometrically for a smooth
    integrand with Gaussian decay (Trefethen & Weideman 2014): at 32 nodes the error is below 3e-7 for a standard
    deviation up to 1.6 and 3e-5 at 2.7, where Gauss-Hermite with as many nodes has 1.5e-3.
    """
    at = torch.linspace(-QUADRATURE_RANGE, QUADRATURE_RANGE, nodes, dtype=mean.dtype, device=mean.device)
    weights = torch.softmax(-0.5 * at.square(), dim=0)
    raw = mean.unsqueeze(-1) + torch.exp(log_std).unsqueeze(-1) * at
    # E[u] = mean is exact; a sum of products, as autocast would round a matrix product to bfloat16.
    expected_log_slope = 2.0 * (math.log(2.0) - mean - (F.softplus(-2.0 * raw) * weights).sum(-1))
    return 0.5 + LOG_SQRT_2PI + log_std + expected_log_slope


def bounded_log_std(free: Tensor, init: float, low: float, high: float) -> Tensor:
    """Map the whole line into (low, high), elementwise: 0 goes to `init` with slope 1.

    The arctangent flattens with the square of the distance, so that a σ at its bound still gets a gradient; a tanh or
    a softplus flattens exponentially, and a clamp has none at all.
    """
    span = torch.full_like(free, init - low).masked_fill(free > 0, high - init)
    return init + span * (2.0 / math.pi) * torch.atan(0.5 * math.pi * free / span)


class ActionHead(nn.Module, ABC):
    """The last layer of the policy and the distribution it parametrises."""

    raw_size: int
    """Width of a raw action."""
    dist_params_size: int
    """Width P of the distribution parameters."""

    linear: nn.Linear

    def forward(self, features: Tensor) -> Tensor:
        """Features [..., F] -> dist_params [..., P]."""
        return self.dist_params_of(self.output_of(features))

    def output_of(self, features: Tensor) -> Tensor:
        """Features [..., F] -> the linear layer's output."""
        return full_precision([self.linear], features)[0]

    @abstractmethod
    def dist_params_of(self, output: Tensor) -> Tensor:
        """The linear layer's output -> dist_params [..., P]."""

    @abstractmethod
    def mode_of(self, output: Tensor) -> Tensor:
        """The linear layer's output -> the raw action a deterministic policy takes, [..., raw_size]."""

    @abstractmethod
    def draw(self, shape: Sequence[int], generator: torch.Generator | None = None) -> Tensor:
        """Random numbers for rows [...] of this shape, which `sample_from_noise` turns into raw actions."""

    @abstractmethod
    def sample_from_noise(self, dist_params: Tensor, noise: Tensor) -> Tensor:
        """The raw action, [..., raw_size], from dist_params and random numbers."""

    def sample(self, dist_params: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Draw a raw action, [..., raw_size]."""
        return self.sample_from_noise(dist_params, self.draw(dist_params.shape[:-1], generator).to(dist_params))

    @abstractmethod
    def mode(self, dist_params: Tensor) -> Tensor:
        """The raw action a deterministic policy takes, [..., raw_size]."""

    @abstractmethod
    def log_prob(self, dist_params: Tensor, raw: Tensor) -> Tensor:
        """Log probability (or density) of the raw action, [...], as used in PPO's ratio."""

    @abstractmethod
    def log_prob_env(self, dist_params: Tensor, raw: Tensor) -> Tensor:
        """Log probability (or density) of the action the environment sees, [...]."""

    @abstractmethod
    def entropy(self, dist_params: Tensor) -> Tensor:
        """Entropy of the action the environment sees, [...]."""

    @abstractmethod
    def collapse_margin(self, dist_params: Tensor) -> Tensor:
        """Distance from a practically deterministic policy (1 %), [...]; below 0 the policy is one."""

    @abstractmethod
    def kl(self, old: Tensor, new: Tensor) -> Tensor:
        """Exact KL(old || new), [...]."""

    @abstractmethod
    def to_env(self, raw: Tensor) -> Tensor:
        """The action the environment sees."""

    @abstractmethod
    def from_env(self, action: Tensor) -> Tensor:
        """The raw action that `to_env` turns into `action`."""


class GaussianHead(ActionHead):
    """Independent Gaussians; dist_params are the means followed by the log standard deviations, [..., 2A].

    With `squash` the raw action goes through tanh and is scaled to the box. Without, the raw action is the action and
    `to_env` clips it to the box, as Stable-Baselines3 does; `log_prob_env` and `entropy` are then those of the action
    before clipping. The standard deviation is one learned number per dimension (`std="global"`) or a function of the
    features (`std="state"`), and stays inside `log_std_bounds` (see `bounded_log_std`).
    """

    low: Tensor
    high: Tensor
    _centre: Tensor
    _half_width: Tensor
    exploration: Tensor
    """Log of a factor on the standard deviation that the learner may change at any time; not among the weights."""
    quadrature_nodes = QUADRATURE_NODES

    def __init__(
        self,
        feature_size: int,
        box: Box,
        squash: bool = True,
        std: Literal["global", "state"] = "global",
        log_std_init: float = -0.5,
        log_std_bounds: tuple[float, float] = (-5.0, 1.0),
    ) -> None:
        super().__init__()
        _check_gaussian(box, squash, std, log_std_init, log_std_bounds)
        self.squash = squash
        self.std = std
        self.log_std_init = log_std_init
        self.log_std_bounds = log_std_bounds
        self.raw_size = box.size
        self.dist_params_size = 2 * box.size
        self.linear = _near_zero_linear(feature_size, box.size if std == "global" else 2 * box.size)
        self.free_log_std = nn.Parameter(torch.zeros(box.size)) if std == "global" else None
        self.register_buffer("low", box.low.to(torch.get_default_dtype()), persistent=False)
        self.register_buffer("high", box.high.to(torch.get_default_dtype()), persistent=False)
        self.register_buffer("_centre", 0.5 * (self.high + self.low), persistent=False)
        self.register_buffer("_half_width", 0.5 * (self.high - self.low), persistent=False)
        self._is_unit_box = bool((self.low == -1).all()) and bool((self.high == 1).all())
        self.register_buffer("exploration", torch.zeros(()), persistent=False)

    def dist_params_of(self, output: Tensor) -> Tensor:
        if self.free_log_std is None:
            mean, free = output.chunk(2, dim=-1)
        else:
            mean, free = output, self.free_log_std.expand_as(output)
        log_std = bounded_log_std(free, self.log_std_init, *self.log_std_bounds) + self.exploration
        return torch.cat((mean, log_std.expand_as(mean)), dim=-1)

    def mode_of(self, output: Tensor) -> Tensor:
        return output if self.free_log_std is not None else output.chunk(2, dim=-1)[0]

    def draw(self, shape: Sequence[int], generator: torch.Generator | None = None) -> Tensor:
        weight = self.linear.weight
        return torch.randn((*shape, self.raw_size), generator=generator, dtype=weight.dtype, device=weight.device)

    def sample_from_noise(self, dist_params: Tensor, noise: Tensor) -> Tensor:
        mean, log_std = dist_params.chunk(2, dim=-1)
        return mean + torch.exp(log_std) * noise

    def mode(self, dist_params: Tensor) -> Tensor:
        """The mean: with `squash` the median of the action."""
        mean, _ = dist_params.chunk(2, dim=-1)
        return mean

    def log_prob(self, dist_params: Tensor, raw: Tensor) -> Tensor:
        mean, log_std = dist_params.chunk(2, dim=-1)
        return gaussian_log_prob(mean, log_std, raw).sum(-1)

    def log_prob_env(self, dist_params: Tensor, raw: Tensor) -> Tensor:
        log_prob = self.log_prob(dist_params, raw)
        if not self.squash:
            return log_prob
        return log_prob - (log_tanh_slope(raw) + self._log_half_width).sum(-1)

    def entropy(self, dist_params: Tensor) -> Tensor:
        mean, log_std = dist_params.chunk(2, dim=-1)
        if not self.squash:
            return (0.5 + LOG_SQRT_2PI + log_std).sum(-1)
        return (squashed_gaussian_entropy(mean, log_std, self.quadrature_nodes) + self._log_half_width).sum(-1)

    def collapse_margin(self, dist_params: Tensor) -> Tensor:
        """Log of the standard deviation over 1 % of the range's half, mean over the dimensions. Before squashing: a
        policy that rests at the end of its range may still explore, and one that rests in the middle may not. The
        scheduled exploration factor does not count."""
        half = torch.ones_like(self.low) if self.squash else self._half_width.nan_to_num(posinf=1.0)
        return (dist_params.chunk(2, dim=-1)[1] - self.exploration - torch.log(COLLAPSED * half)).mean(-1)

    def kl(self, old: Tensor, new: Tensor) -> Tensor:
        """Squashing is one-to-one, so the KL divergence of the squashed policies is that of the Gaussians."""
        return gaussian_kl(*old.chunk(2, dim=-1), *new.chunk(2, dim=-1)).sum(-1)

    def to_env(self, raw: Tensor) -> Tensor:
        if self.squash and self._is_unit_box:
            return torch.tanh(raw)  # neither scaled nor rounded beyond a bound
        if self.squash and raw.requires_grad and not is_logical(raw):
            box = self._centre, self._half_width, self.low, self.high
            squashed: Tensor = _Squashed.apply(raw, *box)  # type: ignore[no-untyped-call]
            return squashed
        action = self._centre + self._half_width * torch.tanh(raw) if self.squash else raw
        return torch.clamp(action, self.low, self.high)  # scaling rounds, and may exceed a bound by the last digit

    def from_env(self, action: Tensor) -> Tensor:
        """Exact up to rounding, but with `squash` not nearer to a bound than `BOUND_MARGIN` allows."""
        if not self.squash:
            return action
        limit = 1.0 - BOUND_MARGIN
        return torch.atanh(((action - self._centre) / self._half_width).clamp(-limit, limit))

    def at_bounds(self, raw: Tensor) -> Tensor:
        """Where the environment's action hardly moves with the raw one, bool like `raw`.

        A tanh flattens as it comes near a bound; a clipped action moves freely until it is there.
        """
        action = self.to_env(raw)
        margin = AT_BOUND * self._half_width if self.squash else torch.zeros_like(self.low)
        return (action <= self.low + margin) | (action >= self.high - margin)

    @property
    def _log_half_width(self) -> Tensor:
        return torch.log(self._half_width)


class _Squashed(torch.autograd.Function):
    """`GaussianHead.to_env` as one node of the graph: a gradient through the environment meets it at every step."""

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> Tensor:
        raw, centre, half_width, low, high = inputs
        shown = torch.tanh(raw)
        action = centre + half_width * shown
        ctx.save_for_backward(shown, half_width, (action >= low) & (action <= high))
        return torch.clamp(action, low, high)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        shown, half_width, inside = ctx.saved_tensors
        slope = torch.where(inside, gradients[0], 0.0) * half_width
        return torch.ops.aten.tanh_backward(slope, shown), None, None, None, None


class CategoricalHead(ActionHead):
    """Independent choices: dist_params are their logits side by side, [..., Σ sizes], raw actions [..., K] int64."""

    def __init__(self, feature_size: int, space: Discrete) -> None:
        super().__init__()
        if not space.sizes or min(space.sizes) < 1:
            raise ConfigError(
                f"a discrete action space needs one or more choices of at least 1; got sizes {space.sizes}"
            )
        self.sizes = list(space.sizes)
        self.raw_size = len(space.sizes)
        self.dist_params_size = sum(space.sizes)
        self.linear = _near_zero_linear(feature_size, self.dist_params_size)

    def dist_params_of(self, output: Tensor) -> Tensor:
        return output

    def mode_of(self, output: Tensor) -> Tensor:
        return self.mode(output)

    def draw(self, shape: Sequence[int], generator: torch.Generator | None = None) -> Tensor:
        weight = self.linear.weight
        return torch.rand(
            (*shape, self.dist_params_size), generator=generator, dtype=weight.dtype, device=weight.device
        )

    def sample_from_noise(self, dist_params: Tensor, noise: Tensor) -> Tensor:
        """The Gumbel-max trick: the largest of logit - log(-log(uniform)); nothing is read back from the device."""
        return self.mode(dist_params - torch.log(-torch.log(noise)))

    def mode(self, dist_params: Tensor) -> Tensor:
        return torch.stack([logits.argmax(-1) for logits in torch.split(dist_params, self.sizes, dim=-1)], dim=-1)

    def log_prob(self, dist_params: Tensor, raw: Tensor) -> Tensor:
        chosen = [
            log_probabilities.gather(-1, choice)
            for log_probabilities, choice in zip(
                self._log_probabilities(dist_params), torch.split(raw, 1, dim=-1), strict=True
            )
        ]
        return torch.cat(chosen, dim=-1).sum(-1)

    def log_prob_env(self, dist_params: Tensor, raw: Tensor) -> Tensor:
        return self.log_prob(dist_params, raw)

    def entropy(self, dist_params: Tensor) -> Tensor:
        log_probabilities = torch.cat(self._log_probabilities(dist_params), dim=-1)
        return -(log_probabilities.exp() * log_probabilities).sum(-1)

    def collapse_margin(self, dist_params: Tensor) -> Tensor:
        """Entropy above 1 % of that of a uniform policy."""
        return self.entropy(dist_params) - COLLAPSED * sum(math.log(size) for size in self.sizes)

    def kl(self, old: Tensor, new: Tensor) -> Tensor:
        log_old = torch.cat(self._log_probabilities(old), dim=-1)
        log_new = torch.cat(self._log_probabilities(new), dim=-1)
        return (log_old.exp() * (log_old - log_new)).sum(-1)

    def to_env(self, raw: Tensor) -> Tensor:
        return raw

    def from_env(self, action: Tensor) -> Tensor:
        return action.to(torch.int64)

    def _log_probabilities(self, dist_params: Tensor) -> list[Tensor]:
        """K tensors [..., size]"""
        return [torch.log_softmax(logits, dim=-1) for logits in torch.split(dist_params, self.sizes, dim=-1)]


def make_action_head(feature_size: int, action_space: ActionSpace, **options: Any) -> ActionHead:
    """The head for an action space. `options` are those of `GaussianHead`; discrete actions have none."""
    if isinstance(action_space, Box):
        return GaussianHead(feature_size, action_space, **options)
    if options:
        raise ConfigError(f"discrete actions take no options; remove {', '.join(sorted(options))}")
    return CategoricalHead(feature_size, action_space)


def _near_zero_linear(feature_size: int, output_size: int) -> nn.Linear:
    """A gain of 0.01 lets the first policy be nearly the same in every state (Andrychowicz et al. 2021)."""
    linear = nn.Linear(feature_size, output_size)
    nn.init.orthogonal_(linear.weight, gain=0.01)
    nn.init.zeros_(linear.bias)
    return linear


def _check_gaussian(box: Box, squash: bool, std: str, log_std_init: float, log_std_bounds: tuple[float, float]) -> None:
    for i, (low, high) in enumerate(zip(box.low.tolist(), box.high.tolist(), strict=True)):
        if not low < high:
            raise ConfigError(f"action {i}: low {low} is not below high {high}")
        if squash and not (math.isfinite(low) and math.isfinite(high)):
            raise ConfigError(
                f"action {i}: bounds [{low}, {high}] are not finite, so a squashed action cannot be scaled to them; "
                "give finite bounds or set squash to false"
            )
    if std not in ("global", "state"):
        raise ConfigError(f"std {std!r} is not known; choose global or state")
    if not log_std_bounds[0] < log_std_init < log_std_bounds[1]:
        raise ConfigError(
            f"log_std_init {log_std_init} must lie strictly inside log_std_bounds "
            f"({log_std_bounds[0]}, {log_std_bounds[1]})"
        )

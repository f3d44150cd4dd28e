"""Variance gradient scaling: smaller steps where the gradient is mostly noise.

For a gradient with mean μ and variance σ² per element, the step that gains most on a quadratic is 1 / (1 + NSR) of the
noise-free one, where NSR = Σσ² / Σμ² over the elements: the noise-to-signal ratio, which is McCandlish et al.'s "simple
noise scale" divided by the batch size ("An Empirical Model of Large-Batch Training", 2018; Balles & Hennig, "Dissecting
Adam", ICML 2018, for the factor). Noise is the variation of one element from step to step; differences
between elements are not part of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.optim import SGD, Adadelta, Adagrad, Adamax, NAdam, Optimizer, RAdam, RMSprop

from tailguard.deprecated import renamed_method
from tailguard.errors import ConfigError
from tailguard.optim.registry import kind_of
from tailguard.optim.utility import bias_correction
from tailguard.validate import check_choice, check_count, check_range

Application = Literal["auto", "gradient", "learning_rate"]
Granularity = Literal["global", "per_tensor"]
Moments = Literal["own", "optimizer"]

PROPORTIONAL = (SGD,)
"""Optimisers of torch, beside the registered ones, whose step grows with the gradient."""
SCALE_FREE = (NAdam, RAdam, Adamax, RMSprop, Adagrad, Adadelta)
"""Those that divide the gradient by its own size, so a factor on it cancels out."""
ADAM_MOMENTS = (NAdam, RAdam)
"""Those that keep Adam's averages of the gradient and its square."""


def squared_weight_sum(beta: float, steps: Tensor) -> Tensor:
    """Σ w² over the weights of a bias-corrected running average: the share of the noise that remains in it.

    (1 − β)/(1 + β) · (1 + β^t)/(1 − β^t): 1 for a single gradient, (1 − β)/(1 + β) in the long run.

    steps: [P], at least 1 each → [P]
    """
    correction = bias_correction(beta, steps)
    return (1 - beta) / (1 + beta) * (2 - correction) / correction


def noise_and_signal(mean_square: Tensor, second_moment: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Unbiased Σσ² and Σμ² of a tensor's elements from running averages M of its gradient and V of the square.

    E[V] = μ² + σ² and E[M²] = μ² + weight · σ², whatever weights V was averaged with. The signal is not clipped at
    zero: sums over tensors stay unbiased only if it may be negative.

    mean_square: Σ M², [P]; second_moment: Σ V, [P]; weight: `squared_weight_sum` of M's weights, [P]
    returns: two [P]; where M holds a single gradient the noise is unknown and comes out as 0
    """
    spread = (second_moment - mean_square).clamp(min=0.0)
    noise = torch.where(weight < 1 - 1e-9, spread / (1 - weight), 0.0)
    return noise, mean_square - weight * noise


@dataclass(frozen=True)
class NoiseToSignal:
    """Noise-to-signal ratios, float64, capped at `max_nsr`; 0 as long as the warm-up lasts."""

    total: Tensor
    """[]: of all tensors that had a gradient at the last update, taken together"""
    per_tensor: Tensor
    """[P]: of each tensor by itself, in the order of the parameters"""


class VarianceGradientScaler:
    """Multiplies every step by s = 1 / (1 + α · NSR), clipped to [min_scale, 1].

    Complete use, if nothing happens between `backward` and the step:

        scaler = VarianceGradientScaler(optimizer)
        loss.backward()
        scaler.step()

    With gradient clipping, in this order:

        scaler.update_statistics()      # raw gradients
        scaler.scale_gradients()        # does nothing where the learning rate is scaled instead
        clip_grad_norm_(parameters, 0.5)
        scaler.optimizer_step()

    Each method reads no value on the host, so it never synchronises with the device, and works in the same storage at
    every step, so it can be recorded in a CUDA graph. A parameter without a gradient is left out: its statistics stay
    and do not count for the step's factor.

    Memory: the mean gradient, one number for every weight. Its square needs none, since only its sum over a tensor is
    ever used, and the sum of running averages is the running average of the sum.
    """

    def __init__(
        self,
        params_or_optimizer: Iterable[Tensor] | Optimizer,
        *,
        alpha: float = 1.0,
        beta: float = 0.99,
        min_scale: float = 0.1,
        max_nsr: float = 1e4,
        warmup_steps: int = 100,
        granularity: Granularity = "global",
        apply: Application = "auto",
        moments: Moments = "own",
    ) -> None:
        """params_or_optimizer: an optimiser, or parameters whose gradients are to be scaled for one that is elsewhere.

        alpha: weight of the noise; 1 is the optimal factor for descent, 0 switches the scaling off
        beta: decay of the running averages; 0.99 averages about 100 gradients
        min_scale: lowest factor
        max_nsr: highest noise-to-signal ratio; without a signal it would be infinite
        warmup_steps: gradients of a tensor to see before they count; until then its factor is 1
        granularity: `global`, one factor, which keeps the direction of the gradient and is estimated from all weights;
            `per_tensor`, one for each tensor, which turns the step towards tensors with little noise and is a
            rough estimate for small ones
        apply: `gradient` multiplies gradients, `learning_rate` the steps that the optimiser takes; `auto` selects
            the one that works for the optimisers of torch, Tailguard and those registered
        moments: `own`, from the gradients at `update_statistics`; `optimizer`, from the `exp_avg` and `exp_avg_sq`
            of Adam and similar optimisers, which takes no memory but sees clipped gradients, one step late
        """
        check_range("alpha", alpha, low=0, high_open=True)
        check_range("beta", beta, low=0, high=1, low_open=True, high_open=True)
        check_range("min_scale", min_scale, low=0, high=1, low_open=True)
        check_range("max_nsr", max_nsr, low=0, low_open=True, high_open=True)
        check_count("warmup_steps", warmup_steps)
        check_choice("granularity", granularity, ("global", "per_tensor"))
        check_choice("apply", apply, ("auto", "gradient", "learning_rate"))
        check_choice("moments", moments, ("own", "optimizer"))
        self.alpha, self.beta = alpha, beta
        self.min_scale, self.max_nsr, self.warmup_steps = min_scale, max_nsr, warmup_steps
        self.granularity, self.moments = granularity, moments
        self.optimizer = params_or_optimizer if isinstance(params_or_optimizer, Optimizer) else None
        self.parameters = _check_parameters(
            _parameters_of(params_or_optimizer) if isinstance(params_or_optimizer, Optimizer) else params_or_optimizer
        )
        self.scales_gradients = _choose_application(apply, self.optimizer) == "gradient"
        if moments == "optimizer":
            _check_moments(self.optimizer)
        device = self.parameters[0].device
        self._steps, self._second_moment, self._noise, self._signal = (
            torch.zeros(len(self.parameters), dtype=torch.float64, device=device) for _ in range(4)
        )
        self._present = torch.zeros(len(self.parameters), dtype=torch.bool, device=device)
        self._pattern = (False,) * len(self.parameters)
        # Half precision cannot hold an average: a hundredth of a gradient is rounded away.
        self._means = [
            torch.zeros_like(parameter, dtype=_averaging_dtype(parameter), requires_grad=False)
            for parameter in (self.parameters if moments == "own" else ())
        ]

    # --- the three parts of a step ------------------------------------------------------------------------------

    @torch.no_grad()
    def update_statistics(self) -> None:
        """Update the statistics with the current gradients; call it before they are scaled or clipped."""
        self._notice_gradients()
        mean_square, second_moment, weight = (
            self._average_gradients() if self.moments == "own" else self._read_optimizer()
        )
        noise, signal = noise_and_signal(mean_square, second_moment, weight)
        self._noise.copy_(noise)
        self._signal.copy_(signal)

    @torch.no_grad()
    def scale_gradients(self) -> None:
        """Multiply the gradients by the factor, once per call; does nothing where the learning rate is scaled."""
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        if not self.scales_gradients or not gradients:
            return
        if self.granularity == "global":
            torch._foreach_mul_(gradients, self.get_scaling_factor().to(gradients[0].dtype))
        else:
            torch._foreach_mul_(gradients, self._factors_like(gradients))

    @torch.no_grad()
    def optimizer_step(self) -> None:
        """Let the optimiser take its step, shortened by the factor where gradients are not scaled."""
        if self.optimizer is None:
            raise ConfigError("optimizer_step: this scaler was built from parameters; build it from the optimiser")
        if self.scales_gradients:
            self.optimizer.step()
            return
        rates = {id(group["lr"]): group["lr"] for group in self.optimizer.param_groups}.values()
        tensors = [rate for rate in rates if isinstance(rate, Tensor) and rate.device == self._steps.device]
        if self.granularity == "global" and len(tensors) == len(rates):
            self._step_at_scaled_rates(self.optimizer, tensors)
        else:
            self._step_and_pull_back(self.optimizer)

    def step(self) -> None:
        """Update the statistics, scale, and let the optimiser step if the scaler was built from one."""
        self.update_statistics()
        self.scale_gradients()
        if self.optimizer is not None:
            self.optimizer_step()

    # --- statistics ---------------------------------------------------------------------------------------------

    @torch.no_grad()
    def get_normalized_variance(self) -> NoiseToSignal:
        """Σσ² / Σμ², of everything and of each tensor. A ratio of sums: it depends on neither sizes nor units."""
        return NoiseToSignal(self._total_ratio(), self._ratio_per_tensor())

    @torch.no_grad()
    def get_scaling_factor(self) -> Tensor:
        """The factor of the next step, float64: [] for granularity `global`, [P] for `per_tensor`."""
        ratio = self._total_ratio() if self.granularity == "global" else self._ratio_per_tensor()
        return (1 / (1 + self.alpha * ratio)).clamp(self.min_scale, 1.0)

    @torch.no_grad()
    def metrics(self) -> dict[str, Tensor]:
        """Metrics to log, as 0-dim tensors.

        `vgs/nsr`: noise-to-signal ratio of everything; `vgs/nsr_median`, `vgs/nsr_max`: of the tensors, each by
        itself. `vgs/noise`, `vgs/signal`: Σσ² and Σμ² of the tensors that had a gradient. `vgs/scale`: the factor,
        its mean over the tensors where each has its own.
        """
        ratio = self.get_normalized_variance()
        return {
            "vgs/nsr": ratio.total,
            "vgs/nsr_median": ratio.per_tensor.median(),
            "vgs/nsr_max": ratio.per_tensor.max(),
            "vgs/noise": torch.where(self._present, self._noise, 0.0).sum(),
            "vgs/signal": torch.where(self._present, self._signal, 0.0).sum(),
            "vgs/scale": self.get_scaling_factor().mean(),
        }

    figures = renamed_method("figures", "metrics")

    @torch.no_grad()
    def rescale(self, parameter: Tensor, factor: Tensor) -> None:
        """Carry a parameter's statistics over to a loss whose gradient for it is `factor` times what it was."""
        index = self._index_of(parameter)
        for sums in (self._second_moment, self._noise, self._signal):
            sums[index].mul_(factor.square())
        if self._means:
            self._means[index].mul_(factor)

    @torch.no_grad()
    def forget(self, parameter: Tensor) -> None:
        """Reset a parameter's statistics, because its past gradients carry no information about future ones."""
        index = self._index_of(parameter)
        for sums in (self._steps, self._second_moment, self._noise, self._signal):
            sums[index].zero_()
        if self._means:
            self._means[index].zero_()

    def statistics(self) -> list[Tensor]:
        """The tensors that `update_statistics` changes, themselves."""
        return [self._steps, self._second_moment, self._noise, self._signal, *self._means]

    def _index_of(self, parameter: Tensor) -> int:
        return next(index for index, mine in enumerate(self.parameters) if mine is parameter)

    def state_dict(self) -> dict[str, Tensor]:
        """Copies of the complete state, one flat dictionary."""
        return {name: value.clone() for name, value in self._state().items()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore a saved state, in the same storage."""
        mine = self._state()
        if state.keys() != mine.keys():
            different = sorted(state.keys() ^ mine.keys())
            raise ConfigError(
                f"variance scaler: the saved state differs from this one's in {', '.join(different[:3])}; build it "
                f"with as many parameters ({len(self.parameters)} here) and the same moments ({self.moments!r} here)"
            )
        for name, value in mine.items():
            if state[name].shape != value.shape:
                raise ConfigError(
                    f"variance scaler: saved {name} has shape {tuple(state[name].shape)}, this one needs "
                    f"{tuple(value.shape)}; use the parameters it was saved with, in the same order"
                )
        for name, value in mine.items():
            value.copy_(state[name])
        self._pattern = tuple(self._present.tolist())

    # --- statistics ---------------------------------------------------------------------------------------------

    def _state(self) -> dict[str, Tensor]:
        return {
            "steps": self._steps,
            "second_moment": self._second_moment,
            "noise": self._noise,
            "signal": self._signal,
            "present": self._present,
            **{f"mean.{index}": mean for index, mean in enumerate(self._means)},
        }

    def _notice_gradients(self) -> None:
        """Mark the parameters that have a gradient now."""
        if self.optimizer is not None:
            count = sum(len(group["params"]) for group in self.optimizer.param_groups)
            if count != len(self.parameters):
                raise ConfigError(
                    f"variance scaler: the optimiser has {count} parameters, {len(self.parameters)} when the scaler "
                    "was built; add parameter groups before building it"
                )
        for index, parameter in enumerate(self.parameters):
            if parameter.grad is not None and parameter.grad.layout != torch.strided:
                raise ConfigError(
                    f"variance scaler: parameter {index} of shape {tuple(parameter.shape)} has a sparse gradient; "
                    "build its layer with sparse=False"
                )
        pattern = tuple(parameter.grad is not None for parameter in self.parameters)
        if pattern != self._pattern:
            self._pattern = pattern
            # From values on the device: a learner whose steps alternate between parts changes it inside a CUDA graph.
            flags = self._present.new_zeros(()), self._present.new_ones(())
            self._present.copy_(torch.stack([flags[has_gradient] for has_gradient in pattern]))

    def _average_gradients(self) -> tuple[Tensor, Tensor, Tensor]:
        """Advance the running averages; Σ M², Σ V and Σ w² of every tensor, [P] each."""
        self._steps.add_(self._present)
        steps = self._steps.clamp(min=1.0)
        # The gain (1 − β)/(1 − β^t) keeps the averages bias-corrected at all times. A gradient that never changes
        # then leaves them equal to it to the last bit, and its variance is 0 rather than rounding.
        gains = (1 - self.beta) / bias_correction(self.beta, steps)
        present = [index for index, has_gradient in enumerate(self._pattern) if has_gradient]
        if present:
            means = [self._means[index] for index in present]
            gradients = [_gradient(self.parameters[index]).to(self._means[index].dtype) for index in present]
            torch._foreach_lerp_(means, gradients, _pick(gains, present, means))
            norms = [self._steps.new_zeros(())] * len(self.parameters)
            for index, norm in zip(present, torch._foreach_norm(gradients), strict=True):
                norms[index] = norm
            self._second_moment.lerp_(torch.stack(norms).double().square(), gains * self._present)
        mean_square = torch.stack(torch._foreach_norm(self._means)).double().square()
        return mean_square, self._second_moment, squared_weight_sum(self.beta, steps)

    def _read_optimizer(self) -> tuple[Tensor, Tensor, Tensor]:
        """The same from the averages that the optimiser keeps; zeros for parameters it has not moved yet."""
        assert self.optimizer is not None  # checked when the scaler was built
        zero = self._steps.new_zeros(())
        mean_squares, second_moments, weights, counts = [], [], [], []
        for group in filter(lambda group: group["params"], self.optimizer.param_groups):
            first, second = group["betas"]
            states = [self.optimizer.state.get(parameter) for parameter in group["params"]]
            dtypes = [_averaging_dtype(parameter) for parameter in group["params"]]
            norms = [
                torch.linalg.vector_norm(state["exp_avg"], dtype=dtype) if state else zero
                for state, dtype in zip(states, dtypes, strict=True)
            ]
            squares = [
                state["exp_avg_sq"].sum(dtype=dtype) if state else zero
                for state, dtype in zip(states, dtypes, strict=True)
            ]
            taken = [torch.as_tensor(state["step"]).to(zero, non_blocking=True) if state else zero for state in states]
            counts.append(torch.stack(taken))
            steps = counts[-1].clamp(min=1.0)
            mean_squares.append((torch.stack(norms).double() / bias_correction(first, steps)).square())
            second_moments.append(torch.stack(squares).double() / bias_correction(second, steps))
            weights.append(squared_weight_sum(first, steps))
        self._steps.copy_(torch.cat(counts))
        return torch.cat(mean_squares), torch.cat(second_moments), torch.cat(weights)

    def _total_ratio(self) -> Tensor:
        counted = self._present & (self._steps > self.warmup_steps)
        return self._ratio(*(torch.where(counted, part, 0.0).sum() for part in (self._noise, self._signal)))

    def _ratio_per_tensor(self) -> Tensor:
        return self._ratio(torch.where(self._steps > self.warmup_steps, self._noise, 0.0), self._signal)

    def _ratio(self, noise: Tensor, signal: Tensor) -> Tensor:
        return (noise / signal.clamp(min=torch.finfo(signal.dtype).tiny)).clamp(max=self.max_nsr)

    # --- steps --------------------------------------------------------------------------------------------------

    def _factors_like(self, tensors: list[Tensor]) -> list[Tensor]:
        """The factor of each of `tensors`, which belong to the parameters that have a gradient."""
        present = [index for index, parameter in enumerate(self.parameters) if parameter.grad is not None]
        return _pick(self.get_scaling_factor().expand(len(self.parameters)), present, tensors)

    def _step_at_scaled_rates(self, optimizer: Optimizer, rates: list[Tensor]) -> None:
        kept = [rate.clone() for rate in rates]
        factor = self.get_scaling_factor()
        for rate in rates:
            rate.mul_(factor)
        try:
            optimizer.step()
        finally:
            for rate, value in zip(rates, kept, strict=True):
                rate.copy_(value)

    def _step_and_pull_back(self, optimizer: Optimizer) -> None:
        """Step, then undo a part of it: the effect of a scaled learning rate, without reading the factor.

        A number in a parameter group could be scaled only with a device synchronisation, and applies to the whole
        group.
        """
        moved = [parameter for parameter in self.parameters if parameter.grad is not None]
        places = [parameter.clone() for parameter in moved]
        optimizer.step()
        if moved:
            torch._foreach_lerp_(places, moved, self._factors_like(moved))
            torch._foreach_copy_(moved, places)


def _parameters_of(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _pick(values: Tensor, indices: Sequence[int], tensors: Sequence[Tensor]) -> list[Tensor]:
    """The elements of `values` [P] at `indices` as 0-dim tensors, each in the dtype of the tensor it is meant for."""
    parts = {dtype: values.to(dtype).unbind() for dtype in {tensor.dtype for tensor in tensors}}
    return [parts[tensor.dtype][index] for index, tensor in zip(indices, tensors, strict=True)]


def _averaging_dtype(parameter: Tensor) -> torch.dtype:
    return torch.promote_types(parameter.dtype, torch.float32)


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None  # only parameters with a gradient are used
    return parameter.grad


def _check_parameters(parameters: Iterable[Tensor]) -> list[Tensor]:
    checked = list(parameters)
    if not checked:
        raise ConfigError("variance scaler: no parameters; give the model's parameters() or an optimiser that has some")
    if len({id(parameter) for parameter in checked}) < len(checked):
        raise ConfigError("variance scaler: a parameter is given twice and would be scaled twice; give each one once")
    for index, parameter in enumerate(checked):
        if not isinstance(parameter, Tensor) or not parameter.is_floating_point():
            kind = parameter.dtype if isinstance(parameter, Tensor) else type(parameter).__name__
            raise ConfigError(f"variance scaler: parameter {index} is {kind}; it must be a real floating-point tensor")
    devices = sorted({str(parameter.device) for parameter in checked})
    if len(devices) > 1:
        raise ConfigError(f"variance scaler: parameters on {' and '.join(devices)}; build one scaler for each device")
    return checked


def _choose_application(apply: Application, optimizer: Optimizer | None) -> Application:
    if optimizer is None:
        if apply == "learning_rate":
            raise ConfigError(
                "apply: 'learning_rate' needs the optimiser; build the scaler from it, or multiply the learning rate "
                "by get_scaling_factor() yourself"
            )
        return "gradient"
    if apply != "auto":
        return apply
    kind = kind_of(optimizer)
    if isinstance(optimizer, SCALE_FREE) or (kind is not None and kind.scale_free):
        return "learning_rate"
    if isinstance(optimizer, PROPORTIONAL) or kind is not None:
        return "gradient"
    raise ConfigError(
        f"apply: 'auto' does not know {type(optimizer).__name__}; say 'gradient' if its step grows with the gradient, "
        "'learning_rate' if a factor on the gradient cancels out in it"
    )


def _check_moments(optimizer: Optimizer | None) -> None:
    name = "parameters alone" if optimizer is None else type(optimizer).__name__
    kind = None if optimizer is None else kind_of(optimizer)
    known = isinstance(optimizer, ADAM_MOMENTS) or (kind is not None and kind.adam_moments)
    if optimizer is None or not known:
        raise ConfigError(f"moments: {name} cannot give 'optimizer' moments; use Adam or its like, or 'own'")
    for group in optimizer.param_groups:
        # Without an average of the gradient, noise and signal cannot be separated.
        check_range("moments: betas[0] of the optimiser", float(group["betas"][0]), low=0, high=1, low_open=True)

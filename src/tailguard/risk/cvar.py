"""CVaR and VaR of returns from midpoint quantiles, samples, or the atoms of a categorical critic.

Returns: higher is better. CVaR_α = (1/α) ∫₀^α F⁻¹(τ) dτ is the mean of the worst share α of them, VaR_α = F⁻¹(α); the
expected shortfall of the loss is −CVaR_α. Every function is pure, differentiable, batched over the leading dimensions
and never waits for the device. A NaN among the quantiles or samples of a row makes that row's result NaN; infinite
values are not supported.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from tailguard.errors import ConfigError
from tailguard.models.critics import midpoints
from tailguard.validate import check_choice, check_count, check_range

TailMethod = Literal["tukey", "probit"]

# At h = ½ the variance of a Tukey h-distribution becomes infinite; a few quantiles cannot establish more.
MAX_HEAVINESS = 0.5

# Beyond it the fitted Pareto's mean, hence its CVaR, divides by nearly zero.
MAX_PARETO_SHAPE = 0.9

# Where Φ is 1 and φ is 0 in float64: used for Φ⁻¹(1), which is infinite.
_FAR = 40.0

_SQRT_TWO_PI = math.sqrt(2.0 * math.pi)


def cvar_from_quantiles(quantiles: Tensor, alpha: float, method: TailMethod = "tukey") -> Tensor:
    """CVaR_α from N midpoint quantiles, for every α in (0, 1], also below the outermost level 1/(2N).

    F⁻¹ is piecewise linear in x(z) through the sorted quantiles, where z = Φ⁻¹(τ), its outer segments extend to
    infinity, and the integral over [0, α] is exact.

    * "probit": x = z; exact for every Normal at every N and α. The result is a fixed weighted sum of the quantiles.
    * "tukey":  x = z·exp(h z²/2) (Tukey's h-distributions, Hoaglin 1985), with h ≥ 0 measured on each half of the
      quantiles (see `tail_heaviness`). h is 0 for every Normal, which thus stays exact; so is every h-distribution.

    Affine equivariant for positive scales, and increasing in α. At α = 1 it is the mean of the interpolated
    distribution: the centre of symmetric quantiles, but not in general their average, which has no outer tails.

    quantiles: [..., N] at the levels (i + ½)/N, N ≥ 2, in any order
    returns:   [...], dtype of the quantiles
    """
    _check_alpha(alpha)
    check_choice("method", method, ("tukey", "probit"))
    ordered, dtype = _sorted_quantiles(quantiles)
    grid = _probit_grid(ordered.shape[-1], alpha, ordered.dtype, ordered.device)
    if method == "probit":
        cvar = ordered @ grid.probit_weights
    else:
        cvar = _tail_mean(ordered, grid, *_both_sides(ordered, grid))
    return _keep_nan(cvar, ordered[..., -1]).to(dtype)


def var_from_quantiles(quantiles: Tensor, alpha: float, method: TailMethod = "tukey") -> Tensor:
    """VaR_α = F⁻¹(α), α in (0, 1), of the quantile function that `cvar_from_quantiles` integrates.

    quantiles: [..., N] at the levels (i + ½)/N, N ≥ 2, in any order
    returns:   [...], dtype of the quantiles
    """
    check_range("alpha", alpha, low=0.0, high=1.0, low_open=True, high_open=True)
    check_choice("method", method, ("tukey", "probit"))
    ordered, dtype = _sorted_quantiles(quantiles)
    grid = _probit_grid(ordered.shape[-1], alpha, ordered.dtype, ordered.device)
    none = ordered.new_zeros(())
    low, high = _both_sides(ordered, grid) if method == "tukey" else (none, none)
    x, x_alpha = _stretch(grid.z, low, high), _stretch(grid.z_alpha, low, high)
    below, above = ordered[..., grid.last], ordered[..., grid.last + 1]
    slope = (above - below) / (x[..., grid.last + 1] - x[..., grid.last])
    var = below + slope * (x_alpha.squeeze(-1) - x[..., grid.last])
    return _keep_nan(var, ordered[..., -1]).to(dtype)


def tail_heaviness(quantiles: Tensor) -> Tensor:
    """Tukey's h of the lower half of the distribution: 0 where it is no heavier than a Normal, at most ½.

    The tail index is 1/h: about 0.12 for Student's t with 5 degrees of freedom and 0.22 with 3, at N = 32.

    With the median m and y_i = (m − q_i)/|z_i|, an h-distribution has log y_i = log B + h z_i²/2; h is the slope of the
    regression over the quantiles below the median, weighted by z_i⁴. It needs N ≥ 4: fewer show no tail and give 0.

    quantiles: [..., N] at the levels (i + ½)/N, in any order
    returns:   [...], dtype of the quantiles
    """
    ordered, dtype = _sorted_quantiles(quantiles)
    return _keep_nan(_heaviness(ordered).squeeze(-1), ordered[..., -1]).to(dtype)


def cvar_from_samples(samples: Tensor, alpha: float, weights: Tensor | None = None) -> Tensor:
    """Mean of the worst share α of the samples; the boundary sample is weighted by its fraction in the tail.

    The empirical distribution's own CVaR, hence the maximum over ν of ν − E[(ν − R)₊]/α (Rockafellar & Uryasev 2000).
    It has no information about a tail that was not sampled: biased upwards while n·α is small.

    samples: [..., n]
    weights: non-negative, broadcastable to samples, of any sum; a negative one or a sum of 0 gives NaN
    returns: [...], dtype of the samples
    """
    _check_alpha(alpha)
    values, dtype = _floating("samples", samples, 1)
    if weights is None:
        worst, share = _worst(values, alpha)
        return _keep_nan(_fractional_mean(worst, share), values.sum(-1)).to(dtype)
    ordered, mass = _sorted_mass(values, weights)
    part = (alpha - (mass.cumsum(-1) - mass)).clamp_min(0.0).minimum(mass)
    return _keep_nan((part * ordered).sum(-1) / part.sum(-1), ordered[..., -1]).to(dtype)


def var_from_samples(samples: Tensor, alpha: float, weights: Tensor | None = None) -> Tensor:
    """The smallest sample whose cumulated share reaches α; arguments as of `cvar_from_samples`."""
    _check_alpha(alpha)
    values, dtype = _floating("samples", samples, 1)
    if weights is None:
        worst, share = _worst(values, alpha)
        return _keep_nan(worst[..., math.ceil(share) - 1], values.sum(-1)).to(dtype)
    ordered, mass = _sorted_mass(values, weights)
    # The last sample's cumulated share is 1 but for rounding.
    index = (mass.detach().cumsum(-1) < alpha).sum(-1, keepdim=True).clamp(max=ordered.shape[-1] - 1)
    var = ordered.gather(-1, index).squeeze(-1)
    return _keep_nan(var, ordered[..., -1] + mass.sum(-1)).to(dtype)


def cvar_standard_error(samples: Tensor, alpha: float) -> Tensor:
    """Standard error of `cvar_from_samples` for independent samples: √[(Var(R | tail) + (1 − α)(CVaR − VaR)²) / (n α)].

    The asymptotic formula (Manistre & Hancock 2005). It sees only the tail that was sampled: with n·α below about 20,
    or a heavy tail, the true error is larger.

    samples: [..., n]
    returns: [...], dtype of the samples
    """
    _check_alpha(alpha)
    values, dtype = _floating("samples", samples, 2)
    worst, share = _worst(values, alpha)
    cvar = _fractional_mean(worst, share)
    variance = _fractional_mean((worst - cvar.unsqueeze(-1)).square(), share)
    var = worst[..., math.ceil(share) - 1]
    error = ((variance + (1.0 - alpha) * (cvar - var).square()) / share).sqrt()
    return _keep_nan(error, values.sum(-1)).to(dtype)


def cvar_gpd_from_samples(samples: Tensor, alpha: float, tail_share: float = 0.1) -> Tensor:
    """CVaR_α for small α: a generalised Pareto distribution fitted to the worst `tail_share` of the samples.

    Peaks over a threshold (McNeil & Frey 2000), fitted by probability-weighted moments (Hosking & Wallis 1987), which
    are closed and sound for shapes ξ < ½ (a finite variance). It can extrapolate beyond the worst sample, unlike
    `cvar_from_samples`.

    samples:    [..., n]
    alpha:      in (0, tail_share]
    tail_share: share of the samples the fit reads, at least 10 of them; less of it is less bias and more noise
    returns:    [...], dtype of the samples
    """
    check_range("tail_share", tail_share, low=0.0, high=1.0, low_open=True, high_open=True)
    check_range("alpha", alpha, low=0.0, high=tail_share, low_open=True)
    values, dtype = _floating("samples", samples, 11)
    total = values.shape[-1]
    count = min(math.ceil(tail_share * total), total - 1)
    check_count(f"samples in the worst {tail_share:g} of {total}", count, low=10)

    worst = values.topk(count + 1, largest=False).values
    threshold = worst[..., -1]
    excess = threshold.unsqueeze(-1) - worst[..., :-1]
    # E[Y] and E[Y (1 − F(Y))], unbiased; the worst sample has the largest excess and the smallest 1 − F.
    survival = torch.arange(count, dtype=values.dtype, device=values.device) / (count - 1)
    mean, weighted = excess.mean(-1), (excess * survival).mean(-1)
    # The gap is 0 only for equal excesses: a tail that is one point, which the floor turns into a very short one.
    gap = (1.0 - 2.0 * weighted / torch.where(mean > 0.0, mean, 1.0)).clamp_min(1e-3)
    shape = (2.0 - 1.0 / gap).clamp(max=MAX_PARETO_SHAPE)
    scale = 2.0 * weighted / gap

    # VaR lies σ·(r^ξ − 1)/ξ beyond the threshold, r = count/(n α), and CVaR (that + σ)/(1 − ξ); ξ = 0: σ·log r.
    reach = math.log(count / (total * alpha))
    small = shape.abs() < 1e-4
    safe = torch.where(small, torch.ones_like(shape), shape)
    growth = torch.where(small, reach + 0.5 * shape * reach**2, torch.expm1(safe * reach) / safe)
    return _keep_nan(threshold - scale * (growth + 1.0) / (1.0 - shape), values.sum(-1)).to(dtype)


def cvar_from_atoms(probabilities: Tensor, atoms: Tensor, alpha: float, smoothing_sd: float | Tensor = 0.0) -> Tensor:
    """CVaR_α of a categorical critic's distribution, corrected for the smoothing of its targets.

    With `smoothing_sd` 0 the atoms are the distribution, and the result is exact. Else the probabilities are read as
    bins of even density around evenly spaced atoms, and the result is shrunk towards the mean so that the variance
    loses smoothing_sd² + Δ²/12 (Farebrother et al. 2024; Sheppard's correction), as `CategoricalCritic.quantiles` does.

    probabilities: [..., K], non-negative, of sum 1
    atoms:         [K], ascending
    smoothing_sd:  in the atoms' units: HL_GAUSS_WIDTH·Δ for HL-Gauss, Δ/√12 for two-hot targets; a 0-dim tensor is
                   always removed
    returns:       [...], dtype of the probabilities
    """
    _check_alpha(alpha)
    mass, dtype = _floating("probabilities", probabilities, 2)
    if atoms.shape != mass.shape[-1:]:
        raise ConfigError(
            f"atoms: shape {tuple(atoms.shape)} does not fit probabilities of shape {tuple(mass.shape)}; "
            f"give one position for each of the {mass.shape[-1]} probabilities"
        )
    atoms = atoms.to(mass.dtype)
    part = (alpha - (mass.cumsum(-1) - mass)).clamp_min(0.0).minimum(mass)
    tail = (part * atoms).sum(-1) / part.sum(-1)
    if not isinstance(smoothing_sd, Tensor):
        check_range("smoothing_sd", smoothing_sd, low=0.0)
        if smoothing_sd == 0.0:
            return tail.to(dtype)
    spacing = (atoms[-1] - atoms[0]) / (atoms.numel() - 1)
    # The last bin is split: its lower part is in the tail, and the mean of that part is below the atom.
    cut = part * (1.0 - part / mass.clamp_min(torch.finfo(mass.dtype).tiny))
    tail = tail - 0.5 * spacing * cut.sum(-1) / part.sum(-1)
    mean = (mass * atoms).sum(-1)
    variance = (mass * (atoms - mean.unsqueeze(-1)).square()).sum(-1)
    bin_variance = spacing.square() / 12.0
    kept = (variance - smoothing_sd**2 - bin_variance).clamp_min(0.0) / (variance + bin_variance)
    # √ has no finite slope at 0, where the smoothing explains all of the variance.
    shrink = torch.where(kept > 0.0, kept, torch.ones_like(kept)).sqrt() * (kept > 0.0)
    return (mean + (tail - mean) * shrink).to(dtype)


@dataclass(frozen=True)
class _ProbitGrid:
    """The constants of N quantiles and a level α: nodes z_i = Φ⁻¹(τ_i) up to the segment that holds z_α."""

    alpha: float
    last: int
    """The segment [last, last + 1] holds z_α; the outermost ones reach to ±∞."""
    tau: Tensor
    """[last + 2]"""
    z: Tensor
    """[last + 2]"""
    z_alpha: Tensor
    """[1]"""
    probit_weights: Tensor
    """[N]: CVaR_α = Σ weights · sorted quantiles, where x = z."""


@lru_cache(maxsize=256)
def _probit_grid(count: int, alpha: float, dtype: torch.dtype, device: torch.device) -> _ProbitGrid:
    # A grid first created in inference mode must still work in training.
    with torch.inference_mode(False), torch.no_grad():
        tau = midpoints(count, dtype=torch.float64)
        z = torch.special.ndtri(tau)
        z_alpha = torch.special.ndtri(torch.tensor([alpha], dtype=torch.float64)).clamp(max=_FAR)
        last = min(max(int((z < z_alpha).sum()) - 1, 0), count - 2)
        constants = alpha, last, tau[: last + 2], z[: last + 2], z_alpha
        none = torch.zeros((), dtype=torch.float64)
        # The integral is linear in the quantiles if x does not depend on them: unit quantiles give their weights.
        weights = _tail_mean(torch.eye(count, dtype=torch.float64), _ProbitGrid(*constants, z), none, none)
        tensors = [constant.to(device, dtype) for constant in (*constants[2:], weights)]
        return _ProbitGrid(alpha, last, *tensors)


@lru_cache(maxsize=64)
def _heaviness_weights(count: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """1/|z_i| and the weight of log y_i in the slope h, both [N // 2], for the quantiles below the median."""
    with torch.inference_mode(False), torch.no_grad():
        distance = -torch.special.ndtri(midpoints(count, dtype=torch.float64)[: count // 2])
        weight, abscissa = distance**4, distance.square() / 2.0
        centred = weight * (abscissa - (weight * abscissa).sum() / weight.sum())
        slope = centred / (centred * abscissa).sum()
        return distance.reciprocal().to(device, dtype), slope.to(device, dtype)


def _heaviness(ordered: Tensor) -> Tensor:
    """h of the lower half [..., 1] of sorted quantiles [..., N]."""
    count = ordered.shape[-1]
    if count < 4:
        return ordered.new_zeros((*ordered.shape[:-1], 1))
    inverse_distance, slope = _heaviness_weights(count, ordered.dtype, ordered.device)
    half = count // 2
    median = (ordered[..., half] + ordered[..., count - 1 - half]) / 2.0
    spread = (median.unsqueeze(-1) - ordered[..., :half]) * inverse_distance
    level = spread.mean(-1, keepdim=True).clamp_min(torch.finfo(spread.dtype).tiny)
    # Quantiles tied with the median have no logarithm; from 1/1000 of the average down they count alike.
    logarithm = (spread / level).clamp_min(1e-3).log()
    return (logarithm @ slope).clamp(0.0, MAX_HEAVINESS).unsqueeze(-1)


def _both_sides(ordered: Tensor, grid: _ProbitGrid) -> tuple[Tensor, Tensor]:
    """h of the lower and of the upper half, [..., 1] each; the upper one only if α reaches there."""
    low = _heaviness(ordered)
    return low, (_heaviness(-ordered.flip(-1)) if 2 * (grid.last + 1) >= ordered.shape[-1] else low)


def _stretch(z: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """x(z) = z·exp(h z²/2), h = low where z < 0 and high where z > 0: z [K], h [..., 1] to [..., K]."""
    return z * (torch.where(z > 0.0, high, low) * (0.5 * z.square())).exp()


def _tail_mean(ordered: Tensor, grid: _ProbitGrid, low: Tensor, high: Tensor) -> Tensor:
    """(1/α) ∫₀^α F⁻¹ for sorted quantiles [..., N], h = low, high of the two sides ([..., 1] or 0-dim), [...].

    With the slope b_k = Δq/Δx of segment k and H(z) = ∫_{−∞}^z Φ dx, integration by parts gives
    α·CVaR = α·F⁻¹(α) − Σ_k b_k ΔH_k. H is closed: H = Φ·x − G, where G(z) = ∫_{−∞}^z x dΦ = −φ(z)·exp(h z²/2)/(1 − h).
    """
    z, last, alpha = grid.z, grid.last, grid.alpha
    # G of the upper side starts where the lower side's ends, at z = 0.
    jump = (1.0 / (1.0 - high) - 1.0 / (1.0 - low)) / _SQRT_TWO_PI

    def g(at: Tensor) -> Tensor:
        h = torch.where(at > 0.0, high, low)
        return torch.where(at > 0.0, jump, 0.0) - (-0.5 * (1.0 - h) * at.square()).exp() / (_SQRT_TWO_PI * (1.0 - h))

    x = _stretch(z, low, high)
    area = grid.tau * x - g(z)
    slope = ordered[..., : last + 2].diff(dim=-1) / x.diff(dim=-1)
    # The outermost segment starts at −∞, where H is 0.
    start = torch.cat((torch.zeros_like(area[..., :1]), area[..., 1:-1]), dim=-1)
    whole = (slope[..., :last] * (area[..., 1 : last + 1] - start[..., :last])).sum(-1)
    # F⁻¹(α)·α − b·(H(z_α) − H(start)) of the last segment, without x(z_α), which is infinite at α = 1.
    b, intercept = slope[..., last], ordered[..., last] - slope[..., last] * x[..., last]
    return intercept + (b * (g(grid.z_alpha).squeeze(-1) + start[..., last]) - whole) / alpha


def _check_alpha(alpha: float) -> None:
    check_range("alpha", alpha, low=0.0, high=1.0, low_open=True)


def _floating(name: str, values: Tensor, least: int) -> tuple[Tensor, torch.dtype]:
    """Values [..., n ≥ least] in float32 or float64, and the dtype they came in."""
    if not values.is_floating_point():
        raise ConfigError(f"{name}: dtype {values.dtype} is not floating point; convert them first")
    if values.dim() == 0 or values.shape[-1] < least:
        raise ConfigError(f"{name}: shape {tuple(values.shape)}; the last dimension must hold {least} or more")
    return (values if values.dtype == torch.float64 else values.float()), values.dtype


def _sorted_quantiles(quantiles: Tensor) -> tuple[Tensor, torch.dtype]:
    values, dtype = _floating("quantiles", quantiles, 2)
    return values.sort(-1).values, dtype


def _worst(values: Tensor, alpha: float) -> tuple[Tensor, float]:
    """The samples that the worst α·n touch, ascending, [..., ⌈α n⌉], and α·n."""
    share = alpha * values.shape[-1]
    return values.topk(min(math.ceil(share), values.shape[-1]), largest=False).values, share


def _fractional_mean(worst: Tensor, share: float) -> Tensor:
    """Mean of `share` values, the last of worst [..., ⌈share⌉] counting by the remaining fraction."""
    return (worst.sum(-1) - (worst.shape[-1] - share) * worst[..., -1]) / share


def _sorted_mass(values: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Samples in ascending order and their shares of the weight, [..., n] both; NaN shares for a negative weight."""
    try:
        weights = weights.to(values.dtype).expand(values.shape)
    except RuntimeError:
        raise ConfigError(
            f"weights: shape {tuple(weights.shape)} does not fit samples of shape {tuple(values.shape)}; "
            f"give one weight a sample"
        ) from None
    ordered, index = values.sort(-1)
    weights = weights.masked_fill((weights < 0.0).any(-1, keepdim=True), math.nan).gather(-1, index)
    return ordered, weights / weights.sum(-1, keepdim=True)


def _keep_nan(result: Tensor, witness: Tensor) -> Tensor:
    """Sorting moves NaN to the end, out of the tail: set the row to NaN where the witness [...] is NaN."""
    return torch.where(witness.isnan(), torch.full_like(result, math.nan), result)

"""UPGD, AdaptiveUPGD and UPGDW against steps worked out by hand, a plain reference and torch's own optimisers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tailguard.optim import UPGD, UPGDW, AdaptiveUPGD
from tailguard.optim.utility import UtilityOptimizer

KINDS = [UPGD, AdaptiveUPGD, UPGDW]
BEST = 1 - 1 / (1 + math.exp(-1))  # 0.268941: the gate of the most useful weight
WORST = 1 / (1 + math.exp(-1))

EVERY_KIND = pytest.mark.parametrize("kind", KINDS)


def tensor(values: Sequence[float]) -> nn.Parameter:
    return nn.Parameter(torch.tensor(values, dtype=torch.float64))


def descend(
    kind: type[UtilityOptimizer],
    weights: Sequence[float],
    gradients: Sequence[Sequence[float]],
    **settings: Any,
) -> Tensor:
    """The weights after one step for every row of gradients, without noise or decay unless asked for."""
    parameter = tensor(weights)
    optimizer = kind([parameter], **({"sigma": 0.0, "weight_decay": 0.0, "lr": 0.1} | settings))
    for gradient in gradients:
        parameter.grad = torch.tensor(gradient, dtype=torch.float64)
        optimizer.step()
    return parameter.detach()


class Plain:
    """The three optimisers written out weight tensor by weight tensor, with host numbers for all that is scalar."""

    def __init__(self, name: str, groups: Sequence[dict[str, Any]], seed: int) -> None:
        self.name, self.groups = name, groups
        self.generator = torch.Generator().manual_seed(seed)
        self.steps: dict[Tensor, int] = {}
        self.utility: dict[Tensor, Tensor] = {}
        self.mean: dict[Tensor, Tensor] = {}
        self.square: dict[Tensor, Tensor] = {}

    def step(self, gradients: dict[Tensor, Tensor]) -> None:
        corrected = {}
        for group in self.groups:
            for weight in group["params"]:
                if weight not in gradients:
                    continue
                gradient, beta = gradients[weight], group["beta_utility"]
                self.steps[weight] = self.steps.get(weight, 0) + 1
                self.utility[weight] = beta * self.utility.get(weight, 0.0) - (1 - beta) * gradient * weight
                corrected[weight] = self.utility[weight] / (1 - beta ** self.steps[weight])
        highest = max(value.max().item() for value in corrected.values())
        lowest = min(value.min().item() for value in corrected.values())
        for group in self.groups:
            present = [weight for weight in group["params"] if weight in gradients]
            count = sum(weight.numel() for weight in present)
            noise = torch.randn(count, dtype=torch.float64, generator=self.generator) if group["sigma"] else None
            for weight in present:
                if group["normalisation"] == "max":
                    argument = corrected[weight] / highest if highest > 1e-12 else torch.zeros_like(weight)
                else:
                    argument = 2 * (corrected[weight] - lowest) / (highest - lowest) - 1
                gate = 1 - torch.sigmoid(argument)
                shake = torch.zeros_like(weight)
                if noise is not None:
                    shake = noise[: weight.numel()].reshape(weight.shape) * group["sigma"]
                    noise = noise[weight.numel() :]
                self.move(group, weight, gate, shake, gradients[weight])

    def move(self, group: dict[str, Any], weight: Tensor, gate: Tensor, shake: Tensor, gradient: Tensor) -> None:
        direction = gradient
        if self.name != "UPGD":
            first, second = group["betas"]
            self.mean[weight] = first * self.mean.get(weight, 0.0) + (1 - first) * gradient
            self.square[weight] = second * self.square.get(weight, 0.0) + (1 - second) * gradient**2
            mean = self.mean[weight] / (1 - first ** self.steps[weight])
            square = self.square[weight] / (1 - second ** self.steps[weight])
            direction = mean / (square.sqrt() + group["eps"])
        factor, lr, decay = group["step_factor"], group["lr"], group["weight_decay"]
        if self.name == "UPGDW":
            weight -= factor * lr * gate * (direction + shake + decay * weight)
        else:
            weight.copy_((1 - lr * decay) * weight - factor * lr * gate * (direction + shake))


# The hand-worked step: utilities −g·w are [1, −1, −1, 0]


def test_hand_worked_step_of_upgd() -> None:
    weights, gradient = [1.0, 2.0, -1.0, 0.5], [-1.0, 0.5, -1.0, 0.0]
    moved = descend(UPGD, weights, [gradient], beta_utility=0.0, step_factor=1)
    torch.testing.assert_close(
        moved, torch.tensor([1.026894, 1.963447, -0.926894, 0.5], dtype=torch.float64), atol=5e-7, rtol=0
    )


def test_hand_worked_step_of_adaptive_upgd() -> None:
    moved = descend(AdaptiveUPGD, [1.0, 2.0, -1.0], [[-1.0, 0.5, -1.0]], lr=0.01, eps=1e-5)
    torch.testing.assert_close(
        moved, torch.tensor([1.0053788, 1.9853791, -0.9853790], dtype=torch.float64), atol=5e-8, rtol=0
    )


def test_factor_one_moves_half_as_far_as_two() -> None:
    weights, gradient = [1.0, 2.0, -1.0], [-1.0, 0.5, -1.0]
    start = torch.tensor(weights, dtype=torch.float64)
    for kind in KINDS:
        one = descend(kind, weights, [gradient], step_factor=1) - start
        two = descend(kind, weights, [gradient], step_factor=2) - start
        torch.testing.assert_close(two, 2 * one, rtol=1e-12, atol=0)


# Against the plain reference and torch's own


def fresh_groups(seed: int) -> list[list[nn.Parameter]]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [[(4, 3), (4,), ()], [(2, 5), (1,)]]
    return [
        [nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64)) for shape in group]
        for group in shapes
    ]


@EVERY_KIND
@pytest.mark.parametrize("normalisation", ["max", "minmax"])
def test_agrees_with_a_plain_reference(kind: type[UtilityOptimizer], normalisation: str) -> None:
    settings: list[dict[str, Any]] = [
        {"lr": 0.05, "weight_decay": 0.1, "sigma": 0.3, "beta_utility": 0.9, "step_factor": 2},
        {"lr": 0.02, "weight_decay": 0.0, "sigma": 0.01, "beta_utility": 0.5, "step_factor": 1},
    ]
    if kind is not UPGD:
        settings[0] |= {"betas": (0.9, 0.99), "eps": 1e-5}
        settings[1] |= {"betas": (0.5, 0.9), "eps": 1e-3}
    ours, theirs = fresh_groups(0), fresh_groups(0)
    optimizer = kind(
        [{"params": group, **setting} for group, setting in zip(ours, settings, strict=True)],
        normalisation=normalisation,
        seed=5,
    )
    plain_groups = [
        {"params": [weight.detach() for weight in group], **setting, "normalisation": normalisation}
        for group, setting in zip(theirs, settings, strict=True)
    ]
    reference = Plain(kind.__name__, plain_groups, seed=5)
    flat = [weight for group in ours for weight in group]
    pairs = list(zip(flat, [weight for group in plain_groups for weight in group["params"]], strict=True))
    generator = torch.Generator().manual_seed(9)
    for step in range(60):
        gradients = {}
        for index, (weight, plain) in enumerate(pairs):
            gradient = torch.randn(weight.shape, generator=generator, dtype=torch.float64) + weight.detach()
            absent = (step + index) % 7 == 0  # so that the parameters' counts of steps drift apart
            weight.grad = None if absent else gradient.clone()
            if not absent:
                gradients[plain] = gradient
        optimizer.step()
        reference.step(gradients)
        for weight, plain in pairs:
            torch.testing.assert_close(weight.detach(), plain, atol=1e-12, rtol=1e-12)


@EVERY_KIND
def test_without_useful_weights_it_is_torchs_own(kind: type[UtilityOptimizer]) -> None:
    """On ½w² every utility is −w² ≤ 0, so all gates are 0.5, and twice 0.5 is plain descent."""
    ours, theirs = tensor([1.0, -2.0, 0.3]), tensor([1.0, -2.0, 0.3])
    peer: torch.optim.Optimizer
    if kind is UPGD:
        optimizer: UtilityOptimizer = UPGD([ours], lr=0.03, sigma=0.0, weight_decay=0.0)
        peer = torch.optim.SGD([theirs], lr=0.03)
    else:
        same: dict[str, Any] = {"lr": 0.03, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.2}
        optimizer = kind([ours], sigma=0.0, **same)
        peer = torch.optim.AdamW([theirs], **same)
    for _ in range(50):
        ours.grad, theirs.grad = ours.detach().clone(), theirs.detach().clone()
        optimizer.step()
        peer.step()
        torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=1e-12)


# Decay, and what sets UPGDW apart


@EVERY_KIND
def test_zero_gradients_leave_decay_alone_at_work(kind: type[UtilityOptimizer]) -> None:
    start = [1.0, -2.0, 0.5]
    moved = descend(kind, start, [[0.0] * 3] * 5, lr=0.1, weight_decay=0.3)
    torch.testing.assert_close(moved, torch.tensor(start).double() * (1 - 0.1 * 0.3) ** 5, rtol=1e-14, atol=0)


def test_decay_shrinks_every_weight_alike_except_in_upgdw() -> None:
    weights, gradient = [1.0, 2.0, -1.0, 0.5], [-1.0, 0.5, -1.0, 0.0]
    start = torch.tensor(weights, dtype=torch.float64)
    gate = torch.tensor([BEST, WORST, WORST, 0.5], dtype=torch.float64)
    for kind in KINDS:
        decayed = descend(kind, weights, [gradient], weight_decay=0.4) - descend(kind, weights, [gradient])
        expected = -0.1 * 0.4 * start * (2 * gate if kind is UPGDW else 1)
        torch.testing.assert_close(decayed, expected, rtol=1e-12, atol=1e-15)


def test_upgdw_without_decay_is_adaptive_upgd() -> None:
    draw = torch.randn(30, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64).tolist()
    settings: dict[str, Any] = {"eps": 1e-6, "sigma": 0.1, "weight_decay": 0.0}
    weights = [1.0, 2.0, -1.0, 0.5]
    assert torch.equal(descend(UPGDW, weights, draw, **settings), descend(AdaptiveUPGD, weights, draw, **settings))

"""Checks of the optimisers: variance gradient scaling, utility gates, and the norms of gradients that are reported."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from tailguard.audit.formulas import f64, largest_gap
from tailguard.audit.registry import Measurement, at_most, register_check, within, worst
from tailguard.audit.subject import ScriptedEnv, Subject, Witness
from tailguard.envs.trading import TradingEnv
from tailguard.optim import OPTIMIZERS, UPGD, AdaptiveUPGD, OptimizerSettings, VarianceGradientScaler
from tailguard.optim.config import UPGDConfig

BEST = 1 / (1 + math.e)
"""Gate of the most useful weight, 1 − sigmoid(1)."""

# --- variance gradient scaling ---------------------------------------------------------------------------------------


def scaler_after(gradients: Iterable[Tensor], size: int) -> VarianceGradientScaler:
    """A scaler that has seen these gradients [size] of one parameter."""
    parameter = nn.Parameter(torch.zeros(size, dtype=torch.float64))
    scaler = VarianceGradientScaler([parameter], beta=0.99, warmup_steps=1, min_scale=0.1, max_nsr=1e6)
    for gradient in gradients:
        parameter.grad = gradient
        scaler.update_statistics()
    return scaler


def step_sizes(name: str, factor: float) -> tuple[Tensor, Tensor]:
    """The third step of an optimiser without and with a scaler whose factor is about `factor`, divided by it, [P]."""
    moved = []
    gradients = [f64(1.0, -0.5, 0.25), f64(0.8, -0.7, 0.2), f64(1.1, -0.4, 0.3)]
    for scaled in (False, True):
        parameter = nn.Parameter(f64(1.0, 2.0, -1.0))
        rate = torch.full((), 0.01)
        settings = OptimizerSettings(rate, 0.0, UPGDConfig(sigma=0.0), 0)
        optimizer = OPTIMIZERS[name].make([parameter], settings)
        # The learner's own choice: on the learning rate, for every optimiser.
        scaler = VarianceGradientScaler(
            optimizer, alpha=1e9 if scaled else 0.0, min_scale=factor, warmup_steps=2, apply="learning_rate"
        )
        for number, gradient in enumerate(gradients):
            before = parameter.detach().clone()
            parameter.grad = gradient.clone()
            scaler.update_statistics()
            scaler.optimizer_step()
            assert number < 2 or scaler.get_scaling_factor() == (factor if scaled else 1)
        moved.append((parameter.detach() - before) / (factor if scaled else 1.0))
    return moved[0], moved[1]


@register_check(
    "F15",
    "Does variance gradient scaling measure noise over time, whatever the size, and act on the step?",
    why="A mean over elements sees neither opposite nor independent noise; the spread between elements is no noise. "
    "A factor on the gradient does nothing before Adam, which divides it out.",
    remedy="See optim/variance_scaler.py: averages for every element, a ratio of sums, the factor on "
    "the learning rate.",
    fast=True,
)
def variance_scaling_measures_noise(subject: Subject) -> Measurement:
    draw = torch.Generator().manual_seed(subject.seed)

    def normal(size: int) -> Tensor:
        return torch.randn(size, generator=draw, dtype=torch.float64)

    found = []
    fixed = normal(1000)
    constant = scaler_after((fixed for _ in range(200)), 1000)
    found.append(at_most("noise-to-signal ratio of a constant gradient whose elements differ",
                         float(constant.get_normalized_variance().total), 0.0))  # fmt: skip
    for size, steps in ((400, 1200), (10_000, 800)):
        noisy = scaler_after((1 + normal(size) for _ in range(steps)), size)
        found.append(within(f"ratio of noise 1 on a mean of 1, {size:,} elements",
                            float(noisy.get_normalized_variance().total), 0.9, 1.1))  # fmt: skip
    sine = scaler_after((torch.full_like(fixed[:100], 2 + math.sqrt(2) * math.sin(0.7 * t)) for t in range(1000)), 100)
    found.append(within("ratio of a common sine of power 1 on a mean of 2 (0.25)",
                        float(sine.get_normalized_variance().total), 0.22, 0.28))  # fmt: skip
    signs = torch.cat((torch.ones(50), -torch.ones(50))).double()
    opposite = scaler_after((2 * signs * (-1) ** t for t in range(600)), 100)
    found.append(at_most("factor of noise whose sum over the elements is always 0",
                         float(opposite.get_scaling_factor()), 0.1))  # fmt: skip
    chosen = [name for name in OPTIMIZERS if name in ("adam", "adamw", "upgd", "adaptive_upgd", "upgdw")]
    for name in chosen:
        plain, scaled = step_sizes(name, 0.25)
        gap = largest_gap(scaled, plain) / float(plain.abs().max())
        found.append(at_most(f"relative gap of a step at factor ¼ to ¼ of the step, {name}", gap, 1e-6))
    return worst(found)


# --- utility gates ---------------------------------------------------------------------------------------------------


def gates_of(utilities: list[float], steps: int = 1, rate: float = 1e-2, **settings: float) -> Tensor:
    """The gates of the last of some equal steps, seen from outside: of how far each weight moves."""
    weights = torch.ones(len(utilities), dtype=torch.float64)
    parameter = nn.Parameter(weights.clone())
    optimizer = UPGD([parameter], rate, weight_decay=0.0, sigma=0.0, step_factor=1, **settings)  # type: ignore[arg-type]
    gradient = -f64(*utilities)
    before = weights
    for _ in range(steps):
        before = parameter.detach().clone()
        parameter.grad = gradient.clone()
        optimizer.step()
    return (before - parameter.detach()) / (rate * gradient)


@register_check(
    "F16",
    "Do utility gates protect useful weights, whatever the signs of the utilities, from the first step on?",
    why="Divided by a negative maximum the order of the gates turns round, and the most useful weight moves most. A "
    "maximum without bias correction closes the gate of the best weight for hundreds of steps.",
    remedy="See gate_line and the bias correction in optim/utility.py.",
    fast=True,
)
def gates_protect_useful_weights(subject: Subject) -> Measurement:  # noqa: ARG001
    def sigmoid(*values: float) -> Tensor:
        return f64(*values).sigmoid()

    def one_step(kind: type[UPGD | AdaptiveUPGD], **settings: float) -> Tensor:
        parameter = nn.Parameter(f64(1.0, 2.0, -1.0, 0.5))
        optimizer = kind([parameter], weight_decay=0.0, sigma=0.0, **settings)  # type: ignore[arg-type]
        parameter.grad = f64(-1.0, 0.5, -1.0, 0.0)
        optimizer.step()
        return parameter.detach()

    by_hand = one_step(UPGD, lr=0.1, beta_utility=0.0, step_factor=1)
    adaptive = one_step(AdaptiveUPGD, lr=0.01, eps=1e-5, beta_utility=0.0)
    found = [
        at_most("gap of a step of UPGD to the one worked out by hand",
                largest_gap(by_hand, f64(1.026894, 1.963447, -0.926894, 0.5)), 1e-6),
        at_most("gap of the first step of AdaptiveUPGD to the one worked out by hand",
                largest_gap(adaptive[:3], f64(1.0053788, 1.9853791, -0.9853790)), 1e-6),
        at_most("gap of the gates of positive utilities",
                largest_gap(gates_of([4.0, 2.0, 1.0]), sigmoid(-1, -0.5, -0.25)), 1e-6),
        at_most("gap of the gates of mixed utilities",
                largest_gap(gates_of([2.0, 1e-5, -6.0]), sigmoid(-1, -5e-6, 3)), 1e-6),
        at_most("gap of the gates of utilities that are all negative to ½",
                largest_gap(gates_of([-1.0, -3.0, -2.0]), sigmoid(0, 0, 0)), 1e-6),
    ]  # fmt: skip
    still = nn.Parameter(f64(1.0, 2.0))
    optimizer = UPGD([still], 0.1, weight_decay=0.0, sigma=0.0)
    still.grad = f64(0.0, 0.0)
    optimizer.step()
    found.append(
        at_most("movement of weights whose gradients are all 0", largest_gap(still.detach(), f64(1.0, 2.0)), 0)
    )
    for steps in (1, 100):
        gate = float(gates_of([3.0, 1.0], steps, rate=1e-6, beta_utility=0.999)[0])
        found.append(at_most(f"|gate of the best weight after {steps} steps − {BEST:.4f}|, average over 1,000 steps",
                             abs(gate - BEST), 1e-3))  # fmt: skip
    return worst(found)


# --- norms -----------------------------------------------------------------------------------------------------------


@register_check(
    "F19",
    "Do the reported norms of gradients count every parameter once, under the root, and is the gradient clipped to "
    "max_grad_norm?",
    why="A sum over nested modules counts a parameter once for each module around it: an alarm on it fires, or stays "
    "silent, by the depth of the network. A bound that is not in force lets one bad minibatch undo the training.",
    remedy="See GradientNorms in algorithm/iteration_metrics.py and Updates.step in algorithm/updates.py.",
    fast=True,
)
def norms_count_once(subject: Subject) -> Measurement:
    witness = Witness()
    env = ScriptedEnv(seed=subject.seed)
    learner = subject.learner(env, extensions=(witness,), twin_critics=True, memory="separate", lstm_layers=2)
    learner.iterate()
    learner.updates.accumulate(witness.batch, torch.arange(witness.batch.log_probs.shape[1]), True)
    whole, groups = learner.updates.gradient_norms()
    named = learner.updates.gradient_norms.named(groups)

    def norm(*beginnings: str) -> float:
        chosen = [one.grad for name, one in learner.policy.named_parameters() if name.startswith(beginnings)]
        return math.sqrt(sum(float(grad.double().square().sum()) for grad in chosen if grad is not None))

    expected = {
        "train/grad_norm_action_head": ("action_head",),
        "critic/grad_norm_1": ("critics.0",),
        "critic/grad_norm_2": ("critics.1",),
        "train/grad_norm_actor_encoder": ("trunks.0.encoder",),
        "train/grad_norm_critic_encoder": ("trunks.1.encoder",),
        "lstm/actor_0_grad_norm": ("trunks.0.memory.cells.0",),
        "lstm/critic_1_grad_norm": ("trunks.1.memory.cells.1",),
    }
    gaps = {"the whole": abs(float(whole) / norm("") - 1)}
    for name, beginnings in expected.items():
        value = norm(*beginnings)
        gaps[name] = abs(float(named[name]) / value - 1) if name in named and value > 0 else math.inf
    largest = max(gaps, key=gaps.__getitem__)
    reported = at_most("relative gap of a reported norm to the root of its parameters' summed squares", gaps[largest],
                       1e-5, largest)  # fmt: skip
    return worst([reported, *_clipped(subject)])


CLIP = 1e-3
"""A bound on the gradient that every step reaches."""


def _clipped(subject: Subject) -> list[Measurement]:
    """The norms of the gradients that the optimisers of both learners see, beside the bound that was set."""
    market = TradingEnv(subject.bars, num_envs=6, episode_length=24, seed=subject.seed)
    found = []
    for learner in (subject.learner(max_grad_norm=CLIP), subject.pathwise_learner(market, max_grad_norm=CLIP)):
        norms: list[float] = []

        def note(optimizer: torch.optim.Optimizer, *_: object, norms: list[float] = norms) -> None:
            grads = [one.grad for group in optimizer.param_groups for one in group["params"] if one.grad is not None]
            norms.append(math.sqrt(sum(float(grad.double().square().sum()) for grad in grads)))

        hook = learner.context.optimizer.register_step_pre_hook(note)
        learner.iterate()
        hook.remove()
        found.append(within(f"largest gradient of a step, in units of its bound, {type(learner).__name__}",
                            max(norms, default=0.0) / CLIP, 0.99, 1.001))  # fmt: skip
    return found

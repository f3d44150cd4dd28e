"""Measurements of the pathwise learner, for the checks of connections, trajectories and runs.

Its windows end in the middle of episodes, so a wrong discount, a wrong sign of the critic's slope or a value for an
account that was liquidated changes the policy's gradient and no loss that anybody looks at. Here the whole gradient is
worked out a second time: on an environment that pays a linear function of the action, by the discounts' definition and
by differences of the critics' values.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tailguard.algorithm.estimate import evaluate_critics
from tailguard.algorithm.pathwise import PathwiseLearner
from tailguard.algorithm.rollout import Rollout
from tailguard.audit.registry import Measurement, at_most
from tailguard.audit.subject import ScriptedEnv, Subject
from tailguard.envs.protocol import Step
from tailguard.envs.trading import TradingEnv
from tailguard.models.policy import ActorCritic
from tailguard.returns import RunningMoments
from tailguard.risk.config import RiskConfig

WINDOW, GAMMA = 12, 0.8
RUIN, LIMIT, CUT = 4, 7, WINDOW - 1
"""Rows of the window that end an episode: by ruin for some environments, by time for others, and the last one."""


GAP = 1e-4
"""Rounding is at 2e-7 over many kinds of learners; a ReLU may have its kink between two ends of a difference."""
UNIT = RunningMoments()
"""The return's scale while nothing was learned from: 1."""


# --- the gradient of a window ----------------------------------------------------------------------------------------


class LinearAccounts(ScriptedEnv):
    """Pays a scripted linear function of the action, and shows the action's sum as the account's position."""

    differentiable = True

    def __init__(self, seed: int) -> None:
        super().__init__(end_probability=0.0, seed=seed)
        self.prices = torch.randn(*self.reward.shape, 2, generator=torch.Generator().manual_seed(seed + 1))
        self.observation_size += 1
        self.terminated[RUIN, :2] = True
        self.truncated[LIMIT, 1:4] = True
        self.terminated[CUT, 4] = True
        self.truncated[CUT, 5] = True

    def reset(self, seed: int | None = None) -> Tensor:
        """The first row, with no position."""
        return torch.cat((super().reset(seed), torch.zeros(self.num_envs, 1)), dim=-1)

    def step(self, action: Tensor) -> Step:
        """The next row of the script."""
        prices, step = self.prices[self.row], super().step(action)
        position = action.sum(-1, keepdim=True)
        ended = (step.terminated | step.truncated).unsqueeze(-1)
        return Step(
            obs=torch.cat((step.obs, torch.where(ended, 0.0, position)), dim=-1),
            reward=(prices * action).sum(-1),
            terminated=step.terminated,
            truncated=step.truncated,
            final_obs=torch.cat((step.final_obs, position), dim=-1),
            valid=step.valid,
        )


def blind_to_position(policy: ActorCritic) -> None:
    """Take the position from what the actor reads: an action then changes no later one."""
    with torch.no_grad():
        next(policy.each_trunk()[0].encoder.parameters())[:, -1] = 0.0


def slope_by_hand(learner: PathwiseLearner, policy: ActorCritic, rollout: Rollout, env: LinearAccounts) -> Tensor:
    """dJ / d(bias of the action), [A] float64, of a window on linear accounts; `policy`: as it was in the window."""
    raw = rollout.actions.double().requires_grad_()
    action = copy.deepcopy(policy.action_head).double().to_env(raw)
    (width,) = torch.autograd.grad(action.sum(), raw)
    worth = env.prices[: len(raw)].double().clone()
    power, since = torch.zeros(raw.shape[:2], dtype=torch.float64), torch.zeros(raw.shape[1])
    for row, ended in enumerate(rollout.terminated | rollout.truncated):
        power[row] = GAMMA**since
        since = torch.where(ended, 0.0, since + 1)
    if learner.has_critics:
        to_come = slopes_by_differences(learner, policy, rollout)
        for place, row in enumerate(rollout.final_rows):
            # A time limit keeps the account; ruin ends it, also in the window's last row.
            kept = rollout.truncated[row] | (~rollout.terminated[row] if row == len(raw) - 1 else False)
            worth[row] += (kept * GAMMA * to_come[place]).unsqueeze(-1)
    return (power.unsqueeze(-1) * worth * width).sum((0, 1)) / raw.shape[1]


def slopes_by_differences(learner: PathwiseLearner, policy: ActorCritic, rollout: Rollout) -> Tensor:
    """dV / d(position) of the successors by central differences, in float64, [K, N]."""
    policy = copy.deepcopy(policy).double()
    state = tuple(tuple(part.double() for part in trunk) for trunk in rollout.start_state)
    wide = replace(rollout, scaled_obs=rollout.scaled_obs.double(), start_state=state)
    step = torch.zeros(rollout.final_obs.shape[-1], dtype=torch.float64)
    step[-1] = 1e-5
    ends = []
    for sign in (1, -1):
        moved = rollout.final_obs.double() + sign * step
        views, _ = evaluate_critics(policy, wide, UNIT, learner.config.estimates, moved)
        values = torch.stack([view.final_baseline for view in views])
        ends.append(values.mean(0) if learner.config.twin_mode == "mean" else values.amin(0))
    return (ends[0] - ends[1]) / 2e-5


def window_gap(subject: Subject, *, critics: bool) -> float:
    """Relative gap of a window's gradient in the action's bias to the one by hand."""
    env = LinearAccounts(subject.seed)
    own: dict[str, Any] = {"memory": "separate"} if subject.parts.get("memory") == "shared" else {}
    learner = subject.pathwise_learner(
        env, n_steps=WINDOW, gamma=GAMMA, critic_epochs=int(critics), normalise_observations=False, **own
    )
    blind_to_position(learner.policy)
    draw = torch.Generator().manual_seed(subject.seed)
    with torch.no_grad():  # fresh heads say nearly nothing, and a slope of nothing has no sign
        for layer in (layer for critic in learner.policy.each_critic() for layer in critic.layers):
            layer.weight.copy_(torch.randn(layer.weight.shape, generator=draw))
    learner.return_moments.update(torch.tensor([-1.0, 1.0]))
    before, kept = copy.deepcopy(learner.policy), []
    steps = arriving(learner, ["action_head.linear.bias"])
    learner.iterate(lambda rollout: kept.append(rollout) or True)  # type: ignore[func-returns-value]
    # The learner goes down the loss, in units of the return's scale, which is 1 here.
    got = -steps[0]["action_head.linear.bias"][: env.action_space.size].double()  # type: ignore[union-attr]  # a box
    wanted = slope_by_hand(learner, before, kept[0], env)
    return float(((got - wanted).abs().max() / wanted.abs().max()).nan_to_num(torch.inf))


def arriving(learner: PathwiseLearner, names: list[str]) -> list[dict[str, Tensor]]:
    """The gradients that reach these parameters from now on: a dict for each step of the optimiser."""
    steps: list[dict[str, Tensor]] = [{}]
    for name, parameter in learner.policy.named_parameters():
        if name in names:
            parameter.register_hook(lambda gradient, name=name: _arrived(steps, name, gradient))  # type: ignore[no-untyped-call]
    return steps


def _arrived(steps: list[dict[str, Tensor]], name: str, gradient: Tensor) -> None:
    if name in steps[-1]:
        steps.append({})
    steps[-1][name] = gradient.detach().clone()


def boundaries_of_windows(subject: Subject) -> Measurement:
    """Of T2: rewards of a window, each discounted from the start of its own episode."""
    return at_most("relative gap of a pathwise window's gradient, without critics, to the rewards' own discounts",
                   window_gap(subject, critics=False), GAP)  # fmt: skip


def values_of_windows(subject: Subject) -> Measurement:
    """Of T3: the value of the accounts at time limits and at the window's end, none after ruin, with its own slope."""
    return at_most("relative gap of a pathwise window's gradient to rewards and values by differences, none after ruin",
                   window_gap(subject, critics=True), GAP)  # fmt: skip


# --- which step moves what -------------------------------------------------------------------------------------------


def _bars(subject: Subject) -> TradingEnv:
    return TradingEnv(subject.bars, num_envs=12, episode_length=24, stagger=8, seed=subject.seed)


def gradients_of_window(
    subject: Subject, risk: RiskConfig | None = None, *, fresh: bool = False, **options: Any
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Gradients of an iteration on bars: those of the policy's step, and those of the critics' first minibatch.

    `fresh`: of the first iteration. Heads start near 0 then, and hardly any gradient goes through them.
    """
    learner = subject.pathwise_learner(_bars(subject), risk=risk, stochastic=True, learning_rate=0.0, **options)
    if not fresh:
        learner.iterate()
    found: tuple[dict[str, Tensor], dict[str, Tensor]] = ({}, {})
    turn = [0]

    def watch(name: str, parameter: torch.nn.Parameter) -> None:
        parameter.register_hook(lambda gradient: found[turn[0]].setdefault(name, gradient.clone()))  # type: ignore[no-untyped-call]

    for name, parameter in learner.policy.named_parameters():
        watch(name, parameter)

    def critics_follow(rollout: Rollout) -> bool:  # noqa: ARG001
        # Callbacks see a window after the policy's step and before the critics' epochs.
        turn[0] = 1
        return True

    learner.iterate(critics_follow)
    return found


def of_policy(name: str) -> bool:
    """Whether the policy's step moves a parameter: the action head and the first trunk."""
    return name.startswith(("action_head", "trunks.0."))


MODES: tuple[Mapping[str, Any], ...] = (
    {"memory": "separate", "critic": "quantile", "twin_critics": True, "twin_trunk": "own"},
    {"memory": "none", "critic": "categorical", "twin_critics": False},
)
"""Networks whose windows are followed, besides the subject's own."""


def wrong_reach_of_windows(subject: Subject) -> Iterator[str]:
    """Of C1: parameters that a step of the pathwise learner wrongly moves or leaves."""
    for mode in [*([{}] if subject.parts else []), *MODES]:
        about = ", ".join(["pathwise", *map(str, mode.values())])
        steps = gradients_of_window(subject, **mode)
        learner = subject.pathwise_learner(_bars(subject), **mode)
        shared = learner.config.network.memory == "shared"
        for name, _ in learner.policy.named_parameters():
            wanted = (of_policy(name), not of_policy(name) or (shared and name.startswith("trunks.0.")))
            for step, gradients, moves in zip(("the policy's step", "the critics' epochs"), steps, wanted, strict=True):
                reached = name in gradients and bool(gradients[name].any())
                if reached != moves:
                    yield f"{about}: the gradient of {step} {'does not reach' if moves else 'reaches'} {name}"


def wrongly_bound(subject: Subject) -> Iterator[str]:
    """Of C3: parameters of the pathwise learner whose gradient the constraint wrongly changes or leaves."""
    penalty = 2.0
    free, bound = (
        gradients_of_window(subject, risk, fresh=True) for risk in (None, RiskConfig(penalty=penalty, alpha=0.5))
    )
    # The same rollout; its policy's step has the rate 0, so that the critics learn the same. A constraint divides the
    # objective by 1 + λ: that alone is no change.
    for step, one, other in zip(("the policy's step", "the critics' epochs"), free, bound, strict=True):
        for name, gradient in one.items():
            moves = step == "the policy's step"
            alike = gradient / (1 + penalty) if moves else gradient
            changed = float((other[name] - alike).abs().max()) > 1e-4 * float(alike.abs().max())
            if changed != moves and bool(gradient.any()):
                yield f"pathwise: the gradient of {step} in {name} {'changes' if changed else 'does not change'}"

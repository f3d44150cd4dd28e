"""Gradients through the market: act, add up what the account earns, and send the gradient back. Reads top to bottom.

Prices do not answer to an account of ordinary size. So what it earns is a known, differentiable function of the
weights it held, and the gradient of that can go back through costs, fills, positions and the LSTM: no exploration, no
score function, no advantages (deep hedging, Buehler et al. 2019). A window of T bars ends with what a critic says the
account's state is worth, whose slope in that state carries what comes later (SHAC, Xu et al. 2022):

    J = E[ Σ_{t<T} γ^t·r_t + γ^T·V(x_T) ],    dJ/dθ by back-propagation through r, x and the memory

The window is short because a gradient through many bars is noisy. Whole episodes need no critic, and give the gradient
of their tail exactly: ∇ES_α = −E[∇R | R ≤ VaR_α].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from tailguard.algorithm.config import PathwiseConfig
from tailguard.algorithm.estimate import CriticView
from tailguard.algorithm.learner import Learner
from tailguard.algorithm.rollout import Rollout
from tailguard.algorithm.runtime import detached
from tailguard.algorithm.sb3 import check_arguments, network_options, sample_schedules
from tailguard.algorithm.schedules import Schedule
from tailguard.algorithm.targets import Prepared
from tailguard.algorithm.update import make_batch
from tailguard.algorithm.updates import CriticUpdates
from tailguard.envs.adapt import as_vector_env, episode_length_of
from tailguard.envs.protocol import Box
from tailguard.errors import ConfigError
from tailguard.models.critics import combine_values
from tailguard.risk.config import RiskConfig

if TYPE_CHECKING:
    from tailguard.envs.protocol import VectorEnv

SATURATED = 0.99
"""A squashed action this near to its bound has next to no slope left."""


class PathwiseLearner(Learner):
    """A recurrent policy that learns by gradients through a market that does not answer.

    `env`: a `tailguard.TradingEnv`, or a `FunctionalEnv` of your own whose `transition` is differentiable in state and
        action and that says so with `differentiable = True`.
    `config`: all settings; single ones can be given as keyword arguments instead (`n_steps=16, stochastic=True`): the
        fields of `PathwiseConfig` and of `NetworkConfig`.
    `seed`: of the weights, the noise, the critics' minibatches and the environment.
    `device`: where the network lives; the environment's own device by default.
    `risk`: a budget for the tail of realised outcomes, which the policy learns to keep.
    `verbose`, `tensorboard_log`, `policy_kwargs`: as of `DistributionalPPO`.
    """

    kind: ClassVar[str] = "pathwise"
    config: PathwiseConfig
    updates: CriticUpdates

    def __init__(
        self,
        env: Any,
        config: PathwiseConfig | None = None,
        *,
        seed: int = 0,
        device: torch.device | str | None = None,
        num_envs: int | None = None,
        risk: RiskConfig | None = None,
        verbose: int = 0,
        tensorboard_log: str | Path | None = None,
        policy_kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        check_arguments(type(self).__name__, PathwiseConfig, env, config, options)
        options = sample_schedules(options) | network_options(policy_kwargs, options)
        chosen = (config or PathwiseConfig()).with_options(options)
        accounts = as_vector_env(env, num_envs, device)
        check_differentiable(accounts)
        chosen = chosen.completed(risk, episode_length_of(accounts))
        self.has_critics = bool(chosen.critic_epochs)
        self.critic_learning_rate, self.entropy_coef = (torch.zeros((), device=accounts.device) for _ in range(2))
        super().__init__(
            accounts, chosen, seed=seed, device=device, risk=risk, verbose=verbose, tensorboard_log=tensorboard_log
        )
        self.updates = CriticUpdates(self.context, chosen)
        self.set_hyper()

    def _parameter_groups(self) -> list[dict[str, Any]]:
        """The policy, and what only the critics read: they learn at rates of their own."""
        policy = [*self.policy.each_trunk()[0].parameters(), *self.policy.action_head.parameters()]
        known = {id(parameter) for parameter in policy}
        critics = [parameter for parameter in self.policy.parameters() if id(parameter) not in known]
        return [{"params": policy}, {"params": critics, "lr": self.critic_learning_rate}]

    def set_hyper(self) -> None:
        config, progress = self.config, self.state.progress
        self.learning_rate.fill_(Schedule.parse(config.learning_rate)(progress))
        self.critic_learning_rate.fill_(Schedule.parse(config.critic_learning_rate)(progress))
        self.entropy_coef.fill_(Schedule.parse(config.entropy_coef)(progress))

    def _iterate(self, on_rollout: Callable[[Rollout], bool] | None) -> dict[str, float]:
        self.updates.begin()
        window = self.runtime.run(("window", self.return_moments.started), self._learn_policy)
        # Acting and the policy's step are one pass through the window, so callbacks see it after both.
        wanted = on_rollout is None or on_rollout(window.rollout)
        batch = window.prepared.batch
        if batch is not None and wanted:
            batch = batch if self.policy.is_recurrent else batch.rows_as_sequences()
            self.updates.run(batch, window.rollout.inner_resets)
        return self._record(window.rollout, window.prepared, wanted=wanted, usable=window.usable)

    # --- one iteration, step by step --------------------------------------------------------------------------------

    def _learn_policy(self) -> _Window:
        """Act for one window, move the policy along the gradient of what it earned, and make the critics' targets."""
        noise = self._noise()
        traced = self._act(noise)
        rollout = detached(traced)
        usable = self.context.guard.rollout(rollout) if self.runtime.can_sync else True
        final_obs = rollout.scale(rollout.final_obs).requires_grad_()
        views, estimates, usable = self.targets.estimate(rollout, usable, final_obs)
        if not usable:
            return _Window(rollout, Prepared(estimates, None, {}), usable)
        objective, metrics = self._objective(traced, views, final_obs)
        metrics |= self._step(objective / self.return_moments.std.float(), traced, noise)
        if self.risk is not None:
            metrics |= self.risk.metrics(rollout, estimates)
        metrics |= self.targets.rescale(rollout, estimates)
        batch = None
        if self.has_critics:
            batch = make_batch(self.policy, rollout, estimates, estimates.advantages, self.return_moments)
        return _Window(rollout, Prepared(estimates, batch, metrics), usable)

    def _noise(self) -> Tensor:
        """Of the actions, [T, N, R]: zeros for a deterministic policy. Its gradient is that of the actions."""
        shape = (self.config.n_steps, self.env.num_envs)
        drawn = self.policy.action_head.draw(shape, self.generator)
        return (drawn if self.config.stochastic else torch.zeros_like(drawn)).requires_grad_()

    def _act(self, noise: Tensor) -> Rollout:
        """One window, with the gradient of what it earns."""
        return self._collect(noise, deterministic=not self.config.stochastic)

    def _objective(
        self, rollout: Rollout, views: tuple[CriticView, ...], final_obs: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """What a window earns, and what its end is worth, less the weighted cost of its risk; mean over the accounts.

        `rollout` carries the gradient. `final_obs` is what the critics' values of the successors depend on.
        """
        gamma = self.config.gamma
        discount = discounts(rollout.ended, gamma)
        earned = (discount * rollout.rewards).sum(0).mean()
        metrics = {"pathwise/earned": earned.detach()}
        objective = earned
        if self.has_critics:
            rows = list(rollout.final_rows)
            counts = _bootstrapped(rollout)[rows] * gamma * discount[rows]
            value = views[0].final_baseline
            if len(views) == 2:
                value = combine_values(value, views[1].final_baseline, self.config.twin_mode)
            # The critic is a constant function to the policy: its slope in the account's state, and nothing else.
            (slope,) = torch.autograd.grad((counts * value).sum(), final_obs)
            to_come = (slope * rollout.scale(rollout.final_obs)).sum() / rollout.rewards.shape[1]
            objective = objective + to_come
            metrics["pathwise/to_come"] = (counts * value.detach()).sum() / rollout.rewards.shape[1]
        if self.risk is not None:
            cost = self.risk.costs(rollout).sum(0).mean()
            metrics["pathwise/cost"] = cost.detach()
            objective = self.risk.constraint.combine(objective, cost)
        return objective, metrics

    def _step(self, objective: Tensor, rollout: Rollout, noise: Tensor) -> dict[str, Tensor]:
        """Move the policy up the gradient of the objective; returns metrics of the gradient through time."""
        loss = -objective
        metrics: dict[str, Tensor] = {}
        if self.config.uses_entropy:
            entropy = self.policy.action_head.entropy(rollout.dist_params).mean()
            loss = loss - self.entropy_coef * entropy
            metrics["train/entropy_coef"] = self.entropy_coef
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        # The spread of a policy that acts without it has slope 0, and decays and is saved like every other weight.
        for parameter in self.optimizer.param_groups[0]["params"]:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self.updates.move_policy()
        self.optimizer.zero_grad(set_to_none=True)
        return (
            metrics
            | {"pathwise/loss": loss.detach()}
            | _through_time(rollout, noise, stochastic=self.config.stochastic)
        )


@dataclass(frozen=True)
class _Window:
    """What an iteration goes on with once the policy has moved."""

    rollout: Rollout
    prepared: Prepared
    usable: bool
    """Whether the policy learned from it."""


# --- mathematics ----------------------------------------------------------------------------------------------------


def discounts(ended: Tensor, gamma: float) -> Tensor:
    """γ to the power of the rows since the window began or an episode began inside it, [T, N].

    ended: [T, N] bool, whether an episode ended with the row
    """
    rows, power = [], torch.ones_like(ended[0], dtype=torch.float32)
    for row in ended:
        rows.append(power)
        power = torch.where(row, 1.0, gamma * power)
    return torch.stack(rows)


def _bootstrapped(rollout: Rollout) -> Tensor:
    """1 where a row's successor keeps its value, [T, N]: at a time limit, and at the window's end unless in ruin."""
    keeps = rollout.truncated.clone()
    keeps[-1] = ~rollout.terminated[-1]
    return (keeps & rollout.valid).float()


@torch.no_grad()
def _through_time(rollout: Rollout, noise: Tensor, *, stochastic: bool) -> dict[str, Tensor]:
    """How the gradient reaches the actions of the window, first to last, and how many of them can still move.

    A stochastic action is its mean plus σ times its noise, so the noise's gradient over σ is the action's.
    """
    assert noise.grad is not None
    slope = noise.grad / rollout.dist_params.chunk(2, dim=-1)[1].exp() if stochastic else noise.grad
    slopes = slope.square().mean((1, 2)).sqrt() * noise.shape[1]
    metrics = {
        "pathwise/slope_first": slopes[0],
        "pathwise/slope_last": slopes[-1],
        "pathwise/slope_ratio": slopes.max() / slopes[-1].clamp(min=1e-30),
        "pathwise/saturated": (torch.tanh(rollout.actions).abs() > SATURATED).float().mean(),
    }
    return {name: value.detach() for name, value in metrics.items()}


# --- where it is true -----------------------------------------------------------------------------------------------


def check_differentiable(env: VectorEnv) -> None:
    """Refuse environments in which a gradient cannot go from the reward to the action."""
    name = type(env).__name__
    if not isinstance(env.action_space, Box):
        raise ConfigError(
            "learner pathwise: discrete choices have no gradient. Use PPO: tg.DistributionalPPO, or learner: ppo"
        )
    if not getattr(env, "differentiable", False):
        raise ConfigError(
            f"learner pathwise: the steps of {name} are not known to be a differentiable function of the action, so "
            "no gradient can go through them. Use PPO: tg.DistributionalPPO, or learner: ppo. A TradingEnv is one; "
            "a FunctionalEnv of your own can say so with differentiable = True"
        )

"""Gradients through the market: simulate a window, sum its rewards, and backpropagate to the policy.

An account of ordinary size does not move prices. Its P&L is therefore a known, differentiable function of the weights
it held, and the gradient flows back through costs, fills, positions and the LSTM: no exploration, no score function, no
advantages (deep hedging, Buehler et al. 2019). A window of T bars ends with a critic's value of the account's state,
whose gradient in that state stands for all that comes later (SHAC, Xu et al. 2022):

    J = E[ Σ_{t<T} γ^t·r_t + γ^T·V(x_T) ],    dJ/dθ by back-propagation through r, x and the memory

The window is short because a gradient through many bars is noisy. Whole episodes need no critic, and give the gradient
of their tail exactly: ∇ES_α = −E[∇R | R ≤ VaR_α].
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor

from tailguard.algorithm.config import PathwiseConfig
from tailguard.algorithm.estimate import CriticView, Estimates, final_values
from tailguard.algorithm.learner import Iteration, Learner
from tailguard.algorithm.loss_terms import policy_penalty
from tailguard.algorithm.rollout import Rollout
from tailguard.algorithm.runtime import detached
from tailguard.algorithm.sb3 import check_arguments, network_options, sample_schedules
from tailguard.algorithm.schedules import Schedule
from tailguard.algorithm.targets import Prepared
from tailguard.algorithm.update import Batch, make_batch
from tailguard.algorithm.updates import CriticUpdates
from tailguard.envs.adapt import as_vector_env, episode_length_of
from tailguard.envs.protocol import Box
from tailguard.errors import ConfigError
from tailguard.models.actions import GaussianHead

if TYPE_CHECKING:
    from tailguard.algorithm.risk_budget import RiskBudget
    from tailguard.envs.protocol import VectorEnv
    from tailguard.risk.config import RiskConfig
    from tailguard.robust.config import RobustConfig


class PathwiseLearner(Learner):
    """A recurrent policy trained by gradients through a market that the agent does not move.

    `env`: a `tailguard.TradingEnv`, or a `FunctionalEnv` of your own whose `transition` is differentiable in state and
        action and that says so with `differentiable = True`.
    `config`: all settings; single ones can be given as keyword arguments instead (`n_steps=16, stochastic=True`): the
        fields of `PathwiseConfig` and of `NetworkConfig`.
    `seed`: of the weights, the noise, the critics' minibatches and the environment.
    `device`: where the network lives; the environment's own device by default.
    `risk`: a budget for the tail of realised outcomes, which the policy learns to keep.
    `robust`: training against attacks on the observations.
    `verbose`, `tensorboard_log`, `policy_kwargs`: as of `DistributionalPPO`.
    """

    kind: ClassVar[str] = "pathwise"
    smooths: ClassVar[Literal["kl", "action"]] = "action"
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
        robust: RobustConfig | None = None,
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
        check_robust(robust, has_critics=self.has_critics)
        super().__init__(
            accounts,
            chosen,
            seed=seed,
            device=device,
            risk=risk,
            robust=robust,
            verbose=verbose,
            tensorboard_log=tensorboard_log,
        )
        if self.risk is not None:
            warn_of_cut_episodes(accounts, chosen.n_steps, self.risk)
        smooths_critics = self.smoothness is not None and self.robust.critic_coef > 0
        self.updates = CriticUpdates(self.context, chosen, self.smoothness if smooths_critics else None)
        self.set_hyper()

    def _parameter_groups(self) -> list[dict[str, Any]]:
        """Two groups with their own learning rates: the policy's parameters, and those that only critics use."""
        # Trunk 0 is the actor's. If a critic shares it, it still belongs to the policy's group.
        policy = [*self.policy.each_trunk()[0].parameters(), *self.policy.action_head.parameters()]
        known = {id(parameter) for parameter in policy}
        critics = [parameter for parameter in self.policy.parameters() if id(parameter) not in known]
        return [{"params": policy}, {"params": critics, "lr": self.critic_learning_rate}]

    def set_hyper(self) -> None:
        config, progress = self.config, self.state.progress
        self.learning_rate.fill_(Schedule.parse(config.learning_rate)(progress))
        self.critic_learning_rate.fill_(Schedule.parse(config.critic_learning_rate)(progress))
        self.entropy_coef.fill_(Schedule.parse(config.entropy_coef)(progress))
        self.set_coefficients()

    def _iterate(self, on_rollout: Callable[[Rollout], bool] | None) -> Iteration:
        self.updates.begin()
        window = self.runtime.run(("window", self.return_moments.started), self._learn_policy)
        # Acting and the policy's step are one pass through the window, so callbacks see it after both.
        wanted = on_rollout is None or on_rollout(window.rollout)
        batch = window.prepared.batch
        if batch is not None and wanted:
            batch = batch if self.policy.is_recurrent else batch.rows_as_sequences()
            self.updates.run(batch, window.rollout.inner_resets)
        return self._iteration(window.rollout, window.prepared, wanted=wanted, usable=window.usable)

    # --- one iteration, step by step --------------------------------------------------------------------------------

    def _learn_policy(self) -> _Window:
        """Simulate one window, step the policy along its return's gradient, and compute the critics' targets."""
        noise = self._noise()
        # Only this rollout keeps its graph. Everything but the objective reads the detached copy.
        traced = self._act(noise)
        rollout = detached(traced)
        usable = self.context.guard.rollout(rollout) if self.runtime.can_sync else True
        # A leaf: the critics' values are differentiated with respect to it, and `_objective` chains that slope to the
        # traced observations by hand.
        final_obs = rollout.scale(rollout.final_obs).requires_grad_()
        views, estimates, usable = self.targets.estimate(rollout, usable, final_obs)
        if not usable:
            return _Window(rollout, Prepared(estimates, None, {}), usable)
        objective, metrics = self._objective(traced, views, final_obs)
        # In units of the return's scale, so that gradient clip and entropy weight mean the same in every market.
        objective = objective / self.return_moments.std.float()
        if self.weighted_terms:
            batch = self._batch(rollout, estimates)
            penalty, of_terms = policy_penalty(
                self.weighted_terms, self.policy, rollout, estimates, batch, self.state.progress
            )
            objective, metrics = objective - penalty, metrics | of_terms
        metrics |= self._step(objective, traced, noise)
        # The values' graph ends here. Kept with the results, it would tie the critics' weights to the stream of this
        # iteration, and a later recording of their updates would wait for it.
        estimates = detached(estimates)
        if self.risk is not None:
            metrics |= self.risk.metrics(rollout, estimates)
        # After the policy's step, whose objective is in the old units.
        metrics |= self.targets.rescale(rollout, estimates)
        targets = self._batch(rollout, estimates) if self.has_critics else None
        if targets is not None and self.smoothness is not None and self.robust.critic_coef > 0:
            targets = self.smoothness.attach(targets)
        return _Window(rollout, Prepared(estimates, targets, metrics), usable)

    def _batch(self, rollout: Rollout, estimates: Estimates) -> Batch:
        return make_batch(self.policy, rollout, estimates, estimates.advantages, self.return_moments)

    def _noise(self) -> Tensor:
        """Noise of the actions, [T, N, R]: zeros for a deterministic policy. Its gradient is that of the actions."""
        shape = (self.config.n_steps, self.env.num_envs)
        # Drawn in any case: a deterministic and a stochastic run consume the same random stream.
        drawn = self.policy.action_head.draw(shape, self.generator)
        return (drawn if self.config.stochastic else torch.zeros_like(drawn)).requires_grad_()

    def _act(self, noise: Tensor) -> Rollout:
        """Simulate one window, with the gradient of what it earns."""
        return self._collect(noise, self._dropout_mask(), deterministic=not self.config.stochastic)

    def _robust_metrics(self) -> dict[str, Tensor]:
        # Those of the regulariser come with the step.
        return {} if self.alternation is None else self.alternation.metrics()

    def _dropout_mask(self) -> Tensor | None:
        """Factors on the encoder's outputs, [N, E]: 0 for those that are dropped, 1 / (1 − p) for the others.

        One mask for a whole window, because a recurrent policy would average over masks that change with every bar
        (Gal & Ghahramani 2016).
        """
        share = self.config.dropout
        if share == 0:
            return None
        shape = (self.env.num_envs, self.policy.each_trunk()[0].encoder.output_size)
        kept = torch.rand(shape, generator=self.generator, device=self.device) >= share
        return kept.float() / (1 - share)

    def _objective(
        self, rollout: Rollout, views: tuple[CriticView, ...], final_obs: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Rewards of a window plus the value of its end, minus λ times its risk cost; mean over the accounts.

        `rollout` carries the gradient. `final_obs` is what the critics' values of the successors depend on.
        """
        gamma = self.config.gamma
        discount = discounts(rollout.ended, gamma)
        earned = (discount * rollout.rewards).sum(0).mean()
        metrics = {"pathwise/earned": earned.detach()}
        objective = earned
        if self.has_critics:
            # On a GPU they are all rows: a list would be copied there from the host.
            whole = len(rollout.final_rows) == len(rollout.rewards)
            rows = slice(None) if whole else list(rollout.final_rows)
            # An episode cut by time keeps its value; a liquidated account has none.
            counts = _bootstrapped(rollout)[rows] * gamma * discount[rows]
            value = final_values(views, self.config.twin_mode)
            # The critic is a constant function to the policy: its slope in the account's state, and nothing else.
            (slope,) = torch.autograd.grad((counts * value).sum(), final_obs)
            to_come = (slope * rollout.scale(rollout.final_obs)).sum() / rollout.rewards.shape[1]
            objective = objective + to_come
            metrics["pathwise/to_come"] = (counts * value.detach()).sum() / rollout.rewards.shape[1]
        if self.risk is not None:
            # Summed over whole episodes this is the tail's own cost, so its gradient is that of ES, without a critic.
            cost = self.risk.costs(rollout).sum(0).mean()
            metrics["pathwise/cost"] = cost.detach()
            objective = self.risk.constraint.combine(objective, cost)
        return objective, metrics

    def _saturated(self, raw: Tensor) -> Tensor:
        """Share of the actions that can hardly move."""
        head = self.policy.action_head
        assert isinstance(head, GaussianHead)  # other actions are refused
        return head.at_bounds(raw).float().mean()

    def _step(self, objective: Tensor, rollout: Rollout, noise: Tensor) -> dict[str, Tensor]:
        """One optimiser step up the gradient of the objective; returns metrics of the gradient through time."""
        loss = -objective
        metrics: dict[str, Tensor] = {}
        if self.config.uses_entropy:
            entropy = self.policy.action_head.entropy(rollout.dist_params).mean()
            loss = loss - self.entropy_coef * entropy
            metrics["train/entropy_coef"] = self.entropy_coef
        if self.smoothness is not None:
            rows = detached(rollout)
            penalty, found = self.smoothness.penalty(
                self.policy, rows.scaled_obs, rows.start_state, rows.episode_start, rows.valid
            )
            loss = loss + penalty
            metrics |= found | {"train/robust_loss": penalty.detach()}
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        # The spread of a policy that acts without it has slope 0, and decays and is saved like every other weight.
        for parameter in self.optimizer.param_groups[0]["params"]:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        if self.updates.ranks is not None:
            assert noise.grad is not None
            (noise.grad,) = self.updates.ranks.sum_gradients(self.policy.parameters(), noise.grad)
        self.updates.move_policy()
        self.optimizer.zero_grad(set_to_none=True)
        return (
            metrics
            | {"pathwise/loss": loss.detach()}
            | _through_time(rollout, noise, stochastic=self.config.stochastic)
            | {"pathwise/saturated": self._saturated(rollout.actions.detach())}
        )


@dataclass(frozen=True)
class _Window:
    """Results of the policy step that the rest of the iteration uses."""

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
        # A new episode inside the window starts at γ⁰: its rewards are not later rewards of the old one.
        power = torch.where(row, 1.0, gamma * power)
    return torch.stack(rows)


def _bootstrapped(rollout: Rollout) -> Tensor:
    """1 where a row's successor keeps its value, [T, N]: at a time limit, and at the window's end unless terminated."""
    keeps = rollout.truncated.clone()
    keeps[-1] = ~rollout.terminated[-1]
    return (keeps & rollout.valid).float()


@torch.no_grad()
def _through_time(rollout: Rollout, noise: Tensor, *, stochastic: bool) -> dict[str, Tensor]:
    """How the gradient reaches the actions of the window, first to last.

    A stochastic action is its mean plus σ times its noise, so the noise's gradient over σ is the action's.
    """
    assert noise.grad is not None
    slope = noise.grad / rollout.dist_params.chunk(2, dim=-1)[1].exp() if stochastic else noise.grad
    slopes = slope.square().mean((1, 2)).sqrt() * noise.shape[1]
    metrics = {
        "pathwise/slope_first": slopes[0],
        "pathwise/slope_last": slopes[-1],
        "pathwise/slope_ratio": slopes.max() / slopes[-1].clamp(min=1e-30),
    }
    return {name: value.detach() for name, value in metrics.items()}


def check_robust(robust: RobustConfig | None, *, has_critics: bool) -> None:
    """Refuse to smooth critics that are not there."""
    if robust is not None and robust.critic_coef > 0 and not has_critics:
        raise ConfigError(
            f"robust.critic_coef: {robust.critic_coef:g} smooths the critics, and pathwise has none here; "
            "set it to 0, or pathwise.critic_epochs to 1 or more"
        )


def warn_of_cut_episodes(env: VectorEnv, n_steps: int, risk: RiskBudget) -> None:
    """Warn where windows are as long as episodes, but do not begin with them."""
    length, stagger = risk.horizon, getattr(env, "stagger", None)
    if risk.config.measure == "bar" or n_steps % length or stagger is None or length // stagger <= 1:
        return
    warnings.warn(
        f"a window is as long as an episode, {length} bars, but stagger={stagger} begins most episodes inside one: the "
        "gradient of their tail then goes through a part of each only. Leave the environment's stagger out",
        stacklevel=3,
    )


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

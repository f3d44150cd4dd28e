"""The risk budget inside the learner: from a rollout to advantages that price the tail."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tailguard.algorithm.estimate import Estimates
from tailguard.algorithm.optimizers import OptimizerState
from tailguard.algorithm.rollout import Rollout
from tailguard.errors import ConfigError
from tailguard.returns import gae, lambda_returns
from tailguard.risk.config import RiskConfig
from tailguard.risk.constraint import CVaRConstraint
from tailguard.risk.cost_critic import CostCritic

if TYPE_CHECKING:
    from tailguard.algorithm.config import PPOConfig
    from tailguard.envs.protocol import VectorEnv
    from tailguard.models.agent import ActorCritic

WINDOW_ROLLOUTS = 4
"""Rollouts whose outcomes the window holds by itself: older ones come from another policy."""
NEEDED = {"episode": "pnl", "drawdown": "drawdown", "bar": "net"}
"""What the environment must report for each measure, in its steps' `outcome`."""


class RunningDrawdowns:
    """The deepest drawdown so far of the episodes under way."""

    def __init__(self, num_envs: int, device: torch.device) -> None:
        self.worst = torch.zeros(num_envs, device=device)
        """As a loss, [N]."""

    def follow(self, drawdowns: Tensor, rollout: Rollout) -> Tensor:
        """The deepest drawdown of the episode up to each row, [T, N], going on from the rollout before."""
        rows = []
        for drawdown, start in zip(drawdowns.unbind(), rollout.episode_start.unbind(), strict=True):
            self.worst = torch.maximum(torch.where(start, 0.0, self.worst), drawdown)
            rows.append(self.worst)
        return torch.stack(rows)

    def state_dict(self) -> dict[str, Tensor]:
        """The drawdowns of all environments."""
        return {"worst": self.worst.clone()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what `state_dict` returned."""
        self.worst = state["worst"].to(self.worst.device)


class RiskBudget:
    """Measures realised losses, prices them, and gives the policy advantages of reward minus cost.

    Three things are shared with the learner and none is changed by it: the rollout, the reward's advantages and the
    reward critic's features. The policy feels the budget through its advantages alone.
    """

    def __init__(self, config: RiskConfig, ppo: PPOConfig, env: VectorEnv, agent: ActorCritic, seed: int) -> None:
        self.config, self.ppo = config, ppo
        self.device, self.num_envs = env.device, env.num_envs
        task = getattr(env, "task", None)
        self.horizon = int(task.episode_length) if task is not None else 1
        # Resolved here and saved so: an agent that is loaded elsewhere must find its own window again.
        self.config = replace(config, window=self._window_size())
        self.constraint = CVaRConstraint(self.config, self.device)
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
            torch.manual_seed(seed)
            width = agent.each_trunk()[agent.critic_trunks[0]].output_size + env.observation_size
            critic = CostCritic(width, config.critic_hidden, config.critic_learning_rate)
        self.critic = critic.to(self.device)
        self.generator = torch.Generator(self.device).manual_seed(seed)
        self.drawdowns = RunningDrawdowns(env.num_envs, self.device)
        self.predicted = torch.tensor(torch.nan, dtype=torch.float64, device=self.device)
        """ES that the cost critic expects of episodes that begin."""

    def _window_size(self) -> int:
        if self.config.window:
            return self.config.window
        rows = WINDOW_ROLLOUTS * self.num_envs * self.ppo.n_steps
        return max(rows if self.config.measure == "bar" else rows // self.horizon, self.config.needed)

    @torch.no_grad()
    def losses(self, rollout: Rollout) -> tuple[Tensor, Tensor]:
        """Realised losses [T, N] as fractions of equity, and where they count."""
        needed = NEEDED[self.config.measure]
        if needed not in rollout.outcome:
            raise ConfigError(
                f"risk: this environment does not report {needed!r} in its steps' outcome, which risk.measure "
                f"{self.config.measure} is made of. Train on a TradingEnv, or report it from your own environment"
            )
        values = -rollout.outcome[needed].float()
        if self.config.measure == "bar":
            return values, rollout.valid
        ended = rollout.ended & rollout.valid
        return (self.drawdowns.follow(values, rollout) if self.config.measure == "drawdown" else values), ended

    def advantages(self, rollout: Rollout, estimates: Estimates) -> tuple[Tensor, dict[str, Tensor]]:
        """Advantages [T, N] of reward minus priced cost, in raw units, and the figures of the budget."""
        losses, counted = self.losses(rollout)
        self.constraint.observe(losses, counted)
        costs = self.constraint.costs(losses, counted)
        if self.config.measure == "bar":
            costs = costs / self.horizon
        view = estimates.views[0]
        features, obs = view.output.features, rollout.scaled_obs
        with torch.no_grad():
            values = self.critic(features, obs)
            last = max(rollout.final_obs)
            successor = self.critic(view.final.features, rollout.scale(rollout.final_obs[last]))
            next_values = torch.cat((values[1:], successor.unsqueeze(0)))
            # The budget is on the episode: when it ends, by time or by ruin, nothing more is to come.
            never = torch.zeros_like(rollout.truncated)
            cost_advantages = gae(costs, values, next_values, rollout.ended, never, 1.0, self.ppo.gae_lambda)
            targets = lambda_returns(cost_advantages, values)
            self._predict(values, rollout.episode_start & rollout.valid)
        loss = self.critic.fit(
            features.detach(),
            obs,
            targets,
            rollout.valid.float(),
            epochs=self.config.critic_epochs,
            minibatch=self.ppo.minibatch_size,
            generator=self.generator,
        )
        figures = self.constraint.figures() | {"risk/cost_critic_loss": loss, "risk/cvar_predicted": -self.predicted}
        return self.constraint.combine(estimates.advantages, cost_advantages), figures

    def _predict(self, values: Tensor, starts: Tensor) -> None:
        """ν plus the expected cost of episodes that begin now; as it was, where none does."""
        begun = starts.sum()
        mean = torch.where(starts, values, 0.0).sum().double() / begun.clamp(min=1)
        expected = self.constraint.threshold + mean * self.constraint.scale
        self.predicted.copy_(torch.where(begun > 0, expected, self.predicted))

    def state_dict(self) -> dict[str, Any]:
        """Window, threshold, price, cost critic and its moments, generator; `drawdowns` are a part of their own."""
        return {
            "constraint": self.constraint.state_dict(),
            "critic": {name: value.clone() for name, value in self.critic.state_dict().items()},
            "optimizer": OptimizerState(self.critic, self.critic.optimizer).state_dict(),
            "predicted": self.predicted.clone(),
            "generator": self.generator.get_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned."""
        self.constraint.load_state_dict(state["constraint"])
        self.critic.load_state_dict(state["critic"])
        OptimizerState(self.critic, self.critic.optimizer).load_state_dict(state["optimizer"])
        self.predicted.copy_(state["predicted"])
        self.generator.set_state(state["generator"].cpu())

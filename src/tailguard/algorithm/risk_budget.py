"""The risk budget in the learner: advantages that include the cost of the tail."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tailguard.algorithm.calibration import PredictedReturns
from tailguard.algorithm.estimate import Estimates
from tailguard.algorithm.learner_state import Stateful
from tailguard.algorithm.optimizers import OptimizerState
from tailguard.algorithm.rollout import Rollout
from tailguard.envs.adapt import episode_length_of
from tailguard.errors import ConfigError
from tailguard.monitor.health import FEW_TAIL_OUTCOMES
from tailguard.returns import RunningMoments, gae, lambda_returns
from tailguard.risk.config import RiskConfig
from tailguard.risk.constraint import CVaRConstraint
from tailguard.risk.cost_critic import CostCritic

if TYPE_CHECKING:
    from tailguard.algorithm.config import LearnerConfig
    from tailguard.envs.protocol import VectorEnv
    from tailguard.models.policy import ActorCritic

CHANGE_MEMORY = 0.8
"""Weight of the past in the running moments of the losses' changes, per rollout."""
MANY_TAIL_OUTCOMES = 50
"""Tail outcomes in an update with which the gradient of the tail has little noise."""
WINDOW_ROLLOUTS = 4
"""Rollouts whose outcomes the window holds by itself: older ones come from another policy."""
NEEDED = {"episode": "pnl", "drawdown": "drawdown", "bar": "net"}
"""What the environment must report for each measure, in its steps' `outcome`."""


class RunningLosses:
    """Loss so far of the running episodes: for P&L the current loss, for drawdowns the deepest."""

    def __init__(self, num_envs: int, deepest: bool, device: torch.device) -> None:
        self.deepest = deepest
        self.last = torch.zeros(num_envs, device=device)
        """[N], after the last row."""
        self.age = torch.zeros(num_envs, device=device)
        """Rows since the episode's start, [N]."""

    def follow(self, values: Tensor, episode_start: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Losses before and after each row and the episode's age before it, [T, N] each; an episode starts at 0.

        values: [T, N], continuing from the previous rollout
        """
        rows, ages, worst, age = [], [], self.last, self.age
        for value, start in zip(values.unbind(), episode_start.unbind(), strict=True):
            worst = torch.maximum(torch.where(start, 0.0, worst), value) if self.deepest else value
            age = torch.where(start, 0.0, age)
            rows.append(worst)
            ages.append(age)
            age = age + 1
        after = torch.stack(rows)
        before = torch.cat((self.last.unsqueeze(0), after[:-1])).masked_fill(episode_start, 0.0)
        self.last.copy_(worst.detach())
        self.age.copy_(age)
        return before, after, torch.stack(ages)

    def state_dict(self) -> dict[str, Tensor]:
        """Losses and ages of all environments."""
        return {"last": self.last.clone(), "age": self.age.clone()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` returned."""
        self.last.copy_(state["last"])
        self.age.copy_(state["age"])


class RiskBudget:
    """Measures realised losses, weights them by the multiplier, and returns advantages of reward minus cost.

    It reads three things of the learner and changes none: the rollout, the reward's advantages and the reward critic's
    features. The budget acts on the policy through its advantages alone.
    """

    def __init__(self, config: RiskConfig, ppo: LearnerConfig, env: VectorEnv, policy: ActorCritic, seed: int) -> None:
        self.config, self.ppo = config, ppo
        self.device, self.num_envs = env.device, env.num_envs
        self.horizon = _horizon(env)
        self.changes = RunningMoments((), decay=CHANGE_MEMORY, device=self.device)
        """Change of the loss per row: mean and standard deviation over recent rollouts."""
        # Resolved here and saved so: an agent that is loaded elsewhere must find its own window again.
        self.config = replace(config.with_gains(*ppo.multiplier_gains), window=self._window_size())
        self.constraint = CVaRConstraint(self.config, self.device)
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
            torch.manual_seed(seed)
            # Of many assets, whose number may change, the critic's features tell enough.
            self.layout = policy.layout
            read = env.observation_size if self.layout is None else self.layout.account_size
            width = policy.each_trunk()[policy.critic_trunks[0]].output_size + read
            self.critic = CostCritic(width, config.critic_hidden, config.critic_learning_rate, self.device)
        self.generator = torch.Generator(self.device).manual_seed(seed)
        self.running = RunningLosses(env.num_envs, config.measure == "drawdown", self.device)
        self.predictions: PredictedReturns | None = None
        if ppo.network.critic_kind.predicts_distribution:
            self.predictions = PredictedReturns(
                env.num_envs, ppo.network.quantiles, ppo.gamma, self.config.needed, self.device
            )
        self.predicted = torch.tensor(torch.nan, dtype=torch.float64, device=self.device)
        """ES that the cost critic predicts for episodes that start now."""

    def _window_size(self) -> int:
        if self.config.window:
            return self.config.window
        rows = WINDOW_ROLLOUTS * self.num_envs * self.ppo.n_steps
        return max(rows if self.config.measure == "bar" else rows // self.horizon, self.config.needed)

    @property
    def tail_outcomes(self) -> float:
        """Outcomes beyond the VaR that an update sees, on average: episodes, or bars where the measure is of bars."""
        rows = self.num_envs * self.ppo.n_steps
        return self.config.alpha * (rows if self.config.measure == "bar" else rows / self.horizon)

    def describe_sample(self) -> str:
        """How much of the tail an update sees, in words."""
        what = "bars" if self.config.measure == "bar" else "episodes"
        seen = self.tail_outcomes
        number = f"{seen:.2g}" if seen < 10 else f"{seen:,.0f}"
        words = f"an update sees {number} tail {what}"
        if seen >= MANY_TAIL_OUTCOMES:
            return words
        needed = math.ceil(self.num_envs * MANY_TAIL_OUTCOMES / seen)
        more = f"env.num_envs={needed} shows {MANY_TAIL_OUTCOMES}"
        if seen < FEW_TAIL_OUTCOMES:
            return f"{words}, fewer than {FEW_TAIL_OUTCOMES}: too few to follow; {more}, shorter episodes show more too"
        return f"{words} ({more})"

    def set_limit(self, limit: float | None, penalty: float) -> None:
        """Put another limit in force, or another fixed penalty where there is none; λ's gains and window stay."""
        self.config = self.constraint.config = replace(self.config, limit=limit, penalty=penalty)
        if limit is not None:
            self.constraint.limit.fill_(limit)
        else:
            self.constraint.multiplier.fill_(penalty)

    def episode_parts(self) -> dict[str, Stateful]:
        """What belongs to the episodes under way, by name."""
        parts: dict[str, Stateful] = {"running_losses": self.running}
        return parts if self.predictions is None else parts | {"predictions": self.predictions}

    def costs(self, rollout: Rollout) -> Tensor:
        """Record the rollout's outcomes, update ν and λ, and return the cost of each row, [T, N].

        The tail cost (L − ν)₊/α is known only when an episode ends, and is above 0 for a share α of episodes only. Each
        row is instead charged the change that it makes to the expected cost, if the rest of the episode behaves like
        recent rows. Over an episode these charges sum to the tail cost minus a constant, so the optimal policy is the
        same (potential-based shaping, Ng, Harada & Russell 1999); but every row gets its signal at once, not only rows
        of episodes that end in the tail.

        The costs are differentiable in the outcomes. Summed over a window they are the expected cost at its end less
        that at its start; over whole episodes, (L − ν)₊/α itself, whose gradient is that of the tail.
        """
        needed = NEEDED[self.config.measure]
        if needed not in rollout.outcome:
            raise ConfigError(
                f"risk: this environment does not report {needed!r} in its steps' outcome, which risk.measure "
                f"{self.config.measure} is made of. Train on a TradingEnv, or report it from your own environment"
            )
        values = -rollout.outcome[needed].float()
        if self.config.measure == "bar":
            self.constraint.observe(values, rollout.valid)
            return self.constraint.excess(values).masked_fill(~rollout.valid, 0.0) / self.horizon
        before, after, age = self.running.follow(values, rollout.episode_start)
        self.constraint.observe(after, rollout.ended & rollout.valid)
        self.changes.update(after - before, rollout.valid)
        to_come = (self.horizon - age).clamp(min=0.0)
        change = self._expected(after, (to_come - 1).clamp(min=0.0), rollout.ended) - self._expected(before, to_come)
        return change.masked_fill(~rollout.valid, 0.0)

    def _expected(self, losses: Tensor, rows: Tensor, ended: Tensor | None = None) -> Tensor:
        """Expected cost of episodes at these losses with this many rows to come, [...]."""
        if self.config.measure == "drawdown":
            return self.constraint.excess(losses)  # a deepest fall does not move like a sum
        rows = rows if ended is None else rows.masked_fill(ended, 0.0)
        return self.constraint.expected_excess(
            losses, rows.double() * self.changes.mean, rows.double().sqrt() * self.changes.std
        )

    def _read(self, obs: Tensor) -> Tensor:
        """What the cost critic reads of observations [..., O]: all of it, or the account where assets may vary."""
        return obs if self.layout is None else self.layout.of_account(obs)

    def advantages(self, rollout: Rollout, estimates: Estimates) -> tuple[Tensor, dict[str, Tensor]]:
        """Advantages [T, N] of reward minus λ times the cost, in raw units, and the metrics of the budget."""
        with torch.no_grad():
            costs = self.costs(rollout)
        view = estimates.views[0]
        features, obs = view.output.features, self._read(rollout.scaled_obs)
        with torch.no_grad():
            values = self.critic(features, obs)
            successor = self.critic(view.final_features, self._read(rollout.scale(rollout.final_obs[-1])))
            next_values = torch.cat((values[1:], successor.unsqueeze(0)))
            # The budget is on the episode: when it ends, by time or by ruin, nothing more is to come.
            never = torch.zeros_like(rollout.truncated)
            cost_advantages = gae(costs, values, next_values, rollout.ended, never, 1.0, self.config.cost_lambda)
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
        metrics = self.metrics(rollout, estimates)
        metrics |= {"risk/cost_critic_loss": loss, "risk/cvar_predicted": -self.predicted}
        return self.constraint.combine(estimates.advantages, cost_advantages), metrics

    def metrics(self, rollout: Rollout, estimates: Estimates) -> dict[str, Tensor]:
        """`risk/*` after the rollout's outcomes are recorded, and how well the return's distribution predicted them."""
        metrics = self.constraint.metrics()
        metrics["risk/tail_outcomes"] = torch.full_like(self.predicted, self.tail_outcomes)
        if self.predictions is not None and estimates.views:
            self.predictions.follow(rollout, estimates)
            metrics |= self.predictions.metrics(self.config.alpha)
        return metrics

    def _predict(self, values: Tensor, starts: Tensor) -> None:
        """ν plus the expected cost of episodes that begin now; unchanged where none does."""
        begun = starts.sum()
        mean = torch.where(starts, values, 0.0).sum().double() / begun.clamp(min=1)
        owed = torch.zeros_like(mean)
        if self.config.measure != "bar":
            owed = self._expected(owed, torch.full_like(mean, self.horizon)).double()
        expected = self.constraint.threshold + (mean + owed) * self.constraint.scale
        self.predicted.copy_(torch.where(begun > 0, expected, self.predicted))

    def state_dict(self) -> dict[str, Any]:
        """Window, threshold, multiplier, cost critic with its moments, generator; `episode_parts` has the rest."""
        return {
            "constraint": self.constraint.state_dict(),
            "critic": {name: value.clone() for name, value in self.critic.state_dict().items()},
            "optimizer": OptimizerState(self.critic, self.critic.optimizer).state_dict(),
            "predicted": self.predicted.clone(),
            "changes": self.changes.state_dict(),
            "generator": self.generator.get_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.constraint.load_state_dict(state["constraint"])
        self.critic.load_state_dict(state["critic"])
        OptimizerState(self.critic, self.critic.optimizer).load_state_dict(state["optimizer"])
        self.predicted.copy_(state["predicted"])
        self.changes.load_state_dict(state["changes"])
        self.generator.set_state(state["generator"].cpu())


def _horizon(env: VectorEnv) -> int:
    length = episode_length_of(env)
    if length is None:
        raise ConfigError(
            f"risk: {type(env).__name__} does not say how long its episodes are, and the budget is on episodes. Give "
            "it an attribute episode_length, the steps in a whole episode, or wrap it in gymnasium.wrappers.TimeLimit"
        )
    return length

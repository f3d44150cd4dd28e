"""The critics' predictions at every bar of a backtest, and the realised returns."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tailguard.algorithm.learner import Learner
from tailguard.evaluate.backtest import backtest
from tailguard.models.inference import StepPolicy

if TYPE_CHECKING:
    from tailguard.data.bars import Bars
    from tailguard.envs.spec import TradingSpec

Float = NDArray[np.float64]

FORGOTTEN = 0.01
"""Discount below which later rewards are left out of a realised return."""
ENOUGH = 100
"""Fewest realised returns for a comparison."""


@dataclass(frozen=True)
class Predictions:
    """Quantiles of the discounted return predicted at each bar, and the return that followed."""

    predicted: Float
    """At midpoint levels, the mean of twin critics, [n, Q]; in units of discounted rewards."""
    realised: Float
    """[n]"""
    horizon: int
    """Bars that a realised return spans; neighbours share most of them."""


def predictions(agent: Learner, bars: Bars) -> Predictions | None:
    """Backtest the agent and compare its critics' predictions with the realised returns.

    The critics predict the exploring policy of training, while the backtest trades without exploration, so a small
    difference is expected. None where a comparison is impossible: a critic without a distribution, rewards that depend
    on where an episode started, a discount so close to one that no return ends within these bars, bars with gaps.
    """
    horizon = _horizon(agent.config.gamma)
    distributional = agent.config.network.critic_kind.predicts_distribution
    if not distributional or agent.spec is None or agent.spec.reward == "pnl" or horizon is None:
        return None
    listener = _ObservationRecorder(agent)
    net = backtest(listener, bars, progress_bar=False).net
    rewards = np.log1p(net) if agent.spec.reward == "log" else net
    # Before a gap, and after a liquidation, the backtest does not query the agent.
    if len(listener.observations) != len(net) or len(net) < horizon + ENOUGH or not np.isfinite(rewards).all():
        return None
    realised = discounted_returns(rewards, agent.config.gamma, horizon)
    quantiles = _quantiles(agent, np.stack(listener.observations), np.array(listener.starts))
    return Predictions(quantiles[: len(realised)], realised, horizon)


def discounted_returns(rewards: Float, gamma: float, horizon: int) -> Float:
    """Σ γ^k r_{t+k} over k < horizon, for every t with enough later rewards, [T] -> [T − horizon + 1]."""
    weights = gamma ** np.arange(horizon)
    return np.asarray(np.lib.stride_tricks.sliding_window_view(rewards, horizon) @ weights)


def _horizon(gamma: float) -> int | None:
    """Bars after which a discounted reward is negligible; None without a discount."""
    if gamma >= 1:
        return None
    return max(1, math.ceil(math.log(FORGOTTEN) / math.log(gamma))) if gamma > 0 else 1


class _ObservationRecorder:
    """The agent, with a record of its observations."""

    def __init__(self, agent: Learner) -> None:
        self.agent = agent
        self.observations: list[NDArray[np.float32]] = []
        self.starts: list[bool] = []

    @property
    def spec(self) -> TradingSpec | None:
        return self.agent.spec

    def predict(
        self, observation: Any, state: Any = None, episode_start: Any = None, deterministic: bool = False
    ) -> tuple[Any, Any]:
        return self.agent.predict(observation, state, episode_start, deterministic)

    def inference_policy(self) -> StepPolicy:
        policy = self.agent.inference_policy()

        def listen(observation: Tensor, reset: bool) -> Tensor:
            self.observations.append(observation.numpy()[0].copy())
            self.starts.append(reset)
            return policy(observation, reset)

        return listen


@torch.no_grad()
def _quantiles(agent: Learner, observations: NDArray[np.float32], starts: NDArray[np.bool_]) -> Float:
    """Quantiles of the return at every row, mean of the critics, in raw units, [T, Q]."""
    config = agent.config
    scale = agent.observation_scale(observations.shape[-1])
    rows = scale(torch.as_tensor(observations, device=agent.device).unsqueeze(1))
    start = torch.as_tensor(starts, device=agent.device).unsqueeze(1)
    network = agent.policy
    outputs = network(rows, network.initial_state(1), start)
    quantiles = [
        agent.return_moments.denormalise(critic.distribution.quantiles(output.distribution, config.network.quantiles))
        for critic, output in zip(network.each_critic(), outputs.critics, strict=True)
        if critic.distribution is not None and output.distribution is not None
    ]
    return torch.stack(quantiles).mean(0)[:, 0].double().cpu().numpy()

"""One bar of N episodes after the decision: trade, account, observation and reward.

Few accounts on a CPU take a shorter way to the same numbers (`market.host_step`): a policy that is differentiated
through the market comes here at every bar, and the whole bar is then one node of the graph, with its slopes by hand.
With the gain g = e/s − 1 and the drawdown d = e/p − 1 of an episode that began at s, and p its peak:

    of_e += of_g/s + of_d/p        of_p −= of_d·e/p²        p = max(p, e): its slope goes to the larger one
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tailguard.envs.episodes import GROWTH_FLOOR, EpisodeState, TradingTask
from tailguard.market import MarketState, Transition
from tailguard.market.host_step import Array, HostStep, StepSlopes, array, can_step, host_step, slopes_before


@dataclass(frozen=True)
class TradedBar:
    """What a bar leads to, before any episode begins anew."""

    after: EpisodeState
    transition: Transition
    gain: Tensor
    """Since the start of the episode, as a share of its first equity, [N]."""
    drawdown: Tensor
    """From the episode's peak, as a share of it, [N]."""
    observation: Tensor
    reward: Tensor
    finite: Tensor
    """bool: the account's growth is a number."""
    liquidates: bool
    """Whether some account may have been liquidated."""


def trade_bar(task: TradingTask, before: EpisodeState, target: Tensor, hold: Tensor | None = None) -> TradedBar:
    """Trade one bar towards target weights [N, A]; `hold` as in the simulator."""
    if can_step(task.market, target) and not before.start_equity.requires_grad:
        row = before.market.row + 1
        step = host_step(task.market, before.market, row, target.to(task.market.dtype), hold, before.cost_factor)
        if step is not None:
            return _on_host(task, before, row, target, step)
    after, transition = task.advance(before, target, hold)
    account, reward = task.account(after), task.reward_of(transition, before)
    observation, finite = task.observe(after, account), transition.net.isfinite()
    return TradedBar(after, transition, account[0], account[1], observation, reward, finite, liquidates=True)


def _on_host(task: TradingTask, before: EpisodeState, row: Tensor, target: Tensor, step: HostStep) -> TradedBar:
    """The bar that NumPy has traded, with a node of the graph where one is asked for."""
    inputs = target, before.market.weights, before.market.equity, before.peak_equity
    learns = torch.is_grad_enabled() and any(value.requires_grad for value in inputs)
    made = _Bar.apply(*inputs, task, before, row, step) if learns else _results(task, before, row, step)  # type: ignore[no-untyped-call]
    equity, weights, peak, observation, reward, net, gain, drawdown, turnover, *costs = made
    # One tensor for all that did not happen: results are read, never written to.
    nothing = np.zeros(len(step.net), step.net.dtype)
    zeros = torch.from_numpy(nothing)
    kinds = [cost.kind for cost in task.market.costs["liquidation"]]
    transition = Transition(
        net=net,
        pnl=_flat(step.pnl),
        costs=dict(zip(step.costs, costs, strict=True)) | dict.fromkeys(kinds, zeros),
        shortfall=zeros,
        turnover=turnover,
        unfilled=zeros,
        liquidated=torch.from_numpy(nothing.astype(np.bool_)),
    )
    after = EpisodeState(
        MarketState(row, equity, weights), before.start_equity, peak, before.age + 1, before.cost_factor
    )
    finite = _flat(np.isfinite(step.net))
    return TradedBar(after, transition, gain, drawdown, observation, reward, finite, liquidates=False)


def _results(task: TradingTask, before: EpisodeState, row: Tensor, step: HostStep) -> tuple[Tensor, ...]:
    """What has a slope: equity, weights, peak, observation, reward, net growth, gain, drawdown, turnover, costs."""
    net, former = _flat(step.net), before.market.equity.detach()
    equity = torch.addcmul(former, former, net)
    now, start = array(equity), array(before.start_equity)
    peak = np.maximum(array(before.peak_equity), now)
    gain, drawdown = now / start - 1, now / peak - 1
    age = array(before.age) + 1
    assets = step.weights.shape[1]
    account = np.empty((len(now), assets + 3), now.dtype)
    account[:, :assets] = step.weights
    account[:, assets], account[:, assets + 1] = gain, drawdown
    account[:, assets + 2] = 1 - age.astype(now.dtype) / task.episode_length
    known = task.features.index_select(0, row)
    if known.dtype == torch.bfloat16:
        known = known.float()
    observation = torch.cat((known, torch.from_numpy(account).to(known.dtype)), dim=1)
    return (
        equity, torch.from_numpy(step.weights), torch.from_numpy(peak), observation, _reward(task, before, net), net,
        torch.from_numpy(gain), torch.from_numpy(drawdown), _flat(step.turnover),
        *(_flat(cost) for cost in step.costs.values()),
    )  # fmt: skip


def _reward(task: TradingTask, before: EpisodeState, net: Tensor) -> Tensor:
    if task.reward == "log":
        return torch.log1p(net.clamp(min=GROWTH_FLOOR - 1)).float()
    if task.reward == "simple":
        return net.float()
    return (net * (before.market.equity.detach() / before.start_equity)).float()


class _Bar(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
        *_, task, before, row, step = inputs
        made = _results(task, before, row, step)
        # Most results reach no loss; None then saves a tensor of zeros and what would follow from it.
        ctx.set_materialize_grads(False)
        ctx.task, ctx.before, ctx.step = task, before, step
        ctx.equity, ctx.peak = array(made[0]), array(made[2])
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        task, before, step, equity, peak = ctx.task, ctx.before, ctx.step, ctx.equity, ctx.peak
        given = [None if slope is None else slope.numpy() for slope in gradients]
        of_equity, of_weights, of_peak, of_seen, of_reward, of_net, of_gain, of_drawdown, of_turnover, *own = given
        if of_seen is not None:
            features, assets = task.features.shape[1], step.weights.shape[1]
            of_account = of_seen[:, features:].astype(equity.dtype, copy=False)
            of_weights = _plus(of_weights, of_account[:, :assets])
            of_gain = _plus(of_gain, of_account[:, assets])
            of_drawdown = _plus(of_drawdown, of_account[:, assets + 1])
        if of_gain is not None:
            of_equity = _plus(of_equity, of_gain / array(before.start_equity))
        if of_drawdown is not None:
            share = of_drawdown / peak
            of_equity, of_peak = _plus(of_equity, share), _plus(of_peak, -share * (equity / peak))
        of_former_peak = None
        if of_peak is not None:
            # Of two equal ones each has half of the slope, as automatic differentiation has it.
            half = 0.5 * of_peak
            rest = half * np.sign(equity - array(before.peak_equity))
            of_equity, of_former_peak = _plus(of_equity, half + rest), torch.from_numpy(half - rest)
        of_former = None
        if of_reward is not None:
            through_net, of_former = _slopes_of_reward(task, before, step, of_reward.astype(equity.dtype, copy=False))
            of_net = _plus(of_net, through_net)
        costs = {kind: slope[:, None] for kind, slope in zip(step.costs, own, strict=True) if slope is not None}
        of = StepSlopes(_column(of_equity), of_weights, _column(of_net), _column(of_turnover), costs)
        of_target, of_held, through_step = slopes_before(task.market, step, of)
        of_former = _plus(of_former, through_step[:, 0])
        assert of_former is not None
        slopes = (torch.from_numpy(slope) for slope in (of_target, of_held, of_former))
        return *slopes, of_former_peak, None, None, None, None


def _slopes_of_reward(
    task: TradingTask, before: EpisodeState, step: HostStep, of_reward: Array
) -> tuple[Array, Array | None]:
    """Slopes in the net growth and in the equity before the bar, [N] each."""
    if task.reward == "simple":
        return of_reward, None
    closed = step.closed[:, 0]
    if task.reward == "log":
        return np.where(closed >= GROWTH_FLOOR, of_reward / closed, 0).astype(closed.dtype, copy=False), None
    of_money = of_reward / array(before.start_equity)
    return of_money * step.equity[:, 0], of_money * step.net[:, 0]


def _flat(values: Array) -> Tensor:
    """[N, 1] as [N]."""
    return torch.from_numpy(values[:, 0])


def _column(slope: Array | None) -> Array | None:
    """[N] as [N, 1]."""
    return None if slope is None else slope[:, None]


def _plus(one: Array | None, other: Array | None) -> Array | None:
    """Their sum; None is 0."""
    if one is None or other is None:
        return other if one is None else one
    return one + other

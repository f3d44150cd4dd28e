"""One bar of N episodes after the decision: trade, account, reward and observation, with the slopes of all by hand.

A policy that is differentiated through the market comes here at every bar. Automatic differentiation would give each of
some eighty operations a node of its own, which at a few hundred accounts takes longer than the arithmetic; here a bar
is one node, with the same numbers. `market.slopes` says which bars are left to automatic differentiation.

With the gain g = e/s − 1 and the drawdown d = e/p − 1 of an episode that began at s, and p its peak:

    of_e += of_g/s + of_d/p        of_p −= of_d·e/p²        p = max(p, e): its slope goes to the larger one
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tailguard.device_ops import readable
from tailguard.envs.episodes import GROWTH_FLOOR, EpisodeState, TradingTask
from tailguard.market import Transition
from tailguard.market.slopes import Course, Slopes, has_known_slopes, plus, slopes_before


@dataclass(frozen=True)
class TradedBar:
    """What a bar leads to, before any episode is begun anew."""

    after: EpisodeState
    transition: Transition
    account: tuple[Tensor, Tensor, Tensor]
    """`ACCOUNT_FIELDS`, [N] each."""
    observation: Tensor
    reward: Tensor


def trade_bar(task: TradingTask, before: EpisodeState, target: Tensor, hold: Tensor | None = None) -> TradedBar:
    """Trade one bar towards target weights [N, A]; `hold` as in the simulator."""
    learns = torch.is_grad_enabled() and target.requires_grad and readable(target)
    if learns and not before.start_equity.requires_grad and has_known_slopes(task.market):
        with torch.no_grad():
            bar, course = _traded(task, before, target, hold)
        if not course.rough:
            return _with_slopes(task, before, target, hold, bar, course)
    return _traded(task, before, target, hold)[0]


def _traded(
    task: TradingTask, before: EpisodeState, target: Tensor, hold: Tensor | None
) -> tuple[TradedBar, Course]:
    after, transition, course = task.advance_and_course(before, target, hold)
    account = task.account(after)
    reward = task.reward_of(transition, before)
    return TradedBar(after, transition, account, task.observe(after, account), reward), course


def _with_slopes(
    task: TradingTask, before: EpisodeState, target: Tensor, hold: Tensor | None, bar: TradedBar, course: Course
) -> TradedBar:
    """The bar, which was computed without a graph, with its graph as one node."""
    after, transition, (pnl, drawdown, time_left) = bar.after, bar.transition, bar.account
    inputs = target, before.market.weights, before.market.equity, before.peak_equity
    held = task, before, hold, course, bar
    made = _TradedBar.apply(*inputs, held)  # type: ignore[no-untyped-call]
    equity, weights, peak, observation, reward, net, pnl, drawdown, turnover, *costs = made
    charged = dict(zip(_charged(task), costs, strict=True))
    return TradedBar(
        replace(after, market=replace(after.market, equity=equity, weights=weights), peak_equity=peak),
        replace(transition, net=net, turnover=turnover, costs=transition.costs | charged),
        (pnl, drawdown, time_left),
        observation,
        reward,
    )


def _charged(task: TradingTask) -> list[str]:
    """Kinds of the costs of a bar without liquidations."""
    costs = task.market.costs
    return [cost.kind for cost in (*costs["order"], *costs["close"])]


class _TradedBar(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
        ctx.task, ctx.before, ctx.hold, ctx.course, bar = inputs[-1]
        # Most results reach no loss; None then saves a tensor of zeros and what would follow from it.
        ctx.set_materialize_grads(False)
        market, transition, (pnl, drawdown, _) = bar.after.market, bar.transition, bar.account
        ctx.save_for_backward(market.equity, market.weights, bar.after.peak_equity)
        costs = [transition.costs[kind] for kind in _charged(ctx.task)]
        of_bar = market.equity, market.weights, bar.after.peak_equity, bar.observation, bar.reward
        return (*of_bar, transition.net, pnl, drawdown, transition.turnover, *costs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        task, course, before = ctx.task, ctx.course, ctx.before
        equity, weights, peak = ctx.saved_tensors
        of_equity, of_weights, of_peak, of_seen, of_reward, of_net, of_pnl, of_drawdown, of_turnover, *own = gradients
        if of_seen is not None:
            assets = weights.shape[1]
            of_account = of_seen[:, task.features.shape[1] :].to(equity.dtype)
            of_weights = plus(of_weights, of_account[:, :assets])
            of_pnl, of_drawdown = plus(of_pnl, of_account[:, assets]), plus(of_drawdown, of_account[:, assets + 1])
        if of_pnl is not None:
            of_equity = plus(of_equity, of_pnl / before.start_equity)
        if of_drawdown is not None:
            share = of_drawdown / peak
            of_equity, of_peak = plus(of_equity, share), plus(of_peak, (share * (equity / peak)).neg())
        of_former_peak = None
        if of_peak is not None:
            # Of two equal ones each has half of the slope, as automatic differentiation has it.
            half = 0.5 * of_peak
            rest = half * (equity - before.peak_equity).sign()
            of_equity, of_former_peak = plus(of_equity, half + rest), half - rest
        of_former_equity = None
        if of_reward is not None:
            through_net, of_former_equity = _slopes_of_reward(task, before, course, of_reward.to(equity.dtype))
            of_net = plus(of_net, through_net)
        slopes = Slopes(
            equity=_column(of_equity),
            weights=of_weights,
            net=_column(of_net),
            turnover=_column(of_turnover),
            costs={kind: slope.unsqueeze(1) for kind, slope in zip(_charged(task), own, strict=True) if slope is not None},
        )
        of_target, of_held, through_step = slopes_before(
            task.market, course, weights, ctx.hold, before.cost_factor, slopes
        )
        if through_step is not None:
            of_former_equity = plus(of_former_equity, through_step.squeeze(1))
        return of_target, of_held, of_former_equity, of_former_peak, None


def _slopes_of_reward(
    task: TradingTask, before: EpisodeState, course: Course, of_reward: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Slopes of `TradingTask.reward_of` in the net growth and in the equity before the bar, [N] each."""
    if task.reward == "simple":
        return of_reward, None
    left = course.closed.equity.squeeze(1)
    if task.reward == "log":
        return torch.where(left >= GROWTH_FLOOR, of_reward / left, 0.0), None
    of_money = of_reward / before.start_equity
    return of_money * before.market.equity, of_money * (left - 1)


def _column(slope: Tensor | None) -> Tensor | None:
    """[N] as [N, 1]."""
    return None if slope is None else slope.unsqueeze(1)

"""Accounts side by side add up to one capital, bar by bar."""

from __future__ import annotations

import numpy as np
import pytest

import tailguard as tg
from tailguard.evaluate.accounts import pooled, separate
from tailguard.evaluate.baselines import BuyAndHold, MovingAverageCross

POLICIES = (BuyAndHold(exposure=0.7), MovingAverageCross(3, 12))


@pytest.fixture(scope="module")
def parts():
    bars = tg.make_market(400, assets=2, seed=3).bars
    first, second = separate(bars, "per_symbol")
    cut = second.between(second.end_points[0], second.end_points[1])  # one bar less
    return [tg.backtest(policy, part) for policy, part in zip(POLICIES, (first, cut), strict=True)]


def test_symbols_are_kept_together_in_a_portfolio_and_apart_in_accounts() -> None:
    bars = tg.make_market(60, assets=3).bars
    assert separate(bars, "portfolio") == [bars]
    assert [part.symbols for part in separate(bars, "per_symbol")] == [("SYN01",), ("SYN02",), ("SYN03",)]


def test_the_whole_is_worth_what_its_accounts_are_worth(parts) -> None:
    whole = pooled(parts)
    assert whole.symbols == ("SYN01", "SYN02")
    assert len(whole.time) == len(parts[0].time) == len(parts[1].time) + 1
    money = parts[0].equity[:-1] + parts[1].equity  # both began with 1
    np.testing.assert_allclose(whole.equity[:-1], money / 2, rtol=1e-12)
    # At the last bar only the first account trades; the other keeps what it has.
    assert whole.equity[-1] == pytest.approx((parts[0].equity[-1] + parts[1].equity[-1]) / 2)
    np.testing.assert_allclose(whole.equity, np.cumprod(np.r_[1, 1 + whole.net]), rtol=1e-12)


def test_costs_turnover_and_weights_are_shares_of_the_whole(parts) -> None:
    whole = pooled(parts)
    before, after = (parts[0].equity[:-2], parts[1].equity[:-1]), (parts[0].equity[1:-1], parts[1].equity[1:])
    count = len(parts[1].net)
    paid = sum(part.costs["fee"][:count] * own for part, own in zip(parts, before, strict=True))
    np.testing.assert_allclose(whole.costs["fee"][:count], paid / sum(before), atol=1e-15)
    traded = sum(part.turnover[:count] * own for part, own in zip(parts, before, strict=True))
    np.testing.assert_allclose(whole.turnover[:count], traded / sum(before), atol=1e-15)
    held = np.hstack([part.weights[:count] * own[:, None] for part, own in zip(parts, after, strict=True)])
    np.testing.assert_allclose(whole.weights[:count], held / sum(after)[:, None], atol=1e-15)
    costs = sum(cost for cost in whole.costs.values())
    np.testing.assert_allclose(whole.pnl - costs, whole.net, atol=1e-12)
    assert not whole.liquidated


def test_one_account_is_itself(parts) -> None:
    assert pooled(parts[:1]) is parts[0]

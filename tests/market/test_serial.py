"""One account in plain numbers goes where the simulator's accounts go."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import tailguard as tg
from tailguard.errors import TailguardError
from tailguard.market import MarketConfig, MarketState, build_market, open_accounts, step
from tailguard.market.serial import SerialAccount, check_agreement


@pytest.mark.parametrize("assets", [1, 3])
@pytest.mark.parametrize("observed_funding", [False, True])
@pytest.mark.parametrize(
    "config",
    [
        MarketConfig(),
        MarketConfig(capital=1e9, borrow_rate=0.3, leverage=4.0),
        MarketConfig(participation=float("inf"), impact=0.0),
        MarketConfig(leverage=99.0, maintenance_margin=0.01),
    ],
    ids=["default", "large and borrowed", "no volume", "liquidated"],
)
def test_each_bar_is_the_simulators(assets: int, observed_funding: bool, config: MarketConfig) -> None:
    generator = np.random.default_rng(assets)
    panel = tg.make_market(400, assets=assets, seed=7).bars.panel("portfolio")
    if observed_funding:
        panel = replace(panel, funding=generator.normal(0, 1e-3, (panel.rows, assets)))
    market = build_market(panel, config, dtype=torch.float64)
    account = SerialAccount(market, 0)
    state = open_accounts(torch.tensor([0]), assets, torch.float64)
    liquidations = 0
    for _ in range(panel.rows - 1):
        target = generator.uniform(-1, 1, assets) * config.leverage / assets
        target[generator.random(assets) < 0.3] = np.nan
        wanted = torch.from_numpy(target)[None]
        state, transition = step(market, state, wanted.nan_to_num(), wanted.isnan())
        liquidated = account.step(target.tolist())
        assert liquidated == bool(transition.liquidated)
        assert account.row == int(state.row)
        assert account.equity == pytest.approx(float(state.equity), rel=1e-12)
        np.testing.assert_allclose(account.weights, state.weights[0], rtol=1e-9, atol=1e-12)
        liquidations += liquidated
        if liquidated:
            break
    assert liquidations == (config.leverage == 99.0)


def test_accounts_that_differ_are_named() -> None:
    rows = torch.tensor([4, 5])
    same = MarketState(rows, torch.tensor([1.0, 1.1]).double(), torch.tensor([[0.5], [0.4]]).double())
    check_agreement(same, same)
    for wrong in (replace(same, equity=same.equity * (1 + 1e-7)), replace(same, weights=same.weights + 1e-7)):
        with pytest.raises(TailguardError, match=r"bar 5: .*simulator 1\.0 and \[0\.5\]"):
            check_agreement(wrong, same)

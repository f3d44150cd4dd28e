"""The shares of a decision's inputs: they add up, and they are the integral of the real policy's slope."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import tailguard as tg
from tailguard.live.bar_history import BarHistory, LiveBar, ReplaySource, bars_of
from tailguard.live.decide import AccountAtClose, LiveDecider
from tailguard.live.journal import read_records
from tailguard.live.screen import moved_text
from tailguard.live.venue import SimulatedClock
from tailguard.live.view import session_view

from .conftest import ShadowMaker, open_time


def decided(agent, assets: int, steps: int, seed: int = 8) -> tuple[LiveDecider, list[float]]:
    """A decider after some decisions, and the last target."""
    bars = tg.make_market(260, assets=assets, seed=seed).bars
    decider = LiveDecider(agent, BarHistory(bars, open_time(bars, 200)))
    target: list[float] = []
    for bar in list(bars_of(bars, open_time(bars, 200)))[:steps]:
        decider.read(bar)
        account = AccountAtClose(decider.row, 1.0, [0.1] * assets, [0.0] * assets)
        decider.prepare(account)
        target = decider.decide(account).target
    return decider, target


@pytest.mark.parametrize("assets", [1, 2])
@pytest.mark.parametrize("steps", [1, 20, 32, 33, 50])  # windows of 32 bars: at their starts, within and at the end
def test_the_explained_weight_is_the_decided_one(request, assets: int, steps: int) -> None:
    """The explainer's own memory is that of the policy: its weight, throttled and limited, is the target in float32."""
    agent = request.getfixturevalue("agent" if assets == 1 else "two_assets")
    decider, target = decided(agent, assets, steps)
    explainer = decider._explainer
    with torch.no_grad():
        weights = explainer.weights(explainer._observation, decider.task, decider.row)[0].double().numpy()
    assert np.abs(weights).max() > 0.01
    shield = decider.task.shield
    equity = torch.ones(1, dtype=torch.float64)
    throttled = (weights * decider.memory.throttle.factor).tolist()
    limited = decider.task.limit_one(throttled, [0.1] * assets, decider.row)
    expected, _ = shield.apply(torch.tensor(limited, dtype=torch.float64)[None], equity, equity)
    np.testing.assert_allclose(expected[0].numpy(), target, atol=2e-6)


@pytest.mark.parametrize("assets", [3, 5])
def test_a_network_for_any_universe_is_explained_in_each(assets: int) -> None:
    """Trained on three symbols, it trades three and five: the batch of the explanation is as one row of the policy."""
    bars = tg.make_market(600, assets=3, seed=5).bars
    env = tg.TradingEnv(
        bars, num_envs=4, episode_length=32, accounts="portfolio", shared_scaling=True, features=("return_24", "rsi_14")
    )
    agent = tg.DistributionalPPO(env, n_steps=16, hidden=(16,), lstm_size=16, encoder="shared", seed=1).learn(128)
    with torch.no_grad():
        agent.policy.action_head.linear.weight.mul_(30)
    decider, target = decided(agent, assets, 20)
    explainer = decider._explainer
    with torch.no_grad():
        weights = explainer.weights(explainer._observation.repeat(7, 1), decider.task, decider.row).numpy()
    assert np.abs(target).max() > 0.01
    np.testing.assert_allclose(weights, [target] * 7, atol=2e-6)
    for each in decider.explain(AccountAtClose(decider.row, 1.0, [0.1] * assets, [0.0] * assets)).values():
        total = each["typical"] + sum(share for _, share, _ in each["moved"]) + each["others"]
        assert total == pytest.approx(each["weight"], abs=1e-6)


@pytest.mark.parametrize("assets", [1, 2])
def test_the_shares_add_up_to_the_change_of_the_weight(request, assets: int) -> None:
    agent = request.getfixturevalue("agent" if assets == 1 else "two_assets")
    for steps in (5, 20, 40):
        decider, _ = decided(agent, assets, steps)
        explainer = decider._explainer
        found = decider.explain(AccountAtClose(decider.row, 1.0, [0.1] * assets, [0.0] * assets))
        with torch.no_grad():
            typical = explainer.weights(explainer.typical, decider.task, decider.row)[0]
            asked = explainer.weights(explainer._observation, decider.task, decider.row)[0]
        assert set(found) == set(decider.panel.symbols)
        for asset, symbol in enumerate(decider.panel.symbols):
            each = found[symbol]
            total = sum(share for _, share, _ in each["moved"]) + each["others"]
            assert total == pytest.approx(float(asked[asset] - typical[asset]), abs=1e-6)
            assert each["typical"] + total == pytest.approx(float(asked[asset]), abs=1e-6)


def test_the_quadrature_itself_adds_up_where_nothing_is_clipped(agent, monkeypatch) -> None:
    """Without the division of what is missing: the slopes alone give the change to a part in a thousand."""
    monkeypatch.setattr("tailguard.live.explain.complete", lambda shares, _: shares)
    for steps in (5, 20, 40):
        decider, _ = decided(agent, 1, steps)
        each = decider.explain(AccountAtClose(decider.row, 1.0, [0.1], [0.0]))["SYN01"]
        total = sum(share for _, share, _ in each["moved"]) + each["others"]
        assert abs(total) > 0.005
        assert total == pytest.approx(each["weight"] - each["typical"], abs=2e-5, rel=1e-3)


def test_a_linear_weight_is_shared_exactly_and_a_clipped_one_adds_up() -> None:
    """w = min(3 a − b, 1), in closed form along a line: 3 a stops to count where the weight meets its bound."""
    from tailguard.live.explain import complete

    shares = torch.tensor([[0.3, -0.1], [0.3, -0.1]], dtype=torch.float64)
    assert torch.equal(complete(shares, shares.sum(-1)), shares)
    clipped = complete(shares, torch.tensor([0.2, 0.1], dtype=torch.float64))
    torch.testing.assert_close(clipped[1], torch.tensor([0.225, -0.125], dtype=torch.float64))
    assert complete(torch.zeros(1, 2), torch.zeros(1)).tolist() == [[0.0, 0.0]]


def test_the_shares_are_the_path_integral_of_finite_differences(agent) -> None:
    """Brute force: each input alone, by central differences of the policy in double, at 400 points of the way."""
    decider, _ = decided(agent, 1, 20)
    explainer = decider._explainer
    found = decider.explain(AccountAtClose(decider.row, 1.0, [0.1], [0.0]))["SYN01"]
    start, end = explainer.typical[0], explainer._observation[0]
    names = decider.task.observation_names
    along = torch.tensor((np.arange(400) + 0.5) / 400, dtype=torch.float32).unsqueeze(1)
    path = start + along * (end - start)
    units = torch.stack([each.units for each in explainer.networks]).mean(0)
    with torch.no_grad():
        for name, share, _ in found["moved"][:4]:
            place = names.index(name)
            step = torch.zeros(len(names))
            step[place] = 0.02 * units[place]
            ahead, behind = (explainer.weights(path + sign * step, decider.task, decider.row)[:, 0] for sign in (1, -1))
            slope = ((ahead - behind).double() / (2 * step[place].double())).mean()
            assert share == pytest.approx(float(slope * (end - start)[place].double()), rel=0.01, abs=1e-4)


def test_an_input_that_the_policy_does_not_read_has_no_share(agent) -> None:
    """The first layer's weights of one feature are 0 in all members: its share is 0, and others keep theirs."""
    import copy

    blind = copy.deepcopy(agent)
    decider, _ = decided(agent, 1, 20)
    names = decider.task.observation_names
    place = names.index("trend_24")
    for member in blind.members:
        layer = next(module for module in member.policy.each_trunk()[0].encoder.layers if hasattr(module, "weight"))
        with torch.no_grad():
            layer.weight[:, place] = 0
    other, _ = decided(blind, 1, 20)
    found = other.explain(AccountAtClose(other.row, 1.0, [0.1], [0.0]))["SYN01"]
    assert all(share == 0 for name, share, _ in found["moved"] if name == "trend_24")
    assert found["moved"][0][1] != 0


def test_the_journal_and_the_view_hold_the_explanation_of_the_last_decision(agent, shadow_session: ShadowMaker) -> None:
    bars = tg.make_market(330, seed=8).bars
    first = open_time(bars, 200)
    clock = SimulatedClock(first)
    session = shadow_session(agent, bars, first, clock)
    session.start()
    source = ReplaySource(bars, first - 1, clock)
    for _ in range(40):
        session.on_bar(source.next_bar())
    records = list(read_records(session.ledger.journal.path))
    decisions = [record for record in records if record["kind"] == "decision"]
    explained = [record for record in records if record["kind"] == "explanation"]
    assert [each["bar"] for each in explained] == [each["bar"] for each in decisions]
    for decision, explanation in zip(decisions, explained, strict=True):
        if not decision["shielded"]:
            weight = explanation["moved"]["SYN01"]["weight"] * decision["throttle"]
            assert weight == pytest.approx(decision["target"][0], abs=2e-6)
    view = session_view(session, "")
    assert view["moved"] == explained[-1]["moved"]
    text = moved_text("SYN01", view["moved"]["SYN01"])
    name, share, size = view["moved"]["SYN01"]["moved"][0]
    assert f"{name} {share:+.3f} (at {size:+.1f} sd)" in text
    # After a restart the memory is replayed, and the explanations go on as those of a session that never ended.
    session.ledger.journal.close()
    again = shadow_session(agent, bars, first, clock)
    again.start()
    bar: LiveBar = source.next_bar()
    again.on_bar(bar)
    alone = shadow_session(agent, bars, first, SimulatedClock(first), "alone")
    alone.start()
    replayed = ReplaySource(bars, first - 1, alone.clock)
    for _ in range(41):
        alone.on_bar(replayed.next_bar())
    assert again.ledger.state.explanation["moved"] == alone.ledger.state.explanation["moved"]

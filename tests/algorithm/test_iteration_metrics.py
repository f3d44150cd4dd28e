"""Figures of an iteration, against numbers worked out from the rollout by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import tailguard as tg
from tailguard.algorithm.iteration_metrics import ITERATION, GradientNorms, Snapshot, gradient_groups, metric


@pytest.fixture(scope="module")
def trading_env() -> tg.TradingEnv:
    return tg.TradingEnv(tg.make_market(1_500, seed=0).bars, num_envs=8, episode_length=32, stagger=8)


@pytest.fixture(scope="module")
def trained(trading_env: tg.TradingEnv) -> tg.DistributionalPPO:
    """Two iterations, so that the network is no longer symmetric; `metrics` and `snapshot` are those of the second."""
    agent = tg.DistributionalPPO(
        trading_env,
        n_steps=16,
        minibatch_size=64,
        hidden=(8,),
        lstm_size=8,
        quantiles=8,
        twin_critics=True,
        value_clip="mean_only",
        value_clip_limit=1e-3,
        learning_rate=3e-3,
    )
    agent.iterate()
    agent.metrics = agent.iterate()
    return agent


def test_advantages_are_described_as_they_are_before_normalisation(trained: tg.DistributionalPPO) -> None:
    assert trained.snapshot is not None
    advantages = trained.snapshot.estimates.advantages.double().numpy()
    for name, value in {
        "mean": advantages.mean(),
        "std": advantages.std(),
        "min": advantages.min(),
        "max": advantages.max(),
    }.items():
        assert trained.metrics[f"train/advantage_{name}"] == pytest.approx(value, rel=1e-4, abs=1e-8)


def test_rows_that_do_not_count_are_left_out(trained: tg.DistributionalPPO) -> None:
    """Half of the rows marked as dead, and what stands in them poisoned."""
    assert trained.snapshot is not None
    rollout = trained.snapshot.rollout
    valid = torch.rand(rollout.valid.shape, generator=torch.Generator().manual_seed(0)) < 0.5
    found = replace(trained.snapshot, rollout=replace(rollout, valid=valid))
    values = trained.snapshot.estimates.advantages.masked_fill(~valid, torch.nan)
    kept = values[valid].double().numpy()
    assert float(found.mean(values)) == pytest.approx(kept.mean(), rel=1e-4)
    assert float(found.std(values)) == pytest.approx(kept.std(), rel=1e-4)
    assert (float(found.lowest(values)), float(found.highest(values))) == (kept.min(), kept.max())


def test_explained_variance_is_one_minus_the_share_of_the_residual(trained: tg.DistributionalPPO) -> None:
    assert trained.snapshot is not None
    estimates = trained.snapshot.estimates
    targets, values = estimates.value_targets.double().numpy(), estimates.values.double().numpy()
    expected = 1 - np.var(targets - values) / np.var(targets)
    assert trained.metrics["train/explained_variance"] == pytest.approx(expected, rel=1e-3)


def test_spread_and_crossing_of_quantiles(trained: tg.DistributionalPPO) -> None:
    assert trained.snapshot is not None
    views = trained.snapshot.estimates.views
    raw = np.stack([view.output.distribution.numpy() for view in views])  # type: ignore[union-attr]
    assert trained.metrics["critic/quantile_crossing"] == pytest.approx((np.diff(raw, axis=-1) < 0).mean(), abs=1e-6)
    assert 0 < trained.metrics["critic/quantile_crossing"] < 0.7
    depth = np.maximum(-np.diff(raw, axis=-1), 0).sum(-1).mean()
    assert trained.metrics["critic/quantile_crossing_depth"] == pytest.approx(depth, rel=1e-4)
    mean = np.sort(np.stack([view.quantiles.double().numpy() for view in views]).mean(0), -1)  # type: ignore[union-attr]
    assert trained.metrics["critic/quantile_spread"] == pytest.approx(mean.std(-1).mean(), rel=1e-4)
    assert trained.metrics["critic/return_p05"] == pytest.approx(mean[..., 0].mean(), rel=1e-3, abs=1e-7)
    assert trained.metrics["critic/return_p50"] == pytest.approx(mean[..., 4].mean(), rel=1e-3, abs=1e-7)


def test_memories_are_described_after_the_rollout(trained: tg.DistributionalPPO) -> None:
    assert trained.state.rollout_state is not None
    for trunk, name in enumerate(("actor", "critic")):
        hidden = trained.state.rollout_state.state[trunk][0][0].double().numpy()
        assert trained.metrics[f"lstm/{name}_0_hidden_mean"] == pytest.approx(hidden.mean(), rel=1e-4, abs=1e-7)
        assert trained.metrics[f"lstm/{name}_0_hidden_std"] == pytest.approx(hidden.std(), rel=1e-4)
        norms = np.linalg.norm(hidden, axis=-1)
        assert trained.metrics[f"lstm/{name}_0_hidden_norm"] == pytest.approx(norms.mean(), rel=1e-4)
        assert trained.metrics[f"lstm/{name}_0_saturated"] == (np.abs(hidden) > 0.95).mean()


def test_trading_is_described_by_means_over_bars(trained: tg.DistributionalPPO) -> None:
    assert trained.snapshot is not None
    outcome, start = trained.snapshot.rollout.outcome, trained.snapshot.rollout.episode_start
    for kind in ("turnover", "fee", "impact", "funding"):
        assert trained.metrics[f"data/{kind}"] == pytest.approx(float(outcome[kind].double().mean()), rel=1e-4)
    assert trained.metrics["data/nonfinite_costs"] == 0
    weights = outcome["weights"].numpy()
    flips = sum(
        bool((weights[t, n] * weights[t - 1, n] < 0).any()) and not bool(start[t, n])
        for t in range(1, len(weights))
        for n in range(weights.shape[1])
    )
    assert flips > 0
    assert trained.metrics["data/flips"] == pytest.approx(flips / weights[1:, :, 0].size)


def test_value_clipping_is_seen(trained: tg.DistributionalPPO) -> None:
    """With so narrow a limit it acts on most samples, and the larger of both losses is never the smaller one."""
    for head in ("value", "distribution"):
        assert trained.metrics[f"critic/{head}_clip_share"] > 0.5
        clipped, plain = (trained.metrics[f"critic/{head}_loss_{kind}"] for kind in ("clipped", "unclipped"))
        assert clipped != plain
        assert trained.metrics[f"train/{head}_loss"] >= 0.5 * max(clipped, plain) * (1 - 1e-5)


def test_the_gradient_before_and_after_its_clip(trading_env: tg.TradingEnv) -> None:
    agent = tg.DistributionalPPO(trading_env, n_steps=16, minibatch_size=1_000, epochs=1, max_grad_norm=1e-3)
    metrics = agent.iterate()
    assert metrics["train/grad_norm"] > 1e-2
    assert metrics["train/grad_norm_clipped"] == pytest.approx(1e-3)


@pytest.mark.parametrize(
    "options",
    [
        {"twin_critics": True},
        {"twin_critics": True, "twin_trunk": "own"},
        {"memory": "shared", "lstm_layers": 2},
        {"memory": "none", "hidden": ()},
    ],
    ids=["twin", "own trunks", "shared", "no memory"],
)
def test_gradient_norms_count_each_parameter_once(trading_env: tg.TradingEnv, options: dict[str, Any]) -> None:
    """Against plain sums over the parameters of the modules; the whole is that of torch."""
    settings: dict[str, Any] = {"n_steps": 16, "hidden": (8,), "lstm_size": 8} | options
    agent = tg.DistributionalPPO(trading_env, **settings).policy
    draw = torch.Generator().manual_seed(0)
    for parameter in agent.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=draw)
    norms = GradientNorms(agent)
    total, groups = norms()
    expected = torch.nn.utils.get_total_norm([one.grad for one in agent.parameters() if one.grad is not None])
    assert float(total) == pytest.approx(float(expected), rel=1e-6)
    found = norms.named(groups)
    for name, modules in gradient_groups(agent).items():
        squares = {
            id(one): float(one.grad.double().square().sum())
            for module in modules
            for one in module.parameters()
            if one.grad is not None
        }
        assert float(found[name]) == pytest.approx(math.sqrt(sum(squares.values())), rel=1e-5)
    if settings.get("twin_critics"):
        one, two = (float(found[f"critic/grad_norm_{number}"]) for number in (1, 2))
        assert float(found["critic/grad_ratio"]) == pytest.approx(max(one, two) / min(one, two), rel=1e-5)


def test_a_parameter_without_a_gradient_counts_as_nothing(trading_env: tg.TradingEnv) -> None:
    agent = tg.DistributionalPPO(trading_env, n_steps=16, hidden=(8,), lstm_size=8).policy
    for parameter in agent.action_head.parameters():
        parameter.grad = torch.ones_like(parameter)
    norms = GradientNorms(agent)
    total, groups = norms()
    count = sum(parameter.numel() for parameter in agent.action_head.parameters())
    assert float(total) == pytest.approx(math.sqrt(count))
    assert float(norms.named(groups)["train/grad_norm_action_head"]) == pytest.approx(math.sqrt(count))
    assert float(norms.named(groups)["critic/grad_norm_1"]) == 0


def test_without_monitoring_the_details_are_not_there_and_nothing_else_changes(trading_env: tg.TradingEnv) -> None:
    weights, metrics = [], []
    for monitor in (True, False):
        agent = tg.DistributionalPPO(trading_env, n_steps=16, minibatch_size=64, lstm_size=8, monitor=monitor)
        agent.learn(256)
        metrics.append(agent.metrics)
        weights.append(torch.cat([parameter.detach().flatten() for parameter in agent.policy.parameters()]))
    assert torch.equal(*weights)
    details = metrics[0].keys() - metrics[1].keys()
    assert {"lstm/actor_0_grad_norm", "critic/quantile_spread", "data/flips", "warn/lstm_dead"} <= details
    same = [name for name in metrics[1] if not name.startswith("time/")]
    assert all(metrics[0][name] == pytest.approx(metrics[1][name], nan_ok=True) for name in same)


def test_a_metric_of_ones_own_is_computed_each_iteration(trading_env: Any) -> None:
    name = "my/largest_position"

    @metric(name)
    def largest_position(snapshot: Snapshot) -> torch.Tensor:
        return snapshot.rollout.outcome["weights"].abs().max()

    try:
        with pytest.raises(tg.ConfigError, match="exists already"):
            metric(name)
        learner = tg.PathwiseLearner(trading_env, n_steps=16, hidden=(8,), lstm_size=8)
        learner.learn(16 * trading_env.num_envs)
        assert learner.snapshot is not None
        expected = float(learner.snapshot.rollout.outcome["weights"].abs().max())
        assert learner.metrics[name] == pytest.approx(expected, rel=1e-6)
        assert expected > 0
    finally:
        del ITERATION[name]
    with pytest.raises(tg.ConfigError, match="a group and a name"):
        metric("exposure")

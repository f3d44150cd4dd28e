"""The return's scale moves and no raw prediction does, on the real learner."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tailguard.algorithm.estimate import look
from tailguard.algorithm.scale import SUPPORT_DRIFT_LIMIT, lay_supports, move_return_scale, support_drift
from tailguard.models.critics import CategoricalCritic


def raw_predictions(learner: Any, witness: Any) -> list[Tensor]:
    views, _ = look(learner.agent, witness.rollout, learner.return_moments, learner.config.estimates)
    found = []
    for view in views:
        found += [view.value, view.next_baseline]
        if view.quantiles is not None:
            found += [view.quantiles, view.next_quantiles]
    return [rows.double() for rows in found]


@pytest.mark.parametrize("twin_critics", [False, True])
@pytest.mark.parametrize("critic", ["scalar", "quantile", "categorical"])
def test_raw_predictions_survive_a_move_of_the_scale(
    make_learner: Any, make_witness: Any, critic: str, twin_critics: bool
) -> None:
    witness = make_witness()
    learner = make_learner(critic=critic, twin_critics=twin_critics, learning_rate=0.02, extensions=(witness,))
    for _ in range(3):
        learner.iterate()
    before = raw_predictions(learner, witness)
    change = learner.return_moments.update(torch.tensor([4.0, 2.5, -1.0]).repeat(100))
    assert abs(float(change.std_ratio) - 1) > 0.2
    assert float(change.mean_shift) > 0.5
    wrong = raw_predictions(learner, witness)
    move_return_scale(learner.agent, learner.optimizer, change)
    drift = support_drift(learner.agent)
    assert (drift is not None) == (critic == "categorical")
    assert drift is None or float(drift) < SUPPORT_DRIFT_LIMIT
    assert lay_supports(learner.agent, learner.optimizer) == 0
    after = raw_predictions(learner, witness)
    for old, new, without in zip(before, after, wrong, strict=True):
        assert old.std() > 0.01
        torch.testing.assert_close(new, old, atol=1e-6 * float(change.new_std), rtol=1e-6)
        assert (without - old).abs().mean() > 0.1  # what a change of scale alone would have done


def test_a_support_far_off_its_returns_is_laid_anew(make_learner: Any, make_witness: Any) -> None:
    """Returns a hundred times as wide: the atoms stay in raw units until the support is moved over the new range."""
    witness = make_witness()
    learner = make_learner(critic="categorical", twin_critics=True, atoms=101, extensions=(witness,))
    for _ in range(3):
        learner.iterate()
    heads = [critic.distribution for critic in learner.agent.each_critic()]
    before = raw_predictions(learner, witness)
    change = learner.return_moments.update(torch.tensor([-5.0, 5.0]).repeat(1000))
    move_return_scale(learner.agent, learner.optimizer, change)
    moved = raw_predictions(learner, witness)
    for old, new in zip(before, moved, strict=True):
        torch.testing.assert_close(new, old, atol=1e-6 * float(change.new_std), rtol=1e-6)
    drift = support_drift(learner.agent)
    assert drift is not None
    assert float(drift) > SUPPORT_DRIFT_LIMIT
    assert lay_supports(learner.agent, learner.optimizer) == 2
    for head in heads:
        assert isinstance(head, CategoricalCritic)
        assert float(head.support_drift()) == 0.0
        assert head.support.tolist() == [-10.0, 10.0]
        for parameter in (head.layer.weight, head.layer.bias):
            assert learner.optimizer.state[parameter]
            assert not any(value.any() for value in learner.optimizer.state[parameter].values())
    after = raw_predictions(learner, witness)
    for old, new in zip(before[:2], after[:2], strict=True):  # the scalar head is not concerned
        torch.testing.assert_close(new, old, atol=1e-5, rtol=1e-5)
    # Resampling on atoms that are wider apart blurs a little; the middle of the distribution stays where it was.
    spacing = 20 / 100 * float(change.new_std)
    assert (before[2].mean(-1) - after[2].mean(-1)).abs().max() < 0.25 * spacing
    assert SUPPORT_DRIFT_LIMIT == 1.0


def test_the_first_rollouts_set_the_scale_before_any_critic_speaks(
    make_learner: Any, make_witness: Any, scripted_env: Any
) -> None:
    """Returns of 1e4: untrained critics start at their mean, not at 0, and the first targets are not thousands off."""
    witness = make_witness()
    env = scripted_env()
    env.reward = 1e4 + 10 * env.reward
    learner = make_learner(env, extensions=(witness,))
    learner.iterate()
    values = witness.estimates.values
    targets = witness.estimates.value_targets
    assert float(values.mean()) == pytest.approx(float(targets.mean()), rel=0.4)
    assert float(values.mean()) > 1e4


def test_the_scale_follows_the_targets_of_valid_rows(make_learner: Any, make_witness: Any, scripted_env: Any) -> None:
    witness = make_witness()
    learner = make_learner(scripted_env(dead_rows=True), return_decay=0.5, extensions=(witness,))
    weight = mean = square = 0.0
    for iteration in range(4):
        old = learner.return_moments.state_dict()
        learner.iterate()
        if iteration == 0:  # the first rollout sets a scale of its own before its targets are known
            weight, mean, square = (float(value) for value in self_scale(witness))
            old = None
        rows = witness.estimates.value_targets[witness.rollout.valid].double()
        # Weighted sums, each rollout half of the one after it.
        weight, mean, square = (
            0.5 * weight + rows.numel(),
            0.5 * mean + float(rows.sum()),
            0.5 * square + float(rows.square().sum()),
        )
        expected = mean / weight, (square / weight - (mean / weight) ** 2) ** 0.5
        found = float(learner.return_moments.mean), float(learner.return_moments.std)
        assert found == pytest.approx(expected, rel=1e-6)
        assert old is None or not torch.equal(old["mean"], learner.return_moments.mean)


def self_scale(witness: Any) -> tuple[float, float, float]:
    """Count, sum and sum of squares of the discounted rewards to the end of episode or rollout."""
    rollout = witness.rollout
    returns = torch.zeros_like(rollout.rewards, dtype=torch.float64)
    for t in reversed(range(len(returns))):
        returns[t] = rollout.rewards[t]
        if t + 1 < len(returns):
            returns[t] += 0.99 * torch.where(rollout.ended[t], 0.0, returns[t + 1])
    rows = returns[rollout.valid]
    return rows.numel(), float(rows.sum()), float(rows.square().sum())

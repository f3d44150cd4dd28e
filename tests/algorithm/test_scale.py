"""The return's scale moves and no raw prediction does, on the real learner."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tailguard.algorithm.estimate import evaluate_critics
from tailguard.algorithm.scale import SUPPORT_DRIFT_LIMIT, move_return_scale, reset_support, support_drift
from tailguard.envs.protocol import Box, Step
from tailguard.models.critics import CategoricalCritic


def raw_predictions(learner: Any, witness: Any) -> list[Tensor]:
    views, _ = evaluate_critics(learner.policy, witness.rollout, learner.return_moments, learner.config.estimates)
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
    for head in (found.distribution for found in learner.policy.each_critic()):
        if isinstance(head, CategoricalCritic):
            head.set_support(-10.0, 10.0)
    before = raw_predictions(learner, witness)
    change = learner.return_moments.update(torch.tensor([4.0, 2.5, -1.0]).repeat(100))
    assert abs(float(change.std_ratio) - 1) > 0.2
    assert float(change.mean_shift) > 0.5
    wrong = raw_predictions(learner, witness)
    move_return_scale(learner.policy, learner.optimizer, change)
    drift = support_drift(learner.policy)
    assert (drift is not None) == (critic == "categorical")
    assert drift is None or float(drift) < SUPPORT_DRIFT_LIMIT
    assert reset_support(learner.policy, learner.optimizer) == 0
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
        spread = learner.iterate()["critic/return_spread"]
    heads = [critic.distribution for critic in learner.policy.each_critic()]
    before = raw_predictions(learner, witness)
    change = learner.return_moments.update(torch.tensor([-5.0, 5.0]).repeat(1000))
    move_return_scale(learner.policy, learner.optimizer, change)
    moved = raw_predictions(learner, witness)
    for old, new in zip(before, moved, strict=True):
        torch.testing.assert_close(new, old, atol=1e-6 * float(change.new_std), rtol=1e-6)
    drift = support_drift(learner.policy, spread)
    assert drift is not None
    assert float(drift) > SUPPORT_DRIFT_LIMIT
    assert reset_support(learner.policy, learner.optimizer, spread=spread) == 2
    for head in heads:
        assert isinstance(head, CategoricalCritic)
        assert float(head.support_drift(spread)) == pytest.approx(0.0, abs=1e-9)
        assert head.support.tolist() == pytest.approx([-10.0 * spread, 10.0 * spread])
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


# --- the unit of the scale -------------------------------------------------------------------------------------------


class WhiteNoise:
    """Rewards from N(0, 3²) for `steps` steps; all episodes run side by side, so that a rollout is whole episodes."""

    observation_size, device = 1, torch.device("cpu")
    action_space = Box(torch.tensor([-1.0]), torch.tensor([1.0]))

    def __init__(self, num_envs: int, steps: int) -> None:
        self.num_envs, self.steps, self.time = num_envs, steps, 0
        self.draw = torch.Generator().manual_seed(0)

    def reset(self, seed: int | None = None) -> Tensor:  # noqa: ARG002
        self.time = 0
        return torch.zeros(self.num_envs, 1)

    def step(self, action: Tensor) -> Step:  # noqa: ARG002
        self.time = (self.time + 1) % self.steps
        ended = torch.full((self.num_envs,), self.time == 0)
        reward, obs = 3.0 * torch.randn(self.num_envs, generator=self.draw), torch.zeros(self.num_envs, 1)
        return Step(obs, reward, ended, torch.zeros_like(ended), obs, torch.ones_like(ended))

    def state_dict(self) -> dict[str, Tensor]:
        return {}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        pass

    def close(self) -> None:
        pass


def spreads(steps: int, lam: float) -> tuple[float, float]:
    """Standard deviations of return and λ-return over all rows of an episode, for rewards that nothing predicts."""
    left = np.arange(1, steps + 1)
    return 3 * float(np.sqrt(left.mean())), 3 * float(np.sqrt(((1 - lam ** (2 * left)) / (1 - lam**2)).mean()))


@pytest.mark.parametrize("critic", ["quantile", "categorical"])
def test_the_scale_is_that_of_lambda_returns_and_the_spread_tells_the_returns(make_learner: Any, critic: str) -> None:
    """What value_clip_limit and huber_kappa are measured in, and how much larger the return's standard deviation is.

    With γ = 1 and 32 steps: 12.2 and 7.9, a factor of 1.5.
    """
    learner = make_learner(
        WhiteNoise(1024, 32), n_steps=32, minibatch_size=16_384, epochs=1, gamma=1.0, learning_rate=0.0,
        return_decay=1e-6, critic=critic, memory="none", quantiles=32, atoms=51,
    )  # fmt: skip
    learner.iterate()
    metrics = learner.iterate()
    returns, scale = spreads(32, learner.config.gae_lambda)
    assert metrics["critic/return_std"] == pytest.approx(scale, rel=0.03)
    assert metrics["critic/return_std"] * metrics["critic/return_spread"] == pytest.approx(returns, rel=0.03)


def test_a_support_is_in_standard_deviations_of_the_return(make_learner: Any) -> None:
    """With 128 steps they are 2.6 of λ-returns: the atoms must reach as much further, to the factor 2 of the drift."""
    learner = make_learner(
        WhiteNoise(256, 128), n_steps=128, minibatch_size=16_384, epochs=1, gamma=1.0, learning_rate=0.0,
        critic="categorical", memory="none", atoms=51, quantiles=32, return_decay=1e-6,
    )  # fmt: skip
    for _ in range(3):
        learner.iterate()
    head = learner.policy.each_critic()[0].distribution
    low, high = (head.support * learner.return_moments.std + learner.return_moments.mean).tolist()
    returns, scale = spreads(128, learner.config.gae_lambda)
    assert returns / scale == pytest.approx(2.6, abs=0.1)
    assert high == pytest.approx(10 * returns, rel=0.3)
    assert low == pytest.approx(-10 * returns, rel=0.3)


# --- rewards that come late ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("critic", ["quantile", "categorical", "scalar"])
@pytest.mark.parametrize("silent", [1, 5])
def test_the_first_returns_that_vary_set_the_scale(
    make_learner: Any, scripted_env: Any, critic: str, silent: int
) -> None:
    """Sparse rewards of 1e-4 after rollouts of nothing: from then on the scale is right to a factor of 2.

    What is right is worked out from the rewards alone: Σ (γλ)^k r_{t+k} to the end of the rollout or of the episode.
    """
    env = scripted_env(num_envs=32, rows=400, end_probability=0.02)
    draw = torch.Generator().manual_seed(1)
    env.reward[:] = 1e-4 * (torch.rand(env.reward.shape, generator=draw) < 0.05)
    env.reward[: 12 * silent] = 0.0
    learner = make_learner(env, critic=critic, memory="none")
    decay = learner.config.gamma * learner.config.gae_lambda
    traces = []
    for iteration in range(silent + 12):
        found = learner.iterate()["critic/return_std"]
        if iteration < silent:
            continue
        trace = torch.zeros(32)
        for row in reversed(range(12 * iteration, 12 * iteration + 12)):
            trace = env.reward[row] + decay * trace.masked_fill(env.ended[row], 0.0)
            traces.append(trace)
        assert 1 / 2 < found / float(torch.stack(traces).std()) < 2, iteration

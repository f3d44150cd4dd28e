"""Noise on observations and dropout: on the real learners, while they learn, and nowhere else."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

import tailguard as tg
from tailguard.algorithm.config import PPOConfig
from tailguard.algorithm.saving import capture, restore
from tailguard.config import load_config
from tailguard.envs.randomisation import Randomisation
from tailguard.errors import ConfigError

SMALL: dict[str, Any] = {"n_steps": 8, "hidden": (6,), "lstm_size": 5, "quantiles": 8}
VARIED = Randomisation(costs=0.5, delay=0.2, block=6)


def make(bars: Any, kind: Any = tg.PathwiseLearner, num_envs: int = 64, seed: int = 0, **options: Any) -> Any:
    env = tg.TradingEnv(
        bars, num_envs=num_envs, episode_length=16, stagger=8, seed=seed, randomisation=options.pop("vary", None)
    )
    return kind(env, seed=seed, **(SMALL | options))


def collected(learner: Any, **options: Any) -> Any:
    learner.state.rollout_state = learner._begin()
    with torch.no_grad():
        return learner._collect(**options)


@pytest.mark.parametrize("kind", [tg.PathwiseLearner, tg.DistributionalPPO])
def test_the_policy_sees_observations_with_noise_of_the_asked_size(bars, kind: Any) -> None:
    rollout = collected(make(bars, kind, observation_noise=0.4, observation_clip=1e6))
    noise = rollout.scaled_obs - rollout.scale(rollout.obs)
    count = noise.numel()
    assert float(noise.mean()) == pytest.approx(0, abs=4 * 0.4 / math.sqrt(count))
    assert float(noise.std()) == pytest.approx(0.4, abs=4 * 0.4 / math.sqrt(2 * count))
    # Independent from bar to bar and from input to input.
    assert abs(float((noise[1:] * noise[:-1]).mean())) < 4 * 0.16 / math.sqrt(count)
    # What the environment said and what comes after are as they were.
    env = rollout.obs
    plain = collected(make(bars, kind))
    assert torch.equal(env[0], plain.obs[0])
    assert torch.equal(plain.scaled_obs, plain.scale(plain.obs))


def test_ppo_compares_the_policy_with_itself_on_what_it_saw(bars) -> None:
    """Before the first update the ratio of new and old probability is 1, with noise as well as without."""
    learner = make(bars, tg.DistributionalPPO, observation_noise=0.5, epochs=1, minibatch_size=512, learning_rate=1e-12)
    metrics = learner.iterate()
    assert metrics["train/approx_kl"] == pytest.approx(0, abs=1e-7)
    assert metrics["train/clip_fraction"] == 0


def test_dropout_leaves_the_expected_share_and_keeps_the_mean(bars) -> None:
    learner = make(bars, num_envs=4_000, dropout=0.3)
    mask = learner._dropout_mask()
    assert mask.shape == (4_000, 6)
    assert set(np.unique(mask.numpy()).tolist()) == {0.0, float(np.float32(1 / 0.7))}
    error = math.sqrt(0.3 * 0.7 / mask.numel())
    assert float((mask == 0).float().mean()) == pytest.approx(0.3, abs=4 * error)
    assert make(bars)._dropout_mask() is None


def test_a_dropped_unit_has_no_gradient_and_the_mask_stays_for_the_window(bars) -> None:
    learner = make(bars, num_envs=4)
    mask = torch.ones(4, 6)
    mask[:, 2] = 0
    learner.state.rollout_state = learner._begin()
    rollout = learner._collect(mask=mask)
    rollout.rewards.sum().backward()
    encoder = learner.policy.each_trunk()[0].encoder.layers[0]
    assert (encoder.weight.grad[2] == 0).all()
    assert encoder.bias.grad[2] == 0
    others = [row for row in range(6) if row != 2]
    assert (encoder.weight.grad[others].abs().sum(1) > 0).all()


def test_the_mask_multiplies_what_the_memory_reads(bars) -> None:
    learner = make(bars, num_envs=4)
    trunk = learner.policy.each_trunk()[0]
    obs, state, start = torch.randn(4, learner.env.observation_size), trunk.memory.initial_state(4), torch.zeros(4)
    mask = torch.rand(4, 6)
    found, _ = trunk.step(obs, state, start.bool(), mask)
    expected, _ = trunk.memory.step(trunk.encoder(obs) * mask, state, start.bool())
    assert torch.equal(found, expected)


def test_predictions_are_without_noise_and_dropout(bars) -> None:
    learner = make(bars, observation_noise=0.5, dropout=0.5)
    learner.iterate()
    obs = learner.env.task.observe(learner.env.state).numpy()
    first, _ = learner.predict(obs, deterministic=True)
    second, _ = learner.predict(obs, deterministic=True)
    assert np.array_equal(first, second)
    step = learner.inference_policy()
    one = step(torch.as_tensor(obs[:1]), True)
    np.testing.assert_allclose(one.detach().numpy().ravel(), first[0], atol=1e-6)


@pytest.mark.parametrize(
    "options", [{"observation_noise": 0.3}, {"dropout": 0.3}, {"vary": VARIED}, {"weight_decay": 0.5}], ids=str
)
def test_a_restored_learner_goes_on_to_the_last_bit(bars, options: dict[str, Any]) -> None:
    if "weight_decay" in options:
        options = options | {"optimizer": "adamw"}
    learner = make(bars, **options)
    learner.iterate()
    saved = {name: dict(part) for name, part in capture(learner).items()}
    other = make(bars, seed=0, **options)
    restore(other, saved, "memory", episodes=True)
    for _ in range(2):
        learner.iterate()
        other.iterate()
    for mine, theirs in zip(learner.policy.parameters(), other.policy.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_each_option_changes_what_is_learned_and_its_default_does_not(bars) -> None:
    def weights(**options: Any) -> torch.Tensor:
        learner = make(bars, **options)
        learner.iterate()
        return torch.cat([part.detach().flatten() for part in learner.policy.each_trunk()[0].parameters()])

    plain = weights()
    assert torch.equal(weights(observation_noise=0.0, dropout=0.0, vary=Randomisation()), plain)
    for options in ({"observation_noise": 0.1}, {"dropout": 0.1}, {"vary": VARIED}):
        assert not torch.equal(weights(**options), plain)


def test_weight_decay_shrinks_the_weights_by_rate_times_decay(bars) -> None:
    """AdamW multiplies by 1 − rate · decay and then steps as Adam does: 0.98 at a rate of 0.02 and a decay of 1."""
    before = make(bars).policy.each_trunk()[0].encoder.layers[0].weight.detach().clone()
    moved = []
    for decay in (0.0, 1.0):
        learner = make(bars, optimizer="adamw", weight_decay=decay, learning_rate=0.02)
        learner.iterate()
        moved.append(learner.policy.each_trunk()[0].encoder.layers[0].weight.detach())
    torch.testing.assert_close(moved[0] - moved[1], 0.02 * before, atol=1e-6, rtol=1e-5)


def test_ppo_has_no_dropout() -> None:
    """Its ratio compares two passes through one network, which two masks would make two networks."""
    with pytest.raises(ConfigError, match="dropout"):
        load_config(overrides=["ppo.dropout=0.1"])
    assert not hasattr(PPOConfig(), "dropout")


@pytest.mark.parametrize("override", ["pathwise.dropout=1", "pathwise.observation_noise=-1"])
def test_values_out_of_range_are_refused_by_name(override: str) -> None:
    with pytest.raises(ConfigError, match=override.partition("=")[0]):
        load_config(overrides=[override])

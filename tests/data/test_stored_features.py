"""Features in bfloat16: rounded as stated, and nothing else changes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import tailguard as tg
from tailguard.data.prepare import in_precision, prepare
from tailguard.data.stored_features import stored
from tailguard.envs.episodes import feature_tensor
from tailguard.errors import ConfigError


def test_bits_are_those_of_torch_and_the_error_is_at_most_a_256th() -> None:
    draw = np.random.default_rng(0)
    values = np.concatenate([draw.normal(size=20_000), 10 ** draw.uniform(-30, 30, 2_000)]).astype(np.float32)
    # Halfway between two bfloat16, where the even one is nearest, and numbers that carry into the exponent.
    ties = (np.arange(2**8, dtype=np.uint32) << 16 | np.uint32(0x3F808000)).view(np.float32)
    values = np.concatenate([values, -values, ties, np.float32([0.0, -0.0, np.inf, -np.inf, 10, 255.5])])
    mine = feature_tensor(stored(values, "bfloat16"))
    theirs = torch.from_numpy(values).to(torch.bfloat16)
    assert torch.equal(mine.view(torch.int16), theirs.view(torch.int16))
    finite = np.isfinite(values) & (values != 0)
    error = np.abs(mine.float().numpy()[finite] / values[finite] - 1)
    assert 0.9 * 2**-8 < error.max() <= 2**-8


def test_a_missing_value_stays_missing() -> None:
    bits = np.array([0x7FC00000, 0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001], np.uint32)
    assert feature_tensor(stored(bits.view(np.float32), "bfloat16")).isnan().all()


def test_an_environment_shows_the_rounded_features_in_half_the_memory(bars) -> None:
    options = {"num_envs": 8, "episode_length": 20, "seed": 3}
    full = tg.TradingEnv(bars, **options)
    half = tg.TradingEnv(bars, **options, feature_precision="bfloat16")
    assert half.task.features.nbytes * 2 == full.task.features.nbytes
    seen, rounded = full.reset(0), half.reset(0)
    count = full.task.features.shape[1]
    assert rounded.dtype == torch.float32
    assert torch.equal(rounded[:, :count], seen[:, :count].bfloat16().float())
    assert not torch.equal(rounded[:, :count], seen[:, :count])
    for _ in range(30):
        action = torch.full((8, 1), 0.5)
        mine, theirs = half.step(action), full.step(action)
        assert torch.equal(mine.reward, theirs.reward)  # prices are not rounded
        assert torch.equal(mine.obs[:, count:], theirs.obs[:, count:])


def test_float32_is_the_default_and_the_very_same_array(bars) -> None:
    prepared = prepare(bars)
    assert in_precision(prepared, "float32").features is prepared.features
    with pytest.raises(ConfigError, match="'bfloat16' is requested; these bars were prepared in 'float32'"):
        tg.TradingEnv(prepared, feature_precision="bfloat16")

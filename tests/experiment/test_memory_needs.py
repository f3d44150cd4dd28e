"""Settings that cannot fit are refused before anything is allocated; those that fit are not."""

from __future__ import annotations

import subprocess
import sys

import pytest

import tailguard as tg
from tailguard.config import load_config
from tailguard.errors import ConfigError
from tailguard.experiment.build import build_learner
from tailguard.experiment.memory_needs import check_synthetic


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("env.num_envs=1000000000", r"env\.num_envs=1000000000, ppo\.n_steps=64: .* at least .* TB .* env\.num_envs="),
        ("env.num_envs=1000000000000000000000000", r"env\.num_envs=10+, .* at least [\d,]+ EB"),
        ("ppo.n_steps=1000000000", r"ppo\.n_steps=1000000000: .* Make ppo\.n_steps smaller"),
        ("ppo.network.hidden=[10000000, 10000000]", r"hidden=\[10000000, 10000000\].* Make the network smaller"),
        ("ppo.network.lstm_size=1000000000", r"lstm_size=1000000000.*such a network cannot be built"),
        ("ppo.network.quantiles=10000000000", r"quantiles=10000000000: a network of .* parameters"),
    ],
)
def test_absurd_settings_are_refused_by_name(bars, change: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_learner(load_config(overrides=["learner=ppo", change]), bars, seed=0)


def test_an_absurd_synthetic_market_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"data\.synthetic_bars=1000000000000: .* takes at least 200 TB"):
        check_synthetic(load_config(overrides=["data.synthetic_bars=1000000000000"]))
    with pytest.raises(ConfigError, match="year 9999"):
        tg.make_market(10**12)


TAKEN = """
import torch
from pathlib import Path
import tailguard as tg
from tailguard.config import load_config
from tailguard.experiment.memory_needs import network_need, rollout_need
from tailguard.experiment.build import build_learner
from tailguard.memory_limits import _kilobytes

status = Path("/proc/self/status")
torch.set_num_threads(1)
changes = ["learner=ppo", "env.num_envs=2048", "ppo.n_steps=32", "ppo.epochs=1", "ppo.minibatch_size=4096"]
config = load_config(overrides=changes)
agent = build_learner(config, tg.make_market(1_200, seed=11).bars, 0)
assert network_need(config, agent.env).size == 4 * sum(weights.nbytes for weights in agent.policy.parameters())
before = _kilobytes(status, "VmRSS")
agent.iterate()
print(rollout_need(config, agent.env, 1e9).size, _kilobytes(status, "VmHWM") - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="counters of Linux")
def test_the_estimate_is_below_what_is_really_taken() -> None:
    """So that no run that would fit is refused; and not so far below that it means nothing."""
    run = subprocess.run([sys.executable, "-c", TAKEN], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    estimate, taken = map(float, run.stdout.split())
    assert taken / 20 < estimate < taken

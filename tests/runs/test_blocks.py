"""Training from blocks: the weights of training in memory where all fit, and an exact resume where they do not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import tailguard as tg
from tailguard.experiment.build import build
from tailguard.runs.checkpoint import CheckpointStore
from tailguard.runs.prepare_market import prepare_market
from tailguard.runs.runner import resume_run, train

PATHWISE = (
    "learner=pathwise",
    "pathwise.n_steps=16",
    "pathwise.minibatch_size=64",
    "pathwise.network.hidden=[8]",
    "pathwise.network.lstm_size=8",
)
FEW = ("data.resident_bars=800", "data.resident_blocks=4")
"""Four blocks of 168 starts, where the training part has about ten."""


@pytest.mark.parametrize("learner", [(), PATHWISE], ids=["ppo", "pathwise"])
def test_weights_are_bit_identical_where_every_block_is_resident(small_config, learner: tuple[str, ...]) -> None:
    weights, metrics = [], []
    for resident in ((), ("data.resident_bars=6000", "data.resident_blocks=6")):
        agent = build(small_config(*learner, *resident)).learner
        agent.learn(6 * 128)
        weights.append(torch.cat([weight.flatten() for weight in agent.policy.parameters()]))
        metrics.append({name: value for name, value in agent.metrics.items() if not name.startswith("time/")})
    assert torch.equal(*weights)
    assert metrics[0] == metrics[1]
    assert "rollout/ep_rew_mean" in metrics[0]  # episodes of 32 bars ended in 96 steps


@pytest.mark.parametrize("learner", [(), PATHWISE], ids=["ppo", "pathwise"])
def test_a_run_from_blocks_on_disk_goes_on_exactly(small_config, quiet, tmp_path: Path, learner) -> None:
    tg.make_market(2_500, seed=3).save(tmp_path / "bars.parquet")
    settings = (*learner, *FEW, "data.feature_precision=bfloat16")
    prepare_market(small_config(*settings, f"data.path={tmp_path / 'bars.parquet'}"), tmp_path / "market")
    config = small_config(*settings, f"data.path={tmp_path / 'market'}")
    run, again = tmp_path / "run", tmp_path / "again"
    train(config, run, quiet)
    shutil.copytree(run, again)
    CheckpointStore(again, {}).forget_after(512)
    resume_run(again, quiet)
    last = Path("checkpoints") / "step_768"
    state = load_file(run / last / "state.safetensors")
    turn, retired, _ = next(value for name, value in state.items() if name.endswith("blocks")).tolist()
    assert turn >= 1
    assert retired >= turn
    for name in ("weights", "state"):
        assert (again / last / f"{name}.safetensors").read_bytes() == (run / last / f"{name}.safetensors").read_bytes()
    names = {name for line in (run / "metrics.jsonl").read_text().splitlines() for name in json.loads(line)}
    assert "rollout/ep_rew_mean" in names

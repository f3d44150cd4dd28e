"""One agent trained by several processes: what one computes, and exactly the same after one of them is killed."""

from __future__ import annotations

import json
import os
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import tailguard as tg
from tailguard.algorithm.data_parallel import Ranks, check_divided, distribute
from tailguard.algorithm.loss_terms import register_loss_term
from tailguard.errors import ConfigError
from tailguard.robust import RobustConfig

RUN = """
import atexit
import json
import os
import signal
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

import tailguard as tg
from tailguard.algorithm.data_parallel import distribute
from tailguard.algorithm.config import VGSConfig
from tailguard.algorithm.saving import capture
from tailguard.runs.checkpoint import CheckpointStore
from tailguard.sealed import flat_tensors

folder = Path(sys.argv[1])
SHAPE = dict(hidden=(8,), lstm_size=6, quantiles=6, n_steps=16, minibatch_size=64)
BUDGET = tg.RiskConfig(limit=-0.001, alpha=0.5, window=40)


def make(name):
    market = tg.make_market(1200, seed=3, signal=20.0)
    features = ["return_1", "taker_imbalance_6"]
    env = tg.TradingEnv(market.bars, num_envs=16, episode_length=12, stagger=1, features=features, seed=1)
    if name == "ppo":
        more = dict(epochs=2, target_kl=0.02, twin_critics=True, vgs=VGSConfig(enabled=True), optimizer="upgdw")
        return tg.DistributionalPPO(env, seed=5, risk=BUDGET, **SHAPE, **more)
    # A rate with which five steps of Adam do not turn the last bit of a sum into more than 1e-6.
    noisy = name == "pathwise-stochastic"
    more = dict(learning_rate=1e-3, stochastic=noisy, entropy_coef=0.01 if noisy else 0.0, dropout=0.1)
    return tg.PathwiseLearner(env, seed=5, risk=BUDGET, **SHAPE, **more)


def main(names, iterations, alone=False):
    for name in names:
        agent = make(name)
        store = CheckpointStore(folder / name, {})
        if store.newest():
            store.restore(agent, store.newest())
        rank = 0 if alone else distribute(agent).rank
        while agent.state.iteration < iterations:
            metrics = agent.iterate()
            if agent.state.iteration == 3 and rank == 0 and "--save" in sys.argv:
                store.save(agent)
            if agent.state.iteration == 4 and rank == 1 and (folder / "kill").exists():
                (folder / "kill").unlink()
                os.kill(os.getpid(), signal.SIGKILL)
        if rank == 0:
            save_file({k: v.clone() for k, v in flat_tensors(capture(agent))}, folder / f"{name}.safetensors")
            (folder / f"{name}.json").write_text(json.dumps(metrics))


def say_if_in_group():
    if torch.distributed.is_initialized():
        print("still in the group", file=sys.stderr)


if __name__ == "__main__":
    atexit.register(say_if_in_group)  # before what `distribute` registers: it runs after it
    torch.set_num_threads(1)
    main(sys.argv[2].split(","), int(sys.argv[3]))
"""

LEARNERS = ("ppo", "pathwise", "pathwise-stochastic")
ITERATIONS = 5


def launch(folder: Path, processes: int, *arguments: str, restarts: int = 0) -> None:
    """Run the script in several processes, as a user would."""
    script = folder / "train.py"
    script.write_text(RUN)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--max-restarts={restarts}"]
    run = subprocess.run(
        [*torchrun, f"--nproc-per-node={processes}", str(script), str(folder), *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    # Threads of a group that nobody left abort the process at its end, now and then.
    assert "still in the group" not in run.stderr


def train_alone(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same in this process, by an ordinary learner; from the checkpoint in the folder, if there is one."""
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(RUN)
    monkeypatch.setattr(sys, "argv", ["train.py", str(folder)])
    runpy.run_path(str(folder / "train.py"))["main"]([name], ITERATIONS, alone=True)


def assert_same(ours: Path, theirs: Path, name: str, tolerance: float) -> None:
    """Weights, statistics, multiplier, random streams and metrics agree."""
    states = [load_file(folder / f"{name}.safetensors") for folder in (ours, theirs)]
    assert states[0].keys() == states[1].keys()
    for key, value in states[0].items():
        scale = max(1.0, float(value.double().nan_to_num().abs().max())) if value.numel() else 1.0
        torch.testing.assert_close(
            states[1][key].double() / scale, value.double() / scale, rtol=0, atol=tolerance, equal_nan=True, msg=key
        )
    metrics = [json.loads((folder / f"{name}.json").read_text()) for folder in (ours, theirs)]
    for key, number in metrics[0].items():
        if not key.startswith("time/"):
            assert metrics[1][key] == pytest.approx(number, rel=1e3 * tolerance, abs=10 * tolerance, nan_ok=True), key
    assert metrics[0]["risk/lambda"] > 0 or name == "pathwise"  # which has hardly traded yet


@pytest.mark.parametrize(
    "processes", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(4, marks=pytest.mark.slow)]
)
def test_processes_compute_what_an_ordinary_learner_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: int
) -> None:
    """Episodes end at different rows in each process, and the budget acts."""
    launch(tmp_path, processes, ",".join(LEARNERS), str(ITERATIONS))
    for name in LEARNERS:
        train_alone(tmp_path / "alone", name, monkeypatch)
        assert_same(tmp_path, tmp_path / "alone", name, 1e-6)


@pytest.mark.slow
def test_after_a_killed_process_training_goes_on_exactly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun starts all processes again, and they go on from the checkpoint; so does a single one."""
    whole, killed, fewer = (tmp_path / name for name in ("whole", "killed", "fewer"))
    for folder in (whole, killed):
        folder.mkdir()
    launch(whole, 2, "ppo", str(ITERATIONS), "--save")
    (killed / "kill").touch()
    launch(killed, 2, "ppo", str(ITERATIONS), "--save", restarts=1)
    assert not (killed / "kill").exists()
    assert_same(killed, whole, "ppo", 0.0)
    shutil.copytree(killed, fewer)
    train_alone(fewer, "ppo", monkeypatch)
    assert_same(fewer, whole, "ppo", 1e-6)


@pytest.mark.slow
def test_processes_with_different_weights_are_refused(tmp_path: Path) -> None:
    script = RUN.replace("seed=5, risk", "seed=int(os.environ['RANK']), risk")
    (tmp_path / "train.py").write_text(script)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    run = subprocess.run(
        [*torchrun, str(tmp_path / "train.py"), str(tmp_path), "ppo", "1"], capture_output=True, text=True, check=False
    )
    assert run.returncode != 0
    assert "data parallel: the weights of the processes differ" in run.stderr


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """This process as the only one of its group."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def env(**options: Any) -> tg.TradingEnv:
    settings: dict[str, Any] = {"num_envs": 6, "episode_length": 20, "features": ["return_1"], **options}
    return tg.TradingEnv(tg.make_market(600, seed=0).bars, **settings)


def test_a_process_that_torchrun_did_not_start_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ConfigError, match="was not started by torchrun"):
        distribute(tg.DistributionalPPO(env(), n_steps=8))


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (tg.DistributionalPPO, {"on_nonfinite": "skip"}, "on_nonfinite: skip"),
        (tg.DistributionalPPO, {"observation_noise": 0.1}, "observation_noise"),
        (tg.DistributionalPPO, {"runtime": "compile"}, "runtime: its mode is not eager"),
        (tg.DistributionalPPO, {"robust": RobustConfig(coef=0.1)}, "robust: attacks are not divided"),
        (tg.PathwiseLearner, {"robust": RobustConfig(adversary="alternate")}, "robust: attacks are not divided"),
    ],
)
def test_what_is_not_divided_is_refused(kind: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        distribute(kind(env(), n_steps=8, **options))


def no_term(_: Any, __: Any, batch: Any) -> torch.Tensor:
    return torch.zeros_like(batch.weights)


@pytest.mark.usefixtures("group", "own_parts")
def test_terms_of_the_pathwise_learner_are_refused() -> None:
    register_loss_term("nothing", learners=("ppo", "pathwise"))(no_term)
    with pytest.raises(ConfigError, match="loss_terms: those of the pathwise"):
        distribute(tg.PathwiseLearner(env(), n_steps=8, loss_terms={"nothing": 0.1}))
    distribute(tg.DistributionalPPO(env(), n_steps=8, loss_terms={"nothing": 0.1}))


def test_shares_that_do_not_come_out_even_are_refused() -> None:
    ranks = Ranks(1, 4)
    assert ranks.share(12) == slice(3, 6)
    assert ranks.portion(torch.arange(6)).tolist() == [2, 3]
    with pytest.raises(ConfigError, match="a minibatch of 3 sequences cannot be divided among 4"):
        ranks.portion(torch.arange(3))
    with pytest.raises(ConfigError, match="6 accounts cannot be divided among 4 processes"):
        check_divided(tg.DistributionalPPO(env(), n_steps=8), 4)

"""What the pages take for granted: a reader's folder with bars and finished runs, and names that a text introduces."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import polars as pl
import pytest
import torch
from backtesting.test import GOOG
from torch import nn

import tailguard as tg
from tailguard.cli import main
from tailguard.data.bars import Bars

QUICK = (
    "training.total_timesteps=256",
    "env.num_envs=8",
    "env.episode_length=32",
    "{learner}.n_steps=32",
    "ppo.minibatch_size=128",
    "{learner}.network.hidden=[8]",
    "{learner}.network.lstm_size=8",
)
"""Settings that make a training run take a second."""
FEATURES = ("return_1", "return_24")
FEW = f"data.features=[{','.join(FEATURES)}]"


def quick(learner: str = "pathwise", features: bool = True) -> list[str]:
    settings = [setting.format(learner=learner) for setting in QUICK] + [FEW] * features
    return [part for setting in settings for part in ("--set", setting)]


Command = Callable[..., None]


@pytest.fixture
def tailguard(monkeypatch: pytest.MonkeyPatch) -> Command:
    """The command, in this process: its arguments, and the exit status that is right."""

    def run(*arguments: str, status: int = 0) -> None:
        monkeypatch.setattr(sys, "argv", ["tailguard", *arguments])
        with pytest.raises(SystemExit) as end:
            main()
        assert end.value.code == status, " ".join(arguments)

    return run


@pytest.fixture(scope="session")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with bars and three finished runs, one of them with a limit, that no test changes."""
    folder = tmp_path_factory.mktemp("reader")
    market = tg.make_market(3_500, frequency="4h", seed=4).bars.frame  # 583 days: some pages name dates
    market.write_parquet(folder / "btc.parquet")
    market.write_parquet(folder / "bars.parquet")
    market.drop("symbol", "segment").write_csv(folder / "btc.csv")
    for name in ("btc_2024", "later"):
        later = market.with_columns(pl.col("time").dt.offset_by("1096d")).head(400)
        later.write_parquet(folder / f"{name}.parquet")
    market.select("time", "close").write_csv(folder / "spy.csv")
    freqtrade = folder / "user_data" / "data" / "binance"
    freqtrade.mkdir(parents=True)
    hourly = tg.make_market(3_000, seed=4).bars.frame.select("time", "open", "high", "low", "close", "volume")
    hourly.rename({"time": "date"}).write_ipc(freqtrade / "BTC_USDT-1h.feather")
    (folder / "folder_of_bars").mkdir()
    for symbol in ("ONE", "TWO"):
        market.with_columns(symbol=pl.lit(symbol)).write_parquet(folder / "folder_of_bars" / f"{symbol}.parquet")
    GOOG.to_csv(folder / "goog.csv")
    (folder / "run.yaml").write_text("data:\n  path: btc.parquet\n", encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name, *more in (["btc"], ["btc-small"], ["btc-safe", "--set", "risk.limit=-0.04"]):
            arguments = ["train", "--data", "btc.parquet", "--name", name, *quick(), *more]
            if name == "btc-small":
                arguments += ["--set", "pathwise.network.hidden=[4]"]
            patch.setattr(sys, "argv", ["tailguard", *arguments])
            with pytest.raises(SystemExit) as end:
                main()
            assert end.value.code == 0
    shutil.copytree(folder / "runs" / "btc-safe", folder / "runs" / "demo")
    return folder


@pytest.fixture
def folder(reader: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the reader's folder to work in."""
    shutil.copytree(reader, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


class Given:
    """Names that pages use without defining them, because the text says what they are; made when first used."""

    def __init__(self) -> None:
        self.made: dict[str, Any] = {}

    def names(self) -> set[str]:
        return {name for name in dir(type(self)) if not name.startswith("_")} - {"names", "get"}

    def get(self, name: str) -> Any:
        if name not in self.made:
            self.made[name] = getattr(self, name)()
        return self.made[name]

    def tg(self) -> Any:
        return tg

    def torch(self) -> Any:
        return torch

    def nn(self) -> Any:
        return nn

    def Path(self) -> type[Path]:
        return Path

    def bars(self) -> Bars:
        return tg.load_bars("btc.parquet")

    def frame(self) -> Any:
        return self.get("bars").frame.drop("symbol", "segment").to_pandas()

    def split(self) -> Any:
        return tg.split_bars(self.get("bars"), embargo="7d")

    def env(self) -> tg.TradingEnv:
        return tg.TradingEnv(self.get("split").train, num_envs=8, episode_length=32)

    def eval_env(self) -> Any:
        return gymnasium.make("tailguard/Trading-v0", bars=self.get("split").validation)

    def my_policy(self) -> Any:
        return lambda batch: torch.zeros(*batch.shape[:-1], 1)

    def agent(self) -> Any:
        sizes = {"hidden": (8,), "lstm_size": 8, "quantiles": 8}
        return tg.DistributionalPPO(self.get("env"), n_steps=32, minibatch_size=128, epochs=1, **sizes).learn(256)

    def first(self) -> Any:
        return self._member(1)

    def second(self) -> Any:
        return self._member(2)

    def third(self) -> Any:
        return self._member(3)

    def _member(self, seed: int) -> Any:
        return tg.PathwiseLearner(self.get("env"), n_steps=16, hidden=(4,), lstm_size=4, seed=seed)

    def observation(self) -> torch.Tensor:
        return self.get("env").reset()

    def state(self) -> None:
        return None

    def episode_start(self) -> torch.Tensor:
        return torch.ones(8, dtype=torch.bool)

    def quantiles(self) -> torch.Tensor:
        return torch.randn(5, 32).sort(-1).values

    def episode_returns(self) -> torch.Tensor:
        return torch.randn(400)

    def atoms(self) -> torch.Tensor:
        return torch.linspace(-5, 5, 51)

    def logits(self) -> torch.Tensor:
        return torch.randn(5, 51)

    def model(self) -> nn.Module:
        return nn.Linear(3, 1)

    def loss(self) -> torch.Tensor:
        return self.get("model")(torch.randn(8, 3)).square().mean()


@pytest.fixture
def given() -> Given:
    return Given()

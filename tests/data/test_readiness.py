"""What `data check` says about training is what training then finds."""

from __future__ import annotations

import sys
from pathlib import Path

import polars as pl
import pytest

from tailguard import cli
from tailguard.config import load_config
from tailguard.data.bars import Bars
from tailguard.data.prepare import prepare
from tailguard.data.readiness import TrainingNeeds, check_training, funding_note, usable_rows
from tailguard.data.sources import load_bars
from tailguard.data.splits import split_bars
from tailguard.data.synthetic import make_market
from tailguard.envs.trading import TradingEnv
from tailguard.errors import BarsError, ConfigError
from tailguard.experiment.build import build_learner, load_market, split_market


def with_gaps(bars: Bars, every: int) -> Bars:
    """One bar out of `every` is missing."""
    frame = bars.frame.drop("segment")
    return load_bars(frame.filter(pl.int_range(pl.len()).over("symbol") % every != every - 1), gaps="split")


@pytest.mark.parametrize("every", [1_000_000, 1_500, 1_001, 800])
@pytest.mark.parametrize("accounts", ["portfolio", "per_symbol"])
@pytest.mark.parametrize("assets", [1, 2])
def test_the_rows_that_are_counted_are_those_the_environment_finds(every: int, accounts: str, assets: int) -> None:
    bars = with_gaps(make_market(4_000, assets=assets, seed=1).bars, every)
    train = split_bars(bars, validation=0.1, test=0.1).train
    prepared = prepare(train, accounts=accounts)
    env = TradingEnv(train, num_envs=1, episode_length=32, accounts=accounts)

    found = usable_rows(train, 32, accounts=accounts)

    assert found.bars == int(prepared.panel.tradeable.sum())
    assert found.defined == int((prepared.usable & prepared.panel.tradeable).sum())
    assert found.starts == env.starts.numel()


def check(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["tailguard", "data", "check", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


@pytest.mark.parametrize(
    ("rows", "every", "says"),
    [
        (900, 10_000, "0 bars of 396 in the training part can be used, and no episode of 256 bars fits"),
        (1_400, 10_000, "4 bars of 746 in the training part can be used, and no episode of 256 bars fits"),
        (4_000, 700, "the longest of 699 bars"),
        (300, 10_000, "cannot be split"),
    ],
)
def test_bars_that_training_refuses_fail_the_check(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    rows: int,
    every: int,
    says: str,
) -> None:
    path = tmp_path / "bars.parquet"
    with_gaps(make_market(rows, seed=1).bars, every).frame.drop("segment").write_parquet(path)

    assert check(monkeypatch, str(path), "--gaps", "split") == 1
    output = capsys.readouterr().out
    assert "✗ training" in output
    assert says in output
    assert "The bars can be used" not in output

    config = load_config(overrides=[f"data.path={path}", "data.gaps=split"])
    with pytest.raises(ConfigError) as refused:
        build_learner(config, split_market(config, load_market(config).bars).train, 0)
    assert "0 of the 0" not in str(refused.value)


def test_bars_that_pass_the_check_can_be_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bars.parquet"
    make_market(3_000, seed=1).bars.frame.drop("segment").write_parquet(path)

    assert check(monkeypatch, str(path)) == 0
    # 3,000 less two embargoes of 168 are 2,664; 15 % of it, 399, twice leave 1,866 to training, and 742 warm up.
    assert "training     1,124 of 1,866 bars left after warm-up" in capsys.readouterr().out

    config = load_config(overrides=[f"data.path={path}", "env.num_envs=4"])
    build_learner(config, split_market(config, load_market(config).bars).train, 0)


def test_the_settings_of_the_run_are_those_of_the_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bars.parquet"
    make_market(900, assets=2, seed=1).bars.frame.drop("segment").write_parquet(path)
    few = ("--set", "data.features=[return_4]", "--set", "env.episode_length=16", "--set", "data.embargo=1d")

    assert check(monkeypatch, str(path)) == 1
    assert check(monkeypatch, str(path), *few) == 0
    # 900 less two days are 852; 127 twice leave 598, of which 168 warm up.
    assert "430 of 598 bars left after warm-up" in capsys.readouterr().out
    # A portfolio of one of them.
    check(monkeypatch, str(path), *few, "--set", "data.symbols=[SYN01]", "--set", "data.test=0.5")
    assert "131 bars of 299 in the training part" in capsys.readouterr().out


def test_few_bars_left_are_a_warning() -> None:
    bars = with_gaps(make_market(6_000, seed=1).bars, 1_100)

    found = check_training(bars, TrainingNeeds(0.15, 0.15, "7d", 256))

    assert found.level == "warning"
    assert "features need 742 bars of history after every gap" in found.fault


def test_volume_that_is_zero_throughout_fails_the_check_as_it_fails_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bars.parquet"
    frame = make_market(3_000, seed=1).bars.frame.select("symbol", "time", "open", "high", "low", "close")
    frame.with_columns(volume=pl.lit(0.0)).write_parquet(path)

    assert check(monkeypatch, str(path)) == 1
    output = capsys.readouterr().out
    assert "1 symbol without volume in any bar, so no order would ever fill: SYN01" in output
    assert "--set market.participation=inf --set market.impact=0" in output

    config = load_config(overrides=[f"data.path={path}", "env.num_envs=4"])
    train = split_market(config, load_market(config).bars).train
    with pytest.raises(BarsError, match="volume is 0 in every bar"):
        build_learner(config, train, 0)
    # The way out that is named leads out, of the check as of training.
    assert check(monkeypatch, str(path), "--set", "market.participation=inf", "--set", "market.impact=0") == 0
    assert "fills" not in capsys.readouterr().out
    free = load_config(overrides=[f"data.path={path}", "env.num_envs=4", "market.participation=inf", "market.impact=0"])
    build_learner(free, train, 0)


def test_the_check_says_which_funding_will_be_charged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bars.parquet"
    frame = make_market(3_000, seed=1).bars.frame.drop("segment", "funding_rate", strict=False)
    frame.write_parquet(path)

    assert check(monkeypatch, str(path)) == 0
    # Three times a day: 0.0001 · 3 · 365.25 = 10.96 % a year.
    assert "is charged 0.0001 of its value every 8 hours, 11.0 % a year" in capsys.readouterr().out
    assert "5.5 % a year" in funding_note(0.00005)

    check(monkeypatch, str(path), "--preset", "fx")
    assert "1.1 % a year (market.funding_rate)\n" in capsys.readouterr().out

    frame.with_columns(funding_rate=pl.lit(0.0)).write_parquet(path)
    check(monkeypatch, str(path))
    assert "funding" not in capsys.readouterr().out

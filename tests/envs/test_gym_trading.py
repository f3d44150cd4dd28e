"""`tailguard/Trading-v0` as users make it: from files, in processes of its own, rendered."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

import tailguard as tg
from tailguard.errors import ConfigError, TailguardError


def in_a_fresh_process(code: str, limit: float = 120.0) -> str:
    """What the program prints; a hang is a failure."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=limit, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_environments_in_processes_of_their_own_trade_like_those_in_one() -> None:
    """Polars and PyTorch have run before Gymnasium starts the processes, as whenever bars were loaded."""
    out = in_a_fresh_process(
        """
        import gymnasium, numpy as np, tailguard as tg, torch

        bars = tg.make_market(20_000, seed=0).bars
        torch.ones(2_000_000).exp().sum()
        found = []
        for mode in ("sync", "async"):
            envs = gymnasium.make_vec(
                "tailguard/Trading-v0", 2, vectorization_mode=mode, bars=bars, episode_length=50
            )
            rows = [envs.reset(seed=3)[0]]
            for action in np.linspace(-1, 1, 60, dtype=np.float32):
                rows.append(envs.step(np.full((2, 1), action))[0])
            envs.close()
            found.append(np.stack(rows))
        print(np.array_equal(*found), found[0].shape[:2], np.abs(found[0]).sum() > 0)
        """
    )
    assert out.split() == ["True", "(61,", "2)", "True"]


def test_a_forked_process_that_would_hang_says_so() -> None:
    out = in_a_fresh_process(
        """
        import os, sys, gymnasium, tailguard as tg
        from tailguard.errors import TailguardError
        import tailguard.envs.gym_trading

        bars = tg.make_market(800, seed=0).bars
        if os.fork() == 0:
            try:
                gymnasium.make("tailguard/Trading-v0", bars=bars)
            except TailguardError as error:
                print("context='spawn'" in str(error), flush=True)
            os._exit(0)
        os.wait()
        """
    )
    assert out.strip() == "True"


def test_bars_may_be_a_file(tmp_path: Path) -> None:
    """The same numbers as from the bars themselves; a file that has changed is read again."""
    path = tmp_path / "btc.parquet"
    shown = []
    for seed in (0, 1):
        bars = tg.make_market(1_200, seed=seed).bars
        bars.frame.drop("segment").write_parquet(path)
        of_bars, of_file, of_text, of_many = (
            gymnasium.make("tailguard/Trading-v0", bars=bars, episode_length=20),
            gymnasium.make("tailguard/Trading-v0", bars=path, episode_length=20),
            gymnasium.make("tailguard/Trading-v0", bars=str(path), episode_length=20),
            gymnasium.make_vec("tailguard/Trading-v0", bars=str(path), episode_length=20),
        )
        first = of_bars.reset(seed=5)[0]
        assert np.array_equal(of_file.reset(seed=5)[0], first)
        assert np.array_equal(of_text.reset(seed=5)[0], first)
        assert np.array_equal(of_many.reset(seed=5)[0][0], first)
        shown.append(first)
    assert not np.array_equal(*shown)


def test_a_file_that_is_not_there_is_named() -> None:
    with pytest.raises(TailguardError, match=r"nothing\.parquet"):
        gymnasium.make("tailguard/Trading-v0", bars="nothing.parquet")


@pytest.mark.parametrize("make", [gymnasium.make, gymnasium.make_vec])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"render_mode": "human"}, "render_mode: .*'human'"),
        ({"episode_lenght": 9}, "episode_lenght: .* episode_length"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*render_mode.*")
def test_what_cannot_be_is_named_without_the_bars(make: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        make("tailguard/Trading-v0", bars=tg.make_market(1_200, seed=0).bars, **options)
    assert len(str(caught.value)) < 400


def test_a_line_of_text_shows_the_account() -> None:
    """Time, bar, weight, P&L and drawdown of the step just taken, also of one that ended the episode."""
    market = tg.make_market(1_200, assets=2, seed=0)
    env = gymnasium.make("tailguard/Trading-v0", bars=market.bars, episode_length=3, render_mode="ansi")
    env.reset(seed=1)
    inner = env.unwrapped
    first = inner.env.prepared.panel.time[int(inner.env.state.market.row[0])]
    names = inner.env.prepared.panel.symbols
    for bar in range(4):
        info: dict[str, Any] = {"weights": (0.0, 0.0), "pnl": 0.0, "drawdown": 0.0}
        if bar:
            info = env.step(np.array([0.5, -0.25], np.float32))[4]
        time = np.datetime_as_string(np.datetime64(int(first) + bar * 3_600_000, "ms"), unit="m").replace("T", " ")
        assert env.render() == (
            f"{time}  bar {bar} of 3  {names[0]} {info['weights'][0]:+.3f} {names[1]} {info['weights'][1]:+.3f}  "
            f"P&L {100 * info['pnl']:+.2f} %  drawdown {100 * info['drawdown']:.2f} %"
        )
        assert bar == 0 or abs(info["weights"][0]) > 0.1
    assert gymnasium.make("tailguard/Trading-v0", bars=market.bars).unwrapped.render() is None

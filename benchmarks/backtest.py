"""Backtested bars per CPU-second: target weights, a rule and an LSTM-64 agent, beside what else could be done.

    python benchmarks/backtest.py             about half a minute

One thread and the CPU time of this process (`time.process_time`), so that other load on the machine costs little. Each
figure is the best of several repeats and covers the whole call, features and books included. `plain loop` asks the same
agent through `observe`, `predict` and `step`, a tensor at a time; `backtesting.py` trades a
moving-average cross whose averages it works out in advance; ours asks a function that averages anew at every bar.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from contextlib import redirect_stderr
from io import StringIO

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

import tailguard as tg
from tailguard.data.bars import Bars
from tailguard.envs.spec import task_for
from tailguard.evaluate.baselines import BuyAndHold, MovingAverageCross
from tailguard.market import open_accounts

REPEATS = 3


def rate(bars: int, run: Callable[[], object], repeats: int = REPEATS) -> float:
    """Bars per CPU-second, the best of the repeats."""
    best = float("inf")
    for _ in range(repeats):
        begun = time.process_time()
        run()
        best = min(best, time.process_time() - begun)
    return bars / best


def plain_loop(agent: tg.DistributionalPPO, bars: Bars) -> None:
    """The agent through the environment's own pieces, bar by bar."""
    assert agent.spec is not None
    task, usable, panel = task_for(agent.spec, bars, None, torch.float64)
    rows = np.flatnonzero(usable & panel.tradeable)
    state = task.begin(open_accounts(torch.tensor(rows[:1]), panel.assets, torch.float64))
    memory = None
    for number in range(len(rows) - 1):
        start = number % task.episode_length == 0
        if start:
            state = task.begin(state.market)
        action, memory = agent.predict(task.observe(state).numpy(), memory, np.array([start]), deterministic=True)
        target, _ = task.decide(torch.as_tensor(action, dtype=torch.float64), state)
        state, _ = task.advance(state, target)


def peer(bars: Bars) -> Callable[[], object]:
    """backtesting.py with the moving-average cross of the baselines."""
    import pandas as pd
    from backtesting import Backtest, Strategy

    panel = bars.panel()
    names = ("Open", "High", "Low", "Close", "Volume")
    columns = (panel.open, panel.high, panel.low, panel.close, panel.volume)
    frame = pd.DataFrame({name: column[:, 0] for name, column in zip(names, columns, strict=True)})
    frame.index = pd.to_datetime(panel.time, unit="ms")

    def average(values: np.ndarray, window: int) -> pd.Series:
        return pd.Series(values).rolling(window).mean()

    class Cross(Strategy):  # type: ignore[misc]  # the library has no types
        def init(self) -> None:
            self.fast = self.I(average, self.data.Close, 24)
            self.slow = self.I(average, self.data.Close, 168)

        def next(self) -> None:
            if self.fast[-1] > self.slow[-1] and not self.position.is_long:
                self.position.close()
                self.buy(size=0.99)
            elif self.fast[-1] < self.slow[-1] and not self.position.is_short:
                self.position.close()
                self.sell(size=0.99)

    test = Backtest(frame, Cross, cash=1e7, commission=0.0006)

    def run() -> object:
        with warnings.catch_warnings(), redirect_stderr(StringIO()):  # its own progress bar and advice
            warnings.simplefilter("ignore")
            return test.run()

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bars", type=int, default=11_257)
    parser.add_argument("--lstm", type=int, default=64, help="units of the agent's LSTM and of its encoder")
    options = parser.parse_args()
    torch.set_num_threads(1)
    bars = tg.make_market(options.bars, seed=1).bars
    env = tg.TradingEnv(bars, num_envs=4, episode_length=256)
    agent = tg.DistributionalPPO(env, hidden=(options.lstm,), lstm_size=options.lstm, seed=1)
    weights = np.random.default_rng(0).uniform(-1, 1, (len(bars), 1))
    traded = len(tg.backtest(agent, bars, progress_bar=False).net)
    console = Console()
    table = Table("policy", "bars/s", "ratio to the plain loop", title=f"{options.bars:,} hourly bars, one core")

    def backtest(policy: object) -> Callable[[], object]:
        return lambda: tg.backtest(policy, bars, progress_bar=False)  # type: ignore[arg-type]  # any kind of policy

    base = rate(traded, lambda: plain_loop(agent, bars), 1)
    found = {
        "array of target weights": rate(len(bars), backtest(weights)),
        "rule: buy & hold": rate(len(bars), backtest(BuyAndHold())),
        "rule: moving-average cross": rate(len(bars), backtest(MovingAverageCross())),
        f"agent, LSTM {options.lstm}": rate(traded, backtest(agent)),
        f"agent, LSTM {options.lstm}, plain loop": base,
    }
    try:
        found["rule: moving-average cross, backtesting.py"] = rate(len(bars), peer(bars))
    except ImportError:
        console.print("backtesting.py is not installed: left out")
    for name, value in found.items():
        table.add_row(name, f"{value:,.0f}", f"{value / base:.1f}")
    console.print(table)


if __name__ == "__main__":
    main()

"""What does safety cost? One agent for each risk budget, on a long synthetic market with a planted signal.

    python examples/frontier.py                                   limits 0.5, 1, 2 and 4 %, and none
    python examples/frontier.py --years 100 --limits -0.02 none   two of them on fewer years, minutes on 2 cores
    python examples/frontier.py --out runs/frontier --redraw      the table and the picture again, without training

Each agent learns by gradients through the market with a limit on the mean loss of the worst 5 % of its episodes (256
hourly bars), whole episodes at a time. All else is the same for all of them: rates, seeds, steps. So the agent without
a limit shows what the others would do without theirs. Shown is what the last episodes of training realised, and what
it does on years that no agent has seen: episodes of the same length, one after another, each from a flat account.
Neither exposure nor throttle is calibrated here: the limit is kept by what was learned alone.

The market has 1,200 years of hourly bars by default, 0.8 GB in the folder. Training needs torch and numpy only. Where
Polars is missing, make the market elsewhere and bring it along:

    python examples/frontier.py --market market.npz --prepare     writes the file and stops
"""

from __future__ import annotations

import argparse
import json
import math
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch

import tailguard as tg
from tailguard.data.panel import Panel
from tailguard.data.prepare import PreparedBars, prepare
from tailguard.data.scaling import Scaler
from tailguard.evaluate.bootstrap import cvar_statistic, interval
from tailguard.market import open_accounts
from tailguard.monitor.callbacks import EveryIteration

LIMITS = ("-0.005", "-0.01", "-0.02", "-0.04", "none")
EPISODE = 256
ALPHA = 0.05
TRAINING_YEARS = 1_000
UNSEEN_SHARE = 0.2
"""Unseen years for each year of training."""
HOURS_PER_YEAR = 8_766
SIGNAL = 8.0
"""Yearly Sharpe ratio, before costs, of a trader who sees the planted state."""
FEATURES = ("return_24", "range_volatility_24", "taker_imbalance_1", "taker_imbalance_6", "taker_imbalance_24")
COURSE = ("risk/cvar_realised", "risk/mean_realised", "risk/lambda", "data/exposure", "data/turnover")
"""Figures of every iteration that are kept."""
SHADES = ("#440154", "#31688e", "#35b779", "#b8860b", "#D55E00")
LINE_EVERY = 10
"""Iterations between two lines of progress."""


@dataclass(frozen=True)
class Plan:
    """How every agent is trained."""

    market: Path
    steps: int
    envs: int
    seed: int
    device: str
    threads: int
    minutes: float


# --- the market ------------------------------------------------------------------------------------------------------


def write_market(path: Path, years: int, seed: int) -> None:
    """Make the market, and write the arrays of its training and unseen years."""
    unseen = max(1, round(UNSEEN_SHARE * years))
    bars = tg.make_market((years + unseen) * HOURS_PER_YEAR, seed=seed, signal=SIGNAL).bars
    split = tg.split_bars(bars, validation="30d", test=unseen * HOURS_PER_YEAR, embargo="7d")
    seen = prepare(split.train, FEATURES)
    arrays: dict[str, Any] = {"scaler": np.array(json.dumps(seen.scaler.to_dict()))}
    for part, prepared in (("seen", seen), ("unseen", prepare(split.test, scaler=seen.scaler))):
        panel = prepared.panel
        for name in ("time", "open", "high", "low", "close", "volume", "segment", "tradeable"):
            arrays[f"{part}.{name}"] = getattr(panel, name)
        arrays |= {f"{part}.features": prepared.features, f"{part}.usable": prepared.usable}
        arrays |= {"symbols": np.array(panel.symbols), "frequency_ms": np.array(panel.frequency_ms)}
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, **arrays)


def read_market(path: Path, part: str) -> PreparedBars:
    """The `seen` or the `unseen` years, as an environment takes them."""
    with np.load(path) as arrays:
        scaler = Scaler.from_dict(json.loads(str(arrays["scaler"])))
        columns = {
            name: arrays[f"{part}.{name}"]
            for name in ("time", "open", "high", "low", "close", "volume", "segment", "tradeable")
        }
        symbols = tuple(str(symbol) for symbol in arrays["symbols"])
        panel = Panel(**columns, symbols=symbols, frequency_ms=int(arrays["frequency_ms"]))
        return PreparedBars(panel, arrays[f"{part}.features"], scaler.names, arrays[f"{part}.usable"], scaler)


# --- one agent -------------------------------------------------------------------------------------------------------


def run(limit: float | None, plan: Plan) -> dict[str, Any]:
    """Train one agent; returns its metrics in training and on the unseen years, as returns of an episode."""
    torch.set_num_threads(plan.threads)
    env = tg.TradingEnv(
        read_market(plan.market, "seen"), num_envs=plan.envs, device=plan.device, episode_length=EPISODE, seed=plan.seed
    )
    # Without a limit, a budget that nothing can break: λ stays 0, and the tail is measured anyway.
    risk = tg.RiskConfig(limit=-0.99 if limit is None else limit, alpha=ALPHA, lambda_max=20.0)
    agent = tg.PathwiseLearner(env, seed=plan.seed, risk=risk)
    course: list[list[float]] = []

    begun = time.monotonic()

    def note(*_: Any) -> bool:
        course.append([agent.metrics[name] for name in COURSE])
        if len(course) % LINE_EVERY == 0:
            tail, mean, price, exposure = course[-1][:4]
            print(
                f"limit {limit}: {agent.num_timesteps:,} steps ({agent.metrics['time/fps']:,.0f}/s), "
                f"CVaR {100 * tail:.2f} %, mean {100 * mean:+.2f} %, λ {price:.2f}, exposure {exposure:.3f}",
                flush=True,
            )
        return time.monotonic() - begun < 60 * plan.minutes

    agent.learn(plan.steps, callback=EveryIteration(note))
    unseen = read_market(plan.market, "unseen")
    found = whole_episodes(agent, unseen, plan.device)
    tail = interval(found, cvar_statistic(ALPHA), np.random.default_rng(0))
    return {
        "limit": limit,
        "price": agent.metrics["risk/lambda"],
        "cvar": agent.metrics["risk/cvar_realised"],
        "mean": agent.metrics["risk/mean_realised"],
        "unseen cvar": tail.estimate,
        "unseen cvar low": tail.low,
        "unseen cvar high": tail.high,
        "unseen mean": float(found.mean()),
        "unseen growth": float(np.log1p(found).mean() * HOURS_PER_YEAR / EPISODE),
        "exposure": agent.metrics["data/exposure"],
        "steps": agent.num_timesteps,
        "steps per second": agent.metrics["time/fps"],
        "course": course,
    }


def whole_episodes(agent: tg.PathwiseLearner, bars: PreparedBars, device: str) -> np.ndarray[Any, np.dtype[np.float64]]:
    """P&L of episodes side by side that together cover the bars once, as fractions of their starting equity."""
    env = tg.TradingEnv(bars, num_envs=1, device=device, episode_length=EPISODE)
    starts = torch.as_tensor(env.starts)  # bars in memory: every start by itself
    task, rows = env.task, torch.arange(int(starts[0]), int(starts[-1]) + 1, EPISODE, device=device)
    state, memory = task.begin(open_accounts(rows, task.market.assets, task.market.dtype)), None
    alive = torch.ones(len(rows), 1, dtype=torch.bool, device=device)
    for age in range(EPISODE):
        start = np.full(len(rows), age == 0)
        action, memory = agent.predict(task.observe(state).cpu().numpy(), memory, start, deterministic=True)
        target, _ = task.decide(torch.as_tensor(action, device=device), state)
        state, transition = task.advance(state, torch.where(alive, target, 0.0))
        alive = alive & ~transition.liquidated.unsqueeze(1)
    return (state.market.equity / state.start_equity - 1).double().cpu().numpy()


# --- what came of it -------------------------------------------------------------------------------------------------


def show(rows: list[dict[str, Any]]) -> None:
    print(f"\n{'limit':>7} {'λ':>6} {'CVaR 5 %':>9} {'mean':>8} │ {'unseen CVaR 5 %':>15} {'95 % interval':>18} "
          f"{'mean':>8} {'growth/year':>12}")  # fmt: skip
    for row in rows:
        limit = "none" if row["limit"] is None else f"{100 * row['limit']:.1f} %"
        between = f"{100 * row['unseen cvar low']:.2f} … {100 * row['unseen cvar high']:.2f} %"
        print(f"{limit:>7} {row['price']:6.2f} {100 * row['cvar']:7.2f} % {100 * row['mean']:+6.2f} % │ "
              f"{100 * row['unseen cvar']:13.2f} % {between:>18} {100 * row['unseen mean']:+6.2f} % "
              f"{row['unseen growth']:+12.2f}")  # fmt: skip


def draw(rows: list[dict[str, Any]], out: Path) -> None:
    """Mean against tail, in training and on the unseen years; and on the way there, the tail against the limit."""
    from plotly.subplots import make_subplots

    figure = make_subplots(cols=2, column_widths=[0.6, 0.4], horizontal_spacing=0.09)
    for prefix, name, colour in (("", "last episodes of training", "#0072B2"), ("unseen ", "unseen years", "#D55E00")):
        tails = [100 * row[f"{prefix}cvar"] for row in rows]
        figure.add_scatter(
            x=tails,
            y=[100 * row[f"{prefix}mean"] for row in rows],
            error_x=None if not prefix else {
                "array": [100 * row["unseen cvar high"] - tail for row, tail in zip(rows, tails, strict=True)],
                "arrayminus": [tail - 100 * row["unseen cvar low"] for row, tail in zip(rows, tails, strict=True)],
                "thickness": 1,
            },
            mode="lines+markers" if prefix else "lines+markers+text",
            text=[label(row) for row in rows],
            textposition="top right",
            marker={"size": 9},
            line={"color": colour},
            name=name,
            row=1, col=1,
        )  # fmt: skip
    for row, colour in zip(rows, SHADES, strict=False):
        tails = [100 * values[0] for values in row["course"]]
        steps = [row["steps"] * (index + 1) / len(tails) / 1e6 for index in range(len(tails))]
        figure.add_scatter(
            x=steps, y=tails, mode="lines", line={"color": colour, "width": 1.2}, name=label(row), showlegend=False,
            row=1, col=2,
        )  # fmt: skip
        figure.add_annotation(
            x=steps[-1], y=tails[-1] if row["limit"] is None else 100 * row["limit"], text=label(row),
            font={"color": colour}, showarrow=False, xanchor="left", row=1, col=2,
        )  # fmt: skip
        if row["limit"] is not None:
            for place in ({"x": 100 * row["limit"], "col": 1}, {"y": 100 * row["limit"], "col": 2}):
                add = figure.add_vline if "x" in place else figure.add_hline
                add(**place, row=1, line={"color": "#999999", "width": 1, "dash": "dot"})
    figure.update_layout(
        title=f"What safety costs: a budget on the worst {100 * ALPHA:g} % of {EPISODE}-hour episodes",
        template="plotly_white",
        height=560,
        margin={"t": 60, "r": 90},
        legend={"x": 0.02, "y": 0.02},
    )
    tail = f"mean of the worst {100 * ALPHA:g} %, % of equity"
    lowest = 100 * min(row["unseen cvar low"] for row in rows)
    figure.update_xaxes(title=f"{tail} (dotted: limits; bars: 95 %)", range=[1.05 * lowest, -0.12 * lowest], col=1)
    figure.update_yaxes(title="mean of all episodes, % of equity", col=1)
    figure.update_xaxes(title="steps of training, millions", col=2)
    figure.update_yaxes(title=tail, range=[1.15 * 100 * min(row["cvar"] for row in rows), 0], col=2)
    figure.write_html(out, config={"displayModeBar": False})


def label(row: dict[str, Any]) -> str:
    return "no limit" if row["limit"] is None else f"{100 * row['limit']:g} %".replace("-", "−")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limits", nargs="+", default=LIMITS, help="lowest CVaR of an episode, or none")
    parser.add_argument("--steps", type=int, default=30_000_000, help="environment steps for each agent")
    parser.add_argument("--envs", type=int, default=512, help="accounts that step together; each lives one episode")
    parser.add_argument(
        "--years", type=int, default=TRAINING_YEARS, help="of the market to train on; a fifth more unseen"
    )
    parser.add_argument("--jobs", type=int, default=1, help="agents trained at the same time")
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop an agent after this long, ready or not")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0, help="of the market and of the agents")
    parser.add_argument("--market", type=Path, help="arrays of the market, written where they are missing")
    parser.add_argument("--prepare", action="store_true", help="write the market and stop")
    parser.add_argument("--redraw", action="store_true", help="show what is in --out, without training")
    parser.add_argument("--out", type=Path, default=Path("runs/frontier"), help="folder for frontier.json and .html")
    return parser.parse_args()


def main() -> None:
    given = arguments()
    result = given.out / "frontier.json"
    if not given.redraw:
        market = given.market or given.out / "market.npz"
        if not market.exists():
            write_market(market, given.years, given.seed)
        if given.prepare:
            return
        threads = max(1, torch.get_num_threads() // given.jobs)
        plan = Plan(market, given.steps, given.envs, given.seed, given.device, threads, given.minutes)
        limits = [None if limit == "none" else float(limit) for limit in given.limits]
        given.out.mkdir(parents=True, exist_ok=True)
        with ProcessPoolExecutor(given.jobs, get_context("spawn")) as pool:
            rows = []
            for row in pool.map(partial(run, plan=plan), limits):
                rows.append(row)
                result.write_text(json.dumps({"course": COURSE, "rows": rows}))
    rows = json.loads(result.read_text())["rows"]
    show(rows)
    try:
        draw(rows, given.out / "frontier.html")
    except ImportError:
        print("no picture: Plotly is not installed here. Draw it elsewhere with --redraw")


if __name__ == "__main__":
    main()

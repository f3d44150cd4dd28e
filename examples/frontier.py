"""What does safety cost? One agent for each risk budget, on twelve years of a synthetic market with a planted signal.

    python examples/frontier.py                     limits 0.5, 1, 2 and 4 %, and none; about ten minutes on 2 cores
    python examples/frontier.py --out frontier.html the picture
    python examples/frontier.py --seeds 3           three agents for each

Each agent is trained with the limit on the mean loss of the worst 5 % of its episodes (256 hourly bars). Shown is what
the last episodes of training realised, and the same on a year that no agent has seen: episodes of the same length,
one after another, by the deterministic policy.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np

import tailguard as tg
from tailguard.evaluate.metrics import cvar, horizon_returns

LIMITS: tuple[float | None, ...] = (-0.005, -0.01, -0.02, -0.04, None)
EPISODE = 256
FEATURES = ("return_24", "range_volatility_24", "taker_imbalance_1", "taker_imbalance_6", "taker_imbalance_24")
SETTINGS: dict[str, Any] = {
    "n_steps": 64, "minibatch_size": 1024, "gamma": 0.95, "gae_lambda": 0.8, "learning_rate": "linear:1e-3:2e-4",
    "hidden": (32,), "lstm_size": 32, "log_std_init": -1.0,
}  # fmt: skip
"""Small minibatches and a small first standard deviation: the noise of exploration has a tail, too, and pays costs."""


def run(limit: float | None, seed: int, steps: int) -> dict[str, float]:
    """Train one agent; returns its figures in sample and out of it, as returns of an episode."""
    made = tg.make_market(105_192, seed=seed, signal=8.0)
    split = tg.split_bars(made.bars, validation="30d", test="365d", embargo="7d")
    env = tg.TradingEnv(split.train, num_envs=256, episode_length=EPISODE, features=FEATURES, stagger=64, seed=seed)
    # Without a limit, a budget that nothing can break: the price of risk stays 0, and the tail is measured anyway.
    risk = tg.RiskConfig(limit=-0.99 if limit is None else limit, kp=2.0, ki=0.1)
    agent = tg.DistributionalPPO(env, seed=seed, risk=risk, **SETTINGS)
    agent.learn(steps, progress_bar=True)
    test = tg.backtest(agent, split.test)
    episodes = horizon_returns(test.equity, EPISODE)
    return {
        "growth": agent.metrics["risk/mean_realised"],
        "cvar": agent.metrics["risk/cvar_realised"],
        "price": agent.metrics["risk/lambda"],
        "test growth": float(episodes.mean()),
        "test cvar": cvar(episodes, 0.05),
        "exposure": test.metrics["exposure"],
    }


def show(rows: list[tuple[float | None, dict[str, float]]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("limit", "CVaR 5 %", "mean", "λ", "CVaR 5 %, unseen year", "mean, unseen year", "exposure", box=None)
    for limit, found in rows:
        table.add_row(
            "none" if limit is None else f"{100 * limit:.1f} %",
            f"{100 * found['cvar']:.2f} %",
            f"{100 * found['growth']:+.2f} %",
            f"{found['price']:.2f}",
            f"{100 * found['test cvar']:.2f} %",
            f"{100 * found['test growth']:+.2f} %",
            f"{found['exposure']:.2f}",
        )
    Console().print(table)


def picture(rows: list[tuple[float | None, dict[str, float]]], out: Path) -> None:
    """Mean against tail, in sample and on the unseen year, with the limits as lines."""
    import plotly.graph_objects as go

    figure = go.Figure()
    for prefix, name, colour in (("", "last episodes of training", "#0072B2"), ("test ", "unseen year", "#D55E00")):
        figure.add_scatter(
            x=[100 * found[f"{prefix}cvar"] for _, found in rows],
            y=[100 * found[f"{prefix}growth"] for _, found in rows],
            mode="lines+markers+text",
            text=["no limit" if limit is None else f"{100 * limit:g} %" for limit, _ in rows],
            textposition="top center",
            marker={"size": 10},
            line={"color": colour},
            name=name,
        )
    for limit, _ in rows:
        if limit is not None:
            figure.add_vline(x=100 * limit, line={"color": "#999999", "width": 1, "dash": "dot"})
    figure.update_layout(
        title=f"What safety costs: a budget on the worst 5 % of {EPISODE}-hour episodes",
        xaxis_title="mean of the worst 5 % of episodes, % of equity (dotted: the limits)",
        yaxis_title="mean of all episodes, % of equity",
        template="plotly_white",
        legend={"x": 0.02, "y": 0.02},
    )
    figure.write_html(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=3_000_000)
    parser.add_argument("--out", type=Path, help="write the picture to this HTML file")
    arguments = parser.parse_args()
    rows = []
    for limit in LIMITS:
        found = [run(limit, seed, arguments.steps) for seed in range(arguments.seeds)]
        rows.append((limit, {name: float(np.mean([one[name] for one in found])) for name in found[0]}))
    show(rows)
    if arguments.out:
        picture(rows, arguments.out)


if __name__ == "__main__":
    main()

"""The result of a run in words: its table, the verdict, and the agent that was trained."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from tailguard.algorithm.ensemble import Ensemble
from tailguard.algorithm.learner import Learner
from tailguard.console import say
from tailguard.evaluate.backtest import BacktestResult
from tailguard.evaluate.baselines import AGENT, BUY_AND_HOLD
from tailguard.evaluate.formatting import growth_of
from tailguard.evaluate.optimum import share_of_optimum
from tailguard.evaluate.report.verdict import budget_in_words, ratio_against, window_in_words
from tailguard.evaluate.results_table import print_summary
from tailguard.evaluate.summary import EvaluationSummary


@dataclass(frozen=True)
class RunResult:
    """Result of a run."""

    folder: Path
    agent: Learner | Ensemble
    summary: EvaluationSummary
    """On the test period: the agent, the baselines, and the optimum if it is known."""

    has_budget: bool = False
    """Whether the run had a limit."""

    @property
    def results(self) -> Mapping[str, BacktestResult]:
        """Backtests on the test period, by name."""
        return self.summary.results

    @property
    def captured(self) -> float:
        """The agent's log-growth as a share of the planted optimum's; NaN where none is known or either is ruined."""
        return share_of_optimum(self.results)


def print_outcome(result: RunResult, console: Console) -> None:
    """The table of results and the verdict in words."""
    console.print()
    print_summary(result.summary, "test, net of costs", console)
    console.print()
    say(console, f"verdict  {outcome_in_words(result)}")
    say(console, f"budget   {budget_outcome_in_words(result)}")


def outcome_in_words(result: RunResult) -> str:
    """The outcome in words, also when it is a bad one."""
    agent, held = result.results[AGENT], result.results[BUY_AND_HOLD]
    won, better = agent.equity[-1] > 1, agent.equity[-1] > held.equity[-1]
    difference = result.summary.beaten[BUY_AND_HOLD]
    ratio = "" if math.isnan(difference.p_value) else f". {ratio_against(difference, BUY_AND_HOLD)}"
    words = (
        f"out of sample the agent {'grew' if won else 'lost'}: {growth_of(agent)} net of costs, "
        f"{'better' if better else 'worse'} than buy & hold ({growth_of(held)}){ratio}"
    )
    if not math.isnan(result.captured):
        words += f". It made {100 * result.captured:.0f} % of the log-growth of the planted optimum on these bars"
    if not won:
        words += ". It lost money: do not trade it"
    return words + "."


def budget_outcome_in_words(result: RunResult) -> str:
    """Whether the risk budget held on the test period, in words."""
    check = result.summary.budgets.get(AGENT)
    if check is not None:
        return budget_in_words(check, result.results[AGENT].pace)
    if not result.has_budget:
        return f"none was set; tailguard report {result.folder} --limit -0.04 judges by one."
    return "the test period is too short to judge it."


def describe_agent(agent: Learner) -> str:
    """The network and the length of training in one line."""
    network = agent.config.network
    memory = "no memory" if network.memory == "none" else f"LSTM {network.lstm_size} ({network.memory})"
    critics = "twin critics" if network.twin_critics else "one critic"
    size = sum(parameter.numel() for parameter in agent.policy.parameters())
    return (
        f"{memory} · {critics}, {network.critic_kind.describe(network)} · {size:,} parameters · "
        f"{agent.env.num_envs} accounts × {agent.config.n_steps} steps a rollout · {describe_risk(agent)}"
    )


def describe_risk(agent: Learner) -> str:
    """The risk budget in words."""
    if agent.risk is None:
        return "no risk budget"
    risk = agent.risk.config
    episodes = f"{agent.risk.horizon}-bar episodes"
    if agent.spec is not None:
        named = window_in_words(agent.risk.horizon, agent.spec.pace)
        episodes = episodes if named.startswith("windows") else named
    what = {"episode": episodes, "drawdown": f"drawdowns within {episodes}", "bar": "bars"}[risk.measure]
    sample = agent.risk.describe_sample()
    if risk.limit is None:
        return f"risk-averse: mean − {risk.penalty:g} × loss of the worst {100 * risk.alpha:g} % of {what} · {sample}"
    return f"budget: the worst {100 * risk.alpha:g} % of {what} lose ≤ {-100 * risk.limit:g} % on average · {sample}"

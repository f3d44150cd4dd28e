"""One run: bars, split, training, and the evaluation on the test period."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rich.console import Console

from tailguard._version import __version__
from tailguard.algorithm.ppo import DistributionalPPO
from tailguard.config import RunConfig
from tailguard.data.splits import Split
from tailguard.data.synthetic import SyntheticMarket, describe
from tailguard.errors import ConfigError
from tailguard.evaluate.backtest import BacktestResult
from tailguard.evaluate.notes import baseline_notes
from tailguard.evaluate.report.verdict import budget_in_words, ratio_against, window_in_words
from tailguard.evaluate.standing import Standing, own_budget, standing
from tailguard.evaluate.table import growth_of, print_standing
from tailguard.evaluate.trained import (
    AGENT,
    OPTIMUM,
    TrainedRun,
    beside_baselines,
    build_agent,
    market_of,
    split_of,
)
from tailguard.evaluate.trials import count_trials, record_trial
from tailguard.runs.folder import RunFolder
from tailguard.runs.training import prepare_device, train_to_the_end
from tailguard.runs.validation import Validation

if TYPE_CHECKING:
    from tailguard.data.bars import Bars
    from tailguard.envs.mapped_market import PreparedMarket


@dataclass(frozen=True)
class RunResult:
    """What a run left behind."""

    folder: Path
    agent: DistributionalPPO
    standing: Standing
    """On the test period: the agent, the baselines, and the optimum if it is known."""

    @property
    def results(self) -> Mapping[str, BacktestResult]:
        """Backtests on the test period, by name."""
        return self.standing.results

    @property
    def captured(self) -> float:
        """The agent's log-growth as a share of the planted optimum's on the same bars; NaN where none is known."""
        if OPTIMUM not in self.results:
            return math.nan
        mine, best = (math.log(self.results[name].equity[-1]) for name in (AGENT, OPTIMUM))
        return mine / best if best > 0 else math.nan


def _say_no(_: str) -> bool:
    return False


def train(
    config: RunConfig,
    folder: Path,
    console: Console,
    *,
    replace: bool = False,
    resume: bool = False,
    ask: Callable[[str], bool] = _say_no,
    verbose: bool = False,
) -> RunResult:
    """Train an agent as the config says, keep everything in `folder`, and show what it does on the test period.

    `replace`: an earlier run in the folder is removed.
    `resume`: a run in the folder goes on, exactly from its newest checkpoint.
    `ask`: answers what only the user can decide: whether to go on with a run that is there, and from an older
    checkpoint where the newest is damaged. By default the answer is no, and the question becomes an error.

    `verbose`: print the table of all figures every tenth iteration.

    The first SIGINT or SIGTERM ends the training after the iteration, with a checkpoint; the process exits with status
    128 + the signal's number. Raises `RunError` when the disk does not take any more; the last checkpoint is intact.
    """
    run = RunFolder(folder)
    with run.claimed():
        goes_on = _goes_on(run, config, replace, resume, ask)
        agent, bars, split, synthetic = prepare_agent(config, run, console)
        if not goes_on:  # only now: settings that cannot be used must not claim the name, nor cost an earlier run
            run.begin(config)
        store = train_to_the_end(
            agent,
            config,
            run,
            Validation(agent, split.validation),
            console,
            resume=goes_on,
            again=f"tailguard train --resume {run.path}",
            ask=ask,
            verbose=verbose,
        )
        trained = TrainedRun(folder, config, agent, bars, split, synthetic)
        with console.status("") as status:

            def show(name: str) -> None:
                status.update(f"test     {name}")

            results = beside_baselines(trained, trained.part("test"), before_each=show)
            notes = baseline_notes(results, trained.part("test"), config.market)
            found = standing(results, own_budget(config), notes=notes, before_each=show)
            result = RunResult(folder, agent, found)
        note = _write_down(trained, result)
    console.print()
    print_standing(result.standing, "test, net of costs", console)
    console.print(f"\nverdict  {verdict(result)}", soft_wrap=True, markup=False, highlight=False)
    console.print(f"budget   {budget_of(result)}", soft_wrap=True, markup=False, highlight=False)
    console.print(f"trials   {note}", soft_wrap=True, markup=False, highlight=False)
    best = store.best()
    if best not in (None, agent.num_timesteps):
        console.print(f"best     on validation: {store.folder}/step_{best}", soft_wrap=True)
    console.print(f"saved    {run.agent_path}  (curves: tensorboard --logdir {folder})", soft_wrap=True)
    return result


def resume_run(
    folder: Path, console: Console, ask: Callable[[str], bool] = _say_no, verbose: bool = False
) -> RunResult:
    """Go on with the run in this folder, with its own settings."""
    return train(RunFolder(folder).config(), folder, console, resume=True, ask=ask, verbose=verbose)


def _goes_on(run: RunFolder, config: RunConfig, replace: bool, resume: bool, ask: Callable[[str], bool]) -> bool:
    """Whether the run in the folder goes on; False if a new one may begin there, an error if neither may be."""
    if run.holds_a_run() and not replace:
        run.check_same(config)
        if not resume and not ask(f"{run.path}: this run exists already. Go on with it?"):
            raise ConfigError(
                f"{run.path}: this run exists already. Go on with it (--yes, or tailguard train --resume {run.path}), "
                "or choose another --name"
            )
        return True
    if not run.holds_a_run() and not run.is_free():
        raise ConfigError(f"{run.path}: the folder exists already and holds no run; choose another --name")
    return False


def prepare_agent(
    config: RunConfig, run: RunFolder, console: Console
) -> tuple[DistributionalPPO, Bars | PreparedMarket, Split | PreparedMarket, SyntheticMarket | None]:
    """A fresh agent as the settings say, all bars, their split, and the market's generator; each told in a line."""
    prepare_device(config)
    console.print(
        f"[bold]Tailguard {__version__}[/bold] · {config.training.device}, {torch.get_num_threads()} threads "
        f"· seed {config.training.seed} · {run.path}"
    )
    bars, synthetic = market_of(config)
    console.print(f"market   {describe(synthetic) if synthetic else _describe_bars(bars)}", soft_wrap=True)
    split = split_of(config, bars)
    console.print(f"split    {split.describe()}", soft_wrap=True)
    agent = build_agent(config, split.train, config.training.seed)
    console.print(f"agent    {describe_agent(agent)}", soft_wrap=True)
    return agent, bars, split, synthetic


def _write_down(run: TrainedRun, result: RunResult) -> str:
    """Put the run into the record of trials; returns what the record says, in words."""
    trial = run.trial(result.results[AGENT].metrics["sharpe"])
    try:
        record_trial(run.trials_path, trial)
    except OSError as error:
        return f"{run.trials_path} cannot be written: {error.strerror}. This run is not counted"
    return count_trials(run.trials_path, [trial]).source


def verdict(result: RunResult) -> str:
    """The outcome in words, also when it is a bad one."""
    agent, held = result.results[AGENT], result.results["buy & hold"]
    won, better = agent.equity[-1] > 1, agent.equity[-1] > held.equity[-1]
    difference = result.standing.beaten["buy & hold"]
    ratio = "" if math.isnan(difference.p_value) else f". {ratio_against(difference, 'buy & hold')}"
    words = (
        f"out of sample the agent {'grew' if won else 'lost'}: {growth_of(agent)} net of costs, "
        f"{'better' if better else 'worse'} than buy & hold ({growth_of(held)}){ratio}"
    )
    if not math.isnan(result.captured):
        words += f". It made {100 * result.captured:.0f} % of the log-growth of the planted optimum on these bars"
    if not won:
        words += ". It lost money: do not trade it"
    return words + "."


def budget_of(result: RunResult) -> str:
    """Whether the risk budget held on the test period, in words."""
    found = result.standing.budgets.get(AGENT)
    if found is not None:
        return budget_in_words(found, result.results[AGENT].bars_per_year)
    if result.agent.risk is None or result.agent.risk.config.limit is None:
        return f"none was set; tailguard report {result.folder} --limit -0.04 judges by one."
    return "the test period is too short to judge it."


def describe_agent(agent: DistributionalPPO) -> str:
    """The network and the length of training in one line."""
    network = agent.config.network
    memory = "no memory" if network.memory == "none" else f"LSTM {network.lstm_size} ({network.memory})"
    critics = "twin critics" if network.twin_critics else "one critic"
    spread = {"quantile": f"{network.quantiles} quantiles", "categorical": f"{network.atoms} atoms", "scalar": "scalar"}
    size = sum(parameter.numel() for parameter in agent.agent.parameters())
    return (
        f"{memory} · {critics}, {spread[network.critic]} · {size:,} parameters · "
        f"{agent.env.num_envs} accounts × {agent.config.n_steps} steps a rollout · {describe_risk(agent)}"
    )


def describe_risk(agent: DistributionalPPO) -> str:
    """The risk budget in words."""
    if agent.risk is None:
        return "no risk budget"
    risk = agent.risk.config
    episodes = f"{agent.risk.horizon}-bar episodes"
    if agent.spec is not None:
        named = window_in_words(agent.risk.horizon, 365.25 * 86_400_000 / agent.spec.frequency_ms)
        episodes = episodes if named.startswith("windows") else named
    what = {"episode": episodes, "drawdown": f"drawdowns within {episodes}", "bar": "bars"}[risk.measure]
    sample = agent.risk.describe_sample()
    if risk.limit is None:
        return f"risk-averse: mean − {risk.penalty:g} × loss of the worst {100 * risk.alpha:g} % of {what} · {sample}"
    return f"budget: the worst {100 * risk.alpha:g} % of {what} lose ≤ {-100 * risk.limit:g} % on average · {sample}"


def _describe_bars(bars: Bars | PreparedMarket) -> str:
    first, last = bars.end_points
    return f"{bars.source} · {', '.join(bars.symbols)} · {first:%Y-%m-%d} → {last:%Y-%m-%d} · {len(bars):,} bars"

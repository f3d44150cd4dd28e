"""One run: bars, split, training, and the evaluation on the test period."""

from __future__ import annotations

import dataclasses
import io
import math
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rich.console import Console

from tailguard._version import __version__
from tailguard.algorithm.ensemble import Ensemble
from tailguard.algorithm.learner import Learner
from tailguard.config import RunConfig
from tailguard.console import say
from tailguard.data.splits import Split
from tailguard.data.synthetic import SyntheticMarket, describe
from tailguard.errors import ConfigError, RunError, TailguardError
from tailguard.evaluate.backtest import BacktestResult
from tailguard.evaluate.notes import baseline_notes
from tailguard.evaluate.report.verdict import budget_in_words, ratio_against, window_in_words
from tailguard.evaluate.standing import Budget, Standing, own_budget, standing
from tailguard.evaluate.table import growth_of, print_standing
from tailguard.evaluate.trained import (
    AGENT,
    TrainedRun,
    beside_baselines,
    market_of,
    share_of_optimum,
    split_of,
    why_no_optimum,
)
from tailguard.evaluate.trials import count_trials, record_trial
from tailguard.runs.folder import RunFolder, again
from tailguard.runs.members import Members, train_members
from tailguard.runs.rehearsal import rehearse_report, short_budget, shortened
from tailguard.runs.training import prepare_device
from tailguard.runs.validation import Validation

if TYPE_CHECKING:
    from tailguard.data.bars import Bars
    from tailguard.envs.mapped_market import PreparedMarket


@dataclass(frozen=True)
class RunResult:
    """What a run left behind."""

    folder: Path
    agent: Learner | Ensemble
    standing: Standing
    """On the test period: the agent, the baselines, and the optimum if it is known."""

    has_budget: bool = False
    """Whether the run had a limit."""

    @property
    def results(self) -> Mapping[str, BacktestResult]:
        """Backtests on the test period, by name."""
        return self.standing.results

    @property
    def captured(self) -> float:
        """The agent's log-growth as a share of the planted optimum's; NaN where none is known or either is ruined."""
        return share_of_optimum(self.results)


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

    The first SIGINT, SIGTERM or SIGHUP ends the training after the iteration, with a checkpoint; the process exits with
    status 128 + the signal's number. Raises `RunError` when the disk does not take any more; the last checkpoint is
    intact.
    """
    run = RunFolder(folder)
    with run.claimed():
        goes_on = _goes_on(run, config, replace, resume, ask)
        members, bars, split, synthetic = prepare_members(config, run, console)
        trained = TrainedRun(folder, config, _rehearsed(members), bars, split, synthetic)
        _rehearse(trained, console)
        if not goes_on:  # only now: settings that cannot be used must not claim the name, nor cost an earlier run
            run.begin(config)
        agent = train_members(
            members,
            run,
            Validation(members.first, split.validation),
            console,
            resume=goes_on,
            again=again(run.path),
            ask=ask,
            verbose=verbose,
        )
        trained = dataclasses.replace(trained, agent=agent)
        with console.status("") as status:
            result = _judge(trained, own_budget(config), lambda name: status.update(f"test     {name}"))
        note = _write_down(trained, result)
    _show(result, console)
    say(console, f"trials   {note}")
    say(console, f"saved    {run.agent_path}  (curves: tensorboard --logdir {shlex.quote(str(folder))})")
    return result


def _judge(run: TrainedRun, budget: Budget | None, before_each: Callable[[str], None]) -> RunResult:
    """The agent on the test part beside the baselines, with intervals and the verdict on the budget."""
    results = beside_baselines(run, run.part("test"), before_each=before_each)
    notes = baseline_notes(results, run.part("test"), run.config.market)
    judged = standing(results, budget, notes=notes, before_each=before_each)
    return RunResult(run.folder, run.agent, judged, run.config.risk.limit is not None)


def _show(result: RunResult, console: Console) -> None:
    console.print()
    print_standing(result.standing, "test, net of costs", console)
    console.print()
    say(console, f"verdict  {verdict(result)}")
    say(console, f"budget   {budget_of(result)}")


def _rehearse(run: TrainedRun, console: Console) -> None:
    """Do on a few bars what is done after training: nothing may fail then that could be known now."""
    unknown = why_no_optimum(run)
    if unknown is not None:
        say(console, f"note     the planted optimum is unknown for these settings: {unknown}")
    try:
        short = shortened(run)
        result = _judge(short, short_budget(own_budget(run.config)), lambda _: None)
        _show(result, Console(file=io.StringIO()))
        rehearse_report(short, result.standing)
    except (TailguardError, OSError):
        raise
    except Exception as error:
        raise RunError(
            f"with these settings the run could not be judged after its training: {error!r}. Nothing was trained. "
            "This is a defect of Tailguard: please report it with the settings"
        ) from error


def resume_run(
    folder: Path, console: Console, ask: Callable[[str], bool] = _say_no, verbose: bool = False
) -> RunResult:
    """Go on with the run in this folder, with its own settings.

    Settings that only say where and how long may have been edited since it began, if `ask` agrees to them.
    """
    run = RunFolder(folder)
    config, edited = run.config(), run.edited()
    if edited:
        changes = f"{run.config_path}: edited since the run began ({'; '.join(edited.values())})"
        # Bars that have moved are known by their content.
        if edited.keys() != {"data.path"} and not ask(f"{changes}. Go on with the edited settings?"):
            raise ConfigError(f"{changes}. Go on with the edited settings (--yes), or bring back those from before")
        say(console, f"note     {changes}")
    return train(config, folder, console, resume=True, ask=ask, verbose=verbose)


def _goes_on(run: RunFolder, config: RunConfig, replace: bool, resume: bool, ask: Callable[[str], bool]) -> bool:
    """Whether the run in the folder goes on; False if a new one may begin there, an error if neither may be."""
    if run.holds_a_run() and not replace:
        run.check_same(config)
        if not resume and not ask(f"{run.path}: this run exists already. Go on with it?"):
            raise ConfigError(
                f"{run.path}: this run exists already. Go on with it (--yes, or {again(run.path)}), "
                "or choose another --name"
            )
        return True
    if not run.holds_a_run() and not run.is_free():
        raise ConfigError(f"{run.path}: the folder exists already and holds no run; choose another --name")
    return False


def _rehearsed(members: Members) -> Learner | Ensemble:
    """A fresh agent of the kind that the run will end with."""
    return members.first if members.config.risk.limit is None and members.count == 1 else Ensemble([members.first])


def prepare_members(
    config: RunConfig, run: RunFolder, console: Console
) -> tuple[Members, Bars | PreparedMarket, Split | PreparedMarket, SyntheticMarket | None]:
    """The learners that the settings ask for, all bars, their split, and the market's generator, a line on each."""
    prepare_device(config)
    threads = f"{config.training.device}, {torch.get_num_threads()} threads"
    say(console, f"Tailguard {__version__} · {threads} · seed {config.training.seed} · {run.path}", style="bold")
    bars, synthetic = market_of(config)
    say(console, f"market   {describe(synthetic) if synthetic else _describe_bars(bars)}")
    split = split_of(config, bars)
    say(console, f"split    {split.describe()}")
    members = Members(config, split.train, config.training.seed)
    several = f"{members.count} members, each: " if members.count > 1 else ""
    say(console, f"agent    {several}{describe_agent(members.first)}")
    return members, bars, split, synthetic


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
    if not result.has_budget:
        return f"none was set; tailguard report {result.folder} --limit -0.04 judges by one."
    return "the test period is too short to judge it."


def describe_agent(agent: Learner) -> str:
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


def describe_risk(agent: Learner) -> str:
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

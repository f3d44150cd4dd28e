"""Backtests: a policy on bars, through the same market code as training, net of all costs at every bar."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray

from tailguard.data.findings import names_in_short
from tailguard.data.pace import Pace
from tailguard.data.panel import Panel
from tailguard.envs.constraints import Constraints, limits_of
from tailguard.envs.episodes import TradingTask, holdable_assets, rows_before_session_ends
from tailguard.errors import BarsError, BarsWarning, ConfigError
from tailguard.evaluate import metrics
from tailguard.evaluate.agent_task import Conditions, agent_task, as_feed
from tailguard.evaluate.baselines import Policy
from tailguard.evaluate.deciders import AgentDecider, ArrayDecider, Decider, FunctionDecider
from tailguard.evaluate.decision import DecisionMemory, decide
from tailguard.experiment.faulty_feed import market_config, market_panel, seen_bars
from tailguard.market import MarketConfig, MarketState, build_market, step
from tailguard.market.serial import SerialAccount, check_agreement
from tailguard.models.inference import PredictPolicy, StepPolicy
from tailguard.monitor.object_repr import html_table, one_line
from tailguard.monitor.progress import DelayedBar
from tailguard.risk.throttle import Throttle
from tailguard.robust.feed import Feed
from tailguard.validate import check_count, check_range

if TYPE_CHECKING:
    import plotly.graph_objects as go
    import polars

    from tailguard.data.bars import Bars
    from tailguard.envs.spec import TradingSpec, TrainingBars

Float = NDArray[np.float64]

BATCH = 65_536
"""Bars booked at once; it bounds the memory."""
BOOKED = ("net", "pnl", "turnover", "unfilled")
"""Fields kept of every bar's transition, beside its costs."""


@runtime_checkable
class BacktestAgent(Protocol):
    """A trained agent: SB3's `predict`, and a description of its environment."""

    @property
    def spec(self) -> TradingSpec | None: ...

    def predict(
        self,
        observation: Any,
        state: Any = None,
        episode_start: Any = None,
        deterministic: bool = False,
    ) -> tuple[Any, Any]: ...


@runtime_checkable
class Throttled(Protocol):
    """An agent that may have a throttle on its exposure."""

    def make_throttle(self) -> Throttle | None: ...


@dataclass(frozen=True, repr=False)
class BacktestResult:
    """The result, bar by bar. `T` bars were traded; all fractions are of the equity before the bar."""

    time: NDArray[np.int64]
    """Open times of the traded bars, milliseconds UTC, [T]."""
    equity: Float
    """Equity at the closes as a multiple of the starting capital, starting value first, [T + 1]."""
    targets: Float
    """Target weights at each bar's open, NaN where the position was held, [T, A]."""
    weights: Float
    """Weights at the closes, [T, A]."""
    net: Float
    """Net return of each bar, [T]."""
    pnl: Float
    """Gain from prices alone, [T]."""
    costs: dict[str, Float]
    """Costs by kind, [T] each."""
    turnover: Float
    """Absolute value traded, [T]."""
    unfilled: Float
    """Absolute value beyond the bar's volume cap, not filled, [T]."""
    shielded: NDArray[np.bool_]
    """Where the agent's shield reduced its positions, [T]; `targets` are those after it."""
    liquidated: bool
    """Whether the account was liquidated; it stays flat from then on."""
    bars_per_year: float
    symbols: tuple[str, ...]
    throttle: Float | None = None
    """Factor of the agent's throttle on its exposure, [T]; None without one. `targets` are those after it."""
    unthrottled_return: float | None = None
    """Total return had the throttle not acted; None where it did not."""
    sessions: Pace | None = None
    """Bars of a day, a week and a year where the market closes; None: it trades around the clock."""

    @property
    def pace(self) -> Pace:
        """Bars of a day, a week and a year."""
        return self.sessions or Pace.around_the_clock(self.bars_per_year)

    @property
    def metrics(self) -> dict[str, float]:
        """Every metric by name: those of `evaluate.metrics.track_record`, and those from costs and positions.

        `tailguard.evaluate.metrics` and docs/evaluation.md define each one.
        """
        per_day = self.pace.per_day
        gross = np.abs(self.weights).sum(-1)
        return {
            **metrics.track_record(self.equity, self.net, self.pace),
            "turnover_per_day": float(self.turnover.mean() * per_day),
            "exposure": float(gross.mean()),
            "net_exposure": float(self.weights.sum(-1).mean()),
            "time_in_market": float((gross > 0).mean()),
            "shielded": float(self.shielded.mean()),
            "throttled": 0.0 if self.throttle is None else float((self.throttle < 1).mean()),
            "unfilled_per_day": float(self.unfilled.mean() * per_day),
            **{f"cost_{kind}_per_year": amount for kind, amount in self.costs_per_year.items()},
        }

    @property
    def costs_per_year(self) -> dict[str, float]:
        """Costs by kind, as shares of equity a year."""
        return {kind: float(cost.mean() * self.bars_per_year) for kind, cost in self.costs.items()}

    def __repr__(self) -> str:
        return one_line("BacktestResult", self._facts())

    def _repr_html_(self) -> str:
        return html_table("Backtest", self._facts())

    def _facts(self) -> dict[str, str]:
        """The summary shown in a notebook; `metrics` has everything."""
        first, last = (np.datetime64(int(moment), "ms").astype("datetime64[D]") for moment in self.time[[0, -1]])
        values = self.metrics
        return {
            "symbols": names_in_short(self.symbols),
            "bars": f"{len(self.net):,}",
            "period": f"{first} to {last}",
            "return": f"{100 * (self.equity[-1] - 1):+.1f} %",
            "sharpe": f"{values['sharpe']:.2f}",
            "max drawdown": f"{100 * values['max_drawdown']:.1f} %",
            "turnover/day": f"{values['turnover_per_day']:.2f}",
            **({"liquidated": "yes"} if self.liquidated else {}),
        }

    def plot(self) -> go.Figure:
        """Equity and drawdown as a Plotly figure."""
        from tailguard.evaluate.report.charts import equity_chart

        return equity_chart({"equity": self}, falls=("equity",), filled="equity")

    def frame(self) -> polars.DataFrame:
        """Everything as one table, one row per bar."""
        import polars

        columns: dict[str, Any] = {"time": self.time, "equity": self.equity[1:], "net": self.net, "pnl": self.pnl}
        columns |= self.costs | {"turnover": self.turnover, "unfilled": self.unfilled}
        for index, symbol in enumerate(self.symbols):
            columns[f"target:{symbol}"] = self.targets[:, index]
            columns[f"weight:{symbol}"] = self.weights[:, index]
        return polars.DataFrame(columns).with_columns(
            polars.from_epoch("time", time_unit="ms").dt.replace_time_zone("UTC")
        )


def backtest(
    policy: BacktestAgent | Policy | Float,
    bars: Bars,
    config: MarketConfig | None = None,
    *,
    delay: int = 0,
    noise: float = 0.0,
    feed: Feed | str | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    progress_bar: bool = True,
    warn_in_sample: bool = True,
    throttle: bool = True,
    flat_by_close: bool = False,
    constraints: Constraints | None = None,
) -> BacktestResult:
    """Trade one account over all tradeable bars and book everything.

    `policy`: a trained agent; a function of a `Moment` that returns target weights [A]; or an array of target weights
    [R, A], one row for each row of the bars: the weights named at the close of row t fill at the open of row t + 1.
    NaN leaves a position alone.
    `config`: costs and margin; an agent's own by default.
    `delay`: whole bars that every decision waits beyond the next open before it fills.
    `noise`: normal noise on each feature an agent sees, in standard deviations of that feature over these bars, drawn
    from `seed`. Its weights and account inputs stay exact.
    `feed`: faults of the feed, as `late:2` (`tailguard.robust.feed`): the policy sees them, and orders fill at the true
    prices.
    `progress_bar`: show a bar in a terminal or a notebook once two seconds have passed.
    `warn_in_sample`: give a `BarsWarning` where an agent trades symbols at times that it was trained on.
    `flat_by_close`: sell everything at the open of each session's last bar; an agent does as it was trained.
    `constraints`: limits on the weights of a function or an array; an agent has those that it was trained under.
    `throttle`: reduce the exposure of an agent that has a throttle by the losses that it makes on these bars.

    An agent sees what it saw in training: its window of `episode_length` bars restarts, with its memory reset,
    whenever it ends, while the account continues. Before each gap in the bars all positions are closed; they are
    carried over nights, weekends and holidays of the market's calendar. A liquidated account stays flat.
    """
    check_count("delay", delay, low=0)
    check_range("noise", noise, low=0)
    feed = as_feed(feed)
    if isinstance(policy, BacktestAgent):
        if policy.spec is None:
            raise ConfigError("this agent was not trained on a TradingEnv, so it cannot be backtested on bars")
        if constraints is not None:
            raise ConfigError("constraints: an agent has those that it was trained under; leave them out")
        task, usable, panel = agent_task(policy.spec, bars, config, dtype, Conditions(noise, seed, feed))
        if warn_in_sample and policy.spec.training_bars is not None:
            _warn_in_sample(policy.spec.training_bars, panel)
        decider: Decider = AgentDecider(step_policy(policy), task, panel)
    else:
        if noise:
            raise ConfigError(f"noise: {noise:g} perturbs the features an agent sees; this policy sees none")
        panel = seen = bars.panel("portfolio")
        if feed is not None:
            config = market_config(feed, config or MarketConfig())
            panel, seen = market_panel(bars, feed, config, "portfolio"), seen_bars(bars, feed).panel("portfolio")
        market = build_market(panel, config, dtype=dtype)
        usable = np.ones(panel.rows, bool)
        flat_rows = rows_before_session_ends(panel) if flat_by_close else None
        task = TradingTask(
            market,
            torch.zeros(panel.rows, 0),
            (),
            episode_length=panel.rows,
            holdable=holdable_assets(panel),
            flat_rows=flat_rows,
            limits=None if constraints is None else limits_of(constraints, market),
        )
        decider = FunctionDecider(policy, seen) if callable(policy) else ArrayDecider(policy, panel)
    control = policy.make_throttle() if throttle and isinstance(policy, Throttled) else None
    result = _run(task, decider, panel, usable, delay, progress_bar, control)
    if result.throttle is None or not (result.throttle < 1).any():
        return result
    if result.throttle.min() > 0:
        # Returns are proportional to exposure but for market impact.
        return replace(result, unthrottled_return=float(np.prod(1 + result.net / result.throttle) - 1))
    # What an agent that was stopped would have made is not in its record.
    assert isinstance(policy, BacktestAgent)
    free = _run(task, AgentDecider(step_policy(policy), task, panel), panel, usable, delay, progress_bar, None)
    return replace(result, unthrottled_return=float(free.equity[-1] - 1))


def _warn_in_sample(trained: TrainingBars, panel: Panel) -> None:
    """Warn where these bars have symbols and times that the agent was trained on; names and times are all it knows."""
    symbols = [symbol for symbol in panel.symbols if symbol in trained.symbols]
    times = panel.time[panel.tradeable]
    seen = times[(times >= trained.first_ms) & (times <= trained.last_ms)]
    if not symbols or not len(seen):
        return
    first, last = (np.datetime64(int(moment), "ms").item() for moment in (seen.min(), seen.max()))
    share = 100 * len(seen) / len(times)
    warnings.warn(
        f"in-sample: the agent was trained on {', '.join(symbols)} at {share:.3g} % of the times of these bars, "
        f"{first:%Y-%m-%d %H:%M} to {last:%Y-%m-%d %H:%M}. Unless this is another market of the same name, the results "
        "are no evidence of skill. Use later bars",
        BarsWarning,
        stacklevel=3,
    )


def step_policy(agent: BacktestAgent) -> StepPolicy:
    """The agent as it is asked bar by bar: by its `inference_policy` if it has one, else by `predict`."""
    make = getattr(agent, "inference_policy", None)
    return PredictPolicy(agent) if make is None else make()


def _stretches(panel: Panel, usable: NDArray[np.bool_]) -> Iterator[tuple[int, int]]:
    """First and last row of each stretch that can be traded without a gap."""
    allowed = panel.tradeable & usable
    breaks = np.flatnonzero((np.diff(panel.segment) != 0) | (np.diff(allowed.astype(np.int8)) != 0)) + 1
    for begin, end in zip([0, *breaks], [*breaks, panel.rows], strict=True):
        if allowed[begin] and end - begin >= 2:
            yield int(begin), int(end) - 1


def _run(
    task: TradingTask,
    decider: Decider,
    panel: Panel,
    usable: NDArray[np.bool_],
    delay: int,
    progress_bar: bool,
    throttle: Throttle | None,
) -> BacktestResult:
    stretches = list(_stretches(panel, usable))
    if not stretches:
        raise BarsError(
            f"{', '.join(panel.symbols)}: nothing to trade: no two tradeable bars in a row have all features defined "
            f"({panel.rows:,} rows, {int(panel.tradeable.sum()):,} tradeable, {int(usable.sum()):,} with features)"
        )
    course = _Course.empty(np.concatenate([np.arange(begin, end) for begin, end in stretches]), panel.assets)
    account = SerialAccount(task.market, stretches[0][0])
    memory = DecisionMemory.start(account.equity, throttle)
    done, liquidated = 0, False
    with DelayedBar("backtest", len(course.rows), shown=progress_bar) as bar, torch.inference_mode():
        for stretch, (begin, end) in enumerate(stretches):
            account.row = begin
            goes_on = stretch + 1 < len(stretches)
            memory.begin_stretch(account.equity, panel.assets, delay)
            for row in range(begin, end):
                flat = liquidated or (goes_on and row == end - 1)
                decision = decide(decider, task, panel, account, memory, flat=flat)
                course.throttle[done], course.shielded[done] = decision.throttle, decision.shielded
                course.equity[done], course.weights[done], course.targets[done] = (
                    account.equity,
                    account.weights,
                    decision.target,
                )
                liquidated |= account.step(decision.target)
                memory.end_bar(account.equity)
                done += 1
                if not done % 256:
                    bar.show(done)
    course.equity[done], course.weights[done] = account.equity, account.weights
    return replace(_book(task, course, panel, liquidated), throttle=None if throttle is None else course.throttle)


@dataclass(frozen=True)
class _Course:
    """State of the account and its orders at each bar, before trading; the books follow from them."""

    rows: NDArray[np.int64]
    """The bars at whose closes the decisions were made, [T]."""
    equity: Float
    """[T + 1], the last one after the last bar, as in `weights`."""
    weights: Float
    """[T + 1, A]"""
    targets: Float
    """[T, A]"""
    shielded: NDArray[np.bool_]
    """[T]"""
    throttle: Float
    """[T]"""

    @classmethod
    def empty(cls, rows: NDArray[np.int64], assets: int) -> _Course:
        count = len(rows)
        return cls(
            rows,
            np.empty(count + 1),
            np.empty((count + 1, assets)),
            np.empty((count, assets)),
            np.zeros(count, bool),
            np.ones(count),
        )


def _book(task: TradingTask, course: _Course, panel: Panel, liquidated: bool) -> BacktestResult:
    """The books of all bars, by the simulator: it processes all bars at once, each as a separate account."""
    market, count = task.market, len(course.rows)
    kinds = [cost.kind for costs in market.costs.values() for cost in costs]
    booked = {name: np.empty(count) for name in (*BOOKED, *kinds)}
    weights = np.empty((count, panel.assets))
    for first in range(0, count, BATCH):
        these = slice(first, min(first + BATCH, count))
        before, after = (_accounts(course, these, market.dtype, shift) for shift in (0, 1))
        target = torch.from_numpy(course.targets[these]).to(market.dtype)
        state, transition = step(market, before, target.nan_to_num(), target.isnan())
        check_agreement(after, state)
        for name, amount in ({name: getattr(transition, name) for name in BOOKED} | transition.costs).items():
            booked[name][these] = amount.double().numpy()
        weights[these] = state.weights.double().numpy()

    return BacktestResult(
        time=panel.time[course.rows + 1],
        equity=np.concatenate([[1.0], np.cumprod(1.0 + booked["net"])]),
        targets=course.targets,
        weights=weights,
        costs={kind: booked[kind] for kind in kinds},
        net=booked["net"],
        pnl=booked["pnl"],
        turnover=booked["turnover"],
        unfilled=booked["unfilled"],
        shielded=course.shielded,
        liquidated=liquidated,
        bars_per_year=panel.bars_per_year,
        symbols=panel.symbols,
        sessions=panel.sessions,
    )


def _accounts(course: _Course, these: slice, dtype: torch.dtype, shift: int) -> MarketState:
    """The accounts of some bars, before them (shift 0) or after (1)."""
    moved = slice(these.start + shift, these.stop + shift)
    return MarketState(
        torch.from_numpy(course.rows[these] + shift),
        torch.from_numpy(course.equity[moved]).to(dtype),
        torch.from_numpy(course.weights[moved]).to(dtype),
    )

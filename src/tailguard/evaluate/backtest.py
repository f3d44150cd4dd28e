"""Backtests: a policy on bars, through the same market code as training, net of all costs at every bar."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tailguard.data.panel import Panel
from tailguard.envs.episodes import EpisodeState, TradingTask
from tailguard.errors import BarsError, ConfigError, TailguardError
from tailguard.evaluate import metrics
from tailguard.evaluate.baselines import HOLD, Moment, Policy
from tailguard.market import MarketConfig, build_market, open_accounts
from tailguard.market.costs import COST_KINDS
from tailguard.validate import check_count, check_range

if TYPE_CHECKING:
    import polars

    from tailguard.data.bars import Bars
    from tailguard.envs.spec import TradingSpec

Float = NDArray[np.float64]

BOOKED = ("net", "pnl", "turnover", "unfilled", *COST_KINDS)
"""What is kept of every bar's transition."""


@runtime_checkable
class Agent(Protocol):
    """A trained agent: SB3's `predict`, and what its environment looked like."""

    @property
    def spec(self) -> TradingSpec | None: ...

    def predict(
        self,
        observation: Any,
        state: Any = None,
        episode_start: Any = None,
        deterministic: bool = False,
    ) -> tuple[Any, Any]: ...


@dataclass(frozen=True)
class BacktestResult:
    """What happened, bar by bar. `T` bars were traded; all fractions are of the equity before the bar."""

    time: NDArray[np.int64]
    """Open times of the traded bars, milliseconds UTC, [T]."""
    equity: Float
    """Equity at the closes as a multiple of the starting capital, the start in front, [T + 1]."""
    targets: Float
    """Weights asked for at each bar's open, NaN where the position was held, [T, A]."""
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
    """Absolute value that the bar's volume could not take, [T]."""
    shielded: NDArray[np.bool_]
    """Where the agent's shield held its positions back, [T]; `targets` are those after it."""
    liquidated: bool
    """Whether the account was closed by force; it stays flat from there on."""
    bars_per_year: float
    symbols: tuple[str, ...]

    @property
    def metrics(self) -> dict[str, float]:
        """Every figure by name: those of `evaluate.metrics.track_record`, and what only the books know.

        `tailguard.evaluate.metrics` and docs/evaluation.md say what each means.
        """
        per_day = self.bars_per_year / metrics.DAYS_PER_YEAR
        gross = np.abs(self.weights).sum(-1)
        return {
            **metrics.track_record(self.equity, self.net, self.bars_per_year),
            "turnover_per_day": float(self.turnover.mean() * per_day),
            "exposure": float(gross.mean()),
            "net_exposure": float(self.weights.sum(-1).mean()),
            "time_in_market": float((gross > 0).mean()),
            "shielded": float(self.shielded.mean()),
            "unfilled_per_day": float(self.unfilled.mean() * per_day),
            **{f"cost_{kind}_per_year": float(cost.mean() * self.bars_per_year) for kind, cost in self.costs.items()},
        }

    def frame(self) -> polars.DataFrame:
        """Everything as one table, a row a bar."""
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
    policy: Agent | Policy | Float,
    bars: Bars,
    config: MarketConfig | None = None,
    *,
    delay: int = 0,
    noise: float = 0.0,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
) -> BacktestResult:
    """Trade one account over all tradeable bars and book everything.

    `policy`: a trained agent; a function of a `Moment` that returns target weights [A]; or an array of target weights
    [R, A], one row for each row of the bars: the weights named at the close of row t fill at the open of row t + 1.
    NaN leaves a position alone.
    `config`: costs and margin; an agent's own by default.
    `delay`: whole bars that every decision waits beyond the next open before it fills.
    `noise`: normal noise on each feature an agent sees, in standard deviations of that feature over these bars, drawn
    from `seed`. What it knows exactly, its weights and its account, is left as it is.

    An agent sees what it saw in training: its window of `episode_length` bars starts anew, with its memory cleared,
    whenever it has run out, while the account goes on. Before each gap in the bars all positions are closed. A
    liquidated account stays flat.
    """
    check_count("delay", delay, low=0)
    check_range("noise", noise, low=0)
    if isinstance(policy, Agent):
        from tailguard.envs.spec import task_for

        if policy.spec is None:
            raise ConfigError("this agent was not trained on a TradingEnv, so it cannot be backtested on bars")
        task, usable, panel = task_for(policy.spec, bars, config, dtype)
        if noise:
            task = replace(task, features=_perturbed(task.features, usable, noise, policy.spec.scaler.clip, seed))
        decide: _Decider = _AgentDecider(policy, task)
    else:
        if noise:
            raise ConfigError(f"noise: {noise:g} perturbs the features an agent sees; this policy sees none")
        panel = bars.panel("portfolio")
        market = build_market(panel, config, dtype=dtype)
        usable = np.ones(panel.rows, bool)
        task = TradingTask(market, torch.zeros(panel.rows, 0), (), episode_length=panel.rows)
        decide = _FunctionDecider(policy, panel) if callable(policy) else _ArrayDecider(policy, panel)
    return _run(task, decide, panel, usable, delay)


def _perturbed(features: Tensor, usable: NDArray[np.bool_], noise: float, clip: float, seed: int) -> Tensor:
    """Scaled features [R, F] with noise, inside the bounds of the scaler; one that never varies has no noise."""
    deviation = features[torch.from_numpy(usable)].std(0, correction=0)
    drawn = np.random.default_rng(seed).standard_normal(tuple(features.shape), dtype=np.float32)
    return (features + noise * deviation * torch.from_numpy(drawn)).clamp(-clip, clip)


class _Decider(Protocol):
    """Names target weights [A] for the next open; NaN holds."""

    def __call__(self, state: EpisodeState, new_window: bool, first: bool) -> Float: ...


class _AgentDecider:
    def __init__(self, agent: Agent, task: TradingTask) -> None:
        self.agent, self.task = agent, task
        self.memory: Any = None

    def __call__(self, state: EpisodeState, new_window: bool, first: bool) -> Float:  # noqa: ARG002 (see _Decider)
        observation = self.task.observe(state).cpu().numpy()
        action, self.memory = self.agent.predict(
            observation, state=self.memory, episode_start=np.array([new_window]), deterministic=True
        )
        weights = self.task.to_weights(torch.as_tensor(np.asarray(action), dtype=self.task.market.dtype).reshape(1, -1))
        return np.asarray(weights[0].numpy(), dtype=np.float64)


class _FunctionDecider:
    def __init__(self, policy: Policy, panel: Panel) -> None:
        self.policy, self.panel = policy, panel

    def __call__(self, state: EpisodeState, new_window: bool, first: bool) -> Float:  # noqa: ARG002 (see _Decider)
        panel, row = self.panel, int(state.market.row[0])
        until = slice(None, row + 1)
        moment = Moment(
            row=row,
            first=first,
            time_ms=int(panel.time[row]),
            open=panel.open[until],
            high=panel.high[until],
            low=panel.low[until],
            close=panel.close[until],
            volume=panel.volume[until],
            weights=state.market.weights[0].double().numpy(),
            equity=float(state.market.equity[0]),
            bars_per_year=panel.bars_per_year,
        )
        return np.asarray(self.policy(moment), dtype=np.float64)


class _ArrayDecider:
    def __init__(self, targets: Float, panel: Panel) -> None:
        self.targets = np.asarray(targets, dtype=np.float64)
        if self.targets.ndim == 1:
            self.targets = self.targets[:, None]
        if self.targets.shape != (panel.rows, panel.assets):
            raise ConfigError(
                f"target weights have shape {np.shape(targets)}; these bars need ({panel.rows}, {panel.assets}): "
                f"a row for each bar, lead-in included, and a column for each of {', '.join(panel.symbols)}"
            )

    def __call__(self, state: EpisodeState, new_window: bool, first: bool) -> Float:  # noqa: ARG002 (see _Decider)
        return np.asarray(self.targets[int(state.market.row[0])])


def _stretches(panel: Panel, usable: NDArray[np.bool_]) -> Iterator[tuple[int, int]]:
    """First and last row of each stretch that can be traded without a gap."""
    allowed = panel.tradeable & usable
    breaks = np.flatnonzero((np.diff(panel.segment) != 0) | (np.diff(allowed.astype(np.int8)) != 0)) + 1
    for begin, end in zip([0, *breaks], [*breaks, panel.rows], strict=True):
        if allowed[begin] and end - begin >= 2:
            yield int(begin), int(end) - 1


def _run(task: TradingTask, decide: _Decider, panel: Panel, usable: NDArray[np.bool_], delay: int) -> BacktestResult:
    stretches = list(_stretches(panel, usable))
    if not stretches:
        raise BarsError(
            f"{', '.join(panel.symbols)}: nothing to trade: no two tradeable bars in a row have all features defined "
            f"({panel.rows:,} rows, {int(panel.tradeable.sum()):,} tradeable, {int(usable.sum()):,} with features)"
        )
    config = task.market.config
    account = open_accounts(torch.tensor([stretches[0][0]]), panel.assets, task.market.dtype)
    rows: list[int] = []
    targets: list[Float] = []
    weights: list[Float] = []
    # Plain numbers: a million bars as tensors of one number each would fill the memory.
    booked = np.empty((sum(end - begin for begin, end in stretches), len(BOOKED)))
    shielded: list[bool] = []
    liquidated = False
    for stretch, (begin, end) in enumerate(stretches):
        state = task.begin(replace(account, row=torch.tensor([begin])))
        goes_on = stretch + 1 < len(stretches)
        waiting = deque([np.full(panel.assets, HOLD)] * delay)
        for row in range(begin, end):
            new_window = int(state.age[0]) >= task.episode_length
            if new_window:
                state = task.begin(state.market)
            if liquidated or (goes_on and row == end - 1):
                target = np.zeros(panel.assets)
            else:
                asked = decide(state, new_window or row == begin, first=not rows)
                _check_target(asked, panel, row, config)
                waiting.append(asked)
                target = waiting.popleft()
            tensor = torch.from_numpy(target)[None]
            held_back = False
            if task.shield is not None and not np.isnan(target).any():
                equity, start = state.market.equity, state.start_equity
                tensor, flags = task.shield.apply(tensor, equity, start)
                held_back, target = bool(flags[0]), tensor[0].numpy()
            shielded.append(held_back)
            state, transition = task.advance(state, tensor.nan_to_num(), tensor.isnan())
            liquidated = liquidated or bool(transition.liquidated[0])
            booked[len(rows)] = torch.cat([getattr(transition, name) for name in BOOKED]).double().numpy()
            rows.append(row + 1)
            targets.append(target)
            weights.append(state.market.weights[0].double().numpy())
        account = state.market
    return _collect(panel, rows, targets, weights, booked, shielded, liquidated)


def _check_target(target: Float, panel: Panel, row: int, config: MarketConfig) -> None:
    """Refuse what the account may not do, before it is traded."""
    where = f"target weights at row {row + 1} ({np.datetime64(int(panel.time[row]), 'ms')})"
    if target.shape != (panel.assets,):
        raise ConfigError(f"{where} have shape {target.shape}; there must be {panel.assets}, one for each asset")
    if np.isinf(target).any():
        raise TailguardError(f"{where} are {target}; they must be finite, or NaN to hold")
    known = np.nan_to_num(target)
    # The tolerance is the rounding of float32 weights, not a loosened limit.
    if np.abs(known).sum() > config.leverage * (1 + 1e-6):
        raise ConfigError(
            f"{where} are {target}: {np.abs(known).sum():.4g} times equity, and market.leverage allows "
            f"{config.leverage:g}. Scale them down or raise market.leverage"
        )
    if not config.allow_short and (known < 0).any():
        raise ConfigError(f"{where} are {target}, and market.allow_short is false")


def _collect(
    panel: Panel,
    rows: list[int],
    targets: list[Float],
    weights: list[Float],
    booked: Float,
    shielded: list[bool],
    liquidated: bool,
) -> BacktestResult:
    def series(name: str) -> Float:
        return np.ascontiguousarray(booked[:, BOOKED.index(name)])

    net = series("net")
    return BacktestResult(
        time=panel.time[rows],
        equity=np.concatenate([[1.0], np.cumprod(1.0 + net)]),
        targets=np.array(targets),
        weights=np.array(weights),
        net=net,
        pnl=series("pnl"),
        costs={kind: series(kind) for kind in COST_KINDS},
        turnover=series("turnover"),
        unfilled=series("unfilled"),
        shielded=np.array(shielded),
        liquidated=liquidated,
        bars_per_year=panel.bars_per_year,
        symbols=panel.symbols,
    )

"""The trading environment: N accounts on one market, as tensors, reset in the step in which their episode ends."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import numpy as np
import torch
from torch import Tensor

from tailguard.data.prepare import PreparedBars, in_precision, prepare
from tailguard.data.scaling import Scaler
from tailguard.data.stored_features import FeaturePrecision
from tailguard.device_ops import may_hold_any
from tailguard.envs.asset_layout import AssetLayout
from tailguard.envs.blocks import BlockCache, Layout
from tailguard.envs.constraints import Constraints, limits_of
from tailguard.envs.episodes import (
    REWARDS,
    EpisodeState,
    Reward,
    TradingTask,
    episode_starts,
    feature_tensor,
    holdable_assets,
    rows_before_session_ends,
    where,
)
from tailguard.envs.feed_copies import MixedStarts, RandomisedBars
from tailguard.envs.prepared_market import MappedBars, PreparedMarket, RowRanges, check_same_setting, open_market
from tailguard.envs.protocol import Box, Step
from tailguard.envs.randomisation import Randomisation, Variation, draw_variation
from tailguard.envs.shield import Shield
from tailguard.envs.traded_bar import trade_bar
from tailguard.envs.volatility import VolatilityScaling, volatility_factors
from tailguard.errors import ConfigError
from tailguard.market import MarketConfig, MarketState, build_market, open_accounts
from tailguard.market.tables import market_of_table
from tailguard.validate import check_choice, check_count

if TYPE_CHECKING:
    from tailguard.data.bars import Accounts, Bars


class TradingEnv:
    """Episodes of fixed length from random starts, traded with full costs.

    An action is a share of the allowed leverage for each asset, in [-1, 1] or, without shorts, in [0, 1]; it becomes a
    target weight that fills at the next bar's open (see `TradingTask.to_weights`). The observation is the scaled
    features of the bar that has just closed, the current weights, the episode's gain, its drawdown and the time left.
    An episode is truncated after `episode_length` bars and terminated when its account is liquidated.

    `bars`: from `tailguard.load_bars` or `make_market`, or already prepared ones; a market that `tailguard data
        prepare` wrote, or its folder, is traded from disk, so it may be larger than memory.
    `config`: costs, leverage and margin.
    `num_envs`: accounts that step together.
    `device`, `dtype`: where and how precisely the accounting runs; observations and rewards are float32.
    `episode_length`: bars in an episode. Choose a multiple of the learner's `n_steps`, so no episode ends inside a
        segment.
    `features`: names of the features to use, all built-in ones by default.
    `feature_precision`: float32, or bfloat16, which takes half the memory and rounds each feature by at most 0.39 %.
    `scaler`: feature scaling fitted on training bars; without one it is fitted on these bars.
    `shared_scaling`: scale each feature alike for all symbols, as encoders need that share weights over assets.
    `accounts`: `portfolio` trades all symbols in one account, `per_symbol` each symbol in its own accounts.
    `reward`: `log` of net equity growth, `simple` growth, or `pnl` as a share of the episode's first equity.
    `shield`: a hard cap on exposure, so a given shock cannot take an episode's loss beyond a budget; None: off.
    `constraints`: limits on weights, groups, net and gross exposure and turnover, kept at every decision; None: none.
    `volatility_half_life`: bars; weights are scaled down where recent volatility, weighted with this half-life, exceeds
        its median over these bars. 0: off.
    `randomisation`: random variation of the episodes, for training; None: none. Its copies of the bars are made by
        `tailguard.data.prepare.with_rescaled_copies`, before.
    `flat_by_close`: sell everything at the open of each session's last bar, so that nothing is carried over a closure.
    `resident_bars`: bars that are on the device at a time, where not all fit, in `resident_blocks` blocks that are
        exchanged at the ends of episodes; 0: all of them.
    `stagger`: after a reset, let the first episodes end at different multiples of this many bars, so that the
        environments do not restart all at once.
    """

    differentiable = True
    """A market without feedback from the agent: its steps are differentiable functions of state and action."""

    def __init__(
        self,
        bars: Bars | PreparedBars | PreparedMarket | str | Path,
        config: MarketConfig | None = None,
        num_envs: int = 256,
        device: torch.device | str = "cpu",
        *,
        episode_length: int = 256,
        features: Sequence[str] | None = None,
        feature_precision: FeaturePrecision | None = None,
        scaler: Scaler | None = None,
        shared_scaling: bool = False,
        accounts: Accounts = "portfolio",
        reward: Reward = "log",
        shield: Shield | None = None,
        constraints: Constraints | None = None,
        volatility_half_life: int = 0,
        randomisation: Randomisation | None = None,
        flat_by_close: bool = False,
        resident_bars: int = 0,
        resident_blocks: int = 8,
        stagger: int | None = None,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        check_count("num_envs", num_envs)
        check_count("episode_length", episode_length)
        check_choice("reward", reward, REWARDS)
        check_choice("accounts", accounts, ("portfolio", "per_symbol"))
        check_choice("feature_precision", feature_precision or "float32", get_args(FeaturePrecision))
        check_count("volatility_half_life", volatility_half_life, low=0)
        if stagger is not None:
            check_count("stagger", stagger)
        prepared = self._prepared(bars, features, scaler, accounts, shared_scaling, feature_precision)
        self.prepared = prepared
        self.device = torch.device(device)
        self.num_envs = num_envs
        host = self.device if resident_bars == 0 else torch.device("cpu")
        if isinstance(prepared, MappedBars):
            market = prepared.market(config, host, dtype)
        else:
            market = build_market(prepared.panel, config, device=host, dtype=dtype)
        self.constraints = constraints or Constraints()
        self.constraints.check_fits(shielded=shield is not None, flat_by_close=flat_by_close)
        self.constraints.check_names(prepared.panel.symbols)
        own_bars = prepared.panel.rows_between(0, prepared.own_rows)
        self.volatility: VolatilityScaling | None = None
        if volatility_half_life:
            one_for_all = prepared.scaler.market_wide is not None
            self.volatility = VolatilityScaling.fit(own_bars, volatility_half_life, one_for_all=one_for_all)
        self.randomisation = randomisation if randomisation is not None and randomisation.varies_episodes else None
        holdable = holdable_assets(prepared.panel, prepared.available)
        self.whole_task = TradingTask(
            market=market,
            features=feature_tensor(prepared.features).to(host),
            feature_names=prepared.names,
            episode_length=episode_length,
            reward=reward,
            shield=shield,
            volatility_factors=volatility_factors(self.volatility, prepared.seen_panel, host),
            holdable=None if holdable is None else holdable.to(host),
            flat_rows=rows_before_session_ends(prepared.panel).to(host) if flat_by_close else None,
            limits=limits_of(self.constraints, market, self.device),
        )
        """The task on all bars."""
        self.starts = self._find_starts(prepared, episode_length).to(host)
        self.task, self.blocks = self.whole_task, None
        if resident_bars:
            self.blocks = self._blocks(resident_bars, resident_blocks, seed)
            self.task = self._task_of_blocks(self.blocks)
        self.stagger = stagger
        self.accounts = accounts
        self.generator = torch.Generator(self.device).manual_seed(seed)
        self.state: EpisodeState | None = None

    def sibling(self, seed: int) -> TradingEnv:
        """Other accounts on the same market, whose tensors both use; with a random stream of its own."""
        if self.blocks is not None:
            raise ConfigError("resident_bars: blocks are exchanged for one learner's accounts; set it to 0")
        made = copy.copy(self)
        made.generator = torch.Generator(self.device).manual_seed(seed)
        made.state = None
        return made

    @property
    def observation_size(self) -> int:
        return self.task.observation_size

    @property
    def asset_layout(self) -> AssetLayout | None:
        """Where each asset's numbers are in an observation; None where symbols have a scaling of their own."""
        return AssetLayout.of(self.prepared.scaler)

    @property
    def episode_length(self) -> int:
        """Bars in an episode that does not end early by liquidation."""
        return self.task.episode_length

    @property
    def action_space(self) -> Box:
        high = torch.ones(self.task.market.assets, device=self.device)
        shorts = self.task.market.config.allow_short and not self.constraints.long_only
        return Box(-high if shorts else torch.zeros_like(high), high)

    @staticmethod
    def _prepared(
        bars: Bars | PreparedBars | PreparedMarket | str | Path,
        features: Sequence[str] | None,
        scaler: Scaler | None,
        accounts: Accounts,
        shared_scaling: bool,
        precision: FeaturePrecision | None,
    ) -> PreparedBars:
        if isinstance(bars, str | Path):
            bars = open_market(bars)
        if isinstance(bars, PreparedMarket):
            bars = bars.train
        if isinstance(bars, MappedBars):
            check_same_setting(bars.folder, "accounts", bars.accounts, accounts)
            if features is not None or (scaler is not None and scaler.digest() != bars.scaler.digest()):
                raise ConfigError(f"features, scaler: {bars.folder} was prepared with its own; leave them out")
        if not isinstance(bars, PreparedBars):
            bars = in_precision(
                prepare(bars, features, scaler, accounts, shared_scaling=shared_scaling), precision or "float32"
            )
        held: FeaturePrecision = "bfloat16" if bars.features.dtype == np.uint16 else "float32"
        if precision not in (None, held):
            raise ConfigError(f"feature_precision: {precision!r} is requested; these bars were prepared in {held!r}")
        if shared_scaling and bars.scaler.market_wide is None:
            raise ConfigError(
                "shared_scaling: these bars, or the scaler, were prepared with a scaling of each symbol's own; prepare "
                "them with shared_scaling=True"
            )
        return bars

    @staticmethod
    def _find_starts(prepared: PreparedBars, episode_length: int) -> Tensor | RowRanges | MixedStarts:
        panel = prepared.panel
        starts: Tensor | RowRanges | MixedStarts
        if isinstance(prepared, MappedBars):
            starts = prepared.starts(episode_length)
        else:
            # All feeds of randomised bars have the episodes of the first copy, the clean bars.
            rows = prepared.rows if isinstance(prepared, RandomisedBars) else panel.rows
            begin, usable, segment = (
                torch.as_tensor(values[:rows]) for values in (panel.tradeable, prepared.usable, panel.segment)
            )
            starts = episode_starts(begin, usable, segment, episode_length)
            if isinstance(prepared, RandomisedBars):
                starts = MixedStarts.of(starts, prepared)
        if starts.numel() == 0:
            raise ConfigError(
                f"{', '.join(panel.symbols)}: no unbroken stretch of {episode_length + 1:,} bars with all features "
                f"defined in {panel.rows:,} rows ({int(panel.tradeable.sum()):,} tradeable, "
                f"{int(prepared.usable.sum()):,} with features). Shorten episode_length or provide more bars."
            )
        return starts

    def _blocks(self, resident_bars: int, resident_blocks: int, seed: int) -> BlockCache:
        """Every array of the task that has rows, in blocks."""
        task, starts = self.whole_task, self.starts
        if isinstance(starts, MixedStarts):
            raise ConfigError("resident_bars: randomised feeds keep all bars resident; set it to 0")
        rows = {
            "features": task.features,
            "volatility_factors": task.volatility_factors,
            "holdable": task.holdable,
            "flat_rows": task.flat_rows,
        }
        arrays = {name: (values, 0) for name, values in rows.items() if values is not None}
        layout = Layout.of(len(task.features), task.episode_length, resident_bars, resident_blocks)
        arrays["table"] = (task.market.table, 1)
        return BlockCache(arrays, layout, starts, accounts=self.num_envs, device=self.device, seed=seed)

    def _task_of_blocks(self, blocks: BlockCache) -> TradingTask:
        """The task on the buffers of the blocks, whose rows have neither times nor segments."""
        buffers, no_rows = blocks.buffers, self.prepared.panel.rows_between(0, 0)
        return replace(
            self.whole_task,
            market=market_of_table(no_rows, buffers["table"], self.whole_task.market.config),
            features=buffers["features"],
            volatility_factors=buffers.get("volatility_factors"),
            holdable=buffers.get("holdable"),
            flat_rows=buffers.get("flat_rows"),
        )

    def exchange(self, steps: int) -> None:
        """Exchange a block that no account needs any more; called before `steps` steps, outside of recorded graphs."""
        if self.blocks is not None and self.state is not None:
            self.blocks.exchange(steps, self.state.market.row)

    def reset(self, seed: int | None = None) -> Tensor:
        """Start N flat accounts at random rows and return their first observations, [N, O]."""
        if seed is not None:
            self.generator.manual_seed(seed)
            if self.blocks is not None:
                self.blocks.rewind()
        state = self._fresh_episodes(self.draw())
        if self.stagger is not None:
            phases = max(1, self.task.episode_length // self.stagger)
            age = torch.randint(phases, (self.num_envs,), generator=self.generator, device=self.device) * self.stagger
            state = replace(state, age=age)
        self.state = state
        return self.task.observe(state)

    def step(self, action: Tensor) -> Step:
        """Trade one bar in every account."""
        if self.state is None:
            raise ConfigError("TradingEnv.step: call reset() first")
        self.exchange(1)
        self.state, step = self.transition(self.state, action, self.draw())
        return step

    def transition(self, before: EpisodeState, action: Tensor, drawn: Tensor) -> tuple[EpisodeState, Step]:
        """One bar as a pure function of the state, the action and what `draw` returned."""
        task, hold = self.task, None
        target, shielded = task.decide(action, before)
        if self.randomisation is not None:
            hold = (Variation(*drawn).missed > 0).unsqueeze(1).expand_as(target)
        bar = trade_bar(task, before, target, hold)
        after, transition = bar.after, bar.transition
        terminated, truncated = transition.liquidated, after.age >= task.episode_length
        ended = truncated
        if bar.liquidates:
            truncated = truncated & ~terminated
            ended = terminated | truncated
        final_obs = bar.observation
        if self.randomisation is not None:
            after = _jumped(after, Variation(*drawn).jump.masked_fill(ended, -1))
            final_obs = task.observe(after)
        outcome = {
            "pnl": bar.gain.float(),
            "net": transition.net.float(),
            "drawdown": bar.drawdown.float(),
            "turnover": transition.turnover,
            "unfilled": transition.unfilled,
            "liquidated": transition.liquidated,
            "finite": bar.finite,
            "weights": after.market.weights,
            "shielded": shielded,
            **transition.costs,
        }
        obs = final_obs
        if may_hold_any(ended):
            after = where(ended, self._fresh_episodes(drawn), after)
            obs = task.observe(after)
        return after, Step(obs, bar.reward, terminated, truncated, final_obs, torch.ones_like(terminated), outcome)

    def restrict_starts(self, rows: Tensor) -> None:
        """Let episodes start only at these rows [S]; with randomised feeds, rows of the clean bars."""
        starts = self.starts
        self.starts = starts.only(rows) if isinstance(starts, MixedStarts) else rows.to(self.whole_task.features.device)
        if self.blocks is not None:
            self.blocks.restrict(rows)

    def draw(self) -> Tensor:
        """The random numbers of a step, at every step, so the random stream does not depend on past events.

        Rows to start at, [N], or with a randomisation a `Variation`, [4, N].
        """
        rows = self._random_starts()
        if self.randomisation is None:
            return rows
        return draw_variation(self.randomisation, rows, self._random_starts(), self.generator)

    def _random_starts(self) -> Tensor:
        if self.blocks is not None:
            return self.blocks.draw(self.num_envs, self.generator)
        draw = torch.randint(self.starts.shape[0], (self.num_envs,), generator=self.generator, device=self.device)
        return self.starts.index_select(0, draw)

    def _fresh_episodes(self, drawn: Tensor) -> EpisodeState:
        assets, dtype = self.task.market.assets, self.task.market.dtype
        if self.randomisation is None:
            return self.task.begin(open_accounts(drawn, assets, dtype))
        variation = Variation(*drawn)
        state = self.task.begin(open_accounts(variation.rows.long(), assets, dtype))
        return replace(state, cost_factor=variation.cost_factor.to(dtype))

    def state_dict(self) -> dict[str, Tensor]:
        """Accounts, cursors and the random generator: the complete state, to resume exactly."""
        if self.state is None:
            raise ConfigError("TradingEnv.state_dict: call reset() first")
        state = self.state
        varied = {} if state.cost_factor is None else {"cost_factor": state.cost_factor}
        row = state.market.row
        if self.blocks is not None:
            row, varied["slot"] = self.blocks.rows_of(row)
            varied["blocks"] = self.blocks.state_dict()
        return varied | {
            "row": row,
            "equity": state.market.equity,
            "weights": state.market.weights,
            "start_equity": state.start_equity,
            "peak_equity": state.peak_equity,
            "age": state.age,
            "generator": self.generator.get_state(),
        }

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore a saved state of an environment of the same size on the same bars."""
        if state["row"].shape[0] != self.num_envs:
            raise ConfigError(f"state: saved for {state['row'].shape[0]} environments, but there are {self.num_envs}")
        rows = self.whole_task.features.shape[0]
        if state["row"].numel() and not (int(state["row"].min()) >= 0 and int(state["row"].max()) < rows):
            raise ConfigError(f"state: rows {int(state['row'].min())} to {int(state['row'].max())} of {rows:,} bars")
        put = {name: value.to(self.device) for name, value in state.items() if name != "generator"}
        if self.blocks is not None:
            if "blocks" in state:
                self.blocks.load_state_dict(state["blocks"])
            put["row"] = self.blocks.rows_in_buffers(put["row"], put.get("slot"))
        market = MarketState(put["row"], put["equity"], put["weights"])
        if ("cost_factor" in put) != (self.randomisation is not None):
            raise ConfigError("state: saved with another env.randomisation")
        self.state = EpisodeState(market, put["start_equity"], put["peak_equity"], put["age"], put.get("cost_factor"))
        self.generator.set_state(state["generator"].cpu())

    def close(self) -> None:
        """End the thread that reads blocks ahead, where there is one."""
        if self.blocks is not None:
            self.blocks.close()


def _jumped(state: EpisodeState, rows: Tensor) -> EpisodeState:
    """Accounts that go on at these rows with what they hold, [N]; −1: where they are."""
    row = torch.where(rows >= 0, rows.long(), state.market.row)
    return replace(state, market=replace(state.market, row=row))

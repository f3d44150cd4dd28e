"""Faults of trajectories: the memory at the ends of episodes, restarts, fills, features and splits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from audit_faults import Injection, fault
from torch import Tensor

# --- memory ----------------------------------------------------------------------------------------------------------


@fault("T4", "an episode that starts clears the memory of all environments")
def _(inject: Injection) -> None:
    from tailguard.models.memory import clear

    inject.function(clear, lambda state, start: clear(state, start | start.any()))


@fault("T4", "an episode that starts keeps the memory of the one before")
def _(inject: Injection) -> None:
    from tailguard.models.memory import clear

    inject.function(clear, lambda state, start: state)  # noqa: ARG005


@fault("T4", "the critics' memory is not carried to the next rollout")
def _(inject: Injection) -> None:
    from tailguard.models.policy import ActorCritic

    evaluate = ActorCritic.evaluate

    def forgetful(self: Any, obs: Tensor, final_obs: Tensor, rows: Any, state: Any, start: Tensor) -> Any:
        found, following, _ = evaluate(self, obs, final_obs, rows, state, start)
        return found, following, tuple(state)

    inject.method(ActorCritic, "evaluate", forgetful)


@fault("T4", "a segment with resets is read in one piece")
def _(inject: Injection) -> None:
    from tailguard.models.memory import LSTMMemory

    inject.method(LSTMMemory, "_by_chunks", lambda self, x, state, start: self._fused(x, state))  # noqa: ARG005


# --- restarts --------------------------------------------------------------------------------------------------------


@fault("T5", "rows in which nothing happens have a loss")
def _(inject: Injection) -> None:
    from tailguard.algorithm.update import make_batch

    def all_rows(*given: Any) -> Any:
        batch = make_batch(*given)
        return replace(batch, weights=torch.ones_like(batch.weights))

    inject.function(make_batch, all_rows)


@fault("T5", "the step that only restarts is a transition")
def _(inject: Injection) -> None:
    from tailguard.envs.gym import GymnasiumEnv

    step = GymnasiumEnv.step

    def all_valid(self: Any, action: Tensor) -> Any:
        self._restarts[:] = False
        return step(self, action)

    inject.method(GymnasiumEnv, "step", all_valid)


@fault("T5", "the successor of a last step is the next episode's first observation")
def _(inject: Injection) -> None:
    from tailguard.envs.gym import GymnasiumEnv

    step = GymnasiumEnv.step

    def reset_observation(self: Any, action: Tensor) -> Any:
        found = step(self, action)
        return replace(found, final_obs=found.obs)

    inject.method(GymnasiumEnv, "step", reset_observation)


# --- fills -----------------------------------------------------------------------------------------------------------


@fault("T6", "an order earns the gap before its fill")
def _(inject: Injection) -> None:
    from tailguard.market.tables import bar_of

    def swapped(columns: Any, values: Any) -> Any:
        bar = bar_of(columns, values)
        return bar._replace(gap=bar.move, move=bar.gap)

    inject.function(bar_of, swapped)


@fault("T6", "a backtest reads the orders of the next row")
def _(inject: Injection) -> None:
    from tailguard.evaluate.deciders import ArrayDecider

    def early(self: Any, account: Any, window: Any, first: bool) -> list[float]:  # noqa: ARG001
        weights: list[float] = self.targets[min(account.row + 1, len(self.targets) - 1)].tolist()
        return weights

    inject.method(ArrayDecider, "__call__", early)


@fault("T6", "the environment fills a bar late")
def _(inject: Injection) -> None:
    from tailguard.envs.episodes import TradingTask

    decide, waiting = TradingTask.decide, []

    def late(self: Any, action: Tensor, state: Any) -> Any:
        waiting.append(action)
        return decide(self, waiting[-2] if len(waiting) > 1 else torch.zeros_like(action), state)

    inject.method(TradingTask, "decide", late)


# --- features --------------------------------------------------------------------------------------------------------


def change_feature(inject: Injection, name: str, expression: Any) -> None:
    """Compute a registered feature otherwise."""
    from tailguard.data.features import FEATURES

    entry = FEATURES[name]
    FEATURES[name] = replace(entry, build=expression)
    inject.callback(FEATURES.__setitem__, name, entry)


@fault("T7", "a feature knows the next close")
def _(inject: Injection) -> None:
    import polars as pl

    change_feature(inject, "return_24", lambda: pl.col("close").log().diff(24).shift(-1).fill_null(0.0))


@fault("T7", "a feature is scaled by the whole history")
def _(inject: Injection) -> None:
    import polars as pl

    change_feature(inject, "return_24", lambda: pl.col("close").log().diff(24) / pl.col("close").log().diff().std())


# --- splits ----------------------------------------------------------------------------------------------------------


@fault("T8", "the embargo is not kept")
def _(inject: Injection) -> None:
    from tailguard.data.windows import split_windows

    inject.function(split_windows, lambda count, gap=0, **sizes: split_windows(count, **sizes))  # noqa: ARG005


@fault("T8", "members train on the fold that they are judged on")
def _(inject: Injection) -> None:
    from tailguard.envs.trading import TradingEnv

    inject.method(TradingEnv, "restrict_starts", lambda self, rows: None)  # noqa: ARG005


@fault("T8", "the test begins with the last bar of the validation")
def _(inject: Injection) -> None:
    from tailguard.data.windows import split_windows

    def overlapping(count: int, **sizes: Any) -> Any:
        made = split_windows(count, **sizes)
        return replace(made, test=range(made.validation.stop - 1, count))

    inject.function(split_windows, overlapping)


@fault("T8", "a walk forward trains up to its test")
def _(inject: Injection) -> None:
    from tailguard.data.windows import walk_forward_windows

    inject.function(
        walk_forward_windows,
        lambda count, gap=0, **sizes: walk_forward_windows(count, gap=0, **sizes),  # noqa: ARG005
    )

"""Faults of pipelines and of learning: what looks ahead although features are clean, and what no probe can learn."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from audit_faults import Injection, fault
from audit_faults_bars import change_feature

# --- the pipeline as a black box -------------------------------------------------------------------------------------


@fault("U1", "features are scaled by the bars that are traded")
def _(inject: Injection) -> None:
    from tailguard.data.prepare import prepare

    def refitted(bars: Any, features: Any = None, scaler: Any = None, accounts: Any = "portfolio", **named: Any) -> Any:
        names = None if scaler is None else tuple(dict.fromkeys(name.split(":")[0] for name in scaler.names))
        return prepare(bars, features or names, None, accounts, **named)

    inject.function(prepare, refitted)


@fault("U1", "a feature is divided by its deviation over all bars")
def _(inject: Injection) -> None:
    import polars as pl

    change_feature(inject, "return_24", lambda: pl.col("close").log().diff(24) / pl.col("close").log().diff().std())


def _decide_on_the_next_row(inject: Injection) -> None:
    from tailguard.evaluate.deciders import AgentDecider

    read = AgentDecider.read

    def ahead(self: Any, task: Any, panel: Any) -> None:
        read(self, task, panel)
        self._features = self._features[[*range(1, len(self._features)), len(self._features) - 1]]

    inject.method(AgentDecider, "read", ahead)


@fault("U2", "the agent decides on the features of the next bar")
def _(inject: Injection) -> None:
    _decide_on_the_next_row(inject)


@fault("U2", "baselines see one bar too many")
def _(inject: Injection) -> None:
    from tailguard.evaluate import deciders

    moment = deciders.Moment

    def seen(**known: Any) -> Any:
        longer = {name: known[name].base[: known["row"] + 2] for name in ("open", "high", "low", "close", "volume")}
        return moment(**known | longer)

    inject.method(deciders, "Moment", seen)


@fault("U2", "weights are scaled by the volatility of the next bar")
def _(inject: Injection) -> None:
    import numpy as np

    from tailguard.envs import volatility

    known = volatility.ewma_volatility
    inject.function(known, lambda close, segment, half_life: np.roll(known(close, segment, half_life), -1, axis=0))


@fault("U3", "the agent decides on the features of the next bar")
def _(inject: Injection) -> None:
    _decide_on_the_next_row(inject)


@fault("U4", "a feature sums from the first bar on")
def _(inject: Injection) -> None:
    import polars as pl

    change_feature(inject, "return_24", lambda: pl.col("close").log().diff(24).cum_sum() / 100)


# --- probes ----------------------------------------------------------------------------------------------------------


@fault("B1", "critics have the gradient of half of the value's error, and an offset")
def _(inject: Injection) -> None:
    from tailguard.returns.gae import lambda_returns

    inject.function(lambda_returns, lambda advantages, values: 0.5 * (advantages + values) + 1)


@fault("B2", "the policy descends")
def _(inject: Injection) -> None:
    from tailguard.algorithm.losses import clipped_surrogate

    inject.function(
        clipped_surrogate, lambda log_ratio, advantages, clip: clipped_surrogate(log_ratio, -advantages, clip)
    )


@fault("B3", "the memory is cleared before every row")
def _(inject: Injection) -> None:
    from tailguard.models.memory import _clear

    inject.function(_clear, lambda state, start: _clear(state, torch.ones_like(start)))


@fault("B4", "the discount is applied once too often")
def _(inject: Injection) -> None:
    from tailguard.returns.gae import gae

    inject.function(gae, lambda r, v, n, terminated, truncated, gamma, lam: gae(
        r, v, n, terminated, truncated, gamma * gamma, lam))  # fmt: skip


@fault("B5", "the distribution learns the value instead of samples of the return")
def _(inject: Injection) -> None:
    from tailguard.algorithm import targets

    make = targets.ReturnTargets.estimate

    def without_spread(self: Any, rollout: Any, usable: bool) -> Any:
        scaled, estimates, fine = make(self, rollout, usable)
        samples = estimates.distribution_targets
        if samples is not None:
            value = estimates.views[0].value.unsqueeze(-1).expand_as(samples)
            estimates = replace(estimates, distribution_targets=value.clone())
        return scaled, estimates, fine

    inject.method(targets.ReturnTargets, "estimate", without_spread)

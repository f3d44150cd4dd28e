"""Faults of runs: what a checkpoint forgets, files that are believed, numbers that are not repeatable."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from audit_faults import Injection, fault

# --- kills -----------------------------------------------------------------------------------------------------------


@fault("R1", "the random stream of the actions is not restored")
def _(inject: Injection) -> None:
    from tailguard.algorithm.learner_state import GeneratorState

    inject.method(GeneratorState, "load_state_dict", lambda self, state: None)  # noqa: ARG005


@fault("R1", "episodes begin anew after a resume")
def _(inject: Injection) -> None:
    from tailguard.algorithm.saving import restore

    def fresh_episodes(agent: Any, parts: Any, where: str, *, episodes: bool) -> None:
        restore(agent, parts, where, episodes=episodes)
        agent.env.reset(seed=agent.seed)

    inject.function(restore, fresh_episodes)


@fault("R1", "a checkpoint is written in its place, file by file")
def _(inject: Injection) -> None:
    from tailguard import sealed

    @contextmanager
    def in_place(place: Path) -> Iterator[Path]:
        place.mkdir(parents=True)
        yield place

    inject.method(sealed, "new_folder", in_place)
    inject.method(sealed, "put_in_place", lambda partial, place: None)  # noqa: ARG005


# --- files -----------------------------------------------------------------------------------------------------------


@fault("R2", "hashes are not compared")
def _(inject: Injection) -> None:
    from tailguard.sealed import _digest

    inject.function(_digest, lambda data: "0")  # noqa: ARG005


@fault("R2", "weights that are not numbers are loaded")
def _(inject: Injection) -> None:
    from tailguard.algorithm.saving import _check_finite

    inject.function(_check_finite, lambda where, state: None)  # noqa: ARG005


# --- the same numbers ------------------------------------------------------------------------------------------------


@fault("R3", "minibatches are shuffled by the process's stream")
def _(inject: Injection) -> None:
    from tailguard.device_ops import shuffled

    inject.function(shuffled, lambda count, generator: torch.randperm(count))  # noqa: ARG005


@fault("R3", "the seed is a constant")
def _(inject: Injection) -> None:
    from tailguard.algorithm.learner import Learner

    init = Learner.__init__

    def constant(self: Any, *given: Any, **named: Any) -> None:
        init(self, *given, **named | {"seed": 0})

    inject.method(Learner, "__init__", constant)


@fault("R3", "plain numbers are charged without the spread")
def _(inject: Injection) -> None:
    from tailguard.market.serial import SerialAccount

    read = SerialAccount.read

    def without_spread(self: Any, market: Any) -> None:
        read(self, market)
        self._order_costs = self._order_costs[:1]

    inject.method(SerialAccount, "read", without_spread)


# --- tests -----------------------------------------------------------------------------------------------------------


@fault("R3", "the slopes of a bar in NumPy are a hundredth too small")
def _(inject: Injection) -> None:
    from tailguard.market.host_step import slopes_before

    inject.function(slopes_before, lambda *given: tuple(0.99 * each for each in slopes_before(*given)))


@fault("R3", "of a window's rows only the first one moves the weights")
def _(inject: Injection) -> None:
    from tailguard.models.policy_row import _Layers

    def last_alone(self: Any, slopes: Any) -> None:
        self.sums = None
        add(self, slopes)

    add = _Layers.add
    inject.method(_Layers, "add", last_alone)


@fault("R4", "minibatches are not shuffled in tests")
def _(inject: Injection) -> None:
    from tailguard.device_ops import shuffled

    def ordered_in_tests(count: int, generator: Any) -> Any:
        drawn = shuffled(count, generator)
        return torch.arange(count) if "PYTEST_CURRENT_TEST" in os.environ else drawn

    inject.function(shuffled, ordered_in_tests)


# --- the evidence of a run -------------------------------------------------------------------------------------------


@fault("E2", "costs are a thousandth higher than when the run was recorded")
def _(inject: Injection) -> None:
    from tailguard.market import host_step
    from tailguard.market.costs import charge

    inject.method(host_step, "MOST_NUMBERS", 0)
    inject.function(charge, lambda *given: {kind: 1.001 * cost for kind, cost in charge(*given).items()})


@fault("E3", "the run's settings switch all costs off")
def _(inject: Injection) -> None:
    from tailguard.experiment.trained_run import TrainedRun

    free = {"fee": 0.0, "half_spread": 0.0, "impact": 0.0, "funding_rate": 0.0, "observed_funding": False}

    def without_costs(self: Any) -> Any:
        config = self.__dict__["config"]
        return replace(config, market=replace(config.market, **free))

    inject.method(TrainedRun, "config", property(without_costs))


@fault("E4", "checkpoints hold another evaluation than the record")
def _(inject: Injection) -> None:
    from tailguard.runs.checkpoint import CheckpointStore

    evaluation = CheckpointStore.evaluation

    def doubled(self: Any, step: int) -> Any:
        found = evaluation(self, step)
        return None if found is None else replace(found, growth=2 * found.growth)

    inject.method(CheckpointStore, "evaluation", doubled)


@fault("E7", "features are computed otherwise than in the training")
def _(inject: Injection) -> None:
    from tailguard.data.scaling import Scaler

    transform = Scaler.transform
    inject.method(Scaler, "transform", lambda self, *given: transform(self, *given) * np.float32(1.0001))

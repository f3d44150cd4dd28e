"""Schedules, the entropy coefficient under scripted series, and KL control."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import linregress

from tailguard.algorithm.schedules import (
    AdaptiveKL,
    EntropySchedule,
    EntropyState,
    KLStopper,
    KLStopState,
    Schedule,
    is_plateau,
)
from tailguard.errors import ConfigError

# --- schedules of progress -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (0.3, [0.3, 0.3, 0.3, 0.3]),
        ("3e-4", [3e-4, 3e-4, 3e-4, 3e-4]),
        ("linear:1:0.2", [1.0, 0.8, 0.6, 0.2]),
        (["linear", "3e-4", 0], [3e-4, 2.25e-4, 1.5e-4, 0.0]),
        ("cosine:1:0", [1.0, 0.5 * (1 + math.sqrt(0.5)), 0.5, 0.0]),
        (("exponential", 1.0, 0.0001), [1.0, 0.1, 0.01, 0.0001]),
        ("linear:0:2", [0.0, 0.5, 1.0, 2.0]),
    ],
)
def test_schedule_values(spec: float | str | list[str | float], expected: list[float]) -> None:
    schedule = Schedule.parse(spec)
    assert [schedule(progress) for progress in (0.0, 0.25, 0.5, 1.0)] == pytest.approx(expected)


def test_schedule_holds_its_floor_and_its_ends_beyond_progress_0_and_1() -> None:
    schedule = Schedule.parse("linear:1:0", floor=0.3)
    assert [schedule(progress) for progress in (-1.0, 0.5, 0.8, 1.0, 7.0)] == [1.0, 0.5, 0.3, 0.3, 0.3]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("linaer:1:0", "schedule 'linaer'; choose one of constant, linear"),
        ("linear:1", "kind:start:end"),
        ("linear:one:0", "kind:start:end"),
        ("exponential:1:0", "must be positive"),
        ("constant:1:2", "differ"),
        (math.nan, "must be finite"),
    ],
)
def test_wrong_schedules_are_refused(spec: float | str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Schedule.parse(spec)


# --- entropy coefficient ---------------------------------------------------------------------------------------------


@given(st.lists(st.floats(-100, 100), min_size=3, max_size=30))
def test_plateau_is_a_slope_within_two_standard_errors(series: list[float]) -> None:
    fit = linregress(range(len(series)), series)
    margin = 2 * fit.stderr - abs(fit.slope)
    drift_margin = abs(fit.slope) * (len(series) - 1) - 0.01 * np.abs(series).mean()
    if abs(margin) > 1e-9 and abs(drift_margin) > 1e-9:
        assert is_plateau(series, tolerance=0.01) == (margin > 0 or drift_margin < 0)


def test_a_creeping_noise_free_series_is_a_plateau_and_a_falling_one_is_not() -> None:
    falling = [1.4 * 0.95**step for step in range(10)]
    creeping = [0.5 + 0.001 * 0.9**step for step in range(10)]
    assert not is_plateau(falling, tolerance=0.01)
    assert is_plateau(creeping, tolerance=0.01)
    assert is_plateau([2.0] * 10, tolerance=0.0)


def run(schedule: EntropySchedule, series: list[float], updates: int) -> tuple[list[float], EntropyState]:
    state, coefficients = EntropyState(), []
    for update, value in enumerate(series):
        state = schedule.update(state, value)
        coefficients.append(schedule.coefficient(state, update / updates))
    return coefficients, state


def test_entropy_coefficient_decays_on_schedule_while_the_series_moves() -> None:
    schedule = EntropySchedule(Schedule.parse("linear:0.1:0"), floor=0.02, window=5, boost=3.0)
    coefficients, state = run(schedule, [1.4 - 0.1 * update for update in range(11)], updates=10)
    assert coefficients == pytest.approx([0.1, 0.09, 0.08, 0.07, 0.06, 0.05, 0.04, 0.03, 0.02, 0.02, 0.02])
    assert state.plateaus == 0


def test_a_plateau_lifts_the_coefficient_and_the_schedule_takes_it_back() -> None:
    """Entropy falls and then stands still at 0.9 from update 4 on, and the window is 5 updates. The window that ends at
    update 6 still falls (slope −0.05, standard error 0.015), the one at update 7 no longer does (−0.02, 0.012): there
    the coefficient is tripled, and the extra fades by a fifth an update while the decay goes on.
    """
    schedule = EntropySchedule(Schedule.parse("linear:0.2:0"), window=5, boost=3.0)
    series = [1.3, 1.2, 1.1, 1.0] + [0.9] * 5 + [0.9 - 0.1 * step for step in range(1, 8)]
    coefficients, state = run(schedule, series, updates=20)
    decay = [0.2 * (1 - update / 20) for update in range(16)]
    factor = [1.0] * 7 + [3.0, 2.6, 2.2, 1.8, 1.4] + [1.0] * 4
    assert coefficients == pytest.approx([d * f for d, f in zip(decay, factor, strict=True)])
    assert state.plateaus == 1


def test_a_lasting_plateau_boosts_again_only_after_a_full_window_and_never_breaks_the_floor() -> None:
    schedule = EntropySchedule(Schedule.parse("exponential:0.1:1e-6"), floor=0.01, window=4, boost=2.0)
    coefficients, state = run(schedule, [1.0] * 21, updates=20)
    assert state.plateaus == 5
    assert min(coefficients) == 0.01
    assert coefficients[-1] == 0.01
    decay = [0.1 * 1e-5 ** (update / 20) for update in range(21)]
    factor = [1, 1, 1] + [2, 1.75, 1.5, 1.25] * 4 + [2, 1.75]
    assert coefficients == pytest.approx([max(d * f, 0.01) for d, f in zip(decay, factor, strict=True)])


def test_detection_off_is_the_plain_decay() -> None:
    schedule = EntropySchedule(Schedule.parse("linear:0.1:0"))
    coefficients, state = run(schedule, [1.0] * 5, updates=4)
    assert coefficients == pytest.approx([0.1, 0.075, 0.05, 0.025, 0.0])
    assert state == EntropyState()


def test_a_series_without_value_yet_is_no_observation() -> None:
    schedule = EntropySchedule(Schedule.parse(0.1), window=3)
    _, state = run(schedule, [math.nan, 1.0, math.nan, 1.0], updates=4)
    assert state.history == (1.0, 1.0)
    assert state.plateaus == 0
    _, state = run(schedule, [1.0] * 3 + [math.nan] * 3 + [1.0] * 2, updates=8)
    assert (state.plateaus, state.boosted) == (1, 0)
    assert schedule.update(state, 1.0).plateaus == 2


def test_entropy_state_survives_json_in_the_middle_of_a_boost() -> None:
    schedule = EntropySchedule(Schedule.parse("linear:0.1:0"), window=4, boost=2.0)
    series = [1.0, 0.5, 0.5, 0.5, 0.5, 0.5, 0.4, 0.3, 0.3, 0.3, 0.3, 0.2]
    _, uninterrupted = run(schedule, series, updates=12)
    _, state = run(schedule, series[:6], updates=12)
    assert state.boosted > 0
    state = EntropyState.from_dict(json.loads(json.dumps(state.to_dict())))
    for value in series[6:]:
        state = schedule.update(state, value)
    assert state == uninterrupted


def test_wrong_entropy_settings_are_refused() -> None:
    decay = Schedule.parse(0.1)
    with pytest.raises(ConfigError, match="floor -1"):
        EntropySchedule(decay, floor=-1)
    with pytest.raises(ConfigError, match="window 2"):
        EntropySchedule(decay, window=2)
    with pytest.raises(ConfigError, match=r"boost 0\.5"):
        EntropySchedule(decay, boost=0.5)


# --- KL control ------------------------------------------------------------------------------------------------------


def test_adaptive_kl_doubles_above_the_band_halves_below_and_keeps_its_bounds() -> None:
    rule = AdaptiveKL(target=0.01, minimum=0.1, maximum=1.0)
    assert rule.update(0.4, 0.0151) == 0.8
    assert rule.update(0.4, 0.0149) == 0.4
    assert rule.update(0.4, 0.0067) == 0.4
    assert rule.update(0.4, 0.0066) == 0.2
    assert rule.update(0.8, 1.0) == 1.0
    assert rule.update(0.15, 0.0) == 0.1


def test_adaptive_kl_settles_at_its_target() -> None:
    """A policy whose KL is 0.02 / coefficient: the coefficient must end where the KL is within the band."""
    rule, coefficient = AdaptiveKL(target=0.01), 0.01
    for _ in range(30):
        coefficient = rule.update(coefficient, 0.02 / coefficient)
    assert 0.01 / 1.5 <= 0.02 / coefficient <= 0.01 * 1.5


def test_adaptive_kl_refuses_a_kl_that_is_not_a_number() -> None:
    with pytest.raises(ValueError, match="KL is nan"):
        AdaptiveKL().update(0.1, math.nan)
    with pytest.raises(ConfigError, match="minimum"):
        AdaptiveKL(minimum=0.0)


def stops(stopper: KLStopper, series: list[float]) -> list[bool]:
    state, flags = KLStopState.start(dtype=torch.float64), []
    for value in series:
        state = stopper.update(state, torch.tensor(value, dtype=torch.float64))
        flags.append(bool(state.stopped))
    return flags


def test_stopper_averages_out_one_high_minibatch_but_not_two() -> None:
    """Averages with decay ½: (0.01), (0.01 + 2·0.018)/3 = 0.0153, then (0.01 + 2·0.018 + 4·0.018)/7 = 0.0169."""
    stopper = KLStopper(average_limit=0.016, hard_limit=0.05, decay=0.5)
    assert stops(stopper, [0.01, 0.018, 0.018, 0.0]) == [False, False, True, True]


def test_stopper_average_has_no_start_up_bias() -> None:
    state = KLStopState.start(dtype=torch.float64)
    for value in (0.01, 0.018, 0.018):
        state = KLStopper().update(state, torch.tensor(value, dtype=torch.float64))
    assert state.average.item() == pytest.approx((0.01 + 2 * 0.018 + 4 * 0.018) / 7)
    assert stops(KLStopper(average_limit=0.016), [0.0161]) == [True]


@pytest.mark.parametrize("shock", [0.051, math.inf, math.nan])
def test_stopper_stops_at_once_beyond_the_hard_limit_or_without_a_number(shock: float) -> None:
    stopper = KLStopper(average_limit=0.05, hard_limit=0.05, decay=0.99)
    assert stops(stopper, [0.001] * 5 + [shock, 0.0]) == [False] * 5 + [True, True]


def test_stopper_state_round_trips_and_decides_without_host_sync() -> None:
    stopper = KLStopper()

    def step(
        total: torch.Tensor, weight: torch.Tensor, stopped: torch.Tensor, kl: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        return stopper.update(KLStopState(total, weight, stopped), kl).to_dict()

    compiled = torch.compile(step, backend="eager", fullgraph=True)
    state = KLStopState.start()
    data = compiled(state.total, state.weight, state.stopped, torch.tensor(0.2))
    restored = KLStopState.from_dict(data)
    assert bool(restored.stopped)
    assert restored.average.item() == pytest.approx(0.2)


def test_wrong_stopper_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="average_limit"):
        KLStopper(average_limit=0.2, hard_limit=0.1)

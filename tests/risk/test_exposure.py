"""The exposure that keeps a budget: closed forms of the tail, its bound, and the share of records in which it holds."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np
import pytest
import torch
from torch import Tensor

from tailguard.errors import ConfigError
from tailguard.risk.cvar import cvar_from_samples
from tailguard.risk.exposure import MOST_EXPOSURE, Exposure, calibrate_exposure, cvar_bound

NORMAL_ES = 2.0627128
"""ES of a standard normal at 5 %: φ(Φ⁻¹(0.05)) / 0.05."""


def normal(count: int, seed: int) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_the_factor_is_in_proportion_where_losses_are() -> None:
    outcomes = 0.002 + 0.01 * normal(4_000, 0)
    found = calibrate_exposure(lambda m: m * outcomes, -0.01, alpha=0.05)
    bound = cvar_bound(outcomes, 0.05, 0.9, block=2)
    assert found.factor == pytest.approx(0.01 / -bound, rel=0.01)
    assert -0.01 <= found.bound <= -0.0099
    assert found.uncalibrated == pytest.approx(0.002 - 0.01 * NORMAL_ES, rel=0.05)
    assert found.cvar == pytest.approx(found.factor * found.uncalibrated)
    assert found.tail_episodes == pytest.approx(200)


def test_costs_that_grow_faster_than_exposure_are_found_too() -> None:
    outcomes = 0.01 * normal(2_000, 1)

    def traded(m: float) -> Tensor:
        return m * outcomes - 0.02 * m**2

    found = calibrate_exposure(traded, -0.02, alpha=0.05)
    assert -0.02 <= cvar_bound(traded(found.factor), 0.05, 0.9, block=2) <= -0.0198
    assert cvar_bound(traded(1.02 * found.factor), 0.05, 0.9, block=2) < -0.02  # no larger factor would do


def test_exposure_grows_where_the_budget_is_not_used_up_but_not_without_end() -> None:
    outcomes = 0.01 * normal(1_000, 2)
    assert 1.3 < calibrate_exposure(lambda m: m * outcomes, -0.03, alpha=0.05).factor < 1.5
    assert calibrate_exposure(lambda m: m * outcomes, -0.5, alpha=0.05).factor == MOST_EXPOSURE
    flat = calibrate_exposure(lambda m: 0 * m * outcomes, -0.02, alpha=0.05)
    assert (flat.factor, flat.bound) == (MOST_EXPOSURE, 0.0)


def test_a_tail_that_no_factor_keeps_ends_at_no_exposure() -> None:
    found = calibrate_exposure(lambda m: -0.05 - m * torch.ones(50), -0.02, alpha=0.05)
    assert (found.factor, found.cvar, found.bound) == (0.0, 0.0, 0.0)
    assert found.uncalibrated == pytest.approx(-1.05)


def test_the_bound_is_the_quantile_of_the_resampled_tails() -> None:
    """Against NumPy's own loop over circular blocks; and blocks of one are the plain bootstrap."""
    outcomes = normal(90, 3)
    draw = np.random.default_rng(0)
    tails = []
    for _ in range(4_000):
        first = draw.integers(0, 90, 23)
        sample = np.sort(outcomes.numpy()[(first[:, None] + np.arange(4)).ravel()[:90] % 90])
        tails.append((sample[:4].sum() + 0.5 * sample[4]) / 4.5)
    assert cvar_bound(outcomes, 0.05, 0.9, block=4, resamples=4_000) == pytest.approx(np.quantile(tails, 0.1), rel=0.02)


def test_rows_with_several_outcomes_stay_together() -> None:
    rows = torch.arange(40, dtype=torch.float64).reshape(20, 2) - 30
    same = rows.flatten()
    whole = cvar_bound(rows, 0.5, 0.9, block=1, resamples=2_000)
    single = cvar_bound(same, 0.5, 0.9, block=1, resamples=2_000)
    assert whole < single  # twenty independent rows say less than forty independent numbers


def test_episodes_at_one_time_are_one_piece_of_evidence() -> None:
    """Four copies of a market bound the tail as one does, in whatever order, and count as one."""
    outcomes, times = 0.01 * normal(300, 6), torch.arange(300)
    one = calibrate_exposure(lambda m: m * outcomes, -0.01, alpha=0.05, overlap=2)
    order = torch.randperm(1_200, generator=torch.Generator().manual_seed(0))
    copies, at = outcomes.repeat(4)[order], times.repeat(4)[order]
    four = calibrate_exposure(lambda m: m * copies, -0.01, alpha=0.05, overlap=2, times=at)
    assert asdict(four) == pytest.approx(asdict(one), rel=1e-12)
    assert four.tail_episodes == pytest.approx(0.05 * 300 / 2)
    alone = calibrate_exposure(lambda m: m * copies, -0.01, alpha=0.05, overlap=2)
    assert alone.tail_episodes == pytest.approx(4 * four.tail_episodes)
    assert alone.factor > 1.05 * four.factor  # taken for evidence of its own, a copy narrows the bound


def test_times_may_hold_different_numbers_of_episodes() -> None:
    """A symbol that is listed later: against NumPy's own loop over blocks of two times with all of their episodes."""
    times = torch.cat([torch.arange(60), torch.arange(40, 60)])
    outcomes, draw, tails = normal(80, 7), np.random.default_rng(0), []
    for _ in range(4_000):
        drawn = ((draw.integers(0, 60, 30)[:, None] + np.arange(2)) % 60).ravel()
        sample = np.sort(np.concatenate([outcomes.numpy()[times.numpy() == time] for time in drawn]))
        share = 0.1 * len(sample)
        whole = int(share)
        tails.append((sample[:whole].sum() + (share - whole) * sample[whole]) / share)
    found = cvar_bound(outcomes, 0.1, 0.9, block=2, times=times, resamples=4_000)
    assert found == pytest.approx(np.quantile(tails, 0.1), rel=0.02)
    with pytest.raises(ConfigError, match="give one time for each"):
        cvar_bound(outcomes, 0.1, 0.9, block=2, times=times[:5])


def test_the_true_tail_is_inside_the_limit_as_often_as_it_says() -> None:
    """Independent normal episodes: at 90 % confidence the calibrated true tail breaks the limit in about one of ten."""
    inside = 0
    for seed in range(200):
        outcomes = 0.01 * normal(400, seed)
        found = calibrate_exposure(lambda m, drawn=outcomes: m * drawn, -0.01, alpha=0.05)
        inside += found.factor * 0.01 * NORMAL_ES <= 0.01
    assert 0.82 <= inside / 200 <= 0.96


def test_the_pivotal_bound_turns_the_resampled_ratio_round() -> None:
    """Estimate e, resampled tails t: e · e / q₉₀(t), at most 2e; a tail that gains has the quantile itself."""
    outcomes = 0.01 * normal(200, 3)
    generator, tails = torch.Generator().manual_seed(0), []
    for _ in range(50):
        first = torch.randint(200, (100, 1), generator=generator)
        tails.append(cvar_from_samples(outcomes[((first + torch.arange(2)) % 200).flatten()], 0.05))
    estimate, mild = float(cvar_from_samples(outcomes, 0.05)), float(torch.stack(tails).quantile(0.9))
    found = cvar_bound(outcomes, 0.05, 0.9, block=2, kind="pivotal", resamples=50)
    assert found == pytest.approx(estimate**2 / mild)
    assert found < cvar_bound(outcomes, 0.05, 0.9, block=2, resamples=50) < estimate
    rare = torch.cat([torch.full((99,), 0.01), torch.full((1,), -0.2)])
    assert cvar_bound(rare, 0.05, 0.9, block=1, kind="pivotal") == pytest.approx(2 * (-0.2 + 4 * 0.01) / 5)
    gains = outcomes + 1
    assert cvar_bound(gains, 0.05, 0.9, block=2, kind="pivotal") == cvar_bound(gains, 0.05, 0.9, block=2)


def test_with_few_episodes_only_the_pivotal_bound_holds_as_often_as_it_says() -> None:
    """146 independent normal episodes of mean 0.8 deviations, 7.3 of them in the tail, as a default run has."""
    truth = 0.8 - NORMAL_ES
    inside = {"percentile": 0, "pivotal": 0}
    for seed in range(150):
        outcomes = 0.8 + normal(146, 5_000 + seed)
        for kind in inside:
            inside[kind] += cvar_bound(outcomes, 0.05, 0.9, block=2, kind=kind, resamples=200) <= truth
    assert inside["percentile"] / 150 < 0.83
    assert 0.84 <= inside["pivotal"] / 150 <= 0.96


def test_blocks_are_needed_where_episodes_overlap() -> None:
    """Sums over eight overlapping parts: single draws take them for independent, and their bound is too tight."""
    inside = {1: 0, 16: 0}
    for seed in range(120):
        parts = normal(800 + 7, 1_000 + seed)
        outcomes = parts.unfold(0, 8, 1).sum(1) * 0.01 / 8**0.5
        for block in inside:
            bound = cvar_bound(outcomes, 0.05, 0.9, block=block, resamples=200)
            inside[block] += bound <= -0.01 * NORMAL_ES
    assert inside[16] / 120 > 0.78
    assert inside[1] < inside[16] - 10


def test_outcomes_that_cannot_be_judged_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least one held-out episode"):
        calibrate_exposure(lambda _: torch.zeros(0), -0.02, alpha=0.05)
    with pytest.raises(ConfigError, match="finite"):
        calibrate_exposure(lambda _: torch.tensor([0.0, torch.nan]), -0.02, alpha=0.05)
    with pytest.raises(ConfigError, match="limit"):
        calibrate_exposure(lambda _: torch.zeros(3), 0.0, alpha=0.05)
    with pytest.raises(ConfigError, match="level"):
        cvar_bound(torch.zeros(3), 0.05, 0.3, block=1)


def test_an_exposure_survives_its_description() -> None:
    found = calibrate_exposure(lambda m: m * 0.01 * normal(100, 4), -0.01, alpha=0.1)
    assert Exposure.from_dict(asdict(found)) == found
    with pytest.raises(ConfigError, match=r"exposure\.factor"):
        Exposure.from_dict(asdict(found) | {"factor": -1.0})

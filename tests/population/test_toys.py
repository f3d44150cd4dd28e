"""Populations on problems whose answer is known: the quadratic of the paper, and a learning rate in closed form."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from tailguard.population.ask_tell import PBT
from tailguard.population.executor import Hyper
from tailguard.population.lineage import Lineage, Round
from tailguard.population.options import PopulationSettings
from tailguard.population.pbt import Standing, decide
from tailguard.population.space import SearchSpace

State = tuple[float, float]
Train = Callable[[State, Hyper], tuple[State, float]]


def play(pbt: PBT, states: dict[int, State], train: Train, *, exploit: bool = True) -> PBT:
    """All rounds; every member goes on from its parent's state of the round before, without `exploit` from its own."""
    held, number = dict(states), pbt.round
    while (trial := pbt.ask()) is not None:
        if trial.round != number:
            held, number = dict(states), trial.round
        states[trial.member], score = train(held[trial.parent if exploit else trial.member], trial.hyper)
        pbt.tell(trial, score)
    return pbt


# --- the quadratic of Jaderberg et al. 2017, figure 2 -----------------------------------------------------------------


def quadratic(seed: int, rounds: int = 60, *, exploit: bool = True, explore: bool = True) -> PBT:
    """Two members maximise Q = 1.2 − θ₀² − θ₁² by the gradient of 1.2 − h₀·θ₀² − h₁·θ₁², with h = (0, 1) and (1, 0).

    Each gradient is blind to one parameter: a member alone cannot go beyond 1.2 − 0.9².
    """

    random = np.random.default_rng(seed)

    def train(theta: State, hyper: Hyper) -> tuple[State, float]:
        first, second = theta
        # A little noise, because a metric that tells nobody apart is an error.
        for noise in 0.01 * random.normal(size=(4, 2)):
            first -= 0.02 * float(hyper["h0"]) * (2 * first + noise[0])
            second -= 0.02 * float(hyper["h1"]) * (2 * second + noise[1])
        return (first, second), 1.2 - first**2 - second**2

    states: dict[int, State] = {0: (0.9, 0.9), 1: (0.9, 0.9)}
    space = SearchSpace.parse({"h0": {"linear": [0.0, 1.0]}, "h1": {"linear": [0.0, 1.0]}})
    settings = PopulationSettings(
        members=2,
        rounds=rounds,
        strategy="pbt" if exploit or explore else "random",
        fraction=0.5,
        explore="perturb",
        factors=(0.8, 1.25) if explore else (1.0,),
        seed=seed,
    )
    standings = []
    for member, hyper in enumerate(({"h0": 0.0, "h1": 1.0}, {"h0": 1.0, "h1": 0.0})):
        states[member], score = train(states[member], hyper)
        standings.append(Standing(member, hyper, score, 1))
    begun = Round(1, 4, tuple(standings), decide(settings, space, 1, standings))
    return play(PBT(space, lineage=Lineage(settings, space, (begun,))), states, train, exploit=exploit)


def test_members_that_are_each_blind_to_a_parameter_find_the_optimum_together() -> None:
    for seed in range(5):
        alone, together = quadratic(seed, exploit=False, explore=False), quadratic(seed)
        assert alone.best[0].score == pytest.approx(1.2 - 0.9**2, abs=1e-3)
        assert together.best[0].score == pytest.approx(1.2, abs=0.02)


def test_exploit_alone_and_explore_alone_come_near_the_optimum_and_both_together_sooner() -> None:
    """The four panels of the figure: each half of the method helps, and the whole is ahead of either."""
    alone = [
        [quadratic(seed, exploit=exploit, explore=not exploit).best[0].score for seed in range(8)]
        for exploit in (True, False)
    ]
    assert all(1.15 < score < 1.2001 for scores in alone for score in scores)
    for seed in range(8):
        together = quadratic(seed, 30).best[0].score
        assert together > 1.19
        for exploit in (True, False):
            assert together > quadratic(seed, 30, exploit=exploit, explore=not exploit).best[0].score


# --- a learning rate in closed form -----------------------------------------------------------------------------------


def tracking_error(rate: float, drift: float, noise: float) -> float:
    """Mean squared error of x += rate·(observed − x) after each step, where what is tracked makes a random walk."""
    keep = (1 - rate) ** 2
    return (keep * drift + rate**2 * noise) / (1 - keep)


@pytest.mark.parametrize("drift", [0.01, 0.1])
def test_the_best_learning_rate_is_found_from_a_bad_start(drift: float) -> None:
    """The state is tracked through noise of variance 1: the best rate is the gain of the stationary Kalman filter."""
    variance = (drift + math.sqrt(drift**2 + 4 * drift)) / 2
    best = variance / (variance + 1)
    assert tracking_error(best, drift, 1.0) == pytest.approx(variance / (variance + 1))
    rates = []
    for seed in range(3):
        random = np.random.default_rng(seed)

        def train(state: State, hyper: Hyper, random: np.random.Generator = random) -> tuple[State, float]:
            (guess, truth), rate, error = state, float(hyper["rate"]), 0.0
            for walk, measured in random.normal(size=(200, 2)):
                truth += math.sqrt(drift) * walk
                guess += rate * (truth + measured - guess)
                error += (guess - truth) ** 2
            return (guess, truth), -error / 200

        space = SearchSpace.parse({"rate": {"log": [1e-5, 1.0], "start": 1e-5}})
        settings = PopulationSettings(members=16, rounds=40, seed=seed)
        pbt = play(PBT(space, settings), dict.fromkeys(range(16), (0.0, 0.0)), train)
        last = [standing.hyper for finished in pbt.lineage.rounds[-10:] for standing in finished.standings]
        rates.append(np.median([math.log(float(hyper["rate"])) for hyper in last]))
    found = math.exp(float(np.mean(rates)))
    assert best / 1.5 < found < best * 1.5
    # Within 5 % of the smallest error: it is flat there, so scores of single rounds cannot tell rates apart.
    assert tracking_error(found, drift, 1.0) < 1.05 * tracking_error(best, drift, 1.0)

"""Alarms: silent failures are reported once, with a remedy, and counted from then on.

A rule looks at an iteration's figures, plain numbers by now, and returns a sentence if they are bad. It speaks up
after so many bad iterations in a row. A new alarm is one entry in `RULES` and one section in docs/alarms.md.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Figures = Mapping[str, float]
Past = Mapping[str, Sequence[float]]

REMEMBERED = ("train/grad_norm",)
"""Figures whose recent past a rule looks at."""
FEW_TAIL_OUTCOMES = 5
"""Tail outcomes an update sees on average, below which its gradient is mostly noise: the error of the tail's share
alone is then 45 % or more."""
MEMORY = 20
"""Iterations of it that are kept."""


@dataclass(frozen=True)
class Alarm:
    """Something that went wrong for the first time."""

    name: str
    step: int
    what: str
    usually: str

    def __str__(self) -> str:
        anchor = self.name.replace("_", "-")
        return (
            f"alarm {self.name} at {self.step:,} steps: {self.what}\n  Usually: {self.usually} See docs/alarms#{anchor}"
        )


@dataclass(frozen=True)
class Rule:
    """One way in which training goes wrong."""

    name: str
    check: Callable[[Figures, Past], str | None]
    """A sentence with the figures in it if they are bad."""
    usually: str
    """Common causes and what to do."""
    patience: int = 5
    """Bad iterations in a row before it counts."""
    after: int = 0
    """Iterations at the start of training that do not count."""


def _value(figures: Figures, name: str) -> float:
    return figures.get(name, math.nan)


def learning_stopped(figures: Figures, past: Past) -> str | None:  # noqa: ARG001 (see Rule)
    """An iteration without a single optimiser step."""
    if _value(figures, "train/n_updates") > 0:
        return None
    return "no update was made in this iteration and in those before it: the agent has stopped learning."


def critic_vanished(figures: Figures, past: Past) -> str | None:  # noqa: ARG001
    """A critic whose gradient is a millionth of the whole."""
    whole = _value(figures, "train/grad_norm")
    for name, norm in figures.items():
        if name.startswith("critic/grad_norm_") and norm < 1e-6 * whole:
            number = name.removeprefix("critic/grad_norm_")
            return f"critic {number}'s gradient norm is {norm:.1e} of {whole:.1e} in total. It has stopped learning."
    return None


def critic_imbalanced(figures: Figures, past: Past) -> str | None:  # noqa: ARG001
    """Twin critics whose gradients differ a hundredfold."""
    ratio = _value(figures, "critic/grad_ratio")
    if not ratio > 100:
        return None
    one, two = (_value(figures, f"critic/grad_norm_{number}") for number in (1, 2))
    return f"the critics' gradient norms are {one:.1e} and {two:.1e}, {ratio:.0f} times apart; they act as one."


def lstm_dead(figures: Figures, past: Past) -> str | None:  # noqa: ARG001
    """An LSTM that says the same to everything, or that no gradient reaches."""
    whole = _value(figures, "train/grad_norm")
    for name, value in figures.items():
        layer = name.removeprefix("lstm/").removesuffix("_hidden_std")
        if name.startswith("lstm/") and name.endswith("_hidden_std") and value < 1e-4:
            return f"the outputs of LSTM layer {layer} have a standard deviation of {value:.1e}: no information."
        layer = name.removeprefix("lstm/").removesuffix("_grad_norm")
        if name.startswith("lstm/") and name.endswith("_grad_norm") and value < 1e-7 * whole:
            return f"the gradient norm of LSTM layer {layer} is {value:.1e} of {whole:.1e} in total: it does not learn."
    return None


def lstm_saturated(figures: Figures, past: Past) -> str | None:  # noqa: ARG001
    """An LSTM with half of its outputs at their limits."""
    for name, value in figures.items():
        if name.startswith("lstm/") and name.endswith("_saturated") and value > 0.5:
            layer = name.removeprefix("lstm/").removesuffix("_saturated")
            return f"{100 * value:.0f} % of the outputs of LSTM layer {layer} are saturated, where gradients vanish."
    return None


def ratio_clamped(figures: Figures, past: Past) -> str | None:  # noqa: ARG001
    """Log-ratios beyond the guard."""
    share = _value(figures, "train/log_ratio_clamped")
    return f"{100 * share:.1f} % of the log-ratios were clamped." if share > 0.01 else None


def entropy_collapsed(figures: Figures, past: Past) -> str | None:  # noqa: ARG001
    """A policy that no longer explores."""
    if not _value(figures, "train/entropy_margin") < 0:
        return None
    entropy = _value(figures, "train/entropy")
    return f"the policy's entropy is down to {entropy:.2f}: its actions are practically deterministic."


def constant_advantages(figures: Figures, past: Past) -> str | None:  # noqa: ARG001
    """Advantages without any signal."""
    if not _value(figures, "train/constant_advantages") > 0:
        return None
    return "all advantages of a rollout were equal, so the policy had nothing to learn from it."


def gradient_exploding(figures: Figures, past: Past) -> str | None:
    """A gradient a hundred times longer than it used to be."""
    before = past.get("train/grad_norm", ())
    norm = _value(figures, "train/grad_norm")
    usual = statistics.median(before) if len(before) >= 5 else math.inf
    return f"the gradient norm is {norm:.1e}, its median so far {usual:.1e}." if norm > 100 * usual else None


def gradient_through_time(figures: Figures, past: Past) -> str | None:  # noqa: ARG001
    """A gradient that grows a thousandfold on its way back through a window."""
    ratio = _value(figures, "pathwise/slope_ratio")
    if not ratio > 1000:
        return None
    return f"the gradient grows {ratio:,.0f} times on its way back through a window of the market."


def policy_saturated(figures: Figures, past: Past) -> str | None:  # noqa: ARG001
    """Nearly all actions at their bounds, where tanh has no slope."""
    share = _value(figures, "pathwise/saturated")
    if not share > 0.99:
        return None
    return f"{100 * share:.1f} % of the actions are at their bounds, where the policy gets no gradient."


def quantile_crossing(figures: Figures, past: Past) -> str | None:  # noqa: ARG001
    """Quantiles out of order, and by more than a return that hardly varies explains."""
    share, depth = _value(figures, "critic/quantile_crossing"), _value(figures, "critic/quantile_crossing_depth")
    if not (share > 0.1 and depth > 0.1):
        return None
    return (
        f"{100 * share:.0f} % of neighbouring return quantiles stand in the wrong order, "
        f"by {depth:.2f} standard deviations of the return in all."
    )


def normaliser_drift(figures: Figures, past: Past) -> str | None:  # noqa: ARG001
    """Statistics that one rollout moved far."""
    shift = _value(figures, "data/observation_drift")
    if shift > 0.5:
        return f"one rollout moved the mean of an observation by {shift:.2f} standard deviations."
    ratio = _value(figures, "critic/return_std_drift")
    if ratio > 1.5 or ratio < 1 / 1.5:
        return f"one rollout changed the return's standard deviation by a factor of {ratio:.2f}."
    return None


def never_trades(figures: Figures, past: Past) -> str | None:  # noqa: ARG001
    """An agent that does nothing."""
    turnover = _value(figures, "data/turnover")
    return f"turnover is {turnover:.1e} of equity a bar: the agent does not trade." if turnover < 1e-6 else None


def always_flips(figures: Figures, past: Past) -> str | None:  # noqa: ARG001
    """An agent that turns its position round at every bar."""
    share = _value(figures, "data/flips")
    return f"positions change their sign at {100 * share:.0f} % of the bars." if share > 0.8 else None


def _broken_at_cap(figures: Figures) -> str | None:
    """λ at its cap and the limit broken by 5 % and by two standard errors of the measurement, in words."""
    tail, mean, limit, error = (
        100 * _value(figures, f"risk/{name}") for name in ("cvar_realised", "mean_realised", "limit", "cvar_error")
    )
    broken = _value(figures, "risk/violation") > 0.05 and limit - tail > 2 * error
    if not (_value(figures, "risk/at_cap") > 0 and broken):
        return None
    return (
        f"the price of risk λ is at its cap of {_value(figures, 'risk/lambda'):g}, and the last outcomes' CVaR is "
        f"{tail:.2f} ± {error:.2f} % (mean {mean:+.2f} %) against a limit of {limit:.2f} %."
    )


def risk_infeasible(figures: Figures, past: Past) -> str | None:  # noqa: ARG001
    """A price of risk that has nowhere to go, and a limit that is broken all the same."""
    what = _broken_at_cap(figures)
    if what is None or _value(figures, "risk/tail_outcomes") < FEW_TAIL_OUTCOMES:
        return None
    return f"{what} So far the limit cannot be met."


def tail_undersampled(figures: Figures, past: Past) -> str | None:  # noqa: ARG001
    """The same, with updates that see too little of the tail to tell whether the limit can be met."""
    what, seen = _broken_at_cap(figures), _value(figures, "risk/tail_outcomes")
    if what is None or not seen < FEW_TAIL_OUTCOMES:
        return None
    return f"{what} An update sees {seen:.2g} outcomes of the tail: too few to say that the limit cannot be met."


def tail_mispredicted(figures: Figures, past: Past) -> str | None:  # noqa: ARG001
    """A critic whose tail is not the one that comes."""
    share, level = _value(figures, "risk/tail_share"), _value(figures, "risk/alpha")
    if share > 3 * level and share > 0.1:
        return (
            f"{100 * share:.0f} % of the returns fell below what the critic called the worst {100 * level:g} %: "
            "the tail is heavier than predicted."
        )
    limit = abs(_value(figures, "risk/limit"))
    realised, predicted = _value(figures, "risk/cvar_realised"), _value(figures, "risk/cvar_predicted")
    if abs(realised - predicted) > 0.5 * max(limit, abs(realised)) and _value(figures, "risk/window_filled") == 1:
        return f"the cost critic predicts a CVaR of {100 * predicted:.2f} %; it turned out as {100 * realised:.2f} %."
    return None


RULES: tuple[Rule, ...] = (
    Rule(
        "learning_stopped",
        learning_stopped,
        "numbers that are not finite in every rollout or minibatch (warn/skipped_nonfinite). Set ppo.on_nonfinite=stop "
        "to have the first one named.",
        patience=3,
    ),
    Rule(
        "critic_vanished",
        critic_vanished,
        "a dead activation, weights that are zero or shared, or a coefficient of 0. Look at critic/grad_norm_*.",
    ),
    Rule(
        "critic_imbalanced",
        critic_imbalanced,
        "one critic's trunk is dead, or its scale is wrong. Try network.twin_trunk=shared, or one critic.",
    ),
    Rule(
        "lstm_dead",
        lstm_dead,
        "observations that are all zero, a learning rate that destroyed the weights. Lower learning_rate.",
    ),
    Rule(
        "lstm_saturated",
        lstm_saturated,
        "observations that are not scaled, or too large steps. Keep normalise_observations on, lower the rate.",
    ),
    Rule(
        "ratio_clamped",
        ratio_clamped,
        "the policy moves too far in one rollout. Lower learning_rate or ppo.epochs, or set ppo.target_kl.",
        patience=1,
    ),
    Rule(
        "entropy_collapsed",
        entropy_collapsed,
        "too little exploration is rewarded. Raise entropy_coef or ppo.entropy_floor.",
    ),
    Rule(
        "constant_advantages",
        constant_advantages,
        "rewards that never change, or an agent that has no influence on them. Look at the environment's rewards.",
        patience=1,
    ),
    Rule(
        "gradient_exploding",
        gradient_exploding,
        "an outlier in the data, or too large a learning rate. Check data/*; lower learning_rate.",
        patience=1,
        after=5,
    ),
    Rule(
        "quantile_crossing",
        quantile_crossing,
        "the distribution has not been learned yet or is not learned at all. Raise ppo.distribution_coef.",
        patience=10,
        after=20,
    ),
    Rule(
        "normaliser_drift",
        normaliser_drift,
        "data that change their level, as prices do: use returns and ratios as features; or a larger rollout.",
        patience=3,
        after=5,
    ),
    Rule(
        "never_trades",
        never_trades,
        "costs that exceed every gain, or a risk budget that is too tight. Compare the reward with and without costs.",
    ),
    Rule(
        "always_flips",
        always_flips,
        "costs that are missing, or a signal that is only noise. Check market.fee and market.half_spread.",
    ),
    Rule(
        "risk_infeasible",
        risk_infeasible,
        "a limit below what costs and gaps do to any position. Loosen risk.limit, shorten episodes, or trade less.",
        patience=10,
    ),
    Rule(
        "tail_undersampled",
        tail_undersampled,
        "too few episodes a rollout. Use more accounts, a larger ppo.n_steps, shorter episodes or a larger risk.alpha.",
        patience=10,
    ),
    Rule(
        "tail_mispredicted",
        tail_mispredicted,
        "too few episodes so far, or a market that has changed. The budget reads realised outcomes and still holds.",
        patience=20,
        after=100,
    ),
    Rule(
        "gradient_through_time",
        gradient_through_time,
        "positions or an LSTM that amplify small changes bar by bar. Lower pathwise.n_steps or pathwise.learning_rate.",
    ),
    Rule(
        "policy_saturated",
        policy_saturated,
        "too large steps, or a market without costs, where the best position is always the largest. Lower "
        "pathwise.learning_rate or market.leverage.",
        patience=10,
    ),
)

CONSTANT_EVALUATION = Rule(
    "constant_evaluation",
    lambda figures, past: None,  # noqa: ARG005 (judged over evaluations, see `HealthMonitor.evaluated`)
    "the evaluation never trades, or is not given the trained agent. Backtest the agent by hand and compare.",
    patience=3,
)


@dataclass
class HealthMonitor:
    """Applies the rules, counts, and remembers what has been said."""

    rules: Sequence[Rule] = RULES
    streaks: dict[str, int] = field(default_factory=dict)
    """Bad iterations in a row, by rule."""
    counts: dict[str, int] = field(default_factory=dict)
    """Iterations that counted as bad, by rule."""
    past: dict[str, list[float]] = field(default_factory=dict)
    evaluations: dict[str, float] = field(default_factory=dict)
    """The last value of every evaluation figure."""
    iterations: int = 0

    def check(self, figures: Figures, step: int) -> list[Alarm]:
        """Take in an iteration; returns what must be said for the first time."""
        self.iterations += 1
        raised = []
        for rule in self.rules:
            what = rule.check(figures, self.past) if self.iterations > rule.after else None
            raised += self._count(rule, what, step)
        for name in REMEMBERED:
            if name in figures and math.isfinite(figures[name]):
                self.past[name] = [*self.past.get(name, []), figures[name]][-MEMORY:]
        return raised

    def evaluated(self, figures: Figures, step: int) -> list[Alarm]:
        """Take in an evaluation's figures, `eval/*`, if there are any: a score that never moves measures nothing."""
        scores = {name: value for name, value in figures.items() if name.startswith("eval/mean_reward")}
        raised = []
        for name, value in scores.items():
            same = self.evaluations.get(name) == value
            what = f"{name} is {value:g}, exactly as in the evaluations before." if same else None
            raised += self._count(CONSTANT_EVALUATION, what, step)
        self.evaluations |= scores
        return raised

    def _count(self, rule: Rule, what: str | None, step: int) -> list[Alarm]:
        self.streaks[rule.name] = self.streaks.get(rule.name, 0) + 1 if what else 0
        # The first of several equal evaluations has nothing to compare with, so it is not in the streak.
        needed = rule.patience - 1 if rule is CONSTANT_EVALUATION else rule.patience
        if what is None or self.streaks[rule.name] < needed:
            return []
        self.counts[rule.name] = self.counts.get(rule.name, 0) + 1
        return [Alarm(rule.name, step, what, rule.usually)] if self.counts[rule.name] == 1 else []

    def figures(self) -> dict[str, float]:
        """`warn/*`: how often each alarm has counted so far; 0 for those that never have."""
        return {
            f"warn/{rule.name}": float(self.counts.get(rule.name, 0)) for rule in (*self.rules, CONSTANT_EVALUATION)
        }

    def state_dict(self) -> dict[str, Any]:
        """Streaks, counts and memories."""
        return {
            "streaks": dict(self.streaks),
            "counts": dict(self.counts),
            "past": {name: list(values) for name, values in self.past.items()},
            "evaluations": dict(self.evaluations),
            "iterations": self.iterations,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned."""
        self.streaks, self.counts = dict(state["streaks"]), dict(state["counts"])
        self.past = {name: list(values) for name, values in state["past"].items()}
        self.evaluations, self.iterations = dict(state["evaluations"]), int(state["iterations"])

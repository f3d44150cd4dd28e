"""Alarms: silent failures are reported once, with a remedy, and counted from then on.

A rule reads an iteration's metrics (plain numbers) and returns a message if they are bad. It raises an alarm after
`patience` bad iterations in a row. A new alarm is one entry in `RULES` and one section in docs/alarms.md, or from
outside one call of `register_alarm`.
"""

from __future__ import annotations

import itertools
import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tailguard.errors import ConfigError

Metrics = Mapping[str, float]
Past = Mapping[str, Sequence[float]]

FEW_TAIL_OUTCOMES = 5
"""Mean number of tail outcomes per update below which its gradient is mostly noise: the standard error of the tail
share alone is then 45 % or more."""
MEMORY = 20
"""Number of recent values to keep."""
FALLING = 0.95
"""A value below this share of its mean over the bad iterations before is falling."""


@dataclass(frozen=True)
class Alarm:
    """An alarm, created when its rule first applies."""

    name: str
    step: int
    what: str
    usually: str

    def __str__(self) -> str:
        anchor = self.name.replace("_", "-")
        see = "" if self.name in OWN_RULES else f" See docs/alarms#{anchor}"
        return f"alarm {self.name} at {self.step:,} steps: {self.what}\n  Usually: {self.usually}{see}"


@dataclass(frozen=True)
class Rule:
    """One failure mode of training."""

    name: str
    check: Callable[[Metrics, Past], str | None]
    """Returns a message with the values if they are bad, otherwise None."""
    usually: str
    """Common causes and what to do."""
    patience: int = 5
    """Consecutive bad iterations before the alarm is raised."""
    after: int = 0
    """Iterations at the start of training that are ignored."""
    remembers: tuple[str, ...] = ()
    """Metrics whose recent values it needs, in `past`."""
    of_run: float = 0.0
    """Share of the run's iterations that must be bad in a row, where that is more than `patience`; of its last one, no
    other need be. Not raised where the length of the run is not known."""
    eases: str = ""
    """One of those that it remembers, larger the worse the fault: while it falls the alarm waits, but not in the last
    iteration of a run."""


def _value(metrics: Metrics, name: str) -> float:
    return metrics.get(name, math.nan)


def learning_stopped(metrics: Metrics, past: Past) -> str | None:  # noqa: ARG001 (see Rule)
    """An iteration without a single optimiser step."""
    if _value(metrics, "train/n_updates") > 0:
        return None
    return "no optimiser step was taken in this iteration or the ones before it: the agent has stopped learning."


def critic_vanished(metrics: Metrics, past: Past) -> str | None:  # noqa: ARG001
    """A critic whose gradient is below a millionth of the whole network's."""
    whole = _value(metrics, "train/grad_norm")
    for name, norm in metrics.items():
        if name.startswith("critic/grad_norm_") and norm < 1e-6 * whole:
            number = name.removeprefix("critic/grad_norm_")
            return (
                f"critic {number}'s gradient norm is {norm:.1e}; that of the whole network is {whole:.1e}. "
                "The critic has stopped learning."
            )
    return None


def critic_imbalanced(metrics: Metrics, past: Past) -> str | None:  # noqa: ARG001
    """Twin critics whose gradients differ a hundredfold."""
    ratio = _value(metrics, "critic/grad_ratio")
    if not ratio > 100:
        return None
    one, two = (_value(metrics, f"critic/grad_norm_{number}") for number in (1, 2))
    return (
        f"the critics' gradient norms are {one:.1e} and {two:.1e}, a ratio of {ratio:.0f}: the twin critics act as one."
    )


def lstm_dead(metrics: Metrics, past: Past) -> str | None:  # noqa: ARG001
    """An LSTM layer whose output is constant or that receives no gradient."""
    whole = _value(metrics, "train/grad_norm")
    for name, value in metrics.items():
        layer = name.removeprefix("lstm/").removesuffix("_hidden_std")
        if name.startswith("lstm/") and name.endswith("_hidden_std") and value < 1e-4:
            return f"the outputs of LSTM layer {layer} are almost constant (standard deviation {value:.1e})."
        layer = name.removeprefix("lstm/").removesuffix("_grad_norm")
        if name.startswith("lstm/") and name.endswith("_grad_norm") and value < 1e-7 * whole:
            return (
                f"the gradient norm of LSTM layer {layer} is {value:.1e}; that of the whole network is {whole:.1e}. "
                "The layer does not learn."
            )
    return None


def lstm_saturated(metrics: Metrics, past: Past) -> str | None:  # noqa: ARG001
    """An LSTM layer with more than half of its outputs saturated."""
    for name, value in metrics.items():
        if name.startswith("lstm/") and name.endswith("_saturated") and value > 0.5:
            layer = name.removeprefix("lstm/").removesuffix("_saturated")
            return f"{100 * value:.0f} % of the outputs of LSTM layer {layer} are saturated, where gradients vanish."
    return None


def memorised(metrics: Metrics) -> str | None:
    """Growth in training more than three times that on validation, and more by at least 2 a year."""
    growth, gap = _value(metrics, "eval/growth"), _value(metrics, "eval/gap")
    if not (gap > 2 and growth < gap / 2):
        return None
    return (
        f"log-growth is {growth + gap:+.1f} a year on the training bars and {growth:+.1f} on validation bars: the "
        "agent has memorised its training bars."
    )


def ratio_clamped(metrics: Metrics, past: Past) -> str | None:  # noqa: ARG001
    """More than 1 % of the log-ratios clamped."""
    share = _value(metrics, "train/log_ratio_clamped")
    return f"{100 * share:.1f} % of the log-ratios were clamped." if share > 0.01 else None


def entropy_collapsed(metrics: Metrics, past: Past) -> str | None:  # noqa: ARG001
    """A policy that no longer explores."""
    if not _value(metrics, "train/entropy_margin") < 0:
        return None
    entropy = _value(metrics, "train/entropy")
    return f"the policy's entropy has fallen to {entropy:.2f}: its actions are practically deterministic."


def constant_advantages(metrics: Metrics, past: Past) -> str | None:  # noqa: ARG001
    """A rollout whose advantages are all equal."""
    if not _value(metrics, "train/constant_advantages") > 0:
        return None
    return "all advantages of a rollout were equal, so the policy had nothing to learn from it."


def gradient_exploding(metrics: Metrics, past: Past) -> str | None:
    """A gradient norm a hundred times its recent median."""
    before = past.get("train/grad_norm", ())
    norm = _value(metrics, "train/grad_norm")
    usual = statistics.median(before) if len(before) >= 5 else math.inf
    # Where there was no gradient at all, any is a multiple of it: that is `gradient_vanished`.
    if not (usual > 0 and norm > 100 * usual):
        return None
    return f"the gradient norm is {norm:.1e}; its recent median is {usual:.1e}."


def gradient_vanished(metrics: Metrics, past: Past) -> str | None:
    """No gradient at any action of a window, in this iteration and in most of the recent ones.

    Not in a row: now and then an account's order is small enough to have one.
    """
    # The largest of all bars over the last one's: 0 where none of them has any.
    before = past.get("pathwise/slope_ratio", ())
    if not (_value(metrics, "pathwise/slope_ratio") == 0 and len(before) >= 10 and statistics.median(before) == 0):
        return None
    unfilled, traded = _value(metrics, "data/unfilled"), _value(metrics, "data/turnover")
    return (
        "no gradient reaches any action of a window, so the policy does not learn. Orders of "
        f"{unfilled:.2g} of equity a bar are not filled and {traded:.1e} are; "
        f"{100 * _value(metrics, 'pathwise/saturated'):.0f} % of the actions are at their bounds."
    )


def gradient_through_time(metrics: Metrics, past: Past) -> str | None:  # noqa: ARG001
    """A gradient that grows a thousandfold during backpropagation through a window."""
    ratio = _value(metrics, "pathwise/slope_ratio")
    # Over a last action that has no slope at all, the ratio says nothing.
    if not (ratio > 1000 and _value(metrics, "pathwise/slope_last") > 0):
        return None
    return f"the gradient grows by a factor of {ratio:,.0f} during backpropagation through a window of the market."


def policy_saturated(metrics: Metrics, past: Past) -> str | None:  # noqa: ARG001
    """Nearly all actions at their bounds, where the gradient of tanh vanishes."""
    share = _value(metrics, "pathwise/saturated")
    if not share > 0.99:
        return None
    return f"{100 * share:.1f} % of the actions are at their bounds, where the policy gets no gradient."


def quantile_crossing(metrics: Metrics, past: Past) -> str | None:  # noqa: ARG001
    """Quantiles out of order by more than a nearly constant return explains."""
    share, depth = _value(metrics, "critic/quantile_crossing"), _value(metrics, "critic/quantile_crossing_depth")
    if not (share > 0.1 and depth > 0.1):
        return None
    return (
        f"{100 * share:.0f} % of neighbouring return quantiles are in the wrong order, "
        f"by a total of {depth:.2f} standard deviations of the return."
    )


def normaliser_drift(metrics: Metrics, past: Past) -> str | None:  # noqa: ARG001
    """Normalisation statistics that one rollout shifted far."""
    shift = _value(metrics, "data/observation_drift")
    if shift > 0.5:
        return f"one rollout shifted the mean of an observation by {shift:.2f} standard deviations."
    ratio = _value(metrics, "critic/return_std_drift")
    if ratio > 1.5 or ratio < 1 / 1.5:
        return f"one rollout changed the return's standard deviation by a factor of {ratio:.2f}."
    return None


def never_trades(metrics: Metrics, past: Past) -> str | None:  # noqa: ARG001
    """An agent that does not trade."""
    turnover = _value(metrics, "data/turnover")
    return f"turnover is {turnover:.1e} of equity per bar: the agent does not trade." if turnover < 1e-6 else None


def always_flips(metrics: Metrics, past: Past) -> str | None:  # noqa: ARG001
    """An agent that reverses its position at nearly every bar."""
    share = _value(metrics, "data/flips")
    return f"positions change sign at {100 * share:.0f} % of the bars." if share > 0.8 else None


AT_CAP = 10
"""Updates with λ at its cap and a broken limit before that is an alarm."""


def _is_broken(metrics: Metrics) -> bool:
    """Whether the limit is broken by 5 % and by two standard errors of the measured CVaR."""
    beyond = _value(metrics, "risk/limit") - _value(metrics, "risk/cvar_realised")
    return _value(metrics, "risk/violation") > 0.05 and beyond > 2 * _value(metrics, "risk/cvar_error")


def _tail_in_words(metrics: Metrics) -> str:
    tail, mean, limit, error = (
        100 * _value(metrics, f"risk/{name}") for name in ("cvar_realised", "mean_realised", "limit", "cvar_error")
    )
    return (
        f"the CVaR of recent outcomes is {tail:.2f} ± {error:.2f} % (mean {mean:+.2f} %) against a limit of "
        f"{limit:.2f} %"
    )


def _broken_at_cap(metrics: Metrics, past: Past) -> str | None:
    """A message if λ is at its cap and the limit is broken."""
    if not (_value(metrics, "risk/at_cap") > 0 and _is_broken(metrics)):
        return None
    # The best under the largest multiplier: earlier CVaRs are those of an agent that hardly traded yet.
    reached = [_value(metrics, "risk/cvar_realised"), *past.get("risk/cvar_realised", [])[-(AT_CAP - 1) :]]
    return (
        f"the Lagrange multiplier λ is at its cap of {_value(metrics, 'risk/lambda'):g}, and "
        f"{_tail_in_words(metrics)}; the best it reached there is {100 * max(reached):.2f} %."
    )


def limit_broken(metrics: Metrics, past: Past) -> str | None:
    """A limit that is broken for a quarter of the run, or at its end, whatever λ is: short runs end before its cap."""
    # λ moves only once the tail holds enough outcomes.
    if not (_value(metrics, "risk/lambda") > 0 and _is_broken(metrics)):
        return None
    limit, reached = _value(metrics, "risk/limit"), [_value(metrics, "risk/cvar_realised")]
    # Before the limit was broken the agent hardly traded yet.
    reached += itertools.takewhile(lambda tail: tail < limit, reversed(past.get("risk/cvar_realised", [])))
    return (
        f"{_tail_in_words(metrics)}; in the last updates that broke it the best is {100 * max(reached):.2f} %, and λ "
        f"is {_value(metrics, 'risk/lambda'):.2g}."
    )


def risk_infeasible(metrics: Metrics, past: Past) -> str | None:
    """A Lagrange multiplier at its cap while the limit is still broken."""
    what = _broken_at_cap(metrics, past)
    if what is None or _value(metrics, "risk/tail_outcomes") < FEW_TAIL_OUTCOMES:
        return None
    return f"{what} So far training has not met the limit."


def tail_undersampled(metrics: Metrics, past: Past) -> str | None:
    """The same, with too few tail outcomes per update to tell whether the limit is feasible."""
    what, seen = _broken_at_cap(metrics, past), _value(metrics, "risk/tail_outcomes")
    if what is None or not seen < FEW_TAIL_OUTCOMES:
        return None
    return f"{what} An update sees {seen:.2g} tail outcomes: too few to conclude that the limit is infeasible."


def tail_mispredicted(metrics: Metrics, past: Past) -> str | None:  # noqa: ARG001
    """A critic whose predicted tail differs from the realised one."""
    share, level = _value(metrics, "risk/tail_share"), _value(metrics, "risk/alpha")
    if share > 3 * level and share > 0.1:
        return (
            f"{100 * share:.0f} % of the returns fell below the critic's {100 * level:g} % quantile: "
            "the tail is heavier than predicted."
        )
    limit = abs(_value(metrics, "risk/limit"))
    realised, predicted = _value(metrics, "risk/cvar_realised"), _value(metrics, "risk/cvar_predicted")
    if abs(realised - predicted) > 0.5 * max(limit, abs(realised)) and _value(metrics, "risk/window_filled") == 1:
        return (
            f"the cost critic predicts a CVaR of {100 * predicted:.2f} %; the realised CVaR is {100 * realised:.2f} %."
        )
    return None


RULES: tuple[Rule, ...] = (
    Rule(
        "learning_stopped",
        learning_stopped,
        "non-finite values in every rollout or minibatch (warn/skipped_nonfinite). Set ppo.on_nonfinite=stop to see "
        "where the first one occurs.",
        patience=3,
    ),
    Rule(
        "critic_vanished",
        critic_vanished,
        "a dead activation, weights that are zero or shared, or a coefficient of 0. Check critic/grad_norm_*.",
    ),
    Rule(
        "critic_imbalanced",
        critic_imbalanced,
        "one critic's trunk is dead, or its scale is wrong. Try network.twin_trunk=shared or a single critic.",
    ),
    Rule(
        "lstm_dead",
        lstm_dead,
        "observations that are all zero, or too high a learning rate that destroyed the weights. Lower learning_rate.",
    ),
    Rule(
        "lstm_saturated",
        lstm_saturated,
        "unscaled observations, or too large updates. Keep normalise_observations on and lower learning_rate.",
    ),
    Rule(
        "ratio_clamped",
        ratio_clamped,
        "the policy changes too much in one iteration. Lower learning_rate or ppo.epochs, or set ppo.target_kl.",
        patience=1,
    ),
    Rule(
        "entropy_collapsed",
        entropy_collapsed,
        "too small an entropy bonus. Raise entropy_coef or ppo.entropy_floor.",
    ),
    Rule(
        "constant_advantages",
        constant_advantages,
        "rewards that never change, or actions that do not affect them. Check the environment's rewards.",
        patience=1,
    ),
    Rule(
        "gradient_exploding",
        gradient_exploding,
        "an outlier in the data, or too high a learning rate. Check data/*; lower learning_rate.",
        patience=1,
        after=5,
        remembers=("train/grad_norm",),
    ),
    Rule(
        "quantile_crossing",
        quantile_crossing,
        "the return distribution has not been learned yet, or is not learned at all. Raise ppo.distribution_coef.",
        patience=10,
        after=20,
    ),
    Rule(
        "normaliser_drift",
        normaliser_drift,
        "non-stationary inputs such as prices. Use returns and ratios as features, or larger rollouts.",
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
        "missing costs, or a signal that is only noise. Check market.fee and market.half_spread.",
    ),
    Rule(
        "risk_infeasible",
        risk_infeasible,
        "a limit that costs and price gaps alone break for any position. Loosen risk.limit, shorten episodes, or trade "
        "less.",
        patience=AT_CAP,
        remembers=("risk/cvar_realised",),
    ),
    Rule(
        "limit_broken",
        limit_broken,
        "too few updates or tail episodes for the limit, or one that no position keeps. Train for more steps, raise "
        "env.num_envs, or loosen risk.limit. With a limit the exposure is still calibrated on held-out bars.",
        patience=5,
        of_run=0.25,
        remembers=("risk/cvar_realised", "risk/violation"),
        eases="risk/violation",
    ),
    Rule(
        "tail_undersampled",
        tail_undersampled,
        "too few episodes per rollout. Raise env.num_envs, ppo.n_steps or risk.alpha, or shorten episodes.",
        patience=AT_CAP,
        remembers=("risk/cvar_realised",),
    ),
    Rule(
        "tail_mispredicted",
        tail_mispredicted,
        "too few episodes so far, or a market that has changed. The budget uses realised outcomes and is not affected.",
        patience=20,
        after=100,
    ),
    Rule(
        "gradient_through_time",
        gradient_through_time,
        "positions or an LSTM that amplify small changes bar by bar. Lower pathwise.n_steps or pathwise.learning_rate.",
    ),
    Rule(
        "gradient_vanished",
        gradient_vanished,
        "orders beyond the volume cap (lower market.capital or raise market.participation), or a policy at its bounds.",
        patience=1,
        remembers=("pathwise/slope_ratio",),
    ),
    Rule(
        "policy_saturated",
        policy_saturated,
        "too large updates, or a market without costs, where the best position is always the largest. Lower "
        "pathwise.learning_rate or market.leverage.",
        patience=10,
    ),
)

CONSTANT_EVALUATION = Rule(
    "constant_evaluation",
    lambda metrics, past: None,  # noqa: ARG005 (judged over evaluations, see `HealthMonitor.evaluated`)
    "the evaluation never trades, or is not given the trained agent. Backtest the agent by hand and compare.",
    patience=3,
)
MEMORISED = Rule(
    "memorised",
    lambda metrics, past: memorised(metrics),  # noqa: ARG005 (judged over evaluations, see `HealthMonitor.evaluated`)
    "too few bars for so many steps. Use more bars, fewer training.total_timesteps, or a smaller network.",
    patience=2,
)
EVERY_RULE = (*RULES, CONSTANT_EVALUATION, MEMORISED)
"""Rules over iterations, and those over evaluations."""
OWN_RULES: dict[str, Rule] = {}
"""Rules over iterations that `register_alarm` added, by name."""


def register_alarm(rule: Rule, *, replace: bool = False) -> Rule:
    """Add a rule to every learner that is made from now on; its count is logged as `warn/{name}`.

    `replace`: allow a name that is already registered, as when a notebook cell runs twice.
    """
    if not re.fullmatch(r"[a-z][a-z0-9_]*", rule.name):
        raise ConfigError(f"alarm {rule.name!r}: use lower case letters, digits and underscores, as loses_at_night")
    taken = rule.name in {known.name for known in EVERY_RULE} or rule.name in ("skipped_nonfinite",)
    if taken or (rule.name in OWN_RULES and not replace):
        raise ConfigError(f"alarm {rule.name!r} is registered already; choose another name")
    OWN_RULES[rule.name] = rule
    return rule


def rules_in_force() -> tuple[Rule, ...]:
    """Every rule over iterations."""
    return (*RULES, *OWN_RULES.values())


def advice_on(name: str) -> str:
    """Common causes of an alarm and what to do; empty where its rule is not registered in this process."""
    return next((rule.usually for rule in (*EVERY_RULE, *OWN_RULES.values()) if rule.name == name), "")


@dataclass
class HealthMonitor:
    """Applies the rules, counts bad iterations, and raises each alarm once."""

    rules: Sequence[Rule] = field(default_factory=rules_in_force)
    streaks: dict[str, int] = field(default_factory=dict)
    """Consecutive bad iterations, by rule."""
    counts: dict[str, int] = field(default_factory=dict)
    """Iterations that counted as bad, by rule."""
    past: dict[str, list[float]] = field(default_factory=dict)
    evaluations: dict[str, float] = field(default_factory=dict)
    """The last value of every evaluation metric."""
    iterations: int = 0
    updates: int = 0
    """Iterations at the end of the run; 0: not known."""

    def check(self, metrics: Metrics, step: int) -> list[Alarm]:
        """Check an iteration's metrics; returns alarms that are raised for the first time."""
        self.iterations += 1
        raised = []
        for rule in self.rules:
            what = rule.check(metrics, self.past) if self.iterations > rule.after else None
            falls = bool(rule.eases) and self._falls(rule, metrics)
            raised += self._count(rule, what, step, waits=falls and self.iterations != self.updates)
        for name in dict.fromkeys(name for rule in self.rules for name in rule.remembers):
            if name in metrics and math.isfinite(metrics[name]):
                self.past[name] = [*self.past.get(name, []), metrics[name]][-MEMORY:]
        return raised

    def evaluated(self, metrics: Metrics, step: int) -> list[Alarm]:
        """Check an evaluation's metrics, `eval/*`, if there are any.

        A score that never changes measures nothing, and growth in training that is not there on validation bars has
        been memorised.
        """
        scores = {name: value for name, value in metrics.items() if name.startswith("eval/mean_reward")}
        raised = []
        for name, value in scores.items():
            same = self.evaluations.get(name) == value
            what = f"{name} is {value:g}, identical to the previous evaluations." if same else None
            raised += self._count(CONSTANT_EVALUATION, what, step)
        self.evaluations |= scores
        if "eval/gap" in metrics:
            raised += self._count(MEMORISED, memorised(metrics), step)
        return raised

    def _falls(self, rule: Rule, metrics: Metrics) -> bool:
        """Whether the metric that shows how bad the fault is falls over the bad iterations in a row."""
        streak, past = self.streaks.get(rule.name, 0), self.past.get(rule.eases, [])
        return streak > 0 and _value(metrics, rule.eases) < FALLING * statistics.mean(past[-streak:])

    def _count(self, rule: Rule, what: str | None, step: int, *, waits: bool = False) -> list[Alarm]:
        self.streaks[rule.name] = self.streaks.get(rule.name, 0) + 1 if what else 0
        if what is None or waits or self.streaks[rule.name] < self._needed(rule):
            return []
        self.counts[rule.name] = self.counts.get(rule.name, 0) + 1
        return [Alarm(rule.name, step, what, rule.usually)] if self.counts[rule.name] == 1 else []

    def _needed(self, rule: Rule) -> float:
        """Bad iterations in a row that raise an alarm."""
        if rule is CONSTANT_EVALUATION:  # the first of several equal ones has nothing to compare with
            return rule.patience - 1
        if not rule.of_run:
            return rule.patience
        if self.iterations == self.updates:
            return 1
        return max(rule.patience, math.ceil(rule.of_run * self.updates)) if self.updates else math.inf

    def metrics(self) -> dict[str, float]:
        """`warn/*`: bad iterations counted by each alarm so far."""
        return {
            f"warn/{rule.name}": float(self.counts.get(rule.name, 0))
            for rule in (*self.rules, CONSTANT_EVALUATION, MEMORISED)
        }

    def state_dict(self) -> dict[str, Any]:
        """Streaks, counts and recent values."""
        return {
            "streaks": dict(self.streaks),
            "counts": dict(self.counts),
            "past": {name: list(values) for name, values in self.past.items()},
            "evaluations": dict(self.evaluations),
            "iterations": self.iterations,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.streaks, self.counts = dict(state["streaks"]), dict(state["counts"])
        self.past = {name: list(values) for name, values in state["past"].items()}
        self.evaluations, self.iterations = dict(state["evaluations"]), int(state["iterations"])

"""Faults in what is promised to a user: budgets, alarms, verdicts, sessions, calendars; one check must catch each."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
from audit_faults import Injection, fault
from torch import Tensor


@fault("P1", "the exposure is not calibrated")
def _(inject: Injection) -> None:
    from tailguard.risk.exposure import calibrate_exposure

    inject.function(
        calibrate_exposure, lambda *given, **named: replace(calibrate_exposure(*given, **named), factor=1.0)
    )


@fault("P1", "the exposure is that of the estimate, without a bound")
def _(inject: Injection) -> None:
    from tailguard.risk import exposure

    def without(outcomes: Tensor, alpha: float, level: float, **_: Any) -> float:  # noqa: ARG001
        return float(exposure.cvar_from_samples(outcomes.flatten(), alpha))

    inject.function(exposure.cvar_bound, without)


@fault("P1", "the multiplier does not reach the policy")
def _(inject: Injection) -> None:
    from tailguard.algorithm.risk_budget import RiskBudget

    costs = RiskBudget.costs
    inject.method(RiskBudget, "costs", lambda self, rollout: 0.0 * costs(self, rollout))


@fault("P2", "the multiplier stays near one")
def _(inject: Injection) -> None:
    from tailguard.risk.constraint import dual_step

    def weak(dual: Any, violation: Tensor, config: Any) -> Any:
        moved = dual_step(dual, violation, config)
        return replace(moved, multiplier=moved.multiplier.clamp(max=1.0), integral=moved.integral.clamp(max=1.0))

    inject.function(dual_step, weak)


@fault("P2", "nothing is said at the end of training")
def _(inject: Injection) -> None:
    from tailguard.runs.training import print_tail_in_training

    inject.function(print_tail_in_training, lambda agent, console: None)  # noqa: ARG005


@fault("P3", "growth in training is read from the validation bars")
def _(inject: Injection) -> None:
    from tailguard.runs.validation import Validation

    def of_validation(self: Any, agent: Any) -> float:
        found = self.evaluate(agent)
        return float(found.growth)

    inject.method(Validation, "training_growth", of_validation)


@fault("P3", "the alarm needs a gap that no agent has")
def _(inject: Injection) -> None:
    from tailguard.monitor import health

    memorised = health.memorised
    inject.function(memorised, lambda metrics: memorised({**metrics, "eval/gap": metrics["eval/gap"] / 1000}))


@fault("P4", "whatever the bootstrap alone does not exclude is undecided")
def _(inject: Injection) -> None:
    from tailguard.evaluate.budget import BudgetVerdict, check_limit

    def timid(*given: Any, **named: Any) -> Any:
        return replace(check_limit(*given, **named), verdict=BudgetVerdict.UNDECIDED)

    inject.function(check_limit, timid)


@fault("P4", "the probability is that of the opposite")
def _(inject: Injection) -> None:
    from tailguard.evaluate.budget import TailEvidence

    probability = TailEvidence.probability
    inject.method(TailEvidence, "probability", lambda self, *given: 1 - probability(self, *given))


@fault("P5", "decisions beyond the leverage are scaled by a constant")
def _(inject: Injection) -> None:
    from tailguard.envs.episodes import TradingTask

    to_weights = TradingTask.to_weights

    def constant(self: Any, action: Tensor) -> Tensor:
        scale = to_weights(self, action).detach() / action.detach()
        return action * scale

    inject.method(TradingTask, "to_weights", constant)


@fault("P5", "limits on portfolios pass every slope")
def _(inject: Injection) -> None:
    from tailguard.envs.projection import constrain

    def straight_through(wanted: Tensor, *given: Any) -> Tensor:
        return wanted + (constrain(wanted, *given) - wanted).detach()

    inject.function(constrain, straight_through)


@fault("P6", "rewards are those of orders that filled whole")
def _(inject: Injection) -> None:
    from tailguard.envs.trading import TradingEnv
    from tailguard.market import build_market

    transition, whole = TradingEnv.transition, {}

    def unlimited(self: Any, before: Any, action: Tensor, drawn: Tensor) -> Any:
        after, step = transition(self, before, action, drawn)
        task = self.task
        if id(self) not in whole:
            market = build_market(self.prepared.panel, replace(task.market.config, participation=float("inf")))
            whole[id(self)] = replace(task, market=market)
        target, _ = task.decide(action, before)
        filled = whole[id(self)].advance(before, target)[1]
        return after, replace(step, reward=task.reward_of(filled, before))

    inject.method(TradingEnv, "transition", unlimited)


@fault("P7", "a session ignores the throttle")
def _(inject: Injection) -> None:
    from tailguard.live import decide as live

    decide = live.LiveDecider.prepare

    def without(self: Any, account: Any) -> Any:
        found = decide(self, account)
        self.memory.throttle = None
        return found

    inject.method(live.LiveDecider, "prepare", without)


@fault("P7", "a session's throttle counts windows of another length")
def _(inject: Injection) -> None:
    from tailguard.live.decide import LiveDecider

    prepare = LiveDecider.prepare

    def older(self: Any, account: Any) -> Any:
        found = prepare(self, account)
        self.memory.realised.age += self.memory.count == 5
        return found

    inject.method(LiveDecider, "prepare", older)


@fault("P8", "advantages are computed with a stream of the process")
def _(inject: Injection) -> None:
    from tailguard.returns.normalise import normalise_advantages

    drawn = itertools.count()

    def noisy(*given: Any, **named: Any) -> Any:
        found, flag = normalise_advantages(*given, **named)
        return found * (1 + 1e-6 * next(drawn)), flag

    inject.function(normalise_advantages, noisy)


@fault("P8", "a default of torch is left changed")
def _(inject: Injection) -> None:
    from tailguard.risk.constraint import dual_step

    inject.callback(lambda: np.seterr(divide="warn"))

    def careless(*given: Any) -> Any:
        np.seterr(divide="ignore")
        return dual_step(*given)

    inject.function(dual_step, careless)


@fault("P9", "the report refuses a measure of the budget, and there is no dry run before training")
def _(inject: Injection) -> None:
    from tailguard.errors import ConfigError
    from tailguard.evaluate.report.collect import collect
    from tailguard.runs.runner import dry_run

    def late(run: Any, **named: Any) -> Any:
        if run.config.risk.measure == "drawdown":
            raise ConfigError("risk.measure: drawdown cannot be reported")
        return collect(run, **named)

    inject.function(collect, late)
    inject.function(dry_run, lambda run, console: None)  # noqa: ARG005


@fault("P10", "a year has 365 days on every market")
def _(inject: Injection) -> None:
    from tailguard.data.panel import Panel

    inject.method(Panel, "bars_per_year", property(lambda self: 365.25 * 86_400_000 / self.frequency_ms))


@fault("P10", "the move over a closure belongs to nobody")
def _(inject: Injection) -> None:
    from tailguard.market.tables import bar_of

    def closed(columns: Any, values: Any) -> Any:
        bar = bar_of(columns, values)
        return bar._replace(gap=0 * bar.gap if isinstance(bar.gap, Tensor) else [0.0] * len(bar.gap))

    inject.function(bar_of, closed)


# --- the throttle ----------------------------------------------------------------------------------------------------


@fault("P11", "a loss beyond the threshold counts half")
def _(inject: Injection) -> None:
    from tailguard.risk.throttle import Throttle

    def mild(self: Any, outcome: float) -> float:
        return self.threshold + max(0.0, -outcome - self.threshold) / (2 * self.alpha)

    inject.method(Throttle, "cost", mild)


@fault("P11", "losses at a reduced exposure are not counted")
def _(inject: Injection) -> None:
    from tailguard.risk.throttle import Throttle

    observe = Throttle.observe
    inject.method(Throttle, "observe", lambda self, outcome: observe(self, outcome if self.factor >= 1 else 0.0))


@fault("P11", "a window of the throttle begins with the account")
def _(inject: Injection) -> None:
    from tailguard.evaluate import decision

    decide = decision.decide

    def from_the_beginning(decider: Any, task: Any, panel: Any, account: Any, memory: Any, *, flat: bool) -> Any:
        before = memory.realised.start_equity
        made = decide(decider, task, panel, account, memory, flat=flat)
        memory.realised.start_equity = before
        return made

    inject.function(decide, from_the_beginning)

"""Faults of learners: twin critics and their alarms, the regulariser against attacks, populations, settings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from audit_faults import Injection, fault
from torch import Tensor

# --- twin critics ----------------------------------------------------------------------------------------------------


@fault("C4", "the second critic has no loss")
def _(inject: Injection) -> None:
    from tailguard.algorithm.update import critic_losses

    def first_alone(*given: Any) -> Any:
        found = critic_losses(*given)
        return replace(found, value=found.value[:1], distribution=found.distribution[:1])

    inject.function(critic_losses, first_alone)


@fault("C4", "gradient norms are sums of norms")
def _(inject: Injection) -> None:
    from tailguard.algorithm.iteration_metrics import GradientNorms

    def summed(self: Any) -> tuple[Tensor, Tensor]:
        norms = torch.stack([torch.zeros(()) if one.grad is None else one.grad.norm() for one in self.parameters])
        return norms.sum(), (self.members * norms).sum(-1)

    inject.method(GradientNorms, "__call__", summed)


@fault("C4", "the ratio between the critics is turned round")
def _(inject: Injection) -> None:
    from tailguard.algorithm.iteration_metrics import GradientNorms

    named = GradientNorms.named

    def turned(self: Any, norms: Tensor) -> dict[str, Tensor]:
        metrics = named(self, norms)
        return metrics | {name: 1 / ratio for name, ratio in metrics.items() if name == "critic/grad_ratio"}

    inject.method(GradientNorms, "named", turned)


# --- the regulariser against attacks ---------------------------------------------------------------------------------


@fault("C4", "the larger of both values is taken")
def _(inject: Injection) -> None:
    from tailguard.models.critics.twins import combine_values

    def hopeful(first: Tensor, second: Tensor, mode: str) -> Tensor:
        return first.maximum(second) if mode == "min" else combine_values(first, second, "mean")

    inject.function(combine_values, hopeful)


@fault("C5", "the attack stays at the clean observation")
def _(inject: Injection) -> None:
    from tailguard.robust.attacks import maximise

    inject.function(maximise, lambda objective, obs, *_: obs.detach())  # noqa: ARG005


@fault("C5", "the attack goes in a random direction")
def _(inject: Injection) -> None:
    from tailguard.robust.attacks import Ball

    inject.method(Ball, "direction", lambda self, gradient: torch.randn_like(gradient).sign())  # noqa: ARG005


@fault("C5", "the attacked side is a constant")
def _(inject: Injection) -> None:
    from tailguard.robust.smoothness import Smoothness

    both = Smoothness._both_sides

    def detached(self: Any, *given: Any) -> tuple[Tensor, Tensor]:
        clean, moved = both(self, *given)
        return clean, (moved.detach() + 0 * moved)

    inject.method(Smoothness, "_both_sides", detached)


@fault("C5", "the attacked observation is read with an empty memory")
def _(inject: Injection) -> None:
    from tailguard.robust.smoothness import Smoothness

    term = Smoothness._term

    def emptied(self: Any, policy: Any, rows: Any, output: Any) -> Tensor:
        state = tuple(tuple(torch.zeros_like(part) for part in trunk) for trunk in rows.state)
        return term(self, policy, replace(rows, state=state), output)

    inject.method(Smoothness, "_term", emptied)


# --- populations -----------------------------------------------------------------------------------------------------


@fault("C6", "the new learning rate stays in the settings")
def _(inject: Injection) -> None:
    from tailguard.population.workshop import Workshop, put_in_force

    build = Workshop.build
    inject.method(
        Workshop, "build", lambda self, member, hyper, env=None: build(self, member, dict.fromkeys(hyper, 1e-3), env)
    )
    inject.function(put_in_force, lambda learner, config: None)  # noqa: ARG005


@fault("C6", "an exploiter keeps its own weights")
def _(inject: Injection) -> None:
    from tailguard.population.workshop import Workshop

    restore = Workshop.restore

    def own_weights(self: Any, learner: Any, job: Any, members: Any) -> None:
        mine = {name: value.clone() for name, value in learner.policy.state_dict().items()}
        restore(self, learner, job, members)
        learner.policy.load_state_dict(mine)

    inject.method(Workshop, "restore", own_weights)


@fault("C6", "a reset optimiser keeps its moments")
def _(inject: Injection) -> None:
    from tailguard.algorithm.learner import Learner

    inject.method(Learner, "reset_optimizer", lambda self: None)  # noqa: ARG005


# --- settings --------------------------------------------------------------------------------------------------------


@fault("C7", "unknown settings are left out in silence")
def _(inject: Injection) -> None:
    from tailguard import config

    merge = config._merge

    def lenient(settings: Any, given: Any, source: str, prefix: str = "") -> None:
        merge(settings, {name: value for name, value in given.items() if name in settings}, source, prefix)

    inject.function(merge, lenient)


@fault("C7", "the budget of the shield is a constant")
def _(inject: Injection) -> None:
    from tailguard.config import EnvConfig
    from tailguard.envs.shield import Shield

    def shield(self: Any) -> Shield | None:
        return Shield(self.shield_shock, 0.04) if self.shield_shock > 0 else None

    inject.method(EnvConfig, "shield", property(shield))


# --- evaluation ------------------------------------------------------------------------------------------------------


@fault("C8", "a validation shows the first agent for ever")
def _(inject: Injection) -> None:
    from tailguard.runs.validation import Validation

    evaluate, first = Validation.evaluate, []

    def remembered(self: Any, agent: Any) -> Any:
        first.append(evaluate(self, agent))
        return first[0]

    inject.method(Validation, "evaluate", remembered)


@fault("C8", "fees are half of what is set")
def _(inject: Injection) -> None:
    from tailguard.market.config import MarketConfig

    made = MarketConfig.__post_init__

    def halved(self: Any) -> None:
        made(self)
        object.__setattr__(self, "fee", self.fee / 2)

    inject.method(MarketConfig, "__post_init__", halved)


@fault("C8", "the last of several evaluations is the best")
def _(inject: Injection) -> None:
    from tailguard.runs.validation import BestScore

    inject.method(BestScore, "after", lambda self, score: BestScore(score))  # noqa: ARG005


@fault("C9", "an ensemble is its first member")
def _(inject: Injection) -> None:
    from tailguard.algorithm.ensemble import Ensemble

    combine = Ensemble.combine
    inject.method(Ensemble, "combine", lambda self, actions: combine(self, actions[:1]))


@fault("C9", "an ensemble's exposure is in force twice")
def _(inject: Injection) -> None:
    from tailguard.algorithm.ensemble import Ensemble

    combine = Ensemble.combine
    inject.method(Ensemble, "combine", lambda self, actions: self.exposure * combine(self, actions))


@fault("C9", "an agent is loaded without its observation statistics")
def _(inject: Injection) -> None:
    from tailguard.algorithm.saving import restore

    def forgetful(agent: Any, parts: Any, where: str, *, episodes: bool) -> None:
        fresh = agent.observation_moments.state_dict()
        restore(agent, parts, where, episodes=episodes)
        agent.observation_moments.load_state_dict(fresh)

    inject.function(restore, forgetful)


@fault("C9", "the weights from before the last iteration are saved")
def _(inject: Injection) -> None:
    from tailguard.algorithm.learner import Learner
    from tailguard.algorithm.saving import capture

    iterate, stale = Learner.iterate, {}

    def remembering(self: Any, *given: Any) -> Any:
        stale[id(self)] = {name: value.clone() for name, value in self.policy.state_dict().items()}
        return iterate(self, *given)

    inject.method(Learner, "iterate", remembering)
    inject.function(capture, lambda agent: {**capture(agent), "weights": stale[id(agent)]})

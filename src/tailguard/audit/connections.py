"""Checks of connections: that each part of the learner gets the gradient, the setting and the data meant for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from tailguard.algorithm.ppo import DistributionalPPO
from tailguard.algorithm.update import minibatch_loss
from tailguard.audit.pathwise_windows import wrong_reach_of_windows, wrongly_bound
from tailguard.audit.registry import Measurement, at_least, none_of, register_check, worst
from tailguard.audit.subject import ScriptedEnv, Subject, Witness
from tailguard.envs.trading import TradingEnv
from tailguard.risk.config import RiskConfig

POLICY_TERMS = ("policy", "entropy", "kl")
ALL_TERMS = (*POLICY_TERMS, "value", "distribution")
MODES: tuple[Mapping[str, Any], ...] = (
    {"memory": "separate", "critic": "quantile", "twin_critics": True},
    {"memory": "separate", "critic": "quantile", "twin_critics": True, "twin_trunk": "own"},
    {"memory": "shared", "critic": "quantile", "twin_critics": False},
    {"memory": "none", "critic": "categorical", "twin_critics": True},
    {"memory": "separate", "critic": "scalar", "twin_critics": False},
)
"""Networks whose gradients are followed, besides the subject's own."""


# --- gradients -------------------------------------------------------------------------------------------------------


def parameter_groups(learner: DistributionalPPO) -> dict[str, list[str]]:
    """Names of the parameters of each part of the network."""
    groups: dict[str, list[str]] = {}
    for name, _ in learner.policy.named_parameters():
        words = name.split(".")
        if words[0] == "trunks":
            whose = "actor" if words[1] == "0" else "critic"
            part = f"{whose} {'memory' if words[2] == 'memory' else 'encoder'} {words[1]}"
        elif words[0] == "critics":
            part = f"{words[2]} head {words[1]}"
        else:
            part = "action head"
        groups.setdefault(part, []).append(name)
    return groups


def wanted_terms(group: str, *, shared: bool) -> set[str]:
    """The terms of the loss that must reach a part; no other may."""
    if group.startswith("value head"):
        return {"value"}
    if group.startswith("distribution head"):
        return {"distribution"}
    if group == "action head":
        return set(POLICY_TERMS)
    critics = {"value", "distribution"}
    if group.startswith("actor"):
        return set(POLICY_TERMS) | (critics if shared else set())
    return critics


def gradients_by_term(learner: DistributionalPPO, witness: Witness) -> dict[str, dict[str, Tensor]]:
    """The gradient of each term alone, on the last rollout's batch."""
    batch = witness.batch if learner.policy.is_recurrent else witness.batch.rows_as_sequences()
    found = minibatch_loss(learner.policy, batch, learner.set_hyper(), learner.config)
    names = [name for name, _ in learner.policy.named_parameters()]
    result = {}
    for term, value in found.terms.items():
        gradients: tuple[Tensor, ...] = (torch.zeros(()),) * len(names)
        if value.requires_grad:
            gradients = torch.autograd.grad(
                value, list(learner.policy.parameters()), retain_graph=True, allow_unused=True, materialize_grads=True
            )
        result[term] = dict(zip(names, gradients, strict=True))
    return result


def _followed(subject: Subject, mode: Mapping[str, Any]) -> tuple[DistributionalPPO, dict[str, dict[str, Tensor]]]:
    witness = Witness()
    learner = subject.learner(
        entropy_coef=0.01, target_kl=0.01, kl_penalty=0.1, epochs=1, n_steps=6, minibatch_size=18,
        extensions=(witness,), **mode,
    )  # fmt: skip
    # Two iterations: in the first the policy equals the old one, whose KL has no gradient yet.
    learner.iterate()
    learner.iterate()
    return learner, gradients_by_term(learner, witness)


def _wrong_reach(subject: Subject, mode: Mapping[str, Any]) -> Iterator[str]:
    learner, gradients = _followed(subject, mode)
    shared, about = learner.config.network.memory == "shared", ", ".join(str(value) for value in mode.values())
    # The entropy of an unsquashed Gaussian knows its deviation alone, and not what the trunk says.
    followed = [term for term in gradients if term != "entropy" or learner.config.network.squash]
    for group, names in parameter_groups(learner).items():
        for term in followed:
            wanted = term in wanted_terms(group, shared=shared)
            reached = [bool(gradients[term][name].any()) for name in names]
            if wanted != all(reached) or wanted != any(reached):
                yield f"{about}: {term} {'does not reach' if wanted else 'reaches'} {group}"


@register_check(
    "C1",
    "Does every term of the loss reach exactly the parameters it should?",
    why="A term that reaches too little trains nothing, and one that reaches too much lets critics distort the policy; "
    "the loss goes down in both cases.",
    remedy="Look for a detach() that is missing or too many between the named term and part, in models/policy.py or in "
    "your own critic or term of the loss.",
    fast=True,
)
def gradients_reach_their_parts(subject: Subject) -> Measurement:
    modes = [{}, *MODES] if subject.parts else list(MODES)
    wrong = [line for mode in modes for line in _wrong_reach(subject, mode)]
    wrong += wrong_reach_of_windows(subject)
    return none_of(f"pairs of term and part with the wrong gradient, {len(modes)} networks after two iterations, and "
                   "parameters that a step of the pathwise learner wrongly reaches or leaves", wrong)  # fmt: skip


class _Echo(ScriptedEnv):
    """Pays what the observation before the last one said: only a critic with memory can know it."""

    def __init__(self, seed: int) -> None:
        super().__init__(num_envs=8, rows=96, end_probability=0.03, seed=seed)
        self.reward[1:] = self.obs[1:, :, 0] + 0.5 * self.obs[:-1, :, 0]
        self.reward[0] = self.obs[0, :, 0]
        self.terminated, self.truncated = self.terminated | self.truncated, self.terminated & False


def explained(witness: Witness, gamma: float) -> float:
    """Share of the variance of realised discounted returns that the first critic's values explain."""
    rollout, values = witness.rollout, witness.estimates.views[0].value.double()
    returns, following = torch.zeros_like(values), torch.zeros_like(values[0])
    for row in reversed(range(len(values))):
        following = rollout.rewards[row] + gamma * following.masked_fill(rollout.ended[row], 0.0)
        returns[row] = following
    # The last rows' returns are cut short by the end of the rollout.
    known = returns[:-6]
    return 1 - float((known - values[:-6]).var() / known.var())


@register_check(
    "C2",
    "Do the trunk and the memory of every critic learn?",
    why="A critic whose trunk or LSTM gets no gradient fits its last layer to random features: the advantages are "
    "noise, and the run looks merely slow.",
    remedy="Look for a detached trunk output in models/policy.py (critic_features, evaluate) or in your critic.",
    fast=True,
)
def critics_learn(subject: Subject) -> Measurement:
    found = []
    for twin in (False, True):
        env = _Echo(subject.seed)
        witness = Witness()
        learner = subject.learner(
            env, extensions=(witness,), twin_critics=twin, memory="separate", gamma=0.3, n_steps=24, minibatch_size=48,
            epochs=4, learning_rate=1e-2, lstm_size=12, hidden=(16,), optimizer="adam",
        )  # fmt: skip
        before = {name: value.detach().clone() for name, value in learner.policy.trunks[1].named_parameters()}
        for _ in range(16):
            learner.iterate()
        moved = {
            name: float((value.detach() - before[name]).norm() / before[name].norm().clamp(min=0.1))
            for name, value in learner.policy.trunks[1].named_parameters()
        }
        least = min(moved, key=moved.__getitem__)
        about = "twin critics" if twin else "one critic"
        found.append(at_least(f"smallest relative change in the critic's trunk, {about}", moved[least], 1e-3,
                              f"trunks.1.{least} moved by {moved[least]:.1e}"))  # fmt: skip
        found.append(at_least(f"explained variance after 16 iterations, {about}", explained(witness, 0.3), 0.5))
    return worst(found)


def batch_gradients(learner: DistributionalPPO, witness: Witness) -> dict[str, Tensor]:
    """The gradient of the whole loss on the witness's batch."""
    batch = witness.batch if learner.policy.is_recurrent else witness.batch.rows_as_sequences()
    found = minibatch_loss(learner.policy, batch, learner.set_hyper(), learner.config)
    names, parameters = zip(*learner.policy.named_parameters(), strict=True)
    gradients = torch.autograd.grad(found.total, parameters, allow_unused=True, materialize_grads=True)
    return dict(zip(names, gradients, strict=True))


def gradients_with_budget(subject: Subject, risk: RiskConfig | None) -> dict[str, Tensor]:
    """Gradients on the first rollout of a learner on bars; the rollout is the same whatever the budget is."""
    witness = Witness()
    env = TradingEnv(subject.bars, num_envs=12, episode_length=24, stagger=8, seed=subject.seed)
    learner = subject.learner(env, risk=risk, memory="separate", learning_rate=0.0, extensions=(witness,))
    learner.iterate()
    return batch_gradients(learner, witness)


@register_check(
    "C3",
    "Does the risk constraint change the policy's gradient, and no critic's?",
    why="A constraint that does not reach the policy is a number in a log; one that goes through a critic makes the "
    "critic report a mild tail and leaves the policy alone.",
    remedy="The constraint acts through the advantages alone: see RiskBudget.advantages and CVaRConstraint.combine.",
    fast=True,
)
def constraint_reaches_the_policy(subject: Subject) -> Measurement:
    # A penalty is a multiplier that stands from the first rollout on.
    free, bound = (gradients_with_budget(subject, risk) for risk in (None, RiskConfig(penalty=2.0, alpha=0.5)))
    wrong = []
    for name, gradient in free.items():
        of_policy = name.startswith(("action_head", "trunks.0"))
        changed = not torch.equal(gradient, bound[name])
        if changed != of_policy and (of_policy is False or bool(gradient.any())):
            wrong.append(f"{name} {'changes' if changed else 'does not change'}")
    wrong += wrongly_bound(subject)
    return none_of(f"of {len(free)} parameters of PPO and those of the pathwise learner, those whose gradient the "
                   "constraint wrongly changes or leaves", wrong)  # fmt: skip

"""Every term of the loss reaches exactly the parameters it should, on the real learner in every mode."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from tailguard.algorithm.bc import BehaviourCloning
from tailguard.algorithm.ppo import DistributionalPPO
from tailguard.algorithm.update import minibatch_loss
from tailguard.models.actions import GaussianHead

Gradients = dict[str, Tensor]
Mode = tuple[str, str, str, str]
"""Critic, memory, twin, σ."""

POLICY_TERMS = ("policy", "entropy", "kl", "bc")
TERMS = (*POLICY_TERMS, "value", "distribution")
MODES = [
    (critic, memory, twin, std)
    for critic in ("quantile", "categorical", "scalar")
    for memory in ("separate", "shared", "none")
    for twin in ("single", "twin", "twin_own_trunk")
    for std in ("global", "state")
    if not (memory == "shared" and twin == "twin_own_trunk")
]


def parameter_groups(learner: DistributionalPPO) -> dict[str, list[str]]:
    """Names of the parameters of every group that this learner has."""
    agent, groups = learner.policy, {}
    names = [name for name, _ in agent.named_parameters()]

    def starting(prefix: str) -> list[str]:
        return [name for name in names if name.startswith(prefix)]

    for index, whose in enumerate(("actor", "critic", "second critic")[: len(agent.trunks)]):
        groups[f"{whose} encoder"] = starting(f"trunks.{index}.encoder")
        groups[f"{whose} memory"] = starting(f"trunks.{index}.memory")
    groups["action head"] = starting("action_head")
    for index in range(len(agent.critics)):
        groups[f"value head {index}"] = starting(f"critics.{index}.value")
        groups[f"distribution head {index}"] = starting(f"critics.{index}.distribution")
    assert sorted(name for group in groups.values() for name in group) == sorted(names)
    return {group: found for group, found in groups.items() if found}


def expected_groups(mode: Mode) -> set[str]:
    critic, memory, twin, _ = mode
    trunks = ["actor"] if memory == "shared" else ["actor", "critic"]
    if twin == "twin_own_trunk":
        trunks.append("second critic")
    heads = ["value head"] if critic == "scalar" else ["value head", "distribution head"]
    return {
        "action head",
        *(f"{trunk} encoder" for trunk in trunks),
        *(f"{trunk} memory" for trunk in trunks if memory != "none"),
        *(f"{head} {index}" for head in heads for index in range(1 if twin == "single" else 2)),
    }


def expected_terms(group: str, shared: bool) -> set[str]:
    """The terms that must reach a group; no other may."""
    if group.startswith("value head"):
        return {"value"}
    if group.startswith("distribution head"):
        return {"distribution"}
    if group == "action head":
        return set(POLICY_TERMS)
    critic_terms = {"value", "distribution"}
    if group.startswith("actor"):
        return set(POLICY_TERMS) | (critic_terms if shared else set())
    return critic_terms


def gradients_of_terms(learner: DistributionalPPO, witness: Any) -> dict[str, Gradients]:
    """Gradient of each term alone, on the batch of the last iteration and the weights after it."""
    batch = witness.batch if learner.policy.is_recurrent else witness.batch.rows_as_sequences()
    found = minibatch_loss(learner.policy, batch, learner.set_hyper(), learner.config, learner.extensions)
    names = [name for name, _ in learner.policy.named_parameters()]
    result = {}
    for term, value in found.terms.items():
        if not value.requires_grad:
            continue
        gradients = torch.autograd.grad(
            value, list(learner.policy.parameters()), retain_graph=True, allow_unused=True, materialize_grads=True
        )
        result[term] = dict(zip(names, gradients, strict=True))
    return result


def neutral_teacher(obs: Tensor) -> Tensor:
    """The action 0 in every state, which is legal in the scripted environment's box and in its choices."""
    return torch.zeros(*obs.shape[:2], 2)


Reach = Callable[..., tuple[DistributionalPPO, dict[str, Gradients]]]


@pytest.fixture(scope="module")
def reach(make_learner: Any, make_witness: Any, scripted_env: Any) -> Reach:
    """A learner of a mode after two iterations, and its terms' gradients; made once for all tests of the mode."""

    @cache
    def make(
        critic: str, memory: str, twin: str, std: str, discrete: bool = False
    ) -> tuple[DistributionalPPO, dict[str, Gradients]]:
        witness = make_witness()
        learner = make_learner(
            scripted_env(discrete=discrete),
            critic=critic,
            memory=memory,
            twin_critics=twin != "single",
            twin_trunk="own" if twin == "twin_own_trunk" else "shared",
            std=std,
            lstm_layers=2,
            epochs=1,
            n_steps=6,
            minibatch_size=18,
            entropy_coef=0.01,
            target_kl=0.01,
            kl_penalty=0.1,
            extensions=(BehaviourCloning(teacher=neutral_teacher, beta=1.0), witness),
        )
        learner.iterate()
        learner.iterate()
        return learner, gradients_of_terms(learner, witness)

    return make


@pytest.mark.parametrize("term", TERMS)
@pytest.mark.parametrize("mode", MODES, ids="-".join)
def test_a_term_reaches_exactly_its_groups(reach: Reach, mode: Mode, term: str) -> None:
    learner, gradients = reach(*mode)
    critic, memory, _, _ = mode
    if critic == "scalar" and term == "distribution":
        assert term not in gradients
        return
    groups = parameter_groups(learner)
    assert set(groups) == expected_groups(mode)
    for group, names in groups.items():
        reached = {name: bool(gradients[term][name].any()) for name in names}
        wanted = term in expected_terms(group, memory == "shared")
        assert set(reached.values()) == {wanted}, f"{term} -> {group}: {reached}"


@pytest.mark.parametrize("term", POLICY_TERMS)
@pytest.mark.parametrize("std", ["global", "state"])
@pytest.mark.parametrize("memory", ["separate", "shared", "none"])
def test_policy_terms_reach_mean_and_sigma(reach: Reach, memory: str, std: str, term: str) -> None:
    learner, gradients = reach("quantile", memory, "single", std)
    head = learner.policy.action_head
    assert isinstance(head, GaussianHead)
    layer = gradients[term]["action_head.linear.weight"]
    mean, sigma = layer[: head.raw_size], layer[head.raw_size :]
    if std == "global":
        sigma = gradients[term]["action_head.free_log_std"]
    assert mean.abs().sum(-1).gt(0).all() if mean.dim() > 1 else mean.abs().gt(0).all()
    assert sigma.reshape(head.raw_size, -1).abs().sum(-1).gt(0).all()


@pytest.mark.parametrize("term", TERMS)
@pytest.mark.parametrize("memory", ["separate", "shared", "none"])
def test_reach_with_discrete_actions(reach: Reach, memory: str, term: str) -> None:
    learner, gradients = reach("quantile", memory, "twin", "global", True)
    for group, names in parameter_groups(learner).items():
        wanted = term in expected_terms(group, memory == "shared")
        assert {bool(gradients[term][name].any()) for name in names} == {wanted}, f"{term} -> {group}"


def test_the_terms_add_up_to_the_total(reach: Reach) -> None:
    """What the optimiser gets is the sum of the terms above and nothing else."""
    learner, gradients = reach("quantile", "separate", "twin", "global")
    witness = learner.extensions[1]
    found = minibatch_loss(learner.policy, witness.batch, learner.set_hyper(), learner.config, learner.extensions)  # type: ignore[attr-defined]
    found.total.backward()  # type: ignore[no-untyped-call]
    for name, parameter in learner.policy.named_parameters():
        summed = torch.stack([gradients[term][name] for term in TERMS]).sum(0)
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, summed, atol=1e-7, rtol=1e-5)
    assert found.terms.keys() == {*TERMS, "witness"}
    learner.optimizer.zero_grad(set_to_none=True)


@pytest.mark.parametrize("twin_trunk", ["shared", "own"])
def test_both_critics_pull_equally_where_they_are_equally_wrong(
    make_learner: Any, make_witness: Any, twin_trunk: str
) -> None:
    """Twin critics with the same weights get the same gradient, each half of what a single critic gets."""
    witness = make_witness()
    learner = make_learner(twin_critics=True, twin_trunk=twin_trunk, extensions=(witness,))
    learner.iterate()
    first, second = learner.policy.each_critic()
    second.load_state_dict(first.state_dict())
    if twin_trunk == "own":
        learner.policy.trunks[2].load_state_dict(learner.policy.trunks[1].state_dict())
    state = witness.batch.state
    batch = dataclasses.replace(witness.batch, state=(state[0], state[1], *state[1:2][: len(state) - 2]))
    terms = minibatch_loss(learner.policy, batch, learner.set_hyper(), learner.config).terms
    single = make_learner(extensions=(witness,))
    single.policy.load_state_dict(
        {name: learner.policy.state_dict()[name] for name in single.policy.state_dict()}, strict=True
    )
    single_batch = dataclasses.replace(
        batch,
        state=batch.state[:2],
        old_values=batch.old_values[:1],
        old_distributions=batch.old_distributions[:1],
    )
    single_terms = minibatch_loss(single.policy, single_batch, single.set_hyper(), single.config).terms
    for term, head in (("value", "value"), ("distribution", "distribution")):
        ours = [
            torch.autograd.grad(terms[term], getattr(critic, head).layer.weight, retain_graph=True)[0]
            for critic in (first, second)
        ]
        theirs = torch.autograd.grad(
            single_terms[term], getattr(single.policy.each_critic()[0], head).layer.weight, retain_graph=True
        )[0]
        torch.testing.assert_close(ours[0], ours[1])
        torch.testing.assert_close(2 * ours[0], theirs)

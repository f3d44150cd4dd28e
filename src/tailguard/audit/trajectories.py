"""Checks of trajectories: ratios, boundaries of episodes, bootstraps, memory, fills and look-ahead."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tailguard.algorithm.ppo import DistributionalPPO
from tailguard.audit.pathwise_windows import boundaries_of_windows, values_of_windows
from tailguard.audit.registry import Measurement, at_most, register_check, worst
from tailguard.audit.subject import ScriptedEnv, Subject, Witness
from tailguard.envs.trading import TradingEnv
from tailguard.risk.config import RiskConfig
from tailguard.risk.constraint import CVaRConstraint


def largest_log_ratio(learner: DistributionalPPO, witness: Witness) -> float:
    """|log ratio| of the first minibatch of each iteration, before any step on it."""
    head = learner.policy.action_head
    largest = [
        (head.log_prob(output.dist_params.detach(), batch.actions) - batch.log_probs)[batch.weights > 0].abs().max()
        for output, batch in witness.first
    ]
    return float(torch.stack(largest).max())


@register_check(
    "T1",
    "Is the probability ratio one before the first update?",
    why="PPO clips the ratio around 1. If it does not start there (a memory stored after the step, moved statistics, "
    "a missed reset), the clip acts on samples at random.",
    remedy="Store the memory before the row, reset it where an episode starts, and keep observation statistics "
    "constant within a rollout; see algorithm/rollout.py.",
    fast=True,
)
def ratio_is_one(subject: Subject) -> Measurement:
    found = []
    scripted = ScriptedEnv(end_probability=0.1, dead_rows=True, seed=subject.seed)
    trading = TradingEnv(subject.bars, num_envs=6, episode_length=20, stagger=3, seed=subject.seed)
    for name, env in (("scripted episodes with resets and dead rows", scripted), ("bars", trading)):
        witness = Witness()
        learner = subject.learner(env, learning_rate=1e-2, extensions=(witness,))
        for _ in range(4):
            learner.iterate()
        found.append(
            at_most(f"largest |log ratio| of four iterations, {name}", largest_log_ratio(learner, witness), 1e-5)
        )
    return worst(found)


def _targets_with_boundary(subject: Subject, kind: str, *, changed: bool) -> tuple[Tensor, ...]:
    """Advantages and targets of a rollout with a boundary after row 6; what follows it can be changed."""
    witness = Witness()
    env = ScriptedEnv(end_probability=0.0, seed=subject.seed)
    getattr(env, kind)[6] = True
    if changed:
        env.reward[7:] = 100.0
        env.obs[7:] += 5.0
    learner = subject.learner(env, extensions=(witness,))
    # A scale by the first returns would itself carry the change.
    learner.return_moments.update(torch.tensor([-1.0, 1.0]))
    learner.iterate()
    estimates = witness.estimates
    found = (estimates.advantages, estimates.value_targets)
    return found if estimates.distribution_targets is None else (*found, estimates.distribution_targets)


@register_check(
    "T2",
    "Does nothing cross the end of an episode, terminated or truncated?",
    why="A reward that leaks into the episode before it teaches the agent that its last action caused it.",
    remedy="Stop the trace where terminated or truncated holds, and the bootstrap where terminated holds: see "
    "returns/gae.py and returns/distributional.py, and for windows discounts in algorithm/pathwise.py.",
    fast=True,
)
def nothing_crosses_a_boundary(subject: Subject) -> Measurement:
    largest = 0.0
    for kind in ("terminated", "truncated"):
        plain, changed = (_targets_with_boundary(subject, kind, changed=flag) for flag in (False, True))
        for before, after in zip(plain, changed, strict=True):
            gap = (before[:7] - after[:7]).abs().max()
            largest = max(largest, float(gap.nan_to_num(torch.inf)))
    crossed = at_most("change of earlier advantages and targets by a reward of 100 after the boundary", largest, 0.0)
    return worst([crossed, boundaries_of_windows(subject), _boundary_of_the_budget(subject)])


def _boundary_of_the_budget(subject: Subject) -> Measurement:
    """A cost critic that says K everywhere changes a row's advantage by −K·λʲ, j rows before its episode's end.

    Where the episode ends nothing more is to come, by time or by ruin; where the rollout ends, the critic is right.
    """
    said, found = 3.0, []
    for offset in (0.0, said):
        env = TradingEnv(subject.bars, num_envs=6, episode_length=20, stagger=3, seed=subject.seed)
        witness = Witness()
        learner = subject.learner(env, risk=RiskConfig(penalty=1.0, alpha=0.5), extensions=(witness,))
        assert learner.risk is not None  # it has a penalty
        with torch.no_grad():
            last = learner.risk.critic.network[-1]
            assert isinstance(last, torch.nn.Linear)
            last.bias.fill_(offset)
        witnessed = CostAdvantages(learner.risk.constraint)
        learner.iterate()
        found.append(witnessed.seen[0])
    wanted, to_come = torch.zeros_like(found[0]), torch.zeros_like(found[0][0])
    decay = RiskConfig().cost_lambda
    for row in reversed(range(len(wanted))):
        to_come = torch.where(witness.rollout.ended[row], -said, decay * to_come)
        wanted[row] = to_come
    gap = float((found[1] - found[0] - wanted).abs().max().nan_to_num(torch.inf))
    return at_most("gap of the cost's advantages to the decay of a constant critic, which ends with the episode", gap,
                   1e-4)  # fmt: skip


class CostAdvantages:
    """Keeps the cost's advantages that a constraint mixes into those of the reward."""

    def __init__(self, constraint: CVaRConstraint) -> None:
        self.seen: list[Tensor] = []
        combine = constraint.combine

        def kept(reward_advantages: Tensor, cost_advantages: Tensor) -> Tensor:
            self.seen.append(cost_advantages.clone())
            return combine(reward_advantages, cost_advantages)

        constraint.combine = kept  # type: ignore[method-assign]


def summing_critic(subject: Subject, env: Any, n_steps: int) -> DistributionalPPO:
    """A learner whose critic's LSTM adds up what it sees: one unit, open gates, so small that tanh is the identity."""
    small = 1e-3
    learner = DistributionalPPO(
        env, seed=subject.seed, hidden=(), lstm_size=1, critic="scalar", n_steps=n_steps, gamma=0.5, gae_lambda=0.5,
        normalise_observations=False, runtime="eager",
    )  # fmt: skip
    (cell,) = learner.policy.trunks[1].memory.cells  # type: ignore[union-attr, misc]
    with torch.no_grad():
        for weight in cell.parameters():
            weight.zero_()
        cell.bias_ih[:] = torch.tensor([30.0, 30.0, 0.0, 30.0])
        cell.weight_ih[2] = small
        head = learner.policy.each_critic()[0].value.layer
        head.weight.fill_(1 / small)
        head.bias.zero_()
    return learner


@register_check(
    "T3",
    "Is an episode cut by time worth the value of its final observation, read once, and a ruined one nothing?",
    why="A bootstrap from the reset observation, from a stale memory, or one that reads the final observation twice "
    "gives a wrong value at every time limit, and trading episodes end by time. A value after ruin rewards ruin.",
    remedy="Feed the final observation once, from the memory after the last step: models/policy.py (evaluate). In "
    "windows, values count at time limits and at their end unless terminated: _objective in algorithm/pathwise.py.",
    fast=True,
)
def time_limit_bootstraps(subject: Subject) -> Measurement:
    found = []
    for n_steps in (3, 5):
        env = ScriptedEnv(num_envs=1, observation_size=1, rows=10, end_probability=0.0, seed=subject.seed)
        env.obs[:, 0, 0] = torch.tensor([1.0, 2.0, 4.0, 16.0, 32.0, 0.0, 0.0, 0.0, 0.0, 0.0])
        env.truncated[2], env.last_obs[2, 0, 0] = True, 8.0
        learner = summing_critic(subject, env, n_steps)
        witness = Witness()
        learner.extensions = learner.terms = (witness,)
        learner.return_moments.update(torch.tensor([-1.0, 1.0]))
        learner.iterate()
        (view,) = witness.estimates.views
        value = float(view.next_baseline[2, 0])
        found.append(at_most("|value of the successor − 15|: 1 + 2 + 4 and the final 8 (11: stale memory, 23: read "
                             "twice, 8: empty memory)", abs(value - 15), 0.01, f"it is {value:.3f}"))  # fmt: skip
        wanted = float(env.reward[2, 0]) + 0.5 * 15 - 7
        got = float(witness.estimates.advantages[2, 0])
        found.append(at_most("|advantage at the time limit − its definition|", abs(got - wanted), 0.01))
    return worst([*found, values_of_windows(subject)])

"""Checks of what the policy reads: statistics of observations that stand still, and attacks on observations."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from tailguard.algorithm.ppo import DistributionalPPO
from tailguard.audit.registry import Measurement, at_least, at_most, none_of, register_check, within, worst
from tailguard.audit.subject import ScriptedEnv, Subject, Witness
from tailguard.errors import ConfigError
from tailguard.returns import RunningMoments
from tailguard.robust.attacks import Attack, Ball, distance, maximise, perturb
from tailguard.robust.config import RobustConfig

if TYPE_CHECKING:
    from tailguard.envs.protocol import Step

# --- statistics of observations --------------------------------------------------------------------------------------


class _Watched(ScriptedEnv):
    """Calls back at every step, in the middle of a rollout."""

    look: Callable[[], None] = staticmethod(lambda: None)

    def step(self, action: Tensor) -> Step:
        self.look()
        return super().step(action)


def _statistics(learner: DistributionalPPO) -> Tensor:
    moments = learner.observation_moments
    assert isinstance(moments, RunningMoments)  # a scripted environment has no assets
    return torch.cat([value.flatten() for value in moments.state_dict().values()])


@register_check(
    "F14",
    "Do the statistics of observations stand still within a rollout and in evaluation, and are they saved?",
    why="Statistics that move within a rollout break the ratio's identity; those that move in evaluation let the test "
    "bars change the agent; without them saved weights mean something else.",
    remedy="Update them between rollouts alone (Learner._finish); predict and inference read a copy.",
    fast=True,
)
def observation_statistics_stand_still(subject: Subject) -> Measurement:
    env, witness = _Watched(seed=subject.seed), Witness()
    learner = subject.learner(env, extensions=(witness,), normalise_observations=True)
    learner.iterate()
    seen: list[Tensor] = []
    env.look = lambda: seen.append(_statistics(learner))
    scale = learner.observation_scale()
    mean, std = scale.mean.clone(), scale.std.clone()
    before = _statistics(learner)
    learner.iterate()
    env.look = lambda: None
    scaled = ((witness.rollout.obs - mean) / std).clamp(-scale.clip, scale.clip)
    within_rollout = max(float((one - before).abs().max()) for one in seen)
    moved = float((_statistics(learner) - before).abs().max())
    found = [
        at_most("largest change of the statistics within a rollout", within_rollout, 0.0),
        at_most("largest gap of what the network saw to (observation − mean)/deviation of the rollout's start",
                float((witness.rollout.scaled_obs - scaled).abs().max()), 1e-5),
        at_least("change of the statistics between two rollouts", moved, 1e-9),
    ]  # fmt: skip
    after = _statistics(learner)
    poison = np.full((env.num_envs, env.observation_size), 1e6, np.float32)
    learner.predict(poison, deterministic=True)
    learner.inference_policy()(torch.as_tensor(poison[:1]), True)
    found.append(at_most("change of the statistics by observations of a million in evaluation",
                         float((_statistics(learner) - after).abs().max()), 0.0))  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        learner.save(Path(folder) / "saved")
        loaded = DistributionalPPO.load(Path(folder) / "saved")
        found.append(at_most("change of the statistics by saving and loading",
                             float((_statistics(loaded) - after).abs().max()), 0.0))  # fmt: skip
    return worst(found)


# --- attacks ---------------------------------------------------------------------------------------------------------

WEIGHT, EPSILON, SIGMA = (0.5, -1.2, 0.3, 2.0, -0.1), 0.1, 0.7
"""A linear policy μ = W·s with one action: within ε the largest KL is (ε‖W‖₁)²/2σ²."""


@register_check(
    "F17",
    "Do attacks reach the worst point of their ball and stay in it, and does their size follow its schedule?",
    why="An attack that starts at the clean observation never moves, for the slope there is 0; steps of ε/K leave a "
    "tenth unfound. An agent trained or judged against a weak attack looks robust.",
    remedy="Start at a random point, take steps of 2ε/K, and compute ε from the progress alone; see robust/attacks.py.",
    fast=True,
)
def attacks_reach_the_worst_point(subject: Subject) -> Measurement:
    weight = torch.tensor(WEIGHT)
    obs = torch.randn(64, 5, generator=torch.Generator().manual_seed(subject.seed))

    def kl(moved: Tensor) -> Tensor:
        return ((moved - obs) @ weight).square() / (2 * SIGMA**2)

    best = float((EPSILON * weight.abs().sum()) ** 2 / (2 * SIGMA**2))
    attack = Attack("pgd", EPSILON, target="kl")
    moved = maximise(kl, obs, attack, Ball.of(attack, obs), torch.Generator().manual_seed(subject.seed + 1))
    found = [
        within("lowest share of the largest divergence that the attack finds, linear policy",
               float(kl(moved).min()) / best, 0.99, 1.0001),
        at_most("largest excess over the ball's radius", float((moved - obs).abs().max()) - EPSILON, 1e-7),
    ]  # fmt: skip
    # A step that is far too long must end on the ball's surface, not outside.
    long = Attack("pgd", EPSILON, target="kl", step_size=1.0)
    far = maximise(kl, obs, long, Ball.of(long, obs), torch.Generator().manual_seed(subject.seed + 1))
    found.append(at_most("the same with steps ten times as long as the radius",
                         float((far.double() - obs.double()).abs().max()) - EPSILON, 1e-7))  # fmt: skip
    found.append(_beats_noise(subject))
    found.append(none_of("attacks on a divergence that may start where its slope is 0", _allowed_without_start()))
    found.append(_schedule(subject))
    return worst(found)


def _beats_noise(subject: Subject) -> Measurement:
    """The attack on the subject's policy against noise of the same size."""
    env = ScriptedEnv(num_envs=64, observation_size=12, seed=subject.seed)
    learner = subject.learner(env)
    policy, obs = learner.policy, env.obs[0]
    state, start = policy.initial_state(len(obs)), torch.ones(len(obs), dtype=torch.bool)
    changes = []
    for kind in ("random", "pgd"):
        moved = perturb(policy, obs, state, start, Attack(kind, EPSILON, target="action"))
        with torch.no_grad():
            clean, attacked = (policy.act(seen, state[0], start)[0] for seen in (obs, moved))
            changes.append(float(distance(policy.action_head, clean, attacked, "action").sqrt().mean()))
    return at_least("change of the action by the attack, in units of that by noise of the same size",
                    changes[1] / max(changes[0], 1e-12), 1.5)  # fmt: skip


def _allowed_without_start() -> list[str]:
    allowed = []
    for target in ("action", "kl"):
        try:
            Attack(target=target, random_start=False)
            allowed.append(target)
        except ConfigError:
            pass
    return allowed


def _schedule(subject: Subject) -> Measurement:
    """Size of the attack in the learner at a quarter of the training, twice over: half of what it grows to."""
    robust = RobustConfig(coef=0.1, epsilon=EPSILON, schedule="linear", warmup=0.5, steps=2)
    learner = subject.learner(robust=robust, epochs=1)
    gaps = []
    for _ in range(3):
        learner.state.progress = 0.25
        gaps.append(abs(learner.iterate()["robust/epsilon"] - EPSILON / 2))
    return at_most("|ε in training at half of its growth − ε/2|, three rollouts in a row", max(gaps), 1e-9)

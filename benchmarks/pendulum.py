"""Gymnasium's Pendulum-v1 for many copies at once, and the exact worst case of a policy on it.

    python benchmarks/pendulum.py      what a controller that was made by hand keeps in balls of several sizes

A policy without memory sees one observation, so that an adversary is a choice of one perturbation for every state: its
best choice is found by dynamic programming over angle and velocity, without any learning.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray
from torch import Tensor

from tailguard.robust.attacked_policy import AttackableAgent, AttackedPolicy, Memories
from tailguard.robust.attacks import Attack

Array = NDArray[np.float64]
Policy = Callable[[Array], Array]
"""Observations [n, 3] to torques [n]."""

LENGTH = 200
"""Steps of an episode."""
UNITS = (0.72, 0.5, 2.8)
"""Standard deviations of what a plain agent of a development seed sees."""
ANGLES, SPEEDS = np.linspace(-np.pi, np.pi, 145)[:-1], np.linspace(-8.0, 8.0, 129)
CORNERS = np.array(list(itertools.product((-1, 0, 1), repeat=3)), float)
"""What an adversary may choose, in units of the ball: corners, and what lies between them."""
UNMOVED = len(CORNERS) // 2


def advance(angle: Array, speed: Array, torque: Array) -> tuple[Array, Array, Array]:
    """Angle, velocity and reward after a step."""
    torque = np.clip(torque, -2.0, 2.0)
    off = (angle + np.pi) % (2 * np.pi) - np.pi
    reward = -(off**2 + 0.1 * speed**2 + 0.001 * torque**2)
    speed = np.clip(speed + (15.0 * np.sin(angle) + 3.0 * torque) * 0.05, -8.0, 8.0)
    return angle + 0.05 * speed, speed, reward


def observed(angle: Array, speed: Array) -> Array:
    """[n, 3]"""
    return np.stack((np.cos(angle), np.sin(angle), speed), axis=1)


class Pendulums(gymnasium.vector.VectorEnv[Any, Any, Any]):
    """N copies of Pendulum-v1, whose episodes end together; a hundred of them take as long as two of Gymnasium's."""

    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}  # noqa: RUF012, as in Gymnasium

    def __init__(self, count: int) -> None:
        one = gymnasium.make("Pendulum-v1")
        self.num_envs, self.steps, self.random = count, 0, np.random.default_rng(0)
        self.single_observation_space, self.single_action_space = one.observation_space, one.action_space
        self.observation_space = gymnasium.vector.utils.batch_space(one.observation_space, count)
        self.action_space = gymnasium.vector.utils.batch_space(one.action_space, count)

    def begin(self) -> NDArray[np.float32]:
        """New episodes, from Gymnasium's own range of angles and velocities."""
        self.angle = self.random.uniform(-np.pi, np.pi, self.num_envs)
        self.speed = self.random.uniform(-1.0, 1.0, self.num_envs)
        self.steps = 0
        return observed(self.angle, self.speed).astype(np.float32)

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[NDArray[np.float32], dict[str, Any]]:  # noqa: ARG002
        """Begin all episodes anew."""
        if seed is not None:
            self.random = np.random.default_rng(seed)
        return self.begin(), {}

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Apply torques [N, 1]."""
        torque = np.asarray(actions)[:, 0]  # in float32, as Gymnasium computes with it
        self.angle, self.speed, reward = advance(self.angle, self.speed, torque)
        self.steps += 1
        obs, infos = observed(self.angle, self.speed).astype(np.float32), {}
        over = np.full(self.num_envs, self.steps == LENGTH)
        if over.all():
            final = np.empty(self.num_envs, object)
            final[:] = list(obs)
            infos = {"final_obs": final, "_final_obs": over.copy()}
            obs = self.begin()
        return obs, reward, np.zeros_like(over), over, infos


def _after(angle: Array, speed: Array, torque: Array) -> tuple[Array, Array, Array]:
    """The reward of a step from every point of the grid, and points and weights [4, n] that interpolate its end."""
    angle, speed, reward = advance(angle, speed, torque)
    across = (angle + np.pi) % (2 * np.pi) / (2 * np.pi) * len(ANGLES)
    along = (speed + 8.0) / 16.0 * (len(SPEEDS) - 1)
    i, j = np.floor(across).astype(int), np.minimum(np.floor(along).astype(int), len(SPEEDS) - 2)
    a, b = across - i, along - j
    rows = np.stack((i, i + 1, i, i + 1)) % len(ANGLES)
    return (
        reward,
        rows * len(SPEEDS) + np.stack((j, j, j + 1, j + 1)),
        np.stack(((1 - a) * (1 - b), a * (1 - b), (1 - a) * b, a * b)),
    )


class Planner:
    """The adversary that leaves least of a policy's return; `radius`: of the ball in each feature, raw."""

    def __init__(self, policy: Policy, radius: Sequence[float] | Array) -> None:
        self.policy, self.radius = policy, np.asarray(radius, float)
        angle, speed = (part.ravel() for part in np.meshgrid(ANGLES, SPEEDS, indexing="ij"))
        torques = self.torques(observed(angle, speed))
        ways = [_after(angle, speed, torque) for torque in (torques.min(0), torques.max(0), torques[UNMOVED])]
        self.value = np.zeros(len(angle))
        """Of the points of the grid with a whole episode to come."""
        for _ in range(LENGTH):
            self.value = np.min([self._then(*way) for way in ways], axis=0)

    def torques(self, obs: Array) -> Array:
        """What the policy makes of every corner of the ball, [27, n]."""
        rows = (obs + self.radius * CORNERS[:, None]).reshape(-1, 3)
        return self.policy(rows).reshape(len(CORNERS), -1)

    def choice(self, obs: Array) -> Array:
        """The corner for each observation, [n, 3] in units of the ball: where the return to come is least."""
        angle, speed, torques = np.arctan2(obs[:, 1], obs[:, 0]), obs[:, 2], self.torques(obs)
        found = np.stack([self._then(*_after(angle, speed, torque)) for torque in torques])
        chosen: Array = CORNERS[found.argmin(0)]
        return chosen

    def mean_return(self) -> float:
        """Of episodes from Gymnasium's starts, as the grid knows it: about 10 too low."""
        return float(self.value.reshape(len(ANGLES), -1)[:, np.abs(SPEEDS) <= 1.0].mean())

    def _then(self, reward: Array, points: NDArray[np.int64], weights: Array) -> Array:
        found: Array = reward + (weights * self.value[points]).sum(0)
        return found


class PlannedAttack(AttackedPolicy):
    """An agent without memory under the `Planner` that was made against it."""

    def __init__(self, agent: AttackableAgent, attack: Attack, mask: Tensor) -> None:
        super().__init__(agent, attack, mask)
        self.planner = Planner(self._torques, (attack.epsilon * self.mask * self.units).numpy())

    @torch.no_grad()
    def _torques(self, obs: Array) -> Array:
        rows = torch.as_tensor(obs, dtype=torch.float32)
        memories, start = self.initial_memories(len(rows)), torch.ones(len(rows), dtype=torch.bool)
        chosen: Array = self.act(rows, memories, start)[0][:, 0].double().numpy()
        return chosen

    def perturbed(
        self,
        obs: Tensor,
        memories: Memories,  # noqa: ARG002
        others: Memories,
        episode_start: Tensor,  # noqa: ARG002
    ) -> tuple[Tensor, Memories]:
        corner = torch.as_tensor(self.planner.choice(obs.double().numpy()), dtype=obs.dtype)
        return self.ball(obs).displace(obs, corner), others


def by_hand(obs: Array) -> Array:
    """A controller that does not mind the ball: full torque against any fall, and a push where nothing is certain."""
    angle, speed = np.arctan2(obs[:, 1], obs[:, 0]), obs[:, 2]
    falling = angle + speed / 3.96
    energy = 0.5 * speed**2 + 15.0 * (np.cos(angle) - 1.0)
    push = 2.0 * np.where(np.abs(speed) < 0.31, 1.0, np.sign(speed))
    swing = np.where(energy > 0.08, -2.0 * np.clip(0.86 * speed, -1.0, 1.0), push)
    near = (np.abs(falling) < 1.18) & (np.abs(angle) < 1.38)
    return np.where(near, -2.0 * np.clip(14.6 * falling, -1.0, 1.0), swing)


def main() -> None:
    for epsilon in (0.0, 0.08, 0.12, 0.15, 0.2):
        found = Planner(by_hand, epsilon * np.array(UNITS)).mean_return()
        print(f"ε = {epsilon:g}: {found:.0f} at worst, by hand")


if __name__ == "__main__":
    main()

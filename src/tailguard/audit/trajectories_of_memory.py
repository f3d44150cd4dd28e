"""Checks of trajectories: the state of the LSTM at the ends of episodes, and how environments restart."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from torch import Tensor

from tailguard.algorithm.rollout import Rollout
from tailguard.audit.registry import Measurement, at_most, none_of, register_check, worst
from tailguard.audit.subject import ScriptedEnv, Subject
from tailguard.envs.gym import GymnasiumEnv
from tailguard.models.memory import MemoryState
from tailguard.models.trunk import Trunk


def gap(one: Tensor, other: Tensor) -> float:
    """Largest difference; infinite where a number is not finite."""
    return float((one.double() - other.double()).abs().nan_to_num(math.inf).max()) if one.numel() else 0.0


def state_gap(one: MemoryState, other: MemoryState) -> float:
    """The same of two states."""
    return max((gap(*parts) for parts in zip(one, other, strict=True)), default=0.0)


# --- the state of the memory -----------------------------------------------------------------------------------------


def reset_gaps(trunk: Trunk, obs: Tensor) -> list[Measurement]:
    """A reset of some environments, against a fresh state for them and no reset for the others."""
    count = obs.shape[1]
    never, some = torch.zeros(count, dtype=torch.bool), torch.arange(count) % 3 == 0
    with torch.no_grad():
        _, used = trunk.sequence(obs, trunk.memory.initial_state(count), torch.zeros(obs.shape[:2], dtype=torch.bool))
        output, after = trunk.step(obs[0], used, some)
        kept, kept_after = trunk.step(obs[0], used, never)
        fresh, fresh_after = trunk.step(obs[0], trunk.memory.initial_state(count), never)
    expected = torch.where(some[:, None], fresh, kept)
    states = tuple(torch.where(some[None, :, None], *parts) for parts in zip(fresh_after, kept_after, strict=True))
    return [
        at_most("change of environments that did not reset, and remains in those that did",
                max(gap(output, expected), state_gap(after, states)), 1e-5),
    ]  # fmt: skip


def fused_gaps(trunk: Trunk, obs: Tensor, start: Tensor) -> list[Measurement]:
    """A segment in one call, against the same rows one by one."""
    state: MemoryState = trunk.memory.initial_state(obs.shape[1])
    first, rows = state, []
    with torch.no_grad():
        for row, flags in zip(obs, start, strict=True):
            output, state = trunk.step(row, state, flags)
            rows.append(output)
        stepped = torch.stack(rows)
        found = []
        for resets in (None, True):
            whole, last = trunk.sequence(obs, first, start, inner_resets=resets)
            found.append(max(gap(whole, stepped), state_gap(last, state)))
    return [at_most("gap of a segment in one call to the same rows one by one", max(found), 1e-5)]


def _stored_gap(subject: Subject, memory: str) -> Measurement:
    """The state stored with a rollout, against the rows of the rollout before it, read one by one."""
    learner = subject.learner(
        ScriptedEnv(end_probability=0.1, seed=subject.seed), memory=memory, learning_rate=0.0, optimizer="adam"
    )
    rollouts: list[Rollout] = []

    def keep(rollout: Rollout) -> bool:
        rollouts.append(rollout)
        return True

    for _ in range(2):
        learner.iterate(keep)
    before, following = rollouts
    gaps = []
    for trunk, state, stored in zip(
        learner.policy.each_trunk(), before.start_state, following.start_state, strict=True
    ):
        for row, flags in zip(before.scaled_obs, before.episode_start, strict=True):
            with torch.no_grad():
                _, state = trunk.step(row, state, flags)
        gaps.append(state_gap(state, stored))
    return at_most("gap of the state stored with a rollout to the one before its first row", max(gaps), 1e-5)


@register_check(
    "T4",
    "Is the memory reset where an episode starts, there alone, and stored as it is before the row?",
    why="A reset of all environments at once takes the memory from episodes that go on. A state stored after its row "
    "lets learning see every observation twice.",
    remedy="Clear the state by a mask of the environments that start, before the row is read; see models/memory.py.",
    fast=True,
)
def memory_is_reset_in_place(subject: Subject) -> Measurement:
    memory = subject.parts.get("memory", "separate")
    memory = "separate" if memory == "none" else memory
    draw = torch.Generator().manual_seed(subject.seed)
    learner = subject.learner(memory=memory)
    found = [_stored_gap(subject, memory)]
    for trunk in learner.policy.each_trunk():
        obs = torch.randn(10, 6, 3, generator=draw)
        for share in (0.0, 0.05, 0.4):
            start = torch.rand(10, 6, generator=draw) < share
            found += fused_gaps(trunk, obs, start)
        found += reset_gaps(trunk, obs)
    return worst(found)


# --- how environments restart ----------------------------------------------------------------------------------------

EPISODES = ((3, "terminated"), (1, "truncated"), (4, "truncated"), (2, "terminated"), (1, "terminated"))
"""Length and end of episodes, repeated for ever; environment i starts at entry i."""
Transition = tuple[tuple[float, ...], float, bool, bool, tuple[float, ...]]
"""Observation, reward, terminated, truncated and true successor."""


class CountingEnv(gymnasium.Env[Any, Any]):
    """Shows the number of its episode and of the step in it, and pays what depends on both and on the action."""

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float64)
    action_space = spaces.Discrete(3)

    def __init__(self, offset: int) -> None:
        self.episode, self.time = offset - 1, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """The next episode."""
        super().reset(seed=seed, options=options)
        self.episode, self.time = self.episode + 1, 0
        return np.array([self.episode, self.time], float), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """One step."""
        self.time += 1
        length, end = EPISODES[self.episode % len(EPISODES)]
        over = self.time == length
        observation = np.array([self.episode, self.time], float)
        reward = self.time + 10.0 * self.episode + 100.0 * float(action)
        return observation, reward, over and end == "terminated", over and end == "truncated", {}


def chosen(observation: Any) -> Any:
    """A choice that depends on what is seen."""
    return (observation[..., 0] + 2 * observation[..., 1]).astype(np.int64) % 3


def by_hand(env: CountingEnv, count: int) -> list[Transition]:
    """Transitions of one environment that is stepped and restarted by hand."""
    found: list[Transition] = []
    seen, _ = env.reset(seed=0)
    for _ in range(count):
        successor, reward, terminated, truncated, _ = env.step(chosen(seen))
        found.append((tuple(seen), reward, terminated, truncated, tuple(successor)))
        seen = env.reset()[0] if terminated or truncated else successor
    return found


def through_adapter(mode: AutoresetMode, environments: int, steps: int) -> list[list[Transition]]:
    """The valid transitions of each environment behind the adapter, in this autoreset mode."""

    def make(offset: int) -> Callable[[], CountingEnv]:
        return lambda: CountingEnv(offset)

    env = GymnasiumEnv(SyncVectorEnv([make(number) for number in range(environments)], autoreset_mode=mode))
    found: list[list[Transition]] = [[] for _ in range(environments)]
    obs = env.reset(0)
    for _ in range(steps):
        step = env.step(torch.from_numpy(chosen(obs.numpy())).reshape(environments, 1))
        for number in step.valid.nonzero().flatten().tolist():
            flags = bool(step.terminated[number]), bool(step.truncated[number])
            seen, successor = tuple(obs[number].tolist()), tuple(step.final_obs[number].tolist())
            found[number].append((seen, float(step.reward[number]), *flags, successor))
        obs = step.obs
    env.close()
    return found


def _with_dead_rows(subject: Subject, *, poisoned: bool) -> list[Tensor]:
    """The weights after three iterations with rows in which nothing happens, whose numbers can be poisoned."""
    env = ScriptedEnv(end_probability=0.2, dead_rows=True, seed=subject.seed)
    if poisoned:
        env.reward[~env.valid] = math.nan
        # What is shown there is the last observation of the episode before; a bounded one, as it enters the network.
        env.obs[~env.valid] += 3.0
    learner = subject.learner(env)
    for _ in range(3):
        learner.iterate()
    return [parameter.detach() for parameter in learner.policy.parameters()]


@register_check(
    "T5",
    "Do all ways to restart an environment give the same transitions, and rows in which nothing happens no loss?",
    why="In one autoreset mode the last observation is in the infos, in another the next step only restarts. Taken for "
    "a transition, that step pays the end of one episode for an action of the next.",
    remedy="State metadata['autoreset_mode'] of the environment; see envs/gym.py. Rows that are not valid have weight "
    "0 in every loss and statistic.",
    fast=True,
)
def restarts_are_exact(subject: Subject) -> Measurement:
    wrong = []
    for mode in AutoresetMode:
        for number, found in enumerate(through_adapter(mode, 3, 40)):
            expected = by_hand(CountingEnv(number), len(found))
            differing = [row for row, pair in enumerate(zip(found, expected, strict=True)) if pair[0] != pair[1]]
            if len(found) < 20 or differing:
                wrong.append(f"{mode.name}, environment {number}: transitions {differing[:3]} of {len(found)} differ")
    pairs = zip(_with_dead_rows(subject, poisoned=False), _with_dead_rows(subject, poisoned=True), strict=True)
    change = max(gap(plain, poisoned) for plain, poisoned in pairs)
    return worst(
        [
            none_of("autoreset modes with other transitions than a loop by hand", wrong),
            at_most("change of any weight by numbers in rows in which nothing happens", change, 0.0),
        ]
    )

"""Several agents as one: the mean of their actions, times an exposure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tailguard._version import __version__
from tailguard.algorithm.learner import Learner
from tailguard.algorithm.saving import MEMBERS, PARTS, capture, describe, find_agent, rebuild
from tailguard.algorithm.saving import load_agent as load_learner
from tailguard.envs.protocol import Box
from tailguard.envs.spec import TradingSpec
from tailguard.errors import CheckpointError, ConfigError
from tailguard.models.inference import ScaledNetwork, StepPolicy
from tailguard.risk.exposure import Exposure
from tailguard.risk.throttle import Throttle
from tailguard.sealed import read_about, read_sealed, write_sealed
from tailguard.validate import check_range

MOST_MEMBERS = 1024
"""A description that claims more is refused."""


class Ensemble:
    """Agents with the same observations and actions, which trade as one account.

    The action is the mean of the members' most likely actions times `exposure`, within the action's bounds. Each
    member keeps a memory of its own; all of them see the one account.

    `members`: at least one; agents with continuous actions, trained on the same features and scaling.
    `exposure`: a factor on the mean action, or an `Exposure` that also says how it was calibrated.
    `throttled`: whether realised losses reduce the exposure further in backtests and trading: a `Throttle` as it is
    before the first loss, or True for the one of the calibrated limit.
    """

    def __init__(
        self, members: Sequence[Learner], exposure: float | Exposure = 1.0, *, throttled: bool | Throttle = False
    ) -> None:
        if not members:
            raise ConfigError("members: an ensemble needs at least one agent")
        self.members = tuple(members)
        self.calibration = exposure if isinstance(exposure, Exposure) else None
        """How the exposure was calibrated; None where it was given."""
        self.exposure = exposure.factor if isinstance(exposure, Exposure) else exposure
        check_range("exposure", self.exposure, low=0)
        self._throttle = self._fresh_throttle(throttled)
        if self.spec is not None:
            self.spec.constraints.check_fits(throttled=self.throttled)
        first = self.members[0]
        if not isinstance(first.env.action_space, Box):
            raise ConfigError(
                "members: discrete choices have no mean; an ensemble needs agents with continuous actions"
            )
        for member in self.members[1:]:
            _check_alike(first, member)
        self._low, self._high = (bound.cpu() for bound in (first.env.action_space.low, first.env.action_space.high))
        if first.policy.layout is not None:  # the same for all assets, of which there may be any number
            self._low, self._high = self._low[:1], self._high[:1]

    @property
    def spec(self) -> TradingSpec | None:
        """What the members need to trade new bars; None if they were not trained on bars."""
        return self.members[0].spec

    @property
    def throttled(self) -> bool:
        """Whether realised losses reduce the exposure further."""
        return self._throttle is not None

    @property
    def num_timesteps(self) -> int:
        """Environment steps of the member that took most of them."""
        return max(member.num_timesteps for member in self.members)

    def predict(
        self,
        observation: Any,
        state: tuple[NDArray[Any], ...] | None = None,
        episode_start: NDArray[Any] | None = None,
        deterministic: bool = True,
    ) -> tuple[NDArray[Any], tuple[NDArray[Any], ...] | None]:
        """The mean action, and the members' memories to give back with the next observation; as in SB3.

        `deterministic`: False is refused, because the mean of sampled actions is no sample of any policy.
        """
        if not deterministic:
            raise ConfigError("predict: an ensemble acts without exploration; give deterministic=True")
        actions, after = [], []
        for member, memory in zip(self.members, self._split(state), strict=True):
            action, memory = member.predict(observation, memory, episode_start, deterministic=True)
            actions.append(torch.as_tensor(action))
            after.append(memory)
        combined = self.combine(actions).numpy()
        return combined, None if after[0] is None else tuple(part for memory in after for part in memory or ())

    def inference_policy(self) -> StepPolicy:
        """The policy for one environment, step by step: the actions of `predict`, bit for bit, faster."""
        policies = [member.inference_policy() for member in self.members]

        def step(observation: Tensor, reset: bool) -> Tensor:
            return self.combine([policy(observation, reset) for policy in policies])

        return step

    def make_throttle(self) -> Throttle | None:
        """A fresh throttle for an account that the ensemble trades; None where it has none."""
        return None if self._throttle is None else replace(self._throttle)

    def _fresh_throttle(self, throttled: bool | Throttle) -> Throttle | None:
        if isinstance(throttled, Throttle):
            return replace(throttled)
        if not throttled:
            return None
        if self.calibration is None:
            raise ConfigError("throttled: a throttle follows a limit. Give a calibrated exposure, or a Throttle")
        return Throttle(self.calibration.limit, self.calibration.alpha)

    def scaled_networks(self, observation_size: int | None = None) -> tuple[ScaledNetwork, ...]:
        """The members' networks, with their inputs' scaling."""
        return tuple(network for member in self.members for network in member.scaled_networks(observation_size))

    def combine(self, actions: Sequence[Tensor]) -> Tensor:
        """The ensemble's action from those of its members: their mean times the exposure, within the bounds."""
        mean = actions[0] if len(actions) == 1 else torch.stack(list(actions)).mean(0)
        return (mean * self.exposure).clamp(self._low, self._high)

    def _split(self, state: tuple[NDArray[Any], ...] | None) -> list[tuple[NDArray[Any], ...] | None]:
        """The memory of each member; None at the start."""
        if state is None:
            return [None] * len(self.members)
        each, rest = divmod(len(state), len(self.members))
        if rest or not each:
            raise ConfigError(
                f"state has {len(state)} parts for {len(self.members)} members. Give back what the last predict "
                "returned, or None at the start"
            )
        return [tuple(state[each * member : each * (member + 1)]) for member in range(len(self.members))]

    def save(self, path: str | Path) -> None:
        """Write all members and the exposure to the folder `path`."""
        parts: dict[str, Mapping[str, Any]] = {}
        for number, member in enumerate(self.members):
            captured = capture(member)
            parts |= {name: captured[part] for name, part in zip(_names(number), PARTS, strict=True)}
        about = {
            "tailguard": __version__,
            "exposure": self.exposure,
            "throttled": self.throttled,
            "throttle": None if self._throttle is None else asdict(self._throttle),
            "calibration": None if self.calibration is None else asdict(self.calibration),
            MEMBERS: [describe(member) for member in self.members],
        }
        write_sealed(Path(path), parts, about)

    @classmethod
    def load(cls, path: str | Path, device: torch.device | str | None = None) -> Ensemble:
        """Read an ensemble that `save` wrote; it can predict and be backtested."""
        folder = find_agent(Path(path))
        try:
            count = len(read_about(folder)[MEMBERS])
            if not 0 < count <= MOST_MEMBERS:
                raise CheckpointError(f"{folder}: {count} members; 1 to {MOST_MEMBERS} are read")
            names = [_names(number) for number in range(count)]
            about, parts = read_sealed(folder, [name for pair in names for name in pair])
            members: list[Learner] = [
                rebuild(
                    member, {part: parts[name] for part, name in zip(PARTS, pair, strict=True)}, folder, None, device
                )
                for member, pair in zip(about[MEMBERS], names, strict=True)
            ]
            calibration = about["calibration"]
            exposure = about["exposure"] if calibration is None else Exposure.from_dict(calibration)
            throttle = about.get("throttle")  # agents of before have that of their calibration alone
            throttled = bool(about["throttled"]) if throttle is None else Throttle(**throttle)
            return cls(members, exposure, throttled=throttled)
        except (LookupError, TypeError, AttributeError, ValueError) as error:
            raise CheckpointError(f"{folder}: not the description of an ensemble: {error!r}") from error


def load_agent(path: str | Path) -> Learner | Ensemble:
    """The agent in the folder `path`, whichever learner trained it, or the ensemble: to predict and to backtest."""
    folder = find_agent(Path(path))
    if MEMBERS in read_about(folder):
        return Ensemble.load(folder)
    agent: Learner = load_learner(folder)
    return agent


def _names(member: int) -> tuple[str, ...]:
    """The parts of a member in the ensemble's folder."""
    return tuple(f"{part}_{member}" for part in PARTS)


def _check_alike(first: Learner, other: Learner) -> None:
    """Refuse members that read other observations, act in another space or scale features differently."""
    one, two = first.env, other.env
    same_space = isinstance(two.action_space, Box) and np.array_equal(
        torch.stack([one.action_space.low, one.action_space.high]).cpu(),  # type: ignore[union-attr]
        torch.stack([two.action_space.low, two.action_space.high]).cpu(),
    )
    if one.observation_size != two.observation_size or not same_space:
        raise ConfigError("members: agents of an ensemble must have the same observations and actions")
    specs = [None if agent.spec is None else agent.spec.scaler.digest() for agent in (first, other)]
    if specs[0] != specs[1]:
        raise ConfigError(
            "members: agents of an ensemble must be trained with the same features and scaling. Give each the scaler "
            "of the first: TradingEnv(bars, scaler=agent.spec.scaler)"
        )

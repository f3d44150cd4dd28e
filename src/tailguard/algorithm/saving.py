"""Agents on disk: safetensors and JSON, so that reading one can never run code."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from tailguard._version import __version__
from tailguard.algorithm.config import PPOConfig
from tailguard.algorithm.ppo import DistributionalPPO
from tailguard.algorithm.schedules import EntropyState
from tailguard.algorithm.update import LossTerm
from tailguard.envs.adapt import FlatInputs, GymnasiumInputs
from tailguard.envs.protocol import ActionSpace, Box, Discrete, Step
from tailguard.envs.spec import TradingSpec
from tailguard.errors import TailguardError

WEIGHTS = "weights.safetensors"
DESCRIPTION = "agent.json"
FORMAT = 1


def save_agent(agent: DistributionalPPO, folder: Path) -> None:
    """Weights, statistics, optimiser moments and the random stream as tensors; everything else as JSON.

    The environment and its running episodes are not part of it: a loaded agent goes on with fresh ones.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {f"agent/{name}": value for name, value in agent.agent.state_dict().items()}
    tensors |= {f"observations/{name}": value for name, value in agent.observation_moments.state_dict().items()}
    tensors |= {f"returns/{name}": value for name, value in agent.return_moments.state_dict().items()}
    tensors["generator"] = agent.generator.get_state()
    for name, parameter in agent.agent.named_parameters():
        moments = agent.optimizer.state.get(parameter, {})
        tensors |= {f"optimizer/{name}/{key}": value for key, value in moments.items()}
    save_file({name: value.detach().cpu().contiguous() for name, value in tensors.items()}, folder / WEIGHTS)
    state = agent.state
    description = {
        "format": FORMAT,
        "tailguard": __version__,
        "config": dataclasses.asdict(agent.config),
        "seed": agent.seed,
        "device": agent.device.type,
        "learner": {
            "num_timesteps": state.num_timesteps,
            "iteration": state.iteration,
            "kl_coef": state.kl_coef,
            "entropy": state.entropy.to_dict(),
            "skipped": state.skipped,
            "degenerate": state.degenerate,
        },
        "observation_size": agent.env.observation_size,
        "action_space": _describe_space(agent.env.action_space),
        "plain_rows": _reads_plain_rows(agent),
        "spec": None if agent.spec is None else agent.spec.to_dict(),
    }
    (folder / DESCRIPTION).write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")


def load_agent(
    folder: Path, env: Any, device: torch.device | str | None, extensions: Sequence[LossTerm]
) -> DistributionalPPO:
    """Build the agent that the folder describes and fill in its tensors."""
    description, tensors = _read(folder)
    try:
        config = PPOConfig.from_dict(description["config"])
        space = _read_space(description["action_space"])
        spec = None if description["spec"] is None else TradingSpec.from_dict(description["spec"])
        inputs = FlatInputs(description["observation_size"], space, spec)
        if env is None and not description["plain_rows"]:
            raise TailguardError(
                f"{folder}: the agent's observations or actions are not plain rows of numbers, and only its "
                "environment can translate them; give load(..., env=…)"
            )
        stand_in = _NoEnv(inputs, torch.device(device or "cpu"))
        agent = DistributionalPPO(
            stand_in if env is None else env, config, seed=description["seed"], device=device, extensions=extensions
        )
        if env is None:
            agent.inputs = inputs
        else:
            _check_env(folder, description, spec, agent)
        _fill(agent, description, tensors, folder)
    except (KeyError, TypeError) as error:
        raise TailguardError(f"{folder / DESCRIPTION}: not the description of an agent: {error!r}") from error
    return agent


def _check_env(folder: Path, description: dict[str, Any], spec: TradingSpec | None, agent: DistributionalPPO) -> None:
    """Refuse an environment that asks for other actions, or shows other numbers, than the agent has learned with."""
    size, space = agent.env.observation_size, _describe_space(agent.env.action_space)
    if (size, space) != (description["observation_size"], description["action_space"]):
        raise TailguardError(
            f"{folder}: the agent reads {description['observation_size']} numbers and acts in "
            f"{description['action_space']}; this environment has {size} and {space}"
        )
    if spec is not None and agent.spec is not None and spec.scaler.digest() != agent.spec.scaler.digest():
        known, shown = spec.scaler.names, agent.spec.scaler.names
        what = "the same features on another scale" if known == shown else ", ".join(shown)
        raise TailguardError(
            f"{folder}: the agent has learned with {', '.join(known)}; this environment shows {what}. Make it with the "
            "agent's own scaler: TradingEnv(bars, scaler=DistributionalPPO.load(path).spec.scaler)"
        )


def _reads_plain_rows(agent: DistributionalPPO) -> bool:
    """Whether rows of numbers in and out are all that `predict` needs, so that it can do without the environment."""
    if not isinstance(agent.inputs, GymnasiumInputs):
        return True
    env = agent.inputs.env
    space, choice = env.action_space, env.actions.smallest
    counted_from_zero = choice is None or not choice.any()
    shape = (space.size,) if isinstance(space, Box) else (len(space.sizes),) if len(space.sizes) > 1 else ()
    rows = env.vector_env.single_observation_space.shape
    return rows == (env.observation_size,) and counted_from_zero and env.actions.shape == shape


def _fill(agent: DistributionalPPO, description: dict[str, Any], tensors: dict[str, Tensor], folder: Path) -> None:
    def part(prefix: str) -> dict[str, Tensor]:
        return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}

    try:
        agent.agent.load_state_dict(part("agent/"))
        agent.observation_moments.load_state_dict(part("observations/"))
        agent.return_moments.load_state_dict(part("returns/"))
        # A generator's state has a form of its own on every kind of device; elsewhere the stream starts anew.
        if description["device"] == agent.device.type:
            agent.generator.set_state(tensors["generator"])
    except (RuntimeError, KeyError) as error:
        raise TailguardError(
            f"{folder / WEIGHTS}: the weights do not fit the agent described beside them: {error}"
        ) from error
    for name, parameter in agent.agent.named_parameters():
        moments = part(f"optimizer/{name}/")
        if moments:
            agent.optimizer.state[parameter] = {key: value.to(parameter.device) for key, value in moments.items()}
    learner = dict(description["learner"])
    agent.state = dataclasses.replace(agent.state, entropy=EntropyState.from_dict(learner.pop("entropy")), **learner)


def _read(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    for name in (DESCRIPTION, WEIGHTS):
        if not (folder / name).is_file():
            raise TailguardError(f"{folder}: no agent here: {name} is missing")
    try:
        description = json.loads((folder / DESCRIPTION).read_text(encoding="utf-8"))
        tensors = load_file(folder / WEIGHTS)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise TailguardError(f"{folder / DESCRIPTION}: not readable as JSON: {error}") from error
    except SafetensorError as error:
        raise TailguardError(f"{folder / WEIGHTS}: not readable as safetensors: {error}") from error
    found = description.get("format") if isinstance(description, dict) else None
    if found != FORMAT:
        raise TailguardError(f"{folder / DESCRIPTION}: format {found!r}; this version reads {FORMAT}")
    return description, tensors


def _describe_space(space: ActionSpace) -> dict[str, Any]:
    if isinstance(space, Discrete):
        return {"sizes": list(space.sizes)}
    return {"low": space.low.tolist(), "high": space.high.tolist()}


def _read_space(description: dict[str, Any]) -> ActionSpace:
    if "sizes" in description:
        return Discrete(tuple(description["sizes"]))
    return Box(torch.tensor(description["low"]), torch.tensor(description["high"]))


class _NoEnv:
    """The shape of an environment, without one: enough to predict, refuses to step."""

    num_envs = 1

    def __init__(self, inputs: FlatInputs, device: torch.device) -> None:
        self.observation_size, self.action_space, self.device = inputs.observation_size, inputs.action_space, device

    def reset(self, seed: int | None = None) -> Tensor:  # noqa: ARG002
        raise TailguardError("this agent was loaded without an environment, so it cannot learn; give load(..., env=…)")

    def step(self, action: Tensor) -> Step:  # noqa: ARG002
        raise TailguardError("this agent was loaded without an environment, so it cannot learn; give load(..., env=…)")

    def state_dict(self) -> dict[str, Tensor]:
        return {}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        pass

    def close(self) -> None:
        pass

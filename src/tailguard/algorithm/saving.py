"""Agents on disk: safetensors and JSON, so that reading one can never run code."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from tailguard._version import __version__
from tailguard.envs.adapt import FlatInputs, PolicyInputs
from tailguard.envs.protocol import ActionSpace, Box, Discrete, Step
from tailguard.envs.spec import TradingSpec
from tailguard.errors import TailguardError

if TYPE_CHECKING:
    from tailguard.algorithm.ppo import DistributionalPPO

WEIGHTS = "weights.safetensors"
DESCRIPTION = "agent.json"
FORMAT = 1


def save_agent(agent: DistributionalPPO, folder: Path) -> None:
    """Weights, statistics and optimiser moments as tensors; everything else as JSON."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {f"agent/{name}": value for name, value in agent.agent.state_dict().items()}
    tensors |= {f"observations/{name}": value for name, value in agent.observation_moments.state_dict().items()}
    tensors |= {f"returns/{name}": value for name, value in agent.return_moments.state_dict().items()}
    names = {parameter: name for name, parameter in agent.agent.named_parameters()}
    for parameter, moments in agent.optimizer.state.items():
        tensors |= {f"optimizer/{names[parameter]}/{name}": value for name, value in moments.items()}
    save_file({name: value.detach().cpu().contiguous() for name, value in tensors.items()}, folder / WEIGHTS)
    description = {
        "format": FORMAT,
        "tailguard": __version__,
        "config": dataclasses.asdict(agent.config),
        "seed": agent.seed,
        "num_timesteps": agent.num_timesteps,
        "observation_size": agent.env.observation_size,
        "action_space": _describe_space(agent.env.action_space),
        "spec": None if agent.spec is None else agent.spec.to_dict(),
    }
    (folder / DESCRIPTION).write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")


def load_agent(folder: Path, env: Any, device: torch.device | str | None) -> DistributionalPPO:
    """Build the agent that the folder describes and fill in its tensors."""
    from tailguard.algorithm.config import PPOConfig
    from tailguard.algorithm.ppo import DistributionalPPO
    from tailguard.models.agent import NetworkConfig

    description, tensors = _read(folder)
    settings = dict(description["config"])
    network = {name: _tuples(value) for name, value in settings.pop("network").items()}
    config = PPOConfig(network=NetworkConfig(**network), **settings)
    space = _read_space(description["action_space"])
    spec = None if description["spec"] is None else TradingSpec.from_dict(description["spec"])
    inputs = FlatInputs(description["observation_size"], space, spec)
    stand_in = _NoEnv(inputs, torch.device(device or "cpu"))
    agent = DistributionalPPO(stand_in if env is None else env, config, seed=description["seed"], device=device)
    if env is None:
        agent.inputs = inputs
    elif (agent.env.observation_size, _describe_space(agent.env.action_space)) != (
        description["observation_size"],
        description["action_space"],
    ):
        raise TailguardError(
            f"{folder}: the agent reads {description['observation_size']} numbers and acts in "
            f"{description['action_space']}; this environment has {agent.env.observation_size} and "
            f"{_describe_space(agent.env.action_space)}"
        )
    _fill(agent, tensors, folder)
    return agent


def _fill(agent: DistributionalPPO, tensors: dict[str, Tensor], folder: Path) -> None:
    def part(prefix: str) -> dict[str, Tensor]:
        return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}

    try:
        agent.agent.load_state_dict(part("agent/"))
        agent.observation_moments.load_state_dict(part("observations/"))
        agent.return_moments.load_state_dict(part("returns/"))
    except (RuntimeError, KeyError) as error:
        raise TailguardError(f"{folder / WEIGHTS}: the weights do not fit the agent described beside them: {error}") from error
    for name, parameter in agent.agent.named_parameters():
        moments = part(f"optimizer/{name}/")
        if moments:
            agent.optimizer.state[parameter] = {
                key: value.to(parameter.device if value.dim() else "cpu") for key, value in moments.items()
            }


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
    if description.get("format") != FORMAT:
        raise TailguardError(f"{folder / DESCRIPTION}: format {description.get('format')!r}; this version reads {FORMAT}")
    return description, tensors


def _describe_space(space: ActionSpace) -> dict[str, Any]:
    if isinstance(space, Discrete):
        return {"sizes": list(space.sizes)}
    return {"low": space.low.tolist(), "high": space.high.tolist()}


def _read_space(description: dict[str, Any]) -> ActionSpace:
    if "sizes" in description:
        return Discrete(tuple(description["sizes"]))
    return Box(torch.tensor(description["low"]), torch.tensor(description["high"]))


def _tuples(value: Any) -> Any:
    """JSON has lists where the config has tuples."""
    return tuple(value) if isinstance(value, list) else value


class _NoEnv:
    """The shape of an environment, without one: enough to predict, refuses to step."""

    num_envs = 1

    def __init__(self, inputs: PolicyInputs, device: torch.device) -> None:
        assert isinstance(inputs, FlatInputs)
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

"""Save and load agents: complete, restored exactly or with new episodes, and validated before use."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from tailguard._version import __version__
from tailguard.algorithm.config import LearnerConfig, PathwiseConfig, PPOConfig
from tailguard.algorithm.learner import Learner
from tailguard.algorithm.learner_state import LearnerState
from tailguard.algorithm.pathwise import PathwiseLearner
from tailguard.algorithm.ppo import DistributionalPPO
from tailguard.algorithm.rollout import RolloutState
from tailguard.envs.adapt import FlatInputs, GymnasiumInputs, as_vector_env, policy_inputs
from tailguard.envs.asset_layout import AssetLayout
from tailguard.envs.protocol import ActionSpace, Box, Discrete, Step, VectorEnv
from tailguard.envs.spec import TradingSpec
from tailguard.errors import CheckpointError, ConfigError, TailguardError
from tailguard.models.policy import ActorCritic
from tailguard.monitor.health import HealthMonitor
from tailguard.places import recover
from tailguard.risk.config import RiskConfig
from tailguard.robust.config import RobustConfig
from tailguard.sealed import State, flat_tensors, read_about, read_sealed, write_sealed

AnyLearner = TypeVar("AnyLearner", bound=Learner)
LEARNERS: dict[str, tuple[Any, type[LearnerConfig]]] = {
    DistributionalPPO.kind: (DistributionalPPO, PPOConfig),
    PathwiseLearner.kind: (PathwiseLearner, PathwiseConfig),
}
"""Learners by their names, each with its settings."""

MEMBERS = "members"
"""Entry of an ensemble's description that an agent's does not have."""
PARTS = ("weights", "state")
"""Files of a saved agent: what it is, and what it needs to continue learning."""
EPISODES = ("episodes", "running_losses", "predictions", "env")
"""Parts of the state that belong to the running episodes."""
PARAMETERS = {"policy": "agent", "policy.optimizer": "optimizer", "observations": "observations", "returns": "returns"}
"""What `get_parameters` gives, SB3's names first, and the learner's parts they come from."""
FINITE = ("optimizer", "observations", "returns")
"""Parts of the state that every action or update depends on: one NaN in them spreads to all numbers."""
STREAMS = ("generator", "prediction_generator", "robust")


def save_agent(agent: Learner, folder: Path) -> None:
    """Write the agent to a folder of its own; an agent that is there already is replaced."""
    write_sealed(folder, capture(agent), describe(agent))


def load_agent(
    folder: Path,
    env: Any = None,
    device: torch.device | str | None = None,
    kind: type[AnyLearner] | None = None,
    **options: Any,
) -> AnyLearner:
    """Build the agent that the folder describes and load its state; it continues with fresh episodes.

    `kind`: the learner to continue with; none: the one that trained it. With another one the agent keeps its weights
    and statistics, and everything else starts fresh.
    """
    folder = find_agent(folder)
    if MEMBERS in read_about(folder):
        raise CheckpointError(f"{folder}: an ensemble of agents; load it with tg.load_agent or tg.Ensemble.load")
    about, parts = read_sealed(folder, PARTS)
    return rebuild(about, parts, folder, env, device, kind, **options)


def rebuild(
    about: Mapping[str, Any],
    parts: Mapping[str, State],
    folder: Path,
    env: Any = None,
    device: torch.device | str | None = None,
    kind: type[AnyLearner] | None = None,
    **options: Any,
) -> AnyLearner:
    """The agent of a description and its parts, as `describe` and `capture` return them; see `load_agent`.

    `folder`: where they come from, for messages.
    """
    try:
        trained_by, config_kind = LEARNERS[about.get("learner", DistributionalPPO.kind)]
        config = config_kind.from_dict(about["config"])
        space = _read_space(about["action_space"])
        spec = None if about["spec"] is None else TradingSpec.from_dict(about["spec"])
        inputs = FlatInputs(about["observation_size"], space, spec, _layout_of(config, spec))
        if env is None and not about["plain_rows"]:
            raise TailguardError(
                f"{folder}: the agent's observations or actions are not plain rows of numbers, and only its "
                "environment can translate them; give load(..., env=…)"
            )
        _check_outline(f"{folder}", inputs, config, parts["weights"])
        chosen = kind or trained_by
        if chosen is not trained_by:
            config = config.as_kind(LEARNERS[chosen.kind][1])
        agent = chosen(
            _NoEnv(inputs, torch.device(device or "cpu")) if env is None else env,
            config,
            seed=about["seed"],
            device=device,
            risk=None if about["risk"] is None else RiskConfig.from_dict(about["risk"]),
            robust=None if about.get("robust") is None else RobustConfig.from_dict(about["robust"]),
            **options,
        )
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
        raise CheckpointError(f"{folder}: not the description of an agent: {error!r}") from error
    if env is None:
        agent.inputs = inputs
    else:
        _check_env(folder, about, spec, agent.env, agent.spec, any_universe=inputs.layout is not None)
    if chosen is trained_by:
        restore(agent, parts, str(folder), episodes=False)
    else:
        adopt(agent, parts, str(folder))
    return agent


def find_agent(folder: Path) -> Path:
    """The folder, with or without the `.zip` that SB3's callbacks add to some names and not to others."""
    candidates = [folder, folder.with_name(f"{folder.name}.zip")]
    candidates += [folder.with_suffix("")] if folder.suffix == ".zip" else []
    for candidate in candidates:
        if not candidate.is_dir():
            recover(candidate)
        if candidate.is_dir():
            return candidate
    raise CheckpointError(f"{folder}: no agent here: there is no such folder")


def capture(agent: Learner) -> dict[str, State]:
    """Everything that an exact resume needs: weights and the state of every stateful part, running episodes included.

    Weights, moments and statistics that are not finite are refused: training could not continue from them.
    """
    parts = agent.parts()
    weights = parts.pop("agent").state_dict()
    state: dict[str, Any] = {name: part.state_dict() for name, part in parts.items()}
    if agent.state.rollout_state is not None:
        state["env"] = agent.env.state_dict()
    _check_finite("this agent", {"weights": weights, **{name: state[name] for name in FINITE}})
    return {"weights": weights, "state": state}


def describe(agent: Learner) -> dict[str, Any]:
    """What is needed to build the agent before its state is loaded, as JSON."""
    return {
        "tailguard": __version__,
        "learner": agent.kind,
        "config": dataclasses.asdict(agent.config),
        "risk": None if agent.risk is None else dataclasses.asdict(agent.risk.config),
        "robust": dataclasses.asdict(agent.robust) if agent.robust.enabled else None,
        "seed": agent.seed,
        "step": agent.num_timesteps,
        "observation_size": agent.env.observation_size,
        "action_space": _describe_space(agent.env.action_space),
        "plain_rows": _reads_plain_rows(agent),
        "spec": None if agent.spec is None else agent.spec.to_dict(),
    }


def restore(agent: Learner, parts: Mapping[str, State], where: str, *, episodes: bool) -> None:
    """Load what `capture` returned into an agent built with the same settings.

    `where`: the folder it comes from, for messages. `episodes`: also return to the running episodes, so that the agent
    continues exactly as the captured one did; its environment must be of the same kind, on the same data. Otherwise it
    begins fresh ones.
    """
    targets = agent.parts()
    weights, state = parts["weights"], dict(parts["state"])
    _check_fits(weights, targets.pop("agent").state_dict(), "weights", where)
    if not episodes:
        state = {name: part for name, part in state.items() if name not in EPISODES}
        state["learner"] = {name: value for name, value in state.get("learner", {}).items() if name != "carry"}
        targets = {name: part for name, part in targets.items() if name not in EPISODES}
    expected = {name: target.state_dict() for name, target in targets.items()}
    # It fills with alarms, and an agent may go back to a state from before one.
    expected["health"] = HealthMonitor().state_dict()
    if episodes and "carry" in state.get("learner", {}):
        agent.env.reset(agent.seed)  # before that, an environment has no state to compare with
        expected |= {"learner": _with_episodes(agent), "env": agent.env.state_dict()}
    if not episodes and state.get("generator", {}).get("device") != agent.device.type:
        # A random stream has a form of its own on every kind of device; elsewhere the learner begins others.
        expected |= {name: state.get(name, {}) for name in STREAMS if name in expected}
        expected["optimizer"] = {"moments": {}, "generators": {}}
    _check_fits(state, expected, "state", where)
    _check_finite(where, {"weights": weights, **{name: state[name] for name in FINITE}})
    agent.runtime.forget()
    try:
        agent.policy.load_state_dict(weights)
        for name, target in targets.items():
            target.load_state_dict(_on_device(state[name], agent.device) if name == "learner" else state[name])
        if "env" in expected:
            agent.env.load_state_dict(state["env"])
        agent.set_hyper()
    except TailguardError as error:
        raise CheckpointError(f"{where}: {error}") from error
    except (KeyError, TypeError, ValueError, RuntimeError, IndexError, AttributeError) as error:
        raise CheckpointError(f"{where}: the saved state does not fit this agent: {error!r}") from error


def adopt(agent: Learner, parts: Mapping[str, State], where: str) -> None:
    """Take over another learner's weights and statistics; optimiser, budget and episodes start fresh."""
    weights, state = parts["weights"], parts["state"]
    kept = {name: agent.parts()[name] for name in ("observations", "returns")}
    _check_fits(weights, agent.policy.state_dict(), "weights", where)
    for name, part in kept.items():
        _check_fits(state.get(name), part.state_dict(), f"state/{name}", where)
    _check_finite(where, {"weights": weights, **{name: state[name] for name in kept}})
    agent.runtime.forget()
    agent.policy.load_state_dict(weights)
    for name, part in kept.items():
        part.load_state_dict(state[name])


def parameters_of(agent: Learner) -> dict[str, Any]:
    """Copies of the weights, the optimiser's moments and the statistics that observations and returns are scaled by."""
    parts = agent.parts()
    return {name: copy.deepcopy(dict(parts[part].state_dict())) for name, part in PARAMETERS.items()}


def read_parameters(folder: Path) -> dict[str, Any]:
    """The same of a saved agent."""
    parts = read_sealed(find_agent(folder), PARTS)[1]
    state = {"agent": parts["weights"], **parts["state"]}
    return {name: state[part] for name, part in PARAMETERS.items() if part in state}


def put_parameters(agent: Learner, given: Mapping[str, Any], *, exact_match: bool) -> None:
    """Load what `parameters_of` returned, or a part of it if `exact_match` is false. Nothing is changed on an error."""
    parts, where = agent.parts(), "set_parameters"
    unknown = sorted(given.keys() - PARAMETERS.keys())
    missing = sorted(PARAMETERS.keys() - given.keys()) if exact_match else []
    if unknown or missing:
        what = f"{', '.join(unknown)} unknown" if unknown else f"{', '.join(missing)} missing"
        raise ConfigError(f"{where}: {what}; there are {', '.join(PARAMETERS)}. exact_match=False takes some of them")
    new: dict[str, Any] = {}
    for name, values in given.items():
        mine = dict(parts[PARAMETERS[name]].state_dict())
        partial = name == "policy" and not exact_match
        new[name] = {**mine, **values} if partial else values
        if name != "policy.optimizer":  # a fresh one holds nothing that moments could be compared with
            _check_fits(new[name], mine, name, where)
        _check_finite(where, {name: new[name]} if name in ("policy", "policy.optimizer") else {})
    try:
        for name, values in new.items():
            parts[PARAMETERS[name]].load_state_dict(values)
    except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise CheckpointError(f"{where}: the values do not fit this agent: {error!r}") from error
    agent.runtime.forget()
    agent.set_hyper()


def move_to(agent: Learner, env: Any) -> None:
    """Give the agent another environment, as by saving it and loading it there: it begins fresh episodes."""
    vector_env = as_vector_env(env, None, None if isinstance(env, VectorEnv) else agent.device)
    about = describe(agent)
    env_spec, any_universe = policy_inputs(vector_env).spec, agent.policy.layout is not None
    _check_env(Path("set_env"), about, agent.spec, vector_env, env_spec, any_universe=any_universe)
    parts, alarms = capture(agent), agent.alarms
    risk = None if agent.risk is None else agent.risk.config
    options: dict[str, Any] = {"extensions": agent.extensions} if isinstance(agent, DistributionalPPO) else {}
    type(agent).__init__(
        agent,
        vector_env,
        agent.config,
        seed=agent.seed,
        risk=risk,
        robust=agent.robust,
        verbose=agent.verbose,
        tensorboard_log=agent.tensorboard_log,
        **options,
    )
    agent.alarms = alarms
    restore(agent, parts, "set_env", episodes=False)


# --- what must hold before anything is used -------------------------------------------------------------------------


def _check_outline(where: str, inputs: FlatInputs, config: LearnerConfig, weights: State) -> None:
    """Compare the saved weights with the described network before it is built: a description may claim any size."""
    stored = sum(value.numel() for _, value in flat_tensors(weights))
    network = config.network
    largest = max(inputs.observation_size, *network.hidden, network.lstm_size, network.quantiles, network.atoms)
    if max(largest, network.lstm_layers) > 4096 + stored:
        raise CheckpointError(f"{where}: describes a layer of {largest:,} units, and has {stored:,} weights in all")
    try:
        with torch.device("meta"):  # shapes without memory
            outline = ActorCritic(inputs.observation_size, inputs.action_space, network, inputs.layout)
    except RuntimeError as error:
        raise CheckpointError(f"{where}: describes a network that cannot be built: {error}") from error
    _check_fits(weights, outline.state_dict(), "weights", where)


def _check_fits(saved: Any, mine: Any, path: str, where: str) -> None:
    """Raise unless the saved value has the form of this agent's own: names, types, shapes."""
    if isinstance(mine, Tensor):
        if not isinstance(saved, Tensor):
            raise CheckpointError(f"{where}: {path} is not a tensor")
        if saved.shape != mine.shape or saved.dtype != mine.dtype:
            raise CheckpointError(
                f"{where}: {path} has shape {tuple(saved.shape)} of {_name(saved.dtype)}; "
                f"this agent needs {tuple(mine.shape)} of {_name(mine.dtype)}"
            )
    elif isinstance(mine, Mapping):
        if not isinstance(saved, Mapping):
            raise CheckpointError(f"{where}: {path} is not a group of values")
        if not mine and all(map(_is_plain, saved.values())):
            return  # it fills while the agent learns; a fresh agent cannot tell with what
        for name in sorted(mine.keys() ^ saved.keys()):
            what = "is missing" if name in mine else "is unknown to this agent"
            raise CheckpointError(f"{where}: {path}/{name} {what}")
        for name, value in mine.items():
            _check_fits(saved[name], value, f"{path}/{name}", where)
    elif not _is_like(saved, mine):
        raise CheckpointError(f"{where}: {path} is {str(saved)[:80]!r}; {type(mine).__name__} is needed")


def _is_like(saved: Any, mine: Any) -> bool:
    if isinstance(mine, bool) or isinstance(saved, bool):
        return type(saved) is type(mine)
    if isinstance(mine, float):
        return isinstance(saved, int | float)
    if isinstance(mine, list):
        return isinstance(saved, list) and _is_plain(saved)
    return mine is None or isinstance(saved, type(mine))


def _is_plain(value: Any) -> bool:
    """Numbers and tensors, or lists and dicts of them."""
    if isinstance(value, Mapping | list):
        return all(map(_is_plain, value.values() if isinstance(value, Mapping) else value))
    return isinstance(value, int | float | Tensor)


def _check_finite(where: str, state: State) -> None:
    for name, value in flat_tensors(state):
        if not bool(value.isfinite().all()):
            count = int((~value.isfinite()).sum())
            raise CheckpointError(f"{where}: {count} of {value.numel()} numbers in {name} are not finite")


def _with_episodes(agent: Learner) -> dict[str, Any]:
    """The learner's state as it looks once episodes are running."""
    count = agent.env.num_envs
    obs = torch.zeros(count, agent.env.observation_size)
    rollout_state = RolloutState(obs, torch.zeros(count, dtype=torch.bool), agent.policy.initial_state(count))
    return LearnerState(rollout_state=rollout_state).state_dict()


def _on_device(state: Any, device: torch.device) -> Any:
    if isinstance(state, Mapping):
        return {name: _on_device(value, device) for name, value in state.items()}
    return state.to(device) if isinstance(state, Tensor) else state


def _check_env(
    folder: Path,
    about: Mapping[str, Any],
    spec: TradingSpec | None,
    env: VectorEnv,
    env_spec: TradingSpec | None,
    *,
    any_universe: bool,
) -> None:
    """Refuse an environment that asks for other actions, or shows other numbers, than the agent has learned with.

    `any_universe`: the agent reads and trades any number of assets.
    """
    size, space = env.observation_size, _describe_space(env.action_space)
    if any_universe:  # the bounds of one asset, which are those of all
        space, about = (
            _first_bounds(space),
            {**about, "observation_size": size, "action_space": _first_bounds(about["action_space"])},
        )
    if (size, space) != (about["observation_size"], about["action_space"]):
        raise TailguardError(
            f"{folder}: the agent reads {about['observation_size']} numbers and acts in "
            f"{about['action_space']}; this environment has {size} and {space}"
        )
    if spec is not None and env_spec is not None and spec.scaler.digest() != env_spec.scaler.digest():
        known, shown = spec.scaler.names, env_spec.scaler.names
        what = "the same features on another scale" if known == shown else ", ".join(shown)
        raise TailguardError(
            f"{folder}: the agent has learned with {', '.join(known)}; this environment shows {what}. Make it with the "
            "agent's own scaler: TradingEnv(bars, scaler=DistributionalPPO.load(path).spec.scaler)"
        )


# --- description ----------------------------------------------------------------------------------------------------


def _reads_plain_rows(agent: Learner) -> bool:
    """Whether rows of numbers in and out are all that `predict` needs, so that it can do without the environment."""
    if not isinstance(agent.inputs, GymnasiumInputs):
        return True
    env = agent.inputs.env
    space, choice = env.action_space, env.actions.smallest
    counted_from_zero = choice is None or not choice.any()
    shape = (space.size,) if isinstance(space, Box) else (len(space.sizes),) if len(space.sizes) > 1 else ()
    rows = env.vector_env.single_observation_space.shape
    return rows == (env.observation_size,) and counted_from_zero and env.actions.shape == shape


def _describe_space(space: ActionSpace) -> dict[str, Any]:
    if isinstance(space, Discrete):
        return {"sizes": list(space.sizes)}
    return {"low": space.low.tolist(), "high": space.high.tolist()}


def _first_bounds(space: Mapping[str, Any]) -> dict[str, Any]:
    return {name: values[:1] for name, values in space.items()}


def _layout_of(config: LearnerConfig, spec: TradingSpec | None) -> AssetLayout | None:
    """The layout of the assets that the agent's network reads, if it shares weights over them."""
    return None if config.network.encoder == "flat" or spec is None else AssetLayout.of(spec.scaler)


def _read_space(description: dict[str, Any]) -> ActionSpace:
    if "sizes" in description:
        return Discrete(tuple(description["sizes"]))
    low, high = ([float(bound) for bound in description[name]] for name in ("low", "high"))
    return Box(torch.tensor(low), torch.tensor(high))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class _NoEnv:
    """The shape of an environment, without one: enough to predict, refuses to step."""

    num_envs = 1
    episode_length = 1
    """Any value: a saved budget already has its window."""
    differentiable = True
    """Lets a pathwise learner be built; stepping is refused anyway."""

    def __init__(self, inputs: FlatInputs, device: torch.device) -> None:
        self.observation_size, self.action_space, self.device = inputs.observation_size, inputs.action_space, device
        self.asset_layout = inputs.layout

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

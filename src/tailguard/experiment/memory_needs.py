"""Lower bounds of the memory that training needs; settings that cannot fit are refused before any allocation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from tailguard.config import RunConfig
from tailguard.envs.trading import TradingEnv
from tailguard.errors import ConfigError
from tailguard.memory_limits import format_bytes, free_memory
from tailguard.models.policy import ActorCritic

if TYPE_CHECKING:
    from tailguard.models.policy import NetworkConfig

NUMBER = 4
"""Bytes of a float32."""
OUTCOMES = 12
"""Values that the environment reports at each step, besides the weights."""


BAR = 200
"""Minimum bytes per bar of the synthetic market: its columns, their inputs, and its features."""


@dataclass(frozen=True)
class Need:
    """Minimum memory of a part of training."""

    settings: str
    """The settings that determine it, with their values."""
    what: str
    size: float
    """Bytes."""
    way_out: str


def check_memory(config: RunConfig, env: TradingEnv) -> None:
    """Refuse settings that cannot fit. The estimates are lower bounds, so no feasible setting is refused."""
    device = config.training.device
    _check(network_need(config, env), device)
    _check(rollout_need(config, env, free_memory(device)), device)


def check_synthetic(config: RunConfig) -> None:
    """Refuse a synthetic market that cannot fit."""
    bars = config.data.synthetic_bars
    what = f"a synthetic market of {bars:,} bars"
    _check(Need(f"data.synthetic_bars={bars}", what, float(BAR) * bars, "Make it smaller"), "cpu")


def network_need(config: RunConfig, env: TradingEnv) -> Need:
    """Weights, gradients and the optimiser's two moments."""
    network = config.chosen.network
    sizes = f"{config.learner}.network: hidden={list(network.hidden)}, lstm_size={network.lstm_size}"
    if network.critic_kind.size_setting is not None:
        sizes += f", {network.critic_kind.size_setting}={network.critic_kind.outputs(network)}"
    try:
        with torch.device("meta"):  # shapes without memory
            outline = ActorCritic(env.observation_size, env.action_space, network, env.asset_layout)
    except (RuntimeError, OverflowError, TypeError) as error:
        raise ConfigError(f"{sizes}: such a network cannot be built: {str(error).splitlines()[0]}") from error
    count = sum(parameter.numel() for parameter in outline.parameters())
    what = f"a network of {count:,} parameters, with gradients and the optimiser's moments,"
    return Need(sizes, what, 4.0 * NUMBER * count, "Make the network smaller")


def rollout_need(config: RunConfig, env: TradingEnv, free: float) -> Need:
    """Observations, actions and infos of all accounts in one rollout, and the policy's memory states."""
    accounts, network = config.num_envs, config.chosen.network
    steps = config.chosen.n_steps
    row = 2 * env.observation_size + env.task.market.assets + OUTCOMES + _critics(network)
    if config.learner == "pathwise":
        # What the gradient needs of every step: layers, gates and cells of the policy, and the market's own arithmetic.
        tokens = 1 if network.encoder == "flat" else env.task.market.assets
        row += 2 * tokens * sum(network.hidden) + 8 * network.lstm_size * network.lstm_layers + 2 * OUTCOMES
    each = float(NUMBER * (steps * row + 2 * network.lstm_size * (network.memory != "none")))
    # Half of the memory: the update needs about the same amount again.
    fitting = free / 2 / each
    way_out = f"env.num_envs={int(fitting)} may fit" if fitting >= 1 else f"Make {config.learner}.n_steps smaller"
    return Need(
        f"env.num_envs={accounts}, {config.learner}.n_steps={steps}",
        f"a rollout of {accounts:,} accounts × {steps:,} steps",
        each * accounts,
        way_out,
    )


def _check(need: Need, device: str) -> None:
    free = free_memory(device)
    if need.size > free:
        raise ConfigError(
            f"{need.settings}: {need.what} takes at least {format_bytes(need.size)} of memory, and "
            f"{format_bytes(free)} are free ({device}). {need.way_out}."
        )


def _critics(network: NetworkConfig) -> int:
    """Outputs of the critics per step."""
    return network.critic_kind.outputs(network) * (2 if network.twin_critics else 1)

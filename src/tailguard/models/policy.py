"""The agent's network: trunks (encoder and memory), an action head, and one or two critics on top of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor, nn

from tailguard.device_ops import readable
from tailguard.envs.asset_layout import AssetLayout
from tailguard.envs.protocol import ActionSpace, Box
from tailguard.errors import ConfigError
from tailguard.models.actions import ActionHead, make_action_head
from tailguard.models.asset_head import AssetHead
from tailguard.models.asset_trunk import AssetTrunk
from tailguard.models.critics import CRITICS, Critic, DistributionalCritic, Projection, ScalarCritic
from tailguard.models.encoder import Activation
from tailguard.models.memory import MemoryState
from tailguard.models.policy_row import PolicyRows, RowPolicy, takes_rows
from tailguard.models.precision import Precision, full_precision
from tailguard.models.trunk import Trunk
from tailguard.validate import check_choice, check_count, check_range, check_registered

EncoderKind = Literal["flat", "shared", "attention"]
MemoryKind = Literal["separate", "shared", "none"]
TwinTrunk = Literal["shared", "own"]

PolicyState = tuple[MemoryState, ...]
"""One memory state for each trunk."""


@dataclass(frozen=True)
class NetworkConfig:
    """The shape of the network."""

    encoder: EncoderKind = "flat"
    """How several assets are read. flat: all numbers side by side, for these symbols in this order; shared: the same
    weights for every asset and a pooled context, for any symbols; attention: the same, and assets attend to each
    other."""
    hidden: tuple[int, ...] = (64,)
    """Widths of the encoder's layers before the memory; empty: the LSTM reads the observation directly."""
    activation: Activation = "tanh"
    """Non-linearity of the encoder: tanh, silu or relu."""
    memory: MemoryKind = "separate"
    """separate: actor and critic each have an encoder and an LSTM; shared: one for both; none: no memory."""
    lstm_size: int = 64
    """Units in an LSTM layer."""
    lstm_layers: int = 1
    """LSTM layers, 1 or 2."""
    squash: bool = True
    """Continuous actions: squash by tanh into the box; false clips instead, as Stable-Baselines3 does."""
    std: Literal["global", "state"] = "global"
    """Continuous actions: one standard deviation for all states, or one that depends on the state."""
    log_std_init: float = 0.0
    """Log of the initial standard deviation, before squashing."""
    log_std_bounds: tuple[float, float] = (-5.0, 1.0)
    """Bounds of the log standard deviation."""
    critic: str = "quantile"
    """Distribution learned in addition to the scalar value: quantile, categorical, one that a plugin registers, or
    scalar for none."""
    quantiles: int = 32
    """Quantiles of the return that a distributional critic gives, at least 2."""
    atoms: int = 51
    """Atoms of a categorical critic, at least 2."""
    support: tuple[float, float] = (-10.0, 10.0)
    """Range of a categorical critic's atoms, in standard deviations of the return around its mean, to a factor of 2."""
    projection: Projection = "hl_gauss"
    """How a categorical critic spreads a target over its atoms: hl_gauss or two_hot."""
    twin_critics: bool = False
    """Two critics instead of one."""
    twin_trunk: TwinTrunk = "shared"
    """Whether the second critic reads the first one's encoder and memory or has its own."""
    precision: Precision = "auto"
    """Precision of the matrix products in encoder and LSTM: float32, bfloat16, or auto, which is bfloat16 on a GPU
    and float32 elsewhere. Cells, last layers, returns, advantages and losses are float32 in any case."""

    def __post_init__(self) -> None:
        if not isinstance(self.hidden, tuple | list):
            raise ConfigError(f"network.hidden: {self.hidden!r} is not a list of widths, as [64, 64]")
        for width in self.hidden:
            check_count("network.hidden", width)
        check_choice("network.encoder", self.encoder, get_args(EncoderKind))
        check_choice("network.activation", self.activation, get_args(Activation))
        check_choice("network.memory", self.memory, get_args(MemoryKind))
        check_choice("network.std", self.std, ("global", "state"))
        check_registered("network.critic", self.critic, CRITICS, "tailguard.models.critics.register_critic")
        check_choice("network.projection", self.projection, get_args(Projection))
        check_choice("network.twin_trunk", self.twin_trunk, get_args(TwinTrunk))
        check_choice("network.precision", self.precision, get_args(Precision))
        check_count("network.lstm_size", self.lstm_size)
        check_count("network.lstm_layers", self.lstm_layers)
        check_range("network.lstm_layers", self.lstm_layers, high=2)
        check_count("network.quantiles", self.quantiles, low=2)
        check_count("network.atoms", self.atoms, low=2)
        for name, pair in (("support", self.support), ("log_std_bounds", self.log_std_bounds)):
            if not isinstance(pair, tuple | list) or len(pair) != 2:
                raise ConfigError(f"network.{name}: {pair!r} is not a lower and an upper bound")
        check_range("network.support", self.support[1], low=self.support[0], low_open=True)
        low, high = self.log_std_bounds
        check_range("network.log_std_init", self.log_std_init, low=low, high=high, low_open=True, high_open=True)
        if self.twin_trunk == "own" and not self.twin_critics:
            raise ConfigError(
                "network.twin_trunk: own is for twin critics; set network.twin_critics to true, or shared"
            )
        if self.twin_trunk == "own" and self.memory == "shared":
            raise ConfigError("network.twin_trunk: own needs a trunk for each; set network.memory to separate or none")

    @property
    def critic_kind(self) -> type[Critic]:
        """The class of the critic, which knows what else must be known of it."""
        return CRITICS[self.critic]


class ReturnCritic(nn.Module):
    """A scalar value and the distribution of the return, on the same features. Both in normalised units."""

    def __init__(self, feature_size: int, config: NetworkConfig) -> None:
        super().__init__()
        self.value = ScalarCritic(feature_size)
        self.distribution: DistributionalCritic | None = None
        if config.critic_kind.predicts_distribution:
            head = config.critic_kind.from_config(feature_size, config)
            self.distribution = cast(DistributionalCritic, head)  # `register_critic` admits no other

    @property
    def heads(self) -> list[Critic]:
        """The value, and the distribution, if there is one."""
        return [self.value] if self.distribution is None else [self.value, self.distribution]

    @property
    def layers(self) -> list[nn.Linear]:
        """Their last layers."""
        return [head.layer for head in self.heads]

    def output_of(self, outputs: Sequence[Tensor], features: Tensor) -> CriticOutput:
        """The critic's output from the outputs of its layers."""
        return CriticOutput(outputs[0], outputs[1] if len(outputs) > 1 else None, features)

    def forward(self, features: Tensor) -> CriticOutput:
        return self.output_of(full_precision(self.layers, features), features)


@dataclass(frozen=True)
class CriticOutput:
    """Output of one critic, in normalised return units."""

    value: Tensor
    """The scalar head's output, [..., 1]."""
    distribution: Tensor | None
    """The distribution head's output, [..., Q]; None for a scalar critic."""
    features: Tensor
    """Input of the heads, [..., H]."""


@dataclass(frozen=True)
class PolicyOutput:
    """Output of the network for a batch of rows."""

    dist_params: Tensor
    """Of the action distribution, [..., P]."""
    critics: tuple[CriticOutput, ...]


class ActorCritic(nn.Module):
    """The whole network. Trunk 0 is the actor's; the critics read trunk 0 (shared), 1, or 1 and 2 (own trunks).

    `layout`: of the assets in an observation, for encoders that share weights over them.
    """

    def __init__(
        self,
        observation_size: int,
        action_space: ActionSpace,
        config: NetworkConfig,
        layout: AssetLayout | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.layout = None if config.encoder == "flat" else _check_layout(layout, action_space, config.encoder)
        critics = 2 if config.twin_critics else 1
        if config.memory == "shared":
            self.critic_trunks: tuple[int, ...] = (0,) * critics
        elif config.twin_critics and config.twin_trunk == "own":
            self.critic_trunks = (1, 2)
        else:
            self.critic_trunks = (1,) * critics
        self.trunks = nn.ModuleList(
            Trunk(observation_size, config) if self.layout is None else AssetTrunk(self.layout, config, acts=index == 0)
            for index in range(max(self.critic_trunks) + 1)
        )
        first = self._trunk(0)
        width = first.output_size
        options: dict[str, Any] = {}
        if isinstance(action_space, Box):
            options = {
                "squash": config.squash,
                "std": config.std,
                "log_std_init": config.log_std_init,
                "log_std_bounds": config.log_std_bounds,
            }
        self.action_head: ActionHead = (
            AssetHead(width, first.token_size, cast(Box, action_space), **options)
            if isinstance(first, AssetTrunk)
            else make_action_head(width, action_space, **options)
        )
        self.critics = nn.ModuleList(ReturnCritic(width, config) for _ in range(critics))

    def _trunk(self, index: int) -> Trunk:
        trunk = self.trunks[index]
        assert isinstance(trunk, Trunk)  # ModuleList loses the element type
        return trunk

    @property
    def trunk_names(self) -> tuple[str, ...]:
        """Names of the trunks in metrics and messages."""
        if len(self.trunks) == 1:
            return ("shared",)
        return ("actor", "critic") if len(self.trunks) == 2 else ("actor", "critic_1", "critic_2")

    def each_trunk(self) -> Sequence[Trunk]:
        return [self._trunk(index) for index in range(len(self.trunks))]

    def each_critic(self) -> Sequence[ReturnCritic]:
        return [critic for critic in self.critics if isinstance(critic, ReturnCritic)]

    @property
    def is_recurrent(self) -> bool:
        return self._trunk(0).is_recurrent

    def initial_state(self, n: int) -> PolicyState:
        """Initial memory states of n environments, for every trunk."""
        return tuple(self._trunk(index).memory.initial_state(n) for index in range(len(self.trunks)))

    def act(
        self, obs: Tensor, state: MemoryState, episode_start: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, MemoryState]:
        """One row for the actor alone: parameters of the action distribution [N, P] and its trunk's next state.

        `mask`: see `Trunk.step`.
        """
        output, state = self.act_output(obs, state, episode_start, mask)
        return self.action_head.dist_params_of(output), state

    def act_output(
        self, obs: Tensor, state: MemoryState, episode_start: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, MemoryState]:
        """As `act`, with the output of the action head's layer, of which its methods make mode and parameters."""
        features, state = self._trunk(0).step(obs, state, episode_start, mask)
        return self.action_head.output_of(features), state

    def for_window(self, obs: Tensor, state: MemoryState) -> RowPolicy:
        """The policy for the rows of one window, from this observation on; with a gradient it takes a shorter way."""
        trunk = self._trunk(0)
        return PolicyRows(trunk, self.action_head) if takes_rows(trunk, obs, state) else self

    def act_sequence(self, obs: Tensor, state: PolicyState, episode_start: Tensor) -> Tensor:
        """T rows for the actor alone: obs [T, N, O] -> parameters of the action distribution, [T, N, P]."""
        features, _ = self._trunk(0).sequence(obs, state[0], episode_start)
        dist_params: Tensor = self.action_head(features)
        return dist_params

    def forward(
        self, obs: Tensor, state: PolicyState, episode_start: Tensor, inner_resets: bool | None = None
    ) -> PolicyOutput:
        """T rows for actor and critics: obs [T, N, O], episode_start [T, N], the states before the first row."""
        return self.heads(self.features(obs, state, episode_start, inner_resets))

    def features(
        self, obs: Tensor, state: PolicyState, episode_start: Tensor, inner_resets: bool | None = None
    ) -> tuple[Tensor, ...]:
        """Features of each trunk for T rows, [T, N, H]."""
        return tuple(
            self._trunk(index).sequence(obs, state[index], episode_start, inner_resets)[0]
            for index in range(len(self.trunks))
        )

    def critic_features(
        self, obs: Tensor, state: PolicyState, episode_start: Tensor, inner_resets: bool | None = None
    ) -> dict[int, Tensor]:
        """Features of the critics' trunks for T rows, [T, N, H], by the trunk's number."""
        return {
            index: self._trunk(index).sequence(obs, state[index], episode_start, inner_resets)[0]
            for index in sorted(set(self.critic_trunks))
        }

    def heads(self, features: Sequence[Tensor]) -> PolicyOutput:
        """Outputs of actor and critics from the trunks' features; one matrix product per trunk."""
        if self.layout is not None:
            return PolicyOutput(self.action_head(features[0]), self.critic_heads(dict(enumerate(features))))
        shared = self.critic_trunks[0] == 0
        first = [self.action_head.linear, *(self._critic_layers(0) if shared else [])]
        chosen, *outputs = full_precision(first, features[0])
        dist_params = self.action_head.dist_params_of(chosen)
        if shared:
            return PolicyOutput(dist_params, self._critic_outputs({0: outputs}, {0: features[0]}))
        return PolicyOutput(dist_params, self.critic_heads(dict(enumerate(features))))

    def _critic_layers(self, trunk: int) -> list[nn.Linear]:
        """Last layers of the critics that read this trunk."""
        critics = zip(self.each_critic(), self.critic_trunks, strict=True)
        return [layer for critic, mine in critics if mine == trunk for layer in critic.layers]

    def critic_heads(self, features: Mapping[int, Tensor]) -> tuple[CriticOutput, ...]:
        """Output of every critic from its trunk's features."""
        trunks = sorted(set(self.critic_trunks))
        if self.layout is not None:  # what follows in the actor's trunk belongs to single assets
            features = {trunk: features[trunk][..., : self._trunk(trunk).output_size] for trunk in trunks}
        outputs = {trunk: full_precision(self._critic_layers(trunk), features[trunk]) for trunk in trunks}
        return self._critic_outputs(outputs, features)

    def _critic_outputs(
        self, outputs: Mapping[int, list[Tensor]], features: Mapping[int, Tensor]
    ) -> tuple[CriticOutput, ...]:
        """The outputs of the layers of each trunk's critics, split by critic."""
        parsed, taken = [], dict.fromkeys(outputs, 0)
        for critic, trunk in zip(self.each_critic(), self.critic_trunks, strict=True):
            first = taken[trunk]
            taken[trunk] = first + len(critic.layers)
            parsed.append(critic.output_of(outputs[trunk][first : taken[trunk]], features[trunk]))
        return tuple(parsed)

    @torch.no_grad()
    def evaluate(
        self, obs: Tensor, final_obs: Tensor, final_rows: Sequence[int], state: PolicyState, episode_start: Tensor
    ) -> tuple[tuple[CriticOutput, ...], tuple[CriticOutput, ...], PolicyState]:
        """Outputs of every critic for a rollout and for the successors of some of its rows.

        obs [T, N, O], episode_start [T, N]; `final_rows` are the rows after which an episode ended, and the last one,
        in order, and `final_obs` [K, N, O] their true next observations. A successor is evaluated once, from the state
        after its row, without a reset. Returns the critics' outputs [T, N], those of the successors [K, N], and the
        trunks' states after the last row (the actor's unchanged, unless a critic shares it). Gradients flow only to
        `final_obs`, if it requires them.
        """
        after = list(state)
        features: dict[int, Tensor] = {}
        successors: dict[int, Tensor] = {}
        for index in sorted(set(self.critic_trunks)):
            read = _some_successors if readable(obs) else _each_successor
            features[index], successors[index], after[index] = read(
                self._trunk(index), obs, final_obs, final_rows, state[index], episode_start
            )
        with torch.set_grad_enabled(final_obs.requires_grad):
            following = self.critic_heads(successors)
        return self.critic_heads(features), following, tuple(after)


def _check_layout(layout: AssetLayout | None, action_space: ActionSpace, encoder: str) -> AssetLayout:
    if layout is None or not isinstance(action_space, Box):
        raise ConfigError(
            f"network.encoder: {encoder} shares weights over the assets of a trading environment, whose features are "
            "scaled alike for all symbols; use TradingEnv(bars, shared_scaling=True), or network.encoder=flat"
        )
    return layout


def _some_successors(
    trunk: Trunk,
    obs: Tensor,
    final_obs: Tensor,
    final_rows: Sequence[int],
    state: MemoryState,
    episode_start: Tensor,
) -> tuple[Tensor, Tensor, MemoryState]:
    """Features of T rows, features of the successors of the K final rows, and the state after the last row.

    One fused call from each boundary to the next; at a boundary the state after the row is available, and the successor
    takes one step from it.
    """
    never = torch.zeros_like(episode_start[0])
    if not trunk.is_recurrent:
        everything, _ = trunk.sequence(obs, state, episode_start)
        with torch.set_grad_enabled(final_obs.requires_grad):
            return everything, trunk.sequence(final_obs, state, episode_start[: len(final_rows)])[0], state
    pieces: list[Tensor] = []
    successors: list[Tensor] = []
    first = 0
    with torch.set_grad_enabled(final_obs.requires_grad):
        each = final_obs.unbind()
    for row, last in zip(final_rows, each, strict=True):
        stretch = slice(first, row + 1)
        features, state = trunk.sequence(obs[stretch], state, episode_start[stretch], inner_resets=False)
        pieces.append(features)
        with torch.set_grad_enabled(final_obs.requires_grad):
            successors.append(trunk.step(last, state, never)[0])
        first = row + 1
    with torch.set_grad_enabled(final_obs.requires_grad):
        return torch.cat(pieces), torch.stack(successors), state


def _each_successor(
    trunk: Trunk,
    obs: Tensor,
    final_obs: Tensor,
    final_rows: Sequence[int],
    state: MemoryState,
    episode_start: Tensor,
) -> tuple[Tensor, Tensor, MemoryState]:
    """As `_some_successors`, all of them in one step of K · N environments: for GPUs."""
    everything, states = trunk.every_state(obs, state, episode_start)
    if not trunk.is_recurrent:
        with torch.set_grad_enabled(final_obs.requires_grad):
            return everything, trunk.every_state(final_obs, state, episode_start)[0], state
    rows = slice(None) if len(final_rows) == len(obs) else list(final_rows)
    before = tuple(part[:, rows].flatten(1, 2) for part in states)
    never = torch.zeros(final_obs.shape[0] * final_obs.shape[1], dtype=torch.bool, device=obs.device)
    with torch.set_grad_enabled(final_obs.requires_grad):
        successors, _ = trunk.step(final_obs.flatten(0, 1), before, never)
        successors = successors.reshape(*final_obs.shape[:2], -1)
    return everything, successors, tuple(part[:, -1] for part in states)

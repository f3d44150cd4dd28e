"""Encoders that share weights over assets: order and number of the assets do not matter, absent ones have no part."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tailguard.envs.asset_layout import AssetLayout
from tailguard.envs.protocol import Box, Discrete
from tailguard.errors import ConfigError
from tailguard.models.asset_head import AssetHead
from tailguard.models.asset_trunk import AssetTrunk, Attention
from tailguard.models.policy import ActorCritic, NetworkConfig, PolicyState

LAYOUT = AssetLayout(own=3, market_wide=2)
SMALL = NetworkConfig(hidden=(8,), lstm_size=6, quantiles=5, atoms=7)
OPTIONS: list[dict[str, Any]] = [
    {"encoder": "shared"},
    {"encoder": "attention"},
    {"encoder": "shared", "memory": "none", "std": "state"},
    {"encoder": "attention", "memory": "shared", "twin_critics": True},
    {"encoder": "shared", "hidden": (), "lstm_layers": 2},
]


def make(assets: int, **options: Any) -> ActorCritic:
    torch.manual_seed(0)
    box = Box(-torch.ones(assets), torch.ones(assets))
    size = assets * (LAYOUT.own + 2) + LAYOUT.account_size
    agent = ActorCritic(size, box, dataclasses.replace(SMALL, **options), LAYOUT).double()
    with torch.no_grad():
        for parameter in agent.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return agent


def observation(features: Tensor, wide: Tensor, listed: Tensor, weights: Tensor, account: Tensor) -> Tensor:
    return torch.cat((features.flatten(-2), wide, listed.double(), weights, account), dim=-1)


def parts(assets: int, time: int = 4, count: int = 5) -> list[Tensor]:
    draw = torch.Generator().manual_seed(1)

    def random(*shape: int) -> Tensor:
        return torch.randn(time, count, *shape, generator=draw, dtype=torch.float64)

    listed = torch.rand(time, count, assets, generator=draw) < 0.7
    listed[..., 0] = True
    return [random(assets, 3), random(2), listed, random(assets), random(3)]


def state_of(agent: ActorCritic, count: int = 5) -> PolicyState:
    draw = torch.Generator().manual_seed(2)
    return tuple(
        tuple(torch.randn(part.shape, generator=draw, dtype=torch.float64) for part in trunk)
        for trunk in agent.initial_state(count)
    )


STARTS = torch.tensor([[False] * 5, [False, True, False, False, True], [False] * 5, [True] + [False] * 4])


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_permuted_assets_have_permuted_actions_and_the_same_values(options: dict[str, Any]) -> None:
    agent, (features, wide, listed, weights, account) = make(7, **options), parts(7)
    order = torch.randperm(7, generator=torch.Generator().manual_seed(3))
    state = state_of(agent)
    plain = agent(observation(features, wide, listed, weights, account), state, STARTS)
    permuted = observation(features[..., order, :], wide, listed[..., order], weights[..., order], account)
    other = agent(permuted, state, STARTS)
    for mine, theirs in zip(plain.dist_params.chunk(2, -1), other.dist_params.chunk(2, -1), strict=True):
        torch.testing.assert_close(mine[..., order], theirs, rtol=0, atol=1e-12)
    for mine, theirs in zip(plain.critics, other.critics, strict=True):
        torch.testing.assert_close(mine.value, theirs.value, rtol=0, atol=1e-12)
    means = plain.dist_params.chunk(2, -1)[0]
    assert means[listed].std() > 0.1  # assets are told apart
    # One row at a time the policy does the same.
    row, _ = agent.act(permuted[0], state[0], STARTS[0])
    torch.testing.assert_close(row, other.dist_params[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_absent_assets_have_no_influence(options: dict[str, Any]) -> None:
    """Whatever their numbers, and as if they were not in the universe at all."""
    agent, (features, wide, listed, weights, account) = make(6, **options), parts(6)
    listed = torch.tensor([True, False, True, True, False, True]).expand(4, 5, 6)
    state = state_of(agent)
    plain = agent(observation(features, wide, listed, weights, account), state, STARTS)
    wild = torch.where(listed.unsqueeze(-1), features, 1e3), torch.where(listed, weights, -1e3)
    assert torch.equal(
        plain.dist_params, agent(observation(wild[0], wide, listed, wild[1], account), state, STARTS).dist_params
    )
    kept = listed[0, 0]
    alone = agent(
        observation(features[..., kept, :], wide, listed[..., kept], weights[..., kept], account), state, STARTS
    )
    means, log_stds = plain.dist_params.chunk(2, -1)
    torch.testing.assert_close(means[..., kept], alone.dist_params.chunk(2, -1)[0], rtol=0, atol=1e-12)
    for mine, theirs in zip(plain.critics, alone.critics, strict=True):
        torch.testing.assert_close(mine.value, theirs.value, rtol=0, atol=1e-12)
    assert (means[..., ~kept] == 0).all()
    assert (log_stds[..., ~kept] == SMALL.log_std_init).all()


def test_an_account_without_listed_assets_is_finite() -> None:
    for options in OPTIONS:
        agent, (features, wide, listed, weights, account) = make(3, **options), parts(3)
        obs = observation(features, wide, torch.zeros_like(listed), weights, account)
        output = agent(obs, state_of(agent), STARTS)
        assert output.dist_params.isfinite().all()
        assert (output.dist_params.chunk(2, -1)[0] == 0).all()


@pytest.mark.parametrize("encoder", ["shared", "attention"])
def test_parameters_do_not_grow_with_the_universe(encoder: str) -> None:
    sizes = [sum(weight.numel() for weight in make(assets, encoder=encoder).parameters()) for assets in (1, 3, 100)]
    assert len(set(sizes)) == 1


def test_actions_are_bilinear_in_token_and_memory() -> None:
    """The head against a loop over accounts and assets."""
    torch.manual_seed(0)
    head = AssetHead(4, 3, Box(-torch.ones(2), torch.ones(2)), std="state").double()
    nn.init.normal_(head.linear.weight)
    memory, tokens = torch.randn(5, 4).double(), torch.randn(5, 2, 3).double()
    features = torch.cat((memory, tokens.flatten(1), torch.ones(5, 2)), dim=1)
    means, _ = head(features).detach().chunk(2, -1)
    weight, bias = head.linear.weight[:4], head.linear.bias[:4]
    for account in range(5):
        query = weight @ memory[account] + bias
        for asset in range(2):
            expected = (query[:3] @ tokens[account, asset] + query[3]).item()
            assert float(means[account, asset]) == pytest.approx(expected, abs=1e-12)


def test_attention_is_that_of_pytorch() -> None:
    torch.manual_seed(0)
    ours, peer = Attention(8).double(), nn.MultiheadAttention(8, 4, batch_first=True).double()
    with torch.no_grad():
        peer.in_proj_weight.copy_(torch.cat([part.weight for part in (ours.query, ours.key, ours.value)]))
        peer.in_proj_bias.copy_(torch.cat([part.bias for part in (ours.query, ours.key, ours.value)]))
        peer.out_proj.weight.copy_(ours.output.weight)
        peer.out_proj.bias.copy_(ours.output.bias)
    asking, asked = torch.randn(3, 2, 8).double(), torch.randn(3, 5, 8).double()
    present = torch.tensor([[True, True, False, True, False], [True] * 5, [False, True, False, False, False]])
    expected, _ = peer(asking, asked, asked, key_padding_mask=~present, need_weights=False)
    torch.testing.assert_close(ours(asking, asked, present), expected, rtol=0, atol=1e-12)


def test_every_weight_has_a_gradient_and_the_first_policy_is_near_zero() -> None:
    for options in OPTIONS[:4]:
        torch.manual_seed(0)
        config = dataclasses.replace(SMALL, **options)
        agent = ActorCritic(7 * 5 + LAYOUT.account_size, Box(-torch.ones(7), torch.ones(7)), config, LAYOUT)
        obs = observation(*parts(7)).float()
        output = agent(obs, agent.initial_state(5), STARTS)
        assert output.dist_params.chunk(2, -1)[0].abs().max() < 0.2
        terms = [(output.dist_params + 0.3).square().sum()]
        terms += [critic.value.sum() for critic in output.critics]
        terms += [critic.distribution.sum() for critic in output.critics if critic.distribution is not None]
        torch.stack(terms).sum().backward()
        without = [name for name, weight in agent.named_parameters() if weight.grad is None or not weight.grad.any()]
        assert without == []


def test_dropout_is_by_unit_and_not_by_asset() -> None:
    agent, inputs = make(7, encoder="shared", memory="none"), parts(7)
    trunk = agent.each_trunk()[0]
    assert isinstance(trunk, AssetTrunk)
    obs = observation(*inputs)[0]
    mask = torch.ones(5, 8, dtype=torch.float64)
    mask[:, 2] = 0.0
    features, _ = trunk.step(obs, (), STARTS[0], mask)
    assert (features[:, 2] == 0).all()  # of the context
    assert (features[:, 8:-7].reshape(5, 7, 8)[..., 2] == 0).all()  # of every token


def test_an_environment_without_assets_is_refused() -> None:
    config = NetworkConfig(encoder="shared")
    with pytest.raises(ConfigError, match="shared_scaling=True"):
        ActorCritic(4, Box(-torch.ones(1), torch.ones(1)), config)
    with pytest.raises(ConfigError, match="encoder: shared"):
        ActorCritic(10, Discrete((2,)), config, LAYOUT)
    with pytest.raises(ConfigError, match="different bounds"):
        AssetHead(4, 3, Box(-torch.ones(2), torch.tensor([1.0, 2.0])))
    with pytest.raises(ConfigError, match=r"network\.encoder: 'set' is not one of flat, shared, attention"):
        NetworkConfig(encoder="set")  # type: ignore[arg-type]  # what a user may write

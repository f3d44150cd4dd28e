"""The whole network: who reads which trunk, and that acting, learning and looking agree."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tailguard.envs.protocol import Box, Discrete
from tailguard.models.actions import CategoricalHead, GaussianHead
from tailguard.models.critics import CategoricalCritic, QuantileCritic
from tailguard.models.policy import ActorCritic, NetworkConfig, PolicyState, _each_successor, _some_successors

BOX = Box(torch.tensor([-1.0, 0.0]), torch.tensor([1.0, 3.0]))
SMALL = NetworkConfig(hidden=(8,), lstm_size=6, quantiles=5, atoms=7)


def make(**options: Any) -> ActorCritic:
    torch.manual_seed(0)
    agent = ActorCritic(4, BOX, dataclasses.replace(SMALL, **options))
    with torch.no_grad():
        for parameter in agent.parameters():  # heads start near zero, which would hide what they read
            parameter.add_(0.3 * torch.randn_like(parameter))
    return agent


def rows(time: int = 9, count: int = 5, reset_share: float = 0.2) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    starts = torch.rand(time, count, generator=draw) < reset_share
    return torch.randn(time, count, 4, generator=draw), starts


def random_state(agent: ActorCritic, count: int) -> PolicyState:
    draw = torch.Generator().manual_seed(2)
    return tuple(
        tuple(torch.randn(part.shape, generator=draw) for part in trunk) for trunk in agent.initial_state(count)
    )


@pytest.mark.parametrize(
    ("options", "trunks", "readers"),
    [
        ({}, 2, (1,)),
        ({"memory": "none"}, 2, (1,)),
        ({"memory": "shared"}, 1, (0,)),
        ({"twin_critics": True}, 2, (1, 1)),
        ({"twin_critics": True, "twin_trunk": "own"}, 3, (1, 2)),
        ({"twin_critics": True, "twin_trunk": "own", "memory": "none"}, 3, (1, 2)),
        ({"twin_critics": True, "memory": "shared"}, 1, (0, 0)),
    ],
)
def test_critics_read_their_trunks(options: dict[str, Any], trunks: int, readers: tuple[int, ...]) -> None:
    """Shown by noise in one trunk at a time: only its readers change what they say."""
    agent = make(**options)
    assert len(agent.trunks) == trunks
    assert agent.critic_trunks == readers
    obs, starts = rows()
    state = random_state(agent, 5)
    before = agent(obs, state, starts)
    for index in range(trunks):
        noisy = copy.deepcopy(agent)
        nn.init.normal_(noisy.trunks[index].encoder.layers[0].weight)  # type: ignore[union-attr, index, arg-type]
        after = noisy(obs, state, starts)
        assert (not torch.equal(after.dist_params, before.dist_params)) == (index == 0)
        for critic, reads in enumerate(readers):
            changed = not torch.equal(after.critics[critic].value, before.critics[critic].value)
            assert changed == (reads == index)


@pytest.mark.parametrize("twin_trunk", ["shared", "own"])
def test_twins_start_apart(twin_trunk: Any) -> None:
    torch.manual_seed(0)
    config = dataclasses.replace(SMALL, twin_critics=True, twin_trunk=twin_trunk)
    agent = ActorCritic(4, BOX, config)
    obs, starts = rows()
    first, second = agent(obs, agent.initial_state(5), starts).critics
    assert not torch.allclose(first.value, second.value)
    assert first.distribution is not None
    assert second.distribution is not None
    assert not torch.allclose(first.distribution, second.distribution)
    # And near the mean of normalised returns, before they have seen any.
    assert max(critic.value.abs().max().item() for critic in (first, second)) < 0.05


@pytest.mark.parametrize("reset_share", [0.0, 0.2])
@pytest.mark.parametrize(("memory", "layers"), [("separate", 1), ("separate", 2), ("shared", 2), ("none", 1)])
def test_acting_step_by_step_is_learning_on_the_sequence(memory: Any, layers: int, reset_share: float) -> None:
    agent = make(memory=memory, lstm_layers=layers)
    obs, starts = rows(reset_share=reset_share)
    state = random_state(agent, 5)
    learned = agent(obs, state, starts).dist_params
    memory_state, acted = state[0], []
    for row, start in zip(obs, starts, strict=True):
        parameters, memory_state = agent.act(row, memory_state, start)
        acted.append(parameters)
    torch.testing.assert_close(torch.stack(acted), learned, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    "options",
    [{}, {"lstm_layers": 2, "twin_critics": True, "twin_trunk": "own"}, {"memory": "shared"}, {"memory": "none"}],
)
def test_looking_reads_each_successor_once_from_the_state_after_its_row(options: dict[str, Any]) -> None:
    """Against a second network run that has the successor as one more row, environment by environment."""
    agent = make(**options)
    obs, starts = rows()
    starts[0] = torch.tensor([True, False, False, True, False])
    draw = torch.Generator().manual_seed(7)
    boundaries = sorted({*(starts[1:].any(-1).nonzero().flatten()).tolist(), 8})
    final = torch.randn(len(boundaries), 5, 4, generator=draw)
    state = random_state(agent, 5)
    outputs, successors, after = agent.evaluate(obs, final, boundaries, state, starts)
    plain = agent(obs, state, starts)
    for found, expected in zip(outputs, plain.critics, strict=True):
        torch.testing.assert_close(found.value, expected.value, atol=1e-6, rtol=1e-5)
        assert found.distribution is not None
        assert not found.value.requires_grad
        torch.testing.assert_close(found.distribution, expected.distribution, atol=1e-6, rtol=1e-5)
    never = torch.zeros(1, 5, dtype=torch.bool)
    for place, row in enumerate(boundaries):
        longer = torch.cat((obs[: row + 1], final[place].unsqueeze(0)))
        expected_rows = agent(longer, state, torch.cat((starts[: row + 1], never))).critics
        for found_rows, critic in zip(successors, expected_rows, strict=True):
            assert found_rows.distribution is not None
            assert found_rows.value.shape[0] == len(boundaries)
            torch.testing.assert_close(found_rows.value[place], critic.value[-1], atol=1e-6, rtol=1e-5)
            torch.testing.assert_close(found_rows.distribution[place], critic.distribution[-1], atol=1e-6, rtol=1e-5)
            torch.testing.assert_close(found_rows.features[place], critic.features[-1], atol=1e-6, rtol=1e-5)
    for index, (before, now) in enumerate(zip(state, after, strict=True)):
        read = index in agent.critic_trunks
        for old, new in zip(before, now, strict=True):
            assert torch.equal(old, new) != read
    # The states after the last row are those of the rows, not of the successors.
    again, _, _ = agent.evaluate(obs[:3], obs[2:3], [2], after, starts[:3])
    twice = agent(torch.cat((obs, obs[:3])), state, torch.cat((starts, starts[:3])))
    torch.testing.assert_close(again[0].value, twice.critics[0].value[9:], atol=1e-6, rtol=1e-5)


def test_the_initial_state_is_empty_and_sized_by_trunk() -> None:
    agent = make(twin_critics=True, twin_trunk="own", lstm_layers=2)
    state = agent.initial_state(3)
    assert len(state) == 3
    assert all(part.shape == (2, 3, 6) and not part.any() for trunk in state for part in trunk)
    assert make(memory="none").initial_state(3) == ((), ())
    assert agent.is_recurrent
    assert not make(memory="none").is_recurrent


def test_heads_are_as_configured() -> None:
    agent = make(std="state", squash=False, log_std_init=-1.0, log_std_bounds=(-3.0, 0.0))
    head = agent.action_head
    assert isinstance(head, GaussianHead)
    assert (head.std, head.squash, head.log_std_init, head.log_std_bounds) == ("state", False, -1.0, (-3.0, 0.0))
    distribution = agent.each_critic()[0].distribution
    assert isinstance(distribution, QuantileCritic)
    assert distribution.tau.numel() == 5
    categorical = make(critic="categorical", support=(-4.0, 6.0), projection="two_hot").each_critic()[0].distribution
    assert isinstance(categorical, CategoricalCritic)
    assert (categorical.v_min, categorical.v_max, categorical.projection) == (-4.0, 6.0, "two_hot")
    assert categorical.atoms.numel() == 7
    assert make(critic="scalar").each_critic()[0].distribution is None
    discrete = ActorCritic(4, Discrete((3, 2)), SMALL)
    assert isinstance(discrete.action_head, CategoricalHead)
    assert discrete(*_arguments(discrete)).dist_params.shape == (9, 5, 5)


def _arguments(agent: ActorCritic) -> tuple[Tensor, PolicyState, Tensor]:
    obs, starts = rows()
    return obs, agent.initial_state(5), starts


@pytest.mark.parametrize(("activation", "kind"), [("tanh", nn.Tanh), ("silu", nn.SiLU), ("relu", nn.ReLU)])
def test_the_encoder_is_as_configured(activation: Any, kind: type[nn.Module]) -> None:
    agent = make(hidden=(8, 9), activation=activation)
    layers = list(agent.trunks[0].encoder.layers)  # type: ignore[union-attr, arg-type]
    assert [type(layer) for layer in layers] == [nn.Linear, kind, nn.Linear, kind]
    bare = make(hidden=())
    assert bare.trunks[0].memory.cells[0].input_size == 4  # type: ignore[union-attr, index]


def test_a_nan_does_not_outlive_its_episode_nor_leave_its_environment() -> None:
    agent = make()
    obs, starts = rows(reset_share=0.0)
    obs[2, 1] = float("nan")
    starts[5, 1] = True
    output = agent(obs, agent.initial_state(5), starts)
    spoiled = output.critics[0].value.isnan().squeeze(-1)
    assert spoiled[2:5, 1].all()
    spoiled[2:5, 1] = False
    assert not spoiled.any()


# --- two ways to read successors -------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["all rows", "some rows", "the last row"])
@pytest.mark.parametrize("options", [{}, {"lstm_layers": 2}, {"memory": "none"}])
def test_wide_devices_read_the_same_successors(options: dict[str, Any], which: str) -> None:
    """One step of K · N environments against one fused call between any two boundaries, to rounding in float64."""
    trunk = make(**options).double().each_trunk()[0]
    draw = torch.Generator().manual_seed(4)
    obs = torch.randn(7, 5, 4, generator=draw, dtype=torch.float64)
    starts = torch.zeros(7, 5, dtype=torch.bool)
    starts[0] = torch.tensor([True, False, False, True, False])
    final_rows = {"all rows": list(range(7)), "some rows": [1, 2, 6], "the last row": [6]}[which]
    for row in final_rows[:-1]:  # an episode ends after the row, in some environment
        starts[row + 1] = torch.rand(5, generator=draw) < 0.5
    final = torch.randn(len(final_rows), 5, 4, generator=draw, dtype=torch.float64)
    state = tuple(torch.randn(part.shape, generator=draw).double() for part in trunk.memory.initial_state(5))
    with torch.no_grad():
        wide = _each_successor(trunk, obs, final, final_rows, state, starts)
        narrow = _some_successors(trunk, obs, final, final_rows, state, starts)
    for found, expected in zip((*wide[:2], *wide[2]), (*narrow[:2], *narrow[2]), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    assert wide[0].shape == (7, 5, trunk.output_size)
    assert wide[1].shape == (len(final_rows), 5, trunk.output_size)
    # Each successor by itself: the rows up to its own, and then it.
    for place, row in enumerate(final_rows):
        for n in range(5):
            own = torch.cat((obs[: row + 1, n : n + 1], final[place, n].reshape(1, 1, -1)))
            begins = torch.cat((starts[: row + 1, n : n + 1], torch.zeros(1, 1, dtype=torch.bool)))
            with torch.no_grad():
                alone, _ = trunk.sequence(own, tuple(part[:, n : n + 1] for part in state), begins)
            torch.testing.assert_close(wide[1][place, n], alone[-1, 0], rtol=0, atol=1e-12)

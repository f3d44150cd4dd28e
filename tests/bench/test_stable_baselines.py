"""The peer with whole-sequence LSTM calls is the peer: the same outputs, losses and gradients."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tailguard.bench.own_learner import Shape
from tailguard.bench.stable_baselines import RecurrentPeer, WholeSequencePolicy
from tailguard.data.prepare import PreparedBars, prepare
from tailguard.data.synthetic import make_market

pytest.importorskip("sb3_contrib")

SHAPE = Shape(8, 32, 96)
"""Minibatches that are no whole number of sequences: the peer cuts and pads them."""


@pytest.fixture(scope="module")
def prepared() -> PreparedBars:
    return prepare(make_market(2_000, seed=0).bars)


def counted_calls(peer: RecurrentPeer) -> list[int]:
    """Lengths of the sequences that the actor's LSTM is given from now on."""
    lengths: list[int] = []
    peer.model.policy.lstm_actor.register_forward_pre_hook(lambda _, given: lengths.append(given[0].shape[0]))
    return lengths


@pytest.mark.parametrize("stagger", [1, 32])
def test_whole_sequences_give_the_losses_and_gradients_of_rows_one_by_one(prepared: PreparedBars, stagger: int) -> None:
    stock = RecurrentPeer(prepared, SHAPE, stagger, seed=1)
    whole = RecurrentPeer(prepared, SHAPE, stagger, seed=1, whole_sequences=True)
    for _ in range(20):
        stock.iterate()
        starts = stock.model.rollout_buffer.episode_starts.sum()
        if 0 < starts < SHAPE.envs:  # memories are filled, and some must be cleared
            break
    whole.model.policy.load_state_dict(stock.model.policy.state_dict())
    rows, calls = counted_calls(stock), counted_calls(whole)
    compared = 0
    np.random.seed(0)  # noqa: NPY002 (the peer's buffer shuffles with the global stream)
    for batch in stock.model.rollout_buffer.get(SHAPE.minibatch):
        compared += int((batch.episode_starts * batch.mask).sum())
        gradients = []
        for peer in (stock, whole):
            policy = peer.model.policy
            values, log_prob, entropy = policy.evaluate_actions(
                batch.observations, batch.actions, batch.lstm_states, batch.episode_starts
            )
            mask = batch.mask > 0
            ratio = (log_prob - batch.old_log_prob).exp()
            loss = (batch.advantages * ratio)[mask].mean() + (batch.returns - values.flatten())[mask].square().mean()
            policy.zero_grad()
            (loss + entropy[mask].mean()).backward()
            gradients.append([loss.detach(), values[mask], log_prob[mask], *(p.grad for p in policy.parameters())])
        for one, other in zip(*gradients, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    assert compared == starts > 0
    assert 1 in rows
    assert 1 not in calls


def test_a_start_inside_a_sequence_still_clears_the_memory() -> None:
    torch.manual_seed(0)
    lstm = torch.nn.LSTM(3, 4)
    features, state = torch.randn(2 * 5, 3), (torch.randn(1, 2, 4), torch.randn(1, 2, 4))
    starts = torch.zeros(2, 5)
    starts[1, 3] = 1
    found, _ = WholeSequencePolicy._process_sequence(features, state, starts.flatten(), lstm)
    fresh, _ = lstm(features[8:].unsqueeze(1))
    torch.testing.assert_close(found[8:], fresh.squeeze(1))
    untouched, _ = lstm(features[:5].unsqueeze(1), (state[0][:, :1].contiguous(), state[1][:, :1].contiguous()))
    torch.testing.assert_close(found[:5], untouched.squeeze(1))


def test_rewards_and_observations_are_those_of_the_tensor_environment(prepared: PreparedBars) -> None:
    peer = RecurrentPeer(prepared, SHAPE, 32, reward_scale=100.0)
    vec = peer.model.env
    assert vec is not None
    twin = RecurrentPeer(prepared, SHAPE, 32).model.env.unwrapped.env  # type: ignore[union-attr]
    np.testing.assert_array_equal(vec.reset(), twin.reset(0).numpy())
    action = np.linspace(-1, 1, 8, dtype=np.float32)[:, None]
    for _ in range(40):
        obs, reward, ended, infos = vec.step(action)
        step = twin.step(torch.as_tensor(action))
        np.testing.assert_array_equal(obs, step.obs.numpy())
        np.testing.assert_allclose(reward, 100 * step.reward.numpy(), rtol=1e-6)
        np.testing.assert_array_equal(ended, step.ended.numpy())
        for index in np.flatnonzero(ended):
            np.testing.assert_array_equal(infos[index]["terminal_observation"], step.final_obs[index].numpy())

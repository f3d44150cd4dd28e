"""Recurrent PPO as one would write it by hand, in the manner of CleanRL: one file, plain PyTorch, nothing shared.

The same network as the others: for actor and critic each a layer with tanh, an LSTM and a linear head. A Gaussian
policy whose standard deviation does not depend on the state. As in CleanRL, values are stored while acting, advantages
are normalised in each minibatch, and an episode that was cut short counts as over. Unlike there, a minibatch goes
through the LSTM in one call unless an episode starts inside its sequences.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributions import Normal

import tailguard as tg
from tailguard.bench.own_learner import EPOCHS, UNITS, Shape

State = tuple[Tensor, Tensor]

CLIP_RANGE = 0.2
VALUE_COEF = 0.5
MAX_GRAD_NORM = 0.5


def layer(inputs: int, outputs: int, gain: float) -> nn.Linear:
    """A linear layer with orthogonal weights and no bias at first."""
    made = nn.Linear(inputs, outputs)
    nn.init.orthogonal_(made.weight, gain)
    nn.init.zeros_(made.bias)
    return made


class Recurrent(nn.Module):
    """Encoder, LSTM and head."""

    def __init__(self, inputs: int, outputs: int, gain: float) -> None:
        super().__init__()
        self.encoder = nn.Sequential(layer(inputs, UNITS, 2**0.5), nn.Tanh())
        self.lstm = nn.LSTM(UNITS, UNITS)
        self.head = layer(UNITS, outputs, gain)

    def forward(self, obs: Tensor, state: State, starts: Tensor) -> tuple[Tensor, State]:
        """obs [T, N, O], starts [T, N] of 0 and 1; the state before the first row, [1, N, H] its parts."""
        hidden = self.encoder(obs)
        if len(obs) == 1 or not starts[1:].any():
            features, state = self.lstm(hidden, cleared(state, starts[0]))
            return self.head(features), state
        rows = []
        for row, start in zip(hidden, starts, strict=True):
            feature, state = self.lstm(row.unsqueeze(0), cleared(state, start))
            rows.append(feature)
        return self.head(torch.cat(rows)), state


def cleared(state: State, start: Tensor) -> State:
    """The state, zero where an episode starts, [N]."""
    keep = (1.0 - start).view(1, -1, 1)
    return keep * state[0], keep * state[1]


def empty(count: int) -> State:
    """States of so many environments that have seen nothing."""
    return torch.zeros(1, count, UNITS), torch.zeros(1, count, UNITS)


class PlainPPO:
    """The loop, an iteration at a time."""

    def __init__(
        self,
        env: tg.TradingEnv,
        shape: Shape,
        *,
        gamma: float = 0.99,
        gae_lambda: float = 0.95,
        learning_rate: float = 3e-4,
        reward_scale: float = 1.0,
        seed: int = 0,
    ) -> None:
        torch.manual_seed(seed)
        self.env, self.shape = env, shape
        self.gamma, self.gae_lambda, self.reward_scale = gamma, gae_lambda, reward_scale
        self.size = len(env.action_space.low)
        self.actor = Recurrent(env.observation_size, self.size, 0.01)
        self.critic = Recurrent(env.observation_size, 1, 1.0)
        self.log_std = nn.Parameter(torch.zeros(self.size))
        self.parameters = [*self.actor.parameters(), *self.critic.parameters(), self.log_std]
        self.optimizer = torch.optim.Adam(self.parameters, learning_rate, eps=1e-5)
        self.obs = env.reset(seed)
        self.start = torch.ones(shape.envs)
        self.states = empty(shape.envs), empty(shape.envs)

    def iterate(self) -> None:
        """One rollout and all epochs on it."""
        first = self.states
        rollout = self.collect()
        advantages = self.advantages(rollout)
        rollout |= {"advantages": advantages, "returns": advantages + rollout["values"][:-1]}
        for _ in range(EPOCHS):
            for index in torch.randperm(self.shape.envs).split(max(1, self.shape.minibatch // self.shape.steps)):
                self.update({name: value[: self.shape.steps, index] for name, value in rollout.items()}, first, index)

    @torch.no_grad()
    def collect(self) -> dict[str, Tensor]:
        """Act for some steps. `values` and `starts` have one row more: what follows the last step."""
        kept: dict[str, list[Tensor]] = {
            name: [] for name in ("obs", "starts", "actions", "log_probs", "rewards", "values")
        }
        for _ in range(self.shape.steps):
            mean, actor = self.actor(self.obs[None], self.states[0], self.start[None])
            value, critic = self.critic(self.obs[None], self.states[1], self.start[None])
            policy = Normal(mean[0], self.log_std.exp())
            action = policy.sample()
            step = self.env.step(action.clamp(-1, 1))
            log_prob = policy.log_prob(action).sum(-1)
            row = (self.obs, self.start, action, log_prob, self.reward_scale * step.reward, value[0, :, 0])
            for name, found in zip(kept, row, strict=True):
                kept[name].append(found)
            self.obs, self.start, self.states = step.obs, step.ended.float(), (actor, critic)
        value, _ = self.critic(self.obs[None], self.states[1], self.start[None])
        kept["values"].append(value[0, :, 0])
        kept["starts"].append(self.start)
        return {name: torch.stack(rows) for name, rows in kept.items()}

    def advantages(self, rollout: dict[str, Tensor]) -> Tensor:
        """Generalised advantage estimates, [T, N]."""
        values, goes_on = rollout["values"], 1.0 - rollout["starts"][1:]
        found, last = torch.zeros_like(rollout["rewards"]), torch.zeros(self.shape.envs)
        for row in reversed(range(self.shape.steps)):
            delta = rollout["rewards"][row] + self.gamma * goes_on[row] * values[row + 1] - values[row]
            last = delta + self.gamma * self.gae_lambda * goes_on[row] * last
            found[row] = last
        return found

    def update(self, batch: dict[str, Tensor], states: tuple[State, State], index: Tensor) -> None:
        """One optimiser step on the sequences of some environments."""
        actor, critic = ((hidden[:, index], cell[:, index]) for hidden, cell in states)
        mean, _ = self.actor(batch["obs"], actor, batch["starts"])
        values, _ = self.critic(batch["obs"], critic, batch["starts"])
        log_prob = Normal(mean, self.log_std.exp()).log_prob(batch["actions"]).sum(-1)
        ratio = (log_prob - batch["log_probs"]).exp()
        scaled = (batch["advantages"] - batch["advantages"].mean()) / (batch["advantages"].std() + 1e-8)
        policy_loss = -torch.minimum(scaled * ratio, scaled * ratio.clamp(1 - CLIP_RANGE, 1 + CLIP_RANGE)).mean()
        value_loss = 0.5 * (values[..., 0] - batch["returns"]).square().mean()
        self.optimizer.zero_grad()
        (policy_loss + VALUE_COEF * value_loss).backward()
        nn.utils.clip_grad_norm_(self.parameters, MAX_GRAD_NORM)
        self.optimizer.step()

    @torch.no_grad()
    def predict(
        self, obs: np.ndarray, state: State | None, episode_start: np.ndarray, deterministic: bool = True
    ) -> tuple[np.ndarray, Any]:
        """Actions and the memory to give back, in Stable-Baselines3's form."""
        start = torch.as_tensor(episode_start, dtype=torch.float32)
        mean, state = self.actor(torch.as_tensor(obs)[None], state or empty(len(obs)), start[None])
        action = mean[0] if deterministic else Normal(mean[0], self.log_std.exp()).sample()
        return action.clamp(-1, 1).numpy(), state

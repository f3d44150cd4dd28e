"""The deterministic policy of one account, step by step: for backtests and other sequential decisions.

`ActorCritic.act` reads any number of rows, on any device, and prepares a probability ratio. For one row on a CPU its
bookkeeping costs three times the arithmetic. `InferencePolicy` performs the same operations in the same order, so it
gives the same actions bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tailguard.models.actions import GaussianHead
from tailguard.models.memory import LSTMMemory, MemoryState
from tailguard.models.policy import ActorCritic
from tailguard.models.precision import is_narrow


class StepPolicy(Protocol):
    """Observation [1, O] in, action [1, A] out; `reset` clears the memory before the observation is read."""

    def __call__(self, observation: Tensor, reset: bool) -> Tensor: ...


@dataclass(frozen=True)
class ScaledNetwork:
    """A network with what converts a raw observation to its input: the whole of what decides."""

    network: ActorCritic
    scale: Callable[[Tensor], Tensor]
    """Raw observations [..., O] to the network's inputs."""
    units: Tensor
    """Size in the raw observation of one unit of the network's input, [O]."""
    typical: Tensor
    """The mean of the raw observations in training, [O]: the network's input is 0 there."""


class InferencePolicy:
    """A network's most likely action, step by step. Call it under `torch.inference_mode()`.

    `scale`: converts a raw observation to the network's input.
    """

    def __init__(self, network: ActorCritic, scale: Callable[[Tensor], Tensor]) -> None:
        self.network, self.scale, self.head = network, scale, network.action_head
        trunk = network.each_trunk()[0]
        self.device = next(network.parameters()).device
        self._start = torch.ones(1, dtype=torch.bool, device=self.device)
        self._memory: MemoryState = network.initial_state(1)[0]
        self._cells = trunk.memory.cell_weights() if isinstance(trunk.memory, LSTMMemory) else []
        self._states: list[tuple[Tensor, Tensor]] = []
        plain = network.layout is None
        self._direct = plain and self.device.type == "cpu" and not is_narrow(trunk.precision, self.device)
        self._layers = [_direct(layer) for layer in trunk.encoder.layers]
        self._head = _direct(self.head.linear)
        self._gaussian = isinstance(self.head, GaussianHead)

    def __call__(self, observation: Tensor, reset: bool) -> Tensor:
        if not self._direct:
            return self._by_network(observation, reset)
        x = self.scale(observation)
        for layer in self._layers:
            x = layer(x)
        if reset or not self._states:
            zeros = [torch.zeros(1, weights[1].shape[1], dtype=x.dtype) for weights in self._cells]
            self._states = [(zero, zero) for zero in zeros]
        for index, weights in enumerate(self._cells):
            x, cell = torch.lstm_cell(x, self._states[index], *weights)
            self._states[index] = x, cell
        head, output = self.head, self._head(x)
        # The mean of a Gaussian comes first, followed by a standard deviation if it depends on the state.
        raw = output[:, : head.raw_size] if self._gaussian else head.mode(output)
        return head.to_env(raw)

    def _by_network(self, observation: Tensor, reset: bool) -> Tensor:
        """Other devices, and bfloat16: the network itself handles the precision."""
        start = self._start if reset else ~self._start
        rows = self.scale(observation.to(self.device))
        parameters, self._memory = self.network.act(rows, self._memory, start)
        return self.head.to_env(self.head.mode(parameters)).cpu()


def _direct(layer: nn.Module) -> Callable[[Tensor], Tensor]:
    """A layer as a plain function: a module first looks up hooks and weights, which costs as much as a small layer."""
    if isinstance(layer, nn.Linear):
        weight, bias = layer.weight, layer.bias
        return lambda x: F.linear(x, weight, bias)
    forward: Callable[[Tensor], Tensor] = layer.forward
    return forward


class PredictPolicy:
    """Any agent with SB3's `predict`, as a step policy."""

    def __init__(self, agent: Any) -> None:
        self.agent = agent
        self.memory: Any = None

    def __call__(self, observation: Tensor, reset: bool) -> Tensor:
        action, self.memory = self.agent.predict(
            observation.numpy(), state=self.memory, episode_start=np.array([reset]), deterministic=True
        )
        return torch.as_tensor(np.asarray(action)).reshape(1, -1)

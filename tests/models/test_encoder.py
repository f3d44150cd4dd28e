from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from tailguard.errors import ConfigError
from tailguard.models.encoder import Encoder

ACTIVATIONS = {
    "tanh": np.tanh,
    "silu": lambda x: x / (1.0 + np.exp(-x)),
    "relu": lambda x: np.maximum(x, 0.0),
}


def _weights(encoder: Encoder) -> list[nn.Linear]:
    return [layer for layer in encoder.layers if isinstance(layer, nn.Linear)]


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_each_layer_is_affine_then_activation(activation: str) -> None:
    torch.manual_seed(0)
    encoder = Encoder(5, (7, 3), activation).double()  # type: ignore[arg-type]
    for linear in _weights(encoder):
        nn.init.normal_(linear.bias)
    observation = torch.randn(4, 2, 5, dtype=torch.float64)

    expected = observation.numpy()
    for linear in _weights(encoder):
        affine = expected @ linear.weight.detach().numpy().T + linear.bias.detach().numpy()
        expected = ACTIVATIONS[activation](affine)

    assert encoder.output_size == 3
    np.testing.assert_allclose(encoder(observation).detach().numpy(), expected, rtol=0, atol=1e-14)


def test_weights_start_orthogonal_with_gain_sqrt_2_and_biases_at_zero() -> None:
    torch.manual_seed(0)
    wide, narrow = _weights(Encoder(6, (9, 4)))
    # 9x6 has orthogonal columns, 4x9 orthogonal rows, each of squared length 2.
    torch.testing.assert_close(wide.weight.T @ wide.weight, 2 * torch.eye(6), rtol=0, atol=1e-5)
    torch.testing.assert_close(narrow.weight @ narrow.weight.T, 2 * torch.eye(4), rtol=0, atol=1e-5)
    assert not wide.bias.any()
    assert not narrow.bias.any()


def test_without_hidden_layers_the_observation_passes_unchanged() -> None:
    encoder = Encoder(5, ())
    observation = torch.randn(3, 5)
    assert encoder.output_size == 5
    assert torch.equal(encoder(observation), observation)
    assert not list(encoder.parameters())


def test_unknown_activation_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'swish'.*tanh, silu, relu"):
        Encoder(5, (7,), "swish")  # type: ignore[arg-type]


def test_a_layer_without_units_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"\(7, 0\)"):
        Encoder(5, (7, 0))

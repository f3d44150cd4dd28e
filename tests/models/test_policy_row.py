"""The policy's rows as single nodes of the graph, against the modules' own values and slopes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tailguard.envs.protocol import Box
from tailguard.models.memory import MemoryState
from tailguard.models.policy import ActorCritic, NetworkConfig
from tailguard.models.policy_row import PolicyRows, RowPolicy

ROWS, N, WIDTH = 5, 12, 4
SHAPES: dict[str, dict[str, Any]] = {
    "one layer": {"hidden": (6,)},
    "two LSTM layers": {"hidden": (6,), "lstm_layers": 2},
    "a deep encoder": {"hidden": (6, 7)},
    "no encoder": {"hidden": ()},
    "a deviation of each state": {"hidden": (6,), "std": "state"},
}


@pytest.fixture(autouse=True)
def in_double() -> Any:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def make(**options: Any) -> ActorCritic:
    torch.manual_seed(0)
    one = torch.ones(2)
    policy = ActorCritic(WIDTH, Box(-one, one), NetworkConfig(lstm_size=5, **options))
    for parameter in policy.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    return policy


def rows(acting: RowPolicy, given: dict[str, Tensor]) -> tuple[Tensor, MemoryState]:
    """Outputs of all rows and the memory after them. An observation depends on the output before it; some accounts
    begin an episode in row 2."""
    memory: MemoryState = (given["h"], given["c"])
    output, outputs = torch.zeros(()), []
    for number in range(ROWS):
        start = (torch.arange(N) % 3 == 0) & (number == 2)
        obs = given["obs"][number] + 0.5 * output.sum(-1, keepdim=True) if outputs else given["obs"][number]
        output, memory = acting.act_output(obs, memory, start, given.get("mask"))
        outputs.append(output)
    return torch.stack(outputs), memory


def inputs(policy: ActorCritic, *, masked: bool) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(1)
    h, c = policy.initial_state(N)[0]
    given = {
        "obs": torch.randn(ROWS, N, WIDTH, generator=draw),
        "h": 0.5 * torch.randn(h.shape, generator=draw),
        "c": torch.randn(c.shape, generator=draw),
    }
    given = {name: value.requires_grad_() for name, value in given.items()}
    if masked:
        width = policy.each_trunk()[0].encoder.output_size
        given["mask"] = (torch.rand(N, width, generator=draw) > 0.3) / 0.7
    return given


def weights_of(policy: ActorCritic) -> dict[str, Tensor]:
    names = ("trunks.0.", "action_head.linear.")
    return {name: value for name, value in policy.named_parameters() if name.startswith(names)}


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("options", SHAPES.values(), ids=SHAPES)
def test_values_and_slopes_are_those_of_the_modules(options: dict[str, Any], masked: bool) -> None:
    """In every weight, in the observations and in the memory before the window, of outputs and memory after it."""
    policy = make(**options)
    given = inputs(policy, masked=masked)
    acting = policy.for_window(given["obs"][0], (given["h"], given["c"]))
    assert isinstance(acting, PolicyRows)
    found, after = rows(acting, given)
    expected, wanted = rows(policy, given)
    for mine, theirs in zip((found, *after), (expected, *wanted), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-14)
    draw = torch.Generator().manual_seed(2)
    factors = [torch.randn(value.shape, generator=draw) for value in (found, *after)]
    over = {**weights_of(policy), **{name: given[name] for name in ("obs", "h", "c")}}

    def slopes(values: tuple[Tensor, ...]) -> list[Tensor]:
        total = torch.stack([(factor * value).sum() for factor, value in zip(factors, values, strict=True)]).sum()
        return list(torch.autograd.grad(total, list(over.values())))

    for name, mine, theirs in zip(over, slopes((found, *after)), slopes((expected, *wanted)), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12, msg=name)
        assert float(theirs.abs().max()) > 1e-3, name


def test_a_pass_that_asks_for_less_leaves_nothing_in_the_next_one() -> None:
    """The slopes of the weights are summed over the rows; those of another pass are not among them."""
    policy = make(hidden=(6,))
    given = inputs(policy, masked=False)
    outputs, _ = rows(policy.for_window(given["obs"][0], (given["h"], given["c"])), given)
    plain, _ = rows(policy, given)
    weights = list(weights_of(policy).values())
    torch.autograd.grad(outputs.sum(), given["obs"], retain_graph=True)
    for of in (slice(None), slice(0, 2), slice(3, None)):
        found = torch.autograd.grad(outputs[of].square().sum(), weights, retain_graph=True)
        expected = torch.autograd.grad(plain[of].square().sum(), weights, retain_graph=True)
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


def test_other_networks_and_acting_without_a_gradient_keep_the_modules() -> None:
    for options in ({"memory": "none"}, {"activation": "silu"}, {"precision": "bfloat16"}):
        policy = make(hidden=(6,), **options)
        assert policy.for_window(torch.zeros(N, WIDTH), policy.initial_state(N)[0]) is policy
    policy = make(hidden=(6,))
    with torch.no_grad():
        assert policy.for_window(torch.zeros(N, WIDTH), policy.initial_state(N)[0]) is policy

"""What a GPU records as one graph must not depend on the host: checked operation by operation, without a GPU.

While a CUDA graph is recorded, a value on the device cannot be read, and numbers from the host cannot be copied there.
Here the learner takes the branches that it takes on a GPU, on a CPU, and every operation inside a recorded function is
looked at: reading a value, numbers from Python and tensors made without naming a device would stop the recording.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import tailguard as tg
from tailguard.algorithm.config import PathwiseConfig, PPOConfig
from tailguard.algorithm.learner import Learner
from tailguard.algorithm.member_learners import MemberLearners
from tailguard.algorithm.runtime import Runtime, tensors_of
from tailguard.models.policy import NetworkConfig
from tailguard.optim.config import UPGDConfig, VGSConfig
from tailguard.robust.config import RobustConfig

FACTORIES = {
    getattr(torch, name)
    for name in ("arange", "empty", "eye", "full", "linspace", "ones", "rand", "randint", "randn", "tensor", "zeros")
}
ENVS, LENGTH = 16, 32


class HostFree(TorchDispatchMode):
    """Collects operations that a recording would refuse."""

    def __init__(self) -> None:
        super().__init__()
        self.refused: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        del types
        kwargs, name = dict(kwargs or {}), func.overloadpacket.__name__
        if name in ("_local_scalar_dense", "lift_fresh"):
            self.refused.append(f"{name} in {_caller()}")
        return func(*args, **kwargs)


class DeviceNamed(TorchFunctionMode):
    """Collects tensors that are made without saying where."""

    def __init__(self) -> None:
        super().__init__()
        self.refused: list[str] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        del types
        kwargs = dict(kwargs or {})
        if func in FACTORIES and kwargs.get("device") is None:
            self.refused.append(f"{func.__name__} in {_caller()}")
        return func(*args, **kwargs)


def _caller() -> str:
    """The line of the package that called the operation."""
    frame = sys._getframe(2)
    while frame.f_back is not None and "/tailguard/" not in frame.f_code.co_filename:
        frame = frame.f_back
    return f"{frame.f_code.co_filename.rpartition('/tailguard/')[2]}:{frame.f_lineno}"


class RecordedOnHost(Runtime):
    """Runs functions as they are recorded on a GPU."""

    host: HostFree
    device_named: DeviceNamed

    @classmethod
    def take_over(cls, runtime: Runtime) -> RecordedOnHost:
        runtime.__class__ = cls
        assert isinstance(runtime, cls)
        runtime.mode, runtime.host, runtime.device_named = "graph", HostFree(), DeviceNamed()
        return runtime

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return function

    def run(self, key: Any, function: Callable[..., Any], *inputs: torch.Tensor) -> Any:
        del key
        if not self.recording:
            return function(*inputs)
        with self.device_named, self.host:
            return function(*inputs)


def build(learner: str, **options: Any) -> Learner:
    bars = tg.make_market(1_500, seed=0).bars
    env = tg.TradingEnv(bars, num_envs=ENVS, episode_length=LENGTH, stagger=8, features=("return_24",))
    network = NetworkConfig(hidden=(8,), lstm_size=8, quantiles=8, **options.pop("network", {}))
    risk, robust = options.pop("risk", None), options.pop("robust", None)
    if learner == "ppo":
        config = PPOConfig(n_steps=8, minibatch_size=64, network=network, **options)
        return tg.DistributionalPPO(env, config, seed=0, risk=risk, robust=robust)
    return tg.PathwiseLearner(env, PathwiseConfig(network=network, **options), seed=0, risk=risk, robust=robust)


ALL_ON = {
    "optimizer": "upgdw",
    "vgs": VGSConfig(enabled=True),
    "upgd": UPGDConfig(),
    "entropy_coef": 0.001,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "ppo": ("ppo", {}),
    "ppo, all on": (
        "ppo",
        ALL_ON
        | {"value_clip": "mean_and_variance", "target_kl": 1.0, "network": {"twin_critics": True}}
        | {"risk": tg.RiskConfig(limit=-0.05)},
    ),
    "ppo, categorical": ("ppo", {"network": {"critic": "categorical"}, "microbatches": 2}),
    "ppo without memory": ("ppo", {"network": {"memory": "none"}}),
    "ppo, attacked": ("ppo", {"robust": RobustConfig(coef=1.0)}),
    "pathwise": ("pathwise", {"n_steps": 8}),
    "pathwise, critics": ("pathwise", {"n_steps": 8, "critic_epochs": 1, "network": {"twin_critics": True}}),
    "pathwise, budget": ("pathwise", {"risk": tg.RiskConfig(limit=-0.01)}),
    "pathwise, drawdowns": ("pathwise", {"risk": tg.RiskConfig(limit=-0.01, measure="drawdown")}),
    "pathwise, all on": (
        "pathwise",
        ALL_ON | {"n_steps": 8, "stochastic": True, "dropout": 0.2, "risk": tg.RiskConfig(limit=-0.01)},
    ),
    "pathwise, attacked": ("pathwise", {"n_steps": 8, "robust": RobustConfig(coef=1.0)}),
    "pathwise without memory": ("pathwise", {"n_steps": 8, "network": {"memory": "none"}}),
}


@pytest.mark.parametrize("name", CASES)
def test_a_recorded_iteration_needs_nothing_from_the_host(
    name: str, on_a_gpu: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    on_a_gpu(monkeypatch)
    learner, options = CASES[name]
    agent = build(learner, **dict(options))
    runtime = RecordedOnHost.take_over(agent.runtime)
    for _ in range(4):
        agent.iterate()
    assert runtime.recording
    assert runtime.host.refused == []
    assert runtime.device_named.refused == []


@pytest.mark.parametrize("name", [name for name in CASES if "attacked" not in name])
def test_an_iteration_of_members_needs_nothing_from_the_host(
    name: str, on_a_gpu: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is recorded as a whole, with the draws of every member."""
    on_a_gpu(monkeypatch)
    learner, options = CASES[name]
    members = MemberLearners([build(learner, **copy.deepcopy(options)) for _ in range(2)])
    for _ in range(3):
        members.iterate()
    host, device_named = HostFree(), DeviceNamed()
    with device_named, host:
        members._all_members()
    assert host.refused == []
    assert device_named.refused == []


@pytest.mark.parametrize("name", CASES)
def test_an_iteration_leaves_no_graph_behind(name: str) -> None:
    """A graph kept from an iteration that was not recorded ties its weights to another stream than the recording's."""
    learner, options = CASES[name]
    agent = build(learner, **dict(options))
    agent.iterate()
    carried = agent.state.rollout_state, agent.snapshot, agent.env.state, agent.updates.metrics()
    assert [tuple(one.shape) for one in tensors_of(carried) if one.requires_grad] == []


def test_what_a_recording_refuses_is_seen() -> None:
    host, named = HostFree(), DeviceNamed()
    with named, host:
        bool(torch.ones(2, device="cpu").any())
        torch.ones(2)
        torch.zeros(3, device="cpu")[[0, 2]]
    assert [one.split()[0] for one in host.refused] == ["_local_scalar_dense", "lift_fresh"]
    assert [one.split()[0] for one in named.refused] == ["ones"]

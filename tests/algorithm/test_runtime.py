"""Eager, compiled and recorded iterations are the same iterations; nothing on the way asks the device for a value."""

from __future__ import annotations

import copy
import math
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import tailguard as tg
from tailguard.algorithm.bc import BehaviourCloning
from tailguard.algorithm.nonfinite import NonFiniteError
from tailguard.algorithm.optimizers import unless
from tailguard.algorithm.ppo import DistributionalPPO
from tailguard.algorithm.runtime import WARMUP, Runtime, copy_into, tensors_of
from tailguard.algorithm.saving import capture, restore
from tailguard.algorithm.scale import reset_support
from tailguard.algorithm.update import Batch
from tailguard.data.bars import Bars
from tailguard.envs.trading import TradingEnv
from tailguard.errors import ConfigError
from tailguard.optim.config import VGSConfig

BUDGET = tg.RiskConfig(limit=-0.02, alpha=0.5, window=40)
CPU, GPU = torch.device("cpu"), torch.device("cuda")
RICH: dict[str, Any] = {
    "twin_critics": True,
    "value_clip": "mean_and_variance",
    "entropy_coef": 0.01,
    "microbatches": 2,
    "optimizer": "upgdw",
    "vgs": VGSConfig(enabled=True, warmup_steps=2),
    "risk": BUDGET,
    "extensions": (BehaviourCloning(0.01, beta=1.0),),
}
"""Nearly everything at once."""


def trading(bars: Bars, device: str = "cpu", num_envs: int = 6) -> TradingEnv:
    return TradingEnv(bars, num_envs=num_envs, episode_length=20, stagger=4, device=device)


@contextmanager
def without_looking(*learners: DistributionalPPO) -> Iterator[None]:
    """These learners run as before anything is recorded, on a CPU, and compiled functions as they are."""
    for learner in learners:
        learner.runtime.mode = "graph"
    with torch.compiler.set_stance("force_eager"):
        yield


def iterate_unrecorded(learner: DistributionalPPO) -> dict[str, float]:
    learner.runtime.iterations = 0  # a CPU cannot record
    return learner.iterate()


# --- ways to run -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "device", "functional", "on_nonfinite", "mode", "refusal"),
    [
        ("auto", CPU, True, "stop", "eager", None),
        ("eager", CPU, True, "stop", "eager", None),
        ("compile", CPU, False, "skip", "compile", None),
        ("graph", CPU, True, "stop", "eager", "not as a graph: CUDA graphs need a GPU, and this is cpu"),
        ("auto", GPU, True, "stop", "graph", None),
        ("graph", GPU, True, "stop", "graph", None),
        ("eager", GPU, True, "stop", "eager", None),
        ("compile", GPU, True, "stop", "compile", None),
        ("auto", GPU, False, "stop", "eager", "which is slower: the steps of ScriptedEnv are not a pure function"),
        ("graph", GPU, False, "stop", "eager", "not as a graph: the steps of ScriptedEnv are not a pure function"),
        ("auto", GPU, True, "skip", "eager", "which is slower: on_nonfinite: skip has to look at every minibatch"),
        ("graph", GPU, True, "skip", "eager", "not as a graph: on_nonfinite: skip has to look at every minibatch"),
        ("eager", GPU, False, "skip", "eager", None),
    ],
)
def test_the_way_to_run_is_the_one_asked_for_or_refused_in_words(
    bars: Bars,
    scripted_env: Any,
    kind: Any,
    device: torch.device,
    functional: bool,
    on_nonfinite: str,
    mode: str,
    refusal: str | None,
) -> None:
    runtime = Runtime(kind, trading(bars) if functional else scripted_env(), device, on_nonfinite)
    assert runtime.mode == mode
    assert runtime.can_sync == (mode != "graph")
    assert (runtime.refusal is None) == (refusal is None)
    assert refusal is None or refusal in (runtime.refusal or "")


def test_a_learner_says_what_it_cannot_do(make_learner: Any) -> None:
    with pytest.warns(UserWarning, match=r"^runtime: running eagerly, not as a graph: CUDA graphs need a GPU"):
        make_learner(runtime="graph")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert make_learner().runtime.mode == "eager"
    with pytest.raises(ConfigError, match=r"ppo.runtime: 'fast' is not one of auto, eager, compile, graph"):
        make_learner(runtime="fast")


def test_recording_begins_after_the_warm_up() -> None:
    runtime = Runtime("eager", None, CPU, "stop")
    runtime.mode = "graph"
    seen = []
    for _ in range(WARMUP + 1):
        seen.append(runtime.recording)
        runtime.iterations += 1
    assert seen == [False] * WARMUP + [True]


def test_what_is_kept_stays_in_its_place_once_recording() -> None:
    runtime = Runtime("eager", None, CPU, "stop")
    before, after = {"a": torch.zeros(2), "b": (torch.zeros(1),)}, {"a": torch.ones(2), "b": (torch.full((1,), 7.0),)}
    assert runtime.copy_in_place(before, after) is after
    assert not before["a"].any()
    runtime.mode, runtime.iterations = "graph", WARMUP
    assert runtime.copy_in_place(before, after) is before
    assert before["a"].tolist() == [1.0, 1.0]
    assert before["b"][0].tolist() == [7.0]


def test_a_function_runs_as_it_is_where_nothing_is_recorded() -> None:
    runtime = Runtime("eager", None, CPU, "stop")
    value = torch.ones(3)
    assert runtime.run("key", lambda given: given, value) is value
    assert runtime.run("key", lambda: 5) == 5
    assert runtime.compiled(trading) is trading


# --- structures ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    value: Tensor
    name: str
    inner: Any


def structure(start: float) -> Part:
    tensors = [torch.full((2,), start + number) for number in range(5)]
    pair = (tensors[2], {"x": tensors[3], "none": None, "number": 3})
    return Part(tensors[0], "text", [Part(tensors[1], "more", pair), tensors[4], 2.0])


def test_every_tensor_of_a_structure_is_found_in_order() -> None:
    assert [float(value[0]) for value in tensors_of(structure(10.0))] == [10.0, 11.0, 12.0, 13.0, 14.0]
    assert list(tensors_of(("text", None, 4))) == []


def test_a_structure_is_filled_in_place() -> None:
    old, new = structure(0.0), structure(20.0)
    places = [value.data_ptr() for value in tensors_of(old)]
    copy_into(old, new)
    assert [value.data_ptr() for value in tensors_of(old)] == places
    for mine, given in zip(tensors_of(old), tensors_of(new), strict=True):
        assert torch.equal(mine, given)
        assert mine is not given
    with pytest.raises(ValueError, match="a structure of 1 tensors cannot take the place of one of 5"):
        copy_into(old, torch.zeros(2))


# --- what lives on keeps its storage ---------------------------------------------------------------------------------


def places(learner: DistributionalPPO) -> dict[str, int]:
    """Where everything lies that lives from one iteration to the next and is not handed to `Runtime.keep`."""
    found: dict[str, Tensor] = {f"agent.{name}": value for name, value in learner.policy.state_dict().items()}
    owners: dict[str, Any] = {
        "observations": learner.observation_moments,
        "returns": learner.return_moments,
        "episodes": learner.episodes,
        "hyper": learner.hyper,
        "tally": learner.updates.minibatch_metrics,
        "stop": learner.updates.stop,
        "vgs": learner.scaler,
        "learner": learner,
        "updates": learner.updates,
    }
    optimizers = {"optimizer": learner.optimizer}
    if learner.risk is not None:
        assert learner.risk.predictions is not None
        owners |= {
            "risk": learner.risk,
            "constraint": learner.risk.constraint,
            "window": learner.risk.constraint.window,
            "changes": learner.risk.changes,
            "running": learner.risk.running,
            "predictions": learner.risk.predictions,
            "ranks": learner.risk.predictions.ranks,
        }
        optimizers["cost critic"] = learner.risk.critic.optimizer
        found |= {f"cost critic.{name}": value for name, value in learner.risk.critic.state_dict().items()}
    for owner, thing in owners.items():
        found |= {f"{owner}.{name}": value for name, value in vars(thing).items() if isinstance(value, Tensor)}
    found |= {f"vgs.means.{number}": mean for number, mean in enumerate(getattr(learner.scaler, "_means", []))}
    for owner, optimizer in optimizers.items():
        for number, state in enumerate(optimizer.state.values()):
            found |= {f"{owner}.{number}.{name}": value for name, value in state.items()}
    return {name: value.data_ptr() for name, value in found.items()}


@pytest.mark.parametrize("optimizer", ["adam", "upgdw"])
def test_what_lives_on_is_changed_in_place(make_learner: Any, bars: Bars, optimizer: str) -> None:
    """A recorded iteration goes on writing where it wrote when it was recorded."""
    learner = make_learner(trading(bars), **(RICH | {"optimizer": optimizer}))
    learner.iterate()
    before = places(learner)
    for part in ("hyper.learning_rate", "window.losses", "running.last", "predictions.earned", "episodes.kept"):
        assert part in before
    assert sum(name.startswith("optimizer.") for name in before) > 2 * len(list(learner.policy.parameters()))
    for _ in range(3):
        learner.iterate()
    after = places(learner)
    assert [name for name in before if before[name] != after[name]] == []
    assert before.keys() == after.keys()


def test_a_support_is_laid_anew_in_place(make_learner: Any) -> None:
    learner = make_learner(critic="categorical", twin_critics=True, vgs=VGSConfig(enabled=True))
    learner.iterate()
    before = places(learner)
    change = learner.return_moments.update(torch.tensor([-500.0, 500.0]).repeat(1000))
    for critic in learner.policy.each_critic():
        critic.distribution.rescale(change)
    assert reset_support(learner.policy, learner.optimizer, learner.scaler) == 2
    assert places(learner) == before


# --- steps that are taken back ---------------------------------------------------------------------------------------


def test_a_change_is_made_or_not_made_bit_by_bit() -> None:
    def values() -> list[Tensor]:
        draw = torch.Generator().manual_seed(0)
        return [
            torch.randn(3, 2, generator=draw),
            torch.randn(4, generator=draw, dtype=torch.float64),
            torch.tensor(5),
            torch.tensor(1.0),
            torch.tensor([math.nan, -0.0, math.inf]),
        ]

    def change(given: list[Tensor]) -> None:
        given[0].mul_(1.5)
        given[1].fill_(math.nan)
        given[2].add_(1)
        given[4].copy_(torch.tensor([1.0, 0.0, math.nan]))

    for stopped in (True, False):
        expected, found = values(), values()
        if not stopped:
            change(expected)
        before = [value.data_ptr() for value in found]
        unless(torch.tensor(stopped), lambda found=found: change(found), found)  # type: ignore[misc]
        assert [value.data_ptr() for value in found] == before
        for mine, wanted in zip(found, expected, strict=True):
            assert mine.dtype == wanted.dtype
            assert mine.numpy().tobytes() == wanted.numpy().tobytes()


@pytest.mark.parametrize("vgs", [False, True])
@pytest.mark.parametrize("kind", ["adam", "adamw", "upgd", "adaptive_upgd", "upgdw"])
def test_a_step_that_must_not_be_taken_changes_nothing(
    make_learner: Any, everything_in: Any, kind: str, vgs: bool
) -> None:
    """Of all that a checkpoint would hold, with every optimiser; one that may be taken is the step itself."""

    def numbers(learner: DistributionalPPO) -> dict[str, Tensor]:
        scaler = {} if learner.scaler is None else learner.scaler.state_dict()
        return everything_in(learner) | {f"vgs.{name}": value for name, value in scaler.items()}

    def prepared() -> DistributionalPPO:
        learner: DistributionalPPO = make_learner(optimizer=kind, vgs=VGSConfig(enabled=vgs, warmup_steps=1))
        learner.iterate()
        draw = torch.Generator().manual_seed(3)
        for parameter in learner.policy.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=draw)
        return learner

    norm = torch.tensor(10.0)
    held, free, plain = prepared(), prepared(), prepared()
    before = numbers(held)
    plain.updates.step(norm)
    for learner, stopped in ((held, True), (free, False)):
        unless(torch.tensor(stopped), lambda learner=learner: learner.updates.step(norm), learner.updates.moving())  # type: ignore[misc]
    for expected, found in ((before, numbers(held)), (numbers(plain), numbers(free))):
        assert expected.keys() == found.keys()
        for name, value in expected.items():
            assert torch.equal(found[name], value), name
    assert not torch.equal(numbers(plain)["agent.action_head.linear.weight"], before["agent.action_head.linear.weight"])


# --- nothing is looked at on the way ---------------------------------------------------------------------------------

WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "unique_consecutive", "_unique2", "is_nonzero"}
"""Operations that need to know a value before they can go on: item, bool, float, int and shapes that depend on data."""
FREE_ON_A_CPU = {"may_hold_any"}
"""Functions that look where looking is free, and only there."""
PARTS = ("_collect", "_prepare", "_learn_policy", "minibatch", "_reached_kl", "_finish")


class Reads(TorchDispatchMode):
    """Notes which part of an iteration needed a value from the device."""

    def __init__(self) -> None:
        super().__init__()
        self.places: list[tuple[str, str]] = []

    def note(self, what: str) -> None:
        frame, stack = sys._getframe(1), []
        while frame is not None:
            stack.append((frame.f_code.co_name, frame.f_code.co_filename))
            frame = frame.f_back  # type: ignore[assignment]
        names = [name for name, _ in stack]
        part = next((name for name in names if name in PARTS), None)
        # Adam on a CPU reads its own step count there; on a GPU it is `capturable` and does not.
        if part is None or FREE_ON_A_CPU & set(names) or any(path.endswith("optim/adam.py") for _, path in stack):
            return
        where = next(path for name, path in stack if "/tailguard/" in path)
        self.places.append((part, f"{what} in {where.rsplit('/', 1)[-1]}"))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        masks = name in ("index", "index_put", "index_put_") and any(
            isinstance(index, Tensor) and index.dtype == torch.bool for index in args[1]
        )
        if name in WAITS or masks:
            self.note(name)
        return func(*args, **(kwargs or {}))


@contextmanager
def counting_reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[Reads]:
    """Conversions that copy a tensor to the host without an operation of their own are counted too."""
    reads = Reads()

    def counted(original: Callable[..., Any], name: str) -> Callable[..., Any]:
        def wrapper(*given: Any, **options: Any) -> Any:
            reads.note(name)
            return original(*given, **options)

        return wrapper

    with monkeypatch.context() as patch:
        for name in ("tolist", "item", "numpy", "cpu", "__bool__", "__float__", "__int__", "__index__"):
            patch.setattr(torch.Tensor, name, counted(getattr(torch.Tensor, name), name))
        with reads:
            yield reads


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rich": RICH | {"target_kl": 1e-5},
    "categorical": {"critic": "categorical", "kl_penalty": 0.1, "target_kl": 1e-3, "normalise_advantages": "per_env"},
    "no memory": {"memory": "none", "risk": tg.RiskConfig(limit=-0.02, measure="bar", alpha=0.5)},
    "drawdown": {"critic": "scalar", "risk": tg.RiskConfig(limit=-0.02, measure="drawdown", alpha=0.5)},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_an_iteration_asks_the_device_for_nothing(
    make_learner: Any, bars: Bars, on_a_gpu: Any, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """Neither a short one nor a longer one with more minibatches; the figures are read after it, at once.

    In bfloat16, so that a CPU takes the path of a GPU through the LSTM, which does not look for starts of episodes.
    """
    on_a_gpu(monkeypatch)
    for sizes in ({"n_steps": 6, "epochs": 1}, {"n_steps": 12, "epochs": 3, "minibatch_size": 12}):
        learner = make_learner(trading(bars), precision="bfloat16", **(options | sizes))
        with without_looking(learner):
            iterate_unrecorded(learner)
            with counting_reads(monkeypatch) as reads:
                metrics = iterate_unrecorded(learner)
        assert metrics["train/n_updates"] >= 1
        assert reads.places == []


PATHWISE: dict[str, dict[str, Any]] = {
    "plain": {},
    "critics": {"critic_epochs": 2, "critic": "quantile", "twin_critics": True, "risk": BUDGET},
    "whole episodes": {"n_steps": 20, "risk": BUDGET},
    "noise": {"stochastic": True, "entropy_coef": 0.01, "dropout": 0.2, "memory": "shared"},
}


def through_the_market(
    bars: Bars, device: str = "cpu", num_envs: int = 6, risk: Any = None, **options: Any
) -> tg.PathwiseLearner:
    n_steps = options.get("n_steps", 8)
    stagger = None if n_steps == 20 else 4
    env = TradingEnv(bars, num_envs=num_envs, episode_length=20, stagger=stagger, device=device)
    sizes = {"n_steps": n_steps, "hidden": (8,), "lstm_size": 8, "quantiles": 8, "minibatch_size": 24}
    return tg.PathwiseLearner(env, risk=risk, **(sizes | options))


@pytest.mark.parametrize("options", PATHWISE.values(), ids=PATHWISE)
def test_a_window_of_the_market_asks_the_device_for_nothing_and_changes_no_number(
    everything_in: Any, bars: Bars, on_a_gpu: Any, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    # The shorter way of a CPU differs in the last digit of its slopes; its own tests compare it with this one.
    on_a_gpu(monkeypatch)
    eager, blind = (through_the_market(bars, precision="bfloat16", **options) for _ in range(2))
    for _ in range(2):
        expected = eager.iterate()
    with without_looking(blind):
        iterate_unrecorded(blind)
        with counting_reads(monkeypatch) as reads:
            found = iterate_unrecorded(blind)
    assert reads.places == []
    assert found["train/n_updates"] >= 1
    assert found == pytest.approx(expected, rel=1e-6, abs=1e-12, nan_ok=True)
    numbers = everything_in(eager)
    for name, value in everything_in(blind).items():
        torch.testing.assert_close(value, numbers[name], rtol=1e-6, atol=1e-8, msg=name)


def test_the_counter_sees_what_an_eager_iteration_asks(
    make_learner: Any, bars: Bars, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test above would be worth nothing if it did not: an eager iteration looks at every minibatch."""
    learner = make_learner(trading(bars), target_kl=1.0)
    learner.iterate()
    with counting_reads(monkeypatch) as reads:
        metrics = learner.iterate()
    assert sum(part == "minibatch" for part, _ in reads.places) >= 3 * metrics["train/n_updates"]


# --- the same numbers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_not_looking_changes_no_number(
    make_learner: Any, everything_in: Any, bars: Bars, options: dict[str, Any]
) -> None:
    """One iteration bit by bit, early stops included: what is taken back was never taken."""
    eager, blind = (make_learner(trading(bars), epochs=6, **options) for _ in range(2))
    expected = eager.iterate()
    with without_looking(blind):
        found = iterate_unrecorded(blind)
    if "target_kl" in options:
        assert 1 <= expected["train/n_updates"] < 18
        assert expected["train/early_stop"] == 1
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name] == value or (math.isnan(value) and math.isnan(found[name])), name
    numbers = everything_in(blind)
    for name, value in everything_in(eager).items():
        if name != "generator":
            assert torch.equal(numbers[name], value), name


def test_after_an_early_stop_chance_goes_on_as_in_an_eager_run(make_learner: Any, everything_in: Any) -> None:
    """Whoever looks must not draw less than whoever does not: the ways to run would part after the first stop."""
    eager, blind = (make_learner(epochs=4, target_kl=1e-5) for _ in range(2))
    with without_looking(blind):
        for _ in range(3):
            assert eager.iterate()["train/early_stop"] == 1
            iterate_unrecorded(blind)
    numbers = everything_in(blind)
    for name, value in everything_in(eager).items():
        assert torch.equal(numbers[name], value), name


@pytest.mark.slow
def test_compiled_iterations_are_the_eager_ones(make_learner: Any, bars: Bars) -> None:
    """Fused kernels round otherwise: after three iterations weights are within 1e-4 of the way they have come."""
    runs = {}
    for kind in ("eager", "compile"):
        learner = make_learner(trading(bars), runtime=kind, **RICH)
        start = [parameter.detach().clone() for parameter in learner.policy.parameters()]
        metrics = [learner.iterate() for _ in range(3)]
        runs[kind] = [parameter.detach() for parameter in learner.policy.parameters()], metrics
    way = max(float((new - old).abs().max()) for new, old in zip(runs["eager"][0], start, strict=True))
    gap = max(float((a - b).abs().max()) for a, b in zip(runs["eager"][0], runs["compile"][0], strict=True))
    assert way > 1e-3
    assert gap < 1e-4 * way
    for expected, found in zip(runs["eager"][1], runs["compile"][1], strict=True):
        assert found.keys() == expected.keys()
        for name in ("train/loss", "train/grad_norm", "train/approx_kl", "risk/lambda", "train/bc_loss", "vgs/scale"):
            assert found[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-6), name


# --- what is not finite ----------------------------------------------------------------------------------------------


def spoil_log_prob(batch: Batch) -> dict[str, Any]:
    return {"log_probs": batch.log_probs.index_fill(1, torch.tensor([4]), math.nan)}


def test_a_loss_that_is_not_finite_stops_after_the_iteration(make_learner: Any, tamper: Any) -> None:
    learner = make_learner(extensions=(tamper(spoil_log_prob),))
    with without_looking(learner), pytest.raises(NonFiniteError, match="a loss or gradient of the last iteration"):
        iterate_unrecorded(learner)


def test_from_a_good_checkpoint_it_goes_on(make_learner: Any, tamper: Any) -> None:
    """The message says so: what was not finite is gone with the state that held it."""
    spoils = tamper(lambda _: {})
    learner = make_learner(extensions=(spoils,))
    with without_looking(learner):
        iterate_unrecorded(learner)
        good = capture(learner)
        spoils.change = spoil_log_prob
        with pytest.raises(NonFiniteError):
            iterate_unrecorded(learner)
        spoils.change = lambda _: {}
        restore(learner, good, "here", episodes=True)
        assert math.isfinite(iterate_unrecorded(learner)["train/loss"])


@pytest.mark.parametrize("what", ["reward", "obs"])
def test_an_input_that_is_not_finite_is_named_as_in_an_eager_run(
    make_learner: Any, scripted_env: Any, what: str
) -> None:
    """Row 29 of the script is row 5 of the third rollout of 12, which begins at step 144."""
    messages = []
    for looks in (True, False):
        env = scripted_env(end_probability=0.0)
        getattr(env, what)[29, 3] = math.nan
        learner = make_learner(env)
        with without_looking(*([] if looks else [learner])):
            for _ in range(2):
                iterate_unrecorded(learner)
            with pytest.raises(NonFiniteError) as found:
                iterate_unrecorded(learner)
        messages.append(str(found.value))
    name = {"reward": "reward", "obs": "observation"}[what]
    assert messages[0].startswith(f"step 144: {name} 0 of environment 3 is nan at row 5 of the rollout")
    assert messages[1] == messages[0]


# --- on a GPU --------------------------------------------------------------------------------------------------------

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
ON_GPU: dict[str, dict[str, Any]] = {
    "plain": {},
    "rich": RICH,
    "shared": RICH | {"memory": "shared", "microbatches": 1},
    "no memory": {"memory": "none", "twin_critics": True},
    "categorical": {"critic": "categorical", "kl_penalty": 0.1, "target_kl": 1e-3},
    "exploration": RICH | {"exploration": "exponential:1:0.5"},
    "two layers": {"lstm_layers": 2, "optimizer": "adamw", "weight_decay": 0.01},
}


def on_gpu(make_learner: Any, bars: Bars, kind: str, **options: Any) -> DistributionalPPO:
    sizes = {"n_steps": 16, "minibatch_size": 512, "precision": "float32", "runtime": kind}
    learner: DistributionalPPO = make_learner(trading(bars, "cuda", num_envs=128), **(sizes | options))
    return learner


@needs_gpu
@pytest.mark.slow
@pytest.mark.parametrize("options", ON_GPU.values(), ids=ON_GPU)
@pytest.mark.parametrize("kind", ["compile", "graph"])
def test_recorded_iterations_are_the_eager_ones(
    make_learner: Any, bars: Bars, kind: str, options: dict[str, Any]
) -> None:
    """In float32, after six iterations, four of them recorded: weights within 1e-2 of the way they have come.

    Fused kernels round otherwise, and training multiplies that; a wrong minibatch or a stale tensor is far beyond it.
    """
    eager, other = (on_gpu(make_learner, bars, mode, **options) for mode in ("eager", kind))
    assert_same_way(eager, other, kind, ("train/loss", "train/grad_norm", "rollout/ep_rew_mean"))


def assert_same_way(eager: Any, other: Any, kind: str, metrics: tuple[str, ...]) -> None:
    start = [parameter.detach().clone() for parameter in eager.policy.parameters()]
    for _ in range(WARMUP + 4):
        expected, found = eager.iterate(), other.iterate()
    assert other.runtime.recording == (kind == "graph")
    pairs = list(zip(eager.policy.parameters(), other.policy.parameters(), strict=True))
    way = max(float((new - old).abs().max()) for (new, _), old in zip(pairs, start, strict=True))
    gap = max(float((one - two).detach().abs().max()) for one, two in pairs)
    assert gap < 1e-2 * way
    assert found.keys() == expected.keys()
    for name in metrics:
        assert found[name] == pytest.approx(expected[name], rel=1e-2, abs=1e-5), name


def waits_in(learner: Any) -> list[str]:
    """Where an iteration waited for the device."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            learner.iterate()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return [str(warning.filename) for warning in found if "synchroniz" in str(warning.message)]


@needs_gpu
@pytest.mark.slow
@pytest.mark.parametrize("options", PATHWISE.values(), ids=PATHWISE)
@pytest.mark.parametrize("kind", ["compile", "graph"])
def test_recorded_windows_of_the_market_are_the_eager_ones(bars: Bars, kind: str, options: dict[str, Any]) -> None:
    """As above, for gradients through the market: forward and backward through time, and the critics' minibatches."""
    sizes = {"num_envs": 128, "minibatch_size": 512, "precision": "float32"}
    eager, other = (through_the_market(bars, "cuda", **sizes, **options, runtime=mode) for mode in ("eager", kind))
    assert_same_way(eager, other, kind, ("pathwise/loss", "train/grad_norm", "pathwise/slope_first"))


@needs_gpu
@pytest.mark.slow
@pytest.mark.parametrize("options", PATHWISE.values(), ids=PATHWISE)
def test_a_recorded_window_of_the_market_waits_once(bars: Bars, options: dict[str, Any]) -> None:
    learner = through_the_market(bars, "cuda", num_envs=128, minibatch_size=512, runtime="graph", **options)
    for _ in range(WARMUP + 2):
        learner.iterate()
    assert len(waits_in(learner)) <= 1


@needs_gpu
@pytest.mark.slow
def test_a_recorded_iteration_keeps_its_storage_and_waits_once(make_learner: Any, bars: Bars) -> None:
    learner = on_gpu(make_learner, bars, "graph", **RICH)
    for _ in range(WARMUP + 2):
        learner.iterate()
    before = places(learner) | {"carry": [value.data_ptr() for value in tensors_of(learner.state.rollout_state)]}
    waits = waits_in(learner)
    assert len(waits) <= 1, waits
    assert (
        places(learner) | {"carry": [value.data_ptr() for value in tensors_of(learner.state.rollout_state)]} == before
    )


@needs_gpu
@pytest.mark.slow
def test_a_recorded_learner_goes_on_from_a_checkpoint(make_learner: Any, everything_in: Any, bars: Bars) -> None:
    """Loading puts other tensors in the place of some: what was recorded on the old ones must not be replayed."""
    whole, other = (on_gpu(make_learner, bars, "graph", **RICH) for _ in range(2))
    for learner in (whole, other):
        for _ in range(WARMUP + 1):
            learner.iterate()
    good = copy.deepcopy(capture(other))  # what it captures goes on changing
    other.iterate()
    restore(other, good, "here", episodes=True)
    for learner in (whole, other):
        for _ in range(2):
            learner.iterate()
    numbers = everything_in(other)
    for name, value in everything_in(whole).items():
        torch.testing.assert_close(numbers[name], value, rtol=1e-5, atol=1e-6, msg=name)

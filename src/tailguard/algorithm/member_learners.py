"""P learners that iterate as one: the tensors of all are stacked along a leading axis, on one device.

The code of one learner runs once, under `torch.vmap`, and each member computes what it would compute alone: matrix
products are batched, reductions stay within a member, every member has its own random streams, learning rate, clip,
entropy coefficient, multiplier, limit, normalisers and KL stop. On a GPU a whole iteration of all members is recorded
as one CUDA graph.

Each learner stays a learner: its tensors are views of the stacked ones, so it can be evaluated, saved and changed in
place as ever.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from tailguard.algorithm.learner import Learner
from tailguard.algorithm.member_compile import MemberFunction
from tailguard.algorithm.member_ops import MemberOps
from tailguard.algorithm.member_state import optimizers, places, replace
from tailguard.algorithm.recording import ROLLOUT_FINITE, UPDATES_FINITE
from tailguard.algorithm.runtime import WARMUP, Runtime, cloned
from tailguard.envs.protocol import BlockwiseEnv, FunctionalEnv
from tailguard.errors import ConfigError
from tailguard.member_axis import is_logical, stacked
from tailguard.validate import check_count

Result = TypeVar("Result")

OWN_SETTINGS = frozenset(
    {
        *("learning_rate", "critic_learning_rate", "clip_range", "entropy_coef", "exploration"),
        *("risk.limit", "risk.penalty"),
    }
)
"""Settings in which members may differ, by their names in a learner's or in the budget's config: their values are
tensors."""

COMPILED = ("loss_of_features", "loss_of_critic_features", "act_and_step")


class MemberRuntime(Runtime):
    """Runs functions for all members at once: nothing is read in the middle of an iteration."""

    def __init__(self, of: Runtime, count: int, *, compiles: bool) -> None:
        vars(self).update(vars(of))
        self.mode, self.refusal = "graph", None
        self.count, self.compiles = count, compiles
        self._functions: dict[str, MemberFunction[Any]] = {}

    @property
    def recording(self) -> bool:
        return False  # what an iteration replaces is copied to its place when it ends

    def compiled(self, function: Callable[..., Result]) -> Callable[..., Result]:
        # A trace would lose the backward passes of one's own through the market.
        if not self.compiles or function.__qualname__ not in COMPILED:
            return function
        name = function.__qualname__
        if name not in self._functions:
            self._functions[name] = MemberFunction(function, self.count)
        return self._functions[name]

    def run(self, key: Hashable, function: Callable[..., Result], *inputs: Tensor) -> Result:  # noqa: ARG002
        return function(*inputs)  # the iteration is recorded as a whole


class MemberLearners:
    """The members of a population, as one computation.

    `learners`: of one class, with settings that differ in `OWN_SETTINGS` only, each on its own copy of one environment
        (`TradingEnv.sibling`). They must not iterate by themselves any more.
    """

    def __init__(self, learners: Sequence[Learner], *, compiles: bool | None = None) -> None:
        check_members(learners)
        self.learners = list(learners)
        self.template = self.learners[0]
        self.device = self.template.device
        compiles = self.device.type == "cuda" if compiles is None else compiles
        self.runtime = MemberRuntime(self.template.runtime, len(learners), compiles=compiles)
        for learner in self.learners:
            if learner.state.rollout_state is None:
                learner.state.rollout_state = learner._begin()
            _separate(learner)
            prime(learner)
            learner.targets.note_started(learner.return_moments.started)
            learner.runtime = self.runtime
            object.__setattr__(learner.context, "runtime", self.runtime)
        pairs = zip(*(learner._generators() for learner in self.learners), strict=True)
        self.generators = {id(streams[0]): streams for streams in pairs}
        self.stacked: dict[str, Tensor] = {}
        """Every tensor that belongs to a member, [P, ...], by its name in a learner."""
        self.scratch: dict[str, Tensor] = {}
        """Tensors that live from one iteration to the next but mean nothing to a member alone."""
        self.failures: list[str | None] = [None] * len(learners)
        """Why a member's numbers are spoilt, in words."""
        self.iterations = 0
        self._own: dict[str, Tensor] = {}
        self._recorded: _RecordedIteration | None = None
        self._stack()

    def __len__(self) -> int:
        return len(self.learners)

    def _stack(self) -> None:
        """Move the tensors of all learners into stacked ones, of which theirs become views."""
        found = [places(learner) for learner in self.learners]
        names = [name for name in found[0] if len({_place(of[name]) for of in found}) > 1]
        if len(self.learners) == 1:
            names = list(found[0])
        for name in names:
            values = [of[name].detach() for of in found]
            self.stacked[name] = torch.stack(values).requires_grad_(found[0][name].requires_grad)
        for number, learner in enumerate(self.learners):
            replace(learner, partial(self._view, number))
        self._own = {name: value for name, value in places(self.template).items() if name in self.stacked}

    def _view(self, number: int, name: str, value: Tensor) -> Tensor:
        """A member's part of a stacked tensor; a parameter stays the parameter that it is."""
        if name not in self.stacked:
            return value
        part = self.stacked[name].detach()[number]
        if isinstance(value, nn.Parameter):
            value.data = part
            return value
        return part

    @torch.no_grad()
    def exploit(self, sources: Mapping[int, int]) -> None:
        """Let members take over the whole state of others, by target: one copy by index, and nothing is recorded anew.

        Weights, moments, normalisers, multiplier, critics, episodes and streams; settings stay. All are taken as they
        are before the call.
        """
        if not sources:
            return
        targets, origins = (torch.tensor(part, device=self.device) for part in (list(sources), list(sources.values())))
        for value in self.stacked.values():
            value.index_copy_(0, targets, value.index_select(0, origins))
        streams = {
            number: [one.get_state() for one in self.learners[number]._generators()] for number in sources.values()
        }
        held = {number: _host_state(self.learners[number]) for number in sources.values()}
        failures = list(self.failures)
        for target, source in sources.items():
            learner = self.learners[target]
            for stream, state in zip(learner._generators(), streams[source], strict=True):
                stream.set_state(state)
            _load_host_state(learner, held[source])
            self.failures[target] = failures[source]

    @torch.no_grad()
    def reset_optimizer(self, number: int) -> None:
        """Forget a member's moments, as `Learner.reset_optimizer` does, where they stand."""
        learner = self.learners[number]
        for optimizer in optimizers(learner):
            for moments in optimizer.state.values():
                for value in moments.values():
                    value.zero_()
        if learner.scaler is not None:
            for parameter in learner.scaler.parameters:
                learner.scaler.forget(parameter)

    # --- iterating --------------------------------------------------------------------------------------------------

    def iterate(self) -> list[dict[str, float]]:
        """One rollout of every member and the updates on it; returns each member's metrics."""
        with self.template.context.matmul_precision():
            for learner in self.learners:
                learner.set_hyper()
            names, row = self._device_iteration()
            self.iterations += 1
        return [
            self._report(number, dict(zip(names, numbers, strict=True))) for number, numbers in enumerate(row.tolist())
        ]

    def _report(self, number: int, report: dict[str, float]) -> dict[str, float]:
        """What a learner does with its metrics, once they are read."""
        learner = self.learners[number]
        finite = report.pop(ROLLOUT_FINITE, 1.0), report.pop(UPDATES_FINITE, 1.0)
        if not all(finite):
            what = "a reward or an observation" if not finite[0] else "a loss or a gradient"
            self.failures[number] = f"step {learner.num_timesteps:,}: {what} is not finite"
        if self.failures[number] is not None:
            learner._count(wanted=True, usable=True)
            return report
        report = learner._settle(report, wanted=True, usable=True)
        learner.metrics = report
        return report

    def _device_iteration(self) -> tuple[tuple[str, ...], Tensor]:
        """Names of the metrics, and their values, [P, M]; on a GPU recorded once and replayed from then on."""
        started = [learner.return_moments.started for learner in self.learners]
        moments = self.template.return_moments
        moments.started = all(started)
        if self.device.type != "cuda" or self.iterations < WARMUP or not all(started):
            made = self._all_members()
            moments.started = started[0] or moments.started
            return made
        if self._recorded is None:
            self._recorded = self._record()
        self._recorded.graph.replay()
        return self._recorded.names, self._recorded.row

    def _record(self) -> _RecordedIteration:
        """Record an iteration of all members as one CUDA graph; recording computes nothing."""
        graph = torch.cuda.CUDAGraph()
        for streams in self.generators.values():
            for stream in streams:
                graph.register_generator_state(stream)
        with torch.cuda.device(self.device), torch.cuda.graph(graph):
            names, row = self._all_members()
        return _RecordedIteration(graph, names, row)

    def _all_members(self) -> tuple[tuple[str, ...], Tensor]:
        """An iteration of the template under `torch.vmap`: names of the metrics, and their values, [P, M]."""
        template, values = self.template, self.stacked | self.scratch
        after: dict[str, Tensor] = {}
        names: list[tuple[str, ...]] = []

        def iterate(given: dict[str, Tensor]) -> Tensor:
            with MemberOps(len(self), self.generators) as ops:
                replace(template, lambda name, value: given.get(name, value))
                ops.leaves += [(given[name], value) for name, value in values.items() if value.requires_grad]
                try:
                    metrics = template._iterate(None).metrics
                    _separate(template)
                finally:
                    replace(template, lambda name, value: self._take(name, value, after))
                names.append(metrics.names)
                return metrics.row

        row = torch.vmap(iterate)(values)
        self._keep(after)
        return names[0], row

    def _take(self, name: str, value: Tensor, after: dict[str, Tensor]) -> Tensor:
        """Note a tensor's values after an iteration; returns what stands in its place until the next."""
        if is_logical(value):
            after[name] = stacked(value).detach()
        elif name in self.stacked:
            after[name] = value.detach().expand_as(self.stacked[name])
        else:
            return value
        return self._own.get(name, after[name][0])

    @torch.no_grad()
    def _keep(self, after: dict[str, Tensor]) -> None:
        """Carry over what an iteration has replaced rather than written in place."""
        for name, value in after.items():
            mine = self.stacked.get(name)
            mine = self.scratch.get(name) if mine is None else mine
            if mine is None or mine.shape != value.shape:
                self.scratch[name] = value
            elif mine.data_ptr() != value.data_ptr() or mine.stride() != value.stride():
                # Once recorded, this copy is a part of the graph: the next iteration starts from the same memory.
                mine.copy_(value)


@dataclasses.dataclass(frozen=True)
class _RecordedIteration:
    """A recorded iteration."""

    graph: torch.cuda.CUDAGraph
    names: tuple[str, ...]
    """Of the metrics."""
    row: Tensor
    """Their values after a replay, [P, M]."""


@torch.no_grad()
def prime(learner: Learner) -> None:
    """Let the optimisers of a fresh learner make their moments, at zero, as their first step would.

    Made during an iteration of all members, a count of steps would be one number and not one for each.
    """
    for optimizer in optimizers(learner):
        if optimizer.state:
            continue
        groups = optimizer.param_groups if learner.has_critics else optimizer.param_groups[:1]
        parameters = [parameter for group in groups for parameter in group["params"]]
        streams = list(getattr(optimizer, "generators", {}).values())
        before = [parameter.clone() for parameter in parameters], [stream.get_state() for stream in streams]
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        for parameter, value in zip(parameters, before[0], strict=True):
            parameter.copy_(value)
        for stream, state in zip(streams, before[1], strict=True):
            stream.set_state(state)
        for moments in optimizer.state.values():
            for value in moments.values():
                value.zero_()


def _separate(learner: Learner) -> None:
    """Give every part of the episodes' state its own tensor: the first equity and the present one begin as the same."""
    learner.state.rollout_state = cloned(learner.state.rollout_state)
    if isinstance(learner.env, FunctionalEnv):
        learner.env.state = cloned(learner.env.state)


def _host_state(learner: Learner) -> tuple[dict[str, Any], dict[str, Any], bool]:
    """What a learner knows on the host: its counts, its alarms, and whether its returns vary."""
    counts = dataclasses.replace(learner.state, rollout_state=None).state_dict()
    return counts, learner.health.state_dict(), learner.return_moments.started


def _load_host_state(learner: Learner, held: tuple[dict[str, Any], dict[str, Any], bool]) -> None:
    counts, health, started = held
    episodes = learner.state.rollout_state
    learner.state.load_state_dict(counts)
    learner.state.rollout_state = episodes  # a view of the stacked one, which is copied there
    learner.health.load_state_dict(health)
    learner.return_moments.started = started
    learner.targets.note_started(started)


def _place(value: Tensor) -> tuple[int, int]:
    return value.data_ptr(), value.numel()


# --- what can be stacked --------------------------------------------------------------------------------------------


def check_members(learners: Sequence[Learner]) -> None:
    """Refuse learners that cannot be one computation, with the reason."""
    check_count("members", len(learners))
    first = learners[0]
    for number, learner in enumerate(learners):
        if type(learner) is not type(first):
            raise ConfigError(f"members: {number} is a {type(learner).__name__}, 0 a {type(first).__name__}")
        for setting, mine, theirs in (
            *_differences(first.config, learner.config),
            *_differences_of_terms(first, learner),
            *_differences_of_risk(first, learner),
        ):
            raise ConfigError(
                f"members: {setting} is {theirs} for member {number} and {mine} for member 0. Batched members share "
                f"all settings but {', '.join(sorted(OWN_SETTINGS))}; use the local or ray executor for others"
            )
    env = first.env
    if not isinstance(env, FunctionalEnv):
        raise ConfigError(
            f"members: the steps of {type(env).__name__} are not a pure function of tensors (see FunctionalEnv); use "
            "the local or ray executor"
        )
    if isinstance(env, BlockwiseEnv) and getattr(env, "blocks", None) is not None:
        raise ConfigError("members: blocks of bars are exchanged for one learner; set data.resident_bars to 0")
    if first.config.on_nonfinite == "skip":
        raise ConfigError("members: on_nonfinite skip looks at every minibatch; set it to stop, or use local or ray")
    if first.robust.adversary != "none" or first.smoothness is not None:
        raise ConfigError("members: training against attacks is not batched; use the local or ray executor")


def _differences(first: Any, other: Any, prefix: str = "") -> Iterable[tuple[str, Any, Any]]:
    for field in dataclasses.fields(first):
        mine, theirs = getattr(first, field.name), getattr(other, field.name)
        if dataclasses.is_dataclass(mine) and type(mine) is type(theirs):
            yield from _differences(mine, theirs, f"{prefix}{field.name}.")
        elif mine != theirs and f"{prefix}{field.name}" not in OWN_SETTINGS:
            yield f"{prefix}{field.name}", mine, theirs


def _differences_of_terms(first: Learner, other: Learner) -> Iterable[tuple[str, Any, Any]]:
    """A weight of 0 takes its term out of the loss, which is one expression for all members."""
    if first.config.uses_entropy != other.config.uses_entropy:
        yield "entropy_coef", first.config.entropy_coef, other.config.entropy_coef


def _differences_of_risk(first: Learner, other: Learner) -> Iterable[tuple[str, Any, Any]]:
    if (first.risk is None) != (other.risk is None):
        yield "risk", "off" if first.risk is None else "on", "off" if other.risk is None else "on"
    elif first.risk is not None and other.risk is not None:
        yield from _differences(first.risk.config, other.risk.config, "risk.")
        if (first.risk.config.limit is None) != (other.risk.config.limit is None):
            yield "risk.limit", first.risk.config.limit, other.risk.config.limit

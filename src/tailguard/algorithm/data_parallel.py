"""One agent trained by several processes, started by torchrun: data parallel.

Each process acts for its share of the accounts, and takes its share of every gradient. In between they exchange what
they saw, so each of them has the whole rollout: advantage moments, normalisers, KL, episode outcomes and the multiplier
are those of all accounts, because every process computes them itself. Random numbers are drawn for all accounts by
everybody, and each uses its own. So any number of processes computes what one does, but for the order of sums, and a
checkpoint of any of them is a checkpoint of all.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from tailguard.algorithm.rollout import Acted, Rollout, RolloutState, act_and_step, collect
from tailguard.algorithm.runtime import mapped, tensors_of
from tailguard.envs.trading import TradingEnv
from tailguard.errors import ConfigError, RunError

if TYPE_CHECKING:
    from tailguard.algorithm.learner import Learner
    from tailguard.algorithm.rollout import ObservationScale
    from tailguard.envs.protocol import Step
    from tailguard.models.memory import MemoryState
    from tailguard.models.policy import ActorCritic

BY_ACCOUNT = (
    *("obs", "scaled_obs", "episode_start", "actions", "dist_params", "log_probs"),
    *("rewards", "terminated", "truncated", "valid", "final_obs"),
)
"""Fields of a rollout whose second axis is that of the accounts."""


def distribute(learner: Learner) -> Ranks:
    """Let this process train its share of the learner, which every process has built alike, with all accounts.

    Call it in every process that torchrun started, before `learn` and before or after a checkpoint is restored.
    """
    device = learner.device
    if not distributed.is_initialized():
        if "RANK" not in os.environ:
            raise ConfigError(
                "data parallel: this process was not started by torchrun. Start it with, for example, "
                "torchrun --nproc-per-node 2 train.py"
            )
        _join("nccl" if device.type == "cuda" else "gloo")
    ranks = Ranks(distributed.get_rank(), distributed.get_world_size())
    check_divided(learner, ranks.world)
    learner.collector, learner.updates.ranks = ranks.collect, ranks
    return ranks


def _join(backend: str) -> None:
    """Meet the other processes that torchrun started, until this one ends."""
    # Threads of gloo that still run when the interpreter has ended abort the process, whatever it has computed.
    atexit.register(_leave)
    if os.environ.get("GROUP_WORLD_SIZE") != "1":  # several machines, which count their restarts apart
        distributed.init_process_group(backend)
        return
    store, rank, world = next(rendezvous("env://"))
    # After a restart the store still has the addresses of the processes that died: gloo would wait for them.
    store = PrefixStore(f"restart_{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    distributed.init_process_group(backend, store=store, rank=rank, world_size=world)


def _leave() -> None:
    if distributed.is_initialized():
        distributed.destroy_process_group()


def check_divided(learner: Learner, world: int) -> None:
    """Refuse what is not divided, or not the same in all processes."""
    env: Any = learner.env
    config = learner.config
    if not isinstance(env, TradingEnv) or env.blocks is not None:
        raise ConfigError("data parallel: the environment must be a TradingEnv with all its bars resident")
    if env.num_envs % world:
        raise ConfigError(
            f"data parallel: {env.num_envs} accounts cannot be divided among {world} processes; choose a multiple of it"
        )
    reasons = {
        "runtime: its mode is not eager; set runtime to eager": learner.runtime.mode != "eager",
        "on_nonfinite: skip is decided by each process alone; set it to raise": config.on_nonfinite == "skip",
        "observation_noise: its random numbers are not divided; set it to 0": config.observation_noise > 0,
        "robust: attacks are not divided; switch them off": learner.smoothness is not None
        or learner.robust.adversary == "alternate",
        "loss_terms: those of the pathwise learner are not divided; remove them": learner.kind == "pathwise"
        and bool(learner.weighted_terms),
    }
    for reason, found in reasons.items():
        if found:
            raise ConfigError(f"data parallel: {reason}")


class Ranks:
    """This process among those that train the same agent."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world

    def share(self, accounts: int) -> slice:
        """This process's accounts."""
        size = accounts // self.world
        return slice(self.rank * size, (self.rank + 1) * size)

    def portion(self, index: Tensor) -> Tensor:
        """This process's sequences of a minibatch."""
        if len(index) < self.world:
            raise ConfigError(
                f"data parallel: a minibatch of {len(index)} sequences cannot be divided among {self.world} processes; "
                "raise minibatch_size"
            )
        return index.tensor_split(self.world)[self.rank]

    # --- acting -------------------------------------------------------------------------------------------------------

    def collect(
        self,
        policy: ActorCritic,
        env: Any,
        rollout_state: RolloutState,
        scale: ObservationScale,
        n_steps: int,
        generator: torch.Generator,
        whole_step: Callable[..., tuple[Acted, MemoryState, Any, Step]] = act_and_step,
        noise: Tensor | None = None,
        observe: Callable[[Tensor, Tensor, MemoryState], Tensor] | None = None,
        *,
        observation_noise: float = 0.0,
        mask: Tensor | None = None,
        deterministic: bool = False,
    ) -> tuple[Rollout, RolloutState]:
        """`collect` for this process's accounts, with what the others collected: the rollout of all of them.

        The gradient, where there is one, goes back through this process's accounts alone.
        """
        assert isinstance(env, TradingEnv)
        assert observe is None
        assert not observation_noise
        self._check_weights(policy)
        own = self.share(env.num_envs)
        if noise is None:  # row by row, as a single process draws it
            rows = [policy.action_head.draw((env.num_envs,), generator) for _ in range(n_steps)]
            noise = torch.stack(rows)
        part: Any = _Accounts(env, own)
        before = _of_accounts(rollout_state, own)
        mask = None if mask is None else mask[own]
        rollout, after = collect(
            policy, part, before, scale, n_steps, generator, whole_step, noise[:, own], mask=mask,
            deterministic=deterministic,
        )  # fmt: skip
        env.state = _put(env.state, self._joined(list(tensors_of(part.state)), 0))
        memory = self._joined([part for trunk in after.state for part in trunk], 1)
        obs, start = self._joined([after.obs, after.episode_start], 0)
        return self._whole(rollout), RolloutState(obs, start, _put(after.state, memory))

    def _whole(self, own: Rollout) -> Rollout:
        """The rollout of all accounts."""
        own = self._with_rows(own)
        names = sorted(own.outcome)
        memory = [part for trunk in own.start_state for part in trunk]
        fields = [getattr(own, name) for name in BY_ACCOUNT]
        joined = self._joined([*fields, *memory, *(own.outcome[name] for name in names)], 1)
        count, kept = len(fields), len(fields) + len(memory)
        resets = own.memory_resets.clone()
        distributed.all_reduce(resets)
        changed: dict[str, Any] = dict(zip(BY_ACCOUNT, joined[:count], strict=True))
        changed |= {"start_state": _put(own.start_state, joined[count:kept]), "memory_resets": resets}
        return replace(own, **changed, outcome=dict(zip(names, joined[kept:], strict=True)))

    def _with_rows(self, own: Rollout) -> Rollout:
        """With the true successors of all rows after which an episode of any process ended."""
        rows = torch.zeros(len(own.rewards), dtype=torch.uint8, device=own.rewards.device)
        rows[list(own.final_rows)] = 1
        distributed.all_reduce(rows, distributed.ReduceOp.MAX)
        everybody = rows.nonzero().flatten().tolist()
        mine = {row: number for number, row in enumerate(own.final_rows)}
        # Where no episode of this process ended, the true successor is the next row's observation.
        final = [own.final_obs[mine[row]] if row in mine else own.obs[row + 1] for row in everybody]
        return replace(own, final_rows=tuple(everybody), final_obs=torch.stack(final))

    def _joined(self, values: Sequence[Tensor], axis: int) -> list[Tensor]:
        """Those of all processes, joined along the accounts; this process's own keep their gradient."""
        if not values:
            return []
        packed = torch.cat([_bytes(value) for value in values])
        received = [torch.empty_like(packed) for _ in range(self.world)]
        distributed.all_gather(received, packed)
        joined, begin = [], 0
        for value in values:
            end = begin + value.numel() * value.element_size()
            parts = [each[begin:end].clone().view(value.dtype).view(value.shape) for each in received]
            parts[self.rank] = value
            joined.append(torch.cat(parts, axis))
            begin = end
        return joined

    def _check_weights(self, policy: ActorCritic) -> None:
        """Raise unless all processes have the same weights: a difference would grow unnoticed."""
        total = torch.stack([weight.detach().double().sum() for weight in policy.parameters()]).sum()
        ends = torch.stack([total, -total])
        distributed.all_reduce(ends, distributed.ReduceOp.MAX)
        if float(ends[0]) != -float(ends[1]):
            raise RunError(
                "data parallel: the weights of the processes differ. Build the learner with the same settings and seed "
                "in each, and restore the same checkpoint in all of them"
            )

    # --- learning -----------------------------------------------------------------------------------------------------

    def sum_gradients(self, parameters: Iterable[nn.Parameter], *others: Tensor) -> list[Tensor]:
        """Add up the gradients of all processes, in place, and other numbers with them, which are returned.

        All of them travel as one flat buffer.
        """
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        flat = torch.cat([value.flatten().float() for value in (*gradients, *others)])
        distributed.all_reduce(flat)
        sums: Any = torch.split(flat, [value.numel() for value in (*gradients, *others)])
        for gradient, total in zip(gradients, sums, strict=False):
            gradient.copy_(total.view_as(gradient))
        return [total.view_as(value) for value, total in zip(others, sums[len(gradients) :], strict=True)]

    def sum_minibatch(
        self, parameters: Iterable[nn.Parameter], metrics: Mapping[str, Tensor], finite: Tensor
    ) -> tuple[dict[str, Tensor], Tensor]:
        """The gradient of a whole minibatch in the place of this process's; its metrics, and whether it is finite."""
        names = list(metrics)
        *totals, broken = self.sum_gradients(parameters, *(metrics[name] for name in names), ~finite)
        return dict(zip(names, totals, strict=True)), broken == 0


class _Accounts:
    """Some accounts of an environment, which draws for all of them."""

    def __init__(self, env: TradingEnv, own: slice) -> None:
        assert env.state is not None
        self.env, self.own = env, own
        self.generator, self.device = env.generator, env.device
        self.action_space, self.observation_size = env.action_space, env.observation_size
        self.num_envs = own.stop - own.start
        self.state: Any = mapped(lambda value: value[own], env.state)

    def draw(self) -> Tensor:
        return self.env.draw()[..., self.own]

    def transition(self, before: Any, action: Tensor, noise: Tensor) -> tuple[Any, Step]:
        return self.env.transition(before, action, noise)


def _of_accounts(state: RolloutState, own: slice) -> RolloutState:
    trunks = tuple(tuple(part[:, own] for part in trunk) for trunk in state.state)
    return RolloutState(state.obs[own], state.episode_start[own], trunks)


def _put(structure: Any, values: Sequence[Tensor]) -> Any:
    """The structure with these tensors in the places of its own."""
    left = iter(values)
    return mapped(lambda _: next(left), structure)


def _bytes(value: Tensor) -> Tensor:
    return value.detach().contiguous().flatten().view(torch.uint8)

"""Bars in blocks: some of them are resident on the device, and are exchanged for others between rollouts.

The rows are cut into blocks of equal length. A slot of the device's buffers holds one block and the rows after it that
its last episodes need, so that an episode never leaves its slot. Blocks come in a random order that repeats: the block
at place q of it, counted on through all passes, goes to slot q mod C. The oldest resident block is retired, no episode
starts in it any more, and once none is under way there, the next block takes its slot. A thread reads that one ahead
into memory which the device can copy from.

Buffers, and the table of rows to start at, keep their addresses, so that recorded CUDA graphs read what is resident.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tailguard.envs.prepared_market import RowRanges
from tailguard.errors import ConfigError
from tailguard.validate import check_count

Rows = NDArray[np.int64]

LARGE = 2**62
"""Random numbers below this are taken modulo the number of starts, which changes with the resident blocks."""


@dataclass(frozen=True)
class Layout:
    """How rows are cut into blocks."""

    rows: int
    length: int
    """Rows at which episodes of a block may start."""
    overlap: int
    """Rows after them that these episodes need."""
    slots: int
    """Blocks that are resident at a time."""

    @classmethod
    def of(cls, rows: int, episode_length: int, resident_bars: int, resident_blocks: int) -> Layout:
        """Blocks of equal length, as large as `resident_bars` allow for `resident_blocks` of them."""
        check_count("resident_bars", resident_bars)
        check_count("resident_blocks", resident_blocks, low=2)
        longest = resident_bars // resident_blocks - episode_length
        if longest < episode_length:
            needed = 2 * resident_blocks * episode_length
            raise ConfigError(
                f"resident_bars: {resident_bars:,} bars in {resident_blocks} blocks are too few for episodes of "
                f"{episode_length:,}: an episode ends in the block it starts in. Keep at least {needed:,} resident, in "
                "fewer blocks or with shorter episodes fewer"
            )
        count = math.ceil(rows / longest)
        return cls(rows, math.ceil(rows / count), episode_length, min(resident_blocks, count))

    @property
    def size(self) -> int:
        """Rows of a slot."""
        return self.length + self.overlap

    @property
    def blocks(self) -> int:
        return math.ceil(self.rows / self.length)


@dataclass(frozen=True)
class StartRanges:
    """Rows at which an episode may start, as ranges that rise and do not touch."""

    begin: Rows
    stop: Rows

    @classmethod
    def of(cls, starts: Tensor | RowRanges) -> StartRanges:
        """Of rising rows."""
        if isinstance(starts, RowRanges):
            begin, count = starts.ranges()
            return cls(begin, begin + count)
        rows = np.unique(starts.cpu().numpy())
        cuts = np.flatnonzero(np.diff(rows) != 1) + 1
        return cls(rows[np.concatenate([[0], cuts])], rows[np.concatenate([cuts, [len(rows)]]) - 1] + 1)

    def between(self, first: int, stop: int) -> tuple[Rows, Rows]:
        """First row and number of rows of each range, inside these rows."""
        low, high = np.searchsorted(self.stop, first, side="right"), np.searchsorted(self.begin, stop)
        begin = np.maximum(self.begin[low:high], first)
        return begin, np.minimum(self.stop[low:high], stop) - begin


class BlockCache:
    """The resident blocks of several arrays, their exchange, and the rows at which episodes start in them.

    `arrays`: in memory or mapped from disk, each with the dimension that counts its rows.
    `starts`: where episodes may start; blocks without a start are never resident.
    `accounts`: that step together. A block stays until they have taken as many steps as it has bars, and at least an
        episode.
    """

    def __init__(
        self,
        arrays: Mapping[str, tuple[Tensor, int]],
        layout: Layout,
        starts: Tensor | RowRanges,
        *,
        accounts: int,
        device: torch.device,
        seed: int,
    ) -> None:
        self.layout, self.device, self.seed = layout, device, seed
        self.period = max(layout.overlap, math.ceil(layout.length / accounts))
        self._arrays = dict(arrays)
        self._ranges = StartRanges.of(starts)
        self._order: list[int] = []
        self._stop, self._offset = (torch.zeros(0, dtype=torch.int64, device=device) for _ in range(2))
        self._plan()
        self.buffers = {name: self._empty(name, layout.size * layout.slots, device) for name in arrays}
        """The resident rows of each array, slot after slot; their addresses never change."""
        self._staged: dict[str, Tensor] = {}
        self._reader: ThreadPoolExecutor | None = None
        self._reading: Future[None] | None = None
        self._copied: torch.cuda.Event | None = None
        self.turn = self.retired = self.waited = 0
        self._fill()

    # --- what the environment asks for ----------------------------------------------------------------------------

    @property
    def fits(self) -> bool:
        """Whether every block is resident, so that nothing is ever exchanged."""
        return len(self._order) <= self.layout.slots

    @property
    def resident(self) -> list[int]:
        """The blocks in the slots."""
        return [self._block_at(place) for place in sorted(self._places(), key=lambda place: place % self.layout.slots)]

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        """Random rows of the buffers at which an episode may start, [count]."""
        if self.fits:  # the draws of all bars in memory
            place = torch.randint(self._total, (count,), generator=generator, device=self.device)
        else:
            place = torch.randint(LARGE, (count,), generator=generator, device=self.device) % self._stop[-1]
        return self._offset.index_select(0, torch.searchsorted(self._stop, place, right=True)) + place

    def exchange(self, steps: int, row: Tensor) -> bool:
        """Called before `steps` steps of accounts at these rows of the buffers; whether a block was exchanged.

        A slot that an account is in is never overwritten. The device is asked for that once an exchange is due.
        """
        if self.fits:
            return False
        exchanged = False
        if self.waited >= self.period:
            if self.retired == self.turn:
                self._retire()
            elif not bool((row // self.layout.size == self.turn % self.layout.slots).any()):
                self._take_in()
                exchanged = True
        self.waited += steps
        return exchanged

    def restrict(self, starts: Tensor) -> None:
        """Let episodes start only at these rows of all bars, from the first block on."""
        self._ranges = StartRanges.of(starts)
        self._plan()
        self.turn = self.retired = self.waited = 0
        self._fill()

    def rewind(self) -> None:
        """Back to the first blocks; accounts must start anew."""
        if self.retired == 0:
            self.waited = 0
            return
        self.turn = self.retired = self.waited = 0
        self._fill()

    def close(self) -> None:
        """End the thread that reads ahead."""
        if self._reader is not None:
            self._reader.shutdown(cancel_futures=True)
            self._reader, self._reading = None, None

    # --- rows of the buffers and of all bars ----------------------------------------------------------------------

    def rows_of(self, row: Tensor) -> tuple[Tensor, Tensor]:
        """Rows among all bars, and slots, of rows of the buffers, [N] each."""
        slot = torch.div(row, self.layout.size, rounding_mode="floor")
        return row - slot * self.layout.size + self._first_rows()[slot], slot

    def rows_in_buffers(self, row: Tensor, slot: Tensor | None) -> Tensor:
        """The inverse of `rows_of`. Without slots, as saved where all bars were in memory: in any slot that has the row
        and all bars after it that an episode may need.
        """
        first = self._first_rows()
        if slot is None:
            block = torch.div(row, self.layout.length, rounding_mode="floor")
            slot = torch.full_like(row, -1)
            # A block without starts is not resident: its rows are then the overlap of the one before.
            for number, resident in reversed(list(enumerate(self.resident))):
                inside = (block == resident) | ((block == resident + 1) & (slot < 0))
                slot = torch.where(inside & (row - first[number] < self.layout.size), number, slot)
            if not self.fits or bool((slot < 0).any()):
                raise ConfigError(
                    "state: saved with all bars in memory, and here only some blocks are resident; resume with the "
                    "data.resident_bars it was saved with"
                )
        inside = row - first[slot]
        if bool(((inside < 0) | (inside >= self.layout.size)).any()):
            raise ConfigError("state: accounts are outside the resident blocks; it was saved with others")
        return inside + slot * self.layout.size

    def state_dict(self) -> Tensor:
        """Place in the order of the blocks: exchanged, retired, and steps since, [3]."""
        return torch.tensor([self.turn, self.retired, self.waited])

    def load_state_dict(self, state: Tensor) -> None:
        """Bring the blocks in that were resident."""
        self.turn, self.retired, self.waited = (int(value) for value in state)
        if not (0 <= self.turn <= self.retired <= self.turn + 1 and self.waited >= 0):
            raise ConfigError(f"state: {state.tolist()} is no place in an order of blocks")
        self._fill()

    # --- the order of the blocks ----------------------------------------------------------------------------------

    def _plan(self) -> None:
        """Blocks with a start in their order, and the starts of each."""
        length, rows = self.layout.length, self.layout.rows
        self._starts = {
            block: self._ranges.between(block * length, min((block + 1) * length, rows))
            for block in range(self.layout.blocks)
        }
        self._order = [block for block, (begin, _) in self._starts.items() if len(begin)]
        if not self.fits:
            drawn = torch.randperm(len(self._order), generator=torch.Generator().manual_seed(self.seed))
            self._order = [self._order[place] for place in drawn.tolist()]
        most = max(len(begin) for begin, _ in self._starts.values())
        if len(self._stop) < most * self.layout.slots:
            self._stop, self._offset = (
                torch.zeros(most * self.layout.slots, dtype=torch.int64, device=self.device) for _ in range(2)
            )
        self._total = 0

    def _block_at(self, place: int) -> int:
        return self._order[place % len(self._order)]

    def _places(self) -> range:
        """Places in the order that are resident."""
        return range(self.turn, self.turn + min(self.layout.slots, len(self._order)))

    def _first_rows(self) -> Tensor:
        """First row of each slot among all bars, [C]."""
        return torch.tensor(self.resident, device=self.device) * self.layout.length

    def _fill(self) -> None:
        """Bring in all blocks that are to be resident."""
        if self._reading is not None:
            self._reading.result()
            self._reading = None
        for place in self._places():
            self._stage(place)
            self._put(place)
        self._publish()
        self._read_ahead()

    def _retire(self) -> None:
        self.retired, self.waited = self.turn + 1, 0
        self._publish()

    def _take_in(self) -> None:
        """The next block takes the slot of the oldest one, and the one after that is retired."""
        assert self._reading is not None
        self._reading.result()
        self._put(self.turn + self.layout.slots)
        self.turn += 1
        self._retire()
        self._read_ahead()

    def _publish(self) -> None:
        """Write the table of starts: of all resident blocks but the retired one, slot by slot."""
        width = len(self._stop) // self.layout.slots
        counts, begins = np.zeros((2, self.layout.slots, width), np.int64)
        for place in self._places():
            if place < self.retired:
                continue
            block, slot = self._block_at(place), place % self.layout.slots
            begin, count = self._starts[block]
            counts[slot, : len(count)] = count
            begins[slot, : len(begin)] = begin - block * self.layout.length + slot * self.layout.size
        stop = np.cumsum(counts)
        self._total = int(stop[-1])
        self._stop.zero_()
        self._stop[: len(stop)].copy_(torch.from_numpy(stop))
        self._stop[len(stop) :].fill_(self._total)
        self._offset[: len(stop)].copy_(torch.from_numpy(begins.ravel() - (stop - counts.ravel())))

    # --- from disk to the device ----------------------------------------------------------------------------------

    def _empty(self, name: str, rows: int, device: torch.device, pinned: bool = False) -> Tensor:
        source, axis = self._arrays[name]
        shape = (*source.shape[:axis], rows, *source.shape[axis + 1 :])
        return torch.zeros(shape, dtype=source.dtype, device=device, pin_memory=pinned)

    def _stage(self, place: int) -> None:
        """Read a block into memory that the device can copy from without waiting."""
        if not self._staged:
            pinned = self.device.type == "cuda"
            host = torch.device("cpu")
            self._staged = {name: self._empty(name, self.layout.size, host, pinned) for name in self._arrays}
        if self._copied is not None:
            self._copied.synchronize()
        first = self._block_at(place) * self.layout.length
        count = min(self.layout.size, self.layout.rows - first)
        for name, (source, axis) in self._arrays.items():
            self._staged[name].narrow(axis, 0, count).copy_(source.narrow(axis, first, count))

    def _put(self, place: int) -> None:
        """Copy the staged block into its slot, behind the work that the device has been given so far."""
        first = place % self.layout.slots * self.layout.size
        for name, (_, axis) in self._arrays.items():
            slot = self.buffers[name].narrow(axis, first, self.layout.size)
            for target, plane in _planes(slot, self._staged[name], axis):
                target.copy_(plane, non_blocking=True)
        if self.device.type == "cuda":
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record(torch.cuda.current_stream(self.device))

    def _read_ahead(self) -> None:
        if self.fits:
            self._staged = {}
            return
        if self._reader is None:
            self._reader = ThreadPoolExecutor(1, thread_name_prefix="tailguard-blocks")
        self._reading = self._reader.submit(self._stage, self.turn + self.layout.slots)


def _planes(slot: Tensor, staged: Tensor, axis: int) -> Iterable[tuple[Tensor, Tensor]]:
    """Pieces that are contiguous on both sides."""
    return [(slot, staged)] if axis == 0 else zip(slot.unbind(0), staged.unbind(0), strict=True)

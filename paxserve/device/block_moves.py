"""Whole blocks on the move: between the device and the host's pool, and between device blocks.

Owns: the host's pool, and the three programs that read and write blocks, each for a short ladder
of counts. In: the KV arrays and a plan. Out: the KV arrays, whose buffers stay where they are. Must
not know: whose blocks they are, nor the layout inside a block; every backend counts blocks along
the first axis.

Larger sets go in pieces, and the last piece is padded: padding reads block 0, and writes past the
end of the pool, where it is dropped. A swap waits for its bytes; the host's pool is plain memory,
and has whole blocks also where those on the devices are split.
"""

from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Int

from paxserve.device.executables import Executables
from paxserve.device.sharding import per_device, shardings, specs_of
from paxserve.step import BlockCopy, StepPlan

type Kv = tuple[Array, ...]

MOST_BYTES = 16 << 20  # at once; with its temporary copy within `sizing.KERNEL_BYTES`
MOST_BLOCKS = 64


class Move(StrEnum):
    """Device to host, host to device, device to device."""

    SWAP_OUT = "swap_out"
    SWAP_IN = "swap_in"
    COPY = "copy"


class MoveShape(NamedTuple):
    """One program."""

    move: Move
    num_blocks: int

    def __str__(self) -> str:
        """As an error names it."""
        return f"{self.move.value} of {self.num_blocks} blocks"

    @property
    def remedy(self) -> str:
        """See `Shape`."""
        return "make the executor with the num_host_blocks and copies that its plans need"


class BlockMoves:
    """Invariant: block h of the host's pool holds what the last swap to it found on the device.

    Args:
        kv_blocks: the KV arrays, for their shapes.
        num_host_blocks: size of the host's pool; 0: no swaps.
        copies: warm-up includes copies.
        executables: where the programs are kept.
        mesh: the devices that the KV arrays are split over, if they are.
    """

    def __init__(
        self,
        *,
        kv_blocks: Kv,
        num_host_blocks: int,
        copies: bool,
        executables: Executables,
        mesh: Mesh | None = None,
    ) -> None:
        if not isinstance(num_host_blocks, int) or num_host_blocks < 0:
            raise ValueError(f"num_host_blocks must be an integer >= 0, got {num_host_blocks!r}")
        self.num_blocks = len(kv_blocks[0])
        self.num_host_blocks = num_host_blocks
        self.bytes_per_block = sum(kv.nbytes for kv in kv_blocks) // self.num_blocks
        self.sizes = ladder(self.bytes_per_block)
        self._copies = copies
        self._programs = _programs(mesh, specs_of(kv_blocks))
        self._executables = executables
        self._host = [np.zeros((num_host_blocks, *kv.shape[1:]), kv.dtype) for kv in kv_blocks]

    @property
    def shapes(self) -> list[MoveShape]:
        """Programs that plans may need."""
        swaps = (Move.SWAP_OUT, Move.SWAP_IN) if self.num_host_blocks else ()
        moves = (*swaps, Move.COPY) if self._copies else swaps
        return [MoveShape(move, size) for move in moves for size in self.sizes]

    def rehearse(self, kv_blocks: Kv, shape: MoveShape) -> Kv:
        """Run a program on padding alone, through the path of real moves; nothing changes."""
        return self._run(kv_blocks, shape, ())

    def run(self, kv_blocks: Kv, plan: StepPlan) -> Kv:
        """The swaps and copies of a step, in their order.

        Raises:
            ValueError: a block is in neither pool.
        Donates: kv_blocks.
        """
        device, host = range(1, self.num_blocks), range(self.num_host_blocks)
        for move, moves, sources, targets in (
            (Move.SWAP_OUT, plan.swap_out, device, host),
            (Move.SWAP_IN, plan.swap_in, host, device),
            (Move.COPY, plan.copies, device, device),
        ):
            self._check(move, moves, sources, targets)
            for size, piece in self._pieces(moves):
                kv_blocks = self._run(kv_blocks, MoveShape(move, size), piece)
        return kv_blocks

    def _check(
        self, move: Move, moves: Sequence[BlockCopy], sources: range, targets: range
    ) -> None:
        for source, target in moves:
            if source not in sources or target not in targets:
                raise ValueError(
                    f"{move.value} from block {source} to {target}: the device has blocks "
                    f"1..{self.num_blocks - 1}, the host {self.num_host_blocks} from 0: "
                    "set num_host_blocks, or mend the plan"
                )

    def _pieces(self, moves: Sequence[BlockCopy]) -> Iterator[tuple[int, Sequence[BlockCopy]]]:
        """Pieces of the largest size, then the smallest size that holds the rest."""
        for start in range(0, len(moves), self.sizes[-1]):
            piece = moves[start : start + self.sizes[-1]]
            yield next(size for size in self.sizes if size >= len(piece)), piece

    def _run(self, kv_blocks: Kv, shape: MoveShape, piece: Sequence[BlockCopy]) -> Kv:
        sources = np.zeros(shape.num_blocks, np.int32)
        targets = np.full(shape.num_blocks, self.num_blocks, np.int32)
        sources[: len(piece)] = [move.source for move in piece]
        targets[: len(piece)] = [move.target for move in piece]
        match shape.move:
            case Move.SWAP_OUT:
                found = jax.device_get(self._call(shape, kv_blocks, sources))
                for host, blocks in zip(self._host, found, strict=True):
                    host[targets[: len(piece)]] = blocks[: len(piece)]
                return kv_blocks
            case Move.SWAP_IN:
                blocks = tuple([host[sources] for host in self._host])
                return self._call(shape, kv_blocks, targets, blocks)
            case Move.COPY:
                return self._call(shape, kv_blocks, sources, targets)

    def _call(self, shape: MoveShape, kv_blocks: Kv, *arrays: Any) -> Kv:
        function, placement = self._programs[shape.move]
        on_device = jax.device_put(arrays, placement)
        program = self._executables.find(shape, function, kv_blocks, *on_device)
        moved: Kv = program(kv_blocks, *on_device)
        return moved


def ladder(bytes_per_block: int) -> tuple[int, ...]:
    """Counts of blocks that are compiled: powers of four within `MOST_BYTES` and `MOST_BLOCKS`."""
    most = min(MOST_BLOCKS, max(1, MOST_BYTES // bytes_per_block))
    return tuple([4**k for k in range(most.bit_length()) if 4**k <= most])


def _gather(kv_blocks: Kv, sources: Int[Array, "n"]) -> Kv:
    return tuple([kv[sources] for kv in kv_blocks])


def _scatter(kv_blocks: Kv, targets: Int[Array, "n"], blocks: Kv) -> Kv:
    pairs = zip(kv_blocks, blocks, strict=True)
    return tuple([kv.at[targets].set(new, mode="drop") for kv, new in pairs])


def _copy(kv_blocks: Kv, sources: Int[Array, "n"], targets: Int[Array, "n"]) -> Kv:
    return _scatter(kv_blocks, targets, _gather(kv_blocks, sources))


def _programs(mesh: Mesh | None, kv: Any) -> dict[Move, tuple[jax.stages.Wrapped, Any]]:
    """Each move as a function, and where its arguments after the KV go.

    Over a mesh every device moves its part of a block; `kv` are the specs of the KV arrays.
    """
    ids = PartitionSpec()

    def program(function: Any, *others: Any, donates: bool) -> tuple[jax.stages.Wrapped, Any]:
        split = per_device(function, mesh, in_specs=(kv, *others), out_specs=kv)
        jitted = jax.jit(split, donate_argnums=(0,) if donates else ())
        return jitted, shardings(mesh, others)

    return {
        Move.SWAP_OUT: program(_gather, ids, donates=False),
        Move.SWAP_IN: program(_scatter, ids, kv, donates=True),
        Move.COPY: program(_copy, ids, ids, donates=True),
    }

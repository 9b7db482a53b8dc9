"""write_kv on TPU: keys are rotated, quantised and put into their slots in one Mosaic kernel.

Owns: how tokens become runs, and the kernel that writes them in place. HBM is written in whole
tiles: a *group* of slots, 8 of float32, 16 of bfloat16, up to 32 of 8-bit numbers. So a group that
is written in part is read, merged and written back; one that is written as a whole is only written.
A *run* is what one such merge takes: neighbouring tokens in neighbouring slots of one group. A
decode is a run of one token, a prompt mostly runs of whole groups.

      tokens   0  1  2  3  4  5  6  7  8            runs of 4 slots a group: 0 | 1 2 | 3 4 5 6 | 7
      slots   21 14 15 16 17 18 19 20  pad

A tile of tokens is prepared at once, then its runs follow with several merges in flight. Runs of
one group, if near each other, must not overlap: such a step, which no engine makes, is written run
after run.

In and out: the contract in `write_kv/__init__.py`; layout `paged_attention/tpu_layout.py`. Must
not know: block tables.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas.paged_attention.pallas_tpu import (
    LEAST_VMEM_BYTES,
    VMEM_BYTES,
    check_supported,
    power_of_two,
)
from kernels_pallas.paged_attention.tpu_layout import LANES, SCALE_RUN, kv_dims
from kernels_pallas.quantised import quantise
from kernels_pallas.rotary import rotate_pairs

__all__ = ["check_supported", "write_kv"]

TILE_BYTES = 2**20  # of a tile's keys, as float32
MAX_TILE_TOKENS = 256
NUM_SLOTS = 8  # merges in flight
NUM_AHEAD = 4  # of those, how many are still reading
COUNT_BITS = 6  # a run has at most 32 tokens

type Scalar = jax.Array


@dataclass(frozen=True, slots=True, kw_only=True)
class Statics:
    """What is known when a call is traced.

    Args:
        num_kv_heads, head_dim, block_size: K, H, S.
        group: slots that are merged at once.
        tile_tokens: tokens prepared at once.
        dtype: of the cache. is_rotated: keys come with phases. is_quantised: scales are written.
    """

    num_kv_heads: int
    head_dim: int
    block_size: int
    group: int
    tile_tokens: int
    dtype: jnp.dtype
    is_rotated: bool
    is_quantised: bool


class Runs(NamedTuple):
    """The runs of a step, as the kernel finds them in SMEM."""

    slots: jax.Array  # [T] first slot of each run
    spans: jax.Array  # [T] first token << COUNT_BITS | number of tokens
    tile_ends: jax.Array  # [tiles + 1] runs before each tile of tokens
    one_by_one: jax.Array  # [1] 1: some group is met twice, no two merges may overlap


class Refs(NamedTuple):
    """Operands, results and scratch; HBM where nothing is said, None what a call does not need."""

    runs: Runs
    k: Any  # [tile_tokens, K * H] VMEM
    v: Any  # likewise
    cos: Any  # [tile_tokens, H/2] VMEM
    sin: Any  # likewise
    kv: Any  # [P, K, S, 2H]
    scales: Any  # [P, S / 16, 1, X]
    tokens: Any  # [K, tile_tokens, 2H] VMEM float32: what will be stored
    factors: Any  # [tile_tokens, F] VMEM float32: their scales, K's in lanes 0..K-1, V's in K..2K-1
    merged: Any  # [NUM_SLOTS, K, group, 2H] VMEM
    merged_scales: Any  # [NUM_SLOTS, group / 16, 1, X] VMEM
    read_sem: Any  # [NUM_SLOTS]
    write_sem: Any  # [NUM_SLOTS]


class Run(NamedTuple):
    """A run: its first token in the tile, number of tokens, block, and where it starts there."""

    token: Scalar
    num_tokens: Scalar
    block: Scalar
    group: Scalar  # of the block
    offset: Scalar  # in the group


def write_kv(
    kv_blocks: jax.Array,
    k: jax.Array,
    v: jax.Array,
    slots: jax.Array,
    *,
    rotation: tuple[jax.Array, jax.Array] | None = None,
    kv_scales: jax.Array | None = None,
    device_kind: str | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """See `kernels_pallas.write_kv.write_kv`.

    Raises:
        NotImplementedError: what `paged_attention` of this backend cannot read.
    """
    check_supported(k, kv_blocks, device_kind=device_kind)
    num_blocks, block_size, num_kv_heads, head_dim = kv_dims(kv_blocks.shape)
    num_tokens = k.shape[0]
    group = min(32 // kv_blocks.dtype.itemsize, block_size)
    wanted = power_of_two(TILE_BYTES // (num_kv_heads * head_dim * 4))
    tile_tokens = max(2 * group, min(wanted, MAX_TILE_TOKENS))
    tile_tokens = min(tile_tokens, -(-num_tokens // (2 * group)) * 2 * group)
    statics = Statics(
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        group=group,
        tile_tokens=tile_tokens,
        dtype=kv_blocks.dtype,
        is_rotated=rotation is not None,
        is_quantised=kv_scales is not None,
    )

    def tiled(x: jax.Array) -> jax.Array:
        """[T, ...] -> [whole tiles, lanes]."""
        flat = x.reshape(num_tokens, -1)
        return jnp.pad(flat, ((0, -num_tokens % tile_tokens), (0, 0)))

    num_slots = jnp.int32(num_blocks * block_size)
    padding = -num_tokens % tile_tokens
    padded = jnp.concatenate([slots, jnp.broadcast_to(num_slots, (padding,))])
    runs = _find_runs(padded, num_slots, statics)
    tokens = [tiled(x) for x in (k, v, *(rotation or ()))]
    caches = [kv_blocks] if kv_scales is None else [kv_blocks, kv_scales]
    limit = VMEM_BYTES.get(device_kind or "", LEAST_VMEM_BYTES)
    written = _call(statics, runs, tokens, caches, limit=limit)
    return written[0], written[1] if kv_scales is not None else None


def _find_runs(slots: jax.Array, num_slots: jax.Array, statics: Statics) -> Runs:
    """slots [T], T whole tiles; those >= num_slots are of padding."""
    num_tokens, group = slots.shape[0], statics.group
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    follows = jnp.concatenate([jnp.zeros(1, jnp.bool_), slots[1:] == slots[:-1] + 1])
    is_real = slots < num_slots
    is_cut = (token % statics.tile_tokens == 0) | ~follows | (slots % group == 0) | ~is_real
    is_first = is_cut & is_real
    # The next cut after each token ends its run.
    next_cut = lax.cummin(jnp.where(is_cut, token, num_tokens), reverse=True)
    end = jnp.concatenate([next_cut[1:], jnp.full(1, num_tokens, jnp.int32)])
    rank = jnp.cumsum(is_first, dtype=jnp.int32)  # runs up to and with each token
    place = jnp.where(is_first, rank - 1, num_tokens)
    first = jnp.full(num_tokens, 0, jnp.int32).at[place].set(token, mode="drop")
    run_slots, run_tiles = slots[first], first // statics.tile_tokens
    tile_ends = jnp.concatenate([jnp.zeros(1, jnp.int32), rank[statics.tile_tokens - 1 ::][
        :: statics.tile_tokens
    ]])  # fmt: skip
    index = token < rank[-1]
    met_twice = jnp.bool_(False)
    for distance in range(1, min(NUM_SLOTS, num_tokens)):
        same = (run_slots[distance:] // group == run_slots[:-distance] // group) & (
            run_tiles[distance:] == run_tiles[:-distance]
        )
        met_twice |= jnp.any(same & index[distance:])
    spans = (first << COUNT_BITS) | (end[first] - first)
    return Runs(run_slots, spans, tile_ends, met_twice.astype(jnp.int32)[None])


def _call(
    statics: Statics, runs: Runs, tokens: list[jax.Array], caches: list[jax.Array], *, limit: int
) -> list[jax.Array]:
    """The kernel; `caches` are written in place."""
    num_kv_heads, double, tile = statics.num_kv_heads, 2 * statics.head_dim, statics.tile_tokens
    in_hbm = pl.BlockSpec(memory_space=pl.ANY)

    def tile_spec(x: jax.Array) -> pl.BlockSpec:
        return pl.BlockSpec((tile, x.shape[1]), lambda i, *_: (i, 0))

    scratch = {
        "tokens": pltpu.VMEM((num_kv_heads, tile, double), jnp.float32),
        "merged": pltpu.VMEM((NUM_SLOTS, num_kv_heads, statics.group, double), statics.dtype),
        "read_sem": pltpu.SemaphoreType.DMA((NUM_SLOTS,)),
        "write_sem": pltpu.SemaphoreType.DMA((NUM_SLOTS,)),
    }
    if statics.is_quantised:
        lanes = -(-2 * num_kv_heads // LANES) * LANES
        shape = (NUM_SLOTS, statics.group // SCALE_RUN, 1, caches[1].shape[3])
        scratch["factors"] = pltpu.VMEM((tile, lanes), jnp.float32)
        scratch["merged_scales"] = pltpu.VMEM(shape, jnp.float32)
    names = ["k", "v", *(("cos", "sin") if statics.is_rotated else ())]
    cache_names = ["kv", "scales"][: len(caches)]

    def body(*refs: Any) -> None:
        runs, refs = Runs(*refs[: len(Runs._fields)]), refs[len(Runs._fields) :]
        # Inputs and outputs of a cache are one array.
        order = [*names, *cache_names, *cache_names, *scratch]
        given = dict(zip(order, refs, strict=True))
        rest = (given.get(name) for name in Refs._fields if name != "runs")
        Kernel(statics, Refs(runs, *rest)).run()

    num_operands = len(Runs._fields) + len(tokens)
    found: list[jax.Array] = pl.pallas_call(
        body,
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in caches],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(Runs._fields),
            grid=(tokens[0].shape[0] // tile,),
            in_specs=[*map(tile_spec, tokens), *[in_hbm] * len(caches)],
            out_specs=[in_hbm] * len(caches),
            scratch_shapes=list(scratch.values()),
        ),
        input_output_aliases={num_operands + i: i for i in range(len(caches))},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",), vmem_limit_bytes=limit
        ),
        name="write_kv",
    )(*runs, *tokens, *caches)
    return found


@dataclass(frozen=True, slots=True)
class Kernel:
    """One tile of tokens."""

    statics: Statics
    refs: Refs

    def run(self) -> None:
        """Prepare the tile's tokens, then merge its runs."""
        self.prepare()
        ends, one_by_one = self.refs.runs.tile_ends, self.refs.runs.one_by_one[0] == 1
        first = ends[pl.program_id(0)]
        num_runs = ends[pl.program_id(0) + 1] - first
        ahead = jnp.where(one_by_one, 0, NUM_AHEAD)

        def read(i: Scalar) -> None:
            @pl.when((i >= NUM_SLOTS) & ~one_by_one)
            def _() -> None:
                self.each_write(self.run_at(first + i - NUM_SLOTS), i, _wait)

            self.each_read(self.run_at(first + i), i, _start)

        def merge(i: Scalar) -> None:
            pl.when(i + ahead < num_runs)(lambda: read(i + ahead))
            run = self.run_at(first + i)
            self.each_read(run, i, _wait)
            self.merge(run, i)
            self.each_write(run, i, _start)
            pl.when(one_by_one)(lambda: self.each_write(run, i, _wait))

        _loop(jnp.int32(0), jnp.minimum(ahead, num_runs), read)
        _loop(jnp.int32(0), num_runs, merge)
        left = jnp.where(one_by_one, num_runs, jnp.maximum(num_runs - NUM_SLOTS, 0))
        _loop(left, num_runs, lambda i: self.each_write(self.run_at(first + i), i, _wait))

    def prepare(self) -> None:
        """Keys and values of the tile as they will be stored, side by side, and their scales."""
        statics, refs = self.statics, self.refs
        head_dim, num_kv_heads = statics.head_dim, statics.num_kv_heads
        for k in range(num_kv_heads):
            lanes = slice(k * head_dim, (k + 1) * head_dim)
            keys, values = refs.k[:, lanes], refs.v[:, lanes]
            if statics.is_rotated:
                keys = rotate_pairs(keys, refs.cos[...], refs.sin[...])
            if statics.is_quantised:
                keys = self.quantise(keys, k)
                values = self.quantise(values, num_kv_heads + k)
            both = [keys.astype(jnp.float32), values.astype(jnp.float32)]
            refs.tokens[k] = jnp.concatenate(both, axis=1)

    def quantise(self, x: jax.Array, head: int) -> jax.Array:
        """x [tile_tokens, H] as stored numbers; their scales go to lane `head` of `factors`."""
        stored, scales = quantise(x, self.statics.dtype)
        self.refs.factors[:, head : head + 1] = scales[:, None]
        return stored

    def run_at(self, i: Scalar) -> Run:
        slot, span = self.refs.runs.slots[i], self.refs.runs.spans[i]
        token = lax.rem(span >> COUNT_BITS, jnp.int32(self.statics.tile_tokens))
        size, group = jnp.int32(self.statics.block_size), jnp.int32(self.statics.group)
        in_block = lax.rem(slot, size)
        return Run(
            token=token,
            num_tokens=span & ((1 << COUNT_BITS) - 1),
            block=lax.div(slot, size),
            group=lax.div(in_block, group),
            offset=lax.rem(in_block, group),
        )

    def places(self, run: Run, i: Scalar) -> list[tuple[Any, Any]]:
        """Where a run's group lies, in HBM and in VMEM: K and V, and scales."""
        refs, group, buffer = self.refs, self.statics.group, lax.rem(i, jnp.int32(NUM_SLOTS))
        slots = pl.ds(pl.multiple_of(run.group * group, group), group)
        found = [(refs.kv.at[run.block, :, slots], refs.merged.at[buffer])]
        if self.statics.is_quantised:
            rows = pl.ds(run.group * (group // SCALE_RUN), group // SCALE_RUN)
            found.append((refs.scales.at[run.block, rows], refs.merged_scales.at[buffer]))
        return found

    def each_read(self, run: Run, i: Scalar, act: Callable[[Any], None]) -> None:
        """`act` on the copies from HBM; a run that fills its group needs none."""
        sem = self.refs.read_sem.at[lax.rem(i, jnp.int32(NUM_SLOTS))]

        @pl.when(run.num_tokens < self.statics.group)
        def _() -> None:
            for hbm, vmem in self.places(run, i):
                act(pltpu.make_async_copy(hbm, vmem, sem))

    def each_write(self, run: Run, i: Scalar, act: Callable[[Any], None]) -> None:
        """`act` on the copies to HBM."""
        sem = self.refs.write_sem.at[lax.rem(i, jnp.int32(NUM_SLOTS))]
        for hbm, vmem in self.places(run, i):
            act(pltpu.make_async_copy(vmem, hbm, sem))

    def merge(self, run: Run, i: Scalar) -> None:
        """Put the run's tokens into its group in VMEM; what else lies there keeps every bit."""
        statics, refs, group = self.statics, self.refs, self.statics.group
        buffer = lax.rem(i, jnp.int32(NUM_SLOTS))
        # Two groups of tokens hold any run; turned, its first token stands at its slot.
        start = jnp.minimum(
            lax.div(run.token, jnp.int32(group)) * group, statics.tile_tokens - 2 * group
        )
        window = pl.ds(pl.multiple_of(start, group), 2 * group)
        turn = lax.rem(run.offset - (run.token - start) + 2 * group, jnp.int32(2 * group))

        def turned(x: jax.Array) -> jax.Array:
            return pltpu.roll(x, turn, 0)[:group]

        mask = self.mask(run)
        for k in range(statics.num_kv_heads):
            new = turned(refs.tokens[k, window]).astype(statics.dtype)
            new = pltpu.bitcast(new, jnp.uint32)
            old = pltpu.bitcast(refs.merged[buffer, k], jnp.uint32)
            refs.merged[buffer, k] = pltpu.bitcast((old & ~mask) | (new & mask), statics.dtype)
        if statics.is_quantised:
            self.merge_scales(run, buffer, turned(refs.factors[window]))

    def mask(self, run: Run) -> jax.Array:
        """Ones in the bits of the run's slots; 32 bits hold several slots, the first lowest."""
        bits = 8 * self.statics.dtype.itemsize
        per_row = 32 // bits
        shape = (self.statics.group // per_row, 2 * self.statics.head_dim)
        row = lax.broadcasted_iota(jnp.int32, shape, 0) * per_row
        mask = jnp.zeros(shape, jnp.uint32)
        for j in range(per_row):
            slot = row + j - run.offset
            is_written = (slot >= 0) & (slot < run.num_tokens)
            ones = jnp.uint32(((1 << bits) - 1) << (j * bits))
            mask |= jnp.where(is_written, ones, jnp.uint32(0))
        return mask

    def merge_scales(self, run: Run, buffer: Scalar, factors: jax.Array) -> None:
        """Bring factors [group, F], a row per slot, to a row of lanes per 16 slots."""
        refs, pieces = self.refs, LANES // SCALE_RUN
        shape = (SCALE_RUN, LANES)
        slot = lax.broadcasted_iota(jnp.int32, shape, 0)
        lane = lax.broadcasted_iota(jnp.int32, shape, 1)
        is_own = (lane & (SCALE_RUN - 1)) == slot
        for row in range(self.statics.group // SCALE_RUN):
            of_run = factors[row * SCALE_RUN : (row + 1) * SCALE_RUN]
            first = row * SCALE_RUN - run.offset
            at = first + (lane[:1] & (SCALE_RUN - 1))
            is_written = (at >= 0) & (at < run.num_tokens)
            for heads in range(0, refs.scales.shape[3], LANES):
                spread = jnp.zeros(shape, jnp.float32)
                for j in range(pieces):
                    head = heads // SCALE_RUN + j
                    if head < 2 * self.statics.num_kv_heads:
                        column = jnp.broadcast_to(of_run[:, head : head + 1], shape)
                        spread = jnp.where(
                            lane >> (SCALE_RUN.bit_length() - 1) == j, column, spread
                        )
                new = jnp.sum(jnp.where(is_own, spread, 0.0), axis=0, keepdims=True)
                lanes = slice(heads, heads + LANES)
                old = refs.merged_scales[buffer, row, :, lanes]
                refs.merged_scales[buffer, row, :, lanes] = jnp.where(is_written, new, old)


def _start(copy: Any) -> None:
    copy.start()


def _wait(copy: Any) -> None:
    copy.wait()


def _loop(first: Scalar, end: Scalar, act: Callable[[Scalar], None]) -> None:
    def body(i: Scalar, nothing: Scalar) -> Scalar:
        act(i)
        return nothing

    lax.fori_loop(first, end, body, jnp.int32(0))

"""Moving whole blocks by itself: any set of moves against plain numpy, in any number of pieces."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paxserve.device import block_moves
from paxserve.device.block_moves import BlockMoves, Move, MoveShape, ladder
from paxserve.device.executables import Executables
from paxserve.step import BlockCopy, StepPlan

NUM_BLOCKS, NUM_HOST_BLOCKS, SHAPE = 14, 9, (2, 3, 4, 5)


def kv_of(dtype="float32"):
    """Two layers, every number different (as far as the dtype can tell them apart). The sum makes
    buffers of jax's own, which can be donated.
    """
    size = NUM_BLOCKS * int(np.prod(SHAPE))
    layers = np.arange(2 * size, dtype=np.float32).reshape(2, NUM_BLOCKS, *SHAPE)
    return tuple(jnp.array(layer, dtype) + jnp.zeros((), dtype) for layer in layers)


def make_moves(kv_blocks, *, num_host_blocks=NUM_HOST_BLOCKS, copies=True, strict=False):
    return BlockMoves(
        kv_blocks=kv_blocks,
        num_host_blocks=num_host_blocks,
        copies=copies,
        executables=Executables(strict=strict),
    )


@pytest.fixture(scope="module")
def small_pieces():
    """Programs for 1 and 4 blocks, kept through the module: most sets go in several pieces."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_moves, "MOST_BLOCKS", 5)
        return make_moves(kv_of())


def copies(pairs):
    return tuple(BlockCopy(int(source), int(target)) for source, target in pairs)


@st.composite
def plans(draw):
    """Any swaps out and in, and copies that do not chain; targets of one kind are distinct."""
    device, host = range(1, NUM_BLOCKS), range(NUM_HOST_BLOCKS)

    def pairs(sources, targets):
        chosen = draw(st.permutations(targets))[: draw(st.integers(0, len(targets)))]
        return [(draw(st.sampled_from(sources)), target) for target in chosen]

    order = draw(st.permutations(device))
    num_sources = draw(st.integers(1, NUM_BLOCKS - 2))
    return StepPlan(
        step_id=1,
        rows=(),
        swap_out=copies(pairs(device, host)),
        swap_in=copies(pairs(host, device)),
        copies=copies(pairs(order[:num_sources], order[num_sources:])),
    )


def expected(layers, hosts, plan):
    """The three kinds one after the other; in each, everything is read before it is written."""
    for moves, sources, targets in (
        (plan.swap_out, layers, hosts),
        (plan.swap_in, hosts, layers),
        (plan.copies, layers, layers),
    ):
        for source, target in zip(sources, targets, strict=True):
            read = source.copy()
            for move in moves:
                target[move.target] = read[move.source]


@given(st.lists(plans(), min_size=1, max_size=3))
@settings(max_examples=60)
def test_any_plans_move_what_numpy_moves(small_pieces, steps):
    kv_blocks = kv_of()
    pointers = [kv.unsafe_buffer_pointer() for kv in kv_blocks]
    layers, hosts = [np.array(kv) for kv in kv_blocks], [h.copy() for h in small_pieces._host]
    for step in steps:
        kv_blocks = small_pieces.run(kv_blocks, step)
        expected(layers, hosts, step)
    for found, wanted in zip(kv_blocks, layers, strict=True):
        np.testing.assert_array_equal(found, wanted)
    for found, wanted in zip(small_pieces._host, hosts, strict=True):
        np.testing.assert_array_equal(found, wanted)
    assert [kv.unsafe_buffer_pointer() for kv in jax.block_until_ready(kv_blocks)] == pointers
    assert {shape.num_blocks for shape in small_pieces._executables.programs} <= {1, 4}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_round_trip_over_the_host_keeps_every_bit(dtype):
    kv_blocks = kv_of(dtype)
    before = [np.asarray(kv).view(np.uint8) for kv in jax.tree.map(jnp.copy, kv_blocks)]
    moves = make_moves(kv_blocks)
    assert moves.bytes_per_block == 2 * 120 * jnp.dtype(dtype).itemsize
    there = StepPlan(1, (), swap_out=copies([(3, 8), (5, 0)]))
    back = StepPlan(2, (), swap_in=copies([(8, 6), (0, 3)]))
    kv_blocks = moves.run(moves.run(kv_blocks, there), back)
    for old, kv in zip(before, kv_blocks, strict=True):
        new = np.asarray(kv).view(np.uint8)
        np.testing.assert_array_equal(new[[6, 3]], old[[3, 5]])
        others = [b for b in range(NUM_BLOCKS) if b not in (6, 3)]
        np.testing.assert_array_equal(new[others], old[others])


def test_padding_moves_nothing():
    kv_blocks = kv_of()
    before = [np.array(kv) for kv in kv_blocks]
    moves = make_moves(kv_blocks)
    for host in moves._host:
        host[:] = -1
    for shape in moves.shapes:
        kv_blocks = moves.rehearse(kv_blocks, shape)
    assert set(moves._executables.programs) == set(moves.shapes)
    for old, new in zip(before, kv_blocks, strict=True):
        np.testing.assert_array_equal(old, new)
    assert all((host == -1).all() for host in moves._host)


@pytest.mark.parametrize(
    ("num_host_blocks", "with_copies", "kinds"),
    [
        (0, False, set()),
        (0, True, {Move.COPY}),
        (1, False, {Move.SWAP_OUT, Move.SWAP_IN}),
        (1, True, set(Move)),
    ],
)
def test_warm_up_has_what_plans_may_need(num_host_blocks, with_copies, kinds):
    moves = make_moves(kv_of(), num_host_blocks=num_host_blocks, copies=with_copies)
    assert set(moves.shapes) == {MoveShape(kind, n) for kind in kinds for n in (1, 4, 16, 64)}


def test_pieces_are_bounded_in_bytes_and_blocks():
    assert ladder(1) == ladder(2**18) == (1, 4, 16, 64)
    assert ladder(2**18 + 1) == ladder(2**20) == (1, 4, 16)
    assert ladder(2**20 + 1) == (1, 4)
    assert ladder(2**23) == ladder(2**30) == (1,)


@pytest.mark.parametrize(
    ("kind", "source", "target"),
    [
        ("swap_out", 3, NUM_HOST_BLOCKS),
        ("swap_out", 3, -1),
        ("swap_out", 0, 1),
        ("swap_in", NUM_HOST_BLOCKS, 3),
        ("swap_in", 1, 0),
        ("swap_in", 1, NUM_BLOCKS),
        ("copies", 0, 3),
        ("copies", 3, NUM_BLOCKS),
        ("copies", 3, -1),
    ],
)
def test_a_block_in_no_pool_is_refused_by_name(kind, source, target):
    kv_blocks = kv_of()
    plan = StepPlan(1, ())._replace(**{kind: copies([(source, target)])})
    with pytest.raises(ValueError, match=rf"from block {source} to {target}: the device has"):
        make_moves(kv_blocks).run(kv_blocks, plan)


def test_without_a_host_pool_a_swap_is_refused():
    kv_blocks = kv_of()
    plan = StepPlan(1, (), swap_out=copies([(3, 0)]))
    with pytest.raises(ValueError, match="the host 0 from 0: set num_host_blocks"):
        make_moves(kv_blocks, num_host_blocks=0).run(kv_blocks, plan)
    with pytest.raises(ValueError, match="num_host_blocks must be an integer >= 0, got -1"):
        make_moves(kv_blocks, num_host_blocks=-1)

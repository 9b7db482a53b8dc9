"""Packing, against a few cases by hand and against a per-token loop in plain Python."""

from copy import deepcopy

import numpy as np
import pytest
from builders import make_engine, make_limits, prompt_ids, submit
from hypothesis import given, settings
from hypothesis import strategies as st

from paxserve.arrays import StepArrays
from paxserve.device.buckets import Bucket, Buckets
from paxserve.pack import Packer, Variant
from paxserve.sampling_params import MAX_SUPPRESSED_IDS
from paxserve.step import RowEntry, RowPlan, Rows, RowSampling, StepPlan, TableWrite

LIMITS = make_limits(max_num_seqs=4, max_num_batched_tokens=16, max_model_len=12, block_size=4)
BUCKETS = Buckets.for_limits(LIMITS, row_buckets=(4,), token_buckets=(8, 16))
NUM_SLOTS = LIMITS.num_blocks * LIMITS.block_size
GREEDY = RowSampling()


def packer(limits=LIMITS, buckets=BUCKETS):
    num_slots = limits.num_blocks * limits.block_size
    return Packer(limits=limits, buckets=buckets, num_slots=num_slots)


def plan(rows, *, enters=(), tables=()):
    return StepPlan(
        step_id=1,
        rows=tuple(RowPlan(*row) for row in rows),
        entries=tuple(RowEntry(*entry) for entry in enters),
        table_writes=tuple(TableWrite(*write) for write in tables),
    )


def two_prompts(sampling=GREEDY):
    """Sequence 5 in row 2 with a whole prompt of 5, sequence 6 in row 0 with a chunk of 2."""
    return plan(
        [(5, 2, 0, 5, 1, (10, 11, 12, 13, 14)), (6, 0, 0, 2, 0, (20, 21))],
        enters=[(5, 2, 5, sampling), (6, 0, 9, GREEDY)],
        tables=[(2, 0, (7, 3)), (0, 0, (9,))],
    )


def mixed_step():
    """Then sequence 5 decodes the token that its row sampled, and 6 has its next chunk."""
    return plan(
        [(5, 2, 5, 1, 1, ()), (6, 0, 2, 4, 0, (22, 23, 24, 25))],
        tables=[(0, 1, (4,))],
    )


def test_prompts_and_their_padding():
    packed = packer().pack(two_prompts())
    assert (packed.bucket, packed.variant) == (Bucket(8, 4), Variant.GREEDY)
    arrays = packed.arrays
    assert arrays.token_ids.tolist() == [10, 11, 12, 13, 14, 20, 21, 0]
    assert arrays.token_rows.tolist() == [0, 0, 0, 0, 0, 1, 1, 0]
    assert arrays.positions.tolist() == [0, 1, 2, 3, 4, 0, 1, 0]
    assert arrays.slots.tolist() == [28, 29, 30, 31, 12, 36, 37, NUM_SLOTS]
    assert arrays.block_table.tolist() == [[7, 3, 0], [9, 0, 0], [0, 0, 0], [0, 0, 0]]
    assert arrays.context_lens.tolist() == [5, 2, 0, 0]
    assert arrays.cu_q_lens.tolist() == [0, 5, 7, 7, 7]
    assert int(arrays.num_rows) == 2
    assert arrays.row_ids.tolist() == [2, 0, 4, 4]
    assert arrays.sampled_row_ids.tolist() == [2, 4, 4, 4]
    assert arrays.last_tokens.tolist() == [4, 6, 0, 0]
    assert arrays.sampling is None
    assert {np.asarray(array).dtype for array in arrays if array is not None} == {
        np.dtype(np.int32)
    }


def test_a_decode_beside_a_chunk_takes_its_token_from_the_device():
    instance = packer()
    instance.pack(two_prompts())
    arrays = instance.pack(mixed_step()).arrays
    assert arrays.token_ids.tolist() == [-1, 22, 23, 24, 25, 0, 0, 0]
    assert arrays.positions.tolist() == [5, 2, 3, 4, 5, 0, 0, 0]
    assert arrays.slots.tolist() == [13, 38, 39, 16, 17, *[NUM_SLOTS] * 3]
    assert arrays.block_table.tolist()[:2] == [[7, 3, 0], [9, 4, 0]]
    assert arrays.context_lens.tolist() == [6, 6, 0, 0]
    assert arrays.cu_q_lens.tolist() == [0, 1, 5, 5, 5]
    assert arrays.last_tokens.tolist() == [0, 4, 0, 0]


def forked_prompt(unwritten=()):
    """The last token of a prompt of 6 in rows 2, 0 and 1, between the first 3 of another."""
    step = plan(
        [(5, 2, 5, 1, 1, (15,)), (6, 0, 5, 1, 1, (15,)), (7, 3, 0, 3, 1, (1, 2, 3)),
         (8, 1, 5, 1, 1, (15,))],
        enters=[(5, 2, 6, GREEDY), (6, 0, 6, GREEDY), (7, 3, 3, GREEDY), (8, 1, 6, GREEDY)],
        tables=[(2, 0, (7, 3)), (0, 0, (7, 3)), (3, 0, (4,)), (1, 0, (7, 3))],
    )  # fmt: skip
    return step._replace(unwritten=unwritten)


def test_unwritten_rows_differ_in_their_slot_alone():
    plain, unwritten = (packer().pack(forked_prompt(places)).arrays for places in ((), (1, 3)))
    assert plain.slots.tolist() == [13, 13, 16, 17, 18, 13, NUM_SLOTS, NUM_SLOTS]
    assert unwritten.slots.tolist() == [13, NUM_SLOTS, 16, 17, 18, *[NUM_SLOTS] * 3]
    assert unwritten.context_lens.tolist() == [6, 6, 3, 6]
    for name, array in plain._asdict().items():
        if name not in ("slots", "sampling"):
            np.testing.assert_array_equal(getattr(unwritten, name), array, name)


def test_unwritten_rows_among_decodes_alone():
    rows = [(5, 2, 5, 1, 1, ()), (6, 0, 5, 1, 1, ())]
    instance = packer()
    instance.pack(forked_prompt((1, 3)))
    arrays = instance.pack(plan(rows)._replace(unwritten=(0,))).arrays
    assert arrays.slots.tolist()[:3] == [NUM_SLOTS, 13, NUM_SLOTS]
    assert instance.pack(plan(rows)).arrays.slots.tolist()[:3] == [13, 13, NUM_SLOTS]


def test_a_row_that_another_sequence_enters_forgets_its_table():
    instance = packer()
    instance.pack(two_prompts())
    arrays = instance.pack(
        plan([(8, 2, 0, 1, 1, (30,))], enters=[(8, 2, 1, GREEDY)], tables=[(2, 0, (1,))])
    ).arrays
    assert arrays.block_table.tolist()[0] == [1, 0, 0]
    assert arrays.slots.tolist()[0] == 4


def test_a_row_that_another_sequence_enters_forgets_its_sampling():
    hot = RowSampling(1.0, 5, 0.5, 0.1, 77, 3, 4, (1, 2))
    instance = packer()
    assert instance.pack(two_prompts(hot)).variant is Variant.LOGPROBS
    assert instance.pack(mixed_step()).variant is Variant.LOGPROBS
    again = plan([(8, 2, 0, 1, 1, (30,))], enters=[(8, 2, 1, GREEDY)], tables=[(2, 0, (1,))])
    assert instance.pack(again).variant is Variant.GREEDY


def test_sampling_values_and_their_padding():
    hot = RowSampling(
        temperature=0.5,
        top_k=5,
        top_p=0.25,
        min_p=0.125,
        seed=2**32 - 1,
        min_tokens=2,
        suppressed_ids=(1, 2),
    )
    instance = packer()
    packed = instance.pack(two_prompts(hot))
    sampling = packed.arrays.sampling
    assert packed.variant is Variant.SAMPLED
    assert sampling.temperature.tolist() == [0.5, 0, 0, 0]
    assert sampling.top_k.tolist() == [5, 0, 0, 0]
    assert sampling.top_p.tolist() == [0.25, 1, 1, 1]
    assert sampling.min_p.tolist() == [0.125, 0, 0, 0]
    assert sampling.seed.tolist() == [2**32 - 1, 0, 0, 0]
    assert sampling.output_position.tolist()[0] == 0
    assert sampling.suppressed_ids.shape == (4, MAX_SUPPRESSED_IDS)
    assert sampling.suppressed_ids[0].tolist() == [1, 2, *[-1] * (MAX_SUPPRESSED_IDS - 2)]
    assert (sampling.suppressed_ids[1:] == -1).all()
    assert [np.asarray(a).dtype.name for a in sampling] == [
        "float32",
        "int32",
        "float32",
        "float32",
        "uint32",
        "int32",
        "int32",
    ]


@pytest.mark.parametrize(
    ("sampling", "variant"),
    [
        (GREEDY, Variant.GREEDY),
        (RowSampling(top_k=3, seed=9), Variant.GREEDY),
        (RowSampling(temperature=0.1), Variant.SAMPLED),
        (RowSampling(min_tokens=1), Variant.SAMPLED),
        (RowSampling(num_logprobs=0), Variant.LOGPROBS),
        (RowSampling(temperature=0.1, num_logprobs=2), Variant.LOGPROBS),
    ],
)
def test_a_step_runs_the_variant_of_its_most_demanding_row(sampling, variant):
    packed = packer().pack(two_prompts(sampling))
    assert packed.variant is variant
    assert (packed.arrays.sampling is None) == (variant is Variant.GREEDY)


def test_end_tokens_are_suppressed_before_min_tokens_and_not_after():
    sampling = RowSampling(min_tokens=2, suppressed_ids=(9,))
    instance = packer()
    seen = []
    step = plan([(5, 1, 0, 3, 1, (1, 2, 3))], enters=[(5, 1, 3, sampling)], tables=[(1, 0, (2,))])
    for position in range(3, 7):
        arrays = instance.pack(step).arrays
        seen.append((int(arrays.sampling.output_position[0]), arrays.sampling.suppressed_ids[0, 0]))
        write = [(1, 1, (3,))] if position == 4 else []
        step = plan([(5, 1, position, 1, 1, ())], tables=write)
    assert seen == [(0, 9), (1, 9), (2, -1), (3, -1)]


def test_output_position_counts_from_the_prompt_even_after_a_resume():
    hot = RowSampling(temperature=1.0)
    resume = plan(
        [(5, 0, 0, 7, 1, tuple(range(7)))], enters=[(5, 0, 3, hot)], tables=[(0, 0, (1, 2))]
    )
    assert packer().pack(resume).arrays.sampling.output_position.tolist()[0] == 4


def test_arrays_are_fresh_in_every_step():
    instance = packer()
    hot = RowSampling(temperature=1.0, min_tokens=8, suppressed_ids=(3,))
    first = instance.pack(two_prompts(hot)).arrays
    kept = deepcopy(first)
    instance.pack(mixed_step())
    instance.pack(plan([(8, 2, 0, 1, 1, (30,))], enters=[(8, 2, 1, GREEDY)], tables=[(2, 0, (1,))]))
    for before, now in zip(flat(kept), flat(first), strict=True):
        assert np.array_equal(before, now)
    second = instance.pack(plan([(8, 2, 1, 1, 1, ())])).arrays
    for array in flat(first):
        if isinstance(array, np.ndarray):
            array[...] = 63
    again = instance.pack(plan([(8, 2, 1, 1, 1, ())])).arrays
    for before, now in zip(flat(second), flat(again), strict=True):
        assert np.array_equal(before, now)


def flat(arrays):
    return [*arrays[:-1], *(arrays.sampling or ())]


@pytest.mark.parametrize("variant", Variant)
def test_a_step_of_padding_writes_nothing_and_samples_for_nobody(variant):
    for bucket in BUCKETS.shapes:
        packed = packer().padding(bucket, variant)
        assert (packed.bucket, packed.variant) == (bucket, variant)
        arrays = packed.arrays
        assert arrays.slots.tolist() == [NUM_SLOTS] * bucket.num_tokens
        assert arrays.cu_q_lens.tolist() == [0] * (bucket.num_rows + 1)
        assert int(arrays.num_rows) == 0
        assert set(arrays.row_ids.tolist()) == set(arrays.sampled_row_ids.tolist()) == {4}
        assert not arrays.block_table.any()
        assert (arrays.sampling is None) == (variant is Variant.GREEDY)


def test_padding_and_a_real_step_have_the_same_shapes_and_types():
    hot = RowSampling(temperature=1.0)
    real = packer().pack(two_prompts(hot))
    empty = packer().padding(real.bucket, real.variant)
    for a, b in zip(flat(real.arrays), flat(empty.arrays), strict=True):
        assert (np.shape(a), np.asarray(a).dtype) == (np.shape(b), np.asarray(b).dtype)


def test_a_step_beyond_the_ladder_is_an_error():
    row = (5, 0, 0, 17, 1, tuple(range(17)))
    with pytest.raises(ValueError, match="no bucket holds 17 tokens in 1 rows"):
        packer().pack(plan([row], enters=[(5, 0, 17, GREEDY)], tables=[(0, 0, (1, 2, 3))]))


class Naive:
    """The same arrays, token by token, from dictionaries of what each row was told."""

    def __init__(self, limits):
        self.limits, self.tables, self.entries = limits, {}, {}

    def check(self, step, packed):
        block_size = self.limits.block_size
        num_slots = self.limits.num_blocks * block_size
        for entry in step.entries:
            self.tables[entry.row], self.entries[entry.row] = [], entry
        for write in step.table_writes:
            assert write.start == len(self.tables[write.row])
            self.tables[write.row] += write.block_ids
        arrays, index = packed.arrays, 0
        for i, row in enumerate(step.rows):
            assert arrays.cu_q_lens[i] == index
            for j in range(row.num_tokens):
                position = row.first_position + j
                block_id = self.tables[row.row][position // block_size]
                slot = block_id * block_size + position % block_size
                assert arrays.slots[index] == (num_slots if i in step.unwritten else slot)
                assert arrays.token_ids[index] == (row.tokens[j] if row.tokens else -1)
                assert (arrays.positions[index], arrays.token_rows[index]) == (position, i)
                index += 1
            table = self.tables[row.row]
            width = self.limits.blocks_per_row
            assert arrays.block_table[i].tolist() == table + [0] * (width - len(table))
            assert arrays.context_lens[i] == row.first_position + row.num_tokens
            assert arrays.last_tokens[i] == index - 1
            assert arrays.row_ids[i] == row.row
            assert arrays.sampled_row_ids[i] == (row.row if row.num_samples else self.no_row)
            if arrays.sampling is not None:
                self.check_sampling(arrays.sampling, i, row)
        assert index == step.num_tokens
        assert (arrays.slots[index:] == num_slots).all()
        assert not arrays.token_ids[index:].any()
        assert (arrays.cu_q_lens[len(step.rows) :] == index).all()
        assert (arrays.row_ids[len(step.rows) :] == self.no_row).all()
        assert (arrays.sampled_row_ids[len(step.rows) :] == self.no_row).all()

    @property
    def no_row(self):
        return self.limits.max_num_seqs

    def check_sampling(self, sampling, i, row):
        entry = self.entries[row.row]
        position = row.first_position + row.num_tokens - entry.num_prompt_tokens
        assert sampling.output_position[i] == position
        assert sampling.seed[i] == entry.sampling.seed
        assert sampling.temperature[i] == np.float32(entry.sampling.temperature)
        suppressed = [t for t in sampling.suppressed_ids[i].tolist() if t >= 0]
        early = position < entry.sampling.min_tokens
        assert suppressed == (list(entry.sampling.suppressed_ids) if early else [])


@given(
    st.lists(
        st.tuples(
            st.integers(1, 17), st.integers(1, 7), st.sampled_from([0.0, 1.0]), st.integers(0, 3)
        ),
        min_size=1,
        max_size=9,
    ),
    st.sampled_from([1, 2, 4, 8]),
    st.integers(3, 20),
)
@settings(max_examples=60)
def test_any_run_packs_as_the_plain_loop_does(requests, block_size, budget):
    tight = -(-24 // block_size)
    limits = make_limits(
        max_num_seqs=3,
        max_num_batched_tokens=budget,
        max_model_len=24,
        block_size=block_size,
        num_blocks=1 + tight + tight // 2,
    )
    instance, naive = packer(limits, Buckets.for_limits(limits)), Naive(limits)
    engine = make_engine(limits)
    engine.executor.on_submit = lambda step: naive.check(step, instance.pack(step))
    for salt, (length, max_tokens, temperature, min_tokens) in enumerate(requests):
        submit(
            engine,
            prompt_ids(length, salt),
            max_tokens=max_tokens,
            min_tokens=min(min_tokens, max_tokens),
            temperature=temperature,
            stop_token_ids=[3, 4],
        )
    while engine.has_work:
        engine.step()
    assert len(engine.executor.plans) == len(engine.steps) > 0


def test_what_a_placement_rounds_a_table_up_by_is_not_packed():
    """12 tokens are 3 blocks of 4; buddies hand out 4, and then 4 more to a table of 4."""
    packing = packer()
    step = plan(
        [(5, 2, 0, 1, 0, (10,)), (6, 3, 0, 1, 0, (11,))],
        enters=[(5, 2, 9, GREEDY), (6, 3, 9, GREEDY)],
        tables=[(2, 0, (1, 2, 3, 4)), (3, 0, (5, 6)), (3, 2, (7, 8)), (2, 4, (9, 10, 11, 12))],
    )
    arrays = packing.pack(step).arrays
    assert arrays.block_table[:2].tolist() == [[1, 2, 3], [5, 6, 7]]


def test_decodes_as_columns_are_packed_as_the_rows_they_stand_for():
    columns = Rows.decodes([7, 5, 9], [2, 0, 3], [4, 1, 6])
    rows = tuple(columns)
    assert rows == (
        RowPlan(7, 2, 4, 1, 1, ()),
        RowPlan(5, 0, 1, 1, 1, ()),
        RowPlan(9, 3, 6, 1, 1, ()),
    )
    assert columns == rows
    assert (columns[1], columns[1:], len(columns), hash(columns)) == (
        rows[1],
        rows[1:],
        3,
        hash(rows),
    )
    plans = [StepPlan(step_id=1, rows=chosen) for chosen in (columns, rows)]
    for name in ("num_tokens", "columns"):
        assert list_of(getattr(plans[0], name)) == list_of(getattr(plans[1], name))
    assert [plan.num_blocks(4) for plan in plans] == [2 + 1 + 2] * 2
    entries = [RowEntry(row.sequence_id, row.row, 3, RowSampling()) for row in rows]
    writes = [TableWrite(row.row, 0, (10 + row.row, 20 + row.row)) for row in rows]
    packed = []
    for plan in plans:
        limits = make_limits()
        packer = Packer(limits=limits, buckets=Buckets.for_limits(limits), num_slots=200)
        packed.append(
            packer.pack(plan._replace(entries=tuple(entries), table_writes=tuple(writes)))
        )
    assert packed[0].bucket == packed[1].bucket
    assert packed[0].variant is packed[1].variant
    for name in StepArrays._fields:
        one, other = (getattr(step.arrays, name) for step in packed)
        assert np.array_equal(one, other), name


def list_of(value):
    return value if isinstance(value, int) else list(value)

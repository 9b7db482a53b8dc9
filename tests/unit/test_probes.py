"""The steps that are measured: each is of the shape that it is for, and an engine could run it."""

import numpy as np
import pytest

from paxserve.calibrate.measuring import longest_context
from paxserve.calibrate.probes import Probe, designed, drawn, fits
from paxserve.device.buckets import Bucket, Buckets
from paxserve.limits import Limits
from paxserve.step import RowPlan
from paxserve.step_shape import shape_of


def limits_of(**sizes):
    usual = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 256,
             "block_size": 16, "num_blocks": 129}  # fmt: skip
    return Limits(**usual | sizes)


SIZES = [
    {},
    {"max_num_seqs": 1, "max_num_batched_tokens": 1},
    {"max_num_seqs": 3, "max_num_batched_tokens": 5, "max_model_len": 4, "block_size": 1},
    {"max_num_seqs": 32, "max_num_batched_tokens": 512, "max_model_len": 1024, "num_blocks": 2049},
    {"max_num_seqs": 16, "max_num_batched_tokens": 16, "num_blocks": 40},
]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_every_shape_is_measured_by_steps_that_are_padded_to_it(sizes):
    limits = limits_of(**sizes)
    buckets, longest = Buckets.for_limits(limits), longest_context(limits)
    rng = np.random.default_rng(0)
    for probes in (
        designed(buckets, longest=longest),
        drawn(buckets, longest=longest, num_each=8, rng=rng),
    ):
        chosen = [
            buckets.choose(num_tokens=probe.num_tokens, num_rows=len(probe.rows))
            for probe in probes
        ]
        assert set(chosen) == set(buckets.shapes)
        for probe in probes:
            assert min(first for first, _ in probe.rows) >= 0
            assert min(num for _, num in probe.rows) >= 1
            assert max(map(sum, probe.rows)) <= longest
            assert probe.num_tokens <= limits.max_num_batched_tokens
            assert len(probe.rows) <= limits.max_num_seqs


def test_the_design_covers_what_time_may_depend_on():
    limits = limits_of(**SIZES[3])
    buckets = Buckets.for_limits(limits)
    probes = designed(buckets, longest=1024)
    assert len(set(probes)) == len(probes) < 200
    shapes = [shape_of(probe.plan(0)) for probe in probes]
    for bucket in buckets.shapes[2:]:
        own = [
            shape
            for shape in shapes
            if buckets.choose(num_tokens=shape.num_tokens, num_rows=shape.num_rows) == bucket
        ]
        assert any(s.num_chunks == 1 and s.num_decodes > 1 for s in own), bucket
        assert any(s.num_chunks == 3 and s.num_decodes == 0 for s in own), bucket
        contexts = sorted(s.chunk_context for s in own if s.num_chunks == 1)
        assert contexts[-1] > 700 > 200 > contexts[0]
    of_decodes = [s for s in shapes if not s.num_chunks]
    assert {s.num_rows for s in of_decodes} > {1, 2, 8, 32}
    assert max(s.decode_context for s in of_decodes) == pytest.approx(32 * 0.8 * 1024, rel=0.02)
    longest = max(probes, key=lambda probe: shape_of(probe.plan(0)).decode_context)
    firsts = sorted(first for first, _ in longest.rows)
    assert firsts[0] < 650 < 980 < firsts[-1]  # not all alike


def test_drawn_steps_are_the_seed_s_and_mixed():
    buckets = Buckets.for_limits(limits_of())
    first, again, other = (
        drawn(buckets, longest=256, num_each=8, rng=np.random.default_rng(seed))
        for seed in (1, 1, 2)
    )
    assert first == again != other
    assert len(first) == 8 * len(buckets.shapes)
    assert any(len({num for _, num in probe.rows}) > 2 for probe in first)
    assert not set(first) & set(designed(buckets, longest=256))


def test_a_probe_becomes_a_plan():
    decodes = Probe(((4, 1), (9, 1))).plan(3)
    assert decodes.rows.are_decodes
    assert decodes.step_id == 3
    assert list(decodes.rows) == [RowPlan(0, 0, 4, 1, 1, ()), RowPlan(1, 1, 9, 1, 1, ())]
    mixed = Probe(((4, 1), (0, 3))).plan(4)
    assert mixed.rows == (RowPlan(0, 0, 4, 1, 1, ()), RowPlan(1, 1, 0, 3, 1, (0, 1, 2)))


@pytest.mark.parametrize(
    ("rows", "is_one"),
    [
        (((0, 1),) * 8, True),
        (((0, 8),), True),
        ((), False),
        (((0, 2),), False),  # the shape below holds it
        (((0, 1),) * 9, False),
        (((0, 9),), False),
        (((95, 8),), False),  # longer than a row can be
        (((-1, 8),), False),
    ],
)
def test_what_fits(rows, is_one):
    buckets = Buckets((Bucket(2, 2), Bucket(8, 8)))
    assert fits(Probe(rows), Bucket(8, 8), buckets, longest=100) == is_one


def test_contexts_are_as_long_as_all_rows_can_have_at_once():
    assert longest_context(limits_of()) == 256
    assert longest_context(limits_of(num_blocks=41)) == 5 * 16  # 40 blocks for 8 rows
    assert longest_context(limits_of(max_model_len=100)) == 100

import pytest
from builders import make_limits
from hypothesis import given
from hypothesis import strategies as st

from paxserve.device.buckets import Bucket, Buckets, Exact

LIMITS = make_limits(max_num_seqs=32, max_num_batched_tokens=512)


def test_default_ladder_is_short_and_ends_at_the_limits():
    assert Buckets.for_limits(LIMITS).shapes == (
        Bucket(2, 2),
        Bucket(8, 8),
        Bucket(32, 32),
        Bucket(128, 32),
        Bucket(512, 32),
    )


@pytest.mark.parametrize(
    ("num_tokens", "num_rows", "expected"),
    [
        (1, 1, (2, 2)),
        (2, 2, (2, 2)),
        (3, 3, (8, 8)),
        (3, 1, (8, 8)),
        (8, 8, (8, 8)),
        (9, 9, (32, 32)),
        (33, 1, (128, 32)),
        (128, 32, (128, 32)),
        (129, 2, (512, 32)),
        (512, 32, (512, 32)),
    ],
)
def test_the_smallest_shape_that_holds_the_step(num_tokens, num_rows, expected):
    chosen = Buckets.for_limits(LIMITS).choose(num_tokens=num_tokens, num_rows=num_rows)
    assert chosen == expected


@pytest.mark.parametrize(("num_tokens", "num_rows"), [(513, 1), (33, 33)])
def test_a_step_beyond_the_ladder_is_an_error_that_shows_it(num_tokens, num_rows):
    with pytest.raises(ValueError, match=rf"{num_tokens} tokens in {num_rows} rows.*\(512, 32\)"):
        Buckets.for_limits(LIMITS).choose(num_tokens=num_tokens, num_rows=num_rows)


def test_given_rungs_are_the_ladder():
    ladder = Buckets.for_limits(LIMITS, row_buckets=(32,), token_buckets=(16, 512))
    assert ladder.shapes == (Bucket(16, 16), Bucket(32, 32), Bucket(512, 32))


@pytest.mark.parametrize(
    ("name", "rungs"),
    [
        ("row_buckets", (0, 32)),
        ("row_buckets", (16,)),
        ("row_buckets", (32, 64)),
        ("token_buckets", (512, 1024)),
        ("token_buckets", (256,)),
        ("token_buckets", (-1, 512)),
    ],
)
def test_rungs_outside_the_limits_are_refused_by_name(name, rungs):
    with pytest.raises(ValueError, match=name):
        Buckets.for_limits(LIMITS, **{name: rungs})


@given(st.integers(1, 40), st.integers(1, 300), st.data())
def test_every_step_within_the_limits_has_a_bucket_within_the_limits(rows, extra, data):
    limits = make_limits(max_num_seqs=rows, max_num_batched_tokens=rows + extra)
    buckets = Buckets.for_limits(limits)
    assert list(buckets.shapes) == sorted(set(buckets.shapes))
    num_rows = data.draw(st.integers(1, rows))
    num_tokens = data.draw(st.integers(num_rows, rows + extra))
    bucket = buckets.choose(num_tokens=num_tokens, num_rows=num_rows)
    assert num_tokens <= bucket.num_tokens <= limits.max_num_batched_tokens
    assert num_rows <= bucket.num_rows <= limits.max_num_seqs
    fitting = [b for b in buckets.shapes if b.num_tokens >= num_tokens and b.num_rows >= num_rows]
    assert bucket == fitting[0]


@pytest.mark.parametrize(("num_tokens", "num_rows"), [(1, 1), (9, 2), (700, 40)])
def test_exact_shapes_pad_nothing(num_tokens, num_rows):
    assert Exact().choose(num_tokens=num_tokens, num_rows=num_rows) == (num_tokens, num_rows)

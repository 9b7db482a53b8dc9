"""Steps of served requests, looked at as they run."""

import numpy as np
import pytest
from fidelity_builders import CASES, POISSON, SIZES, make_bench

from paxserve.calibrate.measuring import longest_context
from paxserve.calibrate.profiling import calibrate
from paxserve.calibrate.watching import MOST_OUTPUT, NoRequests, serve_and_watch
from paxserve.workload import Vocabulary


def test_every_step_is_seen_with_the_time_after_it():
    bench = make_bench(POISSON)
    served = serve_and_watch(bench, rng=np.random.default_rng(0))
    assert len(served.shapes) == len(served.durations_s) == len(served.gaps_s) > 8
    assert min(served.durations_s) > 0
    assert min(served.gaps_s[:-1]) > 0
    assert served.gaps_s[-1] == 0
    # Eight requests: prompts shorter than a row holds, and outputs of at least one token.
    assert 8 <= sum(shape.num_samples for shape in served.shapes) <= 8 * MOST_OUTPUT
    assert {shape.padded_rows for shape in served.shapes} == {4}
    assert any(shape.num_chunks for shape in served.shapes)
    assert max(shape.num_decodes for shape in served.shapes) > 2


def test_steps_that_move_blocks_are_left_out():
    served = serve_and_watch(make_bench(CASES["swapped"]), rng=np.random.default_rng(0))
    assert len(served.shapes) == len(served.gaps_s) > 8
    assert not any(shape.num_swapped or shape.num_copied for shape in served.shapes)


@pytest.mark.parametrize("limits", [
    ["limits.num_blocks_override=5"],
    ["limits.num_blocks_override=5", "limits.block_size=1"],
    ["limits.num_blocks_override=8", "limits.block_size=1"],
    ["limits.max_num_seqs=8", "limits.row_buckets=[8]", "limits.num_blocks_override=7"],
])  # fmt: skip
def test_rows_too_short_to_measure_are_refused_before_anything_is_compiled(limits):
    bench = make_bench([*SIZES, "model=tiny", "workload=synthetic", *limits])
    if longest_of(bench.limits) > 1:
        assert longest_context(bench.limits) == longest_of(bench.limits)
        return
    for act in (lambda: calibrate(bench, repetitions=1, seed=0),
                lambda: serve_and_watch(bench, rng=np.random.default_rng(0))):  # fmt: skip
        with pytest.raises(ValueError, match=r"max_num_seqs=\d rows need two tokens of KV each"):
            act()
    assert bench.executor.executables == {}


def longest_of(limits):
    """Tokens that all rows have room for at once."""
    return min(
        limits.max_model_len,
        (limits.num_blocks - 1) // limits.max_num_seqs * limits.block_size,
    )


def test_a_bench_without_requests():
    source = NoRequests().open(seed=0, vocabulary=Vocabulary(9))
    assert (source.num_requests, source.next_s()) == (0, None)

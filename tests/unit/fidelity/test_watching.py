"""Steps of served requests, looked at as they run."""

import numpy as np
from fidelity_builders import CASES, POISSON, make_bench

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


def test_a_bench_without_requests():
    source = NoRequests().open(seed=0, vocabulary=Vocabulary(9))
    assert (source.num_requests, source.next_s()) == (0, None)

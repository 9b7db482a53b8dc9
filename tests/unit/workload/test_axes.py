"""Every choice of the three small axes: what it draws, from a seed, and how it refuses settings."""

import itertools
import os
from pathlib import Path

import numpy as np
import pytest
from axes import stems, yaml_values
from workload_builders import VOCABULARY, opened, part, take_all, words, write_lines

from paxserve.draws import Stream, stream
from paxserve.workload import Vocabulary

CSV_ROWS = ["ContextTokens,GeneratedTokens,TIMESTAMP", "3,40,XXX", "50,6,XXX", "700,800,XXX"]
OPEN_LOOPS = ["all_at_once", "poisson", "gamma"]
FROM_A_FILE = {"empirical": {}, "known_outputs": {"column": "GeneratedTokens"}}


def starts(stem, num, seed=0, recorded=None, **settings):
    return part("arrivals", stem, **settings).starts(num, stream(seed, Stream.ARRIVALS), recorded)


def lengths(stem, num, seed=0, **settings):
    drawn = part("lengths", stem, **settings).draw(num, stream(seed, Stream.LENGTHS))
    return np.array(drawn).reshape(-1, 2)


@pytest.fixture
def lengths_file(tmp_path):
    return write_lines(tmp_path / "lengths.csv", *CSV_ROWS)


# Arrivals.


@pytest.mark.parametrize(
    ("stem", "settings", "cv"),
    [
        ("poisson", {"rate": 4.0}, 1.0),
        ("gamma", {"rate": 4.0, "burstiness": 1.0}, 1.0),
        ("gamma", {"rate": 4.0, "burstiness": 0.25}, 2.0),
        ("gamma", {"rate": 4.0, "burstiness": 16.0}, 0.25),
    ],
)
def test_gaps_have_the_mean_and_the_spread_that_were_asked_for(stem, settings, cv):
    gaps = np.diff(starts(stem, 20_001, **settings), prepend=0.0)
    assert gaps.mean() == pytest.approx(0.25, rel=0.03 * max(cv, 1))
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.03)
    # Independent of one another: no correlation of neighbours.
    assert abs(np.corrcoef(gaps[:-1], gaps[1:])[0, 1]) < 0.03


def test_all_at_once_closed_loop_and_trace():
    assert starts("all_at_once", 3) == [0, 0, 0]
    assert starts("closed_loop", 10, num_users=3) == [0, 0, 0]
    assert starts("closed_loop", 2, num_users=3) == [0, 0]
    assert starts("trace", 2, recorded=[1.0, 3.0, 5.0], scale=0.5) == [0.5, 1.5]
    with pytest.raises(ValueError, match="arrivals=trace, but this workload has no recorded times"):
        starts("trace", 2)


def test_times_of_another_file(tmp_path, lengths_file):
    header, rows = "arrived_at_s,client,num_prefill_tokens,num_decode_tokens", ["2,a,1,1"] * 2
    path = write_lines(tmp_path / "t.csv", header, *rows, "7.5,b,1,1")
    assert starts("trace", 3, path=path, recorded=[9.0] * 3, scale=2.0) == [0, 0, 11]
    with pytest.raises(ValueError, match=r"t\.csv has 3 arrival times, 4 are needed"):
        starts("trace", 4, path=path)
    with pytest.raises(ValueError, match=r"lengths\.csv has no recorded times"):
        starts("trace", 2, path=lengths_file)


# Lengths.


def test_fixed_and_uniform_lengths():
    assert lengths("fixed", 2, input_tokens=7, output_tokens=9).tolist() == [[7, 9]] * 2
    bounds = {"min_input_tokens": 3, "max_input_tokens": 5} | {
        "min_output_tokens": 1, "max_output_tokens": 2}  # fmt: skip
    drawn = lengths("uniform", 3000, **bounds)
    pairs, counts = np.unique(drawn, axis=0, return_counts=True)
    assert pairs.tolist() == [list(pair) for pair in itertools.product((3, 4, 5), (1, 2))]
    assert counts.min() > 420  # 500 each


def test_lognormal_lengths():
    drawn = lengths("lognormal", 20_000, max_total_tokens=10**6)
    for column, median, sigma in ((0, 1730, 0.93), (1, 415, 0.54)):
        assert np.median(drawn[:, column]) == pytest.approx(median, rel=0.03)
        assert np.log(drawn[:, column]).std() == pytest.approx(sigma, rel=0.03)
    assert abs(np.corrcoef(np.log(drawn.T))[0, 1]) < 0.03
    cut = lengths("lognormal", 20_000, max_total_tokens=2048)
    assert (cut.sum(axis=1) <= 2048).all()
    # Left out, not cut back: nothing piles up at the bound.
    assert (cut.sum(axis=1) == 2048).mean() < 0.002
    with pytest.raises(ValueError, match="hardly a pair of lengths is within max_total_tokens=3"):
        lengths("lognormal", 10, max_total_tokens=3)


def test_empirical_lengths_keep_pairs_and_bounds(lengths_file):
    drawn = lengths("empirical", 3000, path=lengths_file)
    pairs, counts = np.unique(drawn, axis=0, return_counts=True)
    assert pairs.tolist() == [[3, 40], [50, 6], [700, 800]]
    assert counts.min() > 900
    for bounds, left in (
        ({"min_tokens": 4}, [[50, 6], [700, 800]]),
        ({"max_input_tokens": 50}, [[3, 40], [50, 6]]),
        ({"max_total_tokens": 56}, [[3, 40], [50, 6]]),
        ({"max_total_tokens": 55}, [[3, 40]]),
        ({"scale_input": 1.5, "scale_output": 0.01}, [[4, 1], [75, 1], [1050, 8]]),
        # The filter comes before the factors, which are then cut back to the bound.
        ({"max_total_tokens": 60, "scale_input": 1.1, "scale_output": 2.0}, [[3, 57], [55, 5]]),
    ):
        drawn = lengths("empirical", 100, path=lengths_file, **bounds)
        assert np.unique(drawn, axis=0).tolist() == left, bounds
    with pytest.raises(ValueError, match=r"none of the 3 rows of .*lengths.csv is within"):
        lengths("empirical", 1, path=lengths_file, min_tokens=900)


def test_known_outputs_have_prompts_around_a_mean(lengths_file):
    settings = {"path": lengths_file, "column": "GeneratedTokens"}
    drawn = lengths("known_outputs", 20_000, **settings, scale_output=0.5)
    outputs, counts = np.unique(drawn[:, 1], return_counts=True)
    assert outputs.tolist() == [3, 20, 400]
    assert counts.min() > 6300  # 6667 each
    prompts = drawn[:, 0]
    assert prompts.mean() == pytest.approx(19.31, rel=0.01)
    assert np.percentile(prompts, [5, 95]).tolist() == [10, 32]
    assert abs(np.corrcoef(drawn.T)[0, 1]) < 0.03
    fixed = lengths("known_outputs", 100, **settings, sigma_input=0, max_total_tokens=50)
    assert np.unique(fixed, axis=0).tolist() == [[19, 6], [19, 31]]
    with pytest.raises(ValueError, match=r"no column gt_tokens"):
        lengths("known_outputs", 1, path=lengths_file)
    with pytest.raises(ValueError, match="column must be a name"):
        part("lengths", "known_outputs", path="x.csv", column=3)


def test_known_outputs_of_a_file_that_is_not_as_described(tmp_path):
    path = write_lines(tmp_path / "outputs.csv", "gt_tokens", "12", "many")
    with pytest.raises(ValueError, match=r"line 3: gt_tokens must be an integer"):
        lengths("known_outputs", 1, path=path)
    with pytest.raises(ValueError, match="has no rows"):
        lengths("known_outputs", 1, path=write_lines(tmp_path / "none.csv", "gt_tokens"))


@pytest.mark.parametrize("stem", FROM_A_FILE)
def test_a_file_that_has_changed_is_read_again(lengths_file, stem):
    settings = {"path": lengths_file} | FROM_A_FILE[stem]
    before = lengths(stem, 50, **settings)
    assert lengths(stem, 50, **settings).tolist() == before.tolist()
    write_lines(Path(lengths_file), CSV_ROWS[0], "3,7,XXX")
    os.utime(lengths_file, (1, 1))
    assert set(lengths(stem, 50, **settings)[:, 1].tolist()) == {7}
    Path(lengths_file).unlink()
    with pytest.raises(FileNotFoundError, match="does not exist"):
        lengths(stem, 50, **settings)


# Content.


def say(content, number, num_tokens=5, seed=0, vocabulary=VOCABULARY):
    return content.token_ids(number, num_tokens, seed=seed, vocabulary=vocabulary)


@pytest.mark.parametrize("stem", ["random_ids", "multi_turn"])
def test_random_ids_cover_the_vocabulary_and_share_nothing(stem):
    content = part("content", stem)
    ids = say(content, 0, 20_000)
    assert (min(ids), max(ids), len(set(ids))) == (0, 999, 1000)
    prompts = {say(content, number) for number in range(500)}
    assert len(prompts) == 500
    assert say(content, 1, seed=1) not in prompts


def test_shared_prefixes_are_as_popular_as_zipf_says():
    content = part("content", "shared_prefix", num_groups=4, prefix_tokens=3, exponent=1.0)
    prompts = [say(content, number) for number in range(4000)]
    assert {len(prompt) for prompt in prompts} == {8}
    assert len({prompt[3:] for prompt in prompts}) == 4000
    prefixes, counts = np.unique([prompt[:3] for prompt in prompts], axis=0, return_counts=True)
    assert len(prefixes) == 4
    expected = 4000 / np.array([1, 2, 3, 4]) / (1 + 1 / 2 + 1 / 3 + 1 / 4)
    assert sorted(counts, reverse=True) == pytest.approx(expected, rel=0.08)
    # Groups are ranked the same under any popularity; without one all are alike.
    most = prefixes[counts.argmax()].tolist()
    steep = part("content", "shared_prefix", num_groups=4, prefix_tokens=3, exponent=8.0)
    assert [list(say(steep, number)[:3]) for number in range(20)].count(most) >= 18
    flat = part("content", "shared_prefix", num_groups=4, prefix_tokens=3, exponent=0.0)
    _, counts = np.unique([say(flat, n)[:3] for n in range(2000)], axis=0, return_counts=True)
    assert counts == pytest.approx(np.full(4, 500), rel=0.15)


def test_written_prompts_have_the_wanted_length():
    content = part("content", "written_prompts")
    vocabulary = Vocabulary(100, words)
    first = words("Why are there two high tides each day? Answer in three or four")
    assert say(content, 0, 13, vocabulary=vocabulary) == tuple(first)
    assert say(content, 48, 13, vocabulary=vocabulary) == tuple(first)
    assert say(content, 1, 13, vocabulary=vocabulary) != tuple(first)
    long = say(content, 47, 3000, vocabulary=vocabulary)
    assert len(long) == 3000
    # Text 47 is the last one: text 0 comes after it.
    assert tuple(first) in {long[start : start + 13] for start in range(1, 3000)}
    with pytest.raises(ValueError, match="needs a model with a tokenizer"):
        say(content, 0)


# All of them.


def combinations():
    axes = ("arrivals", "lengths", "content")
    every = itertools.product(*(stems(f"workload/{axis}") for axis in axes))
    return [chosen for chosen in every if chosen[0] in OPEN_LOOPS and chosen[2] != "multi_turn"]


@pytest.mark.parametrize(("arrivals", "lengths", "content"), combinations(), ids=str)
def test_an_open_loop_depends_on_its_seed_only(lengths_file, arrivals, lengths, content):
    """And is sorted in time, of the drawn lengths, with those forced on the engine."""
    path = {"path": lengths_file} | FROM_A_FILE[lengths] if lengths in FROM_A_FILE else {}
    chosen = {
        "arrivals": part("arrivals", arrivals),
        "lengths": part("lengths", lengths, **path),
        "content": part("content", content),
        "num_requests": 12, "num_clients": 3, "num_priorities": 2,
    }  # fmt: skip
    vocabulary = Vocabulary(1000, words)
    taken = [take_all(opened("synthetic", seed, vocabulary, **chosen)) for seed in (5, 5, 6)]
    assert taken[0] == taken[1]
    is_random = (arrivals, lengths, content) != ("all_at_once", "fixed", "written_prompts")
    assert ([what_was_drawn(a) for a in taken[0]] != [what_was_drawn(a) for a in taken[2]]) == (
        is_random
    )
    times = [arrival.arrival_s for arrival in taken[0]]
    assert times == sorted(times)
    assert times[0] >= 0
    assert [arrival.request_id for arrival in taken[0]] == [str(number) for number in range(12)]
    drawn = chosen["lengths"].draw(12, stream(5, Stream.LENGTHS))
    prefix = 256 if content == "shared_prefix" else 0
    for arrival, length in zip(taken[0], drawn, strict=True):
        assert len(arrival.prompt_token_ids) == prefix + length.num_prompt_tokens
        assert arrival.ignore_eos
        assert arrival.max_tokens == length.num_output_tokens
        assert arrival.origin.num_true_output_tokens == length.num_output_tokens


def what_was_drawn(arrival):
    return arrival.arrival_s, arrival.prompt_token_ids, arrival.max_tokens


def test_drawing_more_of_one_thing_changes_nothing_else():
    """Each axis has a stream of its own; a longer run begins like a shorter one."""
    plain = take_all(opened("synthetic", num_requests=30))
    others = take_all(
        opened("synthetic", num_requests=40, num_clients=5, num_priorities=4,
               lengths=part("lengths", "uniform"))
    )  # fmt: skip
    assert [a.arrival_s for a in others[:30]] == [a.arrival_s for a in plain]
    assert [a.prompt_token_ids[:32] for a in others[:30]] == [
        a.prompt_token_ids[:32] for a in plain
    ]


def test_clients_and_priorities_are_shared_out():
    settings = {"num_requests": 3000, "lengths": part("lengths", "fixed", input_tokens=1)}
    taken = take_all(opened("synthetic", num_clients=4, client_exponent=2.0, **settings))
    names, counts = np.unique([a.origin.client for a in taken], return_counts=True)
    assert names.tolist() == [f"client-{number}" for number in range(4)]
    shares = 1 / np.array([1, 4, 9, 16])
    assert counts == pytest.approx(3000 * shares / shares.sum(), rel=0.15)
    assert {a.origin.priority for a in taken} == {0}
    taken = take_all(opened("synthetic", num_clients=2, num_priorities=3, **settings))
    _, counts = np.unique([a.origin.client for a in taken], return_counts=True)
    assert counts == pytest.approx([1500, 1500], rel=0.1)
    pairs = [(int(a.origin.client[-1]), a.origin.priority) for a in taken]
    found, counts = np.unique(pairs, axis=0, return_counts=True)
    assert found.tolist() == [list(pair) for pair in itertools.product((0, 1), (0, 1, 2))]
    assert counts == pytest.approx([500] * 6, rel=0.15)
    assert {a.origin.client for a in take_all(opened("synthetic", **settings))} == {""}


NUMBERS = [
    (axis, stem, name)
    for axis in ("arrivals", "lengths", "content")
    for stem in stems(f"workload/{axis}")
    for name in yaml_values(f"workload/{axis}", stem)
    if name not in ("path", "column")
]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1, 1e12, True, "3"], ids=str)
@pytest.mark.parametrize(("axis", "stem", "name"), NUMBERS, ids=str)
def test_settings_that_no_one_can_mean_are_refused(axis, stem, name, value):
    path = {"path": "x.csv"} if stem in FROM_A_FILE else {}
    with pytest.raises(ValueError, match=f"{name} must be") as raised:
        part(axis, stem, **path, **{name: value})
    assert repr(value) in str(raised.value)


@pytest.mark.parametrize(
    "name", ["num_requests", "num_clients", "client_exponent", "num_priorities"]
)
@pytest.mark.parametrize("value", [float("nan"), -1, 1e12, True, "3"], ids=str)
def test_numbers_of_a_synthetic_workload_are_checked(name, value):
    with pytest.raises(ValueError, match=f"{name} must be"):
        opened("synthetic", **{name: value})

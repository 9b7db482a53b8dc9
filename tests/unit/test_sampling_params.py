"""Every range, at both of its ends and beyond, and the values that compare with nothing."""

import dataclasses
import math

import pytest

from paxserve.sampling_params import SamplingParams

REJECTED = [
    *[("temperature", v) for v in (-0.1, 2.001, math.nan, math.inf, -math.inf, True, "1", None)],
    *[("top_k", v) for v in (-2, 2**31, 1.5, math.nan, True, "3", None)],
    *[("top_p", v) for v in (0, 0.0, -0.1, 1.0001, math.nan, math.inf, True, "0.5", None)],
    *[("min_p", v) for v in (-0.001, 1.001, math.nan, math.inf, False, "0", None)],
    *[("seed", v) for v in (-1, 2**32, 1.0, math.nan, True, "7")],
    *[("max_tokens", v) for v in (0, -1, 2**31, 1.0, math.inf, math.nan, True, "4")],
    *[("min_tokens", v) for v in (-1, 17, 1.0, math.nan, False, "1", None)],
    *[("logprobs", v) for v in (-1, 21, 1.0, math.nan, True, "2")],
    *[("n", v) for v in (0, -1, 1.0, True, "1", None)],
    *[("ignore_eos", v) for v in (0, 1, "yes", None)],
    *[("include_stop_str_in_output", v) for v in (0, "no", None)],
    *[("skip_special_tokens", v) for v in (1, "no", None)],
    *[("stop", v) for v in ("", ["a", ""], [1], [None], ["x"] * 17)],
    *[("stop_token_ids", v) for v in ([-1], [1.5], [True], ["1"], [None], [math.nan])],
]
ACCEPTED = [
    *[("temperature", v) for v in (0, 0.0, 1e-9, 2, 2.0)],
    *[("top_k", v) for v in (-1, 0, 1, 2**31 - 1)],
    *[("top_p", v) for v in (1e-9, 1, 1.0)],
    *[("min_p", v) for v in (0, 0.0, 1, 1.0)],
    *[("seed", v) for v in (None, 0, 2**32 - 1)],
    *[("max_tokens", v) for v in (1, 2**31 - 1, None)],
    *[("min_tokens", v) for v in (0, 1, 16)],
    *[("logprobs", v) for v in (None, 0, 20)],
    *[("ignore_eos", v) for v in (True, False)],
    *[("stop_token_ids", v) for v in ((0,), (2**40,))],
]


@pytest.mark.parametrize(("name", "value"), REJECTED, ids=str)
def test_value_out_of_range_is_refused_by_name(name, value):
    with pytest.raises(ValueError, match=name):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(("name", "value"), ACCEPTED, ids=str)
def test_value_at_the_end_of_its_range_is_kept(name, value):
    assert getattr(SamplingParams(**{name: value}), name) == value


def test_several_sequences_are_samples_or_beams():
    assert SamplingParams(n=3).num_sequences == 3
    assert SamplingParams(beam_width=4, temperature=0).num_sequences == 4
    for wrong, message in (
        ({"n": 2, "temperature": 0}, "n=2 with temperature=0: greedy samples are all the same"),
        ({"n": 2, "beam_width": 2, "temperature": 0}, "n=2 with beam_width=2: choose one"),
        ({"beam_width": 2}, "beam_width=2 needs temperature=0, got 1"),
        ({"beam_width": 2, "temperature": 0, "logprobs": 1}, "neither logprobs nor stop strings"),
    ):
        with pytest.raises(ValueError, match=message):
            SamplingParams(**wrong)


def test_min_tokens_is_bounded_by_max_tokens_if_there_is_one():
    assert SamplingParams(min_tokens=4, max_tokens=4).min_tokens == 4
    assert SamplingParams(min_tokens=10**6, max_tokens=None).min_tokens == 10**6
    with pytest.raises(ValueError, match="min_tokens must be an integer from 0 to 3, got 4"):
        SamplingParams(min_tokens=4, max_tokens=3)


def test_stops_take_the_form_of_tuples():
    assert SamplingParams(stop="end").stop_strings == ("end",)
    assert SamplingParams(stop=["a", "b"]).stop_strings == ("a", "b")
    assert SamplingParams(stop=["x"] * 16).stop_strings == ("x",) * 16
    assert SamplingParams(stop=None, stop_token_ids=None).stop_strings == ()
    assert SamplingParams(stop_token_ids=[3, 4]).stop_token_ids == (3, 4)


def test_caller_s_list_is_not_kept():
    stops = ["a"]
    params = SamplingParams(stop=stops)
    stops.append("b")
    assert params.stop_strings == ("a",)


def test_parameters_cannot_be_changed_afterwards():
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().temperature = 5.0

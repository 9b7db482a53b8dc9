"""Workload files: what a line may say, and how a bad one is reported."""

import json

import pytest
from workload_builders import opened, take_all

from paxserve.compose import load


def read(tmp_path, *lines, **settings):
    path = tmp_path / "w.jsonl"
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    path.write_text(text, encoding="utf-8")
    return take_all(opened("jsonl", path=str(path), **settings))


def test_every_kind_of_content_and_field(tmp_path):
    chat = [{"role": "user", "content": "hi"}]
    first, second, third = read(
        tmp_path,
        {"prompt": "one\u2028line", "arrival_s": 2, "extra": 1},
        "",
        {"messages": chat, "output_len": 7, "id": "m", "arrival_s": 0.5},
        {"prompt_token_ids": [1, 2], "max_tokens": 3, "output_len": 9, "seed": 4},
    )
    assert (first.prompt_token_ids, first.max_tokens, first.seed) == ((1, 2), 3, 4)
    assert (second.messages, second.max_tokens, second.request_id) == (tuple(chat), 7, "m")
    assert (third.prompt, third.arrival_s, third.request_id) == ("one\u2028line", 2.0, "0")


def test_who_asks(tmp_path):
    one, other = read(
        tmp_path,
        {"prompt": "x", "client": "ann", "priority": -2, "ignore_eos": True},
        {"prompt": "y"},
    )
    assert (one.origin.client, one.origin.priority, one.ignore_eos) == ("ann", -2, True)
    assert (other.origin.client, other.origin.priority, other.ignore_eos) == ("", 0, None)


def test_raw_line_separators_inside_a_text_and_a_byte_order_mark(tmp_path):
    line = json.dumps({"prompt": "a\u2028b\u0085c"}, ensure_ascii=False)
    (only,) = read(tmp_path, "\ufeff" + line)
    assert only.prompt == "a\u2028b\u0085c"


def test_limit_and_scale(tmp_path):
    lines = [{"prompt": "x", "arrival_s": i} for i in range(5)]
    assert [a.arrival_s for a in read(tmp_path, *lines, limit=3, arrival_scale=0.5)] == [0, 0.5, 1]
    assert {a.arrival_s for a in read(tmp_path, *lines, arrival_scale=0)} == {0}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "is not JSON"),
        ("[1]", "must hold an object"),
        ({}, "exactly one of"),
        ({"prompt": "x", "messages": []}, "exactly one of"),
        ({"prompt": 5}, "prompt must be a string"),
        ({"messages": "x"}, "messages must be a list of objects"),
        ({"prompt_token_ids": [True]}, "must be a list of integers"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens must be an integer from 1"),
        ({"prompt": "x", "max_tokens": 2**31}, "max_tokens must be an integer from 1"),
        ({"prompt": "x", "output_len": 1.5}, "output_len must be an integer"),
        ({"prompt": "x", "seed": -1}, "seed must be an integer from 0"),
        ({"prompt": "x", "arrival_s": -1}, "arrival_s must be a number from 0"),
        ('{"prompt": "x", "arrival_s": NaN}', "arrival_s must be a number from 0"),
        ({"prompt": "x", "id": "0"}, "id '0' comes twice"),
        ({"prompt": "x", "ignore_eos": 1}, "ignore_eos must be true or false"),
        ({"prompt": "x", "client": 7}, "client must be a string"),
        ({"prompt": "x", "priority": 0.5}, "priority must be an integer"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, words):
    with pytest.raises(ValueError, match=r"w\.jsonl line 2") as raised:
        read(tmp_path, {"prompt": "good"}, line)
    assert words in str(raised.value)


@pytest.mark.parametrize("name", ["demo", "jsonl"])
@pytest.mark.parametrize(
    "settings",
    [{"limit": -1}, {"limit": "x"}, {"arrival_scale": float("nan")}, {"arrival_scale": -1}],
)
def test_settings_out_of_range_are_refused(name, settings):
    path = {"path": "w.jsonl"} if name == "jsonl" else {}
    with pytest.raises(ValueError, match=next(iter(settings))):
        load("workload", name, settings | path)


def test_the_demo_has_48_conversations_over_40_seconds():
    arrivals = take_all(opened("demo"))
    assert len({arrival.request_id for arrival in arrivals}) == 48
    assert all(arrival.messages and arrival.max_tokens for arrival in arrivals)
    assert arrivals[0].arrival_s == 0 < arrivals[-1].arrival_s < 41

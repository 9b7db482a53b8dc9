"""Recorded workloads: what each format becomes, what a bad row says, and the real files."""

import json
import math
from itertools import accumulate, batched, takewhile

import numpy as np
import pytest
from axes import stems
from workload_builders import (
    AZURE,
    VIDUR,
    VTC,
    make,
    measured_line,
    mooncake_line,
    needs_data,
    opened,
    part,
    sharegpt_item,
    take_all,
    trace_file,
    words,
    write_lines,
)

from paxserve.traces import json_array
from paxserve.workload import Vocabulary

DATE = "2023-11-16 18:17:0"
TEXTS = Vocabulary(100, words)


def seen(arrivals):
    return [(a.arrival_s, len(a.prompt_token_ids), a.max_tokens, a.origin.client) for a in arrivals]


# What the formats say.


def test_azure(tmp_path):
    rows = [f"{DATE}3.9799600,48,10", "", f"{DATE}4.0319600,31,8", f"{DATE}9.0,5,7"]
    path = write_lines(tmp_path / "a.csv", AZURE, *rows)
    arrivals = take_all(opened("azure", path=path))
    assert [a.arrival_s for a in arrivals] == pytest.approx([0, 0.052, 5.02004], abs=1e-5)
    assert [row[1:] for row in seen(arrivals)] == [(48, 10, ""), (31, 8, ""), (5, 7, "")]
    assert all(a.ignore_eos and a.origin.num_true_output_tokens == a.max_tokens for a in arrivals)
    faster = opened("azure", path=path, limit=2, arrivals=part("arrivals", "trace", scale=0.1))
    assert [a.arrival_s for a in take_all(faster)] == pytest.approx([0, 0.0052], abs=1e-5)


def test_a_file_without_times_wants_other_arrivals(tmp_path):
    path = write_lines(tmp_path / "n.csv", AZURE, "XXX,48,10", "XXX,31,8")
    with pytest.raises(ValueError, match="no recorded times: choose other arrivals"):
        opened("azure", path=path)
    once = opened("azure", path=path, arrivals=part("arrivals", "all_at_once"))
    assert seen(take_all(once)) == [(0, 48, 10, ""), (0, 31, 8, "")]


def test_vidur_and_vtc(tmp_path):
    path = write_lines(tmp_path / "v.csv", VIDUR, "7564.0,192.0,39.4", "3,1,3")
    assert seen(take_all(opened("vidur", path=path))) == [(0, 7564, 192, ""), (0, 3, 1, "")]
    path = write_lines(tmp_path / "f.csv", VTC, "0.0,ann,13,19", '2.5,"b,c",3,1')
    assert seen(take_all(opened("vtc", path=path))) == [(0, 13, 19, "ann"), (2.5, 3, 1, "b,c")]


def test_other_content_for_a_trace(tmp_path):
    path = write_lines(tmp_path / "v.csv", VIDUR, "7,2,1", "3,1,3")
    content = part("content", "shared_prefix", num_groups=1, prefix_tokens=4)
    first, second = take_all(opened("vidur", path=path, content=content))
    assert first.prompt_token_ids[:4] == second.prompt_token_ids[:4]
    assert (len(first.prompt_token_ids), len(second.prompt_token_ids)) == (11, 7)


def test_mooncake_blocks_become_shared_prefixes(tmp_path):
    lines = [
        mooncake_line(0, 1200, 10, (5, 6, 7)),
        mooncake_line(1500, 1024, 1, (5, 6)),
        mooncake_line(1500, 600, 21, (5, 8)),
    ]
    path = write_lines(tmp_path / "m.jsonl", *lines)
    a, b, c = take_all(opened("mooncake", path=path))
    assert seen((a, b, c)) == [(0, 1200, 10, ""), (1.5, 1024, 1, ""), (1.5, 600, 21, "")]
    assert a.prompt_token_ids[:1024] == b.prompt_token_ids
    assert a.prompt_token_ids[:512] == c.prompt_token_ids[:512]
    assert a.prompt_token_ids[512:600] != c.prompt_token_ids[512:]
    small = take_all(opened("mooncake", path=path, block_tokens=64, scale_output=0.1))
    # 2 blocks and 176 of 512 of a third: 22 of 64; 88 of 512: 11.
    assert seen(small) == [(0, 150, 1, ""), (1.5, 128, 1, ""), (1.5, 75, 2, "")]
    assert small[0].prompt_token_ids[:128] == small[1].prompt_token_ids
    assert small[0].prompt_token_ids[:64] == small[2].prompt_token_ids[:64]


def test_measured_runs(tmp_path):
    lines = (measured_line(), measured_line(1787267982.58, 3, 1))
    path = write_lines(tmp_path / "r.jsonl", *lines)
    first, second = take_all(opened("llmservingsim", path=path))
    assert seen((first, second)) == [(0, 2358, 531, ""), (pytest.approx(2.5, abs=1e-6), 3, 1, "")]
    assert first.ignore_eos
    assert len(take_all(opened("llmservingsim", path=path, limit=1))) == 1


def test_vllm_bench_prompts(tmp_path):
    lines = [
        '{"prompt": "a b", "output_tokens": 4, "other": 1}',
        '{"prompt": "c", "output_tokens": 1}',
    ]
    path = write_lines(tmp_path / "b.jsonl", *lines)
    arrivals = take_all(opened("vllm_bench", path=path, arrivals=part("arrivals", "poisson")))
    assert [(a.prompt, a.max_tokens, a.ignore_eos) for a in arrivals] == [
        ("a b", 4, True), ("c", 1, True)]  # fmt: skip
    assert arrivals[0].arrival_s < arrivals[1].arrival_s
    assert len(take_all(opened("vllm_bench", path=path, limit=1))) == 1


# ShareGPT.

ITEMS = [
    sharegpt_item("one two three four", "five six seven eight nine", "more", "x"),
    sharegpt_item(),
    sharegpt_item("alone, without an answer"),
    sharegpt_item("too short", "a b c d"),
    sharegpt_item("w " * 30, "a b c d"),
    sharegpt_item('quotes " and \\ and { [ } \n lines', "e f g h"),
]
KEPT = [("one two three four", 5), ('quotes " and \\ and { [ } \n lines', 4)]


def sharegpt(tmp_path, text, **settings):
    (tmp_path / "s.json").write_text(text, encoding="utf-8")
    bounds = {"max_input_tokens": 20, "max_total_tokens": 60} | settings
    path = str(tmp_path / "s.json")
    arrivals = take_all(opened("sharegpt", path=path, vocabulary=TEXTS, **bounds))
    return [(a.prompt, a.max_tokens) for a in arrivals]


@pytest.mark.parametrize("num_chars", [1, 7, 64, 2**20])
@pytest.mark.parametrize("indent", [None, 2])
def test_sharegpt_is_read_piece_by_piece_and_filtered(tmp_path, monkeypatch, num_chars, indent):
    monkeypatch.setattr(json_array, "NUM_CHARS", num_chars)
    text = json.dumps(ITEMS, indent=indent)
    assert sharegpt(tmp_path, text) == KEPT
    assert sharegpt(tmp_path, text, limit=1) == KEPT[:1]
    assert sharegpt(tmp_path, text, min_tokens=1, max_total_tokens=6) == [("too short", 4)]
    assert sharegpt(tmp_path, text, max_input_tokens=None)[1] == ("w " * 30, 4)


def test_a_file_cut_off_anywhere_gives_its_whole_items_and_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(json_array, "NUM_CHARS", 16)
    items = [{"a": 1.5, "b": [True, "\u00e9\n"]}, {"c": None, "d": {"e": "}]"}}, {"f": -1e9}]
    text = json.dumps(items)
    path = tmp_path / "cut.json"
    ends = [i + 1 for i in range(len(text)) if _is_whole(text[1 : i + 1])]
    assert len(ends) == 3
    for length in range(1, len(text)):
        path.write_text(text[:length])
        with pytest.warns(UserWarning, match="cut off") as warned:
            found = [item for _, item in json_array.read_json_array(str(path))]
        num_whole = sum(end <= length for end in ends)
        assert found == items[:num_whole], text[:length]
        assert f"its {num_whole} whole items" in str(warned[0].message)


def _is_whole(text):
    try:
        return bool(json.loads(f"[{text}]")) and text.endswith("}")
    except json.JSONDecodeError:
        return False


def test_only_as_much_of_a_long_file_is_read_as_is_needed(tmp_path, monkeypatch):
    monkeypatch.setattr(json_array, "NUM_CHARS", 4096)
    good = json.dumps([ITEMS[0]] * 200)[:-1]
    assert len(sharegpt(tmp_path, good + ", wrong]", limit=100)) == 100
    with pytest.raises(ValueError, match=r"s\.json line 1 must have \{ here, got 'w'"):
        sharegpt(tmp_path, good + ", wrong]")


def test_sharegpt_needs_a_tokenizer(tmp_path):
    with pytest.raises(ValueError, match="workload=sharegpt needs a model with a tokenizer"):
        opened("sharegpt", path="s.json")


# Bad rows: file, line, field and value are named, in every format.


def csv_cases(stem, header, good, column):
    index = header.split(",").index(column)
    for value in ("x", "nan", "inf", "-3", "0", "1.5", "10000001", "1e300", ""):
        row = good.split(",")
        row[index] = value
        yield stem, [header, good, ",".join(row)], 3, column, repr(value)
    if index:  # else the row would be empty, and skipped
        yield stem, [header, good, ",".join(good.split(",")[:index])], 3, column, "is missing"
    names = header.split(",")
    yield stem, [",".join(n for n in names if n != column), good], 1, column, "there are"


def time_cases(stem, header, later, earlier, column, values):
    index = header.split(",").index(column)
    yield stem, [header, later, earlier], 3, column, f"goes back: {earlier.split(',')[index]!r}"
    for value in values:
        row = later.split(",")
        row[index] = value
        yield stem, [header, later, ",".join(row)], 3, column, repr(value)


def json_cases(stem, good, name, values):
    for value in values:
        row = json.dumps(json.loads(good) | {name: value})
        yield stem, [good, row], 2, name, repr(value)
    row = json.loads(good)
    del row[name]
    yield stem, [good, json.dumps(row)], 2, name, "is missing"


NOT_COUNTS = ("3", math.nan, math.inf, -3, 0, 1.5, 10**7 + 1, True, None, [1])
NOT_TIMES = ("3", math.nan, math.inf, -1, True, None)
BENCH = '{"prompt": "a", "output_tokens": 4}'
JSONL = '{"id": "good", "prompt": "a", "max_tokens": 4}'


def bad_rows():
    for column in ("ContextTokens", "GeneratedTokens"):
        yield from csv_cases("azure", AZURE, f"{DATE}3.9,48,10", column)
    for column in ("num_prefill_tokens", "num_decode_tokens"):
        yield from csv_cases("vidur", VIDUR, "48,10,4.8", column)
        yield from csv_cases("vtc", VTC, "3.9,ann,48,10", column)
    dates = ("XXX", "nan", "2023-13-01 00:00:00", "3.9", "")
    yield from time_cases("azure", AZURE, f"{DATE}3.9,4,1", f"{DATE}3.8,4,1", "TIMESTAMP", dates)
    seconds = ("x", "nan", "inf", "-1", "")
    yield from time_cases("vtc", VTC, "3.9,ann,4,1", "3.8,ann,4,1", "arrived_at_s", seconds)
    for name in ("input_length", "output_length"):
        yield from json_cases("mooncake", mooncake_line(), name, NOT_COUNTS)
    yield from json_cases("mooncake", mooncake_line(), "timestamp", NOT_TIMES)
    yield from json_cases("mooncake", mooncake_line(), "hash_ids", ("x", [1, -2], [1, "2"], [1.5]))
    yield "mooncake", [mooncake_line(hash_ids=(1,))], 1, "hash_ids", "has 1 ids"
    earlier = mooncake_line(timestamp=499)
    yield "mooncake", [mooncake_line(timestamp=500), earlier], 2, "timestamp", "goes back: 499"
    for name in ("input_toks", "output_toks"):
        yield from json_cases("llmservingsim", measured_line(), name, NOT_COUNTS)
    yield from json_cases("llmservingsim", measured_line(), "arrival_time", NOT_TIMES)
    yield from json_cases("vllm_bench", BENCH, "output_tokens", NOT_COUNTS)
    yield from json_cases("vllm_bench", BENCH, "prompt", (3, None, ["a"]))
    for stem, good in (("mooncake", mooncake_line()), ("vllm_bench", BENCH), ("jsonl", JSONL)):
        yield stem, [good, "", "{"], 3, "is not JSON", ""
        yield stem, [good, "[1]"], 2, "must hold an object", "[1]"
    yield "jsonl", [JSONL, '{"prompt": "x", "max_tokens": -4}'], 2, "max_tokens", "-4"
    item = json.dumps(sharegpt_item("a b c d", "e f g h"))
    wrong = (
        ({}, "conversations", "is missing"),
        ({"conversations": "x"}, "conversations", "'x'"),
        ({"conversations": ["x", "y"]}, "conversations", "['x', 'y']"),
        ({"conversations": [{"from": "human"}]}, "value", "is missing"),
        (sharegpt_item("a b c d", 5), "value", "5"),
    )
    for value, name, shown in wrong:
        yield "sharegpt", ["[", item, ",", json.dumps(value), "]"], 4, name, shown
    yield "sharegpt", ["[", item, ",", "5", "]"], 4, "must have {", "'5'"
    yield "sharegpt", ["[", item, item, "]"], 3, "must have ,", "'{'"
    yield "sharegpt", ["[", item, ",", '{"a": nul, "b": "not the end"}', "]"], 4, "is not JSON", ""
    yield "sharegpt", ["{", "}"], 1, "must have [", "'{'"


@pytest.mark.parametrize(("stem", "lines", "line", "name", "shown"), list(bad_rows()), ids=str)
def test_a_bad_row_is_named(tmp_path, monkeypatch, stem, lines, line, name, shown):
    monkeypatch.setattr(json_array, "NUM_CHARS", 8)
    path = write_lines(tmp_path / "bad.txt", *lines)
    arrivals = {} if stem == "jsonl" else {"arrivals": part("arrivals", "all_at_once")}
    with pytest.raises(ValueError, match=rf"bad\.txt line {line}\b") as raised:
        opened(stem, path=path, vocabulary=TEXTS, **arrivals)
    assert name in str(raised.value)
    assert shown in str(raised.value)


FROM_FILES = [stem for stem in stems("workload") if stem not in ("demo", "synthetic")]


@pytest.mark.parametrize("stem", FROM_FILES)
def test_files_that_cannot_be_read(tmp_path, stem):
    for path in (tmp_path / "missing", tmp_path):
        with pytest.raises(FileNotFoundError, match="workload file"):
            opened(stem, path=str(path), vocabulary=TEXTS)
    (tmp_path / "latin").write_bytes(b'["\xe9"]\n1,2,3\n')
    with pytest.raises(ValueError, match="latin is not UTF-8"):
        opened(stem, path=str(tmp_path / "latin"), vocabulary=TEXTS)


@pytest.mark.parametrize("stem", FROM_FILES)
@pytest.mark.parametrize("settings", [{"limit": -1}, {"limit": "x"}, {"limit": True}, {"path": 5}])
def test_settings_of_a_file_are_checked(stem, settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        make(stem, **({"path": "x"} | settings))


@pytest.mark.parametrize("block_tokens", [0, 513, 1.5, True])
def test_mooncake_blocks_only_shrink(block_tokens):
    with pytest.raises(ValueError, match="block_tokens must be an integer from 1 to 512"):
        make("mooncake", path="x", block_tokens=block_tokens)


# The real files.


@needs_data
@pytest.mark.parametrize(
    ("stem", "file", "num_rows", "means", "last_s"),
    [
        ("azure", "azure2023/AzureLLMInferenceTrace_code.csv", 8819, (2047.8, 27.9), 3436),
        ("azure", "azure2023/AzureLLMInferenceTrace_conv.csv", 19366, (1154.7, 211.1), 3502),
        ("azure", "nanoflow/sharegpt.csv", 58787, (298.8, 323.7), None),
        ("azure", "nanoflow/lmsys.csv", 100000, (92.2, 207.4), None),
        ("vidur", "vidur/arxiv_summarization_stats_llama2_tokenizer_filtered_v2.csv",
         28257, (2588.1, 291.4), None),
        ("vidur", "vattention/arxiv_sample.csv", 2895, (10041.0, 471.4), None),
        ("vidur", "vattention/arxiv_long_online.csv", 10111, (29567.5, 363.2), None),
        ("vtc", "vtc/vtc_real_trace.csv", 1500, (136.3, 256.2), 600),
        ("mooncake", "mooncake/conversation_trace.jsonl", 12031, (12035, 342.6), 3537),
        ("mooncake", "mooncake/synthetic_trace.jsonl", 3993, (15325, 149.1), 1022),
        ("llmservingsim", "llmservingsim/vllm_measured/RTX4090_Llama-3.1-8B/requests.jsonl",
         300, (857.5, 652.5), 29),
        ("llmservingsim", "llmservingsim/vllm_measured/RTXPRO6000_Qwen3-32B/requests.jsonl",
         300, (862.3, 665.0), 29),
    ],
)  # fmt: skip
def test_rows_and_means_of_the_real_files(stem, file, num_rows, means, last_s):
    arrivals = part("arrivals", "all_at_once") if last_s is None else part("arrivals", "trace")
    source = opened(stem, path=trace_file(file), arrivals=arrivals)
    assert source.num_requests == num_rows
    known = source._requests
    found = np.mean([(one.num_prompt_tokens, one.num_output_tokens) for one in known], axis=0)
    assert found == pytest.approx(means, abs=0.5)
    if last_s is not None:
        assert known[-1].arrival_s == pytest.approx(last_s, abs=1)
        assert source.next_s() == 0


@needs_data
def test_clients_of_the_arena():
    arrivals = take_all(opened("vtc", path=trace_file("vtc/vtc_real_trace.csv")))
    _, counts = np.unique([a.origin.client for a in arrivals], return_counts=True)
    assert len(counts) == 27
    assert sorted(counts, reverse=True)[:5] == [296, 262, 199, 120, 67]


@needs_data
def test_the_two_sharegpt_filters_of_vllm():
    path = trace_file("nanoflow/sharegpt.csv")
    settings = {"max_total_tokens": 2048, "scale_input": 1.043, "scale_output": 1.063}
    paper = part("lengths", "empirical", path=path, **settings)
    drawn = np.array(paper.draw(50_000, np.random.default_rng(0)))
    assert drawn.mean(axis=0) == pytest.approx((161.31, 337.99), rel=0.02)
    assert drawn.sum(axis=1).max() == 2048
    bench = part("lengths", "empirical", path=path, min_tokens=4, max_input_tokens=1024,
                 max_total_tokens=2048)  # fmt: skip
    drawn = np.array(bench.draw(50_000, np.random.default_rng(0)))
    assert drawn.mean(axis=0) == pytest.approx((110.6, 328.3), rel=0.02)


def num_hits(prompts):
    """Leading blocks found in an endless cache, and all blocks."""
    cached, hits, blocks = set(), 0, 0
    for prompt in prompts:
        chains = list(accumulate(prompt, lambda parent, block: hash((parent, block)), initial=0))
        hits += len(list(takewhile(cached.__contains__, chains[1:])))
        blocks += len(prompt)
        cached.update(chains)
    return hits, blocks


@needs_data
@pytest.mark.parametrize(("file", "share"), [("conversation", 0.366), ("synthetic", 0.640)])
def test_mooncake_prompts_share_what_the_trace_says(file, share):
    path = trace_file(f"mooncake/{file}_trace.jsonl")
    with open(path, encoding="utf-8") as lines:
        hash_ids = [json.loads(line)["hash_ids"] for line in lines]
    hits, blocks = num_hits(hash_ids)
    assert hits / blocks == pytest.approx(share, abs=0.0006)
    wide = Vocabulary(2**31)  # tails of one token are not alike by chance
    source = opened("mooncake", path=path, limit=700, block_tokens=3, vocabulary=wide)
    prompts = [arrival.prompt_token_ids for arrival in take_all(source)]
    in_blocks = [list(batched(prompt, 3)) for prompt in prompts]
    assert num_hits(in_blocks) == num_hits(hash_ids[:700])

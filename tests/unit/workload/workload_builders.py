"""Workloads as their config files describe them, and what comes out of their sources."""

import json
import os
from pathlib import Path

import pytest
from axes import policy_class, yaml_values

from paxserve.workload import Vocabulary

VOCABULARY = Vocabulary(1000)
DATA = os.environ.get("PAXSERVE_DATA")
needs_data = pytest.mark.skipif(not DATA, reason="PAXSERVE_DATA is not set: no real traces")


def trace_file(name):
    return str(Path(DATA) / "traces" / name)


def part(axis, stem, **settings):
    """A choice of one of the smaller axes."""
    values = yaml_values(f"workload/{axis}", stem) | settings
    return policy_class(f"workload/{axis}", stem)(**values)


def make(stem, **settings):
    """A workload; the smaller axes by their default choices unless objects are given."""
    values = yaml_values("workload", stem) | settings
    for axis in ("arrivals", "lengths", "content"):
        if isinstance(values.get(axis), str):
            values[axis] = part(axis, values[axis])
    return policy_class("workload", stem)(**values)


def opened(stem, seed=0, vocabulary=VOCABULARY, **settings):
    return make(stem, **settings).open(seed=seed, vocabulary=vocabulary)


def take_all(source):
    """Every arrival of an open loop; nothing is ever told to have ended."""
    taken = []
    while source.next_s() is not None:
        taken.append(source.take())
        assert len(taken) <= source.num_requests
    return taken


def words(text):
    """A tokenizer: a word is a token, its length the id."""
    return [len(word) for word in text.split()]


def write_lines(path, *lines):
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return str(path)


# One small file per format that has one: header or opening, good rows, what follows.
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens"
VIDUR = "num_prefill_tokens,num_decode_tokens,pd_ratio"
VTC = "arrived_at_s,client,num_prefill_tokens,num_decode_tokens"


def mooncake_line(timestamp=0, input_length=600, output_length=5, hash_ids=(1, 2)):
    fields = {"timestamp": timestamp, "input_length": input_length}
    return json.dumps(fields | {"output_length": output_length, "hash_ids": list(hash_ids)})


def measured_line(arrival_time=1787267980.08, input_toks=2358, output_toks=531):
    fields = {"request_id": "bench-0", "input_toks": input_toks, "output_toks": output_toks}
    return json.dumps(fields | {"arrival_time": arrival_time, "queued_ts": 27536.66})


def sharegpt_item(*values):
    return {"id": "x", "conversations": [{"from": "human", "value": value} for value in values]}

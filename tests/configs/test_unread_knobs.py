"""A setting that nothing reads with the choices made stops the run, and the error names it.

What was applied is in `engine.json`, read back from the engine and not from what was asked for.
"""

import json
import sys

import pytest

from paxserve.cli import main

REQUEST = '{"prompt_token_ids": [5, 6, 7], "max_tokens": 4}\n'
SIZES = ("executor=scripted", "limits.max_model_len=32", "limits.num_blocks_override=9",
         "limits.max_num_seqs=4", "limits.max_num_batched_tokens=32", "workload=jsonl",
         "workload.path=requests.jsonl")  # fmt: skip
SWAP = ("preemption=swap", "limits.num_host_blocks_override=5")


@pytest.fixture(autouse=True)
def workplace(tmp_path, monkeypatch):
    (tmp_path / "requests.jsonl").write_text(REQUEST)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["paxserve"])
    return tmp_path


UNREAD = [
    # What is set, with what, and what would read it.
    ("eviction=lfu", [], ["prefix_cache=radix"]),
    ("victim=most_blocks", ["reservation=max"], ["reservation=on_demand"]),
    ("victim=most_blocks", ["reservation=max"],
     ["reservation=max", "limits.preempt_every_steps=3"]),
    ("victim=newest", ["reservation=max"], ["reservation=max", "admission=srpt"]),
    ("preemption=recompute", ["reservation=max"], []),
    ("preemption.swap_s_per_block=0.1", ["reservation=max", *SWAP[1:], "preemption=cheapest"],
     ["preemption=cheapest", *SWAP[1:]]),
    ("limits.num_host_blocks_override=5", [], SWAP[:1]),
    ("limits.swap_space_gib=1", [], SWAP),
    ("executor.kv_bytes_per_token=8", [], SWAP),
    ("sampling.top_p=0.5", ["sampling=greedy"], ["sampling=random"]),
    ("sampling.top_k=3", ["sampling=greedy"], ["sampling=random"]),
    ("sampling.seed=3", ["sampling=greedy"], ["sampling=random"]),
    ("sampling.length_penalty=2", ["sampling=random"], ["sampling=beam"]),
    ("sampling.logprobs=2", [], None),
    ("limits.memory_utilization=0.5", [], None),
    ("limits.kv_cache_memory_bytes=100000", [], None),
    ("limits.tensor_parallel_size=2", [], None),
    ("limits.kv_cache_dtype=int8", [], None),
    ("limits.row_buckets=[4]", [], None),
    ("limits.token_buckets=[4]", [], None),
    ("kernel=xla", [], None),
    ("model=tiny", [], None),
    ("model.dtype=float32", [], None),
]  # fmt: skip


def override(knob: str) -> str:
    """Not every file of sampling settings has every key."""
    return f"++{knob}" if knob.startswith("sampling.") else knob


@pytest.mark.parametrize(
    ("knob", "where", "reader"), UNREAD, ids=[" ".join([k, *w]) for k, w, _ in UNREAD]
)
def test_what_nothing_reads_is_an_error_that_names_it(workplace, capsys, knob, where, reader):
    assert main(["run", *SIZES, *where, override(knob), "run_dir=a"]) == 2
    err = capsys.readouterr().err
    name = knob.split("=")[0]
    assert f"{name} was set, but nothing reads it" in err or f", {name}" in err, err
    assert not (workplace / "a" / "complete").exists()
    if reader is not None:
        assert main(["run", *SIZES, *reader, override(knob), "run_dir=b"]) == 0


def test_the_engine_says_what_it_runs_with(workplace):
    asked = ("gate=[watermark,token_ratio]", "gate.watermark.share=0.05", "prefix_cache=radix",
             "eviction=lfu", *SWAP, "limits.preempt_every_steps=3", "limits.block_size=8",
             "admission=vtc", "admission.w_output=3")  # fmt: skip
    assert main(["run", *SIZES, *asked, "run_dir=a"]) == 0
    applied = json.loads((workplace / "a" / "engine.json").read_text())
    assert applied["limits"] == {
        "max_num_seqs": 4, "max_num_batched_tokens": 32, "max_model_len": 32, "block_size": 8,
        "num_blocks": 9, "num_host_blocks": 5, "preempt_every_steps": 3,
    }  # fmt: skip
    policies = applied["policies"]
    gates = [(gate["class"].split(":")[1], gate) for gate in policies["gates"]]
    assert [name for name, _ in gates] == ["Watermark", "TokenRatio"]
    assert (gates[0][1]["share"], gates[1][1]["initial"]) == (0.05, 0.7)
    assert policies["eviction"]["class"] == "paxserve.eviction.lfu:Lfu"
    assert policies["prefix_cache"]["publish"] == "after_step"
    assert (policies["admission"]["w_output"], policies["admission"]["w_input"]) == (3, 1.0)
    assert policies["preemption"]["class"].endswith(":Swap")


def test_a_gate_s_setting_without_the_gate_is_refused(capsys):
    assert main(["run", *SIZES, "gate=[watermark]", "+gate.watermark.window=3", "run_dir=a"]) == 2
    assert "gate=watermark does not read window; it reads share" in capsys.readouterr().err


REAL = ("model=tiny", "hardware=host-cpu", "limits.max_model_len=32", "limits.max_num_seqs=4",
        "limits.max_num_batched_tokens=32", "limits.num_blocks_override=9")  # fmt: skip
COMMANDS = {
    "plan": ("plan", "model=llama-3-8b"),
    "calibrate": ("calibrate", "--out=profile.json", *REAL),
    "fidelity": ("fidelity", "--calibrate", *REAL, *SIZES[-2:]),
    "verify": ("verify", *SIZES),
    "capacity": ("capacity", "--slo=p99_itl_ms=100", "--out=capacity", *SIZES[:-2],
                 "workload=synthetic"),
}  # fmt: skip
RECORDED = ("record=compact", "record_blocks=true", "goodput.ttft_ms=5", "run_dir=foo")
OF_NO_GROUP = [
    *[("plan", knob) for knob in ("seed=5", *RECORDED)],
    *[(name, knob) for name in ("calibrate", "fidelity", "verify") for knob in RECORDED],
    ("capacity", "run_dir=foo"),
]


@pytest.mark.parametrize(("command", "knob"), OF_NO_GROUP)
def test_a_command_refuses_a_key_of_no_group_that_it_does_not_read(capsys, command, knob):
    assert main([*COMMANDS[command], knob]) == 2
    assert f"{knob.split('=')[0]} was set, but nothing reads it" in capsys.readouterr().err


@pytest.mark.parametrize("knob", ["seed=5", *RECORDED])
def test_a_run_reads_every_key_of_no_group(knob):
    assert main(["run", *SIZES, knob]) == 0

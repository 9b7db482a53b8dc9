"""`paxserve plot`, `trace` and `buckets` at the command line."""

import gzip
import json
import sys

import pyarrow.parquet as pq
import pytest
import yaml
from real_builders import keep_compiled_programs
from saved_runs import serve

from paxserve.bucket_study import measured, study
from paxserve.cli import main
from paxserve.report.run_tables import RunTables

TINY = (
    "model=tiny", "workload=jsonl", "workload.path=requests.jsonl", "limits.max_num_seqs=2",
    "limits.max_model_len=32", "limits.max_num_batched_tokens=16", "limits.row_buckets=[2]",
    "limits.token_buckets=[16]", "sampling.ignore_eos=true",
)  # fmt: skip


@pytest.fixture(autouse=True)
def workplace(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["paxserve"])
    return tmp_path


@pytest.fixture
def cli(capsys):
    """Run a command line here: its exit code, standard output and standard error."""

    def run(*arguments):
        code = main(arguments)
        return code, *capsys.readouterr()

    return run


def test_plot_prints_what_it_wrote(cli, workplace):
    serve(workplace / "a", [1, 3])
    serve(workplace / "b", [1, 3])
    code, out, _ = cli("plot", "a", "b", "--out", "pictures", "--only", "kv", "--only", "memory")
    assert (code, out.split()) == (0, ["pictures/kv.png", "pictures/memory.png"])
    assert {path.name for path in (workplace / "pictures").iterdir()} == {"kv.png", "memory.png"}


def test_trace_is_written_beside_the_run(cli, workplace):
    serve(workplace / "a", [1, 3])
    code, out, _ = cli("trace", "a")
    trace = json.loads(gzip.decompress((workplace / "a" / "trace.json.gz").read_bytes()))
    assert code == 0
    assert f"a/trace.json.gz: {len(trace['traceEvents'])} events" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["plot", "nowhere"], "nowhere holds no finished run"),
        (["plot", "a", "--only", "kv2"], "no picture is called kv2"),
        (["plot", "a", "--only", "blocks"], "blocks.parquet does not exist"),
        (["trace", "nowhere"], "nowhere holds no finished run"),
        (["buckets", "nowhere", "--max-executables", "3"], "nowhere holds no finished run"),
        (["buckets", "a", "--max-executables", "1"], "max_shapes must be at least 2"),
        (["buckets", "a", "--max-executables", "3", "--row-weight", "-1"], "row_weight must be"),
        (["buckets", "a", "--max-executables", "3", "--rerun"], "batching is not one of"),
    ],
    ids=" ".join,
)
def test_mistakes_are_a_line(cli, workplace, arguments, words):
    serve(workplace / "a", [1, 3], choices={"batching": "Mine(k=3)"})
    code, _, err = cli(*arguments)
    assert code == 2
    assert err.startswith("paxserve: error: ")
    assert words in err
    assert err.count("\n") == 1


def test_buckets_of_a_run_without_padding_are_held_to_the_default_ladder(cli, workplace):
    run = serve(workplace / "a", [4, 4, 4], sizes={"max_num_batched_tokens": 32})
    assert run.steps["num_tokens"].tolist() == [6, 2, 2, 2, 3, 1, 1, 1]
    code, out, _ = cli("buckets", "a", "--max-executables", "4")
    assert code == 0
    assert "limits.row_buckets=[1,2]\nlimits.token_buckets=[6,32]\n" in out
    found = study(run, max_shapes=4, row_weight=1.0)
    assert [tuple(shape) for shape in found.own.shapes] == [(1, 1), (2, 2), (8, 2), (32, 2)]
    assert found.recorded.padded_tokens == 8 + 3 * 2 + 8 + 3
    assert found.predicted.padded_tokens == 6 + 3 * 2 + 6 + 3


def test_a_run_again_has_the_padding_that_was_predicted(cli, workplace):
    keep_compiled_programs()
    requests = [{"prompt_token_ids": [7] * n, "max_tokens": 4} for n in (9, 5, 5, 3)]
    (workplace / "requests.jsonl").write_text("".join(json.dumps(r) + "\n" for r in requests))
    assert cli("run", *TINY, "run_dir=first")[0] == 0
    code, out, _ = cli("buckets", "first", "--max-executables", "3", "--rerun", "--out", "second")
    assert code == 0
    assert "results: second" in out
    first, second = RunTables.read("first"), RunTables.read("second")
    found = study(first, max_shapes=3, row_weight=1.0)
    assert found.recorded == measured(first)
    assert found.predicted == measured(second)
    assert found.predicted.padded_tokens < found.recorded.padded_tokens
    for share in (found.recorded.token_share, found.predicted.token_share):
        assert f"{share:.1%}" in out
    chosen = yaml.safe_load((workplace / "second" / "config.yaml").read_text())
    assert tuple(chosen["limits"]["token_buckets"]) == found.plan.token_buckets
    assert second.engine["buckets"] == [list(b) for b in found.plan.buckets(found.limits).shapes]
    tokens = [
        pq.read_table(workplace / name / "requests.parquet")["output_token_ids"].to_pylist()
        for name in ("first", "second")
    ]
    assert tokens[0] == tokens[1]

"""The benchmark measures what it says, and the search for tiles goes on where it stopped."""

import dataclasses
import json
import subprocess
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from kernels_pallas import bench, bench_calls, bench_rows, support, tiles, timing, tune
from kernels_pallas.bench_rows import Row
from kernels_pallas.checkout import commit_of
from kernels_pallas.paged_attention import paged_attention, xla
from kernels_pallas.tiles import file_name, measured_tiles, tile_key
from kernels_pallas.timing import Timing, seconds_per_call

SHAPE = "smollm2-135m/decode_1x4k"


def test_a_call_is_timed_per_call():
    """More products take longer; a loop is not left out."""
    matrix = jnp.eye(256) * 0.5

    def calls(number):
        def call(x, matrix):
            for _ in range(number):
                x = x @ matrix
            return x

        return seconds_per_call(call, jnp.ones((256, 256)), matrix, num_rounds=5)

    one, four = calls(1), calls(4)
    assert four.least_s > 1.3 * one.least_s
    assert one.least_s <= one.median_s <= one.most_s
    assert one.num_rounds == 5
    assert one.num_calls > 1


def test_a_slow_call_is_cut_and_one_that_never_ends_in_time_is_not_measured(monkeypatch):
    """On a clock that the call itself moves."""
    calls = []

    def act(x):
        calls.append(x)
        return x

    def slow(x):
        return jax.pure_callback(act, x, x)

    clock = SimpleNamespace(perf_counter=lambda: 0.25 * len(calls))
    monkeypatch.setattr(timing, "time", clock)
    found = seconds_per_call(slow, jnp.ones(()), num_rounds=1000, limit_s=2.0)
    assert len(calls) == 8, "one that compiles, one that is not counted, and six rounds"
    assert found == Timing(0.25, 0.25, 0.25, 6, 1)
    calls.clear()
    with pytest.raises(TimeoutError, match=r"no round of num_calls=1 ended within limit_s=0.1"):
        seconds_per_call(slow, jnp.ones(()), limit_s=0.1)
    assert len(calls) == 1, "that which compiles"


def test_bench_prints_and_writes_every_kernel(tmp_path, capsys):
    file = tmp_path / "bench.json"
    assert bench.main(["--small", "--shapes", SHAPE, "--json", str(file)]) == 0
    found = json.loads(file.read_text("utf-8"))
    assert [row["kernel"] for row in found["rows"]] == [
        "xla, block 16",
        "xla, a block per request",
        "contiguous, xla",
    ]
    assert found["ceilings"]["copy_bytes_per_s"] > 1e8
    for row in found["rows"]:
        assert row["timing"]["median_s"] > 0
        assert row["num_bytes"] == bench.host_shape(bench.SHAPES[SHAPE].small()).kv_bytes
        assert row["is_small"]
    printed = capsys.readouterr().out
    assert printed.count("% of copy") == 3
    assert printed.count(f"{SHAPE} (small) (float32)") == 3
    ours, single, contiguous = found["rows"]
    assert [row["backend"] for row in found["rows"]] == ["xla", "xla", None]
    assert ours["problem"] == {
        "rows": [[1, 1, 93]], "num_heads": 6, "num_kv_heads": 2, "head_dim": 64, "block_size": 16,
        "max_model_len": 157, "sliding_window": None, "dtype": "float32", "kv_dtype": "float32",
    }  # fmt: skip
    assert single["problem"]["block_size"] == 128
    assert ours["tiles"] == dataclasses.asdict(xla.Tiles())
    assert contiguous["tiles"] is None
    commit = commit_of(Path(bench_rows.__file__))
    assert found["commit"] == (commit and commit._asdict())


def test_the_commit_of_a_file_and_whether_it_is_changed(tmp_path):
    def git(*arguments):
        own = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
        command = ["git", "-C", str(tmp_path), *own, *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    git("init", "--quiet")
    file = tmp_path / "code.py"
    file.write_text("x = 1\n")
    assert commit_of(file) is None
    git("add", "code.py")
    git("commit", "--quiet", "-m", "Code")
    assert commit_of(file) == (git("rev-parse", "HEAD"), False)
    file.write_text("x = 2\n")
    assert commit_of(file) == (git("rev-parse", "HEAD"), True)


def test_the_tiles_of_a_row_are_those_that_were_measured(monkeypatch):
    """As the call itself takes them from the device's table."""
    shape = bench.host_shape(bench.SHAPES[SHAPE].small())
    key = tile_key(
        *bench_calls.prepared_shapes(shape, "xla"),
        num_kv_heads=2,
        block_size=16,
        sliding_window=None,
    )
    table = {"xla": {key: {"1": {"item_tokens": 48}}}}
    monkeypatch.setattr(tiles, "_table", lambda kind: table)
    row = next(bench.bench([SHAPE], backend="xla", small=True))
    assert row.tiles == dataclasses.asdict(xla.Tiles(item_tokens=48))


def test_a_line_tells_what_replaced_the_named_shape_and_small_rates():
    shape = bench.SHAPES[SHAPE]
    one_ms = Timing(1e-3, 1e-3, 1e-3, 15, 1)
    row = Row(shape=SHAPE, is_small=False, problem=shape, kernel="k", timing=one_ms)
    ceilings = bench_rows.Ceilings(1e15, 1e15, "bfloat16")
    assert bench_rows.line(row, ceilings).split() == [
        SHAPE, "k", "1000", "us", "3.15", "GB/s", "0.000315%", "of", "copy",
        "0.00944", "TFLOP/s", "0.000944%", "of", "matmul",
    ]  # fmt: skip
    small = dataclasses.replace(row, is_small=True, problem=bench.host_shape(shape))
    assert small.title == f"{SHAPE} (small) (float32)"
    assert bench_rows.headline(bench_rows.Ceilings(5e6, 2e9, "float32")).endswith(
        "copies 0.00500 GB/s, multiplies 0.00200 TFLOP/s in float32"
    )


@pytest.mark.parametrize(
    ("value", "text"), [(0.0, "0"), (3141.5, "3142"), (31.415, "31.4"), (0.00031415, "0.000314")]
)
def test_numbers_have_three_significant_digits(value, text):
    assert bench_rows.significant(value) == text


def test_a_row_that_was_cut_says_so(monkeypatch):
    limits = []

    def seconds(*call, num_rounds, limit_s):
        limits.append(limit_s)
        return Timing(1.0, 1.0, 1.0, 3, 1)

    monkeypatch.setattr(bench, "seconds_per_call", seconds)
    monkeypatch.setattr(bench, "MOST_ROW_S", 1e9)
    rows = list(bench.bench([SHAPE], backend="xla", small=True, budget_s=1e4))
    assert {row.note for row in rows} == {"cut: 3 of 15 rounds"}
    assert all(0 < limit_s < 1e4 for limit_s in limits)
    monkeypatch.setattr(bench, "MOST_ROW_S", 100.0)
    next(bench.bench([SHAPE], backend="xla", small=True, budget_s=1e4))
    assert limits[-1] < 100.0
    assert bench_rows.line(rows[0], bench_rows.Ceilings(1.0, 1.0, "float32")).endswith(
        "of matmul  cut: 3 of 15 rounds"
    )

    def never(*call, num_rounds, limit_s):
        raise TimeoutError("no round ended")

    monkeypatch.setattr(bench, "seconds_per_call", never)
    rows = list(bench.bench([SHAPE], backend="xla", small=True))
    assert {(row.note, row.has_failed) for row in rows} == {("not measured: no round ended", False)}
    assert rows[0].tiles == dataclasses.asdict(xla.Tiles())


def test_the_peer_without_scattered_blocks_is_one_that_the_backend_takes(monkeypatch):
    """The TPU's layout has no block of a whole request: there it is consecutive ones."""
    shape = bench.SHAPES["llama-3-8b/decode_64x4k"]
    peers = {name: list(bench_calls.entrants(shape, name))[1] for name in ("pallas_tpu", "xla")}
    assert peers["xla"].kernel == "xla, a block per request"
    assert peers["xla"].shape.block_size == 4096
    run = peers["pallas_tpu"]
    assert run.kernel == "pallas_tpu, consecutive blocks of 128"
    assert (run.shape.block_size, run.shape.context_lens) == (128, shape.context_lens)
    small = dataclasses.replace(shape.small(), block_size=128)
    monkeypatch.setattr(bench_calls, "why_not", lambda *args: "too large")
    peer = list(bench_calls.entrants(small, "xla"))[1]
    table, context_lens, *_ = (jnp.asarray(a) for a in peer.prepare()[4:])
    used = [int(block) for row in table for block in row if block]
    assert used == list(range(1, small.num_blocks))
    assert context_lens.tolist() == list(small.context_lens)


def test_a_row_is_written_when_it_is_measured(tmp_path, monkeypatch):
    """What was measured before an interruption is not lost."""
    file = tmp_path / "bench.json"
    row = Row(shape=SHAPE, is_small=False, problem=bench.SHAPES[SHAPE], kernel="k")

    def interrupted(*args, **options):
        yield row
        assert len(json.loads(file.read_text("utf-8"))["rows"]) == 1
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "bench", interrupted)
    monkeypatch.setattr(bench, "measure_ceilings", lambda: bench_rows.Ceilings(1.0, 1.0, "float32"))
    with pytest.raises(KeyboardInterrupt):
        bench.main(["--json", str(file)])
    assert [path.name for path in tmp_path.iterdir()] == ["bench.json"]
    with pytest.raises(FileNotFoundError, match=r"--json .*/nowhere/b.json cannot be written"):
        bench.main(["--json", str(tmp_path / "nowhere" / "b.json")])


def test_bench_runs_what_auto_chooses_for_the_shape(monkeypatch):
    asked = []

    def choose(platform, kind, shape):
        asked.append((platform, kind, shape))
        return support.Choice("reference", "some reason")

    monkeypatch.setattr(bench, "choose", choose)
    rows = list(bench.bench([SHAPE], backend=None, small=True, budget_s=-1.0))
    assert rows[0].kernel == "reference, block 16"
    assert asked == [("cpu", "cpu", bench.host_shape(bench.SHAPES[SHAPE].small()))]
    assert next(bench.bench([SHAPE], backend="xla", budget_s=-1.0)).kernel == "xla, block 16"


def test_a_peer_may_refuse_and_ours_may_not(monkeypatch):
    def cannot(*args, **options):
        raise NotImplementedError("not today")

    monkeypatch.setattr(bench_calls, "prepare_ours", cannot)
    rows = list(bench.bench([SHAPE], backend="xla", small=True))
    assert [row.has_failed for row in rows] == [True, False, False]
    assert [row.note for row in rows] == ["NotImplementedError: not today"] * 2 + [""]


def test_bench_says_what_it_did_not_reach(monkeypatch):
    rows = list(bench.bench([SHAPE], backend="xla", small=True, budget_s=-1.0))
    assert {row.note for row in rows} == {"not measured: out of time"}
    assert {row.timing for row in rows} == {None}
    assert bench.faults_of(rows) == ["nothing was measured"]

    def broken(*args, **options):
        raise RuntimeError("no such luck")

    monkeypatch.setattr(bench_calls, "paged_attention", broken)
    rows = list(bench.bench([SHAPE], backend="xla", small=True))
    assert [row.note for row in rows] == ["RuntimeError: no such luck"] * 2 + [""]
    assert bench.faults_of(rows) == [
        f"{SHAPE} {kernel}: RuntimeError: no such luck"
        for kernel in ("xla, block 16", "xla, a block per request")
    ]
    assert bench.main(["--small", "--shapes", SHAPE]) == 1


def shapes(num_tokens, num_rows):
    """q, kv_blocks and block_table of SmolLM2's heads."""
    return (
        jnp.zeros((num_tokens, 9, 64)),
        jnp.zeros((5, 2, 3, 16, 64)),
        jnp.zeros((num_rows, 4), jnp.int32),
    )


def test_a_key_tells_all_that_matters_but_rows():
    options = {"num_kv_heads": 3, "block_size": 16, "sliding_window": None}
    heads = "N9 K3 H64 S16 C64"
    assert tile_key(*shapes(8, 8), **options) == f"decode {heads} float32 float32"
    assert tile_key(*shapes(9, 8), **options) == f"mixed {heads} float32 float32"
    windowed = tile_key(*shapes(8, 8), **options | {"sliding_window": 20})
    assert windowed == f"decode {heads} W20 float32 float32"


def test_no_two_named_shapes_share_an_entry():
    """Else the one that is searched last overwrites the other's tiles."""
    found = [tune._work(name, "xla", small=False) for name in bench.SHAPES]
    entries = [(tune._table_key(work), work.shape.num_rows) for work in found]
    assert len(set(entries)) == len(entries)


def test_tiles_come_from_the_table_of_the_device(monkeypatch):
    by_rows = {"8": {"item_tokens": 3}, "64": None, "256": {"item_tokens": 5}}
    table = {"xla": {"some key": by_rows}}
    monkeypatch.setattr(tiles, "_table", lambda kind: table if kind == "some chip" else {})

    def find(key, num_rows, device_kind="some chip"):
        return measured_tiles("xla", key, num_rows=num_rows, device_kind=device_kind)

    assert [find("some key", rows) for rows in (2, 8, 16)] == [{"item_tokens": 3}] * 3
    assert [find("some key", rows) for rows in (200, 1024)] == [{"item_tokens": 5}] * 2
    assert find("some key", 64) is None, "there the default was the fastest"
    assert [find("some key", rows) for rows in (1, 1025)] == [None] * 2, "too far"
    assert find("another key", 8) is None
    assert find("some key", 8, device_kind=None) is None


def test_a_call_runs_with_the_tiles_that_were_measured(monkeypatch):
    """They reach the backend; tiles that are given go before them."""
    seen = []
    right = xla.paged_attention

    def spy(*args, **options):
        seen.append(options["tiles"])
        return right(*args, **options)

    monkeypatch.setattr(xla, "paged_attention", spy)
    table = {"xla": {"decode N9 K3 H64 S16 C64 float32 float32": {"8": {"item_tokens": 48}}}}
    monkeypatch.setattr(tiles, "_table", lambda kind: table if kind == "some chip" else {})
    rows = [jnp.zeros(8, jnp.int32), jnp.zeros(9, jnp.int32), 0]
    for device_kind, given in (("some chip", None), (None, None), ("some chip", xla.Tiles())):
        paged_attention(
            *shapes(8, 8), *rows, scale=1.0, backend="xla", device_kind=device_kind, tiles=given
        )
    assert seen == [xla.Tiles(item_tokens=48), None, xla.Tiles()]


def test_a_device_kind_names_its_file():
    assert file_name("NVIDIA H100 80GB HBM3") == "nvidia_h100_80gb_hbm3.json"
    assert file_name("TPU v5 lite") == "tpu_v5_lite.json"


@pytest.fixture
def searched(monkeypatch, tmp_path):
    """A search over three candidates with made-up times; the second is fastest, the third fails."""
    default = xla.Tiles()
    name = dataclasses.fields(default)[0].name
    candidates = [dataclasses.replace(default, **{name: n}) for n in (101, 102)]
    monkeypatch.setattr(xla, "candidate_tiles", lambda base, block_size: candidates)
    seen = []

    def prepare(shape, backend, *, tiles):
        seen.append(tiles)
        if tiles == candidates[1]:
            raise MemoryError("too large")
        return (tiles,)

    def seconds(tiles, *, num_rounds, limit_s):
        assert limit_s == tune.MOST_CANDIDATE_S
        s = 0.5 if tiles == candidates[0] else 1.0
        return Timing(s, s, s, num_rounds, 1)

    monkeypatch.setattr(tune, "prepare_ours", prepare)
    monkeypatch.setattr(tune, "seconds_per_call", seconds)

    def search(*more, status=0):
        seen.clear()
        files = ["--measured", str(tmp_path / "m.json"), "--out", str(tmp_path / "t.json")]
        arguments = ["--backend", "xla", "--shapes", SHAPE, "--small", *files, *more]
        assert tune.main(arguments) == status
        return json.loads((tmp_path / "t.json").read_text("utf-8"))["tiles"], seen

    return search, default, candidates


def test_the_search_stores_what_beats_the_default(searched):
    search, default, candidates = searched
    table, seen = search()
    assert seen == [default, *candidates]
    ((_, by_rows),) = table["xla"].items()
    assert by_rows == {"1": dataclasses.asdict(candidates[0])}


def test_the_search_stores_that_the_default_won(searched, monkeypatch):
    """Once all were tried, so that no neighbour's tiles are taken there."""
    search, default, candidates = searched
    monkeypatch.setattr(tune, "WORTH_STORING", 0.1)
    table, seen = search()
    assert seen == [default, *candidates]
    ((_, by_rows),) = table["xla"].items()
    assert by_rows == {"1": None}


def test_a_search_that_was_cut_does_not_say_that_the_default_won(searched, tmp_path):
    search, default, _ = searched
    times = {json.dumps(dataclasses.asdict(default)): 1.0}
    (tmp_path / "m.json").write_text(json.dumps({KEY: times}), "utf-8")
    table, seen = search("--budget-s", "-1")
    assert seen == []
    ((_, by_rows),) = table["xla"].items()
    assert by_rows == {}


def test_the_search_goes_on_where_it_stopped(searched):
    search, default, candidates = searched
    _, seen = search("--budget-s", "-1", status=1)
    assert seen == []
    table, seen = search()
    assert seen == [default, *candidates]
    again, seen = search()
    assert again == table
    assert seen == [candidates[1]], "nothing is measured twice, what raised is tried again"


def test_what_raised_is_tried_again_after_the_others(searched, tmp_path):
    search, default, candidates = searched
    search("--budget-s", "-1", status=1)
    raised = {json.dumps(dataclasses.asdict(default)): "RuntimeError: the device was busy"}
    (tmp_path / "m.json").write_text(json.dumps({KEY: raised}), "utf-8")
    _, seen = search()
    assert seen == [*candidates, default]


KEY = f"cpu, jax {jax.__version__}, xla, {SHAPE}, small"


@pytest.mark.parametrize(
    "other",
    [KEY.removesuffix(", small"), KEY.replace("cpu", "TPU v4"), KEY.replace(", jax", ", jax 0.1")],
)
def test_times_hold_for_their_device_jax_and_form_only(searched, tmp_path, other):
    """Times of the full form, another device or another JAX are left alone and not read."""
    search, default, candidates = searched
    times = {json.dumps(dataclasses.asdict(tiles)): 1.0 for tiles in (default, *candidates)}
    (tmp_path / "m.json").write_text(json.dumps({other: times}), "utf-8")
    _, seen = search()
    assert seen == [default, *candidates]
    found = json.loads((tmp_path / "m.json").read_text("utf-8"))
    assert found[other] == times
    assert found[KEY][json.dumps(dataclasses.asdict(candidates[0]))] == 0.5


def test_a_backend_that_there_is_not_is_refused_with_the_list(capsys):
    for command in (bench.main, tune.main):
        with pytest.raises(SystemExit):
            command(["--backend", "foo"])
        printed = capsys.readouterr().err
        assert "invalid choice: 'foo'" in printed
        assert "xla" in printed
        assert "pallas_tpu" in printed


def test_small_shapes_are_not_for_the_package_s_table(capsys):
    with pytest.raises(SystemExit):
        tune.main(["--backend", "xla", "--shapes", SHAPE, "--small"])
    assert "--small needs --out" in capsys.readouterr().err


def test_the_search_refuses_a_backend_without_tiles_and_a_path_it_cannot_write(tmp_path, capsys):
    with pytest.raises(SystemExit):
        tune.main(["--backend", "reference"])
    assert "invalid choice: 'reference'" in capsys.readouterr().err
    with pytest.raises(FileNotFoundError, match=r"--out .* cannot be written"):
        tune.main(["--small", "--out", str(tmp_path / "nowhere" / "t.json")])

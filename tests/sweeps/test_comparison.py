"""Means over seeds and paired differences, by hand; and what `experiments/compare.py` writes."""

import importlib.util
import json
import os
import shutil

import numpy as np
import pyarrow.parquet as pq
import pytest
from axes import ROOT

from paxserve.paired import mean_interval
from paxserve.report.comparison import draw_differences, draw_means
from paxserve.sweep.cell import Cell
from paxserve.sweep.comparison import Comparison, spread_name
from paxserve.sweep.directory import SweepDirectory
from paxserve.sweep.table import sweep_table

RATES, SEEDS = (1, 4), (0, 1, 2)
NOISE = {0: 0.0, 1: 50.0, 2: -20.0}  # of a seed, far more than policies differ


def figure(batching, rate, seed):
    return 100.0 * rate + NOISE[seed] + (3.0 if batching == "static" else 0.0)


def cell(batching, rate, seed):
    config = {"choices": {"batching": batching}, "workload": {"rate": rate}, "seed": seed}
    return Cell(overrides=(), keys=("batching", "workload.rate", "seed"), config=config)


@pytest.fixture
def sweep(tmp_path):
    """Two policies, two rates, three seeds; one cell has failed, and one is missing."""
    directory = SweepDirectory.made(tmp_path / "sweep")
    cells = [cell(b, r, s) for b in ("static", "textbook") for r in RATES for s in SEEDS]
    directory.add(cells)
    for one in cells:
        asked = (
            one.config["choices"]["batching"],
            one.config["workload"]["rate"],
            one.config["seed"],
        )
        if asked == ("textbook", 4, 2):
            continue
        running = directory.begin(one)
        if asked == ("static", 4, 1):
            (running / "error.txt").write_text("no")
        else:
            value = figure(*asked)
            summary = {"p99_itl_ms": value, "output_throughput": 2 * value, "mean_ttft_ms": None}
            (running / "summary.json").write_text(json.dumps(summary))
            (running / "complete").write_text("")
        directory.keep(one.name, running)
    return directory


def test_means_are_over_the_seeds_that_are_there(sweep):
    compared = Comparison.of(sweep_table(sweep))
    assert (compared.by, compared.policy_axes) == ("workload.rate", ("batching",))
    assert compared.metrics == ("output_throughput", "p99_itl_ms")
    means = {(m.policy, m.by, m.metric): m for m in compared.means()}
    assert len(means) == 8
    for (policy, rate, metric), mean in means.items():
        lost = {("static", 4): 1, ("textbook", 4): 2}.get((policy, rate))
        factor = 2 if metric == "output_throughput" else 1
        values = np.array([factor * figure(policy, rate, s) for s in SEEDS if s != lost])
        assert mean.num_seeds == len(values)
        assert mean.mean == pytest.approx(values.mean())
        assert (mean.low, mean.high) == (values.min(), values.max())


def test_five_seeds_make_an_interval_and_fewer_a_range(tmp_path):
    directory = SweepDirectory.made(tmp_path / "sweep")
    for rate, seeds in ((1, 5), (4, 2)):
        for seed in range(seeds):
            one = cell("static", rate, seed)
            directory.add([one])
            running = directory.begin(one)
            (running / "summary.json").write_text(json.dumps({"p99_itl_ms": float(seed * seed)}))
            (running / "complete").write_text("")
            directory.keep(one.name, running)
    compared = Comparison.of(sweep_table(directory))
    five, two = compared.means()
    assert (five.low, five.high) == mean_interval(np.array([0.0, 1, 4, 9, 16]), seed=0)
    assert (two.low, two.high) == (0.0, 1.0)
    drawn = draw_means(compared).get_suptitle()
    assert "bars: range of 2 seeds, 95 % bootstrap interval of the mean of more" in drawn
    assert spread_name([5, 8]) == "95 % bootstrap interval of the mean"
    assert spread_name([1, 2, 4]) == "range of 2 or 4 seeds"
    assert spread_name([1]) is None


def test_differences_are_within_a_seed(sweep):
    """What seeds have in common is no difference: the interval has no width."""
    compared = Comparison.of(sweep_table(sweep), metrics=["p99_itl_ms"])
    rows = compared.differences(compared.baseline("batching=textbook"))
    assert [(row.policy, row.baseline, row.by, row.num_seeds) for row in rows] == [
        ("static", "textbook", 1.0, 3), ("static", "textbook", 4.0, 1),
    ]  # fmt: skip
    assert [(row.mean, row.low, row.high, row.share_lower) for row in rows] == [
        (3.0, 3.0, 3.0, 0.0), (3.0, None, None, 0.0),
    ]  # fmt: skip
    turned = compared.differences(compared.baseline("batching=static"))
    assert [(row.mean, row.share_lower) for row in turned] == [(-3.0, 1.0), (-3.0, 1.0)]


def test_a_baseline_is_a_cell_or_what_sets_it_apart(sweep):
    compared = Comparison.of(sweep_table(sweep))
    name = cell("static", 4, 0).name
    assert compared.baseline(name) == compared.baseline(name[:6]) == ("static",)
    assert compared.baseline("batching=static") == ("static",)
    for asked, words in {
        "batching=orca": "must mean one policy, it means none",
        "placement=paged": "placement sets no policies apart",
        "xyz": "must mean one policy, it means none",
        "": r"must mean one policy, it means \['static', 'textbook'\]",
    }.items():
        with pytest.raises(ValueError, match=words):
            compared.baseline(asked)


@pytest.fixture
def swept(tmp_path):
    """A complete sweep over one setting and two seeds; a figure is 10 times the setting's place."""

    def made(key, values):
        directory = SweepDirectory.made(tmp_path / "swept")
        group, name = key.split(".")
        cells = [
            Cell(overrides=(), keys=(key, "seed"),
                 config={"choices": {}, group: {name: value}, "seed": seed})
            for value in values for seed in (0, 1)
        ]  # fmt: skip
        directory.add(cells)
        for place, one in enumerate(cells):
            running = directory.begin(one)
            (running / "summary.json").write_text(json.dumps({"p99_itl_ms": 10.0 * (place // 2)}))
            (running / "complete").write_text("")
            directory.keep(one.name, running)
        return directory

    return made


@pytest.mark.parametrize(
    ("values", "names"),
    [
        ([64, 128, None], ["x=64", "x=128", "x=null"]),
        ([0.5, None, 2.5], ["x=0.5", "x=null", "x=2.5"]),
        ([None, "auto"], ["x=null", "auto"]),
        ([False, True], ["x=false", "x=true"]),
        ([False, None], ["x=false", "x=null"]),
        ([3, "auto", None], ["3", "auto", "x=null"]),
    ],
)
def test_no_value_of_a_setting_is_lost(swept, values, names):
    """Nor is it anything but a policy where it cannot be drawn against."""
    compared = Comparison.of(sweep_table(swept("limits.x", values)))
    assert (compared.by, compared.policy_axes) == (None, ("limits.x",))
    found = {mean.policy: (mean.mean, mean.num_seeds) for mean in compared.means()}
    assert found == {name: (10.0 * place, 2) for place, name in enumerate(names)}
    assert len(draw_means(compared).axes) == 1
    for value, name in zip(values, names, strict=True):
        word = value if isinstance(value, str) else json.dumps(value)
        base = compared.baseline(f"limits.x={word}")
        assert compared.policies[base] == name
        others = {difference.policy for difference in compared.differences(base)}
        assert others == set(names) - {name}


def test_whole_numbers_beside_null_stay_whole(swept):
    """Here the other axis is drawn against."""
    table = sweep_table(swept("limits.x", [64, None]))
    compared = Comparison.of(table)
    assert list(compared.policies) == [(64,), (None,)]
    with pytest.raises(ValueError, match=r"limits.x is no numeric axis of this sweep; there are"):
        Comparison.of(table, by="limits.x")


def test_without_a_numeric_axis(sweep):
    table = sweep_table(sweep)
    names = [c for c in table.column_names if c != "workload.rate"]
    metadata = {"axes": json.dumps(["batching", "seed"])}
    rows = [row for row in table.to_pylist() if row["workload.rate"] == 1]
    table = table.filter(np.array([r["workload.rate"] == 1 for r in table.to_pylist()]))
    compared = Comparison.of(table.select(names).replace_schema_metadata(metadata))
    assert compared.by is None
    assert [(m.policy, m.by, m.num_seeds) for m in compared.means()][::2] == [
        ("static", None, 3), ("textbook", None, 3),
    ]  # fmt: skip
    assert len(rows) == 6
    assert len(draw_means(compared).axes) == 2


def test_an_axis_of_which_one_value_is_left_is_none(sweep):
    for rate_4 in [cell(b, 4, s) for b in ("static", "textbook") for s in SEEDS]:
        shutil.rmtree(sweep.path / rate_4.name, ignore_errors=True)
    for settings in ({}, {"by": "workload.rate"}):
        compared = Comparison.of(sweep_table(sweep), **settings)
        assert (compared.by, compared.policy_axes) == (None, ("batching",))
        assert list(compared.policies.values()) == ["static", "textbook"]
    assert compared.baseline("batching=static") == ("static",)
    drawn = draw_means(compared).get_suptitle()
    assert drawn == "means over 3 seeds; bars: range of 3 seeds; 6 of 12 cells missing"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"by": "batching"},
            r"batching is no numeric axis of this sweep; there are \['workload.rate'\]",
        ),
        ({"by": "seed"}, "seed is no numeric axis"),
        ({"metrics": ["p98_itl_ms"]}, "p98_itl_ms is no figure of this sweep; there are"),
        ({"metrics": ["cell"]}, "cell is no figure of this sweep"),
    ],
)
def test_what_cannot_be_compared(sweep, settings, words):
    with pytest.raises(ValueError, match=words):
        Comparison.of(sweep_table(sweep), **settings)


def test_a_sweep_without_a_complete_cell(tmp_path):
    directory = SweepDirectory.made(tmp_path)
    directory.add([cell("static", 1, 0)])
    with pytest.raises(ValueError, match="no cell of this sweep is complete"):
        Comparison.of(sweep_table(directory))


def test_pictures_show_the_means(sweep):
    compared = Comparison.of(sweep_table(sweep), metrics=["p99_itl_ms"])
    (axis,) = draw_means(compared).axes
    drawn = [(line.get_xdata().tolist(), line.get_ydata().tolist()) for line in axis.lines]
    for policy, (xs, ys) in zip(("static", "textbook"), drawn, strict=True):
        means = [m for m in compared.means() if m.policy == policy]
        assert (xs, ys) == ([m.by for m in means], [m.mean for m in means])
    low, high = axis.get_ylim()
    assert low == 0
    assert high > max(m.high or m.mean for m in compared.means())
    (axis,) = draw_differences(compared, compared.differences(("textbook",))).axes
    assert axis.lines[0].get_ydata().tolist() == [3.0, 3.0]
    assert axis.get_title(loc="left") == "p99_itl_ms, less textbook"


@pytest.fixture(scope="module")
def compare():
    file = ROOT / "experiments" / "compare.py"
    spec = importlib.util.spec_from_file_location("experiments_compare", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main


def test_the_command_writes_tables_and_pictures(sweep, compare, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    assert compare([str(sweep.path), "--baseline", "batching=textbook"]) == 0
    out = capsys.readouterr().out
    assert "without 2 of 12 cells: failed, missing" in out
    assert "less textbook, paired by seed" in out
    assert "mean (range of 3 seeds)" in out
    written = {"table.csv", "table.parquet"}
    for name in ("means", "differences"):
        written |= {f"{name}.parquet", f"{name}.csv", f"{name}.png"}
    assert written <= {path.name for path in sweep.path.iterdir()}
    means = pq.read_table(sweep.path / "means.parquet").to_pylist()
    itl = next(row for row in means if row["metric"] == "p99_itl_ms")
    assert (itl["policy"], itl["by"], itl["mean"]) == ("static", 1.0, pytest.approx(113))
    assert all(os.path.getsize(sweep.path / f"{n}.png") > 5000 for n in ("means", "differences"))


def test_the_command_says_what_is_wrong(sweep, compare, tmp_path, capsys):
    assert compare([str(tmp_path)]) == 2
    assert "holds no sweep" in capsys.readouterr().err
    assert compare([str(sweep.path), "--by", "batching"]) == 2
    assert "no numeric axis" in capsys.readouterr().err

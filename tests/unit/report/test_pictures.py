"""Pictures from saved tables: the numbers behind them, and that each can be drawn."""

from dataclasses import replace

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from saved_runs import SHORT_OF_MEMORY, serve, write_blocks

from paxserve.batching.static import Static
from paxserve.metrics import PERCENTILES
from paxserve.placement.first_fit import FirstFit
from paxserve.report import style
from paxserve.report.block_map import CACHED, FREE, HELD, block_map, draw_blocks
from paxserve.report.latency import draw_latency, draw_throughput, itl_s, ttft_s
from paxserve.report.memory import PARTS, draw_kv, draw_memory_bars, part_shares, step_edges
from paxserve.report.pictures import PICTURES, plot
from paxserve.report.run_tables import MissingData
from paxserve.reservation.max import Max

STATIC = {"batching": Static(), "reservation": Max(), "placement": FirstFit()}
STATIC_NAMES = {"batching": "static", "reservation": "max", "placement": "first_fit"}


@pytest.fixture
def run(tmp_path):
    return serve(tmp_path / "continuous", [5, 5, 2], sizes=SHORT_OF_MEMORY)


@pytest.fixture
def static(tmp_path):
    return serve(tmp_path / "static", [1, 3, 2], choices=STATIC_NAMES, **STATIC)


def texts(picture):
    axes = picture.get_axes()
    found = [text.get_text() for axis in axes for text in axis.texts]
    found += [axis.get_title(loc="left") for axis in axes]
    legends = [*picture.legends, *(axis.get_legend() for axis in axes if axis.get_legend())]
    return found + [text.get_text() for legend in legends for text in legend.get_texts()]


# Figure 2.


def test_the_bars_are_sums_of_slot_classes_over_the_time_in_steps(static):
    """Pool of 64 slots; each request holds 32 of them. Requests 0 and 1 of one and three outputs
    run for three steps, 0 dead from the second on; then 2 of two outputs alone.
    """
    shares = part_shares(static)
    live = np.array([3 + 3, 4, 5, 3, 4])
    used = np.array([2, 1, 0, 1, 0])  # 1 ends at 5 slots, 2 at 4
    held = np.array([0, 32, 32, 0, 0])
    taken = np.array([64, 32, 32, 32, 32])
    expected = {
        "token states": live.sum(),
        "reservation": used.sum(),
        "internal fragmentation": (taken - live - used).sum(),
        "external fragmentation": 0,
        "held by finished requests": held.sum(),
        "cached": 0,
        "free": (64 - taken - held).sum(),
    }
    assert shares.to_dict() == pytest.approx({k: v / 64 / 5 for k, v in expected.items()})


def test_each_class_is_part_of_one_bar_and_they_sum_to_one(run, static):
    classes = [name for part in PARTS for name in part.classes]
    assert len(classes) == len(set(classes))
    recorded = {c.removeprefix("slots_") for c in run.steps if c.startswith("slots_")} - {"null"}
    assert recorded <= set(classes)
    for one in (run, static):
        assert part_shares(one).sum() == pytest.approx(1)


def test_steps_count_by_their_time(static):
    steps = static.steps.assign(duration_s=[2.0, 0, 0, 0, 0])
    assert part_shares(replace(static, steps=steps))["token states"] == pytest.approx(6 / 64)


def test_an_old_run_without_cached_slots_still_has_bars(static):
    old = replace(static, steps=static.steps.drop(columns="slots_cached", errors="ignore"))
    assert part_shares(old)["cached"] == 0
    with pytest.raises(MissingData, match="no column slots_tail"):
        part_shares(replace(static, steps=static.steps.drop(columns="slots_tail")))


def test_the_bars_carry_their_numbers_and_runs_their_names(run, static):
    picture = draw_memory_bars([static, run])
    found = texts(picture)
    for share in part_shares(static):
        assert share < 0.0005 or f"{100 * share:.1f}" in found
    assert {part.label for part in PARTS if part_shares(static)[part.label]} <= set(found)
    (axis,) = picture.get_axes()
    assert [label.get_text() for label in axis.get_yticklabels()] == [
        "static\nstatic, max, first_fit",
        "continuous\nchunked_prefill, on_demand, paged",
    ]


# Over time.


def test_a_gap_longer_than_a_step_is_idle(tmp_path):
    run = serve(tmp_path / "run", [2, 1], arrivals=[10.0, 17.0])
    times, rows = step_edges(run)
    assert times.tolist() == [0.0, 1.0, 2.0, 7.0, 8.0]
    assert rows.tolist() == [0, 1, -1, 2, -1]
    host = run.steps.assign(duration_s=0.75)  # a quarter of a second of the host between steps
    assert step_edges(replace(run, steps=host))[1].tolist() == [0, 1, -1, 2, -1]


def test_kv_over_time_ends_with_the_run(run, static):
    memory, batch, *_ = draw_kv([run, static]).get_axes()
    assert memory.get_title(loc="left") == run.title
    (waiting, running) = batch.get_lines()
    assert running.get_ydata().tolist() == [*run.steps["num_running"], 0]
    assert waiting.get_ydata().tolist() == [*run.steps["num_waiting"], 0]
    assert running.get_xdata()[-1] == run.end_s
    assert batch.get_xlim()[1] == max(run.end_s, static.end_s)


# Latency.


def test_latencies_are_those_of_the_summary(run):
    for name, sample in (("ttft", ttft_s(run)), ("itl", itl_s(run))):
        for p in PERCENTILES:
            expected = run.summary[f"p{p}_{name}_ms"]
            assert 1000 * np.percentile(sample, p) == pytest.approx(expected)


def test_only_completed_requests_count(run):
    requests = run.requests.assign(finish_reason=["length", "abort", "error"])
    assert ttft_s(replace(run, requests=requests)).tolist() == [run.requests["ttft_s"][0]]
    assert len(itl_s(replace(run, requests=requests))) == 4
    nothing = replace(run, requests=requests.assign(finish_reason="abort"))
    assert "none" in texts(draw_latency([nothing]))


def test_percentiles_are_written_under_the_distributions(run, static):
    found = texts(draw_latency([run, static]))
    assert "p50 1.00 s  p90 5.00 s  p99 5.90 s" in found
    assert "static (static, max, first_fit)" in found


def test_runs_of_the_same_policies_are_one_line(run, static):
    def at(run, rate, latency):
        figures = {"request_throughput": rate, "mean_normalized_latency_s_per_token": latency}
        return replace(run, summary=figures)

    runs = [at(run, 2, 0.3), at(run, 1, 0.1), at(static, 0.5, 0.4), at(static, None, None)]
    (axis,) = draw_throughput(runs).get_axes()
    one, other = axis.get_lines()
    assert one.get_label() == "chunked_prefill, on_demand, paged"
    assert one.get_xydata().tolist() == [[1, 0.1], [2, 0.3]]
    assert other.get_xydata().tolist() == [[0.5, 0.4]]
    with pytest.raises(MissingData, match="mean_normalized_latency"):
        draw_throughput(runs[-1:])


# The block map.


def test_changes_are_replayed_step_by_step(tmp_path):
    run = write_blocks(
        serve(tmp_path / "run", [1, 3], sizes={"num_blocks": 4}),
        (1, 1, "0", "live"),
        (1, 2, "1", "live"),
        (2, 1, "0", "held"),
        (2, 2, "", "free"),
        (2, 2, "1", "live"),
        (3, 1, "", "cached"),
        (3, 2, "", "free"),
        (3, 4, "1", "host"),
    )
    assert run.steps["step_id"].tolist() == [1, 2, 3]
    found = block_map(run)
    assert found.request_ids == ("0", "1")
    assert found.num_device_blocks == 4
    assert found.codes.tolist() == [
        [FREE, 3, 4, FREE, FREE],
        [FREE, HELD, 4, FREE, FREE],
        [FREE, CACHED, FREE, FREE, 4],
    ]
    assert block_map(run, np.array([0, 2, 2])).codes.tolist() == found.codes[[0, 2, 2]].tolist()


def test_the_map_has_a_colour_per_request(tmp_path):
    run = serve(tmp_path / "run", [1, 3], sizes={"num_blocks": 4})
    with pytest.raises(MissingData, match="did not record it"):
        draw_blocks([run])
    blocks = write_blocks(run, (2, 1, "0", "live"), (2, 3, "", "cached"))
    (axis,) = draw_blocks([blocks]).get_axes()
    (image,) = axis.get_images()
    drawn = np.asarray(image.get_array())
    middle = drawn[:, drawn.shape[1] // 2]
    free, cached = to_rgb(style.IDLE), to_rgb(style.BLACK)
    assert drawn[1, 0].tolist() == pytest.approx(free)  # nothing in the first third
    assert middle[1].tolist() != pytest.approx(free)
    assert middle[2].tolist() == pytest.approx(free)
    assert middle[3].tolist() == pytest.approx(cached)
    wrong = write_blocks(run, (0, 1, "0", "lost"))
    with pytest.raises(ValueError, match=r"kind \['lost'\] is none of"):
        block_map(wrong)


# All of them.


def test_pictures_go_beside_the_run_and_say_what_is_missing(run):
    written = list(plot([run]))
    assert (
        written[1] == f"no blocks.png: {run.path}/blocks.parquet does not exist: the run did "
        "not record it"
    )
    paths = [run.path / f"{name}.png" for name in PICTURES if name != "blocks"]
    assert [path for path in written if not isinstance(path, str)] == paths
    for path in paths:
        assert path.read_bytes().startswith(b"\x89PNG")


def test_pictures_of_several_runs_go_where_all_of_them_lie(run, static, tmp_path):
    assert list(plot([run, static], only=["memory"])) == [tmp_path / "memory.png"]
    assert list(plot([run], only=["kv"], out=tmp_path / "a" / "b")) == [tmp_path / "a/b/kv.png"]
    with pytest.raises(ValueError, match=r"no picture is called kvv; there are \['blocks', 'kv'"):
        list(plot([run], only=["kvv"]))
    with pytest.raises(MissingData, match="did not record"):
        list(plot([run], only=["blocks"]))


def test_a_picture_shows_itself_in_a_notebook(run):
    assert draw_kv([run])._repr_png_().startswith(b"\x89PNG")

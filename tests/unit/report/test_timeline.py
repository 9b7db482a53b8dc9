"""The row timeline, from scripted runs of one second a step that can be followed by hand."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from builders import make_engine, prompt_ids, submit
from saved_runs import SHORT_OF_MEMORY, save, serve

from paxserve.batching.static import Static
from paxserve.report.style import DEAD, IDLE
from paxserve.report.timeline import Stay, Timeline, draw_timelines, timeline


def test_a_row_is_dead_until_a_static_batch_dissolves(tmp_path):
    """Requests 0 and 1 form a batch of three steps; 2 has the next for itself."""
    found = timeline(serve(tmp_path / "run", [1, 3, 2], batching=Static()))
    assert found == Timeline(
        num_rows=2,
        end_s=5.0,
        stays=(
            Stay(row=0, request_id="0", start_s=0.0, finished_s=1.0, end_s=3.0),
            Stay(row=1, request_id="1", start_s=0.0, finished_s=3.0, end_s=3.0),
            Stay(row=0, request_id="2", start_s=3.0, finished_s=5.0, end_s=5.0),
        ),
    )


def test_continuous_batching_refills_a_row_at_once(tmp_path):
    found = timeline(serve(tmp_path / "run", [1, 3, 2]))
    assert found.end_s == 3.0
    assert sorted(found.stays) == [
        Stay(row=0, request_id="0", start_s=0.0, finished_s=1.0, end_s=1.0),
        Stay(row=0, request_id="2", start_s=1.0, finished_s=3.0, end_s=3.0),
        Stay(row=1, request_id="1", start_s=0.0, finished_s=3.0, end_s=3.0),
    ]


def test_the_clock_starts_with_the_first_arrival(tmp_path):
    found = timeline(serve(tmp_path / "run", [2], arrivals=[100.0]))
    assert found.end_s == 2.0
    assert found.stays == (Stay(0, "0", 0.0, 2.0, 2.0),)


def test_a_preempted_request_has_two_stays_and_no_dead_time(tmp_path):
    found = timeline(serve(tmp_path / "run", [5, 5], sizes=SHORT_OF_MEMORY))
    stays = [stay for stay in found.stays if stay.request_id == "1"]
    assert len(stays) == 2
    assert stays[0].finished_s == stays[0].end_s <= stays[1].start_s
    assert all(stay.finished_s == stay.end_s for stay in found.stays)


def with_log(run, *events):
    columns = ["time_s", "kind", "request_id", "row"]
    return replace(run, decisions=pd.DataFrame(events, columns=columns))


def test_a_request_that_ends_when_the_clock_starts_has_lived_for_no_time(tmp_path):
    run = with_log(
        serve(tmp_path / "run", [1]),
        (0.0, "entered", "a", 1),
        (0.0, "finished", "a", 1),
        (4.0, "released", "a", 1),
    )
    assert timeline(run).stays == (Stay(1, "a", 0.0, 0.0, 4.0),)


def test_requests_that_never_entered_leave_no_trace(tmp_path):
    log = with_log(
        serve(tmp_path / "run", [1]), (0.0, "arrived", "a", -1), (0.0, "finished", "a", -1)
    )
    assert timeline(log) == Timeline(2, 1.0, ())


def test_a_request_of_two_sequences_is_in_two_rows(tmp_path):
    """One sequence gives up its row before the other; then the request is released as a whole."""
    log = with_log(
        serve(tmp_path / "run", [1]),
        (0.0, "entered", "a", 0),
        (0.0, "entered", "a", 1),
        (2.0, "released", "a", 0),
        (2.0, "entered", "b", 0),
        (4.0, "finished", "a", -1),
        (5.0, "released", "a", -1),
        (6.0, "entered", "c", 0),
        (7.0, "preempted", "c", 0),
    )
    assert timeline(log).stays == (
        Stay(0, "a", 0.0, 2.0, 2.0),
        Stay(1, "a", 0.0, 4.0, 5.0),
        Stay(0, "b", 2.0, 6.0, 6.0),  # nobody said that it left, but another entered
        Stay(0, "c", 6.0, 7.0, 7.0),
    )


def pixels_of(image, colour):
    rgb = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)])
    return (np.abs(image[..., :3] * 255 - rgb).max(-1) < 2).sum()


@pytest.mark.parametrize("num_runs", [1, 2])
def test_the_picture(tmp_path, num_runs):
    from matplotlib import image

    static = serve(tmp_path / "static", [1, 3, 2], batching=Static())
    continuous = serve(tmp_path / "continuous", [1, 3, 2])
    path = tmp_path / "timeline.png"
    draw_timelines([static, continuous][:num_runs]).save(path)
    picture = image.imread(path)
    height, width = picture.shape[:2]
    assert width == 1320
    assert 100 * num_runs < height < 200 * num_runs
    # Of 10 row-seconds of the static run two are dead (and the legend's patch), two are idle.
    dead, idle = pixels_of(picture, DEAD), pixels_of(picture, IDLE)
    assert dead > 4_000
    assert 0.5 < dead / idle < 2
    draw_timelines([continuous]).save(path)
    assert pixels_of(image.imread(path), DEAD) < 1_000


def test_a_run_with_a_failed_step_can_be_drawn(tmp_path):
    engine = make_engine()
    submit(engine, prompt_ids(3), max_tokens=6)
    engine.step()
    submit(engine, prompt_ids(3, 1), max_tokens=6)

    def fail(plan):
        raise MemoryError

    engine.executor.on_submit = fail
    with pytest.raises(MemoryError):
        engine.step()
    line = timeline(save(engine, tmp_path / "run"))
    assert [(stay.row, stay.request_id) for stay in line.stays] == [(0, "0"), (1, "1")]

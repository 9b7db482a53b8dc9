"""The row timeline, from scripted runs of one second a step that can be followed by hand."""

import numpy as np
import pytest
from builders import make_engine, make_limits, prompt_ids, run_to_end, submit

from paxserve.batching.static import Static
from paxserve.events import EventLog, Kind
from paxserve.report.timeline import DEAD, IDLE, Stay, Timeline, draw, timeline


def serve(*lengths, arrivals=None, limits=None, **chosen):
    """Requests of 3 prompt tokens and some output tokens, over two rows; the run's timeline."""
    engine = make_engine(limits or make_limits(max_num_seqs=2), **chosen)
    for i, length in enumerate(lengths):
        engine.clock.wait_until(arrivals[i] if arrivals else 0.0)
        submit(engine, prompt_ids(3, salt=i), max_tokens=length)
    run_to_end(engine)
    return timeline(engine.events, engine.steps, num_rows=engine.limits.max_num_seqs)


def test_a_row_is_dead_until_a_static_batch_dissolves():
    """Requests 0 and 1 form a batch of three steps; 2 has the next for itself."""
    found = serve(1, 3, 2, batching=Static())
    assert found == Timeline(
        num_rows=2,
        end_s=5.0,
        stays=(
            Stay(row=0, request_id="0", start_s=0.0, finished_s=1.0, end_s=3.0),
            Stay(row=1, request_id="1", start_s=0.0, finished_s=3.0, end_s=3.0),
            Stay(row=0, request_id="2", start_s=3.0, finished_s=5.0, end_s=5.0),
        ),
    )


def test_continuous_batching_refills_a_row_at_once():
    found = serve(1, 3, 2)
    assert found.end_s == 3.0
    assert sorted(found.stays) == [
        Stay(row=0, request_id="0", start_s=0.0, finished_s=1.0, end_s=1.0),
        Stay(row=0, request_id="2", start_s=1.0, finished_s=3.0, end_s=3.0),
        Stay(row=1, request_id="1", start_s=0.0, finished_s=3.0, end_s=3.0),
    ]


def test_the_clock_starts_with_the_first_arrival():
    found = serve(2, arrivals=[100.0])
    assert found.end_s == 2.0
    assert found.stays == (Stay(0, "0", 0.0, 2.0, 2.0),)


def test_a_preempted_request_has_two_stays_and_no_dead_time():
    limits = make_limits(max_num_seqs=2, block_size=1, num_blocks=10, max_model_len=9)
    found = serve(5, 5, limits=limits)
    stays = [stay for stay in found.stays if stay.request_id == "1"]
    assert len(stays) == 2
    assert stays[0].finished_s == stays[0].end_s <= stays[1].start_s
    assert all(stay.finished_s == stay.end_s for stay in found.stays)


def test_a_request_that_ends_when_the_clock_starts_has_lived_for_no_time():
    log = EventLog()
    log.add(Kind.ARRIVED, "a")
    log.add(Kind.ENTERED, "a", row=1)
    log.add(Kind.FINISHED, "a", row=1)
    log.now_s = 4.0
    log.add(Kind.RELEASED, "a", row=1)
    assert timeline(log, [], num_rows=2).stays == (Stay(1, "a", 0.0, 0.0, 4.0),)


def test_requests_that_never_entered_leave_no_trace():
    log = EventLog()
    log.add(Kind.ARRIVED, "a")
    log.add(Kind.FINISHED, "a", row=-1)
    assert timeline(log, [], num_rows=2) == Timeline(2, 0.0, ())


def pixels_of(image, colour):
    rgb = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)])
    return (np.abs(image[..., :3] * 255 - rgb).max(-1) < 2).sum()


@pytest.mark.parametrize("num_runs", [1, 2])
def test_the_picture(tmp_path, num_runs):
    from matplotlib import image

    lines = {"static": serve(1, 3, 2, batching=Static()), "continuous": serve(1, 3, 2)}
    path = tmp_path / "timeline.png"
    draw(dict(list(lines.items())[:num_runs]), path)
    assert path.stat().st_size > 5_000
    picture = image.imread(path)
    height, width = picture.shape[:2]
    assert width == 1440
    assert 200 < height < 500
    # Of 10 row-seconds of the static run two are dead (and the legend's patch), two are idle.
    dead, idle = pixels_of(picture, DEAD), pixels_of(picture, IDLE)
    assert dead > 5_000
    assert 0.5 < dead / idle < 2
    draw({"continuous": lines["continuous"]}, path)
    assert pixels_of(image.imread(path), DEAD) < 1_000


def test_a_run_with_a_failed_step_can_be_drawn():
    engine = make_engine()
    submit(engine, prompt_ids(3), max_tokens=6)
    engine.step()
    submit(engine, prompt_ids(3, 1), max_tokens=6)

    def fail(plan):
        raise MemoryError

    engine.executor.on_submit = fail
    with pytest.raises(MemoryError):
        engine.step()
    line = timeline(engine.events, engine.steps, num_rows=4)
    assert [(stay.row, stay.request_id) for stay in line.stays] == [(0, "0"), (1, "1")]

"""Whole schedules, step by step, against text files that were checked by hand.

After a wanted change: `python tests/golden/schedule_text.py --write`, and check the difference.
"""

import pytest
from builders import tokens_alone
from schedule_text import FOLDER, SCENARIOS, run


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_schedule_is_as_written(scenario):
    path = FOLDER / "schedules" / f"{scenario}.txt"
    assert run(scenario)[1] == path.read_text(encoding="ascii")


def test_every_file_belongs_to_a_scenario():
    files = {path.stem for path in (FOLDER / "schedules").iterdir()}
    assert files == set(SCENARIOS)


def first_steps(engine):
    """Step and row in which each request first ran."""
    found = {}
    for number, plan in enumerate(engine.executor.plans, start=1):
        for row in plan.rows:
            found.setdefault(f"R{row.sequence_id + 1}", (number, row.row))
    return found


def last_steps(engine):
    return {r.request_id: r.finished_s for r in engine.requests}


LAST_OF_THE_FIRST_FOUR = {"R1": 26, "R2": 10, "R3": 18, "R4": 7}


def test_static_batching_starts_nobody_before_the_longest_member_ends():
    engine, text = run("four_rows-static")
    assert first_steps(engine) == {f"R{i}": (1, i - 1) for i in range(1, 5)} | {
        "R5": (27, 0),
        "R6": (27, 1),
    }
    assert last_steps(engine) == LAST_OF_THE_FIRST_FOUR | {"R5": 31, "R6": 29}
    dead = (26 - 7) + (26 - 10) + (26 - 18) + (31 - 29)
    assert f"dead row-steps: {dead}\n" in text
    assert sum(step.num_held for step in engine.steps) == dead
    held_after_7 = engine.ledger.steps()[7].held
    assert held_after_7 == 12  # R4's 4 + 7 - 1 = 10 slots in 3 blocks of 4, still held


@pytest.mark.parametrize("scenario", ["four_rows-textbook", "four_rows-chunked_prefill"])
def test_continuous_batching_gives_a_row_on_at_the_boundary_where_it_falls_free(scenario):
    engine, text = run(scenario)
    assert first_steps(engine) == {f"R{i}": (1, i - 1) for i in range(1, 5)} | {
        "R5": (8, 3),  # R4's row, after its 7 steps
        "R6": (11, 1),  # R2's row, after its 10
    }
    assert last_steps(engine) == LAST_OF_THE_FIRST_FOUR | {"R5": 12, "R6": 13}
    assert "dead row-steps: 0\n" in text
    assert "empty row-steps while someone waits: 0\n" in text


def test_the_first_token_of_those_who_queue_waits_for_the_longest_or_for_the_first_vacancy():
    def ttft(scenario):
        requests = run(scenario)[0].requests
        return [r.sequence.token_times_s[0] - r.arrival_s for r in requests]

    assert ttft("four_rows-static") == [1, 1, 1, 1, 27, 27]
    assert ttft("four_rows-textbook") == [1, 1, 1, 1, 8, 11]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_no_schedule_changes_a_token(scenario):
    engine, _ = run(scenario)
    asks = SCENARIOS[scenario].asks
    for number, (request, ask) in enumerate(zip(engine.requests, asks, strict=True), start=1):
        expected = tokens_alone(ask.token_ids(number), ask.output)
        assert list(request.output_token_ids) == expected

"""The search for a knee, on curves whose knee is known."""

import pytest

from paxserve.claims.knees import Point, crossing, find_knee


def queueing(rate):
    """0.03 s without load, without bound at 2 requests/s: 0.2 at 1.7."""
    return 0.03 / (1 - rate / 2) if rate < 2 else 1e3 * rate


@pytest.mark.parametrize("start", [0.1, 0.5, 1.7, 1.9, 10.0])
def test_the_level_is_found_from_wherever_one_starts(start):
    asked = []

    def latency_s(rate):
        asked.append(rate)
        return queueing(rate)

    knee = find_knee(latency_s, start=start, tolerance=0.02)
    assert knee.rate == pytest.approx(1.7, rel=0.01)
    assert [point.rate for point in knee.points] == sorted(asked)
    assert all(point.latency_s == queueing(point.rate) for point in knee.points)
    assert len(asked) == len(set(asked)) <= 18


def test_a_wider_tolerance_asks_less_and_another_level_is_elsewhere():
    near = find_knee(queueing, start=1.5, tolerance=0.01)
    wide = find_knee(queueing, start=1.5, tolerance=0.5)
    assert len(wide.points) == 2 < len(near.points)
    assert wide.rate == pytest.approx(1.7, rel=0.15)
    assert find_knee(queueing, start=1.5, level_s=0.06, tolerance=0.01).rate == pytest.approx(
        1.0, rel=0.01
    )


@pytest.mark.parametrize("level", [1e-4, 1e9])
def test_a_level_that_no_rate_passes_is_an_error(level):
    with pytest.raises(RuntimeError, match=r"passed nowhere near 1\.0 requests/s"):
        find_knee(queueing, start=1.0, level_s=level)


def test_a_curve_is_read_between_its_points():
    curve = [Point(2.0, 0.4), Point(1.0, 0.1), Point(4.0, 0.8)]
    assert crossing(curve) == pytest.approx(2**0.5)  # half way in both logarithms
    assert crossing(curve, 0.1) == 1.0
    assert crossing(curve, 1.0) is None
    assert crossing(curve, 0.05) is None

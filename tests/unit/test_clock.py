import pytest

from paxserve.clock import RecordedClock, RecordingClock, VirtualClock, WallClock


def test_virtual_time_moves_only_when_told():
    clock = VirtualClock()
    assert clock.now_s() == 0.0
    clock.spend(1.5)
    clock.spend(0.0)
    assert clock.now_s() == 1.5
    clock.wait_until(4.0)
    assert clock.now_s() == 4.0
    clock.wait_until(2.0)
    assert clock.now_s() == 4.0


@pytest.mark.parametrize("duration_s", [-0.5, float("nan"), float("inf")])
def test_virtual_time_goes_neither_back_nor_nowhere(duration_s):
    clock = VirtualClock()
    clock.spend(1.0)
    with pytest.raises(ValueError, match=f"duration_s={duration_s}"):
        clock.spend(duration_s)
    assert clock.now_s() == 1.0


def test_wall_time_waits_and_is_not_moved_by_steps():
    clock = WallClock()
    before = clock.now_s()
    clock.spend(1000.0)
    assert 0 <= before <= clock.now_s() < 100
    target = clock.now_s() + 0.01
    clock.wait_until(target)
    assert clock.now_s() >= target
    clock.wait_until(0.0)  # the past is no error


def test_a_recording_is_told_again_in_order_whatever_is_spent_or_waited_for():
    recording = RecordingClock(VirtualClock())
    recording.now_s()
    recording.spend(1.5)
    assert recording.now_s() == 1.5
    recording.wait_until(4.0)
    recording.now_s()
    assert recording.readings_s == [0.0, 1.5, 4.0]
    recorded = RecordedClock(recording.readings_s)
    assert recorded.now_s() == 0.0
    recorded.spend(100.0)
    recorded.wait_until(100.0)
    assert [recorded.now_s(), recorded.now_s()] == [1.5, 4.0]
    with pytest.raises(RuntimeError, match="asked for the time 3 times, this one asks again"):
        recorded.now_s()
    assert recorded.num_told == 3

import pytest
from builders import make_engine, make_limits, prompt_ids, run_to_end, submit

from paxserve.events import EventLog, Kind
from paxserve.ledger import SlotCounts
from paxserve.notices import Notices
from paxserve.records import StepRecord


class Operator:
    """Hears what is said."""

    def __init__(self, **options):
        self.status, self.warnings = [], []
        self.notices = Notices(status=self.status.append, warn=self.warnings.append, **options)
        self.events = EventLog()
        self.now_s = 0.0

    def step(self, duration_s=1.0, *, num_tokens=10, live=10, free=10, cached=0, num_waiting=0):
        zeros = dict.fromkeys(StepRecord._fields, 0)
        fields = {
            "start_s": self.now_s,
            "duration_s": duration_s,
            "num_tokens": num_tokens,
            "num_running": 3,
            "num_waiting": num_waiting,
        }
        self.now_s += duration_s
        tail = 20 - live - free - cached
        slots = SlotCounts(live=live, tail=tail, cached=cached, free=free, null=4)
        self.notices.after_step(StepRecord(**(zeros | fields)), slots, self.events)

    def preempt(self, count=1, detail="recompute"):
        for _ in range(count):
            self.events.add(Kind.PREEMPTED, "r9", num_tokens=7, detail=detail)


def test_a_status_line_every_few_seconds_of_the_engine_s_clock():
    operator = Operator()
    for _ in range(12):
        operator.step(num_waiting=2, live=5, free=10)
    assert (
        operator.status
        == [
            "running 3, waiting 2, KV 50% in blocks, 25% live, 10 tokens/s",
        ]
        * 2
    )
    assert operator.warnings == []


def test_the_rate_is_over_the_time_since_the_last_line():
    operator = Operator(every_s=2.0)
    operator.step(2.0, num_tokens=20)
    operator.step(1.0, num_tokens=0)
    operator.step(3.0, num_tokens=100)  # one long step: one line, not two
    assert [line.split(", ")[-1] for line in operator.status] == ["10 tokens/s", "25 tokens/s"]
    operator.step(1.0, num_tokens=7)
    assert len(operator.status) == 2
    operator.step(1.0, num_tokens=7)
    assert operator.status[2].endswith("7 tokens/s")


def test_a_full_cache_is_warned_of_once_and_only_while_someone_waits():
    operator = Operator()
    operator.step(free=1, live=18, num_waiting=0)  # full, but nobody waits
    operator.step(free=2, live=18, num_waiting=4)  # 90 % is not past 90 %
    assert operator.warnings == []
    operator.step(free=1, live=18, num_waiting=4)
    assert len(operator.warnings) == 1
    for part in ("95% in blocks", "90% live", "4 requests waiting", "memory_utilization"):
        assert part in operator.warnings[0]
    operator.step(free=10, live=10, num_waiting=4)
    operator.step(free=0, live=18, num_waiting=4)
    assert len(operator.warnings) == 1


def test_preemptions_are_warned_of_at_the_first_and_at_each_doubling():
    operator = Operator()
    operator.step(free=1, live=18)  # the use that led to the preemption, not what it left
    said_at = []
    for number in range(1, 18):
        operator.preempt()
        before = len(operator.warnings)
        operator.step()
        if len(operator.warnings) > before:
            said_at.append(number)
    assert said_at == [1, 2, 4, 8, 16]
    first = operator.warnings[0]
    for part in ("preemption 1", "r9", "7 computed tokens", "recompute", "95% in blocks"):
        assert part in first
    for remedy in ("memory_utilization", "max_num_seqs", "max_num_batched_tokens"):
        assert remedy in first


def test_preemptions_of_one_step_are_each_counted_once():
    operator = Operator()
    operator.preempt(3)
    operator.step()
    operator.step()
    assert [w.split(":")[0] for w in operator.warnings] == ["preemption 1", "preemption 2"]
    operator.preempt()
    operator.step()
    assert operator.warnings[-1].startswith("preemption 4")


@pytest.mark.parametrize("num_blocks", [5, 100])
def test_an_engine_passes_on_its_preemptions(num_blocks):
    operator = Operator(every_s=2.0)
    engine = make_engine(
        make_limits(block_size=2, num_blocks=num_blocks, max_model_len=8),
        notices=operator.notices,
    )
    submit(engine, prompt_ids(3), max_tokens=4)
    submit(engine, prompt_ids(2), max_tokens=3)
    run_to_end(engine)
    num_preemptions = sum(r.num_preemptions for r in engine.requests)
    preemption_warnings = [w for w in operator.warnings if w.startswith("preemption")]
    assert len(preemption_warnings) == num_preemptions == (num_blocks == 5)
    assert len(operator.status) == len(engine.steps) // 2


def test_a_pause_is_neither_reported_nor_counted_into_the_rate():
    operator = Operator()
    operator.step()
    operator.now_s = 1000.0  # nobody asked for anything for a while
    operator.step()
    assert operator.status == []
    for _ in range(4):
        operator.step()
    assert [line.split(", ")[-1] for line in operator.status] == ["10 tokens/s"]


def test_a_full_cache_is_no_warning_where_nobody_can_be_preempted():
    operator = Operator(can_preempt=False)
    operator.step(free=0, live=18, num_waiting=4)
    assert operator.warnings == []


def test_blocks_that_only_the_prefix_cache_keeps_are_not_in_use():
    operator = Operator(every_s=1.0)
    operator.step(free=0, live=10, cached=10, num_waiting=4)
    assert operator.warnings == []
    assert operator.status == ["running 3, waiting 4, KV 50% in blocks, 50% live, 10 tokens/s"]
    operator.step(free=0, live=18, cached=1, num_waiting=4)
    assert "95% in blocks" in operator.warnings[0]


@pytest.mark.parametrize("why", ["forced", "displaced by 3", "asked for"])
def test_only_preemptions_for_want_of_memory_are_warned_of(why):
    operator = Operator()
    operator.preempt(detail=f"recompute, {why}")
    operator.step()
    assert operator.warnings == []
    operator.preempt()
    operator.step()
    assert operator.warnings[0].startswith("preemption 1: ")

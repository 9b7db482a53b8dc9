"""What an operator is told while the engine runs: a status line, and two warnings.

Owns: when to say what; the words go to a `say` function. In: step records, slot counts, events.
Must not know: how to act on any of it.
"""

from collections.abc import Callable

from paxserve.events import Event, EventLog, Kind
from paxserve.ledger import SlotCounts
from paxserve.records import StepRecord

type Say = Callable[[str], None]

STATUS_EVERY_S = 5.0
FULL_SHARE = 0.9
_NO_SHORTAGE = ("forced", "displaced", "asked")
REMEDIES = (
    "more KV memory (memory_utilization, kv_cache_memory_bytes), "
    "or lower max_num_seqs or max_num_batched_tokens"
)


class Notices:
    """Args:

    status: receives the status line every `every_s` seconds of the engine's clock; its rate counts
    computed tokens per second of step time. None: no status line.
    warn: receives warnings: once when KV use first passes 90 % with requests waiting, and at the
    first preemption and each doubling of their number.
    can_preempt: whether running requests may be short of memory later; without it a full pool is
    the plan, not a warning.
    """

    def __init__(
        self,
        *,
        status: Say | None,
        warn: Say,
        can_preempt: bool = True,
        every_s: float = STATUS_EVERY_S,
    ) -> None:
        self._warned_full = not can_preempt
        self._status = status
        self._warn = warn
        self._every_s = every_s
        self._next_status_s = every_s
        self._num_tokens = 0
        self._num_entered = self._num_cached = 0
        self._busy_s = 0.0
        self._last_end_s = -every_s
        self._num_events_seen = 0
        self._num_preemptions = 0
        self._use = "its start"

    def watches(self, record: StepRecord) -> bool:
        """Whether there might be something to say of a step in which the same run and wait as in
        this one, and nobody is preempted.
        """
        return self._status is not None or (record.num_waiting > 0 and not self._warned_full)

    def after_step(self, record: StepRecord, slots: SlotCounts, events: EventLog) -> None:
        """Look at one step."""
        usable = sum(slots) - slots.null
        block_share = 1 - (slots.free + slots.free_unfit + slots.cached) / usable
        use = f"KV {block_share:.0%} in blocks, {slots.live / usable:.0%} live"
        if block_share > FULL_SHARE and record.num_waiting and not self._warned_full:
            self._warned_full = True
            self._warn(
                f"the KV cache is nearly full ({use}) with {record.num_waiting} requests waiting; "
                f"preemptions may follow. Remedies: {REMEDIES}"
            )
        for event in events.since(self._num_events_seen):
            if event.kind is Kind.PREEMPTED and not any(
                why in event.detail for why in _NO_SHORTAGE
            ):
                self._on_preemption(event, self._use)  # of the use before it, as the step began
        self._use = use
        self._num_events_seen = len(events)
        self._num_tokens += record.num_tokens
        self._num_entered += record.num_entered_tokens
        self._num_cached += record.num_cached_tokens
        self._busy_s += record.duration_s
        end_s = record.start_s + record.duration_s
        if record.start_s - self._last_end_s >= self._every_s:  # the first step after a pause
            self._next_status_s = record.start_s + self._every_s
        self._last_end_s = end_s
        if self._status is not None and end_s >= self._next_status_s:
            rate = self._num_tokens / max(self._busy_s, 1e-9)
            self._status(
                f"running {record.num_running}, waiting {record.num_waiting}, {use}, "
                f"{self._hits()}{rate:.0f} tokens/s"
            )
            self._num_tokens, self._busy_s = 0, 0.0
            self._next_status_s = end_s + self._every_s

    def _hits(self) -> str:
        """What the prefix cache had of the tokens that entered, if it ever had any."""
        return f"hits {self._num_cached / self._num_entered:.0%}, " if self._num_cached else ""

    def _on_preemption(self, event: Event, use: str) -> None:
        self._num_preemptions += 1
        if self._num_preemptions & (self._num_preemptions - 1):
            return
        self._warn(
            f"preemption {self._num_preemptions}: request {event.request_id} lost "
            f"{event.num_tokens} computed tokens ({event.detail}) at {use}. Remedies: {REMEDIES}"
        )

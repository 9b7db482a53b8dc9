"""D6: vLLM's five flags, and block_size: what each moves, and what the log shows of it.

One workload on a card whose memory is short (Llama-3.1-8B on an RTX 4090), `baseline=vllm_v1` as it
is by default, and each flag low, default and high by itself. Source: vLLM's documentation of its
engine arguments, 0.32; the workload is made up.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from paxserve.claims import Claim, Row, Scale, Value
from paxserve.claims.simulation import served
from paxserve.events import Kind


class Flag(NamedTuple):
    """settings: overrides per setting, low first; the default has none. moves: the figure that
    must rise (+1) or fall (-1) from the first setting to the last. shows: what the log tells.
    """

    name: str
    settings: Mapping[str, tuple[str, ...]]
    moves: str
    sign: int
    shows: str


FLAGS = (
    Flag(
        "memory_utilization",
        {
            "0.85": ("limits.memory_utilization=0.85",),
            "0.9": (),
            "0.95": ("limits.memory_utilization=0.95",),
        },
        "held back for memory",
        -1,
        "heads held back for memory, preemptions",
    ),
    Flag(
        "max_num_seqs",
        {
            "16": ("limits.max_num_seqs=16",),
            "256": (),
            "1024": ("limits.max_num_seqs=1024",),
        },
        "held back for rows",
        -1,
        "heads held back for rows while KV use is low",
    ),
    Flag(
        "max_num_batched_tokens",
        {
            "256": ("limits.max_num_batched_tokens=256",),
            "2048": (),
            "8192": ("limits.max_num_batched_tokens=8192",),
        },
        "p99_itl_ms",
        +1,
        "many chunks per prompt when low; steps of thousands of tokens when high",
    ),
    Flag(
        "enable_chunked_prefill",
        {
            # Whole prompts, for which the budget must cover the longest.
            "off": ("batching=iteration", "limits.max_num_batched_tokens=4096"),
            "on": (),
        },
        "chunks per prompt",
        +1,
        "one chunk per prompt when off, steps as long as the longest prompt",
    ),
    Flag(
        "enable_prefix_caching",
        {"off": ("prefix_cache=none",), "on": ()},
        "computed_tokens",
        -1,
        "cached tokens of who enters: none when off",
    ),
    Flag(
        "block_size",
        {"1": ("limits.block_size=1",), "16": (), "256": ("limits.block_size=256",)},
        "kv_share_tail",
        +1,
        "live slots far below the blocks in use; fewer prefix hits",
    ),
)
FIGURES = (
    "output_throughput",
    "mean_ttft_ms",
    "p99_ttft_ms",
    "p99_itl_ms",
    "mean_running_requests",
    "num_preemptions",
    "prefix_hit_rate",
    "computed_tokens",
    "kv_share_live",
    "kv_share_tail",
    "num_steps",
)

LOGGED = ("rows", "budget", "memory")
# V1 asks its gate first whether a whole prompt finds room; who has no row is refused before that.
_REASONS = {"rows": "rows", "budget": "budget", "blocks": "memory", "gate": "memory"}

D6 = Row(
    "D6",
    "The five flags and block_size, each low, default and high on one workload: which metric "
    "moves, what the log shows",
    {flag.name: f"{'raises' if flag.sign > 0 else 'lowers'} {flag.moves}" for flag in FLAGS},
    "study: direction",
)


def figures_of(overrides: Sequence[str]) -> dict[str, Any]:
    """Figures of a run, and what its log counts: steps in which the head was held back, by what
    it wanted for, and how many chunks a prompt is computed in.
    """
    done = served(overrides)
    events = done.engine.events
    reasons = Counter(_REASONS[e.detail.split(":")[0]] for e in events if e.kind is Kind.HELD_BACK)
    counts = {f"held back for {reason}": reasons[reason] for reason in LOGGED}
    kinds = Counter(event.kind for event in events)
    chunks = {"chunks per prompt": kinds[Kind.CHUNK] / kinds[Kind.ENTERED]}
    return {name: done.summary[name] for name in FIGURES} | counts | chunks


def cell(settings: Sequence[str], *, num_requests: int) -> list[str]:
    """The overrides of one setting."""
    return [
        "experiment=five_flags",
        "baseline=vllm_v1",
        *settings,
        f"workload.num_requests={num_requests}",
    ]


def moved(flag: Flag, found: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the flag's figure goes its way from the first setting to the last, and never back."""
    values = [each[flag.moves] * flag.sign for each in found]
    return values == sorted(values) and values[0] < values[-1]


def five_flags(
    scale: Scale,
    *,
    measure: Callable[[Sequence[str]], dict[str, Any]] = figures_of,
) -> Iterator[Claim]:
    """D6: the figure that each flag moves, setting by setting."""
    num_requests = scale.of(1500, 150)
    found = {
        flag.name: [
            measure(cell(settings, num_requests=num_requests))
            for settings in flag.settings.values()
        ]
        for flag in FLAGS
    }
    measured: dict[str, Value] = {
        flag.name: f"{flag.moves}: "
        + ", ".join(
            f"{each[flag.moves]:.4g} at {setting}"
            for setting, each in zip(flag.settings, found[flag.name], strict=True)
        )
        for flag in FLAGS
    }
    yield D6.measured(
        measured,
        holds=all(moved(flag, found[flag.name]) for flag in FLAGS),
        note=f"{num_requests} requests; all figures and counts: experiments/five_flags",
    )

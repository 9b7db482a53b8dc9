"""B10: preemption changes no token, whatever is done with the victim, and says so.

Source: Kwon et al., SOSP'23, section 4.5. What recomputing and swapping cost (Figure 19)
needs a hardware model: experiments/vllm_fig18 has it (19b, beside 18b's block sizes).
"""

import re
from collections.abc import Iterator

from paxserve.claims import Claim, Row, Scale
from paxserve.claims.serving import ask, make_engine, make_limits, policies, run_to_end
from paxserve.notices import Notices

_USE = re.compile(r"KV \d+% in blocks, \d+% live")
_REMEDIES = ("memory_utilization", "kv_cache_memory_bytes", "max_num_seqs")
_NUM_REQUESTS = 24

B10 = Row(
    "B10",
    "Preemption: recompute and swap give the tokens of a roomy pool, and each is warned about with "
    "cache use and remedies",
    {
        "requests with other tokens, recompute": 0,
        "requests with other tokens, swap": 0,
        "warnings without use or remedies": 0,
    },
)


def preemption(scale: Scale) -> Iterator[Claim]:
    """B10: the same requests three times. Tokens are hashes of what lay in the KV slots."""
    roomy, _, _ = _serve("recompute", num_blocks=1000)
    tight = {name: _serve(name, num_blocks=40) for name in ("recompute", "swap")}
    warnings = [warning for _, told, _ in tight.values() for warning in told]
    silent = [name for name, (_, told, _) in tight.items() if not any(map(_is_of_one, told))]
    counts = {name: num_preempted for name, (_, _, num_preempted) in tight.items()}
    measured = {
        f"requests with other tokens, {name}": _num_different(roomy, tokens)
        for name, (tokens, _, _) in tight.items()
    }
    measured["warnings without use or remedies"] = sum(not _is_complete(w) for w in warnings)
    yield B10.measured(
        measured,
        holds=measured == B10.stated and not silent and all(counts.values()),
        note=f"preemptions: {counts['recompute']} recomputed, {counts['swap']} swapped; without "
        f"a warning: {', '.join(silent) or 'neither'}; e.g. {warnings[-1] if warnings else ''}",
    )


def _serve(how: str, *, num_blocks: int) -> tuple[list[list[int]], list[str], int]:
    """Tokens of each request, warnings, preemptions that were done as asked."""
    told: list[str] = []
    limits = make_limits(max_num_seqs=8, num_blocks=num_blocks, num_host_blocks=200)
    notices = Notices(status=None, warn=told.append)
    engine = make_engine(limits, policies(preemption=how), notices=notices)
    for number in range(_NUM_REQUESTS):
        ask(engine, [7 + number] * (40 + 9 * number % 50), 40 + 17 * number % 60)
    run_to_end(engine)
    as_asked = [e for e in engine.events if e.kind == "preempted" and e.detail.startswith(how)]
    return [list(r.output_token_ids) for r in engine.requests], told, len(as_asked)


def _num_different(expected: list[list[int]], found: list[list[int]]) -> int:
    return sum(ours != theirs for ours, theirs in zip(expected, found, strict=True))


def _is_of_one(warning: str) -> bool:
    """Whether a preemption is told, and not only that some may follow."""
    return warning.startswith("preemption ")


def _is_complete(warning: str) -> bool:
    return bool(_USE.search(warning)) and all(remedy in warning for remedy in _REMEDIES)

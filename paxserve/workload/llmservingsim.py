"""Requests as LLMServingSim recorded them when it measured vLLM: lengths and times.

Fields `input_toks`, `output_toks`, `arrival_time` (seconds on any clock). What the prompts said was
not recorded: with content=random_ids nothing is shared between them, so a prefix cache finds only
what a preempted request had computed itself.

Source: LLMServingSim (Cho et al., IISWC 2024), the files of its bench.
"""

from dataclasses import dataclass
from typing import Any

from paxserve.numbers import MOST_S, MOST_TOKENS, real, whole
from paxserve.traces.jsonl_file import field, read_jsonl
from paxserve.traces.settings import check_file
from paxserve.traces.times import ArrivalTimes
from paxserve.workload import Source, Vocabulary
from paxserve.workload.arrivals import Arrivals
from paxserve.workload.content import Content
from paxserve.workload.sources.composed import with_content
from paxserve.workload.sources.conversations import KnownRequest

LAST_S = 10 * MOST_S  # seconds since 1970 are above MOST_S


@dataclass(frozen=True, slots=True)
class LlmServingSim:
    """Attributes:

    path: the file, relative to the working directory.
    limit: read at most this many requests; 0 reads all.
    arrivals, content: choices of the axes of those names; trace takes the file's times.
    """

    path: str
    limit: int
    arrivals: Arrivals
    content: Content

    forces_lengths = True

    def __post_init__(self) -> None:
        """Check path and limit."""
        check_file(self.path, self.limit)

    def open(self, *, seed: int, vocabulary: Vocabulary) -> Source:
        """See `Workload.open`."""
        requests: list[KnownRequest] = []
        times = ArrivalTimes()
        for _, place, fields in read_jsonl(self.path):
            if self.limit and len(requests) == self.limit:
                break
            requests.append(_request(fields, place, times))
        if not requests:
            raise ValueError(f"{self.path} has no requests")
        return with_content(requests, self.arrivals, self.content, seed=seed, vocabulary=vocabulary)


def _request(fields: dict[str, Any], place: str, times: ArrivalTimes) -> KnownRequest:
    stamp = field(fields, "arrival_time", place)
    name = f"{place}: arrival_time"
    return KnownRequest(
        num_prompt_tokens=_tokens(fields, "input_toks", place),
        num_output_tokens=_tokens(fields, "output_toks", place),
        arrival_s=times.arrival_s(name, real(name, stamp, high=LAST_S), stamp),
    )


def _tokens(fields: dict[str, Any], name: str, place: str) -> int:
    return whole(f"{place}: {name}", field(fields, name, place), low=1, high=MOST_TOKENS)

"""Prompts and output lengths in a JSON-lines file, as vLLM's benchmark reads them.

Fields `prompt` and `output_tokens`; others are ignored.

Source: `vllm bench serve --dataset-name custom`; there `output_tokens` may be left out.
"""

from dataclasses import dataclass

from paxserve.numbers import MOST_TOKENS, whole
from paxserve.traces.jsonl_file import field, read_jsonl, text_field
from paxserve.traces.settings import check_file
from paxserve.workload import Source, Vocabulary
from paxserve.workload.arrivals import Arrivals
from paxserve.workload.sources.composed import with_prompts
from paxserve.workload.sources.conversations import KnownRequest


@dataclass(frozen=True, slots=True)
class VllmBench:
    """Attributes:

    path: the file, relative to the working directory.
    limit: read at most this many requests; 0 reads all.
    arrivals: a choice of the axis of that name.
    """

    path: str
    limit: int
    arrivals: Arrivals

    forces_lengths = True

    def __post_init__(self) -> None:
        """Check path and limit."""
        check_file(self.path, self.limit)

    def open(self, *, seed: int, vocabulary: Vocabulary) -> Source:
        """See `Workload.open`."""
        prompts: list[str] = []
        requests: list[KnownRequest] = []
        for _, place, fields in read_jsonl(self.path):
            if self.limit and len(requests) == self.limit:
                break
            prompts.append(text_field(fields, "prompt", place))
            name = f"{place}: output_tokens"
            tokens = whole(name, field(fields, "output_tokens", place), low=1, high=MOST_TOKENS)
            requests.append(KnownRequest(num_output_tokens=tokens))
        if not requests:
            raise ValueError(f"{self.path} has no requests")
        return with_prompts(requests, self.arrivals, prompts.__getitem__, seed=seed)

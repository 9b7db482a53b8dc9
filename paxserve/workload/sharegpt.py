"""Conversations of people with a chat model, as ShareGPT's JSON files have them.

One array of objects with `conversations`, a list of `{"from": ..., "value": ...}`. The first two
messages are a prompt and the answer whose length is the output's, whoever sent them. The file is
read piece by piece, and only as far as `limit` needs.

Source: the ShareGPT data set of `vllm bench serve`, with its filter as default; there the
conversations are shuffled, here they come in the file's order.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from paxserve.numbers import shown
from paxserve.traces.json_array import read_json_array
from paxserve.traces.jsonl_file import field, text_field
from paxserve.traces.length_filter import LengthFilter
from paxserve.traces.settings import check_file
from paxserve.workload import Source, Vocabulary
from paxserve.workload.arrivals import Arrivals
from paxserve.workload.sources.composed import with_prompts
from paxserve.workload.sources.conversations import KnownRequest

type Encode = Callable[[str], Sequence[int]]


@dataclass(frozen=True, slots=True)
class Sharegpt:
    """Attributes:

    path: the file, relative to the working directory.
    limit: keep at most this many requests; 0 keeps all.
    min_tokens, max_input_tokens, max_total_tokens: others are left out; None is no limit.
    arrivals: a choice of the axis of that name.
    """

    path: str
    limit: int
    min_tokens: int
    max_input_tokens: int | None
    max_total_tokens: int | None
    arrivals: Arrivals

    forces_lengths = True

    def __post_init__(self) -> None:
        """Check path, limit and filter."""
        check_file(self.path, self.limit)
        self._filter()

    def open(self, *, seed: int, vocabulary: Vocabulary) -> Source:
        """See `Workload.open`."""
        if vocabulary.encode is None:
            raise ValueError(
                "workload=sharegpt needs a model with a tokenizer, to know lengths in tokens"
            )
        kept = list(islice(self._kept(vocabulary.encode), self.limit or None))
        if not kept:
            raise ValueError(f"{self.path} has no conversation within the bounds")
        prompts = [prompt for prompt, _ in kept]
        requests = [known for _, known in kept]
        return with_prompts(requests, self.arrivals, prompts.__getitem__, seed=seed)

    def _kept(self, encode: Encode) -> Iterator[tuple[str, KnownRequest]]:
        keeps = self._filter().keeps
        for place, item in read_json_array(self.path):
            messages = _messages(item, place)
            if len(messages) < 2:
                continue
            prompt, answer = messages
            known = KnownRequest(
                num_prompt_tokens=len(encode(prompt)), num_output_tokens=len(encode(answer))
            )
            if keeps(known.num_prompt_tokens, known.num_output_tokens):
                yield prompt, known

    def _filter(self) -> LengthFilter:
        return LengthFilter(self.min_tokens, self.max_input_tokens, self.max_total_tokens)


def _messages(item: dict[str, Any], place: str) -> list[str]:
    """The texts of the first two messages, or fewer."""
    messages = field(item, "conversations", place)
    if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
        raise ValueError(f"{place}: conversations must be a list of objects, got {shown(messages)}")
    return [text_field(message, "value", place) for message in messages[:2]]

"""Mooncake's traces, whose requests say which blocks of their prompts are shared.

Fields `timestamp` (ms), `input_length`, `output_length`, `hash_ids`: one id per 512 tokens of the
prompt, the last one for what is left. Equal ids become equal token ids, so that a prefix cache
finds what theirs found.

Source: Mooncake (Qin et al., FAST 2025), section 4. With `block_tokens` below 512 all prompts
shrink alike, and what is shared stays shared.
"""

import math
from dataclasses import dataclass
from typing import Any

from paxserve import draws
from paxserve.numbers import MOST_S, MOST_TOKENS, real, shown, whole
from paxserve.traces.jsonl_file import field, read_jsonl
from paxserve.traces.settings import check_file
from paxserve.traces.times import ArrivalTimes
from paxserve.workload import Source, Vocabulary
from paxserve.workload.arrivals import Arrivals
from paxserve.workload.sources.composed import with_prompts
from paxserve.workload.sources.conversations import KnownRequest

RECORDED_BLOCK_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Mooncake:
    """Attributes:

    path: the file, relative to the working directory.
    limit: read at most this many requests; 0 reads all.
    block_tokens: token ids that stand for one block of 512.
    scale_output: factor on output lengths.
    arrivals: a choice of the axis of that name; trace takes the times of the file.
    """

    path: str
    limit: int
    block_tokens: int
    scale_output: float
    arrivals: Arrivals

    forces_lengths = True

    def __post_init__(self) -> None:
        """Check the settings."""
        check_file(self.path, self.limit)
        whole("block_tokens", self.block_tokens, low=1, high=RECORDED_BLOCK_TOKENS)
        real("scale_output", self.scale_output, high=1e3, above=True)

    def open(self, *, seed: int, vocabulary: Vocabulary) -> Source:
        """See `Workload.open`."""
        requests: list[KnownRequest] = []
        hash_ids: list[tuple[int, ...]] = []
        times = ArrivalTimes()
        for _, place, fields in read_jsonl(self.path):
            if self.limit and len(requests) == self.limit:
                break
            requests.append(self._request(fields, place, times))
            hash_ids.append(_hash_ids(fields, place))
        if not requests:
            raise ValueError(f"{self.path} has no requests")

        def prompt(number: int) -> tuple[int, ...]:
            """Made when it is sent: all of them together would fill gigabytes."""
            ids = [
                token_id
                for hash_id in hash_ids[number]
                for token_id in self._block(hash_id, seed, vocabulary.size)
            ]
            return tuple(ids[: requests[number].num_prompt_tokens])

        return with_prompts(requests, self.arrivals, prompt, seed=seed)

    def _request(self, fields: dict[str, Any], place: str, times: ArrivalTimes) -> KnownRequest:
        stamp = field(fields, "timestamp", place)
        time_s = real(f"{place}: timestamp", stamp, high=1e3 * MOST_S) / 1e3
        output = _tokens(fields, "output_length", place)
        return KnownRequest(
            num_prompt_tokens=self._scaled(_tokens(fields, "input_length", place)),
            num_output_tokens=max(1, round(output * self.scale_output)),
            arrival_s=times.arrival_s(f"{place}: timestamp", time_s, stamp),
        )

    def _scaled(self, num_tokens: int) -> int:
        blocks, rest = divmod(num_tokens, RECORDED_BLOCK_TOKENS)
        return self.block_tokens * blocks + math.ceil(
            rest * self.block_tokens / RECORDED_BLOCK_TOKENS
        )

    def _block(self, hash_id: int, seed: int, vocab_size: int) -> tuple[int, ...]:
        return draws.token_ids(
            self.block_tokens, vocab_size, seed=seed, kind=draws.Stream.BLOCKS, number=hash_id
        )


def _tokens(fields: dict[str, Any], name: str, place: str) -> int:
    return whole(f"{place}: {name}", field(fields, name, place), low=1, high=MOST_TOKENS)


def _hash_ids(fields: dict[str, Any], place: str) -> tuple[int, ...]:
    value = field(fields, "hash_ids", place)
    if not isinstance(value, list) or not all(type(i) is int and 0 <= i < 2**64 for i in value):
        raise ValueError(
            f"{place}: hash_ids must be a list of integers from 0 to 2**64 - 1, got {shown(value)}"
        )
    num_blocks = math.ceil(fields["input_length"] / RECORDED_BLOCK_TOKENS)
    if len(value) != num_blocks:
        raise ValueError(
            f"{place}: hash_ids has {len(value)} ids, input_length={fields['input_length']} "
            f"needs {num_blocks}, one per {RECORDED_BLOCK_TOKENS} tokens"
        )
    return tuple(value)

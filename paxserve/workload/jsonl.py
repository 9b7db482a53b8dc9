"""Requests from a JSONL file, one object per line.

Fields: one of `prompt`, `messages` (chat), `prompt_token_ids`; optional `id`, `max_tokens` (also
accepted as `output_len`), `arrival_s`, `seed`, `ignore_eos`, `client`, `priority`. Other fields are
ignored, so that files made for other tools can be read. A bad line is an error with its number.
"""

from dataclasses import dataclass
from typing import Any

from paxserve.numbers import MOST_S, real, whole
from paxserve.request import Origin
from paxserve.sampling_params import MAX_COUNT, MAX_SEED
from paxserve.traces.jsonl_file import read_jsonl
from paxserve.traces.settings import check_file
from paxserve.workload import Arrival, Source, Vocabulary
from paxserve.workload.sources.listed import Listed

_CONTENTS = ("prompt", "messages", "prompt_token_ids")


@dataclass(frozen=True, slots=True)
class Jsonl:
    """Attributes:

    path: the file, relative to the working directory.
    limit: read at most this many requests; 0 reads all.
    arrival_scale: factor on arrival times; 0 lets all arrive at once.
    """

    path: str
    limit: int = 0
    arrival_scale: float = 1.0

    forces_lengths = False

    def __post_init__(self) -> None:
        """Check the settings."""
        check_file(self.path, self.limit)
        real("arrival_scale", self.arrival_scale, high=1e6)

    def open(self, *, seed: int, vocabulary: Vocabulary) -> Source:
        """See `Workload.open`. The file says everything: the seed changes nothing."""
        arrivals: dict[str, Arrival] = {}
        for number, place, fields in read_jsonl(self.path):
            if self.limit and len(arrivals) == self.limit:
                break
            arrival = self._arrival(fields, number, place)
            if arrival.request_id in arrivals:
                raise ValueError(f"{place}: id {arrival.request_id!r} comes twice")
            arrivals[arrival.request_id] = arrival
        if not arrivals:
            raise ValueError(f"{self.path} has no requests")
        return Listed(arrivals.values())

    def _arrival(self, fields: dict[str, Any], number: int, where: str) -> Arrival:
        contents = [name for name in _CONTENTS if name in fields]
        if len(contents) != 1:
            raise ValueError(f"{where} must have exactly one of {_CONTENTS}, has {contents}")
        return Arrival(
            request_id=str(fields.get("id", number - 1)),
            arrival_s=self.arrival_scale * _time(fields, where),
            prompt=_text(fields, "prompt", where),
            messages=_messages(fields, where),
            prompt_token_ids=_token_ids(fields, where),
            max_tokens=_whole(fields, _max_tokens_name(fields), where, low=1, high=MAX_COUNT),
            seed=_whole(fields, "seed", where, low=0, high=MAX_SEED),
            ignore_eos=_flag(fields, "ignore_eos", where),
            origin=Origin(
                client=_text(fields, "client", where) or "",
                priority=_whole(fields, "priority", where, low=-MAX_COUNT, high=MAX_COUNT) or 0,
                num_true_output_tokens=_length(fields, "true_output_tokens", where),
                num_predicted_output_tokens=_length(fields, "predicted_output_tokens", where),
            ),
        )


def _time(fields: dict[str, Any], where: str) -> float:
    return real(f"{where}: arrival_s", fields.get("arrival_s", 0.0), high=MOST_S)


def _max_tokens_name(fields: dict[str, Any]) -> str:
    return "max_tokens" if "max_tokens" in fields else "output_len"


def _whole(fields: dict[str, Any], name: str, where: str, *, low: int, high: int) -> int | None:
    value = fields.get(name)
    return None if value is None else whole(f"{where}: {name}", value, low=low, high=high)


def _length(fields: dict[str, Any], name: str, where: str) -> int | None:
    return _whole(fields, name, where, low=1, high=MAX_COUNT)


def _flag(fields: dict[str, Any], name: str, where: str) -> bool | None:
    value = fields.get(name)
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"{where}: {name} must be true or false, got {value!r}")
    return value


def _text(fields: dict[str, Any], name: str, where: str) -> str | None:
    value = fields.get(name)
    if value is not None and not isinstance(value, str):
        raise ValueError(f"{where}: {name} must be a string, got {str(value)[:60]!r}")
    return value


def _messages(fields: dict[str, Any], where: str) -> tuple[dict[str, str], ...] | None:
    value = fields.get("messages")
    if value is None:
        return None
    if not isinstance(value, list) or not all(isinstance(message, dict) for message in value):
        raise ValueError(f"{where}: messages must be a list of objects, got {str(value)[:60]!r}")
    return tuple(value)


def _token_ids(fields: dict[str, Any], where: str) -> tuple[int, ...] | None:
    value = fields.get("prompt_token_ids")
    if value is None:
        return None
    if not isinstance(value, list) or not all(type(token) is int for token in value):
        raise ValueError(f"{where}: prompt_token_ids must be a list of integers")
    return tuple(value)

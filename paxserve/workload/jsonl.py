"""Requests from a JSONL file, one object per line.

Fields: one of `prompt`, `messages` (chat), `prompt_token_ids`; optional `id`, `max_tokens` (also
accepted as `output_len`), `arrival_s`, `seed`. Other fields are ignored, so that files made for
other tools can be read. A bad line is an error with its number.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paxserve.sampling_params import MAX_COUNT, MAX_SEED
from paxserve.workload import Arrival

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

    def __post_init__(self) -> None:
        """Check the settings."""
        if not isinstance(self.path, str):
            raise ValueError(f"path must be the name of a file, got {self.path!r}")
        if not isinstance(self.limit, int) or self.limit < 0:
            raise ValueError(f"limit must be an integer >= 0, got {self.limit!r}")
        scale = self.arrival_scale
        if not isinstance(scale, int | float) or not math.isfinite(scale) or scale < 0:
            raise ValueError(f"arrival_scale must be a number >= 0, got {scale!r}")

    def arrivals(self) -> Sequence[Arrival]:
        """See `Workload.arrivals`.

        Raises:
            ValueError: a line is not as described; the message has file and line number.
            FileNotFoundError: there is no such file.
        """
        arrivals: dict[str, Arrival] = {}
        for number, line in enumerate(self._lines(), start=1):
            if self.limit and len(arrivals) == self.limit:
                break
            if not line.strip():
                continue
            arrival = self._arrival(line, number)
            if arrival.request_id in arrivals:
                raise ValueError(
                    f"{self.path} line {number}: id {arrival.request_id!r} comes twice"
                )
            arrivals[arrival.request_id] = arrival
        return sorted(arrivals.values(), key=lambda arrival: arrival.arrival_s)

    def _lines(self) -> list[str]:
        try:
            return Path(self.path).read_text(encoding="utf-8-sig").split("\n")
        except UnicodeDecodeError as error:
            raise ValueError(f"{self.path} is not UTF-8: {error}") from error
        except IsADirectoryError:
            raise FileNotFoundError(f"workload file {self.path!r} is a directory") from None
        except FileNotFoundError:
            raise FileNotFoundError(f"workload file {self.path!r} does not exist") from None

    def _arrival(self, line: str, number: int) -> Arrival:
        where = f"{self.path} line {number}"
        try:
            fields = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{where} is not JSON: {error}") from error
        if not isinstance(fields, dict):
            raise ValueError(f"{where} must hold an object, got {line.strip()[:60]}")
        contents = [name for name in _CONTENTS if name in fields]
        if len(contents) != 1:
            raise ValueError(f"{where} must have exactly one of {_CONTENTS}, has {contents}")
        return Arrival(
            request_id=str(fields.get("id", number - 1)),
            arrival_s=self.arrival_scale * _time(fields, where),
            prompt=_text(fields, where),
            messages=_messages(fields, where),
            prompt_token_ids=_token_ids(fields, where),
            max_tokens=_whole(fields, _max_tokens_name(fields), where, low=1),
            seed=_whole(fields, "seed", where, low=0),
        )


def _time(fields: dict[str, Any], where: str) -> float:
    value = fields.get("arrival_s", 0.0)
    if not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise ValueError(f"{where}: arrival_s must be a number of seconds >= 0, got {value!r}")
    return float(value)


def _max_tokens_name(fields: dict[str, Any]) -> str:
    return "max_tokens" if "max_tokens" in fields else "output_len"


def _whole(fields: dict[str, Any], name: str, where: str, *, low: int) -> int | None:
    value = fields.get(name)
    most = MAX_SEED if name == "seed" else MAX_COUNT
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= most:
        raise ValueError(f"{where}: {name} must be an integer from {low} to {most}, got {value!r}")
    return value


def _text(fields: dict[str, Any], where: str) -> str | None:
    value = fields.get("prompt")
    if value is not None and not isinstance(value, str):
        raise ValueError(f"{where}: prompt must be a string, got {str(value)[:60]!r}")
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

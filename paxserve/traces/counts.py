"""CSV files that tell of each request how many tokens it has, and perhaps when and from whom.

Owns: the columns of the formats that there are. In: a path. Out: `KnownRequest`s. Must not know:
what prompts will say.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from types import MappingProxyType

from paxserve.numbers import MOST_S, MOST_TOKENS, real_text, whole_text
from paxserve.traces.csv_file import header_of, read_csv
from paxserve.traces.times import ArrivalTimes
from paxserve.workload.sources.conversations import KnownRequest

NO_TIME = "XXX"


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Names of the columns that a format has; None where it has none of the kind."""

    prompt: str
    output: str
    time: str | None = None
    client: str | None = None

    def names(self) -> list[str]:
        """All of them, in the order of the fields."""
        every = (self.prompt, self.output, self.time, self.client)
        return [name for name in every if name is not None]


AZURE = Columns(prompt="ContextTokens", output="GeneratedTokens", time="TIMESTAMP")
VIDUR = Columns(prompt="num_prefill_tokens", output="num_decode_tokens")
VTC = Columns(
    prompt="num_prefill_tokens", output="num_decode_tokens", time="arrived_at_s", client="client"
)


def columns_of(path: str) -> Columns:
    """The format of a file, told by its header; the one with most columns that fit.

    Raises:
        ValueError: none fits.
    """
    header = header_of(path)
    for columns in (VTC, AZURE, VIDUR):
        if set(columns.names()) <= set(header):
            return columns
    raise ValueError(
        f"{path} line 1: must have columns {' and '.join(AZURE.names())}, or "
        f"{' and '.join(VIDUR.names())}, has {', '.join(header)}"
    )


def read_counts(path: str, columns: Columns, *, limit: int = 0) -> list[KnownRequest]:
    """The requests of a file; times count from the first one. `limit` 0 reads all.

    A file whose first time is `XXX` has no times.

    Raises:
        ValueError: a row is not as described, or time goes back; file, line and column are named.
        FileNotFoundError: there is no such file.
    """
    requests: list[KnownRequest] = []
    times = ArrivalTimes()
    for place, texts in read_csv(path, columns.names()):
        if limit and len(requests) == limit:
            break
        fields = dict(zip(columns.names(), texts, strict=True))
        if not requests:
            has_times = columns.time is not None and fields[columns.time] != NO_TIME
        requests.append(
            KnownRequest(
                num_prompt_tokens=_tokens(fields, columns.prompt, place),
                num_output_tokens=_tokens(fields, columns.output, place),
                arrival_s=_arrival_s(fields, columns.time, place, times) if has_times else None,
                client="" if columns.client is None else fields[columns.client],
            )
        )
    if not requests:
        raise ValueError(f"{path} has no requests")
    return requests


def _tokens(fields: Mapping[str, str], column: str, place: str) -> int:
    return whole_text(f"{place}: {column}", fields[column], low=1, high=MOST_TOKENS)


def _arrival_s(
    fields: Mapping[str, str], column: str | None, place: str, times: ArrivalTimes
) -> float:
    assert column is not None
    name, text = f"{place}: {column}", fields[column]
    return times.arrival_s(name, _READ_TIME[column](name, text), text)


def _date_s(name: str, text: str) -> float:
    try:
        date = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(
            f"{name} must be a date like 2023-11-16 18:17:03.97, got {text!r}"
        ) from None
    return (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp()


_READ_TIME: Mapping[str, Callable[[str, str], float]] = MappingProxyType(
    {
        "TIMESTAMP": _date_s,
        "arrived_at_s": lambda name, text: real_text(name, text, high=MOST_S),
    }
)

"""What a run was asked for, so that other policies can be asked for the same.

Owns: how a served request becomes an arrival again, and `arrivals.jsonl`. In: requests of an
engine, or a run directory. Out: arrivals. Must not know: how they are served.

Prompts are kept as token ids, which need no tokenizer and no trace; times as they really were, so
that of a closed loop the recorded times stay, though another policy would have had others.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from paxserve.request import Origin, Request
from paxserve.workload import Arrival


def arrival_of(request: Request, *, start_s: float = 0.0) -> Arrival:
    """The request as it came, with its own seed, so that it draws the same under another id. Its
    true length is what it really produced, of several sequences the longest.
    """
    lengths = [len(request.output_of(sequence)) for sequence in request.sequences]
    return Arrival(
        request_id=request.request_id,
        arrival_s=request.arrival_s - start_s,
        prompt_token_ids=request.prompt_token_ids,
        max_tokens=request.params.max_tokens,
        ignore_eos=request.params.ignore_eos,
        seed=request.sampling.seed,
        origin=replace(request.origin, num_true_output_tokens=max(lengths)),
    )


def with_forced_length(arrival: Arrival) -> Arrival:
    """It ends at its true length, whatever it says."""
    length = arrival.origin.num_true_output_tokens
    return replace(arrival, max_tokens=length, ignore_eos=True)


def arrival_line(arrival: Arrival) -> str:
    """A line of `arrivals.jsonl`."""
    assert arrival.prompt_token_ids is not None, arrival.request_id
    return json.dumps(
        {
            "id": arrival.request_id,
            "arrival_s": arrival.arrival_s,
            "prompt_token_ids": list(arrival.prompt_token_ids),
            "max_tokens": arrival.max_tokens,
            "ignore_eos": arrival.ignore_eos,
            "seed": arrival.seed,
            **asdict(arrival.origin),
        }
    )


def read_arrivals(run_dir: Path) -> list[Arrival]:
    """The arrivals of a saved run.

    Raises:
        ValueError: it has none, or they are not what `arrival_line` writes.
    """
    path = run_dir / "arrivals.jsonl"
    if not path.is_file():
        raise ValueError(
            f"{path} does not exist: the run was made with record=compact, or by a version that "
            "did not record it; run it again with record=full"
        )
    with path.open(encoding="utf-8") as file:
        return list(_read_lines(file, path))


def _read_lines(lines: Iterable[str], path: Path) -> Iterable[Arrival]:
    for number, line in enumerate(lines, start=1):
        try:
            fields: dict[str, Any] = json.loads(line)
            yield Arrival(
                request_id=fields.pop("id"),
                prompt_token_ids=tuple(fields.pop("prompt_token_ids")),
                **{name: fields.pop(name) for name in _OWN},
                origin=Origin(**fields),
            )
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{path} line {number} is no recorded arrival: {error}") from error


_OWN = ("arrival_s", "max_tokens", "ignore_eos", "seed")

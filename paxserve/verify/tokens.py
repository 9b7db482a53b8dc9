"""What a workload's requests produced, and where two servings of it part.

Owns: the comparison. In: served requests. Out: per sequence the first position that differs. Must
not know: policies, why anything differs.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import NamedTuple

from paxserve.request import Request

END = -1  # where a sequence has ended


class Output(NamedTuple):
    """One request: the tokens of each sequence, and their summed log-probabilities (beams)."""

    sequences: tuple[tuple[int, ...], ...]
    scores: tuple[float, ...]
    error: str | None


type Outputs = Mapping[str, Output]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first place where one sequence differs from the reference; a token of -1 is its end.

    gap: between the two best perturbed logits of the reference there, for beams between the scores
    of the two hypotheses; None for the scripted executor, which has neither.
    """

    request_id: str
    sequence: int
    position: int
    expected: int
    found: int
    gap: float | None = None


def output_of(request: Request) -> Output:
    """What a request has produced."""
    return Output(
        sequences=tuple([tuple(request.output_of(s)) for s in request.sequences]),
        scores=tuple([s.cumulative_logprob for s in request.sequences]),
        error=request.error,
    )


def differences(expected: Outputs, found: Outputs) -> Iterator[Difference]:
    """At most one per sequence; a request that is not there has no token.

    Raises:
        ValueError: there are requests that the reference does not have.
    """
    foreign = sorted(found.keys() - expected.keys())
    if foreign:
        raise ValueError(f"requests {foreign} are not in the reference")
    for request_id, reference in expected.items():
        served = found.get(request_id)
        for index, tokens in enumerate(reference.sequences):
            other = served.sequences[index] if served is not None else ()
            pairs = enumerate(zip_longest(tokens, other, fillvalue=END))
            position = next((i for i, (one, two) in pairs if one != two), None)
            if position is not None:
                yield Difference(
                    request_id=request_id,
                    sequence=index,
                    position=position,
                    expected=_at(tokens, position),
                    found=_at(other, position),
                )


def _at(tokens: tuple[int, ...], position: int) -> int:
    return tokens[position] if position < len(tokens) else END

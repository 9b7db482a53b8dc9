"""Beam search: which hypotheses live on after a step.

Owns: the choice among candidates. Pure: the scheduler carries it out by forking block tables. In:
per live beam, the best tokens with their log-probabilities. Out: for each beam of the next step its
parent and token, and the hypotheses that have ended. Must not know: rows, blocks.

Source: as vLLM's `beam_search`: each of `width` beams offers its 2 * width best tokens (here one
more per end token, so that `width` of them go on; vLLM searches on with fewer beams); an end token
completes its hypothesis; of the others the `width` with the largest sums of log-probabilities go
on. At the end all are ranked by sum / length ** length_penalty, the end token counted.
"""

import math
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import NamedTuple


class Candidate(NamedTuple):
    """Beam number `parent` goes on with `token`."""

    parent: int
    token: int
    logprob: float
    cumulative_logprob: float


class Hypothesis(NamedTuple):
    """A finished one: output tokens, when each came, and the sum of their log-probabilities."""

    token_ids: tuple[int, ...]
    token_times_s: tuple[float, ...]
    cumulative_logprob: float
    stop_reason: int | None
    is_stopped: bool

    def score(self, length_penalty: float) -> float:
        """By which hypotheses are ranked, largest first."""
        length = float(max(1, len(self.token_ids)))
        return self.cumulative_logprob / math.pow(length, length_penalty)


@dataclass(slots=True)
class Beams:
    """State of one request: its width, and the hypotheses that have ended."""

    width: int
    length_penalty: float
    completed: list[Hypothesis] = field(default_factory=list)


def choose(
    candidates: SequenceOf[Candidate], *, width: int, stop_ids: frozenset[int]
) -> tuple[list[Candidate], list[Candidate]]:
    """The `width` best that go on, best first, and those among the candidates that end here; ties
    go to the earlier parent, then to the smaller token.
    """
    ranked = sorted(candidates, key=lambda c: (-c.cumulative_logprob, c.parent, c.token))
    going_on = [c for c in ranked if c.token not in stop_ids][:width]
    ending = [c for c in ranked if c.token in stop_ids]
    return going_on, ending

"""Beam search in plain numpy on whole distributions: the oracle of beams on the device."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy_llama import logits

from paxserve.models.load import LoadedModel

type LogProbs = Callable[[Sequence[int]], np.ndarray]


class Beam(NamedTuple):
    """A hypothesis: its output and the sum of its log-probabilities."""

    tokens: tuple[int, ...]
    cumulative_logprob: float

    def score(self, length_penalty: float) -> float:
        """What the search ranks by at its end."""
        return self.cumulative_logprob / len(self.tokens) ** length_penalty


class Found(NamedTuple):
    """The best beams, and by how little any choice between two was made."""

    beams: list[Beam]
    margin: float


def last_logprobs(model: LoadedModel, token_ids: Sequence[int]) -> np.ndarray:
    """Of the token after these, [V], in float64."""
    last = logits(model.config, model.parameters, list(token_ids))[-1].astype(np.float64)
    last -= last.max()
    return last - np.log(np.exp(last).sum())


def beam_search(
    model: LoadedModel,
    prompt: Sequence[int],
    *,
    width: int,
    num_tokens: int,
    stop_ids: frozenset[int] = frozenset(),
    length_penalty: float = 1.0,
) -> Found:
    """Each beam offers its 2 * width best; those that end are set aside, the best others go on."""
    beams, ended, margin = [Beam((), 0.0)], [], np.inf
    for _ in range(num_tokens):
        offers = [offer for beam in beams for offer in _offers(model, prompt, beam, 2 * width)]
        ended += [offer for offer in offers if offer.tokens[-1] in stop_ids]
        going_on = [offer for offer in offers if offer.tokens[-1] not in stop_ids]
        going_on.sort(key=lambda beam: -beam.cumulative_logprob)
        beams = going_on[:width]
        margin = min(margin, beams[-1].cumulative_logprob - going_on[width].cumulative_logprob)
    ranked = sorted([*ended, *beams], key=lambda beam: -beam.score(length_penalty))
    scores = [beam.score(length_penalty) for beam in ranked[: width + 1]]
    return Found(ranked[:width], min(margin, *-np.diff(scores)))


def _offers(model: LoadedModel, prompt: Sequence[int], beam: Beam, num: int) -> list[Beam]:
    logprobs = last_logprobs(model, [*prompt, *beam.tokens])
    best = np.argsort(-logprobs, kind="stable")[:num]
    return [
        Beam((*beam.tokens, int(token)), beam.cumulative_logprob + float(logprobs[token]))
        for token in best
    ]

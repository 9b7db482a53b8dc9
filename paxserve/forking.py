"""A step of beam search carried out: hypotheses are forked, dropped, and ended.

Owns: what `beam_search.choose` means for the sequences of a request: their tokens, block tables and
references. In: the outputs of a step for one request. Out: changed sequences; the request's end.
Must not know: how the choice is made, other requests.

The request's sequences are places. After each step the hypotheses that live on are dealt to the
places anew: one stays where its parent is, if it can; the others share their parent's blocks and
write to copies.
"""

from collections.abc import Mapping
from math import inf

from paxserve.batch import Batch
from paxserve.beam_search import Candidate, Hypothesis, choose
from paxserve.request import FinishReason, Request, Sequence, token_array
from paxserve.step import RowOutput


def advance_beams(
    batch: Batch, request: Request, outputs: Mapping[Sequence, RowOutput], *, now_s: float
) -> None:
    """One step of one request."""
    beams, places = request.beams, request.live
    assert beams is not None
    num_output = len(places[0].token_ids) - request.num_prompt_tokens
    stop_ids = request.stop_ids if num_output >= request.params.min_tokens else frozenset()
    going_on, ending = choose(_candidates(request, outputs), width=beams.width, stop_ids=stop_ids)
    for candidate in ending:
        beams.completed.append(_ended(request, places[candidate.parent], candidate, now_s))
    dealt = _deal(batch, request, going_on, now_s)
    is_full = len(places[0].token_ids) >= request.max_known_tokens
    if is_full or len(going_on) < len(places):
        _end(batch, request, dealt)


def _candidates(request: Request, outputs: Mapping[Sequence, RowOutput]) -> list[Candidate]:
    """What each beam offers; before the first fork all beams are one, so one offers."""
    places = request.live
    is_first = len(places[0].token_ids) == request.num_prompt_tokens
    offering = places[:1] if is_first else places
    return [
        Candidate(parent, token, logprob, places[parent].cumulative_logprob + logprob)
        for parent, sequence in enumerate(offering)
        for token, logprob in zip(
            outputs[sequence].logprobs[0].top_ids,
            outputs[sequence].logprobs[0].top_logprobs,
            strict=True,
        )
    ]


def _deal(
    batch: Batch, request: Request, going_on: list[Candidate], now_s: float
) -> list[Sequence]:
    """Each hypothesis gets a place: its parent's, if no better one has taken it; returns the
    places that have one.
    """
    places = request.live
    place_of: dict[int, int] = {}
    for i, candidate in enumerate(going_on):
        if candidate.parent not in place_of.values():
            place_of[i] = candidate.parent
    free = [place for place in range(len(places)) if place not in place_of.values()]
    forks = [(i, free.pop(0)) for i in range(len(going_on)) if i not in place_of]
    parents = [(p.token_ids[:], list(p.token_times_s), list(p.block_table)) for p in places]
    for i, _ in forks:  # references first, so that no block is let go that lives on
        batch.pool.share(parents[going_on[i].parent][2], is_hit=False)
    for i, place in forks:
        parent, sequence = going_on[i].parent, places[place]
        batch.tables.let_go(sequence)
        sequence.token_ids, sequence.token_times_s = (
            parents[parent][0][:],
            list(parents[parent][1]),
        )
        sequence.block_table.extend(parents[parent][2])
        sequence.num_reserved_tokens = places[parent].num_reserved_tokens
        sequence.num_published_blocks = places[parent].num_published_blocks
        place_of[i] = place
    for i, candidate in enumerate(going_on):
        sequence = places[place_of[i]]
        sequence.token_ids.append(candidate.token)
        sequence.token_times_s.append(now_s)
        sequence.cumulative_logprob = candidate.cumulative_logprob
        sequence.num_entry_tokens = sequence.num_known_tokens  # its input comes from the host
    return [places[place_of[i]] for i in range(len(going_on))]


def _ended(request: Request, place: Sequence, candidate: Candidate, now_s: float) -> Hypothesis:
    eos = candidate.token not in request.params.stop_token_ids
    return Hypothesis(
        token_ids=(*request.output_of(place), candidate.token),
        token_times_s=(*place.token_times_s, now_s),
        cumulative_logprob=candidate.cumulative_logprob,
        stop_reason=None if eos else candidate.token,
        is_stopped=True,
    )


def _end(batch: Batch, request: Request, dealt: list[Sequence]) -> None:
    """The best hypotheses become the sequences' outputs, best first. There are fewer of them than
    sequences only where hardly any token goes on; then the last outputs are empty.
    """
    beams = request.beams
    assert beams is not None
    unfinished = [
        Hypothesis(
            token_ids=tuple(request.output_of(place)),
            token_times_s=tuple(place.token_times_s),
            cumulative_logprob=place.cumulative_logprob,
            stop_reason=None,
            is_stopped=False,
        )
        for place in dealt
    ]
    ranked = sorted([*beams.completed, *unfinished], key=lambda h: -h.score(beams.length_penalty))
    nothing = Hypothesis((), (), -inf, None, False)
    ranked += [nothing] * (len(request.sequences) - len(ranked))
    for sequence, hypothesis in zip(request.sequences, ranked, strict=False):
        sequence.token_ids = token_array((*request.prompt_token_ids, *hypothesis.token_ids))
        sequence.token_times_s = list(hypothesis.token_times_s)
        sequence.cumulative_logprob = hypothesis.cumulative_logprob
        sequence.stop_reason = hypothesis.stop_reason
        is_stopped = hypothesis.is_stopped
        sequence.finish_reason = FinishReason.STOP if is_stopped else FinishReason.LENGTH
    first = request.sequences[0]
    assert first.finish_reason is not None
    batch.finish(request, first.finish_reason, stop_reason=first.stop_reason)

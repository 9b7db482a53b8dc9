"""The choice among hypotheses, and a search carried out, against an exhaustive one in Python."""

from dataclasses import dataclass, field
from math import inf

import pytest
from builders import make_engine, make_limits, run_to_end, submit, top_alone
from hypothesis import given, settings
from hypothesis import strategies as st
from invariants import check, check_idle

from paxserve.beam_search import Candidate, Hypothesis, choose
from paxserve.prefix_cache.hash_chain import HashChain
from paxserve.step import NO_OUTPUT, RowOutput, StepResult, TokenLogprobs

EOS = 0


def candidates(*rows):
    return [Candidate(parent, token, 0.0, total) for parent, token, total in rows]


def test_the_best_go_on_and_ends_take_nobody_s_place():
    offered = candidates((0, 5, -3.0), (0, EOS, -1.0), (1, 6, -2.0), (1, 7, -9.0))
    going_on, ending = choose(offered, width=2, stop_ids=frozenset({EOS}))
    assert [(c.parent, c.token) for c in going_on] == [(1, 6), (0, 5)]
    assert [(c.parent, c.token) for c in ending] == [(0, EOS)]


def test_an_end_token_that_does_not_count_goes_on():
    going_on, ending = choose(candidates((0, EOS, -1.0)), width=2, stop_ids=frozenset())
    assert ([c.token for c in going_on], ending) == ([EOS], [])


def test_ties_go_to_the_earlier_parent_then_to_the_smaller_token():
    offered = candidates((1, 2, -1.0), (0, 9, -1.0), (0, 4, -1.0), (1, 1, -1.0))
    going_on, _ = choose(offered, width=3, stop_ids=frozenset())
    assert [(c.parent, c.token) for c in going_on] == [(0, 4), (0, 9), (1, 1)]


@pytest.mark.parametrize(("penalty", "score"), [(0.0, -6.0), (1.0, -2.0), (2.0, -6.0 / 9)])
def test_the_score_divides_by_the_length_to_a_power(penalty, score):
    assert Hypothesis((1, 2, 3), (), -6.0, None, False).score(penalty) == pytest.approx(score)


def logprob_of(table, context, token):
    """The table's entry: equal contexts give equal numbers; steps of 1/8, so sums are exact."""
    return -table[(sum(context) * 5 + len(context) * 3 + token) % len(table)] / 8


@dataclass
class Tabled:
    """An executor whose log-probabilities stand in a table, by the tokens of the sequence."""

    table: list
    vocab_size: int
    num_top: int
    batch: object = None
    results: list = field(default_factory=list)

    def submit(self, plan):
        outputs = []
        for row in plan.rows:
            _, sequence = self.batch.by_sequence[row.sequence_id]
            known = tuple(sequence.token_ids)
            outputs.append(self.best(known) if row.num_samples else NO_OUTPUT)
        self.results.append(StepResult(plan.step_id, tuple(outputs), 1.0))

    def best(self, context):
        found = [
            (logprob_of(self.table, context, token), token) for token in range(self.vocab_size)
        ]
        found.sort(key=lambda pair: (-pair[0], pair[1]))
        found = found[: self.num_top]
        tops = TokenLogprobs(found[0][0], 1, *zip(*[(t, p) for p, t in found], strict=True))
        return RowOutput((found[0][1],), (tops,))

    def collect(self):
        return self.results.pop(0)

    def reset(self):
        self.results.clear()


def search_in_plain(best, prompt, *, width, num_tokens, penalty):
    """Beams in the places they take: one stays where its parent is, others take free places."""
    beams, ended = [((), 0.0)], []
    for _ in range(num_tokens):
        offered = []
        for place, (output, total) in enumerate(beams):
            tops = best((*prompt, *output)).logprobs[0]
            for token, logprob in zip(tops.top_ids, tops.top_logprobs, strict=True):
                offered.append((-(total + logprob), place, token))
        offered.sort()
        before = beams
        ended += [((*beams[place][0], EOS), -minus) for minus, place, t in offered if t == EOS]
        chosen = [entry for entry in offered if entry[2] != EOS][:width]
        places = [None] * width
        homeless = []
        for minus, parent, token in chosen:
            beam = ((*beams[parent][0], token), -minus)
            if places[parent] is None:
                places[parent] = beam
            else:
                homeless.append(beam)
        for beam in homeless:
            places[places.index(None)] = beam
        beams = [beam for beam in places if beam is not None]
        if len(beams) < width:
            break
    best_first = [((*before[parent][0], token), -minus) for minus, parent, token in chosen]
    found = sorted([*ended, *best_first], key=lambda h: -h[1] / len(h[0]) ** penalty)
    return [*found, *[((), -inf)] * width][:width]


@given(
    table=st.lists(st.integers(1, 9), min_size=5, max_size=17),
    vocab_size=st.integers(2, 6),
    width=st.integers(2, 3),
    num_tokens=st.integers(1, 5),
    penalty=st.sampled_from([0.0, 1.0, 2.0]),
    num_blocks=st.integers(17, 40),
    num_prompt=st.integers(1, 4),
)
@settings(max_examples=150)
def test_a_search_is_the_plain_one(
    table, vocab_size, width, num_tokens, penalty, num_blocks, num_prompt
):
    executor = Tabled(table, vocab_size, 2 * width)
    limits = make_limits(block_size=2, num_blocks=num_blocks)
    engine = make_engine(
        limits,
        executor=executor,
        vocab_size=vocab_size,
        eos_token_ids=[EOS],
        prefix_cache=HashChain(),
    )
    executor.batch = engine.scheduler.batch
    prompt = [1] * num_prompt
    request = submit(
        engine, prompt, beam_width=width, max_tokens=num_tokens, length_penalty=penalty
    )
    while engine.has_work:
        engine.step()
        check(engine)
    check_idle(engine)
    expected = search_in_plain(
        executor.best, prompt, width=width, num_tokens=num_tokens, penalty=penalty
    )
    got = [(tuple(request.output_of(s)), s.cumulative_logprob) for s in request.sequences]
    assert got == expected
    for sequence, (output, _) in zip(request.sequences, expected, strict=True):
        assert sequence.finish_reason == ("stop" if output[-1:] == (EOS,) else "length")
        assert len(sequence.token_times_s) == len(output)
    assert request.finish_reason == request.sequences[0].finish_reason


def test_beams_before_min_tokens_go_through_the_end_token():
    table = [1]  # all alike: the smallest token, which is the end token, is always first
    for min_tokens, expected in ((0, (EOS,)), (2, (EOS, EOS, EOS))):
        executor = Tabled(table, 4, 4)
        engine = make_engine(executor=executor, vocab_size=4, eos_token_ids=[EOS])
        executor.batch = engine.scheduler.batch
        request = submit(
            engine, [1], beam_width=2, max_tokens=5, min_tokens=min_tokens, length_penalty=0.0
        )
        run_to_end(engine)
        assert tuple(request.output_token_ids) == expected


@pytest.mark.parametrize("num_prompt", [1, 4, 5])
@pytest.mark.parametrize("width", [2, 3])
def test_beams_read_what_their_ancestors_wrote(width, num_prompt):
    """On the scripted executor log-probabilities come from what lies in the KV slots."""

    def best(context):
        found = top_alone(context, 2 * width, vocab_size=11)
        tops = TokenLogprobs(0.0, 1, *zip(*found, strict=True))
        return RowOutput((found[0][0],), (tops,))

    for num_tokens in (1, 3, 6):
        engine = make_engine(make_limits(block_size=2), vocab_size=11, eos_token_ids=[EOS])
        prompt = [3 + i for i in range(num_prompt)]
        request = submit(engine, prompt, beam_width=width, max_tokens=num_tokens)
        run_to_end(engine)
        expected = search_in_plain(best, prompt, width=width, num_tokens=num_tokens, penalty=1.0)
        got = [(tuple(request.output_of(s)), s.cumulative_logprob) for s in request.sequences]
        assert got == expected

"""Which choices go together: docs/pairs.md, its errors, and that the rest really runs."""

import re
from itertools import combinations

import pytest
from axes import ROOT, policy_class
from builders import make_engine, prompt_ids, run_to_end, submit, tokens_alone

from paxserve.pairs import (
    AXES,
    NO_GATE,
    SIZES,
    Choice,
    Pair,
    axes,
    company,
    lines,
    pairs,
    policies_of,
    why_not,
)

PAIRS = pairs()
FORBIDDEN = [pair for pair in PAIRS if pair.why_not is not None]
ALLOWED = [pair for pair in PAIRS if pair.why_not is None]
LENGTHS = [(9, 5), (10, 3), (3, 9), (6, 4), (9, 2)]


def class_name(choice: Choice) -> str:
    return policy_class(choice.axis, choice.name).__name__


def test_every_two_choices_of_different_axes_are_judged():
    found = axes()
    assert set(found) == set(AXES)
    expected = sum(len(found[a]) * len(found[b]) for a, b in combinations(AXES, 2))
    assert len({frozenset((p.first, p.second)) for p in PAIRS}) == len(PAIRS) == expected
    assert FORBIDDEN


def test_the_table_in_readme_is_the_generated_one():
    text = (ROOT / "docs" / "pairs.md").read_text(encoding="utf-8")
    (table,) = re.findall(r"<!-- pairs -->\n(.*?)<!-- /pairs -->", text, re.DOTALL)
    assert table.strip().splitlines() == list(lines(PAIRS)), "paste what `paxserve pairs` prints"


@pytest.mark.parametrize(
    "pair", FORBIDDEN, ids=[f"{pair.first}-{pair.second}" for pair in FORBIDDEN]
)
def test_a_forbidden_pair_is_an_error_that_names_both(pair):
    usual = {axis: names[0] for axis, names in axes().items()}
    names = usual | dict([pair.first, pair.second])
    with pytest.raises(ValueError, match=r" .*(but|so) ") as caught:
        policies_of(names).check(SIZES)
    for choice in (pair.first, pair.second):
        assert f"{choice.axis} {class_name(choice)}" in str(caught.value)
    assert str(caught.value) == pair.why_not


@pytest.mark.parametrize(("first", "second"), list(combinations(AXES, 2)), ids="-".join)
def test_every_allowed_pair_serves_and_changes_no_token(first, second):
    mine = [p for p in ALLOWED if (p.first.axis, p.second.axis) == (first, second)]
    assert mine
    for pair in mine:
        names, reason = company(dict([pair.first, pair.second]), axes(), why_not)
        assert reason is None
        serve_under(names, pair)


def serve_under(names: dict[str, str], pair: Pair) -> None:
    made = policies_of(names)
    chosen = {axis: getattr(made, axis) for axis in AXES if axis != "gate"}
    engine = make_engine(SIZES, **chosen, gates=made.gates)
    served = [submit(engine, prompt_ids(length), max_tokens=number) for length, number in LENGTHS]
    run_to_end(engine, max_steps=200)
    for request, (length, number) in zip(served, LENGTHS, strict=True):
        found = list(request.output_token_ids)
        assert found == tokens_alone(prompt_ids(length), number), (pair, request.error)


def test_what_is_never_asked_is_named():
    unread = {(p.unread, p.second if p.unread == p.first else p.first) for p in PAIRS if p.unread}
    assert (Choice("eviction", "lfu"), Choice("prefix_cache", "none")) in unread
    assert (Choice("victim", "newest"), Choice("reservation", "max")) in unread
    assert not any(other.axis == "placement" for _, other in unread)


def test_the_defaults_are_first_and_go_together():
    usual = {axis: names[0] for axis, names in axes().items()}
    assert usual["gate"] == NO_GATE
    assert (usual["batching"], usual["prefix_cache"]) == ("chunked_prefill", "none")
    assert why_not(usual) is None

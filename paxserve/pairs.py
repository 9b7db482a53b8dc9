"""Which choices of two axes go together: asked of `Policies.check`, never written down by hand.

Owns: the search for a company in which two choices can run, and the table. In: choices per axis,
and a judge that says what is wrong with one choice of each. Out: for every two choices of
different axes a `Pair`. Must not know: why anything is forbidden.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import combinations
from typing import Any, NamedTuple

from paxserve.compose import GATE, POLICY_AXES, choices, load, load_policies
from paxserve.hydra_config import compose_config, file_settings
from paxserve.limits import Limits
from paxserve.policies import Policies

type Names = Mapping[str, str]
type Judge = Callable[[Names], str | None]

NO_GATE = "none"
AXES = (*POLICY_AXES[:1], GATE, *POLICY_AXES[1:])
# Large enough for every choice: whole prompts fit a step, a run of any length has a place.
SIZES = Limits(
    max_num_seqs=4,
    max_num_batched_tokens=64,
    max_model_len=32,
    block_size=4,
    num_blocks=65,
    num_host_blocks=64,
)


class Choice(NamedTuple):
    """One choice of one axis."""

    axis: str
    name: str

    def __str__(self) -> str:
        """As on the command line."""
        return f"{self.axis}={self.name}"


class Pair(NamedTuple):
    """Two choices. `why_not` is the error that forbids them, None if they go together; `unread` is
    the one of them that is then never asked.
    """

    first: Choice
    second: Choice
    why_not: str | None = None
    unread: Choice | None = None


@cache
def axes() -> dict[str, list[str]]:
    """Every choice of every policy axis, the default first."""
    _, defaults, _ = compose_config([])
    found = {axis: choices(axis) for axis in AXES}
    found[GATE] = [NO_GATE, *found[GATE]]
    usual = {**defaults, GATE: NO_GATE}
    return {
        axis: sorted(names, key=lambda name: name != usual[axis]) for axis, names in found.items()
    }


@cache
def policy(axis: str, name: str) -> Any:
    """The policy with the settings of its own file."""
    return load(axis, name, file_settings(axis, name))


def policies_of(names: Names) -> Policies:
    """One choice per axis."""
    own: dict[str, Any] = {axis: policy(axis, names[axis]) for axis in POLICY_AXES}
    own[GATE] = [] if names[GATE] == NO_GATE else [policy(GATE, names[GATE])]
    return load_policies({**names, GATE: ""}, own=own)


def why_not(names: Names) -> str | None:
    """What forbids these choices, one per axis, in a pool and steps large enough."""
    try:
        policies_of(names).check(SIZES)
    except ValueError as error:
        return str(error)
    return None


def company(
    given: Names, choices_of: Mapping[str, Sequence[str]], judge: Judge
) -> tuple[dict[str, str], str | None]:
    """The given choices among usual ones, or where those do not fit, with one or two others.

    Returns:
        One choice per axis, and None; or the usual company and what is wrong with it.
    """
    usual = {**{axis: names[0] for axis, names in choices_of.items()}, **given}
    first_reason = judge(usual)
    if first_reason is None:
        return usual, None
    others = [(a, name) for a, names in choices_of.items() if a not in given for name in names[1:]]
    changes = [dict([one]) for one in others]
    changes += [{**a, **b} for a, b in combinations(changes, 2) if a.keys() != b.keys()]
    for change in changes:
        if judge(usual | change) is None:
            return usual | change, None
    return usual, first_reason


def forbidden(
    choices_of: Mapping[str, Sequence[str]], judge: Judge
) -> dict[frozenset[Choice], str]:
    """The pairs that run in no company, with the reason."""
    found = {}
    for first, second in all_pairs(choices_of):
        _, reason = company(dict([first, second]), choices_of, judge)
        if reason is not None:
            found[frozenset((first, second))] = reason
    return found


def all_pairs(choices_of: Mapping[str, Sequence[str]]) -> Iterator[tuple[Choice, Choice]]:
    """Every two choices of different axes."""
    for first_axis, second_axis in combinations(choices_of, 2):
        for first in choices_of[first_axis]:
            for second in choices_of[second_axis]:
                yield Choice(first_axis, first), Choice(second_axis, second)


def pairs() -> list[Pair]:
    """All pairs of the project's own choices."""
    choices_of = axes()
    wrong = forbidden(choices_of, why_not)
    return [
        Pair(first, second, reason, None if reason else _unread(first, second))
        for first, second in all_pairs(choices_of)
        for reason in [wrong.get(frozenset((first, second)))]
    ]


def _unread(first: Choice, second: Choice) -> Choice | None:
    """The one of them that the other alone leaves without a use."""
    usual = {axis: names[0] for axis, names in axes().items()}
    for one, other in ((first, second), (second, first)):
        without = {**usual, "prefix_cache": "hash_chain"}
        if one.axis in policies_of({**without, **dict([other])}).unread(is_forced=False):
            return one
    return None


def lines(found: Iterable[Pair]) -> Iterator[str]:
    """The exceptions as a Markdown table: everything that is not in it goes together."""
    found = list(found)
    yield "| choices | with | |"
    yield "|---|---|---|"
    wrong = [pair for pair in found if pair.why_not is not None]
    for left, right in grouped((pair.first, pair.second) for pair in wrong):
        reason = next(p.why_not for p in wrong if p.first in left and p.second in right)
        yield f"| {named(left)} | {named(right)} | error: {reason} |"
    silent = [(p.unread, p.second if p.unread == p.first else p.first) for p in found if p.unread]
    for left, right in grouped((one, other) for one, other in silent if one):
        yield f"| {named(left)} | {named(right)} | runs, but never asked: setting it is an error |"


def grouped(
    found: Iterable[tuple[Choice, Choice]],
) -> Iterator[tuple[tuple[Choice, ...], tuple[Choice, ...]]]:
    """Pairs of the same two axes together, where all of the one side are with all of the other."""
    rights: dict[tuple[Choice, str], list[Choice]] = {}
    for left, right in found:
        rights.setdefault((left, right.axis), []).append(right)
    lefts: dict[tuple[str, tuple[Choice, ...]], list[Choice]] = {}
    for (left, _), group in rights.items():
        lefts.setdefault((left.axis, tuple(group)), []).append(left)
    for (_, group_of_right), group_of_left in lefts.items():
        yield tuple(group_of_left), group_of_right


def named(group: Sequence[Choice]) -> str:
    """Choices of one axis, as on the command line."""
    return f"`{group[0].axis}={','.join(choice.name for choice in group)}`"

"""Which combinations of choices a workload is served under.

Owns: the axes beside the policies, and the choice of cells. Pure. In: choices per axis, the first
of each the usual one, and a judge of what cannot run. Out: cells, and pairs that have none. Must
not know: policies, engines.

All combinations are too many. Since faults mostly need two choices to meet, the default matrix
holds every two choices of different axes in some cell, which takes about as many cells as the two
largest axes have pairs.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from paxserve.pairs import Choice, Judge, Names, all_pairs, company, forbidden

BUDGET, FORCED, POOL, CACHE = "max_num_batched_tokens", "preempt_every_steps", "pool", "cache"
ROOMY, TIGHT, COLD, WARM = "roomy", "tight", "cold", "warm"
PREEMPT_EVERY = 3

type IsNew = Callable[[Choice, Choice], bool]


def size_axes(*, budget: int, num_rows: int) -> dict[str, list[str]]:
    """What else is varied: tokens per step, forced preemption, the pool, and whether the same
    requests were served once before.
    """
    budgets = sorted({budget, max(num_rows, budget // 8), num_rows}, reverse=True)
    return {
        BUDGET: [str(tokens) for tokens in budgets],
        FORCED: ["0", str(PREEMPT_EVERY)],
        POOL: [ROOMY, TIGHT],
        CACHE: [COLD, WARM],
    }


def restricted(
    choices_of: Mapping[str, Sequence[str]], only: Sequence[str]
) -> dict[str, list[str]]:
    """The axes with only some of their choices.

    Args:
        choices_of: axis -> choices.
        only: `AXIS=NAME,NAME` each.

    Raises:
        ValueError: no such axis or choice.
    """
    found = {axis: list(names) for axis, names in choices_of.items()}
    for one in only:
        axis, _, wanted = one.partition("=")
        if axis not in found:
            raise ValueError(f"--only {one}: no axis is called {axis!r}; there are {list(found)}")
        names = wanted.split(",")
        unknown = [name for name in names if name not in found[axis]]
        if unknown:
            raise ValueError(f"--only {one}: {axis} has no {unknown[0]!r}, it has {found[axis]}")
        found[axis] = names
    return found


class Matrix:
    """Cells to run, the usual one first; `impossible` choices and `forbidden` pairs of others are
    in no cell, with the reasons.

    Raises:
        ValueError: no cell can be run.
    """

    def __init__(
        self, choices_of: Mapping[str, Sequence[str]], judge: Judge, *, quick: bool
    ) -> None:
        self._judge = judge
        self.impossible: dict[Choice, str] = {}
        self._choices_of = self._possible(choices_of)
        self.forbidden = forbidden(self._choices_of, judge)
        usual, _ = company({}, self._choices_of, judge)
        self.cells: list[dict[str, str]] = [usual]
        self._num_uses: Counter[Choice] = Counter(_choices(usual))
        for cell in self._each_once() if quick else self._each_pair():
            if cell not in self.cells:
                self.cells.append(cell)
                self._num_uses.update(_choices(cell))

    def _possible(self, choices_of: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for axis, names in choices_of.items():
            found[axis] = []
            for name in names:
                _, reason = company({axis: name}, choices_of, self._judge)
                if reason is None:
                    found[axis].append(name)
                else:
                    self.impossible[Choice(axis, name)] = reason
            if not found[axis]:
                raise ValueError(f"no cell of what is asked for can be run: {reason}")
        return found

    def _each_once(self) -> Iterator[dict[str, str]]:
        """Every choice in one cell, several new ones together."""
        seen = set(_choices(self.cells[0]))

        def is_new(one: Choice, _: Choice) -> bool:
            return one not in seen

        for axis, names in self._choices_of.items():
            for name in names:
                if Choice(axis, name) not in seen:
                    cell = self._filled({axis: name}, is_new)
                    seen.update(_choices(cell))
                    yield cell

    def _each_pair(self) -> Iterator[dict[str, str]]:
        """Greedily: the next pair that is still missing, among choices that bring most others."""
        missing = {frozenset(p) for p in all_pairs(self._choices_of)} - self.forbidden.keys()
        missing -= _pairs(self.cells[0])

        def is_new(one: Choice, other: Choice) -> bool:
            return frozenset((one, other)) in missing

        for pair in all_pairs(self._choices_of):
            if frozenset(pair) in missing:
                cell = self._filled(dict(pair), is_new)
                missing.difference_update(_pairs(cell))
                yield cell

    def _filled(self, given: Names, is_new: IsNew) -> dict[str, str]:
        """One choice of every axis: the given ones, and of the others what brings most that is
        new, of several the one least used so far.
        """
        cell = dict(given)
        for axis, names in self._choices_of.items():
            if axis not in cell:
                own = list(_choices(cell))
                offers = [Choice(axis, name) for name in names]
                fitting = [offer for offer in offers if self._fits(offer, own)] or offers
                cell[axis] = max(
                    fitting, key=lambda o: (sum(is_new(o, one) for one in own), -self._num_uses[o])
                ).name
        return (
            cell if self._judge(cell) is None else company(given, self._choices_of, self._judge)[0]
        )

    def _fits(self, one: Choice, others: Sequence[Choice]) -> bool:
        return not any(frozenset((one, other)) in self.forbidden for other in others)


def _choices(cell: Names) -> Iterator[Choice]:
    yield from (Choice(axis, name) for axis, name in cell.items())


def _pairs(cell: Names) -> set[frozenset[Choice]]:
    found = list(_choices(cell))
    return {frozenset((one, other)) for i, one in enumerate(found) for other in found[:i]}

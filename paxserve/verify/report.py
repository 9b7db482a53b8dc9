"""A verification as text and as JSON.

Owns: what is said of a cell. In: a `Verification`. Out: lines, plain data. Must not know: how it
was made.
"""

from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Any

from paxserve.pairs import Choice, grouped, named
from paxserve.verify.running import MOST_GAP, CellResult, Verification
from paxserve.verify.tokens import END, Difference


def lines(found: Verification) -> Iterator[str]:
    """A line per cell, then what they say together."""
    usual = found.results[0].cell
    yield f"reference: {_named(usual, {})}"
    for number, result in enumerate(found.results):
        yield f"{number:4d}  {_status(result):9}  {_named(result.cell, usual) or 'reference again'}"
        yield from (f"        {line}" for line in _details(result))
    for choice, reason in found.impossible.items():
        yield f"no cell has {choice}: {reason}"
    yield from _forbidden(found)
    ran = [result for result in found.results if result.why_not is None]
    refused = f", {found.num_refused} refused" if found.num_refused else ""
    yield (
        f"{found.num_requests} requests{refused}, {found.num_sequences} sequences, "
        f"{found.num_tokens} tokens in each of {len(ran)} cells: "
        f"{sum(not result.differences and not result.error for result in ran)} equal, "
        f"{sum(bool(result.differences) and result.holds for result in ran)} differ at near ties, "
        f"{sum(not result.holds for result in ran)} break the law"
    )


def _forbidden(found: Verification) -> Iterator[str]:
    pairs = [_ordered(pair) for pair in found.forbidden]
    for left, right in grouped(pairs):
        reason = found.forbidden[frozenset((left[0], right[0]))]
        yield f"no cell has {named(left)} with {named(right)}: {reason}"


def _ordered(pair: Iterable[Choice]) -> tuple[Choice, Choice]:
    first, second = sorted(pair)
    return first, second


def as_data(found: Verification) -> dict[str, Any]:
    """Everything, for a file."""
    return {
        "holds": found.holds,
        "num_requests": found.num_requests,
        "num_sequences": found.num_sequences,
        "num_tokens": found.num_tokens,
        "num_refused": found.num_refused,
        "cells": [
            {**asdict(result), "status": _status(result), "holds": result.holds}
            for result in found.results
        ],
        "impossible": {str(choice): reason for choice, reason in found.impossible.items()},
        "forbidden": [
            {"pair": sorted(map(str, pair)), "reason": reason}
            for pair, reason in found.forbidden.items()
        ],
    }


def _named(cell: Any, usual: Any) -> str:
    return " ".join(f"{axis}={name}" for axis, name in cell.items() if usual.get(axis) != name)


def _status(result: CellResult) -> str:
    if result.why_not is not None:
        return "forbidden"
    if result.error is not None:
        return "FAILED"
    if not result.differences:
        return "equal"
    return "near tie" if result.holds else "DIFFERS"


def _details(result: CellResult) -> Iterator[str]:
    if result.why_not is not None or result.error is not None:
        yield str(result.why_not or result.error)
        return
    met = [f"{number} {name}" for name, number in result.counts.items() if number]
    yield ", ".join(met).replace("_", " ")
    if result.differences:
        first = min(result.differences, key=lambda one: one.position)
        num_requests = len({one.request_id for one in result.differences})
        yield f"{num_requests} requests differ, first {_place(first)}"
        worst = max(result.differences, key=lambda one: one.gap or 0.0)
        if worst.gap is not None and worst.gap > MOST_GAP and worst is not first:
            yield f"widest gap: {_place(worst)}"


def _place(one: Difference) -> str:
    expected, found = ("the end" if t == END else f"token {t}" for t in (one.expected, one.found))
    gap = "" if one.gap is None else f", gap {one.gap:.2g}"
    return (
        f"request {one.request_id}, sequence {one.sequence}, position {one.position}: "
        f"{expected} expected, {found} found{gap}"
    )

"""Measured vLLM runs against the simulated engine; README.md says what comes of it.

python -m experiments.fidelity_vllm.run            scores, with the factors in factors.json
python -m experiments.fidelity_vllm.run --refit    the same with factors looked for anew, 20 minutes
"""

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from experiments.fidelity_vllm.fit import (
    CARDS,
    FITTED,
    RECORDED_LINKS,
    SCORED,
    Card,
    Factors,
    distance,
    fit,
    folder_of,
    simulate,
)
from experiments.fidelity_vllm.score import Score, score
from experiments.fidelity_vllm.served import Served, read_measured
from experiments.study.readme import mark, refresh, table
from paxserve.report.style import BLACK, BLUE, Picture, legend_below, panels, title
from paxserve.results import write_text
from paxserve.terminal import Terminal

HERE = Path(__file__).parent
FACTORS = HERE / "factors.json"
HALVES = {"0-149, fitted": FITTED, "150-299, scored": SCORED}
CARRIED = {"0-149": FITTED, "150-299": SCORED}  # of a card to which nothing was fitted


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_Raw)
    parser.add_argument("--data", type=Path, help="reference data (default: PAXSERVE_DATA)")
    parser.add_argument("--refit", action="store_true", help="look for the factors anew")
    given = parser.parse_args()
    data = given.data or Path(os.environ.get("PAXSERVE_DATA", ""))
    if not folder_of(CARDS[0], data).is_dir():
        sys.exit(f"{folder_of(CARDS[0], data)} does not exist: set PAXSERVE_DATA, or --data DIR")
    terminal = Terminal()
    measured = {card.folder: read_measured(folder_of(card, data)) for card in CARDS}
    if given.refit:
        write_factors({card.folder: _fit(card, measured, data, terminal) for card in CARDS})
    factors = read_factors()
    simulated = {card.folder: simulate(card, factors[card.folder], data) for card in CARDS}
    first, other = CARDS
    carried = {
        "as they are": simulate(other, factors[first.folder], data),
        "and links of 16 GB/s": simulate(other, factors[first.folder], data, *RECORDED_LINKS),
    }
    parts = {
        "verdict": verdict(
            [(card.name, measured[card.folder], simulated[card.folder]) for card in CARDS]
            + [
                (f"{first.name}'s factors on {other.name}", measured[other.folder], served)
                for served in [carried["as they are"]]
            ]
        ),
        "factors": factors_table(factors),
        "scores": scores_table(
            [(card.name, measured[card.folder], simulated[card.folder]) for card in CARDS]
        ),
        "carried": scores_table(
            [(name, measured[other.folder], served) for name, served in carried.items()],
            halves=CARRIED,
        ),
    }
    for name, part in parts.items():
        print(f"\n{name}\n{part}")
    refresh(HERE / "README.md", parts)
    picture(measured, simulated).save(HERE / "running.png")


def read_factors() -> dict[str, Factors]:
    """The stored ones, by the folder of the card's run."""
    found = json.loads(FACTORS.read_text(encoding="utf-8"))
    return {folder: Factors(**own) for folder, own in found.items()}


def write_factors(factors: Mapping[str, Factors]) -> None:
    """For later runs and for the test."""
    found = {folder: own._asdict() for folder, own in factors.items()}
    write_text(FACTORS, json.dumps(found, indent=1) + "\n")


def factors_table(factors: Mapping[str, Factors]) -> str:
    """A row per card."""
    header = ("card", "compute efficiency", "bandwidth efficiency", "host, ms per step")
    rows = [
        (card.name, own.compute_efficiency, own.bandwidth_efficiency, 1e3 * own.host_s_per_step)
        for card in CARDS
        for own in [factors[card.folder]]
    ]
    return table(header, rows)


def verdict(runs: Sequence[tuple[str, Served, Served]]) -> str:
    """A line per run: how many figures of the requests that were not fitted are near enough."""
    lines = []
    for name, measured, simulated in runs:
        scores = score(measured, simulated, SCORED)
        held = sum(one.holds for one in scores)
        lines.append(
            f"{mark(held == len(scores))}{name}: {held} of {len(scores)} figures of requests "
            "150-299 are within their bounds."
        )
    return "\n".join(lines)


def scores_table(
    runs: Sequence[tuple[str, Served, Served]], *, halves: Mapping[str, slice] = HALVES
) -> str:
    """A row per figure and half of the requests."""
    header = ("run", "requests", "figure", "measured", "simulated", "error", "allowed", "holds")
    rows = [
        (name, half, one.figure, one.measured, one.simulated, *_verdict(one))
        for name, measured, simulated in runs
        for half, requests in halves.items()
        for one in score(measured, simulated, requests)
    ]
    return table(header, rows, digits=4)


def picture(measured: Mapping[str, Served], simulated: Mapping[str, Served]) -> Picture:
    """Running requests over time, a panel per card."""
    drawn, axes = panels([2.4] * len(CARDS))
    for card, axis in zip(CARDS, axes, strict=True):
        ours, theirs = measured[card.folder], simulated[card.folder]
        axis.plot(ours.ticks_s, ours.running, color=BLACK, label="measured")
        at = theirs.running_at(ours.ticks_s)
        axis.plot(ours.ticks_s, at, color=BLUE, linestyle="--", label="simulated")
        axis.set_ylabel("running requests")
        title(axis, card.name)
    axes[-1].set_xlabel("s since the first arrival")
    legend_below(drawn, axes[0].get_legend_handles_labels()[0], columns=2)
    return drawn


def _verdict(one: Score) -> tuple[str, str, str]:
    return f"{one.error:+.1%}", f"{one.allowed:.0%}", "yes" if one.holds else "NO"


def _fit(card: Card, measured: Mapping[str, Served], data: Path, terminal: Terminal) -> Factors:
    number = 0

    def report(factors: Factors, found: float) -> None:
        nonlocal number
        number += 1
        shown = ", ".join(f"{value:.4g}" for value in factors)
        terminal.say(f"{card.name}: trial {number}, {shown}: {found:.4f}")

    found = fit(card, measured[card.folder], data, report=report)
    last = distance(measured[card.folder], simulate(card, found, data), FITTED)
    terminal.say(f"{card.name}: {found}, distance {last:.4f}")
    return found


class _Raw(argparse.RawDescriptionHelpFormatter):
    pass


if __name__ == "__main__":
    main()

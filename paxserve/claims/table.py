"""The claims on a terminal: stated beside measured, tolerance, and whether it holds.

Owns: how values are written. In: claims. Out: a table, notes, and a line
that counts.
"""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from paxserve.claims import Claim, Value
from paxserve.terminal import table_console

_VERDICTS = {True: "yes", False: "NO", None: "not run"}


def print_claims(claims: Sequence[Claim], *, console: Console | None = None) -> None:
    """A section per claim, its text and then a line per value; notes below."""
    console = console or table_console()
    table = Table(title="claims", title_justify="left")
    table.add_column("", no_wrap=True)
    table.add_column("claim", ratio=2)
    for heading in ("stated", "measured"):
        table.add_column(heading, justify="right", ratio=1)
    table.add_column("tolerance", ratio=1)
    table.add_column("holds")
    for claim in claims:
        table.add_row(claim.id, claim.claim, "", "", claim.tolerance, _VERDICTS[claim.holds])
        for name in dict.fromkeys([*claim.stated, *claim.measured]):
            cells = [_written(values.get(name)) for values in (claim.stated, claim.measured)]
            table.add_row("", f"  {name}", *cells, "", "")
        table.add_section()
    console.print(table)
    for claim in claims:
        if claim.note:
            console.print(f"{claim.id}: {claim.note}", markup=False, highlight=False)
    console.print(count_line(claims), markup=False, highlight=False)


def count_line(claims: Sequence[Claim]) -> str:
    """How many hold, and which do not."""
    failing = [claim.id for claim in claims if claim.holds is False]
    open_ = [claim.id for claim in claims if claim.holds is None]
    line = f"{sum(claim.holds is True for claim in claims)} of {len(claims)} claims hold"
    line += f"; {', '.join(failing)} not" if failing else ""
    return line + (f"; {', '.join(open_)} not run" if open_ else "")


def _written(value: Value | None) -> str:
    if value is None:
        return "-"
    if isinstance(value, str | int | float):
        return str(value)
    return " / ".join(map(str, value))

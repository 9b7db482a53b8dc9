"""All rows, one after the other: `paxserve claims`.

Owns: which run derives which rows, and that a run that breaks off or lacks something still leaves
its rows. In: a scale. Out: claims in the order of their ids. Must not know: how a row is shown.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from paxserve.claims import Claim, Missing, Row, Scale
from paxserve.claims.batched import B6_ALPACA, batched
from paxserve.claims.batching import A1, A2, A3, A4, head_of_line, textbook
from paxserve.claims.beams import C4, beam_search
from paxserve.claims.churn import B4, churn
from paxserve.claims.figure12 import B8, sustained
from paxserve.claims.flags import D6, five_flags
from paxserve.claims.gathering import E1, gathering
from paxserve.claims.intensity import A7, intensity
from paxserve.claims.memory import B1, B2, B3, B9, fragmentation, growth, one_request
from paxserve.claims.orca import A6, request_level
from paxserve.claims.overload import B5, B6, B7, overload
from paxserve.claims.paging import E2, paging
from paxserve.claims.preemption import B10, preemption
from paxserve.claims.sharing import C1, C2, C3, copy_on_write, parallel_sampling, system_prompt
from paxserve.claims.sizing import D1, D2, D3, D4, D5, sizing
from paxserve.claims.stall import A5, prefill_stall

type Progress = Callable[[str, int, int], None]


class Derivation(NamedTuple):
    """Some rows, and the run that measures all of them."""

    rows: tuple[Row, ...]
    run: Callable[[Scale], Iterator[Claim]]


DERIVATIONS = (
    Derivation((A1, A2, A3), head_of_line),
    Derivation((A4,), textbook),
    Derivation((A5,), prefill_stall),
    Derivation((A6,), request_level),
    Derivation((A7,), intensity),
    Derivation((B1, B2), one_request),
    Derivation((B3,), fragmentation),
    Derivation((B4,), churn),
    Derivation((B5, B6, B7), overload),
    Derivation((B6_ALPACA,), batched),
    Derivation((B8,), sustained),
    Derivation((B9,), growth),
    Derivation((B10,), preemption),
    Derivation((C1,), system_prompt),
    Derivation((C2,), copy_on_write),
    Derivation((C3,), parallel_sampling),
    Derivation((C4,), beam_search),
    Derivation((D1, D2, D3, D4, D5), sizing),
    Derivation((D6,), five_flags),
    Derivation((E1,), gathering),
    Derivation((E2,), paging),
)


def derive(
    scale: Scale, *, progress: Progress, derivations: Sequence[Derivation] = DERIVATIONS
) -> list[Claim]:
    """Every row, measured or not; `progress` hears of rows done."""
    claims: list[Claim] = []
    num_rows = sum(len(derivation.rows) for derivation in derivations)
    for derivation in derivations:
        progress("claims", len(claims), num_rows)
        claims += attempt(derivation, scale)
    progress("claims", num_rows, num_rows)
    return claims


def attempt(derivation: Derivation, scale: Scale) -> list[Claim]:
    """The rows of one run. An error in it is a finding about this code, not the end of the rest."""
    try:
        return list(derivation.run(scale))
    except Missing as missing:
        return [row.not_run(str(missing)) for row in derivation.rows]
    except Exception as error:
        return [row.failed(error) for row in derivation.rows]

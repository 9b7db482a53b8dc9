"""Requests that have ended, reduced to their figures: what `record=compact` keeps of them.

Owns: a row per request, the gaps between all tokens as a histogram, the first errors. In: requests
that ended and hold nothing any more. Out: the columns of a summary, the table that is written. Must
not know: engines, files.

Prompts and outputs are gone, so such a run cannot be replayed, nor its tokens compared.
"""

import pyarrow as pa

from paxserve.histogram import LogHistogram
from paxserve.metrics import (
    COMPLETED,
    LISTS,
    SUMMED,
    RequestColumns,
    RequestRecord,
    gaps_of,
    scalars_of,
)
from paxserve.request import Request
from paxserve.tables import GrowingTable, numpy_column, schema_of

MOST_ERRORS = 10
_SCALARS = tuple(name for name in RequestRecord._fields if name not in LISTS)
_OWN = {"arrival_seq": int, "gaps_s": float}  # columns that are not written


class FoldedRequests:
    """`num_errors` requests ended with an error; `errors` are the first of their messages."""

    def __init__(self) -> None:
        self.num_errors = 0
        self.errors: list[str] = []
        self._itl = LogHistogram()
        self._rows = GrowingTable(schema_of(RequestRecord, without=LISTS, more=_OWN))

    def add(self, request: Request) -> None:
        """A request has ended, and its figures will not change any more."""
        record, gaps_s = scalars_of(request), gaps_of(request)
        if record.finish_reason in COMPLETED:
            self._itl.add(gaps_s)
        if record.error is not None:
            self.num_errors += 1
            self.errors += [record.error] if len(self.errors) < MOST_ERRORS else []
        scalars = [getattr(record, name) for name in _SCALARS]
        self._rows.add((*scalars, request.arrival_seq, float(gaps_s.sum())))

    def table(self) -> pa.Table:
        """A row per request, in order of arrival; the fields of `RequestRecord` without `LISTS`."""
        return self._in_order().select(_SCALARS)

    def columns(self) -> RequestColumns:
        """What a summary needs."""
        table = self._in_order()
        return RequestColumns(
            fields={name: numpy_column(table[name]) for name in SUMMED},
            gaps_s=numpy_column(table["gaps_s"]),
            itl=self._itl,
        )

    def _in_order(self) -> pa.Table:
        return self._rows.table().sort_by("arrival_seq")

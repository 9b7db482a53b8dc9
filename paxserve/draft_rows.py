"""The rows of a step while it is being decided: granted one by one or in bulk, and taken back.

Owns: their order, and which sequence has one. In: grants. Out: `Rows`. Must not know: why anything
was granted.
"""

from collections.abc import Collection

from paxserve.step import RowPlan, Rows


class DraftRows:
    """What is computed, by sequence id, in the order of the grants.

    Decodes that are granted in bulk stay columns, and are taken apart only where a row of them is
    taken back. `_bulks` are these, each with the number of single rows granted before it.
    """

    def __init__(self) -> None:
        self._singles: dict[int, RowPlan] = {}
        self._bulks: list[tuple[int, Rows]] = []

    def __bool__(self) -> bool:
        return bool(self._singles or self._bulks)

    def __contains__(self, sequence_id: int) -> bool:
        return sequence_id in self._singles or any(
            sequence_id in decodes.sequence_ids for _, decodes in self._bulks
        )

    def isdisjoint(self, sequence_ids: Collection[int]) -> bool:
        """Whether none of these is computed."""
        return self._singles.keys().isdisjoint(sequence_ids) and all(
            set(decodes.sequence_ids).isdisjoint(sequence_ids) for _, decodes in self._bulks
        )

    def add(self, row: RowPlan) -> None:
        """One more row."""
        self._singles[row.sequence_id] = row

    def add_decodes(self, decodes: Rows) -> None:
        """Rows that all decode."""
        self._bulks.append((len(self._singles), decodes))

    def get(self, sequence_id: int) -> RowPlan | None:
        """The row of a sequence, None without one."""
        row = self._singles.get(sequence_id)
        if row is None and sequence_id in self:
            self._take_apart()
            row = self._singles[sequence_id]
        return row

    def pop(self, sequence_id: int) -> RowPlan | None:
        """Take back the row of a sequence, if it has one."""
        row = self.get(sequence_id)
        if row is not None:
            self._take_apart()
            del self._singles[sequence_id]
        return row

    def index(self) -> dict[int, int]:
        """Number of each row by its sequence id."""
        self._take_apart()
        return {sequence_id: i for i, sequence_id in enumerate(self._singles)}

    def joined(self) -> Rows:
        """All rows."""
        singles = list(self._singles.values())
        if not singles and len(self._bulks) == 1:
            return self._bulks[0][1]
        parts, start = [], 0
        for num_before, decodes in self._bulks:
            parts += [Rows.of(singles[start:num_before]), decodes]
            start = num_before
        return Rows.joined([*parts, Rows.of(singles[start:])])

    def _take_apart(self) -> None:
        if self._bulks:
            rows, self._bulks = self.joined(), []
            self._singles = {row.sequence_id: row for row in rows}

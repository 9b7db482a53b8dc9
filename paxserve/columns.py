"""Records kept as columns: one list per field, since most of their readers want one field of all.

Owns: what makes such columns a sequence of records. Must not know: what is in them.
"""

from collections.abc import Iterator, Sequence
from typing import overload


class Columns[T](Sequence[T]):
    """A record is made only for whoever asks for one. Equal to any sequence of equal records."""

    __slots__ = ("_records",)

    def __init__(self) -> None:
        self._records: tuple[T, ...] | None = None

    def _make(self) -> tuple[T, ...]:
        """All records."""
        raise NotImplementedError

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[T, ...]: ...
    def __getitem__(self, index: int | slice) -> T | tuple[T, ...]:
        return self._all()[index]

    def __iter__(self) -> Iterator[T]:
        return iter(self._all())

    def __eq__(self, other: object) -> bool:
        return self._all() == (other._all() if isinstance(other, Columns) else other)

    def __hash__(self) -> int:
        return hash(self._all())

    def __repr__(self) -> str:
        return repr(self._all())

    def _all(self) -> tuple[T, ...]:
        if self._records is None:
            self._records = self._make()
        return self._records

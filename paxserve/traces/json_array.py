"""Objects of one JSON array that is too long to hold, or that was cut off.

Owns: reading piece by piece, and telling a file that ends too early from one that is wrong. In: a
path. Out: (place, object) per object. Must not know: what they mean.
"""

import json
import re
import warnings
from collections.abc import Iterator
from typing import Any, TextIO

from paxserve.traces.text_file import open_text

NUM_CHARS = 2**20
_LONGEST_LITERAL = len("-Infinity")
_GAP = re.compile(r"[ \t\r\n]*")


def read_json_array(path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects, each with the place to name in errors.

    A file cut off in the middle gives its whole objects and a warning that says so.

    Raises:
        ValueError: it is not a JSON array of objects.
        FileNotFoundError: there is no such file.
    """
    num_items = 0
    with open_text(path) as file:
        reader = _Reader(path, file)
        reader.expect("[")
        is_first = True
        while reader.next_char() != "]":
            try:
                if not is_first:
                    reader.expect(",")
                place, item = reader.object()
            except EOFError:
                warnings.warn(
                    f"{reader.place()}: the file is cut off here; its {num_items} whole items "
                    "were read",
                    stacklevel=2,
                )
                return
            yield place, item
            num_items += 1
            is_first = False


class _Reader:
    """A window of the file. Invariant: `_text[_at:]` is what follows, and was not used yet."""

    def __init__(self, path: str, file: TextIO) -> None:
        self._path, self._file = path, file
        self._text, self._at, self._num_lines = "", 0, 1
        self._decoder = json.JSONDecoder()

    def place(self) -> str:
        """Where the next character stands."""
        return f"{self._path} line {self._num_lines + self._text.count(chr(10), 0, self._at)}"

    def next_char(self) -> str:
        """The next one that is not white space, not used up; empty at the end of the file."""
        while True:
            self._at = _GAP.match(self._text, self._at).end()  # type: ignore[union-attr]
            if self._at < len(self._text) or not self._read_more():
                return self._text[self._at : self._at + 1]

    def expect(self, char: str) -> None:
        """Use up this character.

        Raises:
            EOFError: the file ends before it.
            ValueError: there is another one.
        """
        found = self.next_char()
        if found != char:
            if not found:
                raise EOFError
            raise ValueError(f"{self.place()} must have {char} here, got {found!r}")
        self._at += 1

    def object(self) -> tuple[str, dict[str, Any]]:
        """The next object, and where it begins.

        Raises:
            EOFError: the file ends inside it.
            ValueError: it is no JSON object.
        """
        self.expect("{")
        self._at -= 1
        place = self.place()
        while True:
            try:
                value, end = self._decoder.raw_decode(self._text, self._at)
            except (json.JSONDecodeError, RecursionError) as error:
                if not self._may_go_on(error):
                    raise ValueError(f"{place} is not JSON: {error}") from error
                if not self._read_more():
                    raise EOFError from error
                continue
            self._at = end
            return place, value

    def _may_go_on(self, error: Exception) -> bool:
        """Whether the text so far could be the beginning of a value."""
        if not isinstance(error, json.JSONDecodeError):
            return False
        is_at_end = error.pos >= len(self._text) - _LONGEST_LITERAL
        return is_at_end or error.msg.startswith("Unterminated string")

    def _read_more(self) -> bool:
        """At least as much as there is, so that a long item is not tried over and over."""
        self._num_lines += self._text.count("\n", 0, self._at)
        self._text, self._at = self._text[self._at :], 0
        more = self._file.read(max(NUM_CHARS, len(self._text)))
        self._text += more
        return bool(more)

"""Checks of the two settings that every workload read from a file has.

Owns: their ranges. Must not know: the file.
"""

from paxserve.numbers import MOST_REQUESTS, whole


def check_file(path: object, limit: object) -> None:
    """`path` names a file, and `limit` is a number of requests, 0 for all.

    Raises:
        ValueError: one of them is neither.
    """
    if not isinstance(path, str):
        raise ValueError(f"path must be the name of a file, got {path!r}")
    whole("limit", limit, low=0, high=MOST_REQUESTS)

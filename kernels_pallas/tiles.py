"""Tiles that were measured on a kind of device: `tuned/<device kind>.json`.

Owns: which calls share an entry, and the way to it. The tables are data that `tune.py` writes. A
backend with tiles exports `Tiles` (a frozen dataclass of integers), `default_tiles(q, kv_blocks,
block_table, device_kind=)` from shapes and dtypes alone, and `candidate_tiles(base, block_size)`.
Must not know: what a tile means to a kernel.
"""

import json
import math
import re
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

import jax

type Shaped = jax.Array | jax.ShapeDtypeStruct


def tile_key(
    q: Shaped, kv_blocks: Shaped, block_table: Shaped, *, num_kv_heads: int, block_size: int
) -> str:
    """All that a table distinguishes but the number of rows; a decode has one token per row."""
    work = "decode" if q.shape[0] == block_table.shape[0] else "mixed"
    return (
        f"{work} N{q.shape[1]} K{num_kv_heads} H{q.shape[2]} S{block_size} {kv_blocks.dtype.name}"
    )


def measured_tiles(
    backend: str, key: str, *, num_rows: int, device_kind: str | None
) -> dict[str, int] | None:
    """Fields of the tiles measured with the nearest number of rows; None: nothing was measured, or
    nothing beat the default.
    """
    by_rows = _table(device_kind).get(backend, {}).get(key, {})
    if not by_rows:
        return None
    nearest = min(by_rows, key=lambda rows: abs(math.log2(int(rows) / num_rows)))
    fields: dict[str, int] = by_rows[nearest]
    return fields


def file_name(device_kind: str) -> str:
    """Of a kind's table: its name in lower case, words joined by underscores."""
    return re.sub(r"[^a-z0-9]+", "_", device_kind.lower()).strip("_") + ".json"


@cache
def _table(device_kind: str | None) -> Mapping[str, Any]:
    """backend -> key -> rows -> fields of its tiles."""
    if device_kind is None:
        return {}
    file = files("kernels_pallas") / "tuned" / file_name(device_kind)
    if not file.is_file():
        return {}
    table: Mapping[str, Any] = json.loads(file.read_text(encoding="utf-8"))["tiles"]
    return table

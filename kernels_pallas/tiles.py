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

FARTHEST = 4  # times as many rows, or as few, as those whose tiles are taken


def tile_key(
    q: Shaped,
    kv_blocks: Shaped,
    block_table: Shaped,
    *,
    num_kv_heads: int,
    block_size: int,
    sliding_window: int | None,
) -> str:
    """All that a table distinguishes but the number of rows: whether every row is a decode, heads,
    block size, the context that the block table has room for (up to a power of two), the window,
    and the dtypes of q and the cache.
    """
    work = "decode" if q.shape[0] == block_table.shape[0] else "mixed"
    room = 1 << (block_table.shape[1] * block_size - 1).bit_length()
    window = "" if sliding_window is None else f" W{sliding_window}"
    return (
        f"{work} N{q.shape[1]} K{num_kv_heads} H{q.shape[2]} S{block_size} C{room}{window} "
        f"{q.dtype.name} {kv_blocks.dtype.name}"
    )


def measured_tiles(
    backend: str, key: str, *, num_rows: int, device_kind: str | None
) -> dict[str, int] | None:
    """Fields of the tiles measured with the nearest number of rows, `FARTHEST` at most; None: none
    is so near, or there nothing beat the default.
    """

    def distance(rows: str) -> float:
        return abs(math.log2(int(rows) / num_rows))

    by_rows = _table(device_kind).get(backend, {}).get(key, {})
    near = [rows for rows in by_rows if distance(rows) <= math.log2(FARTHEST)]
    fields: dict[str, int] | None = by_rows[min(near, key=distance)] if near else None
    return fields


def file_name(device_kind: str) -> str:
    """Of a kind's table: its name in lower case, words joined by underscores."""
    return re.sub(r"[^a-z0-9]+", "_", device_kind.lower()).strip("_") + ".json"


@cache
def _table(device_kind: str | None) -> Mapping[str, Any]:
    """backend -> key -> rows -> fields of its tiles; null: the default's were the fastest."""
    if device_kind is None:
        return {}
    file = files("kernels_pallas") / "tuned" / file_name(device_kind)
    if not file.is_file():
        return {}
    table: Mapping[str, Any] = json.loads(file.read_text(encoding="utf-8"))["tiles"]
    return table

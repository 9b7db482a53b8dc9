"""Which tiles a kernel runs with: those measured on this kind of device, else the backend's own.

Owns: the static facts on which tiles depend, and the tables of measured ones,
`tuned/<device kind>.json`, data that `tune.py` writes. A backend with tiles exports `Tiles` (a
frozen dataclass of integers), `default_tiles(case)` and `candidate_tiles(case)`. Must not know:
what a tile means to a kernel.
"""

import json
import math
import re
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from types import ModuleType
from typing import Any, NamedTuple

import jax.numpy as jnp


class TileCase(NamedTuple):
    """What is known of a call when it is traced; `device_kind` None: any device."""

    num_tokens: int
    num_rows: int
    blocks_per_row: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: jnp.dtype
    kv_dtype: jnp.dtype
    sliding_window: int | None
    device_kind: str | None

    @property
    def is_decode(self) -> bool:
        """Every row has at most one token, by the shapes alone."""
        return self.num_tokens == self.num_rows

    @property
    def key(self) -> str:
        """All that a table distinguishes, but the number of rows."""
        work = "decode" if self.is_decode else "mixed"
        return (
            f"{work} N{self.num_heads} K{self.num_kv_heads} H{self.head_dim} S{self.block_size} "
            f"{jnp.dtype(self.kv_dtype).name}"
        )


def choose_tiles(backend: str, module: ModuleType, case: TileCase) -> Any:
    """Measured for this kind of device, with the nearest number of rows; else the default. None for
    a backend without tiles.
    """
    if not hasattr(module, "Tiles"):
        return None
    by_rows = _table(case.device_kind).get(backend, {}).get(case.key, {})
    if not by_rows:
        return module.default_tiles(case)
    nearest = min(by_rows, key=lambda rows: abs(math.log2(int(rows) / case.num_rows)))
    return module.Tiles(**by_rows[nearest])


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

"""Looks for the fastest tiles on this device: `python -m kernels_pallas.tune`.

Owns: the search. Every candidate of a backend is timed on the named shapes; each time is written
down at once, so that an interrupted search goes on where it stopped; when the budget is spent it
stops. In the end the fastest tiles of each shape are stored as data for this kind of device, which
later calls look up (`tiles.py`). Must not know: what a tile means.
"""

import argparse
import dataclasses
import fnmatch
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from kernels_pallas.bench import USUAL, host_shape, prepare_ours, prepared_shapes
from kernels_pallas.paged_attention import backend_module, choose_backend
from kernels_pallas.shapes import SHAPES, AttentionShape
from kernels_pallas.tiles import file_name, tile_key
from kernels_pallas.timing import seconds_per_call

TUNED = Path(__file__).parent / "tuned"
WORTH_STORING = 0.97  # of the default's time: less is noise


def main(argv: Sequence[str] | None = None) -> int:
    """Search, print what was found, store it."""
    parser = argparse.ArgumentParser(prog="python -m kernels_pallas.tune", description=__doc__)
    parser.add_argument("--backend", default=None, help="default: what kernel=auto chooses here")
    parser.add_argument("--shapes", default=None, metavar="GLOB", help="of all named shapes")
    parser.add_argument("--small", action="store_true", help="each shape's small form")
    parser.add_argument("--budget-s", type=float, default=120.0, help="start nothing after it")
    parser.add_argument("--measured", type=Path, default=None, help="times so far; goes on there")
    parser.add_argument("--out", type=Path, default=None, help="the table; default: the package's")
    given = parser.parse_args(argv)
    names = [n for n in SHAPES if fnmatch.fnmatch(n, given.shapes)] if given.shapes else USUAL
    if not names:
        parser.error(f"no shape matches {given.shapes!r}: they are {list(SHAPES)}")
    backend = given.backend or choose_backend(jax.default_backend())
    if not hasattr(backend_module(backend), "candidate_tiles"):
        parser.error(f"backend {backend!r} has no tiles to tune")
    kind = jax.devices()[0].device_kind
    measured_file = given.measured or Path(f"tune-{file_name(kind)}")
    measured = _read(measured_file)
    started_s = time.perf_counter()
    for name, tiles, entry in _search(names, backend, measured, small=given.small):
        if time.perf_counter() - started_s > given.budget_s:
            print(f"out of time after {given.budget_s:.0f} s: run it again to go on")
            break
        entry[tiles] = _seconds(name, backend, json.loads(tiles), small=given.small)
        _write(measured_file, measured)
        print(f"{name} {tiles} {entry[tiles]}", flush=True)
    table_file = given.out or TUNED / file_name(kind)
    table = _best(_read(table_file), measured, names, backend, small=given.small)
    _write(table_file, {"device_kind": kind, "jax": jax.__version__, "tiles": table})
    print(f"tiles: {table_file}")
    return 0


def _search(
    names: Sequence[str], backend: str, measured: dict[str, Any], *, small: bool
) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Shape, candidate, and where its time goes; those that have one are left out."""
    module = backend_module(backend)
    for name in names:
        shape = _shape(name, small=small)
        default = _default(shape, backend)
        entry = measured.setdefault(f"{backend} {name}", {})
        for tiles in (default, *module.candidate_tiles(default, shape.block_size)):
            text = json.dumps(dataclasses.asdict(tiles))
            if text not in entry:
                yield name, text, entry


def _seconds(name: str, backend: str, tiles: dict[str, int], *, small: bool) -> float | str:
    """Median of a call, or why there is none: a candidate may ask for more memory than there is."""
    chosen = backend_module(backend).Tiles(**tiles)
    try:
        call = prepare_ours(_shape(name, small=small), backend, tiles=chosen)
        return seconds_per_call(*call, num_rounds=7).median_s
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200]}"


def _best(
    table: dict[str, Any],
    measured: dict[str, Any],
    names: Sequence[str],
    backend: str,
    *,
    small: bool,
) -> dict[str, Any]:
    """The table's tiles with this search's in place of older ones, where they beat the default."""
    found: dict[str, Any] = table.get("tiles", {})
    for name in names:
        shape = _shape(name, small=small)
        times = measured.get(f"{backend} {name}", {})
        timed = {text: s for text, s in times.items() if isinstance(s, float)}
        default_s = timed.get(json.dumps(dataclasses.asdict(_default(shape, backend))))
        if default_s is None:
            continue
        best = min(timed, key=lambda text: timed[text])
        by_rows = found.setdefault(backend, {}).setdefault(_key(shape, backend), {})
        by_rows.pop(str(shape.num_rows), None)
        if timed[best] < WORTH_STORING * default_s:
            by_rows[str(shape.num_rows)] = json.loads(best)
    return found


def _default(shape: AttentionShape, backend: str) -> Any:
    """What the backend itself chooses on this device."""
    q, kv_blocks, block_table, *_ = prepared_shapes(shape, backend)
    kind = jax.devices()[0].device_kind
    return backend_module(backend).default_tiles(q, kv_blocks, block_table, device_kind=kind)


def _key(shape: AttentionShape, backend: str) -> str:
    q, kv_blocks, block_table, *_ = prepared_shapes(shape, backend)
    return tile_key(
        q,
        kv_blocks,
        block_table,
        num_kv_heads=shape.num_kv_heads,
        block_size=shape.block_size,
    )


def _shape(name: str, *, small: bool) -> AttentionShape:
    return host_shape(SHAPES[name].small() if small else SHAPES[name])


def _read(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found


def _write(file: Path, value: dict[str, Any]) -> None:
    """Whole or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f"{file.name}.tmp-{os.getpid()}")
    partial.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    os.replace(partial, file)


if __name__ == "__main__":
    sys.exit(main())

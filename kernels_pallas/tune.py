"""Looks for the fastest tiles on this device: `python -m kernels_pallas.tune`.

Owns: the search. Every candidate of a backend is timed on the named shapes; each time is written
down at once, with the device and the JAX it holds for, so that an interrupted search goes on where
it stopped; a candidate that raised is tried again after the others. When the budget is spent it
stops. In the end the fastest tiles of each shape are stored as data for this kind of device, which
later calls look up (`tiles.py`). Must not know: what a tile means.
"""

import argparse
import dataclasses
import fnmatch
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from kernels_pallas import json_files
from kernels_pallas.bench import USUAL, backend_for, host_shape
from kernels_pallas.bench_calls import prepare_ours, prepared_shapes
from kernels_pallas.paged_attention import BACKENDS, backend_module
from kernels_pallas.shapes import SHAPES, AttentionShape
from kernels_pallas.tiles import file_name, tile_key
from kernels_pallas.timing import seconds_per_call

TUNED = Path(__file__).parent / "tuned"
WORTH_STORING = 0.97  # of the default's time: less is noise
MOST_CANDIDATE_S = 60.0  # its compile included


def main(argv: Sequence[str] | None = None) -> int:
    """Search, print what was found, store it; 1 if nothing was measured."""
    parser = argparse.ArgumentParser(prog="python -m kernels_pallas.tune", description=__doc__)
    parser.add_argument(
        "--backend", choices=_TUNED, help="default: what kernel=auto chooses here for each shape"
    )
    parser.add_argument("--shapes", default=None, metavar="GLOB", help="of all named shapes")
    parser.add_argument("--small", action="store_true", help="each shape's small form")
    parser.add_argument("--budget-s", type=float, default=120.0, help="start nothing after it")
    parser.add_argument("--measured", type=Path, default=None, help="times so far; goes on there")
    parser.add_argument("--out", type=Path, default=None, help="the table; default: the package's")
    given = parser.parse_args(argv)
    names = [n for n in SHAPES if fnmatch.fnmatch(n, given.shapes)] if given.shapes else USUAL
    if not names:
        parser.error(f"no shape matches {given.shapes!r}: they are {list(SHAPES)}")
    if given.small and given.out is None:
        parser.error("--small needs --out: its tiles are not for the package's table")
    kind = jax.devices()[0].device_kind
    measured_file = given.measured or Path(f"tune-{file_name(kind)}")
    if given.out is None:
        TUNED.mkdir(exist_ok=True)
    table_file = given.out or TUNED / file_name(kind)
    json_files.check_writable("--measured", measured_file)
    json_files.check_writable("--out", table_file)
    works = [_work(name, given.backend, small=given.small) for name in names]
    measured = json_files.read(measured_file)
    started_s = time.perf_counter()
    for work, tiles in _search(works, measured):
        if time.perf_counter() - started_s > given.budget_s:
            print(f"out of time after {given.budget_s:.0f} s: run it again to go on")
            break
        measured.setdefault(work.key, {})[tiles] = found = _seconds(work, json.loads(tiles))
        json_files.write(measured_file, measured)
        print(f"{work.name} {work.backend} {tiles} {found}", flush=True)
    table = _best(json_files.read(table_file), measured, works)
    json_files.write(table_file, {"device_kind": kind, "jax": jax.__version__, "tiles": table})
    print(f"tiles: {table_file}")
    if not any(_timed(work, measured) for work in works):
        print("failed: nothing was measured")
        return 1
    return 0


_TUNED = [name for name in BACKENDS if hasattr(backend_module(name), "candidate_tiles")]


class _Work(NamedTuple):
    """A shape and the backend whose tiles are looked for."""

    name: str
    backend: str
    shape: AttentionShape
    key: str  # of its times: all that they hold for


def _work(name: str, backend: str | None, *, small: bool) -> _Work:
    shape = host_shape(SHAPES[name].small() if small else SHAPES[name])
    chosen = backend_for(shape, backend)
    key = [jax.devices()[0].device_kind, f"jax {jax.__version__}", chosen, name]
    return _Work(name, chosen, shape, ", ".join(key + ["small"] * small))


def _search(works: Sequence[_Work], measured: dict[str, Any]) -> Iterator[tuple[_Work, str]]:
    """Work and candidate: those without a time, and those that raised last."""
    left: tuple[list[tuple[_Work, str]], ...] = ([], [])
    for work in works:
        known = measured.get(work.key, {})
        for text in _candidates(work):
            if not isinstance(known.get(text), float):
                left[text in known].append((work, text))
    yield from (*left[0], *left[1])


def _candidates(work: _Work) -> dict[str, None]:
    """Tiles to be tried, each once; the default's are the first."""
    default = _default(work)
    others = backend_module(work.backend).candidate_tiles(default, work.shape.block_size)
    return dict.fromkeys(_text(tiles) for tiles in (default, *others))


def _text(tiles: Any) -> str:
    return json.dumps(dataclasses.asdict(tiles))


def _seconds(work: _Work, tiles: dict[str, int]) -> float | str:
    """Median of a call, or why there is none: a candidate may ask for more memory than there is."""
    chosen = backend_module(work.backend).Tiles(**tiles)
    try:
        call = prepare_ours(work.shape, work.backend, tiles=chosen)
        return seconds_per_call(*call, num_rounds=7, limit_s=MOST_CANDIDATE_S).median_s
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200]}"


def _timed(work: _Work, measured: dict[str, Any]) -> dict[str, float]:
    """Seconds by tiles, without those that raised."""
    times = measured.get(work.key, {})
    return {text: s for text, s in times.items() if isinstance(s, float)}


def _best(
    table: dict[str, Any], measured: dict[str, Any], works: Sequence[_Work]
) -> dict[str, Any]:
    """The table's tiles with this search's in place of older ones: the fastest where they beat the
    default, null where all were tried and none does. A search that was cut says neither.
    """
    found: dict[str, Any] = table.get("tiles", {})
    for work in works:
        timed = _timed(work, measured)
        default_s = timed.get(_text(_default(work)))
        if default_s is None:
            continue
        best = min(timed, key=lambda text: timed[text])
        by_rows = found.setdefault(work.backend, {}).setdefault(_table_key(work), {})
        rows = str(work.shape.num_rows)
        by_rows.pop(rows, None)
        if timed[best] < WORTH_STORING * default_s:
            by_rows[rows] = json.loads(best)
        elif measured[work.key].keys() >= _candidates(work).keys():
            by_rows[rows] = None
    return found


def _default(work: _Work) -> Any:
    """What the backend itself chooses on this device."""
    q, kv_blocks, block_table, *_ = prepared_shapes(work.shape, work.backend)
    kind = jax.devices()[0].device_kind
    return backend_module(work.backend).default_tiles(q, kv_blocks, block_table, device_kind=kind)


def _table_key(work: _Work) -> str:
    """The entry of the tables that calls like this one read."""
    q, kv_blocks, block_table, *_ = prepared_shapes(work.shape, work.backend)
    return tile_key(
        q,
        kv_blocks,
        block_table,
        num_kv_heads=work.shape.num_kv_heads,
        block_size=work.shape.block_size,
        sliding_window=work.shape.sliding_window,
    )


if __name__ == "__main__":
    sys.exit(main())

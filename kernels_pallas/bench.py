"""How fast paged attention is on this device: `python -m kernels_pallas.bench`.

Owns: which shapes are run, and for how long. Per shape and kernel the median of many calls, the
least bytes and products that the answer needs, and their share of what the device copied and
multiplied in the same run. Ends within its budget: a row has a limit, after which it is cut, and
what was not reached says so; a compiler at work is not interrupted. Imports no Hydra, needs no
network. Must not know: what is timed (`bench_calls.py`), how it is shown (`bench_rows.py`), models,
the engine.
"""

import argparse
import fnmatch
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import jax

from kernels_pallas import json_files
from kernels_pallas.bench_calls import Entrant, entrants, tiles_of
from kernels_pallas.bench_rows import Row, headline, line, report
from kernels_pallas.ceilings import measure_ceilings
from kernels_pallas.paged_attention import BACKENDS
from kernels_pallas.shapes import SHAPES, AttentionShape
from kernels_pallas.support import choose
from kernels_pallas.timing import Timing, seconds_per_call

USUAL = (
    "llama-3-8b/decode_64x4k",
    "llama-3-8b/prompts_8x2k",
    "llama-3-8b/mixed_64+512",
    "llama-3-8b/decode_256x1k",
    "llama-3-8b/decode_1x128k",
    "llama-3-8b/decode_1x4k",
    "llama-3-8b/decode_64x4k/block32",
    "llama-3-8b/decode_64x4k/block64",
    "llama-3-8b/decode_64x4k/block128",
    "llama-3-8b/decode_64x4k/int8/block128",
    "llama-3-8b/decode_64x4k/fp8/block128",
    "smollm2-135m/decode_64x4k",
    "qwen2.5-7b/decode_64x4k",
    "mistral-7b/decode_64x8k",  # twice its window
    "llama-3-70b-tp8/decode_64x4k",
    "llama-3-70b-tp8/prompts_8x2k",
)
NUM_ROUNDS = 15
MOST_ROW_S = 60.0  # of a row, its compile included


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write; 1 if a kernel raised, or nothing was measured."""
    parser = argparse.ArgumentParser(prog="python -m kernels_pallas.bench", description=__doc__)
    parser.add_argument(
        "--backend", choices=BACKENDS, help="default: what kernel=auto chooses here for each shape"
    )
    parser.add_argument("--shapes", default=None, metavar="GLOB", help="of all named shapes")
    parser.add_argument("--small", action="store_true", help="each shape's small form")
    parser.add_argument("--budget-s", type=float, default=280.0, help="start nothing after it")
    parser.add_argument("--json", type=Path, default=None, metavar="FILE")
    given = parser.parse_args(argv)
    names = [n for n in SHAPES if fnmatch.fnmatch(n, given.shapes)] if given.shapes else USUAL
    if not names:
        parser.error(f"no shape matches {given.shapes!r}: they are {list(SHAPES)}")
    if given.json is not None:
        json_files.check_writable("--json", given.json)
    started_s = time.perf_counter()
    ceilings = measure_ceilings()
    print(headline(ceilings))
    rows: list[Row] = []
    left_s = given.budget_s - (time.perf_counter() - started_s)
    for row in bench(names, backend=given.backend, small=given.small, budget_s=left_s):
        rows.append(row)
        print(line(row, ceilings), flush=True)
        if given.json is not None:
            json_files.write(given.json, report(ceilings, rows))
    faults = faults_of(rows)
    print(f"failed: {'; '.join(faults) or 'none'}")
    return 1 if faults else 0


def faults_of(rows: Sequence[Row]) -> list[str]:
    """What is wrong with a run: every row that raised, or that none has a time."""
    found = [f"{row.shape} {row.kernel}: {row.note}" for row in rows if row.has_failed]
    if not found and not any(row.timing for row in rows):
        found.append("nothing was measured")
    return found


def bench(
    names: Sequence[str], *, backend: str | None, small: bool = False, budget_s: float = 280.0
) -> Iterator[Row]:
    """Every shape with its peers, as they are measured; backend None: what auto chooses for it."""
    ends_s = time.perf_counter() + budget_s
    for name in names:
        shape = host_shape(SHAPES[name].small() if small else SHAPES[name])
        for number, entrant in enumerate(entrants(shape, backend_for(shape, backend))):
            row = Row(
                shape=name,
                is_small=small,
                problem=entrant.shape,
                kernel=entrant.kernel,
                backend=entrant.backend,
            )
            try:
                row = replace(row, tiles=_tiles(entrant))
                timing = _time(entrant, left_s=ends_s - time.perf_counter())
                row = replace(row, timing=timing, note=_cut(timing))
            except TimeoutError as error:
                row = replace(row, note=f"not measured: {error}")
            except Exception as error:
                note = f"{type(error).__name__}: {str(error)[:200]}"
                is_free = number > 0 and isinstance(error, NotImplementedError)  # a peer may refuse
                row = replace(row, note=note, has_failed=not is_free)
            yield row


def _tiles(entrant: Entrant) -> dict[str, int] | None:
    """Fields of the tiles with which ours runs; None: it has none, or is not ours."""
    tiles = None if entrant.backend is None else tiles_of(entrant.shape, entrant.backend)
    return None if tiles is None else asdict(tiles)


def _time(entrant: Entrant, *, left_s: float) -> Timing:
    """Its time; whatever the kernel raises.

    Raises:
        TimeoutError: there is none within `left_s` or a row's limit.
    """
    if left_s <= 0.0:
        raise TimeoutError("out of time")
    started_s = time.perf_counter()
    call = entrant.prepare()
    limit_s = min(left_s, MOST_ROW_S) - (time.perf_counter() - started_s)
    return seconds_per_call(*call, num_rounds=NUM_ROUNDS, limit_s=limit_s)


def _cut(timing: Timing) -> str:
    """What a row says of a time that has fewer rounds than it should."""
    is_cut = timing.num_rounds < NUM_ROUNDS
    return f"cut: {timing.num_rounds} of {NUM_ROUNDS} rounds" if is_cut else ""


def host_shape(shape: AttentionShape) -> AttentionShape:
    """The shape with the dtype that the default device computes in: a CPU has no fast bfloat16."""
    if jax.default_backend() != "cpu":
        return shape
    kv_dtype = shape.kv_dtype if shape.is_quantised else "float32"
    return replace(shape, dtype="float32", kv_dtype=kv_dtype)


def backend_for(shape: AttentionShape, given: str | None) -> str:
    """The backend that is given, or what `kernel=auto` chooses for this shape here."""
    device = jax.devices()[0]
    return given or choose(device.platform, device.device_kind, shape).backend


if __name__ == "__main__":
    sys.exit(main())

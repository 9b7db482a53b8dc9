"""Everything that only a device can show, in one run of eight minutes at most.

Question: are the Pallas kernels right and fast on this GPU or TPU, alone and within the engine?
Expected (Hopper): decode 64 x 4k at 60 % of the copy bandwidth or more (goal 85), block 16 at most
10 % slower than a block per request, prompts 8 x 2k at 25 % of the matmul rate (goal 50), a decode
step of random Llama-3-8B at 64 x 4k at most 1.4 times its byte floor (goal 1.25).
Command: python experiments/device_check.py --json device.json   (no network, no Hydra)

Parts, in order: numerics, bench, step, chat. A part that fails is reported and the others go on;
each has its share of the time. In the end the bars of a Hopper GPU (`device_bars.py`), which other
devices do not measure. Ends with 1 if anything raised, a number is beyond its tolerance or a bar
does not hold. On a CPU it runs the same code small (`--small`), to be tried out.
"""

import argparse
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # runs from a copy of the tree, installed or not

from experiments import device_bars  # noqa: E402
from kernels_pallas import bench, bench_rows, json_files  # noqa: E402
from kernels_pallas.ceilings import measure_ceilings  # noqa: E402
from kernels_pallas.checkout import commit_of  # noqa: E402
from kernels_pallas.checks import interpreted_checks, run_check  # noqa: E402
from kernels_pallas.paged_attention import BACKENDS  # noqa: E402
from kernels_pallas.shapes import shape_of  # noqa: E402
from kernels_pallas.tolerances import logit_tolerance  # noqa: E402
from paxserve.device.buckets import Bucket, Buckets  # noqa: E402
from paxserve.device.gap import GapMeter  # noqa: E402
from paxserve.executor.real import Real  # noqa: E402
from paxserve.limits import Limits  # noqa: E402
from paxserve.llm import LLM  # noqa: E402
from paxserve.models.config import ModelConfig, parameter_shapes  # noqa: E402
from paxserve.models.llama3 import LLAMA_3_8B  # noqa: E402
from paxserve.models.load import TINY_CONFIG, load_model  # noqa: E402
from paxserve.pack import Variant  # noqa: E402
from paxserve.sampling_params import SamplingParams  # noqa: E402
from paxserve.step import RowEntry, RowPlan, RowSampling, StepPlan, TableWrite  # noqa: E402

GOLDEN = ROOT / "tests" / "golden" / "smollm2_chat.json"
TOTAL_S = 480.0
SHARES_S = {"numerics": 110.0, "bench": 190.0, "step": 110.0, "chat": 70.0}


class Part(NamedTuple):
    """What a part found, and what is wrong with that."""

    found: Any
    faults: Sequence[str] = ()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the parts; 1 if something is wrong with one of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", help=f"of {list(SHARES_S)}; default: all")
    parser.add_argument(
        "--backend", choices=BACKENDS, help="default: what kernel=auto chooses here for each shape"
    )
    parser.add_argument("--small", action="store_true", help="small shapes and models")
    parser.add_argument("--model", default="smollm2-135m", help="of the chat; a name or path")
    parser.add_argument("--json", type=Path, default=Path("device.json"))
    given = parser.parse_args(argv)
    if unknown := sorted(set(given.parts) - set(SHARES_S)):
        parser.error(f"unknown parts {unknown}: they are {list(SHARES_S)}")
    json_files.check_writable("--json", given.json)
    device = jax.devices()[0]
    backend = bench.backend_for(
        bench.host_shape(shape_of("llama-3-8b", "decode_64x4k")), given.backend
    )
    print(f"{device.device_kind}, jax {jax.__version__}, backend {backend}", flush=True)
    parts: dict[str, Callable[[], Part]] = {
        "numerics": lambda: check_numerics(backend, SHARES_S["numerics"]),
        "bench": lambda: run_bench(given.backend, SHARES_S["bench"], small=given.small),
        "step": lambda: time_step(backend, small=given.small),
        "chat": lambda: chat(given.backend or "auto", given.model, SHARES_S["chat"]),
    }
    commit = commit_of(Path(__file__))
    found: dict[str, Any] = {
        "device_kind": device.device_kind,
        "jax": jax.__version__,
        "commit": commit and commit._asdict(),
        "backend": backend,
        "is_small": given.small,
        "started": time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime()),
    }
    started_s = time.perf_counter()
    faults = run_parts({name: parts[name] for name in given.parts or parts}, found, given.json)
    bars = device_bars.verdicts(found)
    faults += device_bars.faults(bars)
    found |= {"bars": device_bars.as_data(bars), "failed": faults}
    json_files.write(given.json, found)
    print("-- bars", *device_bars.table(bars), sep="\n")
    print(f"{time.perf_counter() - started_s:.0f} s; {given.json}")
    print(f"failed: {'; '.join(faults) or 'none'}")
    return 1 if faults else 0


def run_parts(parts: dict[str, Callable[[], Part]], found: dict[str, Any], file: Path) -> list[str]:
    """One after the other, those that still have their share of the time; `found` gets what each
    found and is written to the file.

    Returns:
        What is wrong, each with its part's name.
    """
    started_s, faults = time.perf_counter(), []
    for name, run in parts.items():
        if time.perf_counter() - started_s > TOTAL_S - SHARES_S[name]:
            part = Part("not run: out of time")
            print(f"-- {name} {part.found}", flush=True)
        else:
            print(f"-- {name}", flush=True)
            try:
                part = run()
            except Exception as error:
                traceback.print_exc()
                text = f"{type(error).__name__}: {error}"
                part = Part(text, [text])
        found[name] = part.found
        faults += [f"{name}: {fault}" for fault in part.faults]
        found["failed"] = faults
        json_files.write(file, found)
    return faults


def check_numerics(backend: str, share_s: float) -> Part:
    """The awkward cases on the device itself, against dense float64 attention."""
    started_s, rows, faults = time.perf_counter(), [], []
    for simulated in interpreted_checks(backend, quick=False):
        check = replace(simulated, target="here")
        if time.perf_counter() - started_s > share_s:
            rows.append({"check": str(check), "verdict": "not run: out of time"})
            continue
        outcome = run_check(check)
        print(f"{outcome.verdict:6} {outcome.check}: {outcome.summary}", flush=True)
        rows.append(
            {"check": str(outcome.check), "verdict": outcome.verdict, "detail": outcome.detail}
        )
        if outcome.verdict != "ok":
            faults.append(f"{outcome.check}: {outcome.summary}")
    if not faults and not any(row["verdict"] == "ok" for row in rows):
        faults.append("no check was passed")
    return Part(rows, faults)


def run_bench(backend: str | None, share_s: float, *, small: bool) -> Part:
    """The named shapes with their peers."""
    ceilings = measure_ceilings()
    print(bench_rows.headline(ceilings), flush=True)
    rows = []
    for row in bench.bench(bench.USUAL, backend=backend, small=small, budget_s=share_s):
        print(bench_rows.line(row, ceilings), flush=True)
        rows.append(row)
    return Part(bench_rows.report(ceilings, rows), bench.faults_of(rows))


def time_step(backend: str, *, small: bool) -> Part:
    """The engine's decode step with random weights, against the bytes it cannot avoid to read.

    Wall time is of the executor's submit and collect, with packing and transfers; device time is
    that of steps started one after the other without waiting, from first to last.
    """
    model, config, num_rows, context, dtype = "llama-3-8b", LLAMA_3_8B, 64, 4096, "bfloat16"
    if small:
        model, config, num_rows, context, dtype = "tiny", TINY_CONFIG, 8, 64, "float32"
    real = _executor(config, num_rows, context, backend=backend, dtype=dtype)
    real.warm_up([Variant.GREEDY])
    real.submit(_entering(num_rows, context))
    real.collect()
    plan = _decodes(num_rows, context)
    wall_s = [_seconds(lambda: (real.submit(plan), real.collect())) for _ in range(20)]
    num_steps = 30
    device_s = [_seconds(lambda: _in_a_row(real, plan, num_steps)) / num_steps for _ in range(5)]
    ceilings = measure_ceilings()
    num_bytes = _least_bytes(config, num_rows, context, dtype)
    floor_s = num_bytes / ceilings.copy_bytes_per_s
    found = {
        "model": model,
        "dtype": dtype,
        "backend": backend,
        "rows": num_rows,
        "context": context,
        "bytes": num_bytes,
        "floor_ms": 1e3 * floor_s,
        "device_ms": 1e3 * statistics.median(device_s),
        "wall_ms": 1e3 * statistics.median(wall_s),
        "device_over_floor": statistics.median(device_s) / floor_s,
        "wall_over_floor": statistics.median(wall_s) / floor_s,
    }
    print(", ".join(f"{name} {_shown(value)}" for name, value in found.items()), flush=True)
    return Part(found)


def _shown(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _executor(
    config: ModelConfig, num_rows: int, context: int, *, backend: str, dtype: str
) -> Real:
    """Weights are made on the device: 16 GB of them would take the host minutes."""
    parameters = {}
    for i, (name, shape) in enumerate(parameter_shapes(config).items()):
        scale = 1.0 if name.endswith("norm") else shape[0] ** -0.5
        values = jax.random.normal(jax.random.key(i), shape, jnp.dtype(dtype))
        parameters[name] = jnp.ones_like(values) if name.endswith("norm") else values * scale
    return Real(
        config=config,
        parameters=parameters,
        limits=Limits(
            max_num_seqs=num_rows,
            max_num_batched_tokens=num_rows,
            max_model_len=context + 16,
            block_size=16,
            num_blocks=1 + num_rows * -(-context // 16),
        ),
        buckets=Buckets((Bucket(num_rows, num_rows),)),
        backend=backend,
        fill=0.01,
    )


def _entering(num_rows: int, context: int) -> StepPlan:
    """A decode in which every row enters, its blocks scattered over the pool."""
    per_row = -(-context // 16)
    ids = 1 + np.random.default_rng(0).permutation(num_rows * per_row).reshape(num_rows, per_row)
    return _decodes(num_rows, context, token_ids=(7,))._replace(
        entries=tuple(RowEntry(r, r, context, RowSampling()) for r in range(num_rows)),
        table_writes=tuple(TableWrite(r, 0, tuple(ids[r].tolist())) for r in range(num_rows)),
    )


def _decodes(num_rows: int, context: int, token_ids: tuple[int, ...] = ()) -> StepPlan:
    rows = tuple(RowPlan(r, r, context - 1, 1, 1, token_ids) for r in range(num_rows))
    return StepPlan(step_id=1, rows=rows)


def _in_a_row(real: Real, plan: StepPlan, num_steps: int) -> None:
    for _ in range(num_steps):
        real.submit(plan)
    for _ in range(num_steps):
        real.collect()


def _least_bytes(config: ModelConfig, num_rows: int, context: int, dtype: str) -> int:
    """All weights but the embedding's other rows once, and the contexts' K and V."""
    itemsize = jnp.dtype(dtype).itemsize
    shapes = parameter_shapes(config)
    read = {name for name in shapes if name != "embed" or config.tie_embeddings}
    weights = sum(int(np.prod(shapes[name])) for name in read)
    kv = 2 * config.num_layers * config.num_kv_heads * config.head_dim * num_rows * context
    return itemsize * (weights + kv)


def _seconds(run: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    run()
    return time.perf_counter() - started_s


def chat(kernel: str, model: str, share_s: float) -> Part:
    """SmolLM2 answers the golden prompts through the kernel, in bfloat16 on an accelerator; flipped
    tokens with the gap of the two best logits there, and how far the kernel moves the logits. Each
    length of a context is a program of its own, so gaps and logits end with the part's time.
    """
    deadline_s = time.perf_counter() + share_s
    golden = [entry for entry in json.loads(GOLDEN.read_text("utf-8")) if "chat" in entry["id"]]
    dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    llm = LLM(
        model,
        dtype=dtype,
        kernel=kernel,
        max_num_seqs=8,
        max_model_len=1024,
        row_buckets=(8,),  # two shapes of a step: compiling takes the longest
        token_buckets=(512,),
    )
    outputs = llm.generate(
        [{"prompt_token_ids": entry["prompt_token_ids"]} for entry in golden],
        [_greedy(entry) for entry in golden],
    )
    backend = llm.engine.executor.backend
    found_ids = [list(output.outputs[0].token_ids) for output in outputs]
    flips = list(_flips(golden, found_ids, model, deadline_s))
    logits = list(_logit_errors(golden, model, backend, dtype, deadline_s))
    found = {
        "backend": backend,
        "dtype": dtype,
        "prompts": len(golden),
        "flips": flips,
        "logits": logits,
    }
    print(f"{len(golden)} prompts, {len(flips)} with another token", flush=True)
    for line in (*flips, *logits):
        print(line, flush=True)
    return Part(found, list(_logit_faults(logits, dtype)))


def _greedy(entry: dict[str, Any]) -> SamplingParams:
    return SamplingParams(
        temperature=0.0,
        max_tokens=len(entry["greedy_token_ids"]),
        ignore_eos=entry["ignore_eos"],
        skip_special_tokens=False,
    )


def _flips(
    golden: list[dict[str, Any]], found: list[list[int]], model: str, deadline_s: float
) -> Iterator[dict[str, Any]]:
    """The first token of each answer that differs, with the gap in float32 (None: out of time)."""
    loaded = load_model(model)
    meter = GapMeter(loaded.config, loaded.parameters, backend="xla")
    for entry, token_ids in zip(golden, found, strict=True):
        expected = entry["greedy_token_ids"]
        if token_ids == expected:
            continue
        pairs = enumerate(zip(token_ids, expected, strict=False))
        at = next((i for i, (one, other) in pairs if one != other), len(token_ids))
        prompt = entry["prompt_token_ids"]
        gap = None
        if time.perf_counter() < deadline_s:
            gap = meter.gap(
                (*prompt, *expected[:at]), num_prompt_tokens=len(prompt), sampling=RowSampling()
            )
        yield {"id": entry["id"], "position": at, "of": len(expected), "gap": gap}


def _logit_errors(
    golden: list[dict[str, Any]], model: str, backend: str, dtype: str, deadline_s: float
) -> Iterator[dict[str, Any]]:
    """|kernel - xla| / |xla| of the logits after each prompt, and the same of xla against float32
    for what the dtype alone does.
    """
    narrow, wide = load_model(model, dtype=dtype), load_model(model)
    meters = {
        "kernel": GapMeter(narrow.config, narrow.parameters, backend=backend),
        "xla": GapMeter(narrow.config, narrow.parameters, backend="xla"),
        "float32": GapMeter(wide.config, wide.parameters, backend="xla"),
    }
    for entry in golden:
        if time.perf_counter() >= deadline_s:
            return
        prompt = tuple(entry["prompt_token_ids"])
        logits = {name: meter.logits(prompt) for name, meter in meters.items()}
        yield {
            "id": entry["id"],
            "kernel_against_xla": _relative(logits["kernel"], logits["xla"]),
            "xla_against_float32": _relative(logits["xla"], logits["float32"]),
        }


def _logit_faults(logits: Sequence[dict[str, Any]], dtype: str) -> Iterator[str]:
    bound = logit_tolerance(jnp.dtype(dtype))
    for row in logits:
        if not row["kernel_against_xla"] <= bound:  # a NaN is beyond it, too
            error = row["kernel_against_xla"]
            yield f"logits after {row['id']}: error {error:.1e} of {bound:.0e}"


def _relative(found: np.ndarray, base: np.ndarray) -> float:
    return float(np.linalg.norm(found - base) / np.linalg.norm(base))


if __name__ == "__main__":
    sys.exit(main())

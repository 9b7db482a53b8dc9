"""The speed bars, as ratios within one process: medians of interleaved pairs.

Question: what do paging, scheduling and sampling cost above the arithmetic that must be done?
Expected: decode step <= 2.5 x floor, sampling with top-p <= 1.15 x greedy, host time of a step of
256 decodes, prefix cache and ledger included, <= 300 x sum(range(256)).
Command: make bench   (about 2 minutes on two CPU cores; ARGS="host" or ARGS="device" for one part)

Floor: the step's matrix products for the same number of tokens, chained, on the same weights, and
one max() over a contiguous array as large as the K and V of the real contexts.
"""

import statistics
import sys
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from paxserve.compose import load_policies
from paxserve.device import compile_cache, memory
from paxserve.device.buckets import Bucket, Buckets
from paxserve.events import EventLog
from paxserve.executor.real import Real
from paxserve.executor.scripted import Scripted
from paxserve.intake import Intake
from paxserve.ledger import Ledger
from paxserve.limits import Limits
from paxserve.models.load import LoadedModel, load_model
from paxserve.pack import Packer, Variant
from paxserve.request import Origin
from paxserve.sampling_params import SamplingParams
from paxserve.scheduler import Scheduler
from paxserve.step import RowEntry, RowPlan, RowSampling, StepPlan, TableWrite

NUM_ROWS, CONTEXT, BLOCK_SIZE = 64, 256, 16
NUM_PAIRS = 15
NUM_HOST_ROWS, NUM_HOST_STEPS = 256, 400
NUM_FEW, NUM_MANY = 100, 100_000
POLICIES = {
    "admission": "fcfs",
    "batching": "chunked_prefill",
    "reservation": "on_demand",
    "placement": "paged",
    "prefix_cache": "hash_chain",
    "eviction": "lru",
    "victim": "newest",
    "preemption": "recompute",
}


def main(parts: Sequence[str]) -> None:
    """Run the parts that are named, or all."""
    unknown = set(parts) - {"host", "waiting", "device"}
    if unknown:
        sys.exit(f"bench: unknown part {sorted(unknown)}; choose from host, waiting, device")
    if not parts or "host" in parts:
        bench_host()
    if not parts or "waiting" in parts:
        for admission in ("fcfs", "sjf", "vtc"):
            bench_waiting(admission)
    if not parts or "device" in parts:
        bench_device()


def bench_host() -> None:
    """Plan, pack and apply a step of decodes, against a loop of plain Python."""
    limits = Limits(
        max_num_seqs=NUM_HOST_ROWS,
        max_num_batched_tokens=512,
        max_model_len=1024,
        block_size=BLOCK_SIZE,
        num_blocks=1 + NUM_HOST_ROWS * 1024 // BLOCK_SIZE,
    )
    scheduler = Scheduler(limits=limits, policies=load_policies(POLICIES), events=EventLog())
    ledger = Ledger(scheduler.batch)
    executor = Scripted(limits=limits, vocab_size=512)
    packer = Packer(
        limits=limits,
        buckets=Buckets.for_limits(limits),
        num_slots=limits.num_blocks * BLOCK_SIZE,
    )
    intake = Intake(limits=limits, vocab_size=512)
    params = SamplingParams(temperature=0.0, max_tokens=NUM_HOST_STEPS + 100)
    for i in range(NUM_HOST_ROWS):  # blocks fill at different times, and none are alike
        prompt = [(7 * i + j) % 512 for j in range(20 + i % BLOCK_SIZE)]
        scheduler.add(intake.make({"prompt_token_ids": prompt}, params, arrival_s=0.0), now_s=0.0)
    host_s, parts_s, python_s = [], [], []
    for step in range(NUM_HOST_STEPS):
        started_s = time.perf_counter()
        scheduler.retire()
        plan = scheduler.plan(now_s=float(step))
        planned_s = time.perf_counter()
        assert plan is not None
        executor.submit(plan)
        result = executor.collect()
        executed_s = time.perf_counter()
        packer.pack(plan)
        packed_s = time.perf_counter()
        ledger.record(1.0)
        recorded_s = time.perf_counter()
        scheduler.apply(plan, result, now_s=float(step))
        applied_s = time.perf_counter()
        if len(plan.rows) < NUM_HOST_ROWS:
            continue
        host_s.append(planned_s - started_s + applied_s - executed_s)
        parts_s.append(
            (
                planned_s - started_s,
                packed_s - executed_s,
                recorded_s - packed_s,
                applied_s - recorded_s,
            )
        )
        python_s.append(_seconds(lambda: sum(range(NUM_HOST_ROWS)), 100) / 100)
    unit_s = statistics.median(python_s)
    name = "host: plan + pack + ledger + apply, 256 decodes, hash chain / sum(range(256))"
    _report(name, host_s, python_s, 300)
    for part, seconds in zip(
        ("plan", "pack", "ledger", "apply"), zip(*parts_s, strict=True), strict=True
    ):
        median_s = statistics.median(seconds)
        print(f"  {part}: {1e6 * median_s:.0f} us, {median_s / unit_s:.0f} x")


def bench_waiting(admission: str) -> None:
    """A step with 100,000 requests waiting, against one with 100: 64 rows, 16 of them change hands
    in every step, and as many requests arrive.
    """
    few, many = _Crowd(admission, NUM_FEW), _Crowd(admission, NUM_MANY)
    for _ in range(10):
        few.step(), many.step()
    pairs = [(many.step(), few.step()) for _ in range(200)]
    name = f"waiting: {admission}, step with {NUM_MANY} waiting / with {NUM_FEW}"
    _report(name, *zip(*pairs, strict=True), 1.3)


class _Crowd:
    """A scheduler before which a number of requests keeps waiting."""

    def __init__(self, admission: str, num_waiting: int) -> None:
        limits = Limits(
            max_num_seqs=64,
            max_num_batched_tokens=512,
            max_model_len=64,
            block_size=BLOCK_SIZE,
            num_blocks=1 + 64 * 4,
        )
        policies = load_policies(POLICIES | {"admission": admission})
        self._scheduler = Scheduler(limits=limits, policies=policies, events=EventLog())
        self._executor = Scripted(limits=limits, vocab_size=512)
        self._intake = Intake(limits=limits, vocab_size=512)
        self._params = SamplingParams(temperature=0.0, max_tokens=4)
        self._num_added = 0
        self._add(num_waiting)

    def _add(self, number: int) -> None:
        for _ in range(number):
            i = self._num_added = self._num_added + 1
            request = self._intake.make(
                {"prompt_token_ids": [i % 512] * (5 + i % 7)},
                self._params,
                arrival_s=float(i),
                origin=Origin(client=str(i % 50), num_true_output_tokens=1 + i % 101),
            )
            self._scheduler.add(request, now_s=0.0)

    def step(self) -> float:
        """Seconds of retiring, planning and applying; then newcomers replace those who left."""
        scheduler = self._scheduler
        started_s = time.perf_counter()
        scheduler.retire()
        plan = scheduler.plan(now_s=0.0)
        planned_s = time.perf_counter()
        assert plan is not None
        self._executor.submit(plan)
        result = self._executor.collect()
        executed_s = time.perf_counter()
        scheduler.apply(plan, result, now_s=0.0)
        applied_s = time.perf_counter()
        self._add(len(scheduler.take_ended()))
        return planned_s - started_s + applied_s - executed_s


def bench_device() -> None:
    """A decode step of SmolLM2 against its floor, and sampling against greedy."""
    compile_cache.enable()
    model = load_model("smollm2-135m")
    limits = Limits(
        max_num_seqs=NUM_ROWS,
        max_num_batched_tokens=NUM_ROWS,
        max_model_len=2 * CONTEXT,
        block_size=BLOCK_SIZE,
        num_blocks=1 + NUM_ROWS * CONTEXT // BLOCK_SIZE,
    )
    executor = Real(
        config=model.config,
        parameters=model.parameters,
        limits=limits,
        buckets=Buckets((Bucket(NUM_ROWS, NUM_ROWS),)),
        fill=0.01,
    )
    greedy = [_decode_plan(RowSampling()), _decode_plan(None)]
    floor = make_floor(model)
    pointers = [kv.unsafe_buffer_pointer() for kv in executor.kv_blocks]
    executor.warm_up([Variant.GREEDY, Variant.SAMPLED])
    _run_plan(executor, greedy[0])
    pairs = [
        (_seconds(lambda: _run_plan(executor, greedy[1])), _seconds(floor))
        for _ in range(NUM_PAIRS)
    ]
    _report("device: greedy decode step / floor", *zip(*pairs, strict=True), 2.5)
    for temperature in (0.8, 2.0):
        sampling = RowSampling(temperature=temperature, top_p=0.95, seed=1)
        pairs = []
        for _ in range(NUM_PAIRS):
            seconds = []
            for chosen in (sampling, RowSampling()):
                _run_plan(executor, _decode_plan(chosen))
                seconds.append(_seconds(lambda: _run_plan(executor, greedy[1])))
            pairs.append((seconds[0], seconds[1]))
        name = f"device: top-p 0.95 at temperature {temperature} / greedy"
        _report(name, *zip(*pairs, strict=True), 1.15)
    assert pointers == [kv.unsafe_buffer_pointer() for kv in executor.kv_blocks]
    kv_bytes = sum(kv.nbytes for kv in executor.kv_blocks)
    allowed = memory.step_bytes(model.config, num_tokens=NUM_ROWS, num_rows=NUM_ROWS)
    for (bucket, variant), executable in executor.executables.items():
        analysis = executable.memory_analysis()
        print(f"memory: {tuple(bucket)} {variant.value}: "
              f"aliased {analysis.alias_size_in_bytes / 2**20:.1f} MiB of KV "
              f"{kv_bytes / 2**20:.1f} MiB, temp {analysis.temp_size_in_bytes / 2**20:.1f} MiB "
              f"of {allowed / 2**20:.1f} MiB allowed")  # fmt: skip


def make_floor(model: LoadedModel) -> Callable[[], None]:
    """The arithmetic that a decode step cannot avoid."""
    config = model.config
    weights = {name: jnp.asarray(array) for name, array in model.parameters.items()}
    num_kv = config.num_layers * NUM_ROWS * CONTEXT * 2 * config.num_kv_heads * config.head_dim
    kv = jnp.full(num_kv, 0.01, jnp.float32)

    @jax.jit
    def products(weights: dict[str, jax.Array], x: jax.Array, kv: jax.Array) -> jax.Array:
        for i in range(config.num_layers):
            w = {name: weights[f"layers.{i}.{name}"] for name in ("q", "k", "v", "o")}
            mixed = jnp.concatenate([x @ w["k"], x @ w["v"]], axis=1)
            x = (x @ w["q"]).at[:, : mixed.shape[1]].add(mixed) @ w["o"]
            hidden = (x @ weights[f"layers.{i}.gate"]) + (x @ weights[f"layers.{i}.up"])
            x = hidden @ weights[f"layers.{i}.down"]
        logits = jnp.einsum("td,vd->tv", x, weights["embed"])
        return jnp.max(logits) + jnp.max(kv)

    x = jnp.full((NUM_ROWS, config.hidden_size), 1e-3, jnp.float32)

    def run() -> None:
        products(weights, x, kv).block_until_ready()

    run()
    return run


def _decode_plan(sampling: RowSampling | None) -> StepPlan:
    """Every row's last context token; with `sampling`, the rows are entered anew."""
    per_row = CONTEXT // BLOCK_SIZE
    blocks = 1 + np.arange(NUM_ROWS * per_row).reshape(NUM_ROWS, per_row)
    rows = range(NUM_ROWS)
    entered = () if sampling is None else rows
    return StepPlan(
        step_id=1,
        rows=tuple(RowPlan(r, r, CONTEXT - 1, 1, 1, (1000 + r,)) for r in rows),
        entries=tuple(RowEntry(r, r, CONTEXT, sampling or RowSampling()) for r in entered),
        table_writes=tuple(TableWrite(r, 0, tuple(blocks[r].tolist())) for r in entered),
    )


def _run_plan(executor: Real, plan: StepPlan) -> None:
    executor.submit(plan)
    executor.collect()


def _seconds(run: Callable[[], object], times: int = 1) -> float:
    started_s = time.perf_counter()
    for _ in range(times):
        run()
    return time.perf_counter() - started_s


def _report(name: str, ours: Sequence[float], base: Sequence[float], bar: float) -> None:
    ratio = statistics.median(a / b for a, b in zip(ours, base, strict=True))
    verdict = "holds" if ratio <= bar else "DOES NOT HOLD"
    print(f"{name}: {ratio:.2f} x, bar {bar} x: {verdict}  "
          f"(medians {1000 * statistics.median(ours):.3f} ms and "
          f"{1000 * statistics.median(base):.4f} ms, {len(ours)} pairs)")  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1:])

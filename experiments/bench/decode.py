"""A greedy decode step of SmolLM2 against its floor, and where its memory lies."""

from experiments.bench.served import Served, make_floor, smollm2
from experiments.bench.timing import Bar, interleaved, report
from paxserve.device.buckets import Bucket
from paxserve.sizing import step_bytes

NUM_ROWS = 64
BARS = {256: Bar(1.8, 1.4), 1024: Bar(2.2, 1.6)}
NUM_PAIRS = 25


def run() -> None:
    """Both lengths of contexts."""
    for context, bar in BARS.items():
        compare(context, bar)


def compare(context: int, bar: Bar) -> None:
    """Rows of this length; the KV arrays must stay where they are."""
    served = Served([context] * NUM_ROWS, [Bucket(NUM_ROWS, NUM_ROWS)])
    plan = served.plan(dict.fromkeys(range(NUM_ROWS), 1))
    floor = make_floor(NUM_ROWS, NUM_ROWS * context)
    pointers = [kv.unsafe_buffer_pointer() for kv in served.executor.kv_blocks]
    pairs = interleaved(NUM_PAIRS, lambda: served.run(plan), floor)
    name = f"decode: greedy step of {NUM_ROWS} x {context} / floor"
    report(name, *zip(*pairs, strict=True), bar)
    assert pointers == [kv.unsafe_buffer_pointer() for kv in served.executor.kv_blocks]
    print_memory(served)


def print_memory(served: Served) -> None:
    """What the compiled step holds beside its arguments, against what was allowed for it."""
    kv_bytes = sum(kv.nbytes for kv in served.executor.kv_blocks)
    allowed = step_bytes(smollm2().config, num_tokens=NUM_ROWS, num_rows=NUM_ROWS)
    for (bucket, variant), executable in served.executor.executables.items():
        analysis = executable.memory_analysis()
        print(f"memory: {tuple(bucket)} {variant.value}: "
              f"aliased {analysis.alias_size_in_bytes / 2**20:.1f} MiB of KV "
              f"{kv_bytes / 2**20:.1f} MiB, temp {analysis.temp_size_in_bytes / 2**20:.1f} MiB "
              f"of {allowed / 2**20:.1f} MiB allowed")  # fmt: skip

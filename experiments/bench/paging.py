"""What reading K and V through a block table costs the attention kernel (CLAIMS E1)."""

from experiments.bench.timing import report
from kernels_pallas.gathering import BASE, timed_gathering

NUM_ROWS, CONTEXT = 64, 1024
NUM_ROUNDS = 31


def run() -> None:
    """Decode of equal rows: blocks of several sizes, permuted, and contiguous attention, each
    against one block per row.
    """
    seconds = timed_gathering(num_rows=NUM_ROWS, context=CONTEXT, num_rounds=NUM_ROUNDS)
    for name, rounds in seconds.items():
        if name != BASE:
            report(f"paging: {NUM_ROWS} x {CONTEXT}, {name} / one block per row",
                   rounds, seconds[BASE], None)  # fmt: skip

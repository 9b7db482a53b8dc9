"""One long row among short ones, against rows of equal length with as many tokens in all."""

from experiments.bench.served import Served
from experiments.bench.timing import Bar, interleaved, report
from paxserve.device.buckets import Bucket

NUM_ROWS, LONG, SHORT, EVEN = 64, 4096, 64, 127
BAR = Bar(2.0)
NUM_PAIRS = 25


def run() -> None:
    """A greedy decode step of either, over block tables of the same width."""
    contexts = [LONG, *[SHORT] * (NUM_ROWS - 1), *[EVEN] * NUM_ROWS]
    served = Served(contexts, [Bucket(NUM_ROWS, NUM_ROWS)])
    skewed = served.plan(dict.fromkeys(range(NUM_ROWS), 1))
    even = served.plan(dict.fromkeys(range(NUM_ROWS, 2 * NUM_ROWS), 1))
    pairs = interleaved(NUM_PAIRS, lambda: served.run(skewed), lambda: served.run(even))
    name = f"skewed: one row of {LONG} among {NUM_ROWS - 1} of {SHORT} / {NUM_ROWS} of {EVEN}"
    report(name, *zip(*pairs, strict=True), BAR)

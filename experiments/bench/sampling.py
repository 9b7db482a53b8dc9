"""A decode step whose rows all sample with top-p and top-k, against the greedy one."""

from experiments.bench.served import Served
from experiments.bench.timing import Bar, report, seconds
from paxserve.device.buckets import Bucket
from paxserve.pack import Variant
from paxserve.step import RowSampling

NUM_ROWS, CONTEXT = 64, 256
BAR = Bar(1.1)
NUM_PAIRS = 25


def run() -> None:
    """A usual temperature, and one at which very many tokens stay in the race."""
    buckets = [Bucket(NUM_ROWS, NUM_ROWS)]
    served = Served([CONTEXT] * NUM_ROWS, buckets, variants=[Variant.GREEDY, Variant.SAMPLED])
    plan = served.plan(dict.fromkeys(range(NUM_ROWS), 1))
    for temperature in (0.8, 2.0):
        sampled = RowSampling(temperature=temperature, top_p=0.95, top_k=50, seed=1)
        pairs = []
        for _ in range(NUM_PAIRS):
            pair = []
            for sampling in (sampled, RowSampling()):
                served.enter(sampling)
                pair.append(seconds(lambda: served.run(plan)))
            pairs.append(tuple(pair))
        name = f"sampling: top-p 0.95 and top-k 50 at temperature {temperature} / greedy"
        report(name, *zip(*pairs, strict=True), BAR)

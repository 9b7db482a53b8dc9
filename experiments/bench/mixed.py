"""Decodes beside a chunk in one step, against the two in steps of their own."""

from functools import partial

from experiments.bench.served import BLOCK_SIZE, Served
from experiments.bench.timing import Bar, interleaved, report
from paxserve.device.buckets import Bucket, Buckets
from paxserve.limits import Limits

NUM_DECODES, CONTEXT, CHUNK = 8, 1024, 256
BAR = Bar(1.5)
NUM_ROUNDS = 15


def run() -> None:
    """In buckets that fit each step exactly, which costs the mixed step most, and in the ladder of
    the default limits, where chunk and mixed step share a bucket.
    """
    limits = Limits(
        max_num_seqs=32,
        max_num_batched_tokens=512,
        max_model_len=CONTEXT,
        block_size=BLOCK_SIZE,
        num_blocks=2,
    )
    exact = [Bucket(NUM_DECODES, NUM_DECODES), Bucket(CHUNK, 1)]
    exact.append(Bucket(CHUNK + NUM_DECODES, 1 + NUM_DECODES))
    ladder = [b for b in Buckets.for_limits(limits).shapes if b.num_tokens in (8, 512)]
    decodes, chunk = dict.fromkeys(range(NUM_DECODES), 1), {NUM_DECODES: CHUNK}
    for name, buckets in (("exact buckets", exact), ("default buckets", ladder)):
        served = Served([CONTEXT] * (NUM_DECODES + 1), buckets)
        plans = [served.plan(rows) for rows in (decodes | chunk, decodes, chunk)]
        rounds = interleaved(NUM_ROUNDS, *[partial(served.run, plan) for plan in plans])
        report(
            f"mixed: {NUM_DECODES} decodes at {CONTEXT} beside a chunk of {CHUNK} / alone, {name}",
            [mixed for mixed, _, _ in rounds],
            [decode + chunk for _, decode, chunk in rounds],
            BAR,
        )

"""A bench over the tiny model, and workloads that ask something of it."""

from real_builders import keep_compiled_programs

from paxserve.fidelity.bench import Bench
from paxserve.hydra_config import compose_config

SIZES = (
    "hardware=host-cpu",
    "limits.max_num_seqs=4",
    "limits.max_model_len=128",
    "limits.max_num_batched_tokens=64",
    "limits.row_buckets=[4]",
    "limits.token_buckets=[64]",
)
TINY = (
    *SIZES,
    "model=tiny",
    "workload=synthetic",
    "workload.num_requests=24",
    "workload/lengths=uniform",
    "workload.lengths.min_input_tokens=3",
    "workload.lengths.max_input_tokens=24",
    "workload.lengths.min_output_tokens=2",
    "workload.lengths.max_output_tokens=16",
)
POISSON = (*TINY, "workload.arrivals.rate=200")
PREEMPTED = (*POISSON, "limits.preempt_every_steps=5")
CASES = {
    "poisson": POISSON,
    "closed_loop": (*TINY, "workload/arrivals=closed_loop", "workload.arrivals.num_users=5"),
    "conversations": (
        *(*TINY, "workload/arrivals=closed_loop", "workload.arrivals.num_users=3"),
        *("workload/content=multi_turn", "workload.content.num_turns=3"),
        *("workload.content.think_s=0.01", "prefix_cache=hash_chain"),
    ),
    "preempted": PREEMPTED,
    "swapped": (*PREEMPTED, "preemption=swap", "limits.num_host_blocks_override=12"),
    "short_of_memory": (
        *(*POISSON, "batching=running_first", "gate=[reserve_full_prompt]"),
        *("prefix_cache=hash_chain", "limits.num_blocks_override=7"),
    ),
    "samples": (*POISSON, "sampling=random", "sampling.n=2"),
}


def make_bench(overrides):
    keep_compiled_programs()
    config, choices, explicit = compose_config(overrides)
    quiet = {"say": lambda message: None, "progress": lambda *_: None}
    return Bench.made(config, choices=choices, explicit=explicit, **quiet)

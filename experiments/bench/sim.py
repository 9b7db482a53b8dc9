"""A simulated run as a whole: arrivals, prompts, prefix cache, ledger, records and all.

2,000 requests at once on Llama 3 8B and an A100 under vllm_v1; lengths are lognormal with the means
of ShareGPT (155 and 320 tokens), so that no trace is needed. Seconds are of the CPU: a run of some
seconds is interrupted by others where `sum(range(256))` is not.
"""

import statistics
import time

from experiments.bench.timing import Bar, report
from paxserve.experiment import prepare
from paxserve.hydra_config import compose_config
from paxserve.serve import serve

NUM_REQUESTS = 2000
OVERRIDES = (
    "executor=simulated",
    "model=llama-3-8b",
    "hardware=a100-80g",
    "baseline=vllm_v1",
    "workload=synthetic",
    f"workload.num_requests={NUM_REQUESTS}",
    "workload/arrivals=all_at_once",
    "workload/lengths=lognormal",
    "workload.lengths.median_input_tokens=80",
    "workload.lengths.sigma_input=1.3",
    "workload.lengths.median_output_tokens=260",
    "workload.lengths.sigma_output=0.65",
    "workload.lengths.max_total_tokens=2048",
)
BAR = Bar(1000.0)


def run() -> None:
    """One run, between two looks at the yardstick."""
    config, choices, explicit = compose_config(OVERRIDES)
    made = prepare(config, choices=choices, explicit=explicit, say=lambda _: None)
    engine = made.made.engine
    units_s = _units_s()
    started_s = time.process_time()
    serve(engine, made.source, made.params)
    run_s = time.process_time() - started_s
    unit_s = statistics.median([*units_s, *_units_s()])
    num_steps, num_tokens = len(engine.steps), int(engine.steps.column("num_tokens").sum())
    rows = engine.steps.column("num_rows").mean()
    name = f"sim: a step of {rows:.0f} rows, on average of {num_steps} / sum(range(256))"
    report(name, [run_s / num_steps], [unit_s], BAR)
    print(
        f"  {1e6 * run_s / num_steps:.0f} us per step, {1e6 * run_s / num_tokens:.2f} us per token "
        f"computed; {engine.num_leapt_steps} steps leapt"
    )


def _units_s() -> list[float]:
    """Seconds of the yardstick, several times."""
    found = []
    for _ in range(30):
        started_s = time.process_time()
        for _ in range(300):
            sum(range(256))
        found.append((time.process_time() - started_s) / 300)
    return found

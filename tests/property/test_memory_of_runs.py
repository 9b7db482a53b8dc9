"""What a compact run keeps of a request, measured as the growth of a process."""

import re
import subprocess
import sys

import pytest

MOST_BYTES = 2000  # per request of three steps, workload included: a million are 2 GB

RUN = """
import resource, sys
from paxserve.hydra_config import compose_config
from paxserve.experiment import run

overrides = [
    "record=compact", "executor=simulated", "model=llama-3-8b", "baseline=vllm_v1",
    "workload=synthetic", f"workload.num_requests={sys.argv[1]}", "workload/lengths=fixed",
    "workload.lengths.input_tokens=40", "workload.lengths.output_tokens=20",
    "workload/arrivals=poisson", "workload.arrivals.rate=60",
    "limits.num_blocks_override=2000",
]
config, choices, explicit = compose_config(overrides)
quiet = lambda *_: None
done = run(config, choices=choices, explicit=explicit, say=quiet, progress=quiet)
assert done.summary["completed"] == int(sys.argv[1])
kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(f"peak={kilobytes * 1024} steps={len(done.engine.steps)}")
"""


def peak_bytes(num_requests):
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(num_requests)], capture_output=True, text=True, check=True
    )
    found = re.search(r"peak=(\d+) steps=(\d+)", done.stdout)
    return int(found[1]), int(found[2])


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in kilobytes on Linux")
def test_a_million_requests_fit():
    """Both runs are long enough for the pool to be full of cached blocks."""
    few, many = 6_000, 30_000
    (before, _), (after, num_steps) = peak_bytes(few), peak_bytes(many)
    growth = (after - before) / (many - few)
    assert num_steps > many / 10
    assert growth < MOST_BYTES
    assert before - few * growth + 1_000_000 * growth < 4 * 2**30

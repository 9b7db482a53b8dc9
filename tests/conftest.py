"""Several CPU devices, for tests of groups of them; Hypothesis without randomness or deadlines: the
same examples on every machine, every time; and compiled programs let go of before they are too
many.
"""

import gc
import itertools
import os
import sys
from pathlib import Path

from hypothesis import HealthCheck, settings

# Read when jax starts; whatever names no device goes on using the first.
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")

settings.register_profile(
    "ci",
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("ci")

# Each program that jax keeps takes some of the 65,530 mappings that Linux grants a process; beyond
# that the process crashes, or waits for ever, wherever it needs one more.
MOST_MAPPINGS = 20_000
_MAPPINGS = Path("/proc/self/maps")
_num_tests = itertools.count(1)


def pytest_runtest_teardown() -> None:
    """Now and then: counting takes milliseconds."""
    jax = sys.modules.get("jax")
    if jax is None or next(_num_tests) % 10 or not _MAPPINGS.exists():
        return
    if _MAPPINGS.read_bytes().count(b"\n") > MOST_MAPPINGS:
        jax.clear_caches()
        gc.collect()

"""Several CPU devices, for tests of groups of them; and Hypothesis without randomness or deadlines:
the same examples on every machine, every time.
"""

import os

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

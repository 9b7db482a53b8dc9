"""Checks that do not end as checks should, for processes other than the test's; imports no jax, so
that these are up at once.
"""

import os
import time
from types import SimpleNamespace


def act(check: str) -> SimpleNamespace:
    """By the check's name; the detail is the process."""
    if check == "hangs":
        time.sleep(600)
    if check == "dies":
        os._exit(3)
    return SimpleNamespace(check=check, verdict="ok", detail=os.getpid())

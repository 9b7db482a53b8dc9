"""`python experiments/run.py [overrides]`: the same as `paxserve run [overrides]`."""

import sys

from paxserve.cli import run_command

if __name__ == "__main__":
    sys.exit(run_command(sys.argv[1:]))

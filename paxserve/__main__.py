"""`python -m paxserve`: the `paxserve` command."""

import sys

from paxserve.cli import main

sys.exit(main())

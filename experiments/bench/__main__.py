"""`python -m experiments.bench [PART ...]`: the parts that are named, or all."""

import sys
from collections.abc import Sequence

from experiments.bench import decode, host, mixed, paging, sampling, sim, skewed, waiting

PARTS = {
    "host": host.run,
    "waiting": waiting.run,
    "sim": sim.run,
    "decode": decode.run,
    "sampling": sampling.run,
    "mixed": mixed.run,
    "skewed": skewed.run,
    "paging": paging.run,
}


def main(names: Sequence[str]) -> None:
    """Run them in order."""
    unknown = sorted(set(names) - set(PARTS))
    if unknown:
        sys.exit(f"bench: unknown part {unknown}; choose from {', '.join(PARTS)}")
    for name, run in PARTS.items():
        if not names or name in names:
            run()


if __name__ == "__main__":
    main(sys.argv[1:])

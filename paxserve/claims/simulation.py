"""Runs on the virtual clock, composed as on the command line: for rows that need a hardware model.

Owns: how an override list becomes a summary. In: overrides of `paxserve run`. Out: figures. Must
not know: what is claimed.
"""

from collections.abc import Sequence

from paxserve.engine import Engine
from paxserve.experiment import Run, prepare, run
from paxserve.hydra_config import compose_config
from paxserve.metrics import Summary


def simulate(overrides: Sequence[str]) -> Summary:
    """The figures of one run, without its files.

    Raises:
        ValueError: settings that are wrong, do not go together, or that nothing reads.
        RuntimeError: a request was refused or failed: what is left is another workload.
    """
    return served(overrides).summary


def served(overrides: Sequence[str]) -> Run:
    """The run itself, for rows that look at its requests or steps; errors as of `simulate`."""
    plain, choices, explicit = compose_config(overrides)
    done = run(plain, choices=choices, explicit=explicit, say=_nothing, progress=_no_progress)
    lost = [str(why) for _, why in done.refused]
    lost += [request.error for request in done.engine.requests if request.error is not None]
    if lost:
        raise RuntimeError(f"{len(lost)} requests were not served, the first because: {lost[0]}")
    return done


def simulated_engine(overrides: Sequence[str]) -> Engine:
    """The engine alone, for rows that ask it themselves; errors as of `simulate`."""
    plain, choices, explicit = compose_config([*overrides, "workload=synthetic"])
    prepared = prepare(plain, choices=choices, explicit=explicit, say=_nothing)
    return prepared.made.engine


def _nothing(message: str) -> None:
    """Nobody is listening."""


def _no_progress(what: str, done: int, total: int) -> None:
    """Nobody is watching."""

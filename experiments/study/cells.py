"""Cells: runs on the virtual clock, by their overrides, each kept in a file once it is done.

Owns: names of cells (a hash of the resolved config), their files, and a pool of few processes. In:
overrides. Out: summaries. Must not know: what is studied.
"""

import hashlib
import importlib
import inspect
import json
import multiprocessing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import paxserve
from paxserve.claims.simulation import simulate
from paxserve.files import write_text
from paxserve.hydra_config import compose_config
from paxserve.metrics import Summary
from paxserve.terminal import Terminal

MOST_PROCESSES = 2
PACKAGE = Path(paxserve.__file__).parent
_NOT_SIMULATED = ("claims", "report", "verify", "cli.py", "notebook.py", "demo.py")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cells:
    """Attributes:

    folder: where finished cells lie.
    is_fresh: whether cells that are there are run again.
    version: of the code, a part of every cell's name, as are the module that measures and the files
        that the settings name: cells of other code or data are run again.
    """

    folder: Path
    is_fresh: bool = False
    version: str = field(default_factory=lambda: sources_digest(PACKAGE))

    def run(self, overrides: Sequence[str]) -> Summary:
        """The summary of one cell, run now unless it is there."""
        return self.kept(simulate, overrides)

    def kept(self, measure: Callable[[Sequence[str]], Any], overrides: Sequence[str]) -> Any:
        """What `measure`, a function of a module, says of these overrides; JSON can hold it."""
        path = self.folder / f"{self._name(measure, overrides)}.json"
        if path.exists() and not self.is_fresh:
            return json.loads(path.read_text(encoding="utf-8"))["found"]
        found = measure(overrides)
        self.folder.mkdir(parents=True, exist_ok=True)
        record = {"overrides": list(overrides), "version": self.version, "found": found}
        write_text(path, json.dumps(record, indent=1))
        return json.loads(json.dumps(found))

    def _name(self, measure: Callable[..., Any], overrides: Sequence[str]) -> str:
        plain, choices, _ = compose_config(overrides)
        measured = f"{measure.__module__}.{measure.__qualname__}"
        own = [choice.partition(":")[0] for choice in choices.values() if ":" in choice]
        used = [module_digest(module) for module in (measure.__module__, *own)]
        used += [file_digest(path) for text in _texts(plain) if (path := Path(text)).is_file()]
        resolved = [measured, self.version, used, plain, dict(sorted(choices.items()))]
        text = json.dumps(resolved, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:20]


def sources_digest(package: Path) -> str:
    """Of the sources that a simulated run may execute, claims and pictures left out."""
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        if path.relative_to(package).parts[0] not in _NOT_SIMULATED:
            digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def module_digest(name: str) -> str:
    """Of the source of a module."""
    return file_digest(Path(inspect.getfile(importlib.import_module(name))))


@cache
def file_digest(path: Path) -> str:
    """Of what a file holds."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12]


def _texts(plain: Any) -> Iterator[str]:
    """Every text among settings."""
    if isinstance(plain, str):
        yield plain
    elif isinstance(plain, Mapping):
        for value in plain.values():
            yield from _texts(value)


def each[T, R](
    function: Callable[[T], R], items: Iterable[T], *, num_processes: int, what: str
) -> list[R]:
    """`function` of every item, in order, in so many processes; one is this one.

    Raises:
        ValueError: more processes than a shared machine should give.
    """
    if not 1 <= num_processes <= MOST_PROCESSES:
        raise ValueError(f"processes must be 1 to {MOST_PROCESSES}, got {num_processes}")
    listed, terminal = list(items), Terminal()
    try:
        if num_processes == 1:
            found = []
            for done, item in enumerate(listed):
                terminal.progress(what, done, len(listed))
                found.append(function(item))
            return found
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(num_processes, mp_context=context) as pool:
            futures = [pool.submit(function, item) for item in listed]
            for done, _ in enumerate(as_completed(futures), start=1):
                terminal.progress(what, done, len(listed))
            return [future.result() for future in futures]
    finally:
        terminal.close()

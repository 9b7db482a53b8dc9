"""The files of one run.

Owns: which files there are, and that a directory either holds all of them and the marker
`complete`, or is visibly unfinished. In: a `Run` and its resolved config. Out: files. Must not
know: how to run anything.

| file | one row or entry per |
|---|---|
| summary.json | run, flat |
| requests.parquet | request |
| steps.parquet | executed step, with its slot classes |
| decisions.parquet | event |
| outputs.jsonl | request: its text |
| config.yaml | run: as resolved, with the choices made |
| env.json | run: commit, versions, device |
"""

import json
import os
import platform
import secrets
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
from omegaconf import OmegaConf

from paxserve.experiment import Run
from paxserve.metrics import request_record

MARKER = "complete"
_PACKAGES = ("paxserve", "jax", "jaxlib", "flax", "numpy")


def new_run_dir(wanted: str | None, *, under: Path = Path("runs")) -> Path:
    """The directory for a run's results, made now.

    Args:
        wanted: its path; None makes a new one with a unique name under `under`.

    Raises:
        ValueError: it holds something already.
    """
    name = f"{time.strftime('%Y-%m-%d_%H-%M-%S')}_{secrets.token_hex(3)}"
    path = under / name if wanted is None else Path(wanted)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ValueError(f"run_dir={path} is not empty: choose another, or remove it first")
    path.mkdir(parents=True, exist_ok=True)
    return path


def write_results(run: Run, path: Path, *, config: Mapping[str, Any]) -> None:
    """Write every file, the marker last."""
    engine = run.engine
    write_text(path / "summary.json", json.dumps(run.summary, indent=1, allow_nan=False))
    records = [request_record(request) for request in engine.requests]
    _write_table(path / "requests.parquet", records)
    steps = [
        {**step._asdict(), **{f"slots_{k}": v for k, v in slots._asdict().items()}}
        for step, slots in zip(engine.steps, engine.ledger.steps(), strict=True)
    ]
    _write_rows(path / "steps.parquet", steps)
    _write_table(path / "decisions.parquet", list(engine.events))
    lines = [
        json.dumps({"id": request.request_id, "text": engine.output(request).outputs[0].text})
        for request in engine.requests
    ]
    write_text(path / "outputs.jsonl", "".join(f"{line}\n" for line in lines))
    write_text(path / "config.yaml", OmegaConf.to_yaml(OmegaConf.create(dict(config))))
    write_text(path / "env.json", json.dumps(environment(), indent=1))
    write_text(path / MARKER, "")


def write_text(path: Path, text: str) -> None:
    """Whole or not at all: a temporary name, flushed to disk, renamed."""
    temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def environment() -> dict[str, Any]:
    """Where and with what this runs."""
    return {
        "git_commit": _git("rev-parse", "HEAD"),
        "git_dirty": bool(_git("status", "--porcelain")),
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "num_cpus": os.cpu_count(),
        "versions": {name: _version(name) for name in _PACKAGES},
        "device": _device_kind(),
    }


def _device_kind() -> str | None:
    jax = sys.modules.get("jax")
    return None if jax is None else str(jax.devices()[0].device_kind)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _git(*arguments: str) -> str | None:
    """Asked of the checkout that this file lies in; None outside one."""
    here = str(Path(__file__).parent)
    try:
        done = subprocess.run(
            ["git", "-C", here, *arguments], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def _write_table(path: Path, rows: Sequence[NamedTuple]) -> None:
    _write_rows(path, [row._asdict() for row in rows])


def _write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    pq.write_table(pa.Table.from_pylist(rows), temporary)
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    temporary.replace(path)

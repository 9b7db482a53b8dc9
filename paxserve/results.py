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
| blocks.parquet | change of a block's holder, if `record_blocks` is set |
| arrivals.jsonl | request that ended well: what is needed to send it again |
| outputs.jsonl | request: its text, tokens, how it ended, log-probabilities; `others`: the same |
| | of its further sequences; refused requests too |
| config.yaml | run: as asked for: the choices made and every setting |
| engine.json | run: as applied: limits, buckets, kernel and policies, read back from the engine |
| env.json | run: commit, versions, device |
| error.txt | run that failed: what went wrong, with its traceback |
| log.txt | cell of a sweep: what it printed |

Under `record=compact` there are no decisions, arrivals and outputs, and requests.parquet has no
gaps between tokens and no tokens.
"""

import json
import os
import platform
import secrets
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields
from importlib import metadata
from pathlib import Path
from typing import Any

import pyarrow as pa
from omegaconf import OmegaConf

from kernels_pallas.checkout import commit_of
from paxserve.block_log import BlockChange
from paxserve.engine import Engine
from paxserve.events import Event
from paxserve.experiment import Run
from paxserve.files import write_lines, write_text
from paxserve.ledger import SlotCounts
from paxserve.metrics import RequestRecord, request_record
from paxserve.outputs import CompletionOutput, RequestOutput
from paxserve.recorded import arrival_line, arrival_of
from paxserve.records import StepRecord
from paxserve.tables import CHUNK, batches_of, schema_of, write_batches

MARKER = "complete"
FAILURE = "error.txt"
LOG = "log.txt"  # of a cell of a sweep: what it printed
_PACKAGES = ("paxserve", "jax", "jaxlib", "flax", "numpy")


def new_run_dir(wanted: str | None, *, under: Path = Path("runs")) -> Path:
    """The directory for a run's results, made now.

    Args:
        wanted: its path; None makes a new one with a unique name under `under`.

    Raises:
        ValueError: it holds something already, other than the note of a run that failed.
    """
    path = new_run_path(wanted, under=under)
    notes = {FAILURE, LOG}
    if path.exists() and (not path.is_dir() or {p.name for p in path.iterdir()} - notes):
        raise ValueError(f"run_dir={path} is not empty: choose another, or remove it first")
    path.mkdir(parents=True, exist_ok=True)
    (path / FAILURE).unlink(missing_ok=True)
    return path


def new_run_path(wanted: str | None, *, under: Path = Path("runs")) -> Path:
    """The path alone; see `new_run_dir`."""
    name = f"{time.strftime('%Y-%m-%d_%H-%M-%S')}_{secrets.token_hex(3)}"
    return under / name if wanted is None else Path(wanted)


def write_results(run: Run, path: Path, *, config: Mapping[str, Any]) -> None:
    """Write every file, the marker last."""
    engine = run.engine
    engine.ledger.settle()
    write_text(path / "summary.json", json.dumps(run.summary, indent=1, allow_nan=False))
    _write_steps(engine, path / "steps.parquet")
    if engine.folded is None:
        _write_requests(run, path)
    else:
        table = engine.folded.table()
        write_batches(path / "requests.parquet", table.schema, table.to_batches())
    write_text(path / "config.yaml", OmegaConf.to_yaml(OmegaConf.create(dict(config))))
    write_text(path / "engine.json", json.dumps(applied(engine), indent=1, default=repr))
    write_text(path / "env.json", json.dumps(environment(run.device), indent=1))
    write_text(path / MARKER, "")


def _write_requests(run: Run, path: Path) -> None:
    """Everything that is in the requests and the events."""
    engine = run.engine
    records = (request_record(request) for request in engine.requests)
    schema = schema_of(RequestRecord)
    write_batches(path / "requests.parquet", schema, batches_of(records, schema))
    schema = schema_of(Event)
    write_batches(path / "decisions.parquet", schema, batches_of(engine.events, schema))
    write_lines(path / "outputs.jsonl", map(_compact, _output_lines(run)))
    if engine.block_log is not None:
        schema = schema_of(BlockChange)
        changes = batches_of(engine.block_log.changes, schema)
        write_batches(path / "blocks.parquet", schema, changes)
    served = [request for request in engine.requests if request.error is None]
    arrivals = (
        arrival_line(arrival_of(request, start_s=run.start_s))
        for request in served
        if request.finish_reason is not None and request.num_output_tokens
    )
    write_lines(path / "arrivals.jsonl", arrivals)


def _write_steps(engine: Engine, path: Path) -> None:
    """A step's record, its slot classes, and the terms of its cost where it was simulated."""
    terms = getattr(engine.executor, "terms", ())
    slots: dict[str, type] = {f"slots_{name}": int for name in SlotCounts._fields}
    more = slots | {f"{term}_s": float for term in terms}
    schema = schema_of(StepRecord, without=("terms_s",), more=more)
    write_batches(path, schema, _step_batches(engine, schema, num_terms=len(terms)))


def _step_batches(engine: Engine, schema: pa.Schema, *, num_terms: int) -> Iterator[pa.RecordBatch]:
    steps, slots = engine.steps, engine.ledger.columns()
    names = [name for name in StepRecord._fields if name != "terms_s"]
    for start in range(0, len(steps), CHUNK):
        some = slice(start, start + CHUNK)
        columns = [steps.column(name, some) for name in names]
        columns += [*slots[some].T, *steps.column("terms_s", some).T[:num_terms]]
        yield pa.RecordBatch.from_arrays([pa.array(c) for c in columns], schema=schema)


def write_table(path: Path, record: type, rows: list[dict[str, Any]]) -> None:
    """A Parquet file whose schema is the record's fields, whatever the rows hold."""
    schema = schema_of(record)
    write_batches(path, schema, pa.Table.from_pylist(rows, schema=schema).to_batches())


def _output_lines(run: Run) -> Iterator[dict[str, Any]]:
    for request in run.engine.requests:
        yield _output_line(run.engine.output(request))
    for arrival, error in run.refused:
        yield {"id": arrival.request_id, "finish_reason": "error", "error": str(error)}


def _compact(line: dict[str, Any]) -> str:
    return json.dumps(line, separators=(",", ":"))


def _output_line(output: RequestOutput) -> dict[str, Any]:
    lines = [_completion_line(completion) for completion in output.outputs]
    line: dict[str, Any] = {"id": output.request_id, **lines[0], "error": output.error}
    if len(lines) > 1:
        line["others"] = lines[1:]
    return line


def _completion_line(completion: CompletionOutput) -> dict[str, Any]:
    line: dict[str, Any] = {
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
    }
    if completion.cumulative_logprob is not None:
        line["cumulative_logprob"] = completion.cumulative_logprob
    if completion.logprobs is not None:
        line["logprobs"] = [
            {str(token): entry.logprob for token, entry in position.items()}
            for position in completion.logprobs
        ]
    return line


# Attributes of an executor, by the name that the config and the settings have for them.
_APPLIED = {
    "kernel": "backend",
    "dtype": "dtype",
    "kv_cache_dtype": "kv_cache_dtype",
    "tensor_parallel_size": "tensor_parallel_size",
    "num_device_blocks": "num_device_blocks",
    "strict": "strict",
    "debug": "debug",
}


def applied(engine: Engine) -> dict[str, Any]:
    """What the engine really runs with."""
    executor = engine.executor
    described: dict[str, Any] = {
        "limits": asdict(engine.limits),
        "policies": {
            field.name: _described(getattr(engine.scheduler.policies, field.name))
            for field in fields(engine.scheduler.policies)
        },
        "executor": type(executor).__name__,
    }
    for name, attribute in _APPLIED.items():
        if hasattr(executor, attribute):
            described[name] = getattr(executor, attribute)
    if hasattr(executor, "buckets"):
        described["buckets"] = [list(bucket) for bucket in executor.buckets.shapes]
    return described


def check_writable(option: str, file: Path) -> None:
    """Before the work is done whose result goes there.

    Raises:
        FileNotFoundError: it is a directory, or in none.
    """
    if file.is_dir() or not file.absolute().parent.is_dir():
        raise FileNotFoundError(f"{option} {file} cannot be written: it must be a file's name")


def environment(device: str | None) -> dict[str, Any]:
    """With what this ran; `device` is None where there was none."""
    commit = commit_of(Path(__file__))
    return {
        "git_commit": commit and commit.git_commit,
        "git_dirty": commit and commit.git_dirty,
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "num_cpus": os.cpu_count(),
        "versions": {name: _version(name) for name in _PACKAGES},
        "device": device,
    }


def _described(policy: Any) -> Any:
    if isinstance(policy, tuple):
        return [_described(one) for one in policy]
    return {"class": f"{type(policy).__module__}:{type(policy).__name__}", **asdict(policy)}


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None

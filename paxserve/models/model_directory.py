"""The files of one model directory, each read only if it really lies there.

Owns: which file names may be opened, symlink containment, JSON reading. In: a directory and a
name taken from an untrusted file. Out: a path that is safe to open, or parsed JSON. Must not
know: what the files mean. Nothing here, or elsewhere in the package, imports code from a model
directory.
"""

import json
from pathlib import Path
from typing import Any

PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")

_MAX_JSON_BYTES = 256 * 2**20  # the largest tokenizer.json in use is about 35 MB


def contained_file(directory: Path, name: str) -> Path:
    """Path of `name` inside `directory`, refused if it could be anywhere else.

    A symlink is followed only when it ends in the directory itself or, for a snapshot of the
    Hugging Face cache (`models--org--name/snapshots/<revision>`), in that cache's `blobs`.

    Args:
        directory: the model directory.
        name: one file name, possibly from an untrusted index.

    Raises:
        ValueError: the name is no plain file name, or the file lies outside or is missing.
    """
    if not isinstance(name, str) or name in ("", ".", "..") or set(name) & set('/\\:"\0'):
        raise ValueError(
            f"file name {name!r} in {directory} must be a plain name without directories; "
            "the index may be hostile, fetch the model again from a source you trust"
        )
    path = directory / name
    if not path.is_file():
        raise ValueError(f"{path} is missing or not a file; fetch the model again")
    real, home = path.resolve(strict=True), directory.resolve(strict=True)
    allowed = [home]
    if home.parent.name == "snapshots":
        allowed.append((home.parent.parent / "blobs").resolve())
    if real.parent not in allowed:
        raise ValueError(
            f"{path} is a link to {real}, outside the model directory; copy the file into it"
        )
    return path


def has_file(directory: Path, name: str) -> bool:
    """True if the directory lists `name`, even as a broken link (reading it then fails loudly)."""
    path = directory / name
    return path.exists() or path.is_symlink()


def read_json(directory: Path, name: str) -> dict[str, Any]:
    """Parse a JSON object from the model directory.

    Raises:
        ValueError: the file is missing, outside, too large, not JSON, or not an object.
    """
    path = contained_file(directory, name)
    if path.stat().st_size > _MAX_JSON_BYTES:
        raise ValueError(f"{path} is larger than {_MAX_JSON_BYTES} bytes; it is not read")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON ({error}); fetch it again") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value


def pickle_files(directory: Path) -> list[str]:
    """Names of the files in `directory` that can only be read by running them."""
    return sorted(p.name for p in directory.iterdir() if p.suffix.lower() in PICKLE_SUFFIXES)


def refuse_pickle(what: str) -> ValueError:
    """The error for a pickle file; `what` names it and where it was found."""
    return ValueError(
        f"{what}: pickle formats ({' '.join(PICKLE_SUFFIXES)}) run code when loaded and are "
        "refused. If you trust the file, convert it once, in an environment that has torch: "
        "AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(OUT, safe_serialization=True)"
    )

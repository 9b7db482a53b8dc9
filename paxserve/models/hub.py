"""A model's name to its local directory.

Owns: telling paths from Hugging Face ids, and the download. In: a path or `org/name`. Out: a
directory. Must not know: what the files hold. Only configuration, safetensors and tokenizer
files are fetched, so neither code nor pickles ever reach the disk.
"""

from pathlib import Path

import huggingface_hub  # its parts are imported when they are used: a sixth of a run's start

FETCHED = (
    "config.json",
    "generation_config.json",
    "model*.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)


def is_path(name: str) -> bool:
    """True if the name is explicitly a path: absolute, or starting with `./`, `../` or `~/`."""
    return name in (".", "..", "~") or name.startswith(("/", "./", "../", "~/"))


def local_path(name: str) -> Path:
    """The path a name spells; `~` alone is the home directory, `~user` is not known."""
    return Path(name).expanduser() if name == "~" or name.startswith("~/") else Path(name)


def model_directory(
    name_or_path: str, *, revision: str | None = None, cache_dir: Path | None = None
) -> Path:
    """Find, or fetch, the directory of a model.

    A name that is not explicitly a path is always a Hugging Face id, even if a directory of that
    name exists here: write `./org/name` for the directory. HF_HUB_OFFLINE=1 forbids the network.

    Args:
        name_or_path: `/path`, `./path`, `~/path`, or `org/name`.
        revision: commit, tag or branch of the Hugging Face repository.
        cache_dir: where downloads are kept, by default the user's Hugging Face cache.

    Raises:
        ValueError: the id is malformed, or the repository refuses access or does not exist.
        FileNotFoundError: the path does not exist, or the model is not cached and cannot be
            fetched.
    """
    if is_path(name_or_path):
        directory = local_path(name_or_path)
        if not directory.is_dir():
            raise FileNotFoundError(f"model directory {directory} does not exist")
        return directory
    _check_id(name_or_path)
    try:
        return Path(
            huggingface_hub.snapshot_download(
                name_or_path, revision=revision, cache_dir=cache_dir, allow_patterns=list(FETCHED)
            )
        )
    except huggingface_hub.errors.LocalEntryNotFoundError as error:
        raise FileNotFoundError(
            f"model {name_or_path!r} is not in the local cache and the network is off or "
            "unreachable; unset HF_HUB_OFFLINE, or fetch it once where there is a network and "
            "pass its directory as a path (./org/name)"
        ) from error
    except huggingface_hub.errors.HfHubHTTPError as error:
        raise ValueError(
            f"Hugging Face does not hand out model {name_or_path!r}: {error}; check the name, "
            "and log in if the model is gated"
        ) from error


def _check_id(name: str) -> None:
    """Require exactly `org/name`, as the hub itself spells ids."""
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(name)
    except ValueError as error:
        raise ValueError(f"model id {name!r} is malformed: {error}") from error
    if name.count("/") != 1:
        hint = f" (write ./{name} for the directory)" if Path(name).exists() else ""
        raise ValueError(f"model id {name!r} must be org/name{hint}")

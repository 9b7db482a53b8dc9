"""One cell of a sweep: what is asked, and its name.

Owns: the hash of a resolved config. In: overrides, and what they compose to. Out: a `Cell`. Must
not know: Hydra, directories, processes.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

NAME_LENGTH = 12  # hex digits: among 10,000 cells two are alike once in five million sweeps
_NOT_HASHED = ("run_dir", "tracker")  # where results go, and who watches


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One run: the overrides that ask for it, what they set, and the whole config that they mean.

    `keys` are `group` or `group.key`. `config` has a key `choices` (group -> name) beside the
    settings by group, as in config.yaml. It does not say what lies in files that it names, nor
    which version of the code will run.
    """

    overrides: tuple[str, ...]
    keys: tuple[str, ...]
    config: Mapping[str, Any]

    @property
    def name(self) -> str:
        """Of its directory: equal for equal configs, whatever overrides led there."""
        return hashlib.sha256(canonical(self.config).encode()).hexdigest()[:NAME_LENGTH]

    def to_json(self) -> dict[str, Any]:
        """Plain data, which `from_json` takes."""
        asked = {"overrides": list(self.overrides), "keys": list(self.keys)}
        return {"cell": self.name, **asked, "config": self.config}

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> "Cell":
        """What `to_json` gave."""
        return cls(
            overrides=tuple(found["overrides"]), keys=tuple(found["keys"]), config=found["config"]
        )


def canonical(config: Mapping[str, Any]) -> str:
    """JSON that is the same for equal configs: in every process, for every order of keys."""
    hashed = {key: value for key, value in config.items() if key not in _NOT_HASHED}
    choices = {k: v for k, v in config.get("choices", {}).items() if k not in _NOT_HASHED}
    return json.dumps({**hashed, "choices": choices}, sort_keys=True, separators=(",", ":"))


def value_of(config: Mapping[str, Any], key: str) -> Any:
    """What a config says of a key: `batching` is a choice, `limits.block_size` a setting; None
    where it says nothing.
    """
    choices = config.get("choices", {})
    for name in (key, key.replace(".", "/")):
        if name in choices:
            return choices[name]
    value: Any = config
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def axes_of(cells: Sequence[Cell]) -> list[str]:
    """What somebody has set and not all cells have alike, in the order in which it came up."""
    return [
        key
        for key in dict.fromkeys(key for cell in cells for key in cell.keys)
        if len({json.dumps(value_of(cell.config, key), sort_keys=True) for cell in cells}) > 1
    ]

"""The policies that exist: whatever lies in the axis folders, so that a new file is covered."""

import dataclasses
import importlib
import inspect
import itertools
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
POLICY_AXES = (
    "admission",
    "gate",
    "batching",
    "reservation",
    "placement",
    "prefix_cache",
    "eviction",
    "victim",
    "preemption",
)
WORKLOAD_AXES = ("workload", "workload/arrivals", "workload/lengths", "workload/content")


def stems(axis: str) -> list[str]:
    """Names of the files of an axis."""
    files = (ROOT / "paxserve" / axis).glob("*.py")
    return sorted(file.stem for file in files if file.stem != "__init__")


def policy_class(axis: str, stem: str) -> type[Any]:
    """The one public dataclass of a policy's file."""
    module = importlib.import_module(f"paxserve.{axis.replace('/', '.')}.{stem}")
    classes = [
        value
        for name, value in vars(module).items()
        if inspect.isclass(value)
        and value.__module__ == module.__name__
        and not name.startswith("_")
        and dataclasses.is_dataclass(value)
    ]
    assert len(classes) == 1, f"{module.__name__} must hold one public dataclass, has {classes}"
    return classes[0]


def yaml_values(axis: str, stem: str) -> dict[str, Any] | None:
    """The keys of a policy's config file, None while there is none; a smaller axis that it takes
    by its defaults list is a key whose value is the choice's name.
    """
    path = ROOT / "configs" / axis / f"{stem}.yaml"
    if not path.exists():
        return None
    from omegaconf import OmegaConf

    values: Any = OmegaConf.to_container(OmegaConf.load(path), resolve=False) or {}
    for entry in values.pop("defaults", []):
        values |= entry if isinstance(entry, dict) else {}
    return dict(values)


def policy(axis: str, stem: str) -> Any:
    """A policy with the values of its config file."""
    return policy_class(axis, stem)(**(yaml_values(axis, stem) or {}))


def policies(axis: str) -> list[Any]:
    """One of each policy of an axis."""
    return [policy(axis, stem) for stem in stems(axis)]


def name_of(value: object) -> str:
    """A test id for a policy."""
    return type(value).__name__


def combinations(*axes: str) -> list[Any]:
    """Every combination of the policies of some axes, as pytest parameters with readable ids."""
    return [
        pytest.param(*chosen, id="-".join(map(name_of, chosen)))
        for chosen in itertools.product(*map(policies, axes))
    ]

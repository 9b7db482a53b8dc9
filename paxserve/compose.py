"""From a name to a policy object.

Owns: how a choice is found (by file name in its axis folder, or as `package.module:Class`) and how
its settings are checked against its fields. In: axis, name, settings. Out: the policy. Must not
know: Hydra, the engine.

Names with a colon import code: they are taken from the command line or a user's own config, never
from a run directory that is read back.
"""

import dataclasses
import importlib
import pkgutil
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from paxserve.policies import Policies
from paxserve.workload import Workload

POLICY_AXES = (
    "admission",
    "batching",
    "reservation",
    "placement",
    "prefix_cache",
    "eviction",
    "victim",
    "preemption",
)
GATE = "gate"  # the one axis of which several, or none, can be chosen
COST_MODEL = "cost_model"  # read by simulations and plans, and no policy of the engine
WORKLOAD_AXES = ("workload", "workload/arrivals", "workload/lengths", "workload/content")


def choices(axis: str) -> list[str]:
    """Names that an axis offers: the files of its folder."""
    package = importlib.import_module(_package(axis))
    modules = pkgutil.iter_modules(package.__path__)
    return sorted(module.name for module in modules if not module.ispkg)


def policy_class(axis: str, name: str) -> type:
    """The class behind a name.

    Raises:
        ValueError: the axis has no such choice, or the named class cannot be found.
    """
    if ":" in name:
        return _imported_class(axis, name)
    if name not in choices(axis):
        raise ValueError(f"{axis}={name} is not known; choose one of {', '.join(choices(axis))}")
    module = importlib.import_module(f"{_package(axis)}.{name}")
    (only,) = _public_classes(module)
    return only


def load(axis: str, name: str, settings: Mapping[str, Any] | None = None) -> Any:
    """The policy, made with its settings.

    Raises:
        ValueError: unknown name, a setting that the policy does not have, or one it needs.
    """
    cls, given = policy_class(axis, name), dict(settings or {})
    fields = {field.name: field for field in dataclasses.fields(cls)}
    unknown = sorted(set(given) - set(fields))
    if unknown:
        raise ValueError(
            f"{axis}={name} does not read {', '.join(unknown)}; "
            f"it reads {', '.join(sorted(fields)) or 'nothing'}"
        )
    missing = [
        field.name
        for field in fields.values()
        if field.default is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
        and field.name not in given
    ]
    if missing:
        raise ValueError(
            f"{axis}={name} needs {', '.join(missing)}: set {dotted(axis)}.{missing[0]}=..."
        )
    return cls(**given)


def load_policies(
    names: Mapping[str, str],
    settings: Mapping[str, Mapping[str, Any]] | None = None,
    *,
    own: Mapping[str, object] | None = None,
) -> Policies:
    """One policy per axis of `POLICY_AXES`, and the gates.

    Args:
        names: the choice per axis; for `gate` names with commas between, or nothing.
        settings: per axis, and per gate as `gate.NAME`; for one's own, NAME is the class.
        own: policy objects that take the place of what is named; for `gate` one or a list.

    Raises:
        ValueError: `own` has something that is no policy; otherwise as of `load`.
    """
    given, own = settings or {}, own or {}
    for axis, policy in own.items():
        if axis not in (*POLICY_AXES, GATE):
            known = ", ".join((*POLICY_AXES, GATE, COST_MODEL))
            raise ValueError(f"there is no axis {axis!r}; there are {known}")
        for one in _listed(policy) if axis == GATE else [policy]:
            check_own(axis, one)
    made: dict[str, Any] = {axis: own[axis] for axis in POLICY_AXES if axis in own}
    for axis in POLICY_AXES:
        if axis not in made:
            made[axis] = load(axis, names[axis], given.get(axis))
    gates: list[Any] = [
        load(GATE, name, given.get(f"{GATE}.{name.rpartition(':')[2]}"))
        for name in filter(None, names.get(GATE, "").split(","))
    ]
    if GATE in own:
        gates = _listed(own[GATE])
    return Policies(**made, gates=tuple(gates))


def load_workload(names: Mapping[str, str], settings: Mapping[str, Mapping[str, Any]]) -> Workload:
    """The workload, with the choices of the smaller axes that it is made of.

    Args:
        names: the choice per axis of `WORKLOAD_AXES`; those that the workload has no use for are
            not there.
        settings: per axis.
    """
    parts = {
        axis.removeprefix("workload/"): load(axis, names[axis], settings.get(axis))
        for axis in WORKLOAD_AXES[1:]
        if axis in names
    }
    made: Workload = load("workload", names["workload"], {**settings["workload"], **parts})
    return made


def check_own(axis: str, policy: object) -> None:
    """Refuse what results could not describe.

    Raises:
        ValueError: no object of a dataclass.
    """
    if isinstance(policy, type) or not dataclasses.is_dataclass(policy):
        raise ValueError(
            f"{axis} must be an object of a dataclass, so that results can say what it was, "
            f"got {policy!r}"
        )


def dotted(axis: str) -> str:
    """Where the settings of an axis lie in the config."""
    return axis.replace("/", ".")


def _package(axis: str) -> str:
    return f"paxserve.{dotted(axis)}"


def _listed(gates: object) -> list[Any]:
    return list(gates) if isinstance(gates, list | tuple) else [gates]


def _public_classes(module: ModuleType) -> list[type]:
    return [
        value
        for name, value in vars(module).items()
        if isinstance(value, type)
        and value.__module__ == module.__name__
        and not name.startswith("_")
        and dataclasses.is_dataclass(value)
    ]


def _imported_class(axis: str, name: str) -> type:
    module_name, _, class_name = name.partition(":")
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{axis}={name} cannot be imported: {error}") from error
    if not (isinstance(found, type) and dataclasses.is_dataclass(found)):
        raise ValueError(f"{axis}={name} must be a dataclass, as the policies in paxserve/{axis}/")
    return found

"""From Hydra's composed config to plain data.

Owns: where the configs lie, a user's own policies on the command line, and what counts as set by
the user. In: a DictConfig. Out: dictionaries; DictConfig stops here. Must not know: what a setting
means.
"""

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from paxserve.compose import COST_MODEL, GATE, POLICY_AXES, WORKLOAD_AXES, dotted

_OWN = (*POLICY_AXES, GATE, *WORKLOAD_AXES, COST_MODEL, "tracker")  # may be classes of a user's own
_CUSTOM = re.compile(rf"({'|'.join(_OWN)})=([\w.]+:\w+)")
_LOADED_MODEL = re.compile(r"model=([^,\[\]{}]*[:/].*)")  # no choice has such a name
_NAMED_MODEL = "smollm2-135m"  # the choice that has `name` and `dtype` and nothing else
_SLASH = "__"  # stands for the / of workload/arrivals inside a key
_QUIET = ("hydra.run.dir=.", "hydra.sweep.subdir=.", "hydra.output_subdir=null")
_SWEEP_FLAGS = {"-m", "--multirun"}
_OF_THE_SWEEP = ("n_jobs=", "resume=")
_NO_LOGS = ("hydra/job_logging=none", "hydra/hydra_logging=none")


def config_directory() -> Path:
    """The configs: inside an installed package, at top level in a checkout."""
    package = Path(__file__).parent
    inside = package / "configs"
    return inside if inside.is_dir() else package.parent / "configs"


def add_overrides(parser: argparse.ArgumentParser, *, about: str) -> None:
    """The arguments of a command that composes settings: `overrides`, and where else to look."""
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDE", help=about)
    parser.add_argument("--config-dir", type=Path, metavar="DIR", help=_CONFIG_DIR)


_CONFIG_DIR = "configs of your own: DIR/hardware/mine.yaml is hardware=mine"


def search_override(directory: Path) -> str:
    """The override that has Hydra look for configs in a directory, too.

    Raises:
        FileNotFoundError: it is none.
    """
    if not directory.is_dir():
        raise FileNotFoundError(f"--config-dir {directory} is not a directory")
    escaped = str(directory.resolve()).replace("'", r"\'")
    return f"hydra.searchpath=['file://{escaped}']"


def file_settings(axis: str, name: str) -> dict[str, Any]:
    """The settings in a choice's own file."""
    found: Any = OmegaConf.to_container(OmegaConf.load(config_directory() / axis / f"{name}.yaml"))
    return dict(found or {})


def custom_policies(overrides: Sequence[str], *, scratch: str) -> list[str]:
    """Overrides for Hydra: `batching=package.module:Class` becomes an entry of `custom`, and
    `model=org/name`, `model=random:CONFIG.json` or `model=./PATH` a `model.name`; of a
    sweep, `n_jobs` and `resume` are settings of its launcher; and Hydra leaves files of its own in
    `scratch` only.
    """
    asked = rewritten(overrides)
    if _SWEEP_FLAGS & set(asked):
        asked = [f"hydra.launcher.{o}" if o.startswith(_OF_THE_SWEEP) else o for o in asked]
    # Flags such as -m may stand anywhere; argparse wants the overrides in one piece behind them.
    flags = [argument for argument in asked if not _is_override(argument)]
    return [
        *flags,
        f"hydra.sweep.dir='{scratch}'",
        *_QUIET,
        *_NO_LOGS,
        *filter(_is_override, asked),
    ]


def rewritten(overrides: Sequence[str]) -> list[str]:
    """In Hydra's words: classes of one's own, and models that are no choice of the group."""
    overrides = [part for override in overrides for part in _gates_apart(override)]
    custom = {found[1] for found in map(_CUSTOM.fullmatch, overrides) if found}
    made = []
    for override in overrides:
        found = _CUSTOM.fullmatch(override)
        if loaded := _LOADED_MODEL.fullmatch(override):
            made += [f"model={_NAMED_MODEL}", f"model.name={loaded[1]}"]
        elif found:
            made.append(f"+custom.{found[1].replace('/', _SLASH)}={found[2]}")
        elif any(override.startswith(f"{dotted(axis)}.") for axis in custom):
            # Its settings are not in any config file.
            made.append(f"++{override}")
        else:
            made.append(override)
    return made


def _gates_apart(override: str) -> list[str]:
    """`gate=[watermark,my:Gate]` as Hydra's list and one's own."""
    if not (override.startswith("gate=[") and override.endswith("]") and ":" in override):
        return [override]
    names = [name.strip() for name in override[len("gate=[") : -1].split(",")]
    files = [name for name in names if ":" not in name]
    own = [f"gate={name}" for name in names if ":" in name]
    if len(own) > 1:
        raise ValueError(f"{override}: at most one gate of one's own, it is asked last")
    return [f"gate=[{','.join(files)}]", *own]


def _is_override(argument: str) -> bool:
    return argument.startswith(("+", "~")) or ("=" in argument and not argument.startswith("-"))


type Composed = tuple[dict[str, Any], dict[str, str], list[str]]


def compose_config(overrides: Sequence[str]) -> Composed:
    """What `paxserve run` would get for these overrides; see `read_config`.

    Raises:
        ValueError: an override that Hydra refuses, or as of `read_config`.
    """
    wrong = [override for override in overrides if not _is_override(override)]
    if wrong:
        raise ValueError(f"{wrong[0]!r} is no override: write GROUP=CHOICE or GROUP.KEY=VALUE")
    with initialize_config_dir(str(config_directory()), version_base="1.3"):
        try:
            config = compose("config", rewritten(overrides), return_hydra_config=True)
        except HydraException as error:
            raise ValueError(str(error)) from error
    return plain_config(config)


def plain_config(config: DictConfig) -> Composed:
    """`read_config` of a config that holds Hydra's own."""
    groups = [str(key) for key in config if key != "hydra"]
    return read_config(OmegaConf.masked_copy(config, groups), config.hydra)


def read_config(config: DictConfig, hydra_config: Any) -> Composed:
    """Plain data.

    Returns:
        The settings by group; the choice made per group; and what the user set, as `group`,
        `group.key`, or a key of no group such as `seed`.

    Raises:
        ValueError: a value that must be set is not, or refers to one that does not exist.
    """
    if missing := sorted(OmegaConf.missing_keys(config)):
        raise ValueError(f"{', '.join(missing)} must be set: add {missing[0]}=...")
    plain: dict[str, Any] = OmegaConf.to_container(config, resolve=True)  # type: ignore[assignment]
    named = plain.pop("custom", None) or {}
    custom = {axis.replace(_SLASH, "/"): name for axis, name in named.items()}
    choices = {
        group: str(choice)
        for group, choice in hydra_config.runtime.choices.items()
        if choice is not None and not group.startswith("hydra/")
    }
    explicit = [key_of(override) for override in hydra_config.overrides.task]
    for axis in custom:
        _forget_replaced(plain, choices, axis, explicit)
    settings = [key for key in explicit if not _is_no_setting(key)]
    own = custom.pop(GATE, "")
    gates = [name for name in plain.get(GATE) or {} if name != own.rpartition(":")[2]]
    gates += [own] if own else []
    return plain, {**choices, **custom, GATE: ",".join(gates)}, settings


def _forget_replaced(
    plain: dict[str, Any], choices: dict[str, str], axis: str, explicit: Sequence[str]
) -> None:
    """The settings, and smaller axes, of a choice that a custom one replaces are not its own."""
    replaced = choices.pop(axis, None)
    smaller = [group for group in choices if group.startswith(f"{axis}/")]
    keys = {group.removeprefix(f"{axis}/") for group in smaller}
    for group in smaller:
        del choices[group]
    if replaced is not None:
        keys |= set(file_settings(axis, replaced))
    *parents, last = axis.split("/")
    place = plain
    for parent in parents:
        place = place.setdefault(parent, {})
    dropped = {key for key in keys if f"{dotted(axis)}.{key}" not in explicit}
    place[last] = {k: v for k, v in (place.get(last) or {}).items() if k not in dropped}


def _is_no_setting(key: str) -> bool:
    return key in ("baseline", "experiment", "run") or key.startswith("custom.")


def key_of(override: str) -> str:
    """What an override sets: `group` or `group.key`."""
    return override.split("=", 1)[0].lstrip("+~").split("@")[0].replace("/", ".")

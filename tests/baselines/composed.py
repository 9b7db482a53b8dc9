"""The policies that `configs/baseline/` composes, read without Hydra."""

from functools import cache
from typing import Any

from axes import ROOT, policy_class, yaml_values
from omegaconf import OmegaConf

BASELINES = sorted(path.stem for path in (ROOT / "configs" / "baseline").glob("*.yaml"))
FIELD_OF = {"gate": "gates"}


@cache
def baseline_file(name: str) -> dict[str, Any]:
    """A baseline's config file, as it stands."""
    path = ROOT / "configs" / "baseline" / f"{name}.yaml"
    return dict(OmegaConf.to_container(OmegaConf.load(path)))  # type: ignore[arg-type]


def choices(name: str) -> dict[str, str | list[str]]:
    """What a baseline overrides: the choice of each axis, a list for the gates."""
    return {
        key.removeprefix("override /"): choice
        for entry in baseline_file(name)["defaults"]
        for key, choice in entry.items()
    }


def baseline_policies(
    name: str, settings: dict[str, dict[str, Any]] | None = None
) -> dict[str, Any]:
    """Arguments of `Policies` for a baseline; `settings` by choice differ from its config files."""
    made: dict[str, Any] = {}
    for axis, chosen in choices(name).items():
        loaded = [
            policy_class(axis, choice)(**_values(axis, choice) | (settings or {}).get(choice, {}))
            for choice in (chosen if isinstance(chosen, list) else [chosen])
        ]
        if isinstance(chosen, list):
            made[FIELD_OF[axis]] = tuple(loaded)
        else:
            (made[axis],) = loaded
    return made


@cache
def _values(axis: str, choice: str) -> dict[str, Any]:
    return yaml_values(axis, choice) or {}

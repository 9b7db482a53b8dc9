"""Config group = folder = file stem, and the keys of a file are the fields of its policy."""

import dataclasses

import pytest
from axes import POLICY_AXES, ROOT, WORKLOAD_AXES, policy_class, stems, yaml_values

from paxserve.hardware import Hardware
from paxserve.models.dimensions import Dimensions

CONFIGS = ROOT / "configs"
FIELDED = (*POLICY_AXES, *WORKLOAD_AXES, "cost_model", "tracker")
AXES = (*FIELDED, "executor")
WITH_FIELDS = [(axis, stem) for axis in FIELDED for stem in stems(axis)]
SIZES = {"hardware": Hardware, "model": Dimensions}

pytestmark = pytest.mark.skipif(not CONFIGS.exists(), reason="there are no configs yet")


@pytest.mark.parametrize("axis", AXES)
def test_every_file_of_an_axis_has_a_config_and_the_other_way_round(axis):
    assert sorted(path.stem for path in (CONFIGS / axis).glob("*.yaml")) == stems(axis)


@pytest.mark.parametrize(("axis", "stem"), WITH_FIELDS, ids=[f"{a}-{s}" for a, s in WITH_FIELDS])
def test_keys_of_a_config_are_the_fields_of_its_policy(axis, stem):
    cls = policy_class(axis, stem)
    assert cls.__dataclass_params__.frozen
    assert set(yaml_values(axis, stem)) == {field.name for field in dataclasses.fields(cls)}


@pytest.mark.parametrize(("axis", "stem"), WITH_FIELDS, ids=[f"{a}-{s}" for a, s in WITH_FIELDS])
def test_a_config_opens_with_a_comment_and_is_short(axis, stem):
    lines = (CONFIGS / axis / f"{stem}.yaml").read_text(encoding="utf-8").splitlines()
    assert lines[0].startswith("# ")
    assert len(lines) <= 15


@pytest.mark.parametrize("axis", [*POLICY_AXES, "cost_model"])
def test_a_policy_names_its_source(axis):
    for stem in stems(axis):
        module = policy_class(axis, stem).__module__
        docstring = __import__(module, fromlist=["_"]).__doc__
        assert "Source:" in docstring, module


@pytest.mark.parametrize("group", SIZES)
def test_keys_of_sizes_are_the_fields_of_what_they_describe(group):
    names = {field.name for field in dataclasses.fields(SIZES[group])}
    for path in sorted((CONFIGS / group).glob("*.yaml")):
        values = yaml_values(group, path.stem)
        assert set(values) == ({"name", "dtype"} if is_loaded(values, group) else names), path


def is_loaded(values, group):
    """A model that is found by its name has its sizes from its weights."""
    return group == "model" and "name" in values


@pytest.mark.parametrize("group", SIZES)
def test_sizes_name_their_source(group):
    for path in sorted((CONFIGS / group).glob("*.yaml")):
        comment = [line for line in path.read_text().splitlines() if line.startswith("#")]
        is_described = is_loaded(yaml_values(group, path.stem), group)
        assert is_described or "Source: " in " ".join(comment), path


def test_the_default_choice_of_every_axis_exists():
    from omegaconf import OmegaConf

    config = OmegaConf.to_container(OmegaConf.load(CONFIGS / "config.yaml"), resolve=False)
    defaults = {
        group: choice
        for entry in config["defaults"]
        if isinstance(entry, dict)
        for group, choice in entry.items()
    }
    for axis in AXES:
        if stems(axis) and axis not in WORKLOAD_AXES[1:]:
            chosen = defaults[axis]
            assert set(chosen) <= set(stems(axis)) if axis == "gate" else chosen in stems(axis)


@pytest.mark.parametrize("axis", WORKLOAD_AXES[1:])
def test_the_default_choices_of_a_workload_s_smaller_axes_exist(axis):
    part = axis.removeprefix("workload/")
    found = [yaml_values("workload", stem).get(part) for stem in stems("workload")]
    chosen = [choice for choice in found if choice is not None]
    assert chosen
    assert set(chosen) <= set(stems(axis))

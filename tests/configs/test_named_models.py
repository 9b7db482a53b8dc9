"""Models named where a choice would stand, and the number type of a config that is only planned."""

import json
import sys

import pytest

from paxserve.cli import main
from paxserve.engines import dimensions
from paxserve.hydra_config import compose_config
from paxserve.settings import Knobs

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64,
    "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 256, "max_position_embeddings": 512,
}  # fmt: skip


@pytest.fixture(autouse=True)
def directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["paxserve"])
    return write(tmp_path / "mine", torch_dtype="bfloat16")


def write(path, **more):
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({**CONFIG, **more}))
    return path


def sizes(*overrides):
    plain, _, explicit = compose_config(overrides)
    return dimensions(Knobs(plain, explicit))


def test_a_config_s_number_type_is_that_of_its_weights(directory):
    found = sizes("model=random:mine/config.json")
    assert (found.hidden_size, found.dtype) == (64, "bfloat16")
    assert sizes("model=random:mine", "model.dtype=float32").dtype == "float32"
    write(directory, dtype="float16", torch_dtype="bfloat16")  # the newer key
    assert sizes("model=random:mine").dtype == "float16"
    write(directory)
    assert sizes("model=random:mine").dtype == "float32"
    assert sizes("model=tiny").dtype == "float32"


@pytest.mark.parametrize("name", ["org/name", "random:mine/config.json", "./mine", "a/b.gguf"])
def test_a_name_with_a_colon_or_a_slash_is_loaded(name):
    plain, _, explicit = compose_config(
        ["model=llama-3-8b", f"model={name}", "model.dtype=bfloat16"]
    )
    assert plain["model"] == {"name": name, "dtype": "bfloat16"}
    assert "model.name" in explicit


def test_a_run_and_a_plan_take_such_a_name(capsys, tmp_path):
    named = "model=random:mine/config.json"
    assert main(["plan", named, "hardware=a100-80g", "--input-tokens", "64",
                 "--output-tokens", "64"]) == 0  # fmt: skip
    assert capsys.readouterr().out.startswith("random:mine/config.json, 0.00 x 10^9 weights in bf")
    assert main(["run", named, "executor=simulated", "hardware=a100-80g", "workload=synthetic",
                 "workload/lengths=fixed", "workload.num_requests=2",
                 "run_dir=r"]) == 0  # fmt: skip
    assert "name: random:mine/config.json" in (tmp_path / "r" / "config.yaml").read_text()

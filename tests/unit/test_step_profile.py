"""A profile is what was measured, and says so when something else is to be simulated."""

import json
import math
from dataclasses import fields, replace

import pytest

from paxserve.calibrate.profiling import errors_of
from paxserve.cost_model import Target
from paxserve.cost_model.fitted import Fitted
from paxserve.hardware import Hardware
from paxserve.models.dimensions import Dimensions
from paxserve.step_profile import (
    TERMS,
    Errors,
    Features,
    Profile,
    Regime,
    read_profile,
    write_profile,
)
from paxserve.step_shape import StepShape

MODEL = Dimensions(
    num_layers=2,
    hidden_size=64,
    mlp_size=128,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=512,
    max_position=2048,
    tie_embeddings=True,
    dtype="float32",
)
HARDWARE = Hardware(
    name="some card",
    flop_per_s={"float32": 1e12},
    bytes_per_s=1e10,
    memory_bytes=10**10,
    reserved_bytes=0,
    link_bytes_per_s=0.0,
    all_reduce_latency_s=0.0,
    host_link_bytes_per_s=1e10,
    tile_tokens=1,
    compile_target=None,
    platform="gpu",
)
TARGET = Target(
    model=MODEL,
    hardware=HARDWARE,
    num_devices=1,
    kv_cache_dtype="auto",
    block_size=16,
    sampling="greedy",
    kernel="xla",
)
SECONDS = Features(0.5, 0.25, 0.125, 64.0, 128.0, 2.0, 4.0, 8.0)
PROFILE = Profile(
    model=MODEL,
    num_devices=1,
    hardware="some card",
    kv_cache_dtype="auto",
    block_size=16,
    device="CARD",
    sampling="greedy",
    kernel="xla",
    versions={"jax": "1.2"},
    regimes=(Regime(8, 8, SECONDS), Regime(64, 8, SECONDS._replace(base=32.0))),
    host_s_per_step=16.0,
    host_s_per_row=1.0,
    errors={"held_out": Errors(3, 0.1, -0.02)},
)
STEP = StepShape(
    num_tokens=7,
    num_rows=3,
    padded_tokens=8,
    padded_rows=8,
    num_samples=3,
    num_decodes=2,
    decode_context=10,
    num_chunks=1,
    chunk_tokens=5,
    chunk_context=6,
    chunk_pairs=20,
)
TERMS_OF_STEP = (
    *(0.5, 7 * 0.25, 3 * 0.125, 1 * 64.0, 128.0, 10 * 2.0, 6 * 4.0, 20 * 8.0),
    16.0 + 3 * 1.0,
)


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "profile.json"
    write_profile(path, PROFILE)
    return path


def test_a_file_holds_all_of_it(path):
    assert read_profile(path) == PROFILE
    assert [file.name for file in path.parent.iterdir()] == ["profile.json"]


def test_a_step_takes_the_terms_of_its_padded_shape(path):
    costs = Fitted(str(path)).open(TARGET)
    assert costs.terms == TERMS == (*Features._fields, "host")
    assert costs.of(STEP) == TERMS_OF_STEP
    assert costs.of(STEP._replace(padded_tokens=64)) == (32.0, *TERMS_OF_STEP[1:])
    of_chunks = dict(zip(TERMS, costs.of(STEP._replace(num_decodes=0)), strict=True))
    assert of_chunks["decoding"] == 0.0


def test_a_profile_without_padding_is_for_every_step():
    costs = replace(PROFILE, regimes=(Regime(None, None, SECONDS),)).costs()
    for padded in (7, 8, 1000):
        assert costs.of(STEP._replace(padded_tokens=padded)) == TERMS_OF_STEP


def test_what_the_host_takes_is_no_part_of_a_step_s_own_time():
    alone_s = sum(TERMS_OF_STEP[:-1])
    found = errors_of(PROFILE, [STEP, STEP], [alone_s, 2 * alone_s])
    assert found.num_steps == 2
    assert found.median_absolute == pytest.approx(0.25)
    assert found.summed_bias == pytest.approx(2 / 3 - 1)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"padded_tokens": 16}, r"padded to 16 tokens and 8 rows.*\(64, 8\).*executor\.pads=true"),
        ({"num_copied": 2}, "copies 2 and swaps 0 blocks, of which the profile says nothing"),
        ({"num_swapped": 1}, "copies 0 and swaps 1 blocks"),
    ],
)
def test_what_was_not_measured_is_not_made_up(changed, message):
    with pytest.raises(ValueError, match=message):
        PROFILE.costs().of(STEP._replace(**changed))


@pytest.mark.parametrize(
    ("target", "named"),
    [
        (replace(TARGET, block_size=32), "block_size=16, and block_size=32"),
        (replace(TARGET, num_devices=2), "tensor_parallel_size=1, and tensor_parallel_size=2"),
        (replace(TARGET, kv_cache_dtype="int8"), "kv_cache_dtype=auto, and kv_cache_dtype=int8"),
        (replace(TARGET, hardware=replace(HARDWARE, name="another")),
         "hardware=some card, and hardware=another"),
        (replace(TARGET, model=replace(MODEL, num_layers=3)),
         "model.num_layers=2, and model.num_layers=3"),
        (replace(TARGET, model=replace(MODEL, dtype="bfloat16")),
         "model.dtype=float32, and model.dtype=bfloat16"),
        (replace(TARGET, sampling="sampled"), "sampling=greedy, and sampling=sampled"),
        (replace(TARGET, kernel="pallas_tpu"), "kernel=xla, and kernel=pallas_tpu"),
    ],
)  # fmt: skip
def test_a_profile_of_something_else_is_refused(path, target, named):
    with pytest.raises(ValueError, match=named):
        Fitted(str(path)).open(target)


def test_nothing_of_a_target_is_left_unchecked():
    """Whatever a target has beside its model and hardware, a profile has too."""
    for name in {field.name for field in fields(Target)} - {"model", "hardware"}:
        other = replace(PROFILE, **{name: 99 if name.startswith(("num", "block")) else "other"})
        PROFILE.check(TARGET)
        with pytest.raises(ValueError, match=r"the profile was measured with \w+=(99|other), and"):
            other.check(TARGET)


def test_what_is_not_said_of_a_target_is_not_held_against_a_profile(path):
    Fitted(str(path)).open(replace(TARGET, sampling=None, kernel=None))


def test_a_missing_file_says_what_would_write_it(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"none\.json does not exist: `paxserve calibrate"):
        Fitted(str(tmp_path / "none.json")).open(TARGET)
    with pytest.raises(FileNotFoundError):
        Fitted(str(tmp_path)).open(TARGET)
    for nothing in ("", 3, None):
        with pytest.raises(ValueError, match="path must be the path of a file"):
            Fitted(nothing)


def edited(path, edit):
    found = json.loads(path.read_text())
    edit(found)
    path.write_text(json.dumps(found))


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda found: found.update(version=1), "object with version 2"),
        (lambda found: found.pop("regimes"), "must have"),
        (lambda found: found.update(more=1), "must have"),
        (lambda found: found.update(regimes=[]), "regimes must not be empty"),
        (lambda found: found["regimes"].append(found["regimes"][0]), "different shapes"),
        (lambda found: found["regimes"][0].pop("padded_rows"), "'padded_rows' is missing"),
        (lambda found: found["regimes"][0]["seconds"].pop("rows"), "rows"),
        (lambda found: found["regimes"][0]["seconds"].update(rows=-1), r"\[0\].seconds.rows must"),
        (lambda found: found["regimes"][1]["seconds"].update(base=math.nan), r"\[1\].seconds.base"),
        (lambda found: found["regimes"][0].update(padded_rows="8"), r"\[0\].padded_rows must"),
        (lambda found: found.update(host_s_per_step="x"), "host_s_per_step must"),
        (lambda found: found.update(block_size=0), "block_size must"),
        (lambda found: found["model"].update(num_layers=0), "num_layers must"),
        (lambda found: found.update(errors=[1]), "'list'"),
    ],
)
def test_a_malformed_file_is_named_with_what_is_wrong(path, edit, message):
    edited(path, edit)
    with pytest.raises(ValueError, match=rf"profile\.json is no profile of steps: .*{message}"):
        read_profile(path)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"version": 2}', "null", "\x00"])
def test_a_file_that_is_something_else(tmp_path, text):
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"other\.json is no profile of steps"):
        read_profile(path)


def test_a_binary_file(tmp_path):
    path = tmp_path / "other.json"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"other\.json is no profile of steps"):
        read_profile(path)

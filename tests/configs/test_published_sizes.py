"""Numbers of configs/model and configs/hardware against what is published of them."""

import pytest
from axes import ROOT, yaml_values

from kernels_pallas.compile_targets import TARGETS
from paxserve.hardware import Hardware
from paxserve.models.dimensions import Dimensions

GIB = 2**30


def model(stem):
    return Dimensions(**yaml_values("model", stem))


def stems(group):
    return sorted(path.stem for path in (ROOT / "configs" / group).glob("*.yaml"))


# KV bytes per token in 16 bits: printed by vLLM (section 3), the scaling book and Mooncake
# (Llama-3-70B), or counted from printed layers, KV heads and head size.
KV_BYTES = {
    "opt-13b": 819_200,
    "opt-66b": 2_359_296,
    "opt-175b": 4_718_592,
    "llama-13b": 819_200,
    "llama-2-7b": 524_288,
    "llama-2-70b": 327_680,
    "llama-3-8b": 131_072,
    "llama-3.1-8b": 131_072,
    "llama-3-70b": 327_680,
    "mistral-7b": 131_072,
    "yi-34b": 245_760,
    "qwen2.5-7b": 57_344,
    "qwen3-32b": 262_144,
}

# Published counts of parameters, in 10^9; of OPT the names, which round up a little.
PARAMETERS = {
    "opt-13b": 12.85,
    "opt-66b": 65.7,
    "opt-175b": 175,
    "llama-13b": 13.02,
    "llama-2-7b": 6.74,
    "llama-2-70b": 68.98,
    "llama-3-8b": 8.03,
    "llama-3.1-8b": 8.03,
    "llama-3-70b": 70.55,
    "mistral-7b": 7.24,
    "yi-34b": 34.39,
    "qwen2.5-7b": 7.62,
    "qwen3-32b": 32.76,
}


def test_every_model_with_sizes_is_checked():
    assert {stem for stem in stems("model") if "num_layers" in yaml_values("model", stem)} == (
        KV_BYTES.keys() | PARAMETERS.keys()
    )


@pytest.mark.parametrize("stem", KV_BYTES)
def test_kv_bytes_per_token(stem):
    assert model(stem).kv_bytes_per_token() == KV_BYTES[stem]


@pytest.mark.parametrize("stem", PARAMETERS)
def test_numbers_of_parameters(stem):
    assert model(stem).num_weights == pytest.approx(PARAMETERS[stem] * 1e9, rel=0.01)


# vLLM (SOSP 2023), table 1.
@pytest.mark.parametrize(("stem", "gb"), [("opt-13b", 26), ("opt-66b", 132), ("opt-175b", 346)])
def test_weights_of_table_1(stem, gb):
    assert model(stem).weight_bytes == pytest.approx(gb * 1e9, rel=0.02)


@pytest.mark.parametrize(("stem", "gib", "slots"), [
    ("opt-13b", 12, 15_700), ("opt-66b", 21, 9_700), ("opt-175b", 264, 60_100),
])  # fmt: skip
def test_slots_of_table_1(stem, gib, slots):
    num_slots = gib * GIB // model(stem).kv_bytes_per_token()
    assert num_slots == pytest.approx(slots, rel=0.02)


# Dense bf16 TFLOP/s, GB/s, and the ridge in FLOP per byte, as papers and data sheets round them.
RATES = {
    "a100-40g": (312, 1555, 201),
    "a100-80g": (312, 2039, 153),
    "h100": (990, 3350, 295),
    "h200": (990, 4800, 206),
    "rtx4090": (165.2, 1008, 164),
    "rtxpro6000": (503.8, 1792, 281),
    "tpu-v5e": (197, 810, 243),
    "tpu-v5p": (459, 2800, 164),
    "tpu-v6e": (920, 1600, 575),
}
# Memory by name: as engineers say it, in GB or GiB.
MEMORY_GB = {
    "a100-40g": 40, "a100-80g": 80, "h100": 80, "h200": 141, "rtx4090": 24, "rtxpro6000": 96,
    "tpu-v5e": 16, "tpu-v5p": 96, "tpu-v6e": 32,
}  # fmt: skip


def hardware(stem):
    return Hardware(**yaml_values("hardware", stem))


def test_every_device_with_a_data_sheet_is_checked():
    assert {*stems("hardware")} - {"host-cpu"} == RATES.keys() == MEMORY_GB.keys()


@pytest.mark.parametrize("stem", RATES)
def test_rates_and_ridges(stem):
    device, (tflop, gb, ridge) = hardware(stem), RATES[stem]
    assert device.flop_per_s["bfloat16"] == pytest.approx(tflop * 1e12, rel=0.01)
    assert device.bytes_per_s == pytest.approx(gb * 1e9, rel=0.025)
    assert device.ridge("bfloat16") == pytest.approx(ridge, rel=0.03)


@pytest.mark.parametrize("stem", MEMORY_GB)
def test_memory_lies_between_gb_and_gib(stem):
    name = MEMORY_GB[stem]
    assert name * 1e9 <= hardware(stem).memory_bytes <= name * GIB


def test_what_compiles_without_it_is_a_target_of_its_platform():
    named = {stem: hardware(stem).compile_target for stem in stems("hardware")}
    assert {name for name in named.values() if name} == {"h100", "v5e", "v5p", "v6e"}
    platforms = {"gpu": "cuda", "tpu": "tpu"}
    for stem, name in named.items():
        if name:
            assert TARGETS[name].platform == platforms[hardware(stem).platform]

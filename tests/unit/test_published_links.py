"""Sums over a group, and tiles of products, held to what Vidur measured of both (MLSys 2024).

The tolerance is wide since the measurements are: the same sum takes 20 or 60 us from one size to
the next. Sums of less than 64 KiB scatter over a factor of ten, and are not held to anything.
"""

import os
from collections import defaultdict
from pathlib import Path
from statistics import median

import pytest
from axes import yaml_values

from paxserve.cost_model import Target
from paxserve.cost_model.roofline import TERMS, Roofline
from paxserve.hardware import Hardware
from paxserve.models.dimensions import Dimensions
from paxserve.profiles.vidur import read_sums
from paxserve.step_shape import prompt
from paxserve.traces.csv_file import read_csv

DATA = Path(os.environ.get("PAXSERVE_DATA", "."), "traces", "vidur", "profiling")
pytestmark = pytest.mark.skipif("PAXSERVE_DATA" not in os.environ, reason="PAXSERVE_DATA not set")

MODEL = Dimensions(**yaml_values("model", "llama-2-70b"))
TOKEN_BYTES = MODEL.hidden_size * MODEL.weight_bytes_each
BANDS = [(64 * 2**10, 2**20), (2**20, 2**23), (2**23, 2**26)]  # bytes of a sum, from and to
PRODUCTS = ("attn_pre_proj", "attn_post_proj", "mlp_up_proj", "mlp_down_proj")


def modelled_s(name, num_devices, num_tokens):
    """One sum over a group, with the default efficiencies."""
    model = Roofline(**yaml_values("cost_model", "roofline"))
    costs = model.open(
        Target(
            model=MODEL,
            hardware=Hardware(**yaml_values("hardware", name)),
            num_devices=num_devices,
            kv_cache_dtype="auto",
            block_size=16,
        )
    )
    return costs.of(prompt(num_tokens))[TERMS.index("links")] / (2 * MODEL.num_layers)


@pytest.mark.parametrize("num_devices", [2, 4, 8])
@pytest.mark.parametrize(("name", "file"), [
    ("a100-80g", "network_a100_dgx_all_reduce.csv"),
    ("h100", "network_h100_dgx_all_reduce.csv"),
])  # fmt: skip
def test_sums_within_a_machine(name, file, num_devices):
    measured = read_sums(str(DATA / file), num_devices)
    for low, high in BANDS:
        sizes = range(-(-low // TOKEN_BYTES), high // TOKEN_BYTES)
        ratios = [
            modelled_s(name, num_devices, n) / measured.at(n * TOKEN_BYTES)
            for n in sizes[:: max(1, len(sizes) // 50)]
        ]
        assert 0.7 < median(ratios) < 1.3, (low, high)


@pytest.mark.parametrize("model", ["Llama-2-70b-hf", "Llama-2-7b-hf", "Meta-Llama-3-8B"])
def test_products_on_an_a100_step_up_at_whole_tiles(model):
    tile = yaml_values("hardware", "a100-80g")["tile_tokens"]
    columns = [f"time_stats.{product}.median" for product in PRODUCTS]
    times = defaultdict(list)
    path = str(DATA / f"compute_a100_meta-llama_{model}_mlp.csv")
    group = ["num_tokens", "num_tensor_parallel_workers"]
    for _, (*texts, tokens, devices) in read_csv(path, [*columns, *group], what="profile"):
        if devices == "1":
            times[int(tokens)].append(sum(map(float, texts)))
    steps = {n: median(times[n + 8]) / median(times[n]) for n in range(136, 513, 8)}
    across = [step for n, step in steps.items() if n % tile == 0]
    within = [step for n, step in steps.items() if n % tile]
    assert median(across) > 1.15
    assert median(within) < 1.02

"""Seconds of steps on a device whose rates are round numbers; nothing nonsensical gets that far."""

import math
from dataclasses import fields

import pytest
from cost_builders import KV_BYTES_PER_TOKEN, roofline, small_hardware, small_model, target

from paxserve.cost_model.roofline import TERMS, Roofline
from paxserve.hardware import Hardware
from paxserve.models.dimensions import Dimensions
from paxserve.step_shape import decodes, prompt
from paxserve.step_work import WorkCounter


def seconds(shape, model=None, **changed):
    costs = (model or roofline()).open(target(**changed))
    assert costs.terms == TERMS
    return dict(zip(TERMS, costs.of(shape), strict=True))


def test_each_part_takes_its_arithmetic_or_its_bytes():
    work = WorkCounter.of(small_model()).of_step(decodes(3, 30))
    assert seconds(decodes(3, 30)) == {
        "linear": max(work.linear.flop / 1000, work.linear.num_bytes / 100),
        "head": max(work.head.flop / 1000, work.head.num_bytes / 100),
        "decode_attention": max(work.decodes.flop / 1000, work.decodes.num_bytes / 100),
        "chunk_attention": 0.0,
        "links": 0.0,
        "moves": 0.0,
        "host": 0.0,
    }
    assert work.linear.flop / 1000 < work.linear.num_bytes / 100  # 3 rows: the weights
    many = WorkCounter.of(small_model()).of_step(prompt(64))
    assert seconds(prompt(64))["linear"] == many.linear.num_bytes / 100
    slow = small_hardware(flop_per_s=100.0)
    assert seconds(prompt(64), hardware=slow)["linear"] == many.linear.flop / 100


def test_one_request_is_bound_by_bandwidth_over_weights():
    """CLAIMS D5: the weights are read once per token, so it cannot be faster than that."""
    model, hardware = small_model(), small_hardware(flop_per_s=1e12)
    step_s = sum(seconds(decodes(1, 1), hardware=hardware).values())
    read = model.weight_bytes - 2 * model.num_head_weights  # a row of the embedding, not all of it
    assert read / hardware.bytes_per_s < step_s < 1.6 * read / hardware.bytes_per_s


def test_what_is_reached_of_the_rates():
    half = roofline(compute_efficiency=0.5, bandwidth_efficiency=0.25)
    whole_s, half_s = seconds(decodes(3, 30)), seconds(decodes(3, 30), half)
    assert half_s["decode_attention"] == 4 * whole_s["decode_attention"]
    slow = small_hardware(flop_per_s=1.0)
    assert seconds(prompt(9), half, hardware=slow)["linear"] == (
        2 * seconds(prompt(9), hardware=slow)["linear"]
    )


def test_links_and_their_latency():
    shape, pair = decodes(3, 30), {"num_devices": 2}
    work = WorkCounter.of(small_model(), num_devices=2).of_step(shape)
    assert seconds(shape, **pair)["links"] == work.link_bytes / 50 + work.num_sums * 0.5
    slow = roofline(link_efficiency=0.5)
    assert seconds(shape, slow, **pair)["links"] == work.link_bytes / 25 + work.num_sums * 0.5


def test_arithmetic_takes_the_rate_of_its_dtype():
    rates = {"bfloat16": 1.0, "float32": 0.25, "int8": 2.0}
    hardware = small_hardware(flop_per_s=rates)
    for dtype, rate in rates.items():
        aim = target(hardware=hardware, model=small_model(dtype=dtype))
        linear_s = roofline().open(aim).of(prompt(9))[TERMS.index("linear")]
        assert linear_s == WorkCounter.of(aim.model).of_step(prompt(9)).linear.flop / rate


@pytest.mark.parametrize("dtype", ["float32", "float16", "fp8", "int8"])
def test_a_dtype_without_a_rate_is_refused(dtype):
    with pytest.raises(ValueError, match=f"model.dtype={dtype}: hardware small has no rate for it"):
        roofline().open(target(model=small_model(dtype=dtype)))


def test_the_host():
    model = roofline(host_s_per_step=2.0, host_s_per_row=0.25)
    assert seconds(decodes(3, 30), model)["host"] == 2.75


def test_copies_cross_memory_twice_and_swaps_the_host_s_bus_once():
    block = 4 * KV_BYTES_PER_TOKEN
    shape = decodes(3, 30)._replace(num_copied=2, num_swapped=5)
    assert seconds(shape)["moves"] == 2 * 2 * block / 100 + 5 * block / 10
    half = roofline(link_efficiency=0.5)
    assert seconds(shape, half)["moves"] == 2 * 2 * block / 100 + 5 * block / 5


def test_whole_tiles():
    wide = small_hardware(flop_per_s=1.0, tile_tokens=128)
    at = [seconds(prompt(n), hardware=wide)["linear"] for n in (129, 256, 257)]
    assert at[0] == at[1]
    assert at[2] / at[1] == 1.5


def test_a_device_without_a_link_is_no_part_of_a_group():
    alone = small_hardware(link_bytes_per_s=0.0)
    with pytest.raises(ValueError, match="tensor_parallel_size=2: hardware small has no link"):
        roofline().open(target(hardware=alone, num_devices=2))
    roofline().open(target(hardware=alone))


# Nonsense.

WRONG = [math.nan, math.inf, -math.inf, -1, True, "3", None, [1]]
MAY_BE_ZERO = {
    "reserved_bytes", "link_bytes_per_s", "all_reduce_latency_s", "host_s_per_step",
    "host_s_per_row",
}  # fmt: skip
MADE = [(Hardware, small_hardware), (Dimensions, small_model), (Roofline, roofline)]
NUMBERS = [
    pytest.param(make, field.name, id=f"{cls.__name__}.{field.name}")
    for cls, make in MADE
    for field in fields(cls)
    if isinstance(getattr(make(), field.name), int | float)
    and not isinstance(getattr(make(), field.name), bool)
]


def test_every_number_is_tried():
    assert len(NUMBERS) == 7 + 8 + 5


@pytest.mark.parametrize(("make", "name"), NUMBERS)
def test_nonsense_is_refused_by_name(make, name):
    for value in [*WRONG, *([] if name in MAY_BE_ZERO else [0])]:
        with pytest.raises(ValueError, match=rf"{name}\b.* must be .*, got"):
            make(**{name: value})
    make(**dict.fromkeys({name} & MAY_BE_ZERO, 0))


@pytest.mark.parametrize(
    ("make", "name", "value"),
    [
        (small_hardware, "platform", "npu"),
        (small_hardware, "platform", 1),
        (small_hardware, "name", 3),
        (small_hardware, "name", ""),
        (small_hardware, "compile_target", 3),
        (small_model, "gated_mlp", 1),
        (small_model, "tie_embeddings", None),
    ],
)
def test_nonsense_that_is_no_number(make, name, value):
    with pytest.raises(ValueError, match=rf"{name} must be .*, got {value!r}"):
        make(**{name: value})


@pytest.mark.parametrize("value", [*WRONG, 0])
def test_rates_that_are_none(value):
    with pytest.raises(ValueError, match=r"hardware.flop_per_s\.int8 must be .*, got"):
        small_hardware(flop_per_s={"bfloat16": 1.0, "int8": value})


@pytest.mark.parametrize("rates", [{}, 3, None, [1.0], {"bf16": 1.0}, {3: 1.0}])
def test_rates_of_no_dtype(rates):
    with pytest.raises(ValueError, match=r"flop_per_s must be a rate per dtype, of .*, got"):
        small_hardware(flop_per_s=rates)


def test_more_reserved_than_there_is():
    with pytest.raises(ValueError, match=r"=10 is more than hardware\.memory_bytes=9"):
        small_hardware(memory_bytes=9, reserved_bytes=10)


def test_ridge_and_what_is_left():
    hardware = small_hardware(flop_per_s={"bfloat16": 1000.0, "int8": 3000.0})
    assert (hardware.ridge("bfloat16"), hardware.ridge("int8")) == (10.0, 30.0)
    assert hardware.usable_bytes == 999_999_000

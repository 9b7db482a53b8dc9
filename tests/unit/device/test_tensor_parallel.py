"""A model split over 4 and 8 devices is the model: the same tokens, KV that stays where it is, no
communication but what the split needs.

Two small models with 8 kv heads and random weights; the pool is full of NaN.
"""

from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from builders import run_to_end
from invariants import check_idle
from near_ties import NEAR_TIE, first_difference
from real_builders import make_real, random_ids, real_engine, submit_ids

from kernels_pallas.paged_attention import BACKENDS, backend_module
from paxserve import assemble
from paxserve.device import memory
from paxserve.device.block_moves import Move, MoveShape
from paxserve.device.kv_blocks import KvLayout
from paxserve.device.sharding import AXIS, check_group, share
from paxserve.models.config import ModelConfig, parameter_shapes
from paxserve.models.load import LoadedModel
from paxserve.models.random_parameters import random_parameters
from paxserve.pack import Variant
from paxserve.preemption.swap import Swap
from paxserve.results import applied
from paxserve.sampling_params import SamplingParams
from paxserve.settings import EngineSettings
from paxserve.sizing import step_bytes
from paxserve.step import BlockCopy, StepPlan

SIZES = (4, 8)
NUM_LAYERS = 2
CONFIGS = {
    "tied": {"tie_embeddings": True, "layer_windows": (None, 9)},
    "biased": {"qkv_bias": True, "output_bias": True, "mlp_bias": True},
}


@cache
def model(name="biased"):
    config = ModelConfig(
        vocab_size=512,
        hidden_size=64,
        mlp_size=128,
        num_layers=NUM_LAYERS,
        num_heads=16,
        num_kv_heads=8,
        head_dim=16,
        max_position=2048,
        **CONFIGS[name],
    )
    parameters = random_parameters(config)
    for bias in [name for name in parameters if name.endswith("bias")]:
        parameters[bias] = parameters[bias] * np.float32(20)  # so that one added n times would show
    return LoadedModel(config=config, parameters=parameters, tokenizer=None, name=name)


@cache
def group(size, name="biased", **options):
    return make_real(
        model(name),
        tensor_parallel_size=size,
        max_num_batched_tokens=16,
        token_buckets=(16,),
        num_host_blocks=24,
        copies=True,
        **options,
    )


WAYS = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.9, "top_p": 0.9, "top_k": 40, "seed": 5},
    "logprobs": {"temperature": 0.7, "seed": 6, "logprobs": 3},
}


def serve(real, name, way, **engine_options):
    """Prompts of several chunks, more requests than rows, a pool that is too small."""
    engine = real_engine(real, model(name), **{"num_blocks": 1 + 6} | engine_options)
    params = SamplingParams(max_tokens=14, ignore_eos=True, **WAYS[way])
    for i in range(6):
        submit_ids(engine, random_ids(4 + 9 * i, seed=i), params)
    run_to_end(engine)
    check_idle(engine)
    return engine


def check_same(name, way, expected, found):
    """The law of tokens: equal, but for near ties."""
    for one, other in zip(expected.requests, found.requests, strict=True):
        difference = first_difference(
            model(name),
            one.prompt_token_ids,
            one.params,
            seed=WAYS[way].get("seed", 0),
            expected=list(one.output_token_ids),
            found=list(other.output_token_ids),
            name=one.request_id,
        )
        assert difference is None or difference.gap < NEAR_TIE


# The same tokens.


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("name", "way"), [("tied", "greedy"), *[("biased", w) for w in WAYS]])
def test_a_group_gives_the_tokens_of_one_device(size, name, way):
    expected = serve(group(1, name), name, way)
    found = serve(group(size, name), name, way)
    assert sum(request.num_preemptions for request in found.requests) >= 2
    assert len({tuple(request.output_token_ids) for request in found.requests}) == 6
    check_same(name, way, expected, found)


@pytest.mark.parametrize("size", SIZES)
def test_so_it_does_when_blocks_are_swapped(size):
    swaps = {"policies": {"preemption": Swap()}, "num_host_blocks": 24}
    expected = serve(group(1), "biased", "sampled")
    found = serve(group(size), "biased", "sampled", **swaps)
    assert sum(step.swap_bytes for step in found.steps) >= 8 * group(1)._moves.bytes_per_block
    check_same("biased", "sampled", expected, found)


@pytest.mark.parametrize("size", SIZES)
def test_a_quantised_cache_is_split_with_its_scales(size):
    options = {"kv_cache_dtype": "int8", "backend": "xla"}
    real = group(size, **options)
    expected = serve(group(1, **options), "biased", "greedy", num_blocks=25)
    found = serve(real, "biased", "greedy", num_blocks=25)
    check_same("biased", "greedy", expected, found)
    blocks, scales = real.kv_blocks[:2]
    assert (blocks.dtype, scales.dtype) == ("int8", "float32")
    for array in (blocks, scales):
        assert {shard.data.shape[2] for shard in array.addressable_shards} == {8 // size}


# What each device holds and does.


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_layout_says_where_heads_lie_side_by_side(backend):
    """Never along the blocks, by which they are moved."""
    layout = backend_module(backend).LAYOUT
    assert 0 < layout.KV_HEADS_AXIS < len(layout.kv_shape(9, 16, 2, 64))
    assert 0 < layout.SCALES_HEADS_AXIS < len(layout.kv_scales_shape(9, 16, 2))


def pointers(real):
    return [
        [shard.data.unsafe_buffer_pointer() for shard in kv.addressable_shards]
        for kv in jax.block_until_ready(real.kv_blocks)
    ]


@pytest.mark.parametrize("size", SIZES)
def test_each_device_keeps_its_heads_where_they_are(size):
    real = group(size)
    before = pointers(real)
    assert {len(of_layer) for of_layer in before} == {size}
    serve(real, "biased", "greedy", policies={"preemption": Swap()}, num_host_blocks=24)
    assert pointers(real) == before
    for kv in real.kv_blocks:
        assert {s.data.shape for s in kv.addressable_shards} == {(25, 2, 8 // size, 16, 16)}
    layout = KvLayout(share(model().config, size), 16, "xla", np.dtype("float32"))
    assert layout.bytes_per_block * 25 * size == sum(kv.nbytes for kv in real.kv_blocks)


@pytest.mark.parametrize("size", SIZES)
def test_programs_reuse_each_device_s_pool_within_the_bound_of_its_share(size):
    real = group(size)
    real.warm_up(Variant)
    kv_bytes = sum(kv.nbytes for kv in real.kv_blocks) // size
    assert len(real.executables) == 2 * len(Variant) + 3 * len(real._moves.sizes)
    for shape, program in real.executables.items():
        found = program.memory_analysis()
        if isinstance(shape, MoveShape):
            in_place = 0 if shape.move is Move.SWAP_OUT else kv_bytes
            assert found.alias_size_in_bytes == in_place
            continue
        assert found.alias_size_in_bytes >= kv_bytes
        allowed = step_bytes(
            share(model().config, size),
            num_tokens=shape.bucket.num_tokens,
            num_rows=shape.bucket.num_rows,
            num_devices=size,
        )
        assert found.temp_size_in_bytes <= allowed


COLLECTIVES = ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter")


def num_collectives(program):
    text = program.as_text()
    return [text.count(f" {name}(") for name in COLLECTIVES]


@pytest.mark.parametrize("size", SIZES)
def test_devices_talk_for_two_sums_a_layer_the_embedding_and_the_logits(size):
    real = group(size)
    real.warm_up([Variant.GREEDY])
    for shape, program in real.executables.items():
        expected = [0] * 5 if isinstance(shape, MoveShape) else [2 * NUM_LAYERS + 1, 1, 0, 0, 0]
        assert num_collectives(program) == expected, shape


def test_one_device_s_program_knows_no_group():
    real = group(1)
    real.warm_up([Variant.GREEDY])
    for shape, program in real.executables.items():
        assert num_collectives(program) == [0] * 5, shape
    packed = real._packer.padding(real.buckets.shapes[0], Variant.GREEDY)
    arguments = (real._parameters, real._state, packed.arrays)
    text = real._forward.lower(*arguments, variant=Variant.GREEDY).as_text()
    assert "mesh" not in text
    assert "manual" not in text
    assert f'"{AXIS}"' not in text


@pytest.mark.parametrize("size", SIZES)
def test_all_devices_sample_the_same(size):
    """Bit by bit, log probabilities included."""
    real = group(size)
    packed = real._packer.padding(real.buckets.shapes[-1], Variant.LOGPROBS)
    rng = np.random.default_rng(0)
    arrays = packed.arrays._replace(
        token_ids=rng.integers(0, 512, packed.arrays.token_ids.shape, dtype=np.int32),
        last_tokens=np.arange(4, dtype=np.int32),
        sampling=packed.arrays.sampling._replace(
            temperature=np.float32([0, 0.5, 1, 2]), seed=np.uint32([1, 2, 3, 4])
        ),
    )
    outputs = real._run(packed._replace(arrays=arrays))
    assert np.isfinite(outputs.logprobs.chosen).all()
    for array in (*jax.tree.leaves(outputs), real._state.last_sampled):
        first, *others = [np.asarray(shard.data).tobytes() for shard in array.addressable_shards]
        assert others == [first] * (size - 1)


@pytest.mark.parametrize("size", SIZES)
def test_blocks_move_whole(size):
    """Out to the host, back to other places, and copied, each device its part."""
    real = make_real(model(), tensor_parallel_size=size, num_host_blocks=4, copies=True)
    rng = np.random.default_rng(5)
    filled = [rng.normal(size=kv.shape).astype(np.float32) for kv in real.kv_blocks]
    real._set_kv(
        tuple(
            jax.device_put(new, kv.sharding) for new, kv in zip(filled, real.kv_blocks, strict=True)
        )
    )
    before = pointers(real)

    def run(**moves):
        real.submit(StepPlan(1, (), **moves))
        return real.collect()

    out = run(swap_out=(BlockCopy(3, 0), BlockCopy(5, 2)))
    run(copies=(BlockCopy(7, 3), BlockCopy(8, 5)))
    run(swap_in=(BlockCopy(0, 9), BlockCopy(2, 1)))
    assert out.swap_bytes == 2 * sum(kv[0].nbytes for kv in filled)
    assert pointers(real) == before
    for old, kv in zip(filled, real.kv_blocks, strict=True):
        expected = old.copy()
        expected[[3, 5, 9, 1]] = old[[7, 8, 3, 5]]
        np.testing.assert_array_equal(kv, expected)


# Sizes of one device.


def start(size, **settings):
    lines = []
    engine = assemble.real_engine(
        model(),
        settings=EngineSettings(
            max_num_seqs=4, max_model_len=64, tensor_parallel_size=size, **settings
        ),
        policies=real_engine(group(1), model()).scheduler.policies,
        forks=False,
        say=lines.append,
    )
    return engine, lines


def test_an_engine_sizes_each_device_by_its_share():
    """A block of 16 tokens is 4 KiB of each of 8 devices, 32 KiB of one."""
    engines = {size: start(size, kv_cache_memory_bytes=2**20)[0] for size in (1, 8)}
    assert engines[1].limits.num_blocks == 32
    assert engines[8].limits.num_blocks == 8 * 32
    for size, engine in engines.items():
        kv = engine.executor.kv_blocks
        assert sum(array.addressable_shards[0].data.nbytes for array in kv) == 2**20
        assert applied(engine)["tensor_parallel_size"] == size


def test_it_says_so_and_the_host_s_pool_holds_whole_blocks():
    engine, lines = start(4, swap_space_gib=2**-10)
    assert lines[0] == "kernel: xla on 4 devices of cpu"
    assert "16 blocks of 16 = 256 tokens, 0 MiB on each of 4 devices" in lines[1]
    assert engine.limits.num_host_blocks == 2**20 // (32 * 1024)


def test_what_is_left_is_that_of_the_fullest_device(monkeypatch):
    def device(limit, used):
        stats = {"bytes_limit": limit, "bytes_in_use": used}
        return SimpleNamespace(platform="tpu", memory_stats=lambda: stats)

    assert memory.free_bytes([device(100, 20), device(100, 50), device(90, 0)]) == 50
    monkeypatch.setattr(memory, "free_host_bytes", lambda: 1000)
    assert memory.free_bytes(jax.devices()[:4]) == 250


SILENT = SimpleNamespace(platform="gpu", device_kind="some card", memory_stats=lambda: None)


def test_a_device_that_does_not_say_what_is_left_is_not_sized_by_the_host(monkeypatch):
    message = "gpu some card has no memory statistics.*limits.kv_cache_memory_bytes"
    with pytest.raises(NotImplementedError, match=message):
        memory.free_bytes([SILENT])
    monkeypatch.setattr(
        memory, "free_bytes", lambda devices: memory._free_bytes(SILENT, num_devices=1)
    )
    engine, _ = start(1, kv_cache_memory_bytes=2**20)
    assert engine.limits.num_blocks == 32
    with pytest.raises(NotImplementedError, match=message):
        start(1, kv_cache_memory_bytes=None)


@pytest.mark.parametrize("size", SIZES)
def test_parameters_are_split_evenly_but_for_what_follows_a_sum(size):
    parameters = jax.tree.leaves(group(size)._parameters)
    own = sum(array.addressable_shards[0].data.size for array in parameters)
    shapes = parameter_shapes(model().config)
    everywhere = [name for name in shapes if name.endswith(("norm", "o_bias", "down_bias"))]
    assert len(everywhere) == 4 * NUM_LAYERS + 1
    num_everywhere = sum(np.prod(shapes[name]) for name in everywhere) + 2 * 96 * 8  # cos and sin
    num_split = sum(np.prod(shape) for name, shape in shapes.items() if name not in everywhere)
    assert own == num_everywhere + num_split // size


# What is refused.


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_kv_heads": 2}, r"tensor_parallel_size=4 must divide num_kv_heads=2: .*\[1, 2\]"),
        ({"num_heads": 6, "num_kv_heads": 6}, "num_kv_heads=6"),
        ({"mlp_size": 126}, "mlp_size=126"),
        ({"vocab_size": 510}, "vocab_size=510"),
    ],
)
def test_what_does_not_divide_is_refused(changed, message):
    config = replace(model().config, **changed)
    with pytest.raises(ValueError, match=message):
        check_group(config, 4)
    other = replace(model(), config=config)
    with pytest.raises(ValueError, match=message):
        make_real(other, tensor_parallel_size=4)


@pytest.mark.parametrize("size", [0, -1, True, 2.0, "2"])
def test_a_size_that_is_no_count_is_refused(size):
    with pytest.raises(ValueError, match="tensor_parallel_size must be an integer"):
        check_group(model().config, size)
    with pytest.raises(ValueError, match="tensor_parallel_size must be an integer"):
        EngineSettings(tensor_parallel_size=size)


def test_more_devices_than_there_are_are_refused():
    config = replace(model().config, num_heads=16, num_kv_heads=16)
    wide = replace(model(), config=config, parameters=random_parameters(config))
    message = r"tensor_parallel_size=16 needs as many devices, and there are 8 .*DEVICES=16"
    with pytest.raises(ValueError, match=message):
        make_real(wide, tensor_parallel_size=16)

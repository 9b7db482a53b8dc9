"""Operations and bytes of steps of a small model, worked by hand."""

import pytest
from cost_builders import (
    CROSSING,
    HEAD_WEIGHTS,
    KV_BYTES_PER_TOKEN,
    LAYER_WEIGHTS,
    small_model,
)

from paxserve.step_shape import decodes, prompt
from paxserve.step_work import Work, WorkCounter


def counter(**changed):
    return WorkCounter.of(small_model(), **changed)


def test_three_decodes():
    work = counter().of_step(decodes(3, 30))
    assert work.linear == Work(2 * 2 * LAYER_WEIGHTS * 3, 2 * 2 * (LAYER_WEIGHTS + 3 * CROSSING))
    assert work.head == Work(2 * HEAD_WEIGHTS * 3, 2 * (HEAD_WEIGHTS + 3 * (8 + 2 * 32)))
    # Four operations per channel of 4 heads of 4, per layer; queries in, outputs out.
    assert work.decodes == Work(4 * 2 * 16 * 30, KV_BYTES_PER_TOKEN * 30 + 2 * 2 * 2 * 16 * 3)
    assert work.chunks == Work(0, 0)
    assert (work.link_bytes, work.num_sums) == (0, 0)
    parts = (work.linear, work.head, work.decodes, work.chunks)
    assert (work.flop, work.num_bytes) == tuple(map(sum, zip(*parts, strict=True)))


def test_a_prompt_reads_its_keys_once_and_multiplies_every_pair():
    work = counter().of_step(prompt(5))
    assert work.chunks == Work(4 * 2 * 16 * 15, KV_BYTES_PER_TOKEN * 5 + 2 * 2 * 2 * 16 * 5)
    assert work.decodes == Work(0, 0)
    assert work.head.flop == 2 * HEAD_WEIGHTS  # one row of logits, however long the prompt


def test_a_chunk_that_samples_nothing_makes_no_logits():
    assert counter().of_step(prompt(5)._replace(num_samples=0)).head == Work(0, 0)


def test_whole_tiles_are_computed_and_only_tokens_are_moved():
    at_256, at_257 = [counter(tile_tokens=128).of_step(prompt(n)) for n in (256, 257)]
    assert at_257.linear.flop / at_256.linear.flop == 384 / 256
    assert at_257.linear.num_bytes - at_256.linear.num_bytes == 2 * 2 * CROSSING
    without = [counter().of_step(prompt(n)) for n in (256, 257)]
    assert without[1].linear.flop / without[0].linear.flop == 257 / 256


def test_padding_is_computed_too():
    padded = decodes(3, 30)._replace(padded_tokens=8)
    assert counter().of_step(padded).linear == counter().of_step(decodes(8, 30)).linear


def test_a_device_of_two_has_half_of_everything_and_exchanges_the_sums():
    half, whole = counter(num_devices=2).of_step(decodes(3, 30)), counter().of_step(decodes(3, 30))
    assert half.linear.flop == whole.linear.flop / 2
    assert half.decodes.flop == whole.decodes.flop / 2
    assert half.head.flop == whole.head.flop / 2
    assert half.decodes.num_bytes == whole.decodes.num_bytes / 2
    # Two sums per layer of 3 tokens of 8 channels: of each, 2 (n - 1) / n leave every device.
    sums = 2 * 2 * (3 * 8 * 2)
    assert half.link_bytes == 2 * sums * 1 / 2
    assert half.num_sums == 2 * 2


def test_bytes_over_links_for_more_devices():
    model = small_model(num_kv_heads=4)
    work = WorkCounter.of(model, num_devices=4).of_step(decodes(3, 30))
    assert work.link_bytes == 2 * (2 * 2 * 3 * 8 * 2) * 3 / 4
    assert work.num_sums == 2 * 2  # two a layer, of however many devices


def test_an_8_bit_cache_has_scales_beside_it():
    assert counter(kv_cache_dtype="int8").kv_bytes_per_token == 2 * 2 * 2 * (4 * 1 + 4)


def test_devices_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="tensor_parallel_size=4 does not divide num_kv_heads=2"):
        counter(num_devices=4)

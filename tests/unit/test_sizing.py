"""The pool's size, worked by hand."""

import pytest

from paxserve.sizing import check_host_pool, num_host_blocks, pool_size


def size(**changed):
    given = {
        "platform": "gpu",
        "free_bytes": 10_000,
        "weight_bytes": 3_000,
        "step_bytes": 1_000,
        "bytes_per_block": 100,
        "block_size": 4,
        "max_num_seqs": 100,
        "max_model_len": 16,
        "memory_utilization": 0.5,
        "kv_cache_memory_bytes": None,
    }
    return pool_size(**(given | changed))


def test_kv_takes_its_share_of_what_weights_and_a_step_leave():
    assert size().num_blocks == 30  # half of 10,000 - 3,000 - 1,000
    whole = size(memory_utilization=1.0)
    assert whole.num_bytes + 3_000 + 1_000 <= 10_000 < whole.num_bytes + 4_100


def test_never_more_than_can_be_used_and_on_a_cpu_2_gib():
    assert size(max_num_seqs=2).num_blocks == 1 + 2 * 4
    large = size(platform="cpu", free_bytes=2**40, bytes_per_block=2**20, max_num_seqs=10**6)
    assert large.num_blocks == 2048


def test_an_absolute_size_is_taken_as_it_is():
    assert size(kv_cache_memory_bytes=1_250, max_num_seqs=1).num_blocks == 12


def test_what_does_not_fit_is_named():
    with pytest.raises(ValueError, match="KV budget of 150 bytes"):
        size(kv_cache_memory_bytes=150)
    with pytest.raises(ValueError, match="memory_utilization must be in"):
        size(memory_utilization=1.5)


def test_the_line_that_an_engine_says():
    assert "29 blocks of 4 = 116 tokens" in str(size())
    assert "7 requests of 16 tokens fit" in str(size())


def test_swap_space_holds_whole_blocks():
    assert num_host_blocks(1, bytes_per_block=2**20) == 1024
    assert num_host_blocks(0.5, bytes_per_block=2**29 - 1) == 1
    assert num_host_blocks(0.5, bytes_per_block=2**28 + 1) == 1
    assert num_host_blocks(0, bytes_per_block=2**20) == 0


@pytest.mark.parametrize("space", [-1, -0.5, float("nan"), float("inf"), True, "4", None])
def test_swap_space_that_is_no_amount_is_refused(space):
    with pytest.raises(ValueError, match=r"swap_space_gib must be a number >= 0, got "):
        num_host_blocks(space, bytes_per_block=1024)


def test_swap_space_below_a_block_is_refused():
    with pytest.raises(ValueError, match=r"swap_space_gib=0\.25 does not hold one block of 26843"):
        num_host_blocks(0.25, bytes_per_block=2**28 + 1)


def test_the_host_pool_and_what_is_taken_beside_it_fit_the_host():
    gib = 2**30
    check_host_pool(6 * gib, available_bytes=8 * gib, other_bytes=2 * gib)
    check_host_pool(0, available_bytes=0, other_bytes=2 * gib)  # no swapping, nothing to hold
    message = r"pool of 6.00 GiB does not fit: .* 7.50 GiB available, .* takes 2.00 GiB: lower swap"
    with pytest.raises(ValueError, match=message):
        check_host_pool(6 * gib, available_bytes=15 * gib // 2, other_bytes=2 * gib)

import pytest
from builders import make_intake, make_limits, make_policies, make_request

from paxserve.batching.static import Static
from paxserve.batching.textbook import Textbook
from paxserve.gate.watermark import Watermark
from paxserve.placement.buddy import Buddy
from paxserve.reservation.max import Max


@pytest.mark.parametrize(
    ("name", "low"),
    [
        ("max_num_seqs", 1),
        ("max_num_batched_tokens", 1),
        ("max_model_len", 2),
        ("block_size", 1),
        ("num_blocks", 2),
    ],
)
def test_each_size_has_a_least_value(name, low):
    small = {"max_num_seqs": 1}
    assert getattr(make_limits(**(small | {name: low})), name) == low
    with pytest.raises(ValueError, match=f"{name} must be at least {low}, got {low - 1}"):
        make_limits(**(small | {name: low - 1}))


def test_the_budget_gives_each_row_a_token():
    assert make_limits(max_num_seqs=8, max_num_batched_tokens=8).max_num_batched_tokens == 8
    with pytest.raises(ValueError, match=r"max_num_batched_tokens=7 .* max_num_seqs=8"):
        make_limits(max_num_seqs=8, max_num_batched_tokens=7)


@pytest.mark.parametrize(
    ("max_model_len", "block_size", "width"), [(16, 4, 4), (17, 4, 5), (15, 4, 4), (5, 8, 1)]
)
def test_a_table_is_wide_enough_for_the_longest_request(max_model_len, block_size, width):
    limits = make_limits(max_model_len=max_model_len, block_size=block_size)
    assert limits.blocks_per_row == width


def test_the_null_block_holds_nothing():
    limits = make_limits(num_blocks=9, block_size=4)
    assert (limits.num_usable_blocks, limits.num_usable_slots) == (8, 32)


@pytest.mark.parametrize("batching", [Static(), Textbook()])
def test_whole_prompts_need_a_budget_of_the_longest_request(batching):
    policies = make_policies(batching=batching)
    policies.check(make_limits(max_model_len=32, max_num_batched_tokens=32))
    name = type(batching).__name__
    with pytest.raises(ValueError, match=rf"{name} .*max_num_batched_tokens=31.*max_model_len=32"):
        policies.check(make_limits(max_model_len=32, max_num_batched_tokens=31))
    make_policies().check(make_limits(max_model_len=32, max_num_batched_tokens=31))


def test_a_reservation_that_never_grows_must_fit_the_pool():
    policies = make_policies(reservation=Max())
    policies.check(make_limits(max_model_len=32, block_size=4, num_blocks=9))
    with pytest.raises(ValueError, match=r"Max holds max_model_len=32 .*28 slots \(7 blocks of 4"):
        policies.check(make_limits(max_model_len=32, block_size=4, num_blocks=8))
    make_policies().check(make_limits(max_model_len=32, block_size=4, num_blocks=8))


def test_the_longest_reservation_needs_a_place_in_the_empty_pool():
    """Buddies round 9 blocks up to 16; a pool of 15 is cut into 8, 4, 2 and 1."""
    policies = make_policies(reservation=Max(), placement=Buddy())
    policies.check(make_limits(max_model_len=36, block_size=4, num_blocks=17))
    policies.check(make_limits(max_model_len=32, block_size=4, num_blocks=16))
    with pytest.raises(
        ValueError, match=r"Max may ask for 9 blocks.*Buddy has no place .*pool of 15"
    ):
        policies.check(make_limits(max_model_len=36, block_size=4, num_blocks=16))
    grows = make_policies(placement=Buddy())
    grows.check(make_limits(max_model_len=36, block_size=4, num_blocks=16))


def test_samples_that_share_nothing_must_all_fit_their_reservations():
    """Three of 8 blocks each."""

    def check(num_blocks, **chosen):
        limits = make_limits(max_model_len=32, block_size=4, num_blocks=num_blocks)
        request = make_request(3, intake=make_intake(limits), n=3, temperature=1.0)
        make_policies(**chosen).check_request(request, limits)

    check(25, reservation=Max())
    message = r"3 sequences, for which reservation Max holds 24 blocks; the pool has 23 of 4 tokens"
    with pytest.raises(ValueError, match=message):
        check(24, reservation=Max())
    check(3)  # the prompt is shared


def test_a_policy_that_lacks_what_its_axis_asks_for_is_refused_by_name():
    class Half:
        def num_tokens(self, request, *, num_needed, limits):
            return num_needed

    policies = make_policies(reservation=Half())
    message = r"reservation Half lacks grows, needs_true_lengths, which paxserve/reservation/__init"
    with pytest.raises(ValueError, match=message):
        policies.check(make_limits())
    message = r"gates Half lacks refusal, which paxserve/gate/__init__"
    with pytest.raises(ValueError, match=message):
        make_policies(gates=(Watermark(), Half())).check(make_limits())

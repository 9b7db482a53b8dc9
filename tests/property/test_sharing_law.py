"""Samples, beams, cached prefixes and swaps in tight memory: the tokens are those of plenty."""

from builders import make_engine, make_limits, prompt_ids, submit, tokens_alone
from hypothesis import event, given, settings
from hypothesis import strategies as st
from invariants import check, check_idle

from paxserve.batching.chunked_prefill import ChunkedPrefill
from paxserve.batching.static import Static
from paxserve.batching.textbook import Textbook
from paxserve.eviction.lru import Lru
from paxserve.intake import seed_of_sample
from paxserve.preemption.recompute import Recompute
from paxserve.preemption.swap import Swap
from paxserve.prefix_cache.hash_chain import HashChain
from paxserve.prefix_cache.none import NoCache
from paxserve.prefix_cache.radix import Radix
from paxserve.request import FinishReason

ROOMY = make_limits(num_blocks=400, max_num_seqs=8, max_num_batched_tokens=64, block_size=3)
REQUESTS = st.lists(
    st.tuples(
        st.integers(1, 12),  # prompt tokens
        st.integers(1, 7),  # max_tokens
        st.sampled_from([(1, 0), (1, 0), (2, 0), (3, 0), (0, 2), (0, 3)]),  # n, beam width
        st.integers(0, 3),  # arrives before step
        st.integers(0, 1),  # salt of the prompt
    ),
    min_size=1,
    max_size=6,
)


def ask(engine, request, number):
    length, max_tokens, (n, width), _, salt = request
    params = {"max_tokens": max_tokens, "request_id": f"r{number}"}
    if width:
        params |= {"beam_width": width}
    elif n > 1:
        params |= {"n": n, "temperature": 1.0, "seed": number}
    return submit(engine, prompt_ids(length, salt), **params)


def outputs(request):
    return [tuple(request.output_of(sequence)) for sequence in request.sequences]


def alone(request, number):
    engine = make_engine(ROOMY)
    served = ask(engine, request, number)
    while engine.has_work:
        engine.step()
    return outputs(served)


@given(
    requests=REQUESTS,
    num_blocks=st.integers(6, 24),
    block_size=st.integers(1, 4),
    budget=st.integers(4, 20),
    cache=st.sampled_from(
        [NoCache(), HashChain(), HashChain("after_step"), Radix(), Radix("planning")]
    ),
    preemption=st.sampled_from([Recompute(), Swap()]),
    batching=st.sampled_from([ChunkedPrefill(), Textbook(), Static()]),
    forced=st.sampled_from([0, 0, 1, 2, 3]),
)
@settings(max_examples=150)
def test_tokens_are_those_of_each_request_alone(
    requests, num_blocks, block_size, budget, cache, preemption, batching, forced
):
    limits = make_limits(
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=4,
        max_num_batched_tokens=max(budget, 20 if batching.whole_prompts else 4),
        max_model_len=20,
        num_host_blocks=5,
        preempt_every_steps=forced,
    )
    engine = make_engine(
        limits, prefix_cache=cache, eviction=Lru(), preemption=preemption, batching=batching
    )
    waiting = list(enumerate(requests))
    served = {}
    num_steps = 0
    while waiting or engine.has_work:
        while waiting and (waiting[0][1][3] <= num_steps or not engine.has_work):
            number, request = waiting.pop(0)
            if request[0] <= limits.num_usable_slots:
                served[number] = ask(engine, request, number)
        engine.step()
        check(engine)
        num_steps += 1
        assert num_steps < 1000, "no progress"
    check_idle(engine)
    for number, request in served.items():
        if request.finish_reason is FinishReason.LENGTH:
            assert outputs(request) == alone(requests[number], number)
        else:
            assert request.finish_reason is FinishReason.ERROR
            event("too large")
            continue
        event(f"n={len(request.sequences)}, preempted {min(request.num_preemptions, 2)}")
        event(f"hit {request.num_hit_tokens > 0}")


def test_samples_have_their_own_streams():
    engine = make_engine(ROOMY)
    request = submit(engine, prompt_ids(7), n=3, temperature=1.0, seed=4, max_tokens=5)
    while engine.has_work:
        engine.step()
    assert outputs(request) == [
        tuple(tokens_alone(prompt_ids(7), 5, seed=seed_of_sample(4, i))) for i in range(3)
    ]

"""Sources that wait for ends: users, conversations, and both, served by an engine without a model.

The scripted executor takes a second per step, whatever is in it.
"""

from itertools import pairwise

import pytest
from builders import greedy, make_engine, make_limits
from workload_builders import VOCABULARY, opened, part

from paxserve.serve import serve
from paxserve.workload import Arrival
from paxserve.workload.sources.listed import Listed

FIXED = {"input_tokens": 4, "output_tokens": 3}


def run(source, **limits):
    sizes = {"max_model_len": 64, "num_blocks": 65, "max_num_seqs": 8} | limits
    engine = make_engine(make_limits(**sizes), vocab_size=VOCABULARY.size)
    refused = serve(engine, source, greedy(max_tokens=60))
    return {request.request_id: request for request in engine.requests}, refused


def loop(num_requests, *, arrivals="closed_loop", content="random_ids", lengths=None, **settings):
    per_axis = {axis: {} for axis in ("arrivals", "content")}
    for name, value in settings.items():
        axis, _, key = name.partition("__")
        per_axis[axis][key] = value
    return opened(
        "synthetic",
        num_requests=num_requests,
        arrivals=part("arrivals", arrivals, **per_axis["arrivals"]),
        content=part("content", content, **per_axis["content"]),
        lengths=lengths or part("lengths", "fixed", **FIXED),
    )


def most_in_flight(requests):
    """Counts ends before the arrivals of the same moment."""
    events = [(r.arrival_s, 1) for r in requests] + [(r.finished_s, -1) for r in requests]
    most = now = 0
    for _, change in sorted(events):
        now += change
        most = max(most, now)
    return most


@pytest.mark.parametrize("max_num_seqs", [1, 2, 8])
@pytest.mark.parametrize("num_users", [1, 3, 30])
def test_a_closed_loop_never_has_more_in_flight_than_users(num_users, max_num_seqs):
    lengths = part("lengths", "uniform", min_input_tokens=1, max_input_tokens=20,
                   min_output_tokens=1, max_output_tokens=9)  # fmt: skip
    source = loop(25, lengths=lengths, arrivals__num_users=num_users, arrivals__think_s=0.0)
    requests, refused = run(source, max_num_seqs=max_num_seqs)
    assert (len(requests), refused, source.next_s()) == (25, [], None)
    assert most_in_flight(requests.values()) == min(num_users, 25)
    for user in range(num_users):
        own = [requests[str(number)] for number in range(user, 25, num_users)]
        for before, after in pairwise(own):
            assert after.arrival_s == before.finished_s


def test_users_think_between_requests():
    requests, _ = run(loop(6, arrivals__num_users=2, arrivals__think_s=2.5))
    # Each takes 3 seconds: the prompt's step gives the first of 3 tokens.
    assert [requests[str(i)].arrival_s for i in range(6)] == [0, 0, 5.5, 5.5, 11, 11]
    assert [requests[str(i)].finished_s for i in range(6)] == [3, 3, 8.5, 8.5, 14, 14]


def test_each_turn_extends_the_prompt_and_the_real_answer_before_it():
    source = loop(
        10, content="multi_turn", content__num_turns=4, content__think_s=1.5,
        arrivals="poisson", arrivals__rate=0.3,
    )  # fmt: skip
    requests, refused = run(source)
    assert (len(requests), refused) == (10, [])
    for number in range(10):
        request = requests[str(number)]
        assert request.num_prompt_tokens == 4 + 7 * (number % 4)
        assert len(request.output_token_ids) == 3
        if number % 4:
            before = requests[str(number - 1)]
            said = (*before.prompt_token_ids, *before.output_token_ids)
            assert request.prompt_token_ids[:-4] == said
            assert request.arrival_s == before.finished_s + 1.5
    # Conversations 0, 1, 2 start by themselves, whatever becomes of the others.
    times = part("arrivals", "poisson", rate=0.3)
    alone = [take.arrival_s for take in taken_at_start(loop(10, content="multi_turn",
             content__num_turns=4, arrivals="poisson", arrivals__rate=times.rate))]  # fmt: skip
    assert [requests[str(number)].arrival_s for number in (0, 4, 8)] == alone


def taken_at_start(source):
    taken = []
    while source.next_s() is not None:
        taken.append(source.take())
    return taken


def test_users_hold_one_conversation_after_the_other():
    source = loop(
        12, content="multi_turn", content__num_turns=3, content__think_s=1.0,
        arrivals__num_users=2, arrivals__think_s=10.0,
    )  # fmt: skip
    requests, _ = run(source)
    assert len(requests) == 12
    assert most_in_flight(requests.values()) == 2
    # A turn takes 3 seconds and a second of thought, the third is followed by ten.
    for number in range(12):
        conversation, turn = divmod(number, 3)
        round_s = (3 + 1 + 3 + 1 + 3 + 10) * (conversation // 2)
        assert requests[str(number)].arrival_s == round_s + 4 * turn


def test_a_refused_turn_does_not_stop_a_user():
    """The third turn is too long for the model, and the fourth; the next conversation starts."""
    source = loop(
        8, content="multi_turn", content__num_turns=4, content__think_s=1.0,
        arrivals__num_users=1, arrivals__think_s=0.0,
    )  # fmt: skip
    requests, refused = run(source, max_model_len=16)
    assert sorted(requests) == ["0", "1", "4", "5"]
    assert [arrival.request_id for arrival, _ in refused] == ["2", "3", "6", "7"]
    assert [len(arrival.prompt_token_ids) for arrival, _ in refused] == [18, 22, 18, 22]
    assert requests["4"].arrival_s == requests["5"].arrival_s - 4 == 9.0


def test_what_an_arrival_knows_reaches_the_policies_and_forces_its_length():
    source = opened(
        "synthetic", num_requests=3, num_clients=2, num_priorities=3,
        lengths=part("lengths", "fixed", **FIXED),
    )  # fmt: skip
    engine = make_engine(vocab_size=1000, eos_token_ids=range(1000))
    serve(engine, source, greedy(max_tokens=20, min_tokens=5))
    assert [request.num_output_tokens for request in engine.requests] == [3, 3, 3]
    again = taken_at_start(opened("synthetic", num_requests=3, num_clients=2, num_priorities=3))
    for request, arrival in zip(engine.requests, again, strict=True):
        assert request.origin.num_true_output_tokens == 3
        assert request.origin.client == arrival.origin.client != ""
        assert request.origin.priority == arrival.origin.priority


def test_a_list_is_sorted_by_time_and_those_of_one_time_stay_in_order():
    arrivals = [Arrival(request_id=name, arrival_s=s) for name, s in (("b", 2), ("a", 2), ("c", 1))]
    source = Listed(arrivals)
    assert source.num_requests == 3
    assert source.next_s() == 1
    assert [arrival.request_id for arrival in taken_at_start(source)] == ["c", "b", "a"]

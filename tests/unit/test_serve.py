"""A workload is replayed to its end, whatever single requests are worth."""

from builders import greedy, make_engine, tokens_alone

from paxserve.serve import serve
from paxserve.workload import Arrival
from paxserve.workload.sources.listed import Listed


def test_a_request_out_of_range_is_refused_and_the_others_are_served():
    engine = make_engine()
    ids = (5, 6, 7)
    arrivals = [
        Arrival(request_id="good", prompt_token_ids=ids, max_tokens=2),
        Arrival(request_id="none", prompt_token_ids=ids, max_tokens=0),
        Arrival(request_id="seed", prompt_token_ids=ids, seed=-1),
        Arrival(request_id="chat", messages=({"role": "user", "content": "x"},)),
        Arrival(request_id="late", prompt_token_ids=ids, max_tokens=3, arrival_s=50.0),
    ]
    ended = []
    refused = serve(engine, Listed(arrivals), greedy(max_tokens=4), on_ended=ended.append)
    assert [arrival.request_id for arrival, _ in refused] == ["none", "seed", "chat"]
    assert sum(ended) == 5
    outputs = {r.request_id: list(r.output_token_ids) for r in engine.requests}
    assert outputs == {"good": tokens_alone(ids, 2), "late": tokens_alone(ids, 3)}
    assert engine.requests[1].sequence.token_times_s[0] == 51.0

"""Virtual token counter: the client that has been served least goes first.

Source: Sheng et al., OSDI'24, Algorithm 2 (counters, and the lift of a client that comes back) and
section 4.3 (weights of clients). Differs: preemption, which the paper does not have, puts a request
back without a refund, and when it resumes its input is not charged again; the lift applies to its
client as to any other that comes to wait. Work-conserving: it orders, and never holds back.

Between two clients that both have requests waiting, service (weighted tokens) in any stretch of
time differs by at most 2 max(w_input * longest input, w_output * tokens that a batch can hold)
(Theorem 4.4).
"""

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field

from paxserve.admission import Key, Seen
from paxserve.events import Kind
from paxserve.numbers import real
from paxserve.request import Request

MOST_WEIGHT = 1e6


@dataclass(slots=True)
class _Service:
    """The state. `counters`: weighted tokens by client. `num_waiting`: of the backlogged clients.
    `waits`: by id of a live request. `charged`: ids of those whose input was charged.
    `last_left`: the client that last had nobody waiting any more.
    """

    counters: dict[str, float] = field(default_factory=dict)
    num_waiting: dict[str, int] = field(default_factory=dict)
    waits: dict[str, bool] = field(default_factory=dict)
    charged: set[str] = field(default_factory=set)
    last_left: str | None = None


@dataclass(frozen=True, slots=True)
class Vtc:
    """Args:

    w_input, w_output: what a token of a prompt and of an output counts.
    client_weights: shares by client; whose weight is 2 gets twice the service. Others have 1.
    """

    w_input: float = 1.0
    w_output: float = 2.0
    client_weights: Mapping[str, float] = field(default_factory=dict)
    displaces_running = False

    def __post_init__(self) -> None:
        """Check the fields."""
        real("w_input", self.w_input, high=MOST_WEIGHT)
        real("w_output", self.w_output, high=MOST_WEIGHT)
        if not isinstance(self.client_weights, Mapping):
            raise ValueError(f"client_weights must map clients to weights: {self.client_weights!r}")
        for client, weight in self.client_weights.items():
            real(f"client_weights[{client!r}]", weight, high=MOST_WEIGHT, above=True)

    def init(self) -> _Service:
        """See `Learning.init`."""
        return _Service()

    def observe(self, state: _Service, seen: Seen) -> _Service:
        """See `Learning.observe`."""
        request = seen.request
        if request is None:
            return state
        name, client = request.request_id, request.origin.client
        match seen.kind:
            case Kind.ARRIVED | Kind.PREEMPTED:
                self._lift(state, client)
                state.num_waiting[client] = state.num_waiting.get(client, 0) + 1
                state.waits[name] = True
            case Kind.ENTERED:
                self._leave(state, name, client)
                state.waits[name] = False
                if name not in state.charged:
                    state.charged.add(name)
                    self._charge(state, client, self.w_input * request.num_prompt_tokens)
            case Kind.SERVED:
                self._charge(state, client, self.w_output * seen.num_outputs)
            case Kind.FINISHED:
                self._leave(state, name, client)
                state.waits.pop(name, None)
                state.charged.discard(name)
        return state

    def place(self, state: _Service, request: Request) -> tuple[Hashable, Key]:
        """See `Learning.place`: by arrival within a client."""
        return request.origin.client, (request.arrival_s,)

    def key(self, state: _Service, request: Request) -> Key:
        """See `Admission.key`."""
        return (state.counters.get(request.origin.client, 0.0), request.arrival_s)

    def next_timer_s(self, state: _Service, heads: Iterable[Request]) -> float | None:
        """See `Learning.next_timer_s`."""
        return None

    def _charge(self, state: _Service, client: str, tokens: float) -> None:
        weighted = tokens / self.client_weights.get(client, 1.0)
        state.counters[client] = state.counters.get(client, 0.0) + weighted

    def _lift(self, state: _Service, client: str) -> None:
        """Who had nobody waiting has saved nothing up: it starts level with the least served of
        those who wait, or with the last that waited. One look at each backlogged client.
        """
        if client in state.num_waiting:
            return
        counters = state.counters
        if state.num_waiting:
            floor = min([counters.get(other, 0.0) for other in state.num_waiting])
        else:
            floor = counters.get(state.last_left, 0.0) if state.last_left is not None else 0.0
        counters[client] = max(counters.get(client, 0.0), floor)

    def _leave(self, state: _Service, name: str, client: str) -> None:
        if not state.waits.get(name):
            return
        state.num_waiting[client] -= 1
        if not state.num_waiting[client]:
            del state.num_waiting[client]
            state.last_left = client

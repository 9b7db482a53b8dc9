"""A source of conversations: chains of requests, each sent some time after the one before ended.

Owns: who sends when. In: what is known of each request, when conversations start, prompts by
number. Out: arrivals with forced output lengths. Must not know: how times, lengths and prompts
were drawn or read.

A lone request is a conversation of one turn. With fewer starts than conversations the loop is
closed: there is one user per start, and user u holds conversations u, u + num_users, ... one after
the other. Which request is whose so depends on the seed only, never on who was served first.
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paxserve.request import Origin
from paxserve.workload import Arrival

type PromptContent = str | tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownRequest:
    """What is known of a request before it is sent. `num_prompt_tokens` counts what the user adds
    in this turn, 0 where only text is known. `arrival_s` is None where no time was recorded.
    """

    num_output_tokens: int
    num_prompt_tokens: int = 0
    arrival_s: float | None = None
    client: str = ""
    priority: int = 0


class Conversations:
    """Requests `num_turns * c` up to `num_turns * (c + 1)` are conversation c.

    Args:
        requests: all of them.
        starts: when the first conversations start.
        prompt: what the user says in request number i; token ids if `num_turns` > 1.
        num_turns: requests per conversation; the last one may have fewer.
        turn_think_s: from the end of a request to the next turn of its conversation.
        user_think_s: from the end of a conversation to the next one of its user.

    Invariant: taken + sent and not taken + those behind a live request == num_requests.
    """

    def __init__(
        self,
        requests: Sequence[KnownRequest],
        *,
        starts: Sequence[float],
        prompt: Callable[[int], PromptContent],
        num_turns: int = 1,
        turn_think_s: float = 0.0,
        user_think_s: float = 0.0,
    ) -> None:
        self.num_requests = len(requests)
        self._requests = requests
        self._num_users = len(starts)
        self._prompt = prompt
        self._num_turns = num_turns
        self._turn_think_s = turn_think_s
        self._user_think_s = user_think_s
        self._said: dict[str, PromptContent] = {}  # in live requests that another turn follows
        self._coming: list[tuple[float, int, tuple[int, ...]]] = [
            (time_s, conversation * num_turns, ()) for conversation, time_s in enumerate(starts)
        ]
        heapq.heapify(self._coming)

    def next_s(self) -> float | None:
        """See `Source.next_s`."""
        return self._coming[0][0] if self._coming else None

    def take(self) -> Arrival:
        """See `Source.take`."""
        time_s, number, said_before = heapq.heappop(self._coming)
        known, content = self._requests[number], self._prompt(number)
        if not isinstance(content, str):
            content = said_before + content
        request_id = str(number)
        if self._goes_on(number):
            self._said[request_id] = content
        return Arrival(
            request_id=request_id,
            arrival_s=time_s,
            prompt=content if isinstance(content, str) else None,
            prompt_token_ids=None if isinstance(content, str) else content,
            max_tokens=known.num_output_tokens,
            ignore_eos=True,
            origin=Origin(
                client=known.client,
                priority=known.priority,
                num_true_output_tokens=known.num_output_tokens,
            ),
        )

    def on_end(self, request_id: str, time_s: float, output_token_ids: Sequence[int]) -> None:
        """See `Source.on_end`."""
        number = int(request_id)
        if self._goes_on(number):
            content = self._said.pop(request_id)
            assert not isinstance(content, str), "turns are told apart by token ids"
            self._send(time_s + self._turn_think_s, number + 1, content + tuple(output_token_ids))
            return
        following = (number // self._num_turns + self._num_users) * self._num_turns
        if following < self.num_requests:
            self._send(time_s + self._user_think_s, following, ())

    def _goes_on(self, number: int) -> bool:
        """Whether another turn follows a request."""
        return (number + 1) % self._num_turns > 0 and number + 1 < self.num_requests

    def _send(self, time_s: float, number: int, said_before: tuple[int, ...]) -> None:
        heapq.heappush(self._coming, (time_s, number, said_before))

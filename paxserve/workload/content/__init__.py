"""What prompts say: the protocol of the workload/content axis."""

from typing import Protocol

from paxserve.workload import Vocabulary


class Content(Protocol):
    """Writes prompts. Pure: a prompt depends on the arguments and settings only, so it can be
    written when its request arrives, in whatever order.
    """

    @property
    def num_turns(self) -> int:
        """Requests per conversation; each turn's prompt begins with all that was said before."""

    @property
    def think_s(self) -> float:
        """From the end of a request to the next turn of its conversation."""

    def token_ids(
        self, number: int, num_tokens: int, *, seed: int, vocabulary: Vocabulary
    ) -> tuple[int, ...]:
        """What the user says in request `number`: `num_tokens` ids, after any shared prefix.

        Raises:
            ValueError: it needs a tokenizer, and there is none.
        """

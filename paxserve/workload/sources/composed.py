"""The three small axes put together: requests that are known, arrivals, and what they say.

Owns: which stream of the seed each one draws from. In: `KnownRequest`s, the choices made. Out: a
source. Must not know: any choice by name.
"""

from collections.abc import Callable, Sequence

from paxserve.draws import Stream, stream
from paxserve.workload import Vocabulary
from paxserve.workload.arrivals import Arrivals
from paxserve.workload.content import Content
from paxserve.workload.sources.conversations import Conversations, KnownRequest, PromptContent


def with_content(
    requests: Sequence[KnownRequest],
    arrivals: Arrivals,
    content: Content,
    *,
    seed: int,
    vocabulary: Vocabulary,
) -> Conversations:
    """Prompts are written by a choice of content, of the lengths that are known.

    Raises:
        ValueError: times that do not exist, or a tokenizer that is needed and does not.
    """

    def prompt(number: int) -> tuple[int, ...]:
        return content.token_ids(
            number, requests[number].num_prompt_tokens, seed=seed, vocabulary=vocabulary
        )

    prompt(0)  # what it lacks is said now, not when the first request arrives
    return with_prompts(
        requests,
        arrivals,
        prompt,
        seed=seed,
        num_turns=content.num_turns,
        turn_think_s=content.think_s,
    )


def with_prompts(
    requests: Sequence[KnownRequest],
    arrivals: Arrivals,
    prompt: Callable[[int], PromptContent],
    *,
    seed: int,
    num_turns: int = 1,
    turn_think_s: float = 0.0,
) -> Conversations:
    """Prompts are known, or made, by the request's number.

    Raises:
        ValueError: times that do not exist.
    """
    first_turns = requests[::num_turns]
    recorded_s = [known.arrival_s for known in first_turns if known.arrival_s is not None] or None
    return Conversations(
        requests,
        starts=arrivals.starts(len(first_turns), stream(seed, Stream.ARRIVALS), recorded_s),
        prompt=prompt,
        num_turns=num_turns,
        turn_think_s=turn_think_s,
        user_think_s=arrivals.think_s,
    )

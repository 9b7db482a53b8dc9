"""The written prompts of `workload=demo`, cut or joined to the lengths that are wanted.

For runs on a real model whose outputs should be language. In: the texts of `demo.jsonl`.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import resources
from itertools import cycle, islice

from paxserve.workload import Vocabulary


@dataclass(frozen=True, slots=True)
class WrittenPrompts:
    """Request number i begins with text i; when that is too short, the next ones follow."""

    num_turns = 1
    think_s = 0.0

    def token_ids(
        self, number: int, num_tokens: int, *, seed: int, vocabulary: Vocabulary
    ) -> tuple[int, ...]:
        """See `Content.token_ids`."""
        if vocabulary.encode is None:
            raise ValueError(
                "content=written_prompts needs a model with a tokenizer: choose random_ids"
            )
        said: list[str] = []
        for text in _texts_from(number):
            said.append(text)
            # Joined before they are encoded: the end of a text is no end of a prompt.
            token_ids = vocabulary.encode("\n\n".join(said))
            if len(token_ids) >= num_tokens:
                return tuple(token_ids[:num_tokens])
        raise AssertionError("texts never end")


def _texts_from(number: int) -> Iterator[str]:
    texts = _texts()
    return islice(cycle(texts), number % len(texts), None)


@cache
def _texts() -> tuple[str, ...]:
    lines = (resources.files("paxserve.workload") / "demo.jsonl").read_text(encoding="utf-8")
    return tuple(json.loads(line)["messages"][0]["content"] for line in lines.splitlines())

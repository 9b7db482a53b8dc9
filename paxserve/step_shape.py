"""What a step is like, in numbers: all that its cost may depend on.

Owns: `StepShape`, and how it is counted from a plan. In: a `StepPlan`. Out: counts. Must not know:
models, hardware, time.
"""

from typing import NamedTuple

from paxserve.step import StepPlan


class StepShape(NamedTuple):
    """Counts of one step. A decode is a row of one token, a chunk one of more.

    num_tokens, num_rows: computed; padded_*: of the shape that runs, equal where nothing pads.
    num_samples: rows whose logits are wanted. decode_context: tokens that decodes read, each its
    own included. num_chunks, chunk_tokens; chunk_context: tokens that chunks read, each to its own
    end; chunk_pairs: of a query and a key that it sees. num_copied, num_swapped: blocks.
    """

    num_tokens: int
    num_rows: int
    padded_tokens: int
    padded_rows: int
    num_samples: int
    num_decodes: int
    decode_context: int
    num_chunks: int = 0
    chunk_tokens: int = 0
    chunk_context: int = 0
    chunk_pairs: int = 0
    num_copied: int = 0
    num_swapped: int = 0


def decodes(num_rows: int, context: int) -> StepShape:
    """A step of `num_rows` decodes that read `context` tokens together."""
    return StepShape(num_rows, num_rows, num_rows, num_rows, num_rows, num_rows, context)


def chunk(first: int, num_tokens: int, *, samples: bool) -> StepShape:
    """A step of a piece of a prompt, behind `first` tokens; a piece of one token is a decode."""
    if num_tokens == 1:
        return decodes(1, first + 1)._replace(num_samples=int(samples))
    return StepShape(
        num_tokens=num_tokens,
        num_rows=1,
        padded_tokens=num_tokens,
        padded_rows=1,
        num_samples=int(samples),
        num_decodes=0,
        decode_context=0,
        num_chunks=1,
        chunk_tokens=num_tokens,
        chunk_context=first + num_tokens,
        chunk_pairs=first * num_tokens + num_tokens * (num_tokens + 1) // 2,
    )


def prompt(num_tokens: int) -> StepShape:
    """A step of one whole prompt."""
    return chunk(0, num_tokens, samples=True)


def together(*shapes: StepShape) -> StepShape:
    """One step of all these rows."""
    return StepShape(*[sum(counts) for counts in zip(*shapes, strict=True)])


def shape_of(
    plan: StepPlan, *, padded_tokens: int | None = None, padded_rows: int | None = None
) -> StepShape:
    """The shape of a plan; without the padded sizes nothing pads."""
    rows = plan.columns
    num_rows, num_tokens = len(rows), sum(rows.num_tokens)
    context = sum(rows.first_positions) + num_tokens  # to the end of what each row computes
    chunks: list[tuple[int, int]] = []
    if num_tokens > num_rows:
        columns = zip(rows.first_positions, rows.num_tokens, strict=True)
        chunks = [chunk for chunk in columns if chunk[1] > 1]
    chunk_context = sum([first + num for first, num in chunks])
    return StepShape(
        num_tokens=num_tokens,
        num_rows=num_rows,
        padded_tokens=num_tokens if padded_tokens is None else padded_tokens,
        padded_rows=num_rows if padded_rows is None else padded_rows,
        num_samples=num_rows - rows.num_samples.count(0),
        num_decodes=num_rows - len(chunks),
        decode_context=context - chunk_context,
        num_chunks=len(chunks),
        chunk_tokens=sum([num for _, num in chunks]),
        chunk_context=chunk_context,
        chunk_pairs=sum([first * num + num * (num + 1) // 2 for first, num in chunks]),
        num_copied=len(plan.copies),
        num_swapped=len(plan.swap_in) + len(plan.swap_out),
    )

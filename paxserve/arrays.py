"""The padded arrays of one step, as numpy makes them and as jax receives them.

Owns: the two records and the meaning of their padding. Field types are left open between numpy
(host) and jax (device) arrays of the same dtype. Must not know: how they are filled or used.

Shapes: T tokens, R rows, M blocks per row, E suppressed ids; T and R come from the bucket ladder.
"""

from typing import Any, NamedTuple


class SamplingArrays(NamedTuple):
    """How each row of the padded batch samples; ranges as in `SamplingParams`.

    temperature f32[R] (0 is greedy), top_k i32[R] (0 is off), top_p f32[R], min_p f32[R],
    seed u32[R], output_position i32[R] (0 for the first output token), suppressed_ids i32[R, E]
    (-1 is none). Padding rows are greedy.
    """

    temperature: Any
    top_k: Any
    top_p: Any
    min_p: Any
    seed: Any
    output_position: Any
    suppressed_ids: Any


class StepArrays(NamedTuple):
    """One step's input; all i32.

    token_ids [T]: -1 takes the token last sampled in its row. Padding is 0.
    token_rows [T]: which of the R rows a token belongs to. Padding is 0.
    positions [T]: absolute position in the sequence. Padding is 0.
    slots [T]: where the token's KV goes. Padding, and the tokens of unwritten rows, are
        num_blocks * block_size: dropped.
    block_table [R, M]: padding is the null block 0.
    context_lens [R]: valid tokens after this step's writes. Padding is 0.
    cu_q_lens [R + 1]: first token of each row; padding repeats the total.
    num_rows []: real rows.
    row_ids [R]: the row in the engine's batch. Padding is max_num_seqs: dropped.
    sampled_row_ids [R]: the same for rows that sample in this step, else max_num_seqs.
    last_tokens [R]: index of each row's last token in T. Padding is 0.
    sampling: None when every row is greedy.
    """

    token_ids: Any
    token_rows: Any
    positions: Any
    slots: Any
    block_table: Any
    context_lens: Any
    cu_q_lens: Any
    num_rows: Any
    row_ids: Any
    sampled_row_ids: Any
    last_tokens: Any
    sampling: SamplingArrays | None

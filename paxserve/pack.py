"""From a `StepPlan` to padded arrays: numpy only.

Owns: the host copy of every row's block table and sampling settings, kept from the plans seen so
far. In: plans, in order. Out: fresh `StepArrays` per step (never mutated later: jax may still be
reading them) and the bucket they are padded to. Must not know: jax, policies, requests.
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

import numpy as np

from paxserve.arrays import SamplingArrays, StepArrays
from paxserve.device.buckets import Bucket, Buckets, Exact
from paxserve.limits import Limits
from paxserve.sampling_params import MAX_SUPPRESSED_IDS, SamplingParams
from paxserve.step import RowEntry, RowSampling, StepPlan


class Variant(StrEnum):
    """What the step does with the logits: one executable each, per bucket."""

    GREEDY = "greedy"
    SAMPLED = "sampled"
    LOGPROBS = "logprobs"


VARIANTS = tuple(Variant)


def variant_of(sampling: RowSampling | SamplingParams) -> Variant:
    """The variant that one row asks for; a step runs the last of its rows' variants."""
    if isinstance(sampling, SamplingParams) and sampling.beam_width:
        return Variant.LOGPROBS
    num_logprobs = sampling.num_logprobs if isinstance(sampling, RowSampling) else sampling.logprobs
    if num_logprobs is not None and num_logprobs >= 0:
        return Variant.LOGPROBS
    sampled = sampling.temperature > 0 or sampling.min_tokens > 0
    return Variant.SAMPLED if sampled else Variant.GREEDY


class PackedStep(NamedTuple):
    """Arrays for the device, and which executable they are for."""

    arrays: StepArrays
    bucket: Bucket
    variant: Variant


class _Tokens(NamedTuple):
    """The T tokens of R rows, before padding: ids, rows and positions [T]; starts [R + 1], the
    first token of each row and the total.
    """

    ids: np.ndarray
    rows: np.ndarray
    positions: np.ndarray
    starts: np.ndarray


class Packer:
    """Invariant: `_tables[row, :n]` is the block table of the sequence in that row."""

    def __init__(self, *, limits: Limits, buckets: Buckets | Exact, num_slots: int) -> None:
        num_rows = limits.max_num_seqs
        self._buckets = buckets
        self._block_size = limits.block_size
        self._num_slots = num_slots
        self._no_row = num_rows
        self._count = np.arange(max(num_rows, limits.max_num_batched_tokens) + 1, dtype=np.int32)
        self._tables = np.zeros((num_rows, limits.blocks_per_row), np.int32)
        self._num_prompt_tokens = np.zeros(num_rows, np.int32)
        self._variants = np.zeros(num_rows, np.int8)
        self._min_tokens = np.zeros(num_rows, np.int32)
        self._temperature = np.zeros(num_rows, np.float32)
        self._top_k = np.zeros(num_rows, np.int32)
        self._top_p = np.ones(num_rows, np.float32)
        self._min_p = np.zeros(num_rows, np.float32)
        self._seed = np.zeros(num_rows, np.uint32)
        self._suppressed_ids = np.full((num_rows, MAX_SUPPRESSED_IDS), -1, np.int32)

    def pack(self, plan: StepPlan) -> PackedStep:
        """Arrays of one step.

        Raises:
            ValueError: no bucket holds the step.
        """
        for entry in plan.entries:
            self._enter(entry)
        for write in plan.table_writes:
            columns = self._tables[write.row, write.start :]
            # A placement may round a table up beyond max_model_len; no context reaches that far.
            block_ids = write.block_ids[: len(columns)]
            columns[: len(block_ids)] = block_ids
        step = plan.columns
        rows, num_rows = _int32(step.places), len(step)
        bucket = self._buckets.choose(num_tokens=sum(step.num_tokens), num_rows=num_rows)
        variant = VARIANTS[self._variants[rows].max()]
        ids = np.full(num_rows, -1, np.int32) if step.are_decodes else _token_ids(step.tokens)
        tokens = self._tokens(step.firsts, step.num_tokens, ids)
        sampled = rows if all(step.num_samples) else self._sampled(rows, step.num_samples)
        arrays = self._pad(rows, sampled, tokens, plan.unwritten, bucket, variant)
        return PackedStep(arrays, bucket, variant)

    def padding(self, bucket: Bucket, variant: Variant) -> PackedStep:
        """A step of this shape without a single real token: for warm-up; nothing is written."""
        nothing = np.zeros(0, np.int32)
        tokens = self._tokens(nothing, (), nothing)
        arrays = self._pad(nothing, nothing, tokens, (), bucket, variant)
        return PackedStep(arrays, bucket, variant)

    def _tokens(self, first: np.ndarray, num_column: Sequence[int], ids: np.ndarray) -> _Tokens:
        """Decodes alone, the usual step, need no arithmetic: token i belongs to row i."""
        num_rows, num_tokens = len(first), len(ids)
        starts, token_rows = self._count[: num_rows + 1], self._count[:num_rows]
        if num_tokens == num_rows:
            return _Tokens(ids, token_rows, first, starts)
        lengths = _int32(num_column)
        starts = np.zeros(num_rows + 1, np.int32)
        np.cumsum(lengths, out=starts[1:])
        token_rows = np.repeat(token_rows, lengths)
        positions = self._count[:num_tokens] + (first - starts[:-1])[token_rows]
        return _Tokens(ids, token_rows, positions, starts)

    def _sampled(self, rows: np.ndarray, samples_column: Sequence[int]) -> np.ndarray:
        return np.where(_int32(samples_column) > 0, rows, np.int32(self._no_row))

    def _pad(
        self,
        rows: np.ndarray,
        sampled: np.ndarray,
        tokens: _Tokens,
        unwritten: tuple[int, ...],
        bucket: Bucket,
        variant: Variant,
    ) -> StepArrays:
        num_rows, num_tokens = len(rows), len(tokens.ids)
        last_tokens = tokens.starts[1:] - np.int32(1)
        ends = tokens.positions[last_tokens] + np.int32(1)
        tables = self._tables.take(rows, axis=0)
        blocks, offsets = np.divmod(tokens.positions, np.int32(self._block_size))
        slots = tables[tokens.rows, blocks] * np.int32(self._block_size) + offsets
        if unwritten:
            slots[last_tokens[list(unwritten)]] = self._num_slots
        greedy = variant is Variant.GREEDY
        return StepArrays(
            token_ids=_padded(tokens.ids, bucket.num_tokens, 0),
            token_rows=_padded(tokens.rows, bucket.num_tokens, 0),
            positions=_padded(tokens.positions, bucket.num_tokens, 0),
            slots=_padded(slots, bucket.num_tokens, self._num_slots),
            block_table=_padded(tables, bucket.num_rows, 0),
            context_lens=_padded(ends, bucket.num_rows, 0),
            cu_q_lens=_padded(tokens.starts, bucket.num_rows + 1, num_tokens),
            num_rows=np.int32(num_rows),
            row_ids=_padded(rows, bucket.num_rows, self._no_row),
            sampled_row_ids=_padded(sampled, bucket.num_rows, self._no_row),
            last_tokens=_padded(last_tokens, bucket.num_rows, 0),
            sampling=None if greedy else self._sampling(rows, ends, bucket.num_rows),
        )

    def _enter(self, entry: RowEntry) -> None:
        row, sampling = entry.row, entry.sampling
        self._tables[row] = 0
        self._variants[row] = VARIANTS.index(variant_of(sampling))
        self._num_prompt_tokens[row] = entry.num_prompt_tokens
        self._min_tokens[row] = sampling.min_tokens
        self._temperature[row] = sampling.temperature
        self._top_k[row] = sampling.top_k
        self._top_p[row] = sampling.top_p
        self._min_p[row] = sampling.min_p
        self._seed[row] = sampling.seed
        self._suppressed_ids[row] = -1
        self._suppressed_ids[row, : len(sampling.suppressed_ids)] = sampling.suppressed_ids

    def _sampling(self, rows: np.ndarray, ends: np.ndarray, size: int) -> SamplingArrays:
        output_position = ends - self._num_prompt_tokens[rows]
        suppressed = np.where(
            (output_position < self._min_tokens[rows])[:, None], self._suppressed_ids[rows], -1
        ).astype(np.int32)
        return SamplingArrays(
            temperature=_padded(self._temperature[rows], size, 0.0),
            top_k=_padded(self._top_k[rows], size, 0),
            top_p=_padded(self._top_p[rows], size, 1.0),
            min_p=_padded(self._min_p[rows], size, 0.0),
            seed=_padded(self._seed[rows], size, 0),
            output_position=_padded(output_position, size, 0),
            suppressed_ids=_padded(suppressed, size, -1),
        )


def _token_ids(columns: Sequence[tuple[int, ...]]) -> np.ndarray:
    """Input ids of all rows; -1 for a row whose token is on the device."""
    if not any(columns):
        return np.full(len(columns), -1, np.int32)
    return np.array([token for tokens in columns for token in tokens or (-1,)], np.int32)


def _int32(values: Sequence[int]) -> np.ndarray:
    return np.fromiter(values, np.int32, len(values))


def _padded(values: np.ndarray, size: int, fill: float) -> np.ndarray:
    """`values`, which nobody will change, with its first axis filled up to `size`."""
    if len(values) == size:
        return values
    out = np.full((size, *values.shape[1:]), fill, values.dtype)
    out[: len(values)] = values
    return out

"""How long steps take, what bounds them, and what a batch of requests sees of that.

Owns: the shapes that stand for a served batch, and what follows from their seconds. In: a `Setup`,
a `Demand`. Out: `BatchPlan` per batch size. Must not know: memory, queues.

A batch of R requests that is kept full has steps of R decodes at the mean context, and steps in
which prompts of those that take the places of the ended go beside these (`newcomers.py`). TTFT is
that of a request that has a place: the wait for the prompts before its own, and its own in chunks
of what the decodes leave of the token budget, or whole under a batching that does not split
prompts.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from paxserve.cost_model import Costs
from paxserve.plan import Demand, Setup
from paxserve.plan.newcomers import newcomers
from paxserve.step_shape import StepShape, chunk, decodes, prompt, together
from paxserve.step_work import StepWork, WorkCounter

WEIGHTS, KV, ARITHMETIC = "weights", "KV", "arithmetic"
_READS = {"linear": WEIGHTS, "head": WEIGHTS, "decode_attention": KV, "chunk_attention": KV}
_PARTS = {
    "linear": "linear",
    "head": "head",
    "decode_attention": "decodes",
    "chunk_attention": "chunks",
}
_MOST_ROWS = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """A batch of so many requests; None where the cost model has no answer.

    Attributes:
        num_rows: requests in the batch.
        fits: whether memory holds all of them at their mean context.
        num_batched_tokens: the engine's, or as many as prompts of those who follow need.
        step_s: of a step of decodes, at the mean context.
        bounds_s: of that, by what bounds it: weights and KV (reading them), arithmetic, links,
            host, or the name of a term that the cost model does not take apart.
        flop_per_byte: of that step on one device; `ridge_share`: of the hardware's ridge.
        tpot_s: the mean step, with and without prompts of newcomers; output_tokens_per_s: all
            devices.
        longest_s: of a step whose budget is full.
        ttft_s: beside the batch, the wait for prompts before one's own included.
    """

    num_rows: int
    fits: bool
    num_batched_tokens: int
    step_s: float | None
    bounds_s: Mapping[str, float]
    flop_per_byte: float
    ridge_share: float
    tpot_s: float | None
    output_tokens_per_s: float | None
    longest_s: float | None
    ttft_s: float | None

    @property
    def bound(self) -> str | None:
        """What takes most of a step."""
        return max(self.bounds_s, key=lambda name: self.bounds_s[name], default=None)


class Steps:
    """Predictions for one setup and one demand."""

    def __init__(self, setup: Setup, demand: Demand) -> None:
        self._demand, self._whole_prompts = demand, setup.whole_prompts
        self._costs: Costs = setup.cost_model.open(setup.target)
        self._ridge = setup.hardware.ridge(setup.model.dtype)
        counter = {"num_devices": setup.num_devices}
        kv_cache_dtype = setup.settings.kv_cache_dtype
        self._exact = WorkCounter.of(setup.model, kv_cache_dtype=kv_cache_dtype, **counter)
        self._tiled = WorkCounter.of(
            setup.model,
            kv_cache_dtype=kv_cache_dtype,
            tile_tokens=setup.hardware.tile_tokens,
            **counter,
        )

    def seconds(self, shape: StepShape) -> float | None:
        """Of one step; None where the cost model has no answer, as a table beyond its rows."""
        try:
            return sum(self._costs.of(shape))
        except ValueError:
            return None

    def decode_s(self, num_rows: int) -> float | None:
        """A step of decodes at the mean context."""
        return self.seconds(self._decodes(num_rows))

    def mean_s(self, num_rows: int, budget: int) -> float | None:
        """The mean of steps with prompts of those who follow and steps without; None if the budget
        has no room for these, so that a batch of this size does not stay full.
        """
        if num_rows + self.new_tokens(num_rows) > budget:
            return None
        new = newcomers(self._demand, num_rows=num_rows, room=self._room(num_rows, budget))
        alone_s = self.decode_s(num_rows)
        beside_s = self.seconds(self._mixed(num_rows, new.num_tokens, at_end=False))
        if alone_s is None or beside_s is None:
            return None
        return new.share * beside_s + (1.0 - new.share) * alone_s

    def longest_s(self, num_rows: int, budget: int) -> float | None:
        """A step whose budget is full: the last pieces of prompts beside the decodes."""
        return self.seconds(self._mixed(num_rows, budget - num_rows, at_end=True))

    def prompt_s(self, num_rows: int, budget: int) -> float | None:
        """From the first chunk of a prompt to its first token, `num_rows` others decoding."""
        size, room = self._demand.input_tokens, self._room(num_rows, budget)
        if room < 1:
            return None
        total_s = 0.0
        for done in range(0, size, room):
            length = min(room, size - done)
            step_s = self.seconds(
                self._with(num_rows, chunk(done, length, samples=done + length == size))
            )
            if step_s is None:
                return None
            total_s += step_s
        return total_s

    def ttft_s(self, num_rows: int, budget: int) -> float | None:
        """Of one of `num_rows` requests that keep the batch full: mean wait, then its prompt."""
        own_s = self.prompt_s(num_rows - 1, budget)
        if own_s is None:
            return None
        new = newcomers(self._demand, num_rows=num_rows, room=self._room(num_rows - 1, budget))
        step_s = self.seconds(self._mixed(num_rows - 1, new.num_tokens, at_end=False))
        return None if step_s is None else new.wait_steps * step_s + own_s

    def new_tokens(self, num_rows: int) -> int:
        """Prompt tokens per step that keep a batch full."""
        demand = self._demand
        return -(-num_rows * demand.input_tokens // demand.output_tokens)

    def bounds_s(self, shape: StepShape) -> dict[str, float]:
        """Seconds of a step, by what bounds them."""
        try:
            terms = self._costs.of(shape)
        except ValueError:
            return {}
        work = self._tiled.of_step(shape)
        found: dict[str, float] = {}
        for name, seconds in zip(self._costs.terms, terms, strict=True):
            label = self._bound(name, work)
            if seconds:
                found[label] = found.get(label, 0.0) + seconds
        return found

    def intensity(self, num_rows: int, context: int) -> float:
        """FLOP per byte of decodes on one device."""
        work = self._exact.of_step(decodes(num_rows, num_rows * context))
        return work.flop / work.num_bytes

    def rows_at_ridge(self, context: int) -> int | None:
        """The smallest batch of decodes whose arithmetic takes as long as its bytes; None if there
        is none, since each row brings KV that is read for it alone.
        """
        low, high = 0, _MOST_ROWS
        if self.intensity(high, context) < self._ridge:
            return None
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (
                (low, middle) if self.intensity(middle, context) >= self._ridge else (middle, high)
            )
        return high

    def batch(self, num_rows: int, *, budget: int, fits: bool) -> BatchPlan:
        """Everything about a batch.

        Args:
            num_rows: requests.
            budget: tokens per step, of which the batch may need more to stay full.
            fits: whether memory holds it.
        """
        shape = self._decodes(num_rows)
        budget = max(budget, num_rows + self.new_tokens(num_rows))
        tpot_s = self.mean_s(num_rows, budget)
        intensity = self.intensity(num_rows, self._demand.mean_context)
        return BatchPlan(
            num_rows=num_rows,
            fits=fits,
            num_batched_tokens=budget,
            step_s=self.seconds(shape),
            bounds_s=self.bounds_s(shape),
            flop_per_byte=intensity,
            ridge_share=intensity / self._ridge,
            tpot_s=tpot_s,
            output_tokens_per_s=None if tpot_s is None else num_rows / tpot_s,
            longest_s=self.longest_s(num_rows, budget),
            ttft_s=self.ttft_s(num_rows, budget),
        )

    def _room(self, num_rows: int, budget: int) -> int:
        """Tokens of prompts that a step takes beside so many decodes."""
        room = budget - num_rows
        return max(room, self._demand.input_tokens) if self._whole_prompts else room

    def _decodes(self, num_rows: int) -> StepShape:
        return decodes(num_rows, num_rows * self._demand.mean_context)

    def _mixed(self, num_rows: int, num_tokens: int, *, at_end: bool) -> StepShape:
        """Decodes, and so many prompt tokens: whole prompts, and a piece of one, of its end or its
        middle, which has the mean of the pairs of all pieces.
        """
        size = self._demand.input_tokens
        num_whole, piece = divmod(num_tokens, size)
        first = size - piece if at_end else (size - piece) // 2
        pieces = [chunk(first, piece, samples=at_end)] if piece else []
        return self._with(num_rows, *[prompt(size)] * num_whole, *pieces)

    def _with(self, num_rows: int, *prompts: StepShape) -> StepShape:
        return together(*([self._decodes(num_rows)] if num_rows else []), *prompts)

    def _bound(self, name: str, work: StepWork) -> str:
        ridge = self._costs.ridge
        if ridge is None or name not in _READS:
            return name
        part = getattr(work, _PARTS[name])
        return ARITHMETIC if part.flop > ridge * part.num_bytes else _READS[name]

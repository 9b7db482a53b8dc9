"""A plan on a terminal.

Owns: which figures are shown, and how they are written. In: a `Plan`. Out: tables on a console.
Must not know: how anything is counted.
"""

from rich.console import Console
from rich.table import Table

from paxserve.plan.advice import MOST_UTILIZATION, Advice
from paxserve.plan.memory import MemoryPlan
from paxserve.plan.plan import Plan
from paxserve.terminal import table_console

GIB = 2**30


def print_plan(plan: Plan, *, name: str, console: Console | None = None) -> None:
    """Memory, capacities, batches, advice and alternatives, in this order."""
    console = console or table_console()

    def say(*lines: str) -> None:
        for line in lines:
            console.print(line, markup=False, highlight=False, soft_wrap=True)

    memory, demand = plan.memory, plan.demand
    devices = plan.hardware if plan.num_devices == 1 else f"{plan.num_devices} x {plan.hardware}"
    cache = plan.dtype if plan.kv_cache_dtype == "auto" else plan.kv_cache_dtype
    say(
        f"{name}, {plan.num_weights / 1e9:.2f} x 10^9 weights in {plan.dtype}, on {devices}",
        f"KV in {cache}: {memory.kv_bytes_per_token:,} bytes a token, "
        f"{memory.kv_bytes_per_token_and_layer:,} of them in each layer"
        + (f"; each device has 1/{plan.num_devices}" if plan.num_devices > 1 else ""),
        f"requests: {demand.input_tokens} tokens in, {demand.output_tokens} out; no step longer "
        f"than {demand.tpot_s * 1e3:g} ms",
        f"steps by {_cost_model(plan)}",
        "",
    )
    console.print(_memory(memory))
    say(*_rules(memory), *_override(memory), *_misfit(memory), "")
    console.print(_capacities(memory))
    say("", *_ridge(plan), "")
    console.print(_batches(plan))
    say(_BATCH_NOTE, *((_ROOFLINE_NOTE,) if plan.cost_model["class"] == "Roofline" else ()), "")
    say(*_advice(plan), "")
    console.print(_variants(plan))
    for variant in plan.variants:
        if variant.refusal is not None and variant.refusal != plan.advice_refusal:
            say(f"{variant.name}: {variant.refusal}")


def _cost_model(plan: Plan) -> str:
    settings = {name: value for name, value in plan.cost_model.items() if value is not None}
    name = settings.pop("class")
    return f"{name.lower()}: " + ", ".join(f"{key}={value}" for key, value in settings.items())


def _memory(memory: MemoryPlan) -> Table:
    table = _table("memory of each device", "", "GB", "GiB")
    by = "the engine's estimate"
    if memory.is_compiled:
        by = f"as its compiler counts; estimate {memory.estimated_step_bytes / 1e9:.2f} GB"
    blocks = memory.num_device_blocks - 1
    terms = {
        "reserved: context, fragmentation": memory.reserved_bytes,
        "weights": memory.weight_bytes,
        f"largest step ({memory.max_num_batched_tokens} tokens, {memory.max_num_seqs} rows; "
        f"{by})": memory.step_bytes,
        f"KV: {blocks:,} blocks of {memory.block_size} = {blocks * memory.block_size:,} "
        f"tokens, and the null block": memory.kv_bytes,
        f"{'left' if memory.left_bytes >= 0 else 'lacking'} ({memory.reason})": memory.left_bytes,
    }
    for name, num_bytes in terms.items():
        table.add_row(name, f"{num_bytes / 1e9:.2f}", f"{num_bytes / GIB:.2f}")
    table.add_section()
    total = memory.memory_bytes
    table.add_row("all", f"{total / 1e9:.2f}", f"{total / GIB:.2f}")
    return table


def _rules(memory: MemoryPlan) -> tuple[str, ...]:
    """Both ways to share memory out, every term."""
    share, count = memory.memory_utilization, memory.num_devices
    all_, reserved, weights, step = (
        f"{num_bytes / 1e9:.2f}"
        for num_bytes in (
            memory.memory_bytes,
            memory.reserved_bytes,
            memory.weight_bytes,
            memory.step_bytes,
        )
    )
    return (
        f"KV by the engine's rule, which executor=simulated has too: {share:g} x ({all_} - "
        f"{reserved} - {weights} - {step}) = {memory.rule_kv_bytes / 1e9:.2f} GB each, "
        f"{count * memory.rule_kv_bytes / GIB:.1f} GiB on {count}",
        f"KV by vLLM's rule, for comparison: {share:g} x {all_} - {weights} - {step} = "
        f"{memory.vllm_kv_bytes / 1e9:.2f} GB each, "
        f"{count * memory.vllm_kv_bytes / GIB:.1f} GiB on {count}",
    )


def _override(memory: MemoryPlan) -> tuple[str, ...]:
    if memory.num_blocks == memory.num_device_blocks:
        return ()
    share = memory.num_blocks / memory.num_device_blocks
    return (
        f"of the pool the host hands out {memory.num_blocks - 1:,} blocks = {memory.num_tokens:,} "
        f"tokens, {share * memory.kv_bytes / 1e9:.2f} GB with the null block "
        "(num_blocks_override or num_slots_override); the rest stays idle",
    )


def _misfit(memory: MemoryPlan) -> tuple[str, ...]:
    """Where what is lacking is said again, so that nobody overlooks it."""
    if memory.left_bytes >= 0:
        return ()
    by = "as its compiler counts workspace"
    if not memory.is_compiled:
        by = "by the estimate of workspace, an upper bound (--compile asks the compiler)"
    return (
        f"DOES NOT FIT {by}: {-memory.left_bytes / 1e9:.2f} GB more than there are; lower "
        "limits.kv_cache_memory_bytes, limits.max_num_batched_tokens or limits.max_num_seqs",
    )


def _capacities(memory: MemoryPlan) -> Table:
    rows = f"run with max_num_seqs={memory.max_num_seqs}"
    table = _table("requests at once", "KV slots of each", "memory holds", rows)
    for one in memory.capacities:
        table.add_row(f"{one.context:,}", f"{one.num_in_memory:,}", f"{one.num_running:,}")
    return table


def _ridge(plan: Plan) -> tuple[str, ...]:
    def rows(number: int | None) -> str:
        return "in no batch" if number is None else f"with {number:,} rows"

    return (
        f"ridge: {plan.ridge:.0f} FLOP/byte; decodes reach it {rows(plan.rows_at_ridge)} by their "
        f"weights alone, and {rows(plan.rows_at_ridge_with_kv)} at {plan.demand.mean_context:,} "
        "tokens of context, as each row reads its own KV",
        f"TTFT of a request alone: {_ms(plan.ttft_s)} ms",
    )


_BATCH_NOTE = (
    "step: decodes alone at the mean context; TPOT and tokens/s: the mean of such steps and of "
    "those that prompts of newcomers share; longest: the budget full; TTFT: with the mean wait for "
    "prompts of others, no wait for a place; budget: of tokens per step, the engine's or what the "
    "batch needs to stay full"
)

_ROOFLINE_NOTE = (
    "a roofline with the default efficiencies is optimistic: the products of measured steps take "
    "1.1 to 1.3 times as long at 32 tokens and less, up to 1.7 times near the ridge "
    "(experiments/roofline_vidur); cost_model=table and fitted have measured steps"
)


def _batches(plan: Plan) -> Table:
    table = _table(
        "predicted steps", "rows", "step, ms", "bound by", "FLOP/byte", "of ridge", "TPOT, ms",
        "tokens/s", "longest, ms", "TTFT, ms", "budget", "in memory",
    )  # fmt: skip
    for batch in plan.batches:
        total_s = sum(batch.bounds_s.values())
        shares = sorted(batch.bounds_s.items(), key=lambda one: -one[1])[:2]
        bounds = ", ".join(f"{name} {seconds / total_s:.0%}" for name, seconds in shares)
        table.add_row(
            f"{batch.num_rows:,}",
            _ms(batch.step_s),
            bounds or "-",
            f"{batch.flop_per_byte:.0f}",
            f"{batch.ridge_share:.0%}",
            _ms(batch.tpot_s),
            "-" if batch.output_tokens_per_s is None else f"{batch.output_tokens_per_s:,.0f}",
            _ms(batch.longest_s),
            _ms(batch.ttft_s),
            f"{batch.num_batched_tokens:,}",
            "yes" if batch.fits else "no",
        )
    return table


def _advice(plan: Plan) -> tuple[str, ...]:
    advice = plan.advice
    if advice is None:
        return (f"no limits to advise: {plan.advice_refusal}",)
    pool = "these rows at their full length"
    if advice.preempts:
        pool = f"what memory holds; {MOST_UTILIZATION:g} is the most, and some rows are preempted"
    return (
        f"serve with limits.max_num_seqs={advice.max_num_seqs} "
        f"limits.max_num_batched_tokens={advice.max_num_batched_tokens} "
        f"limits.memory_utilization={advice.memory_utilization:g}",
        f"  one more row is one too many for: {advice.limited_by}; the pool has {pool} "
        f"({advice.num_blocks - 1:,} blocks; by vLLM's rule "
        f"gpu_memory_utilization={advice.vllm_memory_utilization:g}); more memory would only keep "
        "more prefixes",
        f"  predicted: TPOT {_ms(advice.tpot_s)} ms, longest step {_ms(advice.longest_s)} ms, TTFT "
        f"{_ms(advice.ttft_s)} ms, {advice.output_tokens_per_s:,.0f} output tokens/s, "
        f"{advice.requests_per_s:.2f} requests/s",
    )


def _variants(plan: Plan) -> Table:
    table = _table(
        "what if", "", "KV bytes/token", "weights, GB each", "KV tokens", "requests",
        "1 row, ms", "rows", "budget", "TPOT, ms", "tokens/s and device",
    )  # fmt: skip
    for one in plan.variants:
        per_device = one.output_tokens_per_s_and_device
        advice: Advice | None = one.advice
        table.add_row(
            one.name,
            _count(one.kv_bytes_per_token),
            "-" if one.weight_bytes is None else f"{one.weight_bytes / 1e9:.1f}",
            _count(one.num_tokens),
            _count(one.num_requests),
            _ms(one.step_s),
            _count(None if advice is None else advice.max_num_seqs),
            _count(None if advice is None else advice.max_num_batched_tokens),
            _ms(None if advice is None else advice.tpot_s),
            "-" if per_device is None else f"{per_device:,.0f}",
        )
    return table


def _table(title: str, first: str, *headings: str) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column(first, justify="right" if first else "left")
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "bound by" else "right")
    return table


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.3g}"


def _count(number: int | None) -> str:
    return "-" if number is None else f"{number:,}"

"""Runs side by side in one table.

Owns: which figures are shown, and how they are written. In: summaries by run name. Out: a table on
a console. Must not know: how figures are defined (`metrics.py`).
"""

from collections.abc import Mapping

from rich.console import Console
from rich.table import Table

from paxserve.metrics import Summary
from paxserve.terminal import table_console

type Row = tuple[str, str, str]

ROWS: tuple[Row, ...] = (
    ("requests completed", "completed", "{:.0f}"),
    ("requests failed", "failed", "{:.0f}"),
    ("requests refused", "num_refused", "{:.0f}"),
    ("duration, s", "duration", "{:.1f}"),
    ("share of it in steps", "busy_share", "{:.1%}"),
    ("request throughput, 1/s", "request_throughput", "{:.2f}"),
    ("output throughput, tokens/s", "output_throughput", "{:.1f}"),
    ("TTFT mean, ms", "mean_ttft_ms", "{:.0f}"),
    ("TTFT p99, ms", "p99_ttft_ms", "{:.0f}"),
    ("TPOT mean, ms", "mean_tpot_ms", "{:.0f}"),
    ("TPOT p99, ms", "p99_tpot_ms", "{:.0f}"),
    ("ITL p99, ms", "p99_itl_ms", "{:.0f}"),
    ("running requests, mean", "mean_running_requests", "{:.2f}"),
    ("preemptions", "num_preemptions", "{:.0f}"),
    ("KV pool, tokens", "kv_pool_tokens", "{:.0f}"),
    ("prefix hit rate, tokens", "prefix_hit_rate", "{:.1%}"),
    ("KV live", "kv_share_live", "{:.1%}"),
    ("KV reserved, used later", "kv_share_reserved_used", "{:.1%}"),
    ("KV reserved, never used", "kv_share_reserved_unused", "{:.1%}"),
    ("KV tail of last block", "kv_share_tail", "{:.1%}"),
    ("KV rounding of placement", "kv_share_rounding", "{:.1%}"),
    ("KV held by finished requests", "kv_share_held", "{:.1%}"),
    ("KV cached, evictable", "kv_share_cached", "{:.1%}"),
    ("KV free, too short a run", "kv_share_free_unfit", "{:.1%}"),
    ("KV free", "kv_share_free", "{:.1%}"),
    ("padded share of tokens", "padded_token_share", "{:.1%}"),
    ("step time median, ms", "median_step_time_ms", "{:.1f}"),
    ("compilations while serving", "num_compiles", "{:.0f}"),
)


def print_table(runs: Mapping[str, Summary], *, console: Console | None = None) -> None:
    """Print one column per run. KV shares are of the usable pool; they and the running requests
    are means over the time spent in steps.
    """
    table = Table(title="paxserve", title_justify="left")
    table.add_column("")
    for name in runs:
        table.add_column(name, justify="right")
    for label, key, form in ROWS:
        table.add_row(label, *[cell_text(summary.get(key), form) for summary in runs.values()])
    (console or table_console()).print(table)


def cell_text(value: float | None, form: str) -> str:
    """A figure as it is shown; a dash where it is undefined."""
    return "-" if value is None else form.format(value)

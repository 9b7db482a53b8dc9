"""The table of runs."""

from io import StringIO

from builders import make_engine, prompt_ids, run_to_end, submit
from rich.console import Console

from paxserve.metrics import summarize
from paxserve.report.table import ROWS, print_table


def printed(runs):
    out = StringIO()
    print_table(runs, console=Console(file=out, width=160))
    lines = out.getvalue().splitlines()
    cells = [[cell.strip() for cell in line.strip("│┃").split("│")] for line in lines]
    return {row[0]: row[1:] for row in cells if len(row) == 1 + len(runs)}, out.getvalue()


def summary(*lengths):
    engine = make_engine()
    for i, length in enumerate(lengths):
        submit(engine, prompt_ids(3, salt=i), max_tokens=length)
    run_to_end(engine)
    figures = summarize(engine.requests, engine.steps, engine.ledger.steps())
    return figures | {"num_refused": 0}


def test_every_row_is_printed_with_the_figures_of_each_run():
    rows, text = printed({"one": summary(4), "two runs": summary(2, 6)})
    assert [label for label in rows if label] == [label for label, _, _ in ROWS]
    assert "one" in text
    assert "two runs" in text
    assert rows["requests completed"] == ["1", "2"]
    assert rows["duration, s"] == ["4.0", "6.0"]
    assert rows["output throughput, tokens/s"] == ["1.0", "1.3"]
    assert rows["TTFT mean, ms"] == ["1000", "1000"]
    assert rows["running requests, mean"] == ["1.00", "1.33"]
    assert rows["preemptions"] == ["0", "0"]
    assert "-" not in {cell for label, cells in rows.items() if label for cell in cells}


def test_every_row_is_a_figure_of_a_summary():
    assert {key for _, key, _ in ROWS} <= set(summary(3))


def test_a_figure_that_a_run_does_not_have_is_a_dash():
    rows, _ = printed({"one": summary(1), "none": {}})
    assert rows["TPOT mean, ms"] == ["-", "-"]
    assert rows["TTFT mean, ms"] == ["1000", "-"]
    assert {cells[1] for cells in rows.values() if cells[1] != "none"} == {"-"}


def test_shares_are_percentages():
    rows, _ = printed({"one": {"kv_share_live": 0.1234, "num_preemptions": 3}})
    assert rows["KV live"] == ["12.3%"]
    assert rows["preemptions"] == ["3"]

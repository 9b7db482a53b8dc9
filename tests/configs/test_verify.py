"""`paxserve verify`: the matrix, the comparison, the verdict, and that defects are found."""

import json
import re
import sys
from dataclasses import replace
from itertools import combinations

import pytest
from real_builders import keep_compiled_programs

from paxserve.cli import main
from paxserve.hydra_config import compose_config
from paxserve.pairs import Choice, axes, why_not
from paxserve.prefix_cache import radix
from paxserve.recorded import arrival_of
from paxserve.verify import running
from paxserve.verify.matrix import FORCED, Matrix, restricted, size_axes
from paxserve.verify.running import CellResult, verify
from paxserve.verify.tokens import END, Difference, Output, differences

LONG = list(range(5, 14))
REQUESTS = [
    {"prompt_token_ids": LONG, "max_tokens": 9},
    {"prompt_token_ids": [*LONG[:8], 20, 21], "max_tokens": 6, "arrival_s": 1.0},
    {"prompt_token_ids": LONG[:8], "max_tokens": 12, "arrival_s": 2.5},
    {"prompt_token_ids": [5, 6], "max_tokens": 10, "arrival_s": 3.0},
]
SIZES = ("limits.max_model_len=32", "limits.block_size=4", "limits.max_num_seqs=4",
         "limits.num_blocks_override=33", "limits.max_num_batched_tokens=32",
         "workload=jsonl", "workload.path=requests.jsonl")  # fmt: skip
SCRIPTED = ("executor=scripted", *SIZES)
THREE_SAMPLES = ("sampling=random", "sampling.n=3")
TWO_BEAMS = ("sampling=beam", "sampling.beam_width=2")
ALL_AXES = {**axes(), **size_axes(budget=64, num_rows=4)}


@pytest.fixture(autouse=True)
def workplace(tmp_path, monkeypatch):
    lines = "".join(json.dumps(request) + "\n" for request in REQUESTS)
    (tmp_path / "requests.jsonl").write_text(lines)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["paxserve"])
    return tmp_path


def verified(*overrides, only=(), quick=True):
    config, choices, explicit = compose_config(overrides)
    return verify(
        config, choices=choices, explicit=explicit, say=print, progress=lambda *_: None,
        only=only, quick=quick,
    )  # fmt: skip


# Which cells.


def pairs_of(cell):
    return {frozenset(pair) for pair in combinations([Choice(*item) for item in cell.items()], 2)}


def test_every_two_choices_that_go_together_meet_in_a_cell():
    matrix = Matrix(ALL_AXES, why_not, quick=False)
    wanted = {
        frozenset((Choice(a, one), Choice(b, other)))
        for a, b in combinations(ALL_AXES, 2)
        for one in ALL_AXES[a]
        for other in ALL_AXES[b]
    }
    met = set().union(*map(pairs_of, matrix.cells))
    assert met == wanted - matrix.forbidden.keys()
    assert not matrix.impossible
    assert all(why_not(cell) is None for cell in matrix.cells)
    assert len(matrix.cells) < 2 * len(ALL_AXES["admission"]) * len(ALL_AXES["batching"])


def test_quick_has_every_choice_once_and_the_usual_ones_first():
    cells = Matrix(ALL_AXES, why_not, quick=True).cells
    assert cells[0] == {axis: names[0] for axis, names in ALL_AXES.items()}
    assert {item for cell in cells for item in cell.items()} == {
        (axis, name) for axis, names in ALL_AXES.items() for name in names
    }
    assert len(cells) <= 1 + sum(len(names) - 1 for names in ALL_AXES.values()) // 3


def test_a_choice_that_runs_in_no_company_is_impossible_and_not_forbidden_pair_by_pair():
    def judge(names):
        return "max cannot" if names["reservation"] == "max" else why_not(names)

    matrix = Matrix(ALL_AXES, judge, quick=True)
    assert matrix.impossible == {Choice("reservation", "max"): "max cannot"}
    assert not any(Choice("reservation", "max") in pair for pair in matrix.forbidden)
    with pytest.raises(ValueError, match="can be run: max cannot"):
        Matrix(restricted(ALL_AXES, ["reservation=max"]), judge, quick=True)


def test_only_some_choices():
    found = restricted(ALL_AXES, ["batching=static,textbook", f"{FORCED}=3"])
    assert (found["batching"], found[FORCED]) == (["static", "textbook"], ["3"])
    assert found["placement"] == ALL_AXES["placement"]
    with pytest.raises(ValueError, match="no axis is called 'batch'"):
        restricted(ALL_AXES, ["batch=static"])
    with pytest.raises(ValueError, match="batching has no 'orca'"):
        restricted(ALL_AXES, ["batching=static,orca"])


# What is compared.


def output(*sequences):
    return Output(sequences=sequences, scores=(0.0,) * len(sequences), error=None)


def test_the_first_position_of_each_sequence_that_differs():
    expected = {"a": output((1, 2, 3), (4, 5, 6)), "b": output((7,))}
    assert list(differences(expected, expected)) == []
    found = list(differences(expected, {"a": output((1, 2, 3), (4, 9, 6)), "b": output((7, 8))}))
    assert found == [
        Difference(request_id="a", sequence=1, position=1, expected=5, found=9),
        Difference(request_id="b", sequence=0, position=1, expected=END, found=8),
    ]
    (missing,) = differences({"b": expected["b"]}, {})
    assert (missing.position, missing.expected, missing.found) == (0, 7, END)
    with pytest.raises(ValueError, match=r"\['c'\] are not in the reference"):
        list(differences(expected, {**expected, "c": output((1,))}))


@pytest.mark.parametrize(
    ("gap", "holds"), [(None, False), (1e-3, True), (1.1e-3, False), (float("nan"), False)]
)
def test_only_a_near_tie_may_differ(gap, holds):
    one = Difference(request_id="a", sequence=0, position=1, expected=5, found=9, gap=gap)
    near = replace(one, gap=0.0)
    assert CellResult(cell={}, differences=(near, one)).holds is holds
    assert CellResult(cell={}, differences=(near,)).holds
    assert not CellResult(cell={}, error="broke off").holds


# The command.


@pytest.mark.parametrize(
    "sampling",
    [(), THREE_SAMPLES, ("sampling=beam", "sampling.beam_width=3")],
    ids=["greedy", "n=3", "beams"],
)
def test_the_law_holds_and_every_cell_says_what_it_met(workplace, capsys, sampling):
    code = main(["verify", "--quick", "--json", "found.json", *SCRIPTED, *sampling])
    out = capsys.readouterr().out
    assert code == 0, out
    found = json.loads((workplace / "found.json").read_text())
    cells = found["cells"]
    assert {cell["status"] for cell in cells} == {"equal"}
    assert (found["holds"], found["num_requests"]) == (True, 4)
    assert found["num_tokens"] == sum(r["max_tokens"] for r in REQUESTS) * (3 if sampling else 1)
    total = {name: sum(cell["counts"][name] for cell in cells) for name in cells[0]["counts"]}
    assert min(total["preempted"], total["cached_tokens"], total["swapped"]) > 0, total
    # A cell is as far from the reference as its axes say: warm is twice the requests.
    assert out.count("\n   ") >= len(cells)
    assert f"in each of {len(cells)} cells: {len(cells)} equal" in out


def test_what_cannot_be_run_is_listed_with_the_reason(capsys):
    code = main(["verify", "--quick", *SCRIPTED, "--only", "placement=paged,first_fit",
                 "--only", "prefix_cache=none,radix", "sampling=beam"])  # fmt: skip
    out = capsys.readouterr().out
    assert code == 0
    assert "no cell has placement=first_fit: beam search shares blocks" in out
    assert "no cell has reservation=max: beam search shares blocks" in out
    found = verified(*SCRIPTED, only=["placement=first_fit,paged", "prefix_cache=none,radix"])
    pair = frozenset((Choice("placement", "first_fit"), Choice("prefix_cache", "radix")))
    assert "Radix shares blocks between tables, but placement FirstFit" in found.forbidden[pair]


def test_a_cache_that_takes_other_tokens_for_these_is_found(workplace, monkeypatch, capsys):
    def key(token_ids, number, *, block_size, salt):
        return number.to_bytes(4, "big")  # whatever the tokens are

    monkeypatch.setattr(radix, "block_key", key)
    only = ("--only", "prefix_cache=none,hash_chain,radix", "--only", "placement=paged")
    code = main(["verify", "--quick", *SCRIPTED, *only, "--json", "found.json"])
    out = capsys.readouterr().out
    assert code == 1, out
    cells = json.loads((workplace / "found.json").read_text())["cells"]
    wrong = [cell for cell in cells if not cell["holds"]]
    assert wrong
    assert {cell["cell"]["prefix_cache"] for cell in wrong} == {"radix"}
    assert "DIFFERS" in out
    place = (
        r"4 requests differ, first request \d, sequence 0, position \d: token \d+ expected, token"
    )
    assert re.search(place, out)


def test_seeds_that_change_with_the_id_are_found(monkeypatch):
    monkeypatch.setattr(
        running, "arrival_of", lambda request: replace(arrival_of(request), seed=None)
    )
    found = verified(*SCRIPTED, *THREE_SAMPLES, only=["cache=cold,warm"])
    by_cache = {result.cell["cache"] for result in found.results if not result.holds}
    assert by_cache == {"warm"}
    first = next(result for result in found.results if not result.holds).differences[0]
    assert (first.position, first.gap) == (0, None)


def test_a_step_that_fails_is_a_cell_that_failed(monkeypatch):
    def withdraw(batch, request, **_):
        raise RuntimeError("no way back")

    monkeypatch.setattr("paxserve.batch.Batch.withdraw", withdraw)
    found = verified(*SCRIPTED, only=[f"{FORCED}=0,3", "pool=roomy"])
    failed = [result for result in found.results if result.error]
    assert failed
    assert all("no way back" in (result.error or "") for result in failed)
    assert not found.holds
    assert found.results[0].holds


def test_mistakes_are_a_line(capsys):
    for arguments, words in (
        (["--only", "batch=static"], "no axis is called 'batch'"),
        (["limits.block_size=0"], "block_size must be an integer of at least 1"),
        (["kernel=xla"], "kernel was set, but nothing reads it"),
        (["nonsense"], "'nonsense' is no override"),
    ):
        assert main(["verify", *SCRIPTED, *arguments]) == 2
        err = capsys.readouterr().err
        assert words in err
        assert err.count("\n") == 1


@pytest.mark.parametrize("sampling", [THREE_SAMPLES, TWO_BEAMS], ids=["n=3", "beams"])
def test_the_law_holds_on_jax(sampling):
    keep_compiled_programs()
    tiny = ("model=tiny", *SIZES, "limits.row_buckets=[4]", "limits.token_buckets=[32]")
    found = verified(*tiny, *sampling)
    assert found.holds, [result for result in found.results if not result.holds]
    assert len(found.results) >= 9
    assert sum(result.counts["preempted"] for result in found.results) > 0


def test_on_jax_a_difference_has_the_gap_that_it_has(monkeypatch):
    """Other seeds draw other tokens where the reference was sure of its own."""
    keep_compiled_programs()
    monkeypatch.setattr(
        running, "arrival_of", lambda request: replace(arrival_of(request), seed=None)
    )
    tiny = ("model=tiny", *SIZES, "limits.row_buckets=[4]", "limits.token_buckets=[32]")
    only = [f"{axis}={names[0]}" for axis, names in ALL_AXES.items() if axis != "cache"]
    only[-3:] = ["max_num_batched_tokens=32", f"{FORCED}=0", "pool=roomy"]
    found = verified(*tiny, "sampling=random", only=only)
    (cold, warm) = found.results
    assert (cold.holds, warm.holds) == (True, False)
    gaps = [one.gap for one in warm.differences]
    assert len(gaps) == 4
    assert all(gap is not None and gap >= 0 for gap in gaps)
    assert max(gaps) > 1e-2

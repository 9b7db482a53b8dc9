"""Published profiles as cost models: small files worked by hand, and rows of the real ones."""

import json
import math
import os
from pathlib import Path

import pytest
from axes import yaml_values
from cost_builders import roofline, small_model, target

from paxserve.cost_model import Target
from paxserve.cost_model.table import Table
from paxserve.hardware import Hardware
from paxserve.models.dimensions import Dimensions
from paxserve.profiles.curve import Curve
from paxserve.step_shape import decodes, prompt

MS = 1e-3
DATA = Path(os.environ["PAXSERVE_DATA"]) / "traces" if "PAXSERVE_DATA" in os.environ else None
needs_data = pytest.mark.skipif(DATA is None, reason="PAXSERVE_DATA is not set")


def table(**changed):
    given = {
        "path": "", "format": "distserve", "entry": None, "links_path": None,
        "compute_efficiency": None, "bandwidth_efficiency": None, "host_s_per_step": 0.0,
    }  # fmt: skip
    return Table(**(given | changed))


def seconds(costs, shape):
    """Of each term that is not 0."""
    return {term: s for term, s in zip(costs.terms, costs.of(shape), strict=True) if s}


def both(num_decodes, context, tokens):
    """Decodes and a prompt in one step."""
    one, other = decodes(num_decodes, context), prompt(tokens)
    return type(one)(*[a + b for a, b in zip(one, other, strict=True)])


# Points.


def test_a_curve_is_straight_between_points_level_before_and_ends_after():
    curve = Curve("rows", [(4, 2.0), (2, 1.0), (4, 9.0), (4, 3.0), (8, 5.0)])
    assert [curve.at(n) for n in (1, 2, 3, 4, 5, 8)] == [1.0, 1.0, 2.0, 3.0, 3.5, 5.0]
    with pytest.raises(ValueError, match="rows: measured from 2 to 8, and a step has 9: lower"):
        curve.at(9)
    with pytest.raises(ValueError, match="rows: nothing was measured"):
        Curve("rows", [])


# DistServe.

FIT = {
    "prefill": [10.0, 0.5, 0.01],
    "decoding_smallbs": [4.0, 0.25, 2.0],
    "decoding_largebs": [100.0, 0.125, 1.0],
    "decoding_large_small_bs_threshold": 3,
}


@pytest.fixture
def fits(tmp_path):
    path = tmp_path / "fits.json"

    def write(found=None):
        path.write_text(json.dumps({"small": {"1": FIT}} if found is None else found))
        return str(path)

    return write


def test_prompts_and_decodes_by_their_coefficients(fits):
    costs = table(path=fits(), entry="small").open(target())
    assert seconds(costs, prompt(20)) == pytest.approx(
        {"fixed": 10 * MS, "prompt_tokens": 10 * MS, "prompt_pairs": 4 * MS}
    )
    assert seconds(costs, decodes(2, 40)) == pytest.approx(
        {"fixed": 4 * MS, "decode_context": 10 * MS, "decode_rows": 4 * MS}
    )
    assert seconds(costs, decodes(3, 40)) == pytest.approx(
        {"fixed": 100 * MS, "decode_context": 5 * MS, "decode_rows": 3 * MS}
    )


def test_a_step_of_both_has_one_constant(fits):
    costs = table(path=fits(), entry="small").open(target())
    assert seconds(costs, both(2, 40, 20)) == pytest.approx(
        seconds(costs, prompt(20)) | {"decode_context": 10 * MS, "decode_rows": 4 * MS}
    )


def test_chunks_have_the_squares_of_the_whole_prompt(fits):
    costs = table(path=fits(), entry="small").open(target())
    chunks = [prompt(8), prompt(12)._replace(chunk_pairs=8 * 12 + 78, chunk_context=20)]
    squares = [seconds(costs, chunk)["prompt_pairs"] for chunk in chunks]
    assert sum(squares) == pytest.approx(seconds(costs, prompt(20))["prompt_pairs"])


def test_moves_and_the_host_beside_what_was_measured(fits):
    costs = table(path=fits(), entry="small", host_s_per_step=0.5).open(target())
    rest = roofline(host_s_per_step=0.5, link_efficiency=0.8).open(target())
    shape = decodes(2, 40)._replace(num_copied=2, num_swapped=3)
    moved = {term: s for term, s in seconds(rest, shape).items() if term in ("moves", "host")}
    assert moved["host"] == 0.5
    assert seconds(costs, shape).items() >= moved.items()


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ({}, "has no small; it has"),
        ([], r"must be an object, got \[\]"),
        ({"small": {"2": FIT}}, "small has no 1; it has 2"),
        ({"small": {"1": {**FIT, "prefill": [1.0, 2.0]}}}, "prefill must be three numbers"),
        ({"small": {"1": {**FIT, "prefill": [1.0, 2.0, math.nan]}}}, "prefill must be three num"),
        ({"small": {"1": {**FIT, "decoding_smallbs": [1, 2, True]}}}, "smallbs must be three num"),
        ({"small": {"1": {k: v for k, v in FIT.items() if k != "prefill"}}}, "has no prefill; it"),
        ({"small": {"1": {**FIT, "decoding_large_small_bs_threshold": -1}}}, "threshold must be"),
    ],
)
def test_files_that_are_none_of_distserve_s(fits, found, message):
    with pytest.raises(ValueError, match=message):
        table(path=fits(found), entry="small").open(target())


def test_a_formula_below_zero_is_refused(fits):
    falling = {"small": {"1": {**FIT, "prefill": [4.0, 0.0, -1.0]}}}
    costs = table(path=fits(falling), entry="small").open(target())
    assert sum(costs.of(prompt(2))) == 0
    with pytest.raises(ValueError, match=r"gives -0.005 s for a step of 3 prompt tokens"):
        costs.of(prompt(3))


def test_files_that_are_not_there_or_not_json(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"profile file '.*none' does not exist"):
        table(path=str(tmp_path / "none"), entry="small").open(target())
    (tmp_path / "text").write_text("model,tp\n")
    with pytest.raises(ValueError, match="text is not JSON"):
        table(path=str(tmp_path / "text"), entry="small").open(target())


# Splitwise.

MODEL = "model,hardware,prompt_size,batch_size,token_size,prompt_time,token_time,tensor_parallel\n"


@pytest.fixture
def steps(tmp_path):
    path = tmp_path / "perf_model.csv"

    def write(*rows):
        path.write_text(MODEL + "".join(f"{row}\n" for row in rows))
        return str(path)

    return write


ROWS = ("m,h,100,1,8,10,4,1", "m,h,100,1,8,12,4,1", "m,h,100,1,8,90,4,1", "m,h,100,2,8,20,6,1",
        "m,h,400,1,8,60,4,1", "m,h,100,1,8,1,1,2", "m,other,100,1,8,1,1,1")  # fmt: skip


def test_prompts_by_tokens_and_decodes_by_rows(steps):
    costs = table(format="splitwise", path=steps(*ROWS), entry="m/h").open(target())
    assert seconds(costs, prompt(100)) == pytest.approx({"prompts": 12 * MS})
    assert seconds(costs, prompt(7)) == pytest.approx({"prompts": 12 * MS})
    assert seconds(costs, prompt(300)) == pytest.approx({"prompts": 40 * MS})
    assert seconds(costs, decodes(1, 999)) == pytest.approx({"decodes": 4 * MS})
    assert seconds(costs, decodes(2, 40)) == pytest.approx({"decodes": 6 * MS})
    mixed = seconds(costs, both(2, 40, 198))
    assert mixed == pytest.approx({"decodes": 6 * MS, "prompts": 14 * MS})
    with pytest.raises(ValueError, match=r"prompt tokens: measured from 100 to 400, and a .* 401"):
        costs.of(prompt(401))
    with pytest.raises(ValueError, match="rows of decodes: measured from 1 to 2, and a step has 3"):
        costs.of(decodes(3, 3))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (["m,h,100,1,8,10,4,2"], "has no m/h on 1 devices; it has m/h on 2"),
        (["m,h,0,1,8,10,4,1"], "line 2 prompt_size must be an integer from 1"),
        (["m,h,100,1,8,nan,4,1"], "line 2 prompt_time must be a number from 0"),
        (["m,h,100,1,8,10,-4,1"], "line 2 token_time must be a number from 0"),
        (["m,h,100,1"], "line 2: prompt_time is missing|line 2: tensor_parallel is missing"),
    ],
)
def test_files_that_are_none_of_splitwise_s(steps, rows, message):
    with pytest.raises(ValueError, match=message):
        table(format="splitwise", path=steps(*rows), entry="m/h").open(target())


# Vidur.

OPERATORS = ("input_layernorm", "attn_pre_proj", "attn_rope", "attn_post_proj",
             "post_attention_layernorm", "mlp_up_proj", "mlp_act", "mlp_down_proj", "add",
             "emb")  # fmt: skip
EFFICIENCIES = {"compute_efficiency": 0.5, "bandwidth_efficiency": 0.5}


@pytest.fixture
def operators(tmp_path):
    path = tmp_path / "mlp.csv"

    def write(*rows, sizes="4,2,8,16"):
        header = ",".join(f"time_stats.{name}.median" for name in OPERATORS)
        header += ",n_head,n_kv_head,n_embd,n_expanded_embd,num_tokens"
        header += ",num_tensor_parallel_workers"
        lines = [f"{','.join(map(str, ms))},{sizes},{n},{group}" for ms, n, group in rows]
        path.write_text("\n".join([header, *lines, ""]))
        return str(path)

    return write


@pytest.fixture
def sums(tmp_path):
    path = tmp_path / "all_reduce.csv"
    header = "time_stats.all_reduce.median,num_workers,size,collective,devices_per_node\n"
    path.write_text(header + "5,2,16,all_reduce,2\n9,2,48,all_reduce,2\n1,2,16,all_reduce,1\n")
    return str(path)


ONE_MS = ((1,) * 8 + (0.5, 3), 1, 1)  # 8 operators and 2 adds of a layer, then the embedding


def test_operators_by_tokens_and_a_roofline_for_the_rest(operators):
    path = operators(ONE_MS, ((2,) * 8 + (1, 6), 3, 1), ((9,) * 10, 1, 2))
    costs = table(format="vidur", path=path, **EFFICIENCIES).open(target())
    rest = roofline(compute_efficiency=0.5, bandwidth_efficiency=0.5).open(target())
    expected = seconds(rest, decodes(1, 9)) | {"linear": (2 * (8 + 2 * 0.5) + 3 + 1) * MS}
    assert seconds(costs, decodes(1, 9)) == pytest.approx(expected)
    assert seconds(costs, decodes(2, 9))["linear"] == pytest.approx(1.5 * expected["linear"])
    assert costs.ridge == rest.ridge
    with pytest.raises(ValueError, match="tokens: measured from 1 to 3, and a step has 4"):
        costs.of(decodes(4, 9))


def test_sums_over_a_group_by_their_bytes(operators, sums):
    pair = target(num_devices=2)
    path = operators(ONE_MS, ((1,) * 10, 4, 2))
    costs = table(format="vidur", path=path, links_path=sums, **EFFICIENCIES).open(pair)
    # Two a layer of 2 layers; a token has 8 channels of 2 bytes.
    assert seconds(costs, decodes(1, 9))["links"] == pytest.approx(4 * 5 * MS)
    assert seconds(costs, decodes(2, 9))["links"] == pytest.approx(4 * 7 * MS)
    with pytest.raises(ValueError, match=r"bytes of a sum: measured from 16 to 48, and .* has 64"):
        costs.of(decodes(4, 9))


def test_a_profile_of_another_model_or_group(operators, sums):
    def opened(path, num_devices=1, **more):
        found = table(format="vidur", path=path, **EFFICIENCIES, **more)
        return found.open(target(num_devices=num_devices))

    with pytest.raises(ValueError, match="n_embd is 9, and the model has hidden_size=8"):
        opened(operators(ONE_MS, sizes="4,2,9,16"))
    with pytest.raises(ValueError, match=r"has no group of 1; it has \['2', '8'\]"):
        opened(operators(((1,) * 10, 1, 8), ((1,) * 10, 1, 2)))
    with pytest.raises(ValueError, match=r"tensor_parallel_size=2: set cost_model.links_path"):
        opened(operators(((1,) * 10, 1, 2)), 2)
    with pytest.raises(ValueError, match="links_path is for tensor_parallel_size > 1"):
        opened(operators(ONE_MS), links_path=sums)
    with pytest.raises(ValueError, match="mlp_act must be a number from 0"):
        opened(operators(((1,) * 6 + ("nan",) + (1,) * 3, 1, 1)))
    four = small_model(num_kv_heads=4)
    path = operators(((1,) * 10, 1, 4), sizes="4,4,8,16")
    with pytest.raises(
        ValueError, match=r"no all_reduce of 4 devices in one machine; it has .*2 1"
    ):
        table(format="vidur", path=path, links_path=sums, **EFFICIENCIES).open(
            target(model=four, num_devices=4)
        )


# Settings.


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"format": "csv"}, "format must be one of distserve, splitwise, vidur, got 'csv'"),
        ({"format": ["vidur"]}, "format must be one of"),
        ({"path": 3}, "path must be the name of a file, got 3"),
        ({}, "format=distserve needs cost_model.entry"),
        ({"entry": 3}, "entry must be a name or null, got 3"),
        ({"format": "splitwise"}, "format=splitwise needs cost_model.entry"),
        ({"format": "vidur"}, "format=vidur needs cost_model.compute_efficiency"),
        ({"entry": "m", "links_path": "x"}, "links_path was set, but format=distserve does not"),
        ({"entry": "m", "compute_efficiency": 1.0}, "compute_efficiency was set, but format=dist"),
        ({"format": "vidur", "entry": "m", **EFFICIENCIES}, "entry was set, but format=vidur"),
        ({"entry": "m", "host_s_per_step": math.nan}, "host_s_per_step must be a number"),
        ({"format": "vidur", **EFFICIENCIES, "compute_efficiency": 0}, "compute_efficiency must"),
    ],
)
def test_settings_that_do_not_go_together(changed, message):
    with pytest.raises(ValueError, match=message):
        table(**changed)


# The published files: rows of them, read by eye.


def published(stem, name, *, num_devices=1):
    return Target(
        model=Dimensions(**yaml_values("model", stem)),
        hardware=Hardware(**yaml_values("hardware", name)),
        num_devices=num_devices,
        kv_cache_dtype="auto",
        block_size=16,
    )


@needs_data
@pytest.mark.parametrize(("engine", "prefill", "small", "large"), [
    ("distserve", (18.10254647486372, 0.1019122572698738, 7.122264314252114e-06),
     (19.934702624895458, 0.0006269356524350583, 0.03850697740828398),
     (7.1661889468253595, 0.0005798000403396046, 0.15831096191764046)),
    ("vllm", (22.052204789310185, 0.14050923870128956, 8.076584822611088e-06),
     (23.475041008414784, 0.000592934466077393, 0.060726861260369455),
     (20.206356173691958, 0.0004907727036234946, 0.1200031385587413)),
])  # fmt: skip
def test_distserve_s_opt_13b(engine, prefill, small, large):
    path = str(DATA / f"distserve/profiler-a100-80g.{engine}.json")
    costs = table(path=path, entry="facebook/opt-13b").open(published("opt-13b", "a100-80g"))
    for tokens in (1 + 1, 512, 2048):
        a, b, c = prefill
        assert sum(costs.of(prompt(tokens))) == pytest.approx(MS * (a + b * tokens + c * tokens**2))
    for rows, (a, b, c) in ((1, small), (94, small), (95, large), (200, large)):
        expected = MS * (a + b * 700 * rows + c * rows)
        assert sum(costs.of(decodes(rows, 700 * rows))) == pytest.approx(expected)


@needs_data
def test_splitwise_s_llama_2_70b():
    path = str(DATA / "splitwise_sim/perf_model.csv")
    on_8 = published("llama-2-70b", "a100-80g", num_devices=8)
    costs = table(format="splitwise", path=path, entry="llama2-70b/a100-80gb").open(on_8)
    assert sum(costs.of(prompt(512))) == pytest.approx(93.0164810270071 * MS)
    # Five runs of 8 prompts of 512, five of one of 4096: the two in the middle of all ten.
    assert sum(costs.of(prompt(4096))) == pytest.approx((662.492601 + 754.217489) / 2 * MS)
    assert sum(costs.of(decodes(1, 600))) == pytest.approx(45.0393265758588 * MS)
    assert sum(costs.of(decodes(64, 600))) == pytest.approx(71.605148 * MS, rel=1e-6)
    assert sum(costs.of(decodes(48, 600))) == pytest.approx((53.016984 + 71.605148) / 2 * MS,
                                                            rel=1e-6)  # fmt: skip
    with pytest.raises(ValueError, match="rows of decodes: measured from 1 to 64"):
        costs.of(decodes(65, 600))
    assert table(format="splitwise", path=path, entry="bloom-176b/h100-80gb").open(on_8)


@needs_data
def test_vidur_s_llama_2_7b():
    path = str(DATA / "vidur/profiling/compute_a100_meta-llama_Llama-2-7b-hf_mlp.csv")
    costs = table(format="vidur", path=path, **EFFICIENCIES).open(
        published("llama-2-7b", "a100-80g")
    )
    # One token: medians in milliseconds.
    layer = 0.005 + 0.065 + 0.005 + 0.025 + 0.005 + 0.116 + 0.007 + 0.060 + 2 * 0.002
    linear = seconds(costs, decodes(1, 9))["linear"]
    assert linear == pytest.approx(MS * (32 * layer + 0.003 + 0.005))
    with pytest.raises(ValueError, match="n_head is 32, and the model has num_heads=64"):
        table(format="vidur", path=path, **EFFICIENCIES).open(published("llama-2-70b", "a100-80g"))


@needs_data
def test_vidur_s_group_of_four():
    folder = DATA / "vidur/profiling"
    costs = table(
        format="vidur",
        path=str(folder / "compute_a100_meta-llama_Llama-2-70b-hf_mlp.csv"),
        links_path=str(folder / "network_a100_dgx_all_reduce.csv"),
        **EFFICIENCIES,
    ).open(published("llama-2-70b", "a100-80g", num_devices=4))
    # 18,432 bytes took 0.018 ms, 10,240 bytes 0.016: a token's sum has 8,192 x 2.
    each = 0.016 + (0.018 - 0.016) * (16_384 - 10_240) / (18_432 - 10_240)
    assert seconds(costs, decodes(1, 9))["links"] == pytest.approx(MS * 2 * 80 * each)

"""What README shows is true: its policy runs, its axes are the real ones, its example works."""

import re
from pathlib import Path

import pytest
from builders import make_engine, make_limits, prompt_ids, run_to_end, submit, tokens_alone

from paxserve.compose import POLICY_AXES, WORKLOAD_AXES, choices

README = Path(__file__).parent.parent.joinpath("README.md").read_text(encoding="utf-8")
EXAMPLE, POLICY = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_the_policy_of_readme_serves_one_prompt_at_a_time():
    names: dict[str, object] = {"__name__": "readme"}
    exec(compile(POLICY, "README.md", "exec"), names)
    limits = make_limits(max_num_batched_tokens=4)
    engine = make_engine(limits, batching=names["OnePromptAtATime"]())
    prompts = [prompt_ids(9, salt) for salt in range(3)]
    requests = [submit(engine, ids, max_tokens=5) for ids in prompts]
    while engine.has_work:
        engine.step()
        running = engine.scheduler.batch.running
        assert sum(request.num_remaining_tokens > 1 for request in running) <= 1
    for request, ids in zip(requests, prompts, strict=True):
        assert list(request.output_token_ids) == list(tokens_alone(ids, 5))
    assert run_to_end(engine) == 0


@pytest.mark.parametrize(
    "axis", [*POLICY_AXES, *WORKLOAD_AXES, "executor", "cost_model", "tracker"]
)
def test_the_axes_of_readme_are_the_real_ones(axis):
    (row,) = re.findall(rf"^\| `{axis}` \| (.*?) \|", README, re.MULTILINE)
    assert sorted(re.findall(r"`(\w+)`", row)) == choices(axis)


def test_the_files_of_a_requests_life_exist():
    life = README.split("## A request's life")[1].split("## ")[0]
    root = Path(__file__).parent.parent
    named = re.findall(r"`([\w/]+(?:\.py|/))`", life)
    assert len(named) > 20
    for name in named:
        assert (root / name).exists() or (root / "paxserve" / name).exists(), name


@pytest.mark.slow
def test_the_example_of_readme_runs(capsys):
    exec(compile(EXAMPLE, "README.md", "exec"), {"__name__": "readme"})
    printed = capsys.readouterr().out
    assert "Paris" in printed
    assert "stop" in printed
    assert printed.splitlines()[-1].strip()

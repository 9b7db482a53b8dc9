"""SmolLM2 on the host CPU, real and simulated in turn; README.md says what comes of it.

python -m experiments.fidelity_host.run            15 minutes on two quiet cores; writes the README
python -m experiments.fidelity_host.run --quick    one turn, nothing is written
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.study.readme import mark, refresh, table
from paxserve.cli import main as paxserve

HERE = Path(__file__).parent
LOAD, REPEATS, REPETITIONS = 0.6, 5, 3
OVERRIDES = (
    "model=smollm2-135m",
    "hardware=host-cpu",
    "limits.max_num_seqs=8",
    "limits.max_model_len=512",
    "limits.max_num_batched_tokens=128",
    "workload=synthetic",
    "workload.num_requests=48",
    "workload/lengths=lognormal",
    "workload.lengths.median_input_tokens=100",
    "workload.lengths.sigma_input=0.7",
    "workload.lengths.median_output_tokens=40",
    "workload.lengths.sigma_output=0.5",
    "workload.lengths.max_total_tokens=500",
)
MEANING = {"held_out": "other shapes", "served": "steps of served requests"}
MOST_ABSOLUTE, MOST_BIAS = 0.10, 0.03  # of held-out steps


def main() -> int:
    """See the module; ends with 0 only if everything holds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_Raw)
    parser.add_argument("--quick", action="store_true", help="one turn; nothing is written")
    quick = parser.parse_args().quick
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "fidelity.json"
        arguments = ["--load", str(LOAD), "--calibrate", "--repetitions", str(REPETITIONS)]
        arguments += ["--repeats", "1" if quick else str(REPEATS), "--json", str(file)]
        code = paxserve(["fidelity", *OVERRIDES, *arguments])
        if not file.exists():
            return code
        found = json.loads(file.read_text(encoding="utf-8"))
    parts = {
        "verdict": verdict(found),
        "figures": figures_table(found),
        "steps": steps_table(found),
        "ran": ran_line(found),
    }
    for name, part in parts.items():
        print(f"\n{name}\n{part}")
    if not quick:
        refresh(HERE / "README.md", parts)
    return 0 if found["holds"] and all(holds(one) for _, one in held_out(found)) else 1


def verdict(found: Mapping[str, Any]) -> str:
    """End to end, steps that were not fitted, and the retold run."""
    figures, told = found["figures"], found["retold"]
    near = sum(one["holds"] for one in figures)
    lines = [f"{mark(near == len(figures))}{near} of {len(figures)} figures are near enough."]
    for of, said in MEANING.items():
        all_of = [holds(profile["errors"][of]) for profile in found["profiles"]]
        lines.append(
            f"{mark(all(all_of))}Held out, {said}: within both bounds in {sum(all_of)} of "
            f"{len(all_of)} calibrations."
        )
    lines.append(f"{mark(told['is_equal'])}Retold, every decision and figure is equal.")
    return "\n".join(lines)


def figures_table(found: Mapping[str, Any]) -> str:
    """End to end: medians of the runs."""
    header = ("figure", "real runs", "simulated runs", "error", "spread", "allowed", "holds")
    rows = [
        (
            figure["name"],
            ", ".join(f"{value:.4g}" for value in figure["real"]),
            ", ".join(f"{value:.4g}" for value in figure["simulated"]),
            f"{figure['error']:+.1%}",
            f"{figure['spread']:.1%}",
            f"{figure['allowed']:.1%}",
            "yes" if figure["holds"] else "NO",
        )
        for figure in found["figures"]
    ]
    return table(header, rows)


def steps_table(found: Mapping[str, Any]) -> str:
    """Every calibration's held-out steps."""
    header = (
        "calibration",
        "held out",
        "steps",
        "median absolute error",
        "error of the sum",
        "holds",
    )
    rows = [
        (
            name[0],
            name[1],
            one["num_steps"],
            f"{one['median_absolute']:.1%}",
            f"{one['summed_bias']:+.1%}",
            "yes" if holds(one) else "NO",
        )
        for name, one in held_out(found)
    ]
    return table(header, rows)


def held_out(found: Mapping[str, Any]) -> list[tuple[tuple[int, str], Mapping[str, Any]]]:
    """Errors of the steps that no calibration was fitted to, by its number and what they are."""
    return [
        ((number, said), profile["errors"][of])
        for number, profile in enumerate(found["profiles"], start=1)
        for of, said in MEANING.items()
    ]


def holds(errors: Mapping[str, Any]) -> bool:
    """Whether held-out steps are predicted well enough."""
    return errors["median_absolute"] <= MOST_ABSOLUTE and abs(errors["summed_bias"]) <= MOST_BIAS


def ran_line(found: Mapping[str, Any]) -> str:
    """With what, and how the retold run came out."""
    ran, told = found["environment"], found["retold"]
    versions = ", ".join(f"{name} {version}" for name, version in ran["versions"].items())
    equal = told["num_decisions"] - told["num_different"]
    return (
        f"Commit {ran['git_commit']}, {versions}, {ran['num_cpus']} CPUs, {ran['platform']}. "
        f"Capacity {found['capacity_requests_per_s']:.3g} requests/s, load {LOAD:.0%} of it. Told "
        f"the recorded step times: {equal} of {told['num_decisions']} decisions equal, figures to "
        f"{told['worst_error']:.1e}."
    )


class _Raw(argparse.RawDescriptionHelpFormatter):
    pass


if __name__ == "__main__":
    sys.exit(main())

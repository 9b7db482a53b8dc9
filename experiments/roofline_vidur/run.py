"""Does a roofline with default efficiencies tell step times? Vidur's operator times beside it.

python -m experiments.roofline_vidur.run [--fast]
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from experiments.study.door import Findings, Setting, main
from experiments.study.readme import mark, table
from paxserve.cost_model.roofline import TERMS
from paxserve.plan import Setup
from paxserve.plan.command import setup_of
from paxserve.profiles.vidur import read_linear
from paxserve.report import style
from paxserve.report.style import Picture, panels, title
from paxserve.step_shape import decodes

TOLERANCE = 0.1
COUNTS = (1, 8, 32, 64, 128, 192, 256, 384, 512, 1024, 2048, 4096)
BANDS = {
    "few tokens": (1, 32),
    "near the ridge": (64, 512),
    "many tokens": (1024, 4096),
}  # from and to so many tokens of a step


class Profile(NamedTuple):
    """One model on a group of cards, and its file."""

    name: str
    model: str
    hardware: str
    num_devices: int
    file: str

    def setup(self) -> Setup:
        """With the default efficiencies."""
        return setup_of(
            [f"model={self.model}", f"hardware={self.hardware}", f"tp={self.num_devices}"]
        )[0]


PROFILES = (
    Profile("A100, Llama-2-7B", "llama-2-7b", "a100-80g", 1, "a100_meta-llama_Llama-2-7b-hf"),
    Profile("A100, Llama-3-8B", "llama-3-8b", "a100-80g", 1, "a100_meta-llama_Meta-Llama-3-8B"),
    Profile("4 A100, Llama-2-70B", "llama-2-70b", "a100-80g", 4, "a100_meta-llama_Llama-2-70b-hf"),
    Profile("H100, Llama-2-7B", "llama-2-7b", "h100", 1, "h100_meta-llama_Llama-2-7b-hf"),
    Profile("4 H100, Llama-2-70B", "llama-2-70b", "h100", 4, "h100_meta-llama_Llama-2-70b-hf"),
)


class Pair(NamedTuple):
    """The linear part of a step of so many tokens: products, norms, activations, residuals."""

    num_tokens: int
    measured_s: float
    modelled_s: float

    @property
    def ratio(self) -> float:
        """Modelled over measured."""
        return self.modelled_s / self.measured_s


def pairs_of(profile: Profile, data: Path, counts: Sequence[int]) -> list[Pair]:
    """Measured beside modelled."""
    setup = profile.setup()
    folder = data / "traces" / "vidur" / "profiling"
    path = str(folder / f"compute_{profile.file}_mlp.csv")
    measured = read_linear(path, setup.model, profile.num_devices)
    costs, linear = setup.cost_model.open(setup.target), TERMS.index("linear")
    return [Pair(n, measured.at(n), costs.of(decodes(n, n))[linear]) for n in counts]


def study(setting: Setting) -> Findings:
    """Every profile at every number of tokens."""
    is_fast = setting.scale.fast
    counts = (1, 64, 128, 256, 1024) if is_fast else COUNTS
    profiles = PROFILES[1:4:2] if is_fast else PROFILES
    found = {profile.name: pairs_of(profile, setting.data, counts) for profile in profiles}
    return Findings(
        {"verdict": verdict(found), "steps": step_table(found)}, {"ratios": draw(found)}
    )


def verdict(found: Mapping[str, Sequence[Pair]]) -> str:
    """Band by band, which of them are told within the tolerance."""
    lines = []
    for band, (low, high) in BANDS.items():
        ratios = [
            pair.ratio
            for pairs in found.values()
            for pair in pairs
            if low <= pair.num_tokens <= high
        ]
        holds = all(abs(ratio - 1) <= TOLERANCE for ratio in ratios)
        num_close = sum(abs(ratio - 1) <= TOLERANCE for ratio in ratios)
        lines.append(
            f"{mark(holds)}{band.capitalize()} ({low} to {high}): modelled steps take "
            f"{min(ratios):.2f} to {max(ratios):.2f} of the measured time; {num_close} of "
            f"{len(ratios)} are within {TOLERANCE:.0%}."
        )
    return "\n".join(lines)


def step_table(found: Mapping[str, Sequence[Pair]]) -> str:
    """A row per profile and number of tokens."""
    rows = [
        [name, pair.num_tokens, 1e3 * pair.measured_s, 1e3 * pair.modelled_s, f"{pair.ratio:.2f}"]
        for name, pairs in found.items()
        for pair in pairs
    ]
    return table(["cards, model", "tokens", "measured, ms", "modelled, ms", "ratio"], rows)


def draw(found: Mapping[str, Sequence[Pair]]) -> Picture:
    """The ratios over tokens; 1 is a step that was told."""
    picture, (axis,) = panels([3.2], width=8.0)
    colours = style.series_colours(len(found))
    for (name, pairs), colour in zip(found.items(), colours, strict=True):
        axis.plot(
            [pair.num_tokens for pair in pairs],
            [pair.ratio for pair in pairs],
            marker="o",
            markersize=4,
            color=colour,
            label=name,
        )
    axis.axhspan(1 - TOLERANCE, 1 + TOLERANCE, color=style.GRID, alpha=0.5, zorder=0)
    axis.set_xscale("log", base=2)
    axis.set_ylim(0, 1.2)
    axis.set_xlabel("tokens of a step")
    axis.set_ylabel("modelled / measured")
    title(axis, "Linear part of a step; the band is 10 %")
    axis.legend(frameon=False, fontsize=9, loc="lower right")
    return picture


if __name__ == "__main__":
    main(__file__, study, doc=__doc__)

"""Contiguous memory under churn, and what a restart does for it.

python -m experiments.fragmentation.run [--fast]
"""

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes

from experiments.study.door import Findings, Setting, main
from experiments.study.readme import mark, table
from paxserve.claims.churn import NUM_SLOTS, NUM_STEPS, STAGES, Stage, by_stage, lives
from paxserve.report import style
from paxserve.report.style import Picture, panels, title

PLACEMENTS = {"contiguous, first fit": "first_fit", "paged (blocks of one slot)": "paged"}
_FINE = tuple((start, start + 20) for start in range(0, NUM_STEPS, 20))
_SHOWN_LIVES = 3


def study(setting: Setting) -> Findings:
    """Lives of a server; `--fast`: three of them."""
    num_lives = setting.scale.of(12, 3)
    lived = {name: lives(how, num_lives, stages=(*STAGES, *_FINE))
             for name, how in PLACEMENTS.items()}  # fmt: skip
    coarse = {name: [life[: len(STAGES)] for life in own] for name, own in lived.items()}
    fine = {name: [life[len(STAGES) :] for life in own] for name, own in lived.items()}
    return Findings(
        {"verdict": verdict(coarse), "stages": stage_table(coarse)}, {"lives": draw(fine)}
    )


type Lived = Mapping[str, Sequence[Sequence[Stage]]]


def verdict(lived: Lived) -> str:
    """Wear, cure, and that paging knows neither."""
    worn, flat = (by_stage(own) for own in lived.values())
    first = next(iter(lived.values()))[0][0]
    again = by_stage(next(iter(lived.values()))[1:])[0]
    wear = 1 - worn[-1].used_share / worn[0].used_share
    slowed = 1 - worn[-1].output_tokens_per_s / worn[0].output_tokens_per_s
    drift = max(abs(each.num_running / flat[0].num_running - 1) for each in flat)
    is_cured = again.used_share > first.used_share - 0.03
    holds = wear > 0.05 and drift < 0.1 and is_cured
    return (
        f"{mark(holds)}With age contiguous memory loses "
        f"{100 * wear:.0f} % of what it used at the start, and {100 * slowed:.0f} % of its tokens "
        f"per second; a restart brings it back to {100 * again.used_share:.1f} % in use (at first "
        f"{100 * first.used_share:.1f} %). Paged, the batch stays within {100 * drift:.0f} %."
    )


def stage_table(lived: Lived) -> str:
    """Means over all lives, by age."""
    rows = []
    for name, own in lived.items():
        for (start, end), each in zip(STAGES, by_stage(own), strict=True):
            rows.append(
                [
                    name,
                    f"{start} to {end}",
                    each.num_running,
                    each.output_tokens_per_s,
                    100 * each.used_share,
                    each.num_free,
                    _largest(each),
                ]
            )
    header = ["placement", "steps since the start", "running", "tokens per step", "in use, %"]
    return table([*header, "free slots", "largest free run"], rows)


def draw(lived: Lived) -> Picture:
    """The first lives one after the other: use, and the largest free run."""
    picture, (use, run) = panels([2.4, 2.2], share_x=True, width=9.0)
    for (name, own), colour in zip(lived.items(), style.series_colours(len(lived)), strict=True):
        stages = [stage for life in own[:_SHOWN_LIVES] for stage in life]
        times = [20 * i + 10 for i in range(len(stages))]
        use.plot(times, [100 * stage.used_share for stage in stages], color=colour, label=name)
        if _largest(stages[0]) is not None:
            run.plot(times, [stage.largest_free_run for stage in stages], color=colour)
    for axis in (use, run):
        _mark_restarts(axis)
    title(use, f"{NUM_SLOTS:,} KV slots under a queue that never empties; dotted: restarts")
    use.set_ylabel("slots in use, %")
    run.set_ylabel("largest free run, slots")
    run.set_xlabel("steps")
    use.legend(frameon=False, fontsize=9)
    return picture


def _largest(stage: Stage) -> float | None:
    """None under paging, where nothing depends on it."""
    return None if stage.largest_free_run < 0 else stage.largest_free_run


def _mark_restarts(axis: Axes) -> None:
    for life in range(1, _SHOWN_LIVES):
        axis.axvline(life * NUM_STEPS, color=style.BLACK, linestyle=":", linewidth=0.9)


if __name__ == "__main__":
    main(__file__, study, doc=__doc__)

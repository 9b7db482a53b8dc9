"""From a bench to a profile: measure, fit, and hold the fit to steps that were not fitted.

Owns: the order of that. In: a `Bench`. Out: a `Profile`. Must not know: how anything is measured or
fitted.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from paxserve.calibrate.measuring import longest_context, measure
from paxserve.calibrate.probes import designed, drawn
from paxserve.calibrate.watching import serve_and_watch
from paxserve.experiment import warm_up
from paxserve.fidelity.bench import Bench
from paxserve.pack import variant_of
from paxserve.results import environment
from paxserve.step_fit import errors, fit_host, fit_regimes
from paxserve.step_profile import TERMS, Errors, Profile
from paxserve.step_shape import StepShape

FITTED_EACH, HELD_OUT_EACH = 24, 16  # drawn steps of each padded shape


def calibrate(bench: Bench, *, repetitions: int, seed: int) -> Profile:
    """Measure the bench's executor.

    Args:
        bench: nothing else uses its executor.
        repetitions: how often each step is measured.
        seed: of the orders of measurement, and of the steps and requests that are drawn.

    Raises:
        ValueError: rows so short that there is nothing to measure; before anything was compiled.
    """
    limits, target, made = bench.limits, bench.target, bench.prepared.made
    longest, rng = longest_context(limits), np.random.default_rng(seed)
    warm_up(made.engine, bench.prepared.params, bench.progress)
    fitted, held_out = (
        drawn(bench.buckets, longest=longest, num_each=num_each, rng=rng)
        for num_each in (FITTED_EACH, HELD_OUT_EACH)
    )
    fitted += designed(bench.buckets, longest=longest)
    shapes, seconds = measure(
        bench.executor,
        [*fitted, *held_out],
        limits=limits,
        sampling=bench.row_sampling,
        repetitions=repetitions,
        rng=rng,
        progress=bench.progress,
    )
    served = serve_and_watch(bench, rng=rng)
    number = len(fitted)
    rows = [shape.num_rows for shape in served.shapes]
    host_s, host_s_per_row = fit_host(rows[:-1], served.gaps_s[:-1])
    profile = Profile(
        model=target.model,
        num_devices=target.num_devices,
        hardware=target.hardware.name,
        kv_cache_dtype=target.kv_cache_dtype,
        block_size=target.block_size,
        device=str(made.device),
        sampling=variant_of(bench.prepared.params).value,
        kernel=bench.executor.backend,
        versions=environment(made.device)["versions"],
        regimes=fit_regimes(shapes[:number], seconds[:number]),
        host_s_per_step=host_s,
        host_s_per_row=host_s_per_row,
        errors={},
    )
    found = {
        "fitted": errors_of(profile, shapes[:number], seconds[:number]),
        "held_out": errors_of(profile, shapes[number:], seconds[number:]),
        "served": errors_of(profile, served.shapes, served.durations_s),
    }
    return replace(profile, errors=found)


def errors_of(profile: Profile, shapes: Sequence[StepShape], seconds: Sequence[float]) -> Errors:
    """Of the steps themselves: what the host takes between two is no part of what they report."""
    of = profile.costs().of
    terms = [dict(zip(TERMS, of(shape), strict=True)) | {"host": 0.0} for shape in shapes]
    return errors([sum(own.values()) for own in terms], seconds)

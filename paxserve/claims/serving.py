"""Small engines on a virtual clock, one second a step, and the requests they serve.

Owns: how rows of all families build an engine and watch its plans. In: sizes, names of policies.
Out: engines, requests. Must not know: what is claimed.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from paxserve.clock import VirtualClock
from paxserve.compose import GATE, POLICY_AXES, load_policies
from paxserve.engine import Engine
from paxserve.executor import Executor
from paxserve.executor.scripted import Scripted
from paxserve.hydra_config import compose_config
from paxserve.intake import Intake
from paxserve.limits import Limits
from paxserve.notices import Notices
from paxserve.policies import Policies
from paxserve.request import Origin, Request
from paxserve.sampling_params import SamplingParams
from paxserve.settings import Knobs
from paxserve.step import StepPlan, StepResult

VOCAB_SIZE = 50_000

PLAIN: Mapping[str, str] = {
    "admission": "fcfs",
    "batching": "iteration",
    "reservation": "on_demand",
    "placement": "paged",
    "prefix_cache": "none",
    "eviction": "lru",
    "victim": "newest",
    "preemption": "recompute",
}


def policies(settings: Mapping[str, Mapping[str, Any]] | None = None, **names: str) -> Policies:
    """Iteration-level batching over paged memory, but for what is named."""
    return load_policies({**PLAIN, **names}, settings)


def baseline_policies(baseline: str) -> Policies:
    """The policies of a published system, as `configs/baseline/` composes them."""
    plain, choices, _ = compose_config([f"baseline={baseline}"])
    knobs = Knobs(plain, ())
    gates = [f"{GATE}.{name}" for name in filter(None, choices[GATE].split(","))]
    return load_policies(choices, {axis: knobs.plain(axis) for axis in (*POLICY_AXES, *gates)})


def make_limits(**sizes: int) -> Limits:
    """Room for 64 rows and all that they need, unless told otherwise."""
    defaults = {
        "max_num_seqs": 64,
        "max_num_batched_tokens": 8192,
        "max_model_len": 2048,
        "block_size": 16,
        "num_blocks": 64 * 128 + 1,
    }
    return Limits(**{**defaults, **sizes})


def make_engine(
    limits: Limits,
    chosen: Policies,
    *,
    executor: Executor | None = None,
    notices: Notices | None = None,
) -> Engine:
    """An engine without a model; its executor checks what it reads and writes, unless given."""
    scripted = Scripted(
        limits=limits, vocab_size=VOCAB_SIZE, num_host_blocks=limits.num_host_blocks
    )
    return Engine(
        limits=limits,
        policies=chosen,
        executor=executor or scripted,
        clock=VirtualClock(),
        intake=Intake(limits=limits, vocab_size=VOCAB_SIZE),
        notices=notices,
    )


def ask(
    engine: Engine, prompt: int | Iterable[int], num_output: int, *, name: str = "", **params: Any
) -> Request:
    """A request arrives. `prompt`: token ids, or how many; `params`: see `SamplingParams`."""
    token_ids = list(range(1, prompt + 1)) if isinstance(prompt, int) else list(prompt)
    return engine.submit(
        {"prompt_token_ids": token_ids},
        SamplingParams(**{"temperature": 0.0, "max_tokens": num_output, **params}),
        request_id=name or None,
        origin=Origin(num_true_output_tokens=num_output),
    )


def steps_of(engine: Engine) -> Iterator[None]:
    """Run to the end, stopping after each step."""
    while engine.has_work:
        engine.step()
        yield


def run_to_end(engine: Engine) -> None:
    """Serve everything."""
    for _ in steps_of(engine):
        pass


class Watched:
    """An executor that shows each plan before it runs."""

    def __init__(self, inner: Executor, see: Callable[[StepPlan], None]) -> None:
        self._inner = inner
        self._see = see

    def submit(self, plan: StepPlan) -> None:
        """See `Executor.submit`."""
        self._see(plan)
        self._inner.submit(plan)

    def collect(self) -> StepResult:
        """See `Executor.collect`."""
        return self._inner.collect()

    def reset(self) -> None:
        """See `Executor.reset`."""
        self._inner.reset()


def watch(engine: Engine, see: Callable[[StepPlan], None]) -> None:
    """From now on, `see` is called with each plan before it runs."""
    engine.executor = Watched(engine.executor, see)

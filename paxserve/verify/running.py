"""One workload served under every cell of a matrix, each held to the first.

Owns: what a cell means for an engine, and the verdict. In: the settings of a run. Out: a
`Verification`. Must not know: how it is shown.

Cells share one executor on a device, since compiling is what costs; they use fewer tokens, rows
and blocks of it than it has. Time is virtual: arrivals are not waited for.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from paxserve.clock import VirtualClock
from paxserve.compose import GATE, POLICY_AXES, load, load_policies
from paxserve.engine import Engine
from paxserve.executor import Executor
from paxserve.executor.scripted import Scripted
from paxserve.experiment import WRITTEN_DOWN, Prepared, Progress, prepare, warm_up
from paxserve.hydra_config import file_settings
from paxserve.intake import Intake
from paxserve.limits import Limits
from paxserve.notices import Say
from paxserve.pairs import AXES, NO_GATE, Choice, Names, axes
from paxserve.placement import Placement
from paxserve.policies import Policies
from paxserve.recorded import arrival_of
from paxserve.request import Request
from paxserve.serve import serve
from paxserve.verify.matrix import (
    BUDGET,
    CACHE,
    FORCED,
    POOL,
    TIGHT,
    WARM,
    Matrix,
    restricted,
    size_axes,
)
from paxserve.verify.tokens import Difference, Output, differences, output_of
from paxserve.workload import Arrival, Source
from paxserve.workload.sources.listed import Listed

MOST_GAP = 1e-3  # of DESIGN.md's law: where the two best are nearer, float32 may choose either
_SPARE_BLOCKS = 3  # of a tight pool, so that a gate that keeps some free lets anybody in
_NUM_HOST_BLOCKS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class CellResult:
    """What came of one cell. `error`: it broke off. `why_not`: it cannot be run as asked."""

    cell: Names
    why_not: str | None = None
    error: str | None = None
    differences: tuple[Difference, ...] = ()
    counts: Mapping[str, int] = field(default_factory=dict)

    @property
    def holds(self) -> bool:
        """Whether the law does: equal, or different only where the two best nearly tie."""
        near = all(d.gap is not None and d.gap <= MOST_GAP for d in self.differences)
        return self.error is None and near


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """All cells, the reference first; what no cell can hold; and the workload."""

    results: tuple[CellResult, ...]
    impossible: Mapping[Choice, str]
    forbidden: Mapping[frozenset[Choice], str]
    num_requests: int
    num_sequences: int
    num_tokens: int
    num_refused: int

    @property
    def holds(self) -> bool:
        """Whether the law does, in every cell."""
        return all(result.holds for result in self.results)


def verify(
    config: Mapping[str, Any],
    *,
    choices: Mapping[str, str],
    explicit: Sequence[str],
    say: Say,
    progress: Progress,
    only: Sequence[str] = (),
    quick: bool = False,
) -> Verification:
    """Serve and compare.

    Args:
        config, choices, explicit, say, progress: as of `experiment.run`; the first cell has these
            choices.
        only: `AXIS=NAME,NAME`: these choices of an axis only.
        quick: every choice once, instead of every two of different axes.

    Raises:
        ValueError: settings as of `experiment.run`; a wrong `only`; or no request could be served.
    """
    bench = Bench.made(config, choices=choices, explicit=explicit, say=say)
    warm_up(bench.prepared.made.engine, bench.prepared.params, progress)
    reference = bench.serve_first()
    axes_of = {**bench.axes, **size_axes(budget=bench.limits.max_num_batched_tokens,
                                         num_rows=bench.limits.max_num_seqs)}  # fmt: skip
    matrix = Matrix(restricted(axes_of, only), bench.why_not, quick=quick)
    results = []
    for done, cell in enumerate(matrix.cells):
        progress("cells", done, len(matrix.cells))
        results.append(bench.run(cell, reference))
    progress("cells", len(matrix.cells), len(matrix.cells))
    sequences = [tokens for output in reference.values() for tokens in output.sequences]
    return Verification(
        results=tuple(results),
        impossible=matrix.impossible,
        forbidden=matrix.forbidden,
        num_requests=len(reference),
        num_sequences=len(sequences),
        num_tokens=sum(map(len, sequences)),
        num_refused=bench.num_refused,
    )


@dataclass(slots=True, kw_only=True)
class Bench:
    """One executor and one workload, and engines over them cell by cell.

    `prepared` lends its executor, model and source; `limits` become those of the workload when it
    has been served once. Policies are frozen, so each choice is made once.
    """

    prepared: Prepared
    limits: Limits
    choices: dict[str, str]
    settings: Mapping[str, Mapping[str, Any]]
    seed: int
    step_s: float
    arrivals: list[Arrival] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    num_refused: int = 0
    made_policies: dict[Choice, Any] = field(default_factory=dict)

    @classmethod
    def made(
        cls,
        config: Mapping[str, Any],
        *,
        choices: Mapping[str, str],
        explicit: Sequence[str],
        say: Say,
    ) -> "Bench":
        """Everything that cells share: an executor that can share and swap blocks."""
        if choices["executor"] == "simulated":
            raise ValueError(
                "executor=simulated says nothing of tokens: choose executor=scripted or real"
            )
        usual = {"reservation": "on_demand", "placement": "paged", "preemption": "swap",
                 "prefix_cache": "hash_chain", "admission": "fcfs", GATE: ""}  # fmt: skip
        kept = {key: value for key, value in config.items() if key not in WRITTEN_DOWN}
        lent = {**kept, **{axis: {} for axis in (*usual, "eviction", "victim", "batching")}}
        lent["prefix_cache"] = file_settings("prefix_cache", "hash_chain")
        lent["limits"] = {**config["limits"]}
        if not config["limits"]["swap_space_gib"]:
            override = lent["limits"]["num_host_blocks_override"]
            lent["limits"]["num_host_blocks_override"] = override or _NUM_HOST_BLOCKS
        of_policies = tuple(f"{axis}." for axis in AXES)
        prepared = prepare(
            lent,
            choices={
                **choices,
                **usual,
                "batching": "chunked_prefill",
                "eviction": "lru",
                "victim": "newest",
            },
            explicit=[k for k in explicit if k not in AXES and not k.startswith(of_policies)],
            say=say,
        )
        gates = choices.get(GATE, "")
        return cls(
            prepared=prepared,
            limits=prepared.made.engine.limits,
            choices={axis: choices[axis] for axis in POLICY_AXES} | {GATE: gates or NO_GATE},
            settings={axis: config.get(axis) or {} for axis in AXES},
            seed=config.get("seed", 0),
            step_s=config["executor"].get("step_s", 0.0),
        )

    @property
    def axes(self) -> dict[str, list[str]]:
        """The project's own choices, after the ones made."""
        return {
            axis: [self.choices[axis], *(n for n in names if n != self.choices[axis])]
            for axis, names in axes().items()
        }

    def serve_first(self) -> dict[str, Output]:
        """The workload itself, as the choices say; what is served later are its requests."""
        engine = self._engine(self._policies(self.choices), self.limits)
        refused = self._serve(engine, self.prepared.source)
        if not engine.requests:
            raise ValueError(
                f"no request can be served: {refused[0] if refused else 'there is none'}"
            )
        self.num_refused = len(refused)
        self.requests = engine.requests
        self.arrivals = [arrival_of(request) for request in engine.requests]
        longest = max(request.max_known_tokens for request in engine.requests)
        self.limits = replace(self.limits, max_model_len=max(2, longest))
        return {request.request_id: output_of(request) for request in engine.requests}

    def why_not(self, cell: Names) -> str | None:
        """What forbids a cell; None if it can be run."""
        try:
            policies = self._policies(cell)
            limits = self._limits(cell, policies.placement)
            policies.check(limits)
            for request in self.requests[:1]:
                policies.check_request(replace(request, origin=self.arrivals[0].origin), limits)
        except ValueError as error:
            return str(error)
        return None

    def run(self, cell: Names, reference: Mapping[str, Output]) -> CellResult:
        """Serve the recorded requests under a cell, once or twice, and compare."""
        why_not = self.why_not(cell)
        if why_not is not None:
            return CellResult(cell=cell, why_not=why_not)
        policies = self._policies(cell)
        engine = self._engine(policies, self._limits(cell, policies.placement))
        found: list[Difference] = []
        try:
            for number in range(1 + (cell[CACHE] == WARM)):
                served, renamed = len(engine.requests), _renamed(self.arrivals, number)
                refused = self._serve(engine, Listed(renamed))
                if refused:
                    return CellResult(cell=cell, error=f"refused: {refused[0]}")
                names = [arrival.request_id for arrival in self.arrivals]
                outputs = map(output_of, engine.requests[served:])
                found += differences(reference, dict(zip(names, outputs, strict=True)))
        except Exception as error:
            self.prepared.made.engine.executor.reset()
            return CellResult(cell=cell, error=f"{type(error).__name__}: {error}")
        measured = [replace(d, gap=self._gap(d, reference, engine)) for d in found]
        return CellResult(cell=cell, differences=tuple(measured), counts=_counts(engine))

    def _serve(self, engine: Engine, source: Source) -> list[str]:
        params, tokenizer = self.prepared.params, self.prepared.made.tokenizer
        refused = serve(engine, source, params, tokenizer=tokenizer)
        return [f"request {arrival.request_id}: {why}" for arrival, why in refused]

    def _engine(self, policies: Policies, limits: Limits) -> Engine:
        prepared, model = self.prepared, self.prepared.made.model
        executor: Executor = prepared.made.engine.executor
        if model is None:
            executor = Scripted(
                limits=limits,
                vocab_size=prepared.made.vocab_size,
                step_s=self.step_s,
                num_host_blocks=limits.num_host_blocks,
            )
        return Engine(
            limits=limits,
            policies=policies,
            executor=executor,
            clock=VirtualClock(),
            intake=Intake(
                limits=limits,
                vocab_size=prepared.made.vocab_size,
                eos_token_ids=() if model is None else model.config.eos_token_ids,
                tokenizer=prepared.made.tokenizer,
                seed=self.seed,
            ),
            tokenizer=prepared.made.tokenizer,
        )

    def _policies(self, cell: Names) -> Policies:
        own = {axis: self._policy(axis, cell[axis]) for axis in POLICY_AXES}
        gates = cell[GATE].split(",") if cell[GATE] != NO_GATE else []
        own[GATE] = [self._policy(GATE, name) for name in gates]
        return load_policies({**cell, GATE: ""}, own=own)

    def _policy(self, axis: str, name: str) -> Any:
        """With the user's settings where it is the user's choice, else those of its file."""
        if (choice := Choice(axis, name)) not in self.made_policies:
            if axis == GATE:
                settings = self.settings[GATE].get(name)
            else:
                settings = self.settings[axis] if name == self.choices[axis] else None
            settings = file_settings(axis, name) if settings is None else settings
            self.made_policies[choice] = load(axis, name, settings)
        return self.made_policies[choice]

    def _limits(self, cell: Names, placement: Placement) -> Limits:
        """Those of the workload, with what the cell says of sizes."""
        forced, budget = int(cell[FORCED]), int(cell[BUDGET])
        limits = replace(self.limits, preempt_every_steps=forced, max_num_batched_tokens=budget)
        if cell[POOL] != TIGHT:
            return limits
        most = max(len(request.sequences) for request in self.requests)
        return replace(limits, num_blocks=_tight(placement, limits, num_tables=most))

    def _gap(
        self, found: Difference, reference: Mapping[str, Output], engine: Engine
    ) -> float | None:
        """See `Difference.gap`."""
        model, executor = self.prepared.made.model, self.prepared.made.engine.executor
        if model is None:
            return None
        number = [request.request_id for request in self.requests].index(found.request_id)
        request = self.requests[number]
        if request.beams is not None:
            return abs(
                reference[found.request_id].scores[found.sequence]
                - engine.requests[number].sequences[found.sequence].cumulative_logprob
            )
        from paxserve.device.gap import GapMeter
        from paxserve.executor.real import Real

        assert isinstance(executor, Real)
        meter = GapMeter(model.config, model.parameters, backend=executor.backend)
        output = reference[found.request_id].sequences[found.sequence][: found.position]
        sampling = request.sampling._replace(seed=request.sequences[found.sequence].seed)
        return meter.gap(
            (*request.prompt_token_ids, *output),
            num_prompt_tokens=request.num_prompt_tokens,
            sampling=sampling,
        )


def _renamed(arrivals: Iterable[Arrival], number: int) -> list[Arrival]:
    """Ids are used once: those of a second serving get its number."""
    if not number:
        return list(arrivals)
    return [replace(a, request_id=f"{a.request_id}#{number + 1}") for a in arrivals]


def _tight(placement: Placement, limits: Limits, *, num_tables: int) -> int:
    """The smallest pool, null block included, with a place for all tables of the longest request,
    and a few blocks to spare; at most the whole pool.
    """
    num_blocks = 1 + num_tables * limits.blocks_per_row + _SPARE_BLOCKS
    while num_blocks < limits.num_blocks:
        space = placement.open(num_blocks)
        if all(space.take(limits.blocks_per_row) is not None for _ in range(num_tables)):
            return num_blocks
        num_blocks += 1
    return limits.num_blocks


def _counts(engine: Engine) -> dict[str, int]:
    """What the cell really met with."""
    steps: dict[str, Callable[[Any], int]] = {
        "cached_tokens": lambda step: step.num_cached_tokens,
        "evicted": lambda step: step.num_evicted,
        "copied": lambda step: step.num_copied,
        "swapped": lambda step: step.num_swapped_in,
    }
    counts = {name: sum(map(count, engine.steps)) for name, count in steps.items()}
    preempted = sum(request.num_preemptions for request in engine.requests)
    return {"steps": len(engine.steps), "preempted": preempted, **counts}

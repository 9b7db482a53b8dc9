"""One model on a device, one workload, and engines that differ in executor and clock only.

Owns: what such engines have in common. In: the settings of a real run. Out: finished `Run`s. Must
not know: how runs are compared.

Compiling is what costs, so all real engines share one executor, one after another.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from paxserve.clock import Clock, RecordedClock, RecordingClock, VirtualClock, WallClock
from paxserve.cost_model import CostModel, Costs, Target
from paxserve.device.buckets import Buckets
from paxserve.engine import Engine
from paxserve.engines import hardware
from paxserve.executor import Executor
from paxserve.executor.simulated import Simulated
from paxserve.experiment import (
    WRITTEN_DOWN,
    Prepared,
    Progress,
    Run,
    prepare,
    serve_prepared,
)
from paxserve.fidelity.retold import Retold, recorded_costs, recorded_costs_and_gaps
from paxserve.intake import Intake, Prompt
from paxserve.limits import Limits
from paxserve.models.dimensions import Dimensions
from paxserve.models.load import LoadedModel
from paxserve.notices import Say
from paxserve.pack import variant_of
from paxserve.settings import Knobs
from paxserve.step import RowSampling
from paxserve.workload import Source, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """`prepared` lends its executor, model, policies and workload; `target` is what would be
    simulated in its place.
    """

    prepared: Prepared
    target: Target
    seed: int
    say: Say
    progress: Progress

    @classmethod
    def made(
        cls,
        config: Mapping[str, Any],
        *,
        choices: Mapping[str, str],
        explicit: Iterable[str],
        say: Say,
        progress: Progress,
        reads: Collection[str] = ("hardware",),
        workload: Workload | None = None,
    ) -> "Bench":
        """Build the real engine.

        Args:
            config, choices, explicit, say, progress, workload: as of `experiment.run`.
            reads: groups that a real run does not read, and the caller does.

        Raises:
            ValueError: as of `experiment.prepare`; another executor than the real one; or hardware
                of another kind than the device.
            FileNotFoundError, ModuleNotFoundError, NotImplementedError: likewise.
        """
        if choices["executor"] != "real":
            raise ValueError(f"executor={choices['executor']} measures nothing: choose real")
        asked = [key for key in explicit if key.split(".")[0] not in reads]
        config = {key: value for key, value in config.items() if key not in WRITTEN_DOWN}
        prepared = prepare(config, choices=choices, explicit=asked, say=say, workload=workload)
        return cls(
            prepared=prepared,
            target=_target(config, choices, prepared),
            seed=config.get("seed", 0),
            say=say,
            progress=progress,
        )

    @property
    def executor(self) -> Any:
        """The real one."""
        return self.prepared.made.engine.executor

    @property
    def limits(self) -> Limits:
        """Of all engines."""
        return self.prepared.made.engine.limits

    @property
    def vocab_size(self) -> int:
        """Of the model."""
        return self.prepared.made.vocab_size

    @property
    def buckets(self) -> Buckets:
        """The shapes that the real executor pads to."""
        found: Buckets = self.executor.buckets
        return found

    @property
    def row_sampling(self) -> RowSampling:
        """Of a request with the run's settings."""
        prompt: Prompt = {"prompt_token_ids": [0]}
        return self._intake().make(prompt, self.prepared.params, arrival_s=0.0).sampling

    def real(self, source: Source | None = None, *, executor: Executor | None = None) -> Run:
        """Serve on the device; the clock remembers its readings.

        Args:
            source: of arrivals; default: the workload's.
            executor: the real one, with something around it.
        """
        return self._serve(executor or self.executor, RecordingClock(WallClock()), source)

    def simulated(self, costs: Costs, told: Run, source: Source | None = None) -> Run:
        """Serve on a virtual clock, with what the sequences of a real run said."""
        executor = Retold(self._simulator(costs), told.engine.requests)
        return self._serve(executor, VirtualClock(), source)

    def retold(self, told: Run, source: Source | None = None) -> Run:
        """Serve with the recorded step times of a run of `real`, every reading of its clock told
        again: the same time everywhere, so that decisions alone could differ.
        """
        assert isinstance(told.engine.clock, RecordingClock)
        executor = Retold(self._simulator(recorded_costs(told.engine.steps)), told.engine.requests)
        return self._serve(executor, RecordedClock(told.engine.clock.readings_s), source)

    def timed(self, told: Run, source: Source | None = None) -> Run:
        """Serve on a virtual clock, with the recorded step times and host's gaps of a real run;
        when requests come between its steps is found anew.
        """
        costs = recorded_costs_and_gaps(
            told.engine.steps, told.engine.requests, start_s=told.start_s
        )
        return self.simulated(costs, told, source)

    def costs(self, cost_model: CostModel) -> Costs:
        """Of a cost model opened for what runs here."""
        return cost_model.open(self.target)

    def _simulator(self, costs: Costs) -> Simulated:
        return Simulated(
            limits=self.limits,
            vocab_size=self.vocab_size,
            costs=costs,
            bytes_per_block=self.executor.bytes_per_block,
            buckets=self.buckets,
        )

    def _serve(self, executor: Executor, clock: Clock, source: Source | None) -> Run:
        made = replace(self.prepared.made, engine=self._engine(executor, clock))
        source = self.prepared.open_source() if source is None else source
        prepared = replace(self.prepared, made=made, source=source)
        return serve_prepared(prepared, _quiet, self.progress)  # each would tell of its warm-up

    def _engine(self, executor: Executor, clock: Clock) -> Engine:
        return Engine(
            limits=self.limits,
            policies=self.prepared.made.engine.scheduler.policies,
            executor=executor,
            clock=clock,
            intake=self._intake(),
            tokenizer=self.prepared.made.tokenizer,
        )

    def _intake(self) -> Intake:
        made = self.prepared.made
        return Intake(
            limits=self.limits,
            vocab_size=made.vocab_size,
            eos_token_ids=_model(made.model).config.eos_token_ids,
            tokenizer=made.tokenizer,
            seed=self.seed,
        )


def _quiet(message: str) -> None:
    """Nobody is told."""


def _target(config: Mapping[str, Any], choices: Mapping[str, str], prepared: Prepared) -> Target:
    from paxserve.device import memory

    model, limits = _model(prepared.made.model), config["limits"]
    executor: Any = prepared.made.engine.executor
    chosen = hardware(Knobs(config, ()))
    if chosen.platform != memory.platform():
        raise ValueError(
            f"hardware={choices['hardware']} is a {chosen.platform}, and this device is a "
            f"{memory.platform()}: say what it is, as in hardware=host-cpu"
        )
    return Target(
        model=Dimensions.of(model.config, dtype=str(model.parameters["embed"].dtype)),
        hardware=chosen,
        num_devices=limits["tensor_parallel_size"],
        kv_cache_dtype=limits["kv_cache_dtype"],
        block_size=prepared.made.engine.limits.block_size,
        sampling=variant_of(prepared.params).value,
        kernel=executor.backend,
    )


def _model(model: LoadedModel | None) -> LoadedModel:
    assert model is not None, "a real engine has one"
    return model

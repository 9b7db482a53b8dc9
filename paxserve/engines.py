"""From settings to an engine, one function per executor.

Owns: which settings each executor reads. In: `Knobs`, policies, the choices made. Out: what was
made. Must not know: Hydra, workloads, how the engine will be driven.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

from paxserve.assemble import real_engine, scripted_engine, simulated_engine
from paxserve.compose import COST_MODEL, check_own, load
from paxserve.cost_model import CostModel
from paxserve.engine import Engine
from paxserve.folded import FoldedRequests
from paxserve.hardware import Hardware, check_units
from paxserve.models.dimensions import Dimensions
from paxserve.models.load import LoadedModel, load_model, model_config, stored_dtype
from paxserve.models.tokenizer import Tokenizer
from paxserve.notices import Say
from paxserve.numbers import flag
from paxserve.policies import Policies
from paxserve.settings import EngineSettings, Knobs, from_section


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """An engine, and what a workload and a report want to know of it. `model` is None where no
    weights are needed, `device` the kind of device, None without one.
    """

    engine: Engine
    vocab_size: int
    model: LoadedModel | None = None
    device: str | None = None

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's, if it has one."""
        return None if self.model is None else self.model.tokenizer


class _Asked(NamedTuple):
    knobs: Knobs
    policies: Policies
    choices: Mapping[str, str]
    seed: int
    say: Say
    logs_blocks: bool
    forks: bool
    folded: FoldedRequests | None
    own_cost_model: object
    sampling: str | None

    def settings(self, *, unread: Iterable[str], **more: Any) -> EngineSettings:
        """Limits, of which some are legal but not read by this executor."""
        self.knobs.chosen("limits")
        swap = ("swap_space_gib", "num_host_blocks_override")
        unread = (*unread, *(() if self.policies.preemption.swaps else swap))
        section = self.knobs.section("limits")
        limits = from_section(
            EngineSettings, section, unread=unread, elsewhere=("kernel", "debug", "strict")
        )
        return replace(limits, **more)

    @property
    def fixed_pool(self) -> tuple[str, ...]:
        """What a pool of a given size leaves unread."""
        is_given = self.knobs.plain("limits").get("kv_cache_memory_bytes")
        return ("memory_utilization",) if is_given else ()


def make_engine(
    executor: str,
    knobs: Knobs,
    policies: Policies,
    *,
    choices: Mapping[str, str],
    seed: int,
    say: Say,
    logs_blocks: bool,
    forks: bool,
    folded: FoldedRequests | None = None,
    own_cost_model: object = None,
    sampling: str | None = None,
) -> Made:
    """The engine that was asked for, not warmed up.

    Args:
        executor: real, simulated or scripted.
        knobs: the settings; those that are read are marked so.
        policies: as composed.
        choices: group -> the name that was chosen for it.
        seed, say, logs_blocks, forks, folded: as of `real_engine`.
        own_cost_model: in place of the one that was chosen.
        sampling: as of `simulated_engine`.

    Raises:
        ValueError, NotImplementedError, FileNotFoundError, ModuleNotFoundError: as of `load_model`
            and `real_engine`.
    """
    if executor not in _MAKERS:
        raise ValueError(f"executor={executor} is not known; choose one of {', '.join(_MAKERS)}")
    if own_cost_model is not None and executor != "simulated":
        raise ValueError(f"cost_model was given, but executor={executor} reads none")
    return _MAKERS[executor](
        _Asked(
            knobs,
            policies,
            choices,
            seed,
            say,
            logs_blocks,
            forks,
            folded,
            own_cost_model,
            sampling,
        )
    )


def _real(asked: _Asked) -> Made:
    from paxserve.device import compile_cache, memory

    knobs = asked.knobs
    compile_cache.enable()
    settings = asked.settings(
        unread=asked.fixed_pool,
        kernel=knobs.section("kernel")["backend"],
        debug=knobs.section("kernel")["debug"],
        strict=knobs.section("executor")["strict"],
    )
    section = knobs.section("model")
    if "name" not in section:
        raise ValueError(
            f"model={asked.choices.get('model')} has sizes and no weights: choose "
            "executor=simulated, or a model that can be loaded"
        )
    model = load_model(_name(section), dtype=section["dtype"], seed=asked.seed)
    engine = real_engine(
        model,
        settings=settings,
        policies=asked.policies,
        seed=asked.seed,
        say=asked.say,
        logs_blocks=asked.logs_blocks,
        folded=asked.folded,
        forks=asked.forks,
    )
    return Made(
        engine=engine,
        vocab_size=model.config.vocab_size,
        model=model,
        device=memory.device_kind(),
    )


def _simulated(asked: _Asked) -> Made:
    knobs = asked.knobs
    pads, leaps = knobs.section("executor")["pads"], knobs.section("executor")["leaps"]
    flag("executor.pads", pads)
    flag("executor.leaps", leaps)
    buckets = () if pads else ("row_buckets", "token_buckets")
    settings = asked.settings(unread=(*asked.fixed_pool, *buckets))
    model = dimensions(knobs)
    engine = simulated_engine(
        model=model,
        hardware=hardware(knobs),
        cost_model=_cost_model(asked),
        settings=settings,
        policies=asked.policies,
        pads=pads,
        leaps=leaps,
        seed=asked.seed,
        say=asked.say,
        logs_blocks=asked.logs_blocks,
        folded=asked.folded,
        sampling=asked.sampling,
    )
    return Made(engine=engine, vocab_size=model.vocab_size)


def _scripted(asked: _Asked) -> Made:
    executor = asked.knobs.section("executor")
    settings = asked.settings(
        unread=(
            "memory_utilization",
            "kv_cache_memory_bytes",
            "kv_cache_dtype",
            "tensor_parallel_size",
            "row_buckets",
            "token_buckets",
        ),
    )
    swaps = asked.policies.preemption.swaps
    engine = scripted_engine(
        settings=settings,
        policies=asked.policies,
        vocab_size=executor["vocab_size"],
        step_s=executor["step_s"],
        kv_bytes_per_token=executor["kv_bytes_per_token"] if swaps else 1,
        seed=asked.seed,
        say=asked.say,
        logs_blocks=asked.logs_blocks,
        folded=asked.folded,
    )
    return Made(engine=engine, vocab_size=executor["vocab_size"])


def dimensions(knobs: Knobs) -> Dimensions:
    """Sizes of the model that was chosen. Its number type is that of its `config.json`, if it has
    one and model.dtype was not set: nothing is loaded, so that nothing is converted either.

    Raises:
        ValueError: a size that no model can have, or a setting that is none.
    """
    section = knobs.section("model")
    knobs.used("model")
    if "name" in section:
        name, dtype = _name(section), section["dtype"]
        if not knobs.is_set("model.dtype"):
            dtype = stored_dtype(name) or dtype
        return Dimensions.of(model_config(name), dtype=dtype)
    return _made(Dimensions, "model", section)


def hardware(knobs: Knobs) -> Hardware:
    """The kind of device that was chosen.

    Raises:
        ValueError: a number that no device can have, or in another unit.
    """
    knobs.used("hardware")
    values = knobs.plain("hardware")
    check_units(values)
    return _made(Hardware, "hardware", values)


def cost_model(knobs: Knobs, name: str) -> CostModel:
    """The cost model that was chosen.

    Raises:
        ValueError: there is none of that name, or a setting that it does not have.
    """
    knobs.used(COST_MODEL)
    made: CostModel = load(COST_MODEL, name, knobs.plain("cost_model"))
    return made


def _cost_model(asked: _Asked) -> CostModel:
    if asked.own_cost_model is None:
        return cost_model(asked.knobs, asked.choices[COST_MODEL])
    check_own(COST_MODEL, asked.own_cost_model)
    own: CostModel = asked.own_cost_model  # type: ignore[assignment]
    return own


def _name(section: Mapping[str, Any]) -> str:
    unknown = sorted(set(section) - {"name", "dtype"})
    if unknown:
        raise ValueError(f"unknown settings {unknown}; model has ['dtype', 'name']")
    name: str = section["name"]
    return name


def _made[T](cls: type[T], group: str, values: Mapping[str, Any]) -> T:
    known = {field.name for field in fields(cls)}  # type: ignore[arg-type]
    unknown = sorted(set(values) - known)
    if unknown:
        raise ValueError(f"unknown settings {group}.{unknown[0]}; there are {sorted(known)}")
    missing = sorted(known - set(values) - _DEFAULTED)
    if missing:
        raise ValueError(f"{group}.{missing[0]} must be set")
    return cls(**values)


_DEFAULTED = {"gated_mlp", "tie_embeddings", "dtype"}
_MAKERS: Mapping[str, Callable[[_Asked], Made]] = {
    "real": _real,
    "simulated": _simulated,
    "scripted": _scripted,
}

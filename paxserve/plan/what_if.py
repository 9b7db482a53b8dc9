"""What KV heads, the type of the cache, and the number of devices change.

Owns: which alternatives are looked at. In: a `Setup`, a `Demand`. Out: a `Variant` each, or why it
cannot be. Must not know: how anything is counted.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from paxserve.plan import Demand, Setup
from paxserve.plan.advice import Advice, advise
from paxserve.plan.memory import num_requests, whole_memory
from paxserve.plan.steps import Steps
from paxserve.settings import KV_CACHE_DTYPES

GROUPS = (1, 2, 4, 8)
GQA_HEADS = 8  # of Llama 2 and 3, Mistral, Qwen


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One alternative, otherwise as planned.

    Attributes:
        name: what is different.
        num_devices, kv_bytes_per_token: of the whole group; weight_bytes: of each device.
        num_tokens: that the pool would hold if all of what memory leaves were used;
            num_requests: of these, at their full length.
        step_s: of one request's decode.
        advice: None with `refusal` where there is none.
        refusal: why this cannot be, or why no limits serve.
    """

    name: str
    num_devices: int
    kv_bytes_per_token: int | None = None
    weight_bytes: int | None = None
    num_tokens: int | None = None
    num_requests: int | None = None
    step_s: float | None = None
    advice: Advice | None = None
    refusal: str | None = None

    @property
    def output_tokens_per_s_and_device(self) -> float | None:
        """With the limits that are advised."""
        return None if self.advice is None else self.advice.output_tokens_per_s / self.num_devices


def variants(setup: Setup, demand: Demand) -> Iterator[Variant]:
    """The setup itself, then what differs from it in one thing."""
    yield _variant("as planned", setup, demand)
    model, settings = setup.model, setup.settings
    for heads in sorted({model.num_heads, GQA_HEADS} - {model.num_kv_heads}):
        if model.num_heads % heads == 0:
            kind = "MHA" if heads == model.num_heads else "GQA"
            other = replace(model, num_kv_heads=heads)
            yield _variant(
                f"{heads} KV heads ({kind})",
                replace(setup, model=other, workspace_bytes=None),
                demand,
            )
    for dtype in KV_CACHE_DTYPES:
        if dtype != settings.kv_cache_dtype:
            name = model.dtype if dtype == "auto" else dtype
            yield _variant(f"KV in {name}", setup.with_settings(kv_cache_dtype=dtype), demand)
    for size in GROUPS:
        if size != settings.tensor_parallel_size:
            other_size = setup.with_settings(tensor_parallel_size=size)
            devices = "1 device" if size == 1 else f"{size} devices"
            yield _variant(devices, other_size, demand)


def _variant(name: str, setup: Setup, demand: Demand) -> Variant:
    bare = Variant(name=name, num_devices=setup.num_devices)
    try:
        steps, memory = Steps(setup, demand), whole_memory(setup)
    except ValueError as error:
        return replace(bare, refusal=str(error))
    kv_bytes = setup.part.kv_bytes_per_token(setup.settings.kv_cache_dtype)
    counted = replace(
        bare,
        kv_bytes_per_token=setup.num_devices * kv_bytes,
        weight_bytes=setup.part.weight_bytes,
        num_tokens=memory.num_usable_slots,
        num_requests=num_requests(memory, demand.full_context),
        step_s=steps.decode_s(1),
    )
    try:
        return replace(counted, advice=advise(setup, demand))
    except ValueError as error:
        return replace(counted, refusal=str(error))

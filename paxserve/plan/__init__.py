"""What a model takes on some hardware, before there are weights or a device.

| file | answers |
|---|---|
| `memory.py` | where every byte of a device goes, and how many requests that lets in |
| `steps.py` | how long steps take, what bounds them, and what follows for a batch |
| `newcomers.py` | how the prompts of those who follow share the steps, and wait for each other |
| `advice.py` | which limits to serve with |
| `what_if.py` | what KV heads, the type of the cache and the number of devices change |
| `compiled.py` | the memory of a step as the device's own compiler counts it |

A plan has no arithmetic of its own where an engine has some: the pool is `assemble.planned_limits`,
steps are costed by the cost model that `executor=simulated` runs on, so both agree.
"""

from dataclasses import dataclass, replace

from paxserve.assemble import planned_limits
from paxserve.cost_model import CostModel, Target
from paxserve.hardware import Hardware
from paxserve.limits import Limits
from paxserve.models.dimensions import Dimensions
from paxserve.numbers import real, whole
from paxserve.settings import EngineSettings
from paxserve.sizing import PoolSize, step_bytes

MOST_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What is planned.

    Attributes:
        model, hardware, cost_model, settings: as of `executor=simulated`.
        whole_prompts: the batching never splits a prompt.
        workspace_bytes: memory of the largest step on each device, if a compiler was asked;
            None: the engine's own estimate.
    """

    model: Dimensions
    hardware: Hardware
    cost_model: CostModel
    settings: EngineSettings
    whole_prompts: bool = False
    workspace_bytes: int | None = None

    @property
    def num_devices(self) -> int:
        """Of the group."""
        return self.settings.tensor_parallel_size

    @property
    def part(self) -> Dimensions:
        """The model as one device has it."""
        return self.model.share(self.num_devices)

    @property
    def target(self) -> Target:
        """What the cost model is opened for."""
        return Target(
            model=self.model,
            hardware=self.hardware,
            num_devices=self.num_devices,
            kv_cache_dtype=self.settings.kv_cache_dtype,
            block_size=self.settings.block_size,
        )

    def limits(self) -> tuple[PoolSize, Limits]:
        """Pool and limits of the engine.

        Raises:
            ValueError: as of `planned_limits`.
        """
        return planned_limits(
            self.model,
            self.hardware,
            self.settings,
            whole_prompts=self.whole_prompts,
            workspace_bytes=self.workspace_bytes,
        )

    def step_bytes(self, limits: Limits) -> int:
        """Memory that is set aside for the largest step on each device."""
        if self.workspace_bytes is not None:
            return self.workspace_bytes
        return step_bytes(
            self.part,
            num_tokens=limits.max_num_batched_tokens,
            num_rows=limits.max_num_seqs,
            num_devices=self.num_devices,
        )

    def with_settings(self, **changed: object) -> "Setup":
        """The same with other settings; the estimate of a step's memory, since that was compiled
        for these.
        """
        settings = replace(self.settings, **changed)  # type: ignore[arg-type]
        return replace(self, settings=settings, workspace_bytes=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What is expected of requests, and asked of the server.

    Attributes:
        input_tokens, output_tokens: of a request.
        tpot_s: no step may take longer, so no request waits longer for a token.
    """

    input_tokens: int = 1024
    output_tokens: int = 256
    tpot_s: float = 0.05

    def __post_init__(self) -> None:
        """Check the numbers."""
        for name in ("input_tokens", "output_tokens"):
            whole(name, getattr(self, name), low=1, high=10**7)
        real("tpot_s", self.tpot_s, high=MOST_S, above=True)

    @property
    def mean_context(self) -> int:
        """Tokens that a decode reads, in the mean over a request's life."""
        return self.input_tokens + (self.output_tokens + 1) // 2

    @property
    def full_context(self) -> int:
        """KV slots that a request holds at its end; the last token's are never written."""
        return self.input_tokens + self.output_tokens - 1

    def check(self, limits: Limits) -> None:
        """Refuse requests that are longer than the engine takes.

        Raises:
            ValueError: they are.
        """
        total = self.input_tokens + self.output_tokens
        if total > limits.max_model_len:
            raise ValueError(
                f"input_tokens={self.input_tokens} and output_tokens={self.output_tokens} are "
                f"{total} tokens, beyond max_model_len={limits.max_model_len}"
            )

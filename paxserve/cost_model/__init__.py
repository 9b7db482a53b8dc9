"""Axis: how long a simulated step takes.

A cost model is opened for a model on a kind of device, and then asked for the seconds of each step,
term by term; what a step takes is their sum. The terms have names and stand in `steps.parquet`.
It must not know policies, requests, or what came before.

One of your own is a frozen dataclass, chosen by `cost_model=my_module:MyModel` in run, plan and
capacity, or given as `policies={"cost_model": MyModel()}`:

    @dataclass(frozen=True)
    class MyModel:
        s_per_token: float = 1e-5

        def open(self, target):
            def of(shape):
                return 0.004, self.s_per_token * shape.num_tokens

            return Costs(("fixed", "tokens"), of)

Its times must be finite and at least 0, as many as its terms.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from paxserve.hardware import Hardware
from paxserve.models.dimensions import Dimensions
from paxserve.step_shape import StepShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What is simulated: `model` on `num_devices` of `hardware`, KV of `kv_cache_dtype` in blocks
    of `block_size` tokens; `sampling`, the variant of its steps (greedy, sampled, logprobs), and
    `kernel`, the backend of attention, where they are known.
    """

    model: Dimensions
    hardware: Hardware
    num_devices: int
    kv_cache_dtype: str
    block_size: int
    sampling: str | None = None
    kernel: str | None = None


class Costs(NamedTuple):
    """A cost model for one target: the names of its terms, and their seconds for a step. ridge:
    FLOP per byte above which a part takes what its arithmetic takes, else what its bytes take;
    None where the model does not look at either.
    """

    terms: tuple[str, ...]
    of: Callable[[StepShape], tuple[float, ...]]
    ridge: float | None = None


class CostModel(Protocol):
    """A choice of this axis."""

    def open(self, target: Target) -> Costs:
        """For one model on one kind of device.

        Raises:
            ValueError: the target lacks something, or the model has no answer for it.
        """

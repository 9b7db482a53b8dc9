"""paxserve: continuous batching and PagedAttention as separate, swappable policies, on JAX.

`from paxserve import LLM, SamplingParams` is the door for scripts and notebooks. `LLM` is looked up
when it is first asked for, so that the scheduler, policies and the scripted executor can be
imported and run without jax.
"""

from typing import TYPE_CHECKING, Any

from paxserve.outputs import CompletionOutput, RequestOutput
from paxserve.sampling_params import SamplingParams

if TYPE_CHECKING:
    from paxserve.llm import LLM

__all__ = ["LLM", "CompletionOutput", "RequestOutput", "SamplingParams"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from paxserve.llm import LLM

        return LLM
    raise AttributeError(f"module 'paxserve' has no attribute {name!r}")

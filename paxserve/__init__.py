"""paxserve: continuous batching and PagedAttention as separate, swappable policies, on JAX.

`from paxserve import LLM, SamplingParams` is the door to a model, `paxserve.run` and
`paxserve.compare` that to experiments. They are looked up when they are first asked for, so that
the scheduler, policies and the scripted executor can be imported and run without jax, and without
what only pictures and tables need.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from paxserve.outputs import BeamSearchOutput, CompletionOutput, RequestOutput
from paxserve.sampling_params import BeamSearchParams, SamplingParams

if TYPE_CHECKING:
    from paxserve.llm import LLM
    from paxserve.notebook import Comparison, Result, compare, run

__all__ = [
    "LLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "Comparison",
    "CompletionOutput",
    "RequestOutput",
    "Result",
    "SamplingParams",
    "compare",
    "run",
]
__version__ = "0.1.0"

_LOOKED_UP = {
    "LLM": "paxserve.llm",
    "Comparison": "paxserve.notebook",
    "Result": "paxserve.notebook",
    "compare": "paxserve.notebook",
    "run": "paxserve.notebook",
}


def __getattr__(name: str) -> Any:
    if name in _LOOKED_UP:
        return getattr(import_module(_LOOKED_UP[name]), name)
    raise AttributeError(f"module 'paxserve' has no attribute {name!r}")

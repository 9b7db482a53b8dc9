"""Counts what JAX compiles, whoever asked for it.

Owns: a listener on JAX's own events. An executable read from the persistent cache counts too, as
`num_cached`: it stalls a step less, but a step after warm-up must meet neither.
"""

from dataclasses import dataclass

import jax.monitoring

_COMPILE = "/jax/core/compile/backend_compile_duration"
_CACHE_HIT = "/jax/compilation_cache/cache_hits"


@dataclass(slots=True)
class CompileCounter:
    """Programs built since it was made; JAX has no way to take a listener off again."""

    num_compiles: int = 0
    num_cached: int = 0
    seconds: float = 0.0

    def __post_init__(self) -> None:
        """Listen."""
        jax.monitoring.register_event_duration_secs_listener(self._on_duration)
        jax.monitoring.register_event_listener(self._on_event)

    def _on_duration(self, event: str, duration_secs: float, **_: str | int) -> None:
        if event == _COMPILE:
            self.num_compiles += 1
            self.seconds += duration_secs

    def _on_event(self, event: str, **_: str | int) -> None:
        if event == _CACHE_HIT:
            self.num_cached += 1

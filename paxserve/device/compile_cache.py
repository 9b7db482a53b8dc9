"""JAX's persistent compile cache, in a directory of the user's own.

Owns: where compiled programs are kept between processes. Must run before the first compilation,
else nothing is cached. Never a shared directory: whoever can write there can run code as the user.
"""

from pathlib import Path

import jax


def enable(directory: Path | None = None) -> Path:
    """Keep every compiled program, however small; an already configured directory wins.

    Args:
        directory: default: `~/.cache/paxserve/jax`, made with mode 0700.
    """
    configured = jax.config.jax_compilation_cache_dir
    chosen = Path(configured) if configured else directory or _default()
    chosen.mkdir(mode=0o700, parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(chosen))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return chosen


def _default() -> Path:
    return Path.home() / ".cache" / "paxserve" / "jax"

"""vLLM's flags: see README.md."""

"""vLLM's Figure 12: see README.md."""

"""vLLM's Figure 13: see README.md."""

"""vLLM's Figure 17: see README.md."""

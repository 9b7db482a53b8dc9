"""vLLM's Figure 2: see README.md."""

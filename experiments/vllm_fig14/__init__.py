"""vLLM's Figures 14 and 15: see README.md."""

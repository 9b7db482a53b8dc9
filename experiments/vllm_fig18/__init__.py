"""vLLM's Figures 18b and 19b: see README.md."""

"""The simulated engine against the real one on this machine's CPU; see README.md."""

"""Orca's Figure 10: see README.md."""

"""Shortest first, with lengths that are predicted: see README.md."""

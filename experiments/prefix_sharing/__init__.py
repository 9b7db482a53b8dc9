"""One system prompt for all: see README.md."""

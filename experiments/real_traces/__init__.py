"""Azure's and Mooncake's traces: see README.md."""

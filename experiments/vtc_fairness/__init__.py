"""Fair sharing between clients: see README.md."""

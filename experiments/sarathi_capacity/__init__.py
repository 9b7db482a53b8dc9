"""Sarathi-Serve's capacity: see README.md."""

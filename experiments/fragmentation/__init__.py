"""Contiguous memory under churn: see README.md."""

"""What a long prompt does to others: see README.md."""

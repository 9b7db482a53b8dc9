"""Sources of arrivals: what workloads open. Not a choice of any axis."""

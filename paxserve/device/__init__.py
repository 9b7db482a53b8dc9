"""Device code: what runs under jit, and the arrays it reads and writes."""

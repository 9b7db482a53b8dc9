"""Model families as data: configuration, weights as numpy arrays, tokenizers. No jax here."""

"""Random weights for any configuration.

Owns: the scale of each kind of parameter. In: a `ModelConfig` and a seed. Out: numpy arrays by
our names. Must not know: files, jax.
"""

import zlib

import numpy as np

from paxserve.models.config import ModelConfig, parameter_shapes
from paxserve.models.parameters import Array, parameter_dtype


def random_parameters(
    config: ModelConfig, *, dtype: str = "float32", seed: int = 0
) -> dict[str, Array]:
    """Weights drawn so that activations keep a size of about one from layer to layer.

    Matrices have standard deviation fan_in**-0.5 (the embedding hidden_size**-0.5, so tied
    logits are about one too), norms are 1, biases 0.02. Each parameter has its own stream, named
    by seed and parameter, so one does not move when another is added.
    """
    as_dtype = parameter_dtype(dtype)
    parameters: dict[str, Array] = {}
    for name, shape in parameter_shapes(config).items():
        rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
        if name.endswith("norm"):
            values = np.ones(shape, np.float32)
        else:
            scale = _random_scale(name, shape)
            values = rng.standard_normal(shape, dtype=np.float32) * np.float32(scale)
        parameters[name] = values.astype(as_dtype)
    return parameters


def _random_scale(name: str, shape: tuple[int, ...]) -> float:
    if name.endswith("bias"):
        return 0.02
    fan_in = shape[1] if name == "embed" else shape[0]
    return float(fan_in**-0.5)

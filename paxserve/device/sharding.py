"""Tensor parallelism: which part of the parameters and of the KV each device of a group holds.

Owns: the mesh, the way every parameter is split, what a device's share of a model is, and how one
program per device is made of a function. In: a configuration and a group size. Out: meshes,
partition specs, placed arrays. Must not know: the order of layers, kernels.

Heads and the MLP are split by columns on the way in and by rows on the way out, so a layer needs
two sums over the group (Shoeybi et al., "Megatron-LM", 2019); embedding and logits are split over
the vocabulary; norms, rotary phases, and biases that follow a sum are everywhere. KV lies with its
heads:

    q k v gate up   [D, out / n]    o down   [in / n, D]    embed [V / n, D]    lm_head [D, V / n]

A group of one has no mesh (None), and its program has no trace of any of this.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from paxserve.models.config import ModelConfig

AXIS = "model"

_SHARED = ("num_kv_heads", "num_heads", "mlp_size", "vocab_size")
_EVERYWHERE = PartitionSpec()
_SPLIT = {
    **dict.fromkeys(("q", "k", "v", "gate", "up", "lm_head"), PartitionSpec(None, AXIS)),
    **dict.fromkeys(("q_bias", "k_bias", "v_bias", "gate_bias", "up_bias"), PartitionSpec(AXIS)),
    **dict.fromkeys(("o", "down", "embed"), PartitionSpec(AXIS, None)),
}


def check_group(config: ModelConfig, size: int) -> None:
    """Refuse a model that a group of this size cannot share evenly.

    Nothing is padded or replicated to make it fit: a device would compute what nobody reads, and
    its share of the memory would not be the one that was sized.

    Raises:
        ValueError: the size is no count, or heads, MLP or vocabulary do not divide.
    """
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ValueError(f"tensor_parallel_size must be an integer >= 1, got {size!r}")
    counts = {name: getattr(config, name) for name in _SHARED}
    for name, value in counts.items():
        if value % size:
            fitting = [n for n in range(1, size) if not any(c % n for c in counts.values())]
            raise ValueError(
                f"tensor_parallel_size={size} must divide {name}={value}: take one of {fitting}, "
                "which divide all that is split"
            )


def group_devices(size: int) -> Sequence[jax.Device]:
    """The first devices that JAX has.

    Raises:
        ValueError: there are not so many.
    """
    found = jax.devices()
    if len(found) < size:
        hint = (
            f"simulate them with JAX_NUM_CPU_DEVICES={size} in the environment, or "
            if found[0].platform == "cpu"
            else ""
        )
        raise ValueError(
            f"tensor_parallel_size={size} needs as many devices, and there are {len(found)} "
            f"({found[0].device_kind}): {hint}lower it"
        )
    return found[:size]


def make_mesh(devices: Sequence[jax.Device]) -> Mesh | None:
    """These devices as a group; None for a group of one."""
    return None if len(devices) == 1 else Mesh(np.array(devices), (AXIS,))


def share(config: ModelConfig, size: int) -> ModelConfig:
    """The model as one device has it: its heads and its part of the MLP. The vocabulary stays
    whole, as logits are gathered before a token is chosen.
    """
    return replace(
        config,
        num_heads=config.num_heads // size,
        num_kv_heads=config.num_kv_heads // size,
        mlp_size=config.mlp_size // size,
    )


def parameter_spec(name: str) -> PartitionSpec:
    """How a parameter of `parameter_shapes` is split."""
    return _SPLIT.get(name.rpartition(".")[2], _EVERYWHERE)


def num_parts(name: str, size: int) -> int:
    """Into how many equal parts a group of this size splits a parameter: 1 if it is everywhere."""
    return 1 if parameter_spec(name) == _EVERYWHERE else size


def place_parameters(
    parameters: Mapping[str, np.ndarray], mesh: Mesh | None
) -> dict[str, jax.Array]:
    """Each device gets its part, and no more than that passes through it."""
    if mesh is None:
        return {name: jnp.asarray(array) for name, array in parameters.items()}
    return {
        name: jax.device_put(array, NamedSharding(mesh, parameter_spec(name)))
        for name, array in parameters.items()
    }


def place_rest(arrays: Any, mesh: Mesh | None) -> Any:
    """Arrays that are not on the mesh yet, on all its devices alike."""
    if mesh is None:
        return arrays
    return jax.tree.map(
        lambda array: (
            array
            if isinstance(array.sharding, NamedSharding)
            else jax.device_put(array, NamedSharding(mesh, _EVERYWHERE))
        ),
        arrays,
    )


def shardings(mesh: Mesh | None, specs: Any) -> Any:
    """The shardings of partition specs, for `jax.device_put`; None, JAX's first device, without a
    mesh.
    """
    return None if mesh is None else jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)


def specs_of(arrays: Any) -> Any:
    """The partition spec of each array; an array that no mesh has seen is everywhere."""
    return jax.tree.map(
        lambda array: (
            array.sharding.spec if isinstance(array.sharding, NamedSharding) else _EVERYWHERE
        ),
        arrays,
    )


def per_device[**P, T](
    function: Callable[P, T], mesh: Mesh | None, *, in_specs: Any, out_specs: Any
) -> Callable[P, T]:
    """The function run by every device on its own part; the function itself without a mesh.

    JAX does not check here that what leaves with an empty spec is equal on all devices: kernels
    start their loops from constants, which that check takes for another kind of value. It is equal
    since each such value is made of gathered and summed ones by the same program; tests compare.
    """
    if mesh is None:
        return function
    return jax.shard_map(
        function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )

"""The memory of a planned step as the device's own compiler counts it.

Owns: which step stands for all, and what cannot be compiled. The step is the largest of the engine,
its program the one that `executor=real` runs (`device/whole_step.py`). In: a `Setup`. Out: bytes of
each device beside weights and KV. Must not know: how a compiler is asked; jax, but in the process
that compiles.
"""

from paxserve.check_kernels_command import in_compiler_process
from paxserve.models.config import ModelConfig
from paxserve.models.dimensions import Dimensions
from paxserve.plan import Setup


def workspace_bytes(setup: Setup) -> int:
    """Compile the largest step. Takes minutes for large models.

    Raises:
        ValueError: the model or its share does not fit, or the hardware is no target.
        NotImplementedError: the engine cannot run the model, or the kernels this case.
        ModuleNotFoundError: the compiler of the target is not installed.
    """
    target = setup.hardware.compile_target
    if target is None:
        raise ValueError(
            f"--compile: JAX cannot compile for {setup.hardware.name} without it (no "
            "hardware.compile_target): leave --compile out for the engine's estimate"
        )
    config = model_config(setup.model)
    _, limits = setup.limits()
    return in_compiler_process(
        _compile,
        target,
        {
            "config": config,
            "num_tokens": limits.max_num_batched_tokens,
            "num_rows": limits.max_num_seqs,
            # The pool is an argument, and no step takes longer for what lies in it: one block each.
            "context_len": limits.block_size,
            "max_model_len": limits.max_model_len,
            "block_size": limits.block_size,
            "dtype": setup.model.dtype,
            "kv_cache_dtype": setup.settings.kv_cache_dtype,
            "tensor_parallel_size": setup.num_devices,
        },
    )


def model_config(model: Dimensions) -> ModelConfig:
    """A model of the Llama family with these sizes; rotary frequencies take no memory of a step.

    Raises:
        NotImplementedError: it is none.
    """
    if not model.gated_mlp:
        raise NotImplementedError(
            "--compile: gated_mlp=false, as OPT and GPT have it, is no model of the Llama family, "
            "so the engine has no step of it to compile: leave --compile out"
        )
    return ModelConfig(
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        mlp_size=model.mlp_size,
        num_layers=model.num_layers,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        max_position=model.max_position,
        tie_embeddings=model.tie_embeddings,
    )


def _compile(target: str, sizes: dict[str, object]) -> int:
    """In the compilers' process."""
    from kernels_pallas.compile_targets import TARGETS, group_target
    from kernels_pallas.paged_attention import choose_backend
    from paxserve.device.whole_step import StepCase, compile_step

    case = StepCase(**sizes)  # type: ignore[arg-type]
    name = group_target(target, case.tensor_parallel_size)
    backend = choose_backend(TARGETS[name].platform)
    try:
        memory = compile_step(name, case, backend=backend)
    except RuntimeError as error:
        if "cannot compile for" not in str(error):
            raise
        raise ModuleNotFoundError(
            f"--compile: {error}, into .venv/.compilers; then put that on PYTHONPATH, as the "
            "target check-kernels of the Makefile does"
        ) from error
    return memory.total_bytes - case.weight_bytes - case.kv_bytes(backend)

"""The environment variables under which JAX compiles for accelerators that are not there.

Owns: their values. They are read when jax is imported, so whoever starts a process sets them; this
module imports nothing.
"""

# Only the CPU is a device; libtpu does not look for a machine around it, and may be loaded by
# several processes, as none of them owns a chip.
COMPILE_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "JAX_NUM_CPU_DEVICES": "4",  # threads of the simulated GPU
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}

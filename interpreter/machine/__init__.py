"""A machine that runs PTX on a CPU; it knows nothing of the kernels that it runs."""

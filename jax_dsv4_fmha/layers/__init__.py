"""Attention layers of DeepSeek-V4, and of models with latent attention, as pure functions on arrays and pytrees, from
hidden states to hidden states.
"""

from ._few_rows import step_product
from ._step_psum import step_psum
from .attention import DSV4Attention
from .compressor import Compressor
from .config import from_config
from .hadamard import hadamard
from .indexer import Indexer
from .latent import LatentAttention
from .outputs import LayerCache, Output, Shared
from .pooling import RunningSums
from .rope import Rope, inverse_rope, rope
from .weights import from_state_dict, to_state_dict
from .zigzag import unzigzag, zigzag

STEP_OPTIONS = {"xla_gpu_command_buffer_scheduling_mode": "CONCURRENT"}
"""XLA's options for a jitted step: on GPUs, kernels that do not depend on each other run at the same time. The results
are the same. On a CPU they change nothing. `jax.jit(layer.step, donate_argnums=2, …)` takes them as `compiler_options`.
"""

__all__ = [
    "STEP_OPTIONS",
    "Compressor",
    "DSV4Attention",
    "Indexer",
    "LatentAttention",
    "LayerCache",
    "Output",
    "Rope",
    "RunningSums",
    "Shared",
    "from_config",
    "from_state_dict",
    "hadamard",
    "inverse_rope",
    "rope",
    "step_product",
    "step_psum",
    "to_state_dict",
    "unzigzag",
    "zigzag",
]

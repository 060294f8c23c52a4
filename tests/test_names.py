"""The public names, and no others."""

import os
import subprocess
import sys
from pathlib import Path

import jax_dsv4_fmha
from jax_dsv4_fmha import layers

PUBLIC = [
    "Cache",
    "EXPORT_CHECKS",
    "Span",
    "dequantize_cache",
    "dot_product_attention",
    "dsv4_attention",
    "dsv4_decode",
    "explain",
    "fmha",
    "head_summed_probabilities",
    "indexer_blocks",
    "indexer_loss",
    "indexer_scores",
    "lightning_indexer",
    "merge",
    "quantize_cache",
    "quantize_indexer",
    "reference",
    "sparse_fmha",
]


def test_public_names():
    """In a separate process, because importing a module adds its name to the package."""
    code = "import jax_dsv4_fmha as x; print(sorted(x.__all__)); print([n for n in dir(x) if not n.startswith('_')])"
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    assert done.stdout.splitlines() == [str(PUBLIC)] * 2


LAYERS = [
    "Choice",
    "Compressor",
    "DSV4Attention",
    "Indexer",
    "LayerCache",
    "Output",
    "Rope",
    "Shared",
    "from_config",
    "from_state_dict",
    "hadamard",
    "inverse_rope",
    "rope",
]


def test_public_names_of_layers():
    assert sorted(layers.__all__) == LAYERS
    assert all(callable(getattr(layers, name)) for name in LAYERS)


def test_an_ops_name_is_the_function():
    assert all(callable(getattr(jax_dsv4_fmha, name)) for name in PUBLIC if name not in ("EXPORT_CHECKS", "reference"))

"""The reference's memory is bounded: measured in a separate process, as the greatest resident size."""

import os
import subprocess
import sys

import pytest

RUN = """
import sys
import jax, jax.numpy as jnp
from jax_dsv4_fmha import Span, fmha

s, h, d, with_gradient = map(int, sys.argv[1:])
q, kv = jnp.ones((1, s, h, d), jnp.bfloat16), jnp.ones((1, s, 1, d), jnp.bfloat16)
attention = lambda q, kv: fmha(q, kv, span=Span.sliding_window(s, 128), implementation="reference")[0]
if with_gradient:
    attention = jax.grad(lambda q, kv: fmha(q, kv, span=Span.causal(s))[0].astype(jnp.float32).sum(), (0, 1))
jax.block_until_ready(jax.jit(attention)(q, kv))
# not ru_maxrss: across exec that keeps the peak of the process that started this one
print(next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) / 2**20)
"""


@pytest.mark.parametrize(
    "s, h, d, with_gradient, gib",
    [
        (8192, 64, 64, 0, 2.0),  # one matrix of logits alone would be 16 GiB; q and o are 1/8 GiB
        (4096, 8, 64, 1, 1.0),  # one matrix of logits alone would be 0.5 GiB, and a gradient keeps several
    ],
    ids=["window", "gradient"],
)
def test_peak(s, h, d, with_gradient, gib):
    command = [sys.executable, "-c", RUN, *map(str, (s, h, d, with_gradient))]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < gib

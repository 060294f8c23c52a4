"""The suites of rows that `python -m jax_dsv4_fmha bench` times, and the code that measures a row."""

from . import attention, decode, devices, experts, gqa, gradient, indexer, latent, layer, product, prompt, v41
from .row import Suite

SUITES: dict[str, Suite] = {
    suite.name: suite
    for suite in (
        *attention.SUITES,
        latent.SUITE,
        decode.SUITE,
        gqa.SUITE,
        gradient.SUITE,
        indexer.SUITE,
        layer.SUITE,
        product.SUITE,
        experts.SUITE,
        prompt.SUITE,
        devices.SUITE,
        v41.SUITE,
    )
}

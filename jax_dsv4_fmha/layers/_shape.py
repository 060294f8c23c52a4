"""The static part of a layer: its sizes, its parts, and the shapes of its parameters."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from .. import _check
from .._definitions import explicit_axes
from .._definitions.e4m3 import BF16_ROPE, PRODUCTS, ROPE
from .._definitions.packed import LAYOUTS
from . import _operands
from ._rounding import Rounding
from .compressor import Compressor
from .indexer import Indexer
from .rope import Rope


@dataclasses.dataclass(frozen=True)
class LayerShape:
    """The sizes and parts of a `DSV4Attention`, which describes them, and its parameters."""

    hidden: int
    heads: int
    d: int = 512
    q_rank: int = 1024
    o_groups: int = 8
    o_rank: int = 1024
    window: int = 128
    rope: Rope = dataclasses.field(default_factory=Rope)
    ratio: int = 0
    compressor: Compressor | None = None
    sparse: bool = False
    indexer: Indexer | None = None
    norm_heads: bool = True
    fake_quantize: bool = False
    eps: float = 1e-6
    precision: str | None = None

    def __post_init__(self) -> None:
        _check_sizes(self)
        _check_parts(self)
        if self.indexer is not None:
            _check_indexer(self, self.indexer)

    def init(self, key: jax.Array, dtype: Any = jnp.float32) -> dict[str, Any]:
        """Random parameters: matrices in dtype; norms, sinks and `ape` in float32, as `from_state_dict` has them."""
        dtype = _check.dtype(_OP, "dtype", dtype, _check.FLOAT, " or ".join(map(str, _check.FLOAT)))
        keys = iter(jax.random.split(key, 7))

        def normal(fan_in: int, *shape: int) -> jax.Array:
            return jax.random.normal(next(keys), shape, jnp.float32) * fan_in**-0.5

        m, h, d, g = self.hidden, self.heads, self.d, self.o_groups
        params: dict[str, Any] = {
            "wq_a": normal(m, m, self.q_rank),
            "q_norm": jnp.ones(self.q_rank, jnp.float32),
            "wq_b": normal(self.q_rank, self.q_rank, h, d),
            "wkv": normal(m, m, d),
            "kv_norm": jnp.ones(d, jnp.float32),
            "sink": jnp.zeros(h, jnp.float32),
            "wo_a": normal(h // g * d, g, h // g, d, self.o_rank),
            "wo_b": normal(g * self.o_rank, g, self.o_rank, m),
        }
        if self.compressor is not None:
            params["compressor"] = self.compressor.init(next(keys))
        if self.indexer is not None:
            params["indexer"] = self.indexer.init(next(keys))
        return _operands.with_matrices_in(params, dtype)

    def partition(
        self, heads: str | tuple[str, ...] | None = None, mesh: Any = None, *, params: Any = None
    ) -> dict[str, Any]:
        """The PartitionSpec of each parameter on a mesh whose axis (or axes) `heads` shards the query heads.

        All other parameters, and the indexer's, are whole on each device. The one collective is the sum over groups of
        heads.

        Args:
          heads: names of axes; None shards nothing.
          mesh: the Mesh or AbstractMesh; by default that of `jax.set_mesh`, if there is one.
          params: parameters of which some may be packed, or their shapes, also as `joined` makes them: a packed one has
            the PartitionSpec of its data. None means parameters as `init` makes them.

        Raises:
          ValueError, TypeError: params are not of this layer.
          ValueError: the mesh does not have these axes, or more devices share the heads than `o_groups` can be divided
            over. Without a mesh, placing the parameters is then JAX's error, which names none of them.
        """
        _check_heads_over(self, heads, mesh)
        specs = jax.tree.map(lambda _: PartitionSpec(), _operands.shapes(self))
        split = {name: PartitionSpec(heads) for name in ("sink", "wo_a", "wo_b")}
        found = {**specs, **split, "wq_b": PartitionSpec(None, heads)}
        if params is None:
            return found
        found = _operands.of_form(params, found)
        return _operands.of_data(_OP, "params", params, found)


def formats(layer: LayerShape) -> tuple[str, str]:
    """The layouts in which the model keeps latents and entries."""
    return ("v4_fp8", "v4_fp8") if layer.norm_heads else ("v41_fp8", "v41_fp4")


def plain_dims(layer: LayerShape) -> int:
    """The number of dimensions of latents and entries, the last ones, that are not codes in these layouts."""
    return layer.rope.dims if layer.norm_heads else 0


def roundings(layer: LayerShape) -> tuple[Rounding, Rounding]:
    """The roundings of latents and entries by `fake_quantize`."""
    near, far = ((layout, plain_dims(layer)) if layer.fake_quantize else None for layout in formats(layer))
    return near, far


def _check_sizes(layer: LayerShape) -> None:
    for name in ("hidden", "heads", "d", "q_rank", "o_groups", "o_rank", "window"):
        _check.positive(_OP, name, getattr(layer, name))
    _check.integer(_OP, "ratio", layer.ratio, 0)
    _check.epsilon(_OP, layer.eps)
    for name in ("sparse", "norm_heads", "fake_quantize"):
        _check.flags(_OP, **{name: getattr(layer, name)})
    _check.one_of(_OP, "precision", layer.precision, (None, *PRODUCTS))
    if layer.heads % layer.o_groups:
        raise _check.error(ValueError, _OP, "o_groups", layer.o_groups, f"a divisor of the {layer.heads} heads")


def _check_parts(layer: LayerShape) -> None:
    for name, kind in (("rope", Rope), ("compressor", Compressor | None), ("indexer", Indexer | None)):
        if not isinstance(getattr(layer, name), kind):
            raise _check.error(TypeError, _OP, name, getattr(layer, name), f"a {name.title()}")
    if layer.precision == BF16_ROPE and layer.rope.dims != ROPE:
        raise _check.error(ValueError, _OP, "rope", f"{layer.rope.dims} dims", f"{ROPE} with precision={BF16_ROPE!r}")
    if layer.rope.dims > layer.d:
        raise _check.error(ValueError, _OP, "rope", f"{layer.rope.dims} dims", f"at most d={layer.d}")
    own = layer.compressor
    if own is not None and (own.hidden, own.d, own.ratio) != (layer.hidden, layer.d, layer.ratio):
        got, wanted = (f"hidden={x.hidden}, d={x.d}, ratio={x.ratio}" for x in (own, layer))
        raise _check.error(ValueError, _OP, "compressor", got, wanted)
    if layer.fake_quantize:
        plain = plain_dims(layer)
        for layout in formats(layer)[: 1 + (own is not None)]:
            if (layer.d - plain) % (group := LAYOUTS[layout].group):
                wanted = f"a multiple of {group} with fake_quantize" + f", and {plain} for RoPE" * layer.norm_heads
                raise _check.error(ValueError, _OP, "d", layer.d, wanted)
    if layer.sparse and not layer.ratio:
        raise _check.error(ValueError, _OP, "sparse", layer.sparse, "False with ratio 0")


def _check_indexer(layer: LayerShape, indexer: Indexer) -> None:
    wanted = {"hidden": layer.hidden, "q_rank": layer.q_rank, "fake_quantize": layer.fake_quantize, "pool": 0}
    if indexer.latent:
        wanted["latent"] = layer.d
    for name, n in wanted.items():
        if getattr(indexer, name) != n:
            raise _check.error(ValueError, _OP, f"indexer.{name}", getattr(indexer, name), str(n))
    if layer.rope.dims > indexer.d:
        raise _check.error(ValueError, _OP, "indexer.d", indexer.d, f"at least the {layer.rope.dims} dims of rope")
    if not layer.sparse:
        raise _check.error(ValueError, _OP, "sparse", layer.sparse, "True with an indexer")
    if indexer.owns_keys and layer.compressor is None:
        raise _check.error(ValueError, _OP, "compressor", None, "one with an indexer that makes keys")
    own = indexer.compressor
    if own is not None and own.ratio != layer.ratio:
        raise _check.error(ValueError, _OP, "indexer.compressor.ratio", own.ratio, f"the layer's {layer.ratio}")


def _check_heads_over(layer: LayerShape, heads: str | tuple[str, ...] | None, mesh: Any) -> None:
    names, is_given = explicit_axes.names(heads), mesh is not None
    sizes = (mesh if is_given else jax.sharding.get_abstract_mesh()).shape
    if missing := [name for name in names if name not in sizes]:
        if is_given:
            raise _check.error(ValueError, _OP, "heads", ", ".join(missing), f"axes of the mesh, {', '.join(sizes)}")
        return
    devices = math.prod(sizes[name] for name in names)
    if layer.o_groups % devices:
        got = f"{layer.o_groups} for the {devices} devices of {', '.join(names)}"
        raise _check.error(ValueError, _OP, "o_groups", got, "a multiple of the devices that share the heads")


_OP = "DSV4Attention"

"""Exact attention for JAX that never writes the score matrix, on CPU and NVIDIA GPUs."""

from importlib.metadata import version as _version

from . import flax as flax  # does not import flax itself
from ._alibi import Alibi as Alibi
from ._attention import dot_product_attention as dot_product_attention
from ._attention import flash_attention as flash_attention
from ._ffi import build_info as build_info
from ._ffi import ffi_targets as ffi_targets
from ._ring import from_zigzag as from_zigzag
from ._ring import ring_attention as ring_attention
from ._ring import to_zigzag as to_zigzag

__version__ = _version("jax_flash")
__all__ = [
    "Alibi",
    "__version__",
    "build_info",
    "dot_product_attention",
    "ffi_targets",
    "flash_attention",
    "from_zigzag",
    "ring_attention",
    "to_zigzag",
]

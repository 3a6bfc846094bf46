"""Checks of arguments, in one place (options check themselves, in _options.py).

A mistake in a call raises TypeError (wrong type or dtype) or ValueError (wrong rank, shape or value) and names the
argument, what was expected and what came. A call that no fused kernel serves raises NotImplementedError and names the
way out. All are raised while the call is traced, or lowered if they depend on the platform: an error in a running
kernel could no longer name the argument.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from . import _ffi, _kernel_choice
from ._alibi import Alibi
from ._operands import sum_dtype
from ._options import describe, static_int

_DTYPES = (jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64)
_INT32 = np.iinfo(np.int32)
_MAX_CUDA_HEAD_DIMS = {2: 512, 4: 256, 8: 128}  # by the bytes of an element
_MAX_PORTABLE_HEAD_DIM = 256  # above it only Hopper has kernels
# The largest head dim whose tiles fit into 99 KB of shared memory.
_MAX_SMALL_GPU_GRADIENT_HEAD_DIM = {"float32": 128, "float64": 64}
_USE_XLA = 'Pass implementation="xla" (plain XLA, with memory that grows as T * S).'


def check_implementation(implementation: Any) -> None:
    if implementation is not None and not isinstance(implementation, str):
        raise TypeError(f"implementation must be None or a str, got {describe(implementation)}.")
    if implementation not in (None, "xla"):
        raise ValueError(
            'implementation must be None (the fused kernel of the platform) or "xla" (plain XLA), got '
            f"{implementation!r}."
        )


def check_qkv(
    query: Any, key: Any, value: Any, *, is_paged: bool = False
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Checks query, key and value, or pages of keys and values, against each other; returns them as JAX arrays."""
    query, key, value = _floating("query", query), as_array("key", key), as_array("value", value)
    if query.ndim not in (3, 4):
        raise ValueError(f"query must have shape [B, T, N, H] or [T, N, H], got {_shape(query)}.")
    for name, x in (("key", key), ("value", value)):
        if x.dtype != query.dtype:
            raise TypeError(f"{name} must have query's dtype {query.dtype}, got {x.dtype}.")
        if is_paged:
            if x.ndim != 4 or x.shape[:2] != key.shape[:2] or 0 in x.shape[:2]:
                like_key = f", like key's {list(key.shape)}" if name == "value" else ""
                raise ValueError(
                    f"{name} must have shape [pages, keys of a page, K, {'H' if name == 'key' else 'Hv'}] with "
                    f"page_indices, none of the first two 0{like_key}, got {_shape(x)}."
                )
            continue
        if x.ndim != query.ndim:
            raise ValueError(
                f"{name} must have as many axes as query ({query.ndim}), got {_shape(x)} with query's "
                f"{_shape(query)}."
            )
        if x.shape[:-3] != query.shape[:-3]:
            raise ValueError(f"{name} must have query's batch size {query.shape[0]}, got {_shape(x)}.")
    num_heads, head_dim = query.shape[-2:]
    num_kv_heads = key.shape[-2]
    for name, x in (("query", query), ("value", value)):
        if not isinstance(x.shape[-1], int):
            raise ValueError(
                f"{name} must have a head dim that is a number (its last axis), got {_shape(x)}."
            )
    if head_dim == 0 or value.shape[-1] == 0:
        name, x = ("query", query) if head_dim == 0 else ("value", value)
        raise ValueError(f"{name} must have a head dim of at least 1 (its last axis), got {_shape(x)}.")
    if key.shape[-1] != head_dim:
        raise ValueError(f"key must have query's head dim {head_dim} (its last axis), got {_shape(key)}.")
    if value.shape[-3] != key.shape[-3]:
        raise ValueError(f"value must have key's length {key.shape[-3]}, got {_shape(value)}.")
    if value.shape[-2] != num_kv_heads:
        raise ValueError(f"value must have key's number of heads {num_kv_heads}, got {_shape(value)}.")
    if num_heads % num_kv_heads if num_kv_heads else num_heads:
        raise ValueError(
            f"key must have a number of heads that divides query's {num_heads}, got {num_kv_heads} heads "
            f"in {_shape(key)}."
        )
    return query, key, value


def check_page_indices(page_indices: Any, key_value_seq_lengths: Any, batch: int | None) -> jax.Array | None:
    """Checks the pages of each sequence, int32 [B, P] or without a batch axis [P]; returns [B, P]."""
    if page_indices is None:
        return None
    page_indices = _int32_array("page_indices", page_indices)
    if batch is None and page_indices.ndim == 1:
        page_indices = page_indices[None]
    if page_indices.ndim != 2 or page_indices.shape[0] != (1 if batch is None else batch):
        expected = (
            "[P] or [1, P] (pages of the sequence)" if batch is None else f"[{batch}, P] (batch, pages)"
        )
        raise ValueError(f"page_indices must have shape {expected}, got {_shape(page_indices)}.")
    if key_value_seq_lengths is None:
        raise ValueError("key_value_seq_lengths must be given where page_indices is, got None.")
    return page_indices


def check_scale_array(scale: Any) -> jax.Array | None:
    """A scale that is an array, in a floating dtype; None where it is a number or not given."""
    if not (isinstance(scale, jax.Array | np.ndarray) or hasattr(scale, "__jax_array__")):
        return None
    scale = jnp.asarray(scale)
    message = f"scale must be a real number or a scalar array of one, got {describe(scale)}."
    if not (jnp.issubdtype(scale.dtype, jnp.floating) or jnp.issubdtype(scale.dtype, jnp.integer)):
        raise TypeError(message)
    if scale.ndim:
        raise ValueError(message)
    return scale.astype(sum_dtype(scale.dtype))


def check_lengths(name: str, lengths: Any, batch: int | None) -> jax.Array | None:
    """Checks sequence lengths: int32 [B], or a scalar or [1] without a batch axis (batch None)."""
    if lengths is None:
        return None
    if batch is None and not hasattr(lengths, "dtype"):
        lengths = np.int32(_int32(name, lengths))
    return _int32_per_batch(name, lengths, batch, allow_scalar=batch is None)


def check_query_offset(query_offset: Any, batch: int | None) -> jax.Array | None:
    """Checks the offset, an int or int32 scalar or int32 [B]; None where it is 0."""
    if query_offset is None:
        return None
    if isinstance(query_offset, list | tuple):
        raise TypeError(
            "query_offset must be an int, or an int32 array that is a scalar or has shape [B], got "
            f"{describe(query_offset)}."
        )
    if isinstance(query_offset, np.generic) or not hasattr(query_offset, "dtype"):
        offset = _int32("query_offset", query_offset)
        return jnp.full((1 if batch is None else batch,), offset, jnp.int32) if offset else None
    return _int32_per_batch("query_offset", query_offset, batch, allow_scalar=True)


def check_scale(scale: float, dtype: np.dtype) -> None:
    largest = float(jnp.finfo(sum_dtype(dtype)).max)
    if abs(scale) > largest:
        raise ValueError(f"scale must be at most {largest:.5g} in magnitude for {dtype.name}, got {scale}.")


def check_bias(bias: Any, scores: tuple[int, ...]) -> jax.Array | Alibi | None:
    if bias is None:
        return None
    if isinstance(bias, Alibi):
        return Alibi(check_per_head("the slopes of bias", bias.slopes, scores[-3]))
    bias = _floating("bias", bias)
    _check_broadcastable("bias", bias, scores)
    return bias


def check_mask(mask: Any, scores: tuple[int, ...]) -> jax.Array | None:
    if mask is None:
        return None
    mask = as_array("mask", mask)
    if mask.dtype != jnp.bool_:
        raise TypeError(f"mask must be bool (True where the key is visible), got {mask.dtype}.")
    _check_broadcastable("mask", mask, scores)
    return mask


def check_segment_ids(
    segment_ids: Any, batch: tuple[int, ...], seqlen_q: int, seqlen_kv: int
) -> tuple[jax.Array, jax.Array] | tuple[None, None]:
    """Checks segment ids, and returns those of the queries and those of the keys; `batch` is () without that axis."""
    if segment_ids is None:
        return None, None
    if isinstance(segment_ids, tuple | list):
        if len(segment_ids) != 2:
            raise ValueError(
                "segment_ids must be an array or a pair (of the queries, of the keys), got "
                f"{len(segment_ids)} parts."
            )
    elif seqlen_q != seqlen_kv:
        raise ValueError(
            "segment_ids must be a pair (of the queries, of the keys) where their lengths differ, got one "
            f"array for lengths {seqlen_q} and {seqlen_kv}."
        )
    else:
        segment_ids = (segment_ids, segment_ids)
    query_ids, key_ids = segment_ids
    return (
        _check_ids("segment_ids of the queries", query_ids, (*batch, seqlen_q)),
        _check_ids("segment_ids of the keys", key_ids, (*batch, seqlen_kv)),
    )


def _check_ids(name: str, ids: Any, shape: tuple[int, ...]) -> jax.Array:
    ids = _int32_array(name, ids)
    if ids.shape != shape:
        raise ValueError(f"{name} must have shape {list(shape)}, got {_shape(ids)}.")
    return ids


def check_dropout_rng(dropout_rng: Any, rate: float) -> jax.Array | None:
    """Checks the key of the dropout; None where the rate is 0."""
    if not rate:
        return None
    if dropout_rng is None:
        raise ValueError(f"dropout_rng must be a PRNG key where dropout_rate is not 0 ({rate}), got None.")
    rng = as_array("dropout_rng", dropout_rng)
    is_key = jnp.issubdtype(rng.dtype, jax.dtypes.prng_key)
    if not is_key and rng.dtype != jnp.uint32:
        raise TypeError(f"dropout_rng must be a PRNG key, as of jax.random.key, got {describe(rng)}.")
    if rng.ndim != (0 if is_key else 1):
        raise ValueError(f"dropout_rng must be a single PRNG key, got {_shape(rng)}.")
    if not is_key:
        # Not of PRNGKey itself: eval_shape would remember its shape under another implementation.
        words = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0))).size
        if rng.size != words:
            raise ValueError(f"dropout_rng must be a PRNG key of {words} words, got {_shape(rng)}.")
    return rng


def check_cuda(
    dtype: np.dtype, head_dims: tuple[int, int], *, is_gradient: bool, page_size: int | None = None
) -> None:
    """Refuses calls that the CUDA kernels do not serve. Called when a call is lowered for a GPU."""
    head_dim = max(head_dims)
    largest = _MAX_CUDA_HEAD_DIMS[dtype.itemsize]
    if head_dim > largest:
        raise NotImplementedError(
            f"The CUDA kernels support head dims up to {largest} in {dtype.name}, got {head_dim}. {_USE_XLA}"
        )
    _ffi.check_gpu_kernels()
    if dtype == jnp.float64 and not any(" float64 " in name for name in _ffi.build_info()["kernels"]):
        raise NotImplementedError(
            "This build of jax_flash has no CUDA kernels for float64. In a checkout, run "
            f"{_ffi.install_command(JAX_FLASH_FLOAT64='ON')}, with the head dim 64 or 128 if you also pass "
            'JAX_FLASH_HEAD_DIMS, or pass implementation="xla".'
        )
    if head_dim > _MAX_PORTABLE_HEAD_DIM:
        _check_wide_heads(head_dims, page_size)
    _check_is_compiled("backward" if is_gradient else "forward", dtype, head_dims)
    largest = _MAX_SMALL_GPU_GRADIENT_HEAD_DIM.get(dtype.name, head_dim)
    if is_gradient and head_dim > largest:
        for device in _ffi.local_gpus():
            if _kernel_choice.has_small_blocks(device):
                raise NotImplementedError(
                    f"On {device.device_kind} the gradient in {dtype.name} supports head dims up to {largest}, got "
                    f"{head_dim}: its blocks have 99 KB of shared memory. {_USE_XLA}"
                )


def _check_wide_heads(head_dims: tuple[int, int], page_size: int | None) -> None:
    over = f"Head dims over {_MAX_PORTABLE_HEAD_DIM}"
    for device in _ffi.local_gpus():
        if not _kernel_choice.is_hopper(device):
            raise NotImplementedError(
                f"{over} need a GPU of compute capability 9.0 (H100, H200), got {max(head_dims)} on "
                f"{device.device_kind} ({device.compute_capability}). {_USE_XLA}"
            )
    for head_dim in head_dims:
        if head_dim % 8:
            raise NotImplementedError(
                f"{over} and those beside them must be multiples of 8 on a GPU, got {head_dim}. Pad with zeros and "
                f'pass scale=1 / sqrt(the head dim before), or pass implementation="xla".'
            )
    if page_size is not None and page_size % 8:
        raise NotImplementedError(
            f"With head dims over {_MAX_PORTABLE_HEAD_DIM}, a page's size must be a multiple of 8 on a GPU, got "
            f"{page_size}. {_USE_XLA}"
        )


def _check_is_compiled(direction: str, dtype: np.dtype, head_dims: tuple[int, int]) -> None:
    """Refuses head dims that a build for others, by JAX_FLASH_HEAD_DIMS or JAX_FLASH_CUDA_ARCHS, has no kernel for."""
    head_dim = max(head_dims)
    # Hopper's float32 kernels are beside portable ones, which serve what they do not.
    is_hopper = dtype.itemsize == 2 and all(map(_kernel_choice.is_hopper, _ffi.local_gpus()))
    if _kernel_choice.kernel_head_dim(f"{direction} sm80", dtype, head_dim) or (
        is_hopper and _kernel_choice.hopper_head_dim(direction, dtype, head_dims)
    ):
        return
    missing = next(size for size in (64, 128, 256, 512) if size >= head_dim)
    architecture = " and 90 in JAX_FLASH_CUDA_ARCHS" if missing == 512 else ""
    raise NotImplementedError(
        f"This build of jax_flash has no {direction} kernel for head dim {head_dim} in {dtype.name}. Install it again "
        f'with {missing} in JAX_FLASH_HEAD_DIMS{architecture}, as by default, or pass implementation="xla".'
    )


def refuse_derivative_of_pages() -> None:
    raise NotImplementedError(
        "Attention with page_indices has no derivatives. Gather the pages first, as in "
        "key[page_indices].reshape(B, -1, K, H), and leave page_indices out."
    )


def refuse_third_derivative() -> None:
    raise NotImplementedError(
        f"The fused kernels have first and second derivatives, but not third. {_USE_XLA}"
    )


def refuse_platform(platforms: Sequence[str]) -> None:
    raise NotImplementedError(
        f"jax_flash has kernels for the platforms cpu and cuda, not for {', '.join(platforms)}. {_USE_XLA}"
    )


def as_array(name: str, x: Any) -> jax.Array:
    # Lists are refused: they would be copied element by element on every call. Python scalars too.
    if not (isinstance(x, jax.Array | np.ndarray | np.generic) or hasattr(x, "__jax_array__")):
        raise TypeError(f"{name} must be a JAX or NumPy array, got a value of type {type(x).__name__}.")
    try:
        return jnp.asarray(x)
    except TypeError:
        if not isinstance(x, np.ndarray | np.generic):
            raise
        raise TypeError(f"{name} must have a dtype that JAX has, got {x.dtype}.") from None


def _floating(name: str, x: Any) -> jax.Array:
    x = as_array(name, x)
    if x.dtype not in _DTYPES:
        raise TypeError(f"{name} must be float16, bfloat16, float32 or float64, got {x.dtype}.")
    return x


def _int32(name: str, value: Any) -> int:
    number = static_int(name, value)
    if not _INT32.min <= number <= _INT32.max:
        raise ValueError(f"{name} must fit in int32, got {number}.")
    return number


def _int32_array(name: str, x: Any) -> jax.Array:
    given, x = x, as_array(name, x)
    is_numpy = isinstance(given, np.ndarray | np.generic)
    if is_numpy and given.dtype.kind in "iu":
        outside = given[(given < _INT32.min) | (given > _INT32.max)]
        if outside.size:  # JAX would wrap it around
            raise ValueError(f"{name} must fit in int32, got {outside.flat[0]}.")
    # With jax_enable_x64, NumPy's default has 64 bits, and so has a Python int that is traced, as loop counters are.
    if x.dtype == jnp.int64 and (is_numpy or x.weak_type):
        x = jnp.clip(x, _INT32.min, _INT32.max).astype(jnp.int32)
    if x.dtype != jnp.int32:
        raise TypeError(f"{name} must be int32, got {x.dtype}.")
    return x


def _int32_per_batch(name: str, x: Any, batch: int | None, *, allow_scalar: bool) -> jax.Array:
    x = _int32_array(name, x)
    size = 1 if batch is None else batch
    if x.shape != (size,) and not (allow_scalar and x.ndim == 0):
        scalar = " or be a scalar" if allow_scalar else ""
        raise ValueError(f"{name} must have shape [{size}] (the batch size){scalar}, got {_shape(x)}.")
    return jnp.broadcast_to(x, (size,))


def check_per_head(name: str, x: Any, num_heads: int) -> jax.Array:
    x = _floating(name, x)
    if x.shape != (num_heads,):
        raise ValueError(f"{name} must have shape [N] = [{num_heads}], got {_shape(x)}.")
    return x


def broadcasts_to(shape: tuple[int, ...], scores: tuple[int, ...]) -> bool:
    # Axis by axis: sizes may be symbolic.
    axes = zip(reversed(shape), reversed(scores), strict=False)
    return len(shape) <= len(scores) and all(size in (1, full) for size, full in axes)


def _check_broadcastable(name: str, x: jax.Array, scores: tuple[int, ...]) -> None:
    if not broadcasts_to(x.shape, scores):
        letters = "[B, N, T, S]" if len(scores) == 4 else "[N, T, S]"
        raise ValueError(f"{name} must be broadcastable to {letters} = {list(scores)}, got {_shape(x)}.")


def _shape(x: jax.Array) -> str:
    return f"shape {list(x.shape)}"

"""The attention function: checks its arguments and brings them to one normal form."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from . import _checks, _dropout, _fused, _paged, _reference, _sharding
from ._alibi import Alibi
from ._operands import sum_dtype
from ._options import AttentionOptions, static_bool


def flash_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | Alibi | None = None,
    mask: ArrayLike | None = None,
    *,
    scale: ArrayLike | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: int | tuple[int | None, int | None] | None = None,
    logits_soft_cap: float | None = None,
    query_offset: ArrayLike | int = 0,
    segment_ids: ArrayLike | tuple[ArrayLike, ArrayLike] | None = None,
    sinks: ArrayLike | None = None,
    dropout_rate: float = 0.0,
    dropout_rng: ArrayLike | None = None,
    precision: jax.lax.PrecisionLike = None,
    deterministic: bool = False,
    forward_mode: bool = False,
    page_indices: ArrayLike | None = None,
    return_residual: bool = False,
    implementation: Literal["xla"] | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    r"""Exact softmax attention that never materializes the score matrix.

    Computes :math:`\mathrm{softmax}(\mathrm{scale} \cdot Q K^T) V` for each head, in tiles, with memory linear in T
    and S (FlashAttention, https://arxiv.org/abs/2205.14135, and FlashAttention-2, https://arxiv.org/abs/2307.08691).
    The forward pass stores the log-sum-exp of each row; the backward pass recomputes the probabilities from it.

    The arguments of :func:`jax.nn.dot_product_attention` keep their names and meanings. The function works under
    `jit`, `grad` (twice, and in forward mode with `forward_mode`), `vmap`, `scan`, `checkpoint`, `shard_map` and
    sharded `jit`, which partitions it over batch, heads and queries. The documentation's page on semantics has the
    rules: the formula, fully masked rows, NaN, precision, determinism, memory, sharding, and the names of the residuals
    for `checkpoint`.

    Shapes use these letters: B batch, T query length, S key length, N query heads, K key heads, H head dim, Hv head
    dim of the values. N is a multiple of K, and query head n reads key head n // (N // K): grouped-query attention,
    https://arxiv.org/abs/2305.13245. All arrays may come without B; lengths and offsets are then scalars or [1].

    Query i sees key j if every masking option allows it. A row that sees no key has output 0, log-sum-exp -inf and
    zero gradients.

    Args:
      query: float16, bfloat16, float32 or float64 array, [B, T, N, H].
      key: array of query's dtype, [B, S, K, H]; with `page_indices`, [pages, keys of a page, K, H].
      value: array of query's dtype, [B, S, K, Hv]; with `page_indices`, [pages, keys of a page, K, Hv].
      bias: array of any of the dtypes above, broadcastable to [B, N, T, S], added to the scaled logits; or
        :class:`Alibi`. Not expanded. Differentiable.
      mask: bool array, broadcastable to [B, N, T, S]; True where the key is visible. Not expanded; tiles that it
        hides are skipped.
      scale: finite number that multiplies the logits, 1 / sqrt(H) if None; or a scalar array, which may be traced
        and is differentiable (a learned temperature).
      is_causal: whether query i sees key j only if j <= i + query_offset.
      query_seq_lengths: int32 [B]; queries at and beyond their length see no key. Clamped to [0, T].
      key_value_seq_lengths: int32 [B]; keys at and beyond their length are not visible. Clamped to [0, S]. Rows
        beyond the lengths influence no result, even if they hold NaN.
      local_window_size: pair (left, right) of ints >= 0, or w for (w, w): query i sees key j only if
        i + query_offset - left <= j <= i + query_offset + right. None in a pair: no limit on that side.
      logits_soft_cap: number c > 0; the logits, after scale and bias, become c * tanh(logits / c). From 1e30 on
        there is no cap.
      query_offset: int, or int32 scalar or [B], which may be traced: the position of query 0 among the keys. S - T
        aligns the last query with the last key; to decode, pass the number of keys before the new query.
      segment_ids: int32 [B, T] (if T == S), or a pair of [B, T] and [B, S]: a query sees the keys with its own id.
        Any value is an id; give padding an id of its own. If ids are sorted, tiles of other segments are skipped.
      sinks: floating-point array [N]: a logit for each head that takes part in the softmax and has no value
        (https://arxiv.org/abs/2309.17453). A row with a sink and no key has output 0 and the sink as log-sum-exp.
        Differentiable.
      dropout_rate: in [0, 1): this part of the normalized probabilities, rounded to a multiple of 2^-16, becomes 0,
        and the others are divided by 1 - dropout_rate.
      dropout_rng: PRNG key of the dropout, required if dropout_rate is not 0. The pairs that are kept depend only
        on it, batch, head, row and column.
      precision: of the products of float32 inputs on a GPU, as for `jax.lax.dot`; of a pair, the more exact part
        counts. None: `jax.default_matmul_precision`. Other fused kernels ignore it; "xla" passes it on.
      deterministic: whether the backward pass gives the same bits on every run, on a GPU at some cost in speed.
        (The forward pass and the CPU kernel always do.)
      forward_mode: whether JAX may differentiate the call in forward mode, too (`jvp`, `linearize`, `jacfwd`, `grad` of
        a `jvp`). Reverse mode, and forward mode of the gradient, work without it and run the same kernels with it.
      page_indices: int32 [B, P], for a paged cache (https://arxiv.org/abs/2309.06180): key j of a sequence is key
        j % n of its page page_indices[b, j // n], where a page has n keys, and S is P * n. Sequences may share pages.
        `key_value_seq_lengths` is required; pages beyond a length are not read, and their indices may be anything.
        Others are clamped to the pages that exist. Not differentiable, nor is anything else in such a call.
      return_residual: whether to return the log-sum-exp of each row's logits, too. (In `jax.nn` it has query's dtype
        and no gradient.)
      implementation: None: the fused kernel of the platform; "xla": plain XLA operations on any platform, which
        materialize the score matrix.

    Returns:
      The output, [B, T, N, Hv] in query's dtype. With `return_residual`, a pair of the output and the log-sum-exp,
      [B, T, N], a natural logarithm in float32 (float64 for float64), with sinks and before dropout. Both are
      differentiable; the cotangent of an infinite log-sum-exp is ignored.

    Raises:
      TypeError: an argument has the wrong type or dtype, or a static option is traced.
      ValueError: an argument has the wrong rank, shape or value.
      NotImplementedError: the fused kernels do not support this call, and `implementation="xla"` does: third
        derivatives, platforms and GPUs that this build has no kernels for and, on a GPU, head dims over 256 (16 bits on
        Hopper: 512, in multiples of 8; float64: 128) and, if a block has 99 KB of shared memory, gradients of head dims
        over 128 in float32 and over 64 in float64. What depends on the platform is raised while the call is lowered.
        Also derivatives of a call with `page_indices`.
    """
    _checks.check_implementation(implementation)
    forward_mode = static_bool("forward_mode", forward_mode)
    return_residual = static_bool("return_residual", return_residual)
    call = normal_form(
        query,
        key,
        value,
        bias=bias,
        mask=mask,
        scale=scale,
        is_causal=is_causal,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        local_window_size=local_window_size,
        logits_soft_cap=logits_soft_cap,
        query_offset=query_offset,
        segment_ids=segment_ids,
        sinks=sinks,
        dropout_rate=dropout_rate,
        dropout_rng=dropout_rng,
        precision=precision,
        deterministic=deterministic,
        page_indices=page_indices,
    )
    if page_indices is not None:
        arrays = _sharding.with_matching_types(call.query, call.key, call.value, call.operands)
        out, lse = _paged.attention(*arrays, call.options, implementation)
    elif implementation == "xla":
        out, lse = _reference.attention(call.query, call.key, call.value, call.operands, call.options)
    else:
        arrays = _sharding.with_matching_types(call.query, call.key, call.value, call.operands)
        out, lse = _fused.attention(
            *arrays, call.options, forward_mode=forward_mode, with_lse=return_residual
        )
    return call.results(out, lse, return_residual=return_residual)


dot_product_attention = flash_attention


class Call(NamedTuple):
    """A call that was checked, in the form that `_primitives.forward` takes."""

    query: jax.Array  # [B, T, N, H]
    key: jax.Array  # [B, S, K, H], or pages
    value: jax.Array  # [B, S, K, Hv], or pages
    operands: dict[str, jax.Array]
    options: AttentionOptions
    is_batched: bool  # did the caller's arrays have an axis B?

    def results(self, out: jax.Array, lse: jax.Array, *, return_residual: bool) -> Any:
        """What the caller gets."""
        results = (out, lse) if return_residual else out
        return results if self.is_batched else jax.tree.map(lambda x: x[0], results)


def normal_form(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    bias: Any,
    mask: Any,
    scale: Any,
    query_seq_lengths: Any,
    key_value_seq_lengths: Any,
    query_offset: Any,
    segment_ids: Any,
    sinks: Any,
    dropout_rng: Any,
    page_indices: Any = None,
    num_shards: int = 1,
    **static: Any,
) -> Call:
    """Checks the arguments of `flash_attention`; `key` and `value` are one of `num_shards` parts of all keys."""
    is_paged = page_indices is not None
    query, key, value = _checks.check_qkv(query, key, value, is_paged=is_paged)
    is_batched = query.ndim == 4
    batch = query.shape[0] if is_batched else None
    page_indices = _checks.check_page_indices(page_indices, key_value_seq_lengths, batch)
    seqlen_kv = page_indices.shape[1] * key.shape[1] if is_paged else key.shape[-3]
    *batch_shape, seqlen_q, num_heads, head_dim = query.shape
    scores = (*batch_shape, num_heads, seqlen_q, num_shards * seqlen_kv)  # [B, N, T, S]

    scale_factor = _checks.check_scale_array(scale)
    if scale_factor is not None:
        # Not 1 / sqrt(H): with a large factor, dq and dk without it would be subnormal in float16.
        scale = 1.0
    options = AttentionOptions.resolve(head_dim, scale=scale, **static)
    _checks.check_scale(options.scale, query.dtype)

    query_seq_lengths = _checks.check_lengths("query_seq_lengths", query_seq_lengths, batch)
    key_value_seq_lengths = _checks.check_lengths("key_value_seq_lengths", key_value_seq_lengths, batch)
    query_offset = _checks.check_query_offset(query_offset, batch)
    bias = _checks.check_bias(bias, scores)
    mask = _checks.check_mask(mask, scores)
    query_ids, key_value_ids = _checks.check_segment_ids(segment_ids, tuple(batch_shape), seqlen_q, seqlen_kv)
    sinks = None if sinks is None else _checks.check_per_head("sinks", sinks, num_heads)
    dropout_rng = _checks.check_dropout_rng(dropout_rng, options.dropout_rate)

    if not is_batched:
        query = query[None]
        key, value = (x if is_paged else x[None] for x in (key, value))
    bias, alibi_slopes = (None, bias.slopes) if isinstance(bias, Alibi) else (bias, None)
    operands = dict(
        page_indices=page_indices,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        query_offset=query_offset,
        scale_factor=scale_factor,
        sinks=sinks,
        query_segment_ids=query_ids,
        key_value_segment_ids=key_value_ids,
        mask=mask,
        bias=bias,
        alibi_slopes=alibi_slopes,
        dropout_seeds=dropout_rng,
    )
    operands = {name: _operand(name, x, query) for name, x in operands.items() if x is not None}
    return Call(query, key, value, operands, options, is_batched)


def _operand(name: str, x: jax.Array, query: jax.Array) -> jax.Array:
    """An operand in the shape and dtype that the primitives take, for `query` [B, T, N, H]."""
    lse_dtype = sum_dtype(query.dtype)
    if name == "scale_factor":
        return _sharding.per_batch(x.astype(lse_dtype), query)
    if name in ("sinks", "alibi_slopes"):
        return _sharding.per_head(x.astype(lse_dtype), query)
    if name in ("query_segment_ids", "key_value_segment_ids"):
        return x if x.ndim == 2 else x[None]
    if name in ("mask", "bias"):
        if x.dtype == jnp.float64:
            x = x.astype(lse_dtype)  # the logits' dtype
        return x.reshape((1,) * (4 - x.ndim) + x.shape)
    if name == "dropout_seeds":
        batch, _, num_heads, _ = query.shape
        return _dropout.make_seeds(x, batch, num_heads)
    return x

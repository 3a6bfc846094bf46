"""The attention function: what a user calls, and its gradient."""

from __future__ import annotations

import functools
import math
from typing import Literal

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike

from . import _checks, _dropout, _primitives, _reference
from ._alibi import Alibi
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
    return_residual: bool = False,
    implementation: Literal["xla"] | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    r"""Exact softmax attention that never materializes the score matrix.

    Computes :math:`\mathrm{softmax}(\mathrm{scale} \cdot Q K^T) V` for each head, in tiles, with memory linear in T
    and S (FlashAttention, https://arxiv.org/abs/2205.14135, and FlashAttention-2, https://arxiv.org/abs/2307.08691).
    The forward pass stores the log-sum-exp of each row; the backward pass recomputes the probabilities from it.

    The arguments of :func:`jax.nn.dot_product_attention` keep their names and meanings. The function works under
    `jit`, `grad` (reverse mode, first order), `vmap`, `scan`, `checkpoint`, `shard_map` and sharded `jit`, which
    partitions it over batch and heads. The documentation's page on semantics has the rules: the formula, fully
    masked rows, NaN, precision, determinism, memory, sharding, and the names of the residuals for `checkpoint`.

    Shapes use these letters: B batch, T query length, S key length, N query heads, K key heads, H head dim, Hv head
    dim of the values. N is a multiple of K, and query head n reads key head n // (N // K): grouped-query attention,
    https://arxiv.org/abs/2305.13245. All arrays may come without B; lengths and offsets are then scalars or [1].

    Query i sees key j if every masking option allows it. A row that sees no key has output 0, log-sum-exp -inf and
    zero gradients.

    Args:
      query: float16, bfloat16, float32 or float64 (not on GPUs) array, [B, T, N, H].
      key: array of query's dtype, [B, S, K, H].
      value: array of query's dtype, [B, S, K, Hv].
      bias: array of any of the dtypes above, broadcastable to [B, N, T, S], added to the scaled logits; or
        :class:`Alibi`. Read in place. Differentiable, by a pass of its own.
      mask: bool array, broadcastable to [B, N, T, S]; True where the key is visible. Read in place; tiles that it
        hides are skipped.
      scale: finite number that multiplies the logits, 1 / sqrt(H) if None; or a scalar array, which may be traced
        and is differentiable (a learned temperature).
      is_causal: whether query i sees key j only if j <= i + query_offset.
      query_seq_lengths: int32 [B]; queries at and beyond their length see no key. Clamped to [0, T].
      key_value_seq_lengths: int32 [B]; keys at and beyond their length are not visible. Clamped to [0, S]. Rows
        beyond the lengths influence no result, even if they hold NaN.
      local_window_size: pair (left, right) of ints >= 0, or w for (w, w): query i sees key j only if
        i + query_offset - left <= j <= i + query_offset + right. None in a pair: no limit on that side.
      logits_soft_cap: number c > 0; the logits, after scale and bias, become c * tanh(logits / c).
      query_offset: int, or int32 scalar or [B], which may be traced: the position of query 0 among the keys. S - T
        aligns the last query with the last key; to decode, pass the length of the cache.
      segment_ids: int32 [B, T] (if T == S), or a pair of [B, T] and [B, S]: a query sees the keys with its own id.
        Any value is an id; give padding an id of its own. If ids are sorted, tiles of other segments are skipped.
      sinks: floating-point array [N]: a logit for each head that takes part in the softmax and has no value
        (https://arxiv.org/abs/2309.17453). A row with a sink and no key has output 0 and the sink as log-sum-exp.
        Differentiable.
      dropout_rate: in [0, 1), rounded to a multiple of 2^-16: this part of the normalized probabilities becomes 0,
        and the others are divided by 1 - dropout_rate.
      dropout_rng: PRNG key of the dropout, required if dropout_rate is not 0. The pairs that are kept depend only
        on it, batch, head, row and column.
      precision: of the products of float32 inputs on a GPU, as for `jax.lax.dot`; of a pair, the more exact part
        counts. None: `jax.default_matmul_precision`. Accepted and without effect elsewhere.
      deterministic: whether the backward pass gives the same bits on every run, on a GPU at some cost in speed.
        (The forward pass and the CPU kernel always do.)
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
      NotImplementedError: the fused kernels do not support this call, and `implementation="xla"` does: second
        derivatives, platforms without kernels and, on a GPU, float64, head dims over 256, and, if a block has 99 KB
        of shared memory, float32 gradients of head dims over 128. What depends on the platform is raised while the
        call is lowered.
    """
    _checks.check_implementation(implementation)
    query, key, value = _checks.check_qkv(query, key, value)
    is_batched = query.ndim == 4
    batch = query.shape[0] if is_batched else None
    scores = (*query.shape[:-3], query.shape[-2], query.shape[-3], key.shape[-3])  # [B, N, T, S]

    scale_factor = _checks.check_scale_array(scale)
    if scale_factor is not None:
        # A power of two, so that the remaining factor is exact; near the default, so that float16 has room for dq and
        # dk without it.
        scale = 2.0 ** round(math.log2(1 / math.sqrt(query.shape[-1])))
        scale_factor = scale_factor / scale
    options = AttentionOptions.resolve(
        query.shape[-1],
        scale=scale,
        is_causal=is_causal,
        local_window_size=local_window_size,
        logits_soft_cap=logits_soft_cap,
        dropout_rate=dropout_rate,
        precision=precision,
        deterministic=deterministic,
    )
    return_residual = static_bool("return_residual", return_residual)

    query_seq_lengths = _checks.check_lengths("query_seq_lengths", query_seq_lengths, batch)
    key_value_seq_lengths = _checks.check_lengths("key_value_seq_lengths", key_value_seq_lengths, batch)
    query_offset = _checks.check_query_offset(query_offset, batch)
    bias = _checks.check_bias(bias, scores)
    mask = _checks.check_mask(mask, scores)
    query_ids, key_value_ids = _checks.check_segment_ids(segment_ids, query, key)
    sinks = _checks.check_sinks(sinks, query.shape[-2])
    dropout_rng = _checks.check_dropout_rng(dropout_rng, options.dropout_rate)

    if not is_batched:
        query, key, value = query[None], key[None], value[None]
    bias, alibi_slopes = (None, bias.slopes) if isinstance(bias, Alibi) else (bias, None)
    operands = dict(
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
    operands = {name: _NORMAL_FORMS[name](x, query) for name, x in operands.items() if x is not None}
    arrays = _typed_alike(query, key, value, operands)
    if implementation == "xla":
        out, lse = _reference.attention(*arrays, options)
    elif return_residual:
        out, lse = _fused_attention(*arrays, options)
    else:
        out, lse = _fused_attention_without_lse(*arrays, options), None
    results = (out, lse) if return_residual else out
    return results if is_batched else jax.tree.map(lambda x: x[0], results)


def _as_it_is(x, query):
    return x


def _with_batch_axis(x, query):
    """[T] or [B, T] as [B, T]."""
    return x if x.ndim == 2 else x[None]


def _per_batch(x, query):
    """A scalar as [B], in lse's dtype."""
    batch, *_ = _explicit_spec(query) or (None,)
    out_sharding = None if batch is None else PartitionSpec(batch)
    return jnp.broadcast_to(x.astype(_lse_dtype(query)), query.shape[:1], out_sharding=out_sharding)


def _per_head(x, query):
    """[N] as [B, N], in lse's dtype: with a row for each batch element it is mapped and sharded like the rest."""
    x = x.astype(_lse_dtype(query))
    spec = _explicit_spec(query)
    if spec is None:
        return jnp.broadcast_to(x, (query.shape[0], *x.shape))
    batch, _, heads, _ = spec
    x = jax.sharding.reshard(x, PartitionSpec(heads))
    return jnp.broadcast_to(x, (query.shape[0], *x.shape), out_sharding=PartitionSpec(batch, heads))


def _with_four_axes(x, query):
    if x.dtype == jnp.float64:
        x = x.astype(_lse_dtype(query))  # in which the logits are computed
    return x.reshape((1,) * (4 - x.ndim) + x.shape)


def _as_seeds(rng, query):
    batch, _, num_heads, _ = query.shape
    return _dropout.make_seeds(rng, batch, num_heads)


def _lse_dtype(query):
    return jnp.promote_types(query.dtype, jnp.float32)


# From the arguments of `flash_attention`, without or with a batch axis, to the operands of the primitives.
_NORMAL_FORMS = {
    "query_seq_lengths": _as_it_is,
    "key_value_seq_lengths": _as_it_is,
    "query_offset": _as_it_is,
    "scale_factor": _per_batch,
    "sinks": _per_head,
    "query_segment_ids": _with_batch_axis,
    "key_value_segment_ids": _with_batch_axis,
    "mask": _with_four_axes,
    "bias": _with_four_axes,
    "alibi_slopes": _per_head,
    "dropout_seeds": _as_seeds,
}


dot_product_attention = flash_attention

# The operands that stand for a bias: at most one of them is there.
_BIASES = ("bias", "alibi_slopes")


# With jits of their own, the gradient of an eager call is one program, too, in which XLA drops the passes that nobody
# asked for. (Eager shard_map does not take a custom_vjp with symbolic_zeros, which would know by itself.)
@functools.partial(jax.jit, static_argnums=4)
@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _fused_attention(query, key, value, operands, options):
    return _primitives.forward(query, key, value, operands, options)


@functools.partial(jax.jit, static_argnums=4)
@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _fused_attention_without_lse(query, key, value, operands, options):
    """The common case: the log-sum-exp has no cotangent, one array less for the kernel to read."""
    return _primitives.forward(query, key, value, operands, options)[0]


def _attention_fwd(query, key, value, operands, options):
    out, lse = _primitives.forward(query, key, value, operands, options)
    out = checkpoint_name(out, "flash_attention_out")
    lse = checkpoint_name(lse, "flash_attention_lse")
    return (out, lse), (query, key, value, out, lse, operands)


def _attention_without_lse_fwd(*args):
    (out, _), residuals = _attention_fwd(*args)
    return out, residuals


def _attention_bwd(options, residuals, cotangents):
    query, key, value, out, lse, operands = residuals
    dout, dlse = cotangents
    dq, dk, dv = _primitives.backward(query, key, value, out, lse, dout, dlse, operands, options)
    operand_grads = dict.fromkeys(operands)
    if "scale_factor" in operands:
        operand_grads["scale_factor"] = _scale_gradient(query, dq, operands)
        dq, dk = (_times_factor(x, operands["scale_factor"]) for x in (dq, dk))
    if "sinks" in operands:
        operand_grads["sinks"] = _sinks_gradient(out, lse, dout, dlse, operands)
    for name in _BIASES:
        if name in operands:
            sums = _primitives.backward_bias(query, key, value, out, lse, dout, dlse, operands, options)
            operand_grads[name] = _sum_to(sums, operands[name])
    return dq, dk, dv, operand_grads


def _attention_without_lse_bwd(options, residuals, dout):
    return _attention_bwd(options, residuals, (dout, None))


_fused_attention.__wrapped__.defvjp(_attention_fwd, _attention_bwd)
_fused_attention_without_lse.__wrapped__.defvjp(_attention_without_lse_fwd, _attention_without_lse_bwd)


def _sum_to(sums, like):
    """Sums of four axes, over what `like`, which has as many or the leading ones, is broadcast over."""
    sums = jnp.sum(sums, tuple(range(like.ndim, sums.ndim)))
    axes = [
        axis for axis, sizes in enumerate(zip(sums.shape, like.shape, strict=True)) if sizes[0] != sizes[1]
    ]
    return jnp.sum(sums, axes, keepdims=True).astype(like.dtype)


def _times_factor(x, factor):
    """A gradient [B, ...] times the factor [B] of the scale, in its own type: key's may lie otherwise than query's."""
    if _explicit_spec(x) or _explicit_spec(factor):
        factor = jax.sharding.reshard(factor, PartitionSpec(jax.typeof(x).sharding.spec[0]))
    return (factor[:, None, None, None] * x.astype(factor.dtype)).astype(x.dtype)


def _scale_gradient(query, dq, operands):
    """The gradient [B] of the scale's factor: logits are the factor times what dq, without it, is the gradient of."""
    dtype = operands["scale_factor"].dtype
    products = _of_existing_rows(query, operands).astype(dtype) * dq.astype(dtype)
    return jnp.sum(products, (1, 2, 3))


def _of_existing_rows(x, operands):
    """[B, T, ...] with 0 beyond the lengths, where it may hold anything."""
    if "query_seq_lengths" not in operands:
        return x
    exists = jnp.arange(x.shape[1]) < operands["query_seq_lengths"][:, None]
    return jnp.where(exists.reshape(*exists.shape, *(1,) * (x.ndim - 2)), x, 0)


def _sinks_gradient(out, lse, dout, dlse, operands):
    """The gradient [B, N] of the sinks: that of a logit, p (dp - delta), where dp is 0 as a sink has no value."""
    dout = _of_existing_rows(dout, operands)
    delta = jnp.sum(dout.astype(lse.dtype) * out.astype(lse.dtype), -1)  # [B, T, N]
    if dlse is not None:
        delta -= dlse
    sinks = operands["sinks"][..., None, :]
    # A row without a sink and a key; what else is not finite is a sink's NaN or infinity, which goes on.
    return -jnp.sum(jnp.where(lse == -jnp.inf, 0, jnp.exp(sinks - lse) * delta), -2)


# The operands of one primitive must be alike in what a mesh makes part of their types. All this stands outside of the
# custom_vjp, so that JAX sums the gradients of what was replicated.


def _typed_alike(query, key, value, operands):
    """The arguments, with a bias sharded as its gradient will be."""
    spec = _explicit_spec(query)
    if spec is not None and "bias" in operands:
        bias = operands["bias"]
        batch, _, heads, _ = spec
        axes = (None if size == 1 else axis for size, axis in zip(bias.shape, (batch, heads), strict=False))
        operands = operands | {"bias": jax.sharding.reshard(bias, PartitionSpec(*axes, None, None))}
    return _vary_alike((query, key, value, operands))


def _explicit_spec(x: jax.Array) -> PartitionSpec | None:
    """How `x` is partitioned, where the mesh's axes are explicit: part of its type."""
    sharding = jax.typeof(x).sharding
    return sharding.spec if any(sharding.spec) else None


def _vary_alike(arrays):
    axes = {axis for x in jax.tree.leaves(arrays) for axis in _varying_axes(x)}

    def cast(x: jax.Array) -> jax.Array:
        missing = tuple(axes - _varying_axes(x))
        if not missing:
            return x
        if hasattr(jax.lax, "pcast"):
            return jax.lax.pcast(x, missing, to="varying")
        return jax.lax.pvary(x, missing)  # before jax 0.8

    return jax.tree.map(cast, arrays)


def _varying_axes(x: jax.Array) -> frozenset[str]:
    aval = jax.typeof(x)
    if hasattr(aval, "manual_axis_type"):
        return frozenset(aval.manual_axis_type.varying)
    return aval.vma  # before jax 0.10

"""The attention function: what a user calls, and its gradient."""

from __future__ import annotations

import functools
from typing import Literal

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero, custom_vjp_primal_tree_values
from jax.typing import ArrayLike

from . import _dropout, _primitives, _reference, _support
from ._alibi import Alibi
from ._options import AttentionOptions, static_bool


def flash_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | Alibi | None = None,
    mask: ArrayLike | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: int | tuple[int, int] | None = None,
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
    r"""Exact softmax attention that never writes the score matrix.

    Computes :math:`\mathrm{softmax}(\mathrm{scale} \cdot Q K^T) V` for each head, in tiles, with memory linear in T
    and S (FlashAttention, https://arxiv.org/abs/2205.14135, and FlashAttention-2, https://arxiv.org/abs/2307.08691).
    The forward pass keeps the log-sum-exp of each row; the backward pass recomputes the probabilities from it.

    It takes the arguments of :func:`jax.nn.dot_product_attention` with the same meanings, and works under `jit`,
    `grad` (reverse mode, first order), `vmap`, `scan`, `checkpoint`, `shard_map` and sharded `jit`, where it is
    partitioned over batch and heads. The residuals of the gradient are named `flash_attention_out` and
    `flash_attention_lse`, for policies such as `jax.checkpoint_policies.save_only_these_names`.

    The letters are B batch, T query length, S key length, N query heads, K key heads (N is a multiple of K, and
    query head n reads key head n // (N // K): grouped-query attention, https://arxiv.org/abs/2305.13245), H head
    dim, Hv head dim of the values. All arrays may come without B; then lengths and offsets are scalars or [1].

    Query i sees key j where all masking options allow it. The output of a row that sees no key is 0, its
    log-sum-exp is -inf, and its gradients are 0.

    Args:
      query: float16, bfloat16, float32 or float64 (not on GPUs) array, [B, T, N, H].
      key: array of query's dtype, [B, S, K, H].
      value: array of query's dtype, [B, S, K, Hv].
      bias: floating-point array of any of query's dtypes, broadcastable to [B, N, T, S], that is added to the
        scaled logits; or :class:`Alibi`. Read where it lies. Differentiable: its gradient is summed in float32 (in
        float64 for float64), always in one order, and takes a pass of its own.
      mask: bool array, broadcastable to [B, N, T, S]; True where the key is visible. Never expanded; tiles that
        it hides take no time.
      scale: finite number that multiplies the logits; None: 1 / sqrt(H).
      is_causal: whether key j is visible to query i only if j <= i + query_offset.
      query_seq_lengths: int32 [B]; queries at and beyond their length see no key. Clamped to [0, T].
      key_value_seq_lengths: int32 [B]; keys at and beyond their length are not visible. Clamped to [0, S].
        What the rows beyond the lengths hold, NaN included, has no influence on any result.
      local_window_size: a pair (left, right), or w for (w, w), of ints >= 0: key j is visible to query i only
        if i + query_offset - left <= j <= i + query_offset + right.
      logits_soft_cap: number c > 0; the logits, with scale and bias, become c * tanh(logits / c).
      query_offset: int, or int32 scalar or [B], which may be traced: the position of query 0 among the keys.
        S - T aligns the last query with the last key; the length of the cache serves decoding.
      segment_ids: int32 [B, T] (where T == S), or a pair of [B, T] and [B, S]: a query sees the keys of its own
        segment. Any value is a segment, and padding one of its own. Where ids are sorted, tiles of others'
        segments take no time.
      sinks: floating-point array [N]: a logit for each head that takes part in the softmax and has no value
        (https://arxiv.org/abs/2309.17453). A row with a sink and no key has output 0 and the sink as
        log-sum-exp. Differentiable.
      dropout_rate: in [0, 1): this part of the normalised probabilities becomes 0, and the others are divided by
        1 - dropout_rate. Rounded to a multiple of 2^-16.
      dropout_rng: the PRNG key of the dropout, needed where dropout_rate is not 0. Which pairs are kept depends on
        it and on batch, head, row and column alone: not on platform, tiles or sharding.
      precision: of the products of float32 inputs: what `jax.lax.dot` takes, of a pair the more exact; None:
        `jax.default_matmul_precision`. Accepted and without effect for other dtypes.
      deterministic: whether the backward pass gives the same bits on every run, on a GPU at some cost in speed.
        (The forward pass and the CPU kernel always do.)
      return_residual: whether to return also the log-sum-exp of each row's logits.
      implementation: None: the fused kernel of the platform; "xla": plain XLA operations, which write the score
        matrix, on any platform.

    Returns:
      The output, [B, T, N, Hv] in query's dtype; with `return_residual` a pair of it and the log-sum-exp,
      [B, T, N], natural logarithm, float32 (float64 for float64), with sinks and without dropout. Both are
      differentiable; the cotangent of an infinite log-sum-exp is ignored.

    Raises:
      TypeError: an argument has the wrong type or dtype, or an option that must be static is traced.
      ValueError: an argument has the wrong rank, shape or value.
      NotImplementedError: the fused kernels do not support this call (on a GPU also: float64, head dims over
        256, and where a block has 99 KB of shared memory float32 gradients of head dims over 128), and
        `implementation="xla"` does. Where it depends on the platform it is raised by lowering.
    """
    _support.check_implementation(implementation)
    query, key, value = _support.check_qkv(query, key, value)
    is_batched = query.ndim == 4
    batch = query.shape[0] if is_batched else None
    scores = (*query.shape[:-3], query.shape[-2], query.shape[-3], key.shape[-3])  # [B, N, T, S]

    options = dict(
        scale=scale,
        is_causal=is_causal,
        local_window_size=local_window_size,
        logits_soft_cap=logits_soft_cap,
        dropout_rate=dropout_rate,
        precision=precision,
        deterministic=deterministic,
    )
    resolved = AttentionOptions.resolve(query.shape[-1], **options)
    return_residual = static_bool("return_residual", return_residual)

    operands = dict(
        query_seq_lengths=_support.check_lengths("query_seq_lengths", query_seq_lengths, batch),
        key_value_seq_lengths=_support.check_lengths("key_value_seq_lengths", key_value_seq_lengths, batch),
        query_offset=_support.check_query_offset(query_offset, batch),
    )
    bias = _support.check_bias(bias, scores)
    mask = _support.check_mask(mask, scores)
    segment_ids = _support.check_segment_ids(segment_ids, query, key)
    sinks = _support.check_sinks(sinks, query.shape[-2])
    dropout_rng = _support.check_dropout_rng(dropout_rng, resolved.dropout_rate)

    if implementation == "xla":
        return _reference.attention(
            query,
            key,
            value,
            bias,
            mask,
            segment_ids=segment_ids,
            sinks=sinks,
            dropout_rng=dropout_rng,
            return_residual=return_residual,
            **operands,
            **options,
        )

    if not is_batched:
        query, key, value = query[None], key[None], value[None]
    batch, _, num_heads, _ = query.shape
    if isinstance(bias, Alibi):
        operands["alibi_slopes"] = _per_head(bias.slopes, query)
    elif bias is not None:
        # The kernels compute logits in float32 or in query's dtype: a bias in float64 beside others has no more to say.
        exact = bias.dtype != jnp.float64 or query.dtype == jnp.float64
        operands["bias"] = _with_four_axes(bias if exact else bias.astype(jnp.float32))
    if mask is not None:
        operands["mask"] = _with_four_axes(mask)
    if segment_ids is not None:
        for name, ids in zip(("query_segment_ids", "key_value_segment_ids"), segment_ids, strict=True):
            operands[name] = ids if is_batched else ids[None]
    if sinks is not None:
        operands["sinks"] = _per_head(sinks, query)
    if dropout_rng is not None:
        operands["dropout_seeds"] = _dropout.make_seeds(dropout_rng, batch, num_heads)
    operands = {name: x for name, x in operands.items() if x is not None}
    query, key, value, operands = _vary_alike((query, key, value, operands))
    out, lse = _attention(resolved, query, key, value, operands)
    if not is_batched:
        out, lse = out[0], lse[0]
    return (out, lse) if return_residual else out


def _per_head(x, query):
    """[N] as [B, N], in lse's dtype: with one row for each batch element it is mapped and sharded like the rest."""
    dtype = jnp.promote_types(query.dtype, jnp.float32)
    return jnp.broadcast_to(x.astype(dtype), (query.shape[0], *x.shape))


def _with_four_axes(x):
    return x.reshape((1,) * (4 - x.ndim) + x.shape)


dot_product_attention = flash_attention

# The operands that stand for a bias: at most one of them is there.
_BIASES = ("bias", "alibi_slopes")


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(options, query, key, value, operands):
    return _primitives.forward(query, key, value, operands, options)


def _attention_fwd(options, *args):
    query, key, value, operands = custom_vjp_primal_tree_values(args)
    out, lse = _primitives.forward(query, key, value, operands, options)
    out = checkpoint_name(out, "flash_attention_out")
    lse = checkpoint_name(lse, "flash_attention_lse")
    # The names of what is differentiated are part of the residuals' structure: a pass is run for them.
    differentiated = {name: None for name in _BIASES if name in operands and args[3][name].perturbed}
    return (out, lse), (query, key, value, out, lse, operands, differentiated)


def _attention_bwd(options, residuals, cotangents):
    query, key, value, out, lse, operands, differentiated = residuals
    dout, dlse = cotangents
    # A zero cotangent of lse, the common case, is one array less for the kernel to read.
    dout = jnp.zeros_like(out) if isinstance(dout, SymbolicZero) else dout
    dlse = None if isinstance(dlse, SymbolicZero) else dlse
    grads = _primitives.backward(query, key, value, out, lse, dout, dlse, operands, options)
    operand_grads = dict.fromkeys(operands)
    if "sinks" in operands:
        operand_grads["sinks"] = _sinks_gradient(out, lse, dout, dlse, operands)
    for name in differentiated:
        sums = _primitives.backward_bias(query, key, value, out, lse, dout, dlse, operands, options)
        operand_grads[name] = _sum_to(sums, operands[name])
    return *grads, operand_grads


def _sum_to(sums, like):
    """Sums of four axes, over what `like`, which has as many or the leading ones, is broadcast over."""
    shape = like.shape + (1,) * (sums.ndim - like.ndim)
    axes = [axis for axis, (size, wanted) in enumerate(zip(sums.shape, shape, strict=True)) if size != wanted]
    return jnp.sum(sums, axes, keepdims=True).reshape(like.shape).astype(like.dtype)


def _sinks_gradient(out, lse, dout, dlse, operands):
    """The gradient [B, N] of the sinks: that of a logit, p (dp - delta), where dp is 0 as a sink has no value."""
    delta = jnp.sum(dout.astype(lse.dtype) * out.astype(lse.dtype), -1)  # [B, T, N]
    if "query_seq_lengths" in operands:
        # dout may hold anything beyond the lengths.
        exists = jnp.arange(out.shape[-3]) < operands["query_seq_lengths"][..., None]
        delta = jnp.where(exists[..., None], delta, 0)
    if dlse is not None:
        delta -= dlse
    sinks = operands["sinks"][..., None, :]
    return -jnp.sum(jnp.where(jnp.isfinite(lse), jnp.exp(sinks - lse) * delta, 0), -2)


_attention.defvjp(_attention_fwd, _attention_bwd, symbolic_zeros=True)


def _vary_alike(arrays):
    """Inside shard_map, makes all arrays vary over the same mesh axes, as the operands of one primitive must.

    It stands outside of the custom_vjp, so that JAX sums the gradients of what was replicated.
    """
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

"""Attention and its gradients in plain NumPy float64: the independent result that every backend is compared with.

Rounding to a 16-bit type after every step gives the naive computation in that type, the baseline of the closeness
rule. Rounding to TF32 before every product gives what tensor cores compute from float32.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

Rounding = Callable[[np.ndarray], np.ndarray]


def to_tfloat32(x: np.ndarray) -> np.ndarray:
    """Round to the 11 significant bits of TF32 (which has float32's range)."""
    fraction, exponent = np.frexp(x)
    return np.ldexp(np.round(fraction * 2**11), exponent - 11)


class Arithmetic(NamedTuple):
    """The rounding of each step's result and of each operand of a product."""

    result: Rounding = lambda x: x
    operand: Rounding = lambda x: x


def arithmetic_of(kind: str) -> Arithmetic:
    """Naive arithmetic in "float16", "bfloat16" or "tfloat32"."""
    if kind == "tfloat32":
        return Arithmetic(operand=to_tfloat32)
    dtype = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}[kind]
    return Arithmetic(result=lambda x: x.astype(dtype).astype(np.float64))


class Result(NamedTuple):
    out: np.ndarray  # [B, T, N, Hv]
    lse: np.ndarray  # [B, T, N]
    dq: np.ndarray | None = None
    dk: np.ndarray | None = None
    dv: np.ndarray | None = None


def visible(
    batch: int,
    seqlen_q: int,
    seqlen_kv: int,
    *,
    is_causal: bool = False,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    local_window_size: int | tuple[int | None, int | None] | None = None,
    query_offset: Any = 0,
    mask: Any = None,
    segment_ids: Any = None,
) -> np.ndarray:
    """Which keys each query sees: bool [B, 1 or N, T, S]."""

    def per_batch(x):
        return np.broadcast_to(np.asarray(x, np.int64).reshape(-1, 1, 1, 1), (batch, 1, 1, 1))

    i = np.arange(seqlen_q).reshape(1, 1, -1, 1)
    j = np.arange(seqlen_kv).reshape(1, 1, 1, -1)
    position = i + per_batch(query_offset)
    seen = np.ones((batch, 1, seqlen_q, seqlen_kv), bool)
    if query_seq_lengths is not None:
        seen = seen & (i < per_batch(query_seq_lengths))
    if key_value_seq_lengths is not None:
        seen = seen & (j < per_batch(key_value_seq_lengths))
    if is_causal:
        seen = seen & (j <= position)
    if local_window_size is not None:
        window = local_window_size if isinstance(local_window_size, tuple) else (local_window_size,) * 2
        left, right = (np.inf if part is None else part for part in window)
        seen = seen & (position - left <= j) & (j <= position + right)
    if segment_ids is not None:
        ids_q, ids_kv = segment_ids if isinstance(segment_ids, tuple) else (segment_ids, segment_ids)
        seen = seen & (np.asarray(ids_q)[:, None, :, None] == np.asarray(ids_kv)[:, None, None, :])
    if mask is not None:
        seen = seen & np.asarray(mask)
    return seen


def attention(
    q: Any,
    k: Any,
    v: Any,
    dout: Any = None,
    dlse: Any = None,
    *,
    scale: float | None = None,
    logits_soft_cap: float | None = None,
    bias: Any = None,
    alibi: Any = None,
    sinks: Any = None,
    dropout_rate: float = 0.0,
    keep: Any = None,
    arithmetic: Arithmetic = Arithmetic(),  # noqa: B008  (immutable)
    precision: Any = None,
    deterministic: bool = False,
    gradients: dict[str, np.ndarray] | None = None,
    **mask_options: Any,
) -> Result:
    """Attention of q [B, T, N, H], k [B, S, K, H], v [B, S, K, Hv]; with `dout`, its gradients, too.

    `alibi` are the slopes [N] of a bias; `keep` [B, N, T, S] marks the pairs that dropout keeps. The gradients of
    bias, alibi and sinks are written into `gradients`. Arrays may be complex, for the step of dense.complex_step.
    """
    del precision, deterministic  # these do not change the exact result
    q, k, v = (np.moveaxis(_wide(x), 2, 1) for x in (q, k, v))  # [B, heads, length, dim]
    batch, num_heads, seqlen_q, head_dim = q.shape
    num_kv_heads, seqlen_kv = k.shape[1:3]
    group = num_heads // max(num_kv_heads, 1)
    k, v = (np.repeat(x, group, axis=1) for x in (k, v))
    scale = head_dim**-0.5 if scale is None else scale
    seen = visible(batch, seqlen_q, seqlen_kv, **mask_options)
    rounding, operand = arithmetic

    def product(a, b):
        return _product(operand(a), operand(b))

    with np.errstate(all="ignore"):
        s = rounding(scale * rounding(operand(q) @ operand(k).swapaxes(-1, -2)))
        if bias is not None:
            s = rounding(s + _wide(bias))
        if alibi is not None:
            offset = np.asarray(mask_options.get("query_offset", 0), np.float64).reshape(-1, 1, 1, 1)
            distance = np.abs(np.arange(seqlen_q)[:, None] + offset - np.arange(seqlen_kv))
            s = rounding(s - _wide(alibi).reshape(-1, 1, 1) * distance)
        slope = 1.0
        if logits_soft_cap is not None:
            s = rounding(logits_soft_cap * np.tanh(s / logits_soft_cap))
            slope = 1 - (s / logits_soft_cap) ** 2
        s = np.where(seen, s, -np.inf)
        sink = np.full((1, num_heads, 1, 1), -np.inf)
        if sinks is not None:
            sink = _wide(sinks).reshape(sink.shape)
        top = np.maximum(s.real.max(-1, keepdims=True, initial=-np.inf), sink.real)
        top = np.where(np.isneginf(top), 0.0, top)
        e = np.where(seen, np.exp(s - top), 0.0)
        total = e.sum(-1, keepdims=True) + np.exp(sink - top)
        lse = top + np.log(total)
        p = rounding(e / np.where(total == 0, 1.0, total))
        # Dropout's factors of the probabilities and of their gradients.
        kept = np.ones(1) if keep is None else np.where(keep, 1 / (1 - dropout_rate), 0.0)
        dropped = rounding(kept * p)
        # A hidden key contributes nothing, even if its value is NaN; 0 * NaN would be NaN.
        out = rounding(product(dropped, v))
        if dout is None:
            return Result(_heads_last(out), _heads_last(lse)[..., 0])

        dout = np.moveaxis(_wide(dout), 2, 1)
        dlse = np.zeros(lse.shape) if dlse is None else np.moveaxis(_wide(dlse), 2, 1)[..., None]
        delta = (dout * out).sum(-1, keepdims=True) - np.where(np.isfinite(lse), dlse, 0.0)
        dp = kept * rounding(operand(dout) @ operand(v).swapaxes(-1, -2))
        ds = rounding(np.where(seen, p * (dp - delta) * slope, 0.0))
        dq = rounding(scale * product(ds, k))
        dk = scale * product(ds.swapaxes(-1, -2), q)
        dv = product(dropped.swapaxes(-1, -2), dout)
        dk, dv = (
            rounding(x.reshape(batch, num_kv_heads, group, seqlen_kv, x.shape[-1]).sum(2)) for x in (dk, dv)
        )
        if gradients is not None and bias is not None:
            gradients["bias"] = rounding(_sum_to(ds, np.shape(bias)))
        if gradients is not None and alibi is not None:
            gradients["alibi"] = -(ds * distance).sum((0, 2, 3))
    result = Result(
        _heads_last(out), _heads_last(lse)[..., 0], _heads_last(dq), _heads_last(dk), _heads_last(dv)
    )
    if gradients is not None and sinks is not None:
        dout, dlse = _heads_last(dout), _heads_last(dlse)[..., 0]
        gradients["sinks"] = sinks_gradient(result, dout, np.where(np.isfinite(result.lse), dlse, 0.0), sinks)
    return result


def sinks_gradient(result: Result, dout: np.ndarray, dlse: np.ndarray, sinks: np.ndarray) -> np.ndarray:
    """The gradient [N] of the sinks, from their share exp(sink - lse) of each row."""
    dout, out = _wide(dout), _wide(result.out)
    delta = (dout * out).sum(-1) - dlse  # [B, T, N]
    return -(np.exp(np.asarray(sinks) - result.lse) * delta).sum((0, 1))


def _wide(x: Any) -> np.ndarray:
    x = np.asarray(x)
    return x if np.iscomplexobj(x) else x.astype(np.float64)


def _sum_to(x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Sum over the axes along which an array of `shape` is broadcast to x."""
    own = (1,) * (x.ndim - len(shape)) + shape
    axes = tuple(axis for axis in range(x.ndim) if own[axis] == 1)
    return x.sum(axes, keepdims=True).reshape(shape)


def philox(counter: Any, key: Any) -> np.ndarray:
    """Philox4x32-10 of counters [..., 4] and keys [..., 2]: uint32 [..., 4]."""
    c, k = (np.moveaxis(np.asarray(x).astype(np.uint64), -1, 0) for x in (counter, key))
    low = np.uint64(2**32 - 1)
    for _ in range(10):
        a, b = np.uint64(0xD2511F53) * c[0], np.uint64(0xCD9E8D57) * c[2]
        c = [(b >> np.uint64(32)) ^ c[1] ^ k[0], b & low, (a >> np.uint64(32)) ^ c[3] ^ k[1], a & low]
        k = [(x + np.uint64(step)) & low for x, step in zip(k, (0x9E3779B9, 0xBB67AE85), strict=True)]
    return np.stack(c, -1).astype(np.uint32)


def keep(seeds: Any, rate: float, seqlen_q: int, seqlen_kv: int) -> np.ndarray:
    """The pairs that dropout keeps: bool [B, N, T, S]. seeds [B, N, 5] begin with Philox's key and the head's number.

    Each call of Philox decides on 8 pairs of a 16 x 16 tile: rows r and r + 8, columns c, c + 1, c + 8, c + 9.
    """
    seeds = np.asarray(seeds)
    (tile_row, r), (tile_column, c) = (np.divmod(np.arange(size), 16) for size in (seqlen_q, seqlen_kv))
    row, column = 8 * tile_row + r % 8, 4 * tile_column + c % 8 // 2  # of the call
    shape = (*seeds.shape[:-1], row.max(initial=0) + 1, column.max(initial=0) + 1)
    counter = np.zeros((*shape, 4), np.uint64)
    counter[..., 0] = np.arange(shape[-2])[:, None]
    counter[..., 1] = np.arange(shape[-1])
    counter[..., 2] = seeds[..., 2, None, None]
    words = philox(counter, np.broadcast_to(seeds[..., None, None, :2], (*shape, 2)))
    word = words[..., row[:, None], column, (2 * (r // 8))[:, None] + c // 8]
    half = (word >> (16 * (c % 2)).astype(np.uint32)) & np.uint32(0xFFFF)
    return half >= round(rate * 2**16)


def _product(weights: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Multiply; a weight of exactly zero contributes nothing, even if the value is not finite."""
    if np.isfinite(values).all():
        return weights @ values
    parts = weights[..., :, :, None] * values[..., None, :, :]
    return np.where(weights[..., None] == 0, 0.0, parts).sum(-2)


def _heads_last(x: np.ndarray) -> np.ndarray:
    return np.moveaxis(x, 1, 2)

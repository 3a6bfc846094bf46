"""Attention over one sequence that is sharded over devices: keys and values travel from device to device.

Ring attention (Liu et al., https://arxiv.org/abs/2310.01889) by the kernels of `flash_attention`. Queries stay. In each
step a device attends to the keys that it holds, passes them on, and merges the result with those of the steps before
by their log-sum-exp. The backward pass goes the same way; the gradients of keys and values travel with them.

A device's shard is one chunk of the sequence, or two with the layout "zigzag" (Llama 3, https://arxiv.org/abs/2407.21783,
section 3.3.2). The unit of work is a pair of chunks, one of queries and one of keys. Which pairs causal and window let
see each other is known when the call is traced, unless the offset is an array: a step without such a pair on any device
is skipped, with its transfer.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero
from jax.typing import ArrayLike

from . import _attention, _checks, _derivatives, _dropout, _reference, _sharding, _subsequence
from ._alibi import Alibi
from ._operands import AXES, DIFFERENTIABLE, PART_OF_LSE, Arrays, sum_dtype
from ._options import AttentionOptions, describe, static_bool, static_int

# What travels. Of masks and biases each device has its rows, with all keys.
_TRAVELLING = ("k", "v", "key_value_segment_ids")


def ring_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | Alibi | None = None,
    mask: ArrayLike | None = None,
    *,
    axis_name: str | tuple[str, ...],
    layout: Literal["contiguous", "zigzag"] = "contiguous",
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
    page_indices: None = None,
    return_residual: bool = False,
    implementation: Literal["xla"] | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Exact attention over a sequence that is sharded over the mesh axis `axis_name`. Call it inside `shard_map`.

    Each of the n devices has an n-th of the queries and of the keys; T and S are the lengths of the whole. The result
    is the device's part of what :func:`flash_attention` gives for the whole sequence, up to rounding.

    Arguments that are not listed here have the meaning that they have there. Lengths and offset are those of the whole
    sequence, the same on all devices.

    Args:
      query: the device's queries, [B, T / n, N, H].
      key: the device's keys, [B, S / n, K, H].
      value: the device's values, [B, S / n, K, Hv].
      bias: broadcastable to [B, N, T / n, S]: the device's rows, all keys in the order of the devices' shards; or
        :class:`Alibi`.
      mask: bool, likewise.
      axis_name: the mesh axis over which the sequence is sharded, or a tuple of axes, the major one first, in the
        order of the mesh.
      layout: which part of the sequence a device has. "contiguous": device d has the d-th of n chunks. "zigzag": it
        has chunks d and 2 n - 1 - d of 2 n, so that all devices have equally much to do if the call is causal;
        :func:`to_zigzag` brings a sequence into this order.
      query_offset: a Python int lets the call skip, with their transfers, keys that no query sees; an array does not.
      segment_ids: the device's, [B, T / n] (if T == S), or a pair of [B, T / n] and [B, S / n].
      forward_mode: as there. Reverse mode with it keeps the keys of all steps, memory linear in S instead of S / n. So
        do second derivatives, with it and without.
      page_indices: not supported.
      implementation: None: the fused kernel of the platform; "xla": plain XLA operations, with score matrices of
        T / n x S / n.

    Returns:
      As `flash_attention`: the device's part of the output, [B, T / n, N, Hv], and of the log-sum-exp, [B, T / n, N].

    Raises:
      TypeError: as `flash_attention`.
      ValueError: as `flash_attention`; or axis_name is no axis here, or has axes in another order than the mesh; or
        layout is unknown; or a shard cannot be halved, or with dropout is not a multiple of 16, or of 32 with "zigzag".
      NotImplementedError: as `flash_attention`; page_indices.
    """
    if page_indices is not None:
        raise NotImplementedError(
            "ring_attention does not support page_indices, since pages do not travel between devices. Call "
            "flash_attention with all pages on each device."
        )
    _checks.check_implementation(implementation)
    forward_mode = static_bool("forward_mode", forward_mode)
    return_residual = static_bool("return_residual", return_residual)
    num_devices = axis_size(axis_name)
    call = _attention.normal_form(
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
        num_shards=num_devices,
    )
    num_chunks = _num_chunks(layout)
    query_offset = 0 if query_offset is None else query_offset
    query_offset = int(query_offset) if isinstance(query_offset, int | np.integer) else None
    unit = num_chunks * (_dropout.UNIT if call.options.dropout_rate else 1)
    for name, x in (("query", call.query), ("key", call.key)):
        if x.shape[1] % unit:
            dropout = f" and dropout_rate {call.options.dropout_rate}" if call.options.dropout_rate else ""
            raise ValueError(
                f"{name} must have a length on each device that is a multiple of {unit} with layout {layout!r}"
                f"{dropout}, got {x.shape[1]}."
            )
    lengths = call.query.shape[1], call.key.shape[1]
    ring = _Ring.of(axis_name, num_devices, num_chunks, lengths, call.operands, call.options, query_offset)
    # JAX knows the axes. Where shard_map does not check them, a gradient would be summed over any that is named here.
    axes = _sharding.varying_axes(lax.axis_index(axis_name))
    arrays = _sharding.with_matching_types(
        call.query, call.key, call.value, _with_exact_sums(call.operands, call.query), more_axes=axes
    )
    if implementation == "xla":
        out, lse = _attend(*arrays, call.options, ring, _reference.attention)
    elif forward_mode:
        out, lse = _attend(*arrays, call.options, ring, _kernel)
    else:
        out, lse = _with_reverse_mode(*arrays, call.options, ring)
    return call.results(out, lse, return_residual=return_residual)


def axis_size(axis_name: Any) -> int:
    """The number of devices along the mesh axis, or axes, of the surrounding `shard_map`."""
    names = _sharding.as_tuple(axis_name)
    if not all(isinstance(name, str) for name in names):
        raise TypeError(f"axis_name must be a str or a tuple of them, got {describe(axis_name)}.")
    if not names:
        raise ValueError(f"axis_name must name a mesh axis, got {axis_name!r}.")
    try:
        size = lax.axis_size(axis_name)
    except NameError:
        raise ValueError(
            f"axis_name must be a mesh axis of the surrounding shard_map, got {axis_name!r}."
        ) from None
    mesh = jax.sharding.get_abstract_mesh()
    if len(names) > 1 and not _sharding.are_in_order(names, mesh):
        raise ValueError(
            f"axis_name must have axes of one mesh in its order, {mesh.axis_names}, got {axis_name!r}."
        )
    return size


def _with_exact_sums(operands: Arrays, query: jax.Array) -> Arrays:
    """Operands whose gradients are summed over pairs of chunks and over devices in float32, and rounded once."""
    bias = operands.get("bias")
    if bias is None or 1 not in bias.shape[2:]:
        return operands
    return operands | {"bias": bias.astype(sum_dtype(query.dtype))}


def to_zigzag(x: ArrayLike, num_devices: int, axis: int = 1) -> jax.Array:
    """A whole sequence in the order of the layout "zigzag": sharded along `axis`, device d gets chunks d, 2 n - 1 - d.

    Args:
      x: an array of the whole sequence: queries, keys, positions, segment ids. Where it is sharded along `axis` over
        n devices, so is the result, without a gather.
      num_devices: n, the size of the mesh axis over which the sequence is sharded.
      axis: the axis of the sequence, of a length that is a multiple of 2 n.

    Returns:
      An array of the shape and dtype of x.

    Raises:
      TypeError: an argument has the wrong type.
      ValueError: num_devices is below 1, x has no such axis, or its length is not a multiple of 2 n.
    """
    return _to_zigzag(*_check_sequence(x, num_devices, axis))


def from_zigzag(x: ArrayLike, num_devices: int, axis: int = 1) -> jax.Array:
    """The inverse of :func:`to_zigzag`, with the same arguments and errors."""
    return _from_zigzag(*_check_sequence(x, num_devices, axis))


# Slices and concatenations keep shardings. XLA gathers only in from_zigzag, and in the gradient of to_zigzag, where the
# length of a chunk does not divide by n.
@functools.partial(jax.jit, static_argnums=(1, 2))
def _to_zigzag(x: jax.Array, num_devices: int, axis: int) -> jax.Array:
    chunks = _split(x, axis, 2 * num_devices)
    first, second = (
        lax.slice_in_dim(chunks, i * num_devices, (i + 1) * num_devices, axis=axis) for i in range(2)
    )
    return jnp.stack([first, jnp.flip(second, axis)], axis + 1).reshape(x.shape)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _from_zigzag(x: jax.Array, num_devices: int, axis: int) -> jax.Array:
    shards = _split(x, axis, num_devices, 2)
    first, second = (lax.index_in_dim(shards, i, axis + 1, keepdims=False) for i in range(2))
    return jnp.concatenate([first, jnp.flip(second, axis)], axis).reshape(x.shape)


def _check_sequence(x: Any, num_devices: Any, axis: Any) -> tuple[jax.Array, int, int]:
    """The arguments of `to_zigzag`, the axis counted from the front."""
    x = _checks.as_array("x", x)
    num_devices, axis = static_int("num_devices", num_devices), static_int("axis", axis)
    if num_devices < 1:
        raise ValueError(f"num_devices must be at least 1, got {num_devices}.")
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(f"axis must be an axis of x, which has {x.ndim}, got {axis}.")
    if x.shape[axis] % (2 * num_devices):
        raise ValueError(
            f"x must have a length that is a multiple of 2 n = {2 * num_devices}, got {x.shape[axis]}."
        )
    return x, num_devices, axis % x.ndim


def _split(x: jax.Array, axis: int, *numbers: int) -> jax.Array:
    """The array with its axis as so many groups of so many chunks."""
    length = x.shape[axis] // math.prod(numbers)
    return x.reshape(*x.shape[:axis], *numbers, length, *x.shape[axis + 1 :])


# ---- Which pairs of chunks meet when ----------------------------------------------------------------------


class _Step(NamedTuple):
    shift: int  # the device has the keys of the device that is this far behind it
    # For each device the pairs (own chunk of queries, own chunk of keys) that may see each other.
    pairs: tuple[tuple[tuple[int, int], ...], ...]

    @property
    def num_slots(self) -> int:
        return max(map(len, self.pairs))


def _depends_on_positions(operands: Collection[str], options: AttentionOptions) -> bool:
    """Otherwise the keys of a shard may be in any order."""
    names = ("query_seq_lengths", "key_value_seq_lengths", "dropout_seeds")
    return _subsequence.needs_offset(operands, options) or any(name in operands for name in names)


def _only_causal_decides(
    lengths: tuple[int, int], operands: Collection[str], options: AttentionOptions, offset: int | None
) -> bool:
    """Whether positions matter only in that no query sees later keys, and there are as many keys as queries."""
    is_causal = options.reach == (-1, 0) and offset == 0 and lengths[0] == lengths[1]
    return is_causal and not _depends_on_positions(operands, options.without_reach())


@dataclasses.dataclass(frozen=True)
class _Ring:
    axis_name: str | tuple[str, ...]
    num_devices: int
    num_chunks: int  # of a device
    q_length: int  # of a chunk
    kv_length: int
    steps: tuple[_Step, ...]
    # Whether each step is one call: zigzag, with causality the only option that depends on positions. The call for own
    # keys is causal. All queries see the first half of the keys of a device before; the second half of them sees all
    # keys of a device behind.
    by_halves: bool

    @classmethod
    def of(
        cls,
        axis_name: str | tuple[str, ...],
        num_devices: int,
        num_chunks: int,
        lengths: tuple[int, int],
        operands: Collection[str],
        options: AttentionOptions,
        offset: int | None,
    ) -> _Ring:
        """Plans the steps.

        Args:
          num_chunks: that the layout has on a device. If positions do not decide which of them see each other, the
            ring takes them as one.
          lengths: of a device's queries and keys.
          operands: the names of those of the call.
          offset: of the queries; None if it is known only when the program runs.
        """
        by_halves = num_chunks == 2 and _only_causal_decides(lengths, operands, options, offset)
        if by_halves:
            options = options.without_reach()  # some query of each shard sees a key of every other
        if not _depends_on_positions(operands, options):
            num_chunks = 1
        q_length, kv_length = (length // num_chunks for length in lengths)
        left, right = (np.inf if limit < 0 else limit for limit in options.reach)

        def may_see(device: int, i: int, sender: int, j: int) -> bool:
            if offset is None:
                return True
            row = _chunk_of(device, i, num_devices, num_chunks) * q_length + offset
            column = _chunk_of(sender, j, num_devices, num_chunks) * kv_length
            return row - (column + kv_length - 1) <= left and column - (row + q_length - 1) <= right

        chunks = range(num_chunks)
        steps = []
        for shift in range(num_devices):
            pairs = tuple(
                tuple(
                    (i, j)
                    for i in chunks
                    for j in chunks
                    if may_see(device, i, (device - shift) % num_devices, j)
                )
                for device in range(num_devices)
            )
            if any(pairs):
                steps.append(_Step(shift, pairs))
        return cls(axis_name, num_devices, num_chunks, q_length, kv_length, tuple(steps), by_halves)

    def chunk(self, device: Any, i: Any) -> Any:
        """The place in the sequence of a device's chunk."""
        return _chunk_of(device, i, self.num_devices, self.num_chunks)

    def move(self, arrays: Any, shift: int) -> Any:
        """Passes arrays on to the device that is `shift` further."""
        shift %= self.num_devices
        if not shift:
            return arrays
        n = self.num_devices
        return lax.ppermute(arrays, self.axis_name, [(device, (device + shift) % n) for device in range(n)])


def _num_chunks(layout: str) -> int:
    if not isinstance(layout, str):
        raise TypeError(f"layout must be a str, got {describe(layout)}.")
    if layout not in ("contiguous", "zigzag"):
        raise ValueError(f'layout must be "contiguous" or "zigzag", got {layout!r}.')
    return 2 if layout == "zigzag" else 1


def _chunk_of(device: Any, i: Any, num_devices: int, num_chunks: int) -> Any:
    """The place in the sequence of chunk i (0, or 0 and 1) of a device."""
    if num_chunks == 1:
        return device
    return device + i * (2 * (num_devices - device) - 1)  # device, or 2 num_devices - 1 - device


# ---- The arrays of a pair of chunks -----------------------------------------------------------------------


class _Places(NamedTuple):
    """A pair of chunks that a device works on: how many rows or columns come before it in which array."""

    device: Any
    sender: Any  # whose keys they are
    own_row: Any  # in the device's rows
    own_column: Any  # in the sender's keys
    stored_column: Any  # in the keys of all devices, as a mask or bias has them
    row: Any  # in the sequence
    column: Any  # in the sequence
    is_real: Any  # is there work at all?


class _Pair(NamedTuple):
    at: _Places
    is_aligned: bool = False  # are they the same part of the sequence, on every device?
    is_swapped: bool = False  # does the call have the second half of the rows before the first?


def _pairs(ring: _Ring, step: _Step) -> Iterator[_Pair]:
    for slot in range(step.num_slots):
        chunks = [pairs[slot] if slot < len(pairs) else None for pairs in step.pairs]
        is_own = step.shift == 0 and ring.q_length == ring.kv_length
        is_aligned = is_own and all(pair is None or pair[0] == pair[1] for pair in chunks)
        yield _Pair(_at(ring, step.shift, chunks), is_aligned, is_swapped=ring.by_halves and not is_aligned)


def _at(ring: _Ring, shift: int, chunks: Sequence[tuple[int, int] | None]) -> _Places:
    """The places on this device of the pair of chunks of each device; None: it has no work."""

    def places(device: int) -> _Places:
        (i, j), sender = chunks[device] or (0, 0), (device - shift) % ring.num_devices
        own_row, own_column = i * ring.q_length, j * ring.kv_length
        return _Places(
            device,
            sender,
            own_row,
            own_column,
            sender * ring.num_chunks * ring.kv_length + own_column,
            ring.chunk(device, i) * ring.q_length,
            ring.chunk(sender, j) * ring.kv_length,
            chunks[device] is not None,
        )

    table = np.array([places(device) for device in range(ring.num_devices)], np.int32)
    own = lax.dynamic_index_in_dim(
        table, lax.axis_index(ring.axis_name), keepdims=False, allow_negative_indices=False
    )
    return _Places(*own)


def _travelling(arrays: Arrays) -> Arrays:
    return {name: arrays[name] for name in _TRAVELLING if name in arrays}


def _with_columns(arrays: Arrays) -> Arrays:
    """Those that have the keys of all devices."""
    return {name: x for name, x in arrays.items() if "s" in AXES[name] and name not in _TRAVELLING}


def _axis(name: str, letter: str) -> int | None:
    """The axis of an array [B, ...], or None."""
    place = AXES[name].find(letter)
    return None if place < 0 else 1 + place


def _rows(name: str, x: jax.Array, ring: _Ring, pair: _Pair) -> jax.Array:
    """The rows of the pair, of an array that has rows."""
    x = _slice(x, _axis(name, "t"), pair.at.own_row, ring.q_length)
    return _swapped(name, x) if pair.is_swapped else x


def _swapped(name: str, x: jax.Array) -> jax.Array:
    """The second half of the rows before the first; its own inverse."""
    axis = _axis(name, "t")
    return x if axis is None or x.shape[axis] == 1 else jnp.roll(x, x.shape[axis] // 2, axis)


def _columns(name: str, x: jax.Array, ring: _Ring, pair: _Pair) -> jax.Array:
    """The keys of the pair."""
    return _slice(x, _axis(name, "s"), _first_column(name, pair), ring.kv_length)


def _first_column(name: str, pair: _Pair) -> Any:
    return pair.at.own_column if name in _TRAVELLING else pair.at.stored_column


def _slice(x: jax.Array, axis: int | None, start: Any, size: int) -> jax.Array:
    if axis is None or x.shape[axis] in (1, size):  # 1: broadcast
        return x
    return lax.dynamic_slice_in_dim(x, start, size, axis, allow_negative_indices=False)


def _part(
    arrays: Arrays, options: AttentionOptions, ring: _Ring, pair: _Pair, *, is_padded: bool = False
) -> tuple[Arrays, AttentionOptions]:
    """The arrays and the options of the call that a pair of chunks is; `is_padded`: the pair may not be real."""
    part = {name: _rows(name, _columns(name, x, ring, pair), ring, pair) for name, x in arrays.items()}
    batch = arrays["q"].shape[:1]
    if pair.is_swapped:
        comes_before = pair.at.sender < pair.at.device
        for name, length, is_halved in (
            ("query_seq_lengths", ring.q_length, ~comes_before),
            ("key_value_seq_lengths", ring.kv_length, comes_before),
        ):
            part[name] = jnp.full(batch, jnp.where(is_halved, length // 2, length), jnp.int32)
        return part, options.without_reach()
    # Kernels are faster where they know that the offset is 0.
    with_offset = not pair.is_aligned and _subsequence.needs_offset(arrays, options)
    part = _subsequence.at(part, pair.at.row, pair.at.column, with_offset=with_offset)
    whole = ring.num_devices * ring.num_chunks * ring.kv_length
    if "key_value_seq_lengths" in arrays or is_padded:
        lengths = arrays.get("key_value_seq_lengths", jnp.full(batch, whole, jnp.int32))
        part["key_value_seq_lengths"] = (jnp.maximum(lengths, 0) - pair.at.column) * pair.at.is_real
    return part, options


# ---- Forward ----------------------------------------------------------------------------------------------


def _kernel(query, key, value, operands, options):
    return _derivatives.forward(dict(q=query, k=key, v=value) | operands, options)


def _attend(query, key, value, operands, options: AttentionOptions, ring: _Ring, attention):
    """The results of a device: `attention` of each pair of chunks, merged."""
    arrays = dict(q=query, k=key, v=value) | operands
    sinks = arrays.pop("sinks", None)
    at_hand, shift = _travelling(arrays), 0
    results = None if ring.num_chunks == 1 else _no_results(query, value)
    for step in ring.steps:
        at_hand = ring.move(at_hand, step.shift - shift)
        shift = step.shift
        # A step begins, and with it the next transfer, when the last one has ended. XLA would else be free to begin all
        # transfers at once, and to keep the keys of all steps, and their columns of a mask or bias.
        at_hand, results, columns = lax.optimization_barrier((at_hand, results, _with_columns(arrays)))
        arrays |= columns
        for pair in _pairs(ring, step):
            part, part_options = _part(arrays | at_hand, options, ring, pair, is_padded=_is_padded(step))
            own = {name: part.pop(name) for name in "qkv"}
            more = attention(own["q"], own["k"], own["v"], part, part_options)
            results = _with_pair(results, more, ring, pair)
    out, lse = _no_results(query, value) if results is None else results
    if sinks is not None:
        sinks = jnp.broadcast_to(sinks[:, None], lse.shape)
        is_alone = lse == -jnp.inf  # a sink that is not finite then shows in lse alone
        out, lse = _merge(out, lse, jnp.zeros_like(out), jnp.where(is_alone, -jnp.inf, sinks))
        lse = jnp.where(is_alone, sinks, lse)
    return out.astype(query.dtype), lse


def _no_results(query: jax.Array, value: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Attention over no keys."""
    dtype = sum_dtype(query.dtype)
    lse = jnp.full_like(lax.index_in_dim(query, 0, -1, keepdims=False), -jnp.inf, dtype)
    return jnp.broadcast_to(jnp.zeros_like(lse)[..., None], (*lse.shape, value.shape[-1])), lse


def _with_pair(results, more, ring: _Ring, pair: _Pair):
    """The results of a device's rows, None if there are none yet, with those of one pair more."""
    names = ("out", "lse")
    if pair.is_swapped:
        more = tuple(map(_swapped, names, more))
    if ring.num_chunks == 1:
        return more if results is None else _merge(*results, *more)
    merged = _merge(*(_rows(name, x, ring, pair) for name, x in zip(names, results, strict=True)), *more)
    return tuple(
        lax.dynamic_update_slice_in_dim(whole, x, pair.at.own_row, axis=1, allow_negative_indices=False)
        for whole, x in zip(results, merged, strict=True)
    )


def _is_padded(step: _Step) -> bool:
    return len(set(map(len, step.pairs))) > 1


@jax.jit  # traced once for all steps
def _merge(out, lse, more_out, more_lse):
    """Attention over two sets of keys, from attention over each."""
    top = lax.stop_gradient(jnp.maximum(lse, more_lse))
    top = jnp.where(top == -jnp.inf, 0, top)
    weight, more_weight = jnp.exp(lse - top), jnp.exp(more_lse - top)
    total = weight + more_weight
    is_empty = total == 0
    safe_total = jnp.where(is_empty, 1, total)
    out, more_out = out.astype(lse.dtype), more_out.astype(lse.dtype)
    out = out * (weight / safe_total)[..., None] + more_out * (more_weight / safe_total)[..., None]
    return out, jnp.where(is_empty, -jnp.inf, top + jnp.log(safe_total))


# ---- Backward ---------------------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnums=(4, 5))
@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _with_reverse_mode(query, key, value, operands, options, ring):
    return _attend(query, key, value, operands, options, ring, _kernel)


def _forward(query, key, value, operands, options, ring):
    out, lse = _attend(query, key, value, operands, options, ring, _kernel)
    out = checkpoint_name(out, "flash_attention_out")
    lse = checkpoint_name(lse, "flash_attention_lse")
    return (out, lse), dict(q=query, k=key, v=value) | operands | dict(out=out, lse=lse)


def _backward(options, ring, arrays, cotangents):
    dout, dlse = cotangents
    found = _gradients(arrays | dict(dout=dout, dlse=dlse), options, ring)
    operands = {name: found.get(name) for name in arrays if name not in ("q", "k", "v", "out", "lse")}
    return found["q"], found["k"], found["v"], operands


_with_reverse_mode.__wrapped__.defvjp(_forward, _backward)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def _gradients(arrays: Arrays, options: AttentionOptions, ring: _Ring) -> Arrays:
    """The gradients of a device's arrays. Each pair of chunks adds to them, with out and lse of the whole row."""
    wanted = [name for name in DIFFERENTIABLE if name in arrays and name not in PART_OF_LSE]
    of_bias = [name for name in wanted if name in _derivatives.BIASES]
    others = [name for name in wanted if name not in of_bias]
    of_lse = {name: jnp.zeros_like(arrays[name]) for name in PART_OF_LSE if name in arrays}
    for i in range(ring.num_chunks):
        part, _ = _part(arrays, options, ring, _Pair(_at(ring, 0, [(i, 0)] * ring.num_devices)))
        for name, x in _derivatives.gradients(part, list(of_lse), options).items():
            of_lse[name] += x

    arrays = {name: x for name, x in arrays.items() if name not in PART_OF_LSE}
    # Keys wait for dout, and for the forward pass if dout does not. XLA would else be free to send those of all layers
    # at once.
    at_hand, arrays["dout"], arrays["lse"] = lax.optimization_barrier(
        (_travelling(arrays), arrays["dout"], arrays["lse"])
    )
    shift = 0
    sums: Arrays = {}  # those of keys are of the keys at hand
    for step in ring.steps:
        at_hand = ring.move(at_hand, step.shift - shift)
        # As in the forward pass.
        at_hand, sums, columns = lax.optimization_barrier((at_hand, sums, _with_columns(arrays)))
        arrays |= columns
        # The sums for the keys come from the device before while this one computes what it adds to them. They come
        # together: XLA would else be free to combine the transfer of one with a later one of the other.
        sums |= lax.optimization_barrier(ring.move(_of_keys(sums), step.shift - shift))
        shift = step.shift
        for pair in _pairs(ring, step):
            part, part_options = _part(arrays | at_hand, options, ring, pair, is_padded=_is_padded(step))
            # Two passes: the barriers hide from JAX whether a bias is trained. XLA sees it, and drops the second.
            added = _derivatives.gradients(part, others, part_options)
            added |= _derivatives.gradients(part, of_bias, part_options)
            for name, x in added.items():
                x = _swapped(name, x) if pair.is_swapped else x
                sums[name] = _with_part(name, sums.get(name), x, arrays, ring, pair)
    found = {name: sums.get(name, jnp.zeros_like(arrays[name])) for name in wanted}
    found = {name: x.astype(arrays[name].dtype) for name, x in found.items()}
    return found | ring.move(_of_keys(found), -shift) | of_lse


def _of_keys(sums: Arrays) -> Arrays:
    return {name: sums[name] for name in "kv" if name in sums}


def _with_part(
    name: str, total: jax.Array | None, x: jax.Array, arrays: Arrays, ring: _Ring, pair: _Pair
) -> jax.Array:
    """The sum of an array's gradient, None if there is none yet, and that of one pair more."""
    shape, dtype = arrays[name].shape, arrays["lse"].dtype
    if total is None:
        if x.shape == shape:
            return x  # in the kernel's dtype: the first hop moves no more than that
        total = jnp.zeros_like(arrays[name], dtype)
    total, x = total.astype(dtype), x.astype(dtype)
    if x.shape == shape:
        return total + x
    starts = [np.int32(0)] * x.ndim
    for letter, start in (("t", pair.at.own_row), ("s", _first_column(name, pair))):
        axis = _axis(name, letter)
        if axis is not None and x.shape[axis] < shape[axis]:
            starts[axis] = start
    part = lax.dynamic_slice(total, starts, x.shape, allow_negative_indices=False) + x
    return lax.dynamic_update_slice(total, part, starts, allow_negative_indices=False)


@functools.partial(_gradients.defjvp, symbolic_zeros=True)
def _gradient_tangents(options, ring, primals, tangents):
    """Differentiates the gradient that forward mode has, which follows from the inputs and the cotangents alone."""
    (arrays,), (moved,) = primals, tangents
    inputs = {name: arrays[name] for name in (*DIFFERENTIABLE, "dout", "dlse") if name in arrays}
    fixed = {name: x for name, x in arrays.items() if name not in (*inputs, "out", "lse")}
    # Zeros would cost as much as what moves, and JAX does not transpose an optimization_barrier that has some.
    moved = {name: moved[name] for name in inputs if not isinstance(moved[name], SymbolicZero)}

    def gradients(moving: Arrays) -> Arrays:
        given = inputs | moving

        def attend(wanted: Arrays):
            operands = fixed | {name: x for name, x in wanted.items() if name not in tuple("qkv")}
            return _attend(wanted["q"], wanted["k"], wanted["v"], operands, options, ring, _kernel)

        _, vjp = jax.vjp(attend, {name: given[name] for name in DIFFERENTIABLE if name in given})
        return vjp((given["dout"], given["dlse"]))[0]

    found = _gradients(arrays, options, ring)
    if not moved:
        return found, jax.tree.map(jnp.zeros_like, found)
    return found, jax.jvp(gradients, ({name: inputs[name] for name in moved},), (moved,))[1]

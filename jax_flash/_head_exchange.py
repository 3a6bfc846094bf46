"""A sequence that is sharded over devices, divided by heads for the time of a call.

Each device has a part of the rows of all heads. It exchanges them for all rows of a part of the heads (DeepSpeed
Ulysses, Jacobs et al., https://arxiv.org/abs/2309.14509), and the results back. So all devices have equally much to do,
whatever is masked, and none has the keys of all heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from . import _sharding
from ._operands import sum_dtype
from ._options import AttentionOptions

# An H200 moves a row of a head over NVLink in the time in which it computes it with so many keys, by the model of
# benchmarks/context_parallel_model.py.
_KEYS_OF_A_ROW = 3000
# How many sequences a row with segment ids is assumed to pack.
_SEGMENTS_OF_A_ROW = 16


class HeadExchange(NamedTuple):
    """Exchanges arrays by collectives within a call, where XLA does not do it on the way to it (`_on_shards._Plan`)."""

    axes: str | tuple[str, ...]  # of the mesh, over which the sequence is sharded
    num_devices: int
    num_kv_heads: int  # of each row on a device

    @property
    def copies(self) -> int:
        """How many devices need each key head."""
        return max(self.num_devices // self.num_kv_heads, 1)

    def to_heads(self, x: jax.Array, letters: Sequence[str], rows: str) -> jax.Array:
        """All rows of the device's heads, from its rows of all heads. A key head that several need is sent to each.

        Args:
          x: an array that may have rows or heads.
          letters: of its axes, as in `_operands.AXES`.
          rows: the letter of its rows.
        """
        heads = _heads(letters)
        if rows not in letters:
            if heads is None:
                return x
            size = x.shape[heads] // self.num_devices
            return lax.dynamic_slice_in_dim(x, lax.axis_index(self.axes) * size, size, heads)
        if heads is None:
            return lax.all_gather(x, self.axes, axis=letters.index(rows), tiled=True)
        x = jnp.repeat(x, self._copies(rows), heads)
        return self._exchange(x, heads, letters.index(rows))

    def to_rows(self, x: jax.Array, letters: Sequence[str], rows: str) -> jax.Array:
        """The device's rows of all heads, or without rows all heads, from those of its heads.

        What several devices have for one key head is summed, and rounded to the array's dtype once.
        """
        heads = _heads(letters)
        if rows not in letters:
            return lax.all_gather(x, self.axes, axis=heads, tiled=True)
        x = self._exchange(x, letters.index(rows), heads)
        if (copies := self._copies(rows)) == 1:
            return x
        copied = x.reshape(*x.shape[:heads], x.shape[heads] // copies, copies, *x.shape[heads + 1 :])
        return jnp.sum(copied, heads + 1, sum_dtype(x.dtype)).astype(x.dtype)

    def _exchange(self, x: jax.Array, split: int, concat: int) -> jax.Array:
        """Divides one axis over the devices, and puts the parts of another one together.

        `lax.all_to_all` of these axes does the same by two copies of the array in other orders. With the devices' parts
        in front, one of them is no copy where the batch has one element.
        """
        shape = list(x.shape)
        shape[split : split + 1] = self.num_devices, shape[split] // self.num_devices
        parts = lax.all_to_all(jnp.moveaxis(x.reshape(shape), split, 0), self.axes, 0, 0, tiled=True)
        shape = list(parts.shape[1:])
        shape[concat] *= self.num_devices
        return jnp.moveaxis(parts, 0, concat).reshape(shape)

    def _copies(self, rows: str) -> int:
        """How many devices need each head of an array with these rows."""
        return self.copies if rows == "s" else 1


def of(
    axes: str | tuple[str, ...],
    mesh: Mesh,
    lengths: tuple[int, int],
    heads: tuple[int, int],
    uneven_keys: float,
) -> HeadExchange | None:
    """The exchange of a sequence of queries and keys, both sharded over these axes of the mesh, where it pays.

    None, too, if the axes are not in the order of the mesh. For the other arguments see `pays`.
    """
    num_devices = _sharding.num_parts(mesh, axes)
    if not pays(num_devices, lengths, heads, uneven_keys) or not _sharding.are_in_order(axes, mesh):
        return None
    return HeadExchange(axes, num_devices, heads[1])


def pays(num_devices: int, lengths: tuple[int, int], heads: tuple[int, int], uneven_keys: float) -> bool:
    """Whether heads divide over the devices, and dividing them is faster than gathering the keys on each.

    It is if no more moves, or if what moves more takes less time than rows that see unequally many keys.

    Args:
      lengths: of the sequences of queries and keys.
      heads: the numbers of query and key heads that a device has of each row.
      uneven_keys: how many keys rows see at most, where some see fewer; 0 where all see as many.
    """
    (seqlen_q, seqlen_kv), (num_heads, num_kv_heads) = lengths, heads
    divide = num_heads % num_devices == 0 and num_kv_heads > 0
    divide = divide and (num_kv_heads % num_devices == 0 or num_devices % num_kv_heads == 0)
    moved = seqlen_q * num_heads + seqlen_kv * max(num_kv_heads, num_devices)
    gathered = num_devices * seqlen_kv * num_kv_heads
    return divide and (moved - gathered) * _KEYS_OF_A_ROW <= seqlen_q * num_heads * uneven_keys


def uneven_keys(seqlen_kv: int, options: AttentionOptions, has_segments: bool) -> float:
    """The argument of `pays`. Lengths of sequences may be anything, and do not count."""
    if has_segments:
        return seqlen_kv / _SEGMENTS_OF_A_ROW
    return 0 if options.reach == (-1, -1) else seqlen_kv


def _heads(letters: Sequence[str]) -> int | None:
    """The axis of the heads."""
    return next((axis for axis, letter in enumerate(letters) if letter in ("n", "k")), None)

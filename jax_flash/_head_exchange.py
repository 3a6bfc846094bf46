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


class HeadExchange(NamedTuple):
    axes: str | tuple[str, ...]  # of the mesh, over which the sequence is sharded
    num_devices: int
    num_kv_heads: int  # of each row on a device

    def to_heads(self, x: jax.Array, axes: Sequence[str], rows: str) -> jax.Array:
        """All rows of the device's heads, from its rows of all heads. A key head that several need is sent to each.

        Args:
          x: an array that may have rows or heads.
          axes: what its axes are, by the letters of `_operands.AXES`.
          rows: the letter of its rows.
        """
        heads = _heads(axes)
        if rows not in axes:
            if heads is None:
                return x
            size = x.shape[heads] // self.num_devices
            return lax.dynamic_slice_in_dim(x, lax.axis_index(self.axes) * size, size, heads)
        if heads is None:
            return lax.all_gather(x, self.axes, axis=axes.index(rows), tiled=True)
        x = jnp.repeat(x, self._copies(rows), heads)
        return lax.all_to_all(x, self.axes, split_axis=heads, concat_axis=axes.index(rows), tiled=True)

    def to_rows(self, x: jax.Array, axes: Sequence[str], rows: str) -> jax.Array:
        """The device's rows of all heads, or without rows all heads, from those of its heads.

        What several devices have for one key head is summed, and rounded to the array's dtype once.
        """
        heads = _heads(axes)
        if rows not in axes:
            return lax.all_gather(x, self.axes, axis=heads, tiled=True)
        x = lax.all_to_all(x, self.axes, split_axis=axes.index(rows), concat_axis=heads, tiled=True)
        if (copies := self._copies(rows)) == 1:
            return x
        copied = x.reshape(*x.shape[:heads], -1, copies, *x.shape[heads + 1 :])
        return jnp.sum(copied, heads + 1, jnp.promote_types(x.dtype, jnp.float32)).astype(x.dtype)

    def _copies(self, rows: str) -> int:
        """How many devices need each head of an array with these rows."""
        return max(self.num_devices // self.num_kv_heads, 1) if rows == "s" else 1


def of(
    axes: str | tuple[str, ...], mesh: Mesh, num_heads: int, num_kv_heads: int, *, is_uneven: bool
) -> HeadExchange | None:
    """The exchange of a sequence of queries and keys, both sharded over these axes of the mesh, where it pays.

    None, too, if the axes are not in the order of the mesh. For the other arguments see `pays`.
    """
    num_devices = _sharding.num_parts(mesh, axes)
    is_taken = pays(num_devices, num_heads, num_kv_heads, is_uneven=is_uneven)
    return (
        HeadExchange(axes, num_devices, num_kv_heads)
        if is_taken and _sharding.are_in_order(axes, mesh)
        else None
    )


def pays(num_devices: int, num_heads: int, num_kv_heads: int, *, is_uneven: bool) -> bool:
    """Whether heads divide over devices that have `num_heads` and `num_kv_heads` of each row, and should be.

    They should if the devices would have unequally much to do with their rows and all keys, or if no more moves than in
    a gather of the keys and a sum of their gradients.
    """
    of_keys = num_kv_heads % num_devices == 0 or num_devices % num_kv_heads == 0
    moves_less = num_heads + max(num_kv_heads, num_devices) <= num_devices * num_kv_heads
    return num_heads % num_devices == 0 and of_keys and (is_uneven or moves_less)


def _heads(axes: Sequence[str]) -> int | None:
    return next((i for i, axis in enumerate(axes) if axis in ("n", "k")), None)

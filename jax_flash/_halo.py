"""The keys that the queries of one device see in a window: its own, and a halo of those before and behind them.

Every device has an n-th of the keys and the queries beside them. It gets those of its neighbors that its queries see,
and no others, and sends the gradients of these back.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from . import _sharding
from ._operands import sum_dtype
from ._options import AttentionOptions


class _Transfer(NamedTuple):
    """Each device's keys [begin, end) are seen by the queries of the device `distance` further, which may be < 0."""

    distance: int
    begin: int
    end: int


class Halo(NamedTuple):
    axes: str | tuple[str, ...]  # of the mesh, over which the sequence is sharded
    num_devices: int
    size: int  # of a shard
    reach: tuple[int, int]  # how far before and behind its place a query sees keys

    def gather(self, x: jax.Array) -> jax.Array:
        """A shard [..., S / n, K, H] as an array [..., S, K, H] that has what is seen; the rest is zeros."""
        parts = [(_Transfer(0, 0, self.size), x)]
        for transfer in self._transfers():
            parts.append(
                (transfer, self._move(x[..., transfer.begin : transfer.end, :, :], transfer.distance))
            )
        parts.sort(key=lambda part: -part[0].distance)  # in the order of the sequence
        seen = jnp.concatenate([part for _, part in parts], axis=-3)
        length = self.size * self.num_devices
        rest = jnp.zeros((*x.shape[:-3], length - seen.shape[-3], *x.shape[-2:]), x.dtype)
        # XLA makes one kernel of all this. Updates of zeros would be a kernel and a copy for each part.
        return jnp.roll(jnp.concatenate([seen, rest], axis=-3), self._place(parts[0][0]), axis=-3)

    def sum_parts(self, x: jax.Array) -> jax.Array:
        """The device's shard [..., S / n, K, H] of the sum of what devices have for the keys that they see.

        The sum is rounded to the array's dtype once.
        """

        def rows(transfer: _Transfer) -> jax.Array:
            size = transfer.end - transfer.begin
            return lax.dynamic_slice_in_dim(x, self._place(transfer), size, x.ndim - 3)

        total = rows(_Transfer(0, 0, self.size)).astype(sum_dtype(x.dtype))
        for transfer in self._transfers():
            part = self._move(rows(transfer), -transfer.distance).astype(total.dtype)
            total = total.at[..., transfer.begin : transfer.end, :, :].add(part)
        return total.astype(x.dtype)

    def _transfers(self) -> Iterator[_Transfer]:
        before, behind = self.reach
        for direction, reach in ((1, before), (-1, behind)):
            for places in range(1, 1 + -(-reach // self.size)):
                count = min(reach - (places - 1) * self.size, self.size)
                begin = self.size - count if direction > 0 else 0
                yield _Transfer(direction * places, begin, begin + count)

    def _place(self, transfer: _Transfer) -> jax.Array:
        """The first of the keys that come to this device.

        None come from beyond an end of the sequence. Their place is then at the other end, where it is no other's,
        because what a device sees does not go all the way round.
        """
        sender = (lax.axis_index(self.axes) - transfer.distance) % self.num_devices
        return sender * self.size + transfer.begin

    def _move(self, x: jax.Array, distance: int) -> jax.Array:
        """Passes an array on to the device that is `distance` further, if there is one; zeros arrive at the others."""
        pairs = [(i, i + distance) for i in range(self.num_devices) if 0 <= i + distance < self.num_devices]
        return lax.ppermute(x, self.axes, pairs)


def of(axes: str | tuple[str, ...], mesh: Mesh, seqlen: int, options: AttentionOptions) -> Halo | None:
    """The halo of a sequence of queries and keys, both sharded over these axes of the mesh.

    None if a device would get all keys, or if the axes are not in the order of the mesh.
    """
    num_devices = _sharding.num_parts(mesh, axes)
    if not pays(num_devices, seqlen, options) or not _sharding.are_in_order(axes, mesh):
        return None
    return Halo(axes, num_devices, seqlen // num_devices, options.reach)


def pays(num_devices: int, seqlen: int, options: AttentionOptions) -> bool:
    """Whether a device gets fewer keys in a window than by a gather."""
    return min(options.reach) >= 0 and sum(options.reach) < seqlen - seqlen // num_devices

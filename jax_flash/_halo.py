"""The keys that the queries of one device see in a window: its own, and a halo of those before and behind them.

Every device has an n-th of the keys and the queries beside them. It gets those of its neighbors that its queries see,
and no others, and sends the gradients of these back.

During the call it stores a part of the sequence. The part begins where a kernel's block of keys does, so that results
have the bits that they have on one device, and is as long on all devices: those at the ends have some zeros more.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from . import _library, _sharding
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
    unit: int  # the stored part begins at a multiple

    @property
    def length(self) -> int:
        """The number of keys of the stored part."""
        whole = self.size * self.num_devices
        return whole - max(0, whole - self.size - sum(self.reach) - self.unit) // self.unit * self.unit

    def first_key(self) -> jax.Array | int:
        """Where the stored part begins."""
        last = self.size * self.num_devices - self.length
        if last == 0:
            return 0
        first_seen = lax.axis_index(self.axes) * self.size - self.reach[0]
        return jnp.clip(first_seen // self.unit * self.unit, 0, last)

    def gather(self, x: jax.Array) -> jax.Array:
        """From a shard [..., S / n, K, H] the stored part [..., length, K, H]: what is seen, and zeros."""
        parts = [(_Transfer(0, 0, self.size), x)]
        for transfer in self._transfers():
            parts.append(
                (transfer, self._move(x[..., transfer.begin : transfer.end, :, :], transfer.distance))
            )
        parts.sort(key=lambda part: -part[0].distance)  # in the order of the sequence
        seen = jnp.concatenate([part for _, part in parts], axis=-3)
        rest = jnp.zeros((*x.shape[:-3], self.length - seen.shape[-3], *x.shape[-2:]), x.dtype)
        # XLA makes one kernel of all this. Updates of zeros would be a kernel and a copy for each part.
        return jnp.roll(jnp.concatenate([seen, rest], axis=-3), self._place(parts[0][0]), axis=-3)

    def take(self, x: jax.Array) -> jax.Array:
        """The stored part [..., length] of an array [..., S] that every device has."""
        return lax.dynamic_slice_in_dim(x, self.first_key(), self.length, x.ndim - 1)

    def sum_parts(self, x: jax.Array) -> jax.Array:
        """The device's shard [..., S / n, K, H] of the sum of what devices have in their stored parts.

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
        """The place in the stored part of the first of the keys that come to this device.

        None come from beyond an end of the sequence. Their place is then at the other end of the part, where it is no
        other's, because the part is as long as all that comes.
        """
        sender = lax.axis_index(self.axes) - transfer.distance
        return (sender * self.size + transfer.begin - self.first_key()) % self.length

    def _move(self, x: jax.Array, distance: int) -> jax.Array:
        """Passes an array on to the device that is `distance` further, if there is one; zeros arrive at the others."""
        pairs = [(i, i + distance) for i in range(self.num_devices) if 0 <= i + distance < self.num_devices]
        return lax.ppermute(x, self.axes, pairs)


def of(
    axes: str | tuple[str, ...], mesh: Mesh, seqlen: int, options: AttentionOptions, *, divides_keys: bool
) -> Halo | None:
    """The halo of a sequence of queries and keys, both sharded over these axes of the mesh.

    None if a device would get all keys, or if the axes are not in the order of the mesh. Unless `divides_keys`, a
    device stores the whole sequence.
    """
    num_devices = _sharding.num_parts(mesh, axes)
    if not pays(num_devices, seqlen, options) or not _sharding.are_in_order(axes, mesh):
        return None
    unit = _library.constants()["kKeyUnit"] if divides_keys else seqlen
    return Halo(axes, num_devices, seqlen // num_devices, options.reach, unit)


def pays(num_devices: int, seqlen: int, options: AttentionOptions) -> bool:
    """Whether a device gets fewer keys in a window than by a gather."""
    return min(options.reach) >= 0 and sum(options.reach) < seqlen - seqlen // num_devices

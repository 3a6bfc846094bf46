"""Which probabilities dropout keeps: a function of key, batch, head, row and column, the same in every kernel.

The bits are those of Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011). One call
decides about the 8 pairs of rows r, r + 8 and columns c, c + 1, c + 8, c + 9: those that a thread of a tensor core's
16 x 16 tile holds, whichever way round the tile lies.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_DECISION_BITS = 16

UNIT = 16  # a part of a sequence begins at a multiple of so many rows and columns


def make_seeds(rng: jax.Array, batch: int, num_heads: int) -> jax.Array:
    """uint32 [B, N, 5]: of each head the key of Philox in two words, the head's number, and the first row and column.

    The last two are 0 here. Where a call is a part of a longer sequence, they are multiples of UNIT.
    """
    key = jax.random.bits(rng, (2,), jnp.uint32)
    heads = jnp.arange(batch * num_heads, dtype=jnp.uint32).reshape(batch, num_heads, 1)
    first = jnp.zeros((batch, num_heads, 2), jnp.uint32)
    return jnp.concatenate([jnp.broadcast_to(key, (batch, num_heads, 2)), heads, first], axis=-1)


def of_part(seeds: jax.Array, row: jax.Array | int, column: jax.Array | int) -> jax.Array:
    """The seeds of the part of the sequence that begins at this row and column."""
    first = jnp.stack([0, 0, 0, row, column]).astype(jnp.uint32)
    return seeds + jnp.broadcast_to(first, seeds.shape)  # JAX may be told not to promote ranks


def keep(seeds: jax.Array, rate: float, seqlen_q: int, seqlen_kv: int) -> jax.Array:
    """Which pairs dropout of `rate` keeps: bool [B, N, T, S], from seeds [B, N, 5]."""
    row, column = jnp.arange(seqlen_q)[None, None, :, None], jnp.arange(seqlen_kv)[None, None, None]
    return keep_pairs(seeds, rate, row, column)


def keep_pairs(seeds: jax.Array, rate: float, row: jax.Array, column: jax.Array) -> jax.Array:
    """The same for the given rows [..., T, 1] and columns [..., S]."""
    row = row.astype(jnp.uint32) + seeds[..., 3, None, None]
    column = column.astype(jnp.uint32) + seeds[..., 4, None, None]
    counter = (
        row // 16 * 8 + row % 8,
        column // 16 * 4 + column % 8 // 2,
        seeds[..., 2, None, None],
        jnp.uint32(0),
    )
    words = _philox(counter, (seeds[..., 0, None, None], seeds[..., 1, None, None]))
    left, right = (jnp.where(column % 16 < 8, a, b) for a, b in ((words[0], words[1]), (words[2], words[3])))
    word = jnp.where(row % 16 < 8, left, right)
    half = (word >> (column % 2 * _DECISION_BITS)) & (2**_DECISION_BITS - 1)
    return half >= jnp.uint32(round(rate * 2**_DECISION_BITS))


def _philox(counter: tuple[jax.Array, ...], key: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        (high0, low0), (high1, low1) = _product(c0, _MULTIPLIERS[0]), _product(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + jnp.uint32(_KEY_STEPS[0]), k1 + jnp.uint32(_KEY_STEPS[1])
    return c0, c1, c2, c3


def _product(x: jax.Array, factor: int) -> tuple[jax.Array, jax.Array]:
    """The high and the low 32 bits of a product: 64-bit integers exist only with jax_enable_x64."""
    mask = jnp.uint32(0xFFFF)
    x_high, x_low = x >> 16, x & mask
    f_high, f_low = jnp.uint32(factor >> 16), jnp.uint32(factor & 0xFFFF)
    low, middle0, middle1 = x_low * f_low, x_low * f_high, x_high * f_low
    carry = ((low >> 16) + (middle0 & mask) + (middle1 & mask)) >> 16
    return x_high * f_high + (middle0 >> 16) + (middle1 >> 16) + carry, x * jnp.uint32(factor)

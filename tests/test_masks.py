"""Exact probes of the mask.

With q = k = 0 all visible keys have the same weight: lse is log(number of visible keys), one-hot values show
in the output which keys a query sees, and one-hot cotangents show in dv which queries see a key.
"""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle
import pytest

import jax_flash

# Sizes around those of a tile.
SIZES = [0, 1, 7, 57, 63, 64, 65, 71, 121, 127, 128, 129, 135, 192, 193, 200]
LENGTHS = {
    "query_seq_lengths": np.array([*SIZES[::-1], 200, 200], np.int32),
    "key_value_seq_lengths": np.array([*SIZES[5:], *SIZES[:5], 200, 200], np.int32),
}
OFFSETS = {
    "query_offset": np.array(
        [0, 1, -1, 7, -7, 63, 64, 65, -63, -64, -65, 121, 128, 135, 199, 200, -200, 1000], np.int32
    )
}
HUGE = 2**31 - 1
OPTIONS = {
    "none": {},
    "causal": dict(is_causal=True),
    "causal, offsets": dict(is_causal=True, **OFFSETS),
    "causal, largest offset": dict(is_causal=True, query_offset=HUGE),
    "causal, smallest offset": dict(is_causal=True, query_offset=-HUGE - 1),
    "window of one": dict(local_window_size=0),
    "window left": dict(local_window_size=(64, 0)),
    "window right": dict(local_window_size=(0, 63)),
    "window": dict(local_window_size=(7, 65)),
    "window, wide": dict(local_window_size=500),
    "window, widest": dict(local_window_size=(HUGE, HUGE)),
    "window, widest, largest offset": dict(local_window_size=HUGE, query_offset=HUGE),
    "window, widest, smallest offset": dict(local_window_size=HUGE, query_offset=-HUGE - 1),
    "window, offsets": dict(local_window_size=(71, 1), **OFFSETS),
    "window, causal": dict(local_window_size=(57, 129), is_causal=True),
    "window, causal, offsets": dict(local_window_size=(127, 3), is_causal=True, **OFFSETS),
    "lengths of queries": dict(query_seq_lengths=LENGTHS["query_seq_lengths"]),
    "lengths of keys": dict(key_value_seq_lengths=LENGTHS["key_value_seq_lengths"]),
    "lengths": LENGTHS,
    "lengths, causal, offsets": dict(is_causal=True, **LENGTHS, **OFFSETS),
    "lengths, window, causal, offsets": dict(is_causal=True, local_window_size=(64, 9), **LENGTHS, **OFFSETS),
}


def probe(batch: int, seqlen_q: int, seqlen_kv: int, dtype, implementation=None, **options) -> None:
    """Hold what the probe sees, forward and backward, against the mask's definition."""
    q, k = np.zeros((batch, seqlen_q, 1, 8), dtype), np.zeros((batch, seqlen_kv, 1, 8), dtype)
    # One-hot vectors of at most 256 entries: where there are more rows, neighbours share an entry.
    one_hot_keys, one_hot_queries = (
        np.eye(min(size, 256), dtype=np.float64)[np.arange(size) // -(-size // 256)]
        for size in (seqlen_kv, seqlen_q)
    )
    v, dout = (
        np.broadcast_to(x[None, :, None], (batch, x.shape[0], 1, x.shape[1])).astype(dtype)
        for x in (one_hot_keys, one_hot_queries)
    )
    operands = {name: x for name, x in options.items() if isinstance(x, np.ndarray)}
    static = {name: x for name, x in options.items() if name not in operands} | {
        "implementation": implementation
    }

    @jax.jit
    def forward(q, k, v, operands):
        return jax_flash.flash_attention(q, k, v, return_residual=True, **static, **operands)

    @jax.jit
    def gradient_of_values(q, k, dout, operands):
        v = jnp.zeros((*k.shape[:3], dout.shape[-1]), k.dtype)
        return jax.vjp(lambda v: jax_flash.flash_attention(q, k, v, **static, **operands), v)[1](dout)[0]

    seen = oracle.visible(batch, seqlen_q, seqlen_kv, **options)[:, 0]
    count = seen.sum(-1)
    with np.errstate(divide="ignore"):
        log_count = np.log(count)
    weight = seen / np.maximum(count, 1)[..., None]

    out, lse = (np.asarray(x, np.float64)[:, :, 0] for x in forward(q, k, v, operands))
    np.testing.assert_allclose(lse, log_count, rtol=3e-7, atol=3e-7)
    _assert_same_pairs(out, weight @ one_hot_keys, dtype)

    dv = np.asarray(gradient_of_values(q, k, dout, operands), np.float64)[:, :, 0]
    _assert_same_pairs(dv, weight.swapaxes(1, 2) @ one_hot_queries, dtype)


def _assert_same_pairs(got, want, dtype) -> None:
    wrong = (got > 0) != (want > 0)
    assert not wrong.any(), f"{wrong.sum()} pairs differ, the first at {np.argwhere(wrong)[0]}"
    # Each weight is one rounded number; float32 may be computed in TF32.
    np.testing.assert_allclose(got, want, rtol=2.0**-7 if dtype == ml_dtypes.bfloat16 else 2.0**-10)


DTYPES = pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float32], ids=["bfloat16", "float32"])


@DTYPES
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_every_option(options, dtype, platform):
    probe(18, 200, 200, dtype, **options)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_reference(options):
    probe(18, 200, 200, np.float32, implementation="xla", **options)


@DTYPES
@pytest.mark.parametrize("seqlen_kv", SIZES[1:])
@pytest.mark.parametrize("seqlen_q", [1, 63, 64, 129])
def test_sizes_around_a_tiles(seqlen_q, seqlen_kv, dtype, platform):
    offset = np.array([0, seqlen_kv - seqlen_q, 5], np.int32)
    probe(3, seqlen_q, seqlen_kv, dtype, is_causal=True, local_window_size=(60, 0), query_offset=offset)


@DTYPES
@pytest.mark.parametrize(
    "options",
    [
        dict(is_causal=True),
        dict(local_window_size=(300, 40)),
        dict(is_causal=True, local_window_size=(1, 0), query_offset=np.array([-700, 300], np.int32)),
        dict(
            is_causal=True,
            query_seq_lengths=np.array([1031, 513], np.int32),
            key_value_seq_lengths=np.array([640, 1025], np.int32),
        ),
    ],
    ids=["causal", "window", "narrow window", "lengths"],
)
def test_many_tiles(options, dtype, platform):
    """Long enough that whole tiles are skipped and others need no mask."""
    probe(2, 1031, 1100, dtype, **options)

"""Exact probes of the mask.

With q = k = 0 all visible keys have the same weight, and lse is the logarithm of their number. With one-hot values the
output shows which keys a query sees; with one-hot cotangents dv shows which queries see a key.
"""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle
import pytest
import quick

import jax_flash

# Sizes around the tile sizes.
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
    "window wider than any": dict(local_window_size=(None, 2**40), query_offset=-HUGE - 1),
    "window, offsets": dict(local_window_size=(71, 1), **OFFSETS),
    "window, causal": dict(local_window_size=(57, 129), is_causal=True),
    "window, causal, offsets": dict(local_window_size=(127, 3), is_causal=True, **OFFSETS),
    "lengths of queries": dict(query_seq_lengths=LENGTHS["query_seq_lengths"]),
    "lengths of keys": dict(key_value_seq_lengths=LENGTHS["key_value_seq_lengths"]),
    "lengths": LENGTHS,
    "lengths, causal, offsets": dict(is_causal=True, **LENGTHS, **OFFSETS),
    "lengths, window, causal, offsets": dict(is_causal=True, local_window_size=(64, 9), **LENGTHS, **OFFSETS),
}

RNG = np.random.default_rng(0)
# The fraction of visible pairs of each batch element; the first sees nothing, the second everything.
VISIBLE = np.array(
    [0, 1, 0.001, 0.003, 0.01, 0.03, 0.1, 0.2, 0.3, 0.5, 0.7, 0.8, 0.9, 0.97, 0.99, 0.997, 1, 0.5]
)
VISIBLE = VISIBLE[:, None, None, None]


def segments(length: int, is_sorted: bool) -> np.ndarray:
    """Ids, also negative, with 1 segment in the first batch element to about one for each row in the last."""
    counts = np.array([1, 2, 2, 3, 3, 4, 4, 5, 6, 8, 10, 15, 20, 30, 50, 100, 200, 1000])[:, None]
    ids = RNG.integers(-counts // 2, counts - counts // 2, (18, length)).astype(np.int32)
    return np.sort(ids) if is_sorted else ids


# Arrays that hide keys. They are also combined with each other and with the options above.
ARRAYS = {
    "mask": dict(mask=RNG.random((18, 1, 200, 200)) < VISIBLE),
    "mask of keys": dict(mask=RNG.random((18, 1, 1, 200)) < VISIBLE),
    "mask of rows": dict(mask=RNG.random((18, 1, 200, 1)) < VISIBLE),
    "mask of pairs": dict(mask=RNG.random((200, 200)) < 0.1),
    "segments": dict(segment_ids=segments(200, is_sorted=True)),
    "segments, unsorted": dict(segment_ids=segments(200, is_sorted=False)),
    "segments of queries and keys": dict(segment_ids=(segments(200, True), segments(200, True))),
}
BESIDE = ["causal", "causal, offsets", "window", "window, offsets", "lengths of queries", "lengths of keys"]
ARRAY_OPTIONS = (
    ARRAYS
    | {
        f"{a}, {b}": ARRAYS[a] | OPTIONS[b]
        for a in ("mask", "mask of keys", "segments", "segments, unsorted")
        for b in BESIDE
    }
    | {
        f"{a}, {b}": ARRAYS[a] | ARRAYS[b]
        for a in ("mask", "mask of keys")
        for b in ("segments", "segments, unsorted")
    }
    | {
        "mask, segments, lengths, window, causal, offsets": ARRAYS["mask"]
        | ARRAYS["segments"]
        | OPTIONS["lengths, window, causal, offsets"]
    }
)
# The reference combines all of them in one array, so each alone and all together suffice, also for the quick run.
OPTIONS_OF_REFERENCE = OPTIONS | ARRAYS | dict([list(ARRAY_OPTIONS.items())[-1]])
OPTIONS |= ARRAY_OPTIONS


def probe(
    batch: int,
    seqlen_q: int,
    seqlen_kv: int,
    dtype,
    implementation=None,
    num_heads: int = 1,
    num_kv_heads: int = 1,
    columns: int = 256,
    **options,
) -> None:
    """Compare what the probe sees, forward and backward, with the definition of the mask."""
    q = np.zeros((batch, seqlen_q, num_heads, 8), dtype)
    k = np.zeros((batch, seqlen_kv, num_kv_heads, 8), dtype)
    # One-hot vectors have at most so many entries; with more rows, neighbors share an entry.
    one_hot_keys, one_hot_queries = (
        np.eye(min(size, columns), dtype=np.float64)[np.arange(size) // -(-size // columns)]
        for size in (seqlen_kv, seqlen_q)
    )
    v, dout = (
        np.broadcast_to(x[None, :, None], (batch, x.shape[0], heads, x.shape[1])).astype(dtype)
        for x, heads in ((one_hot_keys, num_kv_heads), (one_hot_queries, num_heads))
    )
    operands = {
        name: x for name, x in options.items() if any(isinstance(y, np.ndarray) for y in jax.tree.leaves(x))
    }
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

    seen = oracle.visible(batch, seqlen_q, seqlen_kv, **options)
    seen = np.broadcast_to(seen, (batch, num_heads, seqlen_q, seqlen_kv))
    count = seen.sum(-1)
    with np.errstate(divide="ignore"):
        log_count = np.log(count)
    weight = seen / np.maximum(count, 1)[..., None]

    out, lse = (np.moveaxis(np.asarray(x, np.float64), 2, 1) for x in forward(q, k, v, operands))
    np.testing.assert_allclose(lse, log_count, rtol=3e-7, atol=3e-7)
    _assert_same_pairs(out, weight @ one_hot_keys, dtype)

    dv = np.moveaxis(np.asarray(gradient_of_values(q, k, dout, operands), np.float64), 2, 1)
    want = weight.swapaxes(2, 3) @ one_hot_queries
    _assert_same_pairs(dv, want.reshape(batch, num_kv_heads, -1, *want.shape[2:]).sum(2), dtype)


def _assert_same_pairs(got, want, dtype) -> None:
    wrong = (got > 0) != (want > 0)
    assert not wrong.any(), f"{wrong.sum()} pairs differ, the first at {np.argwhere(wrong)[0]}"
    # Each weight is one rounded number; float32 may be computed in TF32.
    np.testing.assert_allclose(got, want, rtol=2.0**-7 if dtype == ml_dtypes.bfloat16 else 2.0**-10)


DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float32": np.float32}


@pytest.mark.parametrize(("options", "dtype"), quick.in_turn(OPTIONS, DTYPES, quick=OPTIONS_OF_REFERENCE))
def test_every_option(options, dtype, platform):
    probe(18, 200, 200, dtype, **options)


@pytest.mark.parametrize(
    "options",
    quick.rows(OPTIONS_OF_REFERENCE, quick=["window right", "window, widest, smallest offset", "mask"]),
)
def test_reference(options):
    probe(18, 200, 200, np.float32, implementation="xla", **options)


@pytest.mark.parametrize(
    ("seqlen_kv", "dtype"),
    quick.in_turn(SIZES[1:], DTYPES, quick=[1, 63, 64, 65, 129, 200]),
)
@pytest.mark.parametrize("seqlen_q", quick.rows([1, 63, 64, 129], quick=[1, 64, 129]))
def test_sizes_around_a_tiles(seqlen_q, seqlen_kv, dtype, platform):
    offset = np.array([0, seqlen_kv - seqlen_q, 5], np.int32)
    probe(3, seqlen_q, seqlen_kv, dtype, is_causal=True, local_window_size=(60, 0), query_offset=offset)


def in_blocks(seqlen_q: int, seqlen_kv: int) -> np.ndarray:
    """Blocks of 192 rows and 320 keys, each hidden or visible, some with one exception in every 64 x 64 pairs."""
    kinds = RNG.integers(0, 4, (2, 1, -(-seqlen_q // 192), -(-seqlen_kv // 320)))
    kinds = kinds.repeat(192, 2).repeat(320, 3)[:, :, :seqlen_q, :seqlen_kv]
    mask = kinds % 2 == 1
    row, column = RNG.integers(0, 64, 2)
    mask[..., row::64, column::64] ^= kinds[..., row::64, column::64] > 1
    return mask


def documents(seqlen_q: int, seqlen_kv: int) -> tuple[np.ndarray, np.ndarray]:
    """Sorted ids of documents of very different lengths; some have only queries or only keys."""
    ids = np.sort(
        np.array([-5, 0, 0, 1, 2, 3, 3, 3, 3, 3, 3, 7, 8, 8], np.int32)[RNG.integers(0, 14, (2, 3000))]
    )
    of_queries, of_keys = ids[:, 500 : 500 + seqlen_q], ids[:, 900 : 900 + seqlen_kv]
    return np.where(of_queries == 2, 4, of_queries).astype(np.int32), of_keys


MANY_TILES = {
    "causal": dict(is_causal=True),
    "window": dict(local_window_size=(300, 40)),
    "narrow window": dict(
        is_causal=True, local_window_size=(1, 0), query_offset=np.array([-700, 300], np.int32)
    ),
    "lengths": dict(
        is_causal=True,
        query_seq_lengths=np.array([1031, 513], np.int32),
        key_value_seq_lengths=np.array([640, 1025], np.int32),
    ),
    "mask": dict(mask=in_blocks(1031, 1100)),
    "mask, causal": dict(mask=in_blocks(1031, 1100), is_causal=True),
    "segments": dict(segment_ids=documents(1031, 1100)),
    "segments, window": dict(segment_ids=documents(1031, 1100), local_window_size=(100, 0)),
}


@pytest.mark.parametrize(("options", "dtype"), quick.in_turn(MANY_TILES, DTYPES))
def test_many_tiles(options, dtype, platform):
    """Long enough that some tiles are skipped and others need no mask."""
    for columns in (256, 64):  # above 128 Hopper's forward kernel has no loop for masks
        probe(2, 1031, 1100, dtype, columns=columns, **options)


@pytest.mark.parametrize("is_causal", [False, True], ids=["", "causal"])
@pytest.mark.parametrize(
    ("num_blocks", "columns", "dtype"),
    [
        (32, 64, "bfloat16"),
        (33, 128, "bfloat16"),
        (64, 128, "bfloat16"),
        (65, 64, "bfloat16"),
        (65, 128, "float32"),
    ],
)
def test_lists_of_many_blocks(num_blocks, columns, dtype, is_causal, platform):
    """Visible blocks of 64 keys; with up to 128 columns, Hopper's forward kernel reads mask and list ahead of them."""
    seqlen_q, total = 130, num_blocks * 3 // 2  # every third block is hidden
    seqlen_kv = 64 * total - 7
    kind = np.arange(64 * total)[:seqlen_kv] // 64 % 3
    mask = (kind == 1) | ((kind == 0) & (RNG.random((2, 1, seqlen_q, seqlen_kv)) < 0.5))
    offset = np.array([seqlen_kv, seqlen_kv - 100], np.int32)
    probe(
        2,
        seqlen_q,
        seqlen_kv,
        DTYPES[dtype],
        columns=columns,
        mask=mask,
        is_causal=is_causal,
        query_offset=offset,
    )


@pytest.mark.parametrize(
    ("shape", "dtype"),
    quick.in_turn([(1, 6, 131, 129), (2, 6, 1, 129), (6, 131, 1), (6, 1, 1)], DTYPES),
)
def test_mask_of_each_head(shape, dtype, platform):
    """Heads that share keys have different masks."""
    mask = np.random.default_rng(0).random(shape) < 0.3
    probe(2, 131, 129, dtype, num_heads=6, num_kv_heads=2, mask=mask)


# Sizes, and the number of heads with a mask of their own.
GROUPS_OF_MASK_BLOCKS = {
    "one of many heads": (5, 40, 60, 6),
    "two by three": (2, 100, 150, 3),
    "four by one": (3, 250, 50, 2),
    "four by five": (1, 256, 320, 1),
    "five by four": (2, 261, 256, 3),
    "nine by ten": (2, 517, 630, 1),
    "one by many": (2, 60, 1100, 1),
}


@pytest.mark.parametrize("broadcast", ["", "B", "N", "T", "S", "BNT", "BNS"])
@pytest.mark.parametrize(("sizes", "dtype"), quick.in_turn(GROUPS_OF_MASK_BLOCKS, DTYPES))
def test_groups_of_blocks_of_a_mask(sizes, dtype, broadcast, platform):
    """A thread block makes the bits of several blocks of 64 x 64, or of several heads."""
    batch, seqlen_q, seqlen_kv, num_heads = sizes
    shape = zip("BNTS", (batch, num_heads, seqlen_q, seqlen_kv), strict=True)
    mask = np.random.default_rng(0).random([1 if axis in broadcast else size for axis, size in shape]) < 0.3
    kv_heads = 1 if num_heads % 2 else 2
    probe(batch, seqlen_q, seqlen_kv, dtype, num_heads=num_heads, num_kv_heads=kv_heads, mask=mask)


@pytest.mark.parametrize(
    ("size", "dtype"),
    quick.in_turn(SIZES[1:], DTYPES, quick=[1, 63, 65, 129]),
)
def test_mask_of_sizes_around_a_tiles(size, dtype, platform):
    """Rows of the mask have every alignment."""
    for seqlen_q in (1, 65):
        ids = (
            RNG.integers(0, 3, (3, seqlen_q)).astype(np.int32),
            RNG.integers(0, 3, (3, size)).astype(np.int32),
        )
        probe(3, seqlen_q, size, dtype, mask=RNG.random((3, 1, seqlen_q, size)) < 0.5)
        probe(3, seqlen_q, size, dtype, segment_ids=ids)

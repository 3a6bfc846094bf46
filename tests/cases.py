"""The table of shapes and options that the tests run on every platform."""

import dataclasses
import itertools
import zlib
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

DTYPES = {
    "bfloat16": ml_dtypes.bfloat16,
    "float16": np.float16,
    "float32": np.float32,
    "float64": np.float64,
}
# Options that are arrays: operands of a jitted function, not part of the program. They are tuples of numbers, with the
# dtype given here, or made by one of the classes below, as `scale` may be, too. Two names exist only in the tests:
# `alibi` is the slopes of a bias, `dropout_seed` the seed of the dropout key.
OPERANDS = {
    "query_seq_lengths": np.int32,
    "key_value_seq_lengths": np.int32,
    "query_offset": np.int32,
    "sinks": np.float32,
    "alibi": np.float32,
    "bias": None,
    "mask": None,
    "segment_ids": None,
    "dropout_seed": np.int32,
}


class Inputs(NamedTuple):
    q: Any  # [B, T, N, H]
    k: Any  # [B, S, K, H]
    v: Any  # [B, S, K, Hv]
    dout: Any  # [B, T, N, Hv]
    dlse: Any  # [B, T, N]


@dataclasses.dataclass(frozen=True)
class Case:
    """One row: sizes and options of flash_attention (arrays as tuples, or as objects that make them)."""

    name: str
    batch: int = 2
    seqlen_q: int = 80
    seqlen_kv: int = 80
    num_heads: int = 2
    num_kv_heads: int = 2
    head_dim: int = 64
    head_dim_v: int | None = None
    options: tuple[tuple[str, Any], ...] = ()
    magnitude: float = 1.0  # of the queries

    def __str__(self) -> str:
        return self.name

    def inputs(self, dtype: Any) -> Inputs:
        """Normal random arrays, the same in every run."""
        rng = np.random.default_rng(zlib.crc32(self.name.encode()))
        b, t, s, n, k = self.batch, self.seqlen_q, self.seqlen_kv, self.num_heads, self.num_kv_heads
        h, hv = self.head_dim, self.head_dim_v or self.head_dim
        shapes = [(b, t, n, h), (b, s, k, h), (b, s, k, hv), (b, t, n, hv), (b, t, n)]
        q, k, v, dout, dlse = (rng.standard_normal(shape) for shape in shapes)
        q, k, v, dout = (x.astype(dtype) for x in (self.magnitude * q, k, v, dout))
        return Inputs(q, k, v, dout, dlse.astype(np.float64 if dtype == np.float64 else np.float32))

    @property
    def static(self) -> dict[str, Any]:
        """The options that are static under jit."""
        return {name: x for name, x in self.options if not _is_operand(name, x)}

    def operands(self, dtype: Any) -> dict[str, Any]:
        """The options that are arrays, the same in every run; floating-point ones may have the inputs' dtype."""

        def make(name, x):
            if hasattr(x, "make"):
                return x.make(self, np.random.default_rng(zlib.crc32(f"{name} of {self}".encode())), dtype)
            return np.asarray(x, OPERANDS[name])

        return {name: make(name, x) for name, x in self.options if _is_operand(name, x)}


def _is_operand(name: str, x: Any) -> bool:
    return name in OPERANDS or hasattr(x, "make")


def _shape(axes: str, case: Case) -> tuple[int, ...]:
    sizes = {"B": case.batch, "N": case.num_heads, "T": case.seqlen_q, "S": case.seqlen_kv, "1": 1}
    return tuple(sizes[letter] for letter in axes)


@dataclasses.dataclass(frozen=True)
class Bias:
    """Normal random numbers. `axes` are letters of [B, N, T, S], with 1 for a broadcast dimension."""

    axes: str
    magnitude: float = 1.0
    dtype: str | None = None  # None: that of the inputs

    def make(self, case: Case, rng: np.random.Generator, dtype: Any) -> np.ndarray:
        x = self.magnitude * rng.standard_normal(_shape(self.axes, case))
        return x.astype(dtype if self.dtype is None else DTYPES[self.dtype])


@dataclasses.dataclass(frozen=True)
class Mask:
    """Random pairs, with some rows and some keys fully masked."""

    axes: str
    visible: float = 0.5  # the fraction of pairs that are visible
    blocks: int = 0  # if not 0, blocks of this size are hidden, visible and random in turn
    hidden_heads: tuple[int, ...] = ()  # which see nothing; axes are BNTS or 1NTS

    def make(self, case: Case, rng: np.random.Generator, dtype: Any) -> np.ndarray:
        assert not self.hidden_heads or (self.axes[1] == "N" and not self.blocks)
        shape = _shape(self.axes, case)
        mask = rng.random(shape) < self.visible
        row, column = (np.arange(size) for size in (1, 1, *shape)[-2:])
        if self.blocks:
            turn = (row[:, None] // self.blocks + column // self.blocks) % 3
            return (mask | (turn == 1)) & (turn != 0)
        if self.axes[-2:-1] == "T":
            mask[..., row % 19 == 5, :] = False
        if self.axes[-1:] == "S":
            mask[..., column % 23 == 7] = False
        for head in self.hidden_heads:
            mask[:, head] = False
        return mask


@dataclasses.dataclass(frozen=True)
class Segments:
    """Random ids: one array if T == S and not `pair`, else two."""

    ids: tuple[int, ...]
    is_sorted: bool = True
    pair: bool = False

    def make(self, case: Case, rng: np.random.Generator, dtype: Any) -> np.ndarray | tuple[np.ndarray, ...]:
        lengths = case.seqlen_q, case.seqlen_kv
        ids = [rng.choice(np.array(self.ids, np.int32), (case.batch, length)) for length in lengths]
        if self.is_sorted:
            ids = [np.sort(x) for x in ids]
        return tuple(ids) if self.has_two(case) else ids[0]

    def has_two(self, case: Case) -> bool:
        """Whether queries and keys have an array each."""
        return self.pair or case.seqlen_q != case.seqlen_kv


@dataclasses.dataclass(frozen=True)
class Scale:
    """A scale that is an array."""

    value: float

    def make(self, case: Case, rng: np.random.Generator, dtype: Any) -> np.ndarray:
        return np.asarray(self.value, np.float64 if dtype == np.float64 else np.float32)


def case(name: str, *, batch=2, t=80, s=80, n=2, k=2, h=64, hv=None, magnitude=1.0, **options) -> Case:
    return Case(name, batch, t, s, n, k, h, hv, tuple(options.items()), magnitude)


CASES = [
    case("full"),
    case("blocks", t=256, s=256),
    case("causal", is_causal=True),
    case("causal blocks", t=320, s=320, is_causal=True),
    case("tiles, causal", batch=1, t=520, s=520, h=128, is_causal=True),
    case("tiles, head dim 128", t=333, s=300, n=4, k=2, h=128),
    case("tiles, head dim 112", batch=1, t=90, s=140, h=112),
    case("tiles, window", batch=1, t=450, s=700, h=128, local_window_size=(90, 5), query_offset=200),
    case("tiles, lengths", t=300, s=400, h=72, query_seq_lengths=(300, 65), key_value_seq_lengths=(333, 1)),
    case("causal, more keys", t=65, s=200, is_causal=True),
    case("causal, more queries", t=200, s=65, is_causal=True),
    case("causal, bottom right", t=65, s=200, is_causal=True, query_offset=135),
    case("causal, negative offset", t=130, s=70, is_causal=True, query_offset=-65),
    case("causal, offset per batch", t=40, s=150, is_causal=True, query_offset=(110, -3)),
    case("window", t=150, s=150, local_window_size=20),
    case("window left", t=150, s=150, local_window_size=(33, 0)),
    case("window right", t=150, s=150, local_window_size=(0, 70)),
    case("window of one", local_window_size=0),
    case(
        "window, causal, offset",
        t=70,
        s=200,
        local_window_size=(50, 9),
        is_causal=True,
        query_offset=(100, 30),
    ),
    case("soft cap", logits_soft_cap=2.0),
    case("soft cap, causal", logits_soft_cap=15.0, is_causal=True, magnitude=8.0),
    case("scale", scale=0.3),
    case("scale 0", scale=0.0),
    case("scale negative", scale=-0.2, is_causal=True),
    case("lengths of queries", t=130, query_seq_lengths=(97, 0)),
    case("lengths of keys", s=130, key_value_seq_lengths=(64, 129)),
    case("no keys", key_value_seq_lengths=(0, 7)),
    case(
        "lengths", t=130, s=140, query_seq_lengths=(65, 127), key_value_seq_lengths=(99, 63), is_causal=True
    ),
    case("lengths beyond", query_seq_lengths=(1000, -5), key_value_seq_lengths=(-1, 81)),
    case("lengths beyond both", t=70, query_seq_lengths=(1000, 71), key_value_seq_lengths=(81, 1000)),
    case("sinks", n=4, k=2, sinks=(0.5, -1.0, 3.0, -20.0)),
    case("sinks above all logits", n=2, sinks=(12.0, 9.0)),
    case("sinks, rows without keys", t=200, s=65, is_causal=True, query_offset=-65, sinks=(1.0, -2.0)),
    case(
        "sinks, lengths",
        t=130,
        s=140,
        n=6,
        h=128,
        query_seq_lengths=(65, 127),
        key_value_seq_lengths=(99, 0),
        sinks=(0.1, 0.2, -0.5, 4.0, 2.0, -3.0),
    ),
    case(
        "sinks, soft cap, window",
        t=150,
        s=150,
        logits_soft_cap=2.0,
        local_window_size=(20, 3),
        sinks=(2.0, -1.5),
    ),
    case("one head for 2", k=1),
    case("groups of 2", n=4, k=2, is_causal=True),
    case("groups of 3", n=6, k=2, t=90, s=70),
    case("groups of 8", n=8, k=1, is_causal=True),
    case("deterministic", t=150, s=150, n=4, is_causal=True, deterministic=True),
    case("one query", t=1, s=200, n=4),
    case("one key", t=77, s=1, h=16),
    case("one and one", t=1, s=1, h=16),
    case("odd sizes", batch=1, t=129, s=127, n=3, k=3),
    case("64 keys over", t=66, s=192),
    case(
        "decode",
        batch=3,
        t=1,
        s=140,
        n=8,
        is_causal=True,
        query_offset=(139, 70, 0),
        key_value_seq_lengths=(140, 71, 1),
    ),
    case("head dim 1", h=1),
    case("head dim 3", h=3, is_causal=True),
    case("head dim 8", h=8),
    case("head dim 40", h=40, is_causal=True),
    case("head dim 72", h=72),
    case("head dim 96", h=96, is_causal=True),
    case("head dim 104", h=104),
    case("head dim 128", h=128, is_causal=True),
    case("head dim 136", h=136),
    case("head dim 192", t=150, h=192),
    case("head dim 200", h=200, is_causal=True),
    case("head dim 256", h=256, t=70, s=70, is_causal=True),
    case("values narrower", h=64, hv=24),
    case("values wider", h=40, hv=136, is_causal=True),
    case("values of one", h=64, hv=1),
    case("large logits", magnitude=30.0),
    case(
        "everything",
        t=150,
        s=210,
        n=6,
        k=2,
        h=48,
        hv=80,
        scale=0.2,
        is_causal=True,
        local_window_size=(100, 3),
        logits_soft_cap=3.0,
        query_seq_lengths=(150, 101),
        key_value_seq_lengths=(190, 210),
        query_offset=(60, -20),
        sinks=(0.3, 1.0, -1.0, 2.5, -4.0, 0.0),
        deterministic=True,
    ),
    case("bias", n=4, k=2, t=150, s=131, bias=Bias("1NTS")),
    case("bias of all", t=130, s=129, h=128, bias=Bias("BNTS", dtype="float32")),
    case("bias of batch and keys", s=97, n=3, k=3, bias=Bias("B11S")),
    case("bias of batch and rows", t=97, n=4, k=1, bias=Bias("B1T1")),
    case("bias of heads and rows", t=131, s=70, n=3, k=1, bias=Bias("NT1", dtype="float32")),
    case("bias of heads and keys", t=70, s=131, n=4, k=2, bias=Bias("N1S")),
    case("bias of batch and pairs", batch=3, s=101, n=4, bias=Bias("B1TS", dtype="float32")),
    case("bias of many short sequences", batch=12, t=33, s=31, n=3, k=3, h=32, bias=Bias("1NTS")),
    case("bias of pairs", batch=3, t=65, s=67, bias=Bias("TS")),
    case("bias of keys", batch=3, s=99, h=256, bias=Bias("S")),
    case("a bias of one", t=70, s=90, bias=Bias("1111")),
    case("bias, one query", t=1, s=201, n=4, bias=Bias("BNTS")),
    case("bias, one key", t=77, s=1, h=16, bias=Bias("1NTS")),
    case("bias, head dim 3", h=3, s=75, bias=Bias("1NTS")),
    case("bias, head dim 40", h=40, hv=72, t=90, s=133, bias=Bias("BNTS")),
    case("bias, head dim 256", batch=1, h=256, t=135, s=137, bias=Bias("BNTS")),
    case("bias, large", s=141, bias=Bias("1NTS", magnitude=10.0, dtype="float32")),
    case("bias, causal", t=200, s=195, bias=Bias("11TS"), is_causal=True),
    case("bias, soft cap", n=4, k=2, s=91, bias=Bias("BNTS", magnitude=3.0), logits_soft_cap=2.0),
    case("bias, sinks", n=4, k=2, bias=Bias("BN1S", dtype="float32"), sinks=(0.5, 2.0, -1.0, 4.0)),
    case(
        "bias, window, lengths, offset",
        t=150,
        s=211,
        bias=Bias("BNTS"),
        local_window_size=(50, 9),
        query_offset=(60, -20),
        query_seq_lengths=(150, 101),
        key_value_seq_lengths=(190, 211),
    ),
    case("tiles, bias", batch=1, t=520, s=517, h=128, bias=Bias("1NTS", dtype="float32"), is_causal=True),
    case("alibi", t=150, s=131, n=4, k=2, alibi=(0.25, 0.0625, 0.0, -0.1)),
    case("alibi, head dim 256", t=70, s=131, n=4, h=256, alibi=(0.5, 0.1, 0.2, 0.05)),
    case(
        "alibi, causal, offset",
        t=70,
        s=201,
        n=4,
        is_causal=True,
        query_offset=(131, -5),
        alibi=(0.5, 0.25, 0.125, 0.0625),
    ),
    case("alibi, soft cap, sinks", s=99, logits_soft_cap=4.0, alibi=(0.1, 0.03), sinks=(1.0, -1.0)),
    case("tiles, alibi", batch=1, t=520, s=517, h=128, alibi=(0.2, 0.01), local_window_size=(300, 20)),
    case("mask", t=150, s=141, n=4, k=2, mask=Mask("BNTS")),
    case("mask of batch and keys", t=70, s=200, mask=Mask("B11S")),
    case("mask of rows", t=150, s=70, h=128, mask=Mask("T1")),
    case("mask of heads", n=8, k=2, s=97, mask=Mask("N11")),
    case("mask of heads and pairs", t=131, s=129, n=6, k=2, h=72, mask=Mask("1NTS", visible=0.1)),
    case("mask of nothing", t=100, s=90, mask=Mask("11", visible=0.0)),
    case("mask, few pairs", t=200, s=300, n=1, k=1, mask=Mask("TS", visible=0.003)),
    case("mask, causal", t=200, s=195, mask=Mask("B1TS", visible=0.7), is_causal=True),
    case(
        "mask, window, lengths, offset",
        t=150,
        s=211,
        mask=Mask("B1TS"),
        local_window_size=(50, 9),
        query_offset=(60, -20),
        query_seq_lengths=(150, 101),
        key_value_seq_lengths=(190, 211),
    ),
    case("mask, sinks", t=131, mask=Mask("1NTS", visible=0.05), sinks=(0.5, -2.0)),
    case("tiles, mask", batch=1, t=520, s=517, n=2, k=1, mask=Mask("BNTS", blocks=256)),
    case("tiles, mask, causal", batch=1, t=520, s=520, h=128, mask=Mask("TS", blocks=64), is_causal=True),
    case("tiles, mask, head dim 256", batch=1, t=300, s=520, h=256, n=1, k=1, mask=Mask("TS", blocks=128)),
    case("segments", t=150, s=150, n=4, k=2, segment_ids=Segments((0, 1, 2))),
    case("segments of queries and keys", t=130, s=211, segment_ids=Segments((0, 1, 2, 3))),
    case("segments, unsorted", t=141, s=141, segment_ids=Segments((0, 1, 2, 3), is_sorted=False)),
    case(
        "segments, any numbers",
        t=97,
        s=131,
        h=128,
        segment_ids=Segments((-(2**31), -7, -1, 2**31 - 1), is_sorted=False),
    ),
    case("segments, a pair of one length", t=131, s=131, segment_ids=Segments((-1, 0, 5), pair=True)),
    case("segments, causal", t=199, s=199, segment_ids=Segments((0, 1, 2, 3)), is_causal=True),
    case(
        "segments, lengths, sinks",
        t=130,
        s=130,
        segment_ids=Segments((0, 1, 2)),
        query_seq_lengths=(65, 127),
        key_value_seq_lengths=(99, 63),
        sinks=(1.0, -1.0),
    ),
    case("tiles, segments", batch=1, t=520, s=520, h=128, segment_ids=Segments(tuple(range(5)))),
    case("tiles, segments, causal", t=520, s=520, segment_ids=Segments(tuple(range(4))), is_causal=True),
    case("dropout", t=150, s=131, n=4, k=2, dropout_rate=0.1, dropout_seed=0),
    case("dropout of most", s=97, dropout_rate=0.9, dropout_seed=1),
    case("dropout, causal", t=200, s=195, h=128, dropout_rate=0.5, dropout_seed=2, is_causal=True),
    case("dropout, head dim 40", h=40, hv=72, n=6, s=77, dropout_rate=0.3, dropout_seed=3),
    case("dropout, head dim 256", h=256, t=135, s=137, dropout_rate=0.2, dropout_seed=4),
    case(
        "dropout, lengths, sinks",
        t=130,
        s=141,
        dropout_rate=0.25,
        dropout_seed=5,
        query_seq_lengths=(65, 127),
        key_value_seq_lengths=(99, 0),
        sinks=(1.0, -1.0),
    ),
    case("tiles, dropout", batch=1, t=520, s=517, h=128, dropout_rate=0.1, dropout_seed=6, is_causal=True),
    case(
        "everything at once",
        t=150,
        s=211,
        n=6,
        k=2,
        h=48,
        hv=80,
        scale=0.2,
        is_causal=True,
        local_window_size=(100, 3),
        logits_soft_cap=3.0,
        query_seq_lengths=(150, 101),
        key_value_seq_lengths=(190, 211),
        query_offset=(60, -20),
        sinks=(0.3, 1.0, -1.0, 2.5, -4.0, 0.0),
        bias=Bias("1NTS", dtype="float32"),
        mask=Mask("B1TS", visible=0.9),
        segment_ids=Segments((0, 1)),
        dropout_rate=0.1,
        dropout_seed=7,
        deterministic=True,
    ),
    case(
        "decode in parts",
        batch=3,
        t=1,
        s=700,
        n=8,
        k=2,
        h=128,
        is_causal=True,
        query_offset=(699, 300, 0),
        key_value_seq_lengths=(700, 301, 1),
    ),
    case("decode, many parts", t=1, s=2500, n=2, k=1, key_value_seq_lengths=(2500, 2100)),
    case("decode, groups of 8", t=2, s=600, n=8, k=1, is_causal=True, query_offset=(598, 255)),
    case("decode, groups of 1", t=16, s=520, is_causal=True, query_offset=(504, 0)),
    case("decode, 64 rows", batch=1, t=16, s=530, n=4, k=1, h=128, is_causal=True, query_offset=(514,)),
    case("decode, 135 rows", batch=1, t=15, s=530, n=9, k=1, is_causal=True, query_offset=(514,)),
    case(
        "decode, 80 rows, mask",
        t=16,
        s=300,
        n=10,
        k=2,
        h=72,
        bias=Bias("BN1S"),
        mask=Mask("BNTS", visible=0.3, blocks=64),
        key_value_seq_lengths=(290, 300),
    ),
    case("decode, window", t=3, s=900, n=4, k=1, local_window_size=(300, 2), query_offset=(897, 250)),
    case("decode, head dim 256", t=2, s=600, n=4, k=2, h=256),
    case("decode, head dim 256, 36 rows", batch=1, t=9, s=600, n=4, k=1, h=200, hv=136, is_causal=True),
    case(
        "decode, odd sizes",
        t=7,
        s=611,
        n=3,
        k=3,
        h=37,
        hv=51,
        query_seq_lengths=(7, 3),
        key_value_seq_lengths=(601, 599),
    ),
    case(
        "decode, soft cap, sinks",
        t=2,
        s=611,
        n=4,
        k=1,
        h=72,
        logits_soft_cap=3.0,
        sinks=(0.5, -1.0, 3.0, 10.0),
        key_value_seq_lengths=(601, 0),
    ),
    case("decode, scale negative", t=4, s=301, n=4, k=2, scale=-0.2),
    case("decode, bias", t=3, s=700, n=8, k=2, h=128, bias=Bias("BNTS")),
    case(
        "decode, bias of keys",
        t=5,
        s=701,
        n=4,
        k=2,
        bias=Bias("BN1S", dtype="float32"),
        is_causal=True,
        query_offset=(600, 10),
    ),
    case(
        "decode, alibi",
        t=5,
        s=701,
        n=4,
        k=2,
        alibi=(0.25, 0.0625, 0.01, -0.001),
        is_causal=True,
        query_offset=(600, 10),
    ),
    case("decode, mask", t=16, s=601, n=4, k=2, mask=Mask("BNTS")),
    case("decode, mask of blocks", t=3, s=901, n=4, k=1, h=256, mask=Mask("TS", visible=0.3, blocks=128)),
    case("decode, segments", t=4, s=901, n=4, k=1, h=128, segment_ids=Segments((0, 1, 2, 3))),
    case("decode, dropout", t=4, s=301, n=4, k=2, dropout_rate=0.2, dropout_seed=9),
    case(
        "decode, everything at once",
        t=4,
        s=901,
        n=4,
        k=2,
        h=48,
        hv=80,
        scale=0.2,
        is_causal=True,
        local_window_size=(500, 3),
        logits_soft_cap=3.0,
        query_seq_lengths=(4, 2),
        key_value_seq_lengths=(800, 901),
        query_offset=(600, 890),
        sinks=(0.3, 1.0, -1.0, 2.5),
        bias=Bias("1NTS", dtype="float32"),
        mask=Mask("B1TS", visible=0.9),
        segment_ids=Segments((0, 1)),
    ),
    case(
        "few queries of many heads",
        batch=3,
        t=16,
        s=2100,
        n=16,
        k=2,
        h=72,
        hv=128,
        is_causal=True,
        query_offset=(2084, 30, 0),
        query_seq_lengths=(16, 16, 7),
        key_value_seq_lengths=(2100, 70, 3),
        sinks=tuple(np.linspace(-1, 3, 16)),
    ),
    case(
        "few queries of many heads, window",
        t=16,
        s=4700,
        n=16,
        k=2,
        h=64,
        query_offset=(4600, 40),
        local_window_size=(2500, 30),
    ),
    case("chunk", t=20, s=4100, n=2, k=1, h=128),
    case("chunk, wide tile", t=64, s=4100, n=4, k=1, h=64, is_causal=True, query_offset=(4036, 30)),
    case(
        "chunk, causal, lengths",
        batch=3,
        t=40,
        s=4200,
        n=12,
        k=2,
        is_causal=True,
        query_offset=(4160, 30, 0),
        query_seq_lengths=(40, 40, 7),
        key_value_seq_lengths=(4200, 70, 3),
    ),
    case(
        "chunk, window, sinks",
        batch=1,
        t=200,
        s=8200,
        n=4,
        k=2,
        h=96,
        hv=64,
        query_offset=7900,
        local_window_size=(6000, None),
        sinks=(0.5, -1.0, 3.0, 20.0),
    ),
    case(
        "one part, causal, lengths",
        batch=3,
        t=40,
        s=700,
        n=8,
        k=2,
        h=128,
        is_causal=True,
        query_offset=(660, 30, 0),
        query_seq_lengths=(40, 40, 7),
        key_value_seq_lengths=(700, 70, 0),
    ),
    case(
        "one part, wide tile, sinks",
        batch=1,
        t=64,
        s=1100,
        n=8,
        k=2,
        h=64,
        hv=40,
        sinks=(0.5, -1.0, 3.0, 20.0) * 2,
    ),
    case("window with no limit on the left", t=150, s=170, local_window_size=(None, 7), query_offset=20),
    case("window with no limit on the right", t=150, s=170, local_window_size=(40, None)),
    case("head dims 128 and 192", t=70, s=131, h=128, hv=192, is_causal=True),
    case(
        "head dim 96, groups, offset", t=213, s=300, n=4, k=2, h=96, is_causal=True, query_offset=(100, -30)
    ),
    case(
        "head dims 192 and 128, causal",
        t=250,  # the last block of 48 queries, alone with a tile of keys, ends beyond 256
        s=190,
        n=2,
        k=1,
        h=192,
        hv=128,
        is_causal=True,
        query_offset=(0, -115),
    ),
    case("head dim 72, window", t=150, s=201, h=72, hv=96, local_window_size=(60, 20)),
    case("head dim 96, deterministic", t=130, s=150, h=96, is_causal=True, deterministic=True),
    case(
        "head dims 192 and 128, lengths, window",
        t=150,
        s=270,
        n=4,
        k=2,
        h=192,
        hv=128,
        local_window_size=(90, 9),
        query_offset=(60, -20),
        query_seq_lengths=(150, 101),
        key_value_seq_lengths=(190, 270),
    ),
    case(
        "head dim 96, options",
        t=150,
        s=211,
        n=4,
        k=2,
        h=96,
        local_window_size=(100, 3),
        logits_soft_cap=3.0,
        query_seq_lengths=(150, 101),
        bias=Bias("1NTS"),
        mask=Mask("BNTS", visible=0.9),
        segment_ids=Segments((0, 1)),
        dropout_rate=0.1,
        dropout_seed=10,
    ),
    case("head dims 192 and 128", t=101, s=150, n=4, k=2, h=192, hv=128),
    case("head dims 160 and 72, deterministic", t=97, s=131, n=3, k=1, h=160, hv=72, deterministic=True),
    case(
        "head dims 192 and 128, options",
        t=170,
        s=211,
        n=4,
        k=2,
        h=192,
        hv=128,
        is_causal=True,
        logits_soft_cap=3.0,
        query_seq_lengths=(140, 101),
        key_value_seq_lengths=(211, 130),
        query_offset=(60, 10),
        bias=Bias("1NTS"),
        mask=Mask("B1TS", visible=0.9),
        segment_ids=Segments((0, 1)),
        dropout_rate=0.1,
        dropout_seed=9,
    ),
    case(
        "head dim 96, bias, deterministic", t=131, s=97, n=4, k=2, h=96, bias=Bias("1NTS"), deterministic=True
    ),
    case("head dims 192 and 128, mask", t=150, s=261, h=192, hv=128, mask=Mask("BNTS", blocks=64)),
    case("head dim 16", t=150, s=131, h=16, is_causal=True),
    case("head dim 24", t=97, s=150, n=4, k=2, h=24),
    case("head dim 32", t=213, s=300, n=4, k=2, h=32, is_causal=True, query_offset=(100, -30)),
    case("head dims 32 and 16, deterministic", t=150, s=190, n=4, k=1, h=32, hv=16, deterministic=True),
    case("head dims 32 and 40", t=131, s=97, h=32, hv=40, is_causal=True),
    case(
        "head dim 24, lengths",
        t=300,
        s=400,
        h=24,
        query_seq_lengths=(300, 65),
        key_value_seq_lengths=(333, 1),
    ),
    case("tiles, head dim 32", batch=1, t=450, s=700, h=32, local_window_size=(90, 5), query_offset=200),
    case("head dim 32, mask", t=150, s=261, n=4, k=2, h=32, mask=Mask("BNTS", blocks=64)),
    case(
        "head dim 32, bias, deterministic", t=131, s=97, n=4, k=2, h=32, bias=Bias("1NTS"), deterministic=True
    ),
    case(
        "head dims 16 and 32, options",
        t=170,
        s=211,
        n=4,
        k=2,
        h=16,
        hv=32,
        is_causal=True,
        logits_soft_cap=3.0,
        query_seq_lengths=(140, 101),
        key_value_seq_lengths=(211, 130),
        query_offset=(60, 10),
        bias=Bias("1NTS"),
        mask=Mask("B1TS", visible=0.9),
        segment_ids=Segments((0, 1)),
        dropout_rate=0.1,
        dropout_seed=11,
    ),
    case("chunk, head dim 32", t=20, s=4100, n=2, k=1, h=32, hv=24),
    case("short", t=64, s=64),
    case("short, causal", batch=3, t=49, s=49, n=3, k=3, h=32, is_causal=True),
    case("short, groups", t=50, s=61, n=6, k=2, h=24, hv=40, local_window_size=(20, 5), query_offset=(3, -9)),
    case("short, head dim 33", t=17, s=64, h=33, hv=7),
    case("short, head dims 7 and 5", t=17, s=63, n=4, k=2, h=7, hv=5, key_value_seq_lengths=(63, 20)),
    case("short, dropout", t=64, s=50, h=32, dropout_rate=0.3, dropout_seed=5),
    case(
        "short, lengths, sinks",
        t=60,
        s=33,
        n=4,
        k=1,
        query_seq_lengths=(60, 7),
        key_value_seq_lengths=(0, 33),
        sinks=(0.5, -1.0, 3.0, -20.0),
    ),
    case("short, mask", t=64, s=63, n=4, k=2, h=32, mask=Mask("BNTS")),
    case("short, bias", batch=5, t=49, s=49, n=3, k=3, h=32, bias=Bias("1NTS")),
    case("short, bias of heads and keys", t=33, s=64, n=4, k=2, bias=Bias("N1S", dtype="float32")),
    case("short, alibi, soft cap", t=51, s=40, n=4, k=2, logits_soft_cap=5.0, alibi=(0.5, 0.2, 0.1, 0.0)),
    case(
        "short, options",
        t=49,
        s=62,
        n=4,
        k=2,
        h=24,
        hv=32,
        is_causal=True,
        logits_soft_cap=3.0,
        query_seq_lengths=(40, 49),
        key_value_seq_lengths=(62, 31),
        query_offset=(9, -5),
        bias=Bias("1NTS"),
        mask=Mask("B1TS", visible=0.9),
        segment_ids=Segments((0, 1)),
        dropout_rate=0.1,
        dropout_seed=12,
    ),
    # On Hopper one kernel computes all gradients.
    case("bias of pairs, head dim 128", batch=3, t=200, s=264, n=4, k=2, h=128, bias=Bias("1NTS")),
    case("bias of pairs, head dim 96", t=300, s=304, n=4, k=2, h=96, hv=72, bias=Bias("B1TS")),
    case("bias of pairs, head dim 64", t=260, s=136, n=4, k=2, bias=Bias("BNTS")),
    case("bias of pairs, head dim 32", t=130, s=264, n=2, k=2, h=32, bias=Bias("BNTS"), deterministic=True),
    case(
        "bias of pairs, options",
        t=150,
        s=216,
        n=4,
        k=2,
        h=128,
        bias=Bias("1NTS"),
        logits_soft_cap=3.0,
        query_seq_lengths=(150, 101),
        key_value_seq_lengths=(190, 211),
        sinks=(0.5, 2.0, -1.0, 4.0),
        dropout_rate=0.1,
        dropout_seed=3,
    ),
    case("one block of keys", t=333, s=128, n=4, k=2),
    case("one block of keys, causal", t=111, s=111, h=128, is_causal=True),
    case("one block of keys, deterministic", t=300, s=77, h=40, deterministic=True),
    case("bias of all, even numbers of keys", t=67, s=134, bias=Bias("BNTS", dtype="float32")),
    # On Hopper the kernel for dq keeps ds; a bias is staged forward, and read ahead of the scores backward.
    case("bias of pairs, head dim 256", t=200, s=264, n=4, k=2, h=256, bias=Bias("1NTS")),
    case(
        "bias of pairs, head dim 192, options",
        t=150,
        s=216,
        n=4,
        k=2,
        h=192,
        hv=128,
        bias=Bias("1NTS"),
        logits_soft_cap=3.0,
        query_seq_lengths=(150, 101),
        key_value_seq_lengths=(190, 211),
        dropout_rate=0.1,
        dropout_seed=3,
    ),
    case(
        "bias of pairs, head dim 192, causal",
        t=204,
        s=216,
        n=2,
        k=2,
        h=192,
        bias=Bias("BNTS"),
        is_causal=True,
    ),
    case("bias, head dim 160, odd number of keys", t=150, s=133, n=4, k=2, h=160, bias=Bias("BNTS")),
    # In float32 enough keys for planes, whose bias is read ahead, too.
    case("tiles, bias, head dim 64", batch=1, t=530, s=517, n=4, k=2, bias=Bias("1NTS", dtype="float32")),
    case("tiles, bias, head dim 32", batch=1, t=300, s=392, n=4, h=32, bias=Bias("BNTS"), is_causal=True),
    case("tiles, bias in 16 bits", batch=1, t=300, s=391, n=4, h=32, bias=Bias("BNTS", dtype="bfloat16")),
    case(
        "float32 bias, head dim 256", t=150, s=133, n=4, k=2, h=256, hv=200, bias=Bias("N1S", dtype="float32")
    ),
    case(
        "float16 bias, head dim 192",
        t=150,
        s=134,
        n=4,
        k=2,
        h=192,
        hv=128,
        bias=Bias("B1TS", dtype="float16"),
    ),
    case("scale and bias, head dim 256", t=130, s=136, h=256, bias=Bias("1NTS"), scale=Scale(0.1)),
    # More tiles than multiprocessors, some without keys.
    case(
        "many tiles, bias, head dim 256",
        batch=3,
        t=390,
        s=264,
        n=16,
        k=4,
        h=256,
        bias=Bias("1NTS"),
        is_causal=True,
        query_seq_lengths=(390, 70, 300),
        key_value_seq_lengths=(264, 0, 131),
    ),
]

# Each option as it appears in the table of pairs of options, for 99 queries and 133 keys.
PARTS: dict[str, dict[str, Any]] = {
    "causal": dict(is_causal=True),
    "window": dict(local_window_size=(70, 20)),
    "offset": dict(is_causal=True, query_offset=(19, -30)),
    "lengths of queries": dict(query_seq_lengths=(91, 64)),
    "lengths of keys": dict(key_value_seq_lengths=(65, 117)),
    "soft cap": dict(logits_soft_cap=1.5),
    "sinks": dict(sinks=(0.5, -1.0, 3.0, 1.0)),
    "groups": dict(k=2),
    "bias": dict(bias=Bias("1NTS", dtype="float32")),
    "alibi": dict(alibi=(0.25, 0.125, 0.0625, 0.01)),
    "mask": dict(mask=Mask("BNTS", visible=0.7)),
    "segments": dict(segment_ids=Segments((0, 1, 2))),
    "dropout": dict(dropout_rate=0.2, dropout_seed=8),
}
PAIRS = [
    case(f"{a} and {b}", t=99, s=133, n=4, **({"k": 4, "h": 32} | PARTS[a] | PARTS[b]))
    for a, b in itertools.combinations(PARTS, 2)
    if frozenset((a, b)) != {"bias", "alibi"}  # both are passed as the bias
]

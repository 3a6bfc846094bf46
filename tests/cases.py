"""The table of shapes and options that the tests run on every platform."""

import dataclasses
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
# Options that are arrays: operands of a jitted function, not part of the program.
OPERANDS = {
    "query_seq_lengths": np.int32,
    "key_value_seq_lengths": np.int32,
    "query_offset": np.int32,
    "sinks": np.float32,
}


class Inputs(NamedTuple):
    q: Any  # [B, T, N, H]
    k: Any  # [B, S, K, H]
    v: Any  # [B, S, K, Hv]
    dout: Any  # [B, T, N, Hv]
    dlse: Any  # [B, T, N]


@dataclasses.dataclass(frozen=True)
class Case:
    """One row: sizes, and options of flash_attention (arrays as tuples)."""

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
        """Normal random arrays, the same on every run."""
        rng = np.random.default_rng(zlib.crc32(self.name.encode()))
        b, t, s, n, k = self.batch, self.seqlen_q, self.seqlen_kv, self.num_heads, self.num_kv_heads
        h, hv = self.head_dim, self.head_dim_v or self.head_dim
        shapes = [(b, t, n, h), (b, s, k, h), (b, s, k, hv), (b, t, n, hv), (b, t, n)]
        q, k, v, dout, dlse = (rng.standard_normal(shape) for shape in shapes)
        q, k, v, dout = (x.astype(dtype) for x in (self.magnitude * q, k, v, dout))
        return Inputs(q, k, v, dout, dlse.astype(np.float64 if dtype == np.float64 else np.float32))

    @property
    def static(self) -> dict[str, Any]:
        """The options that belong to the program."""
        return {name: value for name, value in self.options if name not in OPERANDS}

    @property
    def operands(self) -> dict[str, np.ndarray]:
        """The options that are arrays."""
        return {name: np.asarray(x, OPERANDS[name]) for name, x in self.options if name in OPERANDS}


def _case(name: str, *, batch=2, t=80, s=80, n=2, k=2, h=64, hv=None, magnitude=1.0, **options) -> Case:
    return Case(name, batch, t, s, n, k, h, hv, tuple(options.items()), magnitude)


CASES = [
    _case("full"),
    _case("blocks", t=256, s=256),
    _case("causal", is_causal=True),
    _case("causal blocks", t=320, s=320, is_causal=True),
    _case("tiles, causal", batch=1, t=520, s=520, h=128, is_causal=True),
    _case("tiles, window", batch=1, t=450, s=700, h=128, local_window_size=(90, 5), query_offset=200),
    _case("tiles, lengths", t=300, s=400, h=72, query_seq_lengths=(300, 65), key_value_seq_lengths=(333, 1)),
    _case("causal, more keys", t=65, s=200, is_causal=True),
    _case("causal, more queries", t=200, s=65, is_causal=True),
    _case("causal, bottom right", t=65, s=200, is_causal=True, query_offset=135),
    _case("causal, negative offset", t=130, s=70, is_causal=True, query_offset=-65),
    _case("causal, offset per batch", t=40, s=150, is_causal=True, query_offset=(110, -3)),
    _case("window", t=150, s=150, local_window_size=20),
    _case("window left", t=150, s=150, local_window_size=(33, 0)),
    _case("window right", t=150, s=150, local_window_size=(0, 70)),
    _case("window of one", local_window_size=0),
    _case(
        "window, causal, offset",
        t=70,
        s=200,
        local_window_size=(50, 9),
        is_causal=True,
        query_offset=(100, 30),
    ),
    _case("soft cap", logits_soft_cap=2.0),
    _case("soft cap, causal", logits_soft_cap=15.0, is_causal=True, magnitude=8.0),
    _case("scale", scale=0.3),
    _case("scale 0", scale=0.0),
    _case("scale negative", scale=-0.2, is_causal=True),
    _case("lengths of queries", t=130, query_seq_lengths=(97, 0)),
    _case("lengths of keys", s=130, key_value_seq_lengths=(64, 129)),
    _case("no keys", key_value_seq_lengths=(0, 7)),
    _case(
        "lengths", t=130, s=140, query_seq_lengths=(65, 127), key_value_seq_lengths=(99, 63), is_causal=True
    ),
    _case("lengths beyond", query_seq_lengths=(1000, -5), key_value_seq_lengths=(-1, 81)),
    _case("sinks", n=4, k=2, sinks=(0.5, -1.0, 3.0, -20.0)),
    _case("sinks above all logits", n=2, sinks=(12.0, 9.0)),
    _case("sinks, rows without keys", t=200, s=65, is_causal=True, query_offset=-65, sinks=(1.0, -2.0)),
    _case(
        "sinks, lengths",
        t=130,
        s=140,
        n=6,
        h=128,
        query_seq_lengths=(65, 127),
        key_value_seq_lengths=(99, 0),
        sinks=(0.1, 0.2, -0.5, 4.0, 2.0, -3.0),
    ),
    _case(
        "sinks, soft cap, window",
        t=150,
        s=150,
        logits_soft_cap=2.0,
        local_window_size=(20, 3),
        sinks=(2.0, -1.5),
    ),
    _case("one head for 2", k=1),
    _case("groups of 2", n=4, k=2, is_causal=True),
    _case("groups of 3", n=6, k=2, t=90, s=70),
    _case("groups of 8", n=8, k=1, is_causal=True),
    _case("deterministic", t=150, s=150, n=4, is_causal=True, deterministic=True),
    _case("one query", t=1, s=200, n=4),
    _case("one key", t=77, s=1, h=16),
    _case("one and one", t=1, s=1, h=16),
    _case("odd sizes", batch=1, t=129, s=127, n=3, k=3),
    _case("64 keys over", t=66, s=192),
    _case(
        "decode",
        batch=3,
        t=1,
        s=140,
        n=8,
        is_causal=True,
        query_offset=(139, 70, 0),
        key_value_seq_lengths=(140, 71, 1),
    ),
    _case("head dim 1", h=1),
    _case("head dim 3", h=3, is_causal=True),
    _case("head dim 8", h=8),
    _case("head dim 40", h=40, is_causal=True),
    _case("head dim 72", h=72),
    _case("head dim 96", h=96, is_causal=True),
    _case("head dim 104", h=104),
    _case("head dim 128", h=128, is_causal=True),
    _case("head dim 136", h=136),
    _case("head dim 192", t=150, h=192),
    _case("head dim 200", h=200, is_causal=True),
    _case("head dim 256", h=256, t=70, s=70, is_causal=True),
    _case("values narrower", h=64, hv=24),
    _case("values wider", h=40, hv=136, is_causal=True),
    _case("values of one", h=64, hv=1),
    _case("large logits", magnitude=30.0),
    _case(
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
]

"""Random cases for `test_random.py`, drawn from a seed."""

import dataclasses
import inspect
import itertools
import math
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import harness
import jax
import numpy as np
import oracle
from cases import DTYPES, Bias, Case, Inputs, Mask, Segments

HUGE = 2**31 - 1
# Lengths close to the sizes of tiles and blocks.
LENGTHS = (
    *(1, 2, 3, 16, 17, 31, 33, 47, 48, 63, 64, 65, 80, 95, 96, 97, 127, 128, 129, 150, 191, 192, 193, 257, 300),
)  # fmt: skip
LONG_LENGTHS = (320, 383, 385, 449, 512, 513, 640, 700, 1025)
# Of calls with few queries: lengths of caches that the kernels for these split.
CACHE_LENGTHS = (200, 255, 256, 257, 319, 511, 513, 700, 1000, 1023, 1025, 1300, 2049, 4097, 4500)
HEAD_DIMS = (*(1, 2, 3, 8, 16, 24, 31, 32, 33, 40, 48, 63, 65, 72, 80, 96, 97, 104, 127), *[64, 128] * 4)
WIDE_HEAD_DIMS = (129, 136, 160, 191, 192, 193, 200, 224, 255, 256, 257, 300, 384, 448, 512)
# Of a part of a prompt: too many queries for the kernels of few, over keys that others split or take in a single part
# (num_key_parts).
CHUNK_LENGTHS, CHUNK_CACHE_LENGTHS = (17, 24, 33, 48, 64), (1030, 1500, 4096, 4097, 4500, 6144, 6151)
# Of the windows of images: many batch elements of few rows.
WINDOW_BATCHES, WINDOW_LENGTHS = (32, 49, 64), (7, 16, 25, 36, 49)
# What differs by powers of two, in float32.
SPREADS = {
    "rows of values": dict(v="rows", dout="rows"),
    "rows of queries and keys": dict(q="rows", k="rows"),
    "columns": dict.fromkeys(("q", "k", "v", "dout"), "columns"),
    "opposite columns": dict(q="columns", k="opposite columns", v="columns", dout="opposite columns"),
}
BINADES = 20

# Limits of pairs of query and key, over all heads, batch elements and loop turns: about one second, and ten.
PAIRS = 150_000
MANY_PAIRS = 1_500_000
POLICIES = {
    "nothing saved": jax.checkpoint_policies.nothing_saveable,
    "everything saved": jax.checkpoint_policies.everything_saveable,
    "out saved": jax.checkpoint_policies.save_only_these_names("flash_attention_out"),
    "out and lse saved": jax.checkpoint_policies.save_only_these_names(
        "flash_attention_out", "flash_attention_lse"
    ),
}


# ---- Makers of operands ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Lengths:
    """Lengths of one side: 0, full, just past the ends or anything; () and (1,) only without a batch axis."""

    side: str  # "T" or "S"
    shape: tuple[int, ...]

    def make(self, case: Case, rng: np.random.Generator, dtype: Any) -> np.ndarray:
        full = case.seqlen_q if self.side == "T" else case.seqlen_kv
        ends = rng.choice([0, 1, full - 1, full, full + 1, full + 1000, -3], self.shape)
        return np.where(rng.random(self.shape) < 0.4, ends, rng.integers(0, full + 1, self.shape)).astype(
            np.int32
        )


@dataclasses.dataclass(frozen=True)
class Offsets:
    """Positions of the first query; shape () means one for all batch elements."""

    shape: tuple[int, ...]
    may_be_huge: bool

    def make(self, case: Case, rng: np.random.Generator, dtype: Any) -> np.ndarray:
        offset = rng.integers(-case.seqlen_q - 1, case.seqlen_kv + 2, self.shape)
        offset = np.where(rng.random(self.shape) < 0.3, case.seqlen_kv - case.seqlen_q, offset)
        if self.may_be_huge:
            huge = rng.choice([HUGE, -HUGE - 1, 100_000], self.shape)
            offset = np.where(rng.random(self.shape) < 0.1, huge, offset)
        return offset.astype(np.int32)


@dataclasses.dataclass(frozen=True)
class Sinks:
    magnitude: float
    dtype: str

    def make(self, case: Case, rng: np.random.Generator, dtype: Any) -> np.ndarray:
        return (self.magnitude * rng.standard_normal(case.num_heads)).astype(DTYPES[self.dtype])


@dataclasses.dataclass(frozen=True)
class Slopes:
    """Powers of two, as in the paper, and their negatives."""

    dtype: str

    def make(self, case: Case, rng: np.random.Generator, dtype: Any) -> np.ndarray:
        exponents = rng.integers(1, 9, case.num_heads)
        sign = rng.choice([1.0, 1.0, 1.0, -1.0, 0.0], case.num_heads)
        return (sign * 0.5**exponents).astype(DTYPES[self.dtype])


@dataclasses.dataclass(frozen=True)
class Seed:
    def make(self, case: Case, rng: np.random.Generator, dtype: Any) -> np.ndarray:
        return np.int32(rng.integers(1000))


# ---- Transformations -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class View:
    """An argument that is a view of a larger array, with NaN around it, which must not be read."""

    kind: str  # "transposed", "reversed", "sliced" or "strided"
    axis: int

    def outer(self, x: np.ndarray) -> np.ndarray:
        if self.kind == "transposed":
            return np.ascontiguousarray(x.swapaxes(0, self.axis))
        if self.kind == "reversed":
            return np.ascontiguousarray(np.flip(x, self.axis))
        around = np.full_like(x, 1 if x.dtype.kind in "bi" else np.nan)
        if self.kind == "sliced":
            return np.concatenate([around, x, around], self.axis)
        shape = (*x.shape[: self.axis], 2 * x.shape[self.axis], *x.shape[self.axis + 1 :])
        return np.stack([x, around], self.axis + 1).reshape(shape)

    def inner(self, x: Any) -> Any:
        if self.kind == "transposed":
            return x.swapaxes(0, self.axis)
        size = x.shape[self.axis]
        parts = dict(reversed=slice(None, None, -1), sliced=slice(size // 3, 2 * size // 3))
        part = (parts | dict(strided=slice(None, None, 2)))[self.kind]
        return x[(slice(None),) * self.axis + (part,)]


@dataclasses.dataclass(frozen=True)
class Loop:
    """A vmap or a scan over an axis of some arguments; the others are the same in all turns."""

    kind: str  # "vmap" or "scan"
    size: int
    axes: dict[str, int]
    is_differentiated: bool  # the gradient of a loop, else a loop over gradients


@dataclasses.dataclass(frozen=True)
class RandomCase:
    """A call of attention and its gradient.

    Arguments are named as in `cases.Inputs` and `cases.OPERANDS`; `query_ids` and `key_ids` are a pair of segment ids.
    """

    seed: int
    case: Case  # sizes and options
    dtype: str
    rule: str  # kind in the closeness rule
    has_batch: bool
    spread: str | None  # a key of SPREADS
    more: dict[str, Any]  # options that do not change the exact result
    scale_is_array: bool  # as for a learned temperature
    x64: bool
    cotangents: tuple[str, ...]  # of out, of lse
    differentiated: tuple[str, ...]  # names of arguments
    loops: tuple[Loop, ...]  # outermost first; loops over gradients come first
    checkpoint: str | None  # a policy of jax.checkpoint
    is_jitted: bool
    views: dict[str, View]
    poison: bool  # NaN wherever nothing may be read
    forward_mode: bool  # the tangent is computed, too

    def __str__(self) -> str:
        c = self.case
        parts = [
            f"{self.dtype} ({self.rule}), {f'B={c.batch} ' if self.has_batch else 'no batch axis, '}T={c.seqlen_q} "
            f"S={c.seqlen_kv} N={c.num_heads} K={c.num_kv_heads} H={c.head_dim} Hv={c.head_dim_v}, queries x "
            f"{c.magnitude:g}" + (f", powers of two between {self.spread}" if self.spread else ""),
            "options: " + ", ".join(f"{name}={x!r}" for name, x in (*c.options, *self.more.items())),
            f"cotangents of {', '.join(self.cotangents)}; gradients of {', '.join(self.differentiated)}",
        ]
        for loop in self.loops:
            what = "gradient of " if loop.is_differentiated else ""
            axes = ", ".join(f"{name} (axis {axis})" for name, axis in loop.axes.items())
            parts.append(f"{what}{loop.kind} of {loop.size} over {axes}")
        parts += ["the scale is an array"] * self.scale_is_array
        parts += [f"jax.checkpoint, {self.checkpoint}"] * bool(self.checkpoint)
        parts += ["without jit"] * (not self.is_jitted) + ["with x64"] * self.x64 + ["poisoned"] * self.poison
        parts += ["with forward mode"] * self.forward_mode
        parts += [f"{name} is {view.kind} along axis {view.axis}" for name, view in self.views.items()]
        return "\n".join(parts)

    def numbers(self, arguments: dict[str, np.ndarray]) -> list[str]:
        """The values of small operands, to print."""
        operands = {name: x for name, x in arguments.items() if name not in Inputs._fields}
        return [f"{name} = {x.tolist()}" for name, x in operands.items() if x.size <= 12]

    @property
    def static(self) -> dict[str, Any]:
        """The options that are static under jit."""
        return self.case.static | self.more | {"forward_mode": self.forward_mode}

    def mapped(self, name: str) -> tuple[bool, ...]:
        """For each loop, whether it maps an axis of the argument."""
        is_cotangent = name in ("dout", "dlse")
        return tuple(name in loop.axes or (is_cotangent and loop.is_differentiated) for loop in self.loops)

    def summed(self, name: str) -> list[int]:
        """The loops over which the gradient of an argument is summed."""
        of_results = (True,) * len(self.loops)
        mapped = of_results if name in ("out", "lse") else self.mapped(name)
        return [i for i, loop in enumerate(self.loops) if loop.is_differentiated and not mapped[i]]

    def num_terms(self, name: str) -> int:
        """The number of terms in the sum of a result or gradient: num_keys of the closeness rule."""
        c, terms = self.case, self.case.seqlen_kv
        if name in ("bias", "alibi", "sinks"):
            pairs = c.batch * c.num_heads * c.seqlen_q * c.seqlen_kv
            operand = self._makers()[name](np.random.default_rng(0))
            terms = max(terms, pairs // max(operand.size, 1))
        return terms * math.prod(self.loops[i].size for i in self.summed(name))

    def num_rows(self, name: str) -> float:
        """The number of rows of ds that add to each number of an argument's gradient."""
        c, rows = self.case, 1.0
        if name == "k":
            rows = c.seqlen_q * c.num_heads / c.num_kv_heads
        elif name != "q":
            operand = self._makers()[name](np.random.default_rng(0))
            rows = c.batch * c.num_heads * c.seqlen_q
            if name == "bias" and operand.ndim:
                rows *= operand.shape[-1]  # columns of the bias are separate sums
            rows /= max(operand.size, 1)
        return rows * math.prod(self.loops[i].size for i in self.summed(name))

    def cancelling(self, name: str, arguments: dict[str, np.ndarray]) -> float:
        """`cancelling` of the closeness rule: the largest |dout_i| |v_j| of a gradient through ds times ds's factors.

        Over many rows the rounding errors add up like a random walk, and most are smaller than the largest.
        """
        c = self.case
        if name in ("out", "lse", "v") or "dout" not in arguments:
            return 0.0

        def largest(x: Any) -> float:
            return np.abs(np.asarray(x).astype(np.float64)).max(initial=0.0)

        norms = (np.linalg.norm(arguments[x].astype(np.float64), axis=-1) for x in ("dout", "v"))
        terms = math.prod(map(largest, norms)) / (1 - self.static.get("dropout_rate", 0.0))
        terms *= max(1.0, math.sqrt(self.num_rows(name)) / 4)
        if name in ("q", "k"):
            other = arguments["k" if name == "q" else "q"]
            terms *= max(1.0, abs(self.static.get("scale", c.head_dim**-0.5)) * largest(other))
        if name == "alibi":
            offset = arguments.get("query_offset", self.static.get("query_offset", 0))
            terms *= largest(offset) + max(c.seqlen_q, c.seqlen_kv)
        return terms

    def arguments(self) -> dict[str, np.ndarray]:
        """All array arguments, with the axes of the loops in front."""
        arguments = {}
        for name, make in self._makers().items():
            rng = np.random.default_rng([self.seed, zlib.crc32(name.encode())])
            mapped = zip(self.loops, self.mapped(name), strict=True)
            sizes = [loop.size for loop, is_mapped in mapped if is_mapped]
            x = np.stack([make(rng) for _ in range(math.prod(sizes))])
            arguments[name] = x.reshape((*sizes, *x.shape[1:]))
        return arguments

    def turns(self, arguments: dict[str, np.ndarray]) -> Iterator[dict[str, np.ndarray]]:
        """The arguments of each turn of the loops, as views."""
        for index in np.ndindex(*(loop.size for loop in self.loops)):
            yield {
                name: x[(*itertools.compress(index, self.mapped(name)), ...)] for name, x in arguments.items()
            }

    def _makers(self) -> dict[str, Any]:
        case, dtype = self.case, DTYPES[self.dtype]
        b, t, s, n, k, h = (
            case.batch, case.seqlen_q, case.seqlen_kv, case.num_heads, case.num_kv_heads, case.head_dim,
        )  # fmt: skip
        shapes = dict(q=(b, t, n, h), k=(b, s, k, h), v=(b, s, k, case.head_dim_v))
        shapes |= dict(dout=(b, t, n, case.head_dim_v), dlse=(b, t, n))
        lse_dtype = np.float64 if self.dtype == "float64" else np.float32

        def normal(name, shape):
            magnitude = case.magnitude if name == "q" else 1.0
            shape = shape if self.has_batch else shape[1:]
            kind = lse_dtype if name == "dlse" else dtype
            factor = magnitude * self._factor(name, shape)
            return lambda rng: (factor * rng.standard_normal(shape)).astype(kind)

        makers = {
            name: normal(name, shape)
            for name, shape in shapes.items()
            if name[0] != "d" or name[1:] in self.cotangents
        }
        if self.scale_is_array:
            makers["scale"] = lambda rng: np.asarray(case.static["scale"], lse_dtype)
        for name, x in case.options:
            if isinstance(x, Segments):
                makers |= self._segment_makers(x)
            elif hasattr(x, "make"):
                makers[name] = lambda rng, x=x: x.make(case, rng, dtype)
        return makers

    def _factor(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """What multiplies each row or column of an input, the same in all turns of the loops."""
        kind = SPREADS.get(self.spread, {}).get(name)
        if kind is None:
            return np.ones(())
        if kind == "rows":
            rng = np.random.default_rng([self.seed, zlib.crc32(name.encode())])
            return 2.0 ** rng.uniform(-BINADES, 0, (shape[-3], 1, 1))
        exponents = np.random.default_rng(self.seed).uniform(-BINADES, 0, shape[-1])
        return 2.0 ** (exponents if kind == "columns" else -BINADES / 2 - exponents)

    def _segment_makers(self, segments: Segments) -> dict[str, Any]:
        def make(part):
            def ids(rng):
                x = dataclasses.replace(segments, pair=True).make(self.case, rng, None)[part]
                return x if self.has_batch else x[0]

            return ids

        if segments.has_two(self.case):
            return dict(query_ids=make(0), key_ids=make(1))
        return dict(segment_ids=make(0))

    def oracle_options(self, arguments: dict[str, np.ndarray]) -> dict[str, Any]:
        """The oracle's options for the arguments of one turn."""
        options = self.case.static | {name: x for name, x in arguments.items() if name not in Inputs._fields}
        if "query_ids" in options:
            options["segment_ids"] = options.pop("query_ids"), options.pop("key_ids")
        if "segment_ids" in options and not self.has_batch:
            ids = options["segment_ids"]
            options["segment_ids"] = tuple(x[None] for x in ids) if isinstance(ids, tuple) else ids[None]
        if "dropout_seed" in options:
            options["keep"] = harness.kept(self.case, int(options.pop("dropout_seed")))
        return options

    def poisoned(self, arguments: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The arguments with NaN where no turn may read: beyond the lengths, and in a bias at hidden pairs."""
        c = self.case
        # With a sink even a fully masked row has a log-sum-exp, so its cotangent is read.
        names = {"q", "k", "v", "dout", "bias", "" if "sinks" in arguments else "dlse"} & arguments.keys()
        is_read = {name: np.zeros(arguments[name].shape, bool) for name in names}
        for turn, read in zip(self.turns(arguments), self.turns(is_read), strict=True):
            for name in names - {"bias"}:
                side, size = ("key_value", c.seqlen_kv) if name in ("k", "v") else ("query", c.seqlen_q)
                lengths = np.reshape(turn.get(f"{side}_seq_lengths", size), (-1, 1))
                exists = np.broadcast_to(np.arange(size) < lengths, (c.batch, size))
                exists = exists if self.has_batch else exists[0]
                read[name] |= exists.reshape(exists.shape + (1,) * (read[name].ndim - exists.ndim))
            if "bias" in names:
                options = self.oracle_options(turn)
                of_pairs = inspect.signature(oracle.visible).parameters.keys() & options.keys()
                seen = oracle.visible(
                    c.batch, c.seqlen_q, c.seqlen_kv, **{name: options[name] for name in of_pairs}
                )
                seen = np.broadcast_to(seen, (c.batch, c.num_heads, c.seqlen_q, c.seqlen_kv))
                read["bias"] |= _any_to(seen, read["bias"].shape)
        poisoned = arguments | {name: arguments[name].copy() for name in names}
        for name in names:
            poisoned[name][~is_read[name]] = np.nan
        return poisoned


def _any_to(x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    own = (1,) * (x.ndim - len(shape)) + shape
    return x.any(tuple(axis for axis in range(x.ndim) if own[axis] == 1), keepdims=True).reshape(shape)


# ---- Drawing --------------------------------------------------------------------------------------------------


class _Dice:
    def __init__(self, seed: int):
        self.rng = np.random.default_rng(seed)

    def pick(self, choices: Sequence[Any]) -> Any:
        return choices[int(self.rng.integers(len(choices)))]

    def chance(self, probability: float) -> bool:
        return bool(self.rng.random() < probability)

    def number(self, low: float, high: float) -> float:
        """Log-uniform between the limits, rounded to three digits for readability."""
        return float(f"{np.exp(self.rng.uniform(np.log(low), np.log(high))):.3g}")


def max_head_dim(platform: str, dtype: str) -> int:
    if platform == "cpu":
        return max(WIDE_HEAD_DIMS)
    if dtype == "float64":
        return 128
    return 512 if dtype in ("bfloat16", "float16") and harness.is_hopper() else 256


def is_chunk(case: Case) -> bool:
    """A part of a prompt."""
    return case.seqlen_q >= min(CHUNK_LENGTHS) and case.seqlen_kv >= min(CHUNK_CACHE_LENGTHS)


def has_windows(case: Case) -> bool:
    """Windows of images."""
    return case.batch >= min(WINDOW_BATCHES)


def draw(seed: int, platform: str) -> RandomCase:
    """The case of a seed. Platforms differ only in dtype, what depends on it, and the head dims."""
    dice = _Dice(seed)
    dtype, precision, rule = dice.pick(harness.KINDS[platform])
    any_precision = dice.pick([None, None, "default", "high", "highest"])
    if dtype != "float32" or platform == "cpu":
        precision = any_precision
    cotangents = dice.pick([("out",), ("out",), ("out", "lse"), ("out", "lse"), ("out", "lse"), ("lse",)])
    more = dict(precision=precision, return_residual="lse" in cotangents or dice.chance(0.5))
    if dice.chance(0.12):
        more["implementation"] = "xla"
    if dice.chance(0.3):
        more["deterministic"] = dice.pick([True, False])

    case, has_batch, loop_sizes = _draw_sizes(dice, str(seed), max_head_dim(platform, dtype))
    is_wide = platform == "cuda" and max(case.head_dim, case.head_dim_v) > 256
    if is_wide or is_chunk(case):  # Hopper's kernels take multiples of 8
        h, hv = (-(-size // 8) * 8 for size in (case.head_dim, case.head_dim_v))
        case = dataclasses.replace(case, head_dim=h, head_dim_v=hv)
    options = _draw_options(dice, case, dtype, has_batch)
    magnitude = dice.pick([1.0] * 8 + [8.0, 30.0])
    if "scale" in options or case.head_dim > 128:
        magnitude = min(magnitude, 8.0)  # float32 is not exact enough for logits of several hundreds
    if "query_seq_lengths" in options or min(case.seqlen_q, case.seqlen_kv) < 64:
        # Nor with few keys; and with few rows the errors of 16 bits may all be small by chance.
        magnitude = 1.0
    case = dataclasses.replace(case, options=tuple(options.items()), magnitude=magnitude)
    spread = dice.pick(list(SPREADS)) if dtype == "float32" and dice.chance(0.2) else None

    floats = [name for name in ("q", "k", "v", "bias", "alibi", "sinks") if name in (*"qkv", *options)]
    differentiated = [name for name in floats if name in "qkv" or dice.chance(0.8)]
    if dice.chance(0.15):
        differentiated = [name for name in floats if dice.chance(0.5)] or [dice.pick(floats)]

    ndims = dict(q=3, k=3, v=3, dout=3, dlse=2)  # without a batch axis
    ndims |= {name: len(options[name].axes) for name in ("bias", "mask") if name in options}
    arguments = ["q", "k", "v", *(f"d{name}" for name in cotangents)]
    scale_is_array = "scale" in options and dice.chance(0.4)
    arguments += ["scale"] * scale_is_array
    for name, x in options.items():
        if isinstance(x, Segments):
            arguments += ["query_ids", "key_ids"] if x.has_two(case) else [name]
        elif hasattr(x, "make"):
            arguments.append(name)
    loops = _draw_loops(dice, loop_sizes, arguments, ndims)
    views, is_dense = {}, dice.chance(0.6)
    for name in arguments:
        if not is_dense and ndims.get(name, 0) > 1 and dice.chance(0.5):
            kind = dice.pick(["transposed", "transposed", "reversed", "sliced", "strided"])
            views[name] = View(kind, dice.pick(range(1, ndims[name])))
    return RandomCase(
        seed=seed,
        case=case,
        dtype=dtype,
        rule=rule,
        has_batch=has_batch,
        spread=spread,
        more=more,
        scale_is_array=scale_is_array,
        x64=dice.chance(0.05),
        cotangents=cotangents,
        differentiated=tuple(differentiated),
        loops=loops,
        checkpoint=dice.pick(list(POLICIES)) if dice.chance(0.15) else None,
        is_jitted=dice.chance(0.9),
        views=views,
        poison=dice.chance(0.4),
        forward_mode=dice.chance(0.5),
    )


def _draw_sizes(dice: _Dice, name: str, largest: int) -> tuple[Case, bool, list[int]]:
    """A case without options, whether it has a batch axis, and the sizes of the loops."""
    is_large = dice.chance(0.05)
    lengths = [LENGTHS, LENGTHS, [x for x in LENGTHS if x > 90]]
    t, s = (
        dice.pick(LONG_LENGTHS if is_large and dice.chance(0.7) else dice.pick(lengths)) for _ in range(2)
    )
    if dice.chance(0.15):
        s = t
    is_decoding = dice.chance(0.15)
    if is_decoding:
        t, s = dice.pick([1, 1, 2, 3, 4, 5, 8, 15, 16]), dice.pick(CACHE_LENGTHS)
    elif dice.chance(0.05):
        t = 1
    if dice.chance(0.03):
        t, s = dice.pick([(0, s), (t, 0), (0, 0)])
    batch, num_kv_heads, group = (
        dice.pick([1, 2, 3]),
        dice.pick([1, 1, 2, 3]),
        dice.pick([1, 1, 1, 2, 3, 4, 8]),
    )
    sizes = [
        batch,
        num_kv_heads,
        group,
        *(dice.pick([1, 2, 3]) for _ in range(dice.pick([0, 0, 0, 1, 1, 2]))),
    ]
    if dice.chance(0.03):
        t, s = dice.pick(CHUNK_LENGTHS), dice.pick(CHUNK_CACHE_LENGTHS)
    has_images = dice.chance(0.03)
    # If there are too many pairs, shrink these sizes, which do not matter to tiles.
    while t * s * math.prod(sizes) > (MANY_PAIRS if is_large else PAIRS) and max(sizes) > 1:
        sizes[sizes.index(max(sizes))] -= 1
    batch, num_kv_heads, group, *loop_sizes = sizes
    if has_images:
        t = s = dice.pick(WINDOW_LENGTHS)
        batch, num_kv_heads, group, loop_sizes = dice.pick(WINDOW_BATCHES), dice.pick([1, 2]), 1, []
    h, hv = (dice.pick(HEAD_DIMS if dice.chance(0.8) else WIDE_HEAD_DIMS) for _ in range(2))
    h, hv = min(h, largest), min(hv, largest)
    hv = hv if dice.chance(0.4) else h
    case = Case(name, batch, t, s, num_kv_heads * group, num_kv_heads, h, hv)
    return case, batch > 1 or dice.chance(0.7), loop_sizes


def _draw_options(dice: _Dice, case: Case, dtype: str, has_batch: bool) -> dict[str, Any]:
    """Few options in some cases, nearly all in others."""
    # With most options the keys of a chunk are not split.
    share = 0.05 if is_chunk(case) else dice.pick([0.05, 0.15, 0.3, 0.3, 0.5, 0.9])

    def has() -> bool:
        return dice.chance(share)

    def float_dtype() -> str:
        return dice.pick([dtype, dtype, "float32", "float32", *DTYPES])

    def axes() -> str:
        letters = "".join(dice.pick([letter, letter, "1"]) for letter in ("BNTS" if has_batch else "NTS"))
        while letters.startswith("1") and dice.chance(0.5):
            letters = letters[1:]
        return letters

    per_batch = (case.batch,) if has_batch else dice.pick([(), (1,)])
    options: dict[str, Any] = {}
    if has():
        sign, default = dice.pick([1, 1, -1, 0]), case.head_dim**-0.5
        options["scale"] = sign * dice.number(0.2 * default, 2 * default)
    if dice.chance(0.4):
        options["is_causal"] = True
    if has():
        options["query_seq_lengths"] = Lengths("T", per_batch)
    if has():
        options["key_value_seq_lengths"] = Lengths("S", per_batch)
    if has():
        parts = [dice.pick([None, 0, 1, 5, 31, 64, 100, 128, 500]) for _ in range(2)]
        options["local_window_size"] = dice.pick([tuple(parts), tuple(parts), parts[0] or 0])
    if has():
        options["logits_soft_cap"] = dice.number(0.5, 50.0)
    if has():
        options["sinks"] = Sinks(dice.pick([1.0, 5.0]), float_dtype())
    if has_windows(case):
        options["bias"] = Bias(dice.pick(["1NTS", "NTS", "TS"]), 1.0, float_dtype())
    elif has():
        if dice.chance(0.3):
            options["alibi"] = Slopes(float_dtype())
        else:
            options["bias"] = Bias(axes(), dice.pick([1.0, 1.0, 5.0]), float_dtype())
    if has() or ("is_causal" in options and dice.chance(0.3)):
        # With slopes, a huge offset would shift all logits and make the gradient inaccurate.
        may_be_huge = "alibi" not in options
        options["query_offset"] = Offsets(dice.pick([(), per_batch]), may_be_huge)
        if dice.chance(0.3):
            options["query_offset"] = int(Offsets((), may_be_huge).make(case, dice.rng, None))
    if has():
        visible = dice.pick([0.0, 0.003, 0.05, 0.3, 0.5, 0.7, 0.95, 1.0])
        options["mask"] = Mask(axes(), visible, dice.pick([0, 0, 16, 32, 64, 64, 96, 128]))
    if has():
        ids = dice.rng.integers(-(2**31), 2**31, dice.pick([1, 2, 3, 6, 30])).tolist()
        ids = dice.pick([ids, range(len(ids))])
        options["segment_ids"] = Segments(tuple(ids), dice.chance(0.7), dice.chance(0.5))
    if has():
        options["dropout_rate"] = dice.pick([0.05, 0.1, 0.25, 0.5, 0.9])
        options["dropout_seed"] = Seed()
    return options


def _draw_loops(
    dice: _Dice, sizes: list[int], arguments: list[str], ndims: dict[str, int]
) -> tuple[Loop, ...]:
    loops, num_over_gradients = [], dice.pick(range(len(sizes) + 1))
    for i, size in enumerate(sizes):
        is_differentiated = i >= num_over_gradients
        kind = dice.pick(["vmap", "vmap", "scan"])
        names = [name for name in arguments if not (is_differentiated and name in ("dout", "dlse"))]
        names = [name for name in names if dice.chance(0.6)] or [dice.pick(names)]
        axes = {name: dice.pick([0, 0, -1, *range(ndims.get(name, 0))]) for name in names}
        loops.append(Loop(kind, size, dict.fromkeys(names, 0) if kind == "scan" else axes, is_differentiated))
    return tuple(loops)

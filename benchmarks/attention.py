"""Checks jax_flash, then times it beside cuDNN's and XLA's attention (through jax.nn) in one process.

    python benchmarks/attention.py          # the full sweep, on the GPU if there is one
    python benchmarks/attention.py --only forward --head-dim 128 --seq-len 4096 --peers cudnn

Each shape is first checked against one head computed in float64, with all its rows, forward and backward. Then
each direction is timed separately: forward is the jitted call, backward the jitted pullback, whose residuals are
arguments. Inputs are random normal. Operations are counted as 4 B N T S H forward, 2.5 times that backward, and
half of it if causal; for packed sequences only visible pairs count. Memory is the arguments, results and temporary
buffers of each program.

The section "options" times biases, masks, dropout and packed sequences. jax.nn lacks ALiBi and segments and gets a
dense bias or mask instead; it cannot express dropout, so jax_flash is timed alone. For a random mask all pairs
count, because every tile has visible ones.

The section "ways" times float32 as jax_flash does not choose to compute it on Hopper: by the portable kernels, and
cast to 16 bits, whose errors include those of the inputs.

The section "accuracy" times nothing. It compares the output and the gradients of several kinds of inputs with float64,
beside XLA's at "highest", beside cuDNN's in 16 bits, and in float32 beside XLA's with one product in TF32 (on a CPU
that is float32, too).

The exit status is 1 if jax_flash is wrong, without a figure, or slower than cuDNN or XLA in any cell, which is named
at the end.

The full sweep writes its figures to benchmarks/results/<device>.json and plots them. A filtered sweep writes only
to --output.
"""

import argparse
import concurrent.futures
import contextlib
import dataclasses
import functools
import itertools
import os
import pathlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

# XLA's attention needs room for its score matrices. If it still fails, the table has a line that says so.
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import jax
import jax.numpy as jnp
import measure
import numpy as np
from measure import OURS

import jax_flash
from jax_flash import _dropout

RESULTS = pathlib.Path(__file__).parent / "results"
DIRECTIONS = ("forward", "backward")


# ---- Shapes -----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Shape:
    """One attention problem with T = S."""

    section: str
    batch: int
    seq_len: int
    num_heads: int
    head_dim: int
    dtype: str = "bfloat16"
    is_causal: bool = False
    num_kv_heads: int | None = None  # None: as many as query heads
    window: tuple[int, int] | None = None
    precision: str | None = None  # None: jax_default_matmul_precision
    option: str | None = None  # one of the names below, or of measure.DISTRIBUTIONS
    lengths: tuple[int, ...] | None = None  # of packed sequences or of the rows of a ragged batch
    way: str | None = None  # of jax_flash, one of those below; None: its own choice

    @property
    def kv_heads(self) -> int:
        return self.num_kv_heads or self.num_heads

    def flops(self, direction: str) -> float:
        pairs = self.seq_len**2 / (2 if self.is_causal else 1)
        if self.window is not None:
            left, right = self.window[0], 0 if self.is_causal else self.window[1]
            pairs = sum(min(i, left) + 1 + min(self.seq_len - 1 - i, right) for i in range(self.seq_len))
        pairs *= self.batch
        if self.lengths is not None:
            pairs = sum(n * (n + 1) // 2 if self.is_causal else n**2 for n in self.lengths)
        forward = 4 * self.num_heads * self.head_dim * pairs
        return forward if direction == "forward" else 2.5 * forward

    def describe(self) -> str:
        mask = "causal" if self.is_causal else "full"
        if self.window is not None:
            mask += f" window {self.window[0]},{self.window[1]}"
        if self.option is not None:
            mask += f" {self.option}"
        heads = f"{self.num_heads}" + (f"/{self.kv_heads}" if self.kv_heads != self.num_heads else "")
        dtype = self.dtype if self.precision is None else f"{self.dtype} {self.precision}"
        dtype += f" by {self.way}" if self.way else ""
        return f"{self.batch} x {self.seq_len} x {heads} x {self.head_dim} {mask} {dtype}"


def gpu_shapes() -> Iterator[Shape]:
    for head_dim, seq_len, causal in itertools.product((64, 128, 256), (1024, 4096, 16384), (False, True)):
        yield Shape("standard", 16384 // seq_len, seq_len, 2048 // head_dim, head_dim, is_causal=causal)
    for precision, seq_len, causal in itertools.product(("default", "highest"), (1024, 4096), (False, True)):
        batch = 16384 // seq_len
        yield Shape("float32", batch, seq_len, 16, 128, "float32", is_causal=causal, precision=precision)
    yield Shape("float32", 4, 4096, 32, 64, "float32", precision="default")
    for way, precisions in WAYS.items():
        for precision in precisions:
            yield Shape("ways", 4, 4096, 16, 128, "float32", precision=precision, way=way)
    for head_dim, causal in itertools.product((64, 128), (False, True)):
        yield Shape("float64", 4, 4096, 2048 // head_dim, head_dim, "float64", is_causal=causal)
    for num_kv_heads in (32, 8):
        yield Shape("grouped heads", 2, 8192, 32, 128, is_causal=True, num_kv_heads=num_kv_heads)
    for seq_len, causal in itertools.product((1000, 1024, 4097, 4224), (False, True)):
        yield Shape("odd lengths", 16384 // seq_len, seq_len, 16, 128, is_causal=causal)
    for num_heads, head_dim in ((16, 96), (16, 128), (8, 192), (8, 256)):
        yield Shape("odd head dims", 4, 4096, num_heads, head_dim)
    yield Shape("window", 1, 16384, 16, 128, is_causal=True, window=(1023, 0))
    for precision in ("default", "highest"):
        yield Shape("long", 1, 131072, 1, 128, "float32", precision=precision)
    yield from option_shapes(Shape("options", 4, 4096, 16, 128), num_packed=16384)


def cpu_shapes() -> Iterator[Shape]:
    for seq_len, causal in itertools.product((1024, 2048, 4096), (False, True)):
        yield Shape("standard", 1, seq_len, 8, 64, "float32", is_causal=causal)
    yield Shape("long", 1, 16384, 1, 64, "float32")
    yield from option_shapes(Shape("options", 1, 2048, 8, 64, "float32"), num_packed=4096)


def option_shapes(plain: Shape, num_packed: int) -> Iterator[Shape]:
    """Each option on a plain shape, and packed sequences with `num_packed` tokens in total."""
    for option in (BIAS, BIAS_GRADIENT, RANDOM_MASK):
        yield dataclasses.replace(plain, option=option)
    yield dataclasses.replace(plain, option=CAUSAL_MASK, is_causal=True)
    yield dataclasses.replace(plain, option=DROPOUT)
    for causal in (False, True):
        yield dataclasses.replace(plain, option=ALIBI, is_causal=causal)
    lengths = measure.random_lengths(num_packed, count=16)
    longest = -(-max(lengths) // 128) * 128
    for causal in (False, True):
        packed = dataclasses.replace(plain, is_causal=causal, lengths=lengths)
        yield dataclasses.replace(packed, option=PACKED, batch=1, seq_len=num_packed)
        yield dataclasses.replace(packed, option=RAGGED, batch=len(lengths), seq_len=longest)


def memory_shapes(on_gpu: bool) -> Iterator[Shape]:
    """Shapes to compile, not to run: memory of forward and backward together as the sequence grows."""
    if on_gpu:
        for seq_len in (1024, 4096, 16384, 65536):
            yield Shape("memory", 1, seq_len, 16, 128)
    else:
        for seq_len in (1024, 4096, 16384):
            yield Shape("memory", 1, seq_len, 8, 64, "float32")


def accuracy_shapes(on_gpu: bool) -> Iterator[Shape]:
    """Shapes of which the errors are measured, with each distribution of the inputs; those of a dtype in a row."""
    plain = Shape("accuracy", 1, 4096, 8, 128) if on_gpu else Shape("accuracy", 1, 512, 2, 64)
    kinds = (("float32", "default"), ("float32", "highest"), ("bfloat16", None), ("float16", None))
    for (dtype, precision), distribution in itertools.product(kinds, measure.DISTRIBUTIONS):
        yield dataclasses.replace(plain, dtype=dtype, precision=precision, option=distribution)


def implementation(name: str, shape: Shape) -> Callable[..., jax.Array]:
    """Attention by jax_flash or one of jax.nn's implementations, as a function of the arrays in `Inputs`."""
    options: dict[str, Any] = {"is_causal": shape.is_causal and shape.option != CAUSAL_MASK}
    if shape.window is not None:
        options["local_window_size"] = shape.window
    if name == OURS:
        if shape.option == DROPOUT:
            options["dropout_rate"] = DROPOUT_RATE
        attention = functools.partial(jax_flash.flash_attention, **options)
        return cast(attention, shape.way) if shape.way in ("bfloat16", "float16") else attention
    if name == "xla" and shape.dtype == "float64":  # jax.nn's has float32 logits
        return functools.partial(jax_flash.flash_attention, implementation=name, **options)
    return functools.partial(jax.nn.dot_product_attention, implementation=name, **options)


# ---- Ways to compute float32 ------------------------------------------------------------------------------

PORTABLE = "portable kernels"  # TF32, and three products of it at "highest"
# The precisions of each. Hopper's own kernels, with planes, are what jax_flash chooses.
WAYS = {PORTABLE: ("default", "highest"), "float16": ("default",), "bfloat16": ("default",)}


def cast(attention: Callable[..., jax.Array], dtype: str) -> Callable[..., jax.Array]:
    """Attention in 16 bits, with inputs and results in float32."""

    def in_dtype(*arrays: jax.Array) -> jax.Array:
        return attention(*(x.astype(dtype) for x in arrays)).astype(jnp.float32)

    return in_dtype


@contextlib.contextmanager
def kernels_of(way: str | None) -> Iterator[None]:
    """A context in which only the kernels of a way run."""
    if way != PORTABLE:
        yield
        return
    jax_flash._library.set_test_settings("sm80")
    try:
        yield
    finally:
        jax_flash._library.set_test_settings()


# ---- Options ----------------------------------------------------------------------------------------------

# Names of the options in the table.
BIAS = "constant bias [1,N,T,S]"  # cuDNN computes its gradient regardless
BIAS_GRADIENT = "bias [1,N,T,S] and dbias"
RANDOM_MASK = "random mask [B,1,T,S]"
CAUSAL_MASK = "as a mask [B,1,T,S]"
DROPOUT_RATE = 0.1
DROPOUT = f"dropout {DROPOUT_RATE}"
ALIBI = "ALiBi"
PACKED = "packed"
RAGGED = "ragged"


class Inputs(NamedTuple):
    """The arrays of one shape."""

    differentiated: tuple[jax.Array, ...]  # q, k, v, and the bias if its gradient is timed
    ours: dict[str, Any]  # further arguments of flash_attention
    theirs: dict[str, Any] | None  # of jax.nn.dot_product_attention; None: not supported
    dout: jax.Array

    def others(self, name: str) -> dict[str, Any] | None:
        """The arguments of one implementation that are not differentiated."""
        return self.ours if name == OURS else self.theirs


def option_arguments(shape: Shape) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """The arguments that an option adds to flash_attention and to jax.nn.dot_product_attention."""
    key = jax.random.key(1)
    square = (shape.seq_len, shape.seq_len)
    if shape.option in (BIAS, BIAS_GRADIENT):
        arguments = {"bias": jax.random.normal(key, (1, shape.num_heads, *square), jnp.dtype(shape.dtype))}
    elif shape.option == RANDOM_MASK:
        mask = jax.random.bernoulli(key, 0.5, (shape.batch, 1, *square))
        arguments = {"mask": mask | jnp.eye(shape.seq_len, dtype=bool)}  # each query sees a key
    elif shape.option == CAUSAL_MASK:
        arguments = {"mask": jnp.broadcast_to(jnp.tri(*square, dtype=bool), (shape.batch, 1, *square))}
    elif shape.option == DROPOUT:
        return {"dropout_rng": key}, None
    elif shape.option == ALIBI:
        slopes = alibi_slopes(shape)
        bias = alibi_bias(slopes[None, :, None, None], shape.seq_len)
        return {"bias": jax_flash.Alibi(slopes)}, {"bias": bias.astype(shape.dtype)}
    elif shape.option == PACKED:
        ids = jnp.asarray(np.repeat(np.arange(len(shape.lengths)), shape.lengths)[None], jnp.int32)
        return {"segment_ids": ids}, {"mask": (ids[:, :, None] == ids[:, None, :])[:, None]}
    elif shape.option == RAGGED:
        lengths = jnp.array(shape.lengths, jnp.int32)
        arguments = {"query_seq_lengths": lengths, "key_value_seq_lengths": lengths}
    else:
        arguments = {}
    return arguments, arguments


def alibi_slopes(shape: Shape) -> jax.Array:
    return 2.0 ** (-8 * jnp.arange(1, shape.num_heads + 1, dtype=jnp.float32) / shape.num_heads)


def alibi_bias(slopes: jax.Array, seq_len: int) -> jax.Array:
    position = jnp.arange(seq_len, dtype=slopes.dtype)
    return -slopes * jnp.abs(position[:, None] - position)


def option_reference(shape: Shape, operands: Inputs) -> dict[str, np.ndarray]:
    """Like `measure.reference_head`, with an option: the last head of the last sequence, in float64."""
    given = operands.theirs or {}
    index = jnp.arange(shape.seq_len)
    visible = jnp.ones((shape.seq_len, shape.seq_len), bool)
    if shape.is_causal:
        visible &= index[:, None] >= index
    if "mask" in given:
        visible &= given["mask"][-1, -1]
    if shape.option == RAGGED:
        visible &= (index[:, None] < shape.lengths[-1]) & (index < shape.lengths[-1])

    with measure.float64_enabled():
        bias = kept = None
        if shape.option == BIAS:
            bias = given["bias"][0, -1]
        elif shape.option == BIAS_GRADIENT:
            bias = operands.differentiated[3][0, -1]
        elif shape.option == ALIBI:
            bias = alibi_bias(alibi_slopes(shape)[-1].astype(jnp.float64), shape.seq_len)
        elif shape.option == DROPOUT:
            seeds = _dropout.make_seeds(operands.ours["dropout_rng"], shape.batch, shape.num_heads)
            kept = _dropout.keep(seeds[-1:, -1:], DROPOUT_RATE, shape.seq_len, shape.seq_len)[0, 0]

        def head(sequence: int) -> dict[str, jax.Array]:
            q, k, v, dout = (x[sequence, :, -1] for x in (*operands.differentiated[:3], operands.dout))
            return _option_reference(
                q, k, v, dout, bias, visible, kept, bias_gradient=shape.option == BIAS_GRADIENT
            )

        expected = head(-1)
        if shape.option == BIAS_GRADIENT:  # all sequences share a head's bias
            for sequence in range(shape.batch - 1):
                expected["dbias"] += head(sequence)["dbias"]
        return {name: np.asarray(x) for name, x in expected.items()}


@functools.partial(jax.jit, static_argnames="bias_gradient")
def _option_reference(q, k, v, dout, bias, visible, kept, *, bias_gradient: bool):
    q, k, v, dout = (x.astype(jnp.float64) for x in (q, k, v, dout))
    scale = q.shape[-1] ** -0.5
    # Works on blocks of rows, so that each matrix has at most 128 MB.
    num_blocks = next(n for n in range(1, len(q) + 1) if len(q) % n == 0 and len(q) // n * len(k) <= 2**24)

    def rows(sums, operands):
        dk, dv = sums
        q, dout, bias, visible, kept = operands
        s = scale * (q @ k.T)
        if bias is not None:
            s += bias.astype(s.dtype)
        s = jnp.where(visible, s, -jnp.inf)
        p = jnp.where(visible.any(-1, keepdims=True), jax.nn.softmax(s, axis=-1), 0)  # 0 beyond the lengths
        factor = 1.0 if kept is None else kept / (1 - DROPOUT_RATE)
        out = (p * factor) @ v
        ds = p * (factor * (dout @ v.T) - jnp.sum(dout * out, axis=-1, keepdims=True))
        results = {"out": out, "dq": scale * (ds @ k)} | ({"dbias": ds} if bias_gradient else {})
        return (dk + scale * (ds.T @ q), dv + (p * factor).T @ dout), results

    def blocks(x):
        return x.reshape(num_blocks, -1, *x.shape[1:])

    operands = jax.tree.map(blocks, (q, dout, bias, visible, kept))
    (dk, dv), results = jax.lax.scan(rows, (jnp.zeros_like(k), jnp.zeros_like(v)), operands)
    return {name: x.reshape(-1, x.shape[-1]) for name, x in results.items()} | {"dk": dk, "dv": dv}


# ---- Programs ---------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Programs:
    """The compiled programs of one implementation, or the error in place of one that does not compile."""

    forward: jax.stages.Compiled | Exception
    residuals: jax.stages.Compiled | Exception  # q, k, v -> out, pullback
    backward: jax.stages.Compiled | Exception  # pullback, dout -> dq, dk, dv


def inputs(shape: Shape) -> Inputs:
    """Random normal q, k, v and dout, and the arguments that the option adds."""
    keys = jax.random.split(jax.random.key(0), 4)
    heads = (shape.num_heads, shape.kv_heads, shape.kv_heads, shape.num_heads)
    sizes = [(shape.batch, shape.seq_len, n, shape.head_dim) for n in heads]
    q, k, v, dout = map(jax.random.normal, keys, sizes, [jnp.dtype(shape.dtype)] * 4)
    ours, theirs = option_arguments(shape)
    if shape.option == BIAS_GRADIENT:
        return Inputs((q, k, v, ours["bias"]), {}, {}, dout)
    return Inputs((q, k, v), ours, None if shape.way else theirs, dout)


def compile_programs(names: Sequence[str], shape: Shape) -> dict[str, Programs]:
    """Traces the implementations in turn and compiles all of them at once, in threads."""

    def abstract(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype)

    def with_pullback(attention: Callable, differentiated: tuple, others: dict) -> tuple[jax.Array, Callable]:
        return jax.vjp(functools.partial(attention, **others), *differentiated)

    operands = jax.eval_shape(functools.partial(inputs, shape))
    lowered: dict[str, list[jax.stages.Lowered | Exception]] = {}
    with jax.default_matmul_precision(shape.precision):
        for name in names:
            attention, others = implementation(name, shape), operands.others(name)
            try:
                forward = jax.jit(attention).lower(*operands.differentiated, **others)
            except Exception as error:  # not supported, whatever the error's type
                forward = error
            try:
                traced = jax.jit(functools.partial(with_pullback, attention))
                residuals = traced.lower(operands.differentiated, others)
                out, pullback = jax.tree.map(abstract, residuals.out_info)
                backward = jax.jit(lambda pullback, dout: pullback(dout)).lower(pullback, out)
            except Exception as error:
                residuals = backward = error
            lowered[name] = [forward, residuals, backward]

    def compiled(program: jax.stages.Lowered | Exception) -> jax.stages.Compiled | Exception:
        if isinstance(program, Exception):
            return program
        try:
            return program.compile()
        except Exception as error:
            return error

    with concurrent.futures.ThreadPoolExecutor() as pool:
        started = {name: [pool.submit(compiled, one) for one in three] for name, three in lowered.items()}
        return {name: Programs(*(one.result() for one in three)) for name, three in started.items()}


def compile_training_step(name: str, shape: Shape) -> measure.Json:
    """The memory of forward and backward in one program, in bytes."""
    attention = implementation(name, shape)
    try:
        step = jax.jit(lambda q, k, v, dout: jax.vjp(attention, q, k, v)[1](dout))
        operands = jax.eval_shape(functools.partial(inputs, shape))
        lowered = step.lower(*operands.differentiated, operands.dout)
        return {"bytes": measure.program_bytes(lowered.compile())}
    except Exception as error:
        return {"error": measure.reason(error)}


# ---- One shape --------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Timer:
    """How long to measure, and when to stop."""

    rounds: int
    warmup: float
    duration: float
    deadline: float
    asynchronous: bool

    def __call__(self, calls: dict[str, Callable[[], Any]]) -> dict[str, measure.Json]:
        return measure.time_interleaved(
            calls,
            rounds=self.rounds,
            warmup=self.warmup,
            duration=self.duration,
            asynchronous=self.asynchronous,
        )

    def is_over(self) -> bool:
        return time.monotonic() > self.deadline


def run_shape(
    shape: Shape, names: Sequence[str], directions: Sequence[str], timer: Timer
) -> list[measure.Json]:
    """Checks and times one shape; returns a cell for each direction."""
    if shape.option == BIAS_GRADIENT:  # its forward pass is that of BIAS, another shape
        directions = [direction for direction in directions if direction == "backward"]
    if not directions:
        return []
    operands = inputs(shape)
    if operands.theirs is None:
        names = [name for name in names if name == OURS]
    expected = reference(shape, operands)
    programs = compile_programs(names, shape)
    return [run_direction(shape, direction, programs, operands, expected, timer) for direction in directions]


def reference(shape: Shape, operands: Inputs) -> dict[str, np.ndarray]:
    """Output and gradients of the last head of the last sequence, which a wrong offset misses, in float64."""
    if shape.option is not None:
        return option_reference(shape, operands)
    return plain_reference(shape, *operands.differentiated, operands.dout)


def plain_reference(
    shape: Shape, q: jax.Array, k: jax.Array, v: jax.Array, dout: jax.Array
) -> dict[str, np.ndarray]:
    """The same without an option."""
    group = shape.num_heads // shape.kv_heads
    return measure.reference_head(
        q[-1, :, -group:],
        k[-1, :, -1],
        v[-1, :, -1],
        dout[-1, :, -group:],
        is_causal=shape.is_causal,
        window=shape.window,
    )


def run_direction(
    shape: Shape,
    direction: str,
    programs: dict[str, Programs],
    operands: Inputs,
    expected: dict[str, np.ndarray],
    timer: Timer,
) -> measure.Json:
    """Checks each implementation once, then times them in turn; an error counts as a result, too."""
    results: dict[str, measure.Json] = {name: {} for name in programs}
    calls: dict[str, Callable[[], Any]] = {}
    for name, program in programs.items():
        try:
            compiled = usable(program.forward if direction == "forward" else program.backward)
            results[name]["bytes"] = measure.program_bytes(compiled)
            if direction == "forward":
                call = functools.partial(compiled, *operands.differentiated, **operands.others(name))
                got = {"out": jax.block_until_ready(call())}
            else:
                _, pullback = usable(program.residuals)(operands.differentiated, operands.others(name))
                call = functools.partial(compiled, pullback, operands.dout)
                gradients = ("dq", "dk", "dv", "dbias")[: len(operands.differentiated)]
                got = dict(zip(gradients, jax.block_until_ready(call()), strict=True))
                del pullback
            results[name] |= judge(shape, got, expected)
            del got
            if shape.section == "long" and not timer.asynchronous:
                results[name]["resident_growth"] = measure.resident_growth(call)
            calls[name] = call
        except Exception as error:  # not supported or out of memory: continue with the others
            results[name]["error"] = measure.reason(error)
    flops = shape.flops(direction)
    for name, timing in timer(calls).items():
        results[name] |= timing
        if "ms" in timing:
            results[name]["tflops"] = flops / timing["ms"] / 1e9
    speeds = {name: result["tflops"] for name, result in results.items() if "tflops" in result}
    ours = speeds.pop(OURS, None)
    ratio = {name: ours / speed for name, speed in speeds.items()} if ours else {}
    return dataclasses.asdict(shape) | {
        "direction": direction,
        "flops": flops,
        "results": results,
        "ratio": ratio,
    }


def usable(program: jax.stages.Compiled | Exception) -> jax.stages.Compiled:
    """Returns the program, or raises its error."""
    if isinstance(program, Exception):
        raise program
    return program


def judge(shape: Shape, got: dict[str, jax.Array], expected: dict[str, np.ndarray]) -> measure.Json:
    """The errors in the last head of the last sequence, and whether they are within tolerance."""
    errors = errors_of(shape, got, expected)
    dtype = shape.dtype if shape.way in (None, PORTABLE) else shape.way
    kind, limit = measure.tolerance(dtype, shape.precision, shape.seq_len)
    return {"errors": errors, "correct": all(error[kind] <= limit for error in errors.values())}  # NaN is not


def errors_of(
    shape: Shape, got: dict[str, jax.Array], expected: dict[str, np.ndarray]
) -> dict[str, measure.Json]:
    """The errors in the last head of the last sequence."""
    group = shape.num_heads // shape.kv_heads
    heads = {"out": group, "dq": group, "dk": 1, "dv": 1}
    errors = {}
    for name, value in got.items():
        head = value[0, -1] if name == "dbias" else value[-1, :, -heads[name] :]
        head = head.reshape(expected[name].shape)
        errors[name] = measure.compare(head, expected[name])
    return errors


def matmul_ceiling(timer: Timer, size: int = 8192) -> measure.Json:
    """The speed of one large bfloat16 matrix product, a ceiling for this device at its present power limit."""
    a, b = jax.random.normal(jax.random.key(0), (2, size, size), jnp.bfloat16)
    product = jax.jit(jnp.matmul).lower(a, b).compile()
    result = timer({"matmul": lambda: product(a, b)})["matmul"]
    if "ms" in result:
        result["tflops"] = 2 * size**3 / result["ms"] / 1e9
    return result | {"size": size, "dtype": "bfloat16"}


# ---- Accuracy ---------------------------------------------------------------------------------------------

TF32 = "xla, tf32"  # one product of numbers with 11 bits: a baseline for float32
RESULTS_OF_STEP = ("out", "dq", "dk", "dv")
DRAWS = 6  # of the inputs: the error of the worst row differs by half from draw to draw


def compared_in_accuracy(names: Sequence[str], shape: Shape) -> list[str]:
    """Of the implementations, those that take the dtype, and the baseline."""
    if shape.dtype != "float32":
        return list(names)
    return [name for name in names if name != "cudnn"] + ([TF32] if "xla" in names else [])


def compile_results(name: str, shape: Shape) -> jax.stages.Compiled | Exception:
    """The program q, k, v, dout -> out, dq, dk, dv, or the error in place of one that does not compile."""
    attention = implementation("xla" if name == TF32 else name, shape)
    precision = {OURS: shape.precision, TF32: "tensorfloat32"}.get(name, "highest")

    def results(q: jax.Array, k: jax.Array, v: jax.Array, dout: jax.Array) -> tuple[jax.Array, ...]:
        out, pullback = jax.vjp(attention, q, k, v)
        return out, *pullback(dout)

    try:
        operands = jax.eval_shape(functools.partial(inputs, shape))
        with jax.default_matmul_precision(precision):
            return jax.jit(results).lower(*operands.differentiated, operands.dout).compile()
    except Exception as error:  # not supported, whatever the error's type
        return error


def measure_accuracy(shape: Shape, programs: dict[str, jax.stages.Compiled | Exception]) -> measure.Json:
    """The errors of each implementation with one distribution of the inputs: the mean over some draws.

    Correct is what is finite.
    """
    draw = measure.DISTRIBUTIONS[shape.option]
    size = (4, shape.batch, shape.seq_len, shape.num_heads, shape.head_dim)
    of_draws: dict[str, list[measure.Json]] = {name: [] for name in programs}
    results: dict[str, measure.Json] = {}
    for seed in range(DRAWS):
        operands = tuple(draw(jax.random.key(seed), size).astype(shape.dtype))
        expected = plain_reference(shape, *operands)
        for name in of_draws.keys() - results.keys():
            try:
                got = jax.block_until_ready(usable(programs[name])(*operands))
                errors = errors_of(shape, dict(zip(RESULTS_OF_STEP, got, strict=True)), expected)
                of_draws[name].append(errors)
            except Exception as error:  # out of memory: continue with the others
                results[name] = {"error": measure.reason(error)}
    for name in of_draws.keys() - results.keys():
        errors = jax.tree.map(lambda *values: float(np.mean(values)), *of_draws[name])
        is_finite = all(np.isfinite(error["max"]) for error in errors.values())
        results[name] = {"errors": errors, "correct": is_finite}
    return dataclasses.asdict(shape) | {"results": {name: results[name] for name in programs}}


# ---- Report -----------------------------------------------------------------------------------------------

_COLUMNS = ("shape", "direction", OURS, "cudnn", "xla", "vs cudnn", "vs xla", "error", "check")


def table_header(unit: str) -> str:
    """The heading of the table; `table_row` makes its rows."""
    return f"\nSpeed in {unit}\n| " + " | ".join(_COLUMNS) + " |\n|" + " --- |" * len(_COLUMNS)


def shape_of(cell: measure.Json) -> Shape:
    return Shape(**{field.name: cell[field.name] for field in dataclasses.fields(Shape)})


def table_row(cell: measure.Json, unit: str) -> str:
    """One row of the table: each implementation's speed, ours over theirs, and our largest relative error."""

    def speed(name: str) -> str:
        result = cell["results"].get(name)
        if result is None:
            return "-"
        if "tflops" not in result:
            return "failed"
        return f"{result['tflops'] * (1000 if unit == 'GFLOP/s' else 1):.4g}"

    def ratio(name: str) -> str:
        return f"{cell['ratio'][name]:.2f}" if name in cell["ratio"] else "-"

    ours = cell["results"].get(OURS, {})
    error = max((error["relative"] for error in ours.get("errors", {}).values()), default=float("nan"))
    verdict = "ok" if ours.get("correct") else "FAILED"
    return (
        f"| {shape_of(cell).describe()} | {cell['direction']} | {speed(OURS)} | {speed('cudnn')} | {speed('xla')} "
        f"| {ratio('cudnn')} | {ratio('xla')} | {error:.1e} | {verdict} |"
    )


ACCURACY_NAMES = (OURS, "cudnn", "xla", TF32)


def accuracy_header() -> str:
    """The heading of the table of errors; `accuracy_rows` makes its rows."""
    columns = ("shape", "", *ACCURACY_NAMES)
    return f"\nError / of the worst row / largest\n| {' | '.join(columns)} |\n|{' --- |' * len(columns)}"


def accuracy_rows(cell: measure.Json) -> str:
    """A row for each result of a cell, with the errors of each implementation."""

    def errors(name: str, result: str) -> str:
        of_name = cell["results"].get(name)
        if of_name is None:
            return "-"
        if "errors" not in of_name:
            return "failed"
        error = of_name["errors"][result]
        return " / ".join(f"{error[kind]:.1e}" for kind in ("relative", "worst_row", "max"))

    where = shape_of(cell).describe()
    return "\n".join(
        f"| {where} | {result} | {' | '.join(errors(name, result) for name in ACCURACY_NAMES)} |"
        for result in RESULTS_OF_STEP
    )


def megabytes(number: int | None) -> str:
    return "-" if number is None else f"{number / 2**20:,.0f} MiB"


def failures(cells: Sequence[measure.Json]) -> list[str]:
    """The distinct reasons for which implementations have no figure, with their shapes."""
    reasons: dict[tuple[str, str], dict[str, None]] = {}
    for cell in cells:
        for name, result in cell["results"].items():
            if "error" in result:
                where = f"{cell['option'] or cell['section']} T={cell['seq_len']} H={cell['head_dim']}"
                reasons.setdefault((name, result["error"]), {})[where] = None
    return [f"{name}: {error} [{', '.join(places)}]" for (name, error), places in reasons.items()]


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--platform", choices=("gpu", "cpu"), help="default: gpu if there is one")
    parser.add_argument("--only", choices=DIRECTIONS, help="one direction")
    parser.add_argument(
        "--section", nargs="+", metavar="NAME", help="standard, float32, long, options, memory, accuracy, ..."
    )
    parser.add_argument(
        "--option",
        metavar="NAME",
        help="in the sections options and accuracy: options and inputs whose name contains NAME",
    )
    parser.add_argument("--head-dim", type=int, nargs="+", metavar="H")
    parser.add_argument("--seq-len", type=int, nargs="+", metavar="T")
    parser.add_argument("--mask", choices=("full", "causal"))
    parser.add_argument("--peers", help="comma-separated list from cudnn,xla; '' for none")
    parser.add_argument("--quick", action="store_true", help="one shape for each section, shorter slices")
    parser.add_argument("--rounds", type=int, help="timed slices of each program; 2 on a GPU, 3 on a CPU")
    parser.add_argument("--warmup-ms", type=float, default=100, help="untimed calls before each slice (100)")
    parser.add_argument("--slice-ms", type=float, default=150, help="timed calls of each slice (150)")
    parser.add_argument(
        "--minutes", type=float, default=11, help="shapes not begun by then are left out (11)"
    )
    parser.add_argument(
        "--output", type=pathlib.Path, help="JSON file; for a full sweep results/<device>.json"
    )
    parser.add_argument("--no-plot", action="store_true")
    return parser.parse_args(arguments)


def chosen(shapes: Iterator[Shape], options: argparse.Namespace) -> list[Shape]:
    """The shapes that pass the filters."""
    kept = [
        shape
        for shape in shapes
        if (not options.section or shape.section in options.section)
        and (not options.option or options.option in (shape.option or ""))
        and (not options.head_dim or shape.head_dim in options.head_dim)
        and (not options.seq_len or shape.seq_len in options.seq_len)
        and (not options.mask or shape.is_causal == (options.mask == "causal"))
    ]
    if options.quick:
        middle = [shape for shape in kept if (shape.head_dim, shape.seq_len) in ((128, 4096), (64, 2048))]
        kept = list({shape.section: shape for shape in reversed(middle or kept)}.values())
    return kept


class Report:
    """The figures so far. They are saved after each shape, so an interrupted run loses at most one."""

    def __init__(self, facts: measure.Json, timer: Timer, output: pathlib.Path | None):
        self.output = output
        self.start = time.monotonic()
        self.cells: list[measure.Json] = []
        self.memory: list[measure.Json] = []
        self.accuracy: list[measure.Json] = []
        self.left_out: list[str] = []
        self.extra: measure.Json = {
            "environment": facts,
            "settings": {"rounds": timer.rounds, "warmup_s": timer.warmup, "slice_s": timer.duration},
        }

    def save(self) -> None:
        seconds = round(time.monotonic() - self.start, 1)
        figures = self.extra | {
            "seconds": seconds, "left_out": self.left_out, "cells": self.cells, "memory": self.memory,
            "accuracy": self.accuracy,
        }  # fmt: skip
        measure.save(figures, self.output)

    def wrong(self) -> list[measure.Json]:
        """The cells in which jax_flash failed or was not close to the reference."""
        cells = self.cells + self.accuracy
        return [cell for cell in cells if not cell["results"].get(OURS, {}).get("correct")]

    def shortcomings(self) -> list[str]:
        """The cells in which jax_flash is slower than an alternative or has no figure."""
        return measure.shortcomings(
            (f"{shape_of(cell).describe()}, {cell['direction']}", cell["results"]) for cell in self.cells
        )

    def is_good(self) -> bool:
        return not (self.wrong() or self.left_out or self.shortcomings())

    def summary(self) -> str:
        """Details of the long sequences, every reason for a missing figure, and the figures below 1."""
        lines = []
        for cell in self.cells:
            if cell["section"] == "long":
                precision = f"{cell['precision']} " if cell["precision"] else ""
                lines.append(f"{cell['seq_len']} keys, {cell['dtype']}, {precision}{cell['direction']}:")
                lines += [f"  {name}: {_describe(result)}" for name, result in cell["results"].items()]
        lines += [f"no figure for {line}" for line in failures(self.cells + self.memory + self.accuracy)]
        lines += [f"left out: {line}" for line in self.left_out]
        lines += (shortcomings := self.shortcomings())
        seconds = time.monotonic() - self.start
        number = len(self.cells) + len(self.accuracy)
        verdict = f"{len(self.wrong())} wrong or failed, {len(shortcomings)} below 1 or without a figure"
        lines.append(f"{number} cells in {seconds:.0f} s, {verdict}")
        return "\n".join(lines)


def _describe(result: measure.Json) -> str:
    parts = [f"{result['ms']:.4g} ms" if "ms" in result else result.get("error", "not run")]
    parts.append(f"buffers {megabytes(result.get('bytes'))}")
    if result.get("resident_growth") is not None:
        parts.append(f"process grew by {megabytes(result['resident_growth'])}")
    return ", ".join(parts)


def sweep(
    report: Report, shapes: Sequence[Shape], names: Sequence[str], directions: Sequence[str], timer: Timer
) -> None:
    """Checks and times each shape and prints a row of the table for each cell."""
    unit = "TFLOP/s" if timer.asynchronous else "GFLOP/s"
    print(table_header(unit), flush=True)

    def run(shape: Shape) -> list[measure.Json]:
        wide = measure.float64_enabled() if shape.dtype == "float64" else contextlib.nullcontext()
        with wide, kernels_of(shape.way):
            return run_shape(shape, names, directions, timer)

    for cells in measure.attempts(shapes, Shape.describe, run, report.left_out, timer.is_over):
        report.cells += cells
        print("\n".join(table_row(cell, unit) for cell in cells), flush=True)
        report.save()


def memory_sweep(report: Report, shapes: Sequence[Shape], names: Sequence[str], timer: Timer) -> None:
    """Compiles forward and backward as one program for each shape and prints its memory."""
    print("\nMemory of forward and backward in one program", flush=True)
    for shape in shapes:
        if timer.is_over():
            report.left_out.append(f"memory of {shape.describe()}: out of time")
            continue
        with concurrent.futures.ThreadPoolExecutor() as pool:
            steps = pool.map(functools.partial(compile_training_step, shape=shape), names)
            results = dict(zip(names, steps, strict=True))
        report.memory.append(dataclasses.asdict(shape) | {"results": results})
        sizes = ", ".join(f"{name} {megabytes(result.get('bytes'))}" for name, result in results.items())
        print(f"{shape.describe()}: {sizes}", flush=True)
        report.save()


def accuracy_sweep(report: Report, shapes: Sequence[Shape], names: Sequence[str], timer: Timer) -> None:
    """Prints the errors of each shape. A program serves all distributions of the inputs."""
    print(accuracy_header(), flush=True)
    for plain, group in itertools.groupby(shapes, lambda shape: dataclasses.replace(shape, option=None)):
        chosen_names = compared_in_accuracy(names, plain)
        with concurrent.futures.ThreadPoolExecutor() as pool:
            compiled = pool.map(functools.partial(compile_results, shape=plain), chosen_names)
            programs = dict(zip(chosen_names, compiled, strict=True))
        run = functools.partial(measure_accuracy, programs=programs)
        for cell in measure.attempts(
            group, lambda shape: f"accuracy of {shape.describe()}", run, report.left_out, timer.is_over
        ):
            report.accuracy.append(cell)
            print(accuracy_rows(cell), flush=True)
        report.save()


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    if options.platform == "cpu":
        jax.config.update("jax_platforms", "cpu")
    on_gpu = jax.devices()[0].platform == "gpu"
    if options.platform == "gpu" and not on_gpu:
        print("--platform gpu: JAX found no GPU. Omit --platform to measure the CPU.", file=sys.stderr)
        return 2
    facts = measure.environment()
    peers = ["cudnn", "xla"] if on_gpu else ["xla"]
    if options.peers is not None:
        peers = [name for name in options.peers.split(",") if name]
    names = [OURS, *peers]
    directions = (options.only,) if options.only else DIRECTIONS
    timer = Timer(
        rounds=options.rounds or (1 if options.quick else 2 if on_gpu else 3),
        warmup=options.warmup_ms / 1e3,
        duration=options.slice_ms / 1e3,
        deadline=time.monotonic() + 60 * options.minutes,
        asynchronous=on_gpu,
    )
    shapes = chosen(gpu_shapes() if on_gpu else cpu_shapes(), options)
    memory = [] if options.only else chosen(memory_shapes(on_gpu), options)
    accuracy = [] if options.only else chosen(accuracy_shapes(on_gpu), options)
    if not (shapes or memory or accuracy):
        print("No shape passes the filters.", file=sys.stderr)
        return 2
    whole = options.peers is None and not any(
        (
            options.only,
            options.section,
            options.option,
            options.head_dim,
            options.seq_len,
            options.mask,
            options.quick,
        )
    )
    output = options.output or (RESULTS / f"{measure.device_slug(facts)}.json" if whole else None)
    report = Report(facts, timer, output)

    print("  ".join(f"{name} {value}" for name, value in facts.items() if value is not None), flush=True)
    if on_gpu and whole:
        report.extra["matmul"] = ceiling = matmul_ceiling(timer)
        print(f"matrix product 8192^3: {ceiling.get('tflops', float('nan')):.0f} TFLOP/s", flush=True)
    if shapes:
        sweep(report, shapes, names, directions, timer)
    if memory:
        memory_sweep(report, memory, names, timer)
    if accuracy:
        accuracy_sweep(report, accuracy, names, timer)
    report.save()
    if output is not None:
        print(f"figures: {output}", flush=True)
        if not options.no_plot:
            try:
                import plot

                print(f"plot: {plot.draw(output)}", flush=True)
            except ImportError as error:
                print(f"no plot: {error}", flush=True)
    print("\n" + report.summary(), flush=True)
    return 0 if report.is_good() else 1


if __name__ == "__main__":
    sys.exit(main())

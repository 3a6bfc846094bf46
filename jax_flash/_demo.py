"""One case of attention: its inputs, its check against float64, its figures beside those of XLA's attention."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import pathlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

import jax_flash

from . import _reference
from ._measure import Progress, Status, measure
from ._options import AttentionOptions

TENSORS = ("out", "dq", "dk", "dv")
INITS = {"normal": jax.random.normal, "uniform": jax.random.uniform}  # and "ones"

_REFERENCE_SCORES = 2**24  # of one head at a time: 128 MiB in float64
_SHOWN_GRADIENTS = 10


@dataclasses.dataclass(frozen=True)
class Case:
    """One attention problem, with as many keys as queries."""

    dtype: str
    batch: int
    seq_len: int
    heads: int
    head_dim: int
    is_causal: bool = False
    init: str | np.ndarray = "normal"  # the array: q, k and v, [3, batch, length, heads, head dim]

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.batch, self.seq_len, self.heads, self.head_dim

    @property
    def mask(self) -> str:
        return "causal" if self.is_causal else "full"

    def describe(self, length: int | str) -> str:
        """Init, dtype and sizes, of this length or of a symbol for it."""
        init = self.init if isinstance(self.init, str) else "given"
        return f"{init} {self.dtype} [{self.batch}, {length}, {self.heads}, {self.head_dim}]"

    def operands(self) -> tuple[jax.Array, ...]:
        """The arrays q, k, v and dout; dout is normal, whatever q, k and v are."""
        *keys, dout_key = jax.random.split(jax.random.key(0), 4)
        dout = jax.random.normal(dout_key, self.shape, self.dtype)
        if isinstance(self.init, np.ndarray):
            return *(jnp.asarray(x, self.dtype) for x in self.init), dout
        if self.init == "ones":
            return *(jnp.ones(self.shape, self.dtype) for _ in keys), dout
        return *(INITS[self.init](key, self.shape, self.dtype) for key in keys), dout


def load(path: pathlib.Path) -> np.ndarray:
    """Q, K and V of a .npy file, as [3, batch, length, heads, head dim].

    Raises:
      OSError: the file cannot be opened.
      ValueError: it holds something else, which the message names.
    """
    expected = f"{path} must hold Q, K and V stacked in one array of floats, [3, T, N, H] or [3, T, H]"
    try:
        array = np.load(path, allow_pickle=False)
    except (EOFError, ValueError) as error:
        raise ValueError(f"{expected}, and is no such file: {error}") from None
    if not isinstance(array, np.ndarray) or not np.issubdtype(array.dtype, np.floating):
        raise ValueError(f"{expected}, got {getattr(array, 'dtype', 'an archive of several arrays')}")
    if array.ndim not in (3, 4) or array.shape[0] != 3 or array.size == 0:
        raise ValueError(f"{expected}, got {list(array.shape)}")
    with_heads = array if array.ndim == 4 else array[:, :, None]
    return with_heads[:, None]


def ours(case: Case) -> Callable[..., jax.Array]:
    """Our attention of q, k and v."""
    return functools.partial(jax_flash.flash_attention, is_causal=case.is_causal)


def xla(case: Case) -> Callable[..., jax.Array]:
    """XLA's attention of q, k and v."""
    return functools.partial(jax.nn.dot_product_attention, is_causal=case.is_causal, implementation="xla")


def _forward(attention: Callable, q, k, v, dout):
    return (attention(q, k, v),)


def _forward_and_backward(attention: Callable, q, k, v, dout):
    out, vjp = jax.vjp(attention, q, k, v)
    return out, *vjp(dout)


# Functions of an attention, q, k, v and dout; what they return are the first of TENSORS.
PASSES = {"forward": _forward, "forward + backward": _forward_and_backward}


@functools.partial(jax.jit, static_argnames="is_causal")
def _exact(q, k, v, dout, is_causal):
    """TENSORS in float64, and what rounding the output does to the gradients, of a unit roundoff of 1.

    The backward pass gets the output as the forward pass rounded it, and with it delta = rowsum(dout * out), beside
    which dp may be large. An error of delta acts as a cotangent of the log-sum-exp does; here it is as large as that
    of a sum of products whose errors are independent.

    Works on some rows of one head at a time: few scores are written at once.
    """
    batch, length, heads, head_dim = q.shape
    rows = min(length, math.ceil(_REFERENCE_SCORES / length))
    blocks = math.ceil(length / rows)

    def one_head(arrays):
        q, k, v, dout = (x.astype(jnp.float64)[:, None] for x in arrays)  # [T, 1, H]
        # Rows of zeros fill the last block: with dout zero, they add nothing to dk and dv.
        q, dout = (jnp.pad(x, ((0, blocks * rows - length), (0, 0), (0, 0))) for x in (q, dout))

        def one_block(sums, block):
            start, q, dout = block
            attention = functools.partial(
                _reference.attention, is_causal=is_causal, query_offset=start, return_residual=True
            )
            (out, lse), vjp = jax.vjp(attention, q, k, v)
            dq, *of_keys = vjp((dout, jnp.zeros_like(lse)))
            error_of_delta = jnp.sqrt(jnp.sum((dout * out) ** 2, axis=-1))
            dq_error, *of_keys_error = vjp((jnp.zeros_like(dout), error_of_delta))
            sums = jax.tree.map(jnp.add, sums, [*of_keys, *of_keys_error])
            return sums, (out, dq, dq_error)

        by_block = [x.reshape(blocks, rows, 1, head_dim) for x in (q, dout)]
        starts = rows * jnp.arange(blocks, dtype=jnp.int32)
        of_keys, of_queries = jax.lax.scan(one_block, [jnp.zeros_like(k)] * 4, (starts, *by_block))
        out, dq, dq_error = (x.reshape(-1, head_dim)[:length] for x in of_queries)
        dk, dv, dk_error, dv_error = (x[:, 0] for x in of_keys)
        return (out, dq, dk, dv), (jnp.zeros_like(out), dq_error, dk_error, dv_error)

    def as_before(x):
        return jnp.swapaxes(x.reshape(batch, heads, length, head_dim), 1, 2)

    by_head = [jnp.swapaxes(x, 1, 2).reshape(-1, length, head_dim) for x in (q, k, v, dout)]
    exact, rounding = jax.lax.map(one_head, by_head)
    return jax.tree.map(as_before, exact), tuple(jnp.max(jnp.abs(x)) for x in rounding)


def _max_error(got: jax.Array, exact: jax.Array) -> float:
    """The largest difference; NaN where either is NaN."""
    return float(jnp.max(jnp.abs(got.astype(jnp.float64) - exact)))


def _limit(exact: jax.Array, rounding: float, dtype: np.dtype, peer: float, platform: str) -> float:
    """The largest error that passes.

    Args:
      exact: the exact result.
      rounding: what `_exact` has of it.
      dtype: of the result that is checked.
      peer: the error of XLA's attention in the same dtype.
      platform: where it ran.
    """
    largest = float(jnp.max(jnp.abs(exact)))
    rounds_products = (
        platform == "gpu" and AttentionOptions.resolve(exact.shape[-1]).precision == 0
    )  # to TF32
    if dtype == jnp.float64 or (dtype == jnp.float32 and not rounds_products):
        unit = 1e-14 if dtype == jnp.float64 else 2e-6
        return unit * math.sqrt(exact.shape[1]) * max(1.0, largest)
    eps = 2**-10 if dtype == jnp.float32 else float(jnp.finfo(dtype).eps)
    return max(2 * peer, eps * float(rounding), eps * largest) + 1e-6


class CaseError(Exception):
    """Our attention could not be run."""


@dataclasses.dataclass
class Comparison:
    """A case that was run."""

    lines: list[str]  # of the table, without its head
    notes: list[str]  # sentences below the table
    passed: bool
    results: tuple[jax.Array, ...]  # as TENSORS, by our attention
    exact: tuple[jax.Array, ...]  # the same in float64


TABLE_HEAD = (
    f"{'':27} {'jax_flash':>19} {'XLA':>19}\n"
    f"{'':27} {'ms':>9} {'MiB':>9} {'ms':>9} {'MiB':>9}   largest error against float64"
)
STEPS = 1 + 2 * len(PASSES)  # of the progress of one comparison


def compare(case: Case, device: jax.Device, progress: Progress) -> Comparison:
    """Runs a case forward and backward, ours and XLA's, and checks ours.

    Raises:
      CaseError: our attention could not be run.
    """
    progress(f"{case.mask}: reference in float64")
    operands = case.operands()
    exact, rounding = jax.block_until_ready(_exact(*operands, is_causal=case.is_causal))
    lines, notes, passed = [], [], True
    for name, function in PASSES.items():
        progress(f"{case.mask}: {name}, jax_flash")
        own = measure(functools.partial(function, ours(case)), lambda: operands, device)
        if own.status is not Status.MEASURED:
            raise CaseError(f"{case.mask} {name}: {own.reason or str(own).strip()}")
        progress(f"{case.mask}: {name}, XLA")
        peer = measure(functools.partial(function, xla(case)), lambda: operands, device)
        if peer.reason:
            notes.append(f"XLA's attention, {case.mask} {name}: {peer.reason}")
        peers = peer.results or (None,) * len(TENSORS)
        errors = []
        for tensor, got, theirs, right, rounded in zip(
            TENSORS, own.results, peers, exact, rounding, strict=False
        ):
            peer_error = 0.0 if theirs is None else _max_error(theirs, right)
            error, limit = (
                _max_error(got, right),
                _limit(right, rounded, got.dtype, peer_error, device.platform),
            )
            ok = error <= limit  # False for NaN
            passed = passed and ok
            errors.append(f"{tensor} {error:.1e}" + ("" if ok else f" FAILED (limit {limit:.1e})"))
        lines.append(f"{case.mask:7} {name:19} {own} {peer}   {', '.join(errors)}")
    return Comparison(lines, notes, passed, own.results, exact)


def show(case: Case, comparison: Comparison) -> str:
    """Q, K, V and the output, and the first values of each gradient beside the reference's."""
    options = np.get_printoptions() | {"precision": 4, "suppress": True, "linewidth": 100}
    is_small = math.prod(case.shape) <= options["threshold"]
    indices = np.ndindex(case.batch, case.heads) if is_small else [(0, 0)]
    parts = []
    if not is_small:
        parts.append(f"The corners of one of {case.batch * case.heads} heads:\n")
    arrays = zip(("Q", "K", "V", "out"), (*case.operands()[:3], comparison.results[0]), strict=True)
    arrays = [(name, np.asarray(x).astype(np.float64)) for name, x in arrays]
    with np.printoptions(**options):
        for batch, head in indices:
            for name, x in arrays:
                parts.append(f"{name}[{batch}, :, {head}, :] =\n{x[batch, :, head]}\n")
    for name, got, exact in zip(
        ("dQ", "dK", "dV"), comparison.results[1:], comparison.exact[1:], strict=True
    ):
        parts.append(f"{f'{name}, its first values':28} {'jax_flash':>16} {'float64':>16} {'difference':>12}")
        for index in itertools.islice(np.ndindex(case.shape), _SHOWN_GRADIENTS):
            mine, right = float(got[index]), float(exact[index])
            parts.append(f"{f'  {list(index)}':28} {mine:16.8f} {right:16.8f} {mine - right:12.1e}")
        parts.append("")
    return "\n".join(parts)

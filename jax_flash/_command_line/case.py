"""A case of attention: its sizes, its inputs, and the programs that run on them."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

import jax_flash

TENSORS = ("out", "dq", "dk", "dv")
INITS = {
    "normal": jax.random.normal,
    "uniform": jax.random.uniform,
    "ones": lambda key, shape, dtype: jnp.ones(shape, dtype),
}


def _forward(attention: Callable, q, k, v, dout):
    return (attention(q, k, v),)


def _forward_and_backward(attention: Callable, q, k, v, dout):
    out, vjp = jax.vjp(attention, q, k, v)
    return out, *vjp(dout)


def _jax_flash(q, k, v, is_causal):
    return jax_flash.flash_attention(q, k, v, is_causal=is_causal)


def _xla(q, k, v, is_causal):
    return jax.nn.dot_product_attention(q, k, v, is_causal=is_causal, implementation="xla")


# What `Case.program` can be made of.
PASSES = {"forward": _forward, "forward + backward": _forward_and_backward}
ATTENTIONS = {"jax_flash": _jax_flash, "XLA": _xla}


@dataclasses.dataclass(frozen=True)
class Case:
    """One attention problem, with as many keys as queries."""

    dtype: str
    batch: int
    seq_len: int
    heads: int
    head_dim: int
    is_causal: bool = False
    init: str | np.ndarray = "normal"  # a name of INITS, or q, k and v as [3, *shape]

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.batch, self.seq_len, self.heads, self.head_dim

    @property
    def mask(self) -> str:
        return "causal" if self.is_causal else "full"

    def describe(self, length: int | str) -> str:
        """Returns init, dtype and shape, with this length or a symbol in the length's place."""
        init = self.init if isinstance(self.init, str) else "given"
        return f"{init} {self.dtype} [{self.batch}, {length}, {self.heads}, {self.head_dim}]"

    def operands(self) -> tuple[jax.Array, ...]:
        """Returns q, k, v and dout; dout is normal whatever `init` is."""
        *keys, dout_key = jax.random.split(jax.random.key(0), 4)
        dout = jax.random.normal(dout_key, self.shape, self.dtype)
        if isinstance(self.init, np.ndarray):
            return *(jnp.asarray(x, self.dtype) for x in self.init), dout
        return *(INITS[self.init](key, self.shape, self.dtype) for key in keys), dout

    def program(self, name: str, attention: str) -> Callable[..., tuple[jax.Array, ...]]:
        """Returns a function from q, k, v and dout to the first of TENSORS.

        Args:
          name: one of PASSES.
          attention: one of ATTENTIONS.
        """
        return functools.partial(
            PASSES[name], functools.partial(ATTENTIONS[attention], is_causal=self.is_causal)
        )


def load(path: pathlib.Path) -> np.ndarray:
    """Reads q, k and v from a .npy file, as [3, batch, length, heads, head dim].

    Raises:
      OSError: the file cannot be opened.
      ValueError: it holds something else.
    """
    expected = f"{path} must hold Q, K and V stacked in one array of floats, [3, T, N, H] or [3, T, H]"
    try:
        array = np.load(path, allow_pickle=False)
    except (EOFError, ValueError) as error:
        raise ValueError(f"{expected}; NumPy cannot read it: {error}") from None
    if not isinstance(array, np.ndarray) or not np.issubdtype(array.dtype, np.floating):
        raise ValueError(f"{expected}, got {getattr(array, 'dtype', 'an archive of several arrays')}")
    if array.ndim not in (3, 4) or array.shape[0] != 3 or array.size == 0:
        raise ValueError(f"{expected}, got {list(array.shape)}")
    with_heads = array if array.ndim == 4 else array[:, :, None]
    return with_heads[:, None]

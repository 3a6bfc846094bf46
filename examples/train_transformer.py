"""Trains a small byte-level transformer on the source code of Python's standard library, on CPU or GPU.

    python examples/train_transformer.py
    python examples/train_transformer.py --attention flax

Nothing is downloaded. `--attention` chooses the implementation of attention; the loss does not depend on it.
"""

import argparse
import functools
import pathlib
import sysconfig
import time
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jax_flash

VOCABULARY = 256  # bytes

Attention = Callable[..., jax.Array]


def jax_flash_attention(query: jax.Array, key: jax.Array, value: jax.Array, **options) -> jax.Array:
    # Not by functools.partial: newer versions of nnx pass their own is_causal.
    return jax_flash.flax.attention_fn(query, key, value, **options | {"is_causal": True})


def flax_attention(query: jax.Array, key: jax.Array, value: jax.Array, **options) -> jax.Array:
    mask = nnx.make_causal_mask(jnp.zeros(query.shape[:2]))
    return nnx.dot_product_attention(query, key, value, **options | {"mask": mask})


def jax_nn_attention(query: jax.Array, key: jax.Array, value: jax.Array, **_) -> jax.Array:
    return jax.nn.dot_product_attention(query, key, value, is_causal=True)


ATTENTION: dict[str, Attention] = {
    "jax_flash": jax_flash_attention,
    "flax": flax_attention,
    "jax.nn": jax_nn_attention,
}


class Block(nnx.Module):
    """Attention and a two-layer perceptron, each added to its input."""

    def __init__(self, width: int, num_heads: int, attention: Attention, rngs: nnx.Rngs):
        self.norm_attention = nnx.LayerNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            num_heads, width, attention_fn=attention, use_bias=False, decode=False, rngs=rngs
        )
        self.norm_mlp = nnx.LayerNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.norm_attention(x))
        return x + self.down(jax.nn.gelu(self.up(self.norm_mlp(x))))


class Transformer(nnx.Module):
    """A decoder: bytes [B, T] -> logits of the next byte [B, T, 256]."""

    def __init__(
        self, *, seq_len: int, width: int, depth: int, num_heads: int, attention: Attention, rngs: nnx.Rngs
    ):
        self.embedding = nnx.Embed(VOCABULARY, width, rngs=rngs)
        self.position = nnx.Embed(seq_len, width, rngs=rngs)
        self.blocks = nnx.List([Block(width, num_heads, attention, rngs) for _ in range(depth)])
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.head = nnx.Linear(width, VOCABULARY, rngs=rngs)

    def __call__(self, text: jax.Array) -> jax.Array:
        x = self.embedding(text) + self.position(jnp.arange(text.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss_fn(model: Transformer, text: jax.Array) -> jax.Array:
    """Mean cross-entropy, in nats, of each byte given the previous ones."""
    logits = model(text[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, text[:, 1:]).mean()


@nnx.jit
def train_step(model: Transformer, optimizer: nnx.Optimizer, text: jax.Array) -> jax.Array:
    loss, gradients = nnx.value_and_grad(loss_fn)(model, text)
    optimizer.update(model, gradients)
    return loss


@functools.cache
def read_text(limit: int = 4_000_000) -> np.ndarray:
    """The concatenated modules of the standard library."""
    folder = pathlib.Path(sysconfig.get_paths()["stdlib"])
    text = b"\n".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    return np.frombuffer(text[:limit], np.uint8)


def batches(text: np.ndarray, batch: int, length: int, seed: int) -> Iterator[jax.Array]:
    """An endless iterator over random pieces of the text, [batch, length]."""
    rng = np.random.default_rng(seed)
    while True:
        starts = rng.integers(len(text) - length, size=batch)
        yield jnp.asarray(np.stack([text[start : start + length] for start in starts]), jnp.int32)


def train(
    attention: str = "jax_flash",
    *,
    steps: int = 600,
    batch: int = 8,
    seq_len: int = 128,
    width: int = 128,
    depth: int = 2,
    num_heads: int = 4,
    learning_rate: float = 4e-3,
    report_every: int = 50,
) -> list[float]:
    """Trains a new model and returns the loss at each step."""
    model = Transformer(
        seq_len=seq_len,
        width=width,
        depth=depth,
        num_heads=num_heads,
        attention=ATTENTION[attention],
        rngs=nnx.Rngs(0),
    )
    schedule = optax.warmup_cosine_decay_schedule(0.0, learning_rate, min(20, steps // 4), steps)
    optimizer = nnx.Optimizer(model, optax.adamw(schedule, b2=0.99), wrt=nnx.Param)
    losses: list[float] = []
    start, reported = time.perf_counter(), 0
    for step, text in zip(
        range(1, steps + 1), batches(read_text(), batch, seq_len + 1, seed=0), strict=False
    ):
        losses.append(float(train_step(model, optimizer, text)))
        if report_every and (step == 1 or step % report_every == 0 or step == steps):
            recent = losses[reported:]
            speed = len(recent) * batch * seq_len / (time.perf_counter() - start)
            note = "  including compilation" if step == 1 else ""
            print(f"step {step:5d}  loss {np.mean(recent):.3f}  {speed:8.0f} tokens/s{note}", flush=True)
            start, reported = time.perf_counter(), step
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument(
        "--attention", choices=ATTENTION, default="jax_flash", help="implementation of attention"
    )
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--num-heads", type=int, default=4)
    options = parser.parse_args()
    print(
        f"{options.attention} on {jax.devices()[0].device_kind}, {len(read_text()):,} bytes of text",
        flush=True,
    )
    losses = train(**vars(options))
    print(f"loss: {losses[0]:.3f} at the first step, {np.mean(losses[-20:]):.3f} at the end")


if __name__ == "__main__":
    main()

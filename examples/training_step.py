r"""Times a training step of a decoder-only transformer with three implementations of attention.

    python examples/training_step.py  # 362 million parameters, on a GPU
    python examples/training_step.py --depth 2 --width 256 --seq-len 512 --batch 1 \
        --attention jax_flash xla

The model is a GPT in bfloat16 with grouped-query attention and head dim 128. Forward pass, backward pass and AdamW
update are one program. Only the attention differs: jax_flash, or `jax.nn` with cuDNN or XLA.
"""

import argparse
import functools
import time
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jax_flash

VOCABULARY = 32_768
HEAD_DIM = 128

Attention = Callable[..., jax.Array]

ATTENTION: dict[str, Attention] = {
    "jax_flash": jax_flash.flash_attention,
    "cudnn": functools.partial(jax.nn.dot_product_attention, implementation="cudnn"),
    "xla": functools.partial(jax.nn.dot_product_attention, implementation="xla"),
}


class Block(nn.Module):
    """Attention and a two-layer perceptron, each added to its input [B, T, width]."""

    num_kv_heads: int
    attention: Attention

    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        width = x.shape[-1]
        project = functools.partial(nn.DenseGeneral, use_bias=False, dtype=x.dtype)
        y = nn.LayerNorm(use_bias=False, dtype=x.dtype)(x)
        query = project((width // HEAD_DIM, HEAD_DIM), name="query")(y)
        key = project((self.num_kv_heads, HEAD_DIM), name="key")(y)
        value = project((self.num_kv_heads, HEAD_DIM), name="value")(y)
        y = self.attention(query, key, value, is_causal=True)
        x = x + project(width, axis=(-2, -1), name="out")(y)
        y = nn.LayerNorm(use_bias=False, dtype=x.dtype)(x)
        return x + project(width, name="down")(nn.gelu(project(4 * width, name="up")(y))), None


class Transformer(nn.Module):
    """A decoder: tokens [B, T] -> logits of the next token [B, T, VOCABULARY]."""

    width: int
    depth: int
    num_kv_heads: int
    attention: Attention

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        place = self.param("position", nn.initializers.normal(0.02), (tokens.shape[1], self.width))
        x = nn.Embed(VOCABULARY, self.width, dtype=jnp.bfloat16)(tokens) + place.astype(jnp.bfloat16)
        blocks = nn.scan(Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=self.depth)
        x, _ = blocks(self.num_kv_heads, self.attention)(x, None)
        return nn.Dense(VOCABULARY, use_bias=False, dtype=x.dtype)(
            nn.LayerNorm(use_bias=False, dtype=x.dtype)(x)
        )


def make_step(model: Transformer, optimizer: optax.GradientTransformation) -> Callable[..., Any]:
    """(params, optimizer state, tokens [B, T + 1]) -> (new params, new optimizer state, loss in nats)."""

    def loss_fn(params: Any, tokens: jax.Array) -> jax.Array:
        logits = model.apply(params, tokens[:, :-1]).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    def step(params: Any, state: Any, tokens: jax.Array) -> tuple[Any, Any, jax.Array]:
        loss, gradients = jax.value_and_grad(loss_fn)(params, tokens)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    return step


def measure(attention: str, options: argparse.Namespace) -> dict[str, float]:
    """The median step's seconds, the program's GiB, the first step's loss, and the parameter count."""
    model = Transformer(options.width, options.depth, options.num_kv_heads, ATTENTION[attention])
    optimizer = optax.adamw(1e-4)
    tokens = jax.random.randint(jax.random.key(1), (options.batch, options.seq_len + 1), 0, VOCABULARY)
    params = jax.jit(model.init)(jax.random.key(0), tokens[:, :-1])
    state = jax.jit(optimizer.init)(params)
    step = jax.jit(make_step(model, optimizer), donate_argnums=(0, 1)).lower(params, state, tokens).compile()
    memory = step.memory_analysis()
    losses, seconds = [], []
    for _ in range(2 + options.steps):
        start = time.perf_counter()
        params, state, loss = step(params, state, tokens)
        losses.append(float(loss))
        seconds.append(time.perf_counter() - start)
    return {
        "seconds": float(np.median(seconds[2:])),
        "gibibytes": (memory.argument_size_in_bytes + memory.temp_size_in_bytes) / 2**30,
        "loss": losses[0],
        "parameters": sum(x.size for x in jax.tree.leaves(params)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--attention", nargs="+", choices=ATTENTION, default=list(ATTENTION))
    parser.add_argument("--steps", type=int, default=10, help="timed steps, after two for warm-up")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--seq-len", type=int, default=8192)
    parser.add_argument("--width", type=int, default=1024, help=f"model width, in heads of {HEAD_DIM}")
    parser.add_argument("--num-kv-heads", type=int, default=2)
    parser.add_argument("--depth", type=int, default=26)
    options = parser.parse_args()
    print(
        f"{jax.devices()[0].device_kind}: {options.batch} x {options.seq_len} tokens, {options.depth} layers of "
        f"{options.width}, {options.width // HEAD_DIM}/{options.num_kv_heads} heads of {HEAD_DIM}",
        flush=True,
    )
    for attention in options.attention:
        try:
            result = measure(attention, options)
        except Exception as error:  # not supported or out of memory: try the others
            print(f"{attention:>10}: {str(error).strip().splitlines()[0][:100]}", flush=True)
            continue
        print(
            f"{attention:>10}: {1e3 * result['seconds']:8.1f} ms per step, {result['gibibytes']:6.2f} GiB, "
            f"loss {result['loss']:.4f}, {result['parameters'] / 1e6:.0f} M parameters",
            flush=True,
        )


if __name__ == "__main__":
    main()

r"""Times a training step of a decoder-only transformer with three implementations of attention.

    python examples/training_step.py  # 362 million parameters, on a GPU
    python examples/training_step.py --depth 2 --width 256 --seq-len 512 --batch 1 \
        --attention jax_flash xla
    python examples/training_step.py --output FILE  # settings, times, memory and all losses, as JSON
    python examples/training_step.py --context-parallel 2 --seq-len 65536 --checkpoint  # on two GPUs

The model is a GPT in bfloat16 with grouped-query attention and head dim 128. Forward pass, backward pass and AdamW
update are one program. Only the attention differs: jax_flash, or `jax.nn` with cuDNN or XLA.

With `--context-parallel N` each of N devices has an N-th of every sequence, and all parameters. Attention is
`jax_flash.ring_attention`. XLA shards everything else, which works token by token. Tokens, labels and positions are in
the order of the layout "zigzag", in which causal attention is equally much work for all devices. With the XLA flags of
docs/long_context.md, keys and values travel while the kernels run.

With `--checkpoint` the backward pass computes each layer again from its input. Of jax_flash's attention the output and
the log-sum-exp are kept, which is what its backward kernels need, so its forward kernel does not run twice.
"""

import argparse
import functools
import json
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_flash

VOCABULARY = 32_768
HEAD_DIM = 128
DTYPE = jnp.bfloat16

Attention = Callable[..., jax.Array]

ATTENTION: dict[str, Attention] = {
    "jax_flash": jax_flash.flash_attention,
    "cudnn": functools.partial(jax.nn.dot_product_attention, implementation="cudnn"),
    "xla": functools.partial(jax.nn.dot_product_attention, implementation="xla"),
}


def ring(mesh: Mesh) -> Attention:
    """Attention over the sequence of all devices, in the order of the layout "zigzag"."""
    rows = P(None, "sequence")

    def attention(query: jax.Array, key: jax.Array, value: jax.Array, *, is_causal: bool) -> jax.Array:
        local = functools.partial(
            jax_flash.ring_attention, axis_name="sequence", layout="zigzag", is_causal=is_causal
        )
        return jax.shard_map(local, mesh=mesh, in_specs=rows, out_specs=rows)(query, key, value)

    return attention


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
    in_order: Callable[..., jax.Array]  # what brings a sequence into the order of the tokens
    checkpoint: bool = False  # compute layers again in the backward pass?

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        place = self.param("position", nn.initializers.normal(0.02), (tokens.shape[1], self.width))
        x = nn.Embed(VOCABULARY, self.width, dtype=DTYPE)(tokens) + self.in_order(place, axis=0).astype(DTYPE)
        kept = jax.checkpoint_policies.save_only_these_names("flash_attention_out", "flash_attention_lse")
        block = nn.remat(Block, prevent_cse=False, policy=kept) if self.checkpoint else Block
        blocks = nn.scan(block, variable_axes={"params": 0}, split_rngs={"params": True}, length=self.depth)
        x, _ = blocks(self.num_kv_heads, self.attention, name="blocks")(x, None)
        return nn.Dense(VOCABULARY, use_bias=False, dtype=x.dtype)(
            nn.LayerNorm(use_bias=False, dtype=x.dtype)(x)
        )


def make_step(model: Transformer, optimizer: optax.GradientTransformation) -> Callable[..., Any]:
    """(params, optimizer state, tokens, labels [B, T]) -> (new params, new optimizer state, loss in nats)."""

    def loss_fn(params: Any, tokens: jax.Array, labels: jax.Array) -> jax.Array:
        logits = model.apply(params, tokens).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    def step(params: Any, state: Any, tokens: jax.Array, labels: jax.Array) -> tuple[Any, Any, jax.Array]:
        loss, gradients = jax.value_and_grad(loss_fn)(params, tokens, labels)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    return step


def measure(attention: str, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of the timed steps, the GiB of the program on a device, all losses, and the parameter count."""
    number = options.context_parallel
    mesh = Mesh(np.array(jax.devices()[:number]), ("sequence",))
    on_all, in_shards = NamedSharding(mesh, P()), NamedSharding(mesh, P(None, "sequence"))

    def in_order(x: jax.Array, axis: int) -> jax.Array:
        return x if number == 1 else jax_flash.to_zigzag(x, number, axis)

    attend = ATTENTION[attention] if number == 1 else ring(mesh)
    model = Transformer(
        options.width, options.depth, options.num_kv_heads, attend, in_order, options.checkpoint
    )
    optimizer = optax.adamw(1e-4)
    text = jax.random.randint(jax.random.key(1), (options.batch, options.seq_len + 1), 0, VOCABULARY)
    batch = [jax.device_put(in_order(x, axis=1), in_shards) for x in (text[:, :-1], text[:, 1:])]
    params = jax.device_put(jax.jit(model.init)(jax.random.key(0), batch[0]), on_all)
    state = jax.device_put(jax.jit(optimizer.init)(params), on_all)
    step = jax.jit(make_step(model, optimizer), donate_argnums=(0, 1), out_shardings=on_all)
    step = step.lower(params, state, *batch).compile()
    memory = step.memory_analysis()
    losses, seconds = [], []
    for _ in range(2 + options.steps):
        start = time.perf_counter()
        params, state, loss = step(params, state, *batch)
        losses.append(float(loss))
        seconds.append(time.perf_counter() - start)
    return {
        "seconds": seconds[2:],
        "gibibytes": (memory.argument_size_in_bytes + memory.temp_size_in_bytes) / 2**30,
        "losses": losses,
        "parameters": sum(x.size for x in jax.tree.leaves(params)),
    }


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument(
        "--attention",
        nargs="+",
        choices=ATTENTION,
        default=argparse.SUPPRESS,
        help="(default: all; with --context-parallel jax_flash)",
    )
    parser.add_argument("--steps", type=int, default=10, help="timed steps, after two for warm-up")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--seq-len", type=int, default=8192)
    parser.add_argument("--width", type=int, default=1024, help=f"model width, in heads of {HEAD_DIM}")
    parser.add_argument("--num-kv-heads", type=int, default=2)
    parser.add_argument("--depth", type=int, default=26)
    parser.add_argument(
        "--context-parallel", type=int, default=1, metavar="N", help="devices that share a sequence"
    )
    parser.add_argument("--checkpoint", action="store_true", help="compute layers again in the backward pass")
    parser.add_argument(
        "--output", type=pathlib.Path, metavar="FILE", help="JSON file with settings and results"
    )
    options = parser.parse_args(arguments)
    number, available = options.context_parallel, len(jax.devices())
    if not 1 <= number <= available:
        parser.error(f"--context-parallel must be from 1 to the number of devices, {available}, got {number}")
    if number > 1 and options.seq_len % (2 * number):
        parser.error(f"--seq-len must be a multiple of 2 x {number} devices, got {options.seq_len}")
    given = getattr(options, "attention", None)
    if number > 1 and given not in (None, ["jax_flash"]):
        parser.error(f"--context-parallel is for --attention jax_flash, got {' '.join(given)}")
    options.attention = given or (list(ATTENTION) if number == 1 else ["jax_flash"])
    return options


def main() -> None:
    options = parse_arguments()
    print(
        f"{options.context_parallel} x {jax.devices()[0].device_kind}: {options.batch} x {options.seq_len} tokens, "
        f"{options.depth} layers of {options.width}, "
        f"{options.width // HEAD_DIM}/{options.num_kv_heads} heads of {HEAD_DIM}",
        flush=True,
    )
    results: dict[str, dict[str, Any]] = {}
    for attention in options.attention:
        try:
            results[attention] = result = measure(attention, options)
        except Exception as error:  # not supported or out of memory: try the others
            results[attention] = {"error": str(error).strip().splitlines()[0][:100]}
            print(f"{attention:>10}: {results[attention]['error']}", flush=True)
            continue
        milliseconds = 1e3 * np.median(result["seconds"])
        print(
            f"{attention:>10}: {milliseconds:8.1f} ms per step, {result['gibibytes']:6.2f} GiB, loss "
            f"{result['losses'][0]:.4f} to {result['losses'][-1]:.4f}, {result['parameters'] / 1e6:.0f} M parameters",
            flush=True,
        )
    if options.output is not None:
        settings = {name: x for name, x in vars(options).items() if name not in ("attention", "output")}
        device = {"device": jax.devices()[0].device_kind, "jax": jax.__version__}
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(
            json.dumps(device | {"settings": settings, "results": results}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()

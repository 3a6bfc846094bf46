"""Trains a transformer that draws sets of points in one step (MeanFlow, arXiv:2505.13447), on CPU or GPU.

    python examples/train_meanflow.py
    python examples/train_meanflow.py --attention flax

Each example is a set of points near one of two half circles: all must choose the same one, which takes attention. The
loss contains a derivative in forward mode and is differentiated in reverse mode, so jax_flash is called with
`forward_mode=True`. The loss does not depend on `--attention`.
"""

import argparse
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jax_flash

Attention = Callable[..., jax.Array]


def jax_flash_attention(query: jax.Array, key: jax.Array, value: jax.Array, **options) -> jax.Array:
    return jax_flash.flax.attention_fn(query, key, value, **options, forward_mode=True)


def jax_nn_attention(query: jax.Array, key: jax.Array, value: jax.Array, **_) -> jax.Array:
    return jax.nn.dot_product_attention(query, key, value)


ATTENTION: dict[str, Attention] = {
    "jax_flash": jax_flash_attention,
    "flax": nnx.dot_product_attention,
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


class MeanVelocity(nnx.Module):
    """Points [B, T, 2] and times r and t [B] -> the mean velocity of the points between r and t, [B, T, 2]."""

    def __init__(self, *, width: int, depth: int, num_heads: int, attention: Attention, rngs: nnx.Rngs):
        self.embedding = nnx.Linear(2, width, rngs=rngs)
        self.time = nnx.Linear(2 * NUM_FREQUENCIES * 2, width, rngs=rngs)
        self.blocks = nnx.List([Block(width, num_heads, attention, rngs) for _ in range(depth)])
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.head = nnx.Linear(width, 2, rngs=rngs)

    def __call__(self, points: jax.Array, r: jax.Array, t: jax.Array) -> jax.Array:
        times = jnp.concatenate([waves(t), waves(t - r)], axis=-1)
        x = self.embedding(points) + self.time(times)[:, None]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


NUM_FREQUENCIES = 4


def waves(t: jax.Array) -> jax.Array:
    angles = t[:, None] * np.pi * np.arange(1, NUM_FREQUENCIES + 1)
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)


def moons(along: jax.Array) -> jax.Array:
    """The points of the two half circles at the angles `along`, [2, *along.shape, 2]."""
    upper = jnp.stack([jnp.cos(along) - 0.5, jnp.sin(along) - 0.25], axis=-1)
    return jnp.stack([upper, -upper])


def draw_data(key: jax.Array, batch: int, num_points: int) -> jax.Array:
    """Sets of points, [batch, num_points, 2], each near one of the moons."""
    keys = jax.random.split(key, 3)
    both = moons(jax.random.uniform(keys[0], (batch, num_points), maxval=np.pi))
    is_upper = jax.random.bernoulli(keys[1], shape=(batch, 1, 1))
    return jnp.where(is_upper, *both) + 0.05 * jax.random.normal(keys[2], (batch, num_points, 2))


def loss_fn(model: MeanVelocity, key: jax.Array, points: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The loss, in which each example has its error as weight, and the mean squared error."""
    batch = points.shape[0]
    noise_key, time_key, same_key = jax.random.split(key, 3)
    noise = jax.random.normal(noise_key, points.shape)
    times = jax.nn.sigmoid(jax.random.normal(time_key, (2, batch)) - 0.4)
    t = times.max(0)
    r = jnp.where(jax.random.bernoulli(same_key, 0.5, (batch,)), t, times.min(0))
    velocity = noise - points
    noisy = points + t[:, None, None] * velocity

    graph, state = nnx.split(model)
    mean_velocity, change = jax.jvp(
        lambda *inputs: nnx.merge(graph, state)(*inputs),
        (noisy, r, t),
        (velocity, jnp.zeros_like(r), jnp.ones_like(t)),
    )
    target = jax.lax.stop_gradient(velocity - (t - r)[:, None, None] * change)
    errors = jnp.mean((mean_velocity - target) ** 2, axis=(1, 2))
    return jnp.mean(errors / jax.lax.stop_gradient(errors + 1e-2)), jnp.mean(errors)


@nnx.jit(static_argnames=("batch", "num_points"))
def train_step(model: MeanVelocity, optimizer: nnx.Optimizer, key: jax.Array, batch: int, num_points: int):
    data_key, loss_key = jax.random.split(key)
    (_, error), gradients = nnx.value_and_grad(loss_fn, has_aux=True)(
        model, loss_key, draw_data(data_key, batch, num_points)
    )
    optimizer.update(model, gradients)
    return error


@nnx.jit
def draw(model: MeanVelocity, noise: jax.Array) -> jax.Array:
    """Sets of points from noise, in one step from t = 1 to r = 0."""
    times = jnp.ones(noise.shape[0])
    return noise - model(noise, 0 * times, times)


def distance_to_moons(points: jax.Array) -> jax.Array:
    """The root mean squared distance of sets of points [B, T, 2] to a moon, for each set the one that is nearer."""
    lines = moons(jnp.linspace(0, np.pi, 100))
    squares = jnp.sum((points[:, None, :, None] - lines[:, None]) ** 2, axis=-1)  # [B, moon, T, place]
    return jnp.sqrt(jnp.mean(squares.min(-1).mean(-1).min(-1)))


def train(
    attention: str = "jax_flash",
    *,
    steps: int = 1000,
    batch: int = 32,
    num_points: int = 32,
    width: int = 64,
    depth: int = 2,
    num_heads: int = 4,
    learning_rate: float = 2e-3,
    report_every: int = 100,
) -> tuple[list[float], float]:
    """Trains a new model. Returns the error at each step, and the distance of 256 drawn sets to the moons."""
    model = MeanVelocity(
        width=width, depth=depth, num_heads=num_heads, attention=ATTENTION[attention], rngs=nnx.Rngs(0)
    )
    schedule = optax.warmup_cosine_decay_schedule(0.0, learning_rate, min(20, steps // 4), steps)
    optimizer = nnx.Optimizer(model, optax.adamw(schedule, b2=0.99), wrt=nnx.Param)
    errors: list[float] = []
    start, reported = time.perf_counter(), 0
    for step, key in enumerate(jax.random.split(jax.random.key(0), steps), start=1):
        errors.append(float(train_step(model, optimizer, key, batch, num_points)))
        if report_every and (step == 1 or step % report_every == 0 or step == steps):
            recent = errors[reported:]
            speed = len(recent) / (time.perf_counter() - start)
            note = "  including compilation" if step == 1 else ""
            print(f"step {step:5d}  error {np.mean(recent):.3f}  {speed:6.1f} steps/s{note}", flush=True)
            start, reported = time.perf_counter(), step
    noise = jax.random.normal(jax.random.key(1), (256, num_points, 2))
    return errors, float(distance_to_moons(draw(model, noise)))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument(
        "--attention", choices=ATTENTION, default="jax_flash", help="implementation of attention"
    )
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=32, help="sets in a step")
    parser.add_argument("--num-points", type=int, default=32, help="of a set")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--num-heads", type=int, default=4)
    options = parser.parse_args()
    print(f"{options.attention} on {jax.devices()[0].device_kind}", flush=True)
    _, distance = train(**vars(options))
    noise = jax.random.normal(jax.random.key(1), (256, options.num_points, 2))
    print(
        f"distance to the nearer moon: {distance:.3f} of drawn sets, {distance_to_moons(noise):.3f} of noise"
    )


if __name__ == "__main__":
    main()

"""Two operations with kernels of their own, as JAX custom calls on CPU and GPU."""

import jax
import jax.numpy as jnp

from . import _native

__all__ = ["grayscale", "matmul"]

# A target is a name that a compiled program calls. XLA takes the handler of the platform that the program runs on.
for _platform, _handlers in _native.handlers().items():
    for _op, _handler in _handlers.items():
        jax.ffi.register_ffi_target(f"first_custom_call_{_op}", _handler, platform=_platform)


def grayscale(image: jax.Array) -> jax.Array:
    """The brightness of each pixel: 0.299 red + 0.587 green + 0.114 blue (Recommendation ITU-R BT.601).

    Args:
      image: [height, width, 3], uint8 or float32. Red, green and blue.

    Returns:
      [height, width] in the dtype of the image, for uint8 rounded to nearest.

    Raises:
      TypeError: the image has another dtype.
      ValueError: it has another shape.
    """
    image = jnp.asarray(image)
    if image.dtype not in (jnp.uint8, jnp.float32):
        raise TypeError(f"image must be uint8 or float32, got {image.dtype}.")
    if image.ndim != 3 or image.shape[2] != 3:
        raise ValueError(f"image must have shape [height, width, 3], got {list(image.shape)}.")
    result = jax.ShapeDtypeStruct(image.shape[:2], image.dtype)
    # "sequential": under jax.vmap the handler is called for one image after the other.
    return jax.ffi.ffi_call("first_custom_call_grayscale", result, vmap_method="sequential")(image)


def matmul(a: jax.Array, b: jax.Array) -> jax.Array:
    """The matrix product of a and b. It has a gradient.

    Args:
      a: [m, k], float32.
      b: [k, n], float32.

    Returns:
      [m, n], float32.

    Raises:
      TypeError: a or b has another dtype.
      ValueError: a or b is not a matrix, or their shapes do not fit.
    """
    a, b = jnp.asarray(a), jnp.asarray(b)
    for name, matrix in (("a", a), ("b", b)):
        if matrix.dtype != jnp.float32:
            raise TypeError(f"{name} must be float32, got {matrix.dtype}.")
        if matrix.ndim != 2:
            raise ValueError(f"{name} must have 2 axes, got shape {list(matrix.shape)}.")
    if a.shape[1] != b.shape[0]:
        raise ValueError(
            f"b must have as many rows as a has columns, {a.shape[1]}, got shape {list(b.shape)}."
        )
    return _matmul(a, b)


@jax.custom_vjp
def _matmul(a: jax.Array, b: jax.Array) -> jax.Array:
    result = jax.ShapeDtypeStruct((a.shape[0], b.shape[1]), jnp.float32)
    return jax.ffi.ffi_call("first_custom_call_matmul", result, vmap_method="sequential")(a, b)


# JAX cannot see into a custom call, so it has to be told the derivative. The forward pass keeps what the backward pass
# needs; the backward pass turns the gradient with respect to the result into those with respect to a and b.
def _matmul_forward(a: jax.Array, b: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _matmul(a, b), (a, b)


def _matmul_backward(residuals: tuple[jax.Array, jax.Array], dout: jax.Array) -> tuple[jax.Array, jax.Array]:
    a, b = residuals
    return _matmul(dout, b.T), _matmul(a.T, dout)


_matmul.defvjp(_matmul_forward, _matmul_backward)

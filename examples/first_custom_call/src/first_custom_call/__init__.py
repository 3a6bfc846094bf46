"""Two JAX custom calls with their own CPU and GPU kernels."""

import jax
import jax.numpy as jnp

from . import _native

__all__ = ["grayscale", "matmul"]

# A compiled program calls a target by its name. XLA picks the handler of its platform.
for _platform, _handlers in _native.handlers().items():
    for _op, _handler in _handlers.items():
        _target = f"first_custom_call_{_op}"
        jax.ffi.register_ffi_target(_target, _handler, platform=_platform)


def _call(op: str, result: jax.ShapeDtypeStruct, *args: jax.Array) -> jax.Array:
    # "sequential": jax.vmap calls the handler once for each element of the batch.
    target = f"first_custom_call_{op}"
    return jax.ffi.ffi_call(target, result, vmap_method="sequential")(*args)


def grayscale(image: jax.Array) -> jax.Array:
    """Converts RGB to gray: 0.299 red + 0.587 green + 0.114 blue (ITU-R BT.601).

    Args:
      image: [height, width, 3], uint8 or float32.

    Returns:
      [height, width] in the dtype of the image, rounded to nearest for uint8.

    Raises:
      TypeError: the dtype is not supported.
      ValueError: the shape is not [height, width, 3].
    """
    image = jnp.asarray(image)
    if image.dtype not in (jnp.uint8, jnp.float32):
        raise TypeError(f"image must be uint8 or float32, got {image.dtype}.")
    if image.ndim != 3 or image.shape[2] != 3:
        shape = list(image.shape)
        raise ValueError(f"image must have shape [height, width, 3], got {shape}.")
    return _call("grayscale", jax.ShapeDtypeStruct(image.shape[:2], image.dtype), image)


def matmul(a: jax.Array, b: jax.Array) -> jax.Array:
    """The matrix product of a and b, with a gradient.

    Args:
      a: [m, k], float32.
      b: [k, n], float32.

    Returns:
      [m, n], float32.

    Raises:
      TypeError: a or b is not float32.
      ValueError: a or b is not a matrix, or their shapes do not match.
    """
    a, b = jnp.asarray(a), jnp.asarray(b)
    for name, matrix in (("a", a), ("b", b)):
        if matrix.dtype != jnp.float32:
            raise TypeError(f"{name} must be float32, got {matrix.dtype}.")
        if matrix.ndim != 2:
            shape = list(matrix.shape)
            raise ValueError(f"{name} must have 2 axes, got shape {shape}.")
    k, shape = a.shape[1], list(b.shape)
    if shape[0] != k:
        expected = f"b must have as many rows as a has columns, {k}"
        raise ValueError(f"{expected}, got shape {shape}.")
    return _matmul(a, b)


@jax.custom_vjp
def _matmul(a: jax.Array, b: jax.Array) -> jax.Array:
    result = jax.ShapeDtypeStruct((a.shape[0], b.shape[1]), jnp.float32)
    return _call("matmul", result, a, b)


# JAX cannot differentiate a custom call. The forward pass saves the residuals; the
# backward pass turns the gradient of the result into the gradients of a and b.
def _matmul_forward(a: jax.Array, b: jax.Array):
    return _matmul(a, b), (a, b)


def _matmul_backward(residuals: tuple[jax.Array, jax.Array], dout: jax.Array):
    a, b = residuals
    return _matmul(dout, b.T), _matmul(a.T, dout)


_matmul.defvjp(_matmul_forward, _matmul_backward)

"""Both operations against NumPy, on every available platform."""

import first_custom_call
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

# Smaller than a block of the CUDA kernels, exactly one, slightly more, several with a remainder, and empty.
IMAGE_SIZES = [(1, 1), (8, 32), (9, 33), (100, 67), (0, 5)]
MATMUL_SIZES = [(1, 1, 1), (32, 32, 32), (33, 31, 34), (70, 100, 65), (3, 0, 4), (0, 3, 4)]


def platforms() -> list[str]:
    try:
        return ["cpu", "cuda"] if jax.devices("cuda") else ["cpu"]
    except RuntimeError:
        return ["cpu"]


@pytest.fixture(autouse=True, params=platforms())
def platform(request):
    """Every test runs on the first device of each platform."""
    with jax.default_device(jax.devices(request.param)[0]):
        yield request.param


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def exact_gray(image: np.ndarray) -> np.ndarray:
    weighted = image.astype(np.float64) @ [299, 587, 114]
    return np.floor((weighted + 500) / 1000) if image.dtype == np.uint8 else weighted / 1000


def assert_product(got: jax.Array, a: np.ndarray, b: np.ndarray) -> None:
    """The error is within k float32 roundings, in any order of the sum."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    bound = a.shape[1] * np.finfo(np.float32).eps * (np.abs(a) @ np.abs(b))
    assert got.shape == bound.shape
    assert np.all(np.abs(np.asarray(got) - a @ b) <= bound)


@pytest.mark.parametrize(("height", "width"), IMAGE_SIZES)
def test_grayscale_of_bytes(rng, height, width):
    image = rng.integers(0, 256, (height, width, 3), np.uint8)
    gray = first_custom_call.grayscale(image)
    assert gray.dtype == np.uint8
    np.testing.assert_array_equal(gray, exact_gray(image))


@pytest.mark.parametrize(("height", "width"), IMAGE_SIZES)
def test_grayscale_of_floats(rng, height, width):
    image = rng.random((height, width, 3), np.float32)
    gray = first_custom_call.grayscale(image)
    assert gray.dtype == np.float32
    np.testing.assert_allclose(gray, exact_gray(image), rtol=4 * np.finfo(np.float32).eps)


@pytest.mark.parametrize(("m", "k", "n"), MATMUL_SIZES)
def test_matmul(rng, m, k, n):
    a, b = rng.standard_normal((m, k), np.float32), rng.standard_normal((k, n), np.float32)
    assert_product(first_custom_call.matmul(a, b), a, b)


def test_jit_and_vmap(rng):
    a, b = rng.standard_normal((3, 40, 20), np.float32), rng.standard_normal((3, 20, 35), np.float32)
    products = jax.jit(jax.vmap(first_custom_call.matmul))(a, b)
    for got, one_a, one_b in zip(products, a, b, strict=True):
        assert_product(got, one_a, one_b)
    images = rng.integers(0, 256, (2, 10, 40, 3), np.uint8)
    np.testing.assert_array_equal(jax.jit(jax.vmap(first_custom_call.grayscale))(images), exact_gray(images))


def test_matmul_reads_rows_whatever_the_layout(rng):
    """XLA may represent a transpose by a layout; the handler must still get dense rows."""
    a, b = rng.standard_normal((20, 40), np.float32), rng.standard_normal((35, 20), np.float32)
    assert_product(jax.jit(lambda a, b: first_custom_call.matmul(a.T, b.T))(a, b), a.T, b.T)


def test_gradient_of_matmul(rng):
    a, b = rng.standard_normal((35, 20), np.float32), rng.standard_normal((20, 40), np.float32)
    check_grads(first_custom_call.matmul, (a, b), order=1, modes=["rev"])


@pytest.mark.parametrize(
    ("shape", "dtype", "error", "message"),
    [
        ((4, 5, 3), np.int32, TypeError, "image must be uint8 or float32, got int32"),
        ((4, 5, 4), np.uint8, ValueError, r"image must have shape \[height, width, 3\], got \[4, 5, 4\]"),
        ((4, 3), np.float32, ValueError, r"image must have shape \[height, width, 3\], got \[4, 3\]"),
    ],
)
def test_grayscale_refuses(shape, dtype, error, message):
    with pytest.raises(error, match=message):
        first_custom_call.grayscale(np.zeros(shape, dtype))


@pytest.mark.parametrize(
    ("a", "b", "error", "message"),
    [
        (np.zeros((2, 3), np.int32), np.zeros((3, 4), np.float32), TypeError, "a must be float32, got int32"),
        (
            np.zeros((2, 3), np.float32),
            np.zeros((3, 4), np.float16),
            TypeError,
            "b must be float32, got float16",
        ),
        (
            np.zeros(3, np.float32),
            np.zeros((3, 4), np.float32),
            ValueError,
            r"a must have 2 axes, got shape \[3\]",
        ),
        (
            np.zeros((2, 3), np.float32),
            np.zeros((4, 3), np.float32),
            ValueError,
            r"b must have as many rows as a has columns, 3, got shape \[4, 3\]",
        ),
    ],
)
def test_matmul_refuses(a, b, error, message):
    with pytest.raises(error, match=message):
        first_custom_call.matmul(a, b)


@pytest.mark.parametrize(
    ("op", "arguments", "result", "message"),
    [
        (
            "grayscale",
            [((4, 5, 2), np.uint8)],
            ((4, 5), np.uint8),
            r"image must have shape \[height, width, 3\]",
        ),
        (
            "grayscale",
            [((4, 5, 3), np.uint8)],
            ((4, 6), np.uint8),
            r"the result must have shape \[height, width\]",
        ),
        ("grayscale", [((4, 5, 3), np.uint8)], ((4, 5), np.float32), "must have the same dtype"),
        ("grayscale", [((4, 5, 3), np.int32)], ((4, 5), np.int32), "image must be uint8 or float32"),
        (
            "matmul",
            [((2, 3), np.float32), ((4, 5), np.float32)],
            ((2, 5), np.float32),
            "b must have as many rows",
        ),
        (
            "matmul",
            [((2, 3), np.float32), ((3, 5), np.float32)],
            ((2, 6), np.float32),
            "the result must have",
        ),
        ("matmul", [((2, 3), np.float32), ((3, 5), np.int32)], ((2, 5), np.float32), "[Ww]rong"),
    ],
)
def test_handlers_check_for_themselves(op, arguments, result, message):
    """A call that bypasses the Python checks raises an error and does not crash."""
    call = jax.ffi.ffi_call(f"first_custom_call_{op}", jax.ShapeDtypeStruct(*result))
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        jax.block_until_ready(call(*(jnp.zeros(*argument) for argument in arguments)))

"""Arrays with more elements than an int in the CUDA kernels can count."""

import ctypes

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_flash


@pytest.fixture
def gigabytes(cuda):
    """Skips a test that needs more GPU memory than this process may use or than is free."""

    def need(count: float) -> None:
        stats = jax.devices("cuda")[0].memory_stats()
        room = min(stats["bytes_limit"], stats.get("pool_bytes", 0) + free_bytes()) - stats["bytes_in_use"]
        if room < 1e9 * count:
            pytest.skip(f"needs {count:.0f} GB of the GPU's memory")

    return need


def free_bytes() -> int:
    """The free memory of the first GPU that JAX uses."""
    driver, free, total = ctypes.CDLL("libcuda.so.1"), ctypes.c_size_t(), ctypes.c_size_t()
    device, context = ctypes.c_int(), ctypes.c_void_p()
    results = [
        driver.cuDeviceGet(ctypes.byref(device), jax.devices("cuda")[0].local_hardware_id),
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device),
        driver.cuCtxPushCurrent_v2(context),
        driver.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)),
        driver.cuCtxPopCurrent_v2(ctypes.byref(context)),
        driver.cuDevicePrimaryCtxRelease_v2(device),
    ]
    assert results == [0] * len(results)
    return free.value


@pytest.mark.parametrize("kernels", ["", "sm80"], ids=["first kernels", "portable kernels"])
@pytest.mark.parametrize("seqlen", [2**28 + 2**20, 2**29 - 64])
def test_mask_of_many_keys(seqlen, kernels, gigabytes):
    """Only the last 70 keys are visible, so lists of visible blocks hold numbers above 2^22."""
    gigabytes(6 * 16 * seqlen / 1e9)  # k, v and copies of them

    @jax.jit
    def attend(last_keys):
        q = jnp.ones((1, 1, 1, 8), jnp.bfloat16)
        k = jnp.zeros((1, seqlen, 1, 8), jnp.bfloat16)
        v = jax.lax.dynamic_update_slice(k, last_keys, (0, seqlen - 70, 0, 0))
        mask = jnp.arange(seqlen)[None, None, None] >= seqlen - 70
        return jax_flash.flash_attention(q, k, v, mask=mask, return_residual=True)

    last_keys = np.arange(70).reshape(1, 70, 1, 1) % 7 * np.ones((1, 1, 1, 8))
    with harness.cuda_settings(kernels=kernels):
        out, lse = attend(last_keys.astype(jnp.bfloat16))
    np.testing.assert_array_equal(out.astype(np.float32), 3.0)
    np.testing.assert_allclose(lse, np.log(70), rtol=1e-6)


def test_gradients_of_many_rows(gigabytes):
    """33 heads of 2^26 queries, 100 of them within the length: the last head's statistics lie beyond 2^31."""
    gigabytes(80)
    heads, keys, rows = 33, 70, 100
    rng = np.random.default_rng(0)
    q, dout = (rng.standard_normal((1, rows, heads, 1)).astype(jnp.bfloat16) for _ in range(2))
    k, v = (rng.standard_normal((1, keys, 1, 1)).astype(jnp.bfloat16) for _ in range(2))

    def gradients(seqlen):
        @jax.jit
        def f(q, k, v, dout):
            q, dout = (jnp.pad(x, ((0, 0), (0, seqlen - rows), (0, 0), (0, 0))) for x in (q, dout))
            lengths = jnp.array([rows], jnp.int32)

            def attention(q, k, v):
                return jax_flash.flash_attention(q, k, v, query_seq_lengths=lengths, deterministic=True)

            dq, dk, dv = jax.vjp(attention, q, k, v)[1](dout)
            return dq[:, :rows], dk, dv

        return [np.asarray(x).astype(np.float32) for x in f(q, k, v, dout)]

    for got, want in zip(gradients(2**26), gradients(2**7), strict=True):
        np.testing.assert_array_equal(got, want)

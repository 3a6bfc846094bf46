"""What tests set to run on one GPU what runs on others."""

import os
import subprocess
import sys

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_flash

REFUSAL = "no CUDA kernel of this build for this head_dim"
SCRIPT = "import jax.numpy as jnp, jax_flash; x = jnp.ones((1, 8, 1, 8)); print(jax_flash.flash_attention(x, x, x))"


def attend() -> jax.Array:
    x = jnp.ones((1, 8, 1, 8))
    return jax.block_until_ready(jax_flash.flash_attention(x, x, x))


def test_settings_of_a_running_process(cuda, monkeypatch):
    monkeypatch.setenv("JAX_FLASH_KERNELS", "none")  # too late
    np.testing.assert_array_equal(attend(), 1.0)
    with harness.cuda_settings(kernels="none"), pytest.raises(jax.errors.JaxRuntimeError, match=REFUSAL):
        attend()
    np.testing.assert_array_equal(attend(), 1.0)


def test_environment_of_a_new_process(cuda):
    environment = os.environ | {"JAX_FLASH_KERNELS": "none"}
    run = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=environment)
    assert run.returncode != 0
    assert REFUSAL in run.stderr

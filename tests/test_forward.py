"""The forward pass against exact results, over the table of cases."""

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import quick
from cases import CASES, DTYPES, Case

import jax_flash


def forward(case: Case, dtype: str, **more):
    """Compute out and lse of a row, from a program without a backward pass."""

    @jax.jit
    def f(q, k, v, operands):
        return harness.call(q, k, v, operands, return_residual=True, **case.static, **more)

    with harness.x64(dtype):
        inputs = case.inputs(DTYPES[dtype])
        return [np.asarray(x) for x in f(inputs.q, inputs.k, inputs.v, case.operands(DTYPES[dtype]))]


# On a CPU, and in the quick run, test_backward.py compares the same output.
@pytest.mark.parametrize(
    ("case", "kind"),
    quick.cases_and_kinds(CASES, quick=["full", *quick.IN_EVERY_DTYPE], exhaustive_on_cpu=False),
)
def test_is_close_to_exact(case, kind, platform):
    dtype, precision, rule = harness.kind(platform, kind)
    out, lse = forward(case, dtype, precision=precision)
    assert out.dtype == DTYPES[dtype]
    assert lse.dtype == (np.float64 if dtype == "float64" else np.float32)
    harness.check(harness.oracle.Result(out, lse), case, dtype, rule, names=("out", "lse"))


WITHOUT_BATCH = {
    "full": (),
    "groups of 3": (),
    "lengths": ("query_seq_lengths", "key_value_seq_lengths"),
    "sinks": (),
    "bias": (),
    "bias of all": ("bias",),
    "alibi, causal, offset": ("query_offset",),
    "mask of batch and keys": ("mask",),
    "segments of queries and keys": ("segment_ids",),
}


@pytest.mark.parametrize("name", WITHOUT_BATCH)
def test_without_a_batch_axis(name, platform):
    (case,) = [case for case in CASES if case.name == name]
    inputs, all_operands = case.inputs(np.float32), case.operands(np.float32)
    static = dict(return_residual=True, precision="highest", **case.static)
    with_batch = harness.call(*inputs[:3], all_operands, **static)

    def element(name, x, b):
        if name in WITHOUT_BATCH[case.name]:
            return jax.tree.map(lambda x: x[b], x)
        return x[0] if name == "bias" else x  # [1, N, T, S]

    for b in range(case.batch):
        operands = {name: element(name, x, b) for name, x in all_operands.items()}
        out, lse = harness.call(*(x[b] for x in inputs[:3]), operands, **static)
        assert out.shape == inputs.dout.shape[1:]
        assert lse.shape == inputs.dlse.shape[1:]
        np.testing.assert_array_equal(out, with_batch[0][b])
        np.testing.assert_array_equal(lse, with_batch[1][b])


@pytest.mark.parametrize("shape", [(), (1,)])
def test_lengths_without_a_batch_axis_are_scalars_or_of_shape_1(shape, platform):
    q = jax.random.normal(jax.random.key(0), (9, 2, 8))
    options = {
        name: jnp.full(shape, value, jnp.int32)
        for name, value in dict(query_seq_lengths=7, key_value_seq_lengths=5, query_offset=2).items()
    }
    got = jax_flash.flash_attention(q, q, q, is_causal=True, precision="highest", **options)
    want = jax_flash.flash_attention(
        *3 * [q[None]], is_causal=True, precision="highest", **{k: v.reshape(1) for k, v in options.items()}
    )
    np.testing.assert_array_equal(got, want[0])


def test_scalar_offset_is_every_batchs(platform):
    q = jax.random.normal(jax.random.key(0), (2, 9, 2, 8))

    def f(offset):
        return jax_flash.flash_attention(q, q, q, is_causal=True, query_offset=offset)

    want = f(jnp.array([3, 3], jnp.int32))
    for offset in (3, np.int32(3), jnp.int32(3)):
        np.testing.assert_array_equal(f(offset), want)
    np.testing.assert_array_equal(jax.jit(f)(3), want)
    assert (np.asarray(f(0)) != np.asarray(want)).any()


def test_only_the_output_without_return_residual(platform):
    q = jnp.ones((1, 4, 1, 8), jnp.bfloat16)
    out = jax_flash.flash_attention(q, q, q)
    assert out.shape == q.shape
    assert out.dtype == jnp.bfloat16
    np.testing.assert_array_equal(out, q)


def test_the_name_of_jax_nn_is_the_same_function():
    assert jax_flash.dot_product_attention is jax_flash.flash_attention


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_numpy_and_jax_arrays_give_the_same(dtype, platform):
    q, k, v = CASES[0].inputs(DTYPES[dtype])[:3]
    np.testing.assert_array_equal(
        jax_flash.flash_attention(q, k, v), jax_flash.flash_attention(*map(jnp.asarray, (q, k, v)))
    )

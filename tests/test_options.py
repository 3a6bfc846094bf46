"""Python, C++ and the docstring know every option, and none is accepted and then ignored."""

import dataclasses
import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

import jax_flash
from jax_flash import _ffi, _library
from jax_flash._options import AttentionOptions

SIGNATURE = inspect.signature(jax_flash.flash_attention).parameters
LENGTHS = np.array([3, 9], np.int32)

# For each option, a value that must change the output and the gradients.
CHANGES = {
    "scale": dict(scale=0.1),
    "is_causal": dict(is_causal=True),
    "query_seq_lengths": dict(query_seq_lengths=LENGTHS),
    "key_value_seq_lengths": dict(key_value_seq_lengths=LENGTHS),
    "local_window_size": dict(local_window_size=(2, 1)),
    "logits_soft_cap": dict(logits_soft_cap=0.5),
    "query_offset": dict(query_offset=LENGTHS),
    "sinks": dict(sinks=np.ones(2, np.float32)),
    "bias": dict(bias=np.linspace(0, 3, 12, dtype=np.float32)),
    "mask": dict(mask=np.arange(12) % 2 == 0),
    "segment_ids": dict(segment_ids=np.arange(24, dtype=np.int32).reshape(2, 12) // 5),
    "dropout_rate": dict(dropout_rate=0.5, dropout_rng=jax.random.key(0)),
}
# Options that change something else, and the test that shows it.
OTHERWISE = {
    "dropout_rng": "test_dropout.py::test_the_key_decides",
    "precision": "test_precision_changes_float32_products",
    "deterministic": "test_deterministic_chooses_another_backward",
    "forward_mode": "test_forward_mode_allows_jvp",
    "page_indices": "test_paged.py::test_indices_are_clamped",
    "return_residual": "test_return_residual_gives_lse_too",
    "implementation": "test_implementation_chooses_what_runs",
}


def qkv(dtype=np.float32) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal((2, 12, 2, 16)).astype(dtype) for _ in range(3)]


@functools.cache
def results_of(platform: str, **options) -> list[np.ndarray]:
    """The `results` of options that are hashable."""
    return results(**options)


def results(**options) -> list[np.ndarray]:
    """The output and the gradients."""

    @jax.jit
    def f(*args):
        out, vjp = jax.vjp(lambda *args: jax_flash.flash_attention(*args, **options), *args)
        return out, *vjp(jnp.cos(out))

    return [np.asarray(x) for x in f(*qkv())]


# Options that have an effect only together with another one.
BASE = {"query_offset": dict(is_causal=True)}


@pytest.mark.parametrize("implementation", [None, "xla"], ids=["fused", "xla"])
@pytest.mark.parametrize("name", CHANGES)
def test_option_changes_output_and_gradients(name, implementation, platform):
    base = BASE.get(name, {}) | {"implementation": implementation}
    changed = results(**base, **CHANGES[name])
    for before, after in zip(results_of(platform, **base), changed, strict=True):
        assert np.abs(before - after).max() > 1e-2


def test_every_parameter_is_in_a_table():
    arrays = {"query", "key", "value"}
    assert set(SIGNATURE) == arrays | CHANGES.keys() | OTHERWISE.keys()


def test_precision_changes_float32_products(cuda):
    """On a CPU, float32 is always computed in float32."""
    error = {}
    exact = oracle.attention(*qkv()).out
    for precision in ("default", "highest"):
        out = jax_flash.flash_attention(*qkv(), precision=precision)
        error[precision] = np.abs(np.asarray(out, np.float64) - exact).max()
    assert error["highest"] < 1e-5 < error["default"] < 1e-2


def attributes(**options) -> str:
    """The text of the lowered program of a call."""
    f = jax.jit(jax.grad(lambda *args: jax_flash.flash_attention(*args, **options).sum()))
    return f.lower(*qkv()).as_text()


@pytest.mark.parametrize("implementation", [None, "xla"])
@pytest.mark.parametrize("cap", [5e-324, 1.2e-38, 1e-30, 1e37, 1e300])
def test_extreme_soft_caps(cap, implementation, platform):
    """The smallest makes all keys equal; beyond any logit there is no cap."""
    q, k, v = (np.random.default_rng(i).standard_normal((1, 20, 2, 16)).astype(np.float32) for i in range(3))
    call = functools.partial(jax_flash.flash_attention, precision="highest", implementation=implementation)
    (out, vjp) = jax.vjp(lambda *x: call(*x, logits_soft_cap=cap), q, k, v)
    want = call(q, k, v) if cap > 1 else jnp.broadcast_to(v.mean(1, keepdims=True), v.shape)
    np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-5)
    assert all(jnp.all(jnp.isfinite(x)) for x in vjp(out))
    gradient = jax.grad(lambda q: jnp.sum(call(q, k, v, logits_soft_cap=cap) ** 2))
    _, along = jax.jit(lambda q: jax.jvp(gradient, (q,), (q,)))(q)
    assert jnp.all(jnp.isfinite(along))


def test_deterministic_chooses_another_backward(platform):
    assert attributes(deterministic=True) != attributes(deterministic=False)


@pytest.mark.parametrize("precision", ["default", "high", "highest"])
def test_default_matmul_precision_is_the_default(precision, platform):
    with jax.default_matmul_precision(precision):
        assert attributes() == attributes(precision=precision)
    assert attributes() == attributes(precision="default")


@pytest.mark.parametrize(
    "same",
    [
        (jax.lax.Precision.HIGHEST, "highest", "float32"),
        (jax.lax.Precision.HIGH, "high", (jax.lax.Precision.HIGH, jax.lax.Precision.HIGH)),
        (jax.lax.Precision.DEFAULT, "default", None),
    ],
    ids=["highest", "high", "default"],
)
def test_names_of_a_precision(same):
    texts = {attributes(precision=precision) for precision in same}
    assert len(texts) == 1


# The exactness of a float32 product in each algorithm: 0 if its operands are rounded once, to 11 bits or fewer; 1 if
# three products of two parts keep 16 bits or more; 2 if nearly all 24 bits are kept.
ALGORITHMS = {
    "DEFAULT": 0,
    "ANY_F8_ANY_F8_F32": 0,
    "ANY_F8_ANY_F8_F32_FAST_ACCUM": 0,
    "ANY_F8_ANY_F8_ANY": 0,
    "ANY_F8_ANY_F8_ANY_FAST_ACCUM": 0,
    "F16_F16_F16": 0,
    "F16_F16_F32": 0,
    "BF16_BF16_BF16": 0,
    "BF16_BF16_F32": 0,
    "BF16_BF16_F32_X3": 1,
    "BF16_BF16_F32_X6": 2,
    "BF16_BF16_F32_X9": 2,
    "TF32_TF32_F32": 0,
    "TF32_TF32_F32_X3": 1,
    "F32_F32_F32": 2,
    "F64_F64_F64": 2,
}


def level_of(precision) -> int:
    return AttentionOptions.resolve(64, precision=precision).precision


@pytest.mark.parametrize("name", jax.lax.DotAlgorithmPreset.__members__)
def test_what_an_algorithm_is_worth(name):
    """Given as a preset and by name."""
    assert level_of(jax.lax.DotAlgorithmPreset[name]) == level_of(name) == ALGORITHMS[name]


@pytest.mark.parametrize(
    ("dtype", "products", "level"),
    [
        (np.float16, 1, 0),
        (jnp.bfloat16, 3, 1),
        (jnp.bfloat16, 6, 2),
        (jnp.bfloat16, 9, 2),
        (np.float32, 1, 2),
        (np.float64, 1, 2),
    ],
)
def test_what_an_algorithm_in_parts_is_worth(dtype, products, level):
    algorithm = jax.lax.DotAlgorithm(dtype, dtype, np.float32, num_primitive_operations=products)
    assert level_of(algorithm) == level


@pytest.mark.parametrize("pair", [("default", "highest"), ("highest", "default"), ("high", "highest")])
def test_the_more_exact_of_a_pair_counts(pair):
    assert level_of(pair) == 2


def test_return_residual_gives_lse_too(platform):
    out, lse = jax_flash.flash_attention(*qkv(), return_residual=True)
    assert lse.shape == (2, 12, 2)
    np.testing.assert_array_equal(out, jax_flash.flash_attention(*qkv()))


def test_forward_mode_allows_jvp(platform):
    def jvp(**options):
        return jax.jvp(lambda *args: jax_flash.flash_attention(*args, **options), qkv(), qkv())

    with pytest.raises(TypeError, match="custom_vjp"):
        jvp()
    with jax.default_matmul_precision("highest"):
        got, want = jvp(forward_mode=True), jvp(implementation="xla")
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_implementation_chooses_what_runs():
    def calls(**options):
        f = jax.jit(lambda *args: jax_flash.flash_attention(*args, **options))
        return "jax_flash_forward" in f.lower(*qkv()).as_text()

    assert calls()
    assert calls(implementation=None)
    assert not calls(implementation="xla")


def renamed(old: str, new: str) -> dict[str, str]:
    return {new if name == old else name: type_ for name, type_ in _library.options().items()}


def changed(operand: str, **fields: str) -> list[dict[str, str]]:
    return [x | fields if x["name"] == operand else x for x in _library.operands()]


OTHER_LIBRARIES = {
    "an option's name": dict(options=renamed("scale", "factor")),
    "an option's type": dict(options=_library.options() | {"scale": "int64_t"}),
    "an unknown type": dict(options=_library.options() | {"scale": "float"}),
    "one option more": dict(options=_library.options() | {"temperature": "double"}),
    "an operand's name": dict(operands=changed("sinks", name="sink")),
    "an operand's dtype": dict(operands=changed("sinks", dtype="FLOATING")),
    "an operand's shape": dict(operands=changed("mask", shape="{B, T, S}")),
    "an operand that does not broadcast": dict(operands=changed("mask", type="const bool*")),
    "one operand less": dict(operands=_library.operands()[:-1]),
    "another order": dict(operands=_library.operands()[::-1]),
}


@pytest.mark.parametrize("other", OTHER_LIBRARIES.values(), ids=OTHER_LIBRARIES.keys())
def test_a_library_of_other_sources_is_refused(other, monkeypatch):
    _ffi._check_interface()
    for name, value in other.items():
        monkeypatch.setattr(_library, name, lambda value=value: value)
    with pytest.raises(ImportError, match=r"not built from the sources.*Install the package again"):
        _ffi._check_interface()


def test_options_are_plain_python_numbers():
    """A NumPy scalar hashes like the number, but lowers to another type."""
    options = AttentionOptions.resolve(
        np.int64(4),
        scale=np.dtype(jnp.bfloat16).type(0.5),
        is_causal=np.bool_(True),
        local_window_size=(np.int32(3), np.uint8(1)),
        logits_soft_cap=np.float16(2.0),
        deterministic=np.bool_(False),
    )
    types = {
        field.name: {"float": float, "int": int, "bool": bool}[field.type]
        for field in dataclasses.fields(options)
    }
    assert {name: type(x) for name, x in dataclasses.asdict(options).items()} == types


@pytest.mark.parametrize("name", SIGNATURE)
def test_docstring_explains(name):
    doc = inspect.getdoc(jax_flash.flash_attention)
    assert (
        f"\n  {name}: " in doc or f"\n    {name}: " in doc or f"\n  {name}, " in doc or f", {name}: " in doc
    )


JAX_NN = inspect.signature(jax.nn.dot_product_attention).parameters


@pytest.mark.parametrize("name", JAX_NN)
def test_has_the_parameters_of_jax_nn(name):
    ours, theirs = SIGNATURE[name], JAX_NN[name]
    assert ours.kind is theirs.kind
    assert ours.default == theirs.default


def test_positional_parameters_are_in_the_order_of_jax_nn():
    def positional(parameters):
        return [name for name, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]

    assert positional(SIGNATURE) == positional(JAX_NN)

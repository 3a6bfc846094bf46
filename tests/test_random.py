"""Random cases that combine all options, transformations and derivatives, against the exact result.

    python -m pytest tests/test_random.py --random-cases 10000 --random-start 5000 -n 8
    python -m pytest tests/test_random.py --random-seed 123    # one of them again

`random_cases.py` draws the cases. A failure prints its case and the command that repeats it.
"""

import functools
from collections.abc import Callable
from typing import Any

import closeness
import harness
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import quick
import random_cases
from cases import DTYPES, Inputs
from closeness import assert_close
from random_cases import Loop, RandomCase

Arrays = dict[str, Any]  # keyed by the names of arguments in random_cases


def pytest_generate_tests(metafunc):
    if "random_seed" not in metafunc.fixturenames:
        return
    seed, start, number = (metafunc.config.getoption(f"random_{name}") for name in ("seed", "start", "cases"))
    if seed is not None:
        seeds = [seed]
    elif number is not None:
        seeds = range(start, start + number)
    else:
        seeds = quick.rows(range(start, start + 100), quick=range(start, start + 15))
    metafunc.parametrize("random_seed", seeds)


def test_is_close_to_exact(random_seed, platform):
    case = random_cases.draw(random_seed, platform)
    arguments = case.arguments()
    print(case, *case.numbers(arguments), sep="\n")  # pytest shows it if the test fails
    given = to_loops(case, case.poisoned(arguments) if case.poison else arguments)
    given = {name: case.views[name].outer(x) if name in case.views else x for name, x in given.items()}
    uses_float64 = case.x64 or any(x.dtype == np.float64 for x in arguments.values())
    with harness.x64("float64" if uses_float64 else case.dtype):
        # JAX arrays, because without jit jax 0.7 can map a NumPy array only over its first axis. device_put, because
        # jnp.asarray would compile a program for each shape.
        results, gradients, tangent = jax.tree.map(np.asarray, program(case)(jax.device_put(given)))
    check(case, arguments, results | from_loops(case, gradients))
    if case.forward_mode:
        check_tangent(case, arguments, tangent.sum())


def test_what_is_drawn(platform):
    """In every thousand cases there are some of each kind that is rare."""
    drawn = [random_cases.draw(seed, platform) for seed in range(1000)]
    spreads = {case.spread for case in drawn}
    assert spreads == {None, *random_cases.SPREADS}
    assert {case.dtype for case in drawn if case.spread} == {"float32"}
    counts = dict(
        chunks=sum(random_cases.is_chunk(case.case) for case in drawn),
        windows=sum(random_cases.has_windows(case.case) for case in drawn),
        decoding=sum(case.case.seqlen_q <= 16 and case.case.seqlen_kv > 1000 for case in drawn),
        widest=sum(case.case.head_dim == random_cases.max_head_dim(platform, case.dtype) for case in drawn),
    )
    assert min(counts.values()) >= 10, counts


# ---- The program ----------------------------------------------------------------------------------------------


def program(case: RandomCase) -> Callable[[Arrays], tuple[Arrays, Arrays, jax.Array]]:
    """The function under test.

    From arguments to results (out and lse), gradients by argument name, and the cotangents times the tangent.
    """
    forward = functools.partial(attention, case)
    if case.checkpoint is not None:
        forward = jax.checkpoint(forward, policy=random_cases.POLICIES[case.checkpoint])
    for loop in reversed(case.loops):
        if loop.is_differentiated:
            forward = looped(forward, loop)

    def forward_and_backward(arguments: Arrays) -> tuple[Arrays, Arrays, jax.Array]:
        cotangents = {name: arguments[f"d{name}"] for name in case.cotangents}
        rest = {name: x for name, x in arguments.items() if name not in ("dout", "dlse")}

        def of_differentiated(x: Arrays) -> tuple[Arrays, Arrays]:
            results = forward(rest | x)
            return {name: results[name] for name in cotangents}, results

        x = {name: arguments[name] for name in case.differentiated}
        _, vjp, results = jax.vjp(of_differentiated, x, has_aux=True)
        tangent = jnp.zeros(())
        if case.forward_mode:
            direction = jax.tree.map(jnp.sign, x)
            _, tangents, _ = jax.jvp(of_differentiated, (x,), (direction,), has_aux=True)
            products = jax.tree.map(product, cotangents, tangents)
            tangent = sum(jax.tree.leaves(products))
        return results, *vjp(cotangents), tangent

    f = forward_and_backward
    for loop in reversed(case.loops):
        if not loop.is_differentiated:
            f = looped(f, loop)

    def of_views(given: Arrays) -> tuple[Arrays, Arrays, jax.Array]:
        return f({name: case.views[name].inner(x) if name in case.views else x for name, x in given.items()})

    return jax.jit(of_views) if case.is_jitted else of_views


def product(cotangent: jax.Array, tangent: jax.Array) -> jax.Array:
    """The cotangent of a row without keys may be poisoned."""
    dtype = jnp.promote_types(tangent.dtype, jnp.float32)
    return jnp.sum(jnp.where(tangent == 0, 0, cotangent.astype(dtype) * tangent.astype(dtype)))


def attention(case: RandomCase, arguments: Arrays) -> Arrays:
    operands = dict(arguments)
    q, k, v = (operands.pop(name) for name in "qkv")
    if "query_ids" in operands:
        operands["segment_ids"] = operands.pop("query_ids"), operands.pop("key_ids")
    results = harness.call(q, k, v, {**case.static, **operands})
    return dict(zip(("out", "lse"), results if case.static["return_residual"] else [results], strict=False))


def looped(f: Callable[[Arrays], Any], loop: Loop) -> Callable[[Arrays], Any]:
    """`f` applied to each element of the loop's axis of the arguments that have one."""

    def of_all(arguments: Arrays) -> Any:
        if loop.kind == "vmap":
            return jax.vmap(f, ({name: loop.axes.get(name) for name in arguments},))(arguments)
        each = {name: arguments[name] for name in loop.axes}
        return jax.lax.scan(lambda _, each: (None, f(arguments | each)), None, each)[1]

    return of_all


def to_loops(case: RandomCase, arguments: Arrays) -> Arrays:
    """Moves the axes of the loops from the front to where each loop expects its own."""
    moved = dict(arguments)
    for i, loop in reversed(list(enumerate(case.loops))):
        for name, axis in loop.axes.items():
            before = sum(case.mapped(name)[:i])  # axes of the loops around this one
            moved[name] = np.moveaxis(moved[name], before, before + axis if axis >= 0 else axis)
    return moved


def from_loops(case: RandomCase, gradients: Arrays) -> Arrays:
    """Moves the axes of the loops in gradients to the front again."""
    moved = dict(gradients)
    for i, loop in enumerate(case.loops):
        for name in gradients.keys() & loop.axes.keys() if loop.is_differentiated else ():
            before = sum(
                is_mapped or not outer.is_differentiated
                for is_mapped, outer in zip(case.mapped(name)[:i], case.loops, strict=False)
            )
            axis = loop.axes[name]
            moved[name] = np.moveaxis(moved[name], before + axis if axis >= 0 else axis, before)
    return moved


# ---- The exact result -----------------------------------------------------------------------------------------


def exact(case: RandomCase, arguments: Arrays, naive: str | None = None) -> Arrays:
    """Exact results and gradients, with the axes of the loops in front; or those in the arithmetic `naive`."""
    more = {} if naive is None else dict(arithmetic=oracle.arithmetic_of(naive))
    turns: dict[str, list[np.ndarray]] = {}
    for turn in case.turns(arguments):
        options = case.oracle_options(turn)
        inputs = [turn.get(name) for name in Inputs._fields]
        if not case.has_batch:
            inputs = [x if x is None else x[None] for x in inputs]
        if inputs[3] is None:
            inputs[3] = np.zeros((*inputs[0].shape[:-1], case.case.head_dim_v))
        of_operands: Arrays = {}
        result = oracle.attention(*inputs, **options, **more, gradients=of_operands)
        names = dict(out="out", lse="lse", dq="q", dk="k", dv="v")
        named = {names[name]: x if case.has_batch else x[0] for name, x in result._asdict().items()}
        for name, x in (named | of_operands).items():
            turns.setdefault(name, []).append(x)
    return {name: _summed(case, name, np.stack(x), more.get("arithmetic")) for name, x in turns.items()}


def _summed(case: RandomCase, name: str, x: np.ndarray, arithmetic: oracle.Arithmetic | None) -> np.ndarray:
    """The gradient of a loop sums over the turns that share an argument."""
    x = x.reshape((*(loop.size for loop in case.loops), *x.shape[1:]))
    rounding = oracle.Arithmetic().result if arithmetic is None else arithmetic.result
    for axis in reversed(case.summed(name)):
        x = functools.reduce(lambda a, b: rounding(a + b), np.moveaxis(x, axis, 0))
    return x


def check(case: RandomCase, arguments: Arrays, got: Arrays) -> None:
    """Compare results and gradients with the exact ones by the closeness rule."""
    exact_in = functools.cache(functools.partial(exact, case, arguments))
    num_rows = exact_in()["out"].any(-1).sum()  # rows that see a key
    for name, x in got.items():
        rule, like = case.rule, case.dtype
        if name == "lse":
            # lse is float32 for 16-bit inputs, too, and their products are exact in float32.
            rule = "float32" if rule in ("bfloat16", "float16") else rule
            like = "float64" if like == "float64" else "float32"
        elif name != "out":
            # The sum is rounded to the argument's dtype, which may be less exact.
            like = arguments[name].dtype.name
            rule = max(rule, like, key=harness.RULES.index)
        assert x.dtype == DTYPES[like], f"{name} is {x.dtype}, expected {like}"
        want, naive = exact_in()[name], None
        if rule in ("bfloat16", "float16", "tfloat32"):
            naive = exact_in(rule)[name]
        is_operand = name not in ("out", "lse", "q", "k", "v")
        assert_close(
            harness.rows(x) if is_operand else x,
            harness.rows(want) if is_operand else want,
            rule,
            num_keys=case.num_terms(name),
            cancelling=case.cancelling(name, arguments),
            few=min(x.size, num_rows) < 32,
            chance=2.0,
            naive=harness.rows(naive) if is_operand and naive is not None else naive,
            name=name if name in ("out", "lse") else f"gradient of {name}",
        )


def check_tangent(case: RandomCase, arguments: Arrays, got: np.ndarray) -> None:
    """Compare the cotangents times the tangent with the exact gradients times the direction.

    Errors of single elements average out, so the limit is a few units of roundoff of the terms.
    """
    want = exact(case, arguments)

    def direction(name: str) -> np.ndarray:
        """With an axis for each loop of the gradient, also those that share the argument."""
        x, axis = np.sign(arguments[name].astype(np.float64)), 0
        for i, is_mapped in enumerate(case.mapped(name)):
            if i in case.summed(name):
                continue
            if not is_mapped:
                x = np.expand_dims(x, axis)
            axis += 1
        return x

    terms = np.concatenate([(want[name] * direction(name)).ravel() for name in case.differentiated])
    unit = closeness.UNIT_ROUNDOFF.get(case.rule) or 10 * closeness.FULL_PRECISION[case.rule]
    size = max(np.abs(terms).sum(), *(case.cancelling(name, arguments) for name in case.differentiated), 1.0)
    np.testing.assert_allclose(got, terms.sum(), rtol=0, atol=4 * unit * size)

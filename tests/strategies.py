"""Runs rows of the table of cases with one sequence over several devices, by each strategy."""

import functools
import re
from collections.abc import Callable
from typing import Any

import harness
import jax
import numpy as np
import oracle
from cases import CASES, DTYPES, Case
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_flash

LAYOUTS = ("contiguous", "zigzag")  # of ring_attention
SHARDED_JIT = "sharded jit"
STRATEGIES = (*LAYOUTS, SHARDED_JIT)

ROWS = P(None, "sequence", None, None)
# Cases that have an option of their own, or a place in the sequence.
OF_SEQUENCES = [case for case in CASES if not re.match("tiles|decode|head dim|values|.*head dim", case.name)]
_DIFFERENTIABLE = ("bias", "alibi", "sinks")

# The axis of an operand that each axis of a mesh partitions. Keys of masks and biases are not sharded.
_PARTITIONED = {
    "sequence": dict(bias=-2, mask=-2, segment_ids=-1),
    "batch": dict(bias=-4, mask=-4, segment_ids=-2)
    | dict.fromkeys(("query_seq_lengths", "key_value_seq_lengths", "query_offset"), -1),
    "heads": dict(bias=-3, mask=-3, sinks=-1, alibi=-1),
}

Results = tuple[oracle.Result, dict[str, np.ndarray]]


def fitted(case: Case, num_devices: int, strategy: str) -> Case:
    """The case with lengths that can be sharded."""
    return harness.fitted(case, num_devices * (2 if strategy == "zigzag" else 1))


def run(case: Case, dtype: str, mesh: Mesh, strategy: str, **more: Any) -> Results:
    """What harness.run_with_operands returns, from shards."""
    if strategy == SHARDED_JIT:
        return run_jit(case, dtype, mesh, **more)
    return run_ring(case, dtype, mesh, strategy, **more)


def rows_of(mesh: Mesh) -> P:
    """Of arrays [B, length, heads, head dim] whose rows, and batch or heads, are sharded over axes of these names."""
    return P(*(name if name in mesh.axis_names else None for name in ("batch", "sequence", "heads")), None)


def whole(x: jax.Array) -> np.ndarray:
    """The array with the shards of all devices, also of those of other processes."""
    return np.asarray(x if x.is_fully_addressable else multihost_utils.process_allgather(x, tiled=True))


def collectives(text: str) -> list[tuple[str, tuple[int, ...]]]:
    """What moves between devices in a compiled program: the operation and the shape of each array."""
    kinds = "all-gather|all-to-all|all-reduce|reduce-scatter|collective-permute"
    return [
        (kind, tuple(map(int, filter(None, shape.split(",")))))
        for arrays, kind in re.findall(rf"= (.*?) ({kinds})(?:-start)?\(", text)
        for shape in re.findall(r"\w+\[([\d,]*)\]", arrays)
    ]


# ---- Sharded jit ----------------------------------------------------------------------------------------------


def put(mesh: Mesh, spec: P, *arrays: Any) -> list[jax.Array]:
    """The arrays on a mesh; one with fewer axes than the partition has ends where it ends."""
    return [jax.device_put(x, NamedSharding(mesh, P(*spec[: np.ndim(x)]))) for x in arrays]


def run_jit(case: Case, dtype: str, mesh: Mesh, spec_kv: P | None = None, **more: Any) -> Results:
    """With lengths that do not divide evenly, too: only within a program are arrays sharded into unequal parts.

    Keys are sharded as queries are, unless `spec_kv` says how.
    """
    static, spec = case.static | more, rows_of(mesh)
    num_parts = mesh.shape["sequence"]
    is_even = not (case.seqlen_q % num_parts or case.seqlen_kv % num_parts)

    def forward_and_backward(q, k, v, dout, dlse, operands):
        if not is_even:
            rows = NamedSharding(mesh, P(*spec[:2]))
            q, k, v, dout, dlse = jax.lax.with_sharding_constraint((q, k, v, dout, dlse), rows)
        differentiable = {name: operands[name] for name in _DIFFERENTIABLE if name in operands}
        f = functools.partial(harness.call, return_residual=True, **static)
        results, vjp = jax.vjp(lambda q, k, v, d: f(q, k, v, operands | d), q, k, v, differentiable)
        return results, vjp((dout, dlse))

    with harness.x64(dtype):
        q, k, v, dout, dlse = case.inputs(DTYPES[dtype])
        if is_even:
            (q, dout, dlse), (k, v) = put(mesh, spec, q, dout, dlse), put(mesh, spec_kv or spec, k, v)
        results, gradients = jax.jit(forward_and_backward)(q, k, v, dout, dlse, case.operands(DTYPES[dtype]))
        for x, like in zip((*results, gradients[0]), (dout, dlse, q), strict=True):
            assert not is_even or x.sharding.is_equivalent_to(like.sharding, x.ndim)
        *of_inputs, of_operands = jax.tree.map(whole, gradients)
        return oracle.Result(*map(whole, results), *of_inputs), of_operands


# ---- ring_attention -------------------------------------------------------------------------------------------


def in_order(layout: str, num_devices: int, name: str, x: Any, inverse: bool = False) -> Any:
    """An argument of the whole sequence in the order of the layout, or back."""
    if isinstance(x, tuple):
        return tuple(in_order(layout, num_devices, name, part, inverse) for part in x)
    for axis in _sequence_axes(name) if layout == "zigzag" else ():
        if x.ndim >= -axis and x.shape[axis] != 1:
            x = np.take(np.asarray(x), _zigzag(x.shape[axis], num_devices, inverse), axis)
    return x


@functools.cache
def _zigzag(length: int, num_devices: int, inverse: bool) -> np.ndarray:
    order = jax_flash.from_zigzag if inverse else jax_flash.to_zigzag
    return np.asarray(order(np.arange(length, dtype=np.int32), num_devices, 0))


def _sequence_axes(name: str) -> tuple[int, ...]:
    if name in ("bias", "mask"):
        return -2, -1
    return {"q": (-3,), "k": (-3,), "v": (-3,), "out": (-3,), "lse": (-2,), "segment_ids": (-1,)}.get(
        name, ()
    )


def _spec_of(mesh: Mesh, name: str, x: Any) -> Any:
    if isinstance(x, tuple):
        return tuple(_spec_of(mesh, name, part) for part in x)
    axes = {_PARTITIONED.get(axis, {}).get(name): axis for axis in mesh.axis_names}
    return P(*(axes.get(axis - x.ndim) if size != 1 else None for axis, size in enumerate(x.shape)))


def ring_call(
    mesh: Mesh, layout: str, operands: dict[str, Any], check_vma: bool = True, **static: Any
) -> Callable:
    """ring_attention of whole arrays in the order of the layout: out and lse."""

    def local(q, k, v, operands):
        operands = dict(operands)
        if "alibi" in operands:
            operands["bias"] = jax_flash.Alibi(operands.pop("alibi"))
        if "dropout_seed" in operands:
            operands["dropout_rng"] = jax.random.key(operands.pop("dropout_seed"))
        return jax_flash.ring_attention(
            q, k, v, axis_name="sequence", layout=layout, return_residual=True, **static, **operands
        )

    rows = rows_of(mesh)
    specs = {name: _spec_of(mesh, name, x) for name, x in operands.items()}
    in_specs, out_specs = (rows, rows, rows, specs), (rows, P(*rows[:3]))
    return jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=check_vma)


def run_ring(case: Case, dtype: str, mesh: Mesh, layout: str, **more: Any) -> Results:
    order = functools.partial(in_order, layout, mesh.shape["sequence"])

    @jax.jit
    def forward_and_backward(q, k, v, dout, dlse, operands):
        differentiable = {name: operands[name] for name in _DIFFERENTIABLE if name in operands}
        f = ring_call(mesh, layout, operands, **case.static, **more)
        results, vjp = jax.vjp(lambda q, k, v, d: f(q, k, v, operands | d), q, k, v, differentiable)
        return results, vjp((dout, dlse))

    with harness.x64(dtype):
        inputs = case.inputs(DTYPES[dtype])
        names = ("q", "k", "v", "out", "lse")
        args = [order(name, x) for name, x in zip(names, inputs, strict=True)]
        operands = {name: order(name, x) for name, x in case.operands(DTYPES[dtype]).items()}
        if isinstance(dict(case.options).get("query_offset"), int):
            more["query_offset"] = int(operands.pop("query_offset"))  # known when the steps are planned
        results, (*gradients, of_operands) = forward_and_backward(*args, operands)
        back = functools.partial(order, inverse=True)
        results = [
            back(name, whole(x))
            for name, x in zip(("out", "lse", "q", "k", "v"), (*results, *gradients), strict=True)
        ]
        return oracle.Result(*results), {name: back(name, whole(x)) for name, x in of_operands.items()}

"""What `custom_partitioning` leaves to its users: shard_map over some mesh axes, and keys of the compilation cache.

The private parts of JAX that this package needs are imported here and nowhere else. Each may go; then what it is for is
lost, and nothing else.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.extend.mlir import ir
from jax.interpreters import mlir
from jax.sharding import Mesh

from . import _library

try:
    # jit gives a lowering rule the devices, which custom_partitioning needs, only for the primitives in this set.
    from jax._src.dispatch import prim_requires_devices_during_lowering as _needs_devices
except ImportError:
    _needs_devices = None
    warnings.warn(
        f"jax_flash cannot partition its kernels with jax {jax.__version__}: sharded inputs of attention will be "
        "gathered on every device. A newer jax_flash may know this version of jax.",
        stacklevel=2,
    )
try:
    from jax._src.custom_partitioning import _sharding_callbacks
except ImportError:
    _sharding_callbacks = None  # programs are partitioned, and compiled anew by each process

_PREFIX = "jax_flash "  # of the names that are ours

CAN_PARTITION = _needs_devices is not None


def register_lowering(primitive: Primitive, call: Callable) -> None:
    """Lowers `primitive` by `call(whole_mesh, *args, **params)`, which may bind one custom_partitioning.

    `whole_mesh` is None unless some mesh axes are manual, in a shard_map over them, and others are left to the
    compiler. Then the partitioning rule is asked about a mesh of the others, as XLA sees each group of devices along
    them, but its collectives run on the whole one: this is the mesh that the rule must return.
    """

    def lower(ctx: mlir.LoweringRuleContext, *args: ir.Value, **params: Any):
        whole_mesh, auto_mesh = _partly_manual(ctx.module_context.axis_context)
        with _current(auto_mesh):
            results = mlir.lower_fun(lambda *args: call(whole_mesh, *args, **params))(ctx, *args)
        for op in _partitioned_calls(results):
            _name_stably(op, ctx, f"{primitive} {params}")
        return results

    mlir.register_lowering(primitive, lower)
    if _needs_devices is not None:
        _needs_devices.add(primitive)


# Partly manual meshes


def _partly_manual(axis_context: Any) -> tuple[Mesh | None, Mesh | None]:
    mesh, manual = getattr(axis_context, "mesh", None), getattr(axis_context, "manual_axes", ())
    auto = tuple(name for name in mesh.axis_names if name not in manual) if isinstance(mesh, Mesh) else ()
    if not manual or not auto:
        return None, None
    # Any of the groups: only the places of the devices count.
    devices = mesh.devices[tuple(0 if name in manual else slice(None) for name in mesh.axis_names)]
    return mesh, Mesh(devices, auto)


@contextlib.contextmanager
def _current(mesh: Mesh | None) -> Iterator[None]:
    """Makes `mesh` the one that custom_partitioning takes where the program's own has manual axes."""
    if mesh is None:
        yield
        return
    with warnings.catch_warnings():
        # What is to replace it, jax.set_mesh, custom_partitioning does not look at.
        warnings.simplefilter("ignore", DeprecationWarning)
        mesh.__enter__()
    try:
        yield
    finally:
        mesh.__exit__(None, None, None)


# The persistent compilation cache


def _partitioned_calls(values: Iterable[ir.Value], depth: int = 4) -> Iterator[ir.Operation]:
    """The call that gave the values, behind the few operations that may follow it; none where there is one device."""
    for value in values:
        op = value.owner
        if isinstance(op, ir.Block):  # an argument
            continue
        if op.name != "stablehlo.custom_call":
            yield from _partitioned_calls(op.operands, depth - 1) if depth else ()
        elif "sdy.sharding_rule" in op.attributes:
            yield op


def _name_stably(op: ir.Operation, ctx: mlir.LoweringRuleContext, call: str) -> None:
    """Names a call that custom_partitioning made after what it does.

    JAX names it after the address of a Python object, which is then part of the program's key in the persistent
    compilation cache: no other process would ever find it there. To leave the name out of the key, as JAX can be told
    to, would let calls of equal shapes and different options pass for each other.
    """
    name = ir.StringAttr(op.attributes["backend_config"]).value
    info = None if _sharding_callbacks is None else _sharding_callbacks.get(name.encode())
    if info is None or name.startswith(_PREFIX):
        return
    module_context = ctx.module_context
    axis_context = module_context.axis_context
    parts = (
        _fingerprint(),
        call,
        ctx.avals_in,
        info.mesh,
        [] if info.mesh.empty else [device.id for device in info.mesh.devices.flat],
        getattr(axis_context, "mesh", None),
        sorted(getattr(axis_context, "manual_axes", ())),
        [device.id for device in getattr(axis_context, "device_assignment", None) or ()],
        module_context.platforms,
    )
    stable = _PREFIX + hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()
    # The first of equal ones serves all, and lives as long as any program that names it.
    module_context.add_keepalive(_sharding_callbacks.setdefault(stable.encode(), info))
    op.attributes["backend_config"] = ir.StringAttr.get(stable)


@functools.cache
def _fingerprint() -> str:
    """Of this code and its library: what they make of a call is not in the program that is looked up."""
    digest = hashlib.sha256(_library.description())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()

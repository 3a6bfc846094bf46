"""Beyond `custom_partitioning`: shard_map over some mesh axes, and stable keys in the compilation cache.

All private parts of JAX that this package needs are imported here. If one disappears, only its feature is lost.
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
    # custom_partitioning needs the devices, which jit passes only to lowering rules of the primitives in this set.
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
    _sharding_callbacks = None  # programs are partitioned, but every process compiles them anew

_PREFIX = "jax_flash "  # of the names given here

CAN_PARTITION = _needs_devices is not None


def register_lowering(primitive: Primitive, call: Callable) -> None:
    """Lowers `primitive` by `call(whole_mesh, *args, **params)`, which may bind one custom_partitioning.

    `whole_mesh` is None unless a shard_map makes some mesh axes manual and leaves others to the compiler. XLA then
    asks the partitioning rule about a mesh of the others only, but the rule's collectives run on the whole mesh, which
    it must return.
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


def register_program(primitive: Primitive, program: Callable) -> None:
    """Lowers `primitive` by `program(*args, **params)`, which may bind primitives of `register_lowering`."""
    mlir.register_lowering(primitive, mlir.lower_fun(program))
    if _needs_devices is not None:
        _needs_devices.add(primitive)


# Partly manual meshes


def _partly_manual(axis_context: Any) -> tuple[Mesh | None, Mesh | None]:
    mesh, manual = getattr(axis_context, "mesh", None), getattr(axis_context, "manual_axes", ())
    auto = tuple(name for name in mesh.axis_names if name not in manual) if isinstance(mesh, Mesh) else ()
    if not manual or not auto:
        return None, None
    # Any group along the other axes will do: only the positions of the devices count.
    devices = mesh.devices[tuple(0 if name in manual else slice(None) for name in mesh.axis_names)]
    return mesh, Mesh(devices, auto)


@contextlib.contextmanager
def _current(mesh: Mesh | None) -> Iterator[None]:
    """Makes `mesh` current: custom_partitioning takes it if the program's own mesh has manual axes."""
    if mesh is None:
        yield
        return
    with warnings.catch_warnings():
        # custom_partitioning does not look at its replacement, jax.set_mesh.
        warnings.simplefilter("ignore", DeprecationWarning)
        mesh.__enter__()
    try:
        yield
    finally:
        mesh.__exit__(None, None, None)


# The persistent compilation cache


def _partitioned_calls(values: Iterable[ir.Value], depth: int = 4) -> Iterator[ir.Operation]:
    """The call that produced the values, through the few operations that may follow it; none on one device."""
    for value in values:
        op = value.owner
        if isinstance(op, ir.Block):  # an argument
            continue
        if op.name != "stablehlo.custom_call":
            yield from _partitioned_calls(op.operands, depth - 1) if depth else ()
        elif "sdy.sharding_rule" in op.attributes:
            yield op


def _name_stably(op: ir.Operation, ctx: mlir.LoweringRuleContext, call: str) -> None:
    """Renames a call made by custom_partitioning after everything it depends on.

    JAX names it after the address of a Python object. The name is part of the program's key in the persistent
    compilation cache, so no other process would find the program. JAX can leave the name out of the key, but then
    calls with equal shapes and different options would share an entry.
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
    # The first of several equal callbacks serves all, and lives as long as any program that names it.
    module_context.add_keepalive(_sharding_callbacks.setdefault(stable.encode(), info))
    op.attributes["backend_config"] = ir.StringAttr.get(stable)


@functools.cache
def _fingerprint() -> str:
    """A hash of this code and its library, which decide what a call becomes but are not part of the program."""
    tables = (_library.build_info(), _library.options(), _library.operands(), _library.workspace())
    digest = hashlib.sha256(repr(tables).encode())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()

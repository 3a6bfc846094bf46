"""Loads the native library, checks that it fits this jaxlib and this Python code, and registers its FFI targets."""

from __future__ import annotations

import dataclasses
import re
import shlex
from pathlib import Path
from typing import Any

import jax
import jaxlib

from ._operands import OPERANDS, Operand
from ._options import AttentionOptions

try:
    from . import _library, _workspace
except ImportError as error:
    raise ImportError(
        f"jax_flash's native library could not be loaded ({error}). Install the package with pip, which compiles "
        "the library (a checkout's source folder alone does not have it), with the Python that runs now."
    ) from error

_CUDA_PLATFORM = "CUDA"


def build_info() -> dict[str, Any]:
    """What the native library was built with.

    Returns:
      "version" of jax_flash; "ffi_version" of XLA's FFI; "jaxlib", the version whose headers were used; "cuda" and
      "nvcc", versions that are empty without CUDA; "archs", the compute capabilities with machine code; "kernels", the
      names of the CUDA kernels.
    """
    return _library.build_info()


def ffi_targets() -> tuple[str, ...]:
    """The names of the custom calls, for `jax.export.DisabledSafetyCheck.custom_call`."""
    return tuple(sorted({name for targets in _library.registrations().values() for name in targets}))


def install_command(**options: str) -> str:
    """The command that builds and installs the package again with options, and leaves its dependencies alone."""
    defined = " ".join(f"-C {shlex.quote(f'cmake.define.{name}={value}')}" for name, value in options.items())
    return f"`pip install --force-reinstall --no-deps --no-cache-dir {defined} .`"


def local_gpus() -> list[jax.Device]:
    """This process's NVIDIA GPUs; none on a machine without one, where a call may still be lowered for a GPU."""
    try:
        return jax.local_devices(backend="cuda")
    except RuntimeError:
        return []


def check_gpu_kernels() -> None:
    """Refuses a GPU that the library has no kernels for.

    Raises:
      NotImplementedError: the library was built without CUDA, or for newer GPUs than this machine has.
    """
    if _CUDA_PLATFORM not in _library.registrations():
        raise NotImplementedError(
            "This build of jax_flash has no CUDA kernels, as it was installed without an NVIDIA driver and an nvcc. "
            f'In a checkout, run {install_command(JAX_FLASH_CUDA="ON")}, or pass implementation="xla".'
        )
    oldest_built = min(int(re.match(r"\d+", arch)[0]) for arch in _library.build_info()["archs"].split(";"))
    for device in local_gpus():
        capability = device.compute_capability
        if round(10 * float(capability)) < oldest_built:
            raise NotImplementedError(
                f"{device.device_kind} has compute capability {capability}, and this build of jax_flash has kernels "
                f"for {oldest_built / 10} and newer. GPUs before 8.0 are not supported; for others, install it "
                'again with kernels for that architecture (see the README), or pass implementation="xla".'
            )


def _runtime_ffi_version() -> tuple[int, int] | None:
    """The XLA FFI version of the installed jaxlib, from the header it ships; None if it ships none."""
    header = Path(jax.ffi.include_dir(), "xla/ffi/api/c_api.h")
    if not header.exists():
        return None
    text = header.read_text()
    major, minor = (
        int(re.search(rf"#define XLA_FFI_API_{part} (\d+)", text)[1]) for part in ("MAJOR", "MINOR")
    )
    return major, minor


def _check_ffi_version() -> None:
    # XLA registers a handler that was built with newer headers without an error; then the whole backend fails to start.
    info = _library.build_info()
    built = tuple(int(part) for part in info["ffi_version"].split("."))
    runtime = _runtime_ffi_version()
    if runtime is not None and (built[0] != runtime[0] or built[1] > runtime[1]):
        include = dict(
            JAX_FLASH_JAXLIB_INCLUDE=jax.ffi.include_dir(), JAX_FLASH_JAXLIB_VERSION=jaxlib.__version__
        )
        raise ImportError(
            f"jax_flash was built for XLA FFI {built[0]}.{built[1]} (jaxlib {info['jaxlib']}), but the installed "
            f"jaxlib {jaxlib.__version__} has XLA FFI {runtime[0]}.{runtime[1]}. Upgrade jax and jaxlib to at least "
            f"{info['jaxlib']}, or build jax_flash for the installed one: in a checkout, run "
            f"{install_command(**include)}."
        )


def _library_options() -> dict[str, str]:
    types = {"double": "float", "bool": "bool", "int64_t": "int"}
    return {name: types[type_] for name, type_ in _library.options().items()}


def _library_operands() -> list[Operand]:
    dtypes = {"S32": "int32", "U32": "uint32", "PRED": "bool", "LSE": "lse", "FLOATING": "floating"}

    def axes(shape: str) -> str:
        _, *sizes = re.findall(r"\w+", shape)  # {B, N, 5}, as in operands.def
        return "".join({"5": "w"}.get(size, size.lower()) for size in sizes)

    return [
        Operand(x["name"], axes(x["shape"]), dtypes[x["dtype"]], x["type"] == "PairArray")
        for x in _library.operands()
    ]


def _check_interface() -> None:
    # In a checkout, its Python code runs with whatever library is installed.
    types = {field.name: field.type for field in dataclasses.fields(AttentionOptions)}
    options = {name: types[name] for name in AttentionOptions.resolve(head_dim=1).attributes()}
    try:  # a library of other sources may have, for example, a dtype that this code does not know
        is_same = _library_options() == options and _library_operands() == list(OPERANDS)
        _workspace.compile_table()
    except (KeyError, SyntaxError, TypeError, ValueError):
        is_same = False
    if not is_same:
        raise ImportError(
            f"jax_flash's native library was not built from the sources of this Python code, {Path(__file__).parent}: "
            "they differ in the options, operands or workspace of attention. Install the package again with pip."
        )


def _register_targets() -> None:
    for platform, targets in _library.registrations().items():
        for name, handler in targets.items():
            jax.ffi.register_ffi_target(name, handler, platform=platform)


_check_ffi_version()
_check_interface()
_register_targets()

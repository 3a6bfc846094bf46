"""The native library, libjax_flash.so: its FFI handlers and what it tells of itself."""

import ctypes
import json
from importlib.metadata import PackageNotFoundError, distribution

import jax


def _load() -> ctypes.CDLL:
    # Beside the installed package, which in a checkout is not the one beside this file.
    try:
        path = distribution("jax_flash").locate_file("jax_flash/libjax_flash.so")
    except PackageNotFoundError:
        raise ImportError("the package is not installed") from None
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise ImportError(str(error)) from error


_dll = _load()
_dll.JaxFlashDescription.restype = ctypes.c_char_p
_description = json.loads(_dll.JaxFlashDescription())


def description() -> bytes:
    """All that the library tells of itself."""
    return _dll.JaxFlashDescription()


def registrations() -> dict[str, dict[str, object]]:
    """The FFI handlers as `jax.ffi.register_ffi_target` takes them: {platform: {target: capsule}}."""
    return {
        platform: {
            target: jax.ffi.pycapsule(getattr(_dll, f"{_camel_case(target)}{platform.capitalize()}"))
            for target in ("jax_flash_forward", "jax_flash_backward", "jax_flash_backward_bias")
        }
        for platform in _description["platforms"]
    }


def _camel_case(name: str) -> str:
    return "".join(word.capitalize() for word in name.split("_"))


def options() -> dict[str, str]:
    """The op's options and their C++ types, in the order of options.def."""
    return dict(_description["options"])


def operands() -> list[dict[str, str]]:
    """The op's optional operands in the order of operands.def: name, C++ type, dtype and shape as they stand there."""
    return list(_description["operands"])


def build_info() -> dict:
    """What the library was built from."""
    names = ("version", "ffi_version", "jaxlib", "cuda", "nvcc", "archs", "kernels")
    return {name: _description[name] for name in names}

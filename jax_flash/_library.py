"""The native library, libjax_flash.so: its FFI handlers and its description of itself."""

import ctypes
import json
from importlib.metadata import PackageNotFoundError, distribution

import jax


def _load() -> ctypes.CDLL:
    # The installed package has it; in a checkout, this file's folder does not.
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
    """The library's whole description of itself, as JSON."""
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
    """The rows of operands.def, in order: name, C++ type, dtype and shape, as text."""
    return list(_description["operands"])


def workspace() -> list[dict[str, str]]:
    """The rows of workspace.def, in order: name, dtype, condition and shape, as text."""
    return list(_description["workspace"])


def constants() -> dict[str, int]:
    """The constants of the C++ code that Python needs, too."""
    return dict(_description["constants"])


def build_info() -> dict:
    """What the library was built with and for."""
    names = ("version", "ffi_version", "jaxlib", "cuda", "nvcc", "archs", "kernels")
    return {name: _description[name] for name in names}

"""The native library's FFI handlers and its description of itself: the functions of the module `_native`."""

import importlib.util
from importlib.machinery import PathFinder
from importlib.metadata import PackageNotFoundError, distribution
from types import ModuleType


def _load() -> ModuleType:
    # The installed package has the module; in a checkout, this file's folder does not.
    try:
        package = distribution("jax_flash").locate_file("jax_flash")
    except PackageNotFoundError:
        raise ImportError("the package is not installed") from None
    spec = PathFinder.find_spec("jax_flash._native", [str(package)])
    if spec is None:
        raise ImportError(f"{package} has no module _native for this Python")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_native = _load()

registrations = _native.registrations
options = _native.options
operands = _native.operands
workspace = _native.workspace
constants = _native.constants
build_info = _native.build_info
set_test_settings = _native.set_test_settings

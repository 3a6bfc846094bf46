"""The CUDA kernels on a machine without a GPU: compiled for the host, where threads are fibers.

The sources are those of cuda/ with three changes: instructions of PTX have a form for the host (tests/emulator/ptx),
dynamic shared memory is an array, and a launch is a call. Warps run in lockstep only where they must, addresses in
shared memory are checked, and what is asynchronous happens as late as it may, on Hopper at once or late, at random.

The environment variable JAX_FLASH_EMULATE is the compute capability of the GPU, 80 or 90.
"""

import collections
import concurrent.futures
import ctypes
import dataclasses
import functools
import hashlib
import os
import pathlib
import re
import shutil
import subprocess
import tempfile
import types

import jax
from jax.interpreters import mlir

from jax_flash import _blocked, _checks, _ffi, _kernel_choice, _library, _passes, _primitives

ROOT = pathlib.Path(__file__).resolve().parent.parent
EMULATOR = ROOT / "tests" / "emulator"
FOLDER = ROOT / "build" / "emulated"
PASSES = ("forward", "backward", "backward_bias", "tangent", "backward_tangent")
_FLAGS = (
    *("-std=c++20", "-O1", "-fPIC", "-U_FORTIFY_SOURCE"),  # which does not allow jumps from stack to stack
    # float16 is converted by instructions: by calls, that is 40 % of the time. Products and sums stay separate.
    *("-march=native", "-ffp-contract=off"),
    *("-Wall", "-Wextra", "-Wno-unknown-pragmas", "-Wno-maybe-uninitialized"),
    "-Wno-missing-field-initializers",
    "-Wno-psabi",
    *("-include", "emulator.h"),
)


def compiler() -> str | None:
    return os.environ.get("CXX") or next(filter(shutil.which, ("g++", "c++", "clang++")), None)


@functools.cache
def listed_kernels(**settings: str) -> list[tuple[str, str, str, int]]:
    """The rows of cuda/kernels.cmake: direction, arch, arithmetic, head dim. Needs CMake.

    The settings are options of the build, without JAX_FLASH_.
    """
    settings = {"CUDA_ARCHS": "80 90"} | settings
    assignments = "".join(f"set(JAX_FLASH_{name} {value})\n" for name, value in settings.items())
    script = (
        "cmake_minimum_required(VERSION 3.24)\n"
        f"{assignments}"
        "function(jax_flash_kernels direction arch arithmetics head_dim)\n"
        "  foreach(arithmetic IN LISTS arithmetics)\n"
        '    message(STATUS "${direction};${arch};${arithmetic};${head_dim}")\n'
        "  endforeach()\n"
        "endfunction()\n"
        f'include("{ROOT / "cuda" / "kernels.cmake"}")\n'
    )
    with tempfile.NamedTemporaryFile("w", suffix=".cmake") as file:
        file.write(script)
        file.flush()
        printed = subprocess.check_output(["cmake", "-P", file.name], text=True)
    rows = [line.removeprefix("-- ").split(";") for line in printed.splitlines()]
    return [(direction, arch, arithmetic, int(head_dim)) for direction, arch, arithmetic, head_dim in rows]


def kernel_names() -> list[str]:
    """The listed kernels, named as in `build_info`."""
    return [" ".join(map(str, row)) for row in listed_kernels()]


def unit(template: str, direction: str, arch: str, arithmetics: list[str], head_dim: int) -> str:
    """The unit that CMake makes from cuda/kernel.cu.in for a row of cuda/kernels.cmake."""
    values = dict(DIRECTION=direction, ARCH=arch, HEAD_DIM=str(head_dim))
    values["ARITHMETICS"] = " ".join(arithmetics)
    values["INSTANCES"] = "\n".join(f"KERNEL({arithmetic})" for arithmetic in arithmetics)
    return re.sub(r"@(\w+)@", lambda match: values[match[1]], template)


def _for_the_host(text: str) -> str:
    text = re.sub(
        r"extern __shared__ __align__\(\d+\) uint8_t (\w+)\[\];",
        r"uint8_t* \1 = emulator::dynamic_shared();",
        text,
    )
    return text.replace("__shared__", "static")


def _sources() -> dict[str, str]:
    """The files to compile, by path."""
    files = {}
    for folder in ("cuda", "cpp"):
        for path in (ROOT / folder).rglob("*"):
            if path.is_file():
                files[str(path.relative_to(ROOT))] = _for_the_host(path.read_text())
    for path in EMULATOR.rglob("*"):
        if path.is_file():
            name = path.relative_to(EMULATOR)
            files["cuda/" * (name.parts[0] == "ptx") + str(name)] = path.read_text()
    template = files["cuda/kernel.cu.in"]
    table = ""
    # The arithmetics of each unit. Headers take a third of the compiler's time.
    units = collections.defaultdict(list)
    for direction, arch, arithmetic, head_dim in listed_kernels():
        table += f"KERNEL({direction}, {arch}, {arithmetic}, {head_dim})\n"
        units[direction, arch, head_dim].append(arithmetic)
    for (direction, arch, head_dim), arithmetics in units.items():
        files[f"{direction}_{arch}_{head_dim}.cc"] = unit(template, direction, arch, arithmetics, head_dim)
    files["kernels.def"] = table
    return files


@functools.cache
def library() -> ctypes.CDLL:
    """Compiles what has changed, and loads it."""
    files = _sources()
    macros = subprocess.check_output(
        [compiler(), *_FLAGS[:-2], "-E", "-dM", "-x", "c++", os.devnull]
    )  # of this CPU
    key = hashlib.sha256(
        repr((sorted(files.items()), _FLAGS, compiler(), macros, jax.ffi.include_dir())).encode()
    )
    path = FOLDER / f"emulated_{key.hexdigest()[:16]}.so"
    if not path.exists():
        FOLDER.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
            _compile(files, pathlib.Path(folder)).replace(path)
    loaded = ctypes.cdll.LoadLibrary(str(path))
    loaded.num_arrivals.restype = ctypes.c_int64
    return loaded


def _compile(files: dict[str, str], folder: pathlib.Path) -> pathlib.Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    includes = [f"-I{folder / name}" for name in ("include", "cuda", "cpp", ".")]
    units = [name for name in files if "/" not in name and name.endswith(".cc")]
    units += ["cuda/dispatch.cu", "cuda/planes.cu", "cuda/visibility.cu"]
    units += [f"cpp/ffi_{name}.cc" for name in ("call", "decode", "workspace")]

    def compile_unit(name: str) -> pathlib.Path:
        target = folder / f"{name.replace('/', '_')}.o"
        headers = ["-isystem", jax.ffi.include_dir()]
        command = [compiler(), *_FLAGS, *includes, *headers, "-x", "c++", "-c", folder / name, "-o", target]
        subprocess.run(command, check=True)
        return target

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compile_unit, units))
    shared = folder / "emulated.so"
    subprocess.run([compiler(), "-shared", *objects, "-o", shared], check=True)
    return shared


def install() -> None:
    """Lets programs that this process compiles for the CPU call these kernels from now on."""
    capability = os.environ["JAX_FLASH_EMULATE"]
    if capability not in ("80", "90"):
        raise ValueError(f"JAX_FLASH_EMULATE must be 80 or 90, got {capability!r}.")
    for name in PASSES:
        handler = jax.ffi.pycapsule(getattr(library(), f"{name}_emulated"))
        jax.ffi.register_ffi_target(f"jax_flash_{name}_emulated", handler, platform="cpu")
    kernels = kernel_names()
    gpu = types.SimpleNamespace(device_kind="emulated", compute_capability=f"{capability[0]}.{capability[1]}")
    _ffi.local_gpus = lambda: [gpu]
    build_info = _ffi.build_info
    _ffi.build_info = lambda: build_info() | {"kernels": kernels}

    def set_test_settings(*settings: str | None) -> None:
        settings += (None,) * (3 - len(settings))
        library().set_test_settings(*(None if text is None else text.encode() for text in settings))

    _library.set_test_settings = set_test_settings
    lower_ffi = _primitives._lower_ffi

    def lower(call, ctx, args, workspace, **params):
        if call.target.removeprefix("jax_flash_") not in PASSES:
            return lower_ffi(call, ctx, args, workspace, **params)
        if call is _passes.BACKWARD_TANGENT and not _kernel_choice.backward_tangent_fits(*ctx.avals_in[:3]):
            return _primitives._lower_blocked(_blocked.backward_tangent, call, ctx, *args, **params)
        if call is _passes.TANGENT and not _kernel_choice.has_tangent_kernel(*ctx.avals_in[:3]):
            return _primitives._lower_blocked(_blocked.tangent, call, ctx, *args, **params)
        workspace = _primitives._workspace_avals(call, ctx.avals_in, **params)
        call = dataclasses.replace(call, target=f"{call.target}_emulated")
        return lower_ffi(call, ctx, args, workspace, **params)

    _primitives._lower_ffi = lower
    _checks.check_cuda = lambda *_, **__: None  # of the installed library, which may have no kernels
    mlir.register_lowering(
        _primitives._backward_with_bias_call_p,
        functools.partial(_primitives._lower_backward_with_bias_cuda, _passes.BACKWARD_WITH_BIAS),
        platform="cpu",
    )

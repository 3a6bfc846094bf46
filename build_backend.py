"""scikit-build-core's build hooks, which also request compile-time dependencies from the package index.

Two dependencies are requested if they are missing:

* jaxlib, for the headers of the XLA FFI. They come from the oldest supported jaxlib, because handlers built with
  older headers work on newer runtimes, but not vice versa.
* NVIDIA's compiler, if CUDA kernels are to be built, this machine has no usable nvcc and NVIDIA publishes wheels for
  its platform.

Both are copied into build/deps, which outlives pip's isolated environments. The next install does not download them
and, since no path has changed, compiles nothing again.

The config setting `cmake.define.JAX_FLASH_CUDA` chooses whether CUDA kernels are built, and by which compiler:

* `AUTO`, the default: if this machine has an NVIDIA driver, or an nvcc in CUDACXX, on PATH or in CUDA_HOME.
* `ON`: always, by this machine's nvcc or else by the package index's.
* `SYSTEM`, `PYPI` or the path of an nvcc: always, by that compiler.
* `OFF`: never.

The kernels are built for the GPUs of this machine; without one, or if `cmake.define.JAX_FLASH_CUDA_ARCHS` says so, for
others.
"""

import ctypes
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

from scikit_build_core import build as _backend
from scikit_build_core.build import *  # noqa: F403  (hooks that are not overridden below)

_JAXLIB = "0.7.2"
# Pinned: drivers of CUDA 13.0 reject PTX of a newer compiler.
_CUDA = "13.0"
_CUDA_PACKAGES = (
    "nvidia-cuda-nvcc",
    "nvidia-nvvm",
    "nvidia-cuda-crt",
    "nvidia-cuda-runtime",
    "nvidia-cuda-cccl",
)
# The compiler of CUDA 12.9.1. CUDA 12.8.0 to 12.9.0 miscompile causal masks.
_OLDEST_NVCC = (12, 9, 86)
_OLDEST_GPU = 80  # ten times its compute capability
# What compiling takes on one of two cores of an AMD EPYC: for the CPU, for each kind of GPU, and for Hopper besides.
_CPU_SECONDS, _GPU_SECONDS, _HOPPER_SECONDS = 60, 1100, 1000

_DEPS = Path("build/deps").absolute()  # hooks run in the root of the source tree
_DEFINE = "cmake.define."


def get_requires_for_build_wheel(config_settings=None):
    """Return what pip installs into the isolated environment before `build_wheel`."""
    return _backend.get_requires_for_build_wheel(config_settings) + _requirements(config_settings)


def get_requires_for_build_editable(config_settings=None):
    """Return what pip installs into the isolated environment before `build_editable`."""
    return _backend.get_requires_for_build_editable(config_settings) + _requirements(config_settings)


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    """Build a wheel."""
    settings = _resolve(config_settings)
    _say(_announcement(_setting(config_settings, "JAX_FLASH_CUDA"), settings))
    return _backend.build_wheel(wheel_directory, settings, metadata_directory)


def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    """Build an editable wheel."""
    settings = _resolve(config_settings)
    _say(_announcement(_setting(config_settings, "JAX_FLASH_CUDA"), settings))
    return _backend.build_editable(wheel_directory, settings, metadata_directory)


def _requirements(config_settings):
    requirements = []
    if not _setting(config_settings, "JAX_FLASH_JAXLIB_INCLUDE") and not _kept_jaxlib(_JAXLIB).is_dir():
        requirements.append(f"jaxlib=={_JAXLIB}")
    if _nvcc(config_settings) == _kept_nvcc() and not _kept_nvcc().is_file():
        requirements.extend(f"{package}=={_CUDA}.*" for package in _CUDA_PACKAGES)
    return requirements


def _resolve(config_settings):
    """Return the settings, with the paths of the headers and of the compiler added."""
    # By default scikit-build-core uses the compiler that built this Python. It may not be installed, and it
    # differs from one Python to the next.
    compiler = next(filter(shutil.which, ("g++", "c++", "clang++")), None)
    if compiler:
        os.environ.setdefault("CXX", compiler)
    elif "CXX" not in os.environ:
        raise SystemExit("jax_flash: the build needs a C++ compiler (on Debian and Ubuntu: apt install g++).")
    settings = dict(config_settings or {})
    nvcc = _nvcc(settings)
    if nvcc == _kept_nvcc():
        _keep_nvcc()
    settings.pop(_DEFINE + "JAX_FLASH_CUDA", None)
    settings[_DEFINE + "JAX_FLASH_NVCC"] = str(nvcc or "")
    gpus = [gpu for gpu in _gpus() if gpu >= _OLDEST_GPU] if nvcc else []
    if gpus and not _setting(settings, "JAX_FLASH_CUDA_ARCHS"):
        settings[_DEFINE + "JAX_FLASH_CUDA_ARCHS"] = ";".join(map(str, gpus))
    if not _setting(settings, "JAX_FLASH_JAXLIB_INCLUDE"):
        version, include = _keep_jaxlib()
        settings[_DEFINE + "JAX_FLASH_JAXLIB_INCLUDE"] = str(include)
        settings[_DEFINE + "JAX_FLASH_JAXLIB_VERSION"] = version
    return settings


def _setting(config_settings, name):
    return (config_settings or {}).get(_DEFINE + name, "")


def _kept_jaxlib(version):
    return _DEPS / f"jaxlib-{version}" / "include"


def _keep_jaxlib():
    """Copy jaxlib's headers to build/deps unless they are there; return their version and folder."""
    version, kept = _JAXLIB, _kept_jaxlib(_JAXLIB)
    if not kept.is_dir():
        spec = importlib.util.find_spec("jaxlib")  # not imported, which takes seconds
        if spec is None:
            raise SystemExit(f"jax_flash: the build needs jaxlib's headers: pip install jaxlib=={_JAXLIB}")
        version = importlib.metadata.version("jaxlib")  # may differ without pip's build isolation
        kept = _kept_jaxlib(version)
        if not kept.is_dir():
            _copy(Path(spec.origin).parent / "include", kept)
    return version, kept


def _nvcc(config_settings):
    """Return the path of the CUDA compiler to use, or None for a build without CUDA."""
    choice = _setting(config_settings, "JAX_FLASH_CUDA") or "AUTO"
    if choice.upper() in ("OFF", "NONE"):
        return None
    if choice.upper() not in ("AUTO", "ON", "SYSTEM", "PYPI"):
        version = _nvcc_version(choice)
        if version < _OLDEST_NVCC:
            raise SystemExit(f"jax_flash: JAX_FLASH_CUDA={choice}: {_verdict(version)}")
        return Path(choice)
    is_auto = choice.upper() == "AUTO"
    is_wanted = not is_auto or _has_driver()
    nvcc = None if choice.upper() == "PYPI" else _system_nvcc(is_wanted)
    if nvcc is None and is_wanted and choice.upper() != "SYSTEM" and _has_cuda_wheels():
        nvcc = _kept_nvcc()
    if nvcc is None and not is_auto:
        raise SystemExit(f"jax_flash: JAX_FLASH_CUDA={choice}: no usable nvcc was found.")
    return nvcc


def _system_nvcc(is_wanted):
    """Return the first usable nvcc of CUDACXX, PATH, CUDA_HOME and, if CUDA kernels are wanted, /usr/local/cuda."""
    candidates = [os.environ.get("CUDACXX"), shutil.which("nvcc")]
    home = os.environ.get("CUDA_HOME") or ("/usr/local/cuda" if is_wanted else None)
    for candidate in (*candidates, home and f"{home}/bin/nvcc"):
        if candidate is None:
            continue
        version = _nvcc_version(candidate)
        if version >= _OLDEST_NVCC:
            return Path(candidate)
        if version:
            print(f"jax_flash: skipping {candidate}: {_verdict(version)}", file=sys.stderr)
    return None


def _has_driver():
    """Return whether this machine has an NVIDIA driver, and no GPU that is too old."""
    if not (_libcuda() or Path("/proc/driver/nvidia").exists()):
        return False
    gpus = _gpus()
    return not gpus or gpus[-1] >= _OLDEST_GPU


def _libcuda():
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def _gpus():
    """Return the compute capabilities of the visible GPUs, times ten, ascending; none if the driver tells none."""
    cuda, count = _libcuda(), ctypes.c_int()
    if cuda is None or cuda.cuInit(0) != 0 or cuda.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return []
    found = set()
    for device in range(count.value):
        major, minor = ctypes.c_int(), ctypes.c_int()
        # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR
        if all(
            cuda.cuDeviceGetAttribute(ctypes.byref(value), attribute, device) == 0
            for value, attribute in ((major, 75), (minor, 76))
        ):
            found.add(10 * major.value + minor.value)
    return sorted(found)


def _announcement(choice, settings):
    """Return what is built, about how long that takes, and how to build something else."""
    nvcc = _setting(settings, "JAX_FLASH_NVCC")
    archs = _setting(settings, "JAX_FLASH_CUDA_ARCHS")
    seconds = _CPU_SECONDS
    if nvcc:
        listed = archs.split(";") if archs else ["80", "90"]
        seconds += _GPU_SECONDS * len(listed) + _HOPPER_SECONDS * ("90" in listed)
        gpus = (
            " and ".join(f"{arch[:-1]}.{arch[-1]}" for arch in archs.split(";")) if archs else "8.0 and newer"
        )
        what = f"for the CPU and for GPUs of compute capability {gpus}, with {nvcc}"
        hint = "JAX_FLASH_CUDA=OFF builds for the CPU only"
    else:
        reason = "" if choice else ", as this machine has neither an NVIDIA driver nor an nvcc on its PATH"
        what = f"for the CPU only{reason}"
        hint = "JAX_FLASH_CUDA=ON builds for GPUs, too"
    cores = len(os.sched_getaffinity(0))
    minutes = max(1, round(seconds / cores / 60))
    return (
        f"jax_flash: compiling {what}: about {minutes} min on {cores} cores, the first time. `pip install -v` shows "
        f"the progress; -C cmake.define.{hint}."
    )


def _say(text):
    """Print on the terminal, because pip shows nothing of what a build prints, unless it fails."""
    try:
        with open("/dev/tty", "w") as terminal:
            terminal.write(f"\n{text}\n")
    except OSError:  # there is none
        print(text, file=sys.stderr)


def _nvcc_version(nvcc):
    try:
        output = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return ()
    match = re.search(r"V(\d+)\.(\d+)\.(\d+)", output)
    return tuple(map(int, match.groups())) if match else ()


def _verdict(version):
    if not version:
        return "not a working nvcc."
    got = ".".join(map(str, version))
    return f"nvcc {got} is older than the oldest supported, {'.'.join(map(str, _OLDEST_NVCC))} (CUDA 12.9.1)."


def _has_cuda_wheels():
    return (
        sys.platform == "linux"
        and platform.machine() in ("x86_64", "aarch64")
        and platform.libc_ver()[0] == "glibc"
    )


def _kept_nvcc():
    return _DEPS / f"cuda-{_CUDA}" / "bin" / "nvcc"


def _keep_nvcc():
    """Copy the compiler's wheels to build/deps in the layout of a toolkit, unless they are there."""
    toolkit = _kept_nvcc().parent.parent
    if toolkit.is_dir():
        return
    spec = importlib.util.find_spec("nvidia")
    for root in spec.submodule_search_locations if spec else ():
        wheels = Path(root) / "cu13"
        if (wheels / "bin" / "nvcc").is_file():
            # Shared libraries are half of the size, and static linking does not need them.
            _copy(wheels, toolkit, ignore=shutil.ignore_patterns("lib*.so*", "cmake"))
            return
    packages = " ".join(f"'{package}=={_CUDA}.*'" for package in _CUDA_PACKAGES)
    raise SystemExit(f"jax_flash: this environment lacks NVIDIA's compiler: pip install {packages}")


def _copy(source, target, **options):
    """Copy a folder atomically: an interrupted copy is never taken for a complete one."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f"{target.name}.{os.getpid()}")
    shutil.copytree(source, partial, **options)
    lib64 = partial / "lib64"
    if (partial / "lib").is_dir() and not lib64.exists():
        lib64.symlink_to("lib")  # nvcc looks in lib64; the wheels have only lib
    partial.rename(target)

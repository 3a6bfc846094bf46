"""What pip installs and how the build finds its compilers."""

import importlib.metadata
import importlib.util
import os
import pathlib
import re
import shutil
import stat
import subprocess
import sys
import tomllib
import types
import zlib

import emulated
import jax
import pytest
from harness import LIBRARY

import jax_flash
from jax_flash import _ffi

ROOT = pathlib.Path(__file__).parent.parent

# For tests that compile kernels.
compiles = pytest.mark.skipif(
    not os.environ.get("JAX_FLASH_TEST_INSTALL"),
    reason="compiles kernels, which takes a minute: set JAX_FLASH_TEST_INSTALL=1 for it",
)


def test_the_adapter_for_flax_is_there_without_flax():
    script = "import sys, jax_flash; jax_flash.flax.attention_fn; assert 'flax' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.fixture
def backend(monkeypatch, tmp_path):
    """The build backend on a machine with neither driver nor nvcc, and with an empty build folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CUDACXX", raising=False)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "none"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    spec = importlib.util.spec_from_file_location("build_backend", ROOT / "build_backend.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "_has_cuda_wheels", lambda: True)
    monkeypatch.setattr(module, "_has_driver", lambda: False)
    monkeypatch.setattr(module, "_gpus", list)
    return module


def write_nvcc(path: pathlib.Path, version: str) -> pathlib.Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release 0.0, V{version}'\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.mark.parametrize(
    ("output", "status", "passes"),
    [
        ("ptxas info : Used 168 registers", 0, True),
        (
            "ptxas info : (C7512) Potential Performance Loss: wgmma.mma_async instructions are serialized",
            0,
            False,
        ),
        ("error: expected an expression", 1, False),
    ],
)
def test_serialised_products_fail_the_build(output, status, passes):
    script = ROOT / "cpp" / "compile_kernel.sh"
    compiler = ["sh", "-c", f"echo '{output}' >&2; exit {status}"]
    done = subprocess.run(["sh", script, *compiler], capture_output=True, text=True)
    assert (done.returncode == 0) == passes
    assert output.split("(")[0] in done.stderr


def test_build_info():
    info = jax_flash.build_info()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert info["version"] == jax_flash.__version__ == project["version"]
    assert re.fullmatch(r"\d+\.\d+", info["ffi_version"])
    if info["cuda"]:
        assert re.fullmatch(r"\d+\.\d+\.\d+", info["cuda"])
        assert info["cuda"].startswith("13.0.") or "build/deps" not in info["nvcc"]  # the package index's
        assert re.fullmatch(r"\d+(;\d+)*", info["archs"])
        directions = {name.split()[0] for name in info["kernels"]}
        assert {"forward", "backward"} <= directions
    else:
        assert (info["nvcc"], info["archs"], info["kernels"]) == ("", "", [])


@pytest.mark.parametrize(
    ("runtime", "is_accepted"),
    [((0, 0), True), ((0, 1), True), ((0, -1), False), ((1, 0), False), (None, True)],
    ids=["same", "newer minor", "older minor", "another major", "unknown"],
)
def test_library_of_another_ffi_is_refused(runtime, is_accepted, monkeypatch):
    """A jaxlib runs libraries built for its own or an older minor version of the FFI."""
    major, minor = map(int, jax_flash.build_info()["ffi_version"].split("."))
    version = None if runtime is None else (major + runtime[0], minor + runtime[1])
    monkeypatch.setattr(_ffi, "_runtime_ffi_version", lambda: version)
    if is_accepted:
        _ffi._check_ffi_version()
    else:
        command = rf"`pip install .*--no-deps .*={re.escape(jax.ffi.include_dir())} .* \.`"
        with pytest.raises(ImportError, match=f"jax_flash was built for XLA FFI.*{command}"):
            _ffi._check_ffi_version()


@pytest.mark.skipif(not jax_flash.build_info()["cuda"], reason="the library was built without CUDA")
def test_gpu_older_than_the_kernels_is_refused(monkeypatch):
    gpus = []
    monkeypatch.setattr(_ffi, "local_gpus", lambda: gpus)
    oldest = min(int(arch) for arch in jax_flash.build_info()["archs"].split(";"))
    for capability in (oldest, oldest + 40):  # a newer GPU compiles the PTX
        gpus[:] = [types.SimpleNamespace(device_kind="a GPU", compute_capability=str(capability / 10))]
        _ffi.check_gpu_kernels()
    gpus.append(types.SimpleNamespace(device_kind="an old GPU", compute_capability="7.5"))
    with pytest.raises(NotImplementedError, match=r"an old GPU has compute capability 7\.5"):
        _ffi.check_gpu_kernels()


def test_wheel_size():
    assert len(zlib.compress(LIBRARY.read_bytes())) < 30e6  # the Python files are small beside it


def test_installed_files():
    files = {str(file) for file in importlib.metadata.files("jax_flash") if ".dist-info" not in file.parts[0]}
    native = {
        file for file in files if re.fullmatch(r"jax_flash/(libjax_flash|_native(\.[\w-]+)?)\.so", file)
    }
    assert len(native) == 2
    if any("editable" in file for file in files):
        pytest.skip("an editable install has its Python files in the checkout")
    sources = [path.relative_to(ROOT) for path in (ROOT / "jax_flash").rglob("*") if path.is_file()]
    expected = {str(path) for path in sources if "__pycache__" not in path.parts}
    assert {file for file in files if "__pycache__" not in file} == expected | native


def test_library_exports_only_its_description():
    if not shutil.which("nm"):
        pytest.skip("needs nm, of binutils")
    command = ["nm", "--dynamic", "--defined-only", "--format=posix", LIBRARY]
    names = {line.split()[0] for line in subprocess.check_output(command, text=True).splitlines()}
    assert names == {"JaxFlashLibrary"}


def test_library_needs_no_cuda_to_load():
    if not shutil.which("readelf"):
        pytest.skip("needs readelf, of binutils")
    needed = re.findall(r"NEEDED.*\[(.*)\]", subprocess.check_output(["readelf", "-d", LIBRARY], text=True))
    assert needed
    assert not [name for name in needed if "cuda" in name or "nv" in name]


def test_nvcc_on_path(backend, tmp_path):
    nvcc = write_nvcc(tmp_path / "bin" / "nvcc", "12.9.86")
    assert backend._nvcc({}) == nvcc
    assert backend._requirements({}) == ["jaxlib==0.7.2"]


def test_nvcc_of_environment(backend, monkeypatch, tmp_path):
    write_nvcc(tmp_path / "bin" / "nvcc", "13.0.88")
    other = write_nvcc(tmp_path / "other" / "nvcc", "13.1.80")
    monkeypatch.setenv("CUDACXX", str(other))
    assert backend._nvcc({}) == other


def test_nvcc_of_toolkit(backend, monkeypatch, tmp_path):
    """An nvcc that the user did not ask for is taken only if there is something to run its kernels."""
    monkeypatch.setattr(backend, "_nvcc_version", lambda nvcc: (13, 0, 88) if "cuda/bin" in str(nvcc) else ())
    monkeypatch.delenv("CUDA_HOME")
    toolkit = pathlib.Path("/usr/local/cuda/bin/nvcc")
    assert backend._nvcc({}) is None
    assert backend._nvcc({"cmake.define.JAX_FLASH_CUDA": "ON"}) == toolkit
    monkeypatch.setattr(backend, "_has_driver", lambda: True)
    assert backend._nvcc({}) == toolkit


def test_compiler_of_the_package_index_by_request(backend, tmp_path):
    write_nvcc(tmp_path / "bin" / "nvcc", "13.0.88")
    settings = {"cmake.define.JAX_FLASH_CUDA": "PYPI"}
    assert backend._nvcc(settings) == backend._kept_nvcc()
    assert len(backend._requirements(settings)) == 1 + len(backend._CUDA_PACKAGES)


@pytest.mark.parametrize("version", ["11.8.89", "12.8.61", "12.8.93", "12.9.41"])
def test_nvcc_too_old(backend, monkeypatch, tmp_path, capsys, version):
    """The build requests NVIDIA's wheels instead."""
    monkeypatch.setattr(backend, "_has_driver", lambda: True)
    nvcc = write_nvcc(tmp_path / "bin" / "nvcc", version)
    requirements = backend._requirements({})
    assert requirements[1:] == [f"{package}==13.0.*" for package in backend._CUDA_PACKAGES]
    assert version in capsys.readouterr().err
    for choice in ("SYSTEM", str(nvcc)):
        with pytest.raises(SystemExit, match="JAX_FLASH_CUDA"):
            backend._nvcc({"cmake.define.JAX_FLASH_CUDA": choice})


def test_no_nvcc(backend, monkeypatch):
    """NVIDIA's compiler is downloaded only for a driver or by request."""
    with_compiler = ["jaxlib==0.7.2", *(f"{package}==13.0.*" for package in backend._CUDA_PACKAGES)]
    assert backend._requirements({}) == ["jaxlib==0.7.2"]
    assert backend._requirements({"cmake.define.JAX_FLASH_CUDA": "ON"}) == with_compiler
    monkeypatch.setattr(backend, "_has_driver", lambda: True)
    assert backend._requirements({}) == with_compiler
    assert backend._requirements({"cmake.define.JAX_FLASH_CUDA": "OFF"}) == ["jaxlib==0.7.2"]
    monkeypatch.setattr(backend, "_has_cuda_wheels", lambda: False)
    assert backend._requirements({}) == ["jaxlib==0.7.2"]
    for choice in ("PYPI", "ON"):
        with pytest.raises(SystemExit, match=f"JAX_FLASH_CUDA={choice}: no usable nvcc"):
            backend._nvcc({"cmake.define.JAX_FLASH_CUDA": choice})


class Driver:
    """A libcuda with GPUs of these compute capabilities."""

    def __init__(self, *capabilities: int):
        self.capabilities = capabilities

    def cuInit(self, flags):  # noqa: N802
        return 0 if self.capabilities else 100  # CUDA_ERROR_NO_DEVICE

    def cuDeviceGetCount(self, count):  # noqa: N802
        count._obj.value = len(self.capabilities)
        return 0

    def cuDeviceGetAttribute(self, value, attribute, device):  # noqa: N802
        value._obj.value = divmod(self.capabilities[device], 10)[{75: 0, 76: 1}[attribute]]
        return 0


@pytest.mark.parametrize(
    ("gpus", "has_driver", "archs"),
    [
        ((), True, None),  # such as a build in a container: for the whole list
        ((90,), True, "90"),
        ((90, 86, 90), True, "86;90"),
        ((75, 120), True, "120"),
        ((75, 61), False, None),
        (None, False, None),
    ],
)
def test_gpus_of_this_machine(backend, monkeypatch, tmp_path, gpus, has_driver, archs):
    monkeypatch.undo()
    monkeypatch.setenv("CXX", "g++")
    monkeypatch.setattr(backend, "_libcuda", lambda: None if gpus is None else Driver(*gpus))
    monkeypatch.setattr(backend.Path, "exists", lambda path: False)
    assert backend._has_driver() == has_driver
    settings = {"cmake.define.JAX_FLASH_CUDA": str(write_nvcc(tmp_path / "nvcc", "13.0.88"))}
    settings["cmake.define.JAX_FLASH_JAXLIB_INCLUDE"] = "/headers"
    assert backend._resolve(settings).get("cmake.define.JAX_FLASH_CUDA_ARCHS") == archs
    chosen = settings | {"cmake.define.JAX_FLASH_CUDA_ARCHS": "80;90"}
    assert backend._resolve(chosen)["cmake.define.JAX_FLASH_CUDA_ARCHS"] == "80;90"


def test_announcement(backend, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1}, raising=False)
    define = "cmake.define.JAX_FLASH_"
    cpu_only = {define + "NVCC": ""}
    text = backend._announcement("", cpu_only)
    assert "for the CPU only, as this machine has neither" in text
    assert "about 1 min on 2 cores" in text
    assert "-C cmake.define.JAX_FLASH_CUDA=ON" in text
    assert "as this machine" not in backend._announcement("OFF", cpu_only)
    text = backend._announcement("", {define + "NVCC": "/bin/nvcc", define + "CUDA_ARCHS": "86;90"})
    assert "for GPUs of compute capability 8.6 and 9.0, with /bin/nvcc" in text
    assert "-C cmake.define.JAX_FLASH_CUDA=OFF" in text
    assert "about 27 min on 2 cores" in text
    assert "about 10 min" in backend._announcement(
        "", {define + "NVCC": "/bin/nvcc", define + "CUDA_ARCHS": "80"}
    )


def test_no_compiler(backend, monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(SystemExit, match=r"needs a C\+\+ compiler"):
        backend._resolve({"cmake.define.JAX_FLASH_CUDA": "OFF"})


def test_compiler_is_not_that_of_python(backend, monkeypatch, tmp_path):
    monkeypatch.delenv("CXX", raising=False)
    write_nvcc(tmp_path / "bin" / "c++", "0.0.0")
    settings = {"cmake.define.JAX_FLASH_JAXLIB_INCLUDE": "/headers", "cmake.define.JAX_FLASH_CUDA": "OFF"}
    backend._resolve(settings)
    assert os.environ.pop("CXX") == "c++"
    monkeypatch.setenv("CXX", "mine")
    backend._resolve(settings)
    assert os.environ["CXX"] == "mine"


def test_headers_given(backend, monkeypatch):
    monkeypatch.setenv("CXX", "g++")
    settings = {"cmake.define.JAX_FLASH_JAXLIB_INCLUDE": "/headers", "cmake.define.JAX_FLASH_CUDA": "OFF"}
    assert backend._requirements(settings) == []
    assert backend._resolve(settings) == {
        "cmake.define.JAX_FLASH_JAXLIB_INCLUDE": "/headers",
        "cmake.define.JAX_FLASH_NVCC": "",
    }


@compiles
@pytest.mark.parametrize(
    ("direction", "arithmetic"), [("backward", "bfloat16"), ("decode", "bfloat16"), ("forward", "float64")]
)
def test_portable_kernels_compile_for_the_oldest_gpu(direction, arithmetic, tmp_path):
    """The form that cuda/ptx has for cards before Hopper; a library for Hopper alone lacks it."""
    nvcc = shutil.which(jax_flash.build_info()["nvcc"] or "nvcc")
    if nvcc is None:
        pytest.skip("needs an nvcc")
    source = tmp_path / "kernel.cu"
    template = (ROOT / "cuda" / "kernel.cu.in").read_text()
    source.write_text(emulated.unit(template, direction, "sm80", [arithmetic], 64))
    command = [nvcc, "-std=c++20", "-arch=sm_80", f"-I{ROOT / 'cpp'}", f"-I{ROOT / 'cuda'}", "-c", source]
    subprocess.run([*command, "-o", tmp_path / "kernel.o"], check=True)

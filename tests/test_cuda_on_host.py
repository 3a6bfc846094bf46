"""The parts of the CUDA code that run without a GPU: masks, table of tiles, list of kernels."""

import itertools
import os
import pathlib
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).parent.parent


def test_masks_and_tiles(tmp_path):
    compiler = os.environ.get("CXX") or next(filter(shutil.which, ("g++", "c++", "clang++")), None)
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    program = tmp_path / "cuda_on_host"
    includes = [f"-I{ROOT / folder}" for folder in ("cpp", "cuda")]
    source = ROOT / "tests" / "cuda_on_host.cc"
    subprocess.run(
        [compiler, "-std=c++20", "-O1", "-Wall", "-Wextra", *includes, source, "-o", program], check=True
    )
    done = subprocess.run([program], stdout=subprocess.PIPE, text=True)
    assert done.returncode == 0, done.stdout


@pytest.fixture
def kernels(tmp_path) -> list[tuple[str, str, str, int]]:
    """The rows of cuda/kernels.cmake: direction, arch, arithmetic, head dim."""
    if not shutil.which("cmake"):
        pytest.skip("needs CMake")
    script = tmp_path / "list.cmake"
    script.write_text(
        "cmake_minimum_required(VERSION 3.24)\n"
        "set(JAX_FLASH_CUDA_ARCHS 80 90)\n"
        "function(jax_flash_kernels direction arch arithmetics head_dim)\n"
        "  foreach(arithmetic IN LISTS arithmetics)\n"
        '    message(STATUS "${direction};${arch};${arithmetic};${head_dim}")\n'
        "  endforeach()\n"
        "endfunction()\n"
        f'include("{ROOT / "cuda" / "kernels.cmake"}")\n'
    )
    printed = subprocess.check_output(["cmake", "-P", script], text=True)
    rows = [line.removeprefix("-- ").split(";") for line in printed.splitlines()]
    return [(direction, arch, arithmetic, int(head_dim)) for direction, arch, arithmetic, head_dim in rows]


def test_some_kernel_takes_every_head_dim(kernels):
    """In every arithmetic, on every card."""
    arithmetics = "bfloat16", "float16", "tf32", "tf32x3"
    directions = "forward", "backward", "backward_dq", "backward_bias", "tangent"
    for row in itertools.product(directions, ["sm80"], arithmetics):
        assert (*row, 256) in kernels
    for arithmetic, head_dim in zip(arithmetics, (256, 256, 128, 128), strict=True):
        assert ("backward_tangent", "sm80", arithmetic, head_dim) in kernels
    for row in itertools.product(directions[:3], ["sm90"], arithmetics[:2]):
        assert (*row, 256) in kernels


def test_kernels_stand_in_the_order_of_preference(kernels):
    """Dispatch takes the first kernel that fits: dedicated before portable ones, then the smallest head dim."""
    assert len(set(kernels)) == len(kernels)
    for direction, arithmetic in {(direction, arithmetic) for direction, _, arithmetic, _ in kernels}:
        rows = [row for row in kernels if (row[0], row[2]) == (direction, arithmetic)]
        assert rows == sorted(rows, key=lambda row: (row[1] != "sm90", row[3]))

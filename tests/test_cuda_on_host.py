"""The parts of the CUDA code that run without a GPU: masks, table of tiles, list of kernels."""

import itertools
import os
import pathlib
import shutil
import subprocess

import emulated
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
def kernels() -> list[tuple[str, str, str, int]]:
    if not shutil.which("cmake"):
        pytest.skip("needs CMake")
    return emulated.listed_kernels()


def test_options_of_the_build_choose_kernels(kernels):
    chosen = emulated.listed_kernels(CUDA_ARCHS="80", HEAD_DIMS="64", FLOAT64="OFF")
    assert set(chosen) <= {row for row in kernels if row[3] == 64} | {
        ("backward_bias", "sm80", arithmetic, 64) for arithmetic in ("bfloat16", "float16", "tf32", "tf32x3")
    }
    assert {row[0] for row in chosen} == {row[0] for row in kernels}
    assert {row[1] for row in chosen} == {"sm80"}
    assert "float64" not in {row[2] for row in chosen}


def test_some_kernel_takes_every_head_dim(kernels):
    """In every arithmetic, on every card."""
    arithmetics = "bfloat16", "float16", "tf32", "tf32x3"
    directions = "forward", "backward", "backward_dq", "backward_bias", "tangent"
    assert all((direction, "sm80", "float64", 128) in kernels for direction in directions)
    assert ("backward_tangent", "sm80", "float64", 64) in kernels
    for row in itertools.product(directions, ["sm80"], arithmetics):
        assert (*row, 512 if row[0] == "backward_bias" and row[2] in arithmetics[:2] else 256) in kernels
    for arithmetic, head_dim in zip(arithmetics, (256, 256, 128, 128), strict=True):
        assert ("backward_tangent", "sm80", arithmetic, head_dim) in kernels
    for *row, head_dim in itertools.product(directions[:3], ["sm90"], arithmetics[:2], [256, 512]):
        assert (*row, head_dim) in kernels
    for row in itertools.product(("forward", "backward", "backward_dq"), ["sm90"], ["tf32x3"], [64, 128]):
        assert row in kernels
    for row in itertools.product(("backward", "backward_dq"), ["sm80"], ["tf32x3_infinity"], [64, 128, 256]):
        assert row in kernels
    for direction in ("short_forward", "short_backward", "short_backward_bias"):
        for arithmetic, head_dim in zip(arithmetics[:3], (64, 64, 32), strict=True):
            assert (direction, "sm80", arithmetic, head_dim) in kernels


def test_kernels_stand_in_the_order_of_preference(kernels):
    """Dispatch takes the first kernel that fits: dedicated before portable ones, then the smallest head dim."""
    assert len(set(kernels)) == len(kernels)
    for direction, arithmetic in {(direction, arithmetic) for direction, _, arithmetic, _ in kernels}:
        rows = [row for row in kernels if (row[0], row[2]) == (direction, arithmetic)]
        assert rows == sorted(rows, key=lambda row: (row[1] != "sm90", row[3]))

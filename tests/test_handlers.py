"""The handlers' C++ code: paths that no call from Python can reach."""

import os
import pathlib
import re
import shutil
import subprocess

import jax
import pytest

TESTS = pathlib.Path(__file__).resolve().parent
CPP = TESTS.parent / "cpp"


def test_alignment_workspace_and_exceptions(tmp_path):
    compiler = os.environ.get("CXX") or shutil.which("c++")
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    program = tmp_path / "handlers"
    headers = [f"-I{CPP}", f"-isystem{jax.ffi.include_dir()}"]
    sources = [TESTS / "handlers.cc", CPP / "ffi_call.cc", CPP / "ffi_workspace.cc"]
    command = [compiler, "-std=c++20", "-Wall", "-Wextra", *headers, *sources, "-o", program]
    subprocess.run(command, check=True)
    run = subprocess.run([program], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout


@pytest.mark.parametrize("name", ["ffi_cpu.cc", "ffi_cuda.cc"])
def test_every_handler_is_guarded(name):
    text = (CPP / name).read_text()
    handlers = re.findall(r"XLA_FFI_DEFINE_HANDLER_SYMBOL\(\w+,\s*([^,]*),", text)
    assert len(handlers) == text.count("XLA_FFI_DEFINE_HANDLER_SYMBOL") > 0
    assert all(handler.startswith("jax_flash::kGuarded<") for handler in handlers)

"""The quick run: it has every option, dtype and transformation, and says what it leaves out."""

import ast
import inspect
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys

import harness
import pytest
import quick
from cases import CASES

import jax_flash

TESTS = pathlib.Path(__file__).resolve().parent
OF_CASES = {
    "alibi": "bias",
    "dropout_seed": "dropout_rng",
}  # names of options that only the table of cases has
# Options that no case has.
OTHERWISE = {
    "precision": "one of harness.KINDS has each",
    "page_indices": "test_paged.py",
    "forward_mode": "test_derivatives.py, and half of the random cases",
    "return_residual": "all tests of the table return lse, and test_forward.py has one without",
    "implementation": "test_reference.py",
}
TRANSFORMS = {
    "jit": "test_transforms.py::test_jit_gives_the_same_bits",
    "grad": "test_transforms.py::test_value_and_grad",
    "vmap": "test_transforms.py::test_vmap_over_operands",
    "vmap of grad, grad of vmap": "test_transforms.py::test_vmap_of_grad_and_grad_of_vmap",
    "jvp": "test_derivatives.py::test_tangent_is_close_to_exact",
    "second derivatives": "test_derivatives.py::test_second_order_is_close_to_exact",
    "vmap of jvp": "test_derivatives.py::test_vmap_of_jvp_of_vmap",
    "scan": "test_transforms.py::test_scan_over_layers",
    "checkpoint": "test_transforms.py::test_checkpoint",
    "shard_map": "test_transforms.py::test_shard_map",
    "sharded jit": "test_transforms.py::test_sharded_jit_gathers_nothing",
    "explicit sharding": "test_transforms.py::test_explicit_sharding",
    "export": "test_transforms.py::test_export_round_trip",
    "loops around all options": "test_random.py::test_is_close_to_exact",
}


def run_pytest(*arguments: str, cwd: pathlib.Path) -> tuple[str, list[str]]:
    """The output of pytest in a new process, and the commands that it prints for failures."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    output = subprocess.run(command, cwd=cwd, env=environment, stdout=subprocess.PIPE, text=True).stdout
    return output, re.findall(r"^python -m pytest .*$", output, re.MULTILINE)


@pytest.mark.parametrize("kind", range(4))
def test_every_option_runs_in_every_dtype(kind):
    """The table of cases also gives pairs of options, which run in bfloat16 or float32."""
    kept = [row.values for row in quick.cases_and_kinds(CASES) if quick.EXHAUSTIVE not in row.marks]
    assert {case for case, _ in kept} == set(CASES)
    options = {name for case, k in kept if k == kind for name, _ in case.options}
    assert options == {name for case in CASES for name, _ in case.options}
    parameters = set(inspect.signature(jax_flash.flash_attention).parameters) - {"query", "key", "value"}
    assert parameters == {OF_CASES.get(name, name) for name in options} | OTHERWISE.keys()


def test_every_dtype_is_a_kind():
    assert {dtype for dtype, *_ in harness.KINDS["cpu"]} == {"bfloat16", "float16", "float32", "float64"}
    assert {dtype for dtype, *_ in harness.KINDS["cuda"]} == {"bfloat16", "float16", "float32", "float64"}
    assert {precision for _, precision, _ in harness.KINDS["cuda"]} >= {"default", "highest"}
    assert max(map(len, harness.KINDS.values())) == quick.NUM_KINDS


@pytest.mark.exhaustive
def test_every_function_has_a_quick_test():
    """Except for those that are exhaustive as a whole; every transformation is there."""
    output, _ = run_pytest("--collect-only", "-q", cwd=TESTS.parent)
    kept = set(re.findall(r"^tests/(test_\w+\.py::test_\w+)", output, re.MULTILINE))
    every, whole = set(), set()
    for path in TESTS.glob("test_*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                every.add(name := f"{path.name}::{node.name}")
                if "pytest.mark.exhaustive" in map(ast.unparse, node.decorator_list):
                    whole.add(name)
    assert every - kept == whole
    assert kept >= set(TRANSFORMS.values())


TINY = """
import pytest

@pytest.mark.parametrize("x", [0, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_fails(x):
    assert False

@pytest.mark.exhaustive
def test_passes():
    pass
"""


@pytest.fixture
def tiny(tmp_path) -> pathlib.Path:
    """A folder with three tests, of which the quick run has one."""
    shutil.copy(TESTS / "conftest.py", tmp_path)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = exhaustive\n")
    (tmp_path / "test_tiny.py").write_text(TINY)
    return tmp_path


@pytest.mark.exhaustive
@pytest.mark.parametrize("workers", [(), ("-n", "2")], ids=["one process", "workers"])
def test_the_summary_says_what_was_left_out(workers, tiny):
    output, _ = run_pytest(*workers, cwd=tiny)
    assert "2 exhaustive tests were left out. --all runs them, too." in output
    assert re.search(r"1 failed, 2 deselected in .*$", output.splitlines()[-1]), output
    output, repeat = run_pytest(*workers, "--all", cwd=tiny)
    assert "left out" not in output
    assert re.search(r"2 failed, 1 passed in .*$", output.splitlines()[-1]), output
    assert sorted(repeat) == [f"python -m pytest 'test_tiny.py::test_fails[{x}]' --all" for x in (0, 1)]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "summary"),
    [
        ("test_tiny.py::test_passes", "1 passed"),
        ("test_tiny.py::test_fails[1]", "1 failed"),
        ("test_tiny.py::test_fails", "2 failed"),
        ("test_tiny.py", "1 failed, 2 deselected"),
    ],
)
def test_a_name_runs_the_test(name, summary, tiny):
    """Relative to the working folder, as all arguments of pytest."""
    assert f"{summary} in " in run_pytest(name, cwd=tiny)[0]
    assert f"{summary} in " in run_pytest(f"{tiny.name}/{name}", cwd=tiny.parent)[0]


@pytest.mark.exhaustive
def test_the_printed_command_repeats_a_failure(tiny):
    for options in ([], ["--all"]):
        for command in run_pytest(*options, cwd=tiny)[1]:
            output, again = run_pytest(*shlex.split(command.removeprefix("python -m pytest")), cwd=tiny)
            assert "1 failed in " in output
            assert again == [command]

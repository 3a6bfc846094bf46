"""The quick run: it has every option, dtype and transformation, and says what it leaves out."""

import ast
import inspect
import json
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


# Runs pytest once for each pair of a folder and arguments on standard input: importing JAX takes longer than such a
# run. Each sets the number of devices, which old versions of JAX allow only before there are any.
RUNS = """
import json, os, sys
import jax.extend, pytest

for folder, arguments in json.load(sys.stdin):
    os.chdir(folder)
    pytest.main(["-p", "no:cacheprovider", *arguments])
    jax.extend.backend.clear_backends()
    print("\f", flush=True)
"""


def run_pytest(*runs: tuple[pathlib.Path, list[str]]) -> list[tuple[str, list[str]]]:
    """Runs pytest in these folders, in one new process: the output of each run, and the commands that it prints."""
    printed = subprocess.run(
        [sys.executable, "-c", RUNS],
        input=json.dumps([(str(folder), arguments) for folder, arguments in runs]),
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout
    outputs = printed.split("\f\n")[:-1]
    return [(output, re.findall(r"^python -m pytest .*$", output, re.MULTILINE)) for output in outputs]


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
    [(output, _)] = run_pytest((TESTS.parent, ["--collect-only", "-q"]))
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
    (output, _), (of_all, repeat) = run_pytest((tiny, [*workers]), (tiny, [*workers, "--all"]))
    assert "2 exhaustive tests were left out. --all runs them, too." in output
    assert re.search(r"1 failed, 2 deselected in .*$", output.splitlines()[-1]), output
    assert "left out" not in of_all
    assert re.search(r"2 failed, 1 passed in .*$", of_all.splitlines()[-1]), of_all
    assert sorted(repeat) == [f"python -m pytest 'test_tiny.py::test_fails[{x}]' --all" for x in (0, 1)]


SUMMARIES = {
    "test_tiny.py::test_passes": "1 passed",
    "test_tiny.py::test_fails[1]": "1 failed",
    "test_tiny.py::test_fails": "2 failed",
    "test_tiny.py": "1 failed, 2 deselected",
}


@pytest.mark.exhaustive
def test_a_name_runs_the_test(tiny):
    """Relative to the working folder, as all arguments of pytest."""
    runs = [(folder, name) for name in SUMMARIES for folder in (tiny, tiny.parent)]
    outputs = run_pytest(*((folder, [str((tiny / name).relative_to(folder))]) for folder, name in runs))
    for (_, name), (output, _) in zip(runs, outputs, strict=True):
        assert f" {SUMMARIES[name]} in " in output, output


@pytest.mark.exhaustive
def test_the_printed_command_repeats_a_failure(tiny):
    commands = [command for _, printed in run_pytest((tiny, []), (tiny, ["--all"])) for command in printed]
    assert len(commands) == 3
    runs = run_pytest(*((tiny, shlex.split(x.removeprefix("python -m pytest"))) for x in commands))
    for command, (output, again) in zip(commands, runs, strict=True):
        assert "1 failed in " in output
        assert again == [command]

"""The list of planted faults matches the checkout. `planted_faults.py` itself checks that the tests find them."""

import collections
import os
import pathlib
import re
import subprocess
import sys

import planted_faults
import pytest

ROOT = pathlib.Path(__file__).parents[1]


@pytest.mark.parametrize("fault", planted_faults.FAULTS, ids=lambda fault: f"{fault.file}: {fault.name}")
def test_every_row_fits(fault):
    """Its text occurs once in its file, and its tests exist."""
    assert planted_faults.places(fault) == 1
    assert fault.text != fault.replacement
    assert fault.tests
    for test in fault.tests:
        file, function = re.fullmatch(r"(test_\w+\.py)::(test_\w+)(?:\[.*\])?", test).groups()
        assert re.search(rf"^def {function}\(", (ROOT / "tests" / file).read_text(), re.MULTILINE), test


@pytest.mark.exhaustive
def test_every_named_test_exists():
    """With its parameters, which depend on where a row is in its table."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "--all", "-p", "no:cacheprovider"]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    output = subprocess.check_output([*command, ROOT / "tests"], cwd=ROOT, env=environment, text=True)
    collected = {line.removeprefix("tests/") for line in output.splitlines() if "::" in line}
    collected |= {test.partition("[")[0] for test in collected}
    named = {test for fault in planted_faults.FAULTS for test in fault.tests}
    assert named <= collected


def test_names_say_which_fault_it_is():
    names = collections.Counter((fault.file, fault.name) for fault in planted_faults.FAULTS)
    assert max(names.values()) == 1


def test_the_table_of_the_documentation_is_up_to_date():
    """`python tests/planted_faults.py --table` prints it."""
    assert f"\n{planted_faults.table()}\n" in (ROOT / "docs" / "testing.md").read_text()

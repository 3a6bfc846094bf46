"""examples/first_custom_call: the steps of a reader who copies the folder."""

import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
EXAMPLE = ROOT / "examples" / "first_custom_call"


@pytest.mark.exhaustive
def test_a_copy_installs_and_passes_its_tests(tmp_path):
    """The copy needs nothing else of the repository. The extra `test` has its build tools: no download."""
    copy, site = tmp_path / "copy", tmp_path / "site"
    shutil.copytree(EXAMPLE, copy)
    install = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--no-build-isolation",
        "--no-deps",
        "--target",
        site,
        copy,
    ]
    # PTX for all GPUs from 8.0 on compiles faster than the default, machine code for each GPU.
    install.append("--config-settings=cmake.define.CMAKE_CUDA_ARCHITECTURES=80")
    subprocess.run(install, check=True)

    path = os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", copy],
        cwd=copy,
        env=os.environ | {"PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    assert re.search(r"^=+ \d+ passed in [^,]*=$", done.stdout, re.M), done.stdout  # and none skipped


@pytest.mark.exhaustive
@pytest.mark.skipif(
    not os.environ.get("JAX_FLASH_TEST_INSTALL"),
    reason="makes a virtual environment from the package index: set JAX_FLASH_TEST_INSTALL=1 for it",
)
def test_commands_of_the_notebook(tmp_path):
    """From a copy of the example to a new package, with the commands of docs/notebooks/first_kernel.md."""
    notebook = (ROOT / "docs" / "notebooks" / "first_kernel.md").read_text()
    [commands] = re.findall(r"^```bash\n(.*?)^```$", notebook, re.DOTALL | re.MULTILINE)
    assert "~/my_kernels" in commands
    commands = commands.replace("~/", f"{tmp_path}/")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    output = subprocess.check_output(
        ["bash", "-euo", "pipefail", "-c", commands], cwd=ROOT, env=environment, text=True
    )
    assert re.search(r"^=+ \d+ passed", output, re.M), output
    assert output.endswith("[[3. 3.]\n [3. 3.]]\n")

"""Devices for the tests: eight CPU devices, and a GPU if there is one."""

import os
import shlex

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the workers of pytest-xdist share one GPU

import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)


def _platforms() -> list[str]:
    try:
        jax.devices("cuda")
    except RuntimeError:
        return ["cpu"]
    return ["cpu", "cuda"]


PLATFORMS = _platforms()


def pytest_addoption(parser) -> None:
    group = parser.getgroup("random cases", "test_random.py")
    group.addoption("--random-cases", type=int, default=100, help="number of cases (100)")
    group.addoption("--random-start", type=int, default=0, help="seed of the first case (0)")
    group.addoption("--random-seed", type=int, help="run only the case of this seed")


def pytest_report_header() -> str:
    return f"jax {jax.__version__}, platforms: {', '.join(PLATFORMS)}"


@pytest.fixture(params=PLATFORMS)
def platform(request) -> str:
    """Each available platform; the test runs on its first device."""
    return request.param


@pytest.fixture
def cuda() -> str:
    """For tests that need a GPU."""
    if "cuda" not in PLATFORMS:
        pytest.skip("needs a GPU")
    return "cuda"


@pytest.fixture(autouse=True)
def default_device(request):
    """Run on the CPU unless the test asks for a platform."""
    asked = {"platform", "cuda"}.intersection(request.fixturenames)
    name = request.getfixturevalue(asked.pop()) if asked else "cpu"
    with jax.default_device(jax.devices(name)[0]):
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    """Add to each failure the command that repeats it."""
    report = yield
    if report.failed:
        line = f"python -m pytest {shlex.quote(item.nodeid)}"
        if "random_seed" in item.fixturenames:
            line += f" --random-seed {item.callspec.params['random_seed']}"
        report.sections.append(("repro", line))
    return report

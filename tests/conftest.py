"""Devices for the tests: eight CPU devices, and a GPU if there is one. Which tests run: the quick ones, or all."""

import os
import shlex
import types

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the workers of pytest-xdist share one GPU
# The oracle multiplies small matrices. More threads would mostly wait for each other, and take the workers' cores.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# Processes that tests start skip XLA's optimizations, too. The fixture `optimizations` says why, and decides for this
# process.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")

import jax
import pytest

from jax_flash import _head_exchange, _kernel_choice

jax.config.update("jax_num_cpu_devices", 8)
# Run the CUDA kernels on the CPU, see emulated.py.
EMULATES = bool(os.environ.get("JAX_FLASH_EMULATE"))


def _platforms() -> list[str]:
    if EMULATES:
        return ["cuda"]
    try:
        jax.devices("cuda")
    except RuntimeError:
        return ["cpu"]
    return ["cpu", "cuda"]


PLATFORMS = _platforms()
LEFT_OUT = pytest.StashKey[int]()


def pytest_addoption(parser) -> None:
    parser.addoption(
        "--all", action="store_true", help="run the exhaustive tests, too, and some with XLA's optimizations"
    )
    group = parser.getgroup("random cases", "test_random.py")
    group.addoption("--random-cases", type=int, help="number of cases (100 with --all, else 15)")
    group.addoption("--random-start", type=int, default=0, help="seed of the first case (0)")
    group.addoption("--random-seed", type=int, help="run only the case of this seed")


def pytest_configure(config) -> None:
    if EMULATES:
        import emulated

        emulated.install()


def pytest_report_header() -> str:
    return f"jax {jax.__version__}, platforms: {', '.join(PLATFORMS)}"


@pytest.hookimpl(trylast=True)  # after -k and -m
def pytest_collection_modifyitems(config, items) -> None:
    """Leave out exhaustive tests, unless the command line asks for all, or for these by name."""
    if config.getoption("all"):
        return
    left_out = [
        item for item in items if item.get_closest_marker("exhaustive") and not _is_named(item, config)
    ]
    items[:] = [item for item in items if item not in set(left_out)]
    config.hook.pytest_deselected(items=left_out)
    config.stash[LEFT_OUT] = len(left_out)
    if hasattr(config, "workeroutput"):  # in a worker of pytest-xdist, which counts for the main process
        config.workeroutput["left_out"] = len(left_out)


def _is_named(item, config) -> bool:
    """Whether an argument is the test's node id, with or without its parameters."""
    own = item.nodeid.partition("::")[2]
    for argument in config.args:
        path, _, name = argument.partition("::")
        if name and (own == name or own.startswith(f"{name}[")):
            return (config.invocation_params.dir / path).resolve() == item.path.resolve()
    return False


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node) -> None:
    """Take the count from a worker; each of them collects all tests."""
    config = node.config
    left_out = getattr(node, "workeroutput", {}).get("left_out", 0)
    if left_out and not config.stash.get(LEFT_OUT, 0):
        config.stash[LEFT_OUT] = left_out
        # The last line of the output has their number. Plugins may look at their attributes.
        config.hook.pytest_deselected(items=[types.SimpleNamespace()] * left_out)


def pytest_terminal_summary(terminalreporter, config) -> None:
    if left_out := config.stash.get(LEFT_OUT, 0):
        terminalreporter.write_line(f"{left_out} exhaustive tests were left out. --all runs them, too.")


@pytest.fixture(params=PLATFORMS)
def platform(request) -> str:
    """Each available platform; the test runs on its first device."""
    if request.param == "cpu" and request.node.get_closest_marker("gpu_only"):
        pytest.skip("a CPU's kernels for other dtypes are the same")
    return request.param


@pytest.fixture(autouse=True)
def planes_pay(monkeypatch) -> None:
    """Compute short float32 sequences as planes, too, where there are kernels for them (cuda/planes.cuh)."""
    monkeypatch.setattr(_kernel_choice, "planes_pay", lambda *_: True)


@pytest.fixture
def free_exchange(monkeypatch) -> None:
    """Divide calls on sharded sequences by heads where rows see unequally many keys, however short they are."""
    monkeypatch.setattr(_head_exchange, "_KEYS_OF_A_ROW", 1e-9)


@pytest.fixture(autouse=True)
def optimizations(request) -> None:
    """XLA's optimizations: with --all, for the cases that have everything.

    Most of a test's time is XLA's, which compiles what is around the kernels. The kernels are compiled already.
    """
    is_optimized = request.config.getoption("all") and "everything" in request.node.name
    jax.config.update("jax_disable_most_optimizations", not is_optimized)


@pytest.fixture
def cuda() -> str:
    """For tests that need a GPU."""
    if "cuda" not in PLATFORMS or EMULATES:
        pytest.skip("needs a GPU")
    return "cuda"


@pytest.fixture(autouse=True)
def default_device(request):
    """Run on the CPU unless the test asks for a platform."""
    asked = {"platform", "cuda"}.intersection(request.fixturenames)
    name = request.getfixturevalue(asked.pop()) if asked else "cpu"
    with jax.default_device(jax.devices("cpu" if EMULATES else name)[0]):
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    """Add to each failure the command that repeats it."""
    report = yield
    if report.failed:
        line = f"python -m pytest {shlex.quote(item.nodeid)}"
        if "random_seed" in item.fixturenames:
            line += f" --random-seed {item.callspec.params['random_seed']}"
        if item.config.getoption("all"):
            line += " --all"
        report.sections.append(("repro", line))
    return report

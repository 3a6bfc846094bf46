"""`python -m jax_flash`: what its options run, what it prints and writes, and its errors."""

import contextlib
import csv
import importlib.metadata
import itertools
import os
import pathlib
import pty
import re
import subprocess
import sys
import termios

import jax
import numpy as np
import oracle
import pytest
import quick

import jax_flash
from jax_flash._command_line import arguments, check, devices, measure, progress
from jax_flash._command_line.case import TENSORS, Case
from jax_flash._command_line.main import main

ROOT = pathlib.Path(__file__).parents[1]
SMALL = ["--seq-len", "24", "--heads", "2", "--head-dim", "8", "--batch", "1"]


@pytest.fixture(autouse=True)
def settings(monkeypatch):
    """Shortens timings and restores what the command changes in the process."""
    monkeypatch.setattr(measure, "_WARM_UP", 1e-3)
    monkeypatch.setattr(measure, "_DURATION", 1e-3)
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.75")
    x64 = jax.config.jax_enable_x64
    yield
    jax.config.update("jax_enable_x64", x64)


@pytest.fixture
def on_platform(platform):
    """The options that select the platform of the test."""
    return ["--device", {"cpu": "cpu", "cuda": "gpu"}[platform]]


HEADS = {"jax_flash": "jax_flash +ms", "errors": "Largest error", "XLA": "Compared with XLA .*\\n +ms"}


def rows_of_table(printed: str, table: str) -> list[str]:
    """The rows below one of the heads."""
    block = re.search(rf"^{HEADS[table]}.*\n((?:(?:full|causal) +forward.*\n)*)", printed, re.MULTILINE)
    return block[1].splitlines() if block else []


def table_of_errors(printed: str) -> list[dict[str, float]]:
    """The errors in each row of their table."""
    return [
        {name: float(error) for name, error in re.findall(r"(out|d[qkv]) ([0-9.e+-]+)", row)}
        for row in rows_of_table(printed, "errors")
    ]


def matrix(printed: str, name: str) -> np.ndarray:
    """The matrix that --show printed under a name."""
    block = printed.split(f"{name} =\n")[1].split("\n\n")[0]
    assert "..." not in block
    return np.array([[float(x) for x in line.strip("[] ").split()] for line in block.splitlines()])


# ---- One case -----------------------------------------------------------------------------------------------


@pytest.fixture
def small_standard_case(monkeypatch):
    monkeypatch.setitem(arguments.STANDARD_CASES, "cpu", Case("float32", 1, 64, 2, 8))


def test_without_options(small_standard_case, capsys):
    """The standard case, full and causal."""
    assert main(["--device", "cpu"]) == 0
    printed, on_stderr = capsys.readouterr()
    assert f"jax_flash  {jax_flash.__version__}, on jax {jax.__version__}" in printed
    assert "inputs     normal float32 [1, 64, 2, 8]: batch, length, heads, head dim" in printed
    for table in HEADS:
        rows = rows_of_table(printed, table)
        assert [row.split()[0] for row in rows] == ["full", "full", "causal", "causal"]
        assert ["backward" in row for row in rows] == [False, True, False, True]
    errors = table_of_errors(printed)
    assert [set(row) for row in errors] == 2 * [{"out"}, {"out", "dq", "dk", "dv"}]
    assert all(0 < error < 1e-5 for row in errors for error in row.values())
    assert "All checks passed." in printed
    assert on_stderr == ""


def test_times_to_be_compared_are_taken_together(small_standard_case, monkeypatch, capsys):
    """Each measurement takes one second more than the one before it."""
    seconds = itertools.count(1)
    monkeypatch.setattr(measure, "_seconds_per_call", lambda *_, **__: next(seconds))
    assert main(["--device", "cpu"]) == 0
    printed = capsys.readouterr().out
    ours = [float(row.split()[-2]) for row in rows_of_table(printed, "jax_flash")]
    assert ours == [1000, 2000, 3000, 4000]
    both = [[float(x) for x in row.split()[-4::2]] for row in rows_of_table(printed, "XLA")]
    assert both == [[5000, 6000], [7000, 8000], [9000, 10000], [11000, 12000]]


@pytest.mark.parametrize(
    ("module", "function", "rows"),
    [
        (jax, "vjp", {"jax_flash": 1, "errors": 0, "XLA": 0}),  # of the first backward pass
        (check, "exact", {"jax_flash": 4, "errors": 0, "XLA": 0}),
        (jax.nn, "dot_product_attention", {"jax_flash": 4, "errors": 4, "XLA": 0}),
    ],
    ids=["backward pass", "reference", "XLA"],
)
def test_a_row_waits_for_no_later_program(module, function, rows, small_standard_case, monkeypatch, capsys):
    """Before a program is first traced, the rows that do not need it are printed."""

    class Interrupted(BaseException):
        """Not an `Exception`, which would become a row."""

    def interrupt(*_, **__):
        raise Interrupted

    monkeypatch.setattr(module, function, interrupt)
    with pytest.raises(Interrupted):
        main(["--device", "cpu"])
    printed = capsys.readouterr().out
    assert {table: len(rows_of_table(printed, table)) for table in HEADS} == rows


def test_ends_with_what_to_do_next(small_standard_case, capsys):
    """The lines of Python run, and the options exist."""
    assert main(["--device", "cpu"]) == 0
    *_, lines = capsys.readouterr().out.split("\n\n")
    assert len(lines.splitlines()) <= 8
    assert max(len(line) for line in lines.splitlines()) <= 80
    shape = (2, 24, 3, 8)
    names = {name: np.ones(shape, np.float32) for name in ("query", "key", "value")}
    exec("\n".join(re.findall(r"^  (import .*|out = .*)$", lines, re.MULTILINE)), names)
    assert names["out"].shape == shape
    parser = arguments.make_parser()
    options = re.findall(r"^  python -m jax_flash (--[a-z-]+)", lines, re.MULTILINE)
    assert options == ["--sweep", "--help"]
    assert set(options) <= set(parser._option_string_actions)
    for path in re.findall(r"\b(README\.md|docs)\b", lines):
        assert (ROOT / path).exists()
    assert main(["--device", "cpu", *SMALL]) == 0
    assert capsys.readouterr().out.endswith("All checks passed.\n")


def start(*options: str, **streams) -> subprocess.Popen:
    """Starts a separate process, as a user does, but for XLA's optimizations (conftest.py)."""
    command = [sys.executable, "-m", "jax_flash", *SMALL, *options]
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    return subprocess.Popen(command, env=environment | {"JAX_PLATFORMS": "cpu"}, cwd=ROOT, **streams)


def test_as_a_program():
    """Into pipes: no report of progress, and no character that moves the cursor."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with start("--causal", **pipes) as process:
        printed, on_stderr = process.communicate()
    assert process.returncode == 0, on_stderr
    assert on_stderr == ""
    assert len(rows_of_table(printed, "jax_flash")) == 2
    assert "1/8" not in printed
    assert re.findall(r"[^\n -~]", printed) == []


@pytest.mark.parametrize("columns", quick.rows([80, 50], quick=[50]))
def test_on_a_terminal(columns):
    """Progress is one line that is rewritten, shorter than the terminal is wide, and gone at the end."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, columns))
    with (
        start("--causal", stdout=theirs, stderr=theirs) as process,
        os.fdopen(ours, "rb") as file,
    ):
        os.close(theirs)
        written = b""
        with contextlib.suppress(OSError):  # what Linux raises when the process has ended
            while chunk := file.read1():
                written += chunk
    printed = written.decode().replace("\r\n", "\n")
    assert process.returncode == 0, printed
    reports = re.findall(r"\r(\[[# ]{30}\] \d/8 .*?)\r", printed)
    assert [report.split("] ")[1][:3] for report in reports] == [f"{step}/8" for step in range(8)]
    assert {len(report) for report in reports} == {columns - 1}
    shown = [shown_on_a_line(line) for line in printed.split("\n")]
    assert not any("/8 " in line for line in shown)
    assert len(rows_of_table("\n".join(shown), "jax_flash")) == 2
    assert re.fullmatch(r"causal  forward +out [^ ]+", rows_of_table("\n".join(shown), "errors")[0])
    assert "All checks passed." in shown


def test_progress_is_erased_after_an_error(monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    with contextlib.suppress(ValueError), progress.Progress(2) as report:
        report("one")
        report("two")
        raise ValueError
    written = capsys.readouterr().out
    assert f"[{'#' * 15:30}] 1/2 two" in written
    assert shown_on_a_line(written) == ""


def shown_on_a_line(written: str) -> str:
    """What is left where each carriage return was followed by writing over the line."""
    shown = ""
    for part in written.split("\r"):
        shown = part + shown[len(part) :]
    return shown.rstrip()


@pytest.mark.parametrize(
    ("dtype", "init"),
    [("bfloat16", "normal"), ("bfloat16", "uniform"), ("float16", "ones"), ("float32", "uniform")],
)
def test_one_case(dtype, init, on_platform, capsys):
    assert main([*on_platform, *SMALL, "--dtype", dtype, "--init", init, "--causal"]) == 0
    printed = capsys.readouterr().out
    assert f"{init} {dtype} [1, 24, 2, 8]" in printed
    for table in HEADS:
        assert [row.split()[0] for row in rows_of_table(printed, table)] == ["causal", "causal"]


def test_float64(capsys):
    assert main([*SMALL, "--device", "cpu", "--dtype", "float64"]) == 0
    assert all(error < 1e-13 for row in table_of_errors(capsys.readouterr().out) for error in row.values())


def test_omitted_sizes_are_the_standard_ones():
    parser = arguments.make_parser()
    selected = [
        arguments.cases(parser.parse_args(options), "cpu")
        for options in ([], ["--causal"], ["--seq-len", "7", "--batch", "3"], ["--show", "--heads", "3"])
    ]
    assert [len(cases) for cases in selected] == [2, 1, 1, 1]
    cases = list(itertools.chain(*selected))
    assert [case.is_causal for case in cases] == [False, True, True, False, False]
    assert [case.shape for case in cases] == [(1, 2048, 4, 64)] * 3 + [(3, 7, 4, 64), (1, 8, 3, 4)]


@pytest.mark.parametrize(("rows", "is_causal"), [(24, False), (7, False), (7, True)])
def test_reference(rows, is_causal, monkeypatch):
    """Blocks of rows do not change the results, even if they do not divide the length."""
    monkeypatch.setattr(check, "_MAX_SCORES", 24 * rows)
    jax.config.update("jax_enable_x64", True)
    check.exact.clear_cache()
    operands = Case("float64", 2, 24, 2, 8).operands()
    got, changes = check.exact(*operands, is_causal=is_causal)
    exact = oracle.attention(*operands, is_causal=is_causal)
    for name, x in zip(TENSORS, got, strict=True):
        np.testing.assert_allclose(x, getattr(exact, name), atol=1e-13, err_msg=name)
    delta_error = np.sqrt(np.sum((np.asarray(operands[3]) * exact.out) ** 2, axis=-1))
    changed = oracle.attention(*operands, dlse=delta_error, is_causal=is_causal)
    for name, x in zip(TENSORS, changes, strict=True):
        change = np.abs(getattr(changed, name) - getattr(exact, name)).max()
        np.testing.assert_allclose(x, change, atol=1e-13, err_msg=name)


@pytest.mark.parametrize(
    ("fault", "dtype"), [("a scale", "bfloat16"), ("one element", "float32"), ("NaN", "bfloat16")]
)
def test_wrong_results_fail(dtype, fault, monkeypatch, capsys):
    right = jax_flash.flash_attention

    def wrong(*arguments, **options):
        out = right(*arguments, **options)
        return {
            "a scale": lambda: out * 1.05,
            "one element": lambda: out.at[0, 5, 1, 3].add(0.1),
            "NaN": lambda: out.at[0, 5, 1, 3].set(np.nan),
        }[fault]()

    monkeypatch.setattr(jax_flash, "flash_attention", wrong)
    assert main([*SMALL, "--device", "cpu", "--dtype", dtype]) == 1
    printed = capsys.readouterr().out
    assert printed.endswith("A CHECK FAILED.\n")
    assert re.search(r"^FAILED: full forward: out [^ ]+ \(limit [^ ]+\)$", printed, re.MULTILINE)


def test_error_as_large_as_that_of_xla_passes(monkeypatch, capsys):
    """In 16 bits. Both outputs are 5 per cent too large."""
    for module, name in ((jax_flash, "flash_attention"), (jax.nn, "dot_product_attention")):
        right = getattr(module, name)
        monkeypatch.setattr(
            module, name, lambda *args, right=right, **options: right(*args, **options) * 1.05
        )
    assert main([*SMALL, "--device", "cpu", "--dtype", "bfloat16"]) == 0
    assert all(error > 0.02 for row in table_of_errors(capsys.readouterr().out) for error in row.values())


@pytest.mark.parametrize("name", ["query", "key"])
def test_wrong_gradients_fail(name, monkeypatch, capsys):
    """One gradient is 5 per cent too large; the output is right."""
    right, axis = jax_flash.flash_attention, ("query", "key").index(name)

    def wrong(*operands, **options):
        x = operands[axis]
        scaled = x * 1.05 - jax.lax.stop_gradient(x) * 0.05
        return right(*operands[:axis], scaled, *operands[axis + 1 :], **options)

    monkeypatch.setattr(jax_flash, "flash_attention", wrong)
    assert main([*SMALL, "--device", "cpu", "--dtype", "bfloat16", "--init", "uniform"]) == 1
    failures = re.findall(r"^FAILED: (.*) [^ ]+ \(limit ", capsys.readouterr().out, re.MULTILINE)
    assert failures == [f"full forward + backward: d{name[0]}"]


def test_reports_an_error_of_xla(monkeypatch, capsys):
    def refuse(*_, **__):
        raise ValueError("not here\nnor there")

    monkeypatch.setattr(jax.nn, "dot_product_attention", refuse)
    assert main([*SMALL, "--device", "cpu"]) == 0
    printed = capsys.readouterr().out
    rows = rows_of_table(printed, "XLA")
    assert len(rows) == 2
    assert all(row.endswith(" failed") for row in rows)
    assert len(table_of_errors(printed)) == 2
    assert "XLA's attention, full forward: not here\n" in printed


def test_reports_an_error_of_ours(monkeypatch, capsys):
    def refuse(*_, **__):
        raise NotImplementedError("No such kernel.")

    monkeypatch.setattr(jax_flash, "flash_attention", refuse)
    assert main([*SMALL, "--device", "cpu"]) == 1
    assert "Not run: full forward: No such kernel." in capsys.readouterr().err


# ---- --init npy and --show ------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(3, 6, 2, 4), (3, 6, 4)])
def test_show(shape, on_platform, tmp_path, capsys):
    """The values printed for a file, compared with those computed here."""
    # Multiples of 1/8 are exact in float32 and when printed.
    values = np.round(8 * np.random.default_rng(0).standard_normal(shape)) / 8
    np.save(tmp_path / "qkv.npy", values)
    q, k, v = values.reshape(3, 1, 6, -1, 4)
    heads = q.shape[2]
    with jax.default_matmul_precision("highest"):
        options = [*on_platform, "--dtype", "float32", "--causal", "--show"]
        assert main([*options, "--init", "npy", str(tmp_path / "qkv.npy")]) == 0
    dout = Case("float32", 1, 6, heads, 4).operands()[3]
    exact = oracle.attention(q, k, v, dout, is_causal=True)
    printed = capsys.readouterr().out
    assert f"given float32 [1, 6, {heads}, 4]" in printed
    for name, x in (("Q", q), ("K", k), ("V", v), ("out", exact.out)):
        for head in range(heads):
            got = matrix(printed, f"{name}[0, :, {head}, :]")
            np.testing.assert_allclose(got, x[0, :, head], atol=1e-4, err_msg=name)
    for name in ("dQ", "dK", "dV"):
        lines = printed.split(f"{name}, first values")[1].split("\n\n")[0].splitlines()[1:]
        assert len(lines) == 10
        right = getattr(exact, name.lower())
        for line, index in zip(lines, np.ndindex(right.shape), strict=False):
            where, numbers = line.strip().split("]")
            assert where == str(list(index)).rstrip("]")
            ours, reference, difference = map(float, numbers.split())
            np.testing.assert_allclose(reference, right[index], atol=1e-8, err_msg=name)
            np.testing.assert_allclose(ours, right[index], atol=1e-5, err_msg=name)
            np.testing.assert_allclose(difference, ours - reference, atol=3e-8, err_msg=name)


def test_show_of_a_large_case_is_short(capsys):
    assert main(["--device", "cpu", "--show", "--seq-len", "300", "--heads", "3", "--head-dim", "16"]) == 0
    printed = capsys.readouterr().out
    assert "The first of 3 heads:" in printed
    assert "..." in printed.split("out[0, :, 0, :] =")[1].split("\n\n")[0]
    assert "out[0, :, 1, :]" not in printed
    assert len(printed.splitlines()) < 100


# ---- --sweep ------------------------------------------------------------------------------------------------


TINY_SWEEP = ["--sweep", "--heads", "1", "--head-dim", "8", "--max-seq-len", "1024", "--dtype", "float32"]


def sweep_rows(folder) -> dict[tuple[int, str, str], dict[str, str]]:
    with (folder / "sweep.csv").open(newline="") as file:
        return {(int(row["seq_len"]), row["pass"], row["attention"]): row for row in csv.DictReader(file)}


def test_sweep(on_platform, tmp_path, capsys):
    folder = tmp_path / "new" / "folder"
    assert main([*on_platform, *TINY_SWEEP, "--causal", "--output", str(folder)]) == 0
    printed = capsys.readouterr().out
    rows = sweep_rows(folder)
    passes, attentions = ("forward", "forward + backward"), ("jax_flash", "XLA")
    assert list(rows) == [(n, p, a) for n in (512, 1024) for p in passes for a in attentions]
    facts = {
        "dtype": "float32",
        "batch": "1",
        "heads": "1",
        "head_dim": "8",
        "causal": "True",
        "status": "measured",
    }
    for row in rows.values():
        assert facts.items() <= row.items()
        assert float(row["milliseconds"]) > 0
        assert row["jax"] == jax.__version__
    for length in (512, 1024):
        # q, k, v and out; in the backward pass also dout and three gradients; XLA also holds the scores.
        assert int(rows[length, "forward", "jax_flash"]["bytes"]) >= 4 * (4 * length * 8)
        assert int(rows[length, "forward + backward", "jax_flash"]["bytes"]) >= 8 * (4 * length * 8)
        assert int(rows[length, "forward", "XLA"]["bytes"]) > 4 * length**2
        line = re.search(rf"^ *{length:,}  (.*)$", printed, re.MULTILINE)[1].split()
        milliseconds = [float(rows[length, p, a]["milliseconds"]) for p in passes for a in attentions]
        np.testing.assert_allclose([float(x) for x in line[::2]], milliseconds, atol=0.006)
    assert "not run" not in printed


def test_sweep_skips_what_is_too_large(monkeypatch, tmp_path, capsys):
    """XLA's program for 1,024 is compiled and found too large; ours still runs."""
    monkeypatch.setattr(devices, "memory_bytes", lambda _: 3_000_000)
    assert main(["--device", "cpu", *TINY_SWEEP, "--output", str(tmp_path)]) == 0
    rows = sweep_rows(tmp_path)
    assert rows[512, "forward", "XLA"]["status"] == "measured"
    refused = rows[1024, "forward", "XLA"]
    assert refused["status"] == "too large"
    assert refused["milliseconds"] == ""
    assert int(refused["bytes"]) > 3_000_000 == int(refused["memory_bytes"])
    assert rows[1024, "forward + backward", "jax_flash"]["status"] == "measured"
    printed = capsys.readouterr().out
    assert (
        "forward, XLA, from 1,024 on: not run, as it needs 0.0 GiB of memory and 0.0 GiB are available."
        in printed
    )


def test_sweep_where_memory_runs_out(monkeypatch, tmp_path, capsys):
    """A program that was expected to fit runs out of memory."""

    def run_out(*_, **__):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 123 bytes.\nmore")

    monkeypatch.setattr(jax.nn, "dot_product_attention", run_out)
    assert main(["--device", "cpu", *TINY_SWEEP, "--output", str(tmp_path)]) == 0
    row = sweep_rows(tmp_path)[512, "forward", "XLA"]
    assert (row["status"], row["milliseconds"], row["bytes"]) == ("out of memory", "", "")
    printed = capsys.readouterr().out
    assert (
        "forward, XLA, from 512 on: out of memory (RESOURCE_EXHAUSTED: Out of memory allocating 123"
        in printed
    )


def test_sweep_skips_what_is_too_slow(tmp_path, capsys):
    assert main(["--device", "cpu", *TINY_SWEEP, "--max-seconds", "1e-9", "--output", str(tmp_path)]) == 0
    rows = sweep_rows(tmp_path)
    assert {row["status"] for (length, *_), row in rows.items() if length == 512} == {"measured"}
    assert {row["status"] for (length, *_), row in rows.items() if length == 1024} == {"too slow"}
    assert all(int(row["bytes"]) > 0 for row in rows.values())
    reason = "not run, as one call is predicted to take more than 1e-09 s (--max-seconds)."
    assert f"forward, jax_flash, from 1,024 on: {reason}" in capsys.readouterr().out


def test_sweep_fails_where_our_attention_does(monkeypatch, tmp_path, capsys):
    def refuse(*_, **__):
        raise NotImplementedError("No such kernel.")

    monkeypatch.setattr(jax_flash, "flash_attention", refuse)
    assert main(["--device", "cpu", *TINY_SWEEP, "--output", str(tmp_path)]) == 1
    assert "forward, jax_flash, from 512 on: failed (No such kernel.)." in capsys.readouterr().out


def test_plots(tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="the plots need matplotlib (extra: bench)")
    assert main(["--device", "cpu", *TINY_SWEEP, "--max-seconds", "1e-9", "--output", str(tmp_path)]) == 0
    assert f"Written to {tmp_path}: sweep.csv, time.png, memory.png" in capsys.readouterr().out
    for name in ("time.png", "memory.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_no_matplotlib(monkeypatch, tmp_path, capsys):
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    assert main(["--device", "cpu", *TINY_SWEEP, "--output", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert (
        "matplotlib is not installed, so no plots will be drawn: pip install '.[bench]' installs it."
        in printed
    )
    assert "bench" in importlib.metadata.metadata("jax_flash").get_all("Provides-Extra")
    assert [path.name for path in tmp_path.iterdir()] == ["sweep.csv"]
    assert len(sweep_rows(tmp_path)) == 8


# ---- Parts ----------------------------------------------------------------------------------------------------


def test_available_memory_of_this_machine():
    free = devices.memory_bytes(jax.devices("cpu")[0])
    assert 0 < free < os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_time_is_that_of_one_call(monkeypatch):
    """Both if each call is waited for and with slices of calls."""
    clock = [0.0]
    monkeypatch.setattr(measure.time, "perf_counter", lambda: clock[0])

    def call():
        clock[0] += 3e-3
        return ()

    for asynchronous in (False, True):
        assert measure._seconds_per_call(call, asynchronous) == pytest.approx(3e-3)


# ---- Errors --------------------------------------------------------------------------------------------------


def error_of(arguments: list[str], capsys) -> str:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    return " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--seq-len 0", "argument --seq-len: must be a positive integer, got '0'"),
        ("--heads -1", "argument --heads: "),
        ("--batch two", "argument --batch: must be a positive integer, got 'two'"),
        ("--dtype int8", "argument --dtype: invalid choice: 'int8'"),
        ("--init zeros", "argument --init: must be normal, uniform, ones or npy FILE, got 'zeros'"),
        ("--init ones npy", "argument --init: must be normal, uniform, ones or npy FILE, got 'ones npy'"),
        ("--init npy", "argument --init: must be normal, uniform, ones or npy FILE, got 'npy'"),
        ("--init npy missing.npy", "argument --init: [Errno 2] No such file or directory: 'missing.npy'"),
        ("--show --sweep", "argument --sweep: not allowed with argument --show"),
        ("--sweep --seq-len 512", "--seq-len does not go with --sweep"),
        ("--sweep --max-seq-len 100", "--max-seq-len must be at least 512, got 100"),
        ("--sweep --max-seconds 0", "argument --max-seconds: must be a positive number of seconds, got '0'"),
        ("--sweep --output README", "--output: [Errno 17] File exists: 'README'"),
        ("--max-seq-len 1024", "--max-seq-len requires --sweep"),
        ("--max-seconds 1", "--max-seconds requires --sweep"),
        ("--output here", "--output requires --sweep"),
        ("--sequence 3", "unrecognized arguments: --sequence 3"),
    ],
)
def test_bad_arguments(arguments, message, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "README").touch()
    assert message in error_of(arguments.split(), capsys)


@pytest.mark.parametrize(
    ("array", "got"),
    [
        (np.zeros((2, 6, 2, 4)), "got [2, 6, 2, 4]"),
        (np.zeros((3, 6)), "got [3, 6]"),
        (np.zeros((3, 1, 6, 2, 4)), "got [3, 1, 6, 2, 4]"),
        (np.zeros((3, 0, 4)), "got [3, 0, 4]"),
        (np.zeros((3, 6, 4), np.int32), "got int32"),
        (None, "; NumPy cannot read it: "),
    ],
)
def test_bad_files(array, got, tmp_path, capsys):
    path = tmp_path / "qkv.npy"
    path.touch() if array is None else np.save(path, array)
    message = error_of(["--init", "npy", str(path)], capsys)
    assert (
        f"argument --init: {path} must hold Q, K and V stacked in one array of floats, [3, T, N, H] or [3, T, H]"
        in message
    )
    assert got in message


def test_sizes_must_be_those_of_the_file(tmp_path, capsys):
    path = str(tmp_path / "qkv.npy")
    np.save(path, np.ones((3, 6, 2, 4)))
    assert main(["--device", "cpu", "--init", "npy", path, "--heads", "2"]) == 0
    message = error_of(["--init", "npy", path, "--head-dim", "8"], capsys)
    assert "--head-dim must be 4, as in the file of --init, got 8" in message
    assert "does not go with --sweep: a file has one length" in error_of(
        ["--init", "npy", path, "--sweep"], capsys
    )


def test_no_gpu(capsys):
    if any(device.platform == "gpu" for device in jax.devices()):
        pytest.skip("there is a GPU")
    assert "--device gpu: " in error_of(["--device", "gpu"], capsys)


def test_help(monkeypatch, capsys):
    """It names every option and fits on a screen."""
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as stopped:
        main(["--help"])
    assert stopped.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 24
    assert max(len(line) for line in lines) <= 80
    options = arguments.make_parser()._option_string_actions
    assert {"--seq-len", "--init", "--show", "--sweep", "--output"} <= set(options)
    for option in options:
        assert any(re.match(rf"  (-h, )?{option}( |,|$)", line) for line in lines), option

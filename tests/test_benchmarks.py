"""The benchmarks run, at small sizes, and their verdicts are right; so is the model of sharded sequences."""

import dataclasses
import functools
import importlib
import json
import math
import pathlib

import jax
import numpy as np
import pytest
import quick
from harness import mesh_of
from strategies import collectives

import jax_flash

BENCHMARKS = pathlib.Path(__file__).parent.parent / "benchmarks"

# ---- Standard shapes --------------------------------------------------------------------------------------------


@pytest.fixture
def attention(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    for name in ("XLA_PYTHON_CLIENT_MEM_FRACTION", "TF_CPP_MIN_LOG_LEVEL"):
        monkeypatch.setenv(name, "0")  # the script sets them, and this is undone
    return importlib.import_module("attention")


def run_attention(attention, folder: pathlib.Path, *arguments: str) -> tuple[int, dict]:
    """The exit status, and the result file."""
    file = folder / "attention.json"
    status = attention.main([*arguments, "--no-plot", "--output", str(file)])
    return status, json.loads(file.read_text())


def test_filters_that_no_shape_passes(attention, capsys):
    assert attention.main(["--head-dim", "63"]) == 2
    assert "No shape passes the filters." in capsys.readouterr().err


def test_ways_to_compute_float32(attention, monkeypatch, tmp_path, capsys):
    """Of the 16-bit ones the results; of the portable kernels, which a CPU lacks, that they are chosen."""
    shapes = [x for x in attention.gpu_shapes() if x.section == "ways"]
    assert {x.way for x in shapes} == {"portable kernels", "float16", "bfloat16"}
    small = [
        dataclasses.replace(x, seq_len=64, num_heads=2, head_dim=16)
        for x in shapes
        if x.way != attention.PORTABLE
    ]
    for name in ("gpu_shapes", "cpu_shapes"):
        monkeypatch.setattr(attention, name, lambda: iter(small))
    quickly = ("--rounds", "1", "--warmup-ms", "0.1", "--slice-ms", "0.1")
    status, report = run_attention(attention, tmp_path, "--section", "ways", *quickly)
    printed = capsys.readouterr().out
    assert status == 0, printed
    errors = {}
    for cell in report["cells"]:
        assert set(cell["results"]) == {"jax_flash"}
        result = cell["results"]["jax_flash"]
        assert result["ms"] > 0
        errors[cell["way"], cell["direction"]] = max(x["relative"] for x in result["errors"].values())
    for direction in attention.DIRECTIONS:
        assert 1e-4 < errors["float16", direction] < errors["bfloat16", direction] / 4
    assert "| 4 x 64 x 2 x 16 full float32 default by float16 | forward |" in printed

    settings = []
    monkeypatch.setattr(jax_flash._library, "set_test_settings", lambda *x: settings.append(x))
    with attention.kernels_of(None), attention.kernels_of("float16"):
        assert settings == []
    with attention.kernels_of(attention.PORTABLE):
        assert settings == [("sm80",)]
    assert settings == [("sm80",), ()]


def test_accuracy(attention, monkeypatch, tmp_path, capsys):
    shapes = attention.accuracy_shapes

    def small(on_gpu: bool):
        return (dataclasses.replace(x, seq_len=64, num_heads=2, head_dim=16) for x in shapes(on_gpu))

    monkeypatch.setattr(attention, "accuracy_shapes", small)
    status, report = run_attention(attention, tmp_path, "--section", "accuracy", "--option", "key")
    printed = capsys.readouterr().out
    assert status == 0, printed
    cells = report["accuracy"]
    assert [cell["option"] for cell in cells] == 4 * ["one huge key", "equal keys"]
    assert report["cells"] == []
    for cell in cells:
        names = {"jax_flash", "xla"} | ({"xla, tf32"} if cell["dtype"] == "float32" else set())
        assert set(cell["results"]) - {"cudnn"} == names
        ours = cell["results"]["jax_flash"]["errors"]
        assert set(ours) == {"out", "dq", "dk", "dv"}
        if cell["option"] == "equal keys":  # with a huge key, 11 bits are not enough for the logits
            kind, limit = attention.measure.tolerance(cell["dtype"], cell["precision"], cell["seq_len"])
            assert ours["dk"][kind] <= limit
            assert 0 < ours["out"]["worst_row"] < 0.1
    assert len([line for line in printed.splitlines() if line.startswith("|")]) == 2 + 4 * len(cells)


def test_accuracy_without_a_result_fails(attention, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(jax_flash, "flash_attention", lambda *_, **__: 1 / 0)
    arguments = ("--section", "accuracy", "--option", "normal", "--peers", "", "--quick")
    status, report = run_attention(attention, tmp_path, *arguments)
    assert status == 1
    assert len(report["accuracy"]) == 1
    assert "no figure for jax_flash: ZeroDivisionError" in capsys.readouterr().out


def test_distributions(attention):
    """They are what their names say."""
    size = (4, 1, 64, 2, 16)
    drawn = {
        name: np.asarray(draw(jax.random.key(0), size))
        for name, draw in attention.measure.DISTRIBUTIONS.items()
    }
    for name, x in drawn.items():
        assert x.shape == size, name
        assert np.isfinite(x).all(), name
    assert drawn["uniform"].min() >= 0

    def spread(name: str, axes: tuple[int, ...]) -> float:
        of_axis = np.sqrt(np.mean(drawn[name] ** 2, axis=axes))
        return of_axis.max() / of_axis.min()

    assert spread("columns span 2^20", (0, 1, 2, 3)) > 2**18
    assert spread("rows span 2^20", (4,)) > 2**18
    assert spread("growing", (0, 1, 3, 4)) > 2**5
    sizes = np.linalg.norm(drawn["one huge key"][1], axis=-1)
    assert (sizes > 100).sum() == 2  # one for each head
    assert (drawn["equal keys"][1] == drawn["equal keys"][1, :, :1]).all()


def test_errors_are_those_of_the_worst_row(attention):
    exact = np.array([[3.0, 4.0], [3e-6, 4e-6], [0, 1e-16]])
    got = exact + np.array([[0, 0.05], [0, 1e-6], [0, 1e-6]])  # the last row is 0 but for rounding
    errors = attention.measure.compare(got, exact)
    assert errors["worst_row"] == pytest.approx(0.2)
    assert errors["relative"] == pytest.approx(0.01, rel=1e-3)
    assert errors["max"] == pytest.approx(0.05 / 4)
    assert attention.measure.compare(exact, exact)["worst_row"] == 0
    assert np.isnan(attention.measure.compare(np.where(exact > 3, np.nan, exact), exact)["worst_row"])


@pytest.mark.parametrize(
    ("times", "error", "status", "verdict"),
    [
        ((1.0, 1.1, 1.5), 0.01, 0, None),
        ((1.0, 1.1, 0.8), 0.01, 1, "below 1: 4 x 64 x 2 x 16 full bfloat16, forward: 0.800 (xla)"),
        ((1.0, 1.1, 0.8), 0.2, 0, None),  # XLA computes something else
        ((1.0, None, None), 0.01, 0, None),
        ((None, 1.1, 0.8), 0.01, 1, "no figure: 4 x 64 x 2 x 16 full bfloat16, forward: no kernel"),
    ],
)
def test_verdict_of_standard_shapes(attention, monkeypatch, tmp_path, capsys, times, error, status, verdict):
    def measured(shape, names, directions, timer):
        results = {
            name: {"error": "no kernel"} if ms is None else {"ms": ms, "tflops": 1 / ms}
            for name, ms in zip(("jax_flash", "cudnn", "xla"), times, strict=True)
        }
        results["jax_flash"]["correct"] = True
        results["xla"]["errors"] = {"out": {"relative": error}}
        return [dataclasses.asdict(shape) | {"direction": "forward", "results": results, "ratio": {}}]

    monkeypatch.setattr(attention, "run_shape", measured)
    for name in ("gpu_shapes", "cpu_shapes"):
        monkeypatch.setattr(attention, name, lambda: iter([attention.Shape("standard", 4, 64, 2, 16)]))
    got, report = run_attention(attention, tmp_path, "--section", "standard")
    printed = capsys.readouterr().out
    assert got == status
    assert len(report["cells"]) == 1
    if verdict:
        assert verdict in printed.splitlines()
    else:
        assert "below 1: " not in printed


# ---- What people use attention for ------------------------------------------------------------------------------

QUICK = ["--rounds", "1", "--warmup-ms", "0.1", "--slice-ms", "0.1", "--divide", "512"]
# Bias and mask, segments, sinks, an offset, pages; and what is checked of each.
SOME = {
    "alphafold_512_h16": {"out", "dquery", "dkey", "dvalue", "dbias"},
    "packed": {"out", "dquery", "dkey", "dvalue"},
    "gpt_oss": {"out", "dquery", "dkey", "dvalue", "dsinks"},
    "decode_window": {"out"},
    "decode_8x1024_pages_16": {"out"},
}


@pytest.fixture
def uses(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    for name in ("XLA_PYTHON_CLIENT_MEM_FRACTION", "TF_CPP_MIN_LOG_LEVEL"):
        monkeypatch.setenv(name, "0")  # the script sets them, and this is undone
    return importlib.import_module("uses")


def run(uses, folder: pathlib.Path, *arguments: str) -> tuple[int, dict[str, dict]]:
    """The exit status, and the rows of the result file by name."""
    file = folder / "uses.json"
    status = uses.main([*arguments, *QUICK, "--output", str(file)])
    return status, {row["name"]: row for row in json.loads(file.read_text())["uses"]}


def check(uses, row: dict) -> None:
    """All programs of jax_flash and XLA ran and were right."""
    for direction in uses.directions_of(row):
        for name in ("jax_flash", "xla"):
            result = row[direction]["results"][name]
            assert "error" not in result, (row["name"], direction, name, result)
            assert result["ms"] > 0


def test_sizes_divided_by_one(uses):
    for use in uses.USES:
        assert use.divided(1) == use


def test_names_are_unique(uses):
    assert len({use.name for use in uses.USES}) == len(uses.USES)


def test_some_uses(platform, uses, tmp_path, capsys):
    status, rows = run(uses, tmp_path, *SOME)
    assert set(rows) == set(SOME)
    for name, results in SOME.items():
        check(uses, rows[name])
        last = uses.directions_of(rows[name])[-1]
        assert set(rows[name][last]["results"]["jax_flash"]["errors"]) == results, name
    printed = capsys.readouterr().out
    assert status == ("below 1: " in printed)

    lines = [line for line in printed.splitlines() if line.startswith("|")]
    assert len(lines) == 2 + len(SOME)
    assert uses.main(["--markdown", str(tmp_path / "uses.json")]) == 0
    assert capsys.readouterr().out.splitlines() == lines
    assert uses.main(["gpt", "--markdown", str(tmp_path / "uses.json")]) == 0
    assert capsys.readouterr().out.splitlines() == [*lines[:2], lines[4]]


@pytest.mark.exhaustive
def test_every_use(platform, uses, monkeypatch, tmp_path):
    """Uses that are the same at this size run once, and those of the test above not again."""
    divisor = int(QUICK[QUICK.index("--divide") + 1])
    different = {}
    for use in uses.USES:
        different.setdefault(dataclasses.replace(use.divided(divisor), name="", what=""), use)
    monkeypatch.setattr(uses, "USES", tuple(use for use in different.values() if use.name not in SOME))
    _, rows = run(uses, tmp_path)
    assert list(rows) == [use.name for use in uses.USES]
    for row in rows.values():
        check(uses, row)


@pytest.mark.parametrize(
    ("times", "status", "verdict"),
    [
        ((1.0, 1.1, 1.5), 0, None),
        ((1.0, 1.1, 0.8), 1, "below 1: swin, training: 0.800 (xla)"),
        ((1.0, 0.9, 0.8), 1, "below 1: swin, training: 0.800 (xla)"),
        ((1.0, None, None), 0, None),
        ((None, 1.1, 0.8), 1, "no figure: swin, training: no kernel"),
    ],
)
def test_verdict(uses, monkeypatch, tmp_path, capsys, times, status, verdict):
    def measured(use, names, timer):
        results = {name: {"ms": ms} for name, ms in zip(("jax_flash", "cudnn", "xla"), times, strict=True)}
        for result in results.values():
            result |= {"error": "no kernel"} if result["ms"] is None else {}
        good = {"jax_flash": {"ms": 1.0}, "cudnn": {"ms": 2.0}, "xla": {"ms": 3.0}}
        figures = {"forward": uses.compared(good), "training": uses.compared(results)}
        return dataclasses.asdict(use) | figures

    monkeypatch.setattr(uses, "measure_use", measured)
    got, rows = run(uses, tmp_path, "swin_float32", "swin")
    printed = capsys.readouterr().out
    assert got == status
    assert rows["swin"]["forward"]["ratio"] == 2
    if verdict:
        assert verdict in printed.splitlines()
    else:
        assert "below 1: " not in printed


def test_wrong_alternative_does_not_count(uses, monkeypatch, tmp_path, capsys):
    """One that leaves out the gradient of the bias."""
    right = jax.nn.dot_product_attention

    def wrong(query, key, value, bias, mask, **options):
        return right(query, key, value, jax.lax.stop_gradient(bias), mask, **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", wrong)
    _, rows = run(uses, tmp_path, "alphafold_512_h16")
    forward, training = (rows["alphafold_512_h16"][direction] for direction in ("forward", "training"))
    assert forward["results"]["xla"]["ms"] > 0
    assert training["results"]["xla"]["ms"] is None
    assert training["fastest_alternative"] is None
    assert "wrong result, relative error over 1.0e-01: dbias 1.0e+00 [alphafold_512_h16]" in (
        capsys.readouterr().out
    )


def test_refused_alternative_has_a_reason(uses, monkeypatch, tmp_path, capsys):
    def refuse(*args, **options):
        raise NotImplementedError("Unsupported sequence length.")

    monkeypatch.setattr(jax.nn, "dot_product_attention", refuse)
    status, rows = run(uses, tmp_path, "decode_window")
    assert status == 0
    assert rows["decode_window"]["forward"]["results"]["xla"] == {
        "ms": None,
        "error": "NotImplementedError: Unsupported sequence length.",
    }
    assert "xla: NotImplementedError: Unsupported sequence length. [decode_window]" in capsys.readouterr().out


def test_wrong_result_fails(uses, monkeypatch, tmp_path, capsys):
    right = jax_flash.flash_attention

    def wrong(*args, implementation, **options):
        out = right(*args, implementation=implementation, **options)
        return out if implementation else 1.05 * out

    monkeypatch.setattr(jax_flash, "flash_attention", wrong)
    status, _ = run(uses, tmp_path, "decode_window")
    assert status == 1
    assert "no figure: decode_window, forward: wrong result" in capsys.readouterr().out


def test_use_that_cannot_be_measured_fails(uses, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(uses, "lower_reference", lambda *_: 1 / 0)
    status, rows = run(uses, tmp_path, "decode_window")
    assert status == 1
    assert rows == {}
    assert "left out: decode_window: ZeroDivisionError" in capsys.readouterr().out


def test_unknown_name(uses, capsys):
    with pytest.raises(SystemExit):
        uses.main(["swine"])
    assert "no use is named swine. Names: swin, " in capsys.readouterr().err


# ---- One sequence over several devices ----------------------------------------------------------------------------

TOY = ["--rounds", "1", "--warmup-ms", "0.1", "--slice-ms", "0.1", "--divide", "512", "--platform", "cpu"]


@pytest.fixture
def sharded(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    for name in ("TF_CPP_MIN_LOG_LEVEL", "XLA_FLAGS"):
        monkeypatch.setenv(name, "")  # the script sets them, and this is undone
    return importlib.import_module("context_parallel")


def run_sharded(sharded, folder: pathlib.Path, *arguments: str) -> tuple[int, dict]:
    """The exit status, and the result file."""
    file = folder / "sharded.json"
    status = sharded.main([*arguments, *TOY, "--output", str(file)])
    return status, json.loads(file.read_text())


@pytest.mark.parametrize(
    ("names", "number"),
    quick.rows(
        {"some": (("zigzag_8192", "packed_window_ring"), 2), "all": ((), 4)}, quick=["some"], unpack=True
    ),
)
def test_sharded_cases(names, number, sharded, tmp_path, capsys):
    status, report = run_sharded(sharded, tmp_path, *names, "--devices", str(number))
    printed = capsys.readouterr().out
    assert status == 0, printed
    assert report["num_devices"] == number
    chosen = [x.name for x in sharded.cases(2, 1) if not names or any(name in x.name for name in names)]
    assert [row["name"] for row in report["cases"]] == chosen
    for row in report["cases"]:
        assert set(row["errors"]) == {"out", "dquery", "dkey", "dvalue"}
        assert all(timing["ms"] > 0 for timing in row["timings"].values())
        assert 0 < row["predicted"]["ms"] <= row["predicted"]["without_overlap_ms"]
    lines = [line for line in printed.splitlines() if line.startswith("|")]
    assert len(lines) == 2 + len(chosen)
    assert sharded.main(["--markdown", str(tmp_path / "sharded.json")]) == 0
    assert capsys.readouterr().out.splitlines() == lines


def test_one_device_is_refused(sharded, capsys):
    assert sharded.main([*TOY, "--devices", "1"]) == 2
    assert capsys.readouterr().err.startswith(
        "A sequence is sharded over two devices or more, and there is one"
    )


def test_wrong_sharded_result_fails(sharded, monkeypatch, tmp_path, capsys):
    right = jax_flash.ring_attention
    monkeypatch.setattr(jax_flash, "ring_attention", lambda *args, **options: 1.05 * right(*args, **options))
    status, report = run_sharded(sharded, tmp_path, "zigzag_8192", "--devices", "2")
    assert status == 1
    assert report["cases"] == []
    assert "left out: zigzag_8192: ValueError: wrong result, relative error over" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("one", "two", "lines"),
    [
        (1.9, 1.0, []),
        (1.8, 1.0, ["below 1.9: zigzag: 1.800"]),
        (1.9, None, ["no figure: zigzag: no memory"]),
    ],
)
def test_verdict_of_two_devices(sharded, one, two, lines):
    timings = {
        name: {"error": "no memory"} if ms is None else {"ms": ms}
        for name, ms in (("one device", one), ("all devices", two))
    }
    assert sharded.shortcomings([dict(name="zigzag", least=1.9, timings=timings)], 2) == lines


def test_model_of_one_device(sharded):
    """Within a tenth of what was measured, forward and backward, from 1,000 to 16,384 tokens."""
    cells = json.loads((BENCHMARKS / "results" / "h200.json").read_text())["cells"]
    cells = [x for x in cells if (x["dtype"], x["head_dim"], x["option"]) == ("bfloat16", 128, None)]
    assert len(cells) > 30
    model = sharded.model
    for cell in cells:
        window = cell["window"] and tuple(cell["window"])
        attention = model.Attention(
            cell["batch"],
            cell["seq_len"],
            cell["num_heads"],
            cell["num_kv_heads"] or cell["num_heads"],
            128,
            cell["is_causal"],
            window,
        )
        seconds = attention.kernel(model.H200, cell["direction"], attention.seen(1)).item()
        np.testing.assert_allclose(1e3 * seconds, cell["results"]["jax_flash"]["ms"], rtol=0.1)


# A strategy of the model, the heads of queries and of keys, and options.
_MOVED = {
    "ring, full": ("ring, contiguous", (4, 2), {}),
    "ring, causal": ("ring, zigzag", (4, 2), dict(is_causal=True)),
    "ring, window": ("ring, contiguous", (4, 2), dict(window=(20, 0))),
    "gathered": ("gathered", (6, 3), dict(is_causal=True)),
    "by heads": ("by heads", (8, 4), {}),
    "by heads, two devices for each of the keys": ("by heads", (4, 2), dict(is_causal=True)),
    "window": ("window", (4, 2), dict(window=(20, 3))),
}


@pytest.mark.parametrize(
    ("strategy", "heads", "options"),
    quick.rows(_MOVED, quick=["ring, window", "gathered", "by heads", "window"], unpack=True),
)
def test_model_of_what_moves(strategy, heads, options, sharded):
    """As many bytes arrive at a device as in the compiled program."""
    if strategy.startswith("ring") and jax.__version_info__ < (0, 12):
        pytest.skip(
            "seen with jax 0.7: XLA drops barriers on a CPU, and transfers of the two passes become one"
        )
    mesh = mesh_of(4)
    attention = sharded.model.Attention(1, 64, *heads, 8, itemsize=4, **options)
    if not strategy.startswith("ring"):
        assert sharded.model.of_sharded_jit(attention, 4) == strategy
    case = sharded.Case("", strategy, attention)
    placed = sharded.put(case, mesh, sharded.make_inputs(attention))
    program = functools.partial(sharded.training, sharded.sharded(case, mesh))
    moved = collectives(jax.jit(program).lower(placed).compile().as_text())
    parts = {"all-gather": 3 / 4, "all-to-all": 3 / 4, "reduce-scatter": 3, "collective-permute": 1}
    arriving = sum(parts[kind] * 4 * math.prod(shape) for kind, shape in moved)
    assert sharded.model.STRATEGIES[strategy](sharded.model.H200, attention, 4).arriving == arriving


@pytest.mark.exhaustive
def test_tables_of_the_model_are_in_the_documentation(sharded):
    """`python benchmarks/context_parallel_model.py` prints them."""
    page = (BENCHMARKS.parent / "docs" / "long_context.md").read_text()
    for table in sharded.model.tables():
        assert f"\n{table}\n" in page

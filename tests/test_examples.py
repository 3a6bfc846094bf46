"""The examples run, at a small size."""

import importlib.util
import json
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

EXAMPLES = pathlib.Path(__file__).parent.parent / "examples"
SMALL = dict(
    steps=30, batch=4, seq_len=48, width=32, depth=1, num_heads=2, learning_rate=1e-2, report_every=0
)


def load(name: str):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def train_transformer():
    return load("train_transformer")


@pytest.mark.exhaustive
def test_transformer_learns_the_same_with_each_attention(train_transformer, platform):
    with jax.default_matmul_precision("highest"):
        losses = {name: train_transformer.train(name, **SMALL) for name in train_transformer.ATTENTION}
    for name, loss in losses.items():
        assert np.mean(loss[-5:]) < loss[0] - 1.5, f"{name}: {loss}"
        np.testing.assert_allclose(loss, losses["flax"], rtol=1e-3, err_msg=name)


def test_transformer_from_the_command_line(train_transformer, monkeypatch, capsys):
    argv = "train_transformer.py --steps 3 --batch 2 --seq-len 16 --width 16 --depth 1 --num-heads 2"
    monkeypatch.setattr("sys.argv", argv.split())
    train_transformer.main()
    printed = capsys.readouterr().out
    assert printed.startswith("jax_flash on ")
    assert "step     3  loss " in printed
    assert "tokens/s" in printed


@pytest.mark.exhaustive
def test_meanflow_learns_the_same_with_each_attention(platform):
    small = dict(steps=60, batch=32, num_points=8, width=32, depth=1, num_heads=2, learning_rate=1e-2)
    train_meanflow = load("train_meanflow")
    with jax.default_matmul_precision("highest"):
        runs = {
            name: train_meanflow.train(name, **small, report_every=0) for name in train_meanflow.ATTENTION
        }
    for name, (errors, distance) in runs.items():
        assert distance < 0.6, name  # of noise: 0.9
        np.testing.assert_allclose(errors, runs["flax"][0], rtol=1e-3, err_msg=name)
        np.testing.assert_allclose(distance, runs["flax"][1], rtol=1e-3, err_msg=name)


def test_meanflow_from_the_command_line(monkeypatch, capsys):
    argv = "train_meanflow.py --steps 2 --batch 2 --num-points 4 --width 8 --depth 1 --num-heads 2"
    monkeypatch.setattr("sys.argv", argv.split())
    load("train_meanflow").main()
    printed = capsys.readouterr().out
    assert printed.startswith("jax_flash on ")
    assert "step     2  error " in printed
    assert "distance to the nearer moon: " in printed


@pytest.mark.exhaustive
def test_training_step_from_the_command_line(monkeypatch, tmp_path, capsys):
    """Both attentions give the same loss in the first step; cuDNN's without a GPU is an error of one line."""
    file = tmp_path / "step.json"
    argv = "training_step.py --depth 1 --width 256 --num-kv-heads 1 --seq-len 32 --batch 1 --steps 1 --output"
    monkeypatch.setattr("sys.argv", [*argv.split(), str(file)])
    load("training_step").main()
    lines = {line.split(":")[0].strip(): line for line in capsys.readouterr().out.splitlines()}
    losses = [float(re.search(r"loss ([0-9.]+)", lines[name])[1]) for name in ("jax_flash", "xla")]
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-3)
    assert "cudnn" in lines

    written = json.loads(file.read_text())
    assert written["settings"]["seq_len"] == 32
    assert written["device"] == jax.devices()[0].device_kind
    assert set(written["results"]) == {"jax_flash", "cudnn", "xla"}
    for name, loss in zip(("jax_flash", "xla"), losses, strict=True):
        result = written["results"][name]
        assert len(result["losses"]) == 3  # two for warm-up
        assert len(result["seconds"]) == 1
        np.testing.assert_allclose(result["losses"][0], loss, atol=1e-4)


@pytest.mark.exhaustive
def test_training_step_with_a_sharded_sequence(monkeypatch):
    """The losses are those of one device, but for rounding; those of float32 would show a wrong order of positions."""
    training_step = load("training_step")
    if len(jax.devices()) < 4:
        pytest.skip("needs 4 devices")
    monkeypatch.setattr(training_step, "VOCABULARY", 256)
    monkeypatch.setattr(training_step, "DTYPE", jnp.float32)
    argv = "--depth 2 --width 256 --num-kv-heads 1 --seq-len 64 --steps 8 --context-parallel"
    with jax.default_matmul_precision("highest"):
        one, four, checkpointed = (
            training_step.measure("jax_flash", training_step.parse_arguments([*argv.split(), *more]))
            for more in (["1"], ["4"], ["4", "--checkpoint"])
        )
    losses = one["losses"]
    assert losses[-1] < losses[0] - 1
    np.testing.assert_allclose(four["losses"], losses, rtol=1e-5)
    np.testing.assert_allclose(checkpointed["losses"], losses, rtol=1e-5)
    assert checkpointed["gibibytes"] < four["gibibytes"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--context-parallel 3 --seq-len 64", "--seq-len must be a multiple of 2 x 3 devices, got 64"),
        ("--context-parallel 0", "--context-parallel must be from 1 to the number of devices, 4, got 0"),
        ("--context-parallel 2 --attention xla", "--context-parallel is for --attention jax_flash, got xla"),
    ],
)
def test_training_step_refuses(argv, message, monkeypatch, capsys):
    monkeypatch.setattr(jax, "devices", lambda: [None] * 4)
    with pytest.raises(SystemExit):
        load("training_step").parse_arguments(argv.split())
    assert message in capsys.readouterr().err

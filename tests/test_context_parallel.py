"""One sequence over several devices: gradients of each strategy beside exact ones, for every number of devices."""

import dataclasses
import inspect
import itertools
import os
import pathlib
import random
import socket
import subprocess
import sys
from typing import Any, NamedTuple

import harness
import numpy as np
import pytest
import quick
from cases import PARTS, Bias, Case, Mask, Scale, Segments
from harness import mesh_of
from jax.sharding import Mesh
from strategies import SHARDED_JIT, STRATEGIES, fitted, run

import jax_flash

pytestmark = pytest.mark.usefixtures("free_exchange")


def check(case: Case, number: int, strategy: str, platform: str, **more: Any) -> None:
    """Compares the results and all gradients with exact ones, in the platform's most exact arithmetic."""
    check_on(mesh_of(number), case, strategy, harness.most_exact(platform, case), **more)


def check_on(mesh: Mesh, case: Case, strategy: str, kind: tuple[str, str | None, str], **more: Any) -> None:
    dtype, precision, rule = kind
    got, gradients = run(case, dtype, mesh, strategy, precision=precision, **more)
    is_rounded = mesh.size > 1
    harness.check(got, case, dtype, rule, is_rounded=is_rounded)
    harness.check_operands(gradients, case, dtype, rule, is_rounded=is_rounded)


def case_of(name: str, options: dict[str, Any], **sizes: Any) -> Case:
    """A case of 96 queries and keys and 4 heads, where no size says otherwise."""
    sizes = (
        dict(seqlen_q=96, seqlen_kv=96, num_heads=4, num_kv_heads=options.get("k", 4), head_dim=32) | sizes
    )
    return Case(name, options=tuple((x, value) for x, value in options.items() if x != "k"), **sizes)


# ---- Every option -----------------------------------------------------------------------------------------------

NUMBERS = (1, 2, 4, 8)
# Options, and arguments that do not change the exact result.
OPTIONS = {
    **{name: (options, {}) for name, options in PARTS.items()},
    "full": ({}, {}),
    "short window": (dict(local_window_size=(20, 5)), {}),  # sharded jit exchanges the keys of neighbors
    "offset known in advance": (dict(is_causal=True, query_offset=19), {}),
    "scale": (dict(scale=0.3), {}),
    "deterministic": (dict(deterministic=True), {}),
    "forward mode": (dict(is_causal=True), dict(forward_mode=True)),
    # What a zigzag ring may have and still take shards by halves.
    "causal and all that is in no order": (
        {"is_causal": True, "logits_soft_cap": 1.5}
        | {
            name: x
            for part in ("sinks", "groups", "bias", "mask", "segments")
            for name, x in PARTS[part].items()
        },
        {},
    ),
}
_PLACES = {f"{strategy}-{number}": (strategy, number) for strategy in STRATEGIES for number in NUMBERS}
_EVERY_OPTION = {
    f"{name}-{place}": (case_of(name, options), number, strategy, more)
    for (name, (options, more)), (place, (strategy, number)) in itertools.product(
        OPTIONS.items(), _PLACES.items()
    )
}
_QUICK = [
    *(f"{name}-sharded jit-4" for name in ("causal", "groups", "bias", "short window")),
    *("alibi-contiguous-2", "segments-contiguous-4", "mask-zigzag-4", "causal-zigzag-2"),
    *(f"causal and all that is in no order-zigzag-{number}" for number in (2, 4)),
]


@pytest.mark.parametrize(
    ("case", "number", "strategy", "more"), quick.rows(_EVERY_OPTION, _QUICK, unpack=True)
)
def test_every_option(case, number, strategy, more, platform):
    check(fitted(case, number, strategy), number, strategy, platform, **more)


def test_the_table_has_every_option():
    names = {name for row in OPTIONS.values() for options in row for name in options}
    names = {dict(alibi="bias", dropout_seed="dropout_rng").get(name, name) for name in names - {"k"}}
    # `check` passes these, or ring_attention refuses them, or test_ring.py has a test of them.
    names |= {"query", "key", "value", "axis_name", "layout", "precision", "return_residual"}
    names |= {"page_indices", "implementation"}
    assert names == set(inspect.signature(jax_flash.ring_attention).parameters)


# ---- Random cases -----------------------------------------------------------------------------------------------


class RandomCase(NamedTuple):
    case: Case
    strategy: str
    more: dict[str, Any]  # arguments that do not change the exact result
    kind: int | None  # of harness.KINDS; None: the most exact
    other_axis: str | None  # of the mesh, over two devices


def random_case(seed: int, number: int) -> RandomCase:
    rng = random.Random(seed)
    strategy = rng.choice(STRATEGIES)
    batch = rng.choice((1, 2))
    num_heads, num_kv_heads = rng.choice(((1, 1), (2, 2), (4, 2), (3, 1), (8, 8), (8, 2)))
    unit = number * (2 if strategy == "zigzag" else 1)
    has_dropout = rng.random() < 0.2
    lengths = [rng.randrange(1, 2 if has_dropout else 6) for _ in "TS"]
    t, s = (unit * (16 if has_dropout else 1) * length for length in rng.choice((lengths, lengths[:1] * 2)))

    def numbers(low, high, size):
        return tuple(rng.randrange(low, high) for _ in range(size))

    def axes():
        return "".join(rng.choice((axis, "1")) for axis in "BNTS")

    slopes = tuple(rng.uniform(-0.1, 0.5) for _ in range(num_heads))
    window = tuple(rng.choice((None, 0, rng.randrange(s))) for _ in range(2))
    may_have = dict(
        is_causal=(0.5, True),
        local_window_size=(0.4, rng.choice((window, rng.randrange(s)))),
        logits_soft_cap=(0.2, 2.0),
        scale=(0.2, rng.choice((0.5, 0.0, -0.3))),
        query_offset=(0.2, numbers(-t, s, batch)),
        query_seq_lengths=(0.3, numbers(-1, t + 2, batch)),
        key_value_seq_lengths=(0.3, numbers(-1, s + 2, batch)),
        segment_ids=(0.25, Segments((0, 1, 2), is_sorted=rng.random() < 0.5, pair=rng.random() < 0.5)),
        mask=(0.25, Mask(axes(), visible=0.7)),
        sinks=(0.3, slopes),
    )
    options = {name: x for name, (chance, x) in may_have.items() if rng.random() < chance}
    options |= rng.choice(({}, {"bias": Bias(axes())}, {"alibi": slopes}))
    if has_dropout:
        options |= dict(dropout_rate=0.3, dropout_seed=seed)
    if "query_offset" not in options and rng.random() < 0.4:
        options["query_offset"] = rng.randrange(-t, s)  # a Python int
    h, hv = rng.choice(((8, 8), (4, 12), (16, 8)))
    forward_mode, checks = dict(forward_mode=True), dict(check_vma=rng.random() < 0.5)
    # In plain XLA dropout, or many steps, compile for ten seconds.
    plain = {} if has_dropout or number > 4 else dict(implementation="xla")
    if strategy == SHARDED_JIT:
        more = rng.choice(({}, {}, {}, forward_mode))
    else:
        more = rng.choice((*[{}] * 6, forward_mode, plain)) | checks
    if "scale" in options and rng.random() < 0.5:
        options["scale"] = Scale(options["scale"])
    if rng.random() < 0.2:
        more = more | dict(deterministic=True)
    kind = rng.choice((None, None, None, 0, 1))
    other_axis = None
    if number % 4 == 0 and not has_dropout:  # shards of a shard_map over batch or heads would drop the same
        has_axis = dict(batch=batch % 2 == 0, heads=num_kv_heads % 2 == 0)
        other_axis = rng.choice((None, None, *(axis for axis, divides in has_axis.items() if divides)))
    case = Case(f"random {seed}", batch, t, s, num_heads, num_kv_heads, h, hv, tuple(options.items()))
    return RandomCase(case, strategy, more, kind, other_axis)


_RANDOM = {f"{seed}-8": (seed, 8) for seed in range(100)} | {
    f"{seed}-{number}": (seed, number) for seed, number in zip(range(100, 120), itertools.cycle((2, 3, 4)))
}


@pytest.mark.parametrize(
    ("seed", "number"), quick.rows(_RANDOM, [*_RANDOM][:2] + [*_RANDOM][-4:], unpack=True)
)
def test_random_case(seed, number, platform):
    drawn = random_case(seed, number)
    print(drawn, number, sep="\n")  # pytest shows it if the test fails
    case, strategy, more, kind, axis = drawn
    mesh = mesh_of(number) if axis is None else mesh_of(2, number // 2, names=(axis, "sequence"))
    kind = harness.most_exact(platform, case) if kind is None else harness.kind(platform, kind)
    check_on(mesh, case, strategy, kind, **more)


# ---- Edges ------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Nowhere:
    """A mask, or ids of queries or of keys, of which one device's shard is hidden with 4 devices, by each strategy.

    Of 8 parts of the sequence device 1 has the third and fourth, with zigzag the second and seventh.
    """

    of: str  # "mask", "queries" or "keys"

    def make(self, case: Case, rng: np.random.Generator, dtype: Any) -> Any:
        rows, columns = (
            np.isin(np.arange(length) * 8 // length, (1, 2, 3, 6))
            for length in (case.seqlen_q, case.seqlen_kv)
        )
        if self.of == "mask":
            return ~rows[:, None]
        ids = [np.zeros((case.batch, len(x)), np.int32) for x in (rows, columns)]
        if self.of == "queries":
            ids[0][:, rows] = 1
        else:
            ids[1][:, columns] = 1
        return tuple(ids)


_SINKS = dict(sinks=(0.5, -1.0, 3.0, 1.0))
_WITHOUT_KEYS = {
    "before the first key": dict(is_causal=True, query_offset=-40),
    "before the first key, an array": dict(is_causal=True, query_offset=(-40, -96)),
    "behind the window": dict(local_window_size=(5, 0), query_offset=80),
    "no keys": dict(key_value_seq_lengths=(0, 0)),
    "masked": dict(mask=Nowhere("mask"), bias=Bias("11TS")),
    "segments of queries": dict(segment_ids=Nowhere("queries"), **_SINKS),
    "segments of keys": dict(segment_ids=Nowhere("keys"), k=2),
    "beyond the lengths": dict(query_seq_lengths=(3, 16), is_causal=True, **_SINKS),
    "segments in a window": dict(local_window_size=(20, 5), segment_ids=Nowhere("queries")),
}


@pytest.mark.parametrize(
    ("options", "strategy"), quick.in_turn(_WITHOUT_KEYS, STRATEGIES, quick=("masked", "segments of keys"))
)
def test_a_shard_that_sees_no_key(options, strategy, platform):
    """Or whose keys no query sees."""
    check(case_of("no key", options), 4, strategy, platform)


# The lengths of the sequences within arrays that do divide, or the lengths of arrays that do not.
_PADDED = dict(query_seq_lengths=(61, 13), key_value_seq_lengths=(93, 47))
_UNEVEN = {
    "": {},
    "causal": dict(is_causal=True),
    "window": dict(local_window_size=(9, 30), query_offset=(3, 20)),
    "bias": dict(bias=Bias("1N1S", dtype="float32")),
    "dropout": dict(dropout_rate=0.2, dropout_seed=3),
}


@pytest.mark.parametrize(
    ("options", "strategy"), quick.in_turn(_UNEVEN, STRATEGIES, quick=("causal", "window", "bias"))
)
def test_uneven_lengths(options, strategy, platform):
    if strategy == SHARDED_JIT:
        case = case_of("uneven", options, seqlen_q=61, seqlen_kv=93)
    else:
        case = fitted(case_of("uneven", options | _PADDED), 4, strategy)
    check(case, 4, strategy, platform)


# ---- Several processes ------------------------------------------------------------------------------------------

_PROCESS = pathlib.Path(__file__).with_name("one_of_two_processes.py")


@pytest.mark.exhaustive
def test_two_processes():
    """As on two hosts, with two devices each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    processes = [
        subprocess.Popen(
            [sys.executable, _PROCESS, address, str(i)],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for i in range(2)
    ]
    try:
        for process in processes:
            printed, _ = process.communicate(timeout=120)
            assert process.returncode == 0, printed
            assert printed.splitlines()[-1] == "all are close"
    finally:  # one that failed leaves the other waiting
        for process in processes:
            process.kill()
            process.communicate()

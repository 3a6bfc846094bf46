"""Times attention over one sequence on all GPUs of this host beside the same work on one, in one process.

    python benchmarks/context_parallel.py              # every case; needs two or more GPUs
    python benchmarks/context_parallel.py zigzag       # those whose names contain one of these words
    python benchmarks/context_parallel.py --markdown FILE  # the table of a result file; measures nothing

A figure is the time of a program that returns the output and the gradients of queries, keys and values, in bfloat16:
by `ring_attention`, or by `flash_attention` under sharded `jit`, which takes its way by itself. Beside it are the
prediction of `context_parallel_model.py`, which is made for H200s, and the ratio of the two. If a ring's prediction
without overlap is the closer one, XLA does not move keys while the kernels run.

Before it is timed, each program is compared with one GPU's, which `attention.py` compares with float64. Both take
turns. The exit status is 1 if a result is wrong or missing, or if two GPUs are not as many times as fast as one as the
case asks for.

On a CPU the sizes are divided, which tries the script and measures nothing of interest. It needs two devices or more:

    XLA_FLAGS=--xla_force_host_platform_device_count=2 python benchmarks/context_parallel.py
"""

import argparse
import dataclasses
import functools
import json
import os
import pathlib
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# Otherwise kernels wait for the transfers that a ring makes beside them (docs/long_context.md).
os.environ["XLA_FLAGS"] = " ".join(
    (
        "--xla_gpu_enable_latency_hiding_scheduler=true",
        "--xla_gpu_collective_permute_combine_threshold_bytes=1000000000000",
        os.environ.get("XLA_FLAGS", ""),
    )
)

import context_parallel_model as model
import jax
import jax.numpy as jnp
import measure
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_flash

RESULTS = pathlib.Path(__file__).parent / "results"
AXIS = "sequence"

Arrays = dict[str, jax.Array]
Timer = Callable[[dict[str, Callable[[], Any]]], dict[str, measure.Json]]


# ---- Cases ------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    strategy: str  # of context_parallel_model.STRATEGIES; under sharded jit the one that the package takes
    attention: model.Attention
    least: float | None = None  # how many times as fast as one GPU two should be

    @property
    def layout(self) -> str | None:
        """Of ring_attention; None under sharded jit."""
        return self.strategy.partition(", ")[2] or None

    def describe(self) -> str:
        """Sizes and options, as in the table."""
        x = self.attention
        heads = f"{x.num_heads}" + (f"/{x.num_kv_heads}" if x.num_kv_heads != x.num_heads else "")
        words = [f"{x.batch:,} x {x.length:,} x {heads} x {x.head_dim}"]
        words += ["causal"] if x.is_causal else []
        words += [f"window {x.window[0]:,}"] if x.window else []
        words += [f"{len(x.segments)} segments"] if x.segments else []
        return ", ".join(words)


def cases(num_devices: int, divisor: int) -> list[Case]:
    """The cases for so many devices, with lengths and windows divided."""

    def attention(
        batch: int, length: int, num_heads: int, num_kv_heads: int, **options: Any
    ) -> model.Attention:
        return model.Attention(batch, length // divisor, num_heads, num_kv_heads, 128, **options)

    def packed(num_kv_heads: int, **options: Any) -> model.Attention:
        length = 65_536 * num_devices
        segments = measure.random_lengths(length // divisor, 16 * num_devices)
        return attention(1, length, 48, num_kv_heads, segments=segments, **options)

    def under_jit(name: str, attention: model.Attention, least: float) -> Case:
        return Case(name, model.of_sharded_jit(attention, num_devices), attention, least)

    llama = attention(1, 131_072, 32, 8, is_causal=True)
    short = attention(2, 8_192, 32, 32, is_causal=True)
    window = attention(1, 131_072, 32, 8, window=(8192 // divisor, 0))
    packed_window = packed(12, window=(512 // divisor, 0))
    packed_full = packed(6)
    full = attention(1, 65_536, 16, 16)
    return [
        Case("zigzag_131072", "ring, zigzag", llama, 1.9),
        Case("zigzag_8192", "ring, zigzag", short, 1.75),
        under_jit("jit_131072", llama, 1.85),
        under_jit("jit_8192", short, 1.75),
        under_jit("window", window, 1.85),
        Case("window_ring", "ring, contiguous", window),
        under_jit("packed_window", packed_window, 1.8),
        Case("packed_window_ring", "ring, contiguous", packed_window),
        under_jit("packed_full", packed_full, 1.8),
        Case("packed_full_ring", "ring, contiguous", packed_full),
        under_jit("full", full, 1.9),
        Case("full_ring", "ring, contiguous", full, 1.9),
    ]


# ---- One case ---------------------------------------------------------------------------------------------


def make_inputs(attention: model.Attention) -> Arrays:
    """Random normal arrays, and the ids of the segments."""
    dtype = {2: jnp.bfloat16, 4: jnp.float32}[attention.itemsize]
    heads = dict(
        query=attention.num_heads,
        key=attention.num_kv_heads,
        value=attention.num_kv_heads,
        dout=attention.num_heads,
    )
    keys = jax.random.split(jax.random.key(0), len(heads))
    arrays = {
        name: jax.random.normal(key, (attention.batch, attention.length, number, attention.head_dim), dtype)
        for key, (name, number) in zip(keys, heads.items(), strict=True)
    }
    if attention.segments:
        ids = np.repeat(np.arange(len(attention.segments), dtype=np.int32), attention.segments)
        arrays["segment_ids"] = jnp.broadcast_to(jnp.asarray(ids), (attention.batch, attention.length))
    return arrays


def training(attend: Callable[..., jax.Array], inputs: Arrays) -> Arrays:
    """The output and the gradients."""
    inputs = dict(inputs)
    dout = inputs.pop("dout")
    others = {name: inputs.pop(name) for name in ("segment_ids",) if name in inputs}
    out, pullback = jax.vjp(lambda inputs: attend(**inputs, **others), inputs)
    (gradients,) = pullback(dout)
    return {"out": out} | {f"d{name}": x for name, x in gradients.items()}


def sharded(case: Case, mesh: Mesh) -> Callable[..., jax.Array]:
    """The attention of the case, as a function of arrays that `put` returns."""
    options = dict(is_causal=case.attention.is_causal, local_window_size=case.attention.window)
    if not case.layout:
        return functools.partial(jax_flash.flash_attention, **options)
    ring = functools.partial(jax_flash.ring_attention, axis_name=AXIS, layout=case.layout, **options)

    def attend(**arrays: jax.Array) -> jax.Array:
        def local(arrays: Arrays) -> jax.Array:
            return ring(**arrays)

        rows = P(None, AXIS)
        return jax.shard_map(local, mesh=mesh, in_specs=rows, out_specs=rows)(arrays)

    return attend


def put(case: Case, mesh: Mesh, arrays: Arrays) -> Arrays:
    """Whole arrays, sharded along the sequence, in the order of the layout."""
    if case.layout == "zigzag":
        arrays = {name: jax_flash.to_zigzag(x, mesh.size) for name, x in arrays.items()}
    return jax.device_put(arrays, NamedSharding(mesh, P(None, AXIS)))


def measure_case(case: Case, mesh: Mesh, timer: Timer) -> measure.Json:
    """Checks and times one case on the first device and on all."""
    attention = case.attention
    on_one_device = dataclasses.replace(case, strategy="one device")
    inputs = jax.device_put(make_inputs(attention), mesh.devices.flat[0])
    placed = put(case, mesh, inputs)
    on_one = jax.jit(functools.partial(training, sharded(on_one_device, mesh))).lower(inputs).compile()
    on_all = jax.jit(functools.partial(training, sharded(case, mesh))).lower(placed).compile()
    got, want = on_all(placed), put(case, mesh, on_one(inputs))
    errors = {name: float(relative_error(x, want[name])) for name, x in got.items()}
    del got, want
    _, limit = measure.tolerance("bfloat16", None, attention.length)
    if wrong := [f"{name} {error:.1e}" for name, error in errors.items() if not error <= limit]:
        raise ValueError(f"wrong result, relative error over {limit:.1e}: {', '.join(wrong)}")

    calls = {
        "one device": functools.partial(on_one, inputs),
        "all devices": functools.partial(on_all, placed),
    }
    timings = timer(calls)
    predicted = model.STRATEGIES[case.strategy](model.H200, attention, mesh.size)
    return dict(
        name=case.name,
        strategy=case.strategy,
        sizes=case.describe(),
        attention=dataclasses.asdict(attention),
        least=case.least,
        errors=errors,
        timings=timings,
        program_bytes={
            "one device": measure.program_bytes(on_one),
            "a device": measure.program_bytes(on_all),
        },
        predicted=dict(
            one_device_ms=1e3 * model.one_device(model.H200, attention),
            ms=1e3 * predicted.seconds,
            without_overlap_ms=1e3 * predicted.in_turn,
            arriving_bytes=predicted.arriving,
        ),
    )


@jax.jit
def relative_error(got: jax.Array, want: jax.Array) -> jax.Array:
    """In the Frobenius norm."""
    got, want = got.astype(jnp.float32), want.astype(jnp.float32)
    return jnp.sqrt(jnp.sum((got - want) ** 2) / jnp.sum(want**2))


# ---- Report -----------------------------------------------------------------------------------------------


def speedup(row: measure.Json) -> float | None:
    """How many times as fast all devices are as one; None without a figure."""
    times = [row["timings"][name].get("ms") for name in ("one device", "all devices")]
    return None if None in times else times[0] / times[1]


def table(rows: Iterable[measure.Json], num_devices: int) -> str:
    columns = (
        *("case", "by", "one device, ms", f"{num_devices} devices, ms", "times as fast", "by the model"),
        *("model, ms", "without overlap", "measured / model"),
    )
    lines = [f"| {' | '.join(columns)} |", "| --- " * len(columns) + "|", *map(table_row, rows)]
    return "\n".join(lines)


def table_row(row: measure.Json) -> str:
    one, all_ = (row["timings"][name].get("ms") for name in ("one device", "all devices"))
    predicted = row["predicted"]
    numbers = (
        one,
        all_,
        speedup(row),
        predicted["one_device_ms"] / predicted["ms"],
        predicted["ms"],
        predicted["without_overlap_ms"],
        all_ and all_ / predicted["ms"],
    )
    texts = ["-" if x is None else f"{x:.0f}" if x >= 100 else f"{x:.3g}" for x in numbers]
    return f"| {' | '.join([row['sizes'], row['strategy'], *texts])} |"


def shortcomings(rows: Iterable[measure.Json], num_devices: int) -> list[str]:
    """The figures that are missing, and on two devices those that are too low."""
    lines = []
    for row in rows:
        value = speedup(row)
        if value is None:
            errors = [x["error"] for x in row["timings"].values() if "error" in x]
            lines.append(f"no figure: {row['name']}: {errors[0]}")
        elif num_devices == 2 and row["least"] and value < row["least"]:
            lines.append(f"below {row['least']}: {row['name']}: {value:.3f}")
    return lines


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="cases whose names contain one of these")
    parser.add_argument(
        "--markdown", type=pathlib.Path, metavar="FILE", help="print the table of a result file"
    )
    parser.add_argument("--platform", choices=("gpu", "cpu"), help="default: gpu if there is one")
    parser.add_argument("--devices", type=int, metavar="N", help="the first N devices (default: all)")
    parser.add_argument(
        "--divide", type=int, metavar="N", help="divide the lengths; by 1 on a GPU, 256 on a CPU"
    )
    parser.add_argument("--rounds", type=int, default=3, help="timed slices of each program (3)")
    parser.add_argument("--warmup-ms", type=float, default=100, help="untimed calls before each slice (100)")
    parser.add_argument("--slice-ms", type=float, default=150, help="timed calls of each slice (150)")
    parser.add_argument(
        "--output",
        type=pathlib.Path,
        help="JSON file; for all cases results/<device>x<n>_context_parallel.json",
    )
    options = parser.parse_args(arguments)
    names = [case.name for case in cases(2, 1)]
    if unknown := [word for word in options.names if not any(word in name for name in names)]:
        parser.error(f"no case is named {', '.join(unknown)}. Names: {', '.join(names)}")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)

    def is_chosen(name: str) -> bool:
        return not options.names or any(word in name for word in options.names)

    if options.markdown:
        report = json.loads(options.markdown.read_text())
        print(table((row for row in report["cases"] if is_chosen(row["name"])), report["num_devices"]))
        return 0
    devices = jax.devices(options.platform)[: options.devices]
    if len(devices) < 2:
        print(
            f"A sequence is sharded over two devices or more, and there is one: {devices[0].device_kind}.",
            file=sys.stderr,
        )
        return 2
    on_gpu = devices[0].platform == "gpu"
    divisor = options.divide or (1 if on_gpu else 256)
    settings = dict(rounds=options.rounds, warmup=options.warmup_ms / 1e3, duration=options.slice_ms / 1e3)
    facts = measure.environment()
    output = options.output
    if output is None and divisor == 1 and not options.names:
        output = RESULTS / f"{measure.device_slug(facts)}x{len(devices)}_context_parallel.json"
    print("  ".join(f"{name} {value}" for name, value in facts.items() if value is not None), flush=True)

    mesh = Mesh(np.array(devices), (AXIS,))
    timer = functools.partial(measure.time_interleaved, **settings, asynchronous=on_gpu)
    rows, left_out = [], []
    report = dict(
        environment=facts,
        settings=settings | {"divisor": divisor, "xla_flags": os.environ.get("XLA_FLAGS")},
        model=model.H200.name,
        num_devices=len(devices),
        left_out=left_out,
        cases=rows,
    )
    print("\n" + table([], len(devices)), flush=True)
    chosen = (case for case in cases(len(devices), divisor) if is_chosen(case.name))
    run = functools.partial(measure_case, mesh=mesh, timer=timer)
    for row in measure.attempts(chosen, lambda case: case.name, run, left_out):
        rows.append(row)
        print(table_row(row), flush=True)
        measure.save(report, output)  # after each case, so an interrupted run loses at most one
    measure.save(report, output)

    wrong = [f"left out: {line}" for line in left_out] + shortcomings(rows, len(devices) if on_gpu else 0)
    if output is not None:
        print(f"figures: {output}", flush=True)
    print("\n" + "\n".join([*wrong, f"{len(rows)} cases"]), flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

"""A model of the time of attention whose sequence is sharded over GPUs, forward and backward, by each strategy.

    python benchmarks/context_parallel_model.py  # the tables of docs/long_context.md

It is a model: kernels, memory and links are a few numbers each, and nothing disturbs anything else. Its time on one
GPU is within a tenth of what was measured on an H200; for two GPUs, docs/long_context.md has both.
`context_parallel.py` measures the GPUs of one host and prints its predictions beside the times.

Which chunks meet in which step of a ring, which keys a window moves, and which calls are divided by heads, is asked of
the package.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from jax_flash import _halo, _head_exchange, _library, _ring
from jax_flash._options import AttentionOptions

FORWARD, BACKWARD = "forward", "backward"


# ---- Machines ---------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Link:
    """What a GPU sends and receives at a time."""

    bandwidth: float  # bytes a second that transfers attain, in each direction
    latency: float  # seconds from one GPU to the next


@dataclasses.dataclass(frozen=True)
class Kernel:
    """Fitted to benchmarks/results/h200.json at head dim 128."""

    flops: float  # a second
    # A row of queries costs as much as if it saw so many keys more. The backward pass is split over keys: there a key
    # costs as if so many queries more saw it.
    edge: int


@dataclasses.dataclass(frozen=True)
class Machine:
    name: str
    gpus_per_node: int
    in_node: Link
    between_nodes: Link  # of each GPU
    forward: Kernel = Kernel(737e12, 309)
    backward: Kernel = Kernel(594e12, 368)
    memory: float = 4.28e12  # bytes a second of a copy, read and write together
    call: float = 10e-6  # seconds that a kernel or a collective takes besides

    def link(self, num_devices: int) -> Link:
        """The slowest of a ring."""
        return self.in_node if num_devices <= self.gpus_per_node else self.between_nodes

    def send(self, num_bytes: float, num_devices: int) -> float:
        """Seconds in which all devices pass so many bytes on, each to another one."""
        link = self.link(num_devices)
        return self.call + link.latency + num_bytes / link.bandwidth

    def gather(self, num_bytes: float, num_devices: int) -> float:
        """Seconds of an all-gather whose result has so many bytes, or of a reduce-scatter of as many.

        Rings go through all GPUs; between two nodes there are as many rings as a node has GPUs.
        """
        nodes = math.ceil(num_devices / self.gpus_per_node)
        in_node = (num_devices - 1) / num_devices * num_bytes / self.in_node.bandwidth
        between = (nodes - 1) / nodes * num_bytes / (self.gpus_per_node * self.between_nodes.bandwidth)
        latency = (num_devices - nodes) * self.in_node.latency + (nodes - 1) * self.between_nodes.latency
        return self.call + latency + max(in_node, between)

    def exchange(self, num_bytes: float, num_devices: int) -> float:
        """Seconds in which each device sends an equal part of so many bytes to each one, and copies all twice."""
        in_node = min(num_devices, self.gpus_per_node)
        transfer = max(
            (in_node - 1) / num_devices * num_bytes / self.in_node.bandwidth,
            (num_devices - in_node) / num_devices * num_bytes / self.between_nodes.bandwidth,
        )
        return self.call + self.link(num_devices).latency + transfer + 4 * num_bytes / self.memory


_ATTAINED = 0.8  # of a link's bandwidth

H200 = Machine(
    "nodes of 8 H200, NVLink 4 (450 GB/s a direction), InfiniBand NDR (400 Gb/s a GPU)",
    gpus_per_node=8,
    in_node=Link(_ATTAINED * 450e9, 3e-6),
    between_nodes=Link(_ATTAINED * 50e9, 10e-6),
)


# ---- Work -------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Attention:
    """One call of self-attention. A row sees an interval of the keys."""

    batch: int
    length: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    is_causal: bool = False
    window: tuple[int, int] | None = None
    segments: tuple[int, ...] | None = None  # the lengths of packed sequences
    itemsize: int = 2

    @property
    def options(self) -> AttentionOptions:
        return AttentionOptions.resolve(
            self.head_dim, is_causal=self.is_causal, local_window_size=self.window
        )

    def query_bytes(self, rows: float) -> float:
        return self.batch * rows * self.num_heads * self.head_dim * self.itemsize

    def key_bytes(self, keys: float, itemsize: int | None = None) -> float:
        """Of keys and values, or of their gradients with another itemsize."""
        return 2 * self.batch * keys * self.num_kv_heads * self.head_dim * (itemsize or self.itemsize)

    def seen(self, num_chunks: int) -> "Seen":
        """What each chunk of queries sees of each chunk of keys."""
        stride = max(1, self.length // 2**16)  # one row stands for some
        row = np.arange(stride // 2, self.length, stride)
        first, end = np.zeros_like(row), np.full_like(row, self.length)
        if self.segments:
            ends = np.cumsum(self.segments)
            own = np.searchsorted(ends, row, side="right")
            first, end = ends[own] - np.array(self.segments)[own], ends[own]
        before, behind = self.options.reach
        first = first if before < 0 else np.maximum(first, row - before)
        end = end if behind < 0 else np.minimum(end, row + behind + 1)
        chunk = self.length // num_chunks
        columns = []
        for begin in range(0, self.length, chunk):
            first_here, end_here = (
                np.clip(x, begin, begin + chunk).reshape(num_chunks, -1) for x in (first, end)
            )
            counts = np.maximum(end_here - first_here, 0)
            sees = counts > 0
            most = np.max(end_here, 1, initial=0, where=sees) - np.min(
                first_here, 1, initial=self.length, where=sees
            )
            columns.append((stride * counts.sum(1), stride * sees.sum(1), np.maximum(most, 0)))
        return Seen(*(np.stack(x, 1).astype(float) for x in zip(*columns, strict=True)))

    def kernel(self, machine: Machine, direction: str, seen: "Seen") -> np.ndarray:
        """Seconds of each call."""
        if direction == FORWARD:
            kernel, flops, edges = machine.forward, 4, seen.rows
        else:
            kernel, flops, edges = machine.backward, 10, seen.keys
        flops *= self.batch * self.num_heads * self.head_dim
        return machine.call + flops * (seen.pairs + kernel.edge * edges) / kernel.flops


class Seen(NamedTuple):
    """Of calls: how many pairs of query and key are visible, how many rows see a key, how many keys are seen."""

    pairs: np.ndarray
    rows: np.ndarray
    keys: np.ndarray

    def of_zigzag_shards(self) -> "Seen":
        """Of one call for each pair of shards, which have two chunks each."""
        first = np.arange(len(self.pairs) // 2)
        chunks = np.stack([first, len(self.pairs) - 1 - first])
        pairs, rows, keys = (x[chunks[:, None, :, None], chunks[None, :, None, :]] for x in self)
        return Seen(pairs.sum((0, 1)), rows.max(1).sum(0), keys.max(0).sum(0))

    def of_all_keys(self) -> "Seen":
        """Of one call for each chunk of queries instead of one for each chunk of keys, too."""
        return Seen(self.pairs.sum(1), self.rows.max(1), self.keys.sum(1))


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Of a forward and a backward pass."""

    seconds: float
    in_turn: float  # seconds, if no transfer runs beside a kernel
    arriving: float  # bytes at a device


# ---- Strategies -------------------------------------------------------------------------------------------


def one_device(machine: Machine, attention: Attention) -> float:
    """Seconds."""
    return sum(attention.kernel(machine, x, attention.seen(1)).item() for x in (FORWARD, BACKWARD))


def ring(machine: Machine, attention: Attention, num_devices: int, layout: str) -> Prediction:
    """`ring_attention`: in each step a kernel for each pair of chunks, with the next keys on their way."""
    shard = attention.length // num_devices
    num_chunks = 2 if layout == "zigzag" else 1
    plan = _ring._Ring.of("", num_devices, num_chunks, (shard, shard), (), attention.options, 0)
    keys, sums = (attention.key_bytes(shard, itemsize) for itemsize in (None, 4))
    seen = attention.seen(num_devices * (num_chunks if plan.by_halves else plan.num_chunks))
    if plan.by_halves:
        seen = seen.of_zigzag_shards()

    def kernels_of(step: _ring._Step, device: int, of_pair: np.ndarray) -> float:
        sender = (device - step.shift) % num_devices
        return sum(of_pair[plan.chunk(device, i), plan.chunk(sender, j)] for i, j in step.pairs[device])

    seconds = in_turn = arriving = 0.0
    for direction in (FORWARD, BACKWARD):
        of_pair = attention.kernel(machine, direction, seen)
        for i, step in enumerate(plan.steps):
            # The next keys travel under the kernels, and the gradients of the steps before: those of one call as they
            # are, sums in float32.
            travelling = keys if i + 1 < len(plan.steps) else 0
            if direction == BACKWARD and i > 0:
                travelling += keys if plan.num_chunks == 1 and i == 1 else sums
            copies = _copied_bytes(attention, direction, plan, i) / machine.memory
            kernels = copies + max(kernels_of(step, device, of_pair) for device in range(num_devices))
            transfer = machine.send(travelling, num_devices) if travelling else 0
            seconds += max(kernels, transfer)
            in_turn += kernels + transfer
            arriving += travelling
    if plan.steps and plan.steps[-1].shift:  # the gradients go home
        seconds += machine.send(keys, num_devices)
        in_turn += machine.send(keys, num_devices)
        arriving += keys
    return Prediction(seconds, in_turn, arriving)


def _copied_bytes(attention: Attention, direction: str, plan: _ring._Ring, i: int) -> float:
    """What step i reads and writes around its kernels: parts of a shard, swapped halves, sums in float32."""
    num_slots = plan.steps[i].num_slots
    queries, keys = attention.query_bytes(plan.q_length), attention.key_bytes(plan.kv_length)
    arrays_of_rows = 1 if direction == FORWARD else 3
    copied = summed = 0.0
    if plan.num_chunks > 1:
        copied = num_slots * (arrays_of_rows * queries + keys)
    elif plan.by_halves and i == 1:
        copied = arrays_of_rows * queries
    if plan.num_chunks > 1 or i > 0:
        summed = num_slots * (queries if direction == FORWARD else queries + keys)
    return 2 * copied + summed * (1 + 2 * 4 / attention.itemsize)


def gathered(machine: Machine, attention: Attention, num_devices: int) -> Prediction:
    """Sharded `jit`: all keys are gathered before the kernels, their gradients reduced and scattered behind them."""
    keys = attention.key_bytes(attention.length)
    sums = attention.key_bytes(attention.length, itemsize=4)
    seconds = machine.gather(keys, num_devices) + machine.gather(sums, num_devices)
    seconds += (keys + sums) / machine.memory  # the gradients as float32
    seen = attention.seen(num_devices).of_all_keys()
    seconds += sum(attention.kernel(machine, x, seen).max() for x in (FORWARD, BACKWARD))
    return Prediction(seconds, seconds, (num_devices - 1) / num_devices * (keys + sums))


def by_heads(machine: Machine, attention: Attention, num_devices: int) -> Prediction:
    """Sharded `jit`: devices exchange their rows for all rows of some heads before each call, and back behind it."""
    keys = max(1, num_devices / attention.num_kv_heads) * attention.key_bytes(attention.length) / num_devices
    queries = attention.query_bytes(attention.length) / num_devices
    lse = 4 * attention.batch * attention.length * attention.num_heads / num_devices
    # q, k, v; out, lse; and out, lse, dout; dq, dk, dv.
    moved = [queries, keys, queries, lse, queries, lse, queries, queries, keys]
    if num_devices > attention.num_kv_heads:
        moved.append(keys)  # again for the backward pass
    of_one = [attention.kernel(machine, x, attention.seen(1)).item() for x in (FORWARD, BACKWARD)]
    seconds = sum(machine.exchange(x, num_devices) for x in moved)
    seconds += sum(machine.call + (x - machine.call) / num_devices for x in of_one)
    return Prediction(seconds, seconds, (num_devices - 1) / num_devices * sum(moved))


def halo(machine: Machine, attention: Attention, num_devices: int) -> Prediction:
    """Sharded `jit` in a window: the part of the keys that a device stores."""
    rows = attention.length // num_devices
    unit = _library.constants()["kKeyUnit"]
    plan = _halo.Halo("", num_devices, rows, attention.options.reach, unit)
    moved = [attention.key_bytes(x.end - x.begin) for x in plan._transfers()]
    # Keys for each pass, and their gradients.
    seconds = 3 * sum(machine.send(x, num_devices) for x in moved)
    seconds += 3 * attention.key_bytes(plan.length) / machine.memory
    seen = attention.seen(num_devices).of_all_keys()
    seconds += sum(attention.kernel(machine, x, seen).max() for x in (FORWARD, BACKWARD))
    return Prediction(seconds, seconds, 3 * sum(moved))


def of_sharded_jit(attention: Attention, num_devices: int) -> str:
    """The name of the strategy that the package takes."""
    if _halo.pays(num_devices, attention.length, attention.options):
        return "window"
    lengths, heads = (attention.length, attention.length), (attention.num_heads, attention.num_kv_heads)
    has_segments = attention.segments is not None
    uneven_keys = _head_exchange.uneven_keys(attention.length, attention.options, has_segments)
    return "by heads" if _head_exchange.pays(num_devices, lengths, heads, uneven_keys) else "gathered"


def sharded_jit(machine: Machine, attention: Attention, num_devices: int) -> Prediction:
    return STRATEGIES[of_sharded_jit(attention, num_devices)](machine, attention, num_devices)


STRATEGIES: dict[str, Callable[[Machine, Attention, int], Prediction]] = {
    "ring, zigzag": functools.partial(ring, layout="zigzag"),
    "ring, contiguous": functools.partial(ring, layout="contiguous"),
    "sharded jit": sharded_jit,
    "by heads": by_heads,
    "gathered": gathered,
    "window": halo,
}


# ---- Tables -----------------------------------------------------------------------------------------------

LLAMA = dict(batch=1, num_heads=32, num_kv_heads=8, head_dim=128)
NUMBERS = (2, 8, 16, 32, 64, 128, 256)


def speedup(strategy: Callable, attention: Attention, num_devices: int) -> float:
    return one_device(H200, attention) / strategy(H200, attention, num_devices).seconds


def table(attentions: Iterable[Attention], strategies: Iterable[str]) -> str:
    """How many times as fast as one device, for each number of devices."""
    columns = [
        (f"{x.length:,}: {name}", x, STRATEGIES[name])
        for x, name in itertools.product(attentions, strategies)
    ]
    lines = [["devices", *(name for name, *_ in columns)], ["---"] * (1 + len(columns))]
    for number in NUMBERS:
        speeds = [speedup(strategy, x, number) for _, x, strategy in columns]
        lines.append([str(number), *(f"{x:.0f}" if x >= 99.5 else f"{x:.3g}" for x in speeds)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def tables() -> list[str]:
    """Those of docs/long_context.md: causal, and in a window."""
    lengths = (131_072, 1_048_576)
    causal = [Attention(length=length, is_causal=True, **LLAMA) for length in lengths]
    window = [Attention(length=length, window=(8192, 0), **LLAMA) for length in lengths]
    return [
        table(causal, ("ring, zigzag", "ring, contiguous", "sharded jit")),
        table(window, ("window", "ring, contiguous")),
    ]


if __name__ == "__main__":
    print(H200.name, *tables(), sep="\n\n")

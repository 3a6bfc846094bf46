"""Times what people use attention for, beside cuDNN's and XLA's attention (through jax.nn), in one process.

    python benchmarks/uses.py                        # every use, on a GPU
    python benchmarks/uses.py triangle decode        # those whose names contain one of these words
    python benchmarks/uses.py --markdown FILE        # the table of a result file; measures nothing

The rows of `USES` are windows and pair biases, short sequences, small heads, padded and packed batches, and decoding.
A figure is the time of a call in milliseconds: of the forward pass and, where people train, of a program that returns
the output and all gradients, also those of a bias and of sinks.

jax.nn has no offset, segments or ALiBi, and gets a dense mask or bias instead, made beforehand. It has no pages, so
its program gathers the sequences first. It cannot express a soft cap or sinks: XLA's figure is then that of
`implementation="xla"`, marked with a star. The ratio is the time of the fastest alternative over that of jax_flash.

Decoding with short caches takes the GPU less time than the host needs for a call. There a program makes the calls of
several layers, each with a cache of its own and the output of the one before as its query, and a figure is the time of
one of them.

Before it is timed, each program is checked against plain JAX in float64: the results of the last key head, for the
last 64 sequences, and the gradient of a bias that all sequences share. An alternative that computes something else
does not count.

The programs take turns, and many calls are in flight at a time.

The exit status is 1 if jax_flash is slower than an alternative in any figure, wrong, or without a figure. On a CPU
the sizes are divided, which tries the script and measures nothing of interest.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import itertools
import json
import os
import pathlib
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

# XLA's attention needs room for its score matrices. If it still fails, it has no figure.
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import jax
import jax.numpy as jnp
import measure
import numpy as np
from measure import OURS

import jax_flash

RESULTS = pathlib.Path(__file__).parent / "results"
PEERS = ("cudnn", "xla")
DIRECTIONS = ("forward", "training")
NUM_CHECKED = 64  # sequences whose results are compared: the last ones

Arrays = dict[str, Any]
Timer = Callable[[dict[str, Callable[[], Any]]], dict[str, measure.Json]]


# ---- Uses -------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Use:
    """One call of attention that people make."""

    name: str
    what: str
    batch: int
    seqlen_q: int
    num_heads: int
    head_dim: int
    dtype: str = "bfloat16"
    precision: str | None = None  # None: jax_default_matmul_precision
    num_kv_heads: int | None = None  # None: as many as query heads
    head_dim_v: int | None = None  # of values; None: the same
    seqlen_kv: int | None = None  # None: as many keys as queries
    is_trained: bool = True
    is_causal: bool = False
    window: tuple[int, int] | None = None
    bias: str | None = None  # the shape, such as "1NTS"; random normal, trained with the rest
    mask: str | None = None  # the shape; at random
    has_alibi: bool = False
    has_sinks: bool = False
    soft_cap: float | None = None
    num_segments: int | None = None  # packed into each row
    is_padded: bool = False  # each sequence has a length of its own
    is_cached: bool = False  # the queries are the last of a sequence, whose keys are in a full cache
    page_size: int | None = None  # of a cache in pages that lie anywhere
    num_layers: int = 1  # timed in one program

    @property
    def num_keys(self) -> int:
        return self.seqlen_kv or self.seqlen_q

    @property
    def kv_heads(self) -> int:
        return self.num_kv_heads or self.num_heads

    @property
    def has_offset(self) -> bool:
        """Whether it matters where the queries are among the keys, and they do not begin with them."""
        return self.is_cached and (self.is_causal or self.window is not None)

    @property
    def is_in_jax_nn(self) -> bool:
        """Whether jax.nn can express the call."""
        return self.soft_cap is None and not self.has_sinks and self.head_dim_v is None

    def shape(self, letters: str) -> tuple[int, ...]:
        """The sizes of the axes: B batch, T queries, S keys, N query heads, K key heads, H and V head dims, and 1."""
        sizes = {"1": 1, "B": self.batch, "T": self.seqlen_q, "S": self.num_keys}
        sizes |= {"N": self.num_heads, "K": self.kv_heads, "H": self.head_dim}
        sizes |= {"V": self.head_dim_v or self.head_dim}
        return tuple(sizes[letter] for letter in letters)

    def divided(self, divisor: int) -> "Use":
        """The use with a smaller batch, shorter sequences and windows, and fewer segments; by 1 the use itself."""

        def part(size: int, least: int = 4) -> int:
            return max(min(size, least), size // divisor)

        return dataclasses.replace(
            self,
            batch=part(self.batch),
            seqlen_q=part(self.seqlen_q),
            seqlen_kv=self.seqlen_kv and part(self.seqlen_kv),
            window=self.window and (part(self.window[0]), part(self.window[1])),
            num_segments=self.num_segments and part(self.num_segments, least=3),
            page_size=self.page_size and part(self.page_size),
            num_layers=part(self.num_layers, least=2),
        )

    def describe(self) -> str:
        """Sizes and options, as in the table."""
        heads = f"{self.num_heads}" + (f"/{self.kv_heads}" if self.kv_heads != self.num_heads else "")
        columns = f"{self.head_dim}" + (f"/{self.head_dim_v}" if self.head_dim_v else "")
        words = [f"{self.batch:,} x {self.seqlen_q:,} x {heads} x {columns}"]
        words += [f"{self.num_keys:,} keys"] if self.num_keys != self.seqlen_q else []
        words += ["causal"] if self.is_causal else []
        words += [f"window {self.window[0]:,}"] if self.window else []
        words += [f"bias [{','.join(self.bias)}]"] if self.bias else []
        words += [f"mask [{','.join(self.mask)}]"] if self.mask else []
        words += ["ALiBi"] if self.has_alibi else []
        words += ["sinks"] if self.has_sinks else []
        words += [f"soft cap {self.soft_cap:g}"] if self.soft_cap else []
        words += [f"{self.num_segments} segments"] if self.num_segments else []
        words += ["lengths"] if self.is_padded else []
        words += [f"pages of {self.page_size}"] if self.page_size else []
        words += [f"{self.num_layers} layers"] if self.num_layers > 1 else []
        words += [self.dtype] if self.dtype != "bfloat16" else []
        words += [f'"{self.precision}"'] if self.precision else []
        return ", ".join(words)


LLAMA = dict(num_kv_heads=8, num_heads=32, head_dim=128)
LLAMA_70B = dict(num_kv_heads=8, num_heads=64, head_dim=128)
MULTI_QUERY = dict(num_kv_heads=1, num_heads=32, head_dim=128)
GEMMA = dict(num_kv_heads=8, num_heads=16, head_dim=256)
GEMMA_GLOBAL = dict(num_kv_heads=4, num_heads=8, head_dim=512)
DEEPSEEK = dict(num_heads=16, head_dim=192, head_dim_v=128)  # of 128, on each of 8 GPUs
GPT_OSS = dict(num_kv_heads=8, num_heads=64, head_dim=64)
CACHE = dict(is_cached=True, is_trained=False)

USES = (
    # Biases that are trained, shared by the batch.
    Use("swin", "Swin: windows of an image", 4096, 49, 6, 32, bias="1NTS"),
    Use("swin_float32", "Swin", 4096, 49, 6, 32, "float32", bias="1NTS"),
    Use("triangle_384", "triangle attention", 384, 384, 4, 32, bias="1NTS"),
    Use("triangle_768", "triangle attention", 768, 768, 4, 32, bias="1NTS"),
    Use("triangle_384_float32", "triangle attention", 384, 384, 4, 32, "float32", bias="1NTS"),
    Use("msa_row", "rows of an alignment", 256, 384, 8, 32, bias="1NTS"),
    Use("alphafold_512_h16", "AlphaFold", 512, 512, 4, 16, bias="1NTS", mask="B11S"),
    Use("alphafold_512_h32", "AlphaFold", 512, 512, 4, 32, bias="1NTS", mask="B11S"),
    Use("alphafold_1024_h16", "AlphaFold", 1024, 1024, 4, 16, bias="1NTS", mask="B11S"),
    Use("alphafold_1024_h32", "AlphaFold", 1024, 1024, 4, 32, bias="1NTS", mask="B11S"),
    Use("alphafold_2048_h16", "AlphaFold", 2048, 2048, 4, 16, bias="1NTS", mask="B11S"),
    Use("alphafold_2048_h32", "AlphaFold", 2048, 2048, 4, 32, bias="1NTS", mask="B11S"),
    Use(
        "alphafold_rows_h16", "AlphaFold: some rows of 5,120", 128, 5120, 4, 16, bias="1NTS", mask="B11S",
        is_trained=False,
    ),
    Use(
        "alphafold_rows", "AlphaFold: some rows of 5,120", 128, 5120, 4, 32, bias="1NTS", mask="B11S",
        is_trained=False,
    ),
    Use("t5", "T5: relative positions", 8, 1024, 16, 64, bias="1NTS"),
    Use("wide_heads_bias", "wide heads with a bias", 2, 2048, 8, 256, bias="1NTS"),
    Use("key_bias", "a bias of keys", 8, 1024, 16, 64, bias="BN1S"),
    # Short sequences and small heads.
    Use("vit_b", "ViT-B", 256, 197, 12, 64),
    Use("short", "short sequences", 1024, 64, 12, 64),
    Use("short_128", "short texts", 512, 128, 12, 64),
    Use("tabpfn_h32", "TabPFN: rows of a table", 512, 1024, 6, 32),
    Use("tabpfn_h16", "TabPFN", 512, 1000, 12, 16),
    Use("small_heads_32", "small heads", 4, 4096, 16, 32),
    Use("small_heads_16", "small heads", 8, 2048, 16, 16),
    # Images and sound.
    Use("dit", "DiT: diffusion of images", 16, 4096, 16, 72),
    Use("text_to_image", "cross-attention to a prompt", 16, 4096, 10, 64, seqlen_kv=77),
    Use("whisper", "Whisper: sound", 16, 1500, 20, 64),
    # Text.
    Use("bert", "BERT: a padded batch", 64, 512, 12, 64, is_padded=True),
    Use("mask", "a mask", 8, 2048, 16, 64, mask="B1TS"),
    Use("llama", "Llama", 2, 8192, **LLAMA, is_causal=True),
    Use("packed", "fine-tuning, packed", 1, 16384, **LLAMA, is_causal=True, num_segments=16),
    Use("gemma", "Gemma", 2, 8192, **GEMMA, is_causal=True),
    Use("gemma_window", "Gemma: a local layer", 2, 8192, **GEMMA, is_causal=True, window=(1023, 0)),
    Use("gemma_global", "Gemma 4: a global layer", 1, 8192, **GEMMA_GLOBAL, is_causal=True),
    Use("deepseek", "DeepSeek: latent attention", 2, 8192, **DEEPSEEK, is_causal=True),
    Use("gpt_oss", "GPT-OSS", 1, 8192, **GPT_OSS, is_causal=True, window=(127, 0), has_sinks=True),
    Use("alibi", "MPT: ALiBi", 4, 2048, 32, 128, is_causal=True, has_alibi=True),
    # float32.
    Use("float32", "float32", 4, 4096, 16, 128, "float32"),
    Use("float32_highest", "float32", 4, 4096, 16, 128, "float32", "highest"),
    Use("float32_causal", "float32", 4, 4096, 32, 64, "float32", is_causal=True),
    # New tokens after a cache.
    Use("decode_64x8192", "decoding", 64, 1, **LLAMA, seqlen_kv=8192, **CACHE),
    Use("decode_64x8192_pages_64", "decoding", 64, 1, **LLAMA, seqlen_kv=8192, page_size=64, **CACHE),
    Use("decode_64x8192_pages_16", "decoding", 64, 1, **LLAMA, seqlen_kv=8192, page_size=16, **CACHE),
    Use("decode_1x131072", "decoding", 1, 1, **LLAMA, seqlen_kv=131072, **CACHE),
    Use("decode_1x131072_pages_64", "decoding", 1, 1, **LLAMA, seqlen_kv=131072, page_size=64, **CACHE),
    Use("decode_8x1024", "decoding", 8, 1, **LLAMA, seqlen_kv=1024, num_layers=16, **CACHE),
    Use(
        "decode_8x1024_pages_16", "decoding", 8, 1, **LLAMA, seqlen_kv=1024, page_size=16, num_layers=16,
        **CACHE,
    ),
    Use("decode_window", "decoding, Mistral", 32, 1, **LLAMA, seqlen_kv=32768, window=(4095, 0), **CACHE),
    Use("decode_soft_cap", "decoding, Gemma 2", 32, 1, **GEMMA, seqlen_kv=8192, soft_cap=50.0, **CACHE),
    Use("decode_512", "decoding, Gemma 4", 32, 1, **GEMMA_GLOBAL, seqlen_kv=8192, **CACHE),
    Use("decode_sinks", "decoding, GPT-OSS", 64, 1, **GPT_OSS, seqlen_kv=8192, has_sinks=True, **CACHE),
    Use("speculative", "speculative decoding", 16, 4, **LLAMA, seqlen_kv=8192, is_causal=True, **CACHE),
    Use(
        "speculative_16", "speculative decoding", 16, 16, **LLAMA_70B, seqlen_kv=8192, is_causal=True,
        **CACHE,
    ),
    Use(
        "speculative_multi_query", "speculative decoding", 16, 4, **MULTI_QUERY, seqlen_kv=8192,
        is_causal=True, num_layers=16, **CACHE,
    ),
    Use("chunk", "a part of a prompt", 1, 512, **LLAMA, seqlen_kv=32768, is_causal=True, **CACHE),
    Use("chunk_full", "a part of a prompt", 1, 512, **LLAMA, seqlen_kv=32768, **CACHE),
)  # fmt: skip


# ---- Operands ---------------------------------------------------------------------------------------------


class Operands(NamedTuple):
    """The arrays of a use, by the names of flash_attention's arguments, and "alibi_slopes"."""

    differentiated: Arrays  # query, key, value, bias, sinks
    others: Arrays
    dout: jax.Array


def make_operands(use: Use) -> Operands:
    """Random normal floating-point arrays, and the arrays that the options need."""
    dtype = jnp.dtype(use.dtype)
    shapes = {"query": "BTNH", "key": "BSKH", "value": "BSKV", "dout": "BTNV"}
    shapes |= {"bias": use.bias} if use.bias else {}
    shapes |= {"sinks": "N"} if use.has_sinks else {}
    keys = jax.random.split(jax.random.key(0), len(shapes))
    floats = {
        name: jax.random.normal(key, use.shape(letters), jnp.float32 if name == "sinks" else dtype)
        for key, (name, letters) in zip(keys, shapes.items(), strict=True)
    }
    dout = floats.pop("dout")

    random = np.random.default_rng(0)
    others: Arrays = {}
    if use.mask:
        mask = jax.random.bernoulli(jax.random.key(1), 0.7, use.shape(use.mask))
        others["mask"] = mask.at[..., 0].set(True)  # each query sees a key
    if use.has_alibi:
        others["alibi_slopes"] = 2.0 ** (-8 * jnp.arange(1, use.num_heads + 1) / use.num_heads)
    if use.num_segments:
        cuts = np.sort(random.permutation(use.seqlen_q - 1)[: use.num_segments - 1]) + 1
        ids = np.searchsorted(cuts, np.arange(use.seqlen_q), side="right")
        others["segment_ids"] = jnp.broadcast_to(jnp.asarray(ids, jnp.int32), use.shape("BT"))
    if use.is_padded:
        lengths = jnp.asarray(random.integers(1, use.seqlen_q + 1, use.batch), jnp.int32)
        others |= {"query_seq_lengths": lengths, "key_value_seq_lengths": lengths}
    if use.is_cached:
        others["key_value_seq_lengths"] = jnp.full(use.batch, use.num_keys, jnp.int32)
        if use.has_offset:
            others["query_offset"] = jnp.full(use.batch, use.num_keys - use.seqlen_q, jnp.int32)
    return Operands(floats, others, dout)


def in_pages(use: Use, operands: Operands) -> Operands:
    """The same, with keys and values in pages [B * P, page size, K, H], in a random order."""
    num_pages = use.batch * (use.num_keys // use.page_size)
    order = jax.random.permutation(jax.random.key(2), num_pages)
    pages = {
        name: operands.differentiated[name].reshape(num_pages, use.page_size, *use.shape("KH"))[order]
        for name in ("key", "value")
    }
    page_indices = jnp.argsort(order).astype(jnp.int32).reshape(use.batch, -1)
    return operands._replace(
        differentiated=operands.differentiated | pages,
        others=operands.others | {"page_indices": page_indices},
    )


def ours(use: Use, implementation: str | None = None) -> Callable[..., jax.Array]:
    """jax_flash's attention, as a function of the arrays in `Operands`."""

    def attention(alibi_slopes: jax.Array | None = None, **arrays: Any) -> jax.Array:
        if alibi_slopes is not None:
            arrays["bias"] = jax_flash.Alibi(alibi_slopes)
        return jax_flash.flash_attention(
            **arrays,
            is_causal=use.is_causal,
            local_window_size=use.window,
            logits_soft_cap=use.soft_cap,
            implementation=implementation,
        )

    return attention


def for_jax_nn(use: Use, others: Arrays) -> Arrays:
    """`Operands.others` as arguments of jax.nn.dot_product_attention: what it lacks becomes a bias or a mask."""
    others = dict(others)
    row = jnp.arange(use.seqlen_q)[:, None] + (use.num_keys - use.seqlen_q if use.has_offset else 0)
    column = jnp.arange(use.num_keys)
    if "alibi_slopes" in others:
        slopes = others.pop("alibi_slopes")[:, None, None]
        others["bias"] = (-slopes * jnp.abs(row - column))[None].astype(use.dtype)
    if "segment_ids" in others:
        ids = others.pop("segment_ids")
        others["mask"] = (ids[:, :, None] == ids[:, None, :])[:, None]
    if use.has_offset:
        del others["query_offset"], others["key_value_seq_lengths"]  # the lengths are those of the arrays
        visible = jnp.ones(use.shape("TS"), bool)
        if use.is_causal:
            visible &= column <= row
        if use.window:
            visible &= (column >= row - use.window[0]) & (column <= row + use.window[1])
        others["mask"] = jnp.broadcast_to(visible, use.shape("B1TS"))
    return others


def theirs(use: Use, implementation: str) -> Callable[..., jax.Array]:
    """The attention of an alternative, as a function of the arrays in `Operands`, if need be `for_jax_nn`."""
    if use.is_in_jax_nn:
        options = {} if use.has_offset else dict(is_causal=use.is_causal, local_window_size=use.window)
        attention = functools.partial(jax.nn.dot_product_attention, implementation=implementation, **options)
        return gathering(use, attention) if use.page_size else attention
    if implementation == "xla":
        return ours(use, implementation)
    raise NotImplementedError("jax.nn has no soft cap, no sinks, and no values of another head dim.")


def gathering(use: Use, attention: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """The attention of the sequences in a cache in pages, copied into arrays of their own."""

    def gathered(query: jax.Array, key: jax.Array, value: jax.Array, page_indices: jax.Array, **others: Any):
        key, value = (x[page_indices].reshape(use.shape("BSKH")) for x in (key, value))
        return attention(query, key, value, **others)

    return gathered


# ---- Checks -----------------------------------------------------------------------------------------------


def last_key_head(use: Use, name: str, x: jax.Array) -> jax.Array:
    """The part of an operand, a result or a gradient that belongs to the last key head and its queries."""
    group = use.num_heads // use.kv_heads
    match name.removeprefix("d"):
        case "query" | "out":
            return x[:, :, -group:]
        case "key" | "value":
            return x[:, :, -1:]
        case "bias" | "mask":
            return x[:, -group:]  # or the only one
        case "sinks" | "alibi_slopes":
            return x[-group:]
    return x


def lower_reference(use: Use, operands: Operands) -> jax.stages.Lowered:
    """A program that computes what `judge` compares with, in float64, with plain JAX.

    It works on one sequence at a time. What all sequences share gets the sum of their gradients.
    """

    def reference(differentiated: Arrays, others: Arrays, dout: jax.Array) -> Arrays:
        arrays = {name: last_key_head(use, name, x) for name, x in (differentiated | others).items()}
        arrays = {
            name: x.astype(jnp.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x
            for name, x in arrays.items()
        }
        shared = {name: x for name, x in arrays.items() if name in ("sinks", "alibi_slopes") or len(x) == 1}
        douts = last_key_head(use, "dout", dout).astype(jnp.float64)

        def one_sequence(sums: Arrays, of_sequence: tuple[Arrays, jax.Array]) -> tuple[Arrays, Arrays]:
            own, dout = jax.tree.map(lambda x: x[None], of_sequence)
            given = shared | own
            attention = functools.partial(ours(use, "xla"), **{n: given[n] for n in others})
            inputs = {name: given[name] for name in differentiated}
            if not use.is_trained:
                return sums, {"out": attention(**inputs)[0]}
            out, pullback = jax.vjp(lambda inputs: attention(**inputs), inputs)
            (gradients,) = pullback(dout)
            results = {"out": out[0]} | {f"d{name}": gradients[name][0] for name in inputs if name in own}
            return {name: sums[name] + gradients[name] for name in sums}, results

        sums = {name: jnp.zeros_like(shared[name]) for name in differentiated if name in shared}
        own = {name: x for name, x in arrays.items() if name not in shared}
        sums, results = jax.lax.scan(one_sequence, sums, (own, douts))
        if use.is_trained:
            results |= {f"d{name}": x for name, x in sums.items()}
        return {name: x[-NUM_CHECKED:] for name, x in results.items()}

    with measure.float64_enabled():
        return jax.jit(reference).lower(*operands)


def judge(use: Use, name: str, got: Arrays, expected: Arrays) -> measure.Json:
    """The errors of one implementation's results and, if one is too large, an "error" that says so."""
    errors = {
        result: measure.compare(last_key_head(use, result, x)[-NUM_CHECKED:], expected[result])
        for result, x in got.items()
    }
    kind, limit = "relative", measure.SOMETHING_ELSE
    if name == OURS:
        kind, limit = measure.tolerance(use.dtype, use.precision, use.num_keys)
    wrong = [f"{result} {error[kind]:.1e}" for result, error in errors.items() if not error[kind] <= limit]
    if not wrong:
        return {"errors": errors}
    return {"errors": errors, "error": f"wrong result, {kind} error over {limit:.1e}: {', '.join(wrong)}"}


# ---- One use ----------------------------------------------------------------------------------------------


def program_of(attention: Callable[..., jax.Array], direction: str) -> Callable[..., Arrays]:
    """A function of `Operands` that returns the output and, for training, all gradients."""

    def forward(differentiated: Arrays, others: Arrays, dout: jax.Array) -> Arrays:
        return {"out": attention(**differentiated, **others)}

    def training(differentiated: Arrays, others: Arrays, dout: jax.Array) -> Arrays:
        out, pullback = jax.vjp(lambda inputs: attention(**inputs, **others), differentiated)
        (gradients,) = pullback(dout)
        return {"out": out} | {f"d{name}": x for name, x in gradients.items()}

    return forward if direction == "forward" else training


def call_of_layers(
    use: Use, attention: Callable[..., jax.Array], operands: Operands
) -> Callable[[], jax.Array]:
    """The forward pass of `num_layers` layers, compiled as one program, with its arrays."""
    assert not use.is_trained
    assert set(operands.differentiated) == {"query", "key", "value"}
    query = operands.differentiated["query"]
    caches = [
        {name: jnp.roll(operands.differentiated[name], layer, axis=0) for name in ("key", "value")}
        for layer in range(use.num_layers)
    ]

    def layers(query: jax.Array, caches: list[Arrays], others: Arrays) -> jax.Array:
        for cache in caches:
            query = attention(query=query, **cache, **others)
        return query

    arrays = (query, caches, operands.others)
    with jax.default_matmul_precision(use.precision):
        lowered = jax.jit(layers).lower(*arrays)
    return functools.partial(lowered.compile(), *arrays)


def measure_use(use: Use, names: Sequence[str], timer: Timer) -> measure.Json:
    """Checks and times one use; an error counts as a result, too."""
    plain = make_operands(use)
    operands = in_pages(use, plain) if use.page_size else plain
    operands_of = dict.fromkeys(names, operands)
    if use.is_in_jax_nn:
        others = for_jax_nn(use, operands.others)
        operands_of |= dict.fromkeys(set(names) - {OURS}, operands._replace(others=others))
    directions = DIRECTIONS if use.is_trained else DIRECTIONS[:1]
    results: dict[str, dict[str, measure.Json]] = {direction: {} for direction in directions}
    attentions: dict[str, Callable[..., jax.Array]] = {}
    with concurrent.futures.ThreadPoolExecutor() as pool:
        reference = pool.submit(lower_reference(use, plain).compile)
        compiling = {}
        for direction, name in itertools.product(directions, names):
            results[direction][name] = {"ms": None}
            try:
                attentions[name] = ours(use) if name == OURS else theirs(use, name)
                program = program_of(attentions[name], direction)
                with jax.default_matmul_precision(use.precision):
                    lowered = jax.jit(program).lower(*operands_of[name])
            except Exception as error:  # not supported, whatever the error's type
                results[direction][name]["error"] = measure.reason(error)
            else:
                compiling[direction, name] = pool.submit(lowered.compile)
    expected = {name: np.asarray(x) for name, x in reference.result()(*plain).items()}

    row: measure.Json = dataclasses.asdict(use)
    for direction in directions:
        calls = {}
        for name, result in results[direction].items():
            if (direction, name) not in compiling:
                continue
            try:
                call = functools.partial(compiling[direction, name].result(), *operands_of[name])
                result |= judge(use, name, jax.block_until_ready(call()), expected)
                if use.num_layers > 1:
                    call = call_of_layers(use, attentions[name], operands_of[name])
            except Exception as error:  # not supported or out of memory: continue with the others
                result["error"] = measure.reason(error)
            if "error" not in result:
                calls[name] = call
        for name, timing in timer(calls).items():
            results[direction][name] |= timing
            if "ms" in timing:
                results[direction][name]["ms"] /= use.num_layers
        row[direction] = compared(results[direction])
    return row


def compared(results: dict[str, measure.Json]) -> measure.Json:
    """The results of one direction, with the fastest alternative and the ratio of its time to that of jax_flash."""
    fastest, ratio = measure.fastest_alternative(results)
    return {"results": results, "fastest_alternative": fastest, "ratio": ratio}


# ---- Report -----------------------------------------------------------------------------------------------

TABLE_HEAD = (
    "| use | sizes | jax_flash | cuDNN | XLA | fastest alternative / jax_flash |\n"
    "| --- | --- | --- | --- | --- | --- |"
)


def use_of(row: measure.Json) -> Use:
    return Use(**{field.name: row.get(field.name, field.default) for field in dataclasses.fields(Use)})


def directions_of(row: measure.Json) -> list[str]:
    return [direction for direction in DIRECTIONS if direction in row]


def table_row(row: measure.Json) -> str:
    """A row of the table: forward / training, in milliseconds, and the two ratios."""
    use = use_of(row)
    star = "" if use.is_in_jax_nn else " *"

    def times(name: str) -> str:
        texts = []
        for direction in directions_of(row):
            ms = row[direction]["results"].get(name, {}).get("ms")
            texts.append("-" if ms is None else f"{ms:.0f}" if ms >= 100 else f"{ms:.3g}")
        return "-" if set(texts) == {"-"} else " / ".join(texts) + (star if name == "xla" else "")

    ratios = [row[direction]["ratio"] for direction in directions_of(row)]
    ratio = " / ".join("-" if ratio is None else f"{ratio:.2f}" for ratio in ratios)
    columns = (use.what, use.describe(), times(OURS), times("cudnn"), times("xla"), ratio)
    return f"| {' | '.join(columns)} |"


def table(rows: Iterable[measure.Json]) -> str:
    return "\n".join((TABLE_HEAD, *map(table_row, rows)))


def shortcomings(rows: Iterable[measure.Json]) -> list[str]:
    """The figures in which jax_flash is slower than an alternative, and those that it lacks."""
    return measure.shortcomings(
        (f"{row['name']}, {direction}", row[direction]["results"])
        for row in rows
        for direction in directions_of(row)
    )


def refusals(rows: Iterable[measure.Json]) -> list[str]:
    """Why alternatives have no figure, with the names of the uses."""
    reasons: dict[tuple[str, str], dict[str, None]] = {}
    for row in rows:
        for direction in directions_of(row):
            for name, result in row[direction]["results"].items():
                if name != OURS and result["ms"] is None:
                    reasons.setdefault((name, result["error"]), {})[row["name"]] = None
    return [f"{name}: {error} [{', '.join(uses)}]" for (name, error), uses in reasons.items()]


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="uses whose names contain one of these")
    parser.add_argument(
        "--markdown", type=pathlib.Path, metavar="FILE", help="print the table of a result file"
    )
    parser.add_argument("--platform", choices=("gpu", "cpu"), help="default: gpu if there is one")
    parser.add_argument(
        "--divide", type=int, metavar="N", help="divide the sizes; by 1 on a GPU, 64 on a CPU"
    )
    parser.add_argument("--rounds", type=int, default=3, help="timed slices of each program (3)")
    parser.add_argument("--warmup-ms", type=float, default=100, help="untimed calls before each slice (100)")
    parser.add_argument("--slice-ms", type=float, default=100, help="timed calls of each slice (100)")
    parser.add_argument("--minutes", type=float, default=20, help="uses not begun by then are left out (20)")
    parser.add_argument(
        "--output", type=pathlib.Path, help="JSON file; for all uses results/<device>_uses.json"
    )
    options = parser.parse_args(arguments)
    if unknown := [word for word in options.names if not any(word in use.name for use in USES)]:
        parser.error(f"no use is named {', '.join(unknown)}. Names: {', '.join(use.name for use in USES)}")
    return options


class Report:
    """The figures so far. They are saved after each use, so an interrupted run loses at most one."""

    def __init__(self, output: pathlib.Path | None, **facts: Any):
        self.output = output
        self.facts = facts
        self.start = time.monotonic()
        self.rows: list[measure.Json] = []
        self.left_out: list[str] = []

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.start

    def save(self) -> None:
        figures = {"seconds": round(self.seconds, 1), "left_out": self.left_out, "uses": self.rows}
        measure.save(self.facts | figures, self.output)

    def summary(self) -> str:
        """Every reason for a missing figure, and the figures below 1."""
        lines = [f"alternative without a figure: {line}" for line in refusals(self.rows)]
        lines += [f"left out: {line}" for line in self.left_out]
        lines += (below := shortcomings(self.rows))
        lines.append(
            f"{len(self.rows)} uses in {self.seconds:.0f} s, {len(below)} figures below 1 or missing"
        )
        return "\n".join(lines)

    def is_good(self) -> bool:
        return not self.left_out and not shortcomings(self.rows)


def measure_uses(
    report: Report, uses: Sequence[Use], names: Sequence[str], timer: Timer, limit: float
) -> None:
    """Checks and times each use that begins within `limit` seconds, and prints its row of the table."""
    print(f"\nMilliseconds, forward / training\n{TABLE_HEAD}", flush=True)
    run = functools.partial(measure_use, names=names, timer=timer)
    for row in measure.attempts(
        uses, lambda use: use.name, run, report.left_out, lambda: report.seconds > limit
    ):
        report.rows.append(row)
        print(table_row(row), flush=True)
        report.save()


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)

    def is_chosen(name: str) -> bool:
        return not options.names or any(word in name for word in options.names)

    if options.markdown:
        rows = json.loads(options.markdown.read_text())["uses"]
        print(table(row for row in rows if is_chosen(row["name"])))
        return 0
    if options.platform == "cpu":
        jax.config.update("jax_platforms", "cpu")
    on_gpu = jax.devices()[0].platform == "gpu"
    if options.platform == "gpu" and not on_gpu:
        print(
            "--platform gpu: JAX found no GPU. Omit --platform to try the script on the CPU.", file=sys.stderr
        )
        return 2
    divisor = options.divide or (1 if on_gpu else 64)
    uses = [use.divided(divisor) for use in USES if is_chosen(use.name)]
    settings = dict(rounds=options.rounds, warmup=options.warmup_ms / 1e3, duration=options.slice_ms / 1e3)
    facts = measure.environment()
    output = options.output
    if output is None and divisor == 1 and not options.names:
        output = RESULTS / f"{measure.device_slug(facts)}_uses.json"
    report = Report(output, environment=facts, settings=settings | {"divisor": divisor})

    print("  ".join(f"{name} {value}" for name, value in facts.items() if value is not None), flush=True)
    timer = functools.partial(measure.time_interleaved, **settings, asynchronous=on_gpu)
    names = (OURS, *PEERS) if on_gpu else (OURS, "xla")
    measure_uses(report, uses, names, timer, limit=60 * options.minutes)
    report.save()
    if output is not None:
        print(f"figures: {output}", flush=True)
    print("\n" + report.summary(), flush=True)
    return 0 if report.is_good() else 1


if __name__ == "__main__":
    sys.exit(main())

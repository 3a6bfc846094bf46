"""Which CUDA kernels will run, and into how many parts their work is divided, by the shapes and this process's GPUs.

The library takes any answer: a wrong one costs time or memory.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from . import _ffi, _library
from ._options import AttentionOptions
from ._passes import BACKWARD, FORWARD, FORWARD_WITH_FACTOR, Pass

_HOPPER_MULTIPROCESSORS = 132  # of H200, and of H100 but for the PCIe card
_MOST_DECODE_ROWS = 256  # of a key head
_MOST_DS_BYTES = 4 << 30
_MOST_DS_OF_A_SUM = 8
_SHARED_DS_BYTES, _MOST_SHARED_DS_BYTES = 256 << 20, 1 << 30

# With these, Hopper's forward pass runs in its general form.
_GENERAL_FORM_OPERANDS = {"mask", "bias", "alibi_slopes", "query_segment_ids", "scale_factor"}


def num_planes(call: Pass, q, k, v, options: AttentionOptions) -> int:
    """In how many planes of scaled float16 Hopper's kernels compute float32 (cuda/planes.cuh); 0: not at all."""
    direction = {FORWARD: "forward", FORWARD_WITH_FACTOR: "forward", BACKWARD: "backward"}.get(call)
    planes = 2 if options.precision else 1
    if direction is None or q.dtype != jnp.float32:
        return 0
    # Other kernels do not recompute the scores to the bit: with logits of several hundreds, probabilities would not be
    # exact in float32.
    if planes == 2 and not options.in_planes:
        return 0
    shortest = _library.constants()["kShortLength"] + 1
    sizes = (*q.shape[-3:-1], *k.shape[-3:-1])
    is_long = all(isinstance(size, int) for size in sizes) and min(q.shape[-3], k.shape[-3]) >= shortest
    arithmetic = "tf32x3" if planes == 2 else "tf32"
    is_served = is_long and _hopper_head_dim(direction, q, v, arithmetic) > 0
    return planes if is_served and planes_pay(direction, q, k, options) else 0


def planes_pay(direction: str, q, k, options: AttentionOptions) -> bool:
    """Whether planes gain more than it takes to make them.

    Times are in pairs of a query and a key: measured on an H100, a row of planes takes as long as the products of so
    many pairs become shorter. Neither the batch nor the number of key heads counts, so that a sequence has the same
    bits alone and in a batch.
    """
    (seqlen_q, num_heads, head_dim), (seqlen_kv, num_kv_heads) = q.shape[-3:], k.shape[-3:-1]
    group = num_heads // max(num_kv_heads, 1)
    keys = seqlen_kv // 2 if options.is_causal and seqlen_q >= seqlen_kv else seqlen_kv
    if min(options.reach) >= 0:
        keys = min(keys, sum(options.reach) + 1)
    pairs = seqlen_q * group * keys * (2 if head_dim <= 32 else 1)  # portable kernels fill 64 columns
    # Two planes take longer to make, but there the portable kernels are three times as slow. Both passes must have them
    # or neither.
    of_query, of_key = (
        (70, 140) if options.precision else (170, 95) if direction == "backward" else (165, 330)
    )
    return pairs >= of_query * seqlen_q * group + of_key * seqlen_kv


def num_key_parts(
    q, k, v, operands: tuple[str, ...], options: AttentionOptions, page_size: int | None = None
) -> int:
    """Into how many parts a forward kernel for few queries splits the keys; 0: another kernel runs.

    It depends neither on the batch nor on the number of key heads: a sequence has the same bits alone and in a batch,
    and with heads on several devices.
    """
    (seqlen_q, num_heads), (seqlen_kv, num_kv_heads) = q.shape[-3:-1], k.shape[-3:-1]
    sizes = (seqlen_q, num_heads, seqlen_kv, num_kv_heads)
    if not all(isinstance(size, int) and size > 0 for size in sizes) or "dropout_seeds" in operands:
        return 0
    keys = seqlen_kv
    if min(options.reach) >= 0:  # the first block of keys may begin before the first that a query sees
        keys = min(keys, sum(options.reach) + seqlen_q + _library.constants()["kVisibilityBlock"])
    group, head_dim = num_heads // num_kv_heads, max(q.shape[-1], v.shape[-1])
    has_pair_options = not _GENERAL_FORM_OPERANDS.isdisjoint(operands)
    is_general = options.logits_soft_cap > 0 or options.scale <= 0 or has_pair_options
    in_tiles = q.dtype.itemsize == 2 and not is_general and _hopper_head_dim("forward", q, v) > 0
    in_tiles = in_tiles and (page_size is None or page_size % 8 == 0)
    if _is_decoding(q, k, v):
        # takes_few_queries in cuda/sm90/forward.cuh
        if in_tiles and seqlen_q * math.gcd(group, 64) >= 128 and keys >= 2048 and head_dim <= 128:
            return min(16, max(2, keys // 2048))
        rows = seqlen_q * group
        if rows <= 16 and not has_pair_options and _hopper_head_dim("decode", q, v) > 0:
            return _num_parts_of_few_rows(keys)
        columns = kernel_head_dim("decode sm80", q.dtype, head_dim)
        return _num_parts_of_few_queries(rows, keys, q.dtype.itemsize, columns)
    # A few hundred queries are too few tiles. Not in a window: there a shard would have other parts than the whole.
    if not in_tiles or keys < seqlen_kv or seqlen_q > 1024 or keys < 16 * seqlen_q:
        return 0
    return _num_parts_of_tiles(seqlen_q, group, keys, head_dim)


def _num_parts_of_few_rows(keys: int) -> int:
    """The number of parts in Hopper's kernel for up to 16 rows of a key head (cuda/sm90/decode.cuh)."""
    if keys > 32768:
        # With 8 key heads as many as thread blocks run side by side, or a multiple, of 960 to 1,920 keys.
        side_by_side = 2 * _HOPPER_MULTIPROCESSORS // 8
        return side_by_side * max(1, round(keys / 1280 / side_by_side))
    # In a large batch a thread block merges neighbors, of 1,024 keys or more.
    return -(-keys // (512 if keys < 16384 else 1024))


def _num_parts_of_few_queries(rows: int, keys: int, element_bytes: int, head_dim: int) -> int:
    """The number of parts for all rows of a key head in the portable kernel, with the kernel's head dim."""
    has_three_blocks = rows <= 16 and element_bytes * head_dim <= 256  # on a multiprocessor
    if has_three_blocks and keys > 32768:
        # With 8 key heads whole rounds of thread blocks, of 700 to 1,800 keys.
        in_round = 3 * _HOPPER_MULTIPROCESSORS / 8
        return int(in_round * max(1, int(keys / 1024 / in_round + 0.25)))
    # A part writes 4 bytes for each row and column; short ones fill a GPU even if a sequence is alone. Of up to 8 rows
    # (kGroupRows), a thread block merges those of 1,024 keys in a large batch, so they can be shorter: with 256 columns
    # 8 groups of them (kTeams).
    of_256, of_512 = (4096, 8191) if rows > 8 else (8191, 16383) if head_dim <= 128 else (8191, 8192)
    return -(-keys // (256 if keys <= of_256 else 512 if keys <= of_512 else 1024))


def _num_parts_of_tiles(seqlen_q: int, group: int, keys: int, head_dim: int) -> int:
    """The number of parts that takes the least time with 8 key heads, as most models have; 0: none.

    One part has all keys: then tiles differ from whole ones in that they have rows of several query heads of a key
    head, and lose fewer. In a large batch it must not take much longer than whole tiles.
    """
    packed = math.gcd(group, 64)
    rows = seqlen_q * packed
    # split_is_wide in cuda/tiles.h
    is_wide = 32 < head_dim <= 64 and -(-rows // 256) * 256 <= rows + rows // 8
    tiles = 8 * (group // packed) * -(-rows // (256 if is_wide else 128))
    whole_tiles = 8 * group * -(-seqlen_q // 192)
    most = 16 if seqlen_q <= 64 else 8 if seqlen_q <= 256 else 4
    shortest = 2048 if seqlen_q <= 64 else 4096

    def cost(parts: int) -> float:
        """In keys of a tile, as measured at head dim 128: whole tiles have 192 rows; parts are written and merged."""
        if parts == 0:
            return 1.2 * keys * -(-whole_tiles // _HOPPER_MULTIPROCESSORS)
        rounds = -(-tiles * parts // _HOPPER_MULTIPROCESSORS)
        merged = 1000 * tiles * parts / _HOPPER_MULTIPROCESSORS if parts > 1 else 0
        return keys * rounds / parts + merged

    # The kernel for few queries takes one part of any number of rows.
    is_decoding = seqlen_q <= _library.constants()["kDecodeQueries"]
    may_be_one = packed > 1 and not is_decoding and tiles <= 1.35 * whole_tiles
    several = range(2, min(most, keys // shortest) + 1)
    return min((0, *([1] * may_be_one), *several), key=cost)


def _is_decoding(q, k, v) -> bool:
    """Whether the forward kernel for few queries serves a call without dropout.

    With more rows of a key head, the parts of `num_key_parts` would take more memory than the keys.
    """
    (seqlen_q, num_heads), num_kv_heads = q.shape[-3:-1], k.shape[-2]
    head_dim = kernel_head_dim("decode sm80", q.dtype, max(q.shape[-1], v.shape[-1]))
    is_short = seqlen_q <= _library.constants()["kDecodeQueries"]
    return head_dim > 0 and is_short and seqlen_q * (num_heads // num_kv_heads) <= _MOST_DECODE_ROWS


def sums_dq(q, k, v, *, num_head_parts: int, is_deterministic: bool, hides_pairs: bool) -> bool:
    """Whether the backward kernel sums 16-bit dq in memory.

    The kernel for short sequences, which does not divide query heads into parts, has no need to. Hopper's kernels above
    head dim 128 leave dq to another kernel, which is faster. Only Hopper's kernels sum in a fixed order, unless a mask
    or segments hide pairs; above head dim 64 that is slower than another kernel. Where the program runs on other GPUs
    than it was lowered for, their kernels leave dq to another one without that memory, at some cost in speed.
    """
    longest = _library.constants()["kShortLength"]
    is_short = all(isinstance(x.shape[-3], int) and x.shape[-3] <= longest for x in (q, k))
    if (
        is_short
        and not num_head_parts
        and kernel_head_dim("short_backward sm80", q.dtype, max(q.shape[-1], v.shape[-1]))
    ):
        return False
    head_dim = _hopper_head_dim("backward", q, v)
    if is_deterministic:
        return 0 < head_dim <= 64 and not hides_pairs
    return head_dim <= 128


def keeps_ds(q, k, v, dbias, options: AttentionOptions, *, hides_pairs: bool, has_offset: bool) -> bool:
    """Whether Hopper's gradient kernels write the gradients of the logits, of which that of a bias is then the sum.

    A pass of its own would compute them again: two of five products, above head dim 128 of seven. Written and read,
    they take 4 bytes a pair, which is less from head dim 65 on, or if there is nothing to sum. And they take memory,
    which is limited here. The sum skips what a causal mask without offset hides. It would read what other masks,
    windows and offsets hide, and gain nothing.

    dbias: [B or 1, N or 1, T, S].
    """
    (B, T, N, _), S = q.shape, k.shape[1]
    if not all(isinstance(size, int) and size > 0 for size in (B, T, N, S)) or dbias.shape[2:] != (T, S):
        return False
    ds_bytes, dbias_bytes = (math.prod(shape) * q.dtype.itemsize for shape in ((B, N, T, S), dbias.shape))
    is_small = ds_bytes <= _MOST_DS_BYTES and ds_bytes <= _MOST_DS_OF_A_SUM * dbias_bytes
    head_dim = _hopper_head_dim("backward", q, v)
    return (
        (64 if ds_bytes > dbias_bytes else 0) < head_dim <= 256
        and q.dtype.itemsize == 2
        and S % 8 == 0  # TMA's unit; cuda/sm90/backward.cuh asks for it at any head dim
        and is_small
        and (options.reach == (-1, -1) or (options.reach == (-1, 0) and not has_offset))
        and not hides_pairs
        and (
            head_dim > 128  # the kernel for dq writes it
            or sums_dq(
                q,
                k,
                v,
                num_head_parts=num_head_parts(q, k, v, options.is_causal),
                is_deterministic=options.deterministic,
                hides_pairs=hides_pairs,
            )
        )
    )


def num_shared_heads(q, k, v, *, is_causal: bool, keeps_ds: bool, num_head_parts: int) -> int:
    """Of how many query heads at a time Hopper's kernel for dk and dv leaves ds for that of dq; 0: of none.

    That saves two of seven products, and takes memory: where a single key head would take more than 1 GiB, ds is
    computed again. 256 MiB are enough unless some multiprocessors would then be idle.
    """
    (B, T, N, _), (_, S, K, _) = q.shape, k.shape
    if not all(isinstance(size, int) and size > 0 for size in (B, T, N, S, K)) or keeps_ds:
        return 0
    head_dim = _hopper_head_dim("backward", q, v)
    if q.dtype.itemsize != 2 or head_dim <= 128:
        return 0
    group = N // K
    unit = _library.constants()["kSharedDsUnit"]
    bytes_of_key_head = 2 * (-(-T // unit) * unit) * (-(-S // unit) * unit) * group
    least = min(B * K, max(1, _SHARED_DS_BYTES // bytes_of_key_head))
    most = min(B * K, _MOST_SHARED_DS_BYTES // bytes_of_key_head)
    if not most:
        return 0
    blocks = -(-S // _backward_keys(head_dim))
    if is_causal and T == S:
        blocks = (blocks + 1) // 2  # causal tiles are taken in pairs
    items = blocks * max(num_head_parts // K, 1)
    multiprocessors = _HOPPER_MULTIPROCESSORS // (2 if head_dim > 256 else 1)  # or clusters
    if least * items >= 10 * multiprocessors:
        return group * least  # more would save less than a tenth

    def rounds(key_heads: int) -> int:
        slices, rest = divmod(B * K, key_heads)
        return slices * -(-key_heads * items // multiprocessors) + -(-rest * items // multiprocessors)

    fewest = min(map(rounds, range(least, most + 1)))
    return group * next(x for x in range(least, most + 1) if rounds(x) <= 1.1 * fewest)


def _backward_keys(head_dim: int) -> int:
    """The keys of a tile of Hopper's kernel for dk and dv."""
    return 128 if head_dim < 256 else 64


def num_head_parts(q, k, v, is_causal: bool) -> int:
    """Into how many parts Hopper's backward kernel divides the query heads of all key heads; 0: it does not.

    A tile has 128 keys (64 from head dim 256 on) of one part, and all multiprocessors should have about as many. So
    with few key heads, or long causal tiles, a part is less than a key head's group. The sums of dk and dv of each part
    are written and read in float32. Lengths, masks and windows, which change the tiles, are not looked at.
    """
    (B, T, N, _), (_, S, K, _) = q.shape, k.shape
    head_dim = _hopper_head_dim("backward", q, v)
    if not head_dim or not all(isinstance(size, int) for size in (B, T, N, S, K)) or N in (0, K):
        return 0
    group, blocks = N // K, -(-S // _backward_keys(head_dim))
    is_wide = head_dim > 256
    at_a_tile = 2 if is_wide else 1  # thread blocks, each on a multiprocessor
    multiprocessors = _HOPPER_MULTIPROCESSORS // at_a_tile
    is_triangle = is_causal and T == S
    items = B * K * ((blocks + 1) // 2 if is_triangle else blocks)  # causal tiles are taken in pairs

    def busy(parts: int) -> float:
        """The share of the multiprocessors that is busy on the average."""
        rounds = -(-items * parts // multiprocessors)
        return items * parts / (rounds * multiprocessors) if rounds else 1

    def are_many(parts: int) -> bool:
        """Whether long causal tiles are taken one by one, which is faster (`has_many` of BackwardSchedule).

        Above head dim 256 that gains less than sums of parts cost, so it does not decide.
        """
        tiles = B * K * parts * blocks
        return is_triangle and not is_wide and blocks >= 64 and tiles >= 6 * multiprocessors * group // parts

    # A tile that goes through few queries would take longer to write than to compute.
    divisors = [x for x in range(1, group + 1) if group % x == 0 and (x == 1 or T * group // x >= 1024)]
    enough = [x for x in divisors if are_many(x)] or [x for x in divisors if busy(x) >= 0.85]
    best = enough[0] if enough else max(divisors, key=busy)
    return K * best if best > 1 else 0


def _hopper_head_dim(direction: str, q, v, arithmetic: str | None = None) -> int:
    """The head dim of Hopper's kernel that is certain to run; 0 if none is."""
    return hopper_head_dim(direction, q.dtype, (q.shape[-1], v.shape[-1]), arithmetic) if has_hopper() else 0


def has_hopper() -> bool:
    """Whether this process has GPUs, and all of them are Hopper's."""
    gpus = _ffi.local_gpus()
    return bool(gpus) and all(map(is_hopper, gpus))


def is_hopper(gpu: jax.Device) -> bool:
    """Whether a GPU runs Hopper's kernels."""
    return gpu.compute_capability == "9.0"


def hopper_head_dim(direction: str, dtype, head_dims: tuple[int, int], arithmetic: str | None = None) -> int:
    """The head dim of the compiled kernel for Hopper that serves these of queries and values; 0 if there is none."""
    if any(head_dim % 8 for head_dim in head_dims):
        return 0
    # The gradient's kernel for 192 takes values of up to 128 (backward_head_dim_v in cuda/tiles.h).
    smallest = 193 if direction == "backward" and head_dims[1] > 128 else 1
    return kernel_head_dim(f"{direction} sm90", dtype, max(*head_dims, smallest), arithmetic)


def kernel_head_dim(kind: str, dtype, head_dim: int, arithmetic: str | None = None) -> int:
    """The head dim of the compiled kernel that serves this one; 0 if there is none. kind: such as "forward sm80"."""
    # But for planes and short sequences, tf32x3 has the same head dims as tf32.
    arithmetic = arithmetic or ("tf32" if dtype == jnp.float32 else dtype.name)
    names = (name.rsplit(" ", 1) for name in _ffi.build_info()["kernels"])
    compiled = (int(size) for name, size in names if name == f"{kind} {arithmetic}")
    return min((size for size in compiled if size >= head_dim), default=0)


def num_bias_parts(q, k, dbias) -> int:
    """Into how many parts the sum of dbias over the batch is divided, so that all multiprocessors have some tiles."""
    (B, T, N, H), S = q.shape, k.shape[1]
    if not all(isinstance(size, int) for size in (B, T, N, S)):
        return 1
    if dbias.shape[0] != 1 or dbias.shape[2:] != (T, S):
        return 1  # there is no such sum, or it is in blocks
    heads, parts = dbias.shape[1], 1
    tiles = heads * -(-T // 128) * -(-S // 128)
    for divisor in (x for x in range(1, B + 1) if B % x == 0):
        if divisor * heads * S > B * N * H:
            break  # more memory than q takes in float32
        parts = divisor
        if parts * tiles >= 4 * _HOPPER_MULTIPROCESSORS:
            break
    return parts


def has_tangent_kernel(q, k, v) -> bool:
    """Whether the CUDA kernels for tangents take such head dims."""
    return kernel_head_dim("tangent sm80", q.dtype, max(q.shape[-1], v.shape[-1])) > 0


def has_small_blocks(gpu) -> bool:
    """Whether a block has 99 KB of shared memory (compute capability 8.6, 8.9, 12.x), and not 163 KB or more."""
    return gpu.compute_capability in ("8.6", "8.9") or gpu.compute_capability.startswith("12.")


def backward_tangent_fits(q, k, v) -> bool:
    """Whether there is a CUDA kernel whose tiles fit into the shared memory of the GPUs: see cuda/tiles.h."""
    gpus = _ffi.local_gpus()
    has_room = gpus and not any(map(has_small_blocks, gpus))
    largest = {2: (128, 256), 4: (64, 128), 8: (0, 64)}[q.dtype.itemsize][bool(has_room)]
    return 0 < kernel_head_dim("backward_tangent sm80", q.dtype, max(q.shape[-1], v.shape[-1])) <= largest

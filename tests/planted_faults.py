"""Plants faults in a copy of the checkout, one at a time, and checks that the tests find them.

    python tests/planted_faults.py                 # all faults: build, run the tests without a fault, plant each fault
    python tests/planted_faults.py --only NAME     # faults with NAME in their name or file
    python tests/planted_faults.py --list          # list the faults with their replacements
    python tests/planted_faults.py --table         # print the table of docs/testing.md

pytest does not collect this file. It needs a C++ compiler, CMake, and the package installed for the running Python. The
copy is compiled without CUDA, so faults in CUDA code are ones that show without a GPU. The copy and its build folder
stay in build/planted_faults; the next run compiles only what has changed.

A fault is caught if each of its tests fails, if one crashes or hangs, or if the code no longer compiles or imports.
When you change a test or add a feature, add the faults that a reviewer would plant there.
"""

import argparse
import importlib.metadata
import os
import pathlib
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from typing import NamedTuple
from xml.etree import ElementTree as ET

ROOT = pathlib.Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build" / "planted_faults"
_LONGEST = 180  # seconds for the tests of a fault, which may make them hang
_MISSED = "MISSED"


class Fault(NamedTuple):
    """One row of the table."""

    name: str  # what is wrong
    file: str
    text: str  # occurs exactly once in the file
    replacement: str
    tests: tuple[str, ...]  # node ids relative to tests/; each must fail, in one case if it has no parameters


# Where what one device has to add must not be missing, and must not count twice.
_OF_RINGS = tuple(
    f"test_context_parallel.py::{test}"
    for test in (
        "test_every_option[cpu-causal-zigzag-2]",
        "test_every_option[cpu-alibi-contiguous-4]",
        "test_every_option[cpu-bias-zigzag-8]",
        "test_random_case[cpu-4-8]",
        "test_random_case[cpu-9-8]",
        "test_a_shard_that_sees_no_key[cpu-before the first key-contiguous]",
        "test_a_shard_that_sees_no_key[cpu-before the first key-zigzag]",
        "test_uneven_lengths[cpu-causal-contiguous]",
        "test_uneven_lengths[cpu-bias-zigzag]",
        "test_two_processes",
    )
)
_OF_SHARDED_JIT = tuple(
    f"test_context_parallel.py::{test}"
    for test in (
        "test_every_option[cpu-causal-sharded jit-8]",
        "test_every_option[cpu-bias-sharded jit-8]",
        "test_random_case[cpu-10-8]",
        "test_a_shard_that_sees_no_key[cpu-masked-sharded jit]",
        "test_two_processes",
    )
)
_OF_HEADS = tuple(
    f"test_context_parallel.py::{test}"
    for test in (
        "test_every_option[cpu-groups-sharded jit-4]",
        "test_random_case[cpu-33-8]",
        "test_a_shard_that_sees_no_key[cpu-segments of keys-sharded jit]",
    )
)
_OF_WINDOWS = tuple(
    f"test_context_parallel.py::{test}"
    for test in (
        "test_every_option[cpu-short window-sharded jit-4]",
        "test_random_case[cpu-95-8]",
        "test_random_case[cpu-116-3]",
        "test_a_shard_that_sees_no_key[cpu-segments in a window-sharded jit]",
        "test_two_processes",
    )
)

# By file: the fault's name, the text, its replacement, and the tests each of which must find it.
# fmt: off
_TABLE: dict[str, list[tuple[str, ...]]] = {
    # ---- Python -------------------------------------------------------------------------------------------------
    "jax_flash/_options.py": [
        ("three products of TF32 count as one",
         '"TF32_TF32_F32_X3": 1,', '"TF32_TF32_F32_X3": 0,',
         "test_options.py::test_what_an_algorithm_is_worth"),
        ("six products count as three",
         "return 2 if products >= 6 else", "return 2 if products > 6 else",
         "test_options.py::test_what_an_algorithm_in_parts_is_worth"),
        ("the less exact of a pair of precisions counts",
         "return max(_precision_level(part)", "return min(_precision_level(part)",
         "test_options.py::test_the_more_exact_of_a_pair_counts"),
        ("the sides of a window are swapped",
         "return left, right", "return right, left",
         "test_masks.py::test_every_option[cpu-window left-bfloat16]"),
        ("the default scale is 1 / H",
         "scale=1 / math.sqrt(head_dim) if", "scale=1 / head_dim if",
         "test_forward.py::test_is_close_to_exact[cpu-full-2]"),
        ("a dropout rate of 1 is accepted",
         "if not 0 <= rate < 1:", "if not 0 <= rate <= 1:",
         "test_errors.py::test_bad_call[dropout of all]"),
        ("an infinite scale is accepted",
         "if not math.isfinite(number):", "if math.isnan(number):",
         "test_errors.py::test_bad_call[scale is infinite]"),
        ("a cap of 0 is accepted",
         "if cap <= 0:", "if cap < 0:",
         "test_errors.py::test_bad_call[cap 0]"),
        ("a wrong type is a ValueError",
         'raise TypeError(f"{name} must be a bool, got', 'raise ValueError(f"{name} must be a bool, got',
         "test_errors.py::test_bad_call[is_causal is an int]"),
    ],
    "jax_flash/_checks.py": [
        ("a key of another batch size is accepted",
         "if x.shape[:-3] != query.shape[:-3]:", "if len(x.shape) != len(query.shape):",
         "test_errors.py::test_bad_call[other batch in key]"),
        ("a value of another length is accepted",
         "if value.shape[-3] != key.shape[-3]:", "if value.shape[-3] < key.shape[-3]:",
         "test_errors.py::test_bad_call[other length in value]"),
        ("heads that do not divide are accepted",
         "if num_heads % num_kv_heads if num_kv_heads else num_heads:", "if num_heads and not num_kv_heads:",
         "test_errors.py::test_bad_call[heads not a multiple]"),
        ("an offset of 2^31 is accepted",
         "if not _INT32.min <= number <= _INT32.max:", "if not _INT32.min <= number <= _INT32.max + 1:",
         "test_errors.py::test_bad_call[offset beyond int32]"),
        ("ids of the keys are checked against the queries",
         "key_ids, (*batch, seqlen_kv))", "key_ids, (*batch, seqlen_q))",
         "test_forward.py::test_is_close_to_exact[cpu-segments of queries and keys-2]"),
        ("several PRNG keys are accepted",
         "if rng.ndim != (0 if is_key else 1):", "if rng.ndim > 1:",
         "test_errors.py::test_bad_call[several keys]"),
        ("head dim 129 is lowered for CUDA in float64",
         "4: 256, 8: 128}", "4: 256, 8: 256}",
         "test_transforms.py::test_lowering_for_cuda_refuses_what_it_cannot_do"),
        ("pages of 12 keys are lowered with wide heads",
         "if page_size is not None and page_size % 8:", "if page_size is not None and page_size % 4:",
         "test_wide_heads.py::test_what_is_refused"),
    ],
    "jax_flash/_attention.py": [
        ("lse has a batch axis that the call lacks",
         "jax.tree.map(lambda x: x[0], results)", "jax.tree.map(lambda x: x[0] if x.ndim > 3 else x, results)",
         "test_forward.py::test_without_a_batch_axis[cpu-full]"),
    ],
    "jax_flash/_fused.py": [
        ("the gradient of a bias follows a forward pass by planes",
         "operands.keys().isdisjoint(_derivatives.BIASES)", "True",
         "test_derivatives.py::test_who_recomputes_scores_of_planes[bias]"),
        ("the cotangent of lse is ignored",
         "dout, dlse = cotangents", "dout, dlse = cotangents[0], None",
         "test_backward.py::test_with_the_gradient_of_lse_alone[cpu]"),
    ],
    "jax_flash/_derivatives.py": [
        ("second derivatives have the results of planes", "if not options.in_planes:", "if True:",
         "test_derivatives.py::test_who_recomputes_scores_of_planes[second derivative]"),
        ("the gradient of the sinks ignores that of lse",
         'return delta - arrays["dlse"] if "dlse" in arrays else delta', "return delta",
         "test_sinks.py::test_gradient_is_close_to_exact[cpu-sinks-2]"),
        ("the gradient of the sinks has the wrong sign",
         "return -jnp.sum(jnp.where(arrays", "return jnp.sum(jnp.where(arrays",
         "test_sinks.py::test_gradient_is_close_to_exact[cpu-sinks-2]"),
        ("the gradient of the sinks counts rows beyond the lengths",
         "x = _zero_beyond_lengths(arrays[cotangent], arrays)", "x = arrays[cotangent]",
         "test_sinks.py::test_gradient_is_close_to_exact[cpu-sinks, lengths-2]"),
        ("dq and dk lack the scale of an array",
         "return _times_factor(dq, factor), _times_factor(dk, factor), dv, dscale", "return dq, dk, dv, dscale",
         "test_scale.py::test_gradient_check"),
        ("the gradient of a scale reads queries beyond the lengths",
         'dscale = _dot(_zero_beyond_lengths(arrays["q"], arrays), dq, factor.dtype)\n    return',
         'dscale = _dot(arrays["q"], dq, factor.dtype)\n    return',
         "test_scale.py::test_nan_beyond_the_lengths_does_not_reach_the_gradient[cpu]"),
        ("vmap moves the wrong way",
         "name: x if dim is None else jnp.moveaxis(x, dim, 0)", "name: x if dim is None else jnp.moveaxis(x, 0, dim)",
         "test_transforms.py::test_vmap_over_any_axis[cpu-0-(4, 3, 0)]"),
        ("vmap over tangents repeats the primal",
         "    if all(map(is_directed, mapped)):", "    if False and all(map(is_directed, mapped)):",
         "test_derivatives.py::test_directions_share_the_primal"),
        ("the tangent does not move with the sinks",
         'arrays["tsinks"][..., None, :], arrays)', '0 * arrays["tsinks"][..., None, :], arrays)',
         "test_derivatives.py::test_tangent_is_close_to_exact[cpu-sinks-2]"),
        ("the second tangent takes sinks for fixed",
         '    second = (tsinks - arrays["tlse"]) * (usinks - arrays["ulse"]) + tusinks', "    second = tusinks",
         "test_derivatives.py::test_jacobians[cpu-forward twice]"),
        ("lse is checkpointed under the name of out",
         "{'out' if name == 'out' else 'lse'}", "out",
         "test_transforms.py::test_checkpoint[cpu-out]"),
        ("the rounding of lse shows",
         "    if _P_FACTOR not in arrays:", "    if True:",
         "test_backward.py::test_rounding_of_lse_does_not_show[cpu-64-float32-both modes-300]"),
        ("the tangent is made of results without names",
         "    found = named_residuals(arrays, options)", "    found = residuals(arrays, options)",
         "test_derivatives.py::test_checkpoint_names_spare_the_second_forward_pass[cpu-both modes]"),
        ("a bias that is not trained takes a pass",
         "    partial_eval.dce_rules[both] = rule", "    pass",
         "test_bias.py::test_only_what_is_differentiated_takes_a_pass[cpu--pairs in 16 bits]"),
        ("third derivatives are taken for zero",
         "        _checks.refuse_third_derivative()", "        pass",
         "test_derivatives.py::test_third_derivatives_are_refused[cpu-both modes]"),
        ("the transposed derivative of the gradient lacks the gradient's own tangent",
         'return _named("t", second) | {"tdout": moved["tout"], "tdlse": moved["tlse"]}', 'return _named("t", second)',
         "test_derivatives.py::test_check_grads_of_order_2[custom_vjp-soft cap-float64]"),
    ],
    "jax_flash/_bias_sums.py": [
        ("what a kernel left at hidden pairs counts",
         "ds = jnp.where(_reference.visible_pairs(rows[:, None], columns, arrays, options), ds, 0)", "pass",
         "test_bias.py::test_sums_of_gradients_of_logits[causal, lengths-float32-shape0]"),
        ("the last key that a block of rows sees does not count",
         "num_keys = min(first + step + options.reach[1], seqlen_kv)",
         "num_keys = min(first + step + options.reach[1], seqlen_kv) - 1",
         "test_bias.py::test_sums_of_gradients_of_logits[causal-float32-shape0]"),
        ("terms are added in 16 bits",
         "(ds[:, i, :, j].astype(sum_dtype(ds.dtype)) for", "(ds[:, i, :, j] for",
         "test_bias.py::test_sums_of_gradients_of_logits[none-float32-shape1]"),
    ],
    "jax_flash/_blocked.py": [
        ("pairs of the last block count twice",
         "is_new = (row >= i * num_rows) & (column >= j * num_columns) &", "is_new =",
         "test_derivatives.py::test_second_order_is_close_to_exact[cpu-tiles, bias-tangent of tangent]"),
        ("a block too few is visited",
         "end = jnp.clip(row + rows + highest + right, 0, end)", "end = jnp.clip(row + highest + right, 0, end)",
         "test_derivatives.py::test_second_order_is_close_to_exact[cpu-causal-tangent of tangent]"),
        ("the cap has no second derivative",
         "            tds += ds * self.slope_of_slope * t", "            pass",
         "test_derivatives.py::test_second_order_in_blocks[bias, soft cap]"),
        ("dropout does not reach the derivative of dp",
         "self.p * (self.kept(tdp) - tdelta)", "self.p * (tdp - tdelta)",
         "test_derivatives.py::test_second_order_in_blocks[dropout, lengths, sinks]"),
        ("rows beyond the lengths are read",
         "return jnp.where(self._exists[0][:, 0, :, :, None], x, 0)", "return x",
         "test_derivatives.py::test_nothing_leaks_from_beyond_the_lengths_in_blocks"),
    ],
    "jax_flash/_sharding.py": [
        ("axes in any order count as in order",
         "return [axis for axis in mesh.axis_names if axis in as_tuple(axes)] == [*as_tuple(axes)]",
         "return True",
         "test_sharded_sequence.py::test_meshes[both the other way round-window]"),
        ("replicated operands do not vary in shard_map",
         "missing = tuple(axes - varying_axes(x))", "missing = ()",
         "test_sinks.py::test_shard_map_sums_the_gradient_of_replicated_sinks"),
        ("a bias is whole where the rows of the queries are sharded",
         "wanted = batch, heads, rows, None", "wanted = batch, heads, None, None",
         "test_sharded_sequence.py::test_no_queries_move[sharded keys-bias 1NTS-explicit]"),
    ],
    "jax_flash/_partitioning.py": [
        ("programs with different options share a name in the cache", "        call,\n", "",
         "test_transforms.py::test_the_persistent_cache_knows_sharded_programs"),
        ("programs keep the name that JAX gave them",
         'op.attributes["backend_config"] = ir.StringAttr.get(stable)', "pass",
         "test_transforms.py::test_sharded_programs_can_be_lowered_at_the_same_time"),
        ("shard_map over some axes gathers over the others", "    return mesh, Mesh(devices, auto)",
         "    return mesh, None",
         "test_transforms.py::test_shard_map_over_some_axes_gathers_nothing"),
    ],
    "jax_flash/_primitives.py": [
        ("with jax_debug_nans, programs of one pass are run again",
         "program._apply_primitive = True", "pass",
         "test_errors.py::test_debug_nans_names_the_pass[cpu-eager-False]"),
        ("no barrier after the kernels",
         "return list(stablehlo.OptimizationBarrierOp(results).results)", "return results",
         "test_transforms.py::test_results_on_cuda_stand_behind_a_barrier"),
        ("lse has the query's dtype",
         "lse_dtype = sum_dtype(q.dtype)", "lse_dtype = q.dtype",
         "test_forward.py::test_is_close_to_exact[cpu-full-1]"),
        ("out has the query's head dim",
         "shape=(*q.shape[:-1], v.shape[-1]),", "shape=q.shape,",
         "test_forward.py::test_is_close_to_exact[cpu-values narrower-2]"),
        ("sums of blocks are in 16 bits",
         "has_pairs = is_gradient and", "has_pairs = is_gradient or",
         "test_bias.py::test_gradient_in_16_bits_of_a_bias_of_each_head[(16, 40)-BN1S-one device]"),
        ("the last block of a bias's sums is cut off",
         "_backward_bias_avals, _workspace.blocks)", "_backward_bias_avals, lambda size: size // 64)",
         "test_bias.py::test_gradient_is_summed_over_broadcast_axes[cpu-B11S]"),
    ],
    "jax_flash/_on_shards.py": [
        ("lengths of keys do not count from the stored part",
         'jnp.maximum(part["key_value_seq_lengths"], 0) - column', 'part["key_value_seq_lengths"]',
         "test_sharded_sequence.py::test_a_device_stores_a_part_of_the_keys[8-lengths]"),
        ("a bias of all keys is not looked for",
         "divides_keys=divides_keys)", "divides_keys=True)",
         "test_sharded_sequence.py::test_a_device_stores_a_part_of_the_keys[8-bias]"),
        ("parts of the gradient of a bias are rounded before they are added",
         'if self._summed.get("dbias"):', "if False:",
         "test_bias.py::test_parts_of_devices_are_added_in_float32"),
        ("keys are gathered for whole queries",
         "(own or other for own, other in", "(own for own, other in",
         "test_transforms.py::test_keys_are_not_gathered_for_whole_queries[heads of keys-AxisType.Auto]"),
        ("an axis of the mesh partitions both rows and heads",
         "if taken.intersection(_sharding.as_tuple(axes)) else axes", "if not axes else axes",
         "test_transforms.py::test_other_shardings_give_the_same[rows and heads]"),
        ("heads are divided where a mask has rows",
         "if halo or has_pair_rows:", "if halo:",
         "test_sharded_sequence.py::test_which_calls_are_divided_by_heads[mask of rows]"),
        ("rows of a device with all rows have an offset",
         "            elif self._rows:\n", "            if self._rows:\n",
         "test_sharded_sequence.py::test_heads_are_exchanged[two each--auto]"),
        ("keys are exchanged within the call",
         "self._exchange.copies > 1", "self._exchange.copies > 0",
         "test_sharded_sequence.py::test_arguments_are_exchanged_once"),
        ("XLA gathers arrays beside an axis that shards nothing",
         "axis in used or size == 1", "True",
         "test_sharded_sequence.py::test_heads_are_exchanged_beside_another_axis[unused axis-alibi, sinks, scale]"),
        ("segments do not make the work uneven",
         'sharded.options, "query_segment_ids" in args)', "sharded.options, False)",
         "test_sharded_sequence.py::test_which_calls_are_divided_by_heads[segments]"),
        ("shards of different sizes",
         "return [None if size % _sharding.num_parts(mesh, axes) else axes for size, axes in partition]",
         "return [axes for size, axes in partition]",
         "test_transforms.py::test_shards_of_different_sizes",
         "test_context_parallel.py::test_uneven_lengths[cpu-causal-sharded jit]"),
        ("query heads are separated from their key head",
         "if sharded.num_kv_heads % _sharding.num_parts(mesh, heads):",
         "if sharded.num_heads % _sharding.num_parts(mesh, heads):",
         "test_transforms.py::test_one_key_head_with_sharded_query_heads"),
        ("the gradient of a bias is not summed over the devices",
         "if others := [axis for axis in axes if axis not in scattered]:", "if others := []:",
         "test_bias.py::test_sharded_jit_sums_the_gradient_and_gathers_no_arrays[batch-1NTS-sharded bias]"),
        ("the names of two axes beside a manual one count",
         "if sharded.whole_mesh and sum(size > 1 for size in mesh.shape.values()) > 1:", "if False:",
         "test_sharded_sequence.py::test_two_other_axes_of_shard_map[the last-all keys]"),
        ("the window stays where it is for an offset",
         ' and "query_offset" not in args\n', "\n",
         "test_sharded_sequence.py::test_only_keys_in_the_window_move[most-offsets]"),
        ("one device's part of dk is dropped",
         "total = x.astype(sum_dtype(x.dtype))",
         "total = x.astype(sum_dtype(x.dtype)) * (jax.lax.axis_index(axes) != 0)",
         "test_sharded_sequence.py::test_no_queries_move[sharded keys--auto]",
         "test_sharded_sequence.py::test_no_queries_move[whole keys--explicit]", *_OF_SHARDED_JIT),
        ("one device's part of dk counts twice",
         "total = x.astype(sum_dtype(x.dtype))",
         "total = x.astype(sum_dtype(x.dtype)) * (1 + (jax.lax.axis_index(axes) == 2))",
         "test_sharded_sequence.py::test_no_queries_move[sharded keys--auto]",
         "test_sharded_sequence.py::test_no_queries_move[whole keys--explicit]", *_OF_SHARDED_JIT),
        ("gradients of keys count twice where each device has all rows",
         "        if self._summed[name]:\n",
         '        x = x * 2 if not self._rows and "t" not in axes else x\n        if self._summed[name]:\n',
         *(f"test_context_parallel.py::test_uneven_lengths[cpu-{name}-sharded jit]" for name in ("causal", "bias"))),
        ("parts of a sum are added in their own dtype",
         "total = x.astype(sum_dtype(x.dtype))", "total = x",
         "test_sharded_sequence.py::test_sums_of_16_bits_are_rounded_once"),
        ("all shards of the queries begin at row 0",
         "row = jax.lax.axis_index(self._rows) * self._num_rows", "row = jax.lax.axis_index(self._rows) * 0",
         "test_sharded_sequence.py::test_no_queries_move[sharded keys--auto]"),
        ("shards of the queries have no offset of their own",
         "part = _subsequence.at(part, row, column, with_offset=needs_offset)",
         "part = _subsequence.at(part, row, column, with_offset=False)",
         "test_sharded_sequence.py::test_no_queries_move[sharded keys--auto]"),
        ("rows are gathered on every device",
         "if sharded.seqlen_q // _sharding.num_parts(mesh, rows) == sharded.seqlen_q:", "if True:",
         "test_sharded_sequence.py::test_no_queries_move[sharded keys--auto]"),
        ("dropout takes shards of any length",
         "self._num_rows % _dropout.UNIT and", "self._num_rows % 1 and",
         "test_sharded_sequence.py::test_rows_that_are_gathered[0.3]"),
        ("dk is scattered along axes that hold no parts of it",
         "= _sharding.as_tuple(keys) if is_sum else ()", "= _sharding.as_tuple(keys)",
         "test_sharded_sequence.py::test_meshes[keys over the other-all keys]"),
    ],
    "jax_flash/_kernel_choice.py": [
        ("long keys of a few queries have no sums of dq",
         "x.shape[-3] <= longest for x in (q, k))", "x.shape[-3] <= longest for x in (q, q))",
         "test_dispatch.py::test_room_for_sums_of_dq_of_short_sequences"),
        ("one plane at any precision", "planes = 2 if options.precision else 1", "planes = 1",
         "test_dispatch.py::test_float32_as_planes"),
        ("two planes compute what other kernels differentiate", "if planes == 2 and not options.in_planes:",
         "if planes == 2 and options.in_planes is None:", "test_dispatch.py::test_float32_as_planes"),
        ("planes are made for few keys", "return pairs >= of_query", "return 2 * pairs >= of_query",
         "test_dispatch.py::test_when_planes_pay"),
        ("all parts of the keys have the same size",
         "256 if keys <= of_256 else 512 if keys <= of_512 else 1024", "256",
         "test_dispatch.py::test_number_of_parts"),
        ("parts of a long cache are not whole rounds", "if has_three_blocks and keys > 32768", "if keys < 0",
         "test_dispatch.py::test_number_of_parts"),
        ("Hopper's kernel for few rows takes a bias", "if rows <= 16 and not has_pair_options", "if rows <= 16",
         "test_dispatch.py::test_number_of_parts_on_hopper"),
        ("a window does not change the parts of the keys",
         "if min(options.reach) >= 0:  # the first",
         "if min(options.reach) > keys:  # the first",
         "test_dispatch.py::test_number_of_parts"),
        ("calls with dropout are split into parts",
         """ or "dropout_seeds" in operands:""", ":",
         "test_dispatch.py::test_number_of_parts"),
        ("a kernel does not serve its own head dim",
         "if size >= head_dim), default=0)", "if size > head_dim), default=0)",
         "test_dispatch.py::test_kernels_of_second_order"),
        ("a kernel that is not there is chosen",
         "return 0 < kernel_head_dim(", "return 0 <= kernel_head_dim(",
         "test_dispatch.py::test_kernels_of_second_order"),
        ("the head dim of the values does not count",
         'q.dtype, max(q.shape[-1], v.shape[-1])) <= largest', 'q.dtype, q.shape[-1]) <= largest',
         "test_dispatch.py::test_kernels_of_second_order"),
        ("Hopper's kernel for 192 takes values of any width",
         'smallest = 193 if direction == "backward" and head_dims[1] > 128 else 1', "smallest = 1",
         "test_dispatch.py::test_parts_of_the_query_heads"),
        ("self-attention is split over keys",
         "or keys < 16 * seqlen_q:", "or False:",
         "test_dispatch.py::test_number_of_parts_of_a_chunk"),
    ],
    "jax_flash/_paged.py": [
        ("mapped pages are all the first ones",
         'named["page_indices"] = first + jnp.clip(', 'named["page_indices"] = jnp.clip(',
         "test_paged.py::test_vmap[cpu]"),
        ("an index may lead to another sequence's mapped pages",
         "first + jnp.clip(indices, 0, num_pages - 1)", "first + indices",
         "test_paged.py::test_vmap_clamps_indices[cpu]"),
    ],
    "jax_flash/_halo.py": [
        ("the farthest neighbor's keys are left out",
         "range(1, 1 + -(-reach // self.size))", "range(1, 1 + reach // self.size)",
         "test_sharded_sequence.py::test_every_device_gets_its_window[8-window1]"),
        ("keys lie where the receiver's are",
         "lax.axis_index(self.axes) - transfer.distance", "lax.axis_index(self.axes) + transfer.distance",
         "test_sharded_sequence.py::test_every_device_gets_its_window[8-window2]"),
        ("one device's part of dk counts twice",
         "[..., transfer.begin : transfer.end, :, :].add(part)",
         "[..., transfer.begin : transfer.end, :, :].add(2 * part)",
         "test_sharded_sequence.py::test_every_device_gets_its_window[8-window0]", *_OF_WINDOWS),
        ("one device's part of dk is dropped",
         "[..., transfer.begin : transfer.end, :, :].add(part)",
         "[..., transfer.begin : transfer.end, :, :].add(0)",
         "test_sharded_sequence.py::test_every_device_gets_its_window[8-window0]", *_OF_WINDOWS),
        ("gradients go to the other neighbor",
         "-transfer.distance).astype", "transfer.distance).astype",
         "test_sharded_sequence.py::test_every_device_gets_its_window[8-window1]"),
        ("the stored part begins where no block of keys does",
         "first_seen // self.unit * self.unit, 0, last)", "first_seen, 0, last)",
         "test_sharded_sequence.py::test_a_device_stores_a_part_of_the_keys[8-segments]"),
        ("segment ids are those of the first keys",
         "lax.dynamic_slice_in_dim(x, self.first_key(), self.length, x.ndim - 1)",
         "lax.dynamic_slice_in_dim(x, 0, self.length, x.ndim - 1)",
         "test_sharded_sequence.py::test_a_device_stores_a_part_of_the_keys[8-segments]"),
        ("whole shards move",
         "count = min(reach - (places - 1) * self.size, self.size)", "count = self.size",
         "test_sharded_sequence.py::test_only_keys_in_the_window_move[most-]"),
    ],
    "jax_flash/_head_exchange.py": [
        ("heads are divided where as much would move by a gather",
         "* _KEYS_OF_A_ROW <= seqlen_q", "* _KEYS_OF_A_ROW < seqlen_q",
         "test_sharded_sequence.py::test_when_an_exchange_of_heads_pays[as much moves]"),
        ("calls are divided by heads however much moves",
         "* _KEYS_OF_A_ROW <= seqlen_q", "* 0 <= seqlen_q",
         "test_sharded_sequence.py::test_when_an_exchange_of_heads_pays[few keys]"),
        ("segments are taken for long ones",
         "seqlen_kv / _SEGMENTS_OF_A_ROW", "seqlen_kv",
         "test_sharded_sequence.py::test_when_an_exchange_of_heads_pays[short segments]"),
        ("key heads are divided that do not divide",
         "num_kv_heads % num_devices == 0 or num_devices % num_kv_heads == 0", "True",
         "test_sharded_sequence.py::test_when_an_exchange_of_heads_pays[key heads do not divide]"),
        ("each device has the operands of the first heads",
         "lax.axis_index(self.axes) * size, size, heads)", "0, size, heads)",
         "test_sharded_sequence.py::test_heads_are_exchanged_beside_another_axis[unused axis-alibi, sinks, scale]"),
        ("a device has the key heads of others",
         "x = jnp.repeat(x, self._copies(rows), heads)",
         "x = jnp.concatenate([x] * self._copies(rows), heads)",
         "test_sharded_sequence.py::test_heads_are_exchanged[one for two devices-alibi, sinks, scale-auto]"),
        ("one device's part of dk is dropped",
         "jnp.sum(copied, heads + 1,", "jnp.sum(lax.slice_in_dim(copied, 1, copies, axis=heads + 1), heads + 1,",
         "test_sharded_sequence.py::test_heads_are_exchanged[one for two devices-alibi, sinks, scale-auto]",
         *_OF_HEADS),
        ("one device's part of dk counts twice",
         "jnp.sum(copied, heads + 1,",
         "jnp.sum(jnp.concatenate([copied, lax.slice_in_dim(copied, 0, 1, axis=heads + 1)], heads + 1), heads + 1,",
         "test_sharded_sequence.py::test_heads_are_exchanged[one for two devices-alibi, sinks, scale-auto]",
         *_OF_HEADS),
    ],
    "jax_flash/_row_parts.py": [
        ("the last part of the rows is left out",
         "[add_rows(num_parts * length, seqlen_q - num_parts * length, total)]", "[total]",
         "test_bias.py::test_gradient_from_parts_of_the_rows[cpu-parts: rows, mask]"),
        ("all parts are of the first rows",
         "add_rows(i * length, length, total)", "add_rows(0 * i, length, total)",
         "test_bias.py::test_gradient_from_parts_of_the_rows[cpu-parts: keys, causal]"),
        ("a part has no place in the sequence",
         "sums_of(_subsequence.at(part, jnp.int32(first), 0, with_offset=with_offset))", "sums_of(part)",
         "test_bias.py::test_gradient_from_parts_of_the_rows[cpu-parts: keys, causal]"),
        ("a part has one row",
         "(seqlen_q - 2) // length", "(seqlen_q - 1) // length",
         "test_bias.py::test_gradient_from_parts_of_the_rows[cpu-parts: one row more]"),
        ("all rows are one part",
         "return length if length < seqlen_q else None", "return None",
         "test_bias.py::test_memory_is_linear[cpu-B11S]"),
    ],
    "jax_flash/_subsequence.py": [
        ("the offset of a part has the wrong sign",
         "_add(offset, row - column)", "_add(offset, column - row)",
         "test_ring.py::test_every_option_is_close_to_exact[cpu-causal-8-contiguous]",
         "test_sharded_sequence.py::test_no_queries_move[sharded keys--auto]"),
        ("slopes need no offset",
         'return options.reach != (-1, -1) or "alibi_slopes" in names', "return options.reach != (-1, -1)",
         "test_sharded_sequence.py::test_no_queries_move[sharded keys-alibi-auto]"),
        ("lengths of queries are those of the device",
         'jnp.maximum(arrays["query_seq_lengths"], 0) - row', 'jnp.maximum(arrays["query_seq_lengths"], 0)',
         "test_sharded_sequence.py::test_no_queries_move[sharded keys-lengths-auto]"),
        ("dropout numbers keys as rows",
         'arrays["dropout_seeds"], row, column)', 'arrays["dropout_seeds"], column, row)',
         "test_sharded_sequence.py::test_no_queries_move[sharded keys-dropout-explicit]"),
    ],
    "jax_flash/_ring.py": [
        ("the last step is left out",
         "for shift in range(num_devices):", "for shift in range(max(num_devices - 1, 1)):",
         "test_ring.py::test_every_option_is_close_to_exact[cpu-everything at once-8-zigzag]"),
        ("keys do not move in second derivatives",
         "given = inputs | moving", 'given = inputs | moving | {"k": inputs["k"]}',
         "test_ring.py::test_second_derivatives_without_forward_mode[cpu-causal-zigzag]",
         "test_ring.py::test_second_derivatives_by_some_of_the_inputs[cpu]"),
        ("the device's own keys count twice",
         "for shift in range(num_devices):", "for shift in range(num_devices + 1):",
         "test_ring.py::test_every_option_is_close_to_exact[cpu-everything at once-8-zigzag]"),
        ("one device's keys are left out of the output",
         "_with_pair(results, more, ring, pair)",
         "_with_pair(results, (more[0], jnp.where(pair.at.sender == 1, -jnp.inf, more[1])), ring, pair)",
         *_OF_RINGS),
        ("one device's keys count twice in the output",
         "_with_pair(results, more, ring, pair)",
         "_with_pair(results, (more[0], more[1] + jnp.log(1 + (pair.at.sender == 1))), ring, pair)",
         *_OF_RINGS),
        ("one device's part of the gradients is dropped",
         "_with_part(name, sums.get(name), x, arrays",
         "_with_part(name, sums.get(name), x * (pair.at.device != 1), arrays",
         *_OF_RINGS),
        ("one device's part of the gradients counts twice",
         "_with_part(name, sums.get(name), x, arrays",
         "_with_part(name, sums.get(name), x * (1 + (pair.at.device == 1)), arrays",
         *_OF_RINGS),
        ("pairs that are not there count",
         "- pair.at.column) * pair.at.is_real", "- pair.at.column)",
         "test_ring.py::test_steps_that_are_skipped_had_nothing_to_add"),
        ("the gradients of keys stay where they end",
         "ring.move(_of_keys(found), -shift)", "_of_keys(found)",
         "test_ring.py::test_every_option_is_close_to_exact[cpu-everything at once-8-zigzag]"),
        ("the second chunks lie in the order of the first",
         "return device + i * (2 * (num_devices - device) - 1)", "return device + i * num_devices",
         "test_ring.py::test_every_option_is_close_to_exact[cpu-causal, bottom right-8-zigzag]"),
        ("to_zigzag does not turn the second half",
         "jnp.stack([first, jnp.flip(second, axis)], axis + 1)", "jnp.stack([first, second], axis + 1)",
         "test_ring.py::test_zigzag_gives_each_device_a_chunk_of_both_ends"),
        ("arrays vary over an axis that JAX does not check",
         "axes = _sharding.varying_axes(lax.axis_index(axis_name))", "axes = (axis_name,)",
         "test_ring.py::test_an_axis_of_vmap"),
        ("steps of the forward pass do not wait for each other",
         "at_hand, results, columns = lax.optimization_barrier((at_hand, results, _with_columns(arrays)))",
         "columns = {}",
         "test_ring.py::test_memory_does_not_grow_with_the_number_of_devices[cpu-contiguous]"),
        ("columns of a mask or bias do not wait for their step",
         "if \"s\" in AXES[name] and name not in _TRAVELLING}", "if False}",
         "test_ring.py::test_memory_does_not_grow_with_the_number_of_devices[cpu-zigzag, causal, bias]"),
        ("steps of the backward pass do not wait for each other",
         "at_hand, sums, columns = lax.optimization_barrier((at_hand, sums, _with_columns(arrays)))",
         "columns = {}",
         "test_ring.py::test_memory_does_not_grow_with_the_number_of_devices[cpu-contiguous]"),
        ("sums do not vary over axes before a step adds to them",
         "sums.get(name, jnp.zeros_like(arrays[name]))",
         "sums.get(name, jnp.zeros(arrays[name].shape, arrays[name].dtype))",
         "test_ring.py::test_steps_that_are_skipped_had_nothing_to_add[cpu-nothing is visible-zigzag]"),
        ("results have no sharding before a step adds to them",
         "jnp.full_like(lax.index_in_dim(query, 0, -1, keepdims=False), -jnp.inf, dtype)",
         "jnp.full(query.shape[:-1], -jnp.inf, dtype)",
         "test_ring.py::test_a_mesh_whose_other_axes_are_explicit[cpu-kernel, window]"),
        ("the gradient of a bias is rounded for each pair",
         "if bias is None or 1 not in bias.shape[2:]:", "if True:",
         "test_ring.py::test_the_gradient_of_a_bias_is_rounded_once[cpu-zigzag-S]"),
        ("different chunks of a device count as aligned",
         "is_own and all(pair is None or pair[0] == pair[1] for pair in chunks)", "is_own",
         "test_ring.py::test_calls_of_kernels[zigzag, window]"),
        ("the other half of the rows sees the keys of a device behind",
         "(\"query_seq_lengths\", ring.q_length, ~comes_before)",
         "(\"query_seq_lengths\", ring.q_length, comes_before)",
         "test_context_parallel.py::test_every_option[cpu-causal-zigzag-2]"),
        ("swapped rows of a gradient are not swapped back",
         "x = _swapped(name, x) if pair.is_swapped else x", "pass",
         "test_context_parallel.py::test_every_option[cpu-causal-zigzag-2]"),
        ("shards are taken by halves in a window, too",
         "is_causal = options.reach == (-1, 0) and", "is_causal = options.reach[1] == 0 and",
         "test_ring.py::test_calls_of_kernels[zigzag, window]"),
        ("shards are taken by halves whatever the offset",
         "and offset == 0 and lengths", "and lengths",
         "test_context_parallel.py::test_every_option[cpu-offset known in advance-zigzag-2]"),
        ("keys for the backward pass are sent during the forward pass",
         "at_hand, arrays[\"dout\"], arrays[\"lse\"] = lax.optimization_barrier(",
         "at_hand, arrays[\"dout\"], arrays[\"lse\"] = tuple(",
         "test_ring.py::test_keys_for_the_backward_pass_wait_for_it"),
        ("chunks of unequal lengths count as aligned",
         "is_own = step.shift == 0 and ring.q_length == ring.kv_length", "is_own = step.shift == 0",
         "test_ring.py::test_every_option_is_close_to_exact[cpu-causal, more queries-4-zigzag]"),
        ("lengths of queries do not depend on positions",
         'names = ("query_seq_lengths", "key_value_seq_lengths",', 'names = ("key_value_seq_lengths",',
         "test_ring.py::test_calls_of_kernels[zigzag, lengths]"),
        ("a window ends one key early",
         "<= left and column", "< left and column",
         "test_ring.py::test_only_keys_that_are_seen_travel"),
        ("columns of a bias are those of the device itself",
         "sender * ring.num_chunks * ring.kv_length +", "device * ring.num_chunks * ring.kv_length +",
         "test_ring.py::test_every_option_is_close_to_exact[cpu-everything at once-8-zigzag]"),
        ("the gradient of the sinks is of the first chunk alone",
         "for i in range(ring.num_chunks):", "for i in range(1):",
         "test_ring.py::test_every_option_is_close_to_exact[cpu-everything at once-8-zigzag]"),
    ],
    "jax_flash/_operands.py": [
        ("lse is sharded with heads first",
         '"lse": "tn",', '"lse": "nt",',
         "test_transforms.py::test_sharded_jit_gathers_nothing[heads-]"),
    ],
    "jax_flash/_workspace.py": [
        ("row statistics are not rounded up to whole blocks",
         "return _ceil_div(size, unit) * unit", "return size",
         "test_transforms.py::test_workspace_of_gradients"),
        ("a library with an unknown workspace is accepted",
         "if unknown := {", "if unknown := 0 and {",
         "test_ffi.py::test_a_library_with_another_workspace_is_refused"),
    ],
    "jax_flash/_reference.py": [
        ("a window one key too narrow",
         "visible &= distance <= jnp.minimum(offset", "visible &= distance < jnp.minimum(offset",
         "test_masks.py::test_reference[window right]"),
        ("a wide window wraps around",
         "jnp.maximum(offset, _INT32.min + options.window_left) - options", "offset - options",
         "test_masks.py::test_reference[window, widest, smallest offset]"),
        ("lse is NaN in rows without keys whose sink is infinite",
         "jnp.where(is_alone & (sinks == jnp.inf), 0, sinks - maximum)", "sinks - maximum",
         "test_sinks.py::test_a_row_without_keys_shows_a_sink_that_is_not_finite_in_its_lse_alone[cpu-xla-inf]"),
        ("sinks are missing from the sum",
         "total += jnp.exp(jnp.where(is_alone", "total += 0 * jnp.exp(jnp.where(is_alone",
         "test_reference.py::test_options[sinks-float32]"),
        ("kept probabilities are not scaled up",
         "probabilities / (1 - options.dropout_rate)", "probabilities",
         "test_dropout.py::test_the_reference_keeps_what_it_should"),
    ],
    "jax_flash/_dropout.py": [
        ("a part of a part begins where the whole does",
         "return seeds + jnp.broadcast_to(", "return seeds.at[..., 3:].set(0) + jnp.broadcast_to(",
         "test_sharded_sequence.py::test_the_other_axis_of_shard_map[ring-window-0.3]"),
        ("nine rounds of Philox",
         "_ROUNDS = 10", "_ROUNDS = 9",
         "test_dropout.py::test_keep_is_philox"),
        ("words of Philox swapped",
         "((words[0], words[1]), (words[2], words[3]))", "((words[0], words[2]), (words[1], words[3]))",
         "test_dropout.py::test_keep_is_philox"),
        ("a carry is lost",
         "(middle1 >> 16) + carry,", "(middle1 >> 16),",
         "test_dropout.py::test_keep_is_philox"),
        ("batch elements have the same seeds",
         "heads = jnp.arange(batch * num_heads, dtype=jnp.uint32)",
         "heads = (jnp.arange(batch * num_heads, dtype=jnp.uint32) % num_heads)",
         "test_dropout.py::test_every_head_of_every_batch_element_has_seeds_of_its_own"),
    ],
    "jax_flash/_ffi.py": [
        ("a library built for a newer FFI is accepted",
         "built[1] > runtime[1]", "built[1] < runtime[1]",
         "test_install.py::test_library_of_another_ffi_is_refused"),
        ("GPUs older than all kernels are accepted",
         "if round(10 * float(capability)) < oldest_built:", "if round(10 * float(capability)) > 10 * oldest_built:",
         "test_install.py::test_gpu_older_than_the_kernels_is_refused"),
    ],
    "jax_flash/flax.py": [
        ("dropout is on in inference",
         "dropout_rate = 0.0 if deterministic else dropout_rate", "dropout_rate = dropout_rate",
         "test_flax.py::test_linen_deterministic_dropout[cpu]"),
        ("a mask with some batch axes is not broadcast to the others",
         "if own != batch:", "if own == batch:",
         "test_flax.py::test_mask_and_bias_of_any_shape[cpu-(2, 3)-(2, 1, 1, 7, 9)]"),
        ("a layer's ring has the other layout",
         "axis_name=axis_name, layout=layout)", "axis_name=axis_name)",
         "test_ring.py::test_layers_of_flax[cpu-nnx-zigzag]"),
        ("a layer's mask has the keys of one device",
         "num_shards * key.shape[-3]", "key.shape[-3]",
         "test_ring.py::test_layers_of_flax[cpu-linen-contiguous]"),
    ],
    "jax_flash/_command_line/arguments.py": [
        ("a length of 0 is accepted",
         "if not text.isdecimal() or int(text) == 0:", "if not text.isdecimal():",
         "test_main.py::test_bad_arguments"),
        ("--show shows the standard case",
         "case = dataclasses.replace(case, **_SHOW_SIZES)", "case = dataclasses.replace(case)",
         "test_main.py::test_omitted_sizes_are_the_standard_ones"),
    ],
    "jax_flash/_command_line/main.py": [
        ("a failed check exits with 0",
         "return 0 if passed else 1", "return 0",
         "test_main.py::test_wrong_results_fail[a scale-bfloat16]"),
    ],
    "jax_flash/_command_line/comparison.py": [
        ("NaN passes the check",
         "ok = error <= limit", "ok = not error > limit",
         "test_main.py::test_wrong_results_fail[NaN-bfloat16]"),
    ],
    "jax_flash/_command_line/check.py": [
        ("the reference's rows start at 0 in every block",
         "starts = rows * jnp.arange(blocks, dtype=jnp.int32)", "starts = 0 * jnp.arange(blocks, dtype=jnp.int32)",
         "test_main.py::test_reference[7-True]"),
    ],
    "jax_flash/_command_line/measure.py": [
        ("the time of all calls counts as that of one",
         "return (time.perf_counter() - start) / count", "return time.perf_counter() - start",
         "test_main.py::test_time_is_that_of_one_call"),
    ],
    "benchmarks/context_parallel_model.py": [
        ("the gradients that a ring passes on do not count",
         "if direction == BACKWARD and i > 0:", "if False:",
         "test_benchmarks.py::test_model_of_what_moves[ring, causal]"),
        ("rows cost nothing but their pairs",
         "(seen.pairs + kernel.edge * edges)", "seen.pairs",
         "test_benchmarks.py::test_model_of_one_device"),
    ],
    "benchmarks/context_parallel.py": [
        ("a wrong result is timed",
         "if not error <= limit]:", "if error > 1]:",
         "test_benchmarks.py::test_wrong_sharded_result_fails"),
    ],
    "examples/training_step.py": [
        ("positions do not have the order of the tokens",
         "self.in_order(place, axis=0)", "place",
         "test_examples.py::test_training_step_with_a_sharded_sequence"),
        ("the ring has another layout than the tokens",
         'layout="zigzag", is_causal=is_causal', 'layout="contiguous", is_causal=is_causal',
         "test_examples.py::test_training_step_with_a_sharded_sequence"),
    ],
    "build_backend.py": [
        ("a compiler that miscompiles is accepted",
         "_OLDEST_NVCC = (12, 9, 86)", "_OLDEST_NVCC = (12, 9, 0)",
         "test_install.py::test_nvcc_too_old[12.9.41]"),
        ("the user's C++ compiler is overruled",
         'os.environ.setdefault("CXX", compiler)', 'os.environ["CXX"] = compiler',
         "test_install.py::test_compiler_is_not_that_of_python"),
    ],
    # ---- CUDA, on the host ----------------------------------------------------------------------------------------
    "cpp/compile_kernel.sh": [
        ("serialized products pass the build",
         "C75(08|10|12|14|15|17)", "C75(08|10|14|15|17)",
         "test_install.py::test_serialised_products_fail_the_build"),
    ],
    "cuda/mask.cuh": [
        ("a row misses its last key",
         "clamp(row + highest, -1, kv_length - 1)", "clamp(row + highest - 1, -1, kv_length - 1)",
         "test_cuda_on_host.py::test_masks_and_tiles"),
        ("the first query of a key uses the offset with the wrong sign",
         "clamp(first_key - highest, 0, q_length)", "clamp(first_key + highest, 0, q_length)",
         "test_cuda_on_host.py::test_masks_and_tiles"),
        ("the last block of keys is left out",
         "blocks.end = (last_key(last_row) + kBlockN) / kBlockN;", "blocks.end = last_key(last_row) / kBlockN;",
         "test_cuda_on_host.py::test_masks_and_tiles"),
        ("a block of queries counts for keys that none of them sees",
         "last < first ? 0", "last < start ? 0",
         "test_cuda_on_host.py::test_masks_and_tiles"),
        ("blocks of queries count for keys beyond the length",
         "end <= key ? -1 : last_query(end - 1)", "last_query(end - 1)",
         "test_cuda_on_host.py::test_masks_and_tiles"),
        ("a block that begins before a row's first key counts as fully visible",
         "(first_key(row + rows - 1) + kBlockN - 1) / kBlockN", "first_key(row + rows - 1) / kBlockN",
         "test_cuda_on_host.py::test_masks_and_tiles"),
        ("blocks count as fully visible beyond the last query",
         "row + rows <= q_length ? (last_key(row) + 1) / kBlockN : 0", "(last_key(row) + 1) / kBlockN",
         "test_cuda_on_host.py::test_masks_and_tiles"),
        ("only the first row decides whether a tile is fully visible",
         "row + rows - 1 + lowest <= key", "row + lowest <= key",
         "test_cuda_on_host.py::test_masks_and_tiles"),
        ("lengths are not clamped",
         "lengths ? clamp(lengths[batch], 0, static_cast<int>(full))", "lengths ? lengths[batch]",
         "test_cuda_on_host.py::test_masks_and_tiles"),
        ("the largest offsets overflow",
         "saturate(offset - min(left, int64_t{4} * kFar))", "static_cast<int>(offset - min(left, int64_t{4} * kFar))",
         "test_cuda_on_host.py::test_masks_and_tiles"),
    ],
    "cuda/tiles.h": [
        ("a tile larger than shared memory",
         "return {64, 32, 4, 4, 2};  // 96 KB; 16 rows", "return {64, 64, 4, 4, 2};  // 96 KB; 16 rows",
         "test_cuda_on_host.py::test_masks_and_tiles"),
        ("blocks of keys do not match those of the lists",
         "return {3, 64, 3, 2, 0, true};  // 216 KB", "return {3, 80, 3, 2, 0, true};  // 216 KB",
         "test_cuda_on_host.py::test_masks_and_tiles"),
    ],
    "cuda/kernels.cmake": [
        ("the kernels for the largest head dim are missing",
         "list(REMOVE_ITEM sm80_head_dims 32 96 192 512)", "list(REMOVE_ITEM sm80_head_dims 32 96 192 256 512)",
         "test_cuda_on_host.py::test_some_kernel_takes_every_head_dim"),
        ("no Hopper kernel for a deterministic dq",
         "foreach(direction IN ITEMS backward backward_dq)", "foreach(direction IN ITEMS backward)",
         "test_cuda_on_host.py::test_some_kernel_takes_every_head_dim"),
        ("no kernel for infinities in dq",
         "jax_flash_kernels(backward_dq sm80 tf32x3_infinity ${head_dim})", "",
         "test_cuda_on_host.py::test_some_kernel_takes_every_head_dim"),
        ("no kernel for the bias of short sequences",
         "ITEMS short_forward short_backward short_backward_bias)", "ITEMS short_forward short_backward)",
         "test_cuda_on_host.py::test_some_kernel_takes_every_head_dim"),
    ],
    # ---- C++ ------------------------------------------------------------------------------------------------------
    "cpp/exports.map": [
        ("every symbol is exported",
         "JaxFlashLibrary;", "*;",
         "test_install.py::test_library_exports_only_its_description"),
    ],
    "cpp/ffi_call.cc": [
        ("misaligned arrays are accepted",
         "is_for_cuda() ? 16 : ElementBytes(buffer.element_type());", "ElementBytes(ffi::DataType::PRED);",
         "test_handlers.py::test_alignment_workspace_and_exceptions"),
        ("extra arguments are accepted",
         "if (next_arg_ == args_.size() && next_result_ == results_.size())", "if (next_result_ == results_.size())",
         "test_ffi.py::test_bad_forward_call[cpu-one argument too many]"),
        ("a broadcast dimension has a stride",
         "int64_t elements = got[axis] == 1 ? 0 : 1;", "int64_t elements = 1;",
         "test_forward.py::test_is_close_to_exact[cpu-bias of batch and rows-2]"),
    ],
    "cpp/ffi_decode.cc": [
        ("heads that do not divide",
         "params->num_heads % params->num_kv_heads == 0 : params->num_heads == 0;", "true : params->num_heads == 0;",
         "test_ffi.py::test_bad_forward_call[cpu-heads not a multiple]"),
        ("no pages are accepted",
         "if (params->num_pages <= 0 ||", "if (params->num_pages < 0 ||",
         "test_ffi.py::test_bad_forward_call[cpu-no pages]"),
        ("a gradient takes pages for keys in order",
         "if (is_paged && pass != Pass::kForward) {", "if (false) {",
         "test_ffi.py::test_bad_backward_call[cpu-page indices]"),
        ("a window of -2 is accepted",
         "CheckOption(o.window_left >= -1,", "CheckOption(o.window_left >= -2,",
         "test_ffi.py::test_bad_forward_call[cpu-window -2]"),
        ("a dropout rate of 1 is accepted",
         "o.dropout_rate < 1,", "o.dropout_rate <= 1,",
         "test_ffi.py::test_bad_forward_call[cpu-dropout of all]"),
        ("dropout without seeds is accepted",
         "if (params->options.dropout_rate > 0 && !params->dropout_seeds) {", "if (false) {",
         "test_ffi.py::test_bad_forward_call[cpu-dropout without seeds]"),
        ("ids of the queries alone are accepted",
         "if (!params->query_segment_ids != !params->key_value_segment_ids) {", "if (false) {",
         "test_ffi.py::test_bad_forward_call[cpu-ids of queries alone]"),
        ("dlse has heads first",
         'TakeArg("dlse", LseType(dtype), {B, T, N}', 'TakeArg("dlse", LseType(dtype), {B, N, T}',
         "test_ffi.py::test_bad_backward_call[cpu-dlse of another shape]"),
        ("lse is float32 for float64 inputs",
         "dtype == ffi::DataType::F64 ? ffi::DataType::F64 :", "dtype == ffi::DataType::F64 ? ffi::DataType::F32 :",
         "test_forward.py::test_is_close_to_exact[cpu-full-3]"),
        ("bias sums whose batch size does not divide the batch are accepted",
         "return part > 0 ? whole % part == 0 : whole == 0;", "return part > 0 || whole == 0;",
         "test_ffi.py::test_bad_call_for_the_gradient_of_a_bias[cpu-dbias of 3 batch elements]"),
    ],
    "cpp/ffi_workspace.cc": [
        ("a mask's broadcast dimension gets full size in the bits",
         "B_mask = mask.batch_stride ? B : 1", "B_mask = B",
         "test_handlers.py::test_alignment_workspace_and_exceptions"),
        ("dq is summed without room for the sums",
         "!dq_dims.empty() && dq_dims[1] == 0", "false",
         "test_handlers.py::test_alignment_workspace_and_exceptions"),
    ],
    "cpp/workspace.def": [
        ("a float32 call gets the sums of a 16-bit dq",
         "WORKSPACE(dq_accum, F32, is_backward and is_16_bit,", "WORKSPACE(dq_accum, F32, is_backward,",
         "test_handlers.py::test_alignment_workspace_and_exceptions"),
    ],
    "cpp/cpu_parallel.h": [
        ("workers share their scratch",
         "const int64_t worker = state->next_worker++;", "const int64_t worker = 0 * state->next_worker++;",
         "test_edges.py::test_repeats_give_the_same_bits[cpu-float32]"),
    ],
    "cpp/cpu_types.h": [
        ("ties of bfloat16 are rounded away from 0",
         "(bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16", "(bits + 0x8000u) >> 16",
         "test_edges.py::test_every_tie_is_rounded_to_even"),
        ("bfloat16 is truncated",
         "const uint32_t rounded = (bits + 0x7fffu +", "const uint32_t rounded = (bits + 0 * 0x7fffu +",
         "test_edges.py::test_every_tie_is_rounded_to_even"),
        ("subnormal float16 numbers are rounded to the wrong place",
         "(exponent < 0x38800000u ?", "(exponent < 0x38000000u ?",
         "test_edges.py::test_every_tie_is_rounded_to_even"),
        ("subnormal float16 numbers are read as normal ones",
         "magnitude < 0x400u ? subnormal : normal;", "magnitude < 0x200u ? subnormal : normal;",
         "test_edges.py::test_every_tie_is_rounded_to_even"),
        ("a NaN becomes another number in float16",
         "x != x ? 0x7e00u : rounded", "x != x ? 0x7c00u : rounded",
         "test_edges.py::test_nan_of_every_kind_stays_one"),
    ],
    "cpp/cpu_vector.h": [
        ("exp is 0 below e^-17",
         "y = x < C::kMin ?", "y = x < T(-17) ?",
         "test_edges.py::test_exponential_over_its_whole_range"),
        ("exp loses a denormal fraction",
         "(fraction + T(1)) * power;", "fraction * power + power;",
         "test_edges.py::test_exponential_over_its_whole_range"),
        ("the polynomial of exp ends two terms early",
         "kDegree = 7;", "kDegree = 5;",
         "test_edges.py::test_exponential_over_its_whole_range"),
        ("ln 2 is rounded to a few bits",
         "(x - n * C::kLn2High) - n * C::kLn2Low;", "(x - n * C::kLn2High);",
         "test_edges.py::test_exponential_over_its_whole_range"),
        ("tanh is 1 from 5 on",
         "const T limit = 20;", "const T limit = 5;",
         "test_edges.py::test_hyperbolic_tangent_over_its_whole_range"),
        ("a product's last vector is left out",
         "if (column >= columns) return;", "if (column + 1 >= columns) return;",
         "test_backward.py::test_is_close_to_exact[cpu-causal, more queries-2]"),
    ],
    "cpp/cpu_mask.h": [
        ("a query misses its last key",
         "std::min(position + right_ + 1, kv_len_)", "std::min(position + right_, kv_len_)",
         "test_masks.py::test_every_option[cpu-causal-float32]"),
        ("a window one key too narrow",
         "std::max<int64_t>(position - left_, 0)", "std::max<int64_t>(position - left_ + 1, 0)",
         "test_masks.py::test_every_option[cpu-window left-float32]"),
        ("the offset has the wrong sign",
         "const int64_t position = query + offset_;", "const int64_t position = query - offset_;",
         "test_masks.py::test_every_option[cpu-causal, offsets-float32]"),
        ("a tile of keys misses its first query",
         "keys.first - right_ - offset_, 0)", "keys.first - right_ - offset_ + 1, 0)",
         "test_masks.py::test_every_option[cpu-causal, offsets-float32]"),
        ("a tile of keys misses its last queries",
         "- offset_ + left_, q_len_)", "- offset_ + left_ - 1, q_len_)",
         "test_masks.py::test_many_tiles[cpu-window-float32]"),
        ("is_causal is ignored",
         "right_(params.options.is_causal ? 0 : Window(", "right_(Window(",
         "test_masks.py::test_every_option[cpu-causal-float32]"),
        ("lengths are not clamped",
         "std::clamp<int64_t>(lengths[batch], 0, limit)", "lengths[batch]",
         "test_forward.py::test_is_close_to_exact[cpu-lengths beyond both-2]"),
    ],
    "cpp/cpu_tiles.h": [
        ("queries have the batch stride of keys",
         "batch * params.seqlen_q * stride + kv_head", "batch * params.seqlen_kv * stride + kv_head",
         "test_forward.py::test_is_close_to_exact[cpu-causal, more queries-2]"),
        ("keys have the row stride of queries",
         "stride(params.num_kv_heads * width)", "stride(params.num_heads * width)",
         "test_forward.py::test_is_close_to_exact[cpu-groups of 2-2]"),
        ("all keys of a page are the first one",
         "* size + row % size;", "* size;",
         "test_paged.py::test_every_page_size[cpu-0-1-7]"),
        ("all sequences have the first one's pages",
         "page_indices += batch * params.pages_per_sequence;", "",
         "test_paged.py::test_every_page_size[cpu-0-1-7]"),
        ("float16 is read as bfloat16",
         "return as(std::type_identity<Half>());", "return as(std::type_identity<BFloat16>());",
         "test_forward.py::test_is_close_to_exact[cpu-full-1]"),
        ("rows that see no key of a tile are loaded",
         "(!keep || keep[row])", "(!keep || keep[row] || true)",
         "test_poison.py::test_rows_that_see_no_key_do_not_leak"),
        ("16-bit rows are used without conversion",
         "return SizeOf(dtype) == sizeof(T);", "return true;",
         "test_backward.py::test_is_close_to_exact[cpu-full-1]"),
    ],
    "cpp/cpu_pairs.h": [
        ("a mask of rows is read along the keys",
         "row[j] &= from[j * mask.key_stride];", "row[j] &= from[j];",
         "test_forward.py::test_is_close_to_exact[cpu-mask of rows-2]"),
        ("ids of keys are read with the queries' stride",
         "batch_ * params_.seqlen_kv + first_key;", "batch_ * params_.seqlen_q + first_key;",
         "test_forward.py::test_is_close_to_exact[cpu-segments of queries and keys-2]"),
        ("slopes have the wrong sign",
         "to[j] = -slope * Distance(", "to[j] = slope * Distance(",
         "test_forward.py::test_is_close_to_exact[cpu-alibi-2]"),
        ("slopes ignore the offset",
         "At(row).query + offset - key", "At(row).query + 0 * offset - key",
         "test_forward.py::test_is_close_to_exact[cpu-alibi, causal, offset-2]"),
        ("all heads use the first one's bias",
         "head * array.head_stride", "0 * head * array.head_stride",
         "test_forward.py::test_is_close_to_exact[cpu-bias-2]"),
        ("a bias in bfloat16 is read as float16",
         "static_cast<const BFloat16*>(bias.data)", "static_cast<const Half*>(bias.data)",
         "test_forward.py::test_is_close_to_exact[cpu-bias-0]"),
        ("the words of a seed are swapped",
         "{{seeds[0], seeds[1]},", "{{seeds[1], seeds[0]},",
         "test_dropout.py::test_kernels_keep_what_they_should[cpu-(77, 50, 24)-float32-0.5]"),
        ("dropout pairs the wrong rows",
         "bits.decision(query % 16 / 8,", "bits.decision(query % 8 / 4,",
         "test_dropout.py::test_kernels_keep_what_they_should[cpu-(77, 50, 24)-float32-0.5]"),
        ("kept probabilities are not scaled up",
         "T(1 / (1 - params_.options.dropout_rate))", "T(1)",
         "test_dropout.py::test_kernels_keep_what_they_should[cpu-(77, 50, 24)-float32-0.5]"),
    ],
    "cpp/dropout.h": [
        ("a decision at the threshold drops",
         "return decision >= threshold;", "return decision > threshold;",
         "test_dropout.py::test_kernels_keep_what_they_should[cpu-(300, 261, 64)-float32-0.5]"),
        ("the steps of Philox's key are swapped",
         "k[0] += 0x9E3779B9, k[1] += 0xBB67AE85;", "k[1] += 0x9E3779B9, k[0] += 0xBB67AE85;",
         "test_dropout.py::test_kernels_keep_what_they_should[cpu-(77, 50, 24)-float32-0.5]"),
    ],
    "cpp/cpu_forward.h": [
        ("sinks are missing from lse",
         "scratch.max[row] == -infinity ? 0 : 1;", "0;",
         "test_forward.py::test_is_close_to_exact[cpu-sinks-2]"),
        ("every batch element has the first one's sinks",
         "sinks[batch * params.num_heads + head]", "sinks[head]",
         "test_sinks.py::test_vmap_over_sinks[cpu]"),
        ("the rounding of lse shows",
         "std::exp(row_lse - scratch.max[row]) / scratch.sum[row];", "1;",
         "test_backward.py::test_rounding_of_lse_does_not_show[cpu-64-float32--300]"),
        ("out is not rescaled to the new maximum",
         "if (scratch.rescale[row] == 1) continue;", "continue;",
         "test_forward.py::test_is_close_to_exact[cpu-blocks-2]"),
        ("the bias is scaled, too",
         "x = scale * x + bias[key];", "x = scale * (x + bias[key]);",
         "test_forward.py::test_is_close_to_exact[cpu-bias-2]"),
        ("dropout without its factor",
         "pairs.kept_factor() / scratch.sum[row]", "T(1) / scratch.sum[row]",
         "test_forward.py::test_is_close_to_exact[cpu-dropout-2]"),
        ("a tile before the window needs no mask",
         "const bool masked = last_keys.first > tile || first_keys.end < tile_end;",
         "const bool masked = first_keys.end < tile_end;",
         "test_masks.py::test_many_tiles[cpu-window-float32]"),
        ("a fully masked row with a sink is not 0",
         "!scratch.seeing[row] ||", "",
         "test_sinks.py::test_what_other_rows_see_does_not_leak_into_a_row_without_keys[cpu]"),
        ("only one key head has work items",
         "const int64_t items = params.batch * params.num_kv_heads * blocks;",
         "const int64_t items = params.batch * blocks;",
         "test_forward.py::test_is_close_to_exact[cpu-full-2]"),
        ("all batch elements have the first one's lengths",
         "const Mask mask(params, batch);", "const Mask mask(params, 0);",
         "test_forward.py::test_is_close_to_exact[cpu-lengths of keys-2]"),
    ],
    "cpp/cpu_backward.h": [
        ("dlse has the wrong sign",
         "delta - static_cast<const T*>(params.dlse)[row]", "delta + static_cast<const T*>(params.dlse)[row]",
         "test_backward.py::test_is_close_to_exact[cpu-full-2]"),
        ("the soft cap's derivative is wrong",
         "gradient *= T(1) - tanh * tanh;", "gradient *= T(1) - tanh;",
         "test_backward.py::test_is_close_to_exact[cpu-soft cap-2]"),
        ("dq lacks the scale",
         "to[column] += scale * from[column];", "to[column] += from[column];",
         "test_backward.py::test_is_close_to_exact[cpu-scale-2]"),
        ("dk lacks the scale",
         "scratch.dk + key * width, scale, head_dim);", "scratch.dk + key * width, T(1), head_dim);",
         "test_backward.py::test_is_close_to_exact[cpu-scale-2]"),
        ("kept probabilities are not scaled up in ds",
         "kept[key] ? ds[key] * pairs.kept_factor() : T(0);", "kept[key] ? ds[key] : T(0);",
         "test_backward.py::test_is_close_to_exact[cpu-dropout-2]"),
        ("dv ignores dropout",
         "kept[key] ? p[key] * pairs.kept_factor() : T(0);", "p[key];",
         "test_backward.py::test_is_close_to_exact[cpu-dropout-2]"),
        ("a row whose logits are all -inf has probabilities",
         "if (row.lse == -std::numeric_limits<T>::infinity()) {", "if (row.lse == T(-1234)) {",
         "test_bias.py::test_a_row_of_minus_infinities_sees_no_key[cpu-fused]"),
        ("a row sees one key too many",
         "std::clamp<int64_t>(of_row.end - tile.first, first[row], keys)",
         "std::clamp<int64_t>(of_row.end - tile.first + 1, first[row], keys)",
         "test_masks.py::test_every_option[cpu-causal-float32]"),
        ("all key heads use the lse of the first one's group",
         "const GroupRows lse(static_cast<const T*>(params.lse), params, batch, kv_head, 1);",
         "const GroupRows lse(static_cast<const T*>(params.lse), params, batch, 0, 1);",
         "test_backward.py::test_is_close_to_exact[cpu-full-2]"),
        ("dq waits only for the previous tile",
         "for (int64_t before = first_unfinished_; before < tile_; ++before) {",
         "for (int64_t before = std::max(first_unfinished_, tile_ - 1); before < tile_; ++before) {",
         "test_edges.py::test_hidden_tiles_do_not_change_the_order"),
        ("dq does not wait for earlier tiles",
         "(std::memory_order_acquire)) <= block)", "(std::memory_order_acquire)) < 0)",
         "test_edges.py::test_hidden_tiles_do_not_change_the_order"),
    ],
    "cpp/cpu_tangent.h": [
        ("the tangent ignores how lse moves",
         "moved_out[column] -= moved * ToCompute(result[column]);", "(void)result;",
         "test_derivatives.py::test_tangent_is_close_to_exact[cpu-full-2]"),
        ("a key's tangent is multiplied by another direction's query",
         "LoadRows(key_rows(params.tk, d, head_dim)", "LoadRows(key_rows(params.tk, 0, head_dim)",
         "test_derivatives.py::test_jacobians[cpu-forward]"),
        ("the cap has no slope",
         "Store(p_slope + key, probability * (T(1) - tanh * tanh));", "Store(p_slope + key, probability);",
         "test_derivatives.py::test_tangent_is_close_to_exact[cpu-soft cap-2]"),
        ("dropout does not reach the product with v",
         "for (int64_t key = 0; key < keys; ++key) ts[key] *= factors[key];", "(void)factors;",
         "test_derivatives.py::test_tangent_is_close_to_exact[cpu-dropout-2]"),
        ("directions beyond the first work item are lost",
         "const int64_t first = item % parts * kTangentDirections;", "const int64_t first = 0;",
         "test_derivatives.py::test_jacobians[cpu-forward]"),
    ],
    "cpp/cpu_backward_tangent.h": [
        ("the cap has no second derivative",
         "(ts - row.tlse) * dp + tdp)) * slope + bend);", "(ts - row.tlse) * dp + tdp)) * slope);",
         "test_derivatives.py::test_second_order_is_close_to_exact[cpu-everything at once-tangent of gradient]"),
        ("dropout does not reach the derivative of dp",
         "for (T* x : {ds, tp}) {", "for (T* x : {ds}) {",
         "test_derivatives.py::test_second_order_is_close_to_exact[cpu-dropout, lengths, sinks-tangent of gradient]"),
        ("dropout does not reach the derivative of p",
         "for (T* x : {p, tp}) {", "for (T* x : {p}) {",
         "test_derivatives.py::test_second_order_is_close_to_exact[cpu-dropout, lengths, sinks-tangent of gradient]"),
        ("the derivative of delta lacks that of out",
         "T tdelta = RowProduct<T>(at(params.dout, primal_row), at(params.tout, row), width);",
         "T tdelta = 0;",
         "test_derivatives.py::test_second_order_is_close_to_exact[cpu-full-tangent of gradient]"),
        ("all directions have the first one's tlse",
         "static_cast<const T*>(params.tlse), direction, 1);", "static_cast<const T*>(params.tlse), 0, 1);",
         "test_derivatives.py::test_hessian[cpu-custom_vjp]"),
        ("a tile adds to tdq out of turn",
         "      turns.Wait(block);", "",
         "test_edges.py::test_second_derivatives_have_one_order_of_summation"),
    ],
    "cpp/cpu_backward_bias.h": [
        ("the gradient of slopes has the wrong sign",
         "params.alibi_slopes ? -pairs.Distance(", "params.alibi_slopes ? pairs.Distance(",
         "test_backward.py::test_is_close_to_exact[cpu-alibi-2]"),
        ("heads of a group read the wrong keys",
         "kv_head = head / group;", "kv_head = head % params.num_kv_heads;",
         "test_backward.py::test_is_close_to_exact[cpu-bias-2]"),
        ("one batch element's gradient replaces the sum",
         "b < (batch + 1) * batches_a_sum;", "b < batch * batches_a_sum + 1;",
         "test_bias.py::test_gradient_is_summed_over_broadcast_axes[cpu-1NTS]"),
        ("sums of blocks stop a row early",
         "ii < std::min(i + params.dbias_rows, rows);", "ii < std::min(i + params.dbias_rows, rows) - 1;",
         "test_bias.py::test_gradient_is_summed_over_broadcast_axes[cpu-B11S]"),
    ],
}
# fmt: on

FAULTS = [
    Fault(name, file, text, replacement, tuple(tests))
    for file, rows in _TABLE.items()
    for name, text, replacement, *tests in rows
]


def places(fault: Fault) -> int:
    """How often the text occurs in its file in this checkout."""
    return (ROOT / fault.file).read_text().count(fault.text)


def table() -> str:
    """The table of docs/testing.md."""
    groups: dict[tuple[str, str], list[str]] = {}
    for fault in FAULTS:
        found_by = ", ".join(dict.fromkeys(f"`{test.split('::')[0]}`" for test in fault.tests))
        groups.setdefault((fault.file, found_by), []).append(fault.name)
    rows = [f"| `{file}` | {found_by} | {'; '.join(names)} |" for (file, found_by), names in groups.items()]
    return "\n".join(["| in | found by | what is wrong |", "| --- | --- | --- |", *rows])


# ---- The copy -------------------------------------------------------------------------------------------------

# The units of the CPU kernels are alike, so the copy compiles only the baseline; these replace the others.
_OTHER_SETS = {
    pathlib.Path(f"cpp/cpu_{name.lower()}.cc"): (
        '#include "cpu_kernels.h"\n#if defined(__x86_64__)\n'
        f"const jax_flash::cpu::Kernels jax_flash::cpu::k{name}Kernels = {{}};\n#endif\n"
    )
    for name in ("Avx2", "Avx512")
}
CHECKOUT, LIBRARY, SITE, STARTUP = (FOLDER / name for name in ("checkout", "library", "site", "startup"))
# Python runs this file first. An editable install would find the package in this checkout, not in the copy.
_SITECUSTOMIZE = """
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in type(finder).__module__]
"""


def _environment(*paths: pathlib.Path) -> dict[str, str]:
    """The environment of a child process: where it finds programs, package and library; JAX without a GPU."""
    return os.environ | {
        "PATH": os.pathsep.join([str(pathlib.Path(sys.executable).parent), os.environ.get("PATH", "")]),
        "PYTHONPATH": os.pathsep.join(map(str, (*paths, STARTUP))),
        "PYTHONSAFEPATH": "1",
        "PYTHONDONTWRITEBYTECODE": "1",  # bytecode of a file that changes twice in a second would be stale
        "JAX_PLATFORMS": "cpu",
        "JAX_FLASH_INSTRUCTION_SET": "baseline",
    }


def _copy_checkout() -> None:
    """Updates the copy. Unchanged files keep their times, so that they are not compiled again."""

    def files(root: pathlib.Path) -> set[pathlib.Path]:
        found = set()
        for folder, folders, names in os.walk(root):
            folders[:] = [x for x in folders if not x.startswith(".") and x not in ("build", "__pycache__")]
            found |= {pathlib.Path(folder, name).relative_to(root) for name in names}
        return found

    for path in files(CHECKOUT) - files(ROOT):
        (CHECKOUT / path).unlink()
    for path in files(ROOT):
        copy = CHECKOUT / path
        content = _OTHER_SETS[path].encode() if path in _OTHER_SETS else (ROOT / path).read_bytes()
        if not copy.exists() or copy.read_bytes() != content:
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(content)


def _make_site() -> None:
    """Makes a folder with the package's metadata and module; its library and its Python files come from the copy."""
    STARTUP.mkdir(exist_ok=True)
    (STARTUP / "sitecustomize.py").write_text(_SITECUSTOMIZE)
    installed = importlib.metadata.distribution("jax_flash")
    (metadata,) = [file.parent for file in installed.files or () if file.name == "METADATA"]
    shutil.copytree(installed.locate_file(metadata), SITE / metadata, dirs_exist_ok=True)
    (SITE / "jax_flash").mkdir(exist_ok=True)
    for module in pathlib.Path(installed.locate_file("jax_flash")).glob("_native.*"):
        shutil.copyfile(module, SITE / "jax_flash" / module.name)


def _run(
    command: list[object], environment: dict[str, str], limit: float | None = None
) -> tuple[int | None, str]:
    """The exit status, or None after a timeout, and the output."""
    try:
        done = subprocess.run(
            [str(part) for part in command], cwd=CHECKOUT, env=environment, timeout=limit, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return None, ""
    return done.returncode, done.stdout


def _configure() -> None:
    import jax

    # -O1 compiles in half the time of -O3, and each fault has few tests.
    command = [
        "cmake",
        "-S",
        CHECKOUT / "cpp",
        "-B",
        LIBRARY,
        "-DCMAKE_BUILD_TYPE=None",
        "-DCMAKE_CXX_FLAGS=-O1",
    ]
    command += [f"-DJAX_FLASH_JAXLIB_INCLUDE={jax.ffi.include_dir()}", "-DJAX_FLASH_NVCC="]
    environment = _environment()
    if not (LIBRARY / "CMakeCache.txt").exists() and shutil.which("ninja", path=environment["PATH"]):
        command += ["-G", "Ninja"]
    status, printed = _run(command, environment)
    if status != 0:
        sys.exit(printed)


def _build() -> tuple[bool, str]:
    """Compiles what has changed and installs it."""
    status, printed = _run(["cmake", "--build", LIBRARY, "--parallel"], _environment())
    if status == 0:
        # A new file, not new bytes in the old one, which a process may have loaded.
        new = SITE / "jax_flash" / "new"
        shutil.copyfile(LIBRARY / "libjax_flash.so", new)
        new.rename(SITE / "jax_flash" / "libjax_flash.so")
    return status == 0, printed


# ---- The tests ------------------------------------------------------------------------------------------------


def _pytest(
    tests: Iterable[str], compiled: bool, *options: str, limit: float | None = None
) -> tuple[int | None, str]:
    """Runs tests of the copy, with the library compiled here or the installed one."""
    paths = (CHECKOUT, SITE) if compiled else (CHECKOUT,)
    nodes = [f"tests/{test}" for test in tests]
    command = [sys.executable, "-m", "pytest", "--all", "-q", "-p", "no:cacheprovider", *options, *nodes]
    return _run(command, _environment(*paths), limit)


def _passing(tests: Iterable[str], compiled: bool) -> set[str]:
    """The tests with a passing case; a failing test ends the program."""
    tests = list(dict.fromkeys(tests))
    report = FOLDER / "report.xml"
    report.unlink(missing_ok=True)
    status, printed = _pytest(tests, compiled, f"--junitxml={report}") if tests else (0, "")
    if status != 0 and not compiled and "native library was not built from the sources" in printed:
        return set()
    if status != 0:
        sys.exit(f"{printed}\nThese tests fail without a fault, or do not exist.")
    outcomes: dict[str, set[str]] = {}
    for case in ET.parse(report).iter("testcase") if tests else ():
        outcome = "skipped" if case.find("skipped") is not None else "passed"
        node = f"{case.attrib['classname'].rpartition('.')[2]}.py::{case.attrib['name']}"
        for name in (node, node.partition("[")[0]):
            outcomes.setdefault(name, set()).add(outcome)
    return {test for test in tests if "passed" in outcomes.get(test, ())}


def _is_compiled(fault: Fault) -> bool:
    """Whether the fault is in a source of the library without CUDA."""
    return fault.file.startswith("cpp/") and not fault.file.endswith(".sh")


def _plant(fault: Fault, compiled: bool) -> str:
    """Plants a fault and returns what catches it, or that a test missed it."""
    path = CHECKOUT / fault.file
    right = path.read_text()
    try:
        path.write_text(right.replace(fault.text, fault.replacement))
        if _is_compiled(fault) and not _build()[0]:
            return "the compiler"
        status, printed = _pytest(fault.tests, compiled, "--tb=no", limit=_LONGEST)
    finally:
        path.write_text(right)
    failed = [
        line.split(" - ")[0].removeprefix("FAILED tests/")
        for line in printed.splitlines()
        if line.startswith("FAILED ")
    ]
    missing = [test for test in fault.tests if not any(x == test or x.startswith(f"{test}[") for x in failed)]
    match status:
        case None:
            return "a test that hangs"
        case 0 | 1 | 5 if missing:
            return f"{_MISSED} by {', '.join(missing)}"
        case 1:
            return ", ".join(dict.fromkeys(x.partition("[")[0] for x in failed))
        case _ if status < 0:
            return f"a crash ({-status})"
        case _:
            return "an error of import or collection"


def main() -> int:
    """Plants the selected faults and returns the number of missed ones."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", metavar="NAME", help="faults with NAME in their name or file")
    parser.add_argument("--list", action="store_true", help="print the faults")
    parser.add_argument("--table", action="store_true", help="print the table of docs/testing.md")
    options = parser.parse_args()
    faults = [fault for fault in FAULTS if (options.only or "") in f"{fault.name} {fault.file}"]
    if options.table:
        print(table())
        return 0
    if options.list:
        for fault in faults:
            print(
                f"{fault.name} ({fault.file})\n    {fault.text}\n    {fault.replacement}\n    {fault.tests}"
            )
        return 0
    wrong = [
        f"{fault.name}: its text occurs {places(fault)} times in {fault.file}"
        for fault in faults
        if places(fault) != 1
    ]
    if wrong or not faults:
        sys.exit("\n".join(wrong) or "No fault matches.")

    start = time.monotonic()
    CHECKOUT.mkdir(parents=True, exist_ok=True)
    _copy_checkout()
    _make_site()
    _configure()
    built, printed = _build()
    if not built:
        sys.exit(printed)
    print(f"{time.monotonic() - start:.0f} s: the library is built; tests without a fault", flush=True)
    # Tests that need CUDA's registrations are skipped with the compiled library, but not with an installed CUDA one.
    tests = [test for fault in faults for test in fault.tests]
    with_compiled = _passing(tests, compiled=True)
    with_installed = _passing(set(tests) - with_compiled, compiled=False)
    print(f"{time.monotonic() - start:.0f} s: they pass\n", flush=True)

    missed, skipped, done = 0, 0, 0
    for fault in sorted(faults, key=_is_compiled):  # those that need no compilation come first
        began = time.monotonic()
        compiled = _is_compiled(fault) or set(fault.tests) <= with_compiled
        if not set(fault.tests) <= (with_compiled if compiled else with_installed):
            verdict, skipped = (
                "not run: its tests need a library with CUDA installed from these sources",
                skipped + 1,
            )
        else:
            verdict, done = _plant(fault, compiled), done + 1
            missed += verdict.startswith(_MISSED)
        seconds = time.monotonic() - began
        print(f"{seconds:4.0f} s  {fault.file:26} {fault.name:66} {verdict}", flush=True)
    (SITE / "jax_flash" / "libjax_flash.so").unlink()  # it contains the last fault
    print(f"\n{done - missed} of {done} caught in {(time.monotonic() - start) / 60:.0f} minutes", end="")
    print(f"; {skipped} not run" if skipped else "")
    return missed


if __name__ == "__main__":
    sys.exit(main() != 0)

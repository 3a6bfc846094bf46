"""One of two processes with two CPU devices each: runs every strategy over all four, beside exact results.

    python tests/one_of_two_processes.py ADDRESS 0 & python tests/one_of_two_processes.py ADDRESS 1

`test_context_parallel.py` runs it. pytest does not collect this file.
"""

import sys

import harness
import jax
import numpy as np
from cases import PARTS
from jax.sharding import Mesh
from strategies import SHARDED_JIT, fitted, run
from test_context_parallel import OPTIONS, case_of

# A row has many options, because most of the time is XLA's, which compiles a program for each row.
_PADDED = {
    name: x
    for part in ("lengths of queries", "lengths of keys", "alibi", "dropout")
    for name, x in PARTS[part].items()
}
_MANY = "causal and all that is in no order"
_ROWS = {
    (_MANY, "zigzag"): OPTIONS[_MANY],
    (_MANY, SHARDED_JIT): OPTIONS[_MANY],
    ("padded", "contiguous"): (_PADDED, dict(forward_mode=True)),
    ("padded", SHARDED_JIT): (_PADDED, dict(forward_mode=True)),
    ("short window", SHARDED_JIT): OPTIONS["short window"],
}


def main() -> None:
    address, process = sys.argv[1], int(sys.argv[2])
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    jax.config.update("jax_disable_most_optimizations", True)  # as for most tests: conftest.py
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, num_processes=2, process_id=process)
    mesh = Mesh(np.array(jax.devices()), ("sequence",))
    for (name, strategy), (options, more) in _ROWS.items():
        print(f"{name}, {strategy}", flush=True)
        case = fitted(case_of(name, options), mesh.size, strategy)
        got, gradients = run(case, "float32", mesh, strategy, **more)
        harness.check(got, case, "float32", "float32", is_rounded=True)
        harness.check_operands(gradients, case, "float32", "float32")
    print("all are close")


if __name__ == "__main__":
    main()

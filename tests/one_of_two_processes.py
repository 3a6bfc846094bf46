"""One of two processes with two CPU devices each: runs every strategy over all four, beside exact results.

    python tests/one_of_two_processes.py ADDRESS 0 & python tests/one_of_two_processes.py ADDRESS 1

`test_context_parallel.py` runs it. pytest does not collect this file.
"""

import itertools
import sys

import harness
import jax
import numpy as np
from jax.sharding import Mesh
from strategies import SHARDED_JIT, STRATEGIES, fitted, run
from test_context_parallel import OPTIONS, case_of

# Names of test_context_parallel.OPTIONS, and strategies.
_ROWS = [
    *itertools.product(("causal", "bias"), STRATEGIES),
    ("short window", SHARDED_JIT),
]


def main() -> None:
    address, process = sys.argv[1], int(sys.argv[2])
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, num_processes=2, process_id=process)
    mesh = Mesh(np.array(jax.devices()), ("sequence",))
    for name, strategy in _ROWS:
        print(f"{name}, {strategy}", flush=True)
        case = fitted(case_of(name, OPTIONS[name][0]), mesh.size, strategy)
        got, gradients = run(case, "float32", mesh, strategy)
        harness.check(got, case, "float32", "float32", is_rounded=True)
        harness.check_operands(gradients, case, "float32", "float32")
    print("all are close")


if __name__ == "__main__":
    main()

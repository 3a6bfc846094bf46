"""`python -m jax_flash`: see docs/command_line.md."""

import sys

from ._command_line.main import main

if __name__ == "__main__":
    sys.exit(main())

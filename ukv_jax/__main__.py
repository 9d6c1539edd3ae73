"""`python -m ukv_jax`."""

import sys

from ukv_jax.cli import main

if __name__ == "__main__":
    sys.exit(main())

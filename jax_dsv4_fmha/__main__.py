"""python -m jax_dsv4_fmha info | check | explain | bench"""

import sys

from ._cli import main

if __name__ == "__main__":
    sys.exit(main())

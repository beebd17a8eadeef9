"""The command ``python -m cuflash``: see ``python -m cuflash --help``."""

import sys

from cuflash._cli import main

if __name__ == "__main__":
    sys.exit(main())

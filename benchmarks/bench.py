"""Measure, and write what was found to ``benchmarks/results``: see `python -m cuflash bench`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.command import main

if __name__ == "__main__":
    sys.exit(main(results=Path(__file__).parent / "results"))

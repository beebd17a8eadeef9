"""Write cuflash/tiles.json, the measured tiles that are shipped, from the committed sweeps.

python tools/shipped_tiles.py [--check]

A sweep's best replaces the tile of cuflash/_select.py only if the last comparison, all in turns,
found it faster by more than MARGIN: two runs of one sweep differ by as much. Run it, too, after a
row of those tables changed.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from cuflash import _tuned, tuning  # noqa: E402
from cuflash.tuning._table import best_row  # noqa: E402

SWEEPS = ROOT / "benchmarks" / "sweeps"
TABLE = ROOT / "cuflash" / "tiles.json"
MARGIN = 0.02


def rows() -> list[_tuned.Row]:
    """One row for each sweep, in the order of their keys."""
    found: dict[_tuned.Key, _tuned.Row] = {}
    for path in sorted(SWEEPS.glob("*.jsonl")):
        row = best_row(tuning.load(path), MARGIN)
        if row.key in found:
            raise SystemExit(f"{path}: another sweep has a row for {row.key}")
        found[row.key] = row
    return [found[key] for key in sorted(found)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing, fail if stale")
    arguments = parser.parse_args()
    if arguments.check:
        return int(rows() != _tuned.read(TABLE))
    _tuned.write(TABLE, rows())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

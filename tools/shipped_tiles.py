"""Write cuflash/tiles.json, the measured tiles that are shipped, from the committed sweeps.

python tools/shipped_tiles.py [--check]

A sweep's best replaces the tile of cuflash/_select*.py only if the last comparison, all in turns,
found it faster by more than MARGIN: two runs of one sweep differ by as much. And only if all sweeps
of its problem, of at least two lengths, agree on it, since a row holds for every length, and each
compared it with the tile of those tables, or with itself where it was shipped by then. Run it, too,
after a row of those tables changed. A tile that none of its sweeps timed is left out.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from cuflash import _tuned, tuning  # noqa: E402
from cuflash.tuning._table import best_rows, table_rows  # noqa: E402

SWEEPS = ROOT / "benchmarks" / "sweeps"
TABLE = ROOT / "cuflash" / "tiles.json"
MARGIN = 0.02


def rows() -> list[_tuned.Row]:
    """One row for each kernel and problem that was swept, in the order of their keys."""
    swept: dict[_tuned.Key, list[tuning.Sweep]] = {}
    for path in sorted(SWEEPS.glob("*.jsonl")):
        found = tuning.load(path)
        for row in table_rows(found):
            swept.setdefault(row.key, []).append(found)
    found = [row_of(key, swept[key]) for key in sorted(swept)]
    return [row for row in found if any(was_timed(row, sweep) for sweep in swept[row.key])]


def was_timed(row: _tuned.Row, sweep: tuning.Sweep) -> bool:
    """Whether a sweep timed the tile of a row, or all others in turns with it."""
    tile = dict(row.values)
    return tile == sweep.default_values or any(tile == found["values"] for found in sweep.timed)


def row_of(key: _tuned.Key, sweeps: list[tuning.Sweep]) -> _tuned.Row:
    """The tile that all of them found faster, at several lengths, or that of the tables."""
    of_tables = {row.key: row for row in table_rows(sweeps[0])}[key]
    faster = [{row.key: row for row in best_rows(found, MARGIN)}[key] for found in sweeps]
    tiles = {row.values for row in faster}
    compared = {tuple(found.default_values.items()) for found in sweeps}
    lengths = {found.workload.seqlen_k for found in sweeps}
    agreed = len(tiles) == 1 and compared <= {*tiles, of_tables.values} and len(lengths) > 1
    return faster[0] if agreed else of_tables


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

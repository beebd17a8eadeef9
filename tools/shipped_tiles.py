"""Write cuflash/_select/tiles.json, the measured tiles that are shipped, from the committed sweeps.

python tools/shipped_tiles.py [--check]

A tile replaces that of cuflash/_select/*.py only if all sweeps of a problem, of at least two
lengths, timed both and found it faster by more than MARGIN: two runs of one sweep differ by as
much. It spills nothing, waits for no product, and gives a block of threads no more rows than the
tables do: a row holds for every call, and where there are few rows, larger tiles leave
multiprocessors without one. Run it, too, after a row of those tables changed. A tile that none of
its sweeps timed is left out.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from cuflash import tuning  # noqa: E402
from cuflash._select import measured  # noqa: E402
from cuflash.tuning._table import table_rows  # noqa: E402

SWEEPS = ROOT / "benchmarks" / "sweeps"
TABLE = ROOT / "cuflash" / "_select" / "tiles.json"
MARGIN = 0.02
#: Kernels whose blocks of threads own rows of keys; those of the others own queries.
OWNERS_OF_KEYS = ("backward_sm90", "backward_pair_sm90", "backward_dkv")
Tile = tuple[tuple[str, int], ...]


def rows() -> list[measured.Row]:
    """One row for each kernel and problem that was swept, in the order of their keys."""
    swept: dict[measured.Key, list[tuning.Sweep]] = {}
    for path in sorted(SWEEPS.glob("*.jsonl")):
        found = tuning.load(path)
        for row in table_rows(found):
            swept.setdefault(row.key, []).append(found)
    found = [row_of(key, swept[key]) for key in sorted(swept)]
    return [row for row in found if any(was_timed(row, sweep) for sweep in swept[row.key])]


def was_timed(row: measured.Row, sweep: tuning.Sweep) -> bool:
    """Whether a sweep timed the tile of a row, or all others in turns with it."""
    return row.values in relative_times(sweep)


def row_of(key: measured.Key, sweeps: list[tuning.Sweep]) -> measured.Row:
    """The tile that all of them found faster than that of the tables, or that one."""
    own = {row.key: row for row in table_rows(sweeps[0])}[key]
    times = [relative_times(found) for found in sweeps]
    lengths = {found.workload.seqlen_k for found in sweeps}
    if len(lengths) < 2 or not all(own.values in found for found in times):
        return own
    slowest = {own.values: 1.0} | {
        tile: max(found[tile] / found[own.values] for found in times)
        for tile in set.intersection(*map(set, times))
        if all(serves_every_call(tile, own.values, found) for found in sweeps)
    }
    best = min(slowest, key=lambda tile: (slowest[tile], tile))
    return own._replace(values=best) if slowest[best] * (1 + MARGIN) <= 1 else own


def relative_times(sweep: tuning.Sweep) -> dict[Tile, float]:
    """Times of tiles over that of the one that all were compared with, those together at last."""
    keys = {row["key"]: as_tile(row["values"]) for row in sweep.timed}
    times = {keys[row["key"]]: float(row["relative"]) for row in sweep.timed}
    for final in sweep.finals[-1:]:
        times |= {keys[key]: ms / final["default_ms"] for key, ms in final["ms"].items()}
        for key in final.get("left_out", {}):
            del times[keys[key]]
    return times | {as_tile(sweep.default_values): 1.0}


def serves_every_call(tile: Tile, of_tables: Tile, sweep: tuning.Sweep) -> bool:
    """Whether a tile leaves registers and processors as those of the tables do."""
    owned = "block_n" if sweep.kernel.startswith(OWNERS_OF_KEYS) else "block_m"
    if dict(tile)[owned] > dict(of_tables)[owned]:
        return False
    return not any(
        row["facts"]["spill_bytes"] or row["facts"]["warnings"]
        for row in sweep.timed
        if as_tile(row["values"]) == tile
    )


def as_tile(values: Mapping[str, int]) -> Tile:
    """Values by name, as a row has them."""
    return tuple(values.items())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing, fail if stale")
    arguments = parser.parse_args()
    if arguments.check:
        return int(rows() != measured.read(TABLE))
    measured.write(TABLE, rows())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

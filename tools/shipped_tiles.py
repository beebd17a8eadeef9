"""Do the tables of cuflash/_kernels have the tiles that the committed sweeps found fastest?

python tools/shipped_tiles.py

Prints every row of a table that a swept tile should replace, and fails if there is one. A tile
replaces another only if all sweeps of a problem, of at least two lengths, timed both and found it
faster by more than MARGIN: two runs of one sweep differ by as much. It must also not spill, have no
ptxas warning about serialised wgmma, and give a thread block no more rows than the table does. A
row is used for every call, and in calls with few rows larger tiles leave SMs idle.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from cuflash import tuning  # noqa: E402
from cuflash._select import measured  # noqa: E402
from cuflash._select.hardware import typical  # noqa: E402
from cuflash.tuning._kernels import tile_of  # noqa: E402
from cuflash.tuning._space import default_configs  # noqa: E402
from cuflash.tuning._table import table_rows  # noqa: E402

SWEEPS = ROOT / "benchmarks" / "sweeps"
MARGIN = 0.02
#: Kernels whose thread blocks own rows of keys. Thread blocks of other kernels own queries.
OWNERS_OF_KEYS = ("backward_sm90", "backward_pair_sm90", "backward_dkv")
Tile = tuple[tuple[str, int], ...]


def rows() -> list[measured.Row]:
    """One row for each swept kernel and problem, in the order of their keys."""
    swept: dict[measured.Key, list[tuning.Sweep]] = {}
    for path in sorted(SWEEPS.glob("*.jsonl")):
        found = tuning.load(path)
        for row in table_rows(found):
            swept.setdefault(row.key, []).append(found)
    found = [row_of(key, swept[key]) for key in sorted(swept)]
    return [row for row in found if any(was_timed(row, sweep) for sweep in swept[row.key])]


def was_timed(row: measured.Row, sweep: tuning.Sweep) -> bool:
    """Whether a sweep timed the tile of a row, or compared all others with it."""
    return row.values in relative_times(sweep)


def row_of(key: measured.Key, sweeps: list[tuning.Sweep]) -> measured.Row:
    """The tile that all sweeps found faster than the table's tile, else the table's tile."""
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
    """Times of tiles relative to the sweep's default; the final comparison overrides others."""
    keys = {row["key"]: as_tile(row["values"]) for row in sweep.timed}
    times = {keys[row["key"]]: float(row["relative"]) for row in sweep.timed}
    for final in sweep.finals[-1:]:
        times |= {keys[key]: ms / final["default_ms"] for key, ms in final["ms"].items()}
        for key in final.get("left_out", {}):
            del times[keys[key]]
    return times | {as_tile(sweep.default_values): 1.0}


def serves_every_call(tile: Tile, of_tables: Tile, sweep: tuning.Sweep) -> bool:
    """Whether a tile owns no more rows than the table's tile, without spills and warnings."""
    owned = "block_n" if sweep.kernel.startswith(OWNERS_OF_KEYS) else "block_m"
    if dict(tile)[owned] > dict(of_tables)[owned]:
        return False
    return not any(
        row["facts"]["spill_bytes"] or row["facts"]["warnings"]
        for row in sweep.timed
        if as_tile(row["values"]) == tile
    )


def as_tile(values: Mapping[str, int]) -> Tile:
    """Values by name, in the form that rows have."""
    return tuple(values.items())


def disagreements() -> list[str]:
    """Lines about swept tiles that are clearly faster than the table's."""
    best = {row.key: row for row in rows()}
    found = {}
    for path in sorted(SWEEPS.glob("*.jsonl")):
        sweep = tuning.load(path)
        device = typical(sweep.header["arch"])  # tables have rows for the measured device
        configs = default_configs(sweep.workload, sweep.kernel, device)
        for row, config in zip(table_rows(sweep), configs, strict=True):
            swept = best.get(row.key)
            if swept is not None and swept.values != as_tile(tile_of(config)):
                found[row.key] = f"{row.key}: {dict(swept.values)}, not {tile_of(config)}"
    return list(found.values())


def main() -> int:
    found = disagreements()
    print("\n".join(found) or f"The tables have the best tiles of {len(rows())} problems.")
    return bool(found)


if __name__ == "__main__":
    raise SystemExit(main())

"""How long does a tile of packed sequences take, compared with a tile of a dense call?"""

from __future__ import annotations

from dataclasses import replace

from benchmarks.cells import Run, measure_cell
from benchmarks.report import shape_text, workload_of
from benchmarks.shapes import TOKENS, square
from cuflash.tuning import Workload

SEQLENS = (4096, 3100, 2048, 1777, 1024, 1024, 900, 777, 512, 300, 256, 200, 128, 100, 77, 65)
#: 2379 tiles of 128 queries and 128 keys per head, and a dense call with as many tiles.
PACKED = Workload(1, 16, 16, TOKENS, TOKENS, 128, 128, "bfloat16", seqlens=SEQLENS)
AS_MANY_TILES = replace(PACKED, seqlen_q=39 * 128, seqlen_k=61 * 128, seqlens=())


def tiles(work: Workload) -> int:
    """Number of tiles of 128 queries and 128 keys in a call without a mask."""
    if work.seqlens:
        return sum(tiles(alone) for alone in work.sequences())
    return work.batch * work.heads_q * -(-work.seqlen_q // 128) * -(-work.seqlen_k // 128)


def measure_packed(run: Run) -> None:
    """Measure both, and the nearest training shape; note the time of a tile."""
    first = len(run.rows)
    for dtype in run.dtypes:
        for work in (PACKED, AS_MANY_TILES, square(4, 16, 4096, 128, causal=False)):
            measure_cell(run, replace(work, dtype=dtype), "fwd")
    for row in run.rows[first:]:
        ns = 1e6 * row["ms"] / tiles(workload_of(row))
        run.note(f"{ns:.2f} ns a tile: {row['impl']} {row['dtype']} {shape_text(row)}")

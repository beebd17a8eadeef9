"""How near does a forward of few queries come to the time that a copy of its keys would take?"""

from __future__ import annotations

import statistics
from dataclasses import replace

from benchmarks.cells import Run, measure_cell
from benchmarks.report import shape_text, workload_of
from cuflash._timing.clock import DeviceClock
from cuflash.tuning import Workload

#: batch, query heads, heads of keys, queries, keys
GENERATED = (
    (16, 32, 8, 1, 8192),
    (64, 32, 8, 1, 4096),
    (1, 32, 32, 1, 65_536),
    (1, 32, 8, 1, 131_072),
    (1, 32, 8, 4, 131_072),
)
#: Queries over many keys, as of a Perceiver, of which a tile has more than few.
CROSS = ((1, 8, 8, 512, 50_000), (1, 8, 8, 77, 4096))
SHAPES = [
    Workload(1, 8, 8, 1, 512, 64, 64, "bfloat16"),
    *(Workload(*shape, 64, 64, "bfloat16") for shape in CROSS),
    *(Workload(*shape, d, d, "bfloat16") for d in (64, 128, 256) for shape in GENERATED),
]
_COPIED_BYTES = 1 << 30
_ROUNDS = 15


def measure_decode(run: Run) -> None:
    """Measure every shape; note how its bytes over time compare with a copy's."""
    for dtype in run.dtypes:
        first = len(run.rows)
        for work in SHAPES:
            measure_cell(run, replace(work, dtype=dtype), "fwd")
        if not isinstance(run.clock, DeviceClock):
            return
        copied = copied_bytes_per_ms(run.clock)
        run.note(f"a copy of 1 GiB moves {copied / 1e9:.2f} TB/s")
        for row in run.rows[first:]:
            work = workload_of(row)
            share = work.input_bytes("fwd") / row["ms"] / copied
            run.note(f"{share:.2f} of a copy: {row['impl']} {dtype} {shape_text(row)}")


def copied_bytes_per_ms(clock: DeviceClock) -> float:
    """Bytes that a copy in device memory reads and writes."""
    source = clock.cupy.empty(_COPIED_BYTES, "u1")
    target = clock.cupy.empty_like(source)

    def copy() -> None:
        target.data.copy_from_device_async(source.data, _COPIED_BYTES, clock.stream)

    with clock.scope():
        copy()
        ms = statistics.median(clock.once(copy) for _ in range(_ROUNDS))
    return 2 * _COPIED_BYTES / ms

"""How many bytes do forwards of several lengths and tiles move, by the model and by counters?"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from benchmarks import profiler
from cuflash._cli import io_model
from cuflash._kernels.config import KernelConfig
from cuflash._select.choose import PORTABLE, choose
from cuflash._select.hardware import Hardware, present, typical
from cuflash.tuning._kernels import tile_of, with_tile
from cuflash.tuning._workload import Workload

SEQLENS = (512, 1024, 2048, 4096, 8192, 16_384)
_WORK = Workload(1, 16, 16, 1024, 1024, 128, 128, "bfloat16")
#: Tiles for each kernel; other parameters are chosen so that the tile fits into shared memory.
_TILES: dict[str, tuple[dict[str, int], ...]] = {
    "forward_sm90": ({}, {"block_m": 192, "block_n": 80}),
    "forward_sm80": ({"block_m": 32, "num_warps": 2}, {"block_m": 64}, {"block_m": 128}),
}


def rows(*, causal: bool = False) -> list[dict[str, Any]]:
    """One row for each length and tile; on a device with ncu's counters."""
    hardware = present()
    planned = hardware or typical("sm_90")
    cells = [
        (replace(_WORK, seqlen_q=n, seqlen_k=n, causal=causal), config)
        for n in SEQLENS
        for config in configs(planned)
    ]
    found = [_row(work, config) for work, config in cells]
    if hardware is not None:
        counted = profiler.moved_bytes([(work, tile_of(config)) for work, config in cells])
        for row, own in zip(found, counted, strict=True):
            row["measured"] = own
    return found


def table(rows: list[dict[str, Any]]) -> str:
    """Lines with the predictions of the model, and counters relative to them."""
    lines = [
        f"{'seqlen':>6}  {'kernel':<13} {'tile':<9} {'from L2':>12}  counted / model: "
        f"{', '.join(io_model.PREDICTED)}"
    ]
    for row in rows:
        own = row.get("measured", {})
        shares = [f"{own[name] / row[of]:.3f}" for name, of in io_model.PREDICTED.items() if own]
        tile = f"{row['block_m']}x{row['block_n']}"
        lines.append(
            f"{row['seqlen']:>6}  {row['kernel']:<13} {tile:<9} {row['loaded'] / 1e6:>9.1f} MB  "
            f"{', '.join(shares) or 'not counted'}"
        )
    return "\n".join(lines)


def configs(hardware: Hardware) -> list[KernelConfig]:
    """The tiles that are compared on a device."""
    found = []
    for kernel, tiles in _TILES.items():
        default: Any = choose(_WORK.problem(), hardware, only=PORTABLE | {kernel})[-1].config
        if default.kernel == kernel:
            found += [with_tile(default, tile) for tile in tiles]
    return found


def _row(work: Workload, config: KernelConfig) -> dict[str, Any]:
    tile = config.block_m, config.block_n, config.smem_bytes
    model = io_model.forward(work, *tile, boxes=config.kernel == "forward_sm90")
    return {
        "seqlen": work.seqlen_q,
        "kernel": config.kernel,
        "block_m": config.block_m,
        "block_n": config.block_n,
        "read_once": model.read_once,
        "loaded": model.loaded,
        "stored": model.stored,
        "unfused": io_model.unfused(work),
    }

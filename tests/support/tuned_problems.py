"""A problem for each kernel with tiles."""

from __future__ import annotations

from dataclasses import replace

from cuflash import tuning
from cuflash.tuning import _kernels

WORK = tuning.Workload(2, 8, 8, 1024, 1024, 128, 128, "bfloat16")
PROBLEMS = {
    **dict.fromkeys(_kernels.KERNELS, WORK),
    **{
        name: replace(WORK, dtype="float32")
        for name in _kernels.KERNELS
        if "tf32" in name
    },
    **{
        name: replace(WORK, dtype="float64")
        for name in _kernels.KERNELS
        if name.endswith("_partners")
    },
    "backward_pair_sm90": replace(WORK, head_dim=256, head_dim_v=256),
    **{
        name: replace(WORK, dtype="float32", head_dim=3, head_dim_v=5)
        for name in _kernels.KERNELS
        if name.endswith("_narrow")
    },
}  # fmt: skip

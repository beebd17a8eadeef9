"""Which bytes does a call move, by the IO model and by the device's counters?"""

from __future__ import annotations

from typing import Any

from cuflash._ahead import kernels_of
from cuflash._cli import io_gradient, io_model, profiler
from cuflash._select.hardware import wanted
from cuflash.tuning._kernels import kernel_name
from cuflash.tuning._workload import Workload


def predicted(work: Workload, *, arch: str | None = None, backward: bool = False) -> dict[str, Any]:
    """Bytes of the forward, and of each kernel of the gradient, in values that JSON knows."""
    configs = kernels_of(work, wanted(arch), backward=backward)
    forward: Any = next(config for config in configs if config.computes == "out")
    io_gradient.refuse_cuda_cores(forward)
    model = io_model.forward(
        work, forward.block_m, forward.block_n, forward.smem_bytes,
        boxes=kernel_name(forward) == "forward_sm90", column_parts=forward.column_parts,
    )  # fmt: skip
    found: dict[str, Any] = {
        "io": {
            "read_once": model.read_once,
            "loaded": model.loaded,
            "stored": model.stored,
            "unfused": io_model.unfused(work),
            "asymptotic": model.asymptotic,
        }
    }
    if backward:
        of_gradient = configs[configs.index(forward) + 1 :]
        parts = [io_gradient.gradient(work, config) for config in of_gradient]
        found["io_gradient"] = {
            "kernels": [
                {"kernel": kernel_name(config), **part._asdict()}
                for config, part in zip(of_gradient, parts, strict=True)
            ],
            "sum": io_gradient.together(parts)._asdict()
            | {"unfused": io_model.unfused(work, "bwd")},
        }
    return found


def count(work: Workload, found: dict[str, Any]) -> None:
    """Put what the device counts beside what :func:`predicted` has found; may be ``NotProfiled``.

    That of the gradient is of the same kernels, one by one, and their sum.
    """
    (found["io"]["measured"],) = profiler.moved_bytes([(work, None)])
    if "io_gradient" not in found:
        return
    own = found["io_gradient"]
    counted = profiler.gradient_bytes(work, [row["kernel"] for row in own["kernels"]])
    for row, counters in zip(own["kernels"], counted, strict=True):
        row["measured"] = counters
    own["sum"]["measured"] = {
        name: sum(counters[name] for counters in counted) for name in profiler.METRICS
    }

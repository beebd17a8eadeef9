"""Which kernels run for a problem, why these, and what bounds their time?"""

from __future__ import annotations

import operator
from typing import Any

from cuflash._ahead import kernels_of
from cuflash._cli import io_model
from cuflash._select import hardware as select_hardware
from cuflash._select import measured as select_measured
from cuflash._select.choose import why_portable
from cuflash._select.hardware import Hardware
from cuflash.tuning._facts import Facts, compile_all
from cuflash.tuning._kernels import tile_of
from cuflash.tuning._workload import Workload

#: What kernels without tiles do.
_STEPS = {
    "segment_bounds": "the least and the largest id of every 64, by which blocks are left out",
    "backward_delta": "rowsum(dout * out), which the gradients' kernels read",
    "backward_convert": "scales and rounds the sums of dq, which tiles of keys add to",
}


def explain(
    work: Workload, *, arch: str | None = None, backward: bool = False, compiled: bool = True
) -> dict[str, Any]:
    """Describe the kernels of one problem in values that JSON knows.

    ``compiled``: with registers and what follows from them, for which NVRTC is needed.
    """
    hardware = select_hardware.wanted(arch)
    configs = kernels_of(work, hardware, backward=backward)
    facts = compile_all(configs, hardware) if compiled else {}
    words = [work.dtype] + ["tf32"] * (work.precision == "tf32")
    words += ["unordered"] * (not work.deterministic)
    return {
        "problem": " ".join((f"{work}", *words)),
        "workload": work.as_json(),
        "device": hardware.name,
        "arch": hardware.arch,
        "kernels": [_described(work, config, hardware, facts.get(config)) for config in configs],
    }


def _described(
    work: Workload, config: Any, hardware: Hardware, facts: Facts | None
) -> dict[str, Any]:
    found: dict[str, Any] = {
        "kernel": config.kernel,
        "why": _why(work, config, hardware),
        "tile": {},
        "num_threads": config.num_threads,
        "smem_bytes": config.smem_bytes,
    }
    if facts is not None:
        names = ("registers", "spill_bytes", "blocks_per_multiprocessor")
        found |= {name: getattr(facts, name) for name in names}
        found |= {"error": facts.error} if facts.error else {}
    if config.computes not in ("out", "dq", "dkv", "dqkv"):
        return found
    found["tile"] = tile_of(config) or {"block_m": config.block_m, "block_n": config.block_n}
    row = select_measured.row_behind(config, hardware.name)
    measured = None if row is None else row.measured or "a table in use"
    found["tile_from"] = measured or f"cuflash/_kernels/{config.kernel}.py"
    grads = io_model.grads_of(config)
    if len(grads) == 1:  # a pass of its own
        found["gradient"] = f"d{grads}"
    once = io_model.least_bytes(work, config.kernel, grads) + work.option_bytes()
    flops = work.kernel_flops(config.kernel, grads)
    found |= {"tflop": flops / 1e12, "once": once, "intensity": flops / once}
    return found | _roofline(work, config, flops, once, hardware.peak)


def _roofline(
    work: Workload, config: Any, flops: float, once: int, peak: select_hardware.Peak | None
) -> dict[str, Any]:
    """The least time by the data sheet, and what takes it; None where there is no data sheet.

    Each pass computes an exponential for each pair, in float64 by multiply-adds. Products of
    CUDA cores are not counted.
    """
    if peak is None:
        return dict.fromkeys(("bound_ms", "bound_by", "bound_tflops"))
    least_ms = {"device memory": once / peak.gbytes / 1e6}
    if not (config.cuda_cores or config.kernel == "forward_narrow"):
        tflops, products = select_hardware.peak_products(peak, work.dtype, work.precision)
        least_ms[products] = flops / tflops / 1e9
    if work.dtype != "float64":
        pairs = work.batch * work.heads_q * work.visible_pairs()
        least_ms["exponentials"] = pairs / peak.texp2 / 1e9
    by, bound = max(least_ms.items(), key=operator.itemgetter(1))
    return {
        "bound_ms": bound,
        "bound_by": by,
        "bound_tflops": flops / bound / 1e9,
        "least_ms": least_ms,
    }


def _why(work: Workload, config: Any, hardware: Hardware) -> str:
    if config.kernel in _STEPS:
        return _STEPS[config.kernel]
    problem = work.problem()
    portable = why_portable(problem, hardware, config.computes)
    if getattr(config, "cuda_cores", False):
        portable += "; tensor cores would be no faster, or have no room: CUDA cores multiply"
    return portable or "Hopper's instructions serve this problem"

"""Which kernels run for a problem, why these, and what bounds their time?"""

from __future__ import annotations

from typing import Any

from cuflash import _chosen, _hardware, _tuned
from cuflash._ahead import kernels_of
from cuflash._bench import io_gradient, io_model
from cuflash._bench.workload import ONE_PASS, Workload
from cuflash._config import BackwardConvertConfig, KernelConfig, TileConfig
from cuflash.tuning._facts import Facts, compile_all
from cuflash.tuning._kernels import kernel_name, tile_of


def explain(
    work: Workload, *, arch: str | None = None, backward: bool = False, compiled: bool = True
) -> dict[str, Any]:
    """Describe the kernels of one problem in values that JSON knows.

    ``compiled``: with registers and what follows from them, for which NVRTC is needed.
    """
    hardware = _hardware.wanted(arch)
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
    work: Workload, config: KernelConfig, hardware: _hardware.Hardware, facts: Facts | None
) -> dict[str, Any]:
    name = kernel_name(config)
    found: dict[str, Any] = {
        "kernel": name,
        "why": _why(work, config, hardware),
        "tile": {},
        "num_threads": config.num_threads,
        "smem_bytes": config.smem_bytes,
    }
    if facts is not None:
        found |= {
            "registers": facts.registers,
            "spill_bytes": facts.spill_bytes,
            "blocks_per_multiprocessor": facts.blocks_per_multiprocessor,
        }
        if facts.error:
            found["error"] = facts.error
    if not isinstance(config, TileConfig) or isinstance(config, BackwardConvertConfig):
        return found
    found["tile"] = tile_of(config) or {"block_m": config.block_m, "block_n": config.block_n}
    row = _tuned.row_behind(config, hardware.name)
    measured = None if row is None else row.measured or "a table in use"
    found["tile_from"] = measured or f"cuflash/{_table_of(config, name)}.py"
    grads = io_gradient.grads_of(config)
    if len(grads) == 1:  # a pass of its own
        found["gradient"] = f"d{grads}"
    once = io_model.least_bytes(work, name, grads)
    flops = work.kernel_flops(name, grads)
    found |= {"tflop": flops / 1e12, "once": once, "intensity": flops / once}
    return found | _roofline(work, name, flops, once, hardware.peak)


def _table_of(config: TileConfig, kernel: str) -> str:
    """The module that has the table of a tile."""
    if kernel in ONE_PASS:
        return "_select_one_pass"
    if kernel == "forward_narrow":
        return "_select_narrow"
    if kernel.endswith("_tf32_sm90"):
        return "_select_tf32"
    return "_tiles" if config.real_bytes == config.element_bytes or config.cuda_cores else "_select"


def _roofline(
    work: Workload, kernel: str, flops: float, once: int, peak: _hardware.Peak | None
) -> dict[str, Any]:
    """The least time by the data sheet: of the products, or of the bytes; None where there is none.

    Of the narrow forward it is of the bytes alone: its products are of CUDA cores, and take less
    time than its exponentials.
    """
    if peak is None:
        return dict.fromkeys(("bound_ms", "bound_by", "bound_tflops"))
    memory_ms = once / peak.gbytes / 1e6
    if kernel == "forward_narrow":
        return {"bound_ms": memory_ms, "bound_by": "device memory", "bound_tflops": None}
    tflops, products = _hardware.peak_products(peak, work.dtype, work.precision)
    compute_ms = flops / tflops / 1e9
    bound = max(compute_ms, memory_ms)
    return {
        "bound_ms": bound,
        "bound_by": products if compute_ms >= memory_ms else "device memory",
        "bound_tflops": flops / bound / 1e9,
    }


def _why(work: Workload, config: KernelConfig, hardware: _hardware.Hardware) -> str:
    kernel = kernel_name(config)
    if kernel == "segment_bounds":
        return "the least and the largest id of every 64, by which blocks are left out"
    if kernel == "backward_delta":
        return "rowsum(dout * out), which the gradients' kernels read"
    if kernel == "backward_convert":
        return "scales and rounds the sums of dq, which tiles of keys add to"
    problem = work.problem()
    if kernel.startswith("forward"):
        portable = _chosen.why_portable(problem, hardware)
    else:
        portable = _chosen.why_portable_gradient(problem, hardware)
    if isinstance(config, TileConfig) and config.cuda_cores:
        portable += "; tensor cores would be no faster, or have no room: CUDA cores multiply"
    return portable or "Hopper's instructions serve this problem"

"""What does a GPU offer to a kernel: shared memory, registers, speed? No GPU is needed."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from cuflash._errors import problem_with, shown
from cuflash._kernels.config import RESERVED_SMEM

_KIB = 1024
#: Registers of every SM since compute capability 5.0, except the embedded 6.2.
_REGISTERS = 65_536
_MOST_REGISTERS = 255  # of a thread
_REGISTERS_OF_BOUND = 8  # a launch bound leaves a thread a multiple of this
_REGISTERS_GRANTED = 256  # registers of a warp come in multiples of this


class Limits(NamedTuple):
    """Limits of thread blocks and SMs of one compute capability."""

    block_smem: int  # bytes of shared memory of a thread block
    multiprocessor_smem: int  # bytes of shared memory of an SM
    threads: int  # threads of an SM
    blocks: int = 32  # thread blocks of an SM


class Peak(NamedTuple):
    """Peak speeds by a data sheet."""

    tflops: float  # TFLOP/s of dense 16-bit products with float32 sums
    gbytes: float  # GB/s of device memory
    float64: float  # TFLOP/s in float64, of tensor cores where they support it
    texp2: float  # 10^12 exp2 a second: each SM computes 16 in a clock


class Hardware(NamedTuple):
    """A device, or a typical one where there is none."""

    name: str
    arch: str  # "sm_90"
    multiprocessors: int  # number of SMs
    limits: Limits
    l2_bytes: int  # size of the L2 cache
    peak: Peak | None  # None for a device that is not in the table
    tensor_maps: bool = True  # can its driver encode them, as CUDA 12 does?

    @property
    def capability(self) -> int:
        """Compute capability: 90 for sm_90."""
        return int(self.arch.removeprefix("sm_"))

    @property
    def hopper(self) -> bool:
        """Whether Hopper's own kernels run."""
        return self.arch == "sm_90" and self.tensor_maps


#: Words of a device's name, of which the first that fit count, and its peaks by NVIDIA's data
#: sheet. Exponentials are at the clock for which the sheet promises products.
_PEAKS = (
    ("H100 PCIe", Peak(756.5, 2039.0, 51.2, 114 * 16 * 1.62e-3)),
    ("H100 NVL", Peak(835.5, 3938.0, 60.0, 132 * 16 * 1.545e-3)),
    ("H100", Peak(989.4, 3352.0, 66.9, 132 * 16 * 1.83e-3)),
    ("H200", Peak(989.4, 4814.0, 66.9, 132 * 16 * 1.83e-3)),
    ("A100-SXM4-80GB", Peak(311.9, 2039.0, 19.5, 108 * 16 * 1.41e-3)),
    ("A100", Peak(311.9, 1555.0, 19.5, 108 * 16 * 1.41e-3)),
    ("RTX 4090", Peak(165.2, 1008.0, 1.3, 128 * 16 * 2.52e-3)),
    ("L40S", Peak(362.1, 864.0, 1.4, 142 * 16 * 2.52e-3)),
)
#: Devices for which calls are planned without a GPU: name, SMs, bytes of L2 and limits. The limits
#: are those of the CUDA C++ Programming Guide, "Technical Specifications per Compute Capability".
_TYPICAL = {
    "sm_50": ("NVIDIA GeForce GTX 750 Ti", 5, 2 << 20, Limits(48 * _KIB, 64 * _KIB, 2048)),
    "sm_52": ("NVIDIA GeForce GTX 980", 16, 2 << 20, Limits(48 * _KIB, 96 * _KIB, 2048)),
    "sm_60": ("Tesla P100-SXM2-16GB", 56, 4 << 20, Limits(48 * _KIB, 64 * _KIB, 2048)),
    "sm_61": ("NVIDIA GeForce GTX 1080", 20, 2 << 20, Limits(48 * _KIB, 96 * _KIB, 2048)),
    "sm_70": ("Tesla V100-SXM2-16GB", 80, 6 << 20, Limits(96 * _KIB, 96 * _KIB, 2048)),
    "sm_75": ("Tesla T4", 40, 4 << 20, Limits(64 * _KIB, 64 * _KIB, 1024, 16)),
    "sm_80": ("NVIDIA A100-SXM4-80GB", 108, 40 << 20, Limits(163 * _KIB, 164 * _KIB, 2048)),
    "sm_86": ("an sm_86", 84, 6 << 20, Limits(99 * _KIB, 100 * _KIB, 1536, 16)),
    "sm_89": ("NVIDIA GeForce RTX 4090", 128, 72 << 20, Limits(99 * _KIB, 100 * _KIB, 1536, 24)),
    "sm_90": ("NVIDIA H100 80GB HBM3", 132, 50 << 20, Limits(227 * _KIB, 228 * _KIB, 2048)),
    "sm_100": ("an sm_100", 148, 126 << 20, Limits(227 * _KIB, 228 * _KIB, 2048)),
    "sm_120": ("an sm_120", 170, 96 << 20, Limits(99 * _KIB, 100 * _KIB, 1536, 24)),
}
ARCHITECTURES = tuple(_TYPICAL)


def typical(arch: str) -> Hardware:
    """The most common device of an architecture, "sm_90" or "sm_90a"."""
    plain = arch.removesuffix("a") if isinstance(arch, str) else ""
    if plain not in _TYPICAL:
        raise problem_with(
            "arch", ValueError, got=shown(arch), expected=f"one of {', '.join(ARCHITECTURES)}"
        )
    name, multiprocessors, l2_bytes, limits = _TYPICAL[plain]
    return Hardware(name, plain, multiprocessors, limits, l2_bytes, peak_of(name))


#: The hardware that replaces every device inside :func:`assumed`.
_assumed: Hardware | None = None


def of_device(device: int) -> Hardware:
    """The hardware that a call on ``device`` is planned for."""
    return _assumed or _of_device(device)


@contextmanager
def assumed(hardware: Hardware) -> Iterator[None]:
    """Plan calls for other hardware inside the block, as for an older device than is there.

    Cached plans stay: ``cuflash._launch.plan_cache.forget`` makes calls choose again.
    """
    global _assumed
    before, _assumed = _assumed, hardware
    try:
        yield
    finally:
        _assumed = before


@functools.cache
def _of_device(device: int) -> Hardware:
    import cupy

    from cuflash._jit import driver

    def has(name: str) -> int:
        return driver.attribute(name, device)

    limits = Limits(
        has("MaxSharedMemoryPerBlockOptin"),
        has("MaxSharedMemoryPerMultiprocessor"),
        has("MaxThreadsPerMultiProcessor"),
        has("MaxBlocksPerMultiprocessor"),
    )
    name = driver.device_name(device)
    capability = int(cupy.cuda.Device(device).compute_capability)
    return Hardware(
        name, f"sm_{capability}", has("MultiProcessorCount"), limits,
        has("L2CacheSize"), peak_of(name), driver.encodes_tensor_maps(),
    )  # fmt: skip


def present() -> Hardware | None:
    """The current device, or None where CuPy finds none."""
    try:
        import cupy

        return of_device(cupy.cuda.runtime.getDevice())
    except (ImportError, RuntimeError, OSError):
        return None


def wanted(arch: str | None) -> Hardware:
    """The hardware of a plan: typical for ``arch``, else the current device, else an H100."""
    found = present() if arch is None else typical(arch)
    return found or typical("sm_90")


def peak_of(name: str) -> Peak | None:
    """Peak speeds of a device by name; None where no data sheet is in the table."""
    return next((peak for words, peak in _PEAKS if words in name), None)


def peak_products(peak: Peak, dtype: str, precision: str) -> tuple[float, str]:
    """Peak TFLOP/s of products of a dtype, and how the kernels form these products."""
    if dtype == "float64":
        return peak.float64, "float64 products"
    if dtype != "float32":
        return peak.tflops, "16-bit products"
    if precision == "tf32":
        return peak.tflops / 2, "TF32 products"
    # kernels_cu/tile/matmul_sm80.cuh; TF32 has half the rate of bfloat16.
    return peak.tflops / 6, "three TF32 products for one of float32"


def occupancy(limits: Limits, num_threads: int, smem_bytes: int, registers: int) -> int:
    """Thread blocks that share an SM; ``registers`` are those of a thread."""
    warps = num_threads // 32
    granted = -(-registers * 32 // _REGISTERS_GRANTED) * _REGISTERS_GRANTED
    return min(
        limits.blocks,
        limits.threads // num_threads,
        limits.multiprocessor_smem // (smem_bytes + RESERVED_SMEM),
        _REGISTERS // max(granted * warps, 1),
    )


def registers_of_thread(num_threads: int, blocks: int) -> int:
    """Registers that a thread may have where ``blocks`` thread blocks are to share an SM."""
    share = _REGISTERS // (num_threads * blocks)
    return min(share // _REGISTERS_OF_BOUND * _REGISTERS_OF_BOUND, _MOST_REGISTERS)

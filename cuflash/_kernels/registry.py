"""Which kernels are there? One line each; of those of one result the best comes first."""

from __future__ import annotations

from importlib import import_module

from cuflash._kernels.config import KernelConfig

_NAMES = (
    # out
    "forward_sm90",
    "forward_narrow",
    "forward_tf32_sm90",
    "forward_sm80",
    # dq, dk and dv in one pass
    "backward_sm90",
    "backward_pair_sm90",
    # dk and dv
    "backward_dkv_sm90",
    "backward_dkv_tf32_sm90",
    "backward_dkv_partners",
    "backward_dkv_sm80",
    # dq
    "backward_dq_sm90",
    "backward_dq_tf32_sm90",
    "backward_dq_partners",
    "backward_dq_sm80",
    # steps on the way
    "segment_bounds",
    "backward_delta",
    "backward_dscore_sm80",
    "backward_convert",
)


def room(name: str) -> type[KernelConfig]:
    """The kernel that the module of this name holds."""
    module = import_module(f"cuflash._kernels.{name}")
    kernels = (found for found in vars(module).values() if getattr(found, "kernel", "") == name)
    return next(kernels)  # type: ignore[no-any-return]


#: By name, in this order.
KERNELS: dict[str, type[KernelConfig]] = {name: room(name) for name in _NAMES}


def that_compute(result: str) -> tuple[type[KernelConfig], ...]:
    """The kernels of one result, best first."""
    return tuple(kernel for kernel in KERNELS.values() if kernel.computes == result)

"""How are kernels compiled before they are needed, on a machine that need not have a GPU?"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cuflash._errors import CompileError, problem_with

if TYPE_CHECKING:
    from cuflash._kernels.config import KernelConfig
    from cuflash._select.hardware import Hardware
    from cuflash._timing.workload import Workload


def compile(  # noqa: A001  cuflash.compile, as re.compile
    workloads: Workload | Iterable[Workload],
    /,
    *,
    arch: str | None = None,
    folder: str | os.PathLike[str] | None = None,
    backward: bool = False,
    processes: int | None = None,
) -> tuple[Path, ...]:
    """Compile the kernels of problems ahead of time; needs NVRTC and no GPU.

    Kernels depend on head sizes, dtype and on which options are present; of the lengths only the
    number of tiles matters, and only where there are fewer than multiprocessors.

    Parameters
    ----------
    workloads : Workload or iterable of Workload
        The problems, see ``cuflash.tuning.Workload``; their arrays in C order.
    arch : str, optional
        ``"sm_80"``, ``"sm_90a"`` ...; default: that of the device at hand.
    folder : path, optional
        Put the kernels there, for machines whose variable ``CUFLASH_KERNELS`` names the folder.
        Default: the store of this machine.
    backward : bool
        Also those of the gradients of q, k and v.
    processes : int, optional
        That compile side by side; default: one for each core.

    Returns
    -------
    tuple of Path
        The file of each kernel.

    Raises
    ------
    ValueError
        For an unknown architecture, or none where there is no device.
    ImportError
        Where CuPy or NVRTC is missing.
    OSError
        For a folder that cannot be made.
    CompileError
        For a kernel that does not compile, or a folder that cannot be written.

    Examples
    --------
    >>> import cuflash
    >>> work = cuflash.tuning.Workload(8, 16, 16, 4096, 4096, 128, 128, "bfloat16", causal=True)
    >>> cuflash.compile(work, arch="sm_90a", folder="kernels", backward=True)  # doctest: +SKIP
    (PosixPath('kernels/...cubin'), ...)
    """
    from cuflash._jit import compilation, cubin_cache
    from cuflash._timing.workload import Workload
    from cuflash.tuning._facts import compile_all

    hardware = _hardware_of(arch)
    several = isinstance(workloads, Iterable) and not isinstance(workloads, str)
    given: list[Any] = [*workloads] if several else [workloads]  # type: ignore[misc]
    for work in given:
        if not isinstance(work, Workload):
            raise problem_with(
                "workloads", TypeError, got=type(work).__name__,
                expected="a cuflash.tuning.Workload, or several",
            )  # fmt: skip
    configs = [c for work in given for c in kernels_of(work, hardware, backward=backward)]
    shared = None if folder is None else Path(folder)
    if shared is not None:
        try:
            shared.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise problem_with(
                "folder", type(error), got=f"{shared} ({error.strerror})",
                expected="a folder that can be made and written",
            ) from None  # fmt: skip
    facts = compile_all(configs, hardware, processes=processes, shared=shared)
    for config, found in facts.items():
        if found.error:
            raise CompileError(
                f"{config.entry} did not compile: {found.error}",
                config=config, log=found.error, source=None,
            )  # fmt: skip
    files = []
    for config in facts:
        own = compilation.architecture(config, hardware.capability)
        if shared is None:
            files.append(cubin_cache.folder() / f"{compilation.stored_name(config, own)}.cubin")
        else:
            files.append(shared / f"{compilation.shared_name(config, own)}.cubin")
    return tuple(files)


def _hardware_of(arch: str | None) -> Hardware:
    from cuflash._select import hardware as select_hardware

    if arch is not None:
        return select_hardware.typical(arch)
    found = select_hardware.present()
    if found is None:
        raise problem_with(
            "arch", ValueError, got="None, and no device is here",
            expected=f"one of {', '.join(select_hardware.ARCHITECTURES)}",
        )  # fmt: skip
    return found


def kernels_of(work: Workload, hardware: Hardware, *, backward: bool) -> list[KernelConfig]:
    """The kernels of one problem, in order of launch."""
    from cuflash._kernels import segment_bounds
    from cuflash._select import choose

    problem = work.problem()
    found: list[KernelConfig] = []
    if problem.segment_ids_q is not None:
        found.append(segment_bounds.config_of(problem))
    found.append(choose.forward(problem, hardware))
    if backward:
        found += choose.backward(problem, hardware, ordered=work.deterministic)
    return found

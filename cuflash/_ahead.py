"""How are kernels compiled ahead of time, also on a machine without a GPU?"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cuflash._errors import CompileError, problem_with, shown, wrong_type, wrong_value
from cuflash._problem.checks import flag

if TYPE_CHECKING:
    from cuflash._kernels.config import KernelConfig
    from cuflash._select.hardware import Hardware
    from cuflash.tuning._workload import Workload


def compile(  # noqa: A001  cuflash.compile, as re.compile
    workloads: Workload | Iterable[Workload],
    /,
    *,
    arch: str | None = None,
    folder: str | os.PathLike[str] | None = None,
    backward: bool = False,
    processes: int | None = None,
) -> tuple[Path, ...]:
    """Compile the kernels of problems ahead of time, with CuPy and NVRTC but without a GPU.

    A kernel depends on the head sizes, the dtype and the options that are present. It depends on
    the lengths only through the number of tiles, and only if there are fewer tiles than SMs.

    Parameters
    ----------
    workloads : Workload or iterable of Workload
        The problems: see ``cuflash.tuning.Workload``. Their arrays are taken to be in C order.
    arch : str, optional
        Architecture, such as ``"sm_80"`` or ``"sm_90a"``. Default: the current device's.
    folder : path, optional
        Folder to write the kernels to. A machine uses them if its environment variable
        ``CUFLASH_KERNELS`` names the folder. Default: the kernel cache of this machine.
    backward : bool
        Also compile the kernels for the gradients of q, k and v.
    processes : int, optional
        Number of processes that compile in parallel. Default: one for each core.

    Returns
    -------
    tuple of Path
        The path of each compiled kernel.

    Raises
    ------
    TypeError, ValueError
        If an argument has a wrong type or value, or there is neither ``arch`` nor a device.
    ImportError
        If CuPy or NVRTC is missing.
    OSError
        If ``folder`` cannot be created, or does not keep the files that are written to it.
    CompileError
        If a kernel does not compile, or ``folder`` cannot be written to.

    Examples
    --------
    >>> import cuflash
    >>> work = cuflash.tuning.Workload(8, 16, 16, 4096, 4096, 128, 128, "bfloat16", causal=True)
    >>> cuflash.compile(work, arch="sm_90a", folder="kernels", backward=True)  # doctest: +SKIP
    (PosixPath('kernels/...cubin'), ...)
    """
    from cuflash import _cupy
    from cuflash._jit import compilation, cubin_cache
    from cuflash.tuning._facts import compile_all
    from cuflash.tuning._workload import Workload

    hardware = _hardware_of(arch)
    backward = flag("backward", backward)
    given: list[Any] = [workloads]
    several = isinstance(workloads, Iterable) and not isinstance(workloads, str)
    if several:
        with contextlib.suppress(TypeError):  # iterating an array without axes raises
            given = [*workloads]  # type: ignore[misc]
    for work in given:
        if not isinstance(work, Workload):
            expected = "a cuflash.tuning.Workload, or several"
            raise wrong_type("workloads", type(work).__name__, expected)
    if not isinstance(folder, str | os.PathLike | None):
        raise wrong_type("folder", shown(folder), "a path")
    configs = [c for work in given for c in kernels_of(work, hardware, backward=backward)]
    shared = None if folder is None else Path(folder)
    if shared is not None:
        try:
            shared.mkdir(parents=True, exist_ok=True)
        except (OSError, ValueError) as error:  # ValueError: a zero byte in the path
            kind = type(error) if isinstance(error, OSError) else ValueError
            raise problem_with(
                "folder", kind, got=f"{shown(shared)} ({getattr(error, 'strerror', error)})",
                expected="a folder that can be created and written to",
            ) from None  # fmt: skip
    facts = compile_all(configs, hardware, processes=processes, shared=shared)
    for config, found in facts.items():
        if found.error:
            message = f"{config.entry} did not compile: {found.error}"
            raise CompileError(message, config=config, log=found.error, source=None)
    place, name_of = _cupy.folder(), compilation.stored_name
    if shared is not None:
        place, name_of = shared, compilation.shared_name
    architectures = [compilation.architecture(c, hardware.capability) for c in facts]
    names = map(name_of, facts, architectures)
    files = [place / f"{name}.cubin" for name in names]
    problems = {path: cubin_cache.problem_of(path) for path in files}
    lost = next((path for path in files if problems[path]), None)
    if lost is not None:
        raise problem_with(
            "folder", OSError, got=f"{lost.parent}, where {lost.name} {problems[lost]}",
            expected="a writable folder with free space",
            fix="pass another folder, or unset CUPY_CACHE_IN_MEMORY" if _cupy.in_memory() else "",
        )  # fmt: skip
    return tuple(files)


def _hardware_of(arch: str | None) -> Hardware:
    from cuflash._select import hardware as select_hardware

    if arch is not None:
        return select_hardware.typical(arch)
    found = select_hardware.present()
    if found is None:
        expected = f"one of {', '.join(select_hardware.ARCHITECTURES)}"
        raise wrong_value("arch", "None on a machine without a GPU", expected)
    return found


def kernels_of(work: Workload, hardware: Hardware, *, backward: bool) -> list[KernelConfig]:
    """The kernels of one problem, in order of launch."""
    return [*steps_of(work, hardware, backward=backward)]


def steps_of(work: Workload, hardware: Hardware, *, backward: bool) -> dict[KernelConfig, Any]:
    """The launches of one problem in order, by the configurations of their kernels."""
    from cuflash._select.choose import Wanted, choose

    problem = work.problem()
    steps = choose(problem, hardware)
    if backward:
        wanted, deterministic = Wanted.of("qkv"), work.deterministic
        steps += choose(problem, hardware, wanted=wanted, deterministic=deterministic)
    return {step.config: step for step in steps}  # both may compute bounds of segments

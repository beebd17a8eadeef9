"""What would the GPU tests compile? They run without a GPU, and every kernel is written down.

    python -m pytest -m gpu --rehearse kernels.jsonl [tests]

`cupy_stand_in` replaces CuPy, and known facts of an H100 replace the device. Plans are made, and
launches do nothing. Results are those of the CPU path, so that tests go on. Each line of the file
has a kernel, its architecture and the test that asked for it.
"""

from __future__ import annotations

import importlib
import inspect
import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cuflash import _arrays
from cuflash._jit import compilation, driver
from cuflash._problem.options import Options, with_arrays
from cuflash._results import Saved
from cuflash._select import hardware
from cuflash.testing._budget import Budget
from cuflash.tuning._kernels import config_as_json
from support import cupy_stand_in, rehearsed_results
from support.cupy_stand_in import to_host

ARCH = "sm_90"
_PAIRS = 1 << 14  # (query, key) pairs of a call whose error budget is computed


class Rehearsal:
    """A run of tests, their launched kernels, and why the running test lacks results."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.kernels: set[str] = set()  # of the running test, as lines
        self.test = ""
        self.unfilled = ""

    def function(self, _: Any, config: Any) -> tuple[Any, None]:
        """Replace `compilation._function`."""
        arch = compilation.architecture(config, hardware.typical(ARCH).capability)
        compilation.source_of(config, arch)  # the source must know all fields
        own = {"arch": arch, "config": config_as_json(config), "test": self.test}
        self.kernels.add(json.dumps(own) + "\n")
        return SimpleNamespace(ptr=1), None

    def filling(self, launch: Callable[..., Any], fill: Callable[..., Any]) -> Any:
        """Return ``launch``, followed by ``fill`` on the same arguments in host memory.

        ``fill`` returns the elements of the result of ``launch``.
        """

        parameters = inspect.signature(fill)

        def both(*args: Any, **named: Any) -> Any:
            found = launch(*args, **named)
            given = parameters.bind(*map(_on_host, args), **_on_host(named))
            try:
                with np.errstate(all="ignore"):
                    own = fill(*given.args, **given.kwargs)
                if own is not None:
                    to_host(found)[...] = own
            except Exception as error:  # values that kernels clamp, formulas for kernels
                self.unfilled = f"no results without a device ({type(error).__name__}: {error})"
            return found

        return both

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.test, self.unfilled = item.nodeid, ""
        _forget()
        try:
            return (yield)
        finally:
            with self.path.open("a") as file:  # at once, as other processes write, too
                file.write("".join(sorted(self.kernels)))
            self.kernels.clear()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        try:
            return (yield)
        except Exception:
            if self.unfilled:
                pytest.skip(f"rehearsal: {self.unfilled[:100]}")
            raise


def _on_host(value: Any) -> Any:
    """Return an argument of a launch with its arrays in host memory."""
    if isinstance(value, Mapping):
        return {name: _on_host(array) for name, array in value.items()}
    if isinstance(value, Saved):
        return Saved(*map(to_host, value))
    if not isinstance(value, Options):
        return to_host(value)
    formulas = {
        name: replace(own, arrays=_on_host(own.arrays))
        for name in ("score_mod", "mask_mod")
        if (own := getattr(value, name)) is not None
    }
    return replace(with_arrays(value, _on_host(value.arrays)), **formulas)


def _of_small_calls(check: Callable[..., None]) -> Callable[..., None]:
    """Return a `Budget` check that runs only for few (query, key) pairs, as it is slow."""

    def small(budget: Budget, *args: Any, **named: Any) -> None:
        call = budget.call
        if math.prod(call.batch) * call.q.shape[-2] * call.k.shape[-2] <= _PAIRS:
            check(budget, *args, **named)

    return small


def _install(rehearsal: Rehearsal) -> None:
    """Replace CuPy and the device in this process for good, before CuPy is imported."""
    cupy = importlib.import_module("cupy")
    bindings = {n: importlib.import_module(f"cupy_backends.cuda.api.{n}") for n in _BINDINGS}
    modules = cupy_stand_in.stand_in(cupy, **bindings)
    sys.modules.update(modules)
    api = importlib.import_module("cupy_backends.cuda.api")
    for name in _BINDINGS:
        setattr(api, name, modules[f"cupy_backends.cuda.api.{name}"])
    _arrays.imported_cupy.cache_clear()
    hardware._assumed = hardware.typical(ARCH)
    compilation._function = rehearsal.function  # type: ignore[assignment]
    driver.attribute = _attribute  # type: ignore[assignment]
    driver.function = lambda _: lambda *_: 0  # type: ignore[assignment]  succeeds

    from cuflash._launch import run

    for module, name, fill in rehearsed_results.seams():
        setattr(module, name, rehearsal.filling(getattr(module, name), fill))
    for name in ("check_forward", "check_backward", "check_probe"):
        setattr(Budget, name, _of_small_calls(getattr(Budget, name)))
    subprocess.Popen = _refused_process  # type: ignore[assignment,misc]
    # Known calls are checked again, since only checked calls have the arrays.
    run.repeated_forward = run.repeated_backward = lambda *_: lambda *_: None


def _forget() -> None:
    """Clear plans and kernels, so that a test asks for its kernels itself."""
    from cuflash._launch import cache, plan_cache

    plan_cache.forget()
    cache.forget()
    compilation.compile_kernel.cache_clear()


def _refused_process(*_: Any, **__: Any) -> Any:
    return cupy_stand_in.skip("the device of another process")


_BINDINGS = ("runtime", "driver")


def _attribute(name: str, _: int) -> int:
    limits = hardware.typical(ARCH).limits
    return {"MaxSharedMemoryPerBlockOptin": limits.block_smem}[name]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--rehearse", type=Path, metavar="FILE",
        help="run GPU tests without a GPU, and add the kernels that they launch to a file",
    )  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--rehearse")
    if path is not None:
        config.option.gpu_timeout = 0.0  # the CPU path is slow
        rehearsal = Rehearsal(path.absolute())
        _install(rehearsal)
        config.pluginmanager.register(rehearsal, "rehearsal")

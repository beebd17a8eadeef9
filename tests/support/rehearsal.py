"""What would the GPU tests compile? They run without a GPU, and every kernel is written down.

    python -m pytest -m gpu --rehearse kernels.jsonl [tests]

`cupy_stand_in` stands for CuPy, and what is known of an H100 for a device: plans are made, and
launches do nothing. Results are those of the CPU path, so that tests go on. A line of the file is a
kernel, its architecture and the test that asked for it.
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
_PAIRS = 1 << 14  # of queries and keys of a call whose error budget is computed


class Rehearsal:
    """A run of tests, the kernels that they launch, and why the running one lacks results."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.kernels: set[str] = set()  # of the running test, as lines
        self.test = ""
        self.unfilled = ""

    def function(self, _: Any, config: Any) -> tuple[Any, None]:
        """Stand for `compilation._function`."""
        arch = compilation.architecture(config, hardware.typical(ARCH).capability)
        compilation.source_of(config, arch)  # its fields have to be known to the source
        own = {"arch": arch, "config": config_as_json(config), "test": self.test}
        self.kernels.add(json.dumps(own) + "\n")
        return SimpleNamespace(ptr=1), None

    def filling(self, launch: Callable[..., Any], fill: Callable[..., Any]) -> Any:
        """``launch``, and then ``fill`` on the same arguments in host memory.

        What ``fill`` returns are the elements of what ``launch`` has returned.
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
            except Exception as error:  # of values that kernels clamp, of a formula for kernels
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
            with self.path.open("a") as file:  # at once, whoever else writes
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
    """An argument of a launch with its arrays in host memory."""
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
    """A check of a `Budget`, which takes longer than all else, on few pairs of queries and keys."""

    def small(budget: Budget, *args: Any, **named: Any) -> None:
        call = budget.call
        if math.prod(call.batch) * call.q.shape[-2] * call.k.shape[-2] <= _PAIRS:
            check(budget, *args, **named)

    return small


def _install(rehearsal: Rehearsal) -> None:
    """Let the process have the stand-in for CuPy and a device: for good, before it is imported."""
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
    driver.function = lambda _: lambda *_: 0  # type: ignore[assignment]  what it does succeeds

    from cuflash._launch import run

    for module, name, fill in rehearsed_results.seams():
        setattr(module, name, rehearsal.filling(getattr(module, name), fill))
    for name in ("check_forward", "check_backward", "check_probe"):
        setattr(Budget, name, _of_small_calls(getattr(Budget, name)))
    subprocess.Popen = _refused_process  # type: ignore[assignment,misc]
    # A known call has its checks again: only they know the arrays.
    run.repeated_forward = run.repeated_backward = lambda *_: lambda *_: None


def _forget() -> None:
    """Let a test ask for its kernels, whatever was asked for before."""
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
        config.option.gpu_timeout = 0.0  # the CPU path takes its time
        rehearsal = Rehearsal(path.absolute())
        _install(rehearsal)
        config.pluginmanager.register(rehearsal, "rehearsal")

"""Which kernels do calls take, and how do kernels of other devices run on a better one?"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from cuflash._launch import plan_cache, run
from cuflash._launch.kernel_launcher import KernelLauncher
from cuflash._launch.repeat import Plan
from cuflash._select import hardware
from cuflash._select.hardware import Hardware


def planned_kernels() -> Any:
    """Return a context that plans calls anew, and yields the configurations of their kernels."""
    return _planned_for(_here())


def portable_kernels() -> Any:
    """Return such a context with portable kernels only."""
    return _planned_for(_here()._replace(tensor_maps=False))


def planned_launchers() -> list[KernelLauncher]:
    """Return the launches of all cached plans."""
    plans = [plan for plan in plan_cache._plans.values() if isinstance(plan, Plan)]
    return [launcher for plan in plans for launcher in plan.launchers]


def kernels_of(arch: str) -> Any:
    """Return such a context with kernels for an architecture's instructions and shared memory."""
    return _planned_for(hardware.typical(arch)._replace(tensor_maps=False))


def _here() -> Hardware:
    import cupy  # or its replacement

    return hardware.of_device(cupy.cuda.runtime.getDevice())


@contextmanager
def _planned_for(other: Hardware) -> Iterator[list[Any]]:
    configs, plan_steps = [], run.plan_steps

    def planned(steps: Any, *rest: Any) -> Any:
        configs.extend(step.config for step in steps)
        return plan_steps(steps, *rest)

    with hardware.assumed(other), mock.patch.object(run, "plan_steps", planned):
        plan_cache.forget()
        try:
            yield configs
        finally:
            plan_cache.forget()

"""Which kernels do calls take, and how those of other devices on one that has better ones?"""

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
    """Context in which calls are planned anew, with the configurations of their kernels."""
    return _planned_for(_here())


def portable_kernels() -> Any:
    """The same of kernels that every architecture has."""
    return _planned_for(_here()._replace(tensor_maps=False))


def planned_launchers() -> list[KernelLauncher]:
    """The launches of all plans that are known."""
    plans = [plan for plan in plan_cache._plans.values() if isinstance(plan, Plan)]
    return [launcher for plan in plans for launcher in plan.launchers]


def kernels_of(arch: str) -> Any:
    """The same of an architecture: what it multiplies with, its shared memory."""
    return _planned_for(hardware.typical(arch)._replace(tensor_maps=False))


def _here() -> Hardware:
    import cupy  # or what stands for it just now

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

"""How do calls take the kernels of other devices on one that has better ones?"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from cuflash._api import recall
from cuflash._launch import plan, run
from cuflash._select import hardware
from cuflash._select.hardware import Hardware


def portable_kernels() -> Any:
    """Context in which they do; the configurations of kernels that are planned there are listed."""
    import cupy  # or what stands for it just now

    here = hardware.of_device(cupy.cuda.runtime.getDevice())
    return _planned_for(here._replace(tensor_maps=False))


def kernels_of(arch: str) -> Any:
    """The same of an architecture: what it multiplies with, its shared memory."""
    return _planned_for(hardware.typical(arch)._replace(tensor_maps=False))


@contextmanager
def _planned_for(other: Hardware) -> Iterator[list[Any]]:
    configs, plan_launch = [], plan.plan_launch

    def planned(config: Any, *rest: Any, **keywords: Any) -> Any:
        configs.append(config)
        return plan_launch(config, *rest, **keywords)

    with hardware.assumed(other), mock.patch.object(plan, "plan_launch", planned):
        _forget()
        try:
            yield configs
        finally:
            _forget()


def _forget() -> None:
    run.forget_plans()
    recall.forget()

"""How do calls take the kernels of other devices on one that has better ones?"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from cuflash._api import recall
from cuflash._jit import device
from cuflash._launch import plan, run, sm90
from cuflash._select import hardware as select_hardware
from cuflash._select import portable


@contextmanager
def portable_kernels() -> Iterator[list[Any]]:
    """Inside, they do; the configurations of kernels that are planned there are listed."""
    configs, plan_launch = [], plan.plan_launch

    def planned(params: Any, config: Any, *rest: Any, **keywords: Any) -> Any:
        configs.append(config)
        return plan_launch(params, config, *rest, **keywords)

    with (
        mock.patch.object(sm90, "available", return_value=False),
        mock.patch.object(plan, "plan_launch", planned),
    ):
        _forget()
        try:
            yield configs
        finally:
            _forget()


@contextmanager
def kernels_of(arch: str) -> Iterator[list[Any]]:
    """Inside, the device is taken for another: what it multiplies with, its shared memory.

    The configurations of kernels that are planned there are listed.
    """
    hardware, configs = select_hardware.typical(arch), []
    capability, decided = int(hardware.capability), portable.for_architecture

    def decide(config: Any, _: int) -> Any:
        configs.append(decided(config, capability))
        return configs[-1]

    with (
        mock.patch.object(portable, "for_architecture", decide),
        mock.patch.object(device, "capability", return_value=capability),
        mock.patch.object(device, "smem_limit", return_value=hardware.limits.block_smem),
        mock.patch.object(sm90, "available", return_value=False),
    ):
        _forget()
        try:
            yield configs
        finally:
            _forget()


def _forget() -> None:
    run.forget_plans()
    recall.forget()

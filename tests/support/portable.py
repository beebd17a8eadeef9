"""How do calls take the portable kernels on a device that has better ones?"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from cuflash import _launch, _launch_sm90, _plan, _recall


@contextmanager
def portable_kernels() -> Iterator[list[Any]]:
    """Inside, they do; the configurations of kernels that are planned there are listed."""
    configs, plan_launch = [], _plan.plan_launch

    def planned(params: Any, config: Any, *rest: Any, **keywords: Any) -> Any:
        configs.append(config)
        return plan_launch(params, config, *rest, **keywords)

    with (
        mock.patch.object(_launch_sm90, "available", return_value=False),
        mock.patch.object(_plan, "plan_launch", planned),
    ):
        _forget()
        try:
            yield configs
        finally:
            _forget()


def _forget() -> None:
    _launch.forget_plans()
    _recall.forget()

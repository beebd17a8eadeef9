"""Which variants of the forward of 8 bits are tried? Shared by the scripts beside this file."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tools")]

import numpy as np  # noqa: E402

from cuflash import Options  # noqa: E402
from cuflash._kernels.forward_fp8_sm90 import ForwardFp8Sm90Config  # noqa: E402
from cuflash._kernels.request import Request  # noqa: E402
from cuflash._problem.float8 import E4M3  # noqa: E402
from cuflash._problem.problem import describe  # noqa: E402

CAUSAL = (False, True)
#: By head size: changes of the table's row.
VARIANTS: dict[int, dict[str, dict[str, Any]]] = {
    64: {"table": {}, "128 rows": {"block_m": 128, "num_warps": 12}},
    128: {"table": {}, "96 keys": {"block_n": 96}},
}  # fmt: skip


def config_of(head_dim: int, *, causal: bool, **changes: Any) -> ForwardFp8Sm90Config:
    """The table's row for plain calls with bfloat16 results, changed."""
    like = np.broadcast_to(np.zeros((), E4M3), (1, 8, 8192, head_dim))
    ones = np.ones((1, 8), np.float32)
    options = replace(Options(causal=causal), q_scale=ones, k_scale=ones, v_scale=ones)
    (config,) = ForwardFp8Sm90Config.chosen(Request(describe(like, like, like, options)))
    return config.replace(**changes)


@contextmanager
def used(changes: dict[str, Any]) -> Iterator[None]:
    """Let calls of every head size take the kernel of 8 bits, changed in this way."""
    from cuflash._launch import plan_cache

    chosen = ForwardFp8Sm90Config.__dict__["chosen"]

    def changed(cls: type[ForwardFp8Sm90Config], request: Request) -> tuple[Any, ...]:
        return tuple(c.replace(**changes) for c in chosen.__func__(cls, request))

    plan_cache.forget()
    ForwardFp8Sm90Config.chosen = classmethod(changed)  # type: ignore[assignment]
    try:
        yield
    finally:
        ForwardFp8Sm90Config.chosen = chosen
        plan_cache.forget()

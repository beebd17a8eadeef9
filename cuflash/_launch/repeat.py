"""How is a known call made again? New results, their addresses, the launches of its plan."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import cupy
import numpy as np
from cupy_backends.cuda.api import runtime

from cuflash._api.recall import Repeat
from cuflash._launch import dq_sums, score_params
from cuflash._launch.fused_backward import Step
from cuflash._launch.kernel_launcher import Addresses
from cuflash._launch.plan import Launch
from cuflash._launch.sm90 import Sm90Launch
from cuflash._problem.problem import Problem
from cuflash._results import AttentionResult, Gradients

_ADDRESSES = (
    "q", "k", "v", "dout", "out", "lse", "dq", "dk", "dv", "rows", "turns", "dq sums", "nothing",
)  # fmt: skip
Shape = tuple[int, ...]


def forward(
    problem: Problem, launch: Launch | Sm90Launch, device: int, *, return_lse: bool
) -> Repeat:
    """A call that passed its checks, without score arrays, on new results each time. (D66)

    In a capture nothing is allocated.
    """
    out_shape, dtype, nothing = problem.out_shape, problem.dtype, score_params.NOTHING
    lse_shape, lse_dtype = problem.lse_shape, problem.lse_dtype

    def repeat(q: int, k: int, v: int) -> Any:
        if runtime.getDevice() != device:
            with cupy.cuda.Device(device):
                return repeat(q, k, v)
        stream = cupy.cuda.get_current_stream().ptr
        if runtime.streamIsCapturing(stream):  # it gives a new thread its context, too (D67)
            return None
        out = cupy.ndarray(out_shape, dtype)
        if not return_lse:
            launch.run((q, k, v, out.data.ptr, 0, *nothing), stream, False)
            return out
        lse = cupy.ndarray(lse_shape, lse_dtype)
        launch.run((q, k, v, out.data.ptr, lse.data.ptr, *nothing), stream, False)
        return AttentionResult(out, lse)

    return repeat


def backward(
    device: int,
    steps: tuple[Step, ...],
    shapes: tuple[Shape, Shape, Shape],
    dtype: np.dtype[Any],
    workspace_size: int,
    turns: int,
    turns_end: int,
) -> Repeat:
    """The same of a call for the gradients of q, k and v.

    Its workspace holds the statistics of rows, ``turns`` from there on and sums of dq behind them.
    """
    of_q, of_k, of_v = shapes
    picked = [(_picking(names), launch) for names, launch in steps]

    def repeat(q: int, k: int, v: int, dout: int, out: int, lse: int) -> Any:
        if runtime.getDevice() != device:
            with cupy.cuda.Device(device):
                return repeat(q, k, v, dout, out, lse)
        stream = cupy.cuda.get_current_stream().ptr
        if runtime.streamIsCapturing(stream):  # it gives a new thread its context, too
            return None
        dq, dk, dv = (cupy.ndarray(shape, dtype) for shape in (of_q, of_k, of_v))
        workspace = cupy.ndarray(workspace_size, np.uint8)
        rows = workspace.data.ptr
        addresses = (
            q, k, v, dout, out, lse, dq.data.ptr, dk.data.ptr, dv.data.ptr,
            rows, rows + turns, dq_sums.sums_behind(rows + turns_end), 0,
        )  # fmt: skip
        for pick, launch in picked:
            launch.run(pick(addresses), stream)
        return Gradients(dq, dk, dv)

    return repeat


def _picking(names: tuple[str, ...]) -> Callable[[Addresses], Addresses]:
    """What picks the pointers of a launch out of _ADDRESSES; score arrays are not among them."""
    places = [_ADDRESSES.index(name if name in _ADDRESSES else "nothing") for name in names]
    if len(places) == 1:  # of one place itemgetter would return the pointer alone
        return lambda addresses: (addresses[places[0]],)
    return operator.itemgetter(*places)

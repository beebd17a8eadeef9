"""How is a known call made again? New results, their addresses, the launches of its plan."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import cupy
import numpy as np
from cupy_backends.cuda.api import runtime

from cuflash import _one_pass, _score_params
from cuflash._arguments import Addresses
from cuflash._arrays import Triple
from cuflash._launch_sm90 import Sm90Launch
from cuflash._one_pass import GradientLaunch, Step
from cuflash._plan import Launch
from cuflash._results import AttentionResult, Gradients

_ADDRESSES = (
    "q", "k", "v", "dout", "out", "lse", "dq", "dk", "dv", "rows", "turns", "dq sums", "nothing",
)  # fmt: skip


class RepeatedForward(NamedTuple):
    """A forward call that passed its checks, without score arrays, on new results each time."""

    device: int
    launch: Launch | Sm90Launch
    out_shape: tuple[int, ...]
    dtype: np.dtype[Any]
    lse_shape: tuple[int, ...] | None  # None: no lse
    lse_dtype: np.dtype[Any]

    def __call__(self, operands: Triple) -> Any:
        """Compute on the operands' device, or return None: nothing is allocated in a capture."""
        if runtime.getDevice() != self.device:
            with cupy.cuda.Device(self.device):
                return self(operands)
        stream = cupy.cuda.get_current_stream()
        if stream.is_capturing():
            return None
        q, k, v = operands
        out = cupy.ndarray(self.out_shape, self.dtype)
        lse = None if self.lse_shape is None else cupy.ndarray(self.lse_shape, self.lse_dtype)
        addresses = (
            q.data.ptr, k.data.ptr, v.data.ptr, out.data.ptr, 0 if lse is None else lse.data.ptr,
            *_score_params.NOTHING,
        )  # fmt: skip
        self.launch.run(addresses, stream.ptr, False)
        return out if lse is None else AttentionResult(out, lse)


class RepeatedBackward(NamedTuple):
    """The same of a call for the gradients of q, k and v."""

    device: int
    steps: tuple[tuple[Callable[[Addresses], Addresses], GradientLaunch], ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: np.dtype[Any]
    workspace_size: int
    turns: int  # where they begin in it
    turns_end: int

    @classmethod
    def of(cls, device: int, steps: tuple[Step, ...], *how: Any) -> RepeatedBackward:
        """Find the pointers of each of the ``steps`` by place instead of by name."""
        return cls(device, tuple((_picking(names), launch) for names, launch in steps), *how)

    def __call__(self, operands: Triple, given: Triple) -> Any:
        """Compute on the operands' device, or return None: nothing is allocated in a capture."""
        if runtime.getDevice() != self.device:
            with cupy.cuda.Device(self.device):
                return self(operands, given)
        stream = cupy.cuda.get_current_stream()
        if stream.is_capturing():
            return None
        (q, k, v), (dout, out, lse) = operands, given
        of_q, of_k, of_v = self.shapes
        dq, dk, dv = (cupy.ndarray(shape, self.dtype) for shape in (of_q, of_k, of_v))
        workspace = cupy.ndarray(self.workspace_size, np.uint8)
        rows = workspace.data.ptr
        addresses = (
            q.data.ptr, k.data.ptr, v.data.ptr, dout.data.ptr, out.data.ptr, lse.data.ptr,
            dq.data.ptr, dk.data.ptr, dv.data.ptr,
            rows, rows + self.turns, _one_pass.sums_behind(rows + self.turns_end), 0,
        )  # fmt: skip
        pointer = stream.ptr
        for pick, launch in self.steps:
            launch.run(pick(addresses), pointer)
        return Gradients(dq, dk, dv)


def _picking(names: tuple[str, ...]) -> Callable[[Addresses], Addresses]:
    """What picks the pointers of a launch out of _ADDRESSES; score arrays are not among them."""
    places = [_ADDRESSES.index(name if name in _ADDRESSES else "nothing") for name in names]
    if len(places) == 1:  # of one place itemgetter would return the pointer alone
        return lambda addresses: (addresses[places[0]],)
    return operator.itemgetter(*places)

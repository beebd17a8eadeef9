"""How long do gradients with the gradient of a bias take, compared with PyTorch's kernels?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

import cuflash
from benchmarks.cells import Run, free_memory
from benchmarks.peers import IMPLEMENTATIONS, ScaledDotProduct
from benchmarks.report import first_line
from cuflash.tuning import Workload
from cuflash.tuning._checking import AGREEMENT, difference

Array = Any
Call = Callable[[], tuple[Array, Array]]


class Case(NamedTuple):
    """Self-attention under a bias (1, heads, seqlen, seqlen) that all batch entries share."""

    batch: int
    heads: int
    seqlen: int
    head_dim: int
    dtype: str = "bfloat16"

    def workload(self) -> Workload:
        """The workload in the rows of results."""
        own = (self.batch, self.heads, self.heads, self.seqlen, self.seqlen)
        return Workload(*own, self.head_dim, self.head_dim, self.dtype, arrays=("bias",))


CASES = (
    Case(256, 4, 256, 32),  # a pair representation, as in AlphaFold
    Case(128, 4, 768, 32),
    Case(1, 16, 4096, 64),
    Case(32, 12, 512, 64),  # T5's relative positions
    Case(64, 8, 384, 16, "float32"),
)


def measure_bias_gradients(run: Run) -> None:
    """Time the gradients of q, k, v and the bias together, interleaved."""
    if run.xp is np:
        run.note("bias: it needs a GPU")
        return
    for case in CASES:
        work = case.workload()
        with run.clock.scope():
            ((q, k, v, dout),) = work.inputs(run.xp)
            bias = run.xp.random.RandomState(1).standard_normal(
                (1, case.heads, case.seqlen, case.seqlen), dtype=np.float32
            )
            arrays = (q, k, v, bias.astype(q.dtype), dout)
            calls: dict[str, Call] = {}
            truth = None
            for own in run.implementations:
                try:
                    call = _call(own, case.dtype, *arrays)
                    found = call()
                except Exception as error:
                    run.note(f"{own.name} {work}: {type(error).__name__}: {first_line(error)}")
                    continue
                truth = truth or tuple(array.copy() for array in found)
                apart = max(map(difference, found, truth))
                if apart <= AGREEMENT[case.dtype]:
                    calls[own.name] = call
                else:
                    run.note(f"{own.name} {work}: not timed, its gradients differ by {apart:.2g}")
            measured = run.clock.measure(calls, run.budget_ms)
        for name, ms in measured.items():
            run.add(IMPLEMENTATIONS[name], work, "bwd", ms, options="with dbias")
        calls.clear()
        free_memory(run.xp)


def _call(own: Any, dtype: str, q: Array, k: Array, v: Array, bias: Array, dout: Array) -> Call:
    """A call that returns (dq, dbias) and also computes dk and dv."""
    if own.name == "cuflash":
        _, pullback = cuflash.attention_vjp(q, k, v, bias=bias)

        def ours() -> tuple[Array, Array]:
            found = pullback(dout, wrt=("q", "k", "v", "bias"))
            return found.dq, found.dbias

        return ours
    if not isinstance(own, ScaledDotProduct) or dtype not in own.dtypes:
        raise TypeError("no gradient of a bias")
    return own.bias_gradients(q, k, v, bias, dout)

"""Where do the arrays of a call lie, as far as the choice of kernels depends on it?"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from cuflash._kernels.config import KernelConfig
from cuflash._problem.layout import Layout
from cuflash._problem.option_table import of_stages
from cuflash._problem.problem import Problem

_TMA_BYTES = 16  # what rows are multiples of that the copy engine loads
#: Arrays that all rows of an entry share: options with other arrays keep rows apart in any case.
_OPTIONS = tuple(
    name for o in of_stages("place", "row") for name in o.arrays if name != "q_lengths"
)
Layouts = Mapping[str, Layout]


class Access(NamedTuple):
    """Layouts and alignment of a call's arrays, by the names of the kernels' pointers."""

    layouts: Layouts
    #: Whether Hopper's copy engine can load the operands of a kernel by tensor maps.
    has_maps: Callable[[Problem, Layouts, KernelConfig], bool]
    address_bits: int = 0  # the last four bits of the addresses of q, k, v and dout, by or
    out_bits: int = 0  # the same of dout and out
    look_up_bits: int = 0  # the same of a bias and a mask

    def copy_bytes(self, problem: Problem, *names: str, address_bits: int | None = None) -> int:
        """Widest copy that the rows of these arrays allow."""
        bits = self.address_bits if address_bits is None else address_bits
        columns = {"q": problem.head_dim, "k": problem.head_dim}
        return min(
            self.layouts[name].copy_bytes(columns.get(name, problem.head_dim_v), bits)
            for name in names
        )


def in_c_order(problem: Problem, *, backward: bool = False) -> Access:
    """Access to aligned arrays as a problem lays them out: what is planned for without arrays."""
    ndim = len(problem.batch)
    layouts = {name: Layout.of(getattr(problem, name)) for name in ("q", "k", "v", "out")}
    if backward:
        layouts["dout"] = layouts["out"] = layouts["v"]  # as wide, in C order like it
    if problem.pages is not None:
        layouts["page_table"] = Layout.of(problem.pages.table)
    for name in _OPTIONS:
        operand = getattr(problem, name)
        if operand is not None:
            layouts[name] = Layout(operand.dtype.itemsize, operand.strides[:ndim])
    fit = rows_fit_tensor_maps(problem)
    return Access(layouts, lambda *_: fit)


def of_any_arrays(problem: Problem) -> Access:
    """Access that lets every gradient kernel serve: what a workspace has to suffice for."""
    return in_c_order(problem, backward=True)._replace(has_maps=lambda *_: True)


def forward_of_any_arrays(problem: Problem) -> Iterator[Access]:
    """Between them every kernel serves a forward, and rows of out are joined up to any axis.

    What a workspace has to suffice for, wherever the arrays of the call lie.
    """
    layouts = in_c_order(problem).layouts
    out = layouts["out"]
    for joined in range(len(out.batch) + 1):
        apart = tuple(2 * step if axis < joined else step for axis, step in enumerate(out.batch))
        own = {**layouts, "out": out._replace(batch=apart)}
        yield Access(own, lambda *_: True)
        yield Access(own, lambda *_: False)


def rows_fit_tensor_maps(problem: Problem) -> bool:
    """Whether rows of q, k and v are multiples of what the copy engine loads."""
    columns = {"q": problem.head_dim, "k": problem.head_dim, "v": problem.head_dim_v}
    return all(
        Layout.of(getattr(problem, name)).copy_bytes(width, 0) == _TMA_BYTES
        for name, width in columns.items()
    )

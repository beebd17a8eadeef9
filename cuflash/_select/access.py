"""Which layouts and alignments of a call's arrays does the choice of kernels depend on?"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from cuflash._kernels.config import KernelConfig
from cuflash._problem.layout import Layout
from cuflash._problem.option_table import of_stages
from cuflash._problem.problem import Problem

_TMA_BYTES = 16  # TMA loads rows that are multiples of so many bytes
#: Option arrays with one value for all rows of an entry. PackGQA excludes options with others.
_OPTIONS = tuple(
    name for o in of_stages("place", "row") for name in o.arrays if name != "q_lengths"
)
Layouts = Mapping[str, Layout]


class Access(NamedTuple):
    """Layouts and alignment of a call's arrays, by the names of the kernels' pointers."""

    layouts: Layouts
    #: Whether TMA can load the operands of a kernel, as tensor maps describe them.
    has_maps: Callable[[Problem, Layouts, KernelConfig], bool]
    address_bits: int = 0  # low four bits of the addresses of q, k, v and dout, or-ed
    out_bits: int = 0  # low four bits of the addresses of dout and out, or-ed
    look_up_bits: int = 0  # low four bits of the addresses of a bias and a mask, or-ed

    def copy_bytes(self, problem: Problem, *names: str, address_bits: int | None = None) -> int:
        """Bytes of the widest copy that the rows of these arrays allow."""
        bits = self.address_bits if address_bits is None else address_bits
        columns = {"q": problem.head_dim, "k": problem.head_dim}
        return min(
            self.layouts[name].copy_bytes(columns.get(name, problem.head_dim_v), bits)
            for name in names
        )


def in_c_order(problem: Problem, *, backward: bool = False) -> Access:
    """Access to aligned arrays with the layouts of a problem, for plans without arrays."""
    ndim = len(problem.batch)
    layouts = {name: Layout.of(getattr(problem, name)) for name in ("q", "k", "v", "out")}
    if backward:
        layouts["dout"] = layouts["out"] = layouts["v"]  # as wide as v, and in C order
    if problem.pages is not None:
        layouts["page_table"] = Layout.of(problem.pages.table)
    for name in _OPTIONS:
        operand = getattr(problem, name)
        if operand is not None:
            layouts[name] = Layout(operand.dtype.itemsize, operand.strides[:ndim])
    fit = rows_fit_tensor_maps(problem)
    return Access(layouts, lambda *_: fit)


def of_any_arrays(problem: Problem) -> Access:
    """Access with which every gradient kernel is eligible: a workspace must suffice for all."""
    return in_c_order(problem, backward=True)._replace(has_maps=lambda *_: True)


def forward_of_any_arrays(problem: Problem) -> Iterator[Access]:
    """Accesses that cover all forward kernels, and PackGQA of any number of last batch axes.

    A workspace must suffice for each of them, whatever the layouts of a call's arrays are.
    """
    layouts = in_c_order(problem).layouts
    out = layouts["out"]
    for joined in range(len(out.batch) + 1):
        apart = tuple(2 * step if axis < joined else step for axis, step in enumerate(out.batch))
        own = {**layouts, "out": out._replace(batch=apart)}
        yield Access(own, lambda *_: True)
        yield Access(own, lambda *_: False)


def rows_fit_tensor_maps(problem: Problem) -> bool:
    """Whether rows of q, k and v are multiples of 16 bytes, as TMA needs."""
    columns = {"q": problem.head_dim, "k": problem.head_dim, "v": problem.head_dim_v}
    return all(
        Layout.of(getattr(problem, name)).copy_bytes(width, 0) == _TMA_BYTES
        for name, width in columns.items()
    )

"""What does one launch need beside its pointers? The kernel, the grid, the parameters."""

from __future__ import annotations

import itertools
import struct
from typing import Any, NamedTuple

import numpy as np

from cuflash._errors import problem_with
from cuflash._jit.compilation import Kernel, compile_kernel
from cuflash._kernels import params as kernel_params
from cuflash._kernels.config import KernelConfig
from cuflash._launch import score_params
from cuflash._launch.grid import even_sections, plan_grid
from cuflash._launch.kernel_launcher import Addresses, Starter
from cuflash._problem.layout import Layout
from cuflash._problem.problem import Problem
from cuflash._select import hardware
from cuflash._select.hardware import Hardware

#: What kernels read and write in the dtype that q, k and v promote to.
_OF_THE_DTYPE = frozenset(("q", "k", "v", "dout", "dq", "dk", "dv"))


class Launch(NamedTuple):
    """One kernel with everything but its pointers."""

    kernel: Kernel
    grid: int
    pointers: struct.Struct
    params: bytes  # what follows the pointers
    offsets: tuple[Addresses, ...]
    starter: Starter

    def run(self, pointers: Addresses, stream: int, captured: bool = False) -> None:  # noqa: ARG002
        """Launch on ``stream`` with these addresses; capturing makes no difference."""
        for offsets in self.offsets:
            moved = tuple(map(int.__add__, pointers, offsets)) if offsets else pointers
            self.starter.start(moved, self._pack, stream)

    def _pack(self, pointers: Addresses) -> bytes:
        return self.pointers.pack(*pointers) + self.params


def plan_launch(
    config: KernelConfig,
    problem: Problem,
    layouts: dict[str, Layout],
    device: int,
    *,
    num_blocks: int,
    streamed_bytes: int = 0,
    summed: tuple[bool, ...] | None = None,
) -> Launch:
    """Prepare one launch; ``summed`` axes are walked inside a block of threads."""
    params = kernel_params.with_reals(kernel_params.STRUCTS[config.params], config.real_bytes)
    names = kernel_params.pointer_names(params)
    packed = problem.cu_seqlens_q is not None
    absent = Layout(1, (0,) * len(problem.batch))
    ordered = [layouts.get(name, absent) for name in names]
    for name in _OF_THE_DTYPE & layouts.keys() & set(names):
        if layouts[name].itemsize != problem.dtype.itemsize:
            raise AssertionError(f"{name}: {layouts[name].itemsize} bytes, not {problem.dtype}")
    parts = getattr(config, "column_parts", 1)
    grid = plan_grid(
        problem.batch,
        [layout.batch for layout in ordered],
        summed or (False,) * len(problem.batch),
        num_blocks * parts,
        kernel_params.MAX_BATCH_AXES - packed,
    )
    section = 1
    if config.computes == "dqkv" or getattr(config, "window_right", False):
        own = hardware.of_device(device)
        section = _owners_per_section(config, grid.num_owners, streamed_bytes, own)
    filled = np.zeros(1, params)[0]
    filled["batch"]["num_axes"] = len(grid.axes)
    filled["batch"]["extent"] = [e for e, _ in grid.axes] + [1] * (6 - len(grid.axes))
    filled["grid"] = (num_blocks, grid.num_owners, section, grid.entries_per_owner)
    for column, (name, layout) in enumerate(zip(names, ordered, strict=True)):
        part = filled["score"] if name in kernel_params.SCORE_POINTERS else filled
        if f"{name}_strides" in part.dtype.names:
            strides = part[f"{name}_strides"]
        elif f"{name}_layout" not in part.dtype.names:  # the same for all entries
            continue
        else:
            strides = part[f"{name}_layout"]["batch"]
            part[f"{name}_layout"]["row"] = layout.row // layout.itemsize
            part[f"{name}_layout"]["column"] = layout.column // layout.itemsize
        for axis, (_, steps) in enumerate(grid.axes):
            strides["axis"][axis] = steps[column] // layout.itemsize
        if packed:
            strides["axis"][-1] = layout.sequence // layout.itemsize
    filled["head_dim_v"] = problem.head_dim_v
    if "score" in (params.names or ()):
        filled["head_dim"] = problem.head_dim
        score_params.fill(filled["score"], problem)
    else:
        filled["seqlen_q"] = problem.seqlen_q
        filled["recomputes_far_rows"] = score_params.recomputes_far_rows(problem)
    pointers = struct.Struct(f"<{len(names)}Q")
    kernel, blocks = compile_kernel(config, device), num_blocks * grid.num_owners * parts
    return Launch(
        kernel=kernel,
        grid=blocks,
        pointers=pointers,
        params=filled.tobytes()[pointers.size :],
        offsets=grid.offsets(),
        starter=Starter(kernel, blocks),
    )


def _owners_per_section(config: Any, num_owners: int, streamed_bytes: int, own: Hardware) -> int:
    """How many owners start their heaviest tiles together, before any starts a lighter one.

    As many as possible for balance, but no more than whose streamed operands fit half of the L2
    cache, or than leave about eight blocks of threads to each owner at a time, which then share
    what they stream. Sections are of even size: a small last one would end in a tail.

    dk and dv on Hopper, with one block of threads for each processor, always leave them eight:
    docs/backward-sm90.md. Their tiles begin at different queries and share less than those of dq.
    Pairs of blocks of threads leave each owner sixteen pairs, eight where those that add in order
    have fewer to wait for under a causal bound, and tiles of one pass that add in any order
    sixteen, which share more of what they stream. Those that add in order wait for those of
    their owner that start with them: below head size 128 more owners start together, up to a half
    of the processors, as long as the L2 cache holds what they stream and keep and sum, thrice what
    is streamed; half of it without a causal bound, where all rows are under way. (D21)
    """
    processors, cache, fused = own.multiprocessors, own.l2_bytes, config.computes == "dqkv"
    if config.cluster_blocks > 1:
        waits_less = config.ordered and config.window_right
        return even_sections(num_owners, processors // (16 if waits_less else 32))
    if fused or (config.tensor_maps and config.computes == "dkv"):
        owners = processors // 8
        if fused and not config.ordered:
            owners = processors // 16
        elif fused and config.head_dim < 128:
            fitting = cache // (1 if config.window_right else 2) // max(3 * streamed_bytes, 1)
            owners = max(owners, min(fitting, processors // 2))
        return even_sections(num_owners, owners)
    fitting = cache // 2 // max(streamed_bytes, 1)
    return even_sections(num_owners, max(fitting, processors // 4))


def summed_axes(problem: Problem, config: Any) -> tuple[bool, ...]:
    """The batch axes over which the result of a gradient's kernel is summed."""
    owned = problem.q
    if config.computes != "dq":
        owned = problem.k if getattr(config, "grad_k", True) else problem.v
    return owned.summed


def num_tiles(problem: Problem, rows: int, block: int) -> int:
    """Tiles of one owner; of packed sequences, as many as may be: ``score/seqlen.cuh``."""
    if problem.cu_seqlens_q is None:
        return -(-rows // block)
    return rows // block + problem.cu_seqlens_q.shape[0] - 1


def row_layout(problem: Problem, itemsize: int, strides: tuple[int, ...] | None) -> Layout:
    """Layout of an array batch + (m,), C-contiguous if ``strides`` is None."""
    if strides is None:
        steps = itertools.accumulate((problem.seqlen_q, *problem.batch[:0:-1]), int.__mul__)
        return Layout(itemsize, tuple(s * itemsize for s in steps)[::-1], itemsize)
    *batch, row = strides
    if len(problem.batch) != len(problem.batch_shape):  # GQA splits the head axis
        head = batch.pop()
        batch += [head * problem.batch[-1], head]
    return Layout(itemsize, tuple(batch), row)


def refuse_misaligned(layouts: dict[str, Layout], addresses: dict[str, int]) -> None:
    """Raise for an array whose elements lie across their natural boundaries."""
    for name, layout in layouts.items():
        size = layout.itemsize
        if addresses[name] % size or any(
            stride % size for stride in (*layout.batch, layout.row, layout.column)
        ):
            raise problem_with(
                name, ValueError, got=f"elements of {size} bytes off their boundaries",
                expected="an address and strides that are multiples of the element size",
                fix="copy the array's bytes into a new one",
            )  # fmt: skip


def copy_bytes(
    problem: Problem, layouts: dict[str, Layout], names: tuple[str, ...], address_bits: int
) -> int:
    columns = {"q": problem.head_dim, "k": problem.head_dim}
    return min(
        layouts[name].copy_bytes(columns.get(name, problem.head_dim_v), address_bits)
        for name in names
    )

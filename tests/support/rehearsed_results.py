"""What would kernels have written? The CPU path writes it into the same arrays in host memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from cuflash._api import paged, quantize, varlen
from cuflash._arrays import Array, Triple, rounded
from cuflash._host import cache as host_cache
from cuflash._host.backward import backward as host_backward
from cuflash._host.forward import forward as host_forward
from cuflash._host.scores import arithmetic
from cuflash._host.tiles import operations
from cuflash._problem.options import Options
from cuflash._problem.problem import Problem
from cuflash._results import Saved

_OF_CACHES = ("grow", "write", "take", "turn")
_OPERATIONS = 3e9  # at most, for a call on the CPU path


def seams() -> list[tuple[Any, str, Callable[..., Any]]]:
    """Return module and name of each launching function, and what writes its results."""
    from cuflash._launch import cache, float8, one_pass, run

    of_caches = [(cache, name, getattr(host_cache, name)) for name in _OF_CACHES]
    return [
        (run, "forward", _forward), (run, "backward", _backward), *of_caches,
        (float8, "dequantized", _dequantized), (float8, "quantized", _quantized),
        (one_pass, "_by_kernel", one_pass._by_numpy),
    ]  # fmt: skip


def _check_size(problem: Problem) -> None:
    if operations(problem) > _OPERATIONS:
        raise NotImplementedError("a call too large for the CPU path")


def _forward(
    problem: Problem, qkv: Triple, options: Options, out: Array, lse: Array | None, *,
    cu_seqlens: Any = None, so_far: Any = None, page_table: Any = None, **_: Any,
) -> None:  # fmt: skip
    _check_size(problem)
    lse = np.empty(problem.lse_shape, problem.lse_dtype) if lse is None else lse
    q, k, v = qkv
    if so_far is not None or q.dtype.itemsize == 1:
        raise NotImplementedError("the bits of results that are joined, or of operands of 8 bits")
    if cu_seqlens:
        varlen._forward_on_the_host(problem, options, cu_seqlens, qkv, out, lse)
    elif page_table is not None:
        table = np.clip(page_table.reshape(len(page_table), -1), 0, problem.pages.num_pages - 1)
        pages = (_pages(problem, a, own.page) for a, own in ((k, problem.k), (v, problem.v)))
        lengths = np.clip(np.asarray(options.kv_lengths).reshape(-1), 0, problem.seqlen_k)
        q = paged._with_core_last("q", q, problem.axes[0])
        own = paged._Paged(q, *pages, table, lengths)
        paged._on_the_host(problem, own, options, out, lse)
    else:
        host_forward(problem, qkv, options, out, lse, origin=problem.origin)


def _pages(problem: Problem, like: Array, stride: int) -> Array:
    """Return a view (pages, *heads, page_size, d) of the array that has all keys of a sequence."""
    shape = (problem.pages.num_pages, *like.shape[1:-2], problem.pages.size, like.shape[-1])
    return np.lib.stride_tricks.as_strided(like, shape, (stride, *like.strides[1:]))


def _backward(
    problem: Problem, qkv: Triple, options: Options, saved: Saved, gradients: dict[str, Array], *,
    cu_seqlens: Any = None, **_: Any,
) -> None:  # fmt: skip
    _check_size(problem)
    if cu_seqlens:
        varlen._backward_on_the_host(problem, options, cu_seqlens, qkv, saved, gradients)
    else:
        host_backward(problem, qkv, options, saved, gradients, origin=problem.origin)


def _dequantized(_: str, array: Array, factor: Any, out: Array) -> None:
    wide = arithmetic(out.dtype)
    out[...] = rounded(array.astype(wide) * np.asarray(factor, wide), out.dtype)


def _quantized(array: Array, factor: Array, dtype: np.dtype[Any]) -> Array:
    return quantize._divided(array, factor, dtype)

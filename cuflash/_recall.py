"""Was this call made before? Then what was checked still holds, and only addresses are new.

A key holds all that checks and kernels depend on: layouts, alignment, devices, options without
arrays. Calls with anything else (axes, destinations, NumPy arrays) are described anew each time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cuflash._arrays import Array
from cuflash._options import Options

#: Allocates, launches and returns the result; None where this call needs its checks after all.
Repeat = Callable[[Array, Array, Array], Any]
_LIMIT = 4096
_known: dict[Any, Repeat] = {}
_kinds: set[type] = set()  # of the arrays of known calls


def recall(q: Any, k: Any, v: Any, options: Options, return_lse: bool) -> Any:
    """The result of a call that is known, or None."""
    kind = type(q)
    if kind not in _kinds or type(k) is not kind or type(v) is not kind:
        return None
    repeat = _known.get(_key(q, k, v, options, return_lse))
    return None if repeat is None else repeat(q, k, v)


def remember(
    q: Array, k: Array, v: Array, options: Options, return_lse: bool, repeat: Repeat
) -> None:
    """Know this call from now on."""
    apart = (options.seed, options.score_mod, options.mask_mod)
    if options.arrays or apart != (None, None, None):  # values and places that may change
        return
    if len(_known) >= _LIMIT:
        _known.clear()
    _kinds.add(type(q))
    _known[_key(q, k, v, options, return_lse)] = repeat


def forget() -> None:
    """Know no call any more."""
    _known.clear()


def _key(q: Array, k: Array, v: Array, options: Options, return_lse: bool) -> Any:
    at_q, at_k, at_v = q.data, k.data, v.data
    return (
        q.shape, k.shape, v.shape, q.strides, k.strides, v.strides, q.dtype, k.dtype, v.dtype,
        at_q.device_id, at_k.device_id, at_v.device_id, (at_q.ptr | at_k.ptr | at_v.ptr) & 15,
        options, bool(return_lse),
    )  # fmt: skip

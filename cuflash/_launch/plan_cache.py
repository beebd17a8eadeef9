"""Was this call made before? The one cache of plans: a repeated call is one lookup.

A key holds the values of everything that a plan depends on: layouts, dtypes, alignment, device and
options, but no object identities, addresses or streams. There are two kinds of keys. A plain call
(CuPy arrays, also for its options, no axes, no destinations) is found before anything is checked:
the cache keeps a function that repeats it. Any other call is checked first, and found by its
Problem and the layouts of its results: the cache keeps the Plan that launches it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cuflash._arrays import Triple
from cuflash._problem.options import Options

#: Takes the addresses of a call's arrays, allocates, launches and returns the result; returns None
#: where this call needs its checks after all. (D65)
Repeat = Callable[..., Any]
_LIMIT = 4096  # most plans that are kept
_plans: dict[Any, Any] = {}  # by key
_kinds: set[type] = set()  # types of the arrays of plain calls


def find(key: Any) -> Any:
    """The plan of this key, or None."""
    return _plans.get(key)


def keep(key: Any, plan: Any) -> Any:
    """Keep ``plan`` under this key, and return it."""
    if len(_plans) >= _LIMIT:
        _plans.clear()
    _plans[key] = plan
    return plan


def forget() -> None:
    """Drop all plans, as after a change of the table of tiles."""
    _plans.clear()


def recall(options: Options, flag: bool, operands: Triple, given: Triple | None = None) -> Any:
    """The result of a plain call that the cache can repeat, or None.

    ``operands`` are (q, k, v), ``given`` is (dout, out, lse) of a gradient; ``flag`` is a bool
    argument of the call beside its options.
    """
    found = _key(options, flag, operands, given)
    if found is None:
        return None
    key, addresses = found
    repeat = _plans.get(key)
    return None if repeat is None else repeat(*addresses)


def may_be_known(options: Options) -> bool:
    """Whether calls with these options depend on nothing that may change but their arrays."""
    return (options.seed, options.score_mod, options.mask_mod) == (None, None, None)


def remember(
    repeat: Repeat, options: Options, flag: bool, operands: Triple, given: Triple | None = None
) -> None:
    """Keep ``repeat`` for this plain call; its options ``may_be_known``."""
    _kinds.add(type(operands[0]))
    found = _key(options, flag, operands, given)
    if found is not None:
        keep(found[0], repeat)


def _key(
    options: Options, flag: bool, operands: Triple, given: Triple | None
) -> tuple[Any, tuple[int, ...]] | None:
    """The key of a plain call, and the addresses of all its arrays; None for any other call.

    The key has a signature with the layouts of the options' arrays: the options themselves would
    keep the arrays alive.
    """
    found = _layouts(*operands)
    if found is None or not may_be_known(options):
        return None
    layouts, addresses = found
    saved: Any = None
    if given is not None:
        more = _layouts(*given)
        if more is None:
            return None
        saved, addresses = more[0], addresses + more[1]
    where: list[int] = []
    for array in options.arrays.values():
        if type(array) is not type(operands[0]):
            return None
        place = array.data
        address = place.ptr
        where += place.device_id, address & 15
        addresses += (address,)
    return (options.signature, flag, layouts, saved, *where), addresses


def _layouts(a: Any, b: Any, c: Any) -> tuple[Any, tuple[int, ...]] | None:
    """What plans depend on in three arrays, and their addresses; None if they are not plain."""
    kind = type(a)
    if kind not in _kinds or type(b) is not kind or type(c) is not kind:
        return None
    at_a, at_b, at_c = a.data, b.data, c.data
    addresses = ptr_a, ptr_b, ptr_c = at_a.ptr, at_b.ptr, at_c.ptr
    return (
        a.shape, b.shape, c.shape, a.strides, b.strides, c.strides, a.dtype, b.dtype, c.dtype,
        at_a.device_id, at_b.device_id, at_c.device_id, (ptr_a | ptr_b | ptr_c) & 15,
    ), addresses  # fmt: skip

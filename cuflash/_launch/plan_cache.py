"""Was this call made before? The one cache of plans: a repeated call is one lookup.

A key holds the values of all that a plan depends on: layouts, dtypes, alignment, device and
options, but no identities, no addresses and no stream. There are two kinds of keys. A plain call
(CuPy arrays, those of its options too, no axes, no destinations) is found before anything is
checked: the function that is kept repeats it. Any other call is checked first, and found by its
Problem and the layouts of its results: what is kept is the Plan that launches it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cuflash._arrays import Triple
from cuflash._problem.options import Options

#: Given addresses of its arrays, allocates, launches and returns the result; None where this call
#: needs its checks after all. (D65)
Repeat = Callable[..., Any]
_LIMIT = 4096
_plans: dict[Any, Any] = {}
_kinds: set[type] = set()  # of the arrays of plain calls


def find(key: Any) -> Any:
    """The plan of this key, or None."""
    return _plans.get(key)


def keep(key: Any, plan: Any) -> Any:
    """Know ``plan`` from now on."""
    if len(_plans) >= _LIMIT:
        _plans.clear()
    _plans[key] = plan
    return plan


def forget() -> None:
    """Know no plan any more, as after a change of the table of tiles."""
    _plans.clear()


def recall(options: Options, flag: bool, operands: Triple, given: Triple | None = None) -> Any:
    """The result of a plain call that is known, or None.

    ``operands`` are (q, k, v), ``given`` is (dout, out, lse) of a gradient; ``flag`` is a bool that
    is asked for beside options.
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
    """Know this plain call from now on; its options ``may_be_known``."""
    _kinds.add(type(operands[0]))
    found = _key(options, flag, operands, given)
    if found is not None:
        keep(found[0], repeat)


def _key(
    options: Options, flag: bool, operands: Triple, given: Triple | None
) -> tuple[Any, tuple[int, ...]] | None:
    """What a plain call is known by, and the addresses of all its arrays; None of another call.

    A signature has the layouts of the options' arrays; options would keep the arrays alive.
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
    """All that plans ask of arrays but their addresses, and the addresses; None of other arrays."""
    kind = type(a)
    if kind not in _kinds or type(b) is not kind or type(c) is not kind:
        return None
    at_a, at_b, at_c = a.data, b.data, c.data
    addresses = ptr_a, ptr_b, ptr_c = at_a.ptr, at_b.ptr, at_c.ptr
    return (
        a.shape, b.shape, c.shape, a.strides, b.strides, c.strides, a.dtype, b.dtype, c.dtype,
        at_a.device_id, at_b.device_id, at_c.device_id, (ptr_a | ptr_b | ptr_c) & 15,
    ), addresses  # fmt: skip

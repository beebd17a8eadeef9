"""Was this call made before? The one cache of plans: a repeated call is one lookup.

A key holds the values of all that a plan depends on: layouts, dtypes, alignment, device and
options, but no identities, no addresses and no stream. There are two kinds of keys. A plain call
(CuPy arrays, options without arrays, no axes, no destinations) is found before anything is checked:
the function that is kept repeats it. Any other call is checked first, and found by its Problem and
the layouts of its results: what is kept is the Plan that launches it.
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
_NOTHING: tuple[tuple[()], tuple[()]] = (), ()
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
    found, more = _layouts(*operands), _NOTHING if given is None else _layouts(*given)
    if found is None or more is None:
        return None
    repeat = _plans.get((options, flag, found[0], more[0]))
    return None if repeat is None else repeat(*found[1], *more[1])


def may_be_known(options: Options) -> bool:
    """Whether calls with these options depend on nothing that may change between them."""
    changing = (options.seed, options.score_mod, options.mask_mod)
    return not options.arrays and changing == (None, None, None)


def remember(
    repeat: Repeat, options: Options, flag: bool, operands: Triple, given: Triple | None = None
) -> None:
    """Know this plain call from now on; its options ``may_be_known``."""
    _kinds.add(type(operands[0]))
    found, more = _layouts(*operands), _NOTHING if given is None else _layouts(*given)
    if found is not None and more is not None:
        keep((options, flag, found[0], more[0]), repeat)


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

"""Is attention by anybody as exact as its dtype allows? The error budget as one assertion."""

from __future__ import annotations

from typing import Any, Unpack

import numpy as np

from cuflash._api import float8
from cuflash._api.arguments import QKV
from cuflash._arrays import is_cupy, native
from cuflash._errors import wrong_type, wrong_value
from cuflash._problem.checks import FLOATS, require_shape
from cuflash._problem.float8 import FLOAT8, RESULTS
from cuflash._problem.operand import checked_axes
from cuflash._problem.option_table import FIELDS
from cuflash._problem.options import OPTION_NAMES, Options, ScoreOptions, resolve
from cuflash._problem.problem import describe
from cuflash._results import Gradients
from cuflash.testing._budget import Budget, BudgetError
from cuflash.testing._call import Call

_DEFAULTS = Options()


def assert_attention_close(
    actual: Any,
    q: Any,
    k: Any,
    v: Any,
    /,
    *,
    gradients: Gradients | None = None,
    dout: Any = None,
    dlse: Any = None,
    options: Options | None = None,
    axes: Any = None,
    precision: str | None = None,
    **score_options: Unpack[ScoreOptions],
) -> None:
    """Raise unless a result of attention is within the error budget of its dtype.

    The budget has no tolerance to choose: it follows from the roundings that the dtype declares,
    on these inputs. So it holds for peaked and for flat rows, for scores near 0 and near 60,000.

    Parameters
    ----------
    actual : array, batch + (m, d_v), or a pair (out, lse)
        What is tested, by whatever implementation; with the natural logarithm of the sums, both.
    q, k, v : array
        The inputs, as :func:`cuflash.attention` takes them: NumPy or CuPy arrays, or what DLPack
        hands out. They are read as they are stored.
    gradients : Gradients, optional
        Gradients by input; all of its fields that are not None are tested. They are those of
        ``sum(dout * out) + sum(dlse * lse)``.
    dout : array, batch + (m, d_v)
        Cotangent of out; required with ``gradients``.
    dlse : array, batch + (m,), optional
        Cotangent of lse.
    options, axes, **score_options
        As in :func:`cuflash.attention`.
    precision : {None, "ieee", "tf32"}
        ``"tf32"`` allows for products of TF32. Where an operand has 8 bits, the budget is that of
        weights of 8 bits, on the arrays that its dtype and scale stand for, which powers of two as
        scales keep exact; of results in float64 it is that of float32.

    Raises
    ------
    AssertionError
        With the rule that is broken, the worst element, its error and what is allowed.
    TypeError, ValueError
        For inputs that are no legal call.
    NotImplementedError
        For a ``score_mod`` with a derivative other than 1 or -1.

    Notes
    -----
    The definition is computed in float64 (``longdouble`` for float64), and arrays of batch +
    (m, n) are held: sequences of some thousand rows at most.

    Rules: an element errs at most twice as far as the worst of a flawless fused kernel does on the
    same inputs, and never further than bounds that are proved; the error's root mean square is at
    most 1.25 times (gradients: 1.5 times) that kernel's, as a whole and in each head; queries that
    see no key give exactly 0 and -inf; results are finite exactly where the definition is. The
    derivation stands in ``cuflash/testing/_budget.py``.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> from cuflash.testing import assert_attention_close
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 2, 64, 16), dtype=np.float32)
    >>> scores = q @ k.swapaxes(-1, -2) / 4
    >>> p = np.exp(scores - scores.max(-1, keepdims=True))
    >>> out = p @ v / p.sum(-1, keepdims=True)
    >>> assert_attention_close(out, q, k, v)
    >>> rounded = out.astype(np.float16).astype(np.float32)
    >>> assert_attention_close(rounded, q, k, v)  # doctest: +IGNORE_EXCEPTION_DETAIL
    Traceback (most recent call last):
    BudgetError: R6: ...
    """
    chosen = resolve(options, score_options)
    pairs = checked_axes(axes)
    wrt = () if gradients is None else _names(gradients)
    if wrt and dout is None:
        raise wrong_value("dout", "gradients without dout", "the cotangent of out")
    given = {n: _on_the_host(n, array) for n, array in zip(QKV, (q, k, v), strict=True)}
    parts = actual if isinstance(actual, tuple) else (actual, None)
    if len(parts) != 2:
        raise wrong_type("actual", f"a tuple of {len(parts)}", "out, or a pair (out, lse)")
    out = _real("actual", parts[0])
    lse = None if parts[1] is None else _real("actual", parts[1])
    keywords = _keywords(chosen)
    is_float8 = float8.among(chosen, *given.values())
    if is_float8:
        own = out.dtype if out.dtype in RESULTS else np.dtype(np.float32)
        q, k, v = given.values()
        plain = float8.dequantized(q, k, v, Options(**keywords), axes=axes, out_dtype=own)
        given = dict(zip(QKV, plain[:3], strict=True))
        keywords = _keywords(plain.options)
    if absent := [name for name in wrt if name not in (*QKV, *keywords, "scale")]:
        got = f"a gradient of {absent[0]}, which the call does not have"
        raise wrong_value("gradients", got, "gradients of its inputs")
    problem = describe(
        given["q"], given["k"], given["v"], Options(**keywords), axes=axes, precision=precision
    )
    if out.shape != problem.out_shape:
        raise BudgetError(f"actual: got shape {out.shape}, expected {problem.out_shape}")
    dout = np.zeros_like(out) if dout is None else _real("dout", dout)
    require_shape("dout", dout, problem.out_shape, "actual")
    if dlse is not None:
        dlse = _real("dlse", dlse)
        require_shape("dlse", dlse, problem.lse_shape, "lse")
    of = dict(zip(QKV, pairs, strict=False))
    out, dout = (np.moveaxis(array, pairs[3], (-2, -1)) for array in (out, dout))
    inputs = {n: np.moveaxis(array, of[n], (-2, -1)) for n, array in given.items()}
    call = Call(
        **inputs,
        dout=dout,
        dlse=dlse,
        options=keywords,
        wrt=wrt,
        float8=is_float8,
        tf32=precision == "tf32" and all(a.dtype == np.float32 for a in inputs.values()),
    )
    budget = Budget(call)
    budget.check_forward(out, lse)
    if gradients is None:
        return
    arrays = {}
    for name in wrt:
        array = _real(FIELDS[name], getattr(gradients, FIELDS[name]))
        arrays[name] = np.moveaxis(array, of[name], (-2, -1)) if name in of else array
    budget.check_backward(arrays, given=None if lse is None else (out, lse))


def _names(gradients: Gradients) -> tuple[str, ...]:
    """The inputs with a gradient."""
    if not isinstance(gradients, Gradients):
        raise wrong_type("gradients", type(gradients).__name__, "a cuflash.Gradients")
    found = tuple(name for name, own in FIELDS.items() if getattr(gradients, own) is not None)
    if not found:
        raise wrong_value("gradients", "no gradient", "at least one, or gradients=None")
    return found


def _keywords(options: Options) -> dict[str, Any]:
    """The options that are given, with arrays on the host."""
    given = {name: getattr(options, name) for name in OPTION_NAMES}
    return {
        name: _moved(name, value)
        for name, value in given.items()
        if value is not getattr(_DEFAULTS, name)
    }


def _moved(name: str, value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_moved(name, part) for part in value)
    return _on_the_host(name, value) if hasattr(value, "strides") else value


def _on_the_host(name: str, array: Any) -> Any:
    """An array as NumPy's."""
    own = native(name, array)
    if not is_cupy(own):
        return own
    # CuPy copies no elements of 8-bit floats, which an array that is not contiguous needs.
    return own.view(np.uint8).get().view(own.dtype) if own.dtype in FLOAT8 else own.get()


def _real(name: str, array: Any) -> Any:
    """An array of real numbers as NumPy's; of complex ones a part would not be looked at."""
    own = _on_the_host(name, array)
    if own.dtype.kind not in "iuf" and own.dtype not in (*FLOATS, *FLOAT8):
        raise wrong_type(name, f"dtype {own.dtype}", "real numbers")
    return own

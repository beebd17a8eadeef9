"""Is any implementation's attention as exact as its dtype allows? The error budget, asserted."""

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

    There is no tolerance to choose: the budget follows from the roundings that the dtype implies
    for these inputs. It holds for peaked and for flat rows, for scores near 0 and near 60,000.

    Parameters
    ----------
    actual : array, batch + (m, d_v), or a pair (out, lse)
        The result of any implementation: the output, or the output and the logsumexp (natural
        logarithm).
    q, k, v : array
        The inputs, as :func:`cuflash.attention` takes them: NumPy or CuPy arrays, or objects that
        support DLPack. Their stored values count as exact.
    gradients : Gradients, optional
        Gradients by input. All fields that are not None are tested, as gradients of
        ``sum(dout * out) + sum(dlse * lse)``.
    dout : array, batch + (m, d_v)
        Cotangent of out; required with ``gradients``.
    dlse : array, batch + (m,), optional
        Cotangent of lse.
    options, axes, **score_options
        As in :func:`cuflash.attention`.
    precision : {None, "ieee", "tf32"}
        ``"tf32"`` permits TF32 products. If an operand has 8 bits, the budget is that of 8-bit
        weights on the dequantised arrays, which are exact if the scales are powers of two; for
        results in float64 the budget is then that of float32.

    Raises
    ------
    AssertionError
        Names the broken rule, the worst element, its error and the allowed error.
    TypeError, ValueError
        For inputs that are not a valid call.
    NotImplementedError
        For a ``score_mod`` with a derivative other than 1 or -1.

    Notes
    -----
    The definition is computed in float64 (``longdouble`` for float64) with arrays of shape batch +
    (m, n) in memory, so use sequences of at most a few thousand rows.

    Rules: the error of an element is at most twice the largest error of a flawless fused kernel on
    the same inputs, and never above proved bounds. The root mean square of the error is at most
    1.25 times (gradients: 1.5 times) that of the same kernel, as a whole and in each head. Queries
    that see no key give exactly 0 and -inf. Results are finite exactly where the definition is. The
    derivation is in ``cuflash/testing/_budget.py``.

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
    """Names of the inputs with a gradient."""
    if not isinstance(gradients, Gradients):
        raise wrong_type("gradients", type(gradients).__name__, "a cuflash.Gradients")
    found = tuple(name for name, own in FIELDS.items() if getattr(gradients, own) is not None)
    if not found:
        raise wrong_value("gradients", "no gradient", "at least one, or gradients=None")
    return found


def _keywords(options: Options) -> dict[str, Any]:
    """The options that differ from the defaults, with arrays on the host."""
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
    """Return a NumPy array."""
    own = native(name, array)
    if not is_cupy(own):
        return own
    # CuPy cannot copy non-contiguous arrays of 8-bit floats.
    return own.view(np.uint8).get().view(own.dtype) if own.dtype in FLOAT8 else own.get()


def _real(name: str, array: Any) -> Any:
    """Return a NumPy array of real numbers. Imaginary parts would not be checked."""
    own = _on_the_host(name, array)
    if own.dtype.kind not in "iuf" and own.dtype not in (*FLOATS, *FLOAT8):
        raise wrong_type(name, f"dtype {own.dtype}", "real numbers")
    return own

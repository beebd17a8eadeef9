"""Is the value of an argument legal? Each check returns the value in plain form, or raises.

A check takes the argument's name, for the message, and the value.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import numpy as np
from ml_dtypes import bfloat16

from cuflash._arrays import Array, is_cupy, native
from cuflash._errors import shown, wrong_type, wrong_value

FLOATS = tuple(np.dtype(t) for t in (np.float16, bfloat16, np.float32, np.float64))
#: The largest offset in either direction. The widest window is twice as wide: no 64-bit sum wraps,
#: and such a window hides no key of an array.
FARTHEST = 2**59
_WIDEST = 2 * FARTHEST
_MOST_AXES = 32  # as many as NumPy broadcasts


def is_integer(value: Any) -> bool:
    """Whether ``value`` is an integer and neither a bool nor an array."""
    scalar = hasattr(type(value), "__index__") and not hasattr(value, "shape")
    return isinstance(value, np.integer) or (scalar and not isinstance(value, bool))


def integer_value(name: str, value: Any, expected: str) -> int:
    """The int of a value that :func:`is_integer` accepts; raise if a caller's object refuses."""
    try:
        return operator.index(value)
    except Exception as error:
        raise _refused(name, value, error, expected) from error


def dtype_of(name: str, value: Any, expected: str) -> np.dtype[Any]:
    """The dtype that a value names. None raises, although NumPy takes it for float64."""
    try:
        if value is not None:
            found: np.dtype[Any] = np.dtype(value)
            return found
    except Exception as error:  # any error of a caller's object, or text that is not UTF-8
        raise wrong_type(name, shown(value), expected) from error
    raise wrong_type(name, "None", expected)


def shape_of(name: str, value: Any) -> tuple[int, ...]:
    """A shape of at least two axes, with fewer than 2^60 elements."""
    expected = "a tuple of at least two ints >= 0"
    if not isinstance(value, tuple | list) or not all(map(is_integer, value)):
        raise wrong_type(name, shown(value), expected)
    shape = tuple(integer_value(name, n, expected) for n in value)
    if len(shape) < 2 or min(shape) < 0:
        raise wrong_value(name, shown(shape), expected)
    if len(shape) > _MOST_AXES or math.prod(max(n, 1) for n in shape) >= 2**60:
        raise wrong_value(name, shown(shape), "at most 32 axes, and fewer than 2^60 elements")
    return shape


def _refused(name: str, value: Any, error: Exception, expected: str) -> Exception:
    why = f"cannot be converted to a number ({type(error).__name__}: {error})"
    return wrong_type(name, f"{type(value).__name__} that {why}", expected)


def flag(name: str, value: Any) -> bool:
    """True or False; numbers such as 0 and 1 raise."""
    if value is True or value is False:
        return value
    if not isinstance(value, np.bool_):
        raise wrong_type(name, shown(value), "True or False")
    return bool(value)


def precision_word(name: str, value: Any) -> str | None:
    """The word for float32 products, "ieee" or "tf32", or None."""
    is_text = isinstance(value, str)
    if value is None or (is_text and value in ("ieee", "tf32")):
        return value  # type: ignore[no-any-return]
    wrong = wrong_value if is_text else wrong_type
    raise wrong(name, shown(value), 'None, "ieee" or "tf32"')


def alignment(name: str, value: Any) -> bool | str:
    """True, False, "top_left" or "bottom_right"."""
    if isinstance(value, bool | np.bool_):
        return bool(value)
    if isinstance(value, str) and value in ("top_left", "bottom_right"):
        return value
    wrong = wrong_value if isinstance(value, str) else wrong_type
    raise wrong(name, shown(value), 'True, False, "top_left" or "bottom_right"')


def window(name: str, value: Any) -> tuple[int | None, int | None]:
    """A pair of bounds, each None or an int >= 0."""
    expected = "a pair (left, right), each None or an int >= 0"
    if not isinstance(value, tuple | list) or len(value) != 2:
        same = f"for the same bound on both sides write ({shown(value)}, {shown(value)})"
        raise wrong_type(name, shown(value), expected, same if isinstance(value, int) else "")
    sides: list[int | None] = []
    for side in value:
        if side is not None and not is_integer(side):
            raise wrong_type(name, shown(value), expected)
        bound = None if side is None else integer_value(name, side, expected)
        if bound is not None and bound < 0:
            raise wrong_value(name, shown(value), expected, "None means no bound")
        sides.append(None if bound is None else min(bound, _WIDEST))
    return (sides[0], sides[1])


def finite(name: str, value: Any, expected: str = "None or a finite number") -> float:
    """A finite number."""
    kind = getattr(getattr(value, "dtype", None), "kind", "f")
    wrong = isinstance(value, bool | str | complex | np.void)
    wrong = wrong or kind not in ("i", "u", "f", "V")  # V: bfloat16
    if wrong or not hasattr(type(value), "__float__"):
        raise wrong_type(name, shown(value), expected)
    if getattr(value, "shape", ()) != ():
        raise wrong_type(name, f"shape {value.shape}", expected)
    if hasattr(value, "__cuda_array_interface__"):
        raise wrong_type(name, "an array on a GPU", expected, "pass float(value)")
    try:
        number = float(value)
    except OverflowError:
        raise wrong_value(name, "an int beyond the range of float", expected) from None
    except Exception as error:  # a tensor without memory
        raise _refused(name, value, error, expected) from error
    if not math.isfinite(number):
        raise wrong_value(name, shown(value), expected)
    return number


def positive(name: str, value: Any) -> float:
    """A finite positive number."""
    expected = "None or a finite positive number"
    number = finite(name, value, expected)
    if number <= 0:
        raise wrong_value(name, shown(value), expected)
    return number


def probability(name: str, value: Any) -> float:
    """A number from 0 to 1."""
    expected = "a finite number from 0 to 1"
    if value is None or not 0 <= (number := finite(name, value, expected)) <= 1:
        raise wrong_value(name, shown(value), expected)
    return number


def seed(name: str, value: Any) -> int:
    """An int from 0 to 2^64 - 1."""
    expected = "an int from 0 to 2^64 - 1"
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise wrong_type(name, shown(value), expected)
    if not 0 <= value < 2**64:
        raise wrong_value(name, shown(value), expected)
    return int(value)


def integers(name: str, value: Any, *, optional: bool = True) -> Array | int:
    """A signed 64-bit int, or an integer array; with ``optional`` the message mentions None."""
    expected = "None, an int or an integer array" if optional else "an int or an integer array"
    if is_integer(value):
        number = integer_value(name, value, expected)
        if not -(2**63) <= number < 2**63:
            got = f"an int of {number.bit_length()} bits"
            raise wrong_value(name, got, "an int that fits into 64 bits")
        return number
    if isinstance(value, bool | float | None):
        raise wrong_type(name, shown(value), expected)
    return integer_array(name, value, expected)


def integer_array(name: str, value: Any, expected: str) -> Array:
    """An integer array; a list or tuple is converted."""
    array = _of_list(name, value, expected)
    if isinstance(value, list | tuple) and not array.size:  # NumPy makes floats of it
        array = array.astype(np.int64)
    if array.dtype.kind not in "iu":
        raise wrong_type(name, f"dtype {array.dtype}", expected)
    return array


def _of_list(name: str, value: Any, expected: str) -> Array:
    """An array without a copy; a list or tuple, which is short, is converted to a NumPy array."""
    if not isinstance(value, list | tuple):
        return native(name, value)
    try:
        return np.asarray(value)
    except Exception as error:  # lists of different lengths; an element that refuses
        raise _refused(name, value, error, expected) from error


def offset(name: str, value: Any) -> Array | int:
    """An int from -FARTHEST to FARTHEST, or an integer array."""
    value = integers(name, value)
    if isinstance(value, int) and abs(value) > FARTHEST:
        got = f"an int of {value.bit_length()} bits"
        raise wrong_value(name, got, "an int from -2^59 to 2^59")
    return value


def floats(name: str, value: Any) -> Array:
    """An array of a floating dtype that the library supports."""
    array = native(name, value)
    if array.dtype not in FLOATS:
        fix = "boolean masks go to mask=" if array.dtype == np.bool_ else ""
        expected = "a floating dtype of 16, 32 or 64 bits"
        raise wrong_type(name, f"dtype {array.dtype}", expected, fix)
    return array


def slopes(name: str, value: Any) -> Array:
    """As :func:`floats`, or a list of numbers."""
    expected = "a floating array or a list of numbers"
    array = _of_list(name, value, expected)
    is_list = isinstance(value, list | tuple) and array.dtype.kind in "iu"
    return floats(name, array.astype(np.float64) if is_list else array)


def operand_scale(name: str, value: Any) -> Array | float:
    """A positive number, or a floating array."""
    if hasattr(value, "strides") and getattr(value, "shape", ()) != ():
        return floats(name, value)
    return floats(name, value) if is_cupy(value) else positive(name, value)


def booleans(name: str, value: Any) -> Array:
    """An array of bools."""
    array = native(name, value)
    if array.dtype != np.bool_:
        expected = "dtype bool, True where the query may attend"
        raise wrong_type(name, f"dtype {array.dtype}", expected, "additive masks go to bias=")
    return array


def pair_of_ids(name: str, value: Any) -> tuple[Array, Array]:
    """Two integer arrays, for the queries and for the keys."""
    expected = "a pair of integer arrays, (.., m) for the queries and (.., n) for the keys"
    if not isinstance(value, tuple | list) or len(value) != 2:
        fix = "write (ids, ids) for self-attention" if hasattr(value, "strides") else ""
        raise wrong_type(name, type(value).__name__, expected, fix)
    arrays = [native(f"{name}[{i}]", a) for i, a in enumerate(value)]
    for array in arrays:
        if array.dtype.kind not in "iu":
            raise wrong_type(name, f"dtype {array.dtype}", expected)
    return (arrays[0], arrays[1])


def require_shape(name: str, array: Array, shape: tuple[int, ...], like: str) -> None:
    """Raise unless ``array`` has exactly this shape."""
    if array.shape != shape:
        raise wrong_value(name, f"shape {array.shape}", f"shape {shape}, the shape of {like}")


def require_float(name: str, array: Array) -> None:
    """Raise unless ``array`` has a floating dtype that the library supports."""
    if array.dtype not in FLOATS:
        expected = "float16, bfloat16, float32 or float64"
        raise wrong_type(name, f"dtype {array.dtype}", expected)

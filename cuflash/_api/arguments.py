"""Which checks of operands, saved results and destinations do all functions share?"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple, ParamSpec, TypeVar

import numpy as np

from cuflash._arrays import Array, Triple, allocate, converted, is_cupy, native, same_module
from cuflash._errors import shown, wrong_type
from cuflash._problem.checks import flag, require_float, require_shape
from cuflash._problem.destinations import check_destination
from cuflash._problem.float8 import FLOAT8
from cuflash._problem.option_table import FIELDS
from cuflash._problem.options import Options, ScoreOptions
from cuflash._problem.problem import HALVES, Problem, common_dtype
from cuflash._results import Gradients, Saved

P = ParamSpec("P")
R = TypeVar("R")

QKV = ("q", "k", "v")


class OptionKeywords(ScoreOptions, total=False):
    """Keywords of all functions that do not change the type of the result, for overloads."""

    options: Options | None
    axes: Any


class SharedKeywords(OptionKeywords, total=False):
    """These keywords and ``precision``."""

    precision: str | None


class VjpKeywords(SharedKeywords, total=False):
    """Shared keywords and ``deterministic``."""

    deterministic: bool


class PagedKeywords(SharedKeywords, total=False):
    """Shared keywords, ``workspace`` and ``config``."""

    workspace: Array | None
    config: Any


class CallKeywords(VjpKeywords, PagedKeywords, total=False):
    """All of these keywords."""


class Keywords(NamedTuple):
    """The keywords of a forward that are not score options, not yet checked."""

    axes: Any
    precision: str | None
    deterministic: bool
    return_lse: bool
    out: Any
    workspace: Array | None
    config: Any


def explain_missing_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """Let a call that lacks positional arguments reach the checks, which say what to write.

    Otherwise Python would report missing arguments first, for example for a keyword ``q=``.
    """
    parameters = (own := inspect.signature(function)).parameters.values()
    count = sum(p.kind is p.POSITIONAL_ONLY for p in parameters)
    for name, value in (("__signature__", own), ("__defaults__", (None,) * count)):
        setattr(function, name, value)
    return function


def operands(q: Any, k: Any, v: Any) -> tuple[ModuleType, dict[str, Array], Triple]:
    """The array module of q, k and v, the three arrays, and the three in one dtype."""
    given = {"q": native("q", q), "k": native("k", k), "v": native("v", v)}
    xp = same_module(**given)
    q, k, v = given.values()
    if not q.dtype == k.dtype == v.dtype and not has_8_bit_keys(q, k, v):
        dtype = common_dtype({name: array.dtype for name, array in given.items()})
        q, k, v = (converted(name, array, dtype) for name, array in given.items())
    return xp, given, (q, k, v)


def has_8_bit_keys(q: Array, k: Array, v: Array) -> bool:
    """Whether a kernel may convert k and v, of one 8-bit dtype, beside q of 16 bits."""
    return k.dtype == v.dtype and k.dtype in FLOAT8 and q.dtype in HALVES


def check_common(q: Array, deterministic: Any, workspace: Any, config: Any) -> None:
    """Raise for a wrong workspace, configuration or flag."""
    flag("deterministic", deterministic)
    if workspace is not None:
        if native("workspace", workspace).dtype != np.uint8:
            expected = "a uint8 array of workspace_size(...) bytes"
            raise wrong_type("workspace", f"dtype {workspace.dtype}", expected)
        same_module(q=q, workspace=workspace)
    if config is not None and not is_cupy(q):
        fix = "a config selects the tiles of a GPU kernel"
        raise wrong_type("config", shown(config), "None for NumPy arrays", fix)


def result_pair(out: Any, return_lse: bool) -> tuple[Array | None, Array | None]:
    """The caller's destinations of out and lse."""
    if out is None:
        return None, None
    if not return_lse:
        if isinstance(out, tuple):
            raise wrong_type(
                "out", "a tuple", "one array", "only return_lse=True takes a pair (out, lse)"
            )
        return native("out", out), None
    if not isinstance(out, tuple) or len(out) != 2:
        raise wrong_type("out", type(out).__name__, "a pair (out, lse) with return_lse=True")
    return native("out", out[0]), native("out", out[1])


def results(
    xp: ModuleType,
    pair: tuple[Array | None, Array | None],
    problem: Problem,
    inputs: dict[str, Array],
    *,
    with_lse: bool,
) -> tuple[Array, Array]:
    """The arrays for out and lse: the caller's ``pair``, which overlaps no input, or new arrays.

    lse is None if it is neither in ``pair`` nor wanted by ``with_lse``.
    """
    out, lse = pair
    if out is not None:
        check_destination("out", out, **inputs)  # inputs before promotion, which copies
    if lse is not None:
        require_shape("lse", lse, problem.lse_shape, "batch + (m,)")
        if lse.dtype != problem.lse_dtype:
            raise wrong_type("out", f"lse of dtype {lse.dtype}", str(problem.lse_dtype))
        check_destination("lse", lse, **inputs, out=out)
    if out is None:
        out = allocate(xp, "out", problem.out_shape, problem.out.dtype)
    if lse is None and with_lse:
        lse = allocate(xp, "out", problem.lse_shape, problem.lse_dtype)
    return out, lse


def saved_arrays(
    function: str, problem: Problem, q: Array, dout: Any, out: Any, lse: Any, dlse: Any
) -> Saved:
    """The saved arrays of a gradient; raise unless they have the shapes that ``function`` gave."""
    given = {"dout": dout, "out": out, "lse": lse} | ({} if dlse is None else {"dlse": dlse})
    arrays = {name: native(name, array) for name, array in given.items()}
    same_module(q=q, **arrays)
    for name, array in arrays.items():
        require_float(name, array)
        if name in ("lse", "dlse"):
            require_shape(name, array, problem.lse_shape, f"the lse of {function}")
        else:
            require_shape(name, array, problem.out_shape, f"the result of {function}")
    return Saved(**arrays)


def gradient_buffers(
    xp: ModuleType,
    wanted: tuple[str, ...],
    grads_out: Gradients | None,
    read: dict[str, Array | None],
) -> dict[str, Array]:
    """Arrays for the gradients by input name: fields of ``grads_out``, or new arrays.

    The caller's arrays must overlap neither each other nor the arrays in ``read``, such as inputs.
    """
    if grads_out is not None and not isinstance(grads_out, Gradients):
        raise wrong_type("grads_out", type(grads_out).__name__, "a cuflash.Gradients")
    taken = {name: array for name, array in read.items() if array is not None}
    if "scale" in wanted:
        taken["scale"] = xp.empty(())
    buffers: dict[str, Array] = {}
    for name in wanted:
        argument, like = f"grads_out.{FIELDS[name]}", taken[name]
        buffer = None if grads_out is None else getattr(grads_out, FIELDS[name])
        if buffer is None:
            buffers[name] = allocate(xp, argument, like.shape, like.dtype)
            continue
        buffer = buffers[name] = native(argument, buffer)
        same_module(**{name: like, argument: buffer})
        require_shape(argument, buffer, like.shape, name)
        if buffer.dtype != like.dtype:
            raise wrong_type(argument, f"dtype {buffer.dtype}", f"{like.dtype} as in {name}")
        check_destination(argument, buffer, **taken)
        taken[argument] = buffer
    return buffers


def by_field(gradients: dict[str, Array], wrt: tuple[str, ...]) -> Gradients:
    """The result of a gradient function: ``gradients`` by input name, in the order of ``wrt``."""
    fields = {FIELDS[name]: array for name, array in gradients.items()}
    return Gradients(**fields, order=tuple(FIELDS[name] for name in dict.fromkeys(wrt)))

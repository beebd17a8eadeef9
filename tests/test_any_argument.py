"""Does every value of every argument either work, or raise an error that names the argument?

A table of wrong calls holds only the mistakes that its author thought of. Here every argument of
every public function gets every value of one list, alone and nested: objects of other libraries,
classes, numbers beyond any machine's, containers that hold themselves, arrays of every kind.
"""

from __future__ import annotations

import functools
import inspect
import re
import warnings
from collections.abc import Callable
from typing import Any
from unittest.mock import MagicMock

import ml_dtypes
import numpy as np
import pytest
from conftest import why_no_nvrtc
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import cuflash
from cuflash import MaskMod, Options, ScoreMod
from cuflash._problem.options import OPTION_NAMES


class Refusing:
    """A tensor without memory: it has every protocol, and each raises."""

    def refuse(self, *_: object, **__: object) -> Any:
        raise NotImplementedError("no memory")

    __float__ = __int__ = __index__ = __bool__ = __len__ = __iter__ = __getitem__ = refuse
    __array__ = __dlpack__ = __dlpack_device__ = refuse


class OnADevice:
    """A tensor on a device that DLPack numbers, such as the host, CUDA or another kind."""

    def __init__(self, device: object) -> None:
        self.device = device

    def __dlpack_device__(self) -> Any:
        return self.device


class Interface:
    """An object that claims to be memory of a GPU."""

    def __init__(self, interface: object) -> None:
        self.__cuda_array_interface__ = interface


class Text(str):
    """A subclass of str."""


def in_itself() -> list[Any]:
    found: list[Any] = []
    found.append(found)
    return found


def dict_in_itself() -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    found["q"] = found
    return found


#: Each value is made anew for every call, which may keep or change it.
VALUES: dict[str, Callable[[], Any]] = {
    **{repr(v): (lambda v=v: v) for v in (
        None, True, False, 0, 1, 2, -1, 2**31, 2**62, 2**63, 2**64, -(2**64), 10**400, 0.0, 0.5,
        1.5, -1.0, 1e300, 1j, float("nan"), float("inf"), "", "q", "causal", "top_left", "tf32",
        b"", b"q", (), (0,), (1, 2), (None, None), (-1, 0), (2**70, 2**70, 1), [], [0], [0.5],
        [[0], [0, 1]], {}, {"q": 1}, set(), frozenset(), ..., NotImplemented, range(3),
        slice(None), slice("a"), slice(0, 3, 0), slice(0.5), np.bool_(True), np.int8(1),
        np.uint64(2**63), np.float32(0.5), np.float64("nan"), np.complex64(1), np.str_("q"),
        np.bytes_(b"q"), ml_dtypes.bfloat16(0.5), (2**31, 2**31, 1), (0, 2**40, 2**40),
        (2**62, 2**62), (-(2**70), 1),
    )},
    "ten to the 5000": lambda: 10**5000, "its negative": lambda: -(10**5000),
    "a pair of it": lambda: (10**5000, -(10**5000)), "a surrogate": lambda: "\ud800",
    "a zero byte": lambda: "a\0b", "a long text": lambda: "q" * 10**6, "Text": lambda: Text("q"),
    **{f"the class {c.__name__}": (lambda c=c: c) for c in (
        int, float, bool, str, list, object, type, np.ndarray, np.matrix, np.float32, np.generic,
        ml_dtypes.bfloat16, Options, cuflash.Gradients, Refusing,
    )},
    "a list in itself": in_itself, "a dict in itself": dict_in_itself,
    "a tuple with it": lambda: (in_itself(), in_itself()),
    "an object": object, "a function": lambda: min, "a lambda": lambda: lambda *_: None,
    "a module": lambda: np, "an exception": lambda: ValueError("q"),
    "an iterator": lambda: iter([1]), "a generator": lambda: (x for x in [1, 2]),
    "a mock": MagicMock,
    "a tensor without memory": Refusing, "two of them": lambda: (Refusing(), Refusing()),
    "a tensor of the host": lambda: OnADevice((1, 0)), "of Metal": lambda: OnADevice((8, 0)),
    "of no device": lambda: OnADevice(None), "of a strange one": lambda: OnADevice(("x", [])),
    "no interface": lambda: Interface(None), "an empty one": lambda: Interface({}),
    "a wrong one": lambda: Interface({"shape": 3, "data": None, "typestr": "x"}),
    "void": lambda: np.void(b"ab"), "a date": lambda: np.datetime64("2020"),
    "a record": lambda: np.zeros((), [("a", float)])[()],
    "options": lambda: Options(causal=True), "gradients": lambda: cuflash.Gradients(),
    "gradients of nothing": lambda: cuflash.Gradients(dq=3, dk="k"),
    **{f"an array of {dtype} {shape}": (lambda d=dtype, s=shape: np.zeros(s, d))
       for dtype in ("?", "i1", "u8", "f2", "f4", "g", "c8", "M8[s]", "U3", "O", "V4")
       for shape in ((), (2,), (3, 2), (1, 3, 3))},
    **{f"an array of shape {shape}": (lambda s=shape: np.zeros(s, np.float32))
       for shape in ((0,), (3, 0), (0, 2), (2**40, 0), (1,) * 32, (1,) * 33, (1,) * 40)},
    "bfloat16": lambda: np.zeros((3, 2), ml_dtypes.bfloat16),
    "float8": lambda: np.zeros((3, 2), ml_dtypes.float8_e4m3fn),
    "records": lambda: np.zeros((3, 2), [("a", "f4"), ("b", "i4")]),
    "64 axes": lambda: np.zeros((1,) * 64, np.float32),
    "more than memory": lambda: np.broadcast_to(np.float32(0), (2**30, 2**30)),
    "a masked array": lambda: np.ma.masked_array(np.zeros((3, 2))),
    "a matrix": lambda: np.zeros((3, 2)).view(np.matrix),
    "read-only": lambda: np.broadcast_to(np.float32(0), (3, 2)),
    "swapped bytes": lambda: np.zeros((3, 2), ">f4"), "a view": lambda: memoryview(b"abcd"),
    "NaN": lambda: np.full((3, 2), np.nan, np.float32),
    "lists of arrays": lambda: [np.zeros((3, 2), np.float32), np.zeros((3, 2), np.float64)],
    "arrays and not": lambda: [np.zeros((3, 2), np.float32), None],
    "64 axes twice": lambda: [np.zeros((1,) * 64, np.float32)] * 2,
    "two ids": lambda: (np.zeros(3, int), np.zeros(3, int)),
}  # fmt: skip

X = np.linspace(-1, 1, 6, dtype=np.float32).reshape(3, 2)
OUT, LSE = cuflash.attention(X, X, X, return_lse=True)
ENDS = np.array([0, 1, 3])
ALIKE = {
    "q": X, "k": X, "v": X, "dout": X, "out": OUT, "lse": LSE, "dlse": LSE, "cu_seqlens_q": ENDS,
    "cu_seqlens_k": ENDS, "outs": np.stack([OUT, OUT]), "lses": np.stack([LSE, LSE]),
    "rows": [0], "shape": (3, 3), "p": 0.5, "seed": 1, "expression": "q", "grad": "q",
    "host": lambda *_, **__: True, "host_grad": lambda *_, **__: 1.0, "low": 0.0, "high": 1.0,
    "arch": "sm_80", "mode": "dicts", "x": OUT, "positions": ENDS,
    "k_pages": OUT[None, None], "v_pages": OUT[None, None], "page_table": np.zeros((1, 2), int),
    "kv_lengths": [4],
}  # fmt: skip
#: Arguments of functions that take another array than most functions do.
OTHERS = {"attention_paged": {"q": OUT[None, None]}}


def check(**ends: Any) -> None:
    ScoreMod("score", grad="1", host=lambda s, *_: s, host_grad=lambda s, *_: 1.0).check(**ends)


def backward(**given: Any) -> Any:
    """Call the pullback of attention_vjp with its three arguments."""
    return cuflash.attention_vjp(X, X, X)[1](given.pop("dout"), **given)


backward.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
    [inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY) for n in ("dout", "dlse", "wrt")]
)
check.__signature__ = inspect.signature(ScoreMod.check)  # type: ignore[attr-defined]
FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{name: getattr(cuflash, name) for name in cuflash.__all__
       if inspect.isfunction(getattr(cuflash, name))},
    "compile": functools.partial(cuflash.compile, ()),
    "Options": Options, "ScoreMod": ScoreMod, "MaskMod": MaskMod, "check": check,
    "pullback": backward,
}  # fmt: skip


def arguments(function: Callable[..., Any]) -> list[str]:
    """Return the names of all arguments of a function, score options included."""
    found = []
    for name, parameter in inspect.signature(function).parameters.items():
        if name != "self":
            found += OPTION_NAMES if parameter.kind is parameter.VAR_KEYWORD else [name]
    return found


#: Arguments that have a meaning only beside another argument.
BESIDE: dict[str, dict[str, Any]] = {"dropout": {"seed": 1}, "seed": {"dropout": 0.5}}
OWN = {name: arguments(function) for name, function in FUNCTIONS.items()}


def call(name: str, **changes: Any) -> Any:
    """Call a function with valid arguments, some of which are replaced by ``changes``."""
    function = FUNCTIONS[name]
    parameters = inspect.signature(function).parameters.values()
    given = {p.name: ALIKE[p.name] for p in parameters if p.default is p.empty and p.name in ALIKE}
    given |= {n: ALIKE[n] for n in ("rows", "arch", "mode") if n in OWN[name]}
    given |= OTHERS.get(name, {}) | changes
    by_place = [given.pop(p.name) for p in parameters if p.kind is p.POSITIONAL_ONLY]
    return function(*by_place, **given)


#: The errors that are allowed. An error may name several arguments where they exclude each other.
NAMED = re.compile(r"[\w.\[\]']+(, [\w.\[\]']+)*: "
                   r"(got .*, expected |cannot allocate|an array on a GPU needs CuPy)"
                   r"|compiling needs CuPy")  # fmt: skip


def works_or_says_why(name: str, **changes: Any) -> None:
    before = [a.copy() for a in (X, OUT, LSE, ENDS)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # NumPy warns about the numbers
        try:
            call(name, **changes)
        except (TypeError, ValueError, NotImplementedError, ImportError, OSError) as error:
            text = str(error)
            if not NAMED.match(text) or len(text) > 2000:
                raise AssertionError(f"{type(error).__name__}: {text}") from error
    for array, old in zip((X, OUT, LSE, ENDS), before, strict=True):
        np.testing.assert_array_equal(array, old)


def beside(function: str, argument: str) -> dict[str, Any]:
    return {n: value for n, value in BESIDE.get(argument, {}).items() if n in OWN[function]}


#: Options are tried in one function for each path that implements them, not in all that take them.
CASES = [
    (function, argument)
    for function in FUNCTIONS
    for argument in OWN[function]
    if argument not in OPTION_NAMES or function in ("attention", "attention_varlen", "weights")
]


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    """Run in an empty folder, since calls may create folders of any name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "cache"))


@pytest.mark.parametrize(("function", "argument"), CASES)
def test_any_value_works_or_is_refused_by_name(function, argument):
    for make in VALUES.values():
        works_or_says_why(function, **{argument: make()}, **beside(function, argument))


def nested(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Return makers of lists, pairs and mappings whose elements are made by ``values``."""
    several = st.lists(values, max_size=4)
    return st.one_of(
        several.map(lambda makers: lambda: [make() for make in makers]),
        several.map(lambda makers: lambda: tuple(make() for make in makers)),
        several.map(lambda makers: lambda: {str(i): make() for i, make in enumerate(makers)}),
    )


MAKERS = st.recursive(st.sampled_from(list(VALUES.values())), nested, max_leaves=6)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_values_together_work_or_are_refused_by_name(data):
    function = data.draw(st.sampled_from(list(FUNCTIONS)), label="function")
    changed = data.draw(
        st.dictionaries(st.sampled_from(OWN[function]), MAKERS, min_size=1, max_size=4)
    )
    works_or_says_why(function, **{name: make() for name, make in changed.items()})


def test_the_arguments_are_those_of_all_functions():
    assert len(CASES) > 150
    assert {"attention", "compile", "weights", "dropout_mask", "check"} <= {f for f, _ in CASES}
    for name in FUNCTIONS:
        if name != "compile" or not why_no_nvrtc():
            call(name)

"""Is the device of the arrays current while a call runs? A simulated CuPy notes it."""

from __future__ import annotations

import contextlib
import inspect
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash import _arrays


class Foreign:
    """An array of another library, of DLPack kind 2 (CUDA) or 1 (the host)."""

    def __init__(self, kind: int, device: int) -> None:
        self.where = kind, device

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.where


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the stack of current devices, the last one current now."""
    stack = [0]

    @contextlib.contextmanager
    def device(number: int) -> Any:
        stack.append(number)
        try:
            yield
        finally:
            stack.pop()

    runtime = SimpleNamespace(getDevice=lambda: stack[-1], CUDARuntimeError=RuntimeError)
    cuda = SimpleNamespace(Device=device, runtime=runtime)
    monkeypatch.setattr(_arrays, "_cupy", lambda name: SimpleNamespace(cuda=cuda))
    return stack


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (Foreign(2, 1), 1), (Foreign(2, 0), 0), ([Foreign(2, 1), Foreign(2, 1)], 1),
        (Foreign(1, 3), 0), (np.ones(2), 0), ([], 0), (None, 0), (1.5, 0),
    ],
)  # fmt: skip
def test_the_first_array_decides(current: list[int], given: Any, expected: int) -> None:
    seen = _arrays.on_own_device(lambda array: current[-1])(given)
    assert (seen, current) == (expected, [0])


def test_arrays_by_name_decide_as_well(current: list[int]) -> None:
    own = _arrays.on_own_device(lambda *, outs, lses: (current[-1], outs, lses))
    outs, lses = Foreign(2, 1), [Foreign(2, 1)]
    assert own(outs=outs, lses=lses) == (1, outs, lses)


@pytest.mark.parametrize(
    "name",
    [
        "attention", "attention_backward", "attention_vjp", "attention_varlen",
        "attention_varlen_backward", "logsumexp", "logsumexp_backward", "merge", "merge_backward",
        "weights", "workspace_size",
    ],
)  # fmt: skip
def test_every_function_takes_its_arrays_where_they_lie(
    current: list[int], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Every function converts its first array to CuPy on the device of that array."""

    def taken(array: object) -> None:
        raise BufferError(current[-1])

    cupy = _arrays._cupy("q")
    cupy.from_dlpack = taken
    monkeypatch.setattr(_arrays, "_cupy", lambda name: cupy)
    function = getattr(cuflash, name)
    needed = [
        p
        for p in inspect.signature(function).parameters.values()
        if p.default is p.empty and p.kind is not p.VAR_KEYWORD
    ]
    given = [[Foreign(2, 1)] if p.name in ("outs", "lses") else Foreign(2, 1) for p in needed]
    with pytest.raises(TypeError, match=r"Foreign that DLPack could not export \(BufferError: 1\)"):
        function(*given)
    assert current == [0]


def test_an_error_leaves_the_device_as_it_was(current: list[int]) -> None:
    def fails(array: object) -> None:
        raise ValueError(current[-1])

    with pytest.raises(ValueError, match="1"):
        _arrays.on_own_device(fails)(Foreign(2, 1))
    assert current == [0]


def test_nothing_given_is_the_error_of_the_function_itself(current: list[int]) -> None:
    def attend(q: object) -> None:
        """Take one."""

    with pytest.raises(TypeError, match=r"attend\(\) missing 1 required positional argument: 'q'"):
        _arrays.on_own_device(attend)()  # type: ignore[call-arg]

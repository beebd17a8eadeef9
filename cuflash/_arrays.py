"""Which array library do the arguments belong to, and how are foreign arrays wrapped?"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, ParamSpec, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from cuflash._cupy import import_cupy
from cuflash._dlpack import from_dlpack
from cuflash._errors import pip_install, wrong_type, wrong_value

Array = Any
Triple = tuple[Array, Array, Array]  # q, k and v, or dout, out and lse

P = ParamSpec("P")
R = TypeVar("R")


class Native(Protocol):
    """NumPy and CuPy arrays, by attributes that tensors lack; a call's result has their type."""

    @property
    def strides(self) -> tuple[int, ...]:
        """Bytes from one element to the next, for each axis."""

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""


NativeT = TypeVar("NativeT", bound=Native)
ScalarT = TypeVar("ScalarT", bound=np.generic)  # of NumPy arrays whose number of axes may change
HostFloats = npt.NDArray[np.float16 | np.float32]  # whose lse is float32

#: Exporters raise these, for example for a tensor that requires its gradient or an unknown dtype.
_NOT_EXPORTED = (AttributeError, BufferError, KeyError, RuntimeError, TypeError, ValueError)
_DLPACK_CPU, _DLPACK_CUDA = 1, 2
_EXPECTED = "a NumPy or CuPy array, or an array that exports its memory through DLPack"


def is_cupy(array: object) -> bool:
    """Whether ``array`` is a CuPy array, without importing CuPy."""
    # Another thread may be importing CuPy: until the module has this class, no array exists.
    return isinstance(array, getattr(sys.modules.get("cupy"), "ndarray", ()))


def array_module(array: Array) -> ModuleType:
    """NumPy for NumPy arrays, CuPy for CuPy arrays."""
    return sys.modules["cupy"] if is_cupy(array) else np


def native(name: str, array: object) -> Array:
    """Return ``array`` as a plain NumPy or CuPy array without a copy, or raise TypeError."""
    if type(array) is np.ndarray or is_cupy(array):
        return array
    if isinstance(array, np.ma.MaskedArray):
        raise wrong_type(name, "a masked array", _EXPECTED, "pass mask= instead")
    if isinstance(array, np.ndarray):
        return array.view(np.ndarray)
    got, (kind, _) = _qualified_name(type(array)), _dlpack_device(array)
    try:
        if kind == _DLPACK_CPU:
            return from_dlpack(array)
        if kind == _DLPACK_CUDA:
            return _cupy(name).from_dlpack(array)
        if hasattr(array, "__cuda_array_interface__"):
            return _from_cuda_array_interface(_cupy(name), array)
    except _NOT_EXPORTED as error:
        got += f" that DLPack could not export ({type(error).__name__}: {error})"
    fix = "wrap it in np.asarray" if isinstance(array, list | tuple | int | float) else ""
    if getattr(array, "requires_grad", False) is True:
        fix = f"write {name}.detach()"
    elif kind not in (None, _DLPACK_CPU, _DLPACK_CUDA):
        fix = "copy it to the host or to an NVIDIA GPU"
    raise wrong_type(name, got, _EXPECTED, fix)


def on_device_of(array: object) -> contextlib.AbstractContextManager[Any]:
    """Context in which the GPU of an array is the current device; of several, the first counts.

    Memory is allocated and kernels run on the current device. The context costs nothing if that
    device is current already.
    """
    if isinstance(array, list | tuple) and array:
        array = array[0]
    if is_cupy(array):
        # D75.
        device = array.data.device_id  # type: ignore[attr-defined]
    else:
        kind, device = _dlpack_device(array)
        if kind != _DLPACK_CUDA:
            return contextlib.nullcontext()
    cuda = _cupy("device").cuda
    try:
        elsewhere = cuda.runtime.getDevice() != device
    except cuda.runtime.CUDARuntimeError:  # no driver: the call itself reports it
        return contextlib.nullcontext()
    return cuda.Device(device) if elsewhere else contextlib.nullcontext()


def _dlpack_device(array: object) -> tuple[Any, Any]:
    """Kind and number of a foreign array's device; (None, 0) for an object without a device."""
    try:
        kind, number = array.__dlpack_device__()  # type: ignore[attr-defined]
    except Exception:  # a tensor without memory may raise anything
        return None, 0
    return kind, number


def on_own_device(function: Callable[P, R]) -> Callable[P, R]:
    """Let ``function`` run, and allocate its results, on the device of its first argument."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with on_device_of(next(itertools.chain(args, kwargs.values()), None)):
            return function(*args, **kwargs)

    return run


def same_module(**arrays: Array | None) -> ModuleType:
    """The array module of all given arrays; raise if their modules or devices differ."""
    first_name, module, device = "", None, None
    for name, array in arrays.items():
        if array is None:
            continue
        own = array_module(array)
        if own is not np and device not in (None, array.data.device_id):
            got = f"an array on device {array.data.device_id}"
            raise wrong_value(name, got, f"one on device {device} like {first_name}")
        if module is None:
            first_name, module = name, own
            device = None if own is np else array.data.device_id
        elif own is not module:
            expected = f"a {module.__name__} array like {first_name}"
            fix = "move one of them with cupy.asarray or cupy.asnumpy"
            raise wrong_type(name, f"a {own.__name__} array", expected, fix)
    return module or np


def refuse_capture(argument: str, expected: str) -> None:
    """Raise while CuPy's current stream is capturing: the pool may reuse memory before a replay."""
    if is_capturing():
        raise RuntimeError(
            f"{argument}: cannot allocate while a CUDA graph is captured, expected {expected}"
        )


def is_capturing() -> bool:
    """Whether CuPy's current stream is capturing a graph."""
    return bool(sys.modules["cupy"].cuda.get_current_stream().is_capturing())


def refuse_captured(xp: ModuleType, function: str) -> None:
    """Raise while CuPy's stream captures ``function``, whose CuPy operations allocate memory."""
    if xp is not np:
        refuse_capture(function, "a call outside the capture, since it needs memory")


def converted(argument: str, array: Array, dtype: np.dtype[Any]) -> Array:
    """``array`` in ``dtype``; no copy is made if it has that dtype."""
    if array.dtype == dtype:
        return array
    if is_cupy(array):
        refuse_capture(argument, f"an array of dtype {dtype}")
    return array.astype(dtype)


def contiguous(argument: str, array: Array, dtype: Any) -> Array:
    """A GPU's ``array`` in C order and in ``dtype``; no copy is made if it is so already."""
    if array.dtype == dtype and array.flags.c_contiguous:
        return array
    refuse_capture(argument, f"a contiguous array of dtype {np.dtype(dtype)}")
    return array.astype(dtype, order="C")


def to_int64(array: Array) -> Array:
    """Integers as int64; larger uint64 numbers become the largest int64, not negative numbers."""
    if array.dtype == np.uint64:
        array = array.clip(0, 2**63 - 1)
    return array.astype(np.int64)


def rounded(array: Array, dtype: Any) -> Array:
    """``array`` in ``dtype``, each element rounded once; overflow becomes infinity.

    NumPy and CuPy cast float64 to 16 or 8 bits by way of float32, which would round twice. Here the
    step to float32 rounds to odd, which neither creates nor removes ties.
    """
    if array.dtype == np.float64 and np.dtype(dtype).itemsize <= 2:
        near = array.astype(np.float32)
        inexact, too_far = near != array, abs(near) > abs(array)
        bits = near.view(np.uint32) - too_far.astype(np.uint32)  # towards 0
        array = (bits | inexact.astype(np.uint32)).view(np.float32)
    return array.astype(dtype)


def write_rounded(destination: Array, array: Array) -> None:
    """Write ``array`` into ``destination``, each element rounded once to its dtype."""
    destination[...] = rounded(array, destination.dtype)


def allocate(xp: ModuleType, argument: str, shape: tuple[int, ...], dtype: Any) -> Array:
    """New memory for a result that the caller could have passed as ``argument``."""
    if xp is not np and is_capturing():
        refuse_capture(argument, f"an array of shape {shape} and dtype {dtype}")
    return xp.empty(shape, dtype)


def deeply_copied(value: Any, memo: dict[int, Any]) -> Any:
    """``__deepcopy__`` for objects that pickle their fields as keywords; it copies their arrays."""
    build, _ = value.__reduce__()
    return build.func(**copy.deepcopy(build.keywords, memo))


def _from_cuda_array_interface(cupy: ModuleType, array: Any) -> Array:
    """Wrap device memory without a copy; an event orders it after its producer's stream."""
    interface = array.__cuda_array_interface__
    shape, pointer = interface["shape"], interface["data"][0]
    dtype = np.dtype(interface["typestr"])
    strides = interface.get("strides")
    within = strides is not None and 0 not in shape
    ends = [(n - 1) * s for n, s in zip(shape, strides, strict=True)] if within else [0]
    low = sum(e for e in ends if e < 0)
    high = sum(e for e in ends if e > 0)
    extent = dtype.itemsize * int(np.prod(shape)) if strides is None else high - low
    memory = cupy.cuda.UnownedMemory(pointer + low, max(extent, 0) + dtype.itemsize, array)
    producer = interface.get("stream")
    if producer is not None:
        event = cupy.cuda.Event(disable_timing=True)
        cupy.cuda.runtime.eventRecord(event.ptr, producer)
        cupy.cuda.get_current_stream().wait_event(event)
    start = cupy.cuda.MemoryPointer(memory, -low)
    return cupy.ndarray(shape, dtype, start, strides=strides)


def _cupy(name: str) -> ModuleType:
    try:
        return imported_cupy()
    except ImportError as error:
        raise ImportError(
            f"{name}: an array on a GPU needs CuPy; {pip_install('cuda12', 'cuda13')}"
        ) from error


@functools.cache
def imported_cupy() -> ModuleType:
    """CuPy, imported once: its kernel cache is checked before it compiles anything for us."""
    return import_cupy()


def _qualified_name(cls: type) -> str:
    return cls.__name__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__name__}"

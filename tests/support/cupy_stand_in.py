"""How do tests use CuPy without a device? NumPy takes its place, and is as strict as CuPy.

Names, parameters and errors are those of the installed CuPy: what it lacks is missing here, and an
array of NumPy is no array of CuPy. A test that needs a part of CuPy without a replacement is
skipped. Memory that nobody wrote is NaN.
"""

from __future__ import annotations

import ctypes
import functools
import inspect
import itertools
import re
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

_ALIGNMENT = 512  # of memory of CuPy's pool
_UNWRITTEN = 0xFF  # NaN in every floating format
_COPYING = ("array", "asarray", "ascontiguousarray", "asanyarray", "asfortranarray")
_PLAIN = ("item", "tolist", "tobytes")  # methods that return no array


def skip(what: str) -> Any:
    """Skip the test, which needs a part of CuPy that has no replacement."""
    pytest.skip(f"rehearsal: nothing stands for {what}")


class Memory:
    """Unwritten bytes, with the alignment of CuPy's memory."""

    def __init__(self, size: int) -> None:
        room = np.full(size + _ALIGNMENT, _UNWRITTEN, np.uint8)
        self.array = room[-room.ctypes.data % _ALIGNMENT :][:size]
        self.ptr, self.size = self.array.ctypes.data, size


class Lent:
    """Bytes that belong to an array or another owner."""

    def __init__(self, ptr: int, size: int, owner: Any, device_id: int = 0) -> None:
        own = (ctypes.c_char * max(size, 1)).from_address(ptr)
        own.owner = owner, device_id  # type: ignore[attr-defined]  kept alive with it
        self.array = np.frombuffer(own, np.uint8)
        self.ptr, self.size = ptr, size


class MemoryPointer:
    """A position in memory."""

    device_id = 0

    def __init__(self, mem: Any, offset: int = 0) -> None:
        self.mem, self.ptr = mem, mem.ptr + offset

    def __add__(self, offset: int) -> MemoryPointer:
        return MemoryPointer(self.mem, self.ptr - self.mem.ptr + int(offset))

    def __getattr__(self, name: str) -> Any:
        return skip(f"cupy.cuda.MemoryPointer.{name}")


class ndarray(np.lib.mixins.NDArrayOperatorsMixin):
    """An array of CuPy, whose elements are in a NumPy array."""

    cupys: Any  # CuPy's class
    namespace: Any  # the simulated module
    __hash__ = None  # type: ignore[assignment]

    def __init__(
        self,
        shape: Any,
        dtype: Any = float,
        memptr: MemoryPointer | None = None,
        strides: Any = None,
        order: str = "C",
    ) -> None:
        shape = (int(shape),) if np.ndim(shape) == 0 else tuple(map(int, shape))
        if memptr is None:
            size = np.dtype(dtype).itemsize * int(np.prod(shape, dtype=object))
            memptr = MemoryPointer(Memory(size))
        offset = memptr.ptr - memptr.mem.ptr
        self.host = np.ndarray(shape, dtype, memptr.mem.array, offset, strides, order)

    @classmethod
    def of(cls, host: np.ndarray) -> ndarray:
        """Return the array with these elements, in place if they are in device memory."""
        root = _root(host)
        if root.dtype != np.uint8 or root.ndim != 1:
            like = np.empty_like(host)
            memory = Memory(host.nbytes)
            placed = np.ndarray(host.shape, host.dtype, memory.array, 0, like.strides)
            placed[...] = host
            host = placed
        made = cls.__new__(cls)
        made.host = host
        return made

    @property
    def data(self) -> MemoryPointer:
        root = _root(self.host)
        at = root.ctypes.data
        return MemoryPointer(Lent(at, root.nbytes, root), self.host.ctypes.data - at)

    @property
    def flags(self) -> Any:
        own = self.host.flags
        return SimpleNamespace(
            c_contiguous=own.c_contiguous, f_contiguous=own.f_contiguous, owndata=own.owndata
        )

    @property
    def device(self) -> Device:
        return Device()

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        strides = None if self.host.flags.c_contiguous else self.host.strides
        return {
            "shape": self.host.shape, "typestr": self.host.dtype.str, "version": 3,
            "data": (self.host.ctypes.data, False), "strides": strides, "stream": None,
        }  # fmt: skip

    def __dlpack__(self, **_: Any) -> Any:
        skip("cupy.ndarray.__dlpack__")

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0

    def get(
        self, stream: Any = None, order: Any = "C", out: Any = None, blocking: bool = True
    ) -> np.ndarray:
        del stream, blocking
        if out is None:
            return np.array(self.host, order=order)
        out[...] = self.host
        return out

    def set(self, arr: np.ndarray, stream: Any = None) -> None:
        del stream
        if not isinstance(arr, np.ndarray):
            raise TypeError("Only numpy.ndarray can be set to cupy.ndarray")
        if (arr.dtype, arr.shape) != (self.dtype, self.shape):
            raise ValueError(f"Cannot set {arr.dtype} {arr.shape} to {self.dtype} {self.shape}")
        self.host[...] = arr

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or not hasattr(self.cupys, name):
            raise AttributeError(f"'cupy.ndarray' has no attribute '{name}'")
        if not hasattr(self.host, name):
            skip(f"cupy.ndarray.{name}")
        found = getattr(self.host, name)
        if not callable(found):
            return to_device(found)
        return checked(found, getattr(self.cupys, name), name, keeps=name in _PLAIN)

    def __getitem__(self, key: Any) -> ndarray:
        return ndarray.of(self.host[_places(key)])

    def __setitem__(self, key: Any, value: Any) -> None:
        if isinstance(value, np.ndarray) and value.ndim:
            whole = key is Ellipsis or (isinstance(key, slice) and key == slice(None))
            if not whole:
                raise ValueError("Non-scalar numpy.ndarray cannot be used for fill")
            self.set(value)
            return
        with np.errstate(all="ignore"):
            self.host[_places(key)] = to_host(value)

    def __len__(self) -> int:
        return len(self.host)

    def __iter__(self) -> Iterator[ndarray]:
        if not self.host.ndim:
            raise TypeError("iteration over a 0-d array")
        return (self[i] for i in range(len(self.host)))

    def __bool__(self) -> bool:
        return bool(self.host)

    def __int__(self) -> int:
        return int(self.host)

    def __float__(self) -> float:
        return float(self.host)

    def __index__(self) -> int:
        return self.host.__index__()

    def __repr__(self) -> str:
        return repr(self.host)

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise TypeError("Implicit conversion to a NumPy array is not allowed. Use `.get()`")

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **named: Any) -> Any:
        if method != "__call__":
            return NotImplemented
        if out := named.get("out"):
            named["out"] = out[0] if len(out) == 1 else out
        return getattr(self.namespace, ufunc.__name__)(*inputs, **named)

    def __array_function__(self, func: Any, _: Any, args: Any, kwargs: Any) -> Any:
        return getattr(self.namespace, func.__name__)(*args, **kwargs)


def _root(host: np.ndarray) -> np.ndarray:
    """Return the array that owns the memory of a view."""
    found: Any = host
    while (base := getattr(found, "base", None)) is not None and hasattr(base, "base"):
        found = base
    return found


def _places(key: Any) -> tuple[Any, ...]:
    """Return an index that gives a view of one element instead of a scalar."""
    keys = to_host(key if isinstance(key, tuple) else (key,))
    return keys if any(k is Ellipsis for k in keys) else (*keys, ...)


def to_host(value: Any) -> Any:
    """Return device arrays as NumPy arrays in the same memory, also in lists."""
    if isinstance(value, ndarray):
        return value.host
    if type(value) in (list, tuple):
        return type(value)(map(to_host, value))
    return value


def to_device(value: Any) -> Any:
    """Return NumPy arrays as device arrays, also in lists."""
    if isinstance(value, np.ndarray | np.generic):
        return ndarray.of(np.asarray(value))
    if type(value) in (list, tuple):
        return type(value)(map(to_device, value))
    return value


def _refuse_numpy(values: Any) -> None:
    for value in values:
        if isinstance(value, np.ndarray) and value.ndim:
            raise TypeError(f"Unsupported type {type(value)}")
        if type(value) in (list, tuple):
            _refuse_numpy(value)


def checked(numpys: Callable[..., Any], cupys: Any, name: str, *, keeps: bool = False) -> Any:
    """Return a NumPy function for device arrays, with the parameters of CuPy's function."""
    known = _parameters(cupys)

    @functools.wraps(numpys)
    def call(*args: Any, **named: Any) -> Any:
        wrong = [n for n in named if known is not None and n not in known]
        if wrong:
            raise TypeError(f"{name}() got an unexpected keyword argument '{wrong[0]}'")
        if name not in _COPYING:
            _refuse_numpy((*args, *named.values()))
        given = {n: to_host(value) for n, value in named.items() if n != "blocking"}
        with np.errstate(all="ignore"):
            result = numpys(*map(to_host, args), **given)
        if keeps:
            return result
        out = named.get("out")
        return out if isinstance(out, ndarray) else to_device(result)

    return call


@functools.cache
def _parameters(cupys: Any) -> frozenset[str] | None:
    """Return the parameters' names of a CuPy function; None (any) where it has no signature."""
    if type(cupys).__name__ == "ufunc":
        return frozenset(("out", "dtype", "casting"))
    try:
        found = inspect.signature(cupys).parameters
    except ValueError:  # compiled: its signature is the first line of its text
        line = re.search(r"\((.*)\)", (cupys.__doc__ or "").partition("\n")[0])
        return line and frozenset(re.findall(r"(\w+)\s*(?:=[^,]*)?(?:,|$)", line[1]))
    if any(p.kind is p.VAR_KEYWORD for p in found.values()):
        return None
    return frozenset(found)


class Namespace(ModuleType):
    """A module of CuPy: names in ``own``, constants and errors of CuPy, and functions of NumPy."""

    def __init__(self, cupys: ModuleType, numpys: Any, **own: Any) -> None:
        super().__init__(cupys.__name__)
        vars(self).update(own, _cupys=cupys, _numpys=numpys)

    def __getattr__(self, name: str) -> Any:
        cupys, numpys = getattr(self._cupys, name), getattr(self._numpys, name, None)
        if name.startswith("_") or cupys is numpys:  # CuPy's own modules use private names
            found: Any = cupys
        elif isinstance(cupys, ModuleType):
            found = Namespace(cupys, numpys)
        elif isinstance(cupys, type):
            plain = issubclass(cupys, BaseException | np.generic)
            found = cupys if plain else skip(f"{self.__name__}.{name}")
        elif not callable(cupys):
            found = cupys
        elif numpys is None or self.__name__.endswith("random"):
            found = skip(f"{self.__name__}.{name}")
        else:
            found = checked(numpys, cupys, name)
        setattr(self, name, found)
        return found


class _Partial:
    """Has few of the attributes of what it replaces; all others skip the test."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return skip(f"cupy.cuda.{type(self).__name__}.{name}")


class Generator(_Partial):
    """Random numbers, different from CuPy's."""

    def __init__(self, seed: Any = None) -> None:
        self._host = np.random.default_rng(seed)

    def standard_normal(self, size: Any = None, dtype: Any = float) -> Any:
        return to_device(np.asarray(self._host.standard_normal(size, dtype)))


class ElementwiseKernel:
    """A kernel that does nothing."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __call__(self, *args: Any, **_: Any) -> None:
        _refuse_numpy(args)


class Device(_Partial):
    """The only device."""

    compute_capability = "90"

    def __init__(self, device: int = 0) -> None:
        self.id = int(device)

    def __enter__(self) -> Device:
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def __int__(self) -> int:
        return self.id

    def use(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


class Stream(_Partial):
    """A stream that does everything at once, and on which nothing can be captured."""

    _numbers = itertools.count(1 << 20, 16)
    _current: ClassVar[list[Stream]] = []
    null: Stream

    def __init__(
        self, null: bool = False, non_blocking: bool = False, ptds: bool = False, **_: Any
    ) -> None:
        del non_blocking, ptds
        self.ptr = 0 if null else next(self._numbers)

    def __enter__(self) -> Stream:
        self._current.append(self)
        return self

    def __exit__(self, *_: Any) -> None:
        self._current.pop()

    def synchronize(self) -> None:
        pass

    def is_capturing(self) -> bool:
        return False


Stream.null = Stream(null=True)


def current_stream() -> Stream:
    """Return the innermost stream that was entered."""
    return (Stream._current or [Stream.null])[-1]


def _memset(address: int, value: int, size: int, *_: Any) -> None:
    ctypes.memset(address, value, size)


def stand_in(cupys: ModuleType, runtime: ModuleType, driver: ModuleType) -> dict[str, Namespace]:
    """Return the replacements of CuPy and of its CUDA bindings, by module name."""
    runtimes = Namespace(
        runtime, None,
        getDevice=lambda: 0, setDevice=lambda _: None, getDeviceCount=lambda: 1,
        streamIsCapturing=lambda _: False, memset=_memset, memsetAsync=_memset,
    )  # fmt: skip
    drivers = Namespace(
        driver, None, launchKernel=lambda *_: None, funcSetAttribute=lambda *_: None
    )
    cuda = Namespace(
        cupys.cuda, None, runtime=runtimes, driver=drivers, Device=Device, Stream=Stream,
        get_current_stream=current_stream, MemoryPointer=MemoryPointer, Memory=Memory,
        UnownedMemory=Lent,
    )  # fmt: skip
    module = Namespace(
        cupys, np, rehearsed=True, cuda=cuda, ndarray=ndarray,
        asnumpy=lambda a, *_, **__: np.array(to_host(a)),
        ElementwiseKernel=ElementwiseKernel,
        random=Namespace(cupys.random, None, default_rng=Generator),
        empty=lambda shape, dtype=float, order="C": ndarray(shape, dtype, order=order),
    )  # fmt: skip
    ndarray.cupys, ndarray.namespace = cupys.ndarray, module
    return {
        "cupy": module, "cupy.cuda": cuda,
        "cupy_backends.cuda.api.runtime": runtimes, "cupy_backends.cuda.api.driver": drivers,
    }  # fmt: skip

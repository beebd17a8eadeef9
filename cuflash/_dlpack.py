"""How is another library's array in host memory viewed as a NumPy array, without a copy?

``numpy.from_dlpack`` refuses bfloat16, which NumPy lacks. Such an array is imported as 16-bit
integers and viewed as ``ml_dtypes.bfloat16``.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from ml_dtypes import bfloat16

_UINT, _BFLOAT = 1, 4  # DLDataTypeCode
_NEWEST = (1, 0)  # version of DLPack; from 1.0 on a capsule says whether its array can be written
#: Bytes before the DLTensor in a capsule's struct: none, or version, manager, deleter and flags.
_OFFSET = {b"dltensor": 0, b"dltensor_versioned": 32}


class _Tensor(ctypes.Structure):
    """The first fields of DLTensor."""

    _fields_ = (
        ("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
    )  # fmt: skip


class _Capsule:
    """Exports one capsule, which the array's library made for us alone."""

    def __init__(self, capsule: Any, device: tuple[int, int]) -> None:
        self.capsule, self.device = capsule, device

    def __dlpack__(self, **_: Any) -> Any:
        return self.capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device


_name_of = ctypes.PYFUNCTYPE(ctypes.c_char_p, ctypes.py_object)(
    ("PyCapsule_GetName", ctypes.pythonapi)
)
_pointer_of = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


def from_dlpack(array: Any) -> np.ndarray[Any, Any]:
    """View an array in host memory as a NumPy array; errors of its library or NumPy are raised."""
    try:
        return np.from_dlpack(array)
    except (BufferError, RuntimeError):
        try:
            capsule = array.__dlpack__(max_version=_NEWEST)
        except TypeError:  # an exporter older than DLPack 1.0
            capsule = array.__dlpack__()
        name = _name_of(capsule)
        tensor = _Tensor.from_address(_pointer_of(capsule, name) + _OFFSET[name])
        if (tensor.code, tensor.bits, tensor.lanes) != (_BFLOAT, 16, 1):
            raise
        tensor.code = _UINT
        return np.from_dlpack(_Capsule(capsule, array.__dlpack_device__())).view(bfloat16)

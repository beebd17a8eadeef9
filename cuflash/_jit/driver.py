"""Which functions of the NVIDIA driver does CuPy not offer, or only slowly?"""

from __future__ import annotations

import ctypes
import functools
import os
from typing import Any

_POINTER, _ENUM = ctypes.c_void_p, ctypes.c_int
_SIGNATURES = {
    "cuDeviceGet": (_POINTER, ctypes.c_int),
    "cuDeviceGetName": (_POINTER, ctypes.c_int, ctypes.c_int),
    "cuTensorMapEncodeTiled": (
        _POINTER, _ENUM, ctypes.c_uint32, _POINTER,
        _POINTER, _POINTER, _POINTER, _POINTER,
        _ENUM, _ENUM, _ENUM, _ENUM,
    ),
    "cuTensorMapReplaceAddress": (_POINTER, _POINTER),
    "cuStreamGetId": (_POINTER, _POINTER),
    "cuLaunchKernelEx": (_POINTER, _POINTER, _POINTER, _POINTER),
}  # fmt: skip


@functools.cache
def function(name: str) -> Any:
    """A function of the driver that CuPy has loaded, or None; it returns an error number. (D69)"""
    try:
        driver = ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")
        found = getattr(driver, name)
    except (OSError, AttributeError):
        return None
    found.restype = ctypes.c_int
    found.argtypes = _SIGNATURES[name]
    return found


def encodes_tensor_maps() -> bool:
    """Whether the driver can encode maps and number streams, as Hopper's kernels need: CUDA 12."""
    names = ("cuTensorMapEncodeTiled", "cuTensorMapReplaceAddress", "cuStreamGetId")
    return all(function(name) is not None for name in names)


# CUDA's runtime returns all properties at once, clocks included, which takes milliseconds. (D74)


def device_name(device: int) -> str:
    """Name of a device."""
    handle, name = ctypes.c_int(), ctypes.create_string_buffer(256)
    function("cuDeviceGet")(ctypes.byref(handle), device)
    function("cuDeviceGetName")(name, len(name), handle)
    return name.value.decode()


@functools.cache
def attribute(name: str, device: int) -> int:
    """An attribute of a device, by CUDA's name without the prefix cudaDevAttr."""
    from cupy_backends.cuda.api import runtime

    return int(runtime.deviceGetAttribute(getattr(runtime, f"cudaDevAttr{name}"), device))

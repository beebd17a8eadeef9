"""Does no warp fall two phases behind at a barrier? Run by a C++ compiler, with one late warp.

Waits are by parity, so that a warp that misses two phases waits for ever.
"""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import pytest

from cuflash._jit import source as jit_source
from cuflash._kernels.config import fields_text

pytest.importorskip("cupy", reason="CuPy is not installed")

from support.host_device import COMPILER, SUPPORT

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")


class RingParams(ctypes.Structure):
    """Parameters of ``ring_probe.cu``."""

    _fields_ = (
        *((name, ctypes.c_int) for name in ("blocks", "late_warp", "late_by")),
        ("is_stuck", ctypes.c_bool),
    )


@pytest.mark.parametrize("num_stages", [1, 2])
def test_a_late_warp_keeps_its_place(tmp_path: Path, num_stages: int) -> None:
    """A late warp does not get stuck, whether warps fill, multiply or skip (float32 on Hopper)."""
    files = {
        "host_barriers.h": ("mbarrier", "sync"),
        "host_ptx.h": ("arithmetic", "mma_sync", "special", "tma"),
    }
    texts = [
        (f"ptx/{name}.cuh", f'#include "{SUPPORT}/{file}"\n')
        for file, names in files.items()
        for name in names
    ]
    texts += [("sm90_tf32/tf32_pairs.cuh", ""), fields_text({"num_stages": num_stages})]
    source, library = tmp_path / "probe.cpp", tmp_path / "probe.so"
    source.write_text(
        f'#include "{SUPPORT}/host_kernel.h"\n'
        "#define HOST_KERNEL cuflash_ring\n#define HOST_PARAMS RingParams\n"
        + jit_source.flatten(str(SUPPORT / "ring_probe.cu"), tuple(texts))
        + f'#include "{SUPPORT}/host_run.h"\n'
    )
    command = [COMPILER, "-O1", "-std=c++20", "-shared", "-fPIC", "-w", source, "-o", library]
    subprocess.run(command, check=True)
    for warp in (0, 1, 4, 5, 8, 9):
        params = RingParams(8, warp, 30)
        run = ctypes.CDLL(str(library)).run
        run(ctypes.c_uint(1), ctypes.c_int(384), ctypes.c_uint(1), ctypes.byref(params))
        assert not params.is_stuck, f"warp {warp}"

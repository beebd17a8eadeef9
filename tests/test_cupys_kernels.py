"""Do kernels of CuPy's own, which calls need beside ours, survive any state of their folder?

CuPy raises where it cannot use the folder; the library keeps it out of there. Without a device the
decision is looked at, and CuPy's compiler alone; with one, calls that need such kernels.
"""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
from test_kernel_cache import CONFIG, NO_FILES, finish, right, start

from cuflash._jit import cubin_cache
from support import cacheless_device


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return CuPy's folder, which nothing has made yet; forget afterwards what was decided."""
    place = tmp_path / "home" / "cache"
    monkeypatch.setenv("CUPY_CACHE_DIR", str(place))
    monkeypatch.setenv("CUPY_CACHE_IN_MEMORY", "")  # to be restored, whatever a test makes of it
    monkeypatch.delenv("CUPY_CACHE_IN_MEMORY")
    cubin_cache._warn_once.cache_clear()
    yield place
    cubin_cache._warn_once.cache_clear()
    cubin_cache._kept_out.clear()


def look() -> list[str]:
    """Look at the folder as the first two calls of two processes do; return the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            with cubin_cache.whatever_cupy_finds():
                assert os.environ["CUPY_CACHE_DIR"]
    assert all(warning.category is RuntimeWarning for warning in caught)
    return [str(warning.message) for warning in caught]


def missing(cache: Path) -> None:
    assert not cache.exists()


def filled(cache: Path) -> None:
    cache.mkdir(parents=True)
    (cache / "0.cubin").write_bytes(b"cut off: CuPy itself compiles it again")
    (cache / "cuflash").mkdir()


@pytest.mark.parametrize("state", [missing, filled], ids=lambda f: f.__name__)
def test_a_folder_that_can_be_used_is_used(cache: Path, state: Any) -> None:
    state(cache)
    before = sorted(cache.iterdir()) if cache.exists() else []
    assert look() == []
    assert "CUPY_CACHE_IN_MEMORY" not in os.environ
    assert sorted(cache.iterdir()) == before, "nothing is left of the attempt"


def a_file(cache: Path) -> None:
    cache.parent.mkdir()
    cache.write_text("no folder")


def below_a_file(cache: Path) -> None:
    cache.parent.write_text("no folder")


def a_folder_for_a_kernel(cache: Path) -> None:
    (cache / "0.cubin").mkdir(parents=True)


@pytest.mark.parametrize(
    "state", [a_file, below_a_file, a_folder_for_a_kernel], ids=lambda f: f.__name__
)
def test_a_folder_of_no_use_is_left_alone(cache: Path, state: Any) -> None:
    state(cache)
    (warning,) = look()
    assert str(cache) in warning
    assert os.environ["CUPY_CACHE_IN_MEMORY"] == "1"
    assert os.environ["CUPY_CACHE_DIR"] == str(cache)


@pytest.mark.parametrize("step", ["mkstemp", "access"])
def test_a_full_disk_and_kernels_of_another_user(
    cache: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """Nobody refuses root: the test does."""
    filled(cache)

    def refuse(path: Any = None, *_: Any, **__: Any) -> bool:
        if step == "mkstemp":
            raise OSError(28, "No space left on device")
        return Path(path).suffix != ".cubin"

    monkeypatch.setattr(cubin_cache.tempfile if step == "mkstemp" else os, step, refuse)
    assert len(look()) == 1
    assert os.environ["CUPY_CACHE_IN_MEMORY"] == "1"


@pytest.mark.parametrize("value", ["0", "1"])
def test_what_somebody_has_set_stays(
    cache: Path, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    a_file(cache)
    monkeypatch.setenv("CUPY_CACHE_IN_MEMORY", value)
    assert look() == []
    assert os.environ["CUPY_CACHE_IN_MEMORY"] == value


def test_our_kernels_are_read_where_nothing_can_be_written(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that came with a container, say."""
    compiler = cacheless_device.Compiler(monkeypatch.setattr)
    assert compiler.kernel(CONFIG) == right()

    def refuse(*_: Any, **__: Any) -> Any:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(cubin_cache.tempfile, "mkstemp", refuse)
    assert len(look()) == 1
    assert compiler.kernel(CONFIG) == right()
    assert compiler.compilations == 1


def test_a_folder_is_there_while_cupy_is_imported(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CuPy 14.2 makes it then, and raises where it cannot."""
    monkeypatch.setenv("CUPY_CACHE_IN_MEMORY", "1")
    with cubin_cache.whatever_cupy_finds():
        assert os.environ["CUPY_CACHE_DIR"] == os.sep
    assert not cache.exists()
    assert os.environ["CUPY_CACHE_DIR"] == str(cache)
    monkeypatch.setenv("CUPY_CACHE_DIR", "")
    monkeypatch.setenv("HOME", str(cache))
    with cubin_cache.whatever_cupy_finds():
        assert os.environ["CUPY_CACHE_DIR"] == os.sep
    assert os.environ["CUPY_CACHE_DIR"] == ""


#: CuPy compiles for a device that is not there, and loads nothing.
CUPYS_COMPILER = """
from types import SimpleNamespace
from cuflash import _arrays
cupy = _arrays._cupy("q")
from cupy.cuda import compiler
compiler.function = SimpleNamespace(
    Module=lambda: SimpleNamespace(load=print, _set_mapping=lambda mapping: None)
)
compiler._get_arch_for_options_for_nvrtc = lambda arch: ("-arch=sm_80", "cubin")
compiler._preprocess = lambda *_: ""
compiler._compile_module_with_cache("", arch="80")
"""


@pytest.mark.nvrtc
@pytest.mark.parametrize("kept_out", [True, False])
@pytest.mark.parametrize("place", ["file/cache", str(NO_FILES)])
@pytest.mark.skipif(not NO_FILES.is_dir(), reason="this system has no such folder")
def test_cupy_compiles_in_memory(tmp_path: Path, place: str, *, kept_out: bool) -> None:
    """And would not, were it not kept out."""
    (tmp_path / "file").write_text("")
    given = {"CUPY_CACHE_DIR": str(tmp_path / place)}
    if not kept_out:
        given["CUPY_CACHE_IN_MEMORY"] = "0"
    done = subprocess.run(
        [sys.executable, "-c", CUPYS_COMPILER], capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **given},
    )  # fmt: skip
    assert (done.returncode == 0) == kept_out, done.stderr
    assert done.stderr.count("RuntimeWarning") == kept_out
    assert ("OSError" in done.stderr or "Error: [Errno" in done.stderr) != kept_out


#: The first call has its arrays by name, and needs no kernel of ours.
CALLS = """
import json, os, sys, warnings
import numpy as np
import cuflash

rng = np.random.default_rng(0)
q, k, v, dout = rng.standard_normal((4, 2, 3, 40, 64)).astype(np.float32)
bias, ends = rng.standard_normal((1, 1, 40)).astype(np.float32), np.array([0, 10, 10, 30])
few, none = np.array([0, 0, 12, 40]), k[..., :0, :].copy()
wide = [a.astype(np.float64) for a in (q, k, v)]

def results(xp):
    def on(*arrays):
        return [xp.asarray(a) for a in arrays]
    parts = on(q, 2 * v), on(q[..., 0], v[..., 0])
    yield from cuflash.merge(outs=parts[0], lses=parts[1])
    yield cuflash.attention(*on(q, k.astype(np.float16), v))
    yield from cuflash.attention_varlen(*on(*wide, ends, few), return_lse=True)
    yield from cuflash.attention(*on(q, none, none), return_lse=True)
    given = on(dout, q, k, v)
    b, = on(bias)
    out, lse = cuflash.attention(*given[1:], bias=b, return_lse=True)
    wrt = ("q", "k", "v", "bias")
    g = cuflash.attention_backward(*given, out, lse, bias=b, wrt=wrt)
    yield from (g.dq, g.dk, g.dv, g.dbias)
    yield from cuflash.merge_backward(given[0], *parts)

with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    truth = list(results(np))
    assert not caught and len(truth) == 13, (caught, len(truth))
    sys.stdin.readline()
    if ON_A_DEVICE:
        import cupy
        for n, (got, wanted) in enumerate(zip(results(cupy), truth, strict=True)):
            assert got.dtype == wanted.dtype, n
            np.testing.assert_allclose(got.get(), wanted, rtol=1e-4, atol=1e-4, err_msg=str(n))
ours = [str(w.message) for w in caught if issubclass(w.category, RuntimeWarning)]
print(json.dumps({"warnings": ours, "in memory": os.environ.get("CUPY_CACHE_IN_MEMORY")}))
"""


def test_these_calls_are_legal_ones() -> None:
    """On the host, where no folder is needed."""
    script = CALLS.replace("ON_A_DEVICE", "False")
    assert finish(start(script, CUPY_CACHE_DIR=str(NO_FILES))) == {
        "warnings": [], "in memory": None,
    }  # fmt: skip


@pytest.mark.gpu
@pytest.mark.skipif(not NO_FILES.is_dir(), reason="this system has no such folder")
def test_calls_that_need_kernels_of_cupy() -> None:
    found = finish(start(CALLS.replace("ON_A_DEVICE", "True"), CUPY_CACHE_DIR=str(NO_FILES)))
    assert len(found["warnings"]) == 1, found
    assert str(NO_FILES) in found["warnings"][0]
    assert found["in memory"] == "1"


@pytest.mark.gpu
def test_calls_that_find_their_folder(cache: Path) -> None:
    found = finish(start(CALLS.replace("ON_A_DEVICE", "True"), CUPY_CACHE_DIR=str(cache)))
    assert found == {"warnings": [], "in memory": None}
    assert list(cache.glob("*.cubin")), "CuPy kept some of its own"
    assert list(cache.glob("cuflash/*.cubin"))

"""Do CuPy's own kernels, which calls need beside ours, survive any state of their folder?

CuPy raises where it cannot use the folder, so that cuflash makes CuPy compile in memory there.
Without a device, the tests look at this decision and run CuPy's compiler alone. With a device, they
make calls that need kernels of CuPy.
"""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from test_kernel_cache import CONFIG, NO_FILES, finish, right, start

from cuflash import _cupy
from cuflash._jit import cubin_cache
from support import cacheless_device


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Return CuPy's folder, which does not exist yet; clear afterwards what was decided."""
    place = tmp_path / "home" / "cache"
    monkeypatch.setenv("CUPY_CACHE_DIR", str(place))
    monkeypatch.setenv("CUPY_CACHE_IN_MEMORY", "")  # makes pytest restore the variable afterwards
    monkeypatch.delenv("CUPY_CACHE_IN_MEMORY")
    cubin_cache.warn_once.cache_clear()
    yield place
    cubin_cache.warn_once.cache_clear()


def flag(name, default):
    """Return how CuPy reads a variable."""
    return os.environ.get(name, str(int(default))) == "1"


class Look(NamedTuple):
    """The result of looking at the folder."""

    warnings: list[str]
    in_memory: bool


def look(monkeypatch):
    """Import CuPy in several threads at once, each as its first call; nothing may be set."""
    compiler = SimpleNamespace(_get_bool_env_variable=flag)
    library = SimpleNamespace(cuda=SimpleNamespace(compiler=compiler))
    monkeypatch.setitem(sys.modules, "cupy", library)
    written: list[Any] = []
    with (
        warnings.catch_warnings(record=True) as caught,
        monkeypatch.context() as patch,
        ThreadPoolExecutor(8) as pool,
    ):
        warnings.simplefilter("always")
        for function in ("putenv", "unsetenv"):  # used by `os.environ`
            patch.setattr(os, function, lambda *given: written.append(given))
        found = list(pool.map(lambda _: _cupy.import_cupy(), range(8)))
    assert found == [library] * 8
    assert not written, "threads share the environment, and processes that others start"
    assert all(warning.category is RuntimeWarning for warning in caught)
    assert not compiler._get_bool_env_variable("CUPY_COMPILE_WITH_PTX", False)
    in_memory = compiler._get_bool_env_variable("CUPY_CACHE_IN_MEMORY", False)
    return Look([str(warning.message) for warning in caught], in_memory)


def missing(cache):
    assert not cache.exists()


def filled(cache):
    cache.mkdir(parents=True)
    (cache / "0.cubin").write_bytes(b"cut off: CuPy itself compiles it again")
    (cache / "cuflash").mkdir()


@pytest.mark.parametrize("state", [missing, filled], ids=lambda f: f.__name__)
def test_a_folder_that_can_be_used_is_used(cache, monkeypatch, state):
    state(cache)
    before = sorted(cache.iterdir()) if cache.exists() else []
    assert look(monkeypatch) == Look([], in_memory=False)
    assert sorted(cache.iterdir()) == before, "nothing is left of the attempt"


def a_file(cache):
    cache.parent.mkdir()
    cache.write_text("no folder")


def below_a_file(cache):
    cache.parent.write_text("no folder")


def a_folder_for_a_kernel(cache):
    (cache / "0.cubin").mkdir(parents=True)


@pytest.mark.parametrize(
    "state", [a_file, below_a_file, a_folder_for_a_kernel], ids=lambda f: f.__name__
)
def test_a_folder_of_no_use_is_left_alone(cache, monkeypatch, state):
    state(cache)
    found = look(monkeypatch)
    assert [str(cache) in warning for warning in found.warnings] == [True]
    assert found.in_memory


@pytest.mark.parametrize("step", ["TemporaryFile", "access"])
def test_a_full_disk_and_kernels_of_another_user(cache, monkeypatch, step):
    """A full disk or unreadable kernels keep CuPy in memory (simulated: nobody refuses root)."""
    filled(cache)

    def refuse(path=None, *_, **__):
        if step == "TemporaryFile":
            raise OSError(28, "No space left on device")
        return Path(path).suffix != ".cubin"

    monkeypatch.setattr(cubin_cache.tempfile if step == "TemporaryFile" else os, step, refuse)
    found = look(monkeypatch)
    assert len(found.warnings) == 1
    assert found.in_memory


@pytest.mark.parametrize("value", ["0", "1"])
def test_what_somebody_has_set_stays(cache, monkeypatch, value):
    a_file(cache)
    monkeypatch.setenv("CUPY_CACHE_IN_MEMORY", value)
    assert look(monkeypatch) == Look([], in_memory=value == "1")


def test_our_kernels_are_read_where_nothing_can_be_written(cache, monkeypatch):
    """Stored kernels are read from a folder that cannot be written, such as that of a container."""
    compiler = cacheless_device.Compiler(monkeypatch.setattr)
    assert compiler.kernel(CONFIG) == right()

    def refuse(*_, **__):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(cubin_cache.tempfile, "TemporaryFile", refuse)
    assert len(look(monkeypatch).warnings) == 1
    assert compiler.kernel(CONFIG) == right()
    assert compiler.compilations == 1


#: Several threads need CuPy at once, before anybody has imported it.
THREADS = """
import os
from concurrent.futures import ThreadPoolExecutor
from cuflash import _arrays
before = dict(os.environ)
with ThreadPoolExecutor(8) as pool:
    assert len(set(pool.map(_arrays._cupy, ["q"] * 8))) == 1
assert dict(os.environ) == before
"""


@pytest.mark.parametrize("given", [{}, {"CUPY_CACHE_IN_MEMORY": "1"}], ids=str)
@pytest.mark.parametrize("place", ["file/cache", "new/cache"])
def test_cupy_is_imported_where_no_folder_can_be_made(tmp_path, place, given):
    """Where no folder can be made CuPy is imported, though CuPy 14.2 makes one and may raise."""
    pytest.importorskip("cupy", reason="CuPy is not installed")
    (tmp_path / "file").write_text("")
    own = {"CUPY_CACHE_DIR": str(tmp_path / place)}
    done = subprocess.run(
        [sys.executable, "-c", THREADS], capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **own, **given},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("RuntimeWarning") == (place == "file/cache" and not given)
    assert (tmp_path / place).exists() == (place == "new/cache" and not given)


#: A script in which CuPy compiles for a simulated device, and loads nothing.
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
def test_cupy_compiles_in_memory(tmp_path, place, *, kept_out):
    """CuPy compiles in memory where its folder is unusable, and raises if it tries the folder."""
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


#: The first call passes its arrays by keyword, and needs no kernel of cuflash.
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
print(json.dumps({"warnings": ours, "set": os.environ.get("CUPY_CACHE_IN_MEMORY")}))
"""


def test_these_calls_are_legal_ones():
    """The calls of the script are legal: on the host they run without a warning."""
    script = CALLS.replace("ON_A_DEVICE", "False")
    assert finish(start(script, CUPY_CACHE_DIR=str(NO_FILES))) == {
        "warnings": [], "set": None,
    }  # fmt: skip


@pytest.mark.gpu
@pytest.mark.skipif(not NO_FILES.is_dir(), reason="this system has no such folder")
def test_calls_that_need_kernels_of_cupy():
    found = finish(start(CALLS.replace("ON_A_DEVICE", "True"), CUPY_CACHE_DIR=str(NO_FILES)))
    assert len(found["warnings"]) == 1, found
    assert str(NO_FILES) in found["warnings"][0]
    assert found["set"] is None


@pytest.mark.gpu
def test_calls_that_find_their_folder(cache):
    found = finish(start(CALLS.replace("ON_A_DEVICE", "True"), CUPY_CACHE_DIR=str(cache)))
    assert found == {"warnings": [], "set": None}
    assert list(cache.glob("*.cubin")), "CuPy kept some of its own"
    assert list(cache.glob("cuflash/*.cubin"))

"""Is the compiler identified without loading it, and is no kernel stored under a wrong name?"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from cuflash._jit import compilation, compiler_id, cubin_cache
from cuflash._kernels.segment_bounds import SegmentBoundsConfig
from support import cacheless_device

ROOT = Path(__file__).resolve().parents[1]
CONFIG = SegmentBoundsConfig(num_warps=8, segment_ids="int32")


def forget(cached=(compiler_id.identity, compiler_id.noted)):
    """Clear the caches, so that this process behaves as a new one."""
    for function in cached:
        function.cache_clear()


@pytest.fixture
def library(tmp_path, monkeypatch):
    """Return the file of a simulated NVRTC, and a list that grows with each load."""
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "cache"))
    place = tmp_path / "site/nvidia/cu13/lib"
    place.mkdir(parents=True)
    monkeypatch.setattr(compiler_id, "_site_folders", lambda: [str(tmp_path / "site")])
    file = place / "libnvrtc.so.13"
    file.write_bytes(b"library")
    loads = []
    nvrtc = SimpleNamespace(getVersion=lambda: loads.append(1) or (13, 0))
    finder = SimpleNamespace(load_nvidia_dynamic_lib=lambda _: SimpleNamespace(abs_path=str(file)))
    monkeypatch.setitem(sys.modules, "cupy_backends.cuda.libs", SimpleNamespace(nvrtc=nvrtc))
    monkeypatch.setitem(sys.modules, "cuda.pathfinder", finder)
    forget()
    yield SimpleNamespace(file=file, loads=loads, note=tmp_path / "cache/cuflash/compiler.json")
    forget()


def test_the_first_process_asks_the_library_and_the_next_looks_at_its_file(library):
    assert compiler_id.noted() is None
    assert compiler_id.identity() == "NVRTC 13.0 of 7 bytes"
    forget()
    assert compiler_id.noted() == "NVRTC 13.0 of 7 bytes"
    assert len(library.loads) == 1


def larger(library):
    library.file.write_bytes(b"another library")


def newer(library):
    """Change the time but not the size, as a patch may do."""
    os.utime(library.file, ns=(1, 1))


def gone(library):
    library.file.unlink()


def beside(library):
    """Add another wheel, which CuPy may prefer."""
    (library.file.parents[2] / "cuda_nvrtc/lib").mkdir(parents=True)


def in_its_folder(library):
    (library.file.parent / "libnvrtc.so.14").write_bytes(b"")


def cut_off(library):
    library.note.write_bytes(library.note.read_bytes()[:-9])


def no_text(library):
    library.note.write_bytes(b"\xff\xfe")


def no_object(library):
    library.note.write_text("[]")


def nothing(library):
    library.note.write_text("{}")


def no_path(library):
    note = json.loads(library.note.read_text()) | {"file": "\0"}
    library.note.write_text(json.dumps(note))


def directory(library):
    library.note.unlink()
    library.note.mkdir()


@pytest.mark.parametrize(
    "change",
    [larger, newer, gone, beside, in_its_folder, cut_off, no_text, no_object, nothing, no_path,
     directory],
)  # fmt: skip
def test_a_note_that_may_be_wrong_is_not_believed(library, change):
    compiler_id.identity()
    forget()
    change(library)
    assert compiler_id.noted() is None


@pytest.mark.parametrize("variable", ["CONDA_PREFIX", "CUDA_HOME", "CUDA_PATH", "LD_LIBRARY_PATH"])
def test_a_variable_that_may_lead_elsewhere_makes_a_note_void(library, monkeypatch, variable):
    compiler_id.identity()
    forget()
    monkeypatch.setenv(variable, "/elsewhere")
    assert compiler_id.noted() is None


def test_nothing_is_noted_without_a_file(library, monkeypatch):
    """Where pathfinder finds no file, the version identifies the library and no note is written."""

    def nowhere(name):
        raise RuntimeError(name)

    monkeypatch.setattr(sys.modules["cuda.pathfinder"], "load_nvidia_dynamic_lib", nowhere)
    assert compiler_id.identity() == "NVRTC 13.0 of 0 bytes"
    assert not library.note.exists()


def test_nothing_is_noted_where_the_store_is_in_memory(library, monkeypatch):
    monkeypatch.setenv("CUPY_CACHE_IN_MEMORY", "1")
    compiler_id.identity()
    assert not library.note.exists()
    assert compiler_id.noted() is None


def test_a_folder_without_room_makes_no_difference(library, monkeypatch):
    monkeypatch.setenv("CUPY_CACHE_DIR", "/proc/sys")
    assert compiler_id.identity() == "NVRTC 13.0 of 7 bytes"
    forget()
    assert compiler_id.noted() is None


@pytest.fixture
def compiler(monkeypatch, library):
    """Return a function ``of`` that makes a compiler as a new process would find it."""
    found = cacheless_device.Compiler(monkeypatch.setattr)

    def of(true, noted):
        monkeypatch.setattr(compiler_id, "identity", lambda: true or pytest.fail("it was loaded"))
        monkeypatch.setattr(compiler_id, "noted", lambda: noted)
        return found

    return SimpleNamespace(of=of, found=found)


def names():
    return {path.stem for path in cubin_cache.folder().glob("*.cubin")}


def test_a_stored_kernel_needs_no_library(compiler):
    first = compiler.of("NVRTC", None).kernel(CONFIG)
    assert compiler.of(None, "NVRTC").kernel(CONFIG) == first
    assert compiler.found.compilations == 1


def test_a_kernel_is_stored_under_what_compiled_it(compiler):
    """A kernel's name has the library of this process, even if a note names another one."""
    compiler.of("true", "noted").kernel(CONFIG)
    source = compilation.source_of(CONFIG)
    options = (*compilation.OPTIONS, f"-arch=sm_{cacheless_device.ARCH}")
    by_true, by_noted = (
        cubin_cache.name_of(source, *options, one, cacheless_device.CUPY)
        for one in ("true", "noted")
    )
    assert names() == {by_true}
    assert by_noted != by_true


def test_a_kernel_of_the_library_is_found_behind_a_wrong_note(compiler):
    first = compiler.of("true", None).kernel(CONFIG)
    assert compiler.of("true", "noted").kernel(CONFIG) == first
    assert compiler.found.compilations == 1


@pytest.mark.nvrtc
def test_a_second_process_loads_no_library(tmp_path):
    """A second process trusts the note of the first and loads no library (with the real NVRTC)."""
    text = """if True:
        import json, sys
        from cuflash._jit import compiler_id
        noted = compiler_id.noted()
        loaded = [line for line in open("/proc/self/maps") if "libnvrtc.so" in line]
        print(json.dumps([noted, bool(loaded), noted or compiler_id.identity()]))
    """
    given = {**os.environ, "CUPY_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", text]
    first, second = (
        json.loads(subprocess.run(command, env=given, capture_output=True, check=True).stdout)
        for _ in range(2)
    )
    assert first[0] is None
    assert second == [first[2], False, first[2]]
    assert Path(tmp_path, "cuflash/compiler.json").exists()

"""Does a call survive any state of the kernel cache, and do kernels' names cover all inputs?

Without a device the cache runs on a simulated driver and compiler. The same faults are then tried
with real kernels, in processes of their own.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from cuflash._jit import compilation, compiler_id, cubin_cache
from cuflash._jit import source as jit_source
from cuflash._kernels.forward_sm80 import ForwardConfig
from support import cacheless_device

ROOT = Path(__file__).resolve().parents[1]
CONFIG = ForwardConfig(
    dtype="float16", out_dtype="float16", copy_bytes=16, head_dim=64, head_dim_v=64, block_m=128,
    block_n=64, num_warps=4, blocks_per_sm=2, sink="none", precision="ieee",
    split_columns=1, wide_float64=False, simt=False, num_stages=2,
    window_left=False, window_right=False, scale_in_exponent=True, softcap=False, bias="none",
    mask=False, offset="value", q_lengths="none", kv_lengths="none", alibi_slopes="none",
    segment_ids="none", dropout=False, cu_seqlens="none", score_mod=False, mask_mod=False,
    formulas=(),
)  # fmt: skip
OTHER = CONFIG.replace(head_dim=128)
#: A folder that exists and in which not even root can create a file.
NO_FILES = Path("/proc/sys")


@pytest.fixture(autouse=True)
def forget():
    """Clear cached sources and warnings, before and after a test."""
    for cached in (jit_source.flatten, jit_source.kernels_dir, cubin_cache.warn_once):
        cached.cache_clear()
    yield
    for cached in (jit_source.flatten, jit_source.kernels_dir, cubin_cache.warn_once):
        cached.cache_clear()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return the folder of the kernel cache, which does not exist yet."""
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "cuflash"


@pytest.fixture
def compiler(monkeypatch, folder):
    """Return cuflash's compiler on a simulated device."""
    return cacheless_device.Compiler(monkeypatch.setattr)


def right(config=CONFIG):
    """Return the bytes that must be launched for a configuration."""
    return cacheless_device.product(compilation.source_of(config), compilation.OPTIONS, "sm_90")


def entry_of(folder):
    """Return the one file of the kernel cache."""
    (path,) = folder.iterdir()
    return path


def stored(payload, name):
    """Return a file that the cache accepts as a kernel of this name, whatever it holds."""
    return payload + hashlib.sha256(name.encode() + payload).digest()


# --- faults, without a device ------------------------------------------------------------------


def test_second_process_takes_the_kernel_from_disk(compiler, folder):
    assert compiler.kernel(CONFIG) == right()
    assert compiler.kernel(CONFIG) == right()
    assert compiler.compilations == 1
    assert entry_of(folder).suffix == ".cubin"
    assert entry_of(folder).read_bytes() == stored(right(), entry_of(folder).stem)


def truncated(path):
    path.write_bytes(path.read_bytes()[:-7])


def flipped(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def empty(path):
    path.write_bytes(b"")


def digest_only(path):
    path.write_bytes(path.read_bytes()[-32:])


def no_cubin(path):
    path.write_bytes(stored(b"not a cubin", path.stem))


def another_kernel(path):
    path.write_bytes(stored(right().replace(b"forward_sm80", b"backward_delta"), path.stem))


def under_another_name(path):
    path.write_bytes(stored(right(OTHER), "0" * 64))


def directory(path):
    path.unlink()
    path.mkdir()


def fifo(path):
    """Replace the file by a pipe; opening that waits for a writer."""
    path.unlink()
    os.mkfifo(path)


def writable_by_all(path):
    path.chmod(0o666)


def dangling_link(path):
    path.unlink()
    path.symlink_to(path.with_name("nowhere"))


def removed_folder(path):
    shutil.rmtree(path.parent)


FAULTS = (
    truncated, flipped, empty, digest_only, no_cubin, another_kernel, under_another_name, directory,
    fifo, writable_by_all, dangling_link, removed_folder,
)  # fmt: skip
#: Files that are not regular files of this user cause a warning.
TOLD = (directory, fifo, writable_by_all)


@pytest.mark.skipif(os.name == "nt", reason="Windows has none of some")
@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.__name__)
def test_broken_entry_is_compiled_again(compiler, folder, fault):
    compiler.kernel(CONFIG)
    fault(entry_of(folder))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            assert compiler.kernel(CONFIG) == right()
    told = [str(folder.parent) in str(warning.message) for warning in caught]
    assert told == [True] * (fault in TOLD)
    if fault is directory:
        assert compiler.compilations == 4
    else:
        assert compiler.compilations == 2, "it was replaced"
        assert entry_of(folder).read_bytes() == stored(right(), entry_of(folder).stem)


@pytest.mark.skipif(not NO_FILES.is_dir(), reason="this system has no such folder")
def test_unwritable_folder_warns_once_for_all_kernels(monkeypatch):
    monkeypatch.setenv("CUPY_CACHE_DIR", str(NO_FILES))
    compiler = cacheless_device.Compiler(monkeypatch.setattr)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for config in (
            CONFIG,
            OTHER,
            CONFIG.replace(softcap=True, scale_in_exponent=False),
        ):
            assert compiler.kernel(config) == right(config)
    assert len(caught) == 1, [str(w.message) for w in caught]
    assert caught[0].category is RuntimeWarning


def test_unreadable_entry_of_another_user(compiler, folder, monkeypatch):
    """A file that cannot be read causes a warning (simulated, since nobody refuses root).

    Files can be read by their owner only.
    """
    compiler.kernel(CONFIG)
    entry, real = entry_of(folder), os.open
    assert entry.stat().st_mode & 0o077 == 0

    def refusing(path, flags, *given):
        if Path(path) == entry:
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, flags, *given)

    monkeypatch.setattr(os, "open", refusing)
    with pytest.warns(RuntimeWarning, match="cache"):
        assert compiler.kernel(CONFIG) == right()


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such modes")
@pytest.mark.parametrize("folder_mode", [0o700, 0o775, 0o777, 0o1777], ids=oct)
@pytest.mark.parametrize("owner", ["this user", "root", "another"])
def test_whose_files_are_read(compiler, folder, monkeypatch, owner, folder_mode):
    """Other users' files are not read, whoever may write to the folder: names are public."""
    compiler.kernel(CONFIG)
    real, user = os.fstat, os.geteuid() + 1000
    owners = {"this user": user, "root": 0, "another": user + 1}

    def fstat(descriptor):
        status = list(real(descriptor))
        status[stat.ST_UID] = owners[owner]
        return os.stat_result(status)

    folder.chmod(folder_mode)
    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setattr(os, "fstat", fstat)
    refused = owner == "another"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert compiler.kernel(CONFIG) == right()
    assert compiler.compilations == 1 + refused
    told = ["another user may have written to it" in str(w.message) for w in caught]
    assert told == [True] * refused


NO_NOTES = [b"", b"{", b"[]", b"1", b"\xff", b"[" * 100_000, b'{"a":' * 100_000]


@pytest.mark.parametrize("content", NO_NOTES, ids=lambda content: str(content[:8]))
def test_what_is_no_note_is_none(folder, content):
    cubin_cache.save("a" * 64, b"a kernel")
    for name in ("a" * 64, "compiler"):
        (folder / f"{name}.json").write_bytes(content)
    assert cubin_cache.load_note("a" * 64) is None
    assert cubin_cache.load_note("compiler") is None


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such files")
def test_notes_are_read_as_kernels_are(folder):
    cubin_cache.save_note("compiler", {"identity": "ours"})
    assert cubin_cache.load_note("compiler") == {"identity": "ours"}
    for fault in TOLD:
        cubin_cache.save_note("compiler", {"identity": "ours"})
        fault(folder / "compiler.json")
        assert cubin_cache.load_note("compiler") is None, fault.__name__
        shutil.rmtree(folder)


def test_a_file_in_the_place_of_the_folder(compiler, folder):
    folder.parent.write_text("no folder")
    with pytest.warns(RuntimeWarning, match="cache"):
        assert compiler.kernel(CONFIG) == right()


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), PermissionError(13, "no")]
)
@pytest.mark.parametrize("step", ["mkstemp", "replace"])
def test_full_disk(compiler, folder, monkeypatch, error, step):
    def refuse(*_, **__):
        raise error

    library = cubin_cache.tempfile if step == "mkstemp" else cubin_cache.os
    monkeypatch.setattr(library, step, refuse)
    with pytest.warns(RuntimeWarning, match="cache"):
        assert compiler.kernel(CONFIG) == right()
    assert not list(folder.iterdir()), "a temporary file is left"


def test_a_file_that_cannot_be_replaced_but_holds_the_kernel(compiler, folder, monkeypatch):
    """A file that another process has open, which Windows does not replace, causes no warning."""
    real = os.replace

    def refuse(source, target):
        real(source, target)
        raise PermissionError(5, "Access is denied")

    monkeypatch.setattr(cubin_cache.os, "replace", refuse)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert compiler.kernel(CONFIG) == right()


def test_no_files_where_cupy_keeps_its_own_in_memory(compiler, folder, monkeypatch):
    monkeypatch.setenv("CUPY_CACHE_IN_MEMORY", "1")
    assert compiler.kernel(CONFIG) == right()
    assert compiler.kernel(CONFIG) == right()
    assert compiler.compilations == 2
    assert not folder.exists()


def test_warning_turned_into_an_error_is_the_users_choice(monkeypatch):
    """A warning raised as an error, by -W error, comes once: the next call works."""
    if not NO_FILES.is_dir():
        pytest.skip("this system has no such folder")
    monkeypatch.setenv("CUPY_CACHE_DIR", str(NO_FILES))
    compiler = cacheless_device.Compiler(monkeypatch.setattr)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert compiler.kernel(CONFIG) == right()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert compiler.kernel(OTHER) == right(OTHER)


# --- names -------------------------------------------------------------------------------------


def name(compiler, folder, config=CONFIG):
    """Compile and return the name of the new file."""
    if folder.exists():
        shutil.rmtree(folder)
    compiler.kernel(config)
    return entry_of(folder).name


def changed_fields():
    """Yield the configuration with one field changed, for each field."""
    other = {
        "dtype": "bfloat16", "out_dtype": "float32", "copy_bytes": 2, "head_dim": 128,
        "head_dim_v": 128, "num_warps": 2, "block_m": 64, "block_n": 32, "blocks_per_sm": 1,
        "window_left": True, "window_right": True, "scale_in_exponent": False, "softcap": True,
        "bias": "float32", "mask": True, "offset": "int32", "q_lengths": "int32",
        "kv_lengths": "int64", "alibi_slopes": "float32", "segment_ids": "int32", "score_mod": True,
        "mask_mod": True, "formulas": (("formulas/mask_mod.expression", "q == k\n"),),
        "dropout": True, "cu_seqlens": "int64", "sink": "float32", "precision": "tf32",
        "q_scale": "float32", "k_scale": "float32", "v_scale": "float32",
        "split_columns": 2, "split_keys": True, "wide_float64": True, "simt": True, "num_stages": 1,
        "paged": True, "overlaps": True, "clusters": True, "heads_in_rows": True,
        "holds_bias": True, "kv_dtype": "float8_e4m3fn",
    }  # fmt: skip
    names = CONFIG.values()
    assert sorted(names) == sorted(other), "a new field needs a line here"
    for name in names:
        scored = ("softcap", "bias", "alibi_slopes", "score_mod")
        extra = {"scale_in_exponent": False} if name in scored else {}
        yield CONFIG.replace(**{name: other[name]}, **extra)


def test_every_field_of_the_configuration_is_in_the_source():
    configs = [CONFIG, *changed_fields()]
    assert len({compilation.source_of(config) for config in configs}) == len(configs)


def test_every_field_of_the_configuration_is_in_the_name(compiler, folder):
    configs = [CONFIG, *changed_fields()]
    assert len({name(compiler, folder, config) for config in configs}) == len(configs)


def test_an_edited_header_is_in_the_name(compiler, folder, tmp_path, monkeypatch):
    """An edit of any file that the kernel includes changes its name; other headers do not count."""
    copy = tmp_path / "kernels_cu"
    shutil.copytree(jit_source.kernels_dir(), copy)
    monkeypatch.setattr(jit_source, "kernels_dir", lambda: copy)
    before = name(compiler, folder)
    used = 0
    for path in sorted(p for p in copy.rglob("*") if p.suffix in (".cu", ".cuh")):
        text = path.read_text()
        included = f'"{path.relative_to(copy).as_posix()}"' in jit_source.flatten(CONFIG.source)
        path.write_text(text + "\n// edited\n")
        jit_source.flatten.cache_clear()
        assert (name(compiler, folder) != before) == included, path
        path.write_text(text)
        jit_source.flatten.cache_clear()
        used += included
    assert used >= 5
    assert name(compiler, folder) == before


@pytest.mark.parametrize("what", ["options", "nvrtc", "arch", "cupy"])
def test_tools_are_in_the_name(compiler, folder, monkeypatch, what):
    before = name(compiler, folder)
    if what == "options":
        monkeypatch.setattr(compilation, "OPTIONS", (*compilation.OPTIONS, "-lineinfo"))
    elif what == "nvrtc":
        monkeypatch.setattr(compiler_id, "identity", lambda: "another NVRTC")
    elif what == "arch":
        monkeypatch.setattr(cacheless_device, "ARCH", "80")
    else:
        monkeypatch.setattr(cacheless_device, "CUPY", "14.3.0")
    assert name(compiler, folder) != before


@pytest.mark.nvrtc
def test_patches_of_nvrtc_are_told_apart(monkeypatch):
    identity = compiler_id.identity.__wrapped__
    before = identity()
    assert re.fullmatch(r"NVRTC \d+\.\d+ of \d{7,} bytes", before), "and nothing of this machine"
    monkeypatch.setattr(compiler_id, "_state", lambda path: (12345678, 0))
    assert identity() != before

    def gone(path):
        raise FileNotFoundError(path)

    monkeypatch.setattr(compiler_id, "_state", gone)
    assert identity().endswith(" of 0 bytes")


def test_names_hold_nothing_of_this_machine(compiler, folder, tmp_path, monkeypatch):
    """The same sources in another folder give the same names."""
    before = name(compiler, folder)
    copy = tmp_path / "elsewhere"
    shutil.copytree(jit_source.kernels_dir(), copy)
    monkeypatch.setattr(jit_source, "kernels_dir", lambda: copy)
    jit_source.flatten.cache_clear()
    assert name(compiler, folder) == before


# --- processes ---------------------------------------------------------------------------------

COMPILE_ON_THE_STAND_IN = """
import sys
from support import cacheless_device
import test_kernel_cache as t
compiler = cacheless_device.Compiler(setattr)
sys.stdin.readline()
assert compiler.kernel(t.CONFIG) == t.right()
assert compiler.kernel(t.OTHER) == t.right(t.OTHER)
print("{}")
"""

ATTENTION = """
import hashlib, json, sys, warnings
import numpy as np
import cupy
import cuflash
host = np.random.default_rng(0).standard_normal((4, 2, 3, 150, 64)).astype(np.float16)
q, k, v, dout = cupy.asarray(host)
sys.stdin.readline()
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    out, lse = cuflash.attention(q, k, v, causal=True, return_lse=True)
    g = cuflash.attention_backward(dout, q, k, v, out, lse, causal=True)
truth = cuflash.reference.attention(*host[:3], causal=True)
assert np.abs(out.get() - truth).max() < 4e-3, "wrong result"
digest = hashlib.sha256(b"".join(a.get().tobytes() for a in (out, lse, g.dq, g.dk, g.dv)))
ours = [w for w in caught if issubclass(w.category, RuntimeWarning)]
print(json.dumps({"digest": digest.hexdigest(), "warnings": [str(w.message) for w in ours]}))
"""


def start(script, **environment):
    """Start a process that waits for a line on stdin before it compiles."""
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    variables.pop("CUFLASH_KERNELS", None)  # these tests compile, and load no shared kernels
    variables |= {name: value for name, value in environment.items() if value is not None}
    for name in (name for name, value in environment.items() if value is None):
        variables.pop(name, None)
    return subprocess.Popen(
        [sys.executable, "-c", script], text=True, env=variables, cwd=ROOT,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def finish(process):
    """Let a process run, and return its result."""
    output, error = process.communicate("\n", timeout=300)
    assert process.returncode == 0, error
    return json.loads(output.splitlines()[-1])


def finish_together(processes):
    """Let all processes run at the same time."""
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    return [finish(process) for process in processes]


@pytest.mark.full
def test_16_processes_cold_at_once(folder):
    cache = str(folder.parent)
    finish_together([start(COMPILE_ON_THE_STAND_IN, CUPY_CACHE_DIR=cache) for _ in range(16)])
    found = sorted(path.read_bytes()[:-32] for path in folder.iterdir())
    assert found == sorted([right(), right(OTHER)]), "one file for each, nothing else"
    for path in folder.iterdir():
        assert path.read_bytes() == stored(path.read_bytes()[:-32], path.stem)


@pytest.fixture(scope="module")
def warm(tmp_path_factory):
    """Return a cache that holds the kernels of `ATTENTION`, and the result of that script."""
    folder = tmp_path_factory.mktemp("warm")
    return folder, finish(start(ATTENTION, CUPY_CACHE_DIR=str(folder)))


@pytest.mark.gpu
def test_16_processes_cold_at_once_with_real_kernels(tmp_path, warm):
    processes = [start(ATTENTION, CUPY_CACHE_DIR=str(tmp_path)) for _ in range(16)]
    assert finish_together(processes) == [warm[1]] * 16


@pytest.mark.gpu
def test_the_next_process_compiles_nothing(warm):
    def written():
        return {path: path.stat().st_mtime_ns for path in warm[0].glob("cuflash/*")}

    before = written()
    assert before
    assert finish(start(ATTENTION, CUPY_CACHE_DIR=str(warm[0]))) == warm[1]
    assert written() == before


@pytest.mark.gpu
@pytest.mark.parametrize(
    "fault", [truncated, flipped, empty, no_cubin, directory], ids=lambda f: f.__name__
)
def test_broken_entries_with_real_kernels(tmp_path, warm, fault):
    folder = tmp_path / "cache"
    shutil.copytree(warm[0], folder)
    paths = list(folder.glob("cuflash/*.cubin"))
    assert len(paths) >= 3, "those of forward and backward"
    for path in paths:
        fault(path)
    found = finish(start(ATTENTION, CUPY_CACHE_DIR=str(folder)))
    assert found["digest"] == warm[1]["digest"]
    assert len(found["warnings"]) == (fault is directory)


@pytest.mark.gpu
def test_kernels_under_each_others_names(tmp_path, warm):
    folder = tmp_path / "cache"
    shutil.copytree(warm[0], folder)
    paths = sorted(folder.glob("cuflash/*.cubin"))
    contents = [path.read_bytes() for path in paths]
    for path, content in zip(paths, contents[1:] + contents[:1], strict=True):
        path.write_bytes(content)
    found = finish(start(ATTENTION, CUPY_CACHE_DIR=str(folder)))
    assert found["digest"] == warm[1]["digest"]


@pytest.mark.gpu
@pytest.mark.skipif(not NO_FILES.is_dir(), reason="this system has no such folder")
def test_unwritable_folder_with_real_kernels(warm):
    found = finish(start(ATTENTION, CUPY_CACHE_DIR=str(NO_FILES)))
    assert found["digest"] == warm[1]["digest"]
    assert len(found["warnings"]) == 1


@pytest.mark.gpu
def test_without_a_home(tmp_path, warm):
    found = finish(start(ATTENTION, HOME=None, CUPY_CACHE_DIR=str(tmp_path)))
    assert found["digest"] == warm[1]["digest"]

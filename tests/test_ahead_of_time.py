"""Do kernels run that were compiled ahead of time, and is a bad file noticed?

The driver is simulated (``support/cacheless_device.py``). The tests compare the bytes that it is
asked to load.
"""

from __future__ import annotations

import os
import shutil
import stat
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

import cuflash
from cuflash import _cli, tuning
from cuflash._ahead import kernels_of
from cuflash._jit import compilation, compiler_id, cubin_cache
from cuflash._select import hardware
from cuflash.tuning import _facts

WORK = tuning.Workload(8, 16, 16, 1024, 1024, 64, 64, "float16")
H100 = hardware.typical("sm_90")


@pytest.fixture(autouse=True)
def store(tmp_path, monkeypatch):
    """Give every test an empty kernel cache of its own."""
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("CUPY_CACHE_IN_MEMORY", raising=False)
    monkeypatch.delenv("CUFLASH_KERNELS", raising=False)
    cubin_cache._warn_of_shared.cache_clear()
    cubin_cache.warn_once.cache_clear()


def test_kernels_of_a_gradient():
    names = [c.source for c in kernels_of(WORK, H100, backward=True)]
    assert names == [
        "forward_sm90.cu", "backward_delta.cu", "backward_sm90.cu", "backward_convert.cu",
    ]  # fmt: skip
    segmented = replace(WORK, arrays=("segment_ids",))
    names = [c.source for c in kernels_of(segmented, H100, backward=True)]
    assert names == [
        "segment_bounds.cu", "forward_sm90.cu", "backward_delta.cu", "backward_sm90.cu",
        "backward_convert.cu",
    ]  # fmt: skip


def test_a_gradient_in_any_order_has_a_kernel_of_its_own():
    for head_dim, causal in ((64, False), (64, True), (128, False), (128, True), (256, False)):
        widths = {"head_dim": head_dim, "head_dim_v": head_dim}
        own = replace(WORK, seqlen_q=4096, seqlen_k=4096, causal=causal, **widths)
        kernels = kernels_of(replace(own, deterministic=False), H100, backward=True)
        ordered = kernels_of(own, H100, backward=True)
        assert ordered[2].deterministic
        assert not kernels[2].deterministic
        assert kernels[2].replace(deterministic=True) == ordered[2].replace(finishes_dq=False)
        assert kernels[:2] == ordered[:2]
    short = replace(WORK, seqlen_k=512)  # here the order costs nothing
    assert kernels_of(replace(short, deterministic=False), H100, backward=True) == kernels_of(
        short, H100, backward=True
    )
    options = {"arrays": ("segment_ids",), "causal": True}
    segments = replace(WORK, head_dim=256, head_dim_v=256, **options)  # in three kernels
    assert kernels_of(replace(segments, deterministic=False), H100, backward=True) == kernels_of(
        segments, H100, backward=True
    )


PACKED = replace(WORK, batch=1, seqlens=(1000, 24))


@pytest.mark.parametrize("arrays", [(), ("segment_ids",), ("sink", "kv_lengths")], ids=str)
def test_packed_sequences_have_kernels_of_their_own(arrays):
    packed = replace(PACKED, arrays=arrays)
    found = kernels_of(packed, H100, backward=True)
    tiled = [config for config in found if "tile" in config.parts]
    assert {config.cu_seqlens for config in tiled} == {"int32"}
    assert [c.kernel for c in tiled] == ["forward_sm90", "backward_sm90", "backward_convert"]
    dense = kernels_of(replace(packed, seqlens=()), H100, backward=True)
    assert not set(tiled) & set(dense)


def test_packed_sequences_are_not_tuned_as_if_they_were_one():
    with pytest.raises(ValueError, match="seqlens: got 2 packed sequences, expected none"):
        tuning.space(PACKED, arch="sm_90a")
    with pytest.raises(ValueError, match=r"seqlens: got \(1000, 25\) of 1024 queries"):
        replace(PACKED, seqlens=(1000, 25))


@pytest.mark.long
@pytest.mark.nvrtc
@pytest.mark.parametrize(
    ("backward", "arrays"), [(False, ()), (True, ()), (False, ("segment_ids",))]
)
def test_everything_that_a_call_needs_is_in_the_folder(tmp_path, backward, arrays):
    work = replace(WORK, causal=True, arrays=arrays)
    files = cuflash.compile(
        work, arch="sm_80", folder=tmp_path / "shared", backward=backward, processes=2
    )
    configs = kernels_of(work, hardware.typical("sm_80"), backward=backward)
    names = [compilation.shared_name(c, "sm_80") for c in configs]
    assert [path.stem for path in files] == names
    assert not any(map(cubin_cache.problem_of, files))
    assert not list(cubin_cache.folder().glob("*"))


@pytest.mark.nvrtc
def test_without_a_folder_the_store_of_this_machine_is_filled():
    (path,) = cuflash.compile([WORK, replace(WORK, batch=4)], arch="sm_90a", processes=1)
    (config,) = kernels_of(WORK, H100, backward=False)
    assert path.parent == cubin_cache.folder()
    assert cubin_cache.load(compilation.stored_name(config, "sm_90a")) is not None


def hindered(monkeypatch, folder, how):
    """Keep the kernel cache from writing, in this process and in the processes that it starts."""
    if how == "in memory":
        monkeypatch.setenv("CUPY_CACHE_IN_MEMORY", "1")
    elif how == "read-only":  # read-only for root, too
        monkeypatch.setenv("CUPY_CACHE_DIR", "/proc/sys")
    else:
        folder.parent.mkdir(parents=True)
        folder.write_text("a file")
    return cubin_cache.folder()


@pytest.mark.long
@pytest.mark.nvrtc
@pytest.mark.skipif(not Path("/proc/sys").is_dir(), reason="this system has no such folder")
@pytest.mark.parametrize("how", ["in memory", "read-only", "a file"])
@pytest.mark.filterwarnings("ignore:the kernel cache:RuntimeWarning")
def test_files_that_are_not_there_are_not_returned(monkeypatch, capsys, how):
    folder = hindered(monkeypatch, cubin_cache.folder(), how)
    why = "cannot be read" if how == "a file" else "does not exist"
    with pytest.raises(OSError, match=rf"folder: got {folder}, where .*\.cubin {why}") as caught:
        cuflash.compile(WORK, arch="sm_80", processes=1)
    assert ("CUPY_CACHE_IN_MEMORY" in str(caught.value)) == (how == "in memory")
    words = ["--arch", "sm_80", "--head-dims", "64", "--dtypes", "float16", "--processes", "2"]
    assert _cli.main(["cache", "warm", *words]) == 1
    told = capsys.readouterr()
    assert "ready" not in told.out
    assert f"cuflash: folder: got {folder}, where " in told.err


GOOD = {"registers": 255, "spill_bytes": 0, "warnings": ["C7512"], "seconds": 1}
BAD = [
    {}, {"error": "planted"}, GOOD | {"error": "planted"}, GOOD | {"registers": 256},
    GOOD | {"registers": 0}, GOOD | {"registers": True}, GOOD | {"registers": 10**30},
    GOOD | {"registers": "168"}, GOOD | {"spill_bytes": -1}, GOOD | {"spill_bytes": 0.5},
    GOOD | {"warnings": "C7512"}, GOOD | {"warnings": [1]}, GOOD | {"seconds": float("nan")},
    GOOD | {"seconds": float("inf")}, GOOD | {"seconds": -1.0}, GOOD | {"seconds": None},
]  # fmt: skip


@pytest.mark.nvrtc
@pytest.mark.parametrize("note", [GOOD, *BAD], ids=str)
def test_a_note_that_no_compilation_wrote_is_written_anew(monkeypatch, note):
    """A note that no compilation can have written is replaced by the facts of a new compilation."""
    (config,) = kernels_of(WORK, H100, backward=False)
    name = compilation.stored_name(config, "sm_90a")
    asked = []

    def ask_many(command, requests, *_):
        asked.extend(requests)
        return [(i, GOOD | {"registers": 100}) for i in range(len(requests))]

    monkeypatch.setattr(_facts, "ask_many", ask_many)
    cubin_cache.save(name, b"a kernel")
    cubin_cache.save_note(name, note)
    found = _facts.compile_all([config], H100, processes=1)[config]
    assert (found.error, found.registers) == ("", 255 if note is GOOD else 100)
    assert len(asked) == (note is not GOOD)


@pytest.fixture
def shared(tmp_path, monkeypatch):
    """Return a folder that holds the portable forward for sm_80."""
    folder = tmp_path / "shared"
    cuflash.compile(WORK, arch="sm_80", folder=folder, processes=1)
    monkeypatch.setenv("CUFLASH_KERNELS", str(folder))
    return folder


class Cupy:
    """Stands in for CuPy on an A100, as far as cuflash._jit.compilation uses it."""

    __version__ = "of a node"

    def __init__(self, refused=b""):
        self.loaded = []
        outer = self

        class Module:
            def load(self, cubin):
                if cubin == refused:
                    raise outer.cuda.driver.CUDADriverError(209)
                outer.loaded.append(cubin)

            def get_function(self, name):
                return name

        class Error(RuntimeError):
            pass

        class Device:
            compute_capability = "80"

        names = type("names", (), {})
        self.cuda = names()
        self.cuda.Device = Device
        self.cuda.driver = names()
        self.cuda.driver.CUDADriverError = Error
        self.cuda.function = names()
        self.cuda.function.Module = Module


@pytest.mark.nvrtc
def test_a_kernel_of_the_folder_is_loaded_whatever_compiler_a_node_has(shared, monkeypatch):
    (config,) = kernels_of(WORK, hardware.typical("sm_80"), backward=False)
    monkeypatch.setattr(compiler_id, "identity", lambda: pytest.fail("NVRTC was asked"))
    monkeypatch.setattr(compilation, "_nvrtc", lambda *_: pytest.fail("it was compiled"))
    cupy = Cupy()
    assert compilation._function(cupy, config)[0] == config.entry
    (path,) = shared.glob("*.cubin")
    assert path.read_bytes().startswith(cupy.loaded[0])


@pytest.mark.long
@pytest.mark.nvrtc
@pytest.mark.parametrize("how", ["cut", "changed", "renamed", "driver", "arch"])
def test_what_is_not_right_is_compiled_instead(shared, monkeypatch, how):
    (config,) = kernels_of(WORK, hardware.typical("sm_80"), backward=False)
    monkeypatch.setattr(compilation, "_nvrtc", lambda source, options: (b"compiled here", ""))
    (path,) = shared.glob("*.cubin")
    content, refused = path.read_bytes(), b""
    if how == "cut":
        path.write_bytes(content[:-100])
    elif how == "changed":
        path.write_bytes(b"x" + content[1:])
    elif how == "renamed":  # another kernel under this name
        other = cuflash.compile(replace(WORK, causal=True), arch="sm_80", folder=shared)[0]
        shutil.copy(other, path)
    elif how == "arch":  # the cubin of another architecture under this name
        (other,) = cuflash.compile(WORK, arch="sm_86", folder=shared)
        shutil.copy(other, path)
    else:
        refused = content[:-32]
    cupy = Cupy(refused)
    if how == "driver":
        compilation._function(cupy, config)
    else:
        with pytest.warns(RuntimeWarning, match="truncated, changed, or another kernel's"):
            compilation._function(cupy, config)
    assert cupy.loaded == [b"compiled here"]


def test_wrong_arguments_are_named(monkeypatch):
    with pytest.raises(ValueError, match="arch: got 'sm_35', expected one of sm_50"):
        cuflash.compile(WORK, arch="sm_35")
    monkeypatch.setattr(hardware, "present", lambda device=None: None)
    with pytest.raises(ValueError, match="arch: got None on a machine without a GPU"):
        cuflash.compile(WORK)


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "folder"):
        with pytest.raises(OSError, match=r"folder: got .*expected a folder that can be created"):
            cuflash.compile(WORK, arch="sm_90a", folder=folder)


@pytest.mark.parametrize(("folder_mode", "mode"), [(0o755, 0o644), (0o770, 0o660), (0o777, 0o664)])
def test_whom_the_folder_lets_read_the_file_lets_too(tmp_path, folder_mode, mode):
    if os.name == "nt":
        pytest.skip("Windows has no such modes")
    tmp_path.chmod(folder_mode)
    path = cubin_cache.save_shared(tmp_path, "a" * 64, b"a kernel")
    assert stat.S_IMODE(path.stat().st_mode) == mode
    assert not cubin_cache.problem_of(path)


def test_a_file_that_cannot_be_read_is_said(tmp_path, monkeypatch):
    monkeypatch.setenv("CUFLASH_KERNELS", str(tmp_path))
    (tmp_path / f"{'a' * 64}.cubin").mkdir()  # a folder cannot be read as a file, even by root
    with pytest.warns(RuntimeWarning, match="cannot be read"):
        assert cubin_cache.load_shared("a" * 64) is None


def absent(path):
    path.unlink()


def empty(path):
    path.write_bytes(b"")


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def changed(path):
    path.write_bytes(b"x" + path.read_bytes()[1:])


def unreadable(path):
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("breaks", [absent, empty, cut, changed, unreadable])
def test_a_broken_kernel_hides_none_of_a_later_folder(tmp_path, monkeypatch, breaks):
    folders = [tmp_path / name for name in ("first", "second", "third")]
    name = "a" * 64
    for folder in folders:
        cubin_cache.save_shared(folder, name, folder.name.encode())
    monkeypatch.setenv("CUFLASH_KERNELS", os.pathsep.join(map(str, folders)))
    assert cubin_cache.load_shared(name) == b"first"
    breaks(folders[0] / f"{name}.cubin")
    with nullcontext() if breaks is absent else pytest.warns(RuntimeWarning, match="first"):
        assert cubin_cache.load_shared(name) == b"second"


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such modes")
def test_a_file_that_anybody_may_have_written_is_said(tmp_path, monkeypatch):
    monkeypatch.setenv("CUFLASH_KERNELS", str(tmp_path))
    path = cubin_cache.save_shared(tmp_path, "a" * 64, b"a kernel")
    assert cubin_cache.load_shared("a" * 64) == b"a kernel"
    path.chmod(0o666)
    with pytest.warns(RuntimeWarning, match=r"cannot be read \(other users may have written it\)"):
        assert cubin_cache.load_shared("a" * 64) is None
    path.unlink()
    os.mkfifo(path)
    with pytest.warns(RuntimeWarning, match=r"cannot be read \(not a regular file\)"):
        assert cubin_cache.load_shared("a" * 64) is None
    assert cubin_cache.problem_of(path) == "cannot be read (not a regular file)"


@pytest.mark.gpu
def test_a_call_runs_from_the_folder_alone(tmp_path, monkeypatch):
    import cupy

    work = replace(WORK, batch=1, heads_q=2, heads_kv=2, seqlen_q=300, seqlen_k=300)
    q, k, v, dout = work.inputs(cupy)[0]
    expected = cuflash.attention(q, k, v)
    cuflash.compile(work, folder=tmp_path / "shared", backward=True)
    monkeypatch.setenv("CUFLASH_KERNELS", str(tmp_path / "shared"))
    monkeypatch.setattr(compilation, "_nvrtc", lambda *_: pytest.fail("it was compiled"))
    compilation.compile_kernel.cache_clear()
    from cuflash._launch import plan_cache

    plan_cache.forget()
    out, pullback = cuflash.attention_vjp(q, k, v)
    assert bool((out == expected).all())
    assert pullback(dout).dq.shape == q.shape


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such owners")
@pytest.mark.filterwarnings("ignore:the kernel cache:RuntimeWarning")
@pytest.mark.parametrize("mine", [False, True])
@pytest.mark.parametrize("owner", [0, 1001, 1002])
def test_the_cache_reads_no_file_of_another_user(owner, mine, monkeypatch):
    """Where all may write, another user may have made our folder: only the owner of files counts.

    Folders of kernels compiled ahead of time may be of another user.
    """
    name, fstat = "a" * 64, os.fstat
    cubin_cache.save(name, b"a kernel")
    cubin_cache.save_note(name, GOOD)
    monkeypatch.setenv("CUFLASH_KERNELS", str(cubin_cache.folder()))

    def owned(descriptor):
        status = list(fstat(descriptor))
        status[stat.ST_UID] = owner
        return os.stat_result(status)

    monkeypatch.setattr(os, "fstat", owned)
    monkeypatch.setattr(os, "geteuid", lambda: owner if mine else 1003)
    read = mine or owner == 0
    assert cubin_cache.load(name) == (b"a kernel" if read else None)
    assert cubin_cache.load_note(name) == (GOOD if read else None)
    assert cubin_cache.load_shared(name) == b"a kernel"

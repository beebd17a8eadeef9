"""What can be called, with which arguments, and what does importing need? Growth is a decision."""

from __future__ import annotations

import inspect
import pickle
import re
import subprocess
import sys
import tomllib
import types
import typing
from pathlib import Path

import numpy as np
import pytest

import cuflash
from cuflash import reference
from cuflash._problem import options

ROOT = Path(__file__).resolve().parents[1]

COMMON = "options=None, axes=None, precision=None, deterministic=True"
WRT = "('q', 'k', 'v')"

# A change here needs a line in CHANGELOG.md.
SIGNATURES = {
    "attention": f"(q, k, v, /, *, {COMMON}, return_lse=False, out=None, workspace=None, "
    "config=None, **score_options)",
    "attention_backward": "(dout, q, k, v, out, lse, /, *, dlse=None, "
    f"wrt={WRT}, grads_out=None, {COMMON}, workspace=None, config=None, **score_options)",
    "attention_varlen": f"(q, k, v, cu_seqlens_q, cu_seqlens_k, /, *, {COMMON}, return_lse=False, "
    "out=None, workspace=None, config=None, **score_options)",
    "attention_varlen_backward": "(dout, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, /, *, "
    f"dlse=None, wrt={WRT}, grads_out=None, {COMMON}, workspace=None, config=None, "
    "**score_options)",
    "attention_vjp": f"(q, k, v, /, *, {COMMON}, return_lse=False, **score_options)",
    "compile": "(workloads, /, *, arch=None, folder=None, backward=False, processes=None)",
    "dropout_mask": "(shape, p, seed, *, like=None)",
    "logsumexp": f"(q, k, /, *, {COMMON}, out=None, workspace=None, config=None, **score_options)",
    "logsumexp_backward": f"(dlse, q, k, lse, /, *, wrt=('q', 'k'), grads_out=None, {COMMON}, "
    "workspace=None, config=None, **score_options)",
    "merge": "(outs, lses, axis=0)",
    "merge_backward": "(dout, outs, lses, /, *, dlse=None, axis=0)",
    "weights": "(q, k, lse, /, *, rows=None, cols=None, options=None, axes=None, **score_options)",
    "workspace_size": "(q, k, v, /, *, backward=False, options=None, axes=None, precision=None, "
    "**score_options)",
    "show_config": "(mode='stdout')",
    "Options": "(*, causal=False, offset=None, window=None, scale=None, softcap=None, bias=None, "
    "alibi_slopes=None, score_mod=None, mask=None, mask_mod=None, segment_ids=None, "
    "q_lengths=None, kv_lengths=None, sink=None, dropout=0.0, seed=None, enable_gqa=False)",
    "MaskMod": "(expression, *, arrays=<factory>, host)",
    "ScoreMod": "(expression, *, arrays=<factory>, host, grad, host_grad)",
    "AttentionResult": "(out, lse)",
    "Gradients": "(dq=None, dk=None, dv=None, dbias=None, dslopes=None, dsink=None, dscale=None)",
    "CompileError": "(message, *, config, log, source)",
}
MODULES = {"reference", "tuning"}


def plain_signature(function: object) -> str:
    """Return names, kinds and defaults of the parameters, without annotations."""
    signature = inspect.signature(function)
    parameters = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for parameter in signature.parameters.values()
    ]
    return str(inspect.Signature(parameters))


def test_names():
    assert sorted(cuflash.__all__) == sorted([*SIGNATURES, *MODULES])


def test_nothing_else_is_reachable():
    """Every public attribute of the package is meant to be one."""
    public = {name for name in vars(cuflash) if not name.startswith("_")}
    assert public | {"tuning"} == set(cuflash.__all__)  # which is imported when it is asked for


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name):
    assert plain_signature(getattr(cuflash, name)) == SIGNATURES[name]


def test_a_workload_is_pickled_under_its_public_name():
    work = cuflash.tuning.Workload(1, 2, 2, 64, 64, 64, 64, "float16", causal=True)
    data = pickle.dumps(work)
    assert b"cuflash.tuning" in data
    assert b"_timing" not in data
    assert pickle.loads(data) == work


def test_signatures_differ_where_they_should():
    """The pinned table is compared with something that can fail."""
    assert plain_signature(cuflash.merge) != SIGNATURES["attention"]


@pytest.mark.parametrize("name", ["attention", "attention_backward", "attention_vjp", "weights"])
def test_reference_takes_the_same_arguments(name):
    """Positional arguments agree; the reference adds dtype and may ignore what steers kernels."""
    kernel_only = {"precision", "deterministic", "workspace", "config", "out", "grads_out"}
    ours = inspect.signature(getattr(cuflash, name)).parameters
    theirs = inspect.signature(getattr(reference, name)).parameters
    positional = [n for n, p in ours.items() if p.kind is p.POSITIONAL_ONLY]
    assert positional == [n for n, p in theirs.items() if p.kind is p.POSITIONAL_ONLY]
    assert set(ours) - kernel_only <= set(theirs)
    assert "dtype" in theirs


def test_score_options_are_one_list():
    """The typed keywords and the dataclass are the same options."""
    keywords = typing.get_type_hints(options.ScoreOptions)
    assert list(keywords) == list(inspect.signature(cuflash.Options).parameters)


def test_no_function_takes_arbitrary_keywords():
    """Keywords are the typed score options or nothing: a misspelt one is a TypeError."""
    for name in SIGNATURES:
        for parameter in inspect.signature(getattr(cuflash, name)).parameters.values():
            assert parameter.kind is not inspect.Parameter.VAR_POSITIONAL
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                assert parameter.annotation == "Unpack[ScoreOptions]"


def test_version_is_a_version():
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.dev\d+|rc\d+)?", cuflash.__version__)


def test_version_has_one_home():
    """The wheel takes it from the package."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" in project["project"]["dynamic"]
    assert project["tool"]["hatch"]["version"]["path"] == "cuflash/__init__.py"


def in_fresh_interpreter(program: str) -> str:
    """Run a program that finds the checkout, and return what it printed."""
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT
    )
    return run.stdout


def test_import_takes_no_gpu_library():
    modules = in_fresh_interpreter("import cuflash, sys; print(*sys.modules)").split()
    assert "cuflash" in modules
    assert not {"cupy", "cupy_backends", "cuda", "torch"} & set(modules)


WITHOUT_CUPY = """
import sys
for name in ("cupy", "cupy_backends", "cuda"):
    sys.modules[name] = None
import numpy, cuflash
q = numpy.ones((4, 8), numpy.float32)
assert cuflash.attention(q, q, q).shape == (4, 8)
cuflash.show_config()
"""


def test_everything_but_kernels_works_without_cupy():
    rows = in_fresh_interpreter(WITHOUT_CUPY)
    assert re.search(r"^cupy +not installed .*cuflash\[cuda12\]", rows, flags=re.MULTILINE)
    assert re.search(r"^device +unknown without CuPy$", rows, flags=re.MULTILINE)


def calls_of_numpy_arrays():
    """Yield every public function and a call of it, by names."""
    c, q, ends = cuflash, np.ones((2, 4, 8)), np.array([0, 1, 4])
    flat, rows, both = q[0], np.ones(4), np.ones((2, 4))
    out, lse = c.attention(q, q, q, return_lse=True)
    shift = c.MaskMod("q < n[0]", arrays={"n": rows}, host=lambda b, h, q, k, n: q < n[0])
    yield "attention", lambda: c.attention(q, q, q, bias=flat[:, :4], mask_mod=shift)
    yield "attention_backward", lambda: c.attention_backward(q, q, q, q, out, lse)
    yield "attention_varlen", lambda: c.attention_varlen(flat, flat, flat, ends, ends)
    yield (
        "attention_varlen_backward",
        lambda: c.attention_varlen_backward(flat, flat, flat, flat, flat, rows, ends, ends),
    )
    yield "attention_vjp", lambda: c.attention_vjp(q, q, q)[1](q)
    yield "dropout_mask", lambda: c.dropout_mask((4, 4), 0.5, 1, like=q)
    yield "logsumexp", lambda: c.logsumexp(q, q)
    yield "logsumexp_backward", lambda: c.logsumexp_backward(lse, q, q, lse)
    yield "merge", lambda: c.merge(q, both)
    yield "merge_backward", lambda: c.merge_backward(flat, q, both)
    yield "weights", lambda: c.weights(q, q, lse, rows=[0])
    yield "workspace_size", lambda: c.workspace_size(q, q, q)


def test_calls_while_another_thread_imports_cupy(monkeypatch):
    """Its module is in `sys.modules` long before it has classes."""
    calls = dict(calls_of_numpy_arrays())
    functions = {n for n in SIGNATURES if inspect.isfunction(getattr(cuflash, n))}
    assert set(calls) == functions - {"compile", "show_config"}, "a new function needs a line"
    monkeypatch.setitem(sys.modules, "cupy", types.ModuleType("cupy"))
    for call in calls.values():
        call()


def test_show_config_returns_what_it_prints(capsys):
    table = cuflash.show_config(mode="dicts")
    assert capsys.readouterr().out == ""
    assert cuflash.show_config() is None
    printed = capsys.readouterr().out
    for name, text in table.items():
        assert re.search(rf"^{re.escape(name)} +{re.escape(text)}$", printed, flags=re.MULTILINE)
    assert table["cuflash"].startswith(cuflash.__version__)
    assert (Path(table["kernel sources"]) / "config.cuh").is_file()
    with pytest.raises(ValueError, match="mode: got 'html', expected 'stdout' or 'dicts'"):
        cuflash.show_config(mode="html")


@pytest.mark.gpu
def test_show_config_describes_the_device():
    table = cuflash.show_config(mode="dicts")
    assert re.fullmatch(r"serves CUDA \d+\.\d+", table["driver"])
    assert re.fullmatch(r"\d+ of \d+: .*, sm_\d+, \d+ GiB", table["device"])
    assert re.fullmatch(r"\d+\.\d+", table["nvrtc"])

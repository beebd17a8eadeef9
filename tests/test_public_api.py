"""What can be called, with which arguments, and what does importing need? Growth is a decision."""

from __future__ import annotations

import base64
import inspect
import json
import pickle
import re
import subprocess
import sys
import tomllib
import types
import typing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash import reference
from cuflash._problem import options as options_module

ROOT = Path(__file__).resolve().parents[1]

#: Names, signatures, defaults and headings of docstrings. A change there needs a line in
#: CHANGELOG.md. ``python tests/test_public_api.py`` writes the file anew.
SNAPSHOT = Path(__file__).with_suffix("").with_name("public_api.json")
API: dict[str, dict[str, Any]] = json.loads(SNAPSHOT.read_text(encoding="utf-8"))
#: Pickles of older versions, in base64, and a file of tiles, which are never written anew.
KEPT: dict[str, Any] = json.loads(SNAPSHOT.with_name("kept_objects.json").read_text("utf-8"))
SIGNATURES = {n: found["signature"] for n, found in API.items() if "." not in n}
MODULES = {"distributed", "reference", "testing", "tuning"}


def plain_signature(function: object) -> str:
    """Return names, kinds and defaults of the parameters, without annotations."""
    signature = inspect.signature(function)
    parameters = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for parameter in signature.parameters.values()
    ]
    text = str(inspect.Signature(parameters)).replace(sys.executable, "python")
    return re.sub(r"<module '(\w+)' from '[^']*'>", r"\1", text)


def described(found: Any) -> dict[str, Any]:
    """Describe one public object: signature, headings of its docstring, members of a class."""
    text = {"signature": plain_signature(found)}
    headings = re.findall(r"^(\w[\w ]*)\n-{3,}$", inspect.getdoc(found) or "", flags=re.MULTILINE)
    if headings:
        text["headings"] = headings
    if inspect.isclass(found):
        foreign = [base for base in found.__mro__ if not base.__module__.startswith("cuflash")]
        known = {name for base in foreign for name in dir(base)}
        own = {n: getattr(found, n) for n in dir(found) if not n.startswith("_") and n not in known}
        text["members"] = {
            name: plain_signature(member) if callable(member) else "value"
            for name, member in own.items()
        }
    return text


def snapshot() -> dict[str, Any]:
    """Describe every public object, under the name that users type."""
    named = {n: getattr(cuflash, n) for n in cuflash.__all__ if n not in MODULES}
    for package in (cuflash.distributed, cuflash.testing, cuflash.tuning):
        own = package.__name__.removeprefix("cuflash.")
        named |= {f"{own}.{n}": getattr(package, n) for n in package.__all__}
    del named["testing.FAMILIES"]  # a dictionary
    named |= {
        f"reference.{name}": found
        for name, found in vars(reference).items()
        if inspect.isfunction(found) and not name.startswith("_")
        and found.__module__.startswith("cuflash.reference")
    }  # fmt: skip
    return {name: described(found) for name, found in sorted(named.items())}


def test_names():
    assert sorted(cuflash.__all__) == sorted([*SIGNATURES, *MODULES])


def test_nothing_else_is_reachable():
    """The package has no public attribute beyond those in ``__all__``."""
    public = {name for name in vars(cuflash) if not name.startswith("_")}
    lazy = {"distributed", "testing", "tuning"}  # imported on first use
    assert public | lazy == set(cuflash.__all__)


@pytest.mark.parametrize("name", API)
def test_every_public_object_is_as_it_was(name):
    assert snapshot().get(name) == API[name]


def test_no_public_object_is_new():
    assert list(snapshot()) == list(API)


def unpickled(name: str) -> Any:
    return pickle.loads(base64.b64decode(KEPT["pickles"][name]))


def test_what_an_older_version_pickled_is_read():
    """Pickles of an older commit, named in the file, load: array options, results, a workload."""
    options = unpickled("Options")
    assert options == cuflash.Options(
        **{n: getattr(options, n) for n in options_module.OPTION_NAMES}
    )
    assert (options.causal, options.window, options.softcap) == ("top_left", (3, None), 2.0)
    assert (options.q_lengths, options.dropout, options.seed) == (2, 0.5, 7)
    np.testing.assert_array_equal(options.bias, np.arange(6).reshape(2, 3))
    np.testing.assert_array_equal(options.segment_ids[1], [0, 1, 1])
    assert unpickled("AttentionResult").out.tolist() == [[1, 1]]
    gradients = unpickled("Gradients")
    assert gradients.dq.tolist() == [[1, 1]]
    assert (gradients.dk, gradients.dscale) == (None, 3)
    work = {"dtype": "float16", "causal": True, "arrays": ("sink",)}
    assert unpickled("tuning.Workload") == cuflash.tuning.Workload(1, 2, 2, 64, 64, 64, 64, **work)


@pytest.mark.parametrize("name", [name for name in KEPT["pickles"] if "onfig" in name])
def test_configurations_that_an_older_version_pickled_are_read(name):
    found = unpickled(name)
    configs = [found] if name.startswith("config") else [found.q]
    assert [c.kernel for c in configs] == [name.removeprefix("config of ")] or found.kv is None
    assert all(c.window_right for c in configs)
    assert pickle.loads(pickle.dumps(configs)) == configs


def test_tiles_that_an_older_version_saved_are_used(tmp_path):
    file = tmp_path / "tiles.json"
    file.write_text(json.dumps(KEPT["tiles"]), encoding="utf-8")
    with cuflash.tuning.use(file):
        pass  # checks every row


@pytest.mark.parametrize("name", ["Options", "AttentionResult", "Gradients", "tuning.Workload"])
def test_pickles_name_public_modules_alone(name):
    """Pickles name public modules only, so that internal modules can move."""
    data = pickle.dumps(unpickled(name))
    assert not [word for word in re.findall(rb"cuflash[\w.]*", data) if b"._" in word]


def test_signatures_differ_where_they_should():
    """Signatures of different functions differ, so that comparing them can fail."""
    assert plain_signature(cuflash.merge) != SIGNATURES["attention"]


@pytest.mark.parametrize("name", ["attention", "attention_backward", "attention_vjp", "weights"])
def test_reference_takes_the_same_arguments(name):
    """The reference has the same arguments, plus dtype; it may lack those that steer kernels."""
    kernel_only = {"precision", "deterministic", "workspace", "config", "out", "grads_out"}
    ours = inspect.signature(getattr(cuflash, name)).parameters
    theirs = inspect.signature(getattr(reference, name)).parameters
    positional = [n for n, p in ours.items() if p.kind is p.POSITIONAL_ONLY]
    assert positional == [n for n, p in theirs.items() if p.kind is p.POSITIONAL_ONLY]
    assert set(ours) - kernel_only <= set(theirs)
    assert "dtype" in theirs


def test_score_options_are_one_list():
    """The typed keywords and the fields of the dataclass are the same options."""
    keywords = typing.get_type_hints(options_module.ScoreOptions)
    assert list(keywords) == list(inspect.signature(cuflash.Options).parameters)


def test_no_function_takes_arbitrary_keywords():
    """Keywords are the typed score options, so that a misspelt one is a TypeError."""
    for name in SIGNATURES:
        for parameter in inspect.signature(getattr(cuflash, name)).parameters.values():
            assert parameter.kind is not inspect.Parameter.VAR_POSITIONAL
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                assert parameter.annotation == "Unpack[ScoreOptions]"


def test_version_is_a_version():
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.dev\d+|rc\d+)?", cuflash.__version__)


def test_version_has_one_home():
    """The wheel takes its version from the package."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" in project["project"]["dynamic"]
    assert project["tool"]["hatch"]["version"]["path"] == "cuflash/__init__.py"


def in_fresh_interpreter(program: str) -> str:
    """Run a program in the checkout, and return its output."""
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
    assert re.search(r"^cupy +not installed .*pip install .*\[cuda12\]", rows, flags=re.MULTILINE)
    assert re.search(r"^device +unknown without CuPy$", rows, flags=re.MULTILINE)


def calls_of_numpy_arrays():
    """Yield the name of every public function and a call of it."""
    c, q, ends = cuflash, np.ones((2, 4, 8)), np.array([0, 1, 4])
    flat, rows, both = q[0], np.ones(4), np.ones((2, 4))
    out, lse = c.attention(q, q, q, return_lse=True)
    shift = c.MaskMod("q < n[0]", arrays={"n": rows}, host=lambda b, h, q, k, n: q < n[0])
    yield "attention", lambda: c.attention(q, q, q, bias=flat[:, :4], mask_mod=shift)
    yield "attention_backward", lambda: c.attention_backward(q, q, q, q, out, lse)
    pages = np.ones((3, 1, 2, 8)), np.ones((3, 1, 2, 8)), np.array([[2, 0]]), [3]
    yield "attention_paged", lambda: c.attention_paged(np.ones((1, 1, 2, 8)), *pages, causal=True)
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
    yield "quantize", lambda: c.quantize(q)
    yield "rotary", lambda: c.rotary(q, np.arange(4))
    yield "weights", lambda: c.weights(q, q, lse, rows=[0])
    yield "workspace_size", lambda: c.workspace_size(q, q, q)


def test_calls_while_another_thread_imports_cupy(monkeypatch):
    """Calls work while another thread imports CuPy, whose module in `sys.modules` is empty then."""
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
    assert table["cuflash"] == f"{cuflash.__version__} ({Path(cuflash.__file__).parent})"
    assert (Path(table["kernel sources"]) / "config.cuh").is_file()
    with pytest.raises(ValueError, match="mode: got 'html', expected 'stdout' or 'dicts'"):
        cuflash.show_config(mode="html")


@pytest.mark.gpu
def test_show_config_describes_the_device():
    table = cuflash.show_config(mode="dicts")
    assert re.fullmatch(r"supports CUDA \d+\.\d+", table["driver"])
    assert re.fullmatch(r"\d+ of \d+: .*, sm_\d+, \d+ GiB", table["device"])
    assert re.fullmatch(r"\d+\.\d+", table["nvrtc"])


if __name__ == "__main__":
    SNAPSHOT.write_text(json.dumps(snapshot(), indent=1) + "\n", encoding="utf-8")

"""Does ``python -m cuflash`` do what it says, with statuses that a script can trust?

Commands run in this process, except in tests of the real start.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import cuflash
from cuflash import _cli, tuning
from cuflash._ahead import kernels_of
from cuflash._cli import explain as explaining
from cuflash._cli import from_checkout, info
from cuflash._errors import pip_install
from cuflash._jit import cubin_cache
from cuflash._problem.problem import describe
from cuflash._select import hardware as select_hardware
from cuflash._select import measured
from cuflash._select.choose import why_portable
from cuflash.tuning import _table
from support import chosen
from support.chosen import backward_of, forward_of
from support.simulated_sweep import DEVICE

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results"
H100 = select_hardware.typical("sm_90")


@pytest.fixture(autouse=True)
def store(tmp_path, monkeypatch):
    """Give every test an empty kernel cache of its own."""
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("CUPY_CACHE_IN_MEMORY", raising=False)


@pytest.fixture
def no_device(monkeypatch):
    """Hide the device, where there is one."""
    monkeypatch.setattr(select_hardware, "present", lambda device=None: None)


@pytest.fixture
def command(capsys):
    """Return a function that runs a command line and returns exit status, stdout and stderr."""

    def run(line):
        capsys.readouterr()
        try:
            status = _cli.main(shlex.split(line))
        except SystemExit as end:
            status = end.code
        return status, *capsys.readouterr()

    return run


@pytest.fixture
def explained(command):
    """Return a function that returns explain's JSON, by default on Hopper and without compiling."""

    def run(line=""):
        status, out, err = command(f"explain --arch sm_90a --no-compile --json {line}")
        assert (status, err) == (0, "")
        return json.loads(out)

    return run


NAMES = list(_cli._COMMANDS)


def test_the_real_command(tmp_path):
    """The real command works in a folder that has a package of its own called benchmarks."""
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "__init__.py").write_text("raise SystemExit(9)")
    path = os.pathsep.join((str(Path(cuflash.__file__).parents[1]), *sys.path))
    done = subprocess.run(
        [sys.executable, "-m", "cuflash", "info", "--json"], capture_output=True, text=True,
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": path},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert {"cuflash", "numpy", "kernel cache"} <= set(json.loads(done.stdout))


def test_a_bug_report_shows_a_table_that_cannot_be_read(command, monkeypatch, tmp_path):
    path = tmp_path / "tiles.json"
    monkeypatch.setenv("CUFLASH_TILES", str(path))
    for content in (None, "no table"):
        if content:
            path.write_text(content)
        measured.replace_rows(None)
        status, out, err = command("info --json")
        assert (status, err) == (0, "")
        told = json.loads(out)["measured tiles"]
        assert all(words in told for words in ("none of CUFLASH_TILES: ", str(path)))
    measured.replace_rows(None)


def test_a_bug_report_shows_a_cupy_that_cannot_make_its_folder(tmp_path):
    pytest.importorskip("cupy")
    (tmp_path / "file").write_text("")
    done = subprocess.run(
        [sys.executable, "-m", "cuflash", "info"], capture_output=True, text=True,
        env={**os.environ, "CUPY_CACHE_DIR": str(tmp_path / "file" / "cache")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "broken: [Errno" in done.stdout


def test_the_help_lists_commands_whose_examples_can_be_parsed(command):
    _, every, _ = command("--help")
    parser, tried = _cli.parser(), 0
    for name in NAMES:
        status, own, _ = command(f"{name} --help")
        assert status == 0
        assert f"    {name} " in every
        assert "  --json" in own
        assert f"python -m cuflash {name}" in own.partition("examples:")[2]
        for line in own.splitlines():
            _, found, words = line.partition("python -m cuflash ")
            if found and not line.startswith("usage"):
                parser.parse_args(shlex.split(words, comments=True))
                tried += 1
    assert tried >= 12


def test_help_names_results_that_are_committed(command):
    committed = {path.name for path in RESULTS.parent.rglob("*")}
    named = set()
    for name in ("", *NAMES):
        _, text, _ = command(f"{name} --help")
        named |= set(re.findall(r"h100-[\w.-]+", text))
        assert not re.search(r"\d{4}-\d\d-\d\d", text), "a newer one will take its place"
    assert named
    assert named <= committed, named - committed


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("explain --heads 3 --heads-kv 2", "heads_kv: got 2, expected a divisor"),
        ("explain --arch sm_71", "arch: got 'sm_71', expected one of sm_50"),
        ("explain --head-dim 300", "head_dim 300 on a GPU"),
        ("explain --arrays colour", "arrays: got ('colour',), expected a tuple of names among"),
        ("explain --window 3", "expected LEFT,RIGHT"),
        ("explain --heads-kv 0", "heads_kv: got 0, expected a positive int"),
        ("explain --seqlen-k 0", "seqlen_k: got 0, expected a positive int"),
        ("explain --head-dim-v -1", "head_dim_v: got -1, expected an int >= 0"),
        ("explain --arrays bias,key_bias", "arrays: got bias and key_bias, expected one"),
        ("explain --arch ''", "arch: got '', expected one of sm_50"),
        ("tune --list --arch ''", "arch: got '', expected one of sm_50"),
        ("tune --time-limit 0 --list", "got '0', expected a positive number"),
        ("tune --budget-ms inf --list", "got 'inf', expected a positive number"),
        ("tune --parameters block_n=, --list", "expected NAME=VALUE,VALUE"),
        ("cache warm --arch sm_80 --head-dims ,", "expected comma-separated ints"),
        ("cache warm --arch sm_80 --dtypes ''", "expected comma-separated values"),
        ("tune --parameters block_k=1 --list", "parameters: got 'block_k'"),
        ("tune --parameters block_n --list", "expected NAME=VALUE,VALUE"),
        ("tune --parameters block_n=1 block_n=2 --list", "parameters: got block_n twice"),
        (
            "tune --list --arch sm_80 --parameters blocks_per_sm=0",
            "blocks_per_sm = 0 must be positive",
        ),
        ("tune --list --strategy nonsense", "strategy: got 'nonsense', expected one of"),
        (
            "tune --list --arch sm_90a --head-dim 64 --kernel backward_pair_sm90",
            "supports this problem on it: backward_dq_sm90, backward_dkv_sm90, backward_sm90",
        ),
        (
            "tune --list --arch sm_90a --kernel backward_pair_sm90 --head-dim 256 "
            "--parameters block_n=128 block_m=64",
            "block_n = 128 must be 64 or 96",
        ),
        ("cache warm --arch sm_80 --head-dims x", "expected comma-separated ints"),
        ("tune --parameters block_n=a --list", "expected NAME=VALUE,VALUE"),
        ("tune --kernel forward", "invalid choice: 'forward'"),
        ("cache burn", "invalid choice: 'burn'"),
        ("cache warm --dtypes int8 --arch sm_80", "dtype: got 'int8'"),
        ("tune --list --budget 0", "--budget: got '0', expected a positive int"),
        ("tune --processes -1", "--processes: got '-1', expected a positive int"),
        ("bench --set everything", "expected one or more of portable"),
        ("bench --budget-ms -3", "--budget-ms: got '-3', expected a positive number"),
        ("bench --budget-ms nan", "--budget-ms: got 'nan', expected a positive number"),
        ("bench --memory --io", "--io: not allowed with argument --memory"),
        ("bench --set short --memory", "--memory: not allowed with argument --set"),
        ("bench --memory --device cpu", "--device: got cpu, expected gpu, of which --memory"),
        (f"bench --io --render {__file__}", "--render: not allowed with argument --io"),
        (f"bench --render {__file__}", "got no JSON, expected a result of bench"),
        ("bench --render none.json", "none.json"),
        ("plot speed none.json", "none.json"),
        ("", "which kernel and tiles run for a call"),
    ],
)
def test_wrong_arguments_have_status_2_and_are_named(command, line, message):
    status, out, err = command(line)
    assert (status, out) == (2, "")
    assert message in err
    assert "Traceback" not in err


def test_an_interruption_has_status_130(command, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(explaining, "explain", interrupted)
    status, _, err = command("explain")
    assert (status, err) == (130, "cuflash: interrupted\n")


def test_explain_says_what_was_chosen(command, explained):
    found = explained("--causal")
    (own,) = found["kernels"]
    assert (own["kernel"], own["tile"]["block_m"]) == ("forward_sm90", 128)
    config = forward_of(tuning.Workload.from_json(found["workload"]).problem(), H100)
    assert own["smem_bytes"] == config.smem_bytes
    assert own["tile_from"]
    assert own["bound_by"] == "16-bit products"
    assert own["bound_ms"] == pytest.approx(own["tflop"] / 989.4 * 1e3)
    assert own["intensity"] == pytest.approx(own["tflop"] * 1e12 / own["once"])
    _, text, _ = command("explain --arch sm_90a --causal --no-compile")
    assert "Hopper's instructions support this problem" in text
    assert "b2 h16 8192x8192 d128 causal bfloat16" in text


def test_a_problem_is_explained_without_the_memory_that_it_takes(command, explained):
    found = explained(f"--io --batch 64 --seqlen {2**29 - 1} --arrays mask")
    assert found["kernels"][0]["kernel"] == "forward_sm90"
    for seqlen, message in (
        (2**29, "q, k: got 536870912 queries, 536870912 keys, expected fewer than 2^29 of each"),
        (10**20, f"problem: got an array of 64 x 16 x {10**20} x 128, expected arrays"),
    ):
        line = f"explain --arch sm_90a --no-compile --batch 64 --seqlen {seqlen}"
        status, out, err = command(line)
        assert (status, out, message in err) == (2, "", True)


def test_a_problem_without_its_arrays_is_that_of_the_call():
    """A workload describes the problem of its own arrays, with layouts, dtypes and options."""
    work = tuning.Workload(2, 4, 2, 50, 70, 64, 32, "bfloat16", causal=True)
    for given in ({}, {"arrays": ("mask", "bias", "kv_lengths", "sink")}, {"heads_kv": 4}):
        own = replace(work, **given)
        q, k, v, _ = own.inputs(np)[0]
        options = cuflash.Options(**own.score_options())
        assert own.problem() == describe(q, k, v, options, precision="ieee")


def test_packed_sequences_are_explained(command, explained):
    found = explained("--seqlens 1000,24")
    work = tuning.Workload.from_json(found["workload"])
    assert (work.batch, work.seqlen_q, work.seqlens) == (1, 1024, (1000, 24))
    assert "in 2 sequences" in found["problem"]
    alone = [replace(work, seqlen_q=n, seqlen_k=n, seqlens=()) for n in (1000, 24)]
    tflop = sum(own.flops("fwd") for own in alone) / 1e12
    assert found["kernels"][0]["tflop"] == pytest.approx(tflop)
    status, _, err = command("explain --arch sm_90a --no-compile --seqlens 1000,24 --io")
    assert status == 2
    assert "--seqlens: got 2 packed sequences with --io, expected a batch" in err


def test_tiles_of_few_rows_are_explained(explained):
    shape = "--heads 32 --heads-kv 8 --seqlen 1 --head-dim 64"
    (own,) = explained(f"{shape} --batch 64 --seqlen-k 4096")["kernels"]
    assert (own["kernel"], own["why"]) == (
        "forward_sm80", "few queries of many keys leave the tiles of Hopper's kernels mostly empty"
    )  # fmt: skip
    own, _ = explained(f"{shape} --batch 8 --seqlen-k 8192")["kernels"]
    assert "4 parts of the keys" in own["why"]


def test_query_heads_that_share_a_tile_are_explained_as_they_run():
    decoding = tuning.Workload(8, 32, 8, 1, 4096, 128, 128, "bfloat16", causal=True)
    config = forward_of(decoding.problem(), H100)
    assert not config.window_right  # one row sees all keys, so that no mask is compiled in
    apart = tuning.Workload(8, 8, 8, 65, 4096, 128, 128, "bfloat16", causal=True)
    assert forward_of(apart.problem(), H100).window_right


@pytest.mark.parametrize(("head_dim_v", "arrays"), [(3, ""), (0, "--arrays key_bias")])
def test_narrow_heads_are_bound_by_exponentials(command, explained, head_dim_v, arrays):
    """An SM computes 16 exponentials per clock (1.83 GHz); d_v = 0 is a call of logsumexp."""
    line = f"--dtype float32 --head-dim 3 --head-dim-v {head_dim_v} {arrays}"
    (own,) = explained(line)["kernels"]
    assert (own["kernel"], own["tile"]["block_n"]) == ("forward_narrow", 128)
    pairs = 2 * 16 * 8192**2
    assert own["bound_by"] == "exponentials"
    assert own["bound_ms"] == pytest.approx(pairs / (132 * 16 * 1.83e9) * 1e3)
    assert own["bound_tflops"] == pytest.approx(own["tflop"] / own["bound_ms"] * 1e3)
    assert own["least_ms"]["device memory"] == pytest.approx(own["once"] / 3352e9 * 1e3)
    values = 2 * 16 * 8192 * (2 * (3 + head_dim_v) + 1)  # elements of q, k, v, out and lse
    assert own["once"] == 4 * (values + 8192 * bool(arrays))
    text = command(f"explain --arch sm_90a --no-compile {line}")[1]
    assert "ms at least, by exponentials (" in text


def test_exponentials_of_float64_are_multiplied_and_added(explained):
    (own,) = explained("--dtype float64 --head-dim 3")["kernels"]
    assert own["least_ms"] == {"device memory": own["bound_ms"]}


def test_a_value_for_each_pair_can_be_what_bounds_a_call(explained):
    found = {}
    for name in ("", "bias", "mask"):
        arrays = name and f"--arrays {name}"
        (own,) = explained(f"--batch 1 --heads 1 {arrays}")["kernels"]
        found[name] = own["once"], own["bound_by"]
    assert found["bias"] == (found[""][0] + 2 * 8192**2, "device memory")
    assert found["mask"][0] == found[""][0] + 8192**2
    assert found[""][1] == "16-bit products"


@pytest.mark.parametrize("arch", ["sm_75", "sm_86", "sm_120"])
def test_without_a_data_sheet_there_is_no_roofline_and_it_is_said(command, explained, arch):
    found = explained(f"--arch {arch} --backward")
    tiled = [own for own in found["kernels"] if own["tile"]]
    for own in tiled:
        assert own["bound_ms"] is own["bound_by"] is own["bound_tflops"] is None
    _, text, _ = command(f"explain --arch {arch} --no-compile --backward")
    said = f"roofline        unknown: this library has no data sheet of {found['device']}"
    assert text.count(said) == len(tiled) > 0


@pytest.mark.parametrize(
    ("head_dim", "kernel", "tile"),
    [(128, "backward_sm90", (64, 128)), (256, "backward_pair_sm90", (64, 64))],
)
def test_all_gradients_in_one_pass_are_explained(explained, head_dim, kernel, tile):
    kernels = explained(f"--backward --head-dim {head_dim}")["kernels"]
    found = {own["kernel"]: own for own in kernels}
    own = found[kernel]
    assert (own["tile"]["block_m"], own["tile"]["block_n"]) == tile
    assert own["tflop"] == pytest.approx(2.5 * found["forward_sm90"]["tflop"])
    assert found["backward_convert"]["tile"] == {}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_gradients_are_explained_at_every_head_size_(explained, dtype):
    for arch, head_dim in [(a, d) for a in ("sm_80", "sm_90a") for d in (8, 64, 96, 128, 192, 256)]:
        line = f"--arch {arch} --backward --dtype {dtype} --head-dim {head_dim}"
        found, unordered = explained(line)["kernels"], explained(f"{line} --unordered")
        tiled = [own for own in found if own["tile"]]
        assert len(tiled) >= 2
        assert all(own["tile_from"] for own in tiled)
        assert [own | {"tile_from": ""} for own in unordered["kernels"]] == [
            own | {"tile_from": ""} for own in found
        ]
        assert unordered["problem"].endswith(" unordered")


_PORTABLE = ["forward_sm80", "backward_dkv_sm80", "backward_dq_sm80"]


@pytest.mark.parametrize(
    ("line", "tables"),
    [
        ("", ["forward_sm90", "backward_sm90"]),
        ("--softcap 9", ["forward_sm90", "backward_sm90"]),
        ("--arrays bias", ["forward_sm90", "backward_sm90"]),
        (
            "--dtype float64 --head-dim 3",
            ["forward_narrow", "backward_dkv_narrow", "backward_dq_narrow"],
        ),
        ("--arch sm_75", ["forward_sm80", "backward_dkv_sm80", *_PORTABLE[1:]]),
        ("--arch sm_80", _PORTABLE),
    ],
)
def test_a_tile_is_said_to_be_from_the_module_that_has_it(explained, line, tables):
    kernels = explained(f"--backward {line}")["kernels"]
    told = [own["tile_from"] for own in kernels if own["tile"]]
    assert told == [f"cuflash/_kernels/{name}.py" for name in tables]
    assert all((Path(cuflash.__file__).parents[1] / name).is_file() for name in told)


@pytest.mark.parametrize(("dtype", "size"), [("bfloat16", 2), ("float32", 4)])
def test_passes_for_one_gradient_are_explained_as_such(explained, dtype, size):
    """Wide dk and dv have a pass each where a score branches, and both passes multiply q with k."""
    options = "--softcap 30 --dropout 0.1 --arrays alibi_slopes"
    line = f"--backward --dtype {dtype} {options} --head-dim 192 --head-dim-v 128"
    kernels = explained(line)["kernels"]
    (forward,) = (own for own in kernels if own["kernel"].startswith("forward"))
    dk, dv = (own for own in kernels if "_dkv_" in own["kernel"])
    product = forward["tflop"] / (192 + 128)
    assert dk["tflop"] == pytest.approx(product * (2 * 192 + 128))
    assert dv["tflop"] == pytest.approx(product * (192 + 128))
    assert (dk["gradient"], dv["gradient"]) == ("dk", "dv")
    written = 2 * 16 * 8192 * size * 192  # dk is written, v is read for dv
    assert dk["once"] - dv["once"] == written


@pytest.mark.parametrize(
    ("line", "tflops", "by"),
    [
        ("float32", 164.9, "three TF32 products for one of float32"),
        ("float32 --precision tf32", 494.7, "TF32 products"),
        ("float64", 66.9, "float64 products"),
        ("float16", 989.4, "16-bit products"),
    ],
)
def test_the_roofline_is_that_of_the_products_that_a_dtype_takes(explained, line, tflops, by):
    (own,) = explained(f"--dtype {line}")["kernels"]
    assert (own["bound_tflops"], own["bound_by"]) == (pytest.approx(tflops), by)


@pytest.mark.long
@pytest.mark.nvrtc
def test_explain_compiles_for_registers(command):
    status, out, _ = command("explain --arch sm_80 --backward --json")
    found = json.loads(out)["kernels"]
    assert status == 0
    assert [own["kernel"] for own in found] == [
        "forward_sm80", "backward_delta", "backward_dkv_sm80", "backward_dq_sm80",
    ]  # fmt: skip
    assert all(own["registers"] > 0 and own["blocks_per_multiprocessor"] > 0 for own in found)


def test_explain_says_what_does_not_compile(command, monkeypatch):
    broken = tuning.Facts(1, error="error: no such")
    monkeypatch.setattr(
        explaining, "compile_all", lambda configs, _: dict.fromkeys(configs, broken)
    )
    status, out, _ = command("explain --arch sm_80")
    assert status == 1
    assert "did not compile error: no such" in out


@pytest.mark.parametrize(
    "given",
    [
        {}, {"causal": True}, {"arrays": ("bias",)}, {"head_dim": 100}, {"head_dim_v": 36},
        {"dropout": 0.1}, {"softcap": 5.0}, {"arrays": ("mask", "sink", "segment_ids")},
        {"head_dim": 64, "head_dim_v": 32}, {"dtype": "float32"}, {"dtype": "float64"},
        {"arrays": ("alibi_slopes", "q_lengths")},
    ],
)  # fmt: skip
def test_reasons_are_given_exactly_where_hopper_does_not_serve(given):
    problem = replace(tuning.Workload(2, 8, 8, 512, 512, 64, 64, "bfloat16"), **given).problem()
    forward = forward_of(problem, H100).source.endswith("_sm90.cu")
    assert forward == (why_portable(problem, H100) == "")
    of_float32 = problem.dtype == np.float32 and chosen.one(
        "forward_tf32_sm90", problem, copy_bytes=16
    )
    assert not forward or of_float32 or chosen.one("forward_sm90", problem) is not None
    gradient = [c.source for c in backward_of(problem, H100)][1:]
    hopper = all(s.endswith("_sm90.cu") or s == "backward_convert.cu" for s in gradient)
    assert hopper == (why_portable(problem, H100, "dq") == "")
    assert why_portable(problem, select_hardware.typical("sm_80"))


def test_explain_shows_the_io_model(command, explained):
    found = explained("--io --batch 1")
    io, tile = found["io"], found["kernels"][0]["tile"]
    counted = next(
        row["measured"]
        for row in json.loads((RESULTS / "h100-io-2026-11-23.json").read_text())["rows"]
        if (row["kernel"], row["seqlen"]) == ("forward_sm90", 8192)
        and (row["block_m"], row["block_n"]) == (tile["block_m"], tile["block_n"])
    )
    assert io["loaded"] == pytest.approx(counted["L2 to processors"], rel=1e-4)
    assert io["read_once"] == pytest.approx(counted["device memory read"], rel=0.03)
    assert io["stored"] == pytest.approx(counted["processors to L2"], rel=0.001)
    assert io["unfused"] > 4 * io["loaded"] / 2
    assert "loaded by tiles" in command("explain --arch sm_90a --no-compile --io --batch 1")[1]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("h100-memory-*", ["device memory read", "of the data sheet"]),
        ("h100-io-*", ["forward_sm90  192x80", "counted / model"]),
        ("h100-forward-*", ["# NVIDIA H100", "| cuflash |"]),
        ("h100-accuracy-*", ["**float16**", "| one hot |"]),
        ("h100-widths-*", ["| one hot, seqlen 512, head size 192 |"]),
        ("h100-points-*", ["| cuflash | float32 | 262,144 x 262,144 |"]),
    ],
)
def test_every_kind_of_result_is_rendered(command, name, words):
    path = sorted(RESULTS.glob(f"{name}.json"))[-1]
    status, out, _ = command(f"bench --render {path}")
    assert status == 0
    assert all(word in out for word in words)
    status, out, _ = command(f"bench --render {path} --json")
    assert (status, json.loads(out)) == (0, json.loads(path.read_text()))


@pytest.fixture
def installed(monkeypatch, tmp_path):
    """Place the kernels in the package, as a wheel does, with no folder benchmarks/ beside them."""
    monkeypatch.setattr(from_checkout, "kernels_dir", lambda: tmp_path / "cuflash" / "kernels_cu")


@pytest.mark.usefixtures("installed")
def test_without_the_benchmarks_one_line_says_where_they_are(command, monkeypatch):
    told = "cuflash: the benchmarks are not part of the installed package: run this in a checkout"
    lines = ("bench", "bench --set short more", "bench --render a.json")
    for line in (*lines, *(f"plot {kind} a.json" for kind in ("heatmap", "speed", "io"))):
        status, out, err = command(line)
        assert (status, out, err.count("\n")) == (1, "", 1)
        assert err.startswith(told)
    assert "\nthe benchmarks are not part of" in command("bench --help")[1]
    monkeypatch.setattr(select_hardware, "present", lambda device=None: H100)
    status, _, err = command("explain --io --no-compile")
    assert (status, err.startswith("cuflash: not measured: the benchmarks are not")) == (0, True)
    assert command("info")[0] == 0
    status, _, err = command("info --set")
    assert (status, "unrecognized arguments: --set" in err) == (2, True)


@pytest.mark.parametrize(
    ("kind", "name", "message"),
    [
        ("speed", "h100-memory-*", "got no row with TFLOP/s"),
        ("speed", "h100-io-*", "got no row with TFLOP/s"),
        ("io", "h100-memory-*", "got no row with bytes of a forward, expected a result of bench"),
        ("io", "h100-forward-*", "got no row with bytes of a forward, expected a result of bench"),
        ("memory", "h100-io-*", "got no row with bytes beside the inputs"),
        ("roofline", "h100-io-*", "got no row with a level of memory, expected a result of bench"),
    ],
)
def test_a_result_of_another_kind_is_not_drawn(command, tmp_path, kind, name, message):
    pytest.importorskip("matplotlib")
    path = sorted(RESULTS.glob(f"{name}.json"))[-1]
    sweep = sorted((RESULTS.parent / "sweeps").glob("*.jsonl"))[0]
    given = f"{sweep} --memory {path}" if kind == "roofline" else path
    status, out, err = command(f"plot {kind} {given} --out {tmp_path / 'picture'}")
    assert (status, out, message in err) == (2, "", True)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "content", ["[]", '{"meta": {}, "rows": []}', '{"meta": 1, "rows": []}', '{"rows": [{}]}']
)
def test_what_is_no_result_is_not_rendered(command, tmp_path, content):
    bad = tmp_path / "bad.json"
    bad.write_text(content)
    for line in ("bench --render", "plot speed", "plot io"):
        status, out, err = command(f"{line} {bad}")
        assert (status, out) == (2, "")
        assert "bad.json: got something else, expected a result of bench" in err


#: A sweep of few configurations.
TUNE = "tune --parameters block_m=128 num_stages=2 num_q_stages=1 overlap_quarters=0"


@pytest.mark.long
@pytest.mark.nvrtc
def test_tune_without_a_device_lists_compiles_and_says_what_is_missing(command, no_device):
    line, keys = f"{TUNE} block_n=48,64 --processes 2", ["128,48,2,1,0", "128,64,2,1,0"]
    status, out, err = command(line)
    assert status == 1
    assert "nothing was timed: no NVIDIA device can be used (" in err
    assert "0 of 2 compiled\n" in err  # printed before any is compiled, since stderr is no terminal
    assert "2 of 2 compiled\n" in err
    lines = [line for line in out.splitlines() if line.startswith("128,")]
    assert [line.split()[0] for line in lines] == keys
    assert all("168" in line for line in lines)
    status, out, _ = command(f"{line} --list --json")
    found = json.loads(out)
    assert (status, [c["key"] for c in found["configs"]]) == (0, keys)
    assert found["configs"][0]["spill_bytes"] == 0
    assert len(list(cubin_cache.folder().glob("*.cubin"))) == 2


@pytest.fixture(params=["CuPy", "NVRTC"])
def no_compiler(request, monkeypatch):
    """Hide CuPy, or NVRTC."""

    def absent():
        raise RuntimeError('Failure finding "libnvrtc.so.13"')

    library = SimpleNamespace(nvrtc=SimpleNamespace(getVersion=absent))
    found = None if request.param == "CuPy" else library
    monkeypatch.setitem(sys.modules, "cupy_backends.cuda.libs", found)
    if request.param == "CuPy":
        monkeypatch.setitem(sys.modules, "cupy", None)
    return (
        f"compiling needs CuPy and NVRTC; {pip_install('compile12')} on a machine without a GPU, "
        f"{pip_install('cuda12', 'cuda13')} on one with a GPU"
    )


def test_tune_without_a_compiler_lists_what_needs_none(command, no_device, no_compiler):
    line = TUNE.replace("=128", "=128,192") + " block_n=96"
    told = f"cuflash: nothing was compiled: {no_compiler}\n"
    status, out, err = command(line)
    assert (status, err) == (1, f"{told}nothing was timed: {info.no_device()}\n")
    lines = [line.split() for line in out.splitlines() if line.startswith(("128,", "192,"))]
    assert lines == [
        ["128,96,2,1,0", "129.0", "384", *"?????"], ["192,96,2,1,0", "145.0", "512", *"?????"],
    ]  # fmt: skip
    for more in ("--list", "--arch sm_90a"):
        status, out, err = command(f"{line} {more} --json")
        assert (status, err) == (1, told)
        found = json.loads(out)["configs"]
        assert [(c["key"], c["smem_bytes"], c["num_threads"]) for c in found] == [
            ("128,96,2,1,0", 129 * 1024, 384), ("192,96,2,1,0", 145 * 1024, 512),
        ]  # fmt: skip
        assert {c[name] for c in found for name in ("registers", "spill_bytes", "error")} == {None}


def test_explain_without_a_compiler_leaves_registers_unknown(command, no_device, no_compiler):
    status, out, err = command("explain")
    assert (status, err) == (0, f"cuflash: registers are unknown: {no_compiler}\n")
    assert "  registers       unknown: not compiled\n" in out
    assert (0, out, "") == command("explain --no-compile")


def test_nothing_is_warmed_without_a_compiler(command, tmp_path, no_compiler):
    folder = tmp_path / "shared"
    for more in ("", f"--folder {folder}"):
        found = command(f"cache warm --arch sm_90a {more}")
        assert found == (1, "", f"cuflash: {no_compiler}\n")
    assert not list(folder.iterdir())


@pytest.mark.parametrize(
    ("cupy", "why"),
    [
        (None, f"(cupy not installed ({pip_install('cuda12', 'cuda13')}))"),
        ("too old a driver", "(device unavailable: too old a driver)"),
    ],
)
def test_a_bench_without_a_device_says_why(command, monkeypatch, cupy, why):
    def absent():
        raise RuntimeError(cupy)

    runtime = SimpleNamespace(getDeviceCount=absent, driverGetVersion=lambda: 0)
    found = SimpleNamespace(__version__="14", cuda=SimpleNamespace(runtime=runtime))
    monkeypatch.setitem(sys.modules, "cupy", found if cupy else None)
    told = f"bench: no NVIDIA device can be used {why}"
    for option in ("--memory", "--io", "--portable"):
        assert command(f"bench {option}") == (1, "", f"cuflash: {told}\n")
    status, _, _ = command("bench --device gpu")
    assert status == f"{told}; --device cpu measures NumPy arrays"


def test_tune_lists_what_does_not_compile_with_status_1(command, monkeypatch):
    broken = tuning.Facts(1, error="error: no such")

    def compiled(chosen, *_, **__):
        return {c.key: broken for c in chosen}

    monkeypatch.setattr(tuning.Space, "compile", compiled)
    for more in ("", "--list", "--json"):
        line = f"tune --arch sm_90a --parameters block_m=128 num_stages=2 {more}"
        status, out, _ = command(line)
        assert (status, "error: no such" in out) == (1, True)
    assert {c["error"] for c in json.loads(out)["configs"]} == {"error: no such"}


@pytest.fixture
def simulated(tmp_path, monkeypatch):
    """Simulate device (``support/simulated_device.py``) and compiler; return a command line."""
    for module in (select_hardware, _table):
        monkeypatch.setattr(module, "present", lambda device=None: H100)
    monkeypatch.setattr(tuning.Space, "compile", with_made_up_facts)
    sweep = functools.partial(tuning.sweep, device_command=DEVICE)
    monkeypatch.setattr(tuning, "sweep", sweep)
    monkeypatch.setenv("SIMULATED_NAME", H100.name)
    monkeypatch.setenv("SIMULATED_LOG", str(tmp_path / "log"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    few = "block_m=128 block_n=96,128 num_stages=2,3 overlap_quarters=1"
    return f"tune --file {tmp_path / 'rows.jsonl'} --parameters {few}"


def test_a_sweep_without_a_right_configuration_has_status_1(
    command, simulated, tmp_path, monkeypatch
):
    keys = [f"128,{n},{stages},{q},1" for n in (96, 128) for stages in (2, 3) for q in (1, 2)]
    monkeypatch.setenv("SIMULATED_TROUBLE", json.dumps(dict.fromkeys(keys, "wrong")))
    file, exported = tmp_path / "rows.jsonl", tmp_path / "cache.json"
    status, out, err = command(f"{simulated} --save --kernel-tuner {exported} --json")
    count = len(tuning.load(file).rows)
    assert count >= 4
    assert status == 1
    assert json.loads(out) == {
        "file": str(file), "best": None, "states": {"wrong": count}, "final": None
    }  # fmt: skip
    assert f"{count} rows, none of them timed, expected at least one configuration that" in err
    assert "kept in" not in err
    assert tuning.read_cache(exported).rows == tuning.load(file).rows
    status, out, _ = command(f"{simulated} --save")
    assert (status, f"{count} wrong" in out) == (1, True)


def test_tune_sweeps_goes_on_saves_and_exports(command, simulated, tmp_path):
    file, exported = tmp_path / "rows.jsonl", tmp_path / "cache.json"
    line = f"{simulated} --budget-ms 5"
    status, out, err = command(f"{line} --budget 2")
    assert (status, "2 ok" in out, "   2/2 " in err) == (0, True, True)
    status, out, err = command(f"{line} --save --kernel-tuner {exported} --json")
    assert status == 0
    found, result = json.loads(out), tuning.load(file)
    assert found["states"] == {"ok": len(result.rows)}
    assert found["best"]["key"] == result.best["key"]
    times = [line for line in (tmp_path / "log").read_text().split() if line != "open"]
    assert sorted(times) == sorted(row["key"] for row in result.rows)  # each is timed once
    assert f"kept in {tuning.user_table()}" in err
    (kept,) = measured.read(tuning.user_table())
    assert dict(kept.values) == result.best["values"]
    assert tuning.read_cache(exported).rows == result.rows
    status, _, err = command(f"{line} --causal")
    assert (status, "pass another file" in err) == (2, True)


def with_made_up_facts(chosen, candidates=None, **_):
    """Replace Space.compile: fill in facts without compiling."""
    facts = {c.key: tuning.Facts(c.config.smem_bytes, registers=168) for c in candidates or chosen}
    chosen.facts |= facts
    return facts


def test_warm_leaves_out_what_its_help_says(command, monkeypatch):
    warmed = []
    monkeypatch.setattr(cuflash, "compile", lambda works, **_: warmed.extend(works) or [Path("a")])
    line = "cache warm --arch sm_90a --head-dims 64,256 --dtypes bfloat16,float32"
    assert command(line)[0] == 0
    assert len(warmed) == 8
    there = {config for own in warmed for config in kernels_of(own, H100, backward=True)}
    narrow, wide = (own for own in warmed if own.dtype == "bfloat16" and not own.causal)
    single = next(own for own in warmed if own.dtype == "float32")
    help_text = " ".join(command("cache --help")[1].split())
    for name, other in {
        "small batches": replace(narrow, batch=1, heads_q=4, heads_kv=4),
        "head_dim_v": replace(narrow, head_dim_v=32),
        "packed sequences": replace(narrow, batch=1, seqlens=(4000, 96)),
        "windows": replace(narrow, window=(512, 0)),
        "other score options": replace(narrow, softcap=30.0),
        'precision="tf32"': replace(single, precision="tf32"),
        "deterministic=False": replace(narrow, deterministic=False),
    }.items():
        assert name in help_text
        assert not set(kernels_of(other, H100, backward=True)) <= there, name
    grouped = (replace(own, heads_kv=2) for own in (narrow, wide))
    for like in (replace(narrow, seqlen_q=2048, seqlen_k=3000), *grouped):
        assert set(kernels_of(like, H100, backward=True)) <= there


@pytest.mark.long
@pytest.mark.nvrtc
def test_the_store_is_warmed_listed_verified_and_cleared(command, tmp_path):
    folder = tmp_path / "shared"
    cache = f"cache {{}} --folder {folder}".format
    few = "--arch sm_90a --head-dims 64 --dtypes float16 --processes 2 --json"
    status, out, _ = command(f"{cache('warm')} {few}")
    files = json.loads(out)["files"]
    assert (status, len(files)) == (0, 2)  # the full and the causal kernel
    status, out, _ = command(f"{cache('list')} --json")
    rows = json.loads(out)["kernels"]
    assert (status, {row["entry"] for row in rows}) == (0, {"cuflash_forward_sm90"})
    assert command(cache("verify"))[0] == 0
    (folder / "notes.txt").write_text("not ours")
    with open(files[0], "r+b") as file:
        file.write(b"changed")
    status, out, _ = command(cache("verify"))
    assert (status, "1 unusable" in out) == (1, True)
    if os.name != "nt":
        os.mkfifo(folder / f"{'0' * 64}.cubin")
        status, out, _ = command(cache("list"))
        assert (status, out.count(" is truncated"), out.count("not a regular")) == (0, 1, 1)
    status, out, _ = command(cache("clear"))
    assert (status, sorted(path.name for path in folder.iterdir())) == (0, ["notes.txt"])
    assert command(cache("list"))[0] == 0


def test_clearing_removes_what_killed_processes_left(command, monkeypatch):
    """Temporary files of killed processes are removed; here, neither replace nor unlink runs."""

    def killed(*_, **__):
        raise SystemExit

    with monkeypatch.context() as patch:
        for step in ("replace", "unlink"):
            patch.setattr(cubin_cache.os, step, killed)
        for write, *given in (
            (cubin_cache.save, "a" * 64, b"a kernel"),
            (cubin_cache.save_note, "a" * 64, {}),
            (cubin_cache.save_note, "compiler", {}),
        ):
            with pytest.raises(SystemExit):
                write(*given)
    folder = cubin_cache.folder()
    assert len(list(folder.iterdir())) == 3
    (folder / "tmp_of_another").write_text("not ours")
    status, out, _ = command("cache clear")
    assert (status, "0 kernels removed" in out) == (0, True)
    assert [path.name for path in folder.iterdir()] == ["tmp_of_another"]


def test_a_store_that_is_not_there_is_empty(command, tmp_path):
    status, out, _ = command(f"cache list --folder {tmp_path / 'no'}")
    assert (status, "0 kernels" in out) == (0, True)
    status, _, err = command(f"cache verify --folder {tmp_path / 'no'}")
    assert (status, "expected an existing folder" in err) == (2, True)

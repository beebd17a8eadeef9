"""Are measured tiles used for calls like the measured ones, and for no others?"""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from cuflash import tuning
from cuflash._select import hardware as select_hardware
from cuflash._select import measured
from cuflash._select.override import with_override
from cuflash.tuning import _kernels
from cuflash.tuning._space import default_configs
from support.chosen import backward_of, forward_of, fused, one
from support.simulated_sweep import DEVICE, WORK, simulated, space_of
from support.tuned_problems import PROBLEMS

H100 = select_hardware.typical("sm_90")
SWEPT = Path(__file__).parents[1] / "benchmarks" / "sweeps" / "h100-forward-sm90-d128.jsonl"


@pytest.fixture(autouse=True)
def shipped(monkeypatch, tmp_path):
    """Start and end every test with the shipped tiles, and a cache folder of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("SIMULATED_NAME", H100.name)
    monkeypatch.delenv("CUFLASH_TILES", raising=False)
    measured.replace_rows(None)
    yield
    measured.replace_rows(None)


def row(**given):
    """Return a row of Hopper's forward at head size 128, as in a file."""
    base = {
        "kernel": "forward_sm90", "dtype": "bfloat16", "head_dim": 128, "head_dim_v": 128,
        "options": "plain", "device": H100.name,
        "values": {"block_m": 128, "block_n": 96, "num_stages": 3},
    }  # fmt: skip
    return base | given


def written(tmp_path, *rows, name="tiles.json"):
    path = tmp_path / name
    path.write_text(json.dumps({"format": measured.FORMAT, "tiles": list(rows)}))
    return path


def table_of(work=WORK):
    """Return the configuration by the tables in the source."""
    return one("forward_sm90", work.problem())


def chosen(work=WORK, device=H100.name):
    """Return the configuration that runs."""
    return forward_of(work.problem(), H100._replace(name=device))


def test_nothing_is_in_use_unless_asked_for(tmp_path):
    written(tmp_path, row())
    user = tuning.user_table()
    user.parent.mkdir(parents=True)
    user.write_text(json.dumps({"format": measured.FORMAT, "tiles": [row()]}))
    assert chosen() == table_of()


def test_a_row_is_used_for_what_it_was_measured_with(tmp_path):
    tuning.use(written(tmp_path, row()))
    default = table_of()
    assert chosen() == default.replace(block_n=96, num_stages=3)
    assert chosen(replace(WORK, seqlen_q=77, batch=5)) == chosen()
    for other in (
        {"causal": True},
        {"dtype": "float16"},
        {"softcap": 20.0},
        {"head_dim": 64, "head_dim_v": 64},
        {"arrays": ("sink",)},
        {"window": (100, None)},
    ):
        work = replace(WORK, **other)
        assert chosen(work) == table_of(work), other
    assert chosen(device="another") == default
    portable = forward_of(WORK.problem(), H100, portable=True)
    assert portable == forward_of(WORK.problem(), H100._replace(name="x"), portable=True)


def test_a_row_may_hold_instead_of_one_tile_of_the_tables_alone(tmp_path):
    long = replace(WORK, seqlen_q=16384, seqlen_k=16384)
    narrow, wide = replace(long, window=(100, 100)), replace(long, window=(8000, 8000))
    assert table_of(narrow) != table_of(wide)
    options = measured.key_of(table_of(narrow), "").options
    replaced = measured.tile_text(table_of(narrow))
    tuning.use(written(tmp_path, row(options=options, replaces=replaced)))
    assert chosen(narrow).block_n == 96
    assert chosen(wide) == table_of(wide)
    tuning.use(written(tmp_path, row(options=options, values={"block_n": 112}), name="any.json"))
    assert [chosen(narrow).block_n, chosen(wide).block_n] == [96, 112]


def test_use_ends_with_its_block(tmp_path):
    default = chosen()
    with tuning.use(written(tmp_path, row())):
        first = chosen()
        with tuning.use(None):
            assert chosen() == default
        assert chosen() == first != default
    assert chosen() == default


def test_more_rows_are_added_and_the_last_counts(tmp_path):
    tuning.use(written(tmp_path, row()))
    tuning.use(written(tmp_path, row(options="causal"), name="b.json"))
    assert chosen().block_n == chosen(replace(WORK, causal=True)).block_n == 96
    tuning.use(written(tmp_path, row(values={"block_n": 112}), name="c.json"))
    assert chosen().block_n == 112


@pytest.mark.parametrize("name", ["user", "path"])
def test_the_variable_names_a_table(tmp_path, monkeypatch, name):
    path = tuning.user_table() if name == "user" else tmp_path / "other.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"format": measured.FORMAT, "tiles": [row()]}))
    monkeypatch.setenv("CUFLASH_TILES", "user" if name == "user" else str(path))
    assert chosen().block_n == 96


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"block_m": 64}, "block_m = 64 must be 128 or 192"),
        ({"window_right": 1}, "parameter: got window_right, expected one of num_warps, block_m"),
    ],
)
def test_a_bad_row_of_the_variable_is_named_when_it_would_be_used(
    tmp_path, monkeypatch, values, message
):
    monkeypatch.setenv("CUFLASH_TILES", str(written(tmp_path, row(values=values))))
    assert chosen(replace(WORK, causal=True)) == table_of(replace(WORK, causal=True))
    with pytest.raises(
        ValueError, match=r"CUFLASH_TILES or tuning\.use: got forward_sm90 for"
    ) as error:
        chosen()
    assert message in str(error.value)


def test_a_row_for_more_shared_memory_than_the_device_has_is_named(tmp_path, monkeypatch):
    """A row, say edited by hand, that needs more shared memory is named, and not ``config``."""
    values = {"block_m": 128, "block_n": 128, "num_stages": 4}
    monkeypatch.setenv("CUFLASH_TILES", str(written(tmp_path, row(values=values))))
    needed = measured.with_values(table_of(), values).smem_bytes
    limit = H100.limits.block_smem
    with pytest.raises(
        ValueError, match=r"CUFLASH_TILES or tuning\.use: got forward_sm90 for"
    ) as e:
        chosen()
    assert f"; {needed} bytes of shared memory, a thread block has {limit}" in str(e.value)
    larger = H100._replace(limits=H100.limits._replace(block_smem=needed))
    assert with_override(table_of(), None, larger).num_stages == 4


def test_the_variable_has_to_name_a_file(tmp_path, monkeypatch):
    monkeypatch.setenv("CUFLASH_TILES", str(tmp_path / "no.json"))
    with pytest.raises(
        FileNotFoundError, match=r"CUFLASH_TILES: got .*no\.json, which is not a file"
    ):
        chosen()


def test_a_sweep_in_the_variable_is_told_how_to_become_a_table(tmp_path, monkeypatch):
    sweep = SWEPT
    monkeypatch.setenv("CUFLASH_TILES", str(sweep))
    with pytest.raises(ValueError, match=r"jsonl: got a sweep, expected a file of tiles") as error:
        chosen()
    assert f"python -m cuflash tune --file {sweep} --save" in str(error.value)
    told = f"tuning.save(cuflash.tuning.load({str(sweep)!r}), 'tiles.json')"
    assert told in str(error.value)
    monkeypatch.delenv("CUFLASH_TILES")
    path = tuning.save(tuning.load(sweep), tmp_path / "tiles.json")
    monkeypatch.setenv("CUFLASH_TILES", str(path))
    measured.replace_rows(None)
    assert [dict(r.values) for r in measured.in_use().values()] == [
        tuning.load(sweep).best["values"]
    ]


def test_the_table_of_a_user_need_not_exist(monkeypatch):
    monkeypatch.setenv("CUFLASH_TILES", "user")
    assert chosen() == table_of()


def test_the_callers_config_goes_before_a_table(tmp_path):
    tuning.use(written(tmp_path, row()))
    default = table_of()
    wanted = default.replace(block_n=64)
    assert with_override(default, wanted, H100) == wanted


def test_a_config_whose_tile_is_not_legal_for_the_call_says_why():
    """A config of another head size, as here, or of other options says why it is not legal."""
    narrow, wide = (
        fused(replace(WORK, head_dim=size, head_dim_v=size).problem(), deterministic=True)
        for size in (64, 128)
    )
    with pytest.raises(ValueError, match=r"^config: got BackwardOnePassConfig with .*") as error:
        with_override(wide, narrow, H100)
    reason = "block_m=128 by head_dim=128 must be two parts of dq, each 64 by 64"
    assert str(error.value).endswith(f"expected a tile that is legal for this call; {reason}")


def test_the_best_of_a_sweep_is_kept_and_used(tmp_path):
    found = space_of(num_q_stages=(1, 2))
    result = tuning.sweep(WORK, found, file=tmp_path / "rows.jsonl", device_command=DEVICE)
    best = result.best["values"]
    assert tuple(best.values()) != tuple(_kernels.tile_of(found.default).values())
    for source in (tmp_path / "rows.jsonl", result, tuning.save(result)):
        with tuning.use(source):
            assert _kernels.tile_of(chosen()) == best
    assert tuning.save(result) == tuning.user_table()
    (kept,) = measured.read(tuning.user_table())
    assert kept.key.device == H100.name
    assert H100.name in kept.measured


@pytest.mark.long
@pytest.mark.parametrize("kernel", _kernels.KERNELS)
def test_the_best_of_every_kernel_is_kept_and_used(tmp_path, kernel):
    work = PROBLEMS[kernel]
    found = simulated(tuning.space(work, kernel, arch="sm_90a"))
    other = next((c for c in found if c.key != found.default_key), None)
    keys = {found.default_key, other.key} if other else {found.default_key}
    found.candidates = [c for c in found if c.key in keys]
    result = tuning.sweep(work, found, file=tmp_path / "rows.jsonl", device_command=DEVICE)
    assert set(result.finals[-1]["ms"]) == keys
    if other:
        result.finals[-1]["ms"][other.key] = 0.1
        assert result.best["key"] == other.key
    saved = tuning.save(result)
    with tuning.use(saved):
        used, *_ = default_configs(work, kernel, H100)
    assert used.kernel == found.default.kernel
    assert ",".join(map(str, _kernels.tile_of(used).values())) == result.best["key"]


def test_a_shipped_tile_that_is_faster_is_kept_instead(tmp_path):
    found = space_of(block_n=(48,), num_stages=(2,))
    result = tuning.sweep(WORK, found, file=tmp_path / "rows.jsonl", device_command=DEVICE)
    assert result.finals[-1]["default_ms"] < min(result.finals[-1]["ms"].values())
    with tuning.use(result):
        assert chosen() == table_of()


def test_saving_keeps_the_rows_of_others(tmp_path):
    path = written(tmp_path, row(options="causal"), row(values={"block_n": 64}))
    result = tuning.sweep(WORK, space_of(), file=tmp_path / "rows.jsonl", device_command=DEVICE)
    tuning.save(result, path)
    kept = {r.key.options: dict(r.values) for r in measured.read(path)}
    assert kept == {"causal": row()["values"], "plain": result.best["values"]}


#: Saves one sweep for each of five devices named after its second argument.
SAVER = """
import sys
from dataclasses import replace
from cuflash import tuning
sweep, name, table = sys.argv[1:]
found = tuning.load(sweep)
for number in range(5):
    own = replace(found, header=found.header | {"device": f"{name} {number}"})
    tuning.save(own, table)
"""


@pytest.mark.parametrize("of", ["processes", "threads"])
def test_saves_at_the_same_time_keep_the_rows_of_all(tmp_path, of):
    sweep = SWEPT
    table, names = tmp_path / "new" / "tiles.json", [f"saver {number}" for number in range(8)]
    if of == "processes":
        command = [sys.executable, "-c", SAVER, str(sweep)]
        running = [subprocess.Popen([*command, name, str(table)]) for name in names]
        assert [process.wait(120) for process in running] == [0] * len(names)
    else:
        found = tuning.load(sweep)

        def save(name):
            for number in range(5):
                device = {"device": f"{name} {number}"}
                tuning.save(replace(found, header=found.header | device), table)

        with ThreadPoolExecutor(len(names)) as pool:
            list(pool.map(save, names))
    kept = {row.key.device for row in measured.read(table)}
    assert kept == {f"{name} {number}" for name in names for number in range(5)}
    assert {path.name for path in table.parent.iterdir()} == {"tiles.json", "tiles.json.lock"}


@pytest.mark.parametrize("rows", [10**30, 100])
def test_a_tile_that_is_not_legal_is_not_saved(tmp_path, rows):
    found = tuning.load(SWEPT)
    best = found.best | {"relative": 0.5}
    best["values"] = best["values"] | {"block_m": rows}
    table = written(tmp_path, row())
    before = table.read_bytes()
    with pytest.raises(ValueError, match=r"sweep: got .*, expected a legal tile"):
        tuning.save(replace(found, rows=[best], finals=[]), table)
    assert table.read_bytes() == before


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "invalid JSON"),
        ("{", "invalid JSON"),
        ("[]", "another format"),
        ('{"format": "cuflash tiles 0", "tiles": []}', "another format"),
        ('{"format": "cuflash tiles 1"}', 'no list "tiles"'),
        ('{"format": "cuflash tiles 1", "tiles": [1]}', "tiles[0]: got 1"),
        (row(head_dim="128"), "tiles[0]: got head_dim '128'"),
        (row(device=None), "tiles[0]: got device None"),
        (row(values={"block_n": 96.5}), "expected integers"),
        (row(values={}), "expected integers"),
        (row(head_dim=999), "head_dim 999"),
        (row(kernel="forward_sm70"), "kernel: got 'forward_sm70'"),
        (row(values={"block_k": 64}), "got parameter 'block_k' of forward_sm90"),
        (row(values={"block_n": 100}), "block_n = 100 must be a positive multiple of 16"),
        (row(values={"block_m": 64}), "must be 128 or 192"),
    ],
)
def test_bad_files_are_refused_and_nothing_changes(tmp_path, content, message):
    before = chosen()
    path = tmp_path / "tiles.json"
    if isinstance(content, dict):
        written(tmp_path, content)
    else:
        path.write_text(content)
    with pytest.raises(ValueError, match="expected") as error:
        tuning.use(path)
    assert message in str(error.value)
    assert chosen() == before


def test_an_absent_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no\.json"):
        tuning.use(tmp_path / "no.json")


def test_tiles_of_another_device_are_refused(tmp_path, monkeypatch):
    from cuflash.tuning import _table

    monkeypatch.setattr(_table, "present", lambda: H100)
    with pytest.raises(
        ValueError, match="got tiles for NVIDIA A100, expected tiles for the device"
    ):
        tuning.use(written(tmp_path, row(device="NVIDIA A100")))
    tuning.use(written(tmp_path, row(device="NVIDIA A100"), row()))
    assert chosen().block_n == 96


def test_every_difference_in_code_beside_the_tile_is_in_the_key():
    """Configurations with equal keys differ only by tile, or by the integer width of an option."""
    works = [
        replace(WORK, **given)
        for given in (
            {}, {"causal": True}, {"window": (5, 5)}, {"window": (5, None)}, {"softcap": 9.0},
            {"dropout": 0.1}, *({"arrays": (name,)} for name in ("mask", "sink", "bias")),
            {"arrays": ("kv_lengths",)}, {"arrays": ("q_lengths",)}, {"head_dim": 100},
            {"arrays": ("alibi_slopes",)}, {"arrays": ("segment_ids",)},
        )
    ]  # fmt: skip
    configs = [forward_of(w.problem(), H100, portable=True) for w in works]
    configs += [configs[0].replace(kv_dtype=dtype) for dtype in ("float8_e4m3fn", "float8_e5m2")]
    keys = [measured.key_of(config, "x")._replace(replaces="") for config in configs]
    assert len(set(keys)) == len(keys)
    gradients = [
        measured.key_of(c, "x")
        for wanted in ("k", "v", "kv")
        for c in backward_of(WORK.problem(), H100, frozenset(wanted))[1:]
    ]
    assert [key.options for key in gradients] == ["dk", "dv", "plain"]


@pytest.mark.long
@pytest.mark.parametrize("kernel", _kernels.KERNELS)
def test_a_tile_is_traced_to_the_row_of_its_own_kernel(kernel):
    """A tile is traced to a row of its own kernel; rows of other kernels have other parameters."""
    rows = {}
    for name, work in PROBLEMS.items():
        config, *_ = default_configs(work, name, H100)
        key = measured.key_of(config, H100.name)
        rows[name] = measured.Row(key, tuple(_kernels.tile_of(config).items()), name)
        if name == kernel:
            own = config
    others = {row.key: row for name, row in rows.items() if name != kernel}
    measured.replace_rows(others)
    assert measured.row_behind(own, H100.name) is None
    measured.replace_rows(others | {rows[kernel].key: rows[kernel]})
    assert measured.row_behind(own, H100.name) == rows[kernel]


@pytest.mark.parametrize(
    "given", [{"dtype": "float32"}, {"arrays": ("segment_ids",), "window": (512, 0)}]
)
def test_gradients_of_wide_heads_get_the_best_tile_in_both_passes(tmp_path, given):
    """A sweep times dk and dv by one tile, and both passes, each with its own key, get the best."""
    work = replace(WORK, head_dim=192, head_dim_v=192, **given)
    own = [c for c in backward_of(work.problem(), H100) if "dkv" in c.source]
    assert [(c.grad_k, c.grad_v) for c in own] == [(True, False), (False, True)]
    found = simulated(tuning.space(work, own[0].kernel, arch="sm_90a"))
    other = next(c for c in found if c.key != found.default_key)
    found.candidates = [found.candidate(found.default_key), other]
    result = tuning.sweep(work, found, file=tmp_path / "rows.jsonl", device_command=DEVICE)
    result.finals[-1]["ms"][other.key] = 0.1
    for source in (result, tuning.save(result)):
        with tuning.use(source):
            tiles = [
                ",".join(map(str, _kernels.tile_of(c).values()))
                for c in backward_of(work.problem(), H100)
                if "dkv" in c.source
            ]
            assert tiles == [other.key] * 2


def test_a_gradient_in_any_order_has_rows_of_its_own(tmp_path):
    work = replace(WORK, causal=True, deterministic=False)
    found = simulated(tuning.space(work, "backward_sm90", arch="sm_90a"))
    assert not found.default.deterministic
    found.candidates = [c for c in found if c.config.num_stages == 2]
    result = tuning.sweep(work, found, file=tmp_path / "rows.jsonl", device_command=DEVICE)
    other = next(c for c in found if c.key != found.default_key)
    result.finals[-1]["ms"][other.key] = 0.1
    with tuning.use(result):
        tiles = [
            _kernels.tile_of(backward_of(work.problem(), H100, deterministic=deterministic)[1])
            for deterministic in (False, True)
        ]
    assert tiles == [_kernels.tile_of(other.config), _kernels.tile_of(found.default)]
    named = str(tuning.default_file(found))
    assert named != str(tuning.default_file(tuning.space(replace(work, deterministic=True))))
    assert "unordered" in named


def test_a_row_replaces_the_tile_that_the_device_that_was_swept_has(tmp_path, monkeypatch):
    """A row replaces the swept device's tile: on idle SMs the tables choose other tiles."""
    small = H100._replace(name="NVIDIA H100 PCIe", multiprocessors=114)
    work = replace(WORK, head_dim=64, head_dim_v=64)
    tables = [forward_of(work.problem(), hardware) for hardware in (H100, small)]
    assert tables[0] != tables[1]
    monkeypatch.setenv("SIMULATED_NAME", small.name)
    monkeypatch.setattr("cuflash.tuning._space.wanted", lambda arch: small)
    found = simulated(tuning.space(work, "forward_sm90", arch="sm_90a"))
    found.candidates = [c for c in found if c.config.num_stages == 2][:2]
    monkeypatch.undo()
    monkeypatch.setenv("SIMULATED_NAME", small.name)
    result = tuning.sweep(work, found, file=tmp_path / "rows.jsonl", device_command=DEVICE)
    result.finals[-1]["default_ms"] = 1e3
    with tuning.use(tmp_path / "rows.jsonl"):
        assert tuning.load(tmp_path / "rows.jsonl").header["multiprocessors"] == 114
    with tuning.use(result):
        used = forward_of(work.problem(), small)
        assert _kernels.tile_of(used) == result.best["values"]


def test_a_sweep_of_another_kernel_is_no_table(tmp_path):
    header = {"workload": None, "kernel": "sgemm", "parameters": {"x": [1]}, "default": ""}
    row_of_it = {"key": "1", "values": {"x": 1}, "status": "ok", "ms": 1.0, "relative": 1.0}
    foreign = tuning.Sweep(header | {"device": H100.name, "arch": ""}, [row_of_it])
    for put in (tuning.use, tuning.save):
        with pytest.raises(ValueError, match="got a sweep of sgemm, no kernel of this library"):
            put(foreign)


@pytest.mark.gpu
def test_calls_run_with_the_tiles_in_use(tmp_path, monkeypatch):
    import cupy

    import cuflash
    from cuflash._launch import plan

    device = select_hardware.present()
    q = cupy.random.standard_normal((2, 300, 128), dtype=cupy.float32).astype(cupy.float16)
    work = tuning.Workload(1, 2, 2, 300, 300, 128, 128, "float16")
    default = forward_of(work.problem(), device)
    other = next(
        c.values for c in tuning.space(work) if c.config.block_n != default.block_n
    )  # fmt: skip
    values = dict(zip(default.tunables, other, strict=True))
    seen = []
    compiled = plan.compile_kernel
    monkeypatch.setattr(plan, "compile_kernel", lambda c, d: seen.append(c) or compiled(c, d))
    tiles = row(kernel=default.kernel, dtype="float16", device=device.name, values=values)
    expected = cuflash.attention(q, q, q)
    cuflash.attention(q, q, q)  # taken from the plan cache from here on
    with tuning.use(written(tmp_path, tiles)):
        found = cuflash.attention(q, q, q)
    again = cuflash.attention(q, q, q)
    assert [_kernels.tile_of(c) for c in seen][-2:] == [values, _kernels.tile_of(default)]
    assert bool((again == expected).all())
    assert float(abs(found - expected).max()) < 1e-2


@pytest.mark.gpu
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(
    "given",
    [
        {}, {"causal": True}, {"arrays": ("bias",)}, {"head_dim": 100}, {"head_dim_v": 64},
        {"dropout": 0.25}, {"softcap": 20.0, "arrays": ("mask",)}, {"heads_kv": 2},
        {"heads_kv": 2, "seqlen_q": 1, "causal": True}, {"heads_kv": 1, "seqlen_q": 7},
        {"dtype": "float32"}, {"dtype": "float64", "causal": True}, {"arrays": ("segment_ids",)},
    ],
)  # fmt: skip
def test_what_is_explained_is_what_runs(monkeypatch, given, backward):
    import cupy

    import cuflash
    from cuflash._ahead import kernels_of
    from cuflash._launch import plan, plan_cache

    plan_cache.forget()
    work = replace(tuning.Workload(2, 4, 4, 500, 500, 128, 128, "bfloat16"), **given)
    seen = []
    compiled = plan.compile_kernel
    monkeypatch.setattr(plan, "compile_kernel", lambda c, d: seen.append(c) or compiled(c, d))
    ((q, k, v, dout),) = work.inputs(cupy)
    options = cuflash.Options(**work.score_options(cupy))
    out, lse = cuflash.attention(q, k, v, options=options, return_lse=True)
    if backward:
        cuflash.attention_backward(dout, q, k, v, out, lse, options=options)
    bounds = {config: None for config in seen if config.computes == "bounds"}  # found by both
    assert [*bounds, *(config for config in seen if config not in bounds)] == kernels_of(
        work, select_hardware.present(), backward=backward
    )

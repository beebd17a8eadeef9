"""Are the tables' tiles the best ones of the committed sweeps, and fit to be shipped?"""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import pytest
import shipped_tiles
import sweep_tiles

from cuflash import tuning
from cuflash._jit.compilation import architecture, compile_static
from cuflash._select import measured
from cuflash._select.hardware import typical
from cuflash.tuning import _kernels
from cuflash.tuning._space import default_configs
from cuflash.tuning._table import best_rows
from support.chosen import one
from support.nvrtc import all_cores
from support.parts import kernels_of_part
from support.simulated_sweep import DEVICE, WORK, simulated

H100 = typical("sm_90")
TABLES = one("forward_sm90", WORK.problem())  # from the tables in the source


@pytest.fixture(autouse=True)
def tables_alone(monkeypatch):
    """Start and end every test with the tiles of the tables."""
    monkeypatch.setenv("SIMULATED_NAME", H100.name)
    monkeypatch.delenv("CUFLASH_TILES", raising=False)
    measured.replace_rows(None)
    yield
    measured.replace_rows(None)


def test_the_tables_have_the_best_tiles_of_the_committed_sweeps():
    assert len(shipped_tiles.rows()) > 100
    assert shipped_tiles.disagreements() == []


@pytest.mark.gate
@pytest.mark.nvrtc
def test_shipped_tiles_spill_nothing_and_wait_for_no_product():
    sweeps = map(tuning.load, sorted(shipped_tiles.SWEEPS.glob("*.jsonl")))
    defaults = (default_configs(found.workload, found.kernel, H100) for found in sweeps)
    configs = list(dict.fromkeys(itertools.chain(*defaults)))

    def complaint(config):
        report = compile_static(config, architecture(config, "90"))
        return (report.spill_bytes, report.warnings)

    with all_cores() as pool:
        assert set(pool.map(complaint, kernels_of_part(configs))) == {(0, ())}


@pytest.fixture
def swept(tmp_path, monkeypatch):
    """Return a function that makes or replaces the committed sweep of one length."""
    monkeypatch.setattr(shipped_tiles, "SWEEPS", tmp_path)

    def make(length, *block_n, rows=128, quarters=4, default=None):
        tried = {"block_m": (rows,), "block_n": block_n, "num_stages": (2,), "num_q_stages": (2,),
                 "overlap_quarters": (quarters,)}  # fmt: skip
        work = replace(WORK, seqlen_q=length, seqlen_k=length)
        found = simulated(tuning.space(work, "forward_sm90", arch="sm_90a", parameters=tried))
        assert default in (None, found.default.block_n)
        path = tmp_path / f"{length}.jsonl"
        path.unlink(missing_ok=True)
        return tuning.sweep(work, found, file=path, device_command=DEVICE, progress=False)

    return make


def shipped_width():
    (own,) = shipped_tiles.rows()
    return dict(own.values)["block_n"]


def test_a_tile_is_shipped_only_if_it_is_clearly_faster(swept, monkeypatch):
    _, result = (swept(length, 112, 128) for length in (2048, 8192))
    gain = result.finals[-1]["default_ms"] / min(result.finals[-1]["ms"].values()) - 1
    assert 0.02 < gain < 0.2
    kept = []
    for margin in (0.0, gain - 0.01, gain + 0.01):
        monkeypatch.setattr(shipped_tiles, "MARGIN", margin)
        kept.append(shipped_width())
    assert kept == [112, 112, TABLES.block_n]


def test_a_tile_is_shipped_only_if_several_lengths_agree(swept):
    swept(WORK.seqlen_k, 96, 128, quarters=1)
    assert shipped_width() == TABLES.block_n == 128  # 96 keys are faster, at one length only
    swept(8192, 96, 128, quarters=1)
    assert shipped_width() == 96
    swept(8192, 112, 128, quarters=1)
    assert shipped_width() == 128  # the two lengths do not agree


def test_a_tile_is_shipped_only_if_it_was_compared_with_that_of_the_tables(swept):
    """A tile is shipped only after a comparison with the tables' tile, whatever the default was."""

    def swept_with_default(width, length, *also):
        key = measured.key_of(TABLES, H100.name)._replace(replaces="")
        row = measured.Row(key, (("block_n", width), ("num_stages", 2)))
        measured.replace_rows({row.key: row})
        return swept(length, 64, 96, 112, *also, default=width)

    swept_with_default(128, 2048)
    swept_with_default(128, 4096)
    assert shipped_width() == 96
    again = swept_with_default(96, 8192, 128)
    assert dict(best_rows(again)[0].values)["block_n"] == 96  # compared with itself
    assert shipped_width() == 96
    swept_with_default(64, 8192)  # a default that older tables may have had
    assert shipped_width() == TABLES.block_n == 128


@pytest.mark.parametrize("fact", [{}, {"spill_bytes": 8}, {"warnings": ["C7512"]}], ids=str)
def test_a_tile_is_shipped_only_if_it_serves_every_call(swept, tmp_path, fact):
    """A shipped tile spills nothing, serialises no product, and has as many rows as the tables'."""
    shipped = {}
    for rows in (128, 192):
        for length in (2048, 8192):
            made = swept(length, 64, 80, rows=rows)
            for own in made.rows:
                own["facts"] |= fact
                own["relative"] = 0.9 if own["values"]["block_n"] == 64 else 0.95
            lines = [json.dumps(line) + "\n" for line in (made.header, *made.rows)]
            (tmp_path / f"{length}.jsonl").write_text("".join(lines))
        shipped[rows] = [dict(row.values)["block_n"] for row in shipped_tiles.rows()]
    assert shipped == {128: [128 if fact else 64], 192: [128]}


def test_every_committed_sweep_is_one_that_the_script_makes():
    """The script makes every committed sweep, though older ones have other batches and heads."""
    made = {f"h100-{found.name}": found for found in sweep_tiles.sweeps()}
    for path in sorted(shipped_tiles.SWEEPS.glob("*.jsonl")):
        found, own = tuning.load(path), made[path.stem]
        like = {"batch": 1, "heads_q": 1, "heads_kv": 1}
        assert (own.kernel, replace(own.workload, **like)) == (
            found.kernel, replace(found.workload, **like)
        )  # fmt: skip


@pytest.mark.full
def test_every_committed_sweep_can_stand_behind_the_table(tmp_path):
    rows = shipped_tiles.rows()
    paths = sorted(shipped_tiles.SWEEPS.glob("*.jsonl"))
    assert {r.key.kernel for r in rows} == {tuning.load(path).kernel for path in paths}
    path = tmp_path / "tiles.json"
    measured.write(path, rows)
    assert measured.read(path) == rows
    tuning.use(path)
    for found in map(tuning.load, paths):
        with tuning.use(found):
            used, *_ = default_configs(found.workload, found.kernel, H100)
        faster = found.best["values"] if found.best_relative <= 1 else found.default_values
        assert _kernels.tile_of(used) == faster
    kernels = {key.kernel for key in measured.in_use()}
    assert kernels >= {"forward_sm90", "backward_sm90", "backward_pair_sm90", "forward_tf32_sm90"}

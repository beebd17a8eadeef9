"""Do pictures show what was measured? They are drawn, and read back from the drawing."""

from __future__ import annotations

import copy
import json
from collections import Counter
from pathlib import Path

import draw_pictures
import numpy as np
import pytest

from benchmarks import float8, io_grid, shapes
from cuflash import _cli, tuning
from support.simulated_sweep import DEVICE, WORK, space_of

matplotlib = pytest.importorskip("matplotlib")
from benchmarks import pictures as of_benchmarks  # noqa: E402
from benchmarks import sweep_pictures as pictures  # noqa: E402

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results"
SIMULATED = {"device": "simulated", "date": "today"}
pytestmark = pytest.mark.filterwarnings("default")  # warnings of matplotlib


@pytest.fixture
def found(tmp_path, monkeypatch):
    """Return a sweep of tiles, in which every configuration of one tile fails."""
    monkeypatch.setenv("SIMULATED_NAME", "NVIDIA H100 80GB HBM3")
    whole = space_of(block_m=(128, 192), num_q_stages=(1, 2), num_stages=(2, 3))
    wrong = {c.key: "wrong" for c in whole if c.key.startswith("128,48,")}
    monkeypatch.setenv("SIMULATED_TROUBLE", json.dumps(wrong))
    return tuning.sweep(WORK, whole, file=tmp_path / "rows.jsonl", device_command=DEVICE)


def texts(axes) -> list[str]:
    return [t.get_text() for t in axes.texts]


def reasons(whole, folder) -> list[str]:
    """Return what a heat map says in the places of tiles without a time."""
    found = tuning.sweep(WORK, whole, file=folder / "rows.jsonl", device_command=DEVICE)
    words = [" ".join(text.split()) for text in texts(pictures.heat_map(found).axes[0])]
    return [text for text in words if not text.isdigit()]


def test_a_heat_map_shows_the_best_of_each_tile_and_why_others_are_none(found):
    figure = pictures.heat_map(found)
    axes = figure.axes[0]
    (image,) = axes.images
    shown = np.ma.filled(image.get_array().astype(float), np.nan)
    columns, rows = found.header["parameters"]["block_n"], found.header["parameters"]["block_m"]
    assert shown.shape == (len(rows), len(columns))
    for (y, x), value in np.ndenumerate(shown):
        own = [
            found.tflops(row) for row in found.timed
            if (row["values"]["block_m"], row["values"]["block_n"]) == (rows[y], columns[x])
        ]  # fmt: skip
        assert np.isnan(value) if not own else value == pytest.approx(max(own))
    words = [text.replace("\n", " ") for text in texts(axes)]
    assert "wrong" in words
    assert sum(np.isnan(shown.ravel())) == sum(not text[0].isdigit() for text in words)
    numbers = [int(text.split()[0]) for text in words if text[0].isdigit()]
    assert numbers == [round(value) for value in shown[~np.isnan(shown)].tolist()]
    (legend,), final = figure.legends, found.finals[-1]
    share = min(final["ms"].values()) / final["default_ms"]
    assert f"best: {share:.3f} of the time of shipped" in legend.get_texts()[1].get_text()


def test_a_tile_that_no_memory_holds_says_so(tmp_path):
    values = {"num_stages": (4,), "num_q_stages": (2,), "overlap_quarters": (1,)}
    whole = tuning.space(WORK, "forward_sm90", arch="sm_90a", parameters=values)
    whole.hardware = space_of().hardware
    whole.compile = space_of().compile  # nothing is compiled
    whole.facts = {c.key: tuning.Facts(0) for c in whole}
    assert any("KiB of shared memory" in reason for reason in reasons(whole, tmp_path))


def test_neighbours_say_once_why_they_are_none(tmp_path):
    whole = space_of(block_m=(64, 128), num_stages=(2,))
    expected = "block_m = 64 must be 128 or 192: two or three warpgroups of 64 rows"
    assert reasons(whole, tmp_path) == [expected]


def test_a_line_of_parallel_coordinates_for_each_configuration(found):
    axes = pictures.parallel_coordinates(found).axes[0]
    long = [line for line in axes.lines if len(line.get_xdata()) > 2]
    assert len(long) == len(found.timed)
    heights = sorted(line.get_ydata()[-1] for line in long)
    assert (heights[0], heights[-1]) == (0.0, 1.0)


def test_a_roofline_marks_the_best_tile_of_each_length(found):
    longer = copy.deepcopy(found)
    longer.header["workload"] |= {"seqlen_q": 4 * WORK.seqlen_q, "seqlen_k": 4 * WORK.seqlen_k}
    levels = [{"name": "L2 read", "value": 5500.0}]
    axes = pictures.roofline([found, longer], levels).axes[0]
    circles, crosses = ([x for x in axes.lines if x.get_marker() == m and len(x.get_xdata()) == 2]
                        for m in "ox")  # fmt: skip
    ((circle,), (cross,)) = circles, crosses  # one colour: one kernel at two lengths
    best = [max(map(sweep.tflops, sweep.timed)) for sweep in (found, longer)]
    assert list(circle.get_ydata()) == list(cross.get_ydata()) == best
    assert max(best) <= 989.4
    left, right = circle.get_xdata()
    assert right == pytest.approx(4 * left, rel=0.01)  # FLOP per byte grow with the length
    with pytest.raises(ValueError, match="got no sweep"):
        pictures.roofline([])


def test_every_dtype_has_the_roof_of_its_products(found):
    half, single = copy.deepcopy(found), copy.deepcopy(found)
    single.header["workload"]["dtype"] = "float32"
    axes = pictures.roofline([half, single]).axes[0]
    assert [t.get_text() for t in axes.texts] == [
        "989 TFLOP/s, 16-bit products, data sheet",
        "165 TFLOP/s, three TF32 products for one of float32, data sheet",
    ]
    single.header["device"] = "NVIDIA A100-SXM4-80GB"
    with pytest.raises(ValueError, match="got sweeps on NVIDIA A100-SXM4-80GB, NVIDIA H100"):
        pictures.roofline([half, single])


def test_speed_has_a_panel_for_each_head_size_and_mask():
    path = sorted(RESULTS.glob("h100-forward-*.json"))[-1]
    result = json.loads(path.read_text())
    figure = of_benchmarks.speed(result)
    square = [r for r in result["rows"] if r["pass"] == "fwd" and shapes.is_training(r)]
    cells = Counter((r["head_dim"], r["causal"]) for r in square if r["impl"] == "cuflash")
    rows = [r for r in square if cells[r["head_dim"], r["causal"]] > 1]
    head_dims, masks = ({r[name] for r in rows} for name in ("head_dim", "causal"))
    assert len(figure.axes) == len(head_dims) * len(masks) >= 2
    drawn = sum(len(line.get_xdata()) for axes in figure.axes for line in axes.lines)
    assert drawn == len(rows)
    assert not any(row.get("seqlens") for row in rows)  # no packed sequences are drawn
    with pytest.raises(ValueError, match="no row with bytes"):
        of_benchmarks.memory(result)


def lines_of_memory(sizes):
    """Return the lines of a picture of two lengths, with the bytes given at the first length."""
    rows = [
        {"impl": impl, "pass": "fwd", "bytes": size * n, "head_dim": 128, "causal": False,
         "seqlen_q": 1024 * n, "dtype": "bfloat16"}
        for impl, size in sizes.items()
        for n in (1, 2)
    ]  # fmt: skip
    (axes,) = of_benchmarks.memory({"meta": SIMULATED, "rows": [], "memory": rows}).axes
    return axes.lines


def test_memory_is_drawn_for_every_implementation():
    lines = lines_of_memory({"cuflash": 1024, "naive": 4096})
    assert [list(line.get_ydata()) for line in lines] == [[1024, 2048], [4096, 8192]]


def test_levels_of_memory_that_are_one_share_a_line_and_its_name():
    lines = lines_of_memory({"cuflash": 1000, "cudnn": 1001, "fa2": 1300, "fa4": 1003})
    assert [list(line.get_ydata()) for line in lines] == [[1000, 2000], [1300, 2600]]
    (legend,) = lines[0].figure.legends
    named = [text.get_text() for text in legend.get_texts()]
    assert named == ["cuflash, cuDNN (torch), FlashAttention-4", "FlashAttention-2 (torch)"]


def test_pictures_of_the_method_show_the_committed_counts():
    figures = draw_pictures.figures()
    traffic, intensity, memory = figures["costs"].axes[1:]
    marks = {axes: [line for line in axes.lines if line.get_marker() != "None"]
             for axes in (traffic, intensity, memory)}  # fmt: skip
    (moved,), (per_byte,) = marks[traffic], marks[intensity]
    flop = 4 * 16 * 128 * np.square(moved.get_xdata(), dtype=float)
    np.testing.assert_allclose(per_byte.get_ydata(), flop / moved.get_ydata())
    unfused, ours = (line.get_ydata()[-1] for line in marks[memory])
    assert unfused > 50 * ours  # at 16,384 positions
    (ends,) = (text.get_text() for text in memory.texts if "24 GB" in text.get_text())
    assert ends == "24 GB: unfused ends at 10,990"


def test_errors_of_8_bits_are_drawn_by_method():
    axes = draw_pictures.figures()["float8"].axes[0]
    by_family = {line.get_label(): line.get_xdata() for line in axes.lines}
    methods = [text.get_text() for text in axes.get_yticklabels()]
    assert methods == list(float8.METHODS)
    assert len(by_family) == 5
    normal, outliers = by_family["normal"], by_family["outliers"]
    assert normal[0] < normal[1] / 10  # bfloat16, 8 bits
    assert outliers[2] < outliers[1] / 1.2  # rotated, not rotated
    assert by_family["uniform"][5] > 5 * by_family["uniform"][3]  # one sum in tensor cores, two


def test_movement_shows_the_model_and_the_counters(monkeypatch):
    monkeypatch.setattr(io_grid, "present", lambda: None)
    rows = io_grid.rows()
    for row in rows:
        row["measured"] = {"L2 to processors": row["loaded"], "device memory read": row["stored"]}
    result = {"meta": SIMULATED, "rows": rows}
    axes = of_benchmarks.movement(result).axes[0]
    lines = {line.get_label(): line for line in axes.lines}
    assert list(lines["q, k and v once"].get_xdata()) == list(io_grid.SEQLENS)
    crosses = [line for line in axes.lines if line.get_marker() == "x" and len(line.get_xdata())]
    assert len(crosses) == len(io_grid.configs(io_grid.typical("sm_90")))


@pytest.mark.parametrize("kind", ["heatmap", "parallel", "roofline"])
def test_files_are_the_same_every_time_also_by_a_cache_of_kernel_tuner(
    found, tmp_path, capsys, kind
):
    source = tmp_path / "rows.jsonl"
    assert _cli.main(["plot", kind, str(source), "--json"]) == 0
    files = [Path(name) for name in json.loads(capsys.readouterr().out)]
    assert [path.name for path in files] == [f"rows-{kind}.png", f"rows-{kind}.svg"]
    assert files[0].read_bytes().startswith(b"\x89PNG")
    tuning.write_cache(found, tmp_path / "cache.json")
    rows = source.rename(tmp_path / "rows.json")  # rows in lines, whatever the name
    for again in (rows, tmp_path / "cache.json"):
        assert _cli.main(["plot", kind, str(again), "--out", str(tmp_path / "again")]) == 0
        for path in files:
            assert (tmp_path / f"again{path.suffix}").read_bytes() == path.read_bytes()


def test_a_cache_of_another_kernel_is_named(tmp_path, capsys):
    cache = tmp_path / "cache.json"
    content = {
        "device_name": "NVIDIA H100 80GB HBM3", "kernel_name": "add", "tune_params_keys": ["n"],
        "tune_params": {"n": [1]}, "cache": {"1": {"n": 1, "time": 2.0}},
    }  # fmt: skip
    cache.write_text(json.dumps(content))
    assert tuning.read_cache(cache).best["key"] == "1"
    for kind in ("parallel", "roofline"):
        assert _cli.main(["plot", kind, str(cache)]) == 2
        told = "got times of add, of which no problem is known, expected a sweep of a kernel of"
        assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["heatmap", "none.jsonl"], "none.jsonl"),
        (
            ["heatmap", "rows.jsonl", "--across", "colour"],
            "heat map: got 'colour', expected one of",
        ),
        (["heatmap", "rows.jsonl", "--along", "block_n"], "got block_n both across and along"),
        (["speed", "rows.jsonl"], "got no JSON, expected a result of bench"),
        (["parallel", "rows.jsonl", "rows.jsonl"], "files: got 2, expected one for parallel"),
    ],
)
def test_wrong_arguments_are_named(found, tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.chdir(tmp_path)
    assert _cli.main(["plot", *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.full
def test_committed_pictures_are_drawn_from_committed_results(tmp_path):
    """tools/draw_pictures.py repeats the committed bytes, where matplotlib is the same version."""
    committed = {path.name: path for path in draw_pictures.PICTURES.glob("*.svg")}
    draw_pictures.draw(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(committed)
    made_by = f"Matplotlib v{matplotlib.__version__},"
    for name, path in committed.items():
        if made_by not in path.read_text(encoding="utf-8"):
            pytest.skip(f"{name} was drawn by another matplotlib than {made_by}")
        assert (tmp_path / name).read_bytes() == path.read_bytes(), name

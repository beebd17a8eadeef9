"""Does one run measure every shape of few queries and many keys, in pages and of any lengths?"""

from __future__ import annotations

from dataclasses import replace

import gpu_evidence
import numpy as np
import pytest

from benchmarks import cells, decode, host_clock, peers, report
from benchmarks.machine import META_KEYS
from cuflash.tuning import Workload


def small(work: Workload) -> Workload:
    """Return the same call with fewer entries, keys and features."""
    batch, queries, d = min(work.batch, 3), min(work.seqlen_q, 4), work.head_dim // 16
    return replace(work, batch=batch, seqlen_q=queries, seqlen_k=256, head_dim=d, head_dim_v=d)


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> cells.Run:
    """Return a run of the set on NumPy arrays, each shape made small."""
    replaced = {"COPIED_BYTES": 1 << 20, "SHAPES": [*map(small, decode.SHAPES[:4])]}
    replaced["PAGED"] = [(small(work), sizes) for work, sizes in decode.PAGED]
    for name, value in replaced.items():
        monkeypatch.setattr(decode, name, value)
    for name in ("RAGGED", "PACKED"):
        monkeypatch.setattr(decode, name, small(getattr(decode, name)))
    chosen = [peers.IMPLEMENTATIONS[name] for name in ("cuflash", "naive")]
    run = cells.Run(np, host_clock.HostClock(), chosen, ["float32"], ["fwd"], 0.1)
    decode.measure_decode(run)
    return run


def test_every_way_that_keys_lie_is_a_row_beside_a_copy(found: cells.Run) -> None:
    ways = {row["options"] for row in found.rows}
    pages = {f"pages of {size}" for size in (1, 16, 64, 256)}
    ragged = {f"{lie}, 17 to 256 keys" for lie in ("in order", "pages of 16", "packed")}
    assert ways == {"", "in order"} | pages | ragged
    assert not any("differs" in note or "Error" in note for note in found.notes), found.notes
    for row in found.rows:
        shape, lie = report.shape_text(row), row["options"]
        own = [note for note in found.notes if note.endswith(f"{shape}, {lie}" if lie else shape)]
        assert any(" of a copy's " in note for note in own)
        in_order = not lie or lie.startswith("in order")
        assert in_order or any(" of the speed of keys in order: " in note for note in own)
    text = report.markdown({"meta": dict.fromkeys(META_KEYS), "rows": found.rows})
    assert "## fwd, float32: microseconds\n" in text  # lengths differ, so that there are no TFLOP/s
    assert "waiting" not in text


def test_a_share_counts_the_bytes_of_keys_that_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A share is what is computed by hand, on a clock where a call takes as long as the copy."""
    work = Workload(2, 4, 2, 1, 1008, 32, 32, "float16")
    own = {"SHAPES": [], "PAGED": [], "KEYS_OF_8_BITS": [work], "RAGGED": work, "PACKED": work}
    for name, value in {"COPIED_BYTES": 1 << 20, **own}.items():
        monkeypatch.setattr(decode, name, value)
    monkeypatch.setattr(decode, "lengths_up_to", lambda *_: (600, 100))
    clock = host_clock.HostClock()
    monkeypatch.setattr(clock, "once", lambda call: (call(), 2.0)[1])
    run = cells.Run(np, clock, [], ["float16"], ["fwd"], 0.1)
    decode.measure_decode(run)
    lies = {f"{lie}, 100 to 600 keys": 700 for lie in ("in order", "pages of 16", "packed")}
    for lie, keys in (lies | {decode.WIDENED: 2016, decode.SHOWN_8_BITS: 1008}).items():
        moved = 2 * (2 * 4 * 64 + keys * 2 * 64)  # rows of q and out, and keys of two heads
        share = f"{moved / (2 << 20):.2f} of a copy's 0.00 TB/s: float16 b2 h4/2 1x1008 d32 full"
        assert f"{share}, {lie}" in run.notes
    assert (
        len([note for note in run.notes if note.startswith("1.00 of the speed of keys in ")]) == 3
    )
    (row,) = decode.of_8_bits({"rows": run.rows}).splitlines()[2:]
    assert row.startswith("| 2, 4, 2 | 1 | 1,008 | 32 | ")


def test_one_part_of_the_evidence_has_every_bar() -> None:
    assert "--set decode" in gpu_evidence.PARTS["decode"][1]
    assert {"cuflash", "fa2", "cudnn", "fa4"} == set(gpu_evidence.PEERS.split(","))
    bars = {(1, 8, 8, 512, 50_000, 64), (1, 8, 8, 77, 4096, 64), (1, 8, 8, 1, 512, 64)}
    generated = ((16, 32, 8, 1, 8192), (64, 32, 8, 1, 4096), (1, 32, 32, 1, 65_536),
                 (1, 32, 8, 1, 131_072), (1, 32, 8, 4, 131_072))  # fmt: skip
    bars |= {(*shape, d) for shape in generated for d in (64, 128, 256)}
    names = ("batch", "heads_q", "heads_kv", "seqlen_q", "seqlen_k", "head_dim")
    in_order, in_pages = (
        {tuple(getattr(work, name) for name in names) for work in works}
        for works in (decode.SHAPES, [work for work, sizes in decode.PAGED if 16 in sizes])
    )
    assert in_order == bars
    assert {(*shape, 128) for shape in generated} | {(1, 8, 8, 1, 512, 64)} <= in_pages


def test_pages_of_which_keys_are_no_multiple_are_left_out() -> None:
    work = Workload(1, 2, 2, 1, 100, 8, 8, "float32")
    run = cells.Run(np, host_clock.HostClock(), [], ["float32"], ["fwd"], 0.1)
    among = [decode.InOrder(), decode.InPages(16)]
    assert set(cells.time_cell(run, work, "fwd", among)) == {"in order"}
    assert any("100 keys are no whole pages of 16" in note for note in run.notes)

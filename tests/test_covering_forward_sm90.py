"""Do all options compose, two at a time, in those forwards of Hopper that support both?

The portable forward of keys of 8 bits is one of these kernels, too.

Every two levels of `support.covering_sm90` that one of these kernels supports are in a row.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from cuflash._errors import NoKernel
from support import covering_sm90
from support.covering_sm90 import levels_of, pairs, steps_of

pytest.importorskip("cupy", reason="CuPy is not installed")

from support.portable import planned_kernels

#: Pairs that the test of pairs reports as missing belong in a row here.
ROWS = {
    "forward_sm90": (
        "bfloat16, many keys, window, offset of each entry, q_lengths, negative scale",
        "16 80, packed, causal, offset, grouped, mask, slopes, softcap, sink, dropout, "
        "segments, sequence outside heads, no lse",
        "bfloat16, 128, many entries, float32 out, left window, shared keys, bias of keys, "
        "sink, kv_lengths, sequence outside heads",
        "128, full blocks, pages of 16, shared keys, mask of each head, slopes, softcap, "
        "dropout, segments, q_lengths, kv_lengths, negative scale, no lse",
        "256, few queries, float32 out, causal, offset, grouped, bias of keys, q_lengths, "
        "negative scale, no lse",
        "bfloat16, 192 128, few queries, packed, left window, offset of each entry, mask, "
        "slopes, softcap, sink, dropout, q_lengths, kv_lengths",
        "bfloat16, 16 80, many entries, pages of 128, offset of each entry, "
        "mask of each head, dropout, segments, negative scale, sequence outside heads, no lse",
        "many keys, pages of 128, window, offset, grouped, mask of each head, slopes, "
        "softcap, sink, dropout, segments, kv_lengths, sequence outside heads",
        "bfloat16, 192 128, full blocks, offset, grouped, bias, sequence outside heads",
        "bfloat16, 256, pages of 16, float32 out, window, offset of each entry, shared keys, "
        "slopes, sink, sequence outside heads",
        "16 80, packed, float32 out, left window, mask of each head, q_lengths, kv_lengths, "
        "negative scale",
        "many keys, pages of 128, float32 out, shared keys, mask, q_lengths, negative scale, "
        "sequence outside heads, no lse",
        "16 80, many entries, float32 out, causal, offset of each entry, shared keys, bias, "
        "sink, q_lengths, kv_lengths, negative scale, no lse",
        "bfloat16, many entries, pages of 16, left window, offset, grouped, slopes, softcap, "
        "sink, segments, negative scale, no lse",
        "192 128, few queries, window, shared keys, mask of each head, softcap, sink, "
        "dropout, segments, negative scale, no lse",
        "bfloat16, 128, full blocks, pages of 128, causal, offset of each entry, mask, "
        "slopes, softcap, sink, segments, q_lengths, negative scale",
        "bfloat16, 256, full blocks, packed, float32 out, offset, shared keys, sink, "
        "dropout, kv_lengths, negative scale",
        "256, many keys, causal, bias, kv_lengths, negative scale, no lse",
        "bfloat16, 128, many entries, packed, window, grouped, mask, slopes, softcap, "
        "dropout, negative scale, sequence outside heads",
        "offset, bias of keys, kv_lengths, sequence outside heads, no lse",
        "16 80, full blocks, float32 out, window, offset of each entry, grouped, "
        "bias of keys, q_lengths, no lse",
        "16 80, many keys, pages of 16, float32 out, left window, offset of each entry, "
        "mask, sink, no lse",
        "bfloat16, 128, pages of 128, float32 out, left window, offset, shared keys, "
        "softcap, sink, q_lengths, negative scale, no lse",
        "few queries, packed, causal, offset of each entry, shared keys, mask of each head, "
        "dropout, segments, kv_lengths, sequence outside heads",
        "full blocks, left window, offset of each entry, grouped, bias, kv_lengths, "
        "negative scale, no lse",
        "bfloat16, 256, many entries, float32 out, left window, offset of each entry, "
        "grouped, sink, segments, q_lengths, negative scale",
        "192 128, many keys, causal, bias of keys, q_lengths, kv_lengths, negative scale, "
        "sequence outside heads, no lse",
        "128, few queries, offset of each entry, mask, slopes, q_lengths, no lse",
        "192 128, many entries, pages of 16, causal, offset of each entry, shared keys, softcap",
        "bfloat16, 128, many keys, window, shared keys, bias, negative scale",
        "16 80, few queries, causal, offset, bias, q_lengths, kv_lengths, sequence outside heads",
        "192 128, pages of 128, window, offset, shared keys, sink",
        "256, pages of 128, float32 out, causal, offset of each entry, shared keys, softcap, "
        "negative scale, sequence outside heads",
        "256, few queries, float32 out, window, offset of each entry, mask of each head, "
        "q_lengths, kv_lengths, sequence outside heads, no lse",
        "bfloat16, float32 out, window, offset, grouped, bias, sink, q_lengths, kv_lengths, "
        "negative scale, no lse",
        "many keys, packed, causal, offset of each entry, shared keys, mask of each head, "
        "dropout, segments, q_lengths, kv_lengths, negative scale, sequence outside heads",
        "bfloat16, 256, full blocks, float32 out, window, mask, sink, negative scale",
        # Results in float32 beside other options that need registers.
        "192 128, full blocks, float32 out, causal, grouped, softcap, kv_lengths",
        "bfloat16, 128, full blocks, float32 out, window, softcap, dropout, q_lengths",
        "many entries, packed, float32 out, causal, shared keys, segments, dropout, sink",
        # Tiles of 192 rows.
        "many entries, left window, offset of each entry, grouped, sink, sequence outside heads",
        "bfloat16, many entries, window, offset, shared keys, kv_lengths, no lse",
        "many entries, packed, causal, sink, q_lengths, kv_lengths, sequence outside heads",
        "bfloat16, many entries, pages of 128, causal, offset of each entry, grouped, q_lengths",
        "128, many entries, window, shared keys, q_lengths, kv_lengths, no lse",
        "bfloat16, many entries, softcap, grouped, sequence outside heads",
        # A mask or a bias comes through shared memory.
        "full blocks, window, grouped, mask of each head, sink, q_lengths, kv_lengths",
        "bfloat16, 128, full blocks, causal, offset of each entry, shared keys, mask, no lse",
        "bfloat16, 128, full blocks, causal, offset, grouped, bias, sink, q_lengths, kv_lengths",
        # A tile has rows of several heads.
        "few queries, causal, offset of each entry, grouped, kv_lengths, negative scale",
        "bfloat16, 192 128, few queries, window, shared keys, no lse",
        "256, few queries, left window, offset, grouped",
    ),
    "forward_tf32_sm90": (
        "tf32, full blocks, packed, window, segments, kv_lengths, negative scale",
        "128, few queries, left window, offset of each entry, grouped, bias of keys, "
        "softcap, sink, q_lengths, sequence outside heads, no lse",
        "tf32, 40 100, packed, offset, shared keys, bias, slopes, q_lengths, "
        "sequence outside heads",
        "many keys, causal, offset, shared keys, mask of each head, sink, dropout, "
        "q_lengths, kv_lengths, negative scale, no lse",
        "40 100, full blocks, offset of each entry, mask, sink, dropout, negative scale, "
        "sequence outside heads",
        "tf32, 128, packed, left window, grouped, mask, dropout, kv_lengths, no lse",
        "tf32, 40 100, few queries, packed, causal, offset of each entry, shared keys, "
        "mask of each head, softcap, kv_lengths, negative scale",
        "many keys, window, grouped, bias, slopes, sequence outside heads, no lse",
        "tf32, 40 100, full blocks, packed, causal, bias of keys, slopes, sink, q_lengths, "
        "kv_lengths, no lse",
        "128, many keys, packed, window, offset, shared keys, mask, bias of keys, negative scale",
        "tf32, 128, mask of each head, bias, sink, kv_lengths, negative scale, "
        "sequence outside heads, no lse",
        "causal, offset of each entry, grouped, sink, segments, q_lengths, sequence outside heads",
        "40 100, full blocks, left window, offset, grouped, mask of each head, slopes, "
        "negative scale, sequence outside heads",
        "few queries, packed, offset, mask, softcap, sink, q_lengths, kv_lengths, "
        "negative scale, no lse",
        "tf32, 40 100, few queries, packed, window, shared keys, slopes, sink, dropout, q_lengths",
        "tf32, many keys, left window, offset of each entry, bias, softcap, sink, no lse",
        "tf32, 128, full blocks, packed, window, offset of each entry, shared keys, slopes, "
        "softcap, sink, negative scale, sequence outside heads, no lse",
        "tf32, many keys, offset, shared keys, segments, negative scale, "
        "sequence outside heads, no lse",
        "packed, grouped, bias of keys, softcap, sink, q_lengths, sequence outside heads, no lse",
        "tf32, 128, full blocks, causal, offset of each entry, shared keys, mask, bias, "
        "sink, kv_lengths, negative scale, no lse",
        "tf32, packed, window, shared keys, mask of each head, bias of keys, kv_lengths, "
        "sequence outside heads, no lse",
        "tf32, few queries, left window, offset, shared keys, segments, no lse",
        "few queries, left window, offset of each entry, grouped, bias, sink, dropout, "
        "q_lengths, kv_lengths, negative scale, sequence outside heads",
        "tf32, 40 100, many keys, packed, window, offset, shared keys, mask, slopes, sink, "
        "kv_lengths, negative scale, sequence outside heads",
        "tf32, 40 100, few queries, packed, window, shared keys, softcap, dropout, "
        "kv_lengths, negative scale, sequence outside heads",
        "packed, offset, grouped, bias of keys, sink, dropout, q_lengths",
    ),
    "forward_fp8_sm90": (
        "full blocks, packed, window, shared keys, sink, float16 out",
        "factors of each head, causal, offset of each entry, q_lengths, kv_lengths, "
        "sequence outside heads, no lse, float16 out",
        "64, few queries, offset, grouped, sequence outside heads, float16 out",
        "few queries, packed, factors of each head, left window, offset, shared keys, sink, "
        "q_lengths, kv_lengths, no lse, float16 out",
        "full blocks, factors of each head, grouped, q_lengths, kv_lengths, no lse",
        "packed, left window, offset of each entry, sink, sequence outside heads, no lse",
        "64, factors of each head, causal",
        "full blocks, window, offset of each entry, shared keys, q_lengths, kv_lengths, "
        "sequence outside heads",
        "packed, offset of each entry, grouped, sink, q_lengths",
        "few queries, packed, factors of each head, window, offset, kv_lengths, "
        "sequence outside heads, no lse",
        "64, full blocks, causal, offset, shared keys, no lse",
        "full blocks, factors of each head, left window, grouped, q_lengths, kv_lengths, "
        "sequence outside heads",
        "few queries, factors of each head, causal, grouped, sink, q_lengths, kv_lengths, no lse",
        "window, offset, grouped, q_lengths, kv_lengths, no lse",
        "64, few queries, offset of each entry, sequence outside heads, no lse",
        "many keys, packed, factors of each head, causal, offset, sink, kv_lengths, no lse",
        "shared keys, q_lengths",
        "full blocks, packed, factors of each head, sink, q_lengths, kv_lengths, "
        "sequence outside heads",
    ),
    "forward_sm80": (
        "40 200, pages of 128, left window, grouped, mask of each head, dropout, kv_lengths, "
        "negative scale, sequence outside heads",
        "bfloat16, few queries on many keys, factors of each head, offset of each entry, bias, "
        "slopes, softcap, sink, segments, q_lengths, kv_lengths, no lse",
        "128, pages of 16, factors of each head, window, offset, shared keys, mask, "
        "bias of keys, slopes, sink, dropout, segments",
        "bfloat16, 128, few queries on many keys, pages of 16, causal, offset, shared keys, "
        "mask of each head, bias of keys, softcap, q_lengths, negative scale, "
        "sequence outside heads, no lse",
        "causal, offset of each entry, bias, slopes, dropout, negative scale, "
        "sequence outside heads",
        "bfloat16, 40 200, few queries on many keys, pages of 128, factors of each head, "
        "left window, grouped, mask, slopes, softcap, sink, segments, q_lengths, no lse",
        "bfloat16, pages of 16, window, mask, bias, sink, dropout, segments, q_lengths, "
        "kv_lengths, negative scale, sequence outside heads, no lse",
        "128, factors of each head, shared keys, softcap, kv_lengths, sequence outside heads",
        "bfloat16, 40 200, few queries on many keys, factors of each head, window, "
        "offset of each entry, grouped, mask of each head, bias of keys, softcap, dropout, "
        "kv_lengths, negative scale",
        "40 200, few queries on many keys, pages of 128, offset, mask of each head, bias, "
        "slopes, sink, dropout, segments, kv_lengths, no lse",
        "pages of 128, factors of each head, causal, offset, grouped, sink, q_lengths, "
        "kv_lengths, sequence outside heads",
        "128, few queries on many keys, pages of 16, offset of each entry, grouped, mask, "
        "slopes, dropout, q_lengths, negative scale, no lse",
        "bfloat16, few queries on many keys, pages of 128, left window, offset of each entry, "
        "shared keys, bias of keys, slopes, segments, no lse",
        "40 200, pages of 16, factors of each head, causal, shared keys, bias of keys, "
        "softcap, sink, segments, kv_lengths, negative scale, no lse",
        "128, few queries on many keys, left window, offset, mask, bias, slopes, softcap, "
        "dropout, segments, kv_lengths, sequence outside heads",
        "bfloat16, 128, few queries on many keys, pages of 128, factors of each head, window, "
        "offset of each entry, sink",
        "bfloat16, few queries on many keys, pages of 16, left window, offset of each entry, "
        "shared keys, mask of each head, bias, softcap, dropout, sequence outside heads",
        "bfloat16, 40 200, few queries on many keys, factors of each head, mask, bias of keys, "
        "slopes, softcap, sink, q_lengths, sequence outside heads, no lse",
        "bfloat16, 128, few queries on many keys, factors of each head, causal, "
        "offset of each entry, grouped, mask, bias, softcap, sink, dropout, kv_lengths, "
        "no lse",
    ),
}
CASES = [
    pytest.param(kernel, row, id=f"{kernel}-{number}")
    for kernel, rows in ROWS.items()
    for number, row in enumerate(rows)
]


def chosen(kernel: str, row: str) -> Any:
    """Return the forward that Hopper chooses for a row, or None."""
    try:
        steps = steps_of(kernel, levels_of(kernel, row))
    except NoKernel:  # operands of 8 bits are dequantised
        return None
    return next(step.config for step in steps if step.config.computes == "out")


def serves(kernel: str, row: str) -> bool:
    config = chosen(kernel, row)
    return config is not None and config.kernel == kernel


@pytest.mark.parametrize("kernel", ROWS)
def test_every_pair_that_is_served_is_in_a_row(kernel: str) -> None:
    rows = [set(levels_of(kernel, row).values()) for row in ROWS[kernel]]
    missing = {pair for pair in pairs(kernel) if not any(row.issuperset(pair) for row in rows)}
    assert [pair for pair in sorted(missing) if serves(kernel, ", ".join(pair))] == []


@pytest.mark.parametrize(("kernel", "row"), CASES)
def test_the_kernel_of_a_row_is_chosen(kernel: str, row: str) -> None:
    assert serves(kernel, row)


def test_rows_have_every_kind_of_tile() -> None:
    """Rows have tiles of both heights, split keys, pages, and several heads in a tile."""
    configs = [chosen("forward_sm90", row) for row in ROWS["forward_sm90"]]
    found = Counter(config.block_m for config in configs)
    assert min(found[128], found[192]) >= 4
    for field in ("split_keys", "paged", "bias_stages", "mask_stages", "heads_in_rows"):
        assert sum(bool(getattr(config, field)) for config in configs) >= 2, field
    of_float32 = [chosen("forward_tf32_sm90", row) for row in ROWS["forward_tf32_sm90"]]
    assert sum(config.split_keys for config in of_float32) >= 3


def test_a_result_of_8_bits_may_be_float16() -> None:
    """A result of 8-bit operands may be float16, as docs/float8.md says and as on NumPy arrays."""
    levels = levels_of("forward_fp8_sm90", "") | {"result": "float16 out"}
    assert steps_of("forward_fp8_sm90", levels)[0].config.out_dtype == "float16"


@pytest.mark.gpu
@pytest.mark.parametrize(("kernel", "row"), CASES)
def test_options_compose(kernel: str, row: str) -> None:
    """The row is right in the kernel planned for an H100, whose choice of split keys is kept."""
    import cupy

    if cupy.cuda.Device().compute_capability != "90":
        pytest.skip("the device has no wgmma")
    with planned_kernels() as configs:
        covering_sm90.check_on_a_gpu(cupy, kernel, levels_of(kernel, row))
    (config,) = [config for config in configs if config.computes == "out"]
    planned = chosen(kernel, row)
    assert (config.kernel, config.head_dim, getattr(config, "split_keys", False)) == (
        kernel, planned.head_dim, getattr(planned, "split_keys", False),
    )  # fmt: skip

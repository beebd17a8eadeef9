"""Does attention over pages equal attention over the same keys in order?"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ml_dtypes import bfloat16

import cuflash
from cuflash import reference
from cuflash.testing._budget import Budget
from support.problems import Call

HEADS, HEADS_KV = 4, 2


class Paged:
    """A drawn call: pages in any order, some of them shared, and the same keys in order."""

    def __init__(
        self, seed: int, size: int, columns: int, rows: int, dtype: Any, d: int = 6
    ) -> None:
        rng = self.rng = np.random.default_rng(seed)
        self.size, self.columns, self.sequences = size, columns, 3
        pages = 2 * columns + 1
        self.q = rng.standard_normal((self.sequences, HEADS, rows, d)).astype(dtype)
        self.k_pages = rng.standard_normal((pages, HEADS_KV, size, d)).astype(dtype)
        self.v_pages = rng.standard_normal((pages, HEADS_KV, size, d - 1)).astype(dtype)
        self.table = rng.integers(0, pages, (self.sequences, columns)).astype(np.int32)
        # The CPU path makes one call of neighbouring sequences with equal lengths.
        kinds = rng.integers(0, columns * size + 1, self.sequences)
        self.lengths = kinds[rng.integers(0, 2, self.sequences)]

    def in_order(self, pages: np.ndarray) -> np.ndarray:
        """Return the keys of each sequence, page by page."""
        each = [np.concatenate([*pages[row]], axis=-2) for row in self.table]
        return np.stack(each)

    def contiguous(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return self.q, self.in_order(self.k_pages), self.in_order(self.v_pages)

    def arrays(self) -> tuple[np.ndarray, ...]:
        return self.q, self.k_pages, self.v_pages, self.table, self.lengths

    def options(self, kind: str) -> dict[str, Any]:
        rows, keys = self.q.shape[2], self.columns * self.size
        rng = self.rng
        every = {
            "causal": True,
            "window": (11, 2),
            "softcap": 3.0,
            "sink": rng.standard_normal(HEADS),
            "bias": rng.standard_normal((self.sequences, 1, rows, keys)),
            "mask": rng.random((1, HEADS, rows, keys)) > 0.2,
            "alibi_slopes": rng.random((self.sequences, HEADS)),
            "segment_ids": (rng.integers(0, 2, (3, 1, rows)), rng.integers(0, 2, keys)),
            "q_lengths": rng.integers(0, rows + 1, (3, 1)),
            "dropout": 0.2,
            "seed": 5,
            "score_mod": cuflash.ScoreMod(
                "score - b - h",
                grad="1",
                host=lambda score, b, h, q, k: score - b - h,
                host_grad=lambda score, b, h, q, k: np.ones_like(score),
            ),
        }
        chosen = {"none": (), "causal": ("causal",), "every": tuple(every)}.get(kind, (kind,))
        return (
            {"enable_gqa": True}
            | {name: every[name] for name in chosen}
            | ({"seed": 5} if "dropout" in chosen else {})
        )


KINDS = [
    "none", "causal", "window", "sink", "bias", "mask", "alibi_slopes", "segment_ids", "q_lengths",
    "dropout", "score_mod", "every",
]  # fmt: skip
drawn = st.builds(
    Paged,
    st.integers(0, 2**32 - 1),
    st.sampled_from([1, 2, 3, 16, 50]) | st.integers(1, 256),
    st.integers(1, 4),
    st.sampled_from([1, 2, 7]),
    st.sampled_from([np.float16, bfloat16, np.float32, np.float64]),
)


@pytest.mark.parametrize("kind", KINDS)
@given(call=drawn)
def test_pages_change_no_bit(kind: str, call: Paged) -> None:
    options = call.options(kind)
    found = cuflash.attention_paged(*call.arrays(), return_lse=True, **options)
    lengths = call.lengths[:, None]
    expected = cuflash.attention(*call.contiguous(), kv_lengths=lengths, return_lse=True, **options)
    np.testing.assert_array_equal(found.out, expected.out)
    np.testing.assert_array_equal(found.lse, expected.lse)
    assert found.out.dtype == call.q.dtype


@pytest.mark.parametrize("empty", [{"d_v": 0}, {"heads": 0}, {"sequences": 0}, {"rows": 0}])
def test_extents_of_0(empty: dict[str, int]) -> None:
    extents = {"d_v": 5, "heads": 2, "sequences": 3, "rows": 2} | empty
    d_v, heads, sequences, rows = extents.values()
    table = np.zeros((sequences, 2), int)
    arrays = (np.ones((sequences, heads, rows, 6)), np.ones((4, heads, 8, 6)),
              np.ones((4, heads, 8, d_v)), table, np.full(sequences, 9))  # fmt: skip
    for attention in (cuflash.attention_paged, reference.attention_paged):
        out = attention(*arrays)
        assert out.shape == (sequences, heads, rows, d_v)


@pytest.mark.parametrize("kind", ["causal", "every"])
def test_long_sequences_change_no_bit(kind: str) -> None:
    """Long sequences change no bit, although the CPU path copies only what lengths need."""
    call = Paged(1, 100, 130, 3, np.float32)
    call.lengths[:] = 12, 4097, 13000
    options = call.options(kind)
    found = cuflash.attention_paged(*call.arrays(), **options)
    lengths = call.lengths[:, None]
    expected = cuflash.attention(*call.contiguous(), kv_lengths=lengths, **options)
    np.testing.assert_array_equal(found, expected)


@given(call=drawn, kind=st.sampled_from(KINDS))
def test_results_are_within_the_budget(call: Paged, kind: str) -> None:
    options = call.options(kind)
    found = cuflash.attention_paged(*call.arrays(), return_lse=True, **options)
    q, k, v = call.contiguous()
    own = options | {"kv_lengths": call.lengths[:, None]}
    dout = np.zeros((*q.shape[:-1], v.shape[-1]), q.dtype)
    Budget(Call(q, k, v, dout, options=own)).check_forward(*found)


@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_puts_pages_in_order(kind: str) -> None:
    call = Paged(3, 5, 3, 4, np.float64)
    options = call.options(kind)
    out, lse = reference.attention_paged(*call.arrays(), return_lse=True, **options)
    expected = reference.attention(
        *call.contiguous(), kv_lengths=call.lengths[:, None], return_lse=True, **options
    )
    np.testing.assert_array_equal(out, expected.out)
    np.testing.assert_array_equal(lse, expected.lse)


def test_the_last_query_sees_the_last_key() -> None:
    """Two sequences of 3 and 1 keys in pages of 2, with equal scores, give the means by hand."""
    q = np.zeros((2, 1, 2, 1))
    v_pages = np.array([[[[1.0], [2.0]]], [[[10.0], [99.0]]], [[[5.0], [99.0]]]])
    out = cuflash.attention_paged(
        q, np.zeros_like(v_pages), v_pages, np.array([[0, 1], [2, 0]]), [3, 1], causal=True
    )
    # Rows of sequence 0 see keys 0..1 and 0..2. Rows of sequence 1 see nothing, and key 0.
    np.testing.assert_allclose(out[..., 0], [[[1.5, 13 / 3]], [[0, 5]]])


@given(call=drawn)
def test_other_axes_are_the_same_call(call: Paged) -> None:
    """(sequences, m, heads, d) and pages (pages, page_size, heads, d) give the same results."""
    q, k_pages, v_pages, *rest = call.arrays()
    turned = [np.ascontiguousarray(a.swapaxes(1, 2)) for a in (q, k_pages, v_pages)]
    axes = [(-3, -1)] * 4
    options = {"causal": True, "enable_gqa": True}
    found = cuflash.attention_paged(*turned, *rest, axes=axes, **options)
    expected = cuflash.attention_paged(*call.arrays(), **options)
    np.testing.assert_array_equal(found.swapaxes(1, 2), expected)
    definition = reference.attention_paged(*turned, *rest, axes=axes, **options)
    assert definition.shape == found.shape
    axes = [*axes[:3], (0, 2)]  # out is (m, sequences, d_v, heads)
    found = cuflash.attention_paged(*turned, *rest, axes=axes, **options)
    np.testing.assert_array_equal(found.transpose(1, 3, 0, 2), expected)


@given(call=drawn)
def test_what_lies_beyond_the_lengths_changes_no_bit(call: Paged) -> None:
    """Unused rows of NaN, and page numbers beyond the lengths that do not exist, change no bit."""
    expected = cuflash.attention_paged(*call.arrays(), enable_gqa=True, causal=True)
    used = np.zeros((len(call.k_pages), call.size), bool)
    for row, length in zip(call.table, call.lengths, strict=True):
        for n in range(length):
            used[row[n // call.size], n % call.size] = True
        row[-(-length // call.size) :] = -7
    for pages in (call.k_pages, call.v_pages):
        pages.swapaxes(1, 2)[~used] = np.nan
    for array in call.arrays():
        array.flags.writeable = False
    found = cuflash.attention_paged(*call.arrays(), enable_gqa=True, causal=True)
    np.testing.assert_array_equal(found, expected)


def test_results_are_written_where_they_are_to_go() -> None:
    call = Paged(5, 4, 3, 2, np.float16)
    out = np.empty((3, HEADS, 2, 5), np.float32), np.empty((3, HEADS, 2), np.float32)
    found = cuflash.attention_paged(*call.arrays(), enable_gqa=True, out=out, return_lse=True)
    assert found.out is out[0]
    assert found.lse is out[1]
    plain = cuflash.attention_paged(*call.arrays(), enable_gqa=True)
    np.testing.assert_array_equal(found.out.astype(np.float16), plain)


@pytest.mark.parametrize("lengths", [(5, 5, 5), (5, 5, 7)])
def test_a_formula_that_raises_leaves_out_as_it_was(lengths: tuple[int, ...]) -> None:
    """A formula that raises leaves out unchanged, though other sequences were computed before."""
    call = Paged(5, 4, 3, 2, np.float64)
    call.lengths[:] = lengths

    def host(b: Any, h: Any, q: Any, k: Any) -> Any:
        if (b > 1).any():
            raise RuntimeError("no")
        return k >= 0

    out = np.full((3, HEADS, 2, 5), 7.0)
    with pytest.raises(RuntimeError, match="no"):
        cuflash.attention_paged(
            *call.arrays(), enable_gqa=True, out=out, mask_mod=cuflash.MaskMod("true", host=host)
        )
    assert (out == 7).all()


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({0: np.zeros((3, 2, 6))}, ValueError, r"q: got shape \(3, 2, 6\), expected as many axes"),
        ({1: np.zeros((7, 2, 4, 5))}, ValueError, "k_pages: got head_dim 5, expected head_dim 6"),
        ({2: np.zeros((6, 2, 4, 5))}, ValueError, "v_pages: got 6 pages of 4 rows"),
        ({2: np.zeros((7, 2, 3, 5))}, ValueError, "v_pages: got 7 pages of 3 rows"),
        ({1: np.zeros((7, 2, 0, 6)), 2: np.zeros((7, 2, 0, 5))}, ValueError,
         "k_pages: got pages of no rows"),
        ({1: np.zeros((0, 2, 4, 6)), 2: np.zeros((0, 2, 4, 5))}, ValueError,
         "k_pages: got no pages"),
        ({2: np.zeros((7, 2, 4, 5), np.float32)}, TypeError, "v_pages: got dtype float32"),
        ({3: np.zeros((2, 3), int)}, ValueError, r"page_table: got shape \(2, 3\)"),
        ({3: np.zeros((3, 3))}, TypeError, "page_table: got dtype float64, expected an integer"),
        ({3: np.full((3, 3), 7)}, ValueError, "page_table: got page numbers from 7 to 7"),
        ({3: np.full((3, 3), -1)}, ValueError, "page_table: got page numbers from -1 to -1"),
        (
            {1: np.zeros((7, 2, 4, 6), complex)},
            TypeError,
            "k_pages: got dtype complex128",
        ),
        ({4: []}, ValueError, r"kv_lengths: got shape \(0,\), expected shape \(3,\)"),
        ({4: [1, 2]}, ValueError, r"kv_lengths: got shape \(2,\), expected shape \(3,\)"),
        ({4: [1, 2, 13]}, ValueError, "kv_lengths: got values from 1 to 13"),
        ({4: [[1], [2, 3], [4]]}, TypeError, "kv_lengths: got list that cannot be converted"),
        ({4: 2.5}, TypeError, "kv_lengths: got 2.5"),
        ({4: None}, TypeError, "kv_lengths: got None"),
        ({4: 2**63}, ValueError, "kv_lengths: got an int of 64 bits"),
    ],
)  # fmt: skip
def test_wrong_calls_are_refused_by_name(changes: Any, error: Any, message: str) -> None:
    call = Paged(5, 4, 3, 2, np.float64)
    call.lengths[:] = 12
    arrays = list(call.arrays())
    for place, value in changes.items():
        arrays[place] = value
    out = np.full((3, HEADS, 2, 5), 7.0)
    with pytest.raises(error, match=message):
        cuflash.attention_paged(*arrays, enable_gqa=True, out=out)
    assert (out == 7).all()


@pytest.mark.parametrize(("place", "name"), [(0, "q"), (1, "k_pages"), (2, "v_pages")])
def test_the_first_axis_of_an_input_counts_sequences_or_pages(place: int, name: str) -> None:
    axes = [(-2, -1)] * 4
    axes[place] = (0, -1)
    with pytest.raises(ValueError, match=rf"axes: got \(0, -1\) for {name} of shape"):
        cuflash.attention_paged(*Paged(5, 4, 3, 2, np.float64).arrays(), axes=axes)


def test_lengths_are_no_option() -> None:
    call = Paged(5, 4, 3, 2, np.float64)
    with pytest.raises(TypeError, match="options: got kv_lengths"):
        cuflash.attention_paged(*call.arrays(), kv_lengths=3)


def test_the_size_of_a_workspace_is_checked_as_the_call_is() -> None:
    q, k_pages, v_pages, table, _ = Paged(5, 4, 3, 2, np.float16).arrays()
    given = {"page_table": table, "enable_gqa": True}
    assert cuflash.workspace_size(q, k_pages, v_pages, **given) == 0
    with pytest.raises(ValueError, match="backward: got True, expected False: pages have no grad"):
        cuflash.workspace_size(q, k_pages, v_pages, backward=True, **given)
    with pytest.raises(TypeError, match="options: got kv_lengths, expected no kv_lengths"):
        cuflash.workspace_size(q, k_pages, v_pages, kv_lengths=3, **given)
    with pytest.raises(TypeError, match="page_table: got page_table together with cu_seqlens_q or"):
        cuflash.workspace_size(q, k_pages, v_pages, cu_seqlens_k=[0, 1], **given)
    with pytest.raises(ValueError, match=r"page_table: got shape \(2, 3\)"):
        cuflash.workspace_size(q, k_pages, v_pages, enable_gqa=True, page_table=table[:2])


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["none", "causal", "every"])
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_pages_on_a_gpu(kind: str, dtype: Any) -> None:
    """On a GPU page numbers and lengths stay on the device, and numbers of no page are clamped."""
    import cupy

    call = Paged(7, 16, 4, 5, dtype)
    options = call.options(kind) | ({"score_mod": None} if kind == "every" else {})
    on_device = {n: cupy.asarray(a) for n, a in options.items() if isinstance(a, np.ndarray)}
    if "segment_ids" in options:
        on_device["segment_ids"] = tuple(map(cupy.asarray, options["segment_ids"]))
    arrays = call.arrays()
    arrays[3][0, 0] = len(call.k_pages) - 1
    expected = cuflash.attention_paged(*arrays, return_lse=True, **options)
    arrays[3][0, 0] = 2**30
    found = cuflash.attention_paged(
        *map(cupy.asarray, arrays), return_lse=True, **options | on_device
    )
    tolerance = 2e-2 if dtype == np.float16 else 1e-4
    np.testing.assert_allclose(cupy.asnumpy(found.out), expected.out, atol=tolerance)
    np.testing.assert_allclose(cupy.asnumpy(found.lse), expected.lse, atol=tolerance)

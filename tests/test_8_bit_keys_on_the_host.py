"""Is a kernel that converts keys of 8 bits as exact as one for dequantised keys?

Every number of 8 bits is one of float16, and a sum of few such products is exact in the kernel that
a C++ compiler makes. So results of float16 queries are equal bit by bit, whatever the order of
columns. Results of bfloat16 queries, which become float16, are within the budget.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from ml_dtypes import bfloat16
from test_paged import KINDS, Paged

import cuflash
from cuflash import reference
from cuflash._errors import NoKernel
from cuflash._kernels import split_keys
from cuflash._problem.float8 import E4M3, E5M2
from cuflash._problem.packed import describe_packed
from cuflash._problem.problem import describe
from cuflash._select import hardware
from cuflash._select.choose import choose
from cuflash.testing import assert_attention_close
from support.float8 import on_gpu, on_host

pytest.importorskip("cupy", reason="CuPy is not installed")

from test_pages_on_the_host import forward, in_pages_of

from cuflash._launch import run
from support.host_device import COMPILER, HostDevice, host_device, on_device, options_on_device

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")


@pytest.fixture
def device(tmp_path: Any) -> Iterator[HostDevice]:
    with host_device(tmp_path, capability=90) as found:
        yield found


def of_8_bits(call: Paged, kind: Any) -> Paged:
    """The call with keys and values of 8 bits."""
    call.k_pages, call.v_pages = call.k_pages.astype(kind), call.v_pages.astype(kind)
    return call


def check(call: Paged, kind: str) -> None:
    """Compare 8-bit keys in order with 16-bit keys by the same tile, and with 8-bit pages."""
    options = cuflash.Options(**call.options(kind), kv_lengths=call.lengths[:, None])
    options_on_device(options)
    q, k, v = map(on_device, call.contiguous())
    wide = [on_device(a.astype(q.dtype)) for a in (k, v)]
    # NumPy has no strided views of float8_e5m2, unlike CuPy.
    has_pages = k.dtype == E4M3
    problem = in_pages_of(call, options)[0] if has_pages else describe(q, k, v, options)
    steps = choose(problem, hardware.of_device(0))
    config = next(step.config for step in steps if step.config.computes == "out")
    assert config.kv_dtype == k.dtype.name
    found = forward(describe(q, k, v, options), q, k, v, options, config=config)
    if q.dtype == np.float16:
        plain = config.replace(kv_dtype="none")
        expected = forward(describe(q, *wide, options), q, *wide, options, config=plain)
        assert found == expected
    else:
        out = np.frombuffer(found[0], q.dtype).reshape(problem.out_shape)
        assert_attention_close(out, q, k, v, options=options)
    if has_pages:
        problem, (q, k, v, table) = in_pages_of(call, options)
        assert forward(problem, q, k, v, options, page_table=table) == found


@pytest.mark.parametrize(
    "kind",
    [k if k in ("none", "every") else pytest.param(k, marks=pytest.mark.full) for k in KINDS],
)
@pytest.mark.usefixtures("device")
def test_options(kind: str) -> None:
    check(of_8_bits(Paged(7, 16, 9, 3, np.float16, d=64), E4M3), kind)


@pytest.mark.parametrize("d", [60, 128, 240])
@pytest.mark.parametrize(("dtype", "kind"), [(bfloat16, E4M3), (np.float16, E5M2)], ids=str)
@pytest.mark.usefixtures("device")
def test_head_sizes(d: int, dtype: Any, kind: Any) -> None:
    check(of_8_bits(Paged(5, 16, 9, 2, dtype, d=d), kind), "causal")


def aligned(dtype: Any, keys: int, kind: Any = E4M3, d: int = 64) -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(0)
    q = rng.standard_normal((2, 8, 2, d)).astype(dtype)
    k, v = rng.standard_normal((2, 2, 2, keys, d)).astype(kind)
    return tuple(map(on_device, (q, k, v)))


@pytest.fixture
def many_sms(tmp_path: Any) -> Iterator[HostDevice]:
    with host_device(tmp_path, 90, multiprocessors=132, tensor_maps=True) as found:
        yield found


@pytest.mark.parametrize(("keys", "kind"), [(300, ""), (1000, "clusters"), (2500, "split_keys")])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_parts_of_the_keys(many_sms: HostDevice, d: int, keys: int, kind: str) -> None:
    q, k, v = aligned(bfloat16, keys, d=d)
    v.view(np.uint8)[1, 1, 7, 5] = 0x7F  # NaN
    options = cuflash.Options(
        enable_gqa=True,
        k_scale=np.float32([[0.5, 2], [1, 0.3]]),
        v_scale=np.float32([[1, 3], [4, 0.5]]),
    )
    options_on_device(options)
    problem = describe(q, k, v, options)
    out = many_sms.memory(problem.out_shape, q.dtype)
    lse = many_sms.memory(problem.lse_shape, np.float32)
    run.forward(problem, (q, k, v), options, out, lse)
    config = next(c for c in many_sms.configs if c.computes == "out")
    assert config.copy_bytes == 16
    assert config.split_keys == bool(kind)
    assert config.clusters == (kind == "clusters")
    wide = (
        np.asarray(a, np.float64) * np.asarray(s)[..., None, None]
        for a, s in ((k, options.k_scale), (v, options.v_scale))
    )
    expected, expected_lse = reference.attention(
        np.asarray(q, np.float64), *wide, enable_gqa=True, return_lse=True
    )
    assert (np.isnan(out) == np.isnan(expected)).all()
    assert np.isnan(out).any()
    np.testing.assert_allclose(lse, expected_lse, rtol=0, atol=1e-5)
    np.testing.assert_allclose(np.asarray(out, np.float64), expected, rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize("d", [(64, 16), (16, 64), (30, 128), (200, 20), (1, 250), (128, 96)])
def test_different_head_sizes(many_sms: HostDevice, d: tuple[int, int]) -> None:
    """Both sizes have whole reads of 32 columns, or keys are dequantised first."""
    rng = np.random.default_rng(0)
    q = on_device(rng.standard_normal((2, 2, 3, d[0])).astype(np.float16))
    k, v = (on_device(rng.standard_normal((2, 2, 300, n)).astype(E4M3)) for n in d)
    problem, found, options = describe(q, k, v, cuflash.Options()), [], cuflash.Options()
    if min(d) <= 16:
        with pytest.raises(NoKernel):
            choose(problem, hardware.of_device(0))
        return
    for keys in ((k, v), [on_device(a.astype(np.float16)) for a in (k, v)]):
        config = many_sms.configs[-1].replace(kv_dtype="none") if found else None
        found.append(forward(describe(q, *keys, options), q, *keys, options, config=config))
    assert found[0] == found[1]


@pytest.mark.parametrize("rows", [(1, 3, 0, 5), (9, 3, 0, 5, 40)], ids=str)
@pytest.mark.parametrize("keys", [300, 6000])
def test_packed_sequences(many_sms: HostDevice, keys: int, rows: tuple[int, ...]) -> None:
    """Few rows on average, also where all sequences together have more than a tile."""
    rng = np.random.default_rng(0)
    places = (0, keys // 3, keys // 2, keys // 2 + 5, keys - 7)[: len(rows)]
    ends = {"q": np.cumsum((0, *rows)), "k": [*places, keys]}
    q = on_device(rng.standard_normal((4, ends["q"][-1], 64)).astype(np.float16))
    narrow = [on_device(a.astype(E4M3)) for a in rng.standard_normal((2, 2, keys, 64))]
    ends = {f"cu_seqlens_{name}": on_device(np.array(e, np.int32)) for name, e in ends.items()}
    options = cuflash.Options(enable_gqa=True, causal=True)
    found, config = [], None
    for k, v in (narrow, [on_device(a.astype(np.float16)) for a in narrow]):
        problem = describe_packed(q, k, v, options, ends, axes=None, precision=None)
        found.append(forward(problem, q, k, v, options, cu_seqlens=ends, config=config))
        config = next(c for c in many_sms.configs if c.computes == "out")
        assert (config.split_keys, config.block_m) == (keys > 2048, 16)
        config = config.replace(kv_dtype="none")
    assert found[0] == found[1]


#: A formula in which a product that is NaN leaves no trace.
SWALLOWS_NAN = cuflash.ScoreMod(
    "score > -1 ? score : -0.25f * k",
    grad="score > -1 ? 1 : 0",
    host=lambda score, b, h, q, k: np.where(score > -1, score, -0.25 * k),
    host_grad=lambda score, b, h, q, k: 1.0 * (score > -1),
)


@pytest.mark.parametrize("form", ["plain", "softcap", "score_mod"])
@pytest.mark.parametrize("keys", [40, 2500])
def test_range_of_bfloat16(many_sms: HostDevice, keys: int, form: str) -> None:
    """Rows of q with few or all exponents, and weights that float16 does not hold."""
    q, k, v = aligned(bfloat16, keys)
    q[0, 0] *= 1e-30  # below the range of float16
    q[0, 1] *= bfloat16(2.0**40)
    k[0, 0, :, :] = k[0, 0, :1]  # with equal scores, which those queries multiply
    q[0, 5, :, :8] *= bfloat16(2.0**60)  # one factor does not do for this row
    k[0, 1, :, :8] = 0  # so that its scores are those of its smaller numbers
    q[0, 3, 0] = 0
    q[0, 3, 1] = 2.0**-130
    q[1, 5, 0, 3] = 1 if form == "score_mod" else np.nan
    q[1, :2] = 0
    q[1, :2, :, 0] = 1
    k[1, 0, :, 0] = 0
    k[1, 0, 3, 0] = 160  # a weight of 1; the others are exp(-20)
    v[1, 0] = abs(v[1, 0].astype(np.float32))
    v[1, 0, 3] = 0
    options = cuflash.Options(
        enable_gqa=True,
        softcap=300.0 if form == "softcap" else None,
        score_mod=SWALLOWS_NAN if form == "score_mod" else None,
    )
    found = forward(describe(q, k, v, options), q, k, v, options)
    out = np.frombuffer(found[0], q.dtype).reshape(q.shape)
    assert_attention_close(out, q, k, v, options=options)
    exact = reference.attention(*(np.asarray(a, np.float64) for a in (q, k, v)), options=options)
    np.testing.assert_allclose(out[1, :2].astype(np.float64), exact[1, :2], rtol=0.02)
    assert np.isnan(out[1, 5, 0]).all() == (form != "score_mod")
    assert not np.isnan(out[0]).any()


def test_small_scales_of_values(device: HostDevice) -> None:
    q, k, v = aligned(bfloat16, 300)
    expected = None
    for scale in (1.0, 2.0**-110):
        options = cuflash.Options(enable_gqa=True, v_scale=np.full((2, 2), scale, np.float32))
        options_on_device(options)
        found = forward(describe(q, k, v, options), q, k, v, options)[0]
        values = np.frombuffer(found, bfloat16).astype(np.float64) / scale
        expected = values if expected is None else expected
        np.testing.assert_array_equal(values, expected)


def test_every_number(device: HostDevice) -> None:
    """A key that is the only one of its entry: out is the value, exactly."""
    for kind in (E4M3, E5M2):
        q, k, _ = aligned(np.float16, 256, kind)
        v = on_device(np.zeros((2, 2, 256, 64), np.uint8))
        v[:] = np.arange(256, dtype=np.uint8)[:, None]
        lengths = on_device(np.ones((2, 1), np.int64))
        for code in (0, 1, 7, 8, 0x38, 0x7B, 0x7E, 0x80, 0x81, 0xC5, 0xFB):
            v[..., 0, :] = code
            options = cuflash.Options(enable_gqa=True, kv_lengths=lengths)
            problem = describe(q, k, v.view(kind), options)
            out, _ = forward(problem, q, k, v.view(kind), options)
            value = np.uint8(code).view(kind).astype(np.float16)
            np.testing.assert_array_equal(np.frombuffer(out, np.float16), value)


@pytest.mark.parametrize("capability", [80, 75])
def test_devices_without_conversions_dequantise(tmp_path: Any, capability: int) -> None:
    q, k, v = aligned(np.float16, 300)
    problem = describe(q, k, v, cuflash.Options(enable_gqa=True))
    with host_device(tmp_path, capability=capability), pytest.raises(NoKernel):
        choose(problem, hardware.of_device(0))


def test_many_rows_and_other_widths_dequantise() -> None:
    own = hardware.typical("sm_90")
    for shape in ((2, 8, 100, 64), (2, 8, 1, 96), (2, 8, 1, 32)):
        q, k = np.zeros(shape, bfloat16), np.zeros((2, 8, 4096, shape[-1]), E4M3)
        problem = describe(q, k, k, cuflash.Options())
        with pytest.raises(NoKernel):
            choose(problem, own)
    assert 96 not in split_keys.WIDTHS_OF_FEW_ROWS


@pytest.mark.gpu
@pytest.mark.parametrize("keys", [300, 1000, 5000])
@pytest.mark.parametrize(("dtype", "kind"), [(bfloat16, E4M3), (np.float16, E5M2)], ids=str)
@pytest.mark.parametrize("d", [64, 128, 256])
def test_few_rows_on_a_gpu(d: int, dtype: Any, kind: Any, keys: int) -> None:
    """Within the budget of the definition, the same bits every time, in order and in pages."""
    import cupy

    rng = np.random.default_rng(0)
    q = rng.standard_normal((2, 8, 2, d)).astype(dtype)
    k, v = rng.standard_normal((2, 2, 2, keys, d)).astype(kind)
    scales = {f"{n}_scale": np.exp2(rng.integers(-2, 3, (2, 1, 1))) for n in "kv"}
    options: dict[str, Any] = {"enable_gqa": True, "causal": True, "softcap": 5.0, **scales}
    lengths = np.array([[keys], [keys - 77]])
    there = [on_gpu(cupy, a) for a in (q, k, v)]
    moved = {name: on_gpu(cupy, value) for name, value in options.items()}
    moved["kv_lengths"] = cupy.asarray(lengths)
    found = on_host(cuflash.attention(*there, **moved))
    assert_attention_close(found, q, k, v, **options, kv_lengths=lengths)
    del moved["kv_lengths"]
    size, columns = 16, -(-keys // 16)
    numbers = rng.permutation(2 * columns).reshape(2, columns)
    pages = []
    for array in (k, v):
        made = np.zeros((2 * columns, 2, size, d), array.dtype)
        rows = np.zeros((2, 2, columns * size, d), array.dtype)
        rows[:, :, :keys] = array
        made[numbers] = rows.reshape(2, 2, columns, size, d).swapaxes(1, 2)
        pages.append(on_gpu(cupy, made))
    table = (cupy.asarray(numbers, np.int32), cupy.asarray(lengths[:, 0]))
    paged = on_host(cuflash.attention_paged(there[0], *pages, *table, **moved))
    assert_attention_close(paged, q, k, v, **options, kv_lengths=lengths)
    for _ in range(20):
        again = cuflash.attention_paged(there[0], *pages, *table, **moved)
        assert on_host(again).tobytes() == paged.tobytes()

"""Do arrays become 8-bit floats and scales as documented, on a GPU as on the host?"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash
from cuflash._problem.float8 import E4M3, E5M2
from support.float8 import BF16, bits, dequantized, on_host


def nearest(x: float, dtype: Any) -> float:
    """Return the number of ``dtype`` nearest to ``x``, in a tie that with an even last bit."""
    codes = np.arange(256, dtype=np.uint8).view(dtype)
    numbers = codes.astype(np.float64)
    finite = np.isfinite(numbers)
    distance = np.where(finite, abs(numbers - x), np.inf)
    nearest_two = np.flatnonzero(distance == distance.min())
    even = [i for i in nearest_two if i % 2 == 0]
    return float(numbers[(even or nearest_two)[0]])


@settings(max_examples=60)
@given(
    st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=6),
    st.sampled_from([E4M3, E5M2]),
    st.sampled_from([np.float64, np.float32, np.float16, BF16]),
)
def test_elements_are_rounded_to_nearest_even(values: list[float], kind: Any, dtype: Any) -> None:
    with np.errstate(over="ignore"):
        x = np.array([values]).astype(dtype)
    array, scale = cuflash.quantize(x, dtype=kind)
    assert array.dtype == kind
    assert scale.shape == (1, 1)
    size = np.abs(x.astype(np.float64))
    largest = size[np.isfinite(size)].max(initial=0)
    if largest > 2.0**-80:
        most = float(ml_dtypes.finfo(kind).max)
        assert largest / scale[0, 0] <= most < largest / scale[0, 0] * 2
    for own, code in zip(x[0].astype(np.float64), array[0], strict=True):
        if np.isfinite(own):
            assert float(code) == nearest(own / float(scale[0, 0]), kind)
        else:
            assert np.isnan(float(code))
    assert (dequantized(array, scale, BF16).astype(np.float64) == dequantized(array, scale))[
        np.isfinite(array.astype(np.float32))
    ].all()


def test_what_is_out_of_reach_of_a_scale() -> None:
    """Elements out of reach saturate or vanish: scales and their inverses are normal float32."""
    array, scale = cuflash.quantize(np.array([[1e300, -3e307, 1.0]]))
    assert scale.item() == 2.0**126
    assert array.astype(float).tolist() == [[448.0, -448.0, 0.0]]
    for dtype, x in ((np.float32, 1e-40), (np.float64, 1e-300), (np.float64, 0.0)):
        array, scale = cuflash.quantize(np.array([[x]], dtype))
        assert (float(array[0, 0]), scale.item()) == (0.0, 1.0)
    assert cuflash.quantize(np.array([[1e-35]])).scale == 2.0**-100


@pytest.mark.parametrize(("per", "shape"), [
    ("matrix", (2, 3, 1, 1)), ("tensor", (1, 1)), (16, (2, 3, 4, 1)), (1, (2, 3, 50, 1)),
    (64, (2, 3, 1, 1)),
])  # fmt: skip
def test_scales_have_the_shape_that_options_take(per: Any, shape: tuple[int, ...]) -> None:
    x = np.random.default_rng(0).standard_normal((2, 3, 50, 8)) * 100
    x[:, :, 20:30] *= 64
    array, scale = cuflash.quantize(x, per=per)
    assert scale.shape == shape
    # Four significant bits of each normal number.
    assert (abs(dequantized(array, scale) - x) <= np.maximum(2.0**-4 * abs(x), 64)).all()
    out = cuflash.attention(array, array, array, q_scale=scale, k_scale=scale, v_scale=scale)
    assert out.shape == x.shape
    turned = cuflash.quantize(x, per=per, rotation=3)
    for axes in ((-3, -1), (-1, 0), (0, 1), (1, 2)):
        there = np.moveaxis(x, (-2, -1), axes)
        for made, rotation in (((array, scale), None), (turned, 3)):
            moved, same = cuflash.quantize(there, per=per, axes=axes, rotation=rotation)
            assert bits(np.moveaxis(moved, axes, (-2, -1))) == bits(made[0])
            assert bits(same) == bits(made[1])


@pytest.mark.parametrize("kind", [E4M3, E5M2], ids=str)
def test_a_scale_is_no_larger_than_it_must_be(kind: Any) -> None:
    """A scale is the smallest possible: the largest element is divided into the largest number."""
    largest = float(ml_dtypes.finfo(kind).max)
    for exponent in (-90, -1, 0, 1, 90):
        size = np.ldexp(largest, exponent)
        for x, scale in ((size, 1), (np.nextafter(size, np.inf), 2), (size / 2, 0.5)):
            made = cuflash.quantize(np.array([[-x, 0.0]]), dtype=kind)
            assert made.scale.item() == np.ldexp(scale, exponent)
            assert float(made.array[0, 0]) == -largest / (1 + (scale == 2))


@pytest.mark.parametrize("d", [1, 64, 80, 96])
def test_a_rotation_keeps_products(d: int) -> None:
    """A rotation keeps products: 8-bit errors stay below 1.2 times those without a rotation."""
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((2, 200, d))
    a, b = (cuflash.quantize(array, rotation=5) for array in (x, y))
    turned = dequantized(*a) @ dequantized(*b).T
    plain = dequantized(*cuflash.quantize(x)) @ dequantized(*cuflash.quantize(y)).T
    error, without = (np.sqrt(((p - x @ y.T) ** 2).mean()) for p in (turned, plain))
    assert error < 1.2 * without
    for seed in (6, 5 + 2**32):
        other = dequantized(*cuflash.quantize(y, rotation=seed))
        assert d == 1 or np.sqrt(((dequantized(*a) @ other.T - x @ y.T) ** 2).mean()) > 5 * error
    for dtype in (np.float16, BF16):
        narrow = x.astype(dtype)
        ours, theirs = (cuflash.quantize(z, rotation=5) for z in (narrow, narrow.astype(float)))
        assert bits(ours.array) == bits(theirs.array)


def test_what_quantize_refuses() -> None:
    x = np.ones((4, 8))
    for keywords, kind, text in (
        ({"per": "head"}, TypeError, "per: got 'head'"),
        ({"per": 48}, ValueError, "per: got 48"),
        ({"dtype": np.float16}, TypeError, "dtype: got dtype float16"),
        ({"rotation": -1}, ValueError, "rotation"),
        ({"axes": 1}, TypeError, r"axes: got 1, expected a pair \(sequence axis, feature axis\)"),
        ({"axes": (0, 1.0)}, TypeError, r"axes: got \(0, 1\.0\), expected a pair"),
        ({"axes": (0, 1, 2)}, ValueError, r"axes: got \(0, 1, 2\), expected a pair"),
        ({"axes": (0, 2)}, ValueError, "axes: got axis 2 for x of 2 axes"),
    ):
        with pytest.raises(kind, match=text):
            cuflash.quantize(x, **keywords)
    with pytest.raises(TypeError, match="x: got dtype int64"):
        cuflash.quantize(x.astype(int))
    with pytest.raises(ValueError, match=r"expected axes shorter than 2\^29"):
        cuflash.quantize(np.broadcast_to(np.float32(1), (2**29, 1)))


@pytest.mark.parametrize("rotation", [None, 1])
@pytest.mark.parametrize("shape", [(0, 50, 8), (2, 0, 8), (2, 50, 0)])
def test_what_is_empty_has_scales_of_1(shape: tuple[int, ...], rotation: int | None) -> None:
    for per, of_each in (("matrix", (shape[0], 1, 1)), ("tensor", (1, 1)), (16, (shape[0], 4, 1))):
        array, scale = cuflash.quantize(np.ones(shape), per=per, rotation=rotation)
        assert (array.shape, array.dtype) == (shape, E4M3)
        assert scale.shape == (of_each if shape[1] or per != 16 else (shape[0], 1, 1))
        assert (scale == 1).all()
    assert cuflash.quantize(np.zeros((3, 8))).scale == 1


@pytest.fixture
def cupy() -> Any:
    return pytest.importorskip("cupy")


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("dtype", [np.float16, BF16, np.float32, np.float64], ids=str)
@pytest.mark.parametrize("per", ["matrix", "tensor", 16, 64, 1])
@pytest.mark.parametrize("d", [64, 80, 256])
def test_a_gpu_quantises_to_the_same_bits(
    cupy: Any, kind: Any, dtype: Any, per: Any, d: int
) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 3, 100, d)) * np.exp2(rng.integers(-9, 6, (2, 3, 100, d)))
    x[0, 0, 0, :4] = [np.nan, np.inf, 0.0, -0.0]
    x[1, 1] = 0
    x = x.astype(dtype)
    expected, found = (cuflash.quantize(a, per=per, dtype=kind) for a in (x, cupy.asarray(x)))
    assert bits(found.scale.get()) == bits(expected.scale)
    array = on_host(found.array)
    nan = np.isnan(expected.array.astype(np.float32))
    assert (np.isnan(array.astype(np.float32)) == nan).all()
    assert ((array.view(np.uint8) == expected.array.view(np.uint8)) | nan).all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, np.float32], ids=str)
@pytest.mark.parametrize("first", [0, 1, 8])
def test_a_gpu_quantises_arrays_in_any_order(cupy: Any, dtype: Any, first: int) -> None:
    """A GPU quantises heads beside features, also where elements cannot be read several at once."""
    x = (
        np.random.default_rng(0)
        .standard_normal((2, 100, 3, 128))
        .astype(dtype)[..., first:][..., :64]
    )
    there = cupy.asarray(np.ascontiguousarray(x))
    room = cupy.zeros((2, 100, 3, 128), there.dtype)[..., first:][..., :64]
    room[...] = there
    expected, found = (cuflash.quantize(a, per=16, axes=(-3, -1)) for a in (x, room))
    assert bits(found.scale.get()) == bits(expected.scale)
    assert bits(on_host(found.array)) == bits(expected.array)


@pytest.mark.gpu
@pytest.mark.parametrize("d", [32, 64, 128, 256])
def test_a_gpu_rotates_alike(cupy: Any, d: int) -> None:
    """A GPU rotates like the host up to its order of sums, which rounds few elements otherwise."""
    x = np.random.default_rng(0).standard_normal((3, 70, d)).astype(BF16)
    expected, found = (cuflash.quantize(a, rotation=7) for a in (x, cupy.asarray(x)))
    assert bits(found.scale.get()) == bits(expected.scale)
    assert (on_host(found.array).view(np.uint8) != expected.array.view(np.uint8)).mean() < 0.001

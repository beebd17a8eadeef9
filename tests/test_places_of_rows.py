"""Do the bits of a row depend on its place among the rows?

A lane holds rows 8 apart, in registers whose products and sums a compiler may contract as it likes.
"""

from __future__ import annotations

import numpy as np
import pytest
from ml_dtypes import bfloat16

import cuflash
from support import problems
from support.memory import to_device

cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
pytestmark = pytest.mark.gpu

#: Options that do not depend on a row's position.
OPTIONS = ({}, {"softcap": 20.0}, {"sink": np.array([0.5, -1.0])})
SIZES = ((3, 3), (40, 64), (64, 64), (96, 96), (128, 128), (192, 128), (256, 256))


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: " ".join(options) or "plain")
@pytest.mark.parametrize("dtype", [np.float16, bfloat16, np.float32, np.float64])
@pytest.mark.parametrize("head_dims", SIZES, ids=str)
def test_rows_keep_their_bits_wherever_they_lie(head_dims, dtype, options):
    """Rows keep their bits in other registers, lanes, warps and tiles, beside other references."""
    d, d_v = head_dims
    call = problems.make_call(
        "normal_times_3", 5, dtype, (2, 300, d), (2, 333, d), (2, 333, d_v), options=options
    )
    arrays = {name: call.array(name) for name in ("dout", "q", "k", "v")}
    given = {name: to_device(cupy, value) for name, value in call.options.items() if name == "sink"}
    chosen = cuflash.Options(**call.options | given)

    def results(places):
        moved = {name: array[:, places] for name, array in arrays.items() if name in ("dout", "q")}
        dout, q, k, v = (to_device(cupy, a) for a in (arrays | moved).values())
        out, lse = cuflash.attention(q, k, v, options=chosen, return_lse=True)
        dq = cuflash.attention_backward(dout, q, k, v, out, lse, options=chosen, wrt=("q",)).dq
        return [cupy.asnumpy(a.view(np.uint8)).reshape(*a.shape[:2], -1) for a in (out, lse, dq)]

    rows = np.arange(300)
    expected = results(rows)
    for step in (1, 8, 16, 100):
        for found, wanted in zip(results(np.roll(rows, step)), expected, strict=True):
            np.testing.assert_array_equal(found, np.roll(wanted, step, axis=1))

"""Do the options `shift` and `lift` work in the copy of cuflash that test_toy_option.py made?

python tests/support/toy_option.py PART [...], in the copy.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash import Options, reference
from cuflash._problem.problem import describe
from cuflash._results import Saved
from cuflash.testing._strategies import HALVES
from support import covering, problems

SHIFT = np.array([0.5, -2.0, 1.0], np.float32)


def near(found: Any, expected: Any, dtype: str, name: str) -> None:
    """Compare within what arithmetic in ``dtype`` and the dtype of ``found`` explains."""
    rtol = 1e-9 if found.dtype == dtype == "float64" else 1e-3
    size = np.abs(expected[np.isfinite(expected)]).max(initial=1)
    np.testing.assert_allclose(
        np.asarray(found, np.float64), expected, rtol=rtol, atol=rtol * size, err_msg=name
    )


def calls() -> None:
    """Check what a user meets: formula, name of the option in errors, equality."""
    x = np.random.default_rng(0).standard_normal((2, 3, 5, 4))
    plain = cuflash.logsumexp(x, x)
    np.testing.assert_allclose(cuflash.logsumexp(x, x, shift=SHIFT), plain + SHIFT[:, None])
    np.testing.assert_allclose(cuflash.logsumexp(x, x, lift=0.5), plain + 0.5)
    assert repr(Options(shift=SHIFT)) == "Options(shift=<float32 (3,)>)"
    for wrong, text in (
        ({"shift": np.ones(3, int)}, "shift: got dtype int64, expected a floating dtype"),
        ({"shift": np.ones(4)}, "shift: got shape (4,), expected a shape that broadcasts"),
        ({"lift": np.inf}, "lift: got inf, expected None or a finite number"),
    ):
        with pytest.raises((TypeError, ValueError), match=re.escape(text)):
            cuflash.logsumexp(x, x, **wrong)


def covered() -> None:
    """Check every three levels of options that include the new one, on the CPU path."""
    rows = covering.rows()
    for option in ("shift", "lift"):
        beside = {level for row in rows if row[option] == "some" for level in row.items()}
        every = {(name, level) for name, of in covering.FACTORS.items() for level in of}
        assert beside == every - {(option, "none")}
    tried = 0
    for number, row in enumerate(rows):
        halves = row["dtype"] in HALVES
        halves = halves or (row["dtype"] == "float32" and row["operand dtypes"] != "same")
        if row["shift"] == row["lift"] == "none" or halves:
            continue
        call = covering.call_of(row, number)
        result = problems.run(np, call)
        if call.sequences:
            call, result = problems.unpacked(call, result)
        inputs = [call.array(name).astype(np.float64) for name in ("q", "k", "v", "dout")]
        *qkv, dout = inputs
        out, lse = reference.attention(*qkv, return_lse=True, **call.options)
        grads = reference.attention_backward(
            dout, *qkv, dlse=call.dlse, wrt=call.wrt, **call.options
        )
        near(result.out, out, row["dtype"], f"out, {row}")
        near(result.lse, lse, row["dtype"], f"lse, {row}")
        for name, gradient in result.gradients.items():
            near(gradient, getattr(grads, problems.FIELDS[name]), row["dtype"], f"{name}, {row}")
        tried += 1
    assert tried > 20, tried


def choice() -> None:
    """Check what is derived from the table: fields in CUDA, the words of tiles, workloads."""
    from cuflash._kernels.score_config import score_config
    from cuflash._select.choose import choose
    from cuflash._select.hardware import typical
    from cuflash._select.measured import options_of
    from cuflash.tuning import Workload

    work = Workload(1, 3, 3, 64, 64, 64, 64, "float32", arrays=("shift",))
    assert score_config(work.problem()).shift == "float32"
    (step,) = choose(work.problem(), typical("sm_80"))
    assert "Dtype shift = Dtype::float32;" in dict(step.config.texts())["config.fields"]
    assert "shift" in options_of(step.config).split()
    lifted = score_config(describe(*np.ones((3, 4, 8)), Options(lift=-1.0)))
    assert (lifted.lift, lifted.shift, lifted.scale_in_exponent) == (True, "none", False)


def kernels(folder: str, dtype: str) -> None:
    """Check the portable kernels, forward and gradients, beside a sink and a causal bound."""
    from cuflash._launch import run
    from support.host_device import host_device, on_device, options_on_device

    rng = np.random.default_rng(1)
    arrays = rng.standard_normal((4, 2, 3, 40, 16)).astype(dtype)
    options = {"shift": SHIFT, "lift": 0.75, "sink": np.array([0.5, 1.0, -1.0]), "causal": True}
    expected = reference.attention(*arrays[:3].astype(np.float64), return_lse=True, **options)
    grads = reference.attention_backward(
        arrays[3].astype(np.float64), *arrays[:3].astype(np.float64), **options
    )
    with host_device(Path(folder)) as device:
        q, k, v, dout = map(on_device, arrays)
        given = options_on_device(Options(**options))
        problem = describe(q, k, v, given)
        out, lse = (device.memory(shape, dtype) for shape in (problem.out_shape, problem.lse_shape))
        run.forward(problem, (q, k, v), given, out, lse)
        found = {name: device.memory(q.shape, dtype) for name in "qkv"}
        run.backward(problem, (q, k, v), given, Saved(dout, out, lse), found)
    near(out, expected.out, dtype, "out")
    near(lse, expected.lse, dtype, "lse")
    for name, gradient in found.items():
        near(gradient, getattr(grads, f"d{name}"), dtype, name)


if __name__ == "__main__":
    parts = {"calls": calls, "covering": covered, "choice": choice, "kernels": kernels}
    parts[sys.argv[1]](*sys.argv[2:])

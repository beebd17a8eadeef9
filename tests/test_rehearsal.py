"""Is a rehearsal of the GPU tests as strict as CuPy, and does it list the launched kernels?"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[1]
cupy = pytest.importorskip("cupy", reason="CuPy is not installed")

from cupy_backends.cuda.api import driver, runtime  # noqa: E402

from support import cupy_stand_in, rehearsal  # noqa: E402


@pytest.fixture(scope="module")
def xp():
    """Return the simulated CuPy."""
    return cupy_stand_in.stand_in(cupy, runtime, driver)["cupy"]


def test_results_are_arrays_of_the_device(xp):
    x = xp.asarray(np.arange(6.0).reshape(2, 3))
    for found, expected in (
        (x + 1, np.arange(1.0, 7).reshape(2, 3)),
        (x.sum(axis=0), np.array([3.0, 5, 7])),
        (x[1, 2], np.array(5.0)),  # an array, not a scalar
        (xp.where(x > 2, x, 0), np.array([[0, 0, 0], [3, 4, 5]])),
        (np.exp(x), np.exp(np.arange(6.0).reshape(2, 3))),
    ):
        assert type(found) is xp.ndarray
        np.testing.assert_array_equal(found.get(), expected)
    part = xp.ndarray((3,), np.float64, x.data + 24)
    part[...] = 7
    np.testing.assert_array_equal(x.get()[1], 7)


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        (lambda xp, x: x.max(initial=0), TypeError),
        (lambda xp, x: xp.exp(x, where=x > 0), TypeError),
        (lambda xp, x: xp.where(np.ones(3, bool), x, x), TypeError),
        (lambda xp, x: x + np.ones(3), TypeError),
        (lambda xp, x: np.asarray(x), TypeError),
        (lambda xp, x: x.__setitem__(slice(1), np.ones(1)), ValueError),
        (lambda xp, x: x.ctypes, AttributeError),
        (lambda xp, x: xp.polynomial_of, AttributeError),
        (lambda xp, x: xp.cuda.Graph, pytest.skip.Exception),
    ],
    ids=["method", "ufunc", "function", "operator", "to numpy", "fill", "name", "module", "skip"],
)
def test_what_cupy_refuses_is_refused(xp, wrong, error):
    with pytest.raises(error):
        wrong(xp, xp.ones(3))


def test_arrays_of_formulas_come_to_the_host(xp):
    """Arrays of formulas are copied to the host, as a failure there would count as skipped."""
    found = rehearsal._on_host(MappingProxyType({"shift": xp.ones(3)}))
    assert type(found["shift"]) is np.ndarray


def test_tests_pass_and_their_kernels_are_listed(tmp_path):
    listed = tmp_path / "kernels.jsonl"
    names = [
        "tests/test_logsumexp.py",
        "tests/test_kv_cache.py",
        "tests/test_every_kernel.py::test_forward[portable-plain]",
        "tests/test_covering_sm90.py::test_options_compose_with_parts[0]",
    ]
    command = [sys.executable, "-m", "pytest", "-n", "0", "-q", "-m", "gpu", "--rehearse"]
    done = subprocess.run(
        [*command, str(listed), *names], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 passed" in done.stdout  # a cache on a GPU has more pages
    rows = [json.loads(line) for line in listed.read_text().splitlines()]
    kernels = {(row["test"].partition("::")[0], row["config"]["kernel"]) for row in rows}
    assert ("tests/test_kv_cache.py", "cache_write") in kernels
    assert ("tests/test_every_kernel.py", "forward_sm80") in kernels
    assert ("tests/test_covering_sm90.py", "backward_combine") in kernels

"""Does cuflash give what the ONNX operator ``Attention`` (opset 25) prescribes?

The wheel of onnx 1.22.0 has conformance cases as files: a model of one node, its inputs, and
outputs computed by ONNX's own NumPy implementation. The twin ``<name>_expanded`` of a case holds
the same tensors for the operator written in primitive ones, so that one run proves both. Windows
and offsets of opset 25, which no file covers, are compared with the operator's text, written out
below one score at a time.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support import memory, onnx_adapter

#: Cases that cannot hold, with the reason.
IMPOSSIBLE: dict[str, str] = {}
EXPANDED = "_expanded"
#: The tolerances of ONNX's own backend test.
RTOL, ATOL = 1e-3, 1e-7


def folders() -> dict[str, Path]:
    """Return the folders of the cases by name; {} without onnx, or for a release without cases."""
    try:
        import onnx
    except ImportError:
        return {}
    root = Path(onnx.__file__).parent / "backend" / "test" / "data" / "node"
    return {path.name: path for path in sorted(root.glob("test_attention_*"))}


FOLDERS = folders()
CASES = [name for name in FOLDERS if not name.endswith(EXPANDED)]
needs_cases = pytest.mark.skipif(
    not CASES, reason="onnx 1.22, which ships the conformance cases, is not installed"
)


def tensors(name: str, kind: str) -> list[np.ndarray]:
    """Return the inputs or the outputs of a case, in order."""
    import onnx

    folder = FOLDERS[name] / "test_data_set_0"
    paths = (folder / f"{kind}_{i}.pb" for i in range(len(list(folder.glob(f"{kind}_*.pb")))))
    return [onnx.numpy_helper.to_array(onnx.load_tensor(path)) for path in paths]


def failure(xp: ModuleType, name: str) -> str:
    """Run one case by the adapter; return what is wrong, or ""."""
    import onnx

    (node,) = onnx.load(FOLDERS[name] / "model.onnx").graph.node
    values = (memory.to_device(xp, tensor) for tensor in tensors(name, "input"))
    inputs = [next(values) if given else None for given in node.input]
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    wanted = dict(zip(onnx_adapter.Outputs._fields, node.output, strict=False))
    results = onnx_adapter.attention(
        inputs, attributes, with_qk_matmul_output=bool(wanted.get("qk_matmul_output"))
    )
    named = [field for field, present in wanted.items() if present]
    for field, expected in zip(named, tensors(name, "output"), strict=True):
        got = memory.to_numpy(getattr(results, field))
        if (got.dtype, got.shape) != (expected.dtype, expected.shape):
            return f"{field} is {got.dtype}{got.shape}, not {expected.dtype}{expected.shape}"
        try:
            np.testing.assert_allclose(got, expected, rtol=RTOL, atol=ATOL, err_msg=field)
        except AssertionError as error:
            return str(error)
    return ""


@needs_cases
def test_there_are_64_cases_and_their_twins() -> None:
    assert len(CASES) == 64
    assert {name + EXPANDED for name in CASES} == set(FOLDERS) - set(CASES)


@needs_cases
@pytest.mark.parametrize("name", CASES or ["none"])
def test_case(xp: ModuleType, name: str) -> None:
    wrong = failure(xp, name)
    if name in IMPOSSIBLE:
        assert wrong, f"{name} holds; IMPOSSIBLE says it cannot: {IMPOSSIBLE[name]}"
    else:
        assert not wrong


@needs_cases
@pytest.mark.parametrize("name", CASES or ["none"])
def test_expanded_case_holds_the_same_tensors(name: str) -> None:
    for kind in ("input", "output"):
        own, twin = tensors(name, kind), tensors(name + EXPANDED, kind)
        for a, b in zip(own, twin, strict=True):
            assert (a.dtype, a.shape) == (b.dtype, b.shape)
            np.testing.assert_array_equal(a, b)


def test_impossible_cases_exist() -> None:
    assert set(IMPOSSIBLE) <= set(CASES)


# The operator's text, one score at a time.


def by_the_text(
    Q: np.ndarray,
    K: np.ndarray,
    V: np.ndarray,
    mask: np.ndarray | None,
    past: tuple[np.ndarray, np.ndarray] | None,
    lengths: np.ndarray | None,
    causal: int,
    left: int,
    right: int,
) -> np.ndarray:
    """Return Y of 4-D inputs in float64; rows that see nothing are 0."""
    if past is not None:
        K, V = (np.concatenate(pair, 2) for pair in zip(past, (K, V), strict=True))
    (batch, heads, rows, d), (_, heads_kv, keys, _) = Q.shape, K.shape
    Y = np.zeros((batch, heads, rows, V.shape[-1]))
    for b, h, i in itertools.product(range(batch), range(heads), range(rows)):
        offset = lengths[b] - rows if lengths is not None else past[0].shape[2] if past else 0
        scores = {}
        for j in range(keys):
            added = 0.0
            if mask is not None and j >= mask.shape[-1]:
                continue
            if mask is not None:
                at = (b, h, i, j)[4 - mask.ndim :]
                cell = mask[tuple(x if n > 1 else 0 for x, n in zip(at, mask.shape, strict=True))]
                added = (0.0 if cell else -math.inf) if mask.dtype == bool else float(cell)
            hidden = (
                added == -math.inf
                or (causal and j > i + offset)
                or (left >= 0 and j < i + offset - left)
                or (right >= 0 and j > i + offset + right)
                or (lengths is not None and j >= lengths[b])
            )
            if not hidden:
                dot = Q[b, h, i] @ K[b, h * heads_kv // heads, j]
                scores[j] = float(dot) / math.sqrt(d) + added
        if scores:
            e = {j: math.exp(s - max(scores.values())) for j, s in scores.items()}
            total = sum(e.values())
            for j, weight in e.items():
                Y[b, h, i] += weight / total * V[b, h * heads_kv // heads, j]
    return Y


def masks(
    rng: np.random.Generator, batch: int, heads: int, rows: int, keys: int
) -> Iterator[np.ndarray | None]:
    """Yield None, and float and bool masks of one to four axes."""
    yield None
    full = (batch, heads, rows, keys)
    for shape in (full, (batch, 1, rows, keys), full[1:], (1, rows, keys), full[2:], full[3:]):
        yield rng.random(shape) > 0.3
        values = rng.standard_normal(shape)
        values[rng.random(shape) > 0.8] = -np.inf
        yield values


@given(data=st.data())
def test_visibility_is_the_operators(data: st.DataObject) -> None:
    """Windows, causality and masks hide what the operator's text hides, at all kinds of offsets."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**16)))
    batch, heads_kv, group = 2, 2, data.draw(st.sampled_from((1, 2)))
    rows, keys, past_keys = (data.draw(st.integers(1, 5)) for _ in range(3))
    heads = heads_kv * group
    kind = data.draw(st.sampled_from(("no cache", "past", "lengths")))
    arrays = [
        rng.standard_normal(shape)
        for shape in ((batch, heads, rows, 4), *[(batch, heads_kv, keys, 4)] * 2)
    ]
    past, lengths = None, None
    if kind == "past":
        past = tuple(rng.standard_normal((2, batch, heads_kv, past_keys, 4)))
    if kind == "lengths":
        lengths = rng.integers(0, keys + 1, batch)
    total = keys + (past_keys if past else 0)
    shorter = 0
    if kind == "lengths":  # columns beyond every length may be missing
        shorter = data.draw(st.integers(0, total - max(int(lengths.max()), 1)))
    mask = data.draw(st.sampled_from(list(masks(rng, batch, heads, rows, total - shorter))))
    causal = data.draw(st.integers(0, 1))
    left, right = data.draw(st.tuples(*[st.sampled_from((-1, 0, 1, 3))] * 2))
    expected = by_the_text(*arrays, mask, past, lengths, causal, left, right)
    result = onnx_adapter.attention(
        [*arrays, mask, *(past or (None, None)), lengths],
        {"is_causal": causal, "left_window_size": left, "right_window_size": right},
    )
    np.testing.assert_allclose(result.Y, expected, rtol=1e-12, atol=1e-13)


def both_layouts(dtype: Any, attributes: dict[str, Any]) -> tuple[onnx_adapter.Outputs, ...]:
    """Return the results of one call in both layouts."""
    rng = np.random.default_rng(5)
    Q, K, V = (rng.standard_normal((2, h, n, 6)).astype(dtype) for h, n in ((4, 5), (2, 7), (2, 7)))
    packed = (a.swapaxes(1, 2).reshape(2, a.shape[2], -1) for a in (Q, K, V))
    heads = {"q_num_heads": 4, "kv_num_heads": 2}
    return (
        onnx_adapter.attention((Q, K, V), attributes, with_qk_matmul_output=True),
        onnx_adapter.attention(tuple(packed), attributes | heads, with_qk_matmul_output=True),
    )


@pytest.mark.parametrize("mode", range(4))
def test_both_layouts_and_every_stage_of_scores(mode: int) -> None:
    options = {"is_causal": 1, "softcap": 2.0, "scale": 0.7, "qk_matmul_output_mode": mode}
    plain, packed = both_layouts(np.float64, options)
    np.testing.assert_allclose(packed.Y.reshape(2, 5, 4, 6).swapaxes(1, 2), plain.Y, rtol=1e-14)
    np.testing.assert_array_equal(packed.qk_matmul_output, plain.qk_matmul_output)
    scores = plain.qk_matmul_output
    assert scores.shape == (2, 4, 5, 7)
    raw = both_layouts(np.float64, options | {"qk_matmul_output_mode": 0})[0].qk_matmul_output
    capped = 2 * np.tanh(raw / 2)
    seen = np.tril(np.ones((5, 7), bool))
    exps = np.exp(capped) * seen
    expected = (raw, capped, np.where(seen, capped, -np.inf), exps / exps.sum(-1, keepdims=True))
    np.testing.assert_allclose(scores, expected[mode], rtol=1e-13)


def test_softmax_precision_is_a_lower_bound() -> None:
    """A softmax in double is computed for float32 inputs, and less than float32 never."""
    single, _ = both_layouts(np.float32, {})
    double, _ = both_layouts(np.float32, {"softmax_precision": 11})
    half, _ = both_layouts(np.float32, {"softmax_precision": 10})
    assert double.Y.dtype == np.float32
    np.testing.assert_array_equal(half.Y, single.Y)
    rng = np.random.default_rng(5)
    inputs = [rng.standard_normal((2, h, n, 6)) for h, n in ((4, 5), (2, 7), (2, 7))]
    rounded = [a.astype(np.float32).astype(np.float64) for a in inputs]
    truth = onnx_adapter.attention(rounded).Y
    np.testing.assert_array_equal(double.Y, truth.astype(np.float32))
    assert np.any(double.Y != single.Y)

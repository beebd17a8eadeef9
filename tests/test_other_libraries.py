"""Do keywords and arrays of other libraries work, or is the error's advice right?

PyTorch is not needed: :class:`Foreign` exports memory by DLPack as a tensor does. Where PyTorch is
installed its own tensors are passed, too.
"""

from __future__ import annotations

import copy
import ctypes
import pickle
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import cuflash
from cuflash._arrays import _from_cuda_array_interface, native
from cuflash._problem.foreign_keywords import ADVICE
from cuflash._problem.operand import broadcastable, index_with_new_axes


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p), ("device", ctypes.c_int32 * 2), ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("offset", ctypes.c_uint64), ("manager", ctypes.c_void_p), ("deleter", ctypes.c_void_p),
    )  # fmt: skip


class _Versioned(ctypes.Structure):
    _fields_ = (
        ("version", ctypes.c_uint32 * 2), ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p), ("flags", ctypes.c_uint64), ("tensor", _DLTensor),
    )  # fmt: skip


_KEPT: list[Any] = []  # memory of capsules, read when the last view of an array dies
_CODES = {"i": 0, "u": 1, "f": 2}
_new_capsule = ctypes.PYFUNCTYPE(
    ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p
)(("PyCapsule_New", ctypes.pythonapi))


class Foreign:
    """An array in host memory that only has DLPack, like a tensor, and no strides."""

    versioned = False

    def __init__(self, array: np.ndarray, device: tuple[int, int] = (1, 0)) -> None:
        self.array, self.device = array, device

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, **keywords: Any) -> Any:
        if "max_version" in keywords and not self.versioned:
            raise TypeError("an exporter of the time before versions")
        a = self.array
        extents = (ctypes.c_int64 * a.ndim)(*a.shape)
        steps = (ctypes.c_int64 * a.ndim)(*(n // a.itemsize for n in a.strides))
        code = 4 if a.dtype == ml_dtypes.bfloat16 else _CODES[a.dtype.kind]
        tensor = _DLTensor(
            a.ctypes.data, self.device, a.ndim, code, 8 * a.itemsize, 1, extents, steps
        )
        _KEPT.append((a, tensor, extents, steps))
        if self.versioned:
            managed = _Versioned((1, 0), None, None, 0, tensor)
            _KEPT.append(managed)
            return _new_capsule(ctypes.addressof(managed), b"dltensor_versioned", None)
        return _new_capsule(ctypes.addressof(tensor), b"dltensor", None)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_arrays_in_host_memory_are_taken(dtype):
    arrays = np.random.default_rng(0).standard_normal((3, 2, 5, 8)).astype(dtype)
    mask = np.tri(5, dtype=bool)
    expected = cuflash.attention(*arrays, mask=mask)
    out = cuflash.attention(*map(Foreign, arrays), mask=mask)
    assert out.dtype == dtype
    np.testing.assert_array_equal(out, expected)
    mixed = cuflash.attention(Foreign(arrays[0]), *arrays[1:], mask=mask)
    np.testing.assert_array_equal(mixed, expected)


class Writable(Foreign):
    """An array whose exporter says that it can be written."""

    versioned = True


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float32])
def test_what_can_be_written_takes_results(dtype):
    arrays = np.random.default_rng(0).standard_normal((3, 2, 5, 8)).astype(dtype)
    out = np.zeros((2, 5, 8), dtype)
    cuflash.attention(*map(Writable, arrays), out=Writable(out))
    np.testing.assert_array_equal(out, cuflash.attention(*arrays))
    with pytest.raises(ValueError, match=r"^out: got a read-only array"):
        cuflash.attention(*arrays, out=Foreign(out))


@pytest.mark.parametrize("exporter", [Foreign, Writable])
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float32])
def test_they_are_not_copied(dtype, exporter):
    array = np.ones((4, 6), dtype)[::2, 1:]
    taken = native("q", exporter(array))
    assert taken.dtype == dtype
    assert taken.strides == array.strides
    array[1, 2] = 7
    np.testing.assert_array_equal(taken, array)


def test_no_other_dtype_is_taken_for_bfloat16():
    """Other 16-bit dtypes, and codes of numbers that NumPy lacks, are not taken for bfloat16."""

    class Coded(Foreign):
        def __dlpack__(self, **keywords):
            capsule = super().__dlpack__(**keywords)
            tensor = _KEPT[-1][1]
            tensor.code, tensor.bits = self.dtype
            return capsule

    for dtype in ((4, 32), (3, 16), (10, 8)):
        array = Coded(np.ones((4, 6), np.uint16))
        array.dtype = dtype
        with pytest.raises(TypeError, match=r"q: got .* not export"):
            native("q", array)


@pytest.mark.parametrize("kind", [np.matrix, np.recarray])
def test_kinds_of_numpy_arrays_are_plain_arrays(kind):
    array = np.arange(6.0).reshape(2, 3)
    taken = native("q", array.view(kind))
    assert type(taken) is np.ndarray
    assert np.shares_memory(taken, array)


@pytest.mark.parametrize(
    "part",
    [np.s_[::2, 1:], np.s_[::-1], np.s_[1:3, ::-2], np.s_[:0, ::-1], np.s_[2:2], np.s_[0]],
    ids=str,
)
def test_memory_of_an_array_on_a_gpu_reaches_from_its_first_byte_to_its_last(part):
    """Memory known by an address alone reaches from its first to its last byte, at any strides."""
    array = np.zeros((4, 6), np.float32)[part]
    known = array.__array_interface__ | {"strides": array.strides}
    fake = SimpleNamespace(
        cuda=SimpleNamespace(
            UnownedMemory=lambda *given: given, MemoryPointer=lambda *given: given
        ),
        ndarray=lambda shape, dtype, start, strides: (shape, dtype, start, strides),
    )
    given = SimpleNamespace(__cuda_array_interface__=known)
    shape, dtype, (memory, offset), strides = _from_cuda_array_interface(fake, given)
    assert (shape, dtype, strides) == (array.shape, array.dtype, array.strides)
    assert memory[0] + offset == array.ctypes.data
    if array.size:
        assert (memory[0], memory[0] + memory[1]) == np.lib.array_utils.byte_bounds(array)
    else:
        assert memory[0] == array.ctypes.data
    assert memory[2] is given


def test_another_device_is_named_with_advice():
    elsewhere = Foreign(np.ones((4, 6)), device=(8, 0))  # Metal
    with pytest.raises(TypeError, match=r"^q: got .*Foreign, .* copy it to the host"):
        cuflash.attention(elsewhere, elsewhere, elsewhere)


def test_what_is_not_handed_out_says_why():
    class Refuses(Foreign):
        requires_grad = True

        def __dlpack__(self, **_):
            raise BufferError("Can't export tensors that require gradient")

    with pytest.raises(TypeError, match=r"require gradient.*; write q\.detach\(\)$"):
        cuflash.attention(*[Refuses(np.ones((4, 6)))] * 3)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_tensors_of_pytorch(dtype):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    q, k, v = torch.randn(3, 2, 5, 8).to(getattr(torch, dtype))
    out = cuflash.attention(q, k, v, causal=True)
    own = [np.asarray(a.double()).astype(out.dtype) for a in (q, k, v)]
    assert out.dtype.name == dtype
    np.testing.assert_array_equal(out, cuflash.attention(*own, causal=True))
    is_bfloat16 = dtype == "bfloat16"  # which NumPy's arrays of ml_dtypes do not tell PyTorch
    back = torch.from_numpy(out.view("i2") if is_bfloat16 else out)
    back = back.view(torch.bfloat16) if is_bfloat16 else back
    np.testing.assert_array_equal(back.double(), out.astype(np.float64))
    with pytest.raises(TypeError, match=r"q\.detach\(\)"):
        cuflash.attention(q.requires_grad_(), k, v)


def test_lists_of_lengths_and_slopes():
    q, k, v = np.random.default_rng(0).standard_normal((3, 2, 4, 5, 8))
    lists = {"q_lengths": [[5], [3]], "kv_lengths": [[4], [2]], "offset": [[0], [1]]}
    lists["alibi_slopes"] = [1, 0.5, 0.25, 0.125]
    arrays = {name: np.array(value) for name, value in lists.items()}
    expected = cuflash.attention(q, k, v, causal=True, **arrays)
    np.testing.assert_array_equal(cuflash.attention(q, k, v, causal=True, **lists), expected)
    whole = cuflash.attention(q, k, v, alibi_slopes=[1, 2, 3, 4])
    np.testing.assert_array_equal(
        whole, cuflash.attention(q, k, v, alibi_slopes=np.array([1.0, 2, 3, 4]))
    )


def test_lists_of_ends():
    q, k, v = np.random.default_rng(0).standard_normal((3, 4, 10, 8))
    ends = np.array([0, 3, 10])
    expected = cuflash.attention_varlen(q, k, v, ends, ends, return_lse=True)
    out, lse = cuflash.attention_varlen(q, k, v, [0, 3, 10], (0, 3, 10), return_lse=True)
    np.testing.assert_array_equal(out, expected.out)
    grads = cuflash.attention_varlen_backward(out, q, k, v, out, lse, [0, 3, 10], [0, 3, 10])
    again = cuflash.attention_varlen_backward(out, q, k, v, out, lse, ends, ends)
    np.testing.assert_array_equal(grads.dq, again.dq)


@pytest.mark.parametrize("word", ADVICE)
def test_words_of_other_libraries_are_answered(word):
    with pytest.raises(TypeError, match=rf"^{word}: got an? (unknown )?keyword, .*; \w"):
        cuflash.Options(**{word: None})


@pytest.mark.parametrize(
    ("word", "answer"),
    [
        ("softmax_scale", "scale="), ("return_softmax_lse", "return_lse=True"),
        ("local_window_size", r"window=\(left, right\)"), ("is_causal", 'causal="top_left"'),
        ("attn_mask", "mask=.* or bias="), ("dropout_p", "dropout=.* seed="),
        ("window_size", "-1"), ("cu_seqlens_q", "attention_varlen"),
        ("block_table", "attention_paged"), ("rotary_cos", r"cuflash\.rotary"),
    ],
)  # fmt: skip
def test_the_answer_names_what_serves(word, answer):
    q = np.ones((4, 8))
    with pytest.raises(TypeError, match=f"^{word}: .*{answer}"):
        cuflash.attention(q, q, q, **{word: None})


def test_no_word_is_an_option():
    assert not set(ADVICE) & set(cuflash.Options.__dataclass_fields__)


EXTENTS = st.lists(st.integers(1, 4), max_size=3).map(tuple)


@given(EXTENTS, EXTENTS.filter(lambda core: len(core) <= 2), st.data())
def test_an_index_that_is_advised_works(batch, core, data):
    full = batch + core
    assume(full)
    kept = sorted(data.draw(st.sets(st.sampled_from(range(len(full))))))
    shape = tuple(full[i] if data.draw(st.booleans()) else 1 for i in kept)
    index = index_with_new_axes(shape, batch, core)
    if index:
        indexed = eval(f"array{index}", {"array": np.empty(shape)})
        assert broadcastable(indexed.shape, full)
    else:  # an axis of the core is missing
        assert not set(range(len(batch), len(full))) <= set(kept)


class TestGradientsAreUnpacked:
    q, k, v = np.random.default_rng(0).standard_normal((3, 2, 5, 8))

    def test_in_the_order_of_wrt(self):
        out, pullback = cuflash.attention_vjp(self.q, self.k, self.v)
        whole = pullback(out, wrt=("scale", "v", "q"))
        dscale, dv, dq = whole
        assert dscale is whole.dscale
        assert dv is whole.dv
        assert dq is whole.dq
        dq, dk, dv = pullback(out)
        np.testing.assert_allclose(dv, whole.dv, rtol=1e-12, atol=1e-14)
        assert dk.shape == self.k.shape

    def test_those_that_are_there(self):
        grads = cuflash.Gradients(dv=self.v, dq=self.q)
        dq, dv = grads
        assert dq is self.q
        assert dv is self.v
        assert [*cuflash.Gradients()] == []

    def test_a_name_counts_once(self):
        out, pullback = cuflash.attention_vjp(self.q, self.k, self.v)
        gradients = pullback(out, wrt=("v", "q", "v"))
        dv, dq = gradients
        assert dv is gradients.dv
        assert dq is gradients.dq

    @pytest.mark.parametrize(
        "copied", [copy.copy, copy.deepcopy, lambda g: pickle.loads(pickle.dumps(g))]
    )
    def test_copies_have_the_same_order(self, copied):
        gradients = cuflash.Gradients(dq=self.q, dv=self.v, order=("dv", "dq"))
        dv, dq = copied(gradients)
        np.testing.assert_array_equal(dv, self.v)
        np.testing.assert_array_equal(dq, self.q)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda x: cuflash.rotary(x, np.arange(4), cos=x), "cos: .*frequencies="),
        (lambda x: cuflash.rotary(x, np.arange(4), interleavd=True), "did you mean interleaved="),
        (lambda x: cuflash.rotary(x=x), r"x: got a keyword, expected .*\(x, positions"),
        (lambda x: cuflash.merge([x], [x[..., 0]], dim=0), "dim: .*axis="),
        (lambda x: cuflash.KVCache(1, 2, 8, max_seqlen=3), "max_seqlen: .*max_length="),
        (lambda x: cuflash.KVCache(1, 2, 8, num_blocks=3), "num_blocks: .*pages="),
        (lambda x: cuflash.attention_paged(x, x, x, x, x, cache_seqlens=3), r"shape \(sequences,"),
        (lambda x: cuflash.rotary(x, None), "positions: got None, expected an int or an integer"),
    ],
)
def test_functions_without_score_options_answer_foreign_words(call, text):
    with pytest.raises(TypeError, match=text):
        call(np.ones((2, 4, 8)))

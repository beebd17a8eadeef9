"""Do kernels behave beside other work: streams, threads, graphs, foreign arrays, full memory?

Results are compared bit for bit with those of a plain call. `test_plain_call_is_right` checks a
plain call against the error budget.
"""

from __future__ import annotations

import gc
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext

import numpy as np
import pytest
from ml_dtypes import bfloat16

import cuflash
from cuflash._api import attention
from cuflash.testing._budget import Budget
from support import problems
from support.memory import ALIGNED, to_device

cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
pytestmark = [pytest.mark.gpu, pytest.mark.own_memory]  # tests count blocks and reuse memory

from cuflash._launch import plan_cache  # noqa: E402
from cuflash._select import hardware  # noqa: E402
from support.portable import planned_kernels, portable_kernels  # noqa: E402

NAMES = ("out", "lse", "dq", "dk", "dv")


@pytest.fixture(autouse=True, params=["chosen", "portable"])
def chosen_kernels(request):
    """Run each test with the kernels that are chosen here, and with the portable kernels."""
    with portable_kernels() if request.param == "portable" else nullcontext():
        plan_cache.forget()
        yield
    plan_cache.forget()


class Work:
    """One forward and backward call, with all buffers that it needs."""

    def __init__(
        self, seed=0, batch=2, heads=4, seqlen=300, head_dim=64, dtype=np.float16, *,
        precision=None, **options,
    ):  # fmt: skip
        self.call = problems.make_call(
            "normal", seed, dtype, *((batch, heads, seqlen, head_dim),) * 3, options=options
        )
        self.options = cuflash.Options(**options)
        self.precision = precision
        self.q, self.k, self.v, self.dout = (
            upload(self.call.array(name)) for name in ("q", "k", "v", "dout")
        )
        self.buffers = {name: cupy.empty_like(self.q) for name in ("out", "dq", "dk", "dv")}
        self.buffers["lse"] = cupy.empty(self.q.shape[:-1], self.call.lse_dtype)
        self.forward_room = self.room(backward=False)
        self.backward_room = self.room(backward=True)

    def room(self, *, backward):
        """Return a workspace of the size that cuflash asks for."""
        size = cuflash.workspace_size(
            self.q, self.k, self.v, options=self.options, precision=self.precision,
            backward=backward,
        )  # fmt: skip
        return cupy.empty(size, np.uint8)

    def into_buffers(self):
        """Run forward and backward without an allocation; return the buffers."""
        b = self.buffers
        cuflash.attention(
            self.q, self.k, self.v, options=self.options, precision=self.precision,
            return_lse=True, out=(b["out"], b["lse"]), workspace=self.forward_room,
        )  # fmt: skip
        return self.gradients_into_buffers()

    def gradients_into_buffers(self):
        """Run the backward without an allocation; return the buffers."""
        b = self.buffers
        cuflash.attention_backward(
            self.dout, self.q, self.k, self.v, b["out"], b["lse"], options=self.options,
            precision=self.precision,
            grads_out=cuflash.Gradients(b["dq"], b["dk"], b["dv"]), workspace=self.backward_room,
        )  # fmt: skip
        return b

    def allocating(self):
        """Run forward and backward without buffers, as most users do; return fresh arrays."""
        shared = {"options": self.options, "precision": self.precision}
        out, lse = cuflash.attention(self.q, self.k, self.v, return_lse=True, **shared)
        g = cuflash.attention_backward(self.dout, self.q, self.k, self.v, out, lse, **shared)
        return dict(zip(NAMES, (out, lse, g.dq, g.dk, g.dv), strict=True))

    def expected(self):
        """Return the bits of a plain call, on the host."""
        return bits(self.allocating())


def upload(array):
    """Copy to the device byte for byte."""
    return to_device(cupy, array)


def bits(results):
    """Return the bytes of every result, on the host."""
    return {name: array.get().tobytes() for name, array in results.items()}


def occupy(stream, milliseconds=40.0):
    """Keep a stream busy for some milliseconds, without waiting for it.

    The duration of a fill is the fastest of several: other processes may slow some of them.
    """
    with stream:
        buffer = cupy.empty(1 << 26, np.float32)
        events = [cupy.cuda.Event() for _ in range(9)]
        for event in events:
            event.record()
            buffer.fill(0)
        events[-1].synchronize()
        once = min(map(cupy.cuda.get_elapsed_time, events[:-1], events[1:]))
        for _ in range(int(milliseconds / max(once, 0.01)) + 1):
            buffer.fill(0)


@pytest.mark.parametrize("dtype", [np.float16, bfloat16])
@pytest.mark.parametrize("options", [{}, {"causal": True}])
def test_plain_call_is_right(dtype, options):
    shapes = ((2, 4, 300, 64),) * 3
    call = problems.make_call("normal", 1, dtype, *shapes, options=options, lead=ALIGNED)
    with planned_kernels() as configs:
        result = problems.run(cupy, call)
    assert any(config.for_sm90 for config in configs) == hardware.present().hopper
    budget = Budget(call)
    budget.check_forward(result.out, result.lse)
    budget.check_backward(result.gradients, given=(result.out, result.lse))


# --- streams and threads -----------------------------------------------------------------------


def in_threads(works, expected, make_stream, rounds=50):
    """Run all works at once, each in a thread of its own; return what came out wrong."""
    start = threading.Barrier(len(works))
    wrong = []

    def loop(work, want):
        stream = make_stream()
        try:
            start.wait()
            for round_ in range(rounds):
                with stream:
                    results = work.into_buffers() if round_ % 2 else work.allocating()
                    stream.synchronize()
                    found = bits(results)
                if found != want:
                    wrong.append((round_, [name for name in NAMES if found[name] != want[name]]))
        except BaseException as error:
            wrong.append(error)

    threads = [
        threading.Thread(target=loop, args=pair) for pair in zip(works, expected, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return wrong


@pytest.mark.parametrize("same_shape", [True, False])
def test_two_threads_on_two_streams(same_shape):
    works = [
        Work(seed=0, causal=True),
        Work(seed=1, causal=True, seqlen=300 if same_shape else 517),
    ]
    expected = [work.expected() for work in works]
    cupy.cuda.Device().synchronize()
    assert not in_threads(works, expected, lambda: cupy.cuda.Stream(non_blocking=True))


@pytest.mark.parametrize("seqlen", [50, 300])
def test_four_threads_on_one_stream(seqlen):
    """No call uses memory that it has given back, though launches of several calls interleave."""
    works = [Work(seed=seed, batch=1, heads=2, seqlen=seqlen) for seed in range(4)]
    expected = [work.expected() for work in works]
    cupy.cuda.Device().synchronize()
    assert not in_threads(works, expected, lambda: cupy.cuda.Stream.null, rounds=200)


def in_a_new_thread(task):
    """Run a task in a new thread; it must not allocate, which would make a context."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(task).result()


@pytest.mark.parametrize("first", ["forward", "backward"])
@pytest.mark.parametrize("known", [False, True])
def test_a_new_thread_runs_the_same_kernels(first, known):
    """A new thread runs the same kernels, though it has no context to encode tensor maps in."""
    work = Work(seqlen=600)
    task = work.into_buffers if first == "forward" else work.gradients_into_buffers
    with planned_kernels() as own:
        expected = bits(work.into_buffers())
        if known:
            in_a_new_thread(task)
            assert bits(work.buffers) == expected
    if not known:
        with planned_kernels() as found:
            in_a_new_thread(task)
            assert bits(work.buffers) == expected
        assert set(found) >= set(own) if first == "forward" else set(found) < set(own)


def test_a_cache_grows_in_a_new_thread():
    cache = cuflash.KVCache(2, 2, 64, max_length=64, like=cupy.empty(0, np.float16))
    k = cupy.ones((2, 2, 4, 64), np.float16)
    cache.append(k, k)
    in_a_new_thread(lambda: cache.append(k, k))
    assert cache.lengths.get().tolist() == [8, 8]


@pytest.mark.parametrize("dtype", [np.int64, np.int16])
def test_copied_lengths_outlive_the_call(dtype):
    """Copied lengths and the workspace of a call, both small, are never in one block of memory."""
    work = Work(batch=1, heads=1, seqlen=100)
    expected = Work(batch=1, heads=1, seqlen=100, kv_lengths=57, causal=True).expected()
    work.options = cuflash.Options(kv_lengths=np.array([[57]], dtype), causal=True)
    for _ in range(5):
        cupy.cuda.Device().synchronize()
        cupy.get_default_memory_pool().free_all_blocks()
        assert bits(work.allocating()) == expected


def test_two_streams_of_one_thread_overlap():
    works = [Work(seed=seed, seqlen=513) for seed in range(2)]
    expected = [work.expected() for work in works]
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in works]
    cupy.cuda.Device().synchronize()
    for _ in range(20):
        for work, stream in zip(works, streams, strict=True):
            with stream:
                work.into_buffers()
    cupy.cuda.Device().synchronize()
    for work, want in zip(works, expected, strict=True):
        assert bits(work.buffers) == want


def test_call_waits_for_its_stream_and_never_blocks_the_host():
    work = Work(causal=True)
    expected = work.expected()
    values = {name: getattr(work, name).copy() for name in ("q", "k", "v", "dout")}
    for name in values:
        getattr(work, name).fill(np.nan)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    occupy(stream)
    with stream:
        for name, value in values.items():
            getattr(work, name)[...] = value
        results = work.allocating()
        busy = not stream.done
        stream.synchronize()
    assert bits(results) == expected
    assert busy, "the call returned only after the work in front of it: it synchronises"


def test_default_stream_of_a_thread_is_current_streams_choice():
    """A call runs on CuPy's current stream, also when that changes between two calls."""
    work = Work()
    expected = work.expected()
    stream = cupy.cuda.Stream(non_blocking=True)
    for _ in range(5):
        with stream:
            first = work.allocating()
        stream.synchronize()
        second = work.allocating()
        cupy.cuda.get_current_stream().synchronize()
        assert bits(first) == expected
        assert bits(second) == expected


# --- CUDA graphs -------------------------------------------------------------------------------


@contextmanager
def capturing(stream):
    """Capture on a stream; the yielded list holds the graph afterwards."""
    graphs = []
    with stream:
        stream.begin_capture()
        try:
            yield graphs
        finally:
            graphs.append(stream.end_capture())


def captured(work, stream):
    """Return the graph of forward and backward into the buffers."""
    with stream:
        work.into_buffers()
    stream.synchronize()
    with capturing(stream) as graphs:
        work.into_buffers()
    return graphs[0]


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (40, 3), "softcap": 20.0}])
def test_graph_replays_on_new_values_after_the_pool_has_moved(options):
    work = Work(seed=0, **options)
    other = Work(seed=9, **options)
    expected = work.expected(), other.expected()
    stream = cupy.cuda.Stream(non_blocking=True)
    graph = captured(work, stream)
    pool = cupy.get_default_memory_pool()
    dirt = []
    for replay in range(4):
        source = (work, other)[replay % 2]
        values = {name: getattr(source, name).copy() for name in ("q", "k", "v", "dout")}
        for buffer in work.buffers.values():
            buffer.fill(np.nan)
        kept = {name: getattr(work, name).copy() for name in values}
        for name, value in values.items():
            getattr(work, name)[...] = value
        pool.free_all_blocks()
        dirt.append(cupy.full(1 << 22, 0xFF, np.uint8))
        cupy.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        assert bits(work.buffers) == expected[replay % 2]
        for name, value in kept.items():
            getattr(work, name)[...] = value


def test_graph_of_logsumexp_and_its_gradient():
    work = Work(seed=4)
    q, k, lse = work.q, work.k, work.buffers["lse"]
    size = cuflash.workspace_size(q, k, k[..., :0], options=work.options, backward=True)
    grads = cuflash.Gradients(dq=work.buffers["dq"], dk=work.buffers["dk"])
    room = cupy.empty(size, np.uint8)

    def into_buffers():
        cuflash.logsumexp(q, k, out=lse)
        cuflash.logsumexp_backward(lse, q, k, lse, grads_out=grads, workspace=room)
        return {"lse": lse, "dq": grads.dq, "dk": grads.dk}

    own = cuflash.logsumexp(q, k)
    expected = cuflash.logsumexp_backward(own, q, k, own)
    expected = bits({"lse": own, "dq": expected.dq, "dk": expected.dk})
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        assert bits(into_buffers()) == expected
    stream.synchronize()
    with capturing(stream) as graphs:
        results = into_buffers()
    for buffer in results.values():
        buffer.fill(np.nan)
    cupy.cuda.Device().synchronize()
    graphs[0].launch(stream)
    stream.synchronize()
    assert bits(results) == expected


def test_graph_of_a_grouped_call_with_lengths_on_the_device():
    work = Work(seed=3)
    lengths = cupy.asarray([[100], [257]], np.int32)
    options = cuflash.Options(kv_lengths=lengths, causal=True)
    work.options = options
    work.backward_room = work.room(backward=True)
    expected = work.expected()
    stream = cupy.cuda.Stream(non_blocking=True)
    graph = captured(work, stream)
    graph.launch(stream)
    stream.synchronize()
    assert bits(work.buffers) == expected
    lengths[...] = cupy.asarray([[300], [1]], np.int32)
    changed = work.expected()
    cupy.cuda.Device().synchronize()
    graph.launch(stream)
    stream.synchronize()
    assert changed != expected
    assert bits(work.buffers) == changed


def missing_in_capture(work):
    """Return calls that would allocate, each with the word that its error must name."""
    b = work.buffers
    grads = cuflash.Gradients(b["dq"], b["dk"], b["dv"])
    operands = (work.q, work.k, work.v)
    backward = (work.dout, *operands, b["out"], b["lse"])
    host_lengths = np.array([[100], [200]])
    given = {"workspace": work.backward_room, "grads_out": grads}

    def converted(place):
        """Return a gradient call in which one array has a wider dtype than the others."""
        wider = [*backward]
        wider[place] = wide[place]
        return lambda: cuflash.attention_backward(*wider, **given)

    wide = {0: work.dout.astype(np.float32), 5: b["lse"].astype(np.float64)}
    wide_v = work.v.astype(np.float32)
    wide_out = cupy.empty(b["out"].shape, np.float32)
    return [
        ("out", lambda: cuflash.attention(*operands)),
        ("out", lambda: cuflash.attention(*operands, return_lse=True)),
        ("workspace", lambda: cuflash.attention_backward(*backward, grads_out=grads)),
        (
            "grads_out",
            lambda: cuflash.attention_backward(*backward, workspace=work.backward_room),
        ),
        (
            "grads_out",
            lambda: cuflash.attention_backward(
                *backward, workspace=work.backward_room, grads_out=cuflash.Gradients(dq=b["dq"])
            ),
        ),
        (
            "kv_lengths",
            lambda: cuflash.attention(*operands, kv_lengths=host_lengths, out=b["out"]),
        ),
        ("q", lambda: cuflash.attention(work.q, work.k, wide_v, out=wide_out)),
        ("dout", converted(0)),
        ("lse", converted(5)),
        (
            "dlse",
            lambda: cuflash.attention_backward(*backward, dlse=wide[5], **given),
        ),
        ("out", lambda: cuflash.logsumexp(work.q, work.k)),
        ("merge", lambda: cuflash.merge(b["out"][None], b["lse"][None])),
        ("merge", lambda: cuflash.merge([b["out"]] * 2, [b["lse"]] * 2)),
        ("weights", lambda: cuflash.weights(work.q, work.k, b["lse"], rows=slice(0, 2))),
        ("dropout_mask", lambda: cuflash.dropout_mask((2, 3), 0.5, 1, like=work.q)),
    ]


@pytest.mark.parametrize("case", range(15))
def test_what_would_be_allocated_inside_a_capture_is_named(case):
    work = Work()
    expected = work.expected()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        work.into_buffers()
        for _, call in missing_in_capture(work):  # compiles, so that only allocation fails below
            call()
    stream.synchronize()
    word, call = missing_in_capture(work)[case]
    with capturing(stream), pytest.raises(RuntimeError, match=f"^{word}[:.]"):
        call()
    assert bits(work.allocating()) == expected


def test_a_known_call_is_checked_no_less():
    work = Work(seqlen=64)
    q, k, v = work.q, work.k, work.v
    first, again = (cuflash.attention(q, k, v, return_lse=True) for _ in range(2))
    assert first.out.data.ptr != again.out.data.ptr
    assert bits({"out": first.out, "lse": first.lse}) == bits({"out": again.out, "lse": again.lse})
    with pytest.raises(TypeError, match="v: got a numpy array"):
        cuflash.attention(q, k, cupy.asnumpy(v), return_lse=True)
    with pytest.raises(ValueError, match="precision"):
        cuflash.attention(q, k, v, return_lse=True, precision="double")
    with pytest.raises(TypeError, match="causal"):
        cuflash.attention(q, k, v, return_lse=True, causal=0)


@pytest.mark.parametrize("head_dim", [40, 64, 128])
@pytest.mark.parametrize("options", [{}, {"causal": True}], ids=["full", "causal"])
@pytest.mark.not_rehearsed
def test_a_known_gradient_has_the_bits_of_a_checked_one(monkeypatch, head_dim, options):
    """A call from the plan cache has the bits of a checked call, which given buffers always are.

    Only calls of the same layout that differ in addresses alone are taken from the plan cache.
    """
    works = [Work(seed=seed, head_dim=head_dim, **options) for seed in range(3)]
    expected = [bits(work.into_buffers()) for work in works]
    assert bits(works[0].allocating()) == expected[0]

    def unknown(*arguments, **keywords):
        raise LookupError

    monkeypatch.setattr(attention, "run_backward", unknown)
    for work, want in zip(works, expected, strict=True):
        assert bits(work.allocating()) == want
    q, k, v, dout = work.q, work.k, work.v, work.dout
    out, lse = work.buffers["out"], work.buffers["lse"]
    moved = cupy.empty(dout.size + 1, dout.dtype)[1:].reshape(dout.shape)
    others = [
        ((dout, q, k, v, out, lse), {"deterministic": False}),
        ((dout, q, k, v, out, lse), {"wrt": ("q", "k")}),
        ((dout, q, k, v, out, lse), {"scale": 0.5}),
        ((dout, q, k, v, out, lse), {"dlse": lse}),
        ((dout.astype(np.float32), q, k, v, out, lse), {}),
        ((dout, q, k, v, out.astype(np.float32), lse), {}),
        ((moved, q, k, v, out, lse), {}),
        ((dout, q, k.swapaxes(0, 1).copy().swapaxes(0, 1), v, out, lse), {}),
    ]
    for arrays, keywords in others:
        with pytest.raises(LookupError):
            cuflash.attention_backward(*arrays, **options, **keywords)
    with pytest.raises(TypeError, match="deterministic"):
        cuflash.attention_backward(dout, q, k, v, out, lse, **options, deterministic=1)


def test_capture_of_another_stream_is_no_hindrance():
    """A capture on another stream forbids no allocation on the current stream."""
    work = Work()
    expected = work.expected()
    other = cupy.cuda.Stream(non_blocking=True)
    free = cupy.cuda.Stream(non_blocking=True)
    other.begin_capture(cupy.cuda.runtime.streamCaptureModeThreadLocal)
    try:
        with free:
            results = work.into_buffers()
    finally:
        other.end_capture()
    free.synchronize()
    assert bits(results) == expected


# --- foreign arrays ----------------------------------------------------------------------------


class ByDLPack:
    """An array of another library, with nothing but DLPack."""

    def __init__(self, array):
        self._array = array

    def __dlpack__(self, **keywords):
        return self._array.__dlpack__(**keywords)

    def __dlpack_device__(self):
        return self._array.__dlpack_device__()


class ByInterface:
    """An array of another library, with the older protocol."""

    def __init__(self, array, stream=None):
        self._array = array
        self.__cuda_array_interface__ = {**array.__cuda_array_interface__, "version": 3}
        self.__cuda_array_interface__["stream"] = stream


@pytest.mark.parametrize("wrap", [ByDLPack, ByInterface])
@pytest.mark.parametrize("strided", [False, True])
def test_foreign_arrays_are_read_in_place(wrap, strided):
    work = Work(causal=True)
    expected = work.expected()
    arrays = (work.q, work.k, work.v, work.dout)
    if strided:
        arrays = tuple(cupy.repeat(a, 2, axis=-2)[..., ::2, :] for a in arrays)
    q, k, v, dout = map(wrap, arrays)
    pool = cupy.get_default_memory_pool()
    before = pool.used_bytes()
    out, lse = cuflash.attention(q, k, v, causal=True, return_lse=True)
    held = pool.used_bytes() - before
    assert held <= out.nbytes + lse.nbytes + 1024, "an input was copied"
    g = cuflash.attention_backward(dout, q, k, v, out, lse, causal=True)
    results = (out, lse, g.dq, g.dk, g.dv)
    assert all(type(array) is cupy.ndarray for array in results)
    assert bits(dict(zip(NAMES, results, strict=True))) == expected


@pytest.mark.alone
def test_foreign_array_is_ordered_after_its_producers_stream():
    work = Work()
    expected = work.expected()
    value = work.q.copy()
    producer = cupy.cuda.Stream(non_blocking=True)
    consumer = cupy.cuda.Stream(non_blocking=True)

    def produce_and_consume():
        with producer:
            work.q[...] = value
        with consumer:
            return cuflash.attention(ByInterface(work.q, producer.ptr), work.k, work.v)

    produce_and_consume()  # loads kernels, for which the host may wait until the device is idle
    work.q.fill(np.nan)
    cupy.cuda.Device().synchronize()
    occupy(producer)
    out = produce_and_consume()
    busy = not producer.done
    consumer.synchronize()
    assert out.get().tobytes() == expected["out"]
    assert busy, "the host waited for the producer"


def test_torch_tensors():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    work = Work(causal=True)
    expected = work.expected()
    q, k, v = (torch.from_dlpack(a) for a in (work.q, work.k, work.v))
    out = cuflash.attention(q, k, v, causal=True)
    assert type(out) is cupy.ndarray
    assert out.get().tobytes() == expected["out"]
    back = torch.from_dlpack(out)
    assert back.data_ptr() == out.data.ptr


# --- several devices ---------------------------------------------------------------------------


@pytest.fixture
def second_device():
    """Return device 1."""
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("there is one device only")
    return cupy.cuda.Device(1)


def test_arrays_decide_the_device_and_not_the_current_one(second_device):
    expected = Work().expected()
    with second_device:
        work = Work()
    with cupy.cuda.Device(0):
        results = work.allocating()
        assert cupy.cuda.Device().id == 0
    assert all(array.device == second_device for array in results.values())
    with second_device:
        assert bits(results) == expected


def test_every_function_takes_memory_where_its_arrays_lie(second_device):
    with second_device:
        x, ends = cupy.ones((2, 40, 16), np.float32), cupy.array([0, 15, 40])
    with cupy.cuda.Device(0):
        out, lse = cuflash.attention(x, x, x, return_lse=True)
        results = [
            *cuflash.merge([out, out], [lse, lse]),
            *cuflash.merge_backward(out, [out, out], [lse, lse]),
            cuflash.logsumexp(x, x),
            cuflash.logsumexp_backward(lse, x, x, lse).dk,
            cuflash.weights(x, x, lse, rows=[0, 3]),
            cuflash.attention_varlen(x, x, x, ends, ends),
            cuflash.attention_vjp(x, x, x)[1](out).dv,
            cuflash.dropout_mask((3, 4), 0.5, 1, like=x),
        ]
    assert all(array.device == second_device for array in results)
    assert all(np.isfinite(array.get()).all() for array in results)


def test_arrays_on_two_devices_are_refused(second_device):
    work = Work()
    with second_device:
        k = Work().k
    with pytest.raises(ValueError, match="device"):
        cuflash.attention(work.q, k, work.v)


# --- sizes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("axis", ["batch", "heads"])
def test_65537_entries(axis):
    """More entries than the 65,535 of a grid's second axis have the bits of few entries."""
    entries = 65_537
    shape = (entries, 1, 17, 32) if axis == "batch" else (1, entries, 17, 32)
    rng = np.random.default_rng(0)
    q, k, v, dout = (
        upload(np.resize(rng.standard_normal((97, 17, 32)), shape).astype(np.float16))
        for _ in range(4)
    )
    out, lse = cuflash.attention(q, k, v, causal=True, return_lse=True)
    g = cuflash.attention_backward(dout, q, k, v, out, lse, causal=True)
    results = [a.reshape(entries, *a.shape[2:]) for a in (out, lse, g.dq, g.dk, g.dv)]
    few = [a.reshape(entries, 1, 17, 32)[:97] for a in (q, k, v, dout)]
    q, k, v, dout = few
    out, lse = cuflash.attention(q, k, v, causal=True, return_lse=True)
    g = cuflash.attention_backward(dout, q, k, v, out, lse, causal=True)
    for many, once in zip(results, (out, lse, g.dq, g.dk, g.dv), strict=True):
        once = once.reshape(97, *once.shape[2:])
        index = cupy.arange(entries) % 97
        assert bool((many.view(np.uint16) == once[index].view(np.uint16)).all())


def test_entries_that_no_single_stride_walks():
    """70,000 entries in axes that cannot be merged have the bits of a contiguous copy."""
    rng = np.random.default_rng(0)
    q, k, v = (
        upload(rng.standard_normal((250, 16, 280, 32)).astype(np.float16)).transpose(2, 0, 1, 3)
        for _ in range(3)
    )
    out = cuflash.attention(q, k, v)
    packed = cuflash.attention(*(cupy.ascontiguousarray(a) for a in (q, k, v)))
    assert out.get().tobytes() == packed.get().tobytes()


def empty_pools():
    """Return unused memory of the pools of CuPy and PyTorch to the device."""
    gc.collect()
    cupy.get_default_memory_pool().free_all_blocks()
    if "torch" in sys.modules:
        sys.modules["torch"].cuda.empty_cache()


@pytest.fixture
def emptied_pools():
    """Free the memory of other tests before a test, and its own afterwards."""
    empty_pools()
    yield
    empty_pools()


@pytest.mark.usefixtures("emptied_pools")
@pytest.mark.parametrize("pass_", ["fwd", "bwd"])
def test_strides_beyond_2_to_the_31(pass_):
    """Rows are right that lie so far apart that the last starts past element 2^32, in 9 GB."""
    rows, step = 129, 1 << 25
    free, _ = cupy.cuda.runtime.memGetInfo()
    if free < 10 << 30:
        pytest.skip("needs 10 GB of device memory")
    rng = np.random.default_rng(0)
    host = [rng.standard_normal((rows, 64)).astype(np.float16) for _ in range(4)]
    room = cupy.empty((rows, step), np.float16)
    far = [room[:, 64 * i : 64 * (i + 1)] for i in range(8)]
    near = [upload(a) for a in host]
    for view, values in zip(far, near, strict=False):
        view[...] = values
    lse_near = lse_far = None
    out, lse_near = cuflash.attention(*near[:3], causal=True, return_lse=True)
    _, lse_far = cuflash.attention(
        *far[:3], causal=True, return_lse=True, out=(far[4], cupy.empty(rows, np.float32))
    )
    assert far[4].get().tobytes() == out.get().tobytes()
    assert lse_far.get().tobytes() == lse_near.get().tobytes()
    if pass_ == "bwd":
        g = cuflash.attention_backward(near[3], *near[:3], out, lse_near, causal=True)
        cuflash.attention_backward(
            far[3], *far[:3], far[4], lse_far, causal=True,
            grads_out=cuflash.Gradients(*far[5:8]),
        )  # fmt: skip
        for view, want in zip(far[5:8], (g.dq, g.dk, g.dv), strict=True):
            assert view.get().tobytes() == want.get().tobytes()


@pytest.mark.slow
@pytest.mark.usefixtures("emptied_pools")
def test_more_than_2_to_the_31_elements():
    """Operands of 2^31 + 2^16 elements are right: 35 GB with gradients."""
    entries, seqlen, head_dim, distinct = (1 << 15) + 1, 512, 128, 61
    free, _ = cupy.cuda.runtime.memGetInfo()
    if free < 45 << 30:
        pytest.skip("needs 45 GB of device memory")
    rng = np.random.default_rng(0)
    few = [
        upload(rng.standard_normal((distinct, 1, seqlen, head_dim)).astype(np.float16))
        for _ in range(4)
    ]

    def enlarged(array):
        large = cupy.empty((entries, *array.shape[1:]), array.dtype)
        for start in range(0, entries, distinct):
            part = large[start : start + distinct]
            part[...] = array[: len(part)]
        return large

    q, k, v, dout = map(enlarged, few)
    assert q.size > 1 << 31
    out, lse = cuflash.attention(q, k, v, causal=True, return_lse=True)
    g = cuflash.attention_backward(dout, q, k, v, out, lse, causal=True)
    large = (out, lse, g.dq, g.dk, g.dv)
    out, lse = cuflash.attention(*few[:3], causal=True, return_lse=True)
    g = cuflash.attention_backward(few[3], *few[:3], out, lse, causal=True)
    for name, many, once in zip(NAMES, large, (out, lse, g.dq, g.dk, g.dv), strict=True):
        for start in range(0, entries, distinct):
            part = many[start : start + distinct].view(np.uint16)
            assert bool((part == once[: len(part)].view(np.uint16)).all()), (name, start)


# --- determinism and memory --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("runs", "kind"),
    [
        (200, {}), (60, {"dtype": np.float32}), (60, {"dtype": np.float32, "precision": "tf32"}),
        (60, {"dtype": np.float64}),
    ],
    ids=["float16", "float32", "tf32", "float64"],
)  # fmt: skip
@pytest.mark.parametrize("options", [{"causal": True}, {"window": (70, 10)}, {"enable_gqa": True}])
@pytest.mark.not_rehearsed
def test_many_runs_beside_a_busy_stream_give_the_same_bits(options, runs, kind):
    work = Work(seqlen=513, **kind, **options)
    if options.get("enable_gqa"):
        work.k, work.v = work.k[:, ::2], work.v[:, ::2]
        work.buffers |= {"dk": cupy.empty_like(work.k), "dv": cupy.empty_like(work.v)}
        work.backward_room = work.room(backward=True)
    want = {name: array.copy() for name, array in work.allocating().items()}
    noise = cupy.cuda.Stream(non_blocking=True)
    load = cupy.ones(1 << 22, np.float32)
    stream = cupy.cuda.Stream(non_blocking=True)
    differing = cupy.zeros((), np.int64)
    cupy.cuda.Device().synchronize()
    for round_ in range(runs):
        with noise:
            for _ in range(round_ % 4):
                cupy.multiply(load, 1.0, out=load)
        with stream:
            results = work.into_buffers()
            for name, array in results.items():
                unsigned = f"u{array.itemsize}"
                differing += (array.view(unsigned) != want[name].view(unsigned)).sum()
    cupy.cuda.Device().synchronize()
    assert int(differing) == 0


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_memory_is_linear_in_the_sequence(dtype):
    from benchmarks import overhead

    peaks = []
    for seqlen in (1024, 4096):
        work = Work(batch=1, heads=16, seqlen=seqlen, dtype=dtype)  # no tile is split
        work.buffers.clear()
        peaks.append(overhead.peak_bytes(work.allocating))
    assert peaks[1] <= 4 * peaks[0] + 8192
    if dtype != np.float16:  # wider operands may be split beforehand
        return
    # Memory of out, three gradients and lse. Of lse and delta of each query, and perhaps of dq in
    # float32. Each may be rounded up to 512 bytes.
    scratch = work.backward_room.nbytes
    assert scratch <= (2 + 1 / 16) * work.q.nbytes + 8192
    assert peaks[1] <= 4 * work.q.nbytes + work.q.nbytes // 32 + scratch + 8192


class FailingAllocator:
    """CuPy's pool, which refuses one allocation."""

    def __init__(self, refused):
        self.refused = refused
        self.count = 0
        self.pool = cupy.get_default_memory_pool()

    def __call__(self, size):
        self.count += 1
        if self.count - 1 == self.refused:
            raise cupy.cuda.memory.OutOfMemoryError(size, 0, 0)
        return self.pool.malloc(size)


def runs_out_of_memory(call):
    """Return whether a call runs out of memory; afterwards nothing holds the error's frames."""
    try:
        call()
    except cupy.cuda.memory.OutOfMemoryError:
        return True
    return False


def test_every_allocation_may_fail():
    work = Work(causal=True)
    expected = work.expected()
    before = bits({name: getattr(work, name) for name in ("q", "k", "v", "dout")})
    pool = cupy.get_default_memory_pool()
    used = pool.used_bytes()
    for refused in range(50):
        allocator = FailingAllocator(refused)
        with cupy.cuda.using_allocator(allocator):
            if not runs_out_of_memory(work.allocating):
                break
        assert pool.used_bytes() == used, "memory is lost"
        assert bits({name: getattr(work, name) for name in ("q", "k", "v", "dout")}) == before
        assert bits(work.allocating()) == expected
    assert allocator.count == refused, "the last round refused nothing"
    assert refused >= 5, "out, lse and three gradients are allocated at least"


def test_pool_limit_is_an_out_of_memory_error_and_no_more():
    work = Work()
    expected = work.expected()
    pool = cupy.get_default_memory_pool()
    pool.free_all_blocks()
    limit, used = pool.get_limit(), pool.used_bytes()
    pool.set_limit(size=pool.total_bytes() + 1024)

    def until_the_pool_is_full():
        return [work.allocating() for _ in range(1000)]

    try:
        assert runs_out_of_memory(until_the_pool_is_full)
        assert pool.used_bytes() == used
        assert bits(work.into_buffers()) == expected  # allocates nothing
    finally:
        pool.set_limit(size=limit)
    assert bits(work.allocating()) == expected

"""Do results of the CPU path depend on threads, and does BLAS get back its number of threads?"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from threadpoolctl import ThreadpoolController, threadpool_limits

import cuflash
from cuflash._host import cores, forward
from cuflash._host.cores import Items
from cuflash.testing._budget import Budget
from support.problems import Call, run

BLAS = ThreadpoolController().select(user_api="blas")
needs_blas = pytest.mark.skipif(
    not BLAS.lib_controllers, reason="threadpoolctl controls no BLAS of NumPy here"
)
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")


@pytest.fixture
def worth_threads(monkeypatch):
    """Make small calls use threads."""
    monkeypatch.setattr(cores, "WORTH_A_THREAD", 2**14)


def numbers_of_threads():
    return [blas.num_threads for blas in BLAS.lib_controllers]


def call_of(shape_q, shape_k, dtype, wrt, options):
    rng = np.random.default_rng(0)
    q, dout = rng.standard_normal((2, *shape_q)).astype(dtype)
    k, v = rng.standard_normal((2, *shape_k)).astype(dtype)
    return Call(q, k, v, dout, options=options, wrt=wrt)


def bits(call):
    """Return the bits of all results, also those of a pullback, which keeps probabilities."""
    q, k, v, options = call.q, call.k, call.v, call.options
    out, lse = cuflash.attention(q, k, v, return_lse=True, **options)
    gradients = cuflash.attention_backward(call.dout, q, k, v, out, lse, wrt=call.wrt, **options)
    (again, _), pullback = cuflash.attention_vjp(q, k, v, return_lse=True, **options)
    found = [out, lse, again, *gradients, *pullback(call.dout), *pullback(call.dout, wrt=call.wrt)]
    return [np.asarray(array).tobytes() for array in found]


QKV = ("q", "k", "v")
CASES = {
    "one head": ((700, 24), (900, 24), np.float32, QKV, {}),
    "heads": ((5, 300, 64), (5, 300, 64), np.float32, QKV, {"causal": True}),
    "shared keys": ((6, 260, 40), (1, 520, 40), np.float32, QKV, {"window": (100, 50)}),
    "groups of 16 bits": (
        (2, 4, 300, 32), (2, 2, 300, 32), np.float16, QKV, {"enable_gqa": True},
    ),
    "float64": ((2, 600, 33), (2, 600, 33), np.float64, QKV, {"softcap": 5.0}),
    "few queries": ((3, 7, 64), (3, 3000, 64), np.float32, QKV, {}),
    "gradients of options": (
        (3, 530, 16), (3, 530, 16), np.float32, (*QKV, "bias", "alibi_slopes", "sink", "scale"),
        {
            "bias": np.linspace(-1, 1, 530, dtype=np.float32)[None],
            "alibi_slopes": np.array([0.1, 0.2, 0.3]), "sink": np.array(0.5),
            "dropout": 0.25, "seed": 3,
        },
    ),
    "a bias of all pairs": (
        (1100, 8), (300, 8), np.float32, (*QKV, "bias"),
        {"bias": np.sin(np.arange(1100 * 300, dtype=np.float32)).reshape(1100, 300)},
    ),
    # Pieces of the last queries have the fewest keys, and end first.
    "fewer and fewer keys": ((1500, 8), (1500, 8), np.float32, QKV, {"window": (0, None)}),
}  # fmt: skip


@needs_blas
@pytest.mark.parametrize("case", CASES)
def test_bits_do_not_depend_on_the_number_of_threads(case, worth_threads):
    call, found = call_of(*CASES[case]), []
    for threads in (1, 2, 3, 3):
        with threadpool_limits(threads):
            found.append(bits(call))
    assert all(again == found[0] for again in found[1:])


@needs_blas
@pytest.mark.parametrize("worth", [2, 3, 5])
def test_bits_do_not_depend_on_threads_that_few_operations_are_worth(worth, monkeypatch):
    call, found = call_of(*CASES["fewer and fewer keys"]), []
    operations = 2 * 1500 * 1500 * 16
    monkeypatch.setattr(cores, "WORTH_A_THREAD", operations / worth)
    for threads in (1, 2, 3, 4):
        with threadpool_limits(threads):
            found.append(bits(call))
    assert all(again == found[0] for again in found[1:])


@pytest.mark.parametrize("case", ["one head", "gradients of options", "a bias of all pairs"])
def test_pieces_add_up_to_the_whole(case, worth_threads):
    call = call_of(*CASES[case])
    result, budget = run(np, call), Budget(call)
    budget.check_forward(result.out, result.lse)
    budget.check_backward(result.gradients, given=(result.out, result.lse))


@needs_blas
def test_bits_of_small_products_do_not_depend_on_threads_of_blas():
    """Small products keep their bits without a limit: BLAS computes them on one thread anyway."""
    rng = np.random.default_rng(0)
    for m, n, d in ((64, 64, 64), (90, 90, 32), (8192 // 256, 256, 32), (1, 128, 64)):
        assert max(m * n, m * d, n * d) <= cores.SMALL_MATRIX
        q, k, v = (rng.standard_normal((1, x, d), dtype=np.float32) for x in (m, n, n))
        found = set()
        for threads in (1, 2, 3):
            with threadpool_limits(threads):
                found.add(cuflash.attention(q, k, v).tobytes())
        assert len(found) == 1


def test_small_calls_do_not_look_for_blas():
    code = (
        "import sys, numpy as np, cuflash\n"
        "q = np.ones((2, 64, 64), np.float32)\n"
        "cuflash.attention(q, q, q)\n"
        "assert 'threadpoolctl' not in sys.modules\n"
        "q = np.ones((2, 200, 64), np.float32)\n"
        "cuflash.attention(q, q, q)\n"
        "assert 'threadpoolctl' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@needs_blas
def test_limits_are_restored_when_a_call_raises():
    def fails(*_):
        assert numbers_of_threads() == [1] * len(BLAS.lib_controllers)
        raise ArithmeticError("of the formula")

    q = np.ones((200, 64), np.float32)
    mod = cuflash.ScoreMod("score", grad="1.0f", host=fails, host_grad=fails)
    with threadpool_limits(2):
        before = numbers_of_threads()
        with pytest.raises(ArithmeticError, match="of the formula"):
            cuflash.attention(q, q, q, score_mod=mod)
        assert numbers_of_threads() == before


@needs_blas
def test_the_last_of_concurrent_calls_restores_the_limits():
    """The last of concurrent calls restores the limits; each call has the bits of a call alone."""
    q, k, v = np.random.default_rng(0).standard_normal((3, 2, 600, 32), dtype=np.float32)
    alone = cuflash.attention(q, k, v)
    with threadpool_limits(2):
        before = numbers_of_threads()
        with ThreadPoolExecutor(8) as pool:
            calls = [pool.submit(cuflash.attention, q, k, v) for _ in range(40)]
        assert all(call.result().tobytes() == alone.tobytes() for call in calls)
        assert numbers_of_threads() == before


@needs_blas
@pytest.mark.parametrize("caller_ends_first", [True, False])
def test_a_limit_lasts_from_the_first_call_to_the_end_of_the_last(caller_ends_first):
    """The limit lasts until the last call ends, in any thread (threadpoolctl 3.8 obeys one)."""
    with threadpool_limits(2), ThreadPoolExecutor(1) as another:
        before, one = numbers_of_threads(), [1] * len(BLAS.lib_controllers)
        here, there = cores._limit.of_a_call(), cores._limit.of_a_call()
        another.submit(there.__enter__).result()
        assert numbers_of_threads() == one
        here.__enter__()
        ends = [
            lambda: here.__exit__(None, None, None),
            lambda: another.submit(there.__exit__, None, None, None).result(),
        ]
        for end, left in zip(ends if caller_ends_first else ends[::-1], (one, before), strict=True):
            end()
            assert numbers_of_threads() == left
        assert another.submit(limited_to, 3).result() == [3] * len(before)


def limited_to(number):
    with threadpool_limits(number):
        return numbers_of_threads()


class OfEachThread(threading.local):
    """A simulated BLAS with a number of threads for each thread."""

    number = 4

    def __init__(self, threading_layer, *check_symbols):
        self.threading_layer, self.check_symbols = threading_layer, check_symbols

    def get_num_threads(self):
        return self.number

    def set_num_threads(self, number):
        self.number = number


@pytest.mark.parametrize("blas", [("openmp",), ("intel", "MKL_Set_Num_Threads_Local")], ids=str)
def test_a_number_of_each_thread_is_given_back_by_each(blas, monkeypatch):
    """Each thread gets its own number back when its call ends, before the last call ends."""
    own = OfEachThread(*blas)
    monkeypatch.setattr(cores, "_libraries", lambda: [own])
    limit = cores._Limit()
    with ThreadPoolExecutor(1) as another:
        call = limit.of_a_call()
        with limit.of_a_call():
            another.submit(call.__enter__).result()
            assert (own.number, another.submit(own.get_num_threads).result()) == (1, 1)
        assert (own.number, another.submit(own.get_num_threads).result()) == (4, 1)
        another.submit(call.__exit__, None, None, None).result()
        assert (own.number, another.submit(own.get_num_threads).result()) == (4, 4)


class Interruptions:
    """Ctrl-C at some of the calls of ``count``: the first has the number 1."""

    def __init__(self, *at):
        self.at, self.calls = at, 0

    def count(self):
        self.calls += 1
        if self.calls in self.at:
            raise KeyboardInterrupt


class Interrupted:
    """A simulated BLAS with four threads, and interruptions while its number is set."""

    threading_layer, check_symbols = "pthreads", ()

    def __init__(self, interruptions):
        self.number, self.interruptions = 4, interruptions

    def get_num_threads(self):
        return self.number

    def set_num_threads(self, number):
        self.interruptions.count()
        self.number = number


def interrupted_limit(monkeypatch, *at):
    """A limit of two simulated libraries, whose numbers are set four times in a call."""
    interruptions = Interruptions(*at)
    libraries = [Interrupted(interruptions), Interrupted(interruptions)]
    monkeypatch.setattr(cores, "_libraries", lambda: libraries)
    return cores._Limit(), lambda: [blas.number for blas in libraries]


@pytest.mark.parametrize("at", [1, 2, 3, 4])
def test_an_interrupted_call_gives_blas_its_threads_back(at, monkeypatch):
    limit, numbers = interrupted_limit(monkeypatch, at)
    with pytest.raises(KeyboardInterrupt), limit.of_a_call() as threads:
        assert (threads, numbers()) == (4, [1, 1])
    assert numbers() == [4, 4]
    with limit.of_a_call() as threads:
        assert (threads, numbers()) == (4, [1, 1])
    assert numbers() == [4, 4]


def test_a_call_interrupted_twice_leaves_it_to_the_next_call(monkeypatch):
    """BLAS that is still limited has its threads again after the next call."""
    limit, numbers = interrupted_limit(monkeypatch, 4, 5)
    with pytest.raises(KeyboardInterrupt), limit.of_a_call():
        pass
    assert numbers() == [4, 1]
    with limit.of_a_call() as threads:
        assert (threads, numbers()) == (4, [1, 1])
    assert numbers() == [4, 4]


def test_a_call_interrupted_before_it_begins_to_end_ends(monkeypatch):
    limit, numbers = interrupted_limit(monkeypatch)
    interruptions, end = Interruptions(1), limit._end
    monkeypatch.setattr(limit, "_end", lambda call: (interruptions.count(), end(call)))
    with pytest.raises(KeyboardInterrupt), limit.of_a_call():
        pass
    assert numbers() == [4, 4]


@needs_blas
@pytest.mark.parametrize("m_n_width", [(90, 90, 90), (1, 10_000, 8)])
def test_blas_is_limited_where_a_product_or_a_matrix_is_large(m_n_width):
    with threadpool_limits(2), cores.single_threaded_blas(*m_n_width):
        assert numbers_of_threads() == [1] * len(BLAS.lib_controllers)


@needs_blas
def test_threads_treat_floating_point_errors_as_the_call_does(monkeypatch, worth_threads):
    """Threads share the caller's floating-point error state: a warning would be an error here."""
    caller, product = threading.current_thread(), forward.product

    def shared(*given):
        if threading.current_thread() is caller:
            time.sleep(0.02)
        return product(*given)

    monkeypatch.setattr(forward, "product", shared)
    q = np.full((16, 300, 32), 1e30, np.float32)
    with threadpool_limits(3), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert np.isnan(cuflash.attention(q, q, q)).all()


def in_a_fork(call):
    """Return the exit status of ``call`` in a forked process; None if it hangs."""
    child = os.fork()
    if not child:
        try:
            call()
        except BaseException:
            os._exit(1)
        os._exit(0)
    for _ in range(600):
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status
        time.sleep(0.05)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return None


class SetsUnderALock:
    """A simulated BLAS that sets its number under a lock, as threadpoolctl 3.8 does."""

    threading_layer, check_symbols, number = "pthreads", (), 2

    def __init__(self):
        self.lock, self.locked = threading.Lock(), threading.Event()

    def get_num_threads(self):
        return self.number

    def set_num_threads(self, number):
        with self.lock:
            self.locked.set()
            time.sleep(0.1)
            self.number = number


@needs_fork
def test_no_process_is_forked_while_a_call_sets_numbers(monkeypatch):
    """No process is forked while a thread holds BLAS's lock, which the child could not release."""
    blas = SetsUnderALock()
    monkeypatch.setattr(cores, "_libraries", lambda: [blas])

    def call():
        with cores._limit.of_a_call():
            assert blas.number == 1

    other = threading.Thread(target=call)
    other.start()
    blas.locked.wait(10)
    assert in_a_fork(call) == 0
    other.join()
    assert blas.number == 2


@needs_blas
@needs_fork
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_forked_process_computes_with_threads_of_its_own(worth_threads):
    """A forked process computes without its parent's limit, after a call and beside one."""
    q, k, v = np.random.default_rng(0).standard_normal((3, 4, 600, 32), dtype=np.float32)
    with threadpool_limits(2):
        alone, before = cuflash.attention(q, k, v), numbers_of_threads()

        def same():
            assert numbers_of_threads() == before
            assert cuflash.attention(q, k, v).tobytes() == alone.tobytes()
            assert numbers_of_threads() == before

        assert in_a_fork(same) == 0
        inside, leave = threading.Event(), threading.Event()

        def waits(score, *_):
            inside.set()
            leave.wait()
            return score

        mod = cuflash.ScoreMod("score", grad="1.0f", host=waits, host_grad=waits)
        other = threading.Thread(
            target=cuflash.attention, args=(q, k, v), kwargs={"score_mod": mod}
        )
        other.start()
        inside.wait()
        status = in_a_fork(same)
        leave.set()
        other.join()
        assert status == 0
        assert numbers_of_threads() == before


@needs_blas
def test_an_error_of_a_thread_is_the_error_of_the_call(monkeypatch, worth_threads):
    """An error in any thread ends all threads and is raised by the call."""
    q = np.ones((16, 300, 32), np.float32)
    caller = threading.current_thread()
    monkeypatch.setattr(forward, "product", lambda *_: raise_in(caller))
    with threadpool_limits(3), pytest.raises(MemoryError, match="in a thread"):
        cuflash.attention(q, q, q)
    monkeypatch.undo()
    assert np.all(cuflash.attention(q, q, q) == 1)


def helpers():
    return {thread for thread in threading.enumerate() if thread.name == "cuflash"}


def in_two_threads(count=2):
    """Run ``count`` items, which begin only when another thread has begun one, too."""
    both = threading.Barrier(2)
    Items(range(count)).work(lambda items: [both.wait(10) for _ in items], 2)


def test_a_thread_helps_one_call_after_another():
    in_two_threads()
    before = helpers()
    for _ in range(5):
        in_two_threads()
    assert helpers() == before


def test_waiting_threads_refer_to_no_array():
    both, array = threading.Barrier(2), np.ones(3)
    alive = weakref.ref(array)

    def worker(items, array=array):
        for _ in items:
            both.wait(10)

    Items(range(2)).work(worker, 2)
    del array, worker
    assert alive() is None


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no cores of a thread")
@pytest.mark.parametrize("allowed", [True, False])
def test_a_thread_on_the_core_of_its_caller_leaves_it(allowed, monkeypatch):
    chosen = []

    def choose(_, own):
        chosen.append(own)
        if not allowed:
            raise PermissionError("not allowed")

    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 5})
    monkeypatch.setattr(os, "sched_setaffinity", choose)
    monkeypatch.setattr(cores, "_core", lambda: 1)
    cores._leave_core(0)
    assert not chosen
    cores._leave_core(1)
    assert chosen == [{0, 5}, {0, 1, 5}][: 1 + allowed]
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1})
    cores._leave_core(1)
    assert len(chosen) == 1 + allowed


def test_a_thread_that_wakes_up_after_the_call_does_nothing():
    items = Items(range(3))
    items.work(list, 1)
    items._helps()
    assert items._helping == 0


@needs_fork
def test_threads_that_wait_end_before_a_fork():
    """They would not go on in the child; and Python 3.12 warns of a fork beside threads."""
    in_two_threads()
    assert helpers()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert in_a_fork(in_two_threads) == 0
    assert not helpers()
    in_two_threads()


@needs_fork
def test_a_process_may_fork_while_a_thread_helps():
    begun, leave = threading.Barrier(3), threading.Event()

    def worker(items):
        for _ in items:
            begun.wait(10)
            leave.wait(10)

    other = threading.Thread(target=Items(range(2)).work, args=(worker, 2))
    other.start()
    begun.wait(10)
    status = in_a_fork(in_two_threads)
    leave.set()
    other.join()
    assert status == 0


@needs_blas
@pytest.mark.parametrize("kind", ["score_mod", "mask_mod"])
def test_formulas_are_called_by_the_thread_of_the_call(kind, worth_threads):
    """Formulas are called by the calling thread only, as they need not be thread-safe."""
    q = np.ones((16, 300, 32), np.float32)
    others = []

    def noted(result):
        if threading.current_thread() is not caller:
            others.append(result)
        time.sleep(1e-4)  # gives other threads time to call it, too
        return result

    mods = {
        "score_mod": lambda: cuflash.ScoreMod(
            "score", grad="1.0f", host=lambda score, *_: noted(score),
            host_grad=lambda score, *_: noted(np.ones_like(score)),
        ),
        "mask_mod": lambda: cuflash.MaskMod("true", host=lambda *_: noted(np.array(True))),
    }  # fmt: skip
    caller = threading.current_thread()
    with threadpool_limits(3):
        out, pullback = cuflash.attention_vjp(q, q, q, **{kind: mods[kind]()})
        assert not others
        pullback(out)
    assert not others


def test_of_two_errors_the_first_is_raised():
    caller, both, failed = threading.current_thread(), threading.Barrier(2), threading.Event()

    def worker(items):
        for _ in items:
            both.wait(10)
            if threading.current_thread() is not caller:
                failed.set()
                raise ArithmeticError("first")
            failed.wait(10)
            time.sleep(0.05)  # until the first error is kept
            raise ValueError("second")

    with pytest.raises(ArithmeticError, match="first"):
        Items(range(2)).work(worker, 2)


def raise_in(caller):
    if threading.current_thread() is caller:
        time.sleep(0.01)  # lets another thread start first
    raise MemoryError("in a thread")


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_results_are_added_in_the_order_of_the_items(threads):
    added = []

    def worker(items):
        for index, item in items:
            time.sleep(0.002 * (item % 3))
            items.in_turn(index, lambda item=item: added.append(item))

    Items(range(20)).work(worker, threads)
    assert added == list(range(20))


def test_nobody_waits_for_an_item_that_failed():
    def worker(items):
        for index, item in items:
            if item == 3:
                time.sleep(0.02)  # other threads wait for their turn meanwhile
                raise ArithmeticError(f"item {item}")
            items.in_turn(index, lambda: None)

    with pytest.raises(ArithmeticError, match="item 3"):
        Items(range(20)).work(worker, 4)


@pytest.fixture
def heeds_interrupts():
    """Raise KeyboardInterrupt at SIGINT, which processes of pytest-xdist ignore."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="no signals of threads")
def test_an_interrupted_wait_still_waits_for_what_others_write(heeds_interrupts):
    """A call interrupted twice still waits for other threads: ``out`` may be reused afterwards."""
    caller, written, taken = threading.current_thread(), [], threading.Event()

    def worker(items):
        for _, item in items:
            if threading.current_thread() is caller:
                taken.wait()
                return
            taken.set()
            for _ in range(2):
                time.sleep(0.05)
                signal.pthread_kill(caller.ident, signal.SIGINT)
            time.sleep(0.05)
            written.append(item)

    with pytest.raises(KeyboardInterrupt):
        Items(range(3)).work(worker, 2)
    assert len(written) == 1
    time.sleep(0.3)
    assert len(written) == 1


@needs_blas
def test_a_call_while_the_interpreter_ends_computes_alone():
    """At exit (``__del__``) no thread is started: Python before 3.12 would wait for it for ever."""
    code = (
        "import numpy as np, cuflash, threadpoolctl\n"
        "threadpoolctl.threadpool_limits(2)\n"
        "q = np.ones((4, 1024, 64), np.float32)\n"
        "cuflash.attention(q, q, q)  # what it imports cannot be imported later\n"
        "class Last:\n"
        "    def __del__(self):\n"
        "        print(cuflash.attention(q, q, q).shape)\n"
        "last = Last()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, timeout=30, capture_output=True, text=True
    )
    assert done.stdout == "(4, 1024, 64)\n", done.stderr


def test_a_process_that_gets_no_thread_computes_alone(monkeypatch):
    def refuses(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuses)
    done = []
    Items(range(5)).work(lambda items: done.extend(items), 3)
    assert [item for _, item in done] == list(range(5))

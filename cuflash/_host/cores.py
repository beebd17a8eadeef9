"""Which cores does a call on the CPU use, and in which order are their results added?

Our own threads take items of one list, and BLAS gets one thread. Threads of BLAS would wait for
each other at every tile, and how BLAS divides a product decides the bits. (D127)

Threads that helped wait for the next call. They end before the process forks, because a forked
process would wait for them for ever.
"""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import functools
import os
import queue
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

T = TypeVar("T")

#: Floating-point operations that are worth a thread: 0.2 ms, several times the time to wake one.
WORTH_A_THREAD = 2**24
#: OpenBLAS computes smaller products (multiply-adds, elements of a matrix) on one thread anyway.
SMALL_PRODUCT, SMALL_MATRIX = 2**18, 2**13


class _Limit:
    """Sets BLAS to one thread while calls run, and restores its threads after the last of them."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._calls: set[object] = set()
        self._threads = 1
        #: Libraries and their numbers of threads, until all of them are restored.
        self._before: list[tuple[Any, int]] = []

    @contextlib.contextmanager
    def of_a_call(self) -> Iterator[int]:
        """Yield the number of threads that BLAS would have used, divided by the calls that run.

        KeyboardInterrupt may be raised anywhere here, also while BLAS gets its threads back.
        """
        call = object()
        try:
            yield self._begin(call)
        finally:
            try:
                self._end(call)
            except BaseException:
                self._end(call)
                raise

    def _begin(self, call: object) -> int:
        with self.lock:
            if not self._calls and not self._before:  # else an interruption left BLAS limited
                found = [(blas, blas.get_num_threads()) for blas in _libraries()]
                self._threads = min((n for _, n in found), default=available())
                self._before = [(b, n) for b, n in found if n > 1 or _of_each_thread(b)]
            self._calls.add(call)
            for blas, _ in self._before:
                _set_threads(blas, 1)
            return max(self._threads // len(self._calls), 1)

    def _end(self, call: object) -> None:
        with self.lock:
            self._calls.discard(call)
            self.restore(every=not self._calls)

    def restore(self, *, every: bool) -> None:
        """Restore the numbers of all threads, or only what OpenMP or MKL keeps for this thread."""
        for blas, threads in self._before:
            if every or _of_each_thread(blas):
                _set_threads(blas, threads)
        if every:
            self._before = []


def _set_threads(blas: Any, number: int) -> None:
    """Set the number of threads; threadpoolctl 3.8 obeys only OpenBLAS's first caller: clear it."""
    clear = getattr(blas, "clear_controlling_thread", lambda **_: None)
    clear(force=True)
    blas.set_num_threads(number)
    clear()


def _of_each_thread(blas: Any) -> bool:
    """Whether each thread has its own number: with OpenMP, and with MKL's function for that."""
    own: bool = "MKL_Set_Num_Threads_Local" in blas.check_symbols
    return own or bool(blas.threading_layer == "openmp")


@functools.cache
def _libraries() -> tuple[Any, ...]:
    """The BLAS libraries of this process, as threadpoolctl controls them."""
    from threadpoolctl import ThreadpoolController  # takes 10 ms, which small calls avoid

    return tuple(ThreadpoolController().select(user_api="blas").lib_controllers)


_limit = _Limit()


class _Helper:
    """A thread that runs one task after another, and waits between them."""

    def __init__(self) -> None:
        self.tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        # Nobody waits for it when the interpreter exits.
        self._thread = threading.Thread(target=self._run, name="cuflash", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while (task := self.tasks.get()) is not None:
            task()
            del task

    def end(self) -> None:
        self.tasks.put(None)
        self._thread.join()


_idle: list[_Helper] = []


def _helper() -> _Helper:
    """A thread that waits for tasks; RuntimeError if the system has no more threads."""
    try:
        return _idle.pop()
    except IndexError:
        return _Helper()


def _before_a_fork() -> None:
    while _idle:
        _idle.pop().end()
    # No thread sets a number during the fork: a lock of threadpoolctl would stay locked.
    _limit.lock.acquire()


def _after_a_fork_in_the_child() -> None:
    """End the limit of calls in other threads, which do not go on here; their helpers are gone."""
    global _limit
    before, _limit = _limit, _Limit()
    before.restore(every=True)
    _idle.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before_a_fork,
        after_in_parent=lambda: _limit.lock.release(),
        after_in_child=_after_a_fork_in_the_child,
    )


def available() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


#: The core of this thread, where the C library tells it.
_core: Callable[[], int] = getattr(ctypes.pythonapi, "sched_getcpu", lambda: -1)


def _leave_core(core: int) -> None:
    """Leave the core of the caller, on which Linux may wake a thread though another one is idle."""
    if _core() == core >= 0 and len(cores := os.sched_getaffinity(0)) > 1:
        with contextlib.suppress(OSError):  # not allowed here
            os.sched_setaffinity(0, cores - {core})
            os.sched_setaffinity(0, cores)


@contextlib.contextmanager
def single_threaded_blas(m: int, n: int, width: int) -> Iterator[int]:
    """Limit BLAS to one thread, and yield how many threads the caller may use instead.

    ``m`` x ``n`` is the largest tile, ``width`` the largest head size.
    """
    if m * n * width <= SMALL_PRODUCT and max(m * n, m * width, n * width) <= SMALL_MATRIX:
        yield 1
        return
    with _limit.of_a_call() as threads:
        yield threads


class Items(Generic[T]):
    """Items that threads take in order, and whose results they add in the same order."""

    def __init__(self, items: Iterable[T]) -> None:
        self._items = enumerate(items)
        self._changed = threading.Condition()
        self._turn = 0
        self._error: BaseException | None = None
        self._worker: Callable[[Items[T]], None] | None = None  # until the call ends
        self._core = 0  # of the caller
        self._helping = 0  # threads beside the caller's that may have an item

    def __iter__(self) -> Iterator[tuple[int, T]]:
        while True:
            with self._changed:
                following = None if self._error else next(self._items, None)
            if following is None:
                return
            yield following

    def in_turn(self, index: int, add: Callable[[], None]) -> None:
        """Call ``add`` once the results of all earlier items are added: sums have one order."""
        with self._changed:
            self._changed.wait_for(lambda: self._turn == index or self._error)
            if self._error is None:
                add()
                self._turn += 1
                self._changed.notify_all()

    def work(self, worker: Callable[[Items[T]], None], threads: int) -> None:
        """Call ``worker`` with these items in ``threads`` threads, of which this is one.

        The first error ends all threads after their item, and is raised here. So is an interruption
        even while waiting for other threads: none writes results after this call has returned.
        """
        self._worker, self._core = worker, _core() if threads > 1 else 0
        helpers: list[_Helper] = []

        def works_with_helpers() -> None:
            # While the interpreter exits, threads that wait never go on, and new ones never start.
            for _ in range(0 if sys.is_finalizing() else threads - 1):
                try:
                    helpers.append(_helper())
                except RuntimeError:  # the interpreter exits, or the system has no more threads
                    break
                # The context holds np.errstate.
                run = contextvars.copy_context().run
                helpers[-1].tasks.put(functools.partial(run, self._helps))
            worker(self)

        def ends() -> None:
            with self._changed:
                self._worker = None
                self._changed.wait_for(lambda: not self._helping)

        self._guarded(works_with_helpers)
        while not self._is_over():  # again if it was interrupted
            self._guarded(ends)
        _idle.extend(helpers)
        if self._error is not None:
            raise self._error

    def _is_over(self) -> bool:
        return self._worker is None and not self._helping

    def _helps(self) -> None:
        """Work in a helper. It keeps no reference to the worker, which refers to arrays."""
        with self._changed:
            worker = self._worker
            if worker is None:  # the helper woke up after the call
                return
            self._helping += 1
        self._guarded(functools.partial(self._works_elsewhere, worker))
        del worker
        with self._changed:
            self._helping -= 1
            self._changed.notify_all()

    def _works_elsewhere(self, worker: Callable[[Items[T]], None]) -> None:
        _leave_core(self._core)
        with _limit.of_a_call():
            worker(self)

    def _guarded(self, task: Callable[[], None]) -> None:
        """Call ``task``, and keep its error if it is the first."""
        try:
            task()
        except BaseException as error:
            with self._changed:
                self._error = self._error or error
                self._changed.notify_all()


def worth(most: int, operations: float) -> int:
    """Number of threads, at most ``most``, with enough operations for each."""
    return max(1, min(most, int(operations / WORTH_A_THREAD)))


def pieces_for(threads: int, most: int, operations: float) -> int:
    """Number of pieces: one for each thread, and more where there is enough work."""
    return max(threads, min(most, int(operations / (2 * WORTH_A_THREAD))))

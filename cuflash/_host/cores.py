"""Which cores does a call on the CPU use, and in which order do their results add up?

Threads of our own take items of one list; BLAS gets one thread. Its threads would wait for each
other at every tile, and how it divides a product decides the bits. (D127)

Threads live as long as a call, so that nothing is left to break in a forked process.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

T = TypeVar("T")

#: Floating-point operations that are worth a thread: 0.2 ms, twice the start of one.
WORTH_A_THREAD = 2**24
#: OpenBLAS computes smaller products (multiply-adds, elements of a matrix) on one thread anyway.
SMALL_PRODUCT, SMALL_MATRIX = 2**18, 2**13


class _Limit:
    """One BLAS thread while any call runs, counted; then as many as there were."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._calls = 0
        self._threads = 1
        self._before: list[tuple[Any, int]] = []

    def __enter__(self) -> int:
        """Return the number of threads that BLAS would have used, divided by the calls that run."""
        with self.lock:
            if not self._calls:
                found = [(blas, blas.get_num_threads()) for blas in _libraries()]
                self._threads = min((n for _, n in found), default=available())
                self._before = [(b, n) for b, n in found if n > 1 or _of_each_thread(b)]
            self._calls += 1
            for blas, _ in self._before:
                _set_threads(blas, 1)
            return max(self._threads // self._calls, 1)

    def __exit__(self, *_: object) -> None:
        with self.lock:
            self._calls -= 1
            self.restore(every=not self._calls)

    def restore(self, *, every: bool) -> None:
        """Give back the numbers of all threads, or what OpenMP or MKL keeps for this thread."""
        for blas, threads in self._before:
            if every or _of_each_thread(blas):
                _set_threads(blas, threads)


def _set_threads(blas: Any, number: int) -> None:
    """Set the number of threads; threadpoolctl 3.8 lets only OpenBLAS's first caller: forget it."""
    clear = getattr(blas, "clear_controlling_thread", lambda **_: None)
    clear(force=True)
    blas.set_num_threads(number)
    clear()


def _of_each_thread(blas: Any) -> bool:
    """Whether each thread has a number of its own: MKL since threadpoolctl asks for that."""
    own: bool = "MKL_Set_Num_Threads_Local" in blas.check_symbols
    return own or bool(blas.threading_layer == "openmp")


@functools.cache
def _libraries() -> tuple[Any, ...]:
    """The BLAS libraries of this process, as threadpoolctl controls them."""
    from threadpoolctl import ThreadpoolController  # 10 ms, which small calls do without

    return tuple(ThreadpoolController().select(user_api="blas").lib_controllers)


_limit = _Limit()


def _forget_calls_of_the_parent() -> None:
    """Calls of other threads do not go on in a forked process, nor may their limit."""
    global _limit
    before, _limit = _limit, _Limit()
    before.restore(every=True)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        # No thread is just setting a number then: a lock of threadpoolctl would stay locked.
        before=lambda: _limit.lock.acquire(),
        after_in_parent=lambda: _limit.lock.release(),
        after_in_child=_forget_calls_of_the_parent,
    )


def available() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@contextlib.contextmanager
def single_threaded_blas(m: int, n: int, width: int) -> Iterator[int]:
    """Limit BLAS to one thread, and yield how many threads the caller may use instead.

    ``m`` x ``n`` is the largest tile, ``width`` the largest head size.
    """
    if m * n * width <= SMALL_PRODUCT and max(m * n, m * width, n * width) <= SMALL_MATRIX:
        yield 1
        return
    with _limit as threads:
        yield threads


class Items(Generic[T]):
    """Items that threads take in order, and the turns in which their results are added."""

    def __init__(self, items: Iterable[T]) -> None:
        self._items = enumerate(items)
        self._changed = threading.Condition()
        self._turn = 0
        self._error: BaseException | None = None
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
        """Call ``worker`` with these items in so many threads, this one among them.

        The first error ends the others after their item, and is raised here. So is an interruption,
        even of the wait for the others: nobody writes results after this has returned.
        """
        helpers: list[threading.Thread] = []

        def helps() -> None:
            with self._changed:
                self._helping += 1
            with _limit:
                self._guarded(lambda: worker(self))
            with self._changed:
                self._helping -= 1
                self._changed.notify_all()

        def works_with_helpers() -> None:
            # While the interpreter ends, a new thread does not come before it has (Python < 3.12).
            for _ in range(0 if sys.is_finalizing() else threads - 1):
                # The context holds what errors of arithmetic do, as np.errstate has it.
                run = contextvars.copy_context().run
                helper = threading.Thread(target=run, args=(helps,), name="cuflash")
                try:
                    helper.start()
                except RuntimeError:  # the interpreter ends, or the system has no more
                    break
                helpers.append(helper)
            worker(self)

        def waits() -> None:
            with self._changed:
                self._changed.wait_for(lambda: not self._helping)

        self._guarded(works_with_helpers)
        while self._helping:  # Thread.join, once interrupted, no longer waits
            self._guarded(waits)
        for helper in helpers:
            helper.join()
        if self._error is not None:
            raise self._error

    def _guarded(self, task: Callable[[], None]) -> None:
        """Call ``task``, and keep its error if it is the first."""
        try:
            task()
        except BaseException as error:
            with self._changed:
                self._error = self._error or error
                self._changed.notify_all()


def worth(most: int, operations: float) -> int:
    """So many threads that each has enough to do."""
    return max(1, min(most, int(operations / WORTH_A_THREAD)))


def pieces_for(threads: int, most: int, operations: float) -> int:
    """Pieces of work: one for each thread, and more where there is enough of it."""
    return max(threads, min(most, int(operations / (2 * WORTH_A_THREAD))))

"""How is the result of a sweep used, in this process or for this user?"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from cuflash._errors import wrong_value
from cuflash._launch import plan_cache
from cuflash._select import measured as select_measured
from cuflash._select.hardware import present, typical
from cuflash.tuning._kernels import kernel_type, tile_of
from cuflash.tuning._rows import Sweep, load
from cuflash.tuning._space import default_configs
from cuflash.tuning._workload import Workload


def use(file: str | os.PathLike[str] | Sweep | None) -> contextlib.ExitStack:
    """From now on use measured tiles in this process, in preference to the shipped ones.

    Parameters
    ----------
    file : path, Sweep or None
        The file of a sweep, a file of tiles such as :func:`user_table`, or a result of
        :func:`sweep`. None for the shipped tiles only. Rows are added to the rows in use.

    Returns
    -------
    context manager
        In ``with cuflash.tuning.use(file): ...`` the tiles are used until the end of the block.

    Raises
    ------
    ValueError
        For any other file, an illegal tile, or a file without a row for the device of this machine.

    Notes
    -----
    A row is used for its kernel, dtype, padded head sizes, set of options and device, and for no
    others. Tiles decide the order of sums: results have the same error bounds, not the same bits.

    Examples
    --------
    >>> from cuflash import tuning
    >>> with tuning.use(None):
    ...     pass  # calls here run with the shipped tiles
    """
    before = dict(select_measured.in_use())
    ending = contextlib.ExitStack()
    ending.callback(_put, before)
    if file is None:
        _put({})
        return ending
    if isinstance(file, Sweep):
        rows, where = best_rows(file), "sweep"
    elif select_measured.is_sweep(Path(file)):
        rows, where = best_rows(load(file)), str(file)
    else:
        rows, where = select_measured.read(Path(file)), str(file)
    for row in rows:
        _check(row, where)
    device = present()
    if device is not None and all(row.key.device != device.name for row in rows):
        names = sorted({row.key.device for row in rows})
        got = f"tiles for {', '.join(names) or 'no device'}"
        raise wrong_value(where, got, f"tiles for the device here, {device.name}")
    _put(before | {row.key: row for row in rows})
    return ending


def _put(rows: dict[select_measured.Key, select_measured.Row]) -> None:
    select_measured.replace_rows(rows)
    plan_cache.forget()


def best_rows(found: Sweep) -> list[select_measured.Row]:
    """The best tile of a sweep as rows, one for each pass that was timed with it.

    It is the shipped tile unless another one is faster.
    """
    return _rows(found, found.best["values"] if found.best_relative <= 1 else found.default_values)


def table_rows(found: Sweep) -> list[select_measured.Row]:
    """Rows for the problem of a sweep, with the tiles that the tables have."""
    return _rows(found, None)


def _rows(found: Sweep, values: Mapping[str, int] | None) -> list[select_measured.Row]:
    header = found.header
    if header["workload"] is None:
        got = f"a sweep of {found.kernel}, no kernel of this library"
        raise wrong_value("sweep", got, "a sweep of cuflash's kernels")
    like = typical(header["arch"])
    count = header.get("multiprocessors", like.multiprocessors)
    of_tables = like._replace(name="", multiprocessors=count)  # no measured row has this name
    measured = f"{found.device}, {header['date'][:10]}, kernels {header['kernels'][:9]}"
    return [
        select_measured.Row(
            select_measured.key_of(config, found.device),
            tuple((values or tile_of(config)).items()),
            measured,
        )
        for config in default_configs(found.workload, found.kernel, of_tables)
    ]


def _check(row: select_measured.Row, where: str) -> None:
    """Raise unless a tile is legal for the kernel at these head sizes."""
    kind = kernel_type(row.key.kernel)
    unknown = sorted(set(dict(row.values)) - set(kind.tunables))
    if unknown:
        got = f"parameter {unknown[0]!r} of {row.key.kernel}"
        raise wrong_value(where, got, f"one of {', '.join(kind.tunables)}")
    sizes = (row.key.head_dim, row.key.head_dim_v)
    if kind.row_numbers:  # the exact sizes are among the options
        true = re.search(r"(\d+)x(\d+)", row.key.options)
        sizes = (int(true[1]), int(true[2])) if true else sizes
    try:
        work = Workload(1, 1, 1, 1024, 1024, *sizes, row.key.dtype)
        default, *_ = default_configs(work, row.key.kernel, typical("sm_90"))
        select_measured.with_values(default, dict(row.values))
    except (ValueError, NotImplementedError) as error:
        got = f"{row.key.kernel} with {dict(row.values)}"
        raise wrong_value(where, got, "a legal tile", str(error).replace("self.", "")) from None


def user_table() -> Path:
    """Path of this user's table, which CUFLASH_TILES=user selects; it need not exist.

    Examples
    --------
    >>> from cuflash import tuning
    >>> tuning.user_table().suffix
    '.json'
    """
    return select_measured.user_file()


def save(found: Sweep, file: str | os.PathLike[str] | None = None) -> Path:
    """Save the best tile of a sweep in a file, this user's table by default; return its path.

    Rows with other keys are kept, also those that other threads and processes save meanwhile. An
    illegal tile raises a ValueError.

    Examples
    --------
    >>> from cuflash import tuning
    >>> tuning.save(tuning.load("h100.jsonl"), "tiles.json").name
    'tiles.json'
    """
    path = user_table() if file is None else Path(file)
    own = {row.key: row for row in best_rows(found)}
    for row in own.values():
        _check(row, "sweep")
    with _alone(path):
        rows = {row.key: row for row in (select_measured.read(path) if path.exists() else [])}
        select_measured.write(path, (rows | own).values())
    return path


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Keep other threads and processes from changing a file, by a lock on a file beside it.

    The system frees the lock when its holder ends. The file ``*.lock`` is never removed, because
    others may be waiting for its lock.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = os.open(path.with_name(f"{path.name}.lock"), os.O_RDWR | os.O_CREAT, 0o666)
    try:
        if sys.platform == "win32":
            import msvcrt

            while True:
                try:
                    msvcrt.locking(lock, msvcrt.LK_LOCK, 1)
                    break
                except OSError as error:  # after ten seconds of waiting
                    if error.errno != errno.EDEADLK:
                        raise
        else:
            import fcntl

            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)  # frees the lock

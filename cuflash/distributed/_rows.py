"""How is a whole array split among ranks, and put together again?"""

from __future__ import annotations

from typing import Any, overload

import numpy as np

from cuflash._arrays import (
    Array,
    NativeT,
    array_module,
    native,
    on_device_of,
    refuse_captured,
)
from cuflash._errors import shown, wrong_type, wrong_value
from cuflash._problem.checks import integer_value, is_integer
from cuflash.distributed._communicator import (
    Communicator,
    Schedule,
    Wait,
    checked_communicator,
    drive,
)
from cuflash.distributed._handshake import agreed, as_given, held_rows, own_of, recalled
from cuflash.distributed._layout import Chunks, checked_layout, positions
from cuflash.distributed._share import Group, rows_back, rows_first


def shard(x: Any, *, comm: Communicator, layout: str = "zigzag", axis: int = -2) -> Any:
    """The rows of a whole array that a rank holds. Every rank has the array, so nothing is sent.

    Parameters
    ----------
    x : array
        The same array on every rank.
    comm : communicator
        As in :func:`attention`. If it runs several ranks in this process, the result is a list.
    layout : {"zigzag", "contiguous"}
        Which rows a rank holds.
    axis : int
        The axis of the sequence.

    Returns
    -------
    array
        A copy, on the rank's device.

    Raises
    ------
    TypeError, ValueError
        For an invalid axis or an unknown layout.

    Examples
    --------
    >>> import numpy as np
    >>> from cuflash import distributed
    >>> parts = distributed.shard(np.arange(8), comm=distributed.simulated(2), axis=0)
    >>> parts[0]
    array([0, 1, 6, 7])
    """
    checked_communicator(comm)
    layout, array = checked_layout(layout), native("x", x)
    axis, xp = _checked_axis(axis, array), array_module(array)
    parts = {}
    for rank in comm.ranks:
        own = positions(array.shape[axis], rank, comm.size, layout=layout)
        with on_device_of(array):
            refuse_captured(xp, "distributed.shard")
            part = xp.take(array, xp.asarray(own), axis=axis)
        with comm.on(rank):
            refuse_captured(xp, "distributed.shard")
            parts[rank] = xp.array(part)  # copies to the current device
    return as_given(comm, parts)


@overload
def unshard(x: NativeT, *, comm: Communicator, layout: str = ..., axis: int = ...) -> NativeT: ...
@overload
def unshard(x: Any, *, comm: Communicator, layout: str = ..., axis: int = ...) -> Any: ...
def unshard(x: Any, *, comm: Communicator, layout: str = "zigzag", axis: int = -2) -> Any:
    """The whole array, on every rank, from the rows that each rank holds.

    Parameters
    ----------
    x : array
        The rank's rows; a list if several ranks run in this process.
    comm, layout, axis
        As in :func:`shard`.

    Returns
    -------
    array
        The whole array; a list if several ranks run in this process.

    Raises
    ------
    TypeError, ValueError, CommunicationError
        As :func:`attention`.

    Examples
    --------
    >>> import numpy as np
    >>> from cuflash import distributed
    >>> comm = distributed.simulated(2)
    >>> parts = distributed.shard(np.arange(8), comm=comm, axis=0)
    >>> distributed.unshard(parts, comm=comm, axis=0)[1]
    array([0, 1, 2, 3, 4, 5, 6, 7])
    """
    checked_communicator(comm)

    def facts_of(rank: int) -> tuple[dict[str, Any], Array]:
        array = native("x", own_of(comm, rank, "x", x))
        comm.check_library("x", array)
        refuse_captured(array_module(array), "distributed.unshard")
        own_axis = _checked_axis(axis, array)
        others = list(array.shape)
        rows = others.pop(own_axis)
        alike = {"function": "unshard", "layout": checked_layout(layout), "axis": own_axis}
        alike |= {"x without rows": f"{array.dtype} {others}"}
        return {"alike": alike, "rows": rows}, array

    def schedule(rank: int, array: Array, held: tuple[Chunks, ...]) -> Schedule:
        wire, group = rows_first(array, axis), Group(rank, range(comm.size), held)
        exchange, whole = group.gather(lambda _: wire)
        yield Wait((yield exchange))
        return rows_back(whole, axis)

    with comm.call():
        recalled(comm, {})  # others may be in attention(), which begins like this
        facts, arrays = agreed(comm, facts_of)
        held = held_rows("x", [f["rows"] for f in facts], layout)
        found = drive(comm, {rank: schedule(rank, a, held) for rank, a in arrays.items()})
        return as_given(comm, found)


def _checked_axis(axis: Any, array: Array) -> int:
    """The axis, counted from the front."""
    if not is_integer(axis):
        raise wrong_type("axis", shown(axis), "an int")
    axis = integer_value("axis", axis, "an int")
    if not -array.ndim <= axis < array.ndim:
        raise wrong_value("axis", axis, f"an axis from {-array.ndim} to {array.ndim - 1}")
    return int(np.arange(array.ndim)[axis])

"""Can a checkpoint made by an enemy do anything through the example's unpickler?"""

from __future__ import annotations

import io
import pickle
import struct
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from rxnmapper_weights import LEGACY_MAGIC, LEGACY_PROTOCOL, read_legacy_torch

END = b"."
REBUILD = b"ctorch._utils\n_rebuild_tensor_v2\n"
FLOAT_STORAGE = b"ctorch\nFloatStorage\n"
ORDERED_DICT = b"ccollections\nOrderedDict\n"


def text(value: str) -> bytes:
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def counts(values: tuple[int, ...]) -> bytes:
    return b"(" + b"".join(b"I%d\n" % value for value in values) + b"t"


def tensor(
    key: str = "7",
    length: int = 6,
    offset: int = 0,
    shape: tuple[int, ...] = (2, 3),
    strides: tuple[int, ...] = (3, 1),
    kind: bytes = FLOAT_STORAGE,
) -> bytes:
    """Pickle opcodes that rebuild a tensor, as torch writes them."""
    storage = b"(" + text("storage") + kind + text(key) + text("cpu") + b"I%d\nNtQ" % length
    geometry = b"I%d\n" % offset + counts(shape) + counts(strides)
    return REBUILD + b"(" + storage + geometry + b"\x89" + ORDERED_DICT + b")RtR"


def state(**entries: bytes) -> bytes:
    """Pickle opcodes of an ordered dict with these values."""
    items = b"".join(text(name) + value for name, value in entries.items())
    return b"\x80\x02" + ORDERED_DICT + b")R(" + items + b"u" + END


def checkpoint(
    state_dict: bytes,
    storages: dict[str, np.ndarray],
    *,
    magic: bytes | None = None,
    protocol: bytes | None = None,
    system: bytes | None = None,
    keys: bytes | None = None,
) -> bytes:
    """A legacy torch file: five pickles and the storages; any pickle may be replaced."""
    pickles = [
        pickle.dumps(LEGACY_MAGIC, 2) if magic is None else magic,
        pickle.dumps(LEGACY_PROTOCOL, 2) if protocol is None else protocol,
        pickle.dumps({"little_endian": True}, 2) if system is None else system,
        state_dict,
        pickle.dumps(list(storages), 2) if keys is None else keys,
    ]
    values = [struct.pack("<q", a.size) + a.astype("<f4").tobytes() for a in storages.values()]
    return b"".join(pickles + values)


SIX = {"7": np.arange(6)}


def test_tensors_come_back_as_views_of_their_storages() -> None:
    data = checkpoint(
        state(
            rows=tensor(),
            columns=tensor(shape=(3, 2), strides=(1, 3)),
            tail=tensor(offset=4, shape=(2,), strides=(1,)),
            scalar=tensor(offset=5, shape=(), strides=()),
            empty=tensor(offset=6, shape=(0, 3), strides=(3, 1)),
            other=tensor(key="8", length=1, shape=(1,), strides=(1,)),
        ),
        SIX | {"8": np.array([0.5])},
    )
    read = read_legacy_torch(data)
    np.testing.assert_array_equal(read["rows"], [[0, 1, 2], [3, 4, 5]])
    np.testing.assert_array_equal(read["columns"], [[0, 3], [1, 4], [2, 5]])
    np.testing.assert_array_equal(read["tail"], [4, 5])
    assert read["scalar"] == 5
    assert read["empty"].shape == (0, 3)
    np.testing.assert_array_equal(read["other"], [0.5])
    assert all(array.dtype == np.float32 for array in read.values())


# Each makes a folder when the standard unpickler loads it.
def by_reduce(folder: str) -> bytes:
    return b"cos\nmkdir\n(" + text(folder) + b"tR" + END


def by_stack_global(folder: str) -> bytes:
    return b"\x80\x04" + text("os") + text("mkdir") + b"\x93(" + text(folder) + b"tR" + END


def by_inst(folder: str) -> bytes:
    return b"(" + text(folder) + b"ios\nmkdir\n" + END


def by_obj(folder: str) -> bytes:
    return b"(cos\nmkdir\n" + text(folder) + b"o" + END


def by_eval(folder: str) -> bytes:
    code = f"__import__('os').mkdir({folder!r})"
    return b"cbuiltins\neval\n(" + text(code) + b"tR" + END


def by_exec(folder: str) -> bytes:
    code = f"import os; os.mkdir({folder!r})"
    return b"cbuiltins\nexec\n(" + text(code) + b"tR" + END


def by_getattr(folder: str) -> bytes:
    mkdir = b"cbuiltins\ngetattr\n(cimportlib\nimport_module\n(" + text("os") + b"tR"
    return mkdir + text("mkdir") + b"tR(" + text(folder) + b"tR" + END


def by_system(folder: str) -> bytes:
    return b"cos\nsystem\n(" + text(f'mkdir "{folder}"') + b"tR" + END


def by_popen(folder: str) -> bytes:
    arguments = pickle.dumps([sys.executable, "-c", f"import os; os.mkdir({folder!r})"], 0)[:-1]
    return b"csubprocess\ncheck_call\n(" + arguments + b"tR" + END


ATTACKS = (
    by_reduce,
    by_stack_global,
    by_inst,
    by_obj,
    by_eval,
    by_exec,
    by_getattr,
    by_system,
    by_popen,
)
PLACES = ("magic", "protocol", "system", "state_dict", "keys")


@pytest.mark.parametrize("attack", ATTACKS)
def test_the_attacks_are_real(attack: Callable[[str], bytes], tmp_path: Path) -> None:
    folder = tmp_path / "made"
    pickle.loads(attack(str(folder)))
    assert folder.is_dir()


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("attack", ATTACKS)
def test_no_attack_runs(attack: Callable[[str], bytes], place: str, tmp_path: Path) -> None:
    folder = tmp_path / "made"
    parts = {"state_dict": state(x=tensor()), place: attack(str(folder))}
    data = checkpoint(parts.pop("state_dict"), SIX, **parts)
    with pytest.raises(pickle.UnpicklingError, match="refused"):
        read_legacy_torch(data)
    assert not folder.exists()


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("torch", "load"),
        ("torch", "LongStorage"),
        ("torch._utils", "_rebuild_tensor"),
        ("torch._utils", "_rebuild_tensor_v2.__globals__"),
        ("collections", "OrderedDict.fromkeys"),
        ("collections", "defaultdict"),
        ("numpy", "load"),
        ("builtins", "dict"),
        ("__builtin__", "OrderedDict"),
        ("collections.abc", "OrderedDict"),
    ],
)
def test_globals_beside_the_list_are_refused(module: str, name: str) -> None:
    data = b"\x80\x04" + text(module) + text(name) + b"\x93" + END
    with pytest.raises(pickle.UnpicklingError, match="refused"):
        read_legacy_torch(checkpoint(data, {}))


@pytest.mark.parametrize(
    "fault",
    [
        {"offset": 1},
        {"offset": -1},
        {"shape": (7,), "strides": (1,)},
        {"shape": (2, 3), "strides": (4, 1)},
        {"shape": (2, 3), "strides": (-3, 1)},
        {"shape": (-2, 3)},
        {"shape": (2,), "strides": (1, 1)},
        {"shape": (2**62,), "strides": (0,)},
        {"shape": (2**62, 2**62), "strides": (0, 0)},
        {"shape": (2,), "strides": (2**64,)},
        {"length": 2**40},
        {"length": -1},
    ],
)
def test_tensors_outside_their_storage_are_refused(fault: dict[str, object]) -> None:
    data = checkpoint(state(x=tensor(**fault)), SIX)  # type: ignore[arg-type]
    with pytest.raises(pickle.UnpicklingError):
        read_legacy_torch(data)


def test_one_key_has_one_length() -> None:
    entries = {"x": tensor(), "y": tensor(length=5, shape=(5,), strides=(1,))}
    with pytest.raises(pickle.UnpicklingError, match="two different lengths"):
        read_legacy_torch(checkpoint(state(**entries), SIX))


def test_values_that_are_no_tensors_are_refused() -> None:
    with pytest.raises(pickle.UnpicklingError, match="not a tensor"):
        read_legacy_torch(checkpoint(state(x=text("weights")), {}))


@pytest.mark.parametrize("missing", [1, 4, 24, 25, 32])
def test_a_file_cut_short_is_refused(missing: int) -> None:
    data = checkpoint(state(x=tensor()), SIX)
    with pytest.raises(pickle.UnpicklingError, match="cut short"):
        read_legacy_torch(data[:-missing])


def test_a_file_with_an_end_too_many_is_refused() -> None:
    with pytest.raises(pickle.UnpicklingError, match="goes on"):
        read_legacy_torch(checkpoint(state(x=tensor()), SIX) + b"\0")


def test_other_files_are_refused() -> None:
    zip_format = io.BytesIO(b"PK\x03\x04archive/data.pkl\n")
    for data in (zip_format.getvalue(), pickle.dumps(1), pickle.dumps("weights")):
        with pytest.raises(pickle.UnpicklingError):
            read_legacy_torch(data)
    big_endian = pickle.dumps({"little_endian": False}, 2)
    with pytest.raises(pickle.UnpicklingError, match="big-endian"):
        read_legacy_torch(checkpoint(state(x=tensor()), SIX, system=big_endian))


def test_allowed_objects_cannot_be_bent_by_the_build_opcode() -> None:
    """BUILD sets attributes; on what the three globals stand for, it must change nothing."""
    code = text("__code__") + b"N"
    bend = REBUILD + b"(N}(" + code + b"utb0"
    data = checkpoint(b"\x80\x02" + bend + state(x=tensor())[2:], SIX)
    with pytest.raises((AttributeError, TypeError)):
        read_legacy_torch(data)
    np.testing.assert_array_equal(
        read_legacy_torch(checkpoint(state(x=tensor()), SIX))["x"], [[0, 1, 2], [3, 4, 5]]
    )

"""Can a malicious checkpoint do anything through the example's reader of pickles?"""

from __future__ import annotations

import os
import pickle
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import rxnmapper_weights as weights
from hypothesis import given
from hypothesis import strategies as st
from rxnmapper_weights import LEGACY_MAGIC, LEGACY_PROTOCOL, read_legacy_torch

END = b"."
REBUILD = b"ctorch._utils\n_rebuild_tensor_v2\n"
FLOAT_STORAGE = b"ctorch\nFloatStorage\n"
ORDERED_DICT = b"ccollections\nOrderedDict\n"
PLACES = ("magic", "protocol", "system", "state", "keys")


def text(value):
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def number(value):
    return pickle.dumps(value, 2)[2:-1]


def counts(values):
    return b"(" + b"".join(map(number, values)) + b"t"


def storage(key="7", length=6, kind=FLOAT_STORAGE):
    return b"(" + text("storage") + kind + text(key) + text("cpu") + number(length) + b"NtQ"


def tensor(of=None, offset=0, shape=(2, 3), strides=(3, 1)):
    """Return pickle opcodes that rebuild a tensor, as torch writes them."""
    geometry = number(offset) + counts(shape) + counts(strides)
    return REBUILD + b"(" + (of or storage()) + geometry + b"\x89" + ORDERED_DICT + b")RtR"


def state(*before, **entries):
    """Return pickle opcodes of an ordered dict with these values and torch's metadata."""
    items = b"".join(text(name) + value for name, value in entries.items())
    metadata = b"}" + text("_metadata") + ORDERED_DICT + b")Rsb"
    return b"\x80\x02" + b"".join(before) + ORDERED_DICT + b")R(" + items + b"u" + metadata + END


SIX = np.arange(6)


def checkpoint(storages=None, **pickles):
    """Return a legacy torch file: five pickles, any of them replaceable, and the storages."""
    storages = {"7": SIX} if storages is None else storages
    parts = {
        "magic": pickle.dumps(LEGACY_MAGIC, 2),
        "protocol": pickle.dumps(LEGACY_PROTOCOL, 2),
        "system": pickle.dumps({"little_endian": True}, 2),
        "state": state(x=tensor()),
        "keys": pickle.dumps(list(storages), 2),
    }
    values = [struct.pack("<q", a.size) + a.astype("<f4").tobytes() for a in storages.values()]
    return b"".join((*(parts | pickles).values(), *values))


def test_tensors_come_back_as_views_of_their_storages():
    entries = state(
        rows=tensor(),
        tail=tensor(offset=4, shape=(2,), strides=(1,)),
        scalar=tensor(offset=5, shape=(), strides=()),
        other=tensor(storage("8", 1), shape=(1,), strides=(1,)),
    )
    read = read_legacy_torch(checkpoint({"7": SIX, "8": np.array([0.5])}, state=entries))
    np.testing.assert_array_equal(read["rows"], [[0, 1, 2], [3, 4, 5]])
    np.testing.assert_array_equal(read["tail"], [4, 5])
    assert read["scalar"] == 5
    np.testing.assert_array_equal(read["other"], [0.5])
    assert all(array.dtype == np.float32 for array in read.values())


#: The standard unpickler makes a folder when it loads one of these.
ATTACKS = {
    "reduce": lambda folder: b"cos\nmkdir\n(" + text(folder) + b"tR.",
    "stack_global": lambda folder: (
        b"\x80\x04" + text("os") + text("mkdir") + b"\x93(" + text(folder) + b"tR."
    ),
    "inst": lambda folder: b"(" + text(folder) + b"ios\nmkdir\n.",
    "obj": lambda folder: b"(cos\nmkdir\n" + text(folder) + b"o.",
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_no_attack_runs(attack, tmp_path):
    folder = tmp_path / "made"
    data = ATTACKS[attack](str(folder))
    for place in PLACES:
        with pytest.raises(pickle.UnpicklingError, match="refused"):
            read_legacy_torch(checkpoint(**{place: data}))
        assert not folder.exists()
    pickle.loads(data)
    assert folder.is_dir()


FAULTS = {
    "beyond its end": state(x=tensor(offset=1)),
    "before its start": state(x=tensor(offset=-1)),
    "a row too many": state(x=tensor(shape=(3, 3))),
    "strides of another shape": state(x=tensor(strides=(4, 1))),
    "overlapping": state(x=tensor(strides=(0, 0))),
    "a stride too many": state(x=tensor(strides=(3, 1, 1))),
    "sizes of no address": state(x=tensor(shape=(2**62, 2**62), strides=(2**62, 1))),
    "negative sizes": state(x=tensor(shape=(-2, -3), strides=(-3, 1))),
    "no size": state(x=tensor(shape=(0, 2**70), strides=(2**70, 1))),
    "more axes than numpy has": state(x=tensor(shape=(1,) * 99, strides=(1,) * 99)),
    "a storage larger than its file": state(x=tensor(storage(length=2**40))),
    "a negative length": state(x=tensor(storage(length=-1))),
    "two lengths": state(x=tensor(), y=tensor(storage(length=5), shape=(5,), strides=(1,))),
    "a tensor as storage": state(x=tensor(tensor(shape=(6,), strides=(1,)))),
    "another storage": state(x=tensor(storage(kind=b"ctorch\nLongStorage\n"))),
    "no tensor": state(x=text("weights")),
    "no dict": pickle.dumps(1, 2),
    "keys that are no text": b"\x80\x02}(" + number(1) + tensor() + b"u" + END,
    "a name within a name": b"\x80\x04" + text("torch._utils") + text("_a.b") + b"\x93" + END,
    "a bent class": state(REBUILD, b"(N}(", text("__code__"), b"Nutb0", x=tensor()),
    "nothing to take": b"\x80\x02R" + END,
    "nothing kept": b"\x80\x02h\x07" + END,
    "a mark that was never set": b"\x80\x02u" + END,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_refused(fault):
    with pytest.raises(pickle.UnpicklingError):
        read_legacy_torch(checkpoint(state=FAULTS[fault]))


def test_attributes_that_a_pickle_sets_are_none_of_the_dict():
    """Attributes that BUILD sets do not reach the dict, where ``values`` could hide its content."""
    hidden = state(x=tensor())[:-1] + b"}(" + text("values") + REBUILD + text("keys") + b"]ub" + END
    assert list(read_legacy_torch(checkpoint(state=hidden))) == ["x"]


def test_weights_that_no_key_fills_are_refused():
    with pytest.raises(pickle.UnpicklingError, match="absent"):
        read_legacy_torch(checkpoint({}))


@pytest.mark.parametrize("missing", [1, 4, 24, 25, 32])
def test_a_file_cut_short_is_refused(missing):
    with pytest.raises(pickle.UnpicklingError, match="cut short"):
        read_legacy_torch(checkpoint()[:-missing])


def test_other_files_are_refused():
    for data in (b"", b"PK\x03\x04archive/data.pkl\n", pickle.dumps(1), checkpoint() + b"\0"):
        with pytest.raises(pickle.UnpicklingError):
            read_legacy_torch(data)
    big_endian = pickle.dumps({"little_endian": False}, 2)
    with pytest.raises(pickle.UnpicklingError, match="big-endian"):
        read_legacy_torch(checkpoint(system=big_endian))


NESTED = b")" + b"\x85" * 100_000  # nested tuples
SHARED = b")" + b"q\x00h\x00\x86" * 100  # a tree of 2^100 leaves in 500 bytes
#: These cost the standard unpickler more than their bytes, or end its process.
BOMBS = {
    "a place far out": b"Nr" + struct.pack("<I", 2**28 - 1) + b"0",
    "a deep key": b"}" + NESTED + b"Ns0",
    "a wide key": b"}" + SHARED + b"Ns0",
    "a deep identity": NESTED + b"Q0",
    "a wide identity": SHARED + b"Q0",
    "a wide call": REBUILD + SHARED + b"R0",
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_bombs_cost_no_more_than_their_bytes(bomb, tmp_path):
    """A bomb costs at most 200 times its bytes (in another process, as it may crash or hang)."""
    file = tmp_path / "bomb.bin"
    file.write_bytes(checkpoint(state=BOMBS[bomb] + b"N" + END))
    code = (
        "import pathlib, sys, tracemalloc, rxnmapper_weights as weights\n"
        "data = pathlib.Path(sys.argv[1]).read_bytes()\n"
        "tracemalloc.start()\n"
        "try: weights.read_legacy_torch(data)\n"
        "except weights.pickle.UnpicklingError: print(tracemalloc.get_traced_memory()[1])\n"
    )
    given = {**os.environ, "PYTHONPATH": str(Path(weights.__file__).parent)}
    run = subprocess.run(
        [sys.executable, "-c", code, str(file)], env=given, capture_output=True, timeout=60
    )
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) < 1_000_000 + 200 * file.stat().st_size


PIECES = [bytes([code]) for code in b"}])()Nutbsae0RQ\x85\x86\x88\x89q\x00h\x00."]
PIECES += [REBUILD, FLOAT_STORAGE, ORDERED_DICT, text("7"), text("storage"), storage(), tensor()]
PIECES += [*map(number, (0, 1, 6, -1, 2**70)), b"q\x00", b"h\x00", pickle.dumps(LEGACY_MAGIC)]


@pytest.mark.filterwarnings("ignore:invalid escape")  # pickletools reads text that is then refused
@given(
    st.fixed_dictionaries(
        {},
        optional={
            p: st.lists(st.sampled_from(PIECES)).map(lambda x: b"".join(x) + END) for p in PLACES
        },
    ),
    st.lists(st.tuples(st.integers(0, 10_000), st.binary(max_size=3)), max_size=3),
)
def test_whatever_the_file_it_is_read_or_refused(pickles, changes):
    data = bytearray(checkpoint(**pickles))
    for place, new in changes:
        place %= len(data)
        data[place : place + len(new)] = new
    try:
        read = read_legacy_torch(bytes(data))
    except pickle.UnpicklingError:
        return
    for array in read.values():
        assert 4 * array.size <= len(data)
        assert array.tobytes() in bytes(data)

"""Where do the trained weights come from, and how are they read safely?

The wheel of the PyPI package ``rxnmapper`` 0.4.3 (MIT) contains a trained ALBERT. pip downloads the
wheel into the user's cache folder. It is read as a zip archive and never installed, because this
would also install torch and transformers. The checkpoint inside is a legacy torch pickle. A pickle
can call any function, so ``pickle`` is not used. This module interprets the opcodes itself, and
only those that a state dict needs: they make plain values, import nothing and call nothing.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import pickle
import pickletools
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np

REQUIREMENT = "rxnmapper==0.4.3"
WHEEL_NAME = "rxnmapper-0.4.3-py3-none-any.whl"
WHEEL_SHA256 = "27876a4286881aafd286fd6f24a6a56a4ca6ba22d68e035a0ea120106c541ba5"
MODEL_FOLDER = "rxnmapper/models/transformers/albert_heads_8_uspto_all_1310k/"
DOWNLOAD_SECONDS = 60

LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
LEGACY_PROTOCOL = 1001
MOST_AXES = 4

T = TypeVar("T")


class WheelUnavailableError(RuntimeError):
    """The wheel is not in the cache and cannot be downloaded; the message is one line."""


@dataclass(frozen=True)
class Checkpoint:
    """The model in the wheel: configuration, vocabulary (list of tokens) and named arrays."""

    config: dict[str, Any]
    vocabulary: list[str]
    tensors: dict[str, np.ndarray]


def cache_folder() -> Path:
    """Return the folder in the user's cache for the wheel."""
    if sys.platform == "win32":
        root = os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local"
    elif sys.platform == "darwin":
        root = Path.home() / "Library" / "Caches"
    else:
        root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "cuflash"


def is_the_wheel(path: Path) -> bool:
    """Return whether ``path`` is a file with exactly the pinned contents."""
    return path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == WHEEL_SHA256


def download(path: Path) -> None:
    """Download the wheel to ``path`` with pip, from the index that pip is configured for."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-input", "--no-deps", "--only-binary=:all:", "--retries=1", "--timeout=10"]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # The file is moved into place when complete, so that no other process reads half of it.
        with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
            requirements = Path(scratch) / "requirements.txt"
            requirements.write_text(f"{REQUIREMENT} --hash=sha256:{WHEEL_SHA256}\n")
            subprocess.run(
                [*command, "--require-hashes", "--dest", scratch, "-r", str(requirements)],
                check=True,
                capture_output=True,
                text=True,
                timeout=DOWNLOAD_SECONDS,
            )
            (Path(scratch) / WHEEL_NAME).replace(path)
    except subprocess.TimeoutExpired:
        raise WheelUnavailableError(f"pip had no answer in {DOWNLOAD_SECONDS} s") from None
    except subprocess.CalledProcessError as error:
        lines = error.stderr.strip().splitlines() or [f"pip ended with code {error.returncode}"]
        raise WheelUnavailableError(lines[-1].removeprefix("ERROR: ")) from None
    except OSError as error:
        raise WheelUnavailableError(str(error)) from None


def obtain_wheel(given: Path | None = None) -> Path:
    """Return the path of the wheel: the given file, else the cached one, else a fresh download."""
    path = given or cache_folder() / WHEEL_NAME
    if not is_the_wheel(path) and given is None:
        download(path)
    if not is_the_wheel(path):
        raise WheelUnavailableError(f"{path} is not {WHEEL_NAME} with the pinned sha256")
    return path


def read_checkpoint(wheel: Path) -> Checkpoint:
    """Read configuration, vocabulary and weights from the wheel, a zip archive."""
    with zipfile.ZipFile(wheel) as archive:
        config = json.loads(archive.read(MODEL_FOLDER + "config.json"))
        vocabulary = archive.read(MODEL_FOLDER + "vocab.txt").decode("utf-8").splitlines()
        tensors = read_legacy_torch(archive.read(MODEL_FOLDER + "pytorch_model.bin"))
    return Checkpoint(config, vocabulary, tensors)


class Global(Enum):
    """The names that a state dict may refer to, as ``pickletools`` writes them."""

    ORDERED_DICT = "collections OrderedDict"
    FLOAT_STORAGE = "torch FloatStorage"
    TENSOR = "torch._utils _rebuild_tensor_v2"


@dataclass(frozen=True)
class Storage:
    """A reference to elements that follow later in the file, by key."""

    key: str
    length: int


@dataclass(frozen=True)
class Tensor:
    """A part of a storage; offset and strides are in elements."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def typed(kind: type[T], value: Any) -> T:
    """Return the value if it has exactly this type: True is not an int here."""
    if type(value) is not kind:
        found = type(value).__name__
        raise pickle.UnpicklingError(f"{found} where {kind.__name__} is expected: refused")
    return value


def read_pickle(file: BinaryIO) -> Any:
    """Return the plain values that a pickle describes: strings, ints, lists, dicts and tensors.

    Time and memory are at most proportional to the size of the file: values are shared, and only
    strings are ever compared, hashed or printed.
    """
    stack: list[Any] = []
    below: list[list[Any]] = []  # the content of the stack at each mark
    memo: dict[int, Any] = {}
    for opcode, argument, _ in pickletools.genops(file):
        name = opcode.name
        items: list[Any] = []
        if name in ("TUPLE", "APPENDS", "SETITEMS"):
            items, stack = stack, below.pop()
        elif name in ("TUPLE1", "APPEND", "BINPERSID", "BUILD"):
            items = [stack.pop()]
        elif name in ("TUPLE2", "SETITEM", "REDUCE"):
            items = [stack.pop(), stack.pop()][::-1]
        match name:
            case "PROTO" | "BUILD":  # BUILD sets attributes: torch's metadata, which is ignored
                pass
            case "STOP":
                (value,) = stack
                return value
            case "MARK":
                below.append(stack)
                stack = []
            case "BINPUT" | "LONG_BINPUT":
                memo[argument] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[argument])
            case "NONE" | "BININT" | "BININT1" | "BININT2" | "LONG1" | "BINUNICODE":
                stack.append(argument)
            case "NEWTRUE" | "NEWFALSE":
                stack.append(name == "NEWTRUE")
            case "EMPTY_TUPLE" | "TUPLE" | "TUPLE1" | "TUPLE2":
                stack.append(tuple(items))
            case "EMPTY_LIST":
                stack.append([])
            case "APPEND" | "APPENDS":
                typed(list, stack[-1]).extend(items)
            case "EMPTY_DICT":
                stack.append({})
            case "SETITEM" | "SETITEMS":
                names = [typed(str, key) for key in items[::2]]
                typed(dict, stack[-1]).update(zip(names, items[1::2], strict=True))
            case "GLOBAL":
                stack.append(Global(argument))
            case "BINPERSID":
                stack.append(storage_of(*items))
            case "REDUCE":
                stack.append(result_of(*items))
            case _:
                raise pickle.UnpicklingError(f"opcode {name}: refused")
    raise pickle.UnpicklingError("a pickle without its end")


def storage_of(identity: Any) -> Storage:
    """Return the storage that a persistent id of torch describes."""
    match identity:
        case ("storage", Global.FLOAT_STORAGE, str(key), str(), length, None):
            return Storage(key, typed(int, length))
    raise pickle.UnpicklingError("a persistent object that is no storage of floats: refused")


def result_of(function: Any, arguments: Any) -> Any:
    """Return the result that a call of one of the globals would have."""
    match function, arguments:
        case Global.ORDERED_DICT, ():
            return {}
        case Global.TENSOR, (
            Storage() as storage,
            offset,
            tuple(shape),
            tuple(strides),
            bool(),
            {},
        ):
            return Tensor(storage, offset, shape, strides)
    raise pickle.UnpicklingError("a call that makes neither dict nor tensor: refused")


def elements_of(tensor: Tensor, storages: dict[str, np.ndarray]) -> np.ndarray:
    """Return the elements of a tensor in C order, as a view of its storage."""
    storage, shape = storages.get(tensor.storage.key), tensor.shape
    if storage is None or storage.size != tensor.storage.length:
        raise pickle.UnpicklingError("a storage is absent, or of another length: refused")
    if len(shape) > MOST_AXES or min(typed(int, n) for n in (*shape, 1)) < 1:
        raise pickle.UnpicklingError(f"a tensor needs one to {MOST_AXES} positive sizes: refused")
    end = typed(int, tensor.offset) + math.prod(shape)
    if not 0 <= tensor.offset < end <= storage.size:
        raise pickle.UnpicklingError("a tensor reaches beyond its storage: refused")
    if tensor.strides != tuple(math.prod(shape[axis:]) for axis in range(1, len(shape) + 1)):
        raise pickle.UnpicklingError("the elements of a tensor are not in C order: refused")
    return storage[tensor.offset : end].reshape(shape)


def read_legacy_torch(data: bytes) -> dict[str, np.ndarray]:
    """Read a float32 state dict that torch wrote before version 1.6; arrays are read-only.

    The file is a sequence of pickles: a magic number, a protocol number, facts about the machine,
    the state dict itself and the storage keys. Then follows each storage, in the order of the keys,
    as a 64-bit element count and the elements.

    Raises
    ------
    pickle.UnpicklingError
        For any other file.
    """
    file = io.BytesIO(data)
    try:
        magic, protocol, system, state, keys = (read_pickle(file) for _ in range(5))
    except (ValueError, LookupError) as error:  # bad opcode, empty stack or unknown name
        raise pickle.UnpicklingError(f"not the pickles of a state dict, refused: {error}") from None
    if type(magic) is not int or (magic, protocol) != (LEGACY_MAGIC, LEGACY_PROTOCOL):
        raise pickle.UnpicklingError("not a legacy torch checkpoint")
    if typed(dict, system).get("little_endian") is not True:
        raise pickle.UnpicklingError("big-endian checkpoint: refused")
    storages = {}
    for key in typed(list, keys):
        count = file.read(8)
        length = int.from_bytes(count, "little", signed=True)
        if len(count) < 8 or not 0 <= 4 * length <= len(data) - file.tell():
            raise pickle.UnpicklingError("a storage is cut short")
        storages[typed(str, key)] = np.frombuffer(file.read(4 * length), "<f4")
    if file.read(1):
        raise pickle.UnpicklingError("the checkpoint goes on after its last storage")
    return {
        name: elements_of(typed(Tensor, value), storages)
        for name, value in typed(dict, state).items()
    }

"""Where do the trained weights come from, and how are they read without trusting them?

The PyPI package ``rxnmapper`` 0.4.3 (MIT) carries a trained ALBERT in its wheel. pip downloads the
wheel into the user's cache folder; it is read as a zip archive and never installed, because
installing it would bring torch and transformers along. The checkpoint inside is a legacy torch
pickle. A pickle may call anything, so this one is read by an unpickler that knows three names.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import pickle
import subprocess
import sys
import tempfile
import zipfile
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

REQUIREMENT = "rxnmapper==0.4.3"
WHEEL_NAME = "rxnmapper-0.4.3-py3-none-any.whl"
WHEEL_SHA256 = "27876a4286881aafd286fd6f24a6a56a4ca6ba22d68e035a0ea120106c541ba5"
MODEL_FOLDER = "rxnmapper/models/transformers/albert_heads_8_uspto_all_1310k/"
DOWNLOAD_SECONDS = 60

LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
LEGACY_PROTOCOL = 1001


class WheelUnavailableError(RuntimeError):
    """The wheel is neither in the cache nor can it be downloaded; the message is one line."""


@dataclass(frozen=True)
class Checkpoint:
    """What the wheel carries: configuration, vocabulary (one token a row) and named arrays."""

    config: dict[str, Any]
    vocabulary: list[str]
    tensors: dict[str, np.ndarray]


def cache_folder() -> Path:
    """Return the folder of this user's cache in which the wheel is kept."""
    if sys.platform == "win32":
        root = os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local"
    elif sys.platform == "darwin":
        root = Path.home() / "Library" / "Caches"
    else:
        root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "cuflash"


def is_the_wheel(path: Path) -> bool:
    """Say whether ``path`` is a file with exactly the pinned contents."""
    return path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == WHEEL_SHA256


def download(path: Path) -> None:
    """Let pip fetch the wheel to ``path``, from whichever index pip is configured to use."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-input", "--no-deps", "--only-binary=:all:", "--retries=1", "--timeout=10"]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Moved into place when complete, so that another process never reads half of it.
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
    """Read configuration, vocabulary and weights out of the wheel, which stays a zip archive."""
    with zipfile.ZipFile(wheel) as archive:
        config = json.loads(archive.read(MODEL_FOLDER + "config.json"))
        vocabulary = archive.read(MODEL_FOLDER + "vocab.txt").decode("utf-8").splitlines()
        tensors = read_legacy_torch(archive.read(MODEL_FOLDER + "pytorch_model.bin"))
    return Checkpoint(config, vocabulary, tensors)


class RestrictedUnpickler(pickle.Unpickler):
    """An unpickler to which three globals exist, none of which can run or reach foreign code.

    A storage is announced in the pickle and filled afterwards; ``storages`` holds them by key.
    """

    def __init__(self, file: BinaryIO, byte_limit: int) -> None:
        super().__init__(file)
        self.byte_limit = byte_limit
        self.storages: dict[str, np.ndarray] = {}

    def find_class(self, module: str, name: str) -> Any:
        """Return what stands for one of the three allowed globals."""
        match module, name:
            case "collections", "OrderedDict":
                return OrderedDict
            case "torch", "FloatStorage":
                return "<f4"
            case "torch._utils", "_rebuild_tensor_v2":
                return self.rebuild_tensor
        raise pickle.UnpicklingError(f"the checkpoint asks for {module}.{name}: refused")

    def persistent_load(self, pid: Any) -> np.ndarray:
        """Return the storage of that key; its elements follow later in the file."""
        match pid:
            case ("storage", "<f4", str(key), str(), int(length), None):
                pass
            case _:
                raise pickle.UnpicklingError(f"unknown persistent object {pid!r}: refused")
        if not 0 <= 4 * length <= self.byte_limit:
            raise pickle.UnpicklingError(f"storage {key!r} is larger than its file: refused")
        storage = self.storages.setdefault(key, np.zeros(length, dtype="<f4"))
        if storage.size != length:
            raise pickle.UnpicklingError(f"storage {key!r} has two different lengths: refused")
        return storage

    def rebuild_tensor(
        self,
        storage: Any,
        offset: Any,
        shape: Any,
        strides: Any,
        *_requires_grad_and_hooks: Any,
    ) -> np.ndarray:
        """Return the view of ``storage`` that a tensor is; strides and offset count elements."""
        counts = (offset, *shape, *strides)
        if not all(type(count) is int and count >= 0 for count in counts):
            raise pickle.UnpicklingError(f"tensor geometry {counts} is not made of counts: refused")
        if not isinstance(storage, np.ndarray) or len(shape) != len(strides):
            raise pickle.UnpicklingError("a tensor needs a storage and one stride per axis")
        last = offset + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
        if math.prod(shape) > storage.size or (0 not in shape and last >= storage.size):
            raise pickle.UnpicklingError("a tensor reaches beyond its storage: refused")
        byte_strides = [4 * step for step in strides]
        return np.lib.stride_tricks.as_strided(storage[offset:], shape, byte_strides)


def read_legacy_torch(data: bytes) -> dict[str, np.ndarray]:
    """Read a state dict that torch wrote before version 1.6.

    The file is a row of pickles: a magic number, a protocol number, facts about the machine, the
    state dict itself, the storage keys; then each storage, in the order of the keys, as a 64-bit
    element count and the elements.

    Raises
    ------
    pickle.UnpicklingError
        The file is something else, or asks for a global that is not on the list.
    """
    file = io.BytesIO(data)

    def load() -> Any:
        return RestrictedUnpickler(file, len(data)).load()

    if load() != LEGACY_MAGIC or load() != LEGACY_PROTOCOL:
        raise pickle.UnpicklingError("not a legacy torch checkpoint")
    if not load()["little_endian"]:
        raise pickle.UnpicklingError("big-endian checkpoint: refused")
    unpickler = RestrictedUnpickler(file, len(data))
    state = unpickler.load()
    for key in load():
        storage = unpickler.storages[key]
        count = int.from_bytes(file.read(8), "little", signed=True)
        values = file.read(storage.nbytes)
        if count != storage.size or len(values) != storage.nbytes:
            raise pickle.UnpicklingError(f"storage {key!r} is cut short")
        storage[:] = np.frombuffer(values, "<f4")
    if file.read(1):
        raise pickle.UnpicklingError("the checkpoint goes on after its last storage")
    if not all(isinstance(value, np.ndarray) for value in state.values()):
        raise pickle.UnpicklingError("the checkpoint holds something that is not a tensor")
    return dict(state)

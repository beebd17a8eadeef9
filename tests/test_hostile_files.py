"""Is every file of tiles, sweeps and kernel-tuner read, or refused by the one documented error?

Any value of JSON replaces any node of a valid file.
"""

from __future__ import annotations

import copy
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cuflash import tuning
from cuflash._select import measured

SWEEPS = Path(__file__).resolve().parents[1] / "benchmarks" / "sweeps"
_NAME = next(path for path in sorted(SWEEPS.glob("*.jsonl")) if tuning.load(path).finals)


def lines() -> list[Any]:
    """Return a sweep of an H100: header, two timed rows, a failed row, a final."""
    found = tuning.load(_NAME)
    failed = {**found.rows[1], "status": "error", "reason": "none"}
    best = found.best
    final = {"kind": "final", "ms": {best["key"]: 1.0}, "default_ms": 2.0, "left_out": {"1": "x"}}
    return [found.header, best, found.rows[0], failed, final]


LINES = lines()
KEPT = json.loads(Path(__file__).with_name("kept_objects.json").read_text())
TILES = {"format": measured.FORMAT, "tiles": KEPT["tiles"]["tiles"][:2]}
THEIRS = {
    "device_name": "here", "kernel_name": "add", "tune_params_keys": ["n", "m"],
    "objective": "time", "tune_params": {"n": [1, 2, 3], "m": [1]}, "cache": {
        "1,1": {"n": 1, "m": 1, "time": 2.0}, "2,1": {"n": 2, "m": 1, "time": 1.5},
        "3,1": {"n": 3, "m": 1, "__error__": "RuntimeFailedConfig", "time": "RuntimeFailedConfig"},
    },
}  # fmt: skip
OURS = THEIRS | {"cuflash": {"header": LINES[0], "rows": LINES[1:4], "finals": LINES[4:]}}

Path_ = tuple[Any, ...]
DEEP = json.loads("[" * 400 + "]" * 400)
WORDS = (
    "ok",
    "final",
    "config",
    "sweep",
    "float32",
    "sm_80",
    "forward_sm80",
    "²",
    "1" * 5000,
    "-1",
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3)
    | st.sampled_from((*WORDS, 10**30, 10**400, -(10**400), 0, 1e308, math.nan, -1.0, DEEP)),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=4,
)  # fmt: skip


def places(node: Any, above: Path_ = ()) -> list[Path_]:
    """Return the paths of all nodes."""
    inner: Any = ()
    if isinstance(node, dict):
        inner = node.items()
    elif isinstance(node, list):
        inner = enumerate(node)
    return [above, *(p for name, child in inner for p in places(child, (*above, name)))]


def put(content: Any, place: Path_, value: Any) -> Any:
    """Return the content with another value at ``place``, or without the node for ``...``."""
    if not place:
        return None if value is ... else value
    changed = copy.deepcopy(content)
    node = changed
    for name in place[:-1]:
        node = node[name]
    if value is ...:
        del node[place[-1]]
    else:
        node[place[-1]] = value
    return changed


def changes(content: Any) -> st.SearchStrategy[Any]:
    return st.builds(
        lambda place, value: put(content, place, value),
        st.sampled_from(places(content)),
        VALUES | st.just(...),
    )


def refused(call: Any, path: Path) -> bool:
    """Return whether a file was refused, by an error of the documented form."""
    error = None
    try:
        call(path)
    except ValueError as caught:
        error = caught
    assert error is None or re.match(r"(?s).+: got .*, expected ", str(error))
    return error is not None


def load_and_use(path: Path) -> None:
    found = tuning.load(path)
    for row in found.timed:
        assert math.isfinite(row["relative"])
        assert 0 < found.steady_ms(row) < math.inf
    with tuning.use(path):
        pass


def read_cache(path: Path) -> None:
    found = tuning.read_cache(path)
    for row in found.timed:
        assert 0 < found.steady_ms(row) < math.inf


def use(path: Path) -> None:
    with tuning.use(path):
        pass


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("hostile") / "file.json"


@pytest.fixture(autouse=True, scope="module")
def _nothing_in_use():
    measured.replace_rows({})
    yield
    measured.replace_rows(None)


@given(changes(LINES))
@example(put(LINES, (1, "facts"), DEEP))
@example(put(LINES, (0, "multiprocessors"), "many"))
@example(put(LINES, (0, "default"), "²,1,1,1,1"))
def test_a_sweep_is_read_or_refused(path, content):
    rows = content if isinstance(content, list) else [content]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    refused(load_and_use, path)


@given(changes(TILES))
@example(put(TILES, ("tiles", 0, "values", "block_m"), 10**400))
@example(put(TILES, ("tiles", 0, "values"), DEEP))
def test_a_table_is_read_or_refused(path, content):
    path.write_text(json.dumps(content))
    refused(use, path)


@pytest.mark.parametrize("right", [THEIRS, OURS], ids=["theirs", "ours"])
@given(st.data())
def test_a_cache_is_read_or_refused(path, right, data):
    path.write_text(json.dumps(data.draw(changes(right))))
    refused(read_cache, path)


@pytest.mark.parametrize(("call", "content"), [
    (load_and_use, "\n".join(map(json.dumps, LINES)) + "\n"), (use, json.dumps(TILES)),
    (read_cache, json.dumps(THEIRS)), (read_cache, json.dumps(OURS)),
])  # fmt: skip
def test_what_is_right_is_read(path, call, content):
    path.write_text(content)
    assert not refused(call, path)


@pytest.mark.parametrize("call", [load_and_use, use, read_cache])
@pytest.mark.parametrize("text", [b"\xff\n", b"[" * 100_000 + b"\n", b'{"a":' * 100_000 + b"\n"])
def test_what_is_no_text_or_nested_deep_is_refused(path, call, text):
    for begun in (b"", b'{"kind": "sweep", "a": '):
        path.write_bytes(begun + text)
        assert refused(call, path)


@pytest.mark.parametrize(
    "time", [math.nan, -1.0, 0, math.inf, 10**400, None], ids=lambda t: str(t)[:9]
)
def test_what_is_no_time_is_not_the_fastest(path, time):
    path.write_text(json.dumps(put(THEIRS, ("cache", "1,1", "time"), time)))
    assert refused(read_cache, path)

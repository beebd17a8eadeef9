"""Are listed kernels compiled once, into the folder where a run looks for them?"""

from __future__ import annotations

import json

import gpu_kernels
import pytest

from cuflash._jit import compilation, cubin_cache
from cuflash._kernels.cache_grow import CacheGrowConfig
from cuflash._kernels.cache_take import CacheTakeConfig
from cuflash.tuning._kernels import config_as_json


def list_of(path, *rows):
    """Write a list of configurations and tests as a rehearsal writes it."""
    lines = [
        json.dumps({"arch": "sm_90", "config": config_as_json(config), "test": test})
        for config, test in rows
    ]
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def test_kernels_are_counted_by_file(tmp_path):
    take, grow = CacheTakeConfig(), CacheGrowConfig.of(100)
    rows = [(take, "tests/test_a.py::test_b"), (take, "tests/test_a.py::test_c")]
    listed = list_of(tmp_path / "a.jsonl", *rows, (grow, "tests/test_a.py::test_b"))
    other = list_of(tmp_path / "b.jsonl", (grow, "tests/test_b.py::test_b"))
    text = gpu_kernels.count(gpu_kernels.read([listed, other]))
    assert [line.split() for line in text.splitlines()] == [
        ["2", "1", "tests/test_a.py"], ["1", "0", "tests/test_b.py"], ["2", "in", "all"],
    ]  # fmt: skip


@pytest.mark.nvrtc
def test_what_is_compiled_ahead_is_found_by_a_run(tmp_path, monkeypatch):
    config, folder = CacheTakeConfig(), tmp_path / "kernels"
    listed = list_of(tmp_path / "kernels.jsonl", *2 * [(config, "tests/test_a.py::test_b")])
    assert gpu_kernels.main(["compile", str(listed), str(folder)]) == 0
    (path,) = folder.iterdir()
    monkeypatch.setenv("CUFLASH_KERNELS", str(folder))
    assert cubin_cache.load_shared(compilation.shared_name(config, "sm_90"))
    before = path.stat().st_mtime_ns
    gpu_kernels.main(["compile", str(listed), str(folder)])
    assert path.stat().st_mtime_ns == before

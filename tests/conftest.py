"""What do all tests share: Hypothesis profiles, skips with their reasons, the array module?"""

from __future__ import annotations

import os
from collections import Counter

# Set before NumPy is imported. OpenBLAS's threads wait for each other where other processes keep
# the cores busy (D114).
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

from cuflash._host import tiles
from setup_env import NVRTC_FOLDER
from support import guards, nvrtc
from support.problems import HOST_TILE

pytest_plugins = ["gpu_report", "gpu_watchdog", "support.parts", "support.rehearsal"]

# Choose a profile with --hypothesis-profile=<name>. Without it, the part of the tests that runs
# bounds the examples.
settings.register_profile("dev", deadline=None)
settings.register_profile(
    "ci", settings.get_profile("dev"), derandomize=True, max_examples=40, print_blob=True
)
settings.register_profile(
    "thorough",
    settings.get_profile("dev"),
    max_examples=2000,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("dev")


def why_no_nvrtc() -> str:
    """Say why no kernel can be compiled here; empty where kernels can be compiled."""
    try:
        import cupy  # noqa: F401
        from cupy_backends.cuda.libs import nvrtc

        nvrtc.getVersion()
    except ImportError:
        return "CuPy is not installed"
    except RuntimeError as error:
        return f"NVRTC cannot be loaded ({str(error).splitlines()[0]})"
    return ""


def why_no_gpu() -> str:
    """Say why no kernel can run here; empty where kernels can run."""
    try:
        import cupy

        count = cupy.cuda.runtime.getDeviceCount()
    except ImportError:
        return "CuPy is not installed"
    except RuntimeError as error:
        return f"no NVIDIA device can be used ({str(error).splitlines()[0]})"
    return "" if count else "there is no NVIDIA device"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests that this machine cannot run as skipped."""
    rehearsed = config.getoption("--rehearse") is not None
    reasons = {
        "gpu": "" if rehearsed else why_no_gpu(),
        "not_rehearsed": "there is no device" if rehearsed else "",
        "nvrtc": why_no_nvrtc(),
        "slow": "" if config.getoption("--slow") else "not asked for with --slow",
    }
    for item in items:
        for marker, reason in reasons.items():
            if reason and item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=f"{marker}: {reason}"))
                break


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print one line for each reason to skip, with the number of tests that it stopped."""
    reasons = Counter(
        str(report.longrepr[2]).removeprefix("Skipped: ")
        for report in terminalreporter.getreports("skipped")
        if isinstance(report.longrepr, tuple)
    )
    for reason, count in sorted(reasons.items()):
        terminalreporter.write_line(f"skipped: {count} test(s): {reason}", yellow=True)


@pytest.fixture(autouse=True)
def guard_bands(request: pytest.FixtureRequest):
    """Allocate every array of a GPU test between guard bands, compared when the test ends."""
    kept_out = any(map(request.node.get_closest_marker, ("alone", "own_memory")))
    kept_out |= request.config.getoption("--rehearse") is not None  # kernels do not run
    if request.node.get_closest_marker("gpu") is None or kept_out:
        yield
        return
    with guards.guarded():
        yield


# Of session scope, since Hypothesis refuses fixtures that are made anew for each test function.
@pytest.fixture(scope="session", params=["numpy", pytest.param("cupy", marks=pytest.mark.gpu)])
def xp(request: pytest.FixtureRequest):
    """Return the array module that a test runs on: NumPy, then CuPy."""
    if request.param == "numpy":
        return np
    import cupy

    return cupy


@pytest.fixture(scope="module")
def small_host_tiles():
    """Make the host's tiles small, so that small arrays have several tiles and a partial one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "BLOCK_M", HOST_TILE)
        patch.setattr(tiles, "BLOCK_N", HOST_TILE)
        patch.setattr(tiles, "TILE_ELEMENTS", 2 * HOST_TILE**2)
        patch.setattr(tiles, "ALIGNMENT", HOST_TILE // 4)
        yield


@pytest.fixture(params=nvrtc.DISTRIBUTIONS, ids="nvrtc{}".format)
def generation(request: pytest.FixtureRequest) -> int:
    """Return each major version of NVRTC that is installed."""
    if nvrtc.compiler_of(request.param) is None:
        wheel = f"'{nvrtc.DISTRIBUTIONS[request.param]}<{request.param + 1}'"
        install = f"pip install --target {NVRTC_FOLDER.name} {wheel}"
        pytest.skip(f"nvrtc: version {request.param} is not installed ({install})")
    return int(request.param)

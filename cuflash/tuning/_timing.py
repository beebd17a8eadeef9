"""A process that checks and times configurations on the device: the child of ``_sweep.py``.

It calls the public functions with ``config=``. Its requests:

    {"do": "describe"}                          the device, the driver, NVRTC
    {"do": "open", workload, kernel, default, check, budget_ms}
    {"do": "time", config}                      check, then time interleaved with the default
    {"do": "final", configs}                    interleave several and the default, more often
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from cuflash._kernels.config import KernelConfig
from cuflash._problem.options import Options
from cuflash._results import Gradients
from cuflash._select.hardware import present
from cuflash._timing.clock import ROUNDS, SHORT_MS, Call, DeviceClock, Measurement
from cuflash._timing.machine import read_clocks, versions
from cuflash.tuning import _checking
from cuflash.tuning._checking import AGREEMENT, difference
from cuflash.tuning._facts import first_error
from cuflash.tuning._kernels import config_from_json
from cuflash.tuning._processes import serve
from cuflash.tuning._workload import Workload

_DEFAULT = "the default"


class Calls:
    """One call for each set of inputs; :meth:`of` gives the calls a configuration. (D106)"""

    def __init__(self, workload: Workload, kernel: str, copies: int = 1) -> None:
        import cupy

        from cuflash._api import attention as api
        from cuflash._api.workspace_size import workspace_size

        backward = not kernel.startswith("forward")
        options = Options(**workload.score_options(cupy))
        given: dict[str, Any] = {"options": options, "precision": workload.precision}
        self.inputs = workload.inputs(cupy, copies)
        #: Arrays that the calls write to; fixed, so that the calls can be captured in a graph.
        self.results: list[dict[str, Any]] = []
        self._calls: list[tuple[Callable[..., Any], int]] = []  # with bytes of the workspace
        for q, k, v, dout in self.inputs:
            if backward:
                arrays, wrt = {"q": q, "k": k, "v": v}, _checking.gradients_of(kernel)
                results = {f"d{name}": cupy.empty_like(arrays[name]) for name in wrt}
                found = api.attention(q, k, v, return_lse=True, **given)
                call = partial(
                    api.attention_backward, dout, q, k, v, found.out, found.lse, **given,
                    wrt=wrt, grads_out=Gradients(**results), deterministic=workload.deterministic,
                )  # fmt: skip
            else:
                kind = np.float64 if q.dtype == np.float64 else np.float32
                results = {"out": cupy.empty_like(dout), "lse": cupy.empty(q.shape[:-1], kind)}
                pair = (results["out"], results["lse"])
                call = partial(api.attention, q, k, v, return_lse=True, out=pair, **given)
            self.results.append(results)
            self._calls.append((call, workspace_size(q, k, v, backward=backward, **given)))

    def of(self, config: KernelConfig) -> list[Call]:
        """The library's own calls with a configuration."""
        import cupy

        rooms = [cupy.empty(size, np.uint8) if size else None for _, size in self._calls]
        calls = zip(self._calls, rooms, strict=True)
        return [partial(call, workspace=room, config=config) for (call, _), room in calls]

    def on_host(self) -> _checking.Results:
        """The results of the first call as NumPy arrays."""
        return {name: _on_host(array) for name, array in self.results[0].items()}


def _on_host(array: Any) -> np.ndarray:
    import cupy

    copied: np.ndarray = cupy.asnumpy(array.view(np.uint8)).view(array.dtype)
    return copied


class Bench:
    """An open problem, with its checks and the clock."""

    def __init__(self, request: dict[str, Any]) -> None:
        self.clock = DeviceClock()
        workload, self.kernel = Workload.from_json(request["workload"]), request["kernel"]
        self.dtype, self.budget_ms = workload.dtype, float(request["budget_ms"])
        self.default = config_from_json(request["default"])
        self.deterministic = getattr(
            self.default, "deterministic", True
        )  # are the same bits promised?
        self.check = bool(request["check"])
        self.default_graph: tuple[Call, Any] | None = None
        with self.clock.scope():
            self.calls = Calls(workload, self.kernel)
            self._run(self.calls, self.default)
            first = self.clock.measure({_DEFAULT: self.calls.of(self.default)[0]}, 1.0)
            self.graphs = first[_DEFAULT].ms < SHORT_MS
            if self.graphs:
                copies = self.clock.copies_to_leave_l2(workload.input_bytes("fwd"))
                self.calls = Calls(workload, self.kernel, copies)
                self._run(self.calls, self.default)
            made = self.calls.results[0]
            self.expected = {name: a.copy() for name, a in made.items() if a.size}
            if self.check:
                self._open_check(_checking.small(workload))

    def _open_check(self, workload: Workload) -> None:
        self.small = Calls(workload, self.kernel)
        inputs = tuple(_on_host(array) for array in self.small.inputs[0])
        self.truth = _checking.definition(workload, self.kernel, inputs)
        self._run(self.small, self.default)
        self.shipped = _checking.errors(self.small.on_host(), self.truth)
        wrong = _checking.shipped_complaint(self.shipped, self.truth, self.dtype)
        if wrong:
            raise RuntimeError(wrong)

    def _run(self, calls: Calls, config: KernelConfig) -> None:
        """Call once for each copy of the inputs, with results that are NaN before."""
        for results in calls.results:
            for array in results.values():
                array.view(np.uint8).fill(0xFF)  # NaN in every dtype
        for call in calls.of(config):
            call()
        self.clock.stream.synchronize()

    def checked(self, config: KernelConfig) -> dict[str, Any]:
        """Errors on the small problem, and what is wrong; two runs must agree if deterministic."""
        self._run(self.small, config)
        first = self.small.on_host()
        found = _checking.errors(first, self.truth)
        wrong = _checking.complaint(found, self.shipped, self.truth, self.dtype)
        self._run(self.small, config)
        for name, again in self.small.on_host().items():
            if self.deterministic and not wrong and first[name].tobytes() != again.tobytes():
                wrong = f"{name}: two runs differ in their bits"
        return {"wrong": wrong, "errors": {name: [*own] for name, own in found.items()}}

    def compared(self, config: KernelConfig) -> str:
        """What is wrong with the results of the timed problem; empty if nothing is."""
        self._run(self.calls, config)
        for name, expected in self.expected.items():
            own = self.calls.results[0][name]
            if name == "lse":  # both may have -inf where nothing is visible
                own, expected = (np.exp(-abs(a)) for a in (own, expected))
            gap = difference(own, expected)
            if not gap <= AGREEMENT[self.dtype]:
                return f"{name} of the timed problem differs by {gap:.3g} from the default's"
        return ""

    def time(self, config: KernelConfig) -> dict[str, Any]:
        """Check, then time interleaved with the default."""
        with self.clock.scope():
            answer: dict[str, Any] = {"status": "ok"}
            if self.check:
                checked = self.checked(config)
                wrong = checked["wrong"] or self.compared(config)
                answer["check"] = checked["errors"]
                if wrong:
                    return answer | {"status": "wrong", "reason": wrong}
            found = self._measured({"own": config, _DEFAULT: self.default}, self.budget_ms)
        own, shipped = found["own"], found[_DEFAULT].ms
        times = {"ms": own.ms, "default_ms": shipped, "relative": own.ms / shipped}
        return answer | times | {"timing": own.timing}

    def final(self, configs: list[KernelConfig]) -> dict[str, Any]:
        """Interleaved times of all configurations, and the clocks right afterwards."""
        named = {str(number): config for number, config in enumerate(configs)}
        with self.clock.scope():
            slowest = max(m.ms for m in self._measured(named, 1.0).values())
            found = self._measured(named, 2 * ROUNDS[1] * slowest)
        return {"ms": [found[name].ms for name in named], "clocks": read_clocks()}

    def _measured(
        self, configs: dict[str, KernelConfig], budget_ms: float
    ) -> dict[str, Measurement]:
        calls = {name: self.calls.of(config) for name, config in configs.items()}
        if not self.graphs:
            return self.clock.measure({name: own[0] for name, own in calls.items()}, budget_ms)
        graphs = {
            name: (self._captured(config, calls[name]), len(calls[name]))
            for name, config in configs.items()
        }
        return self.clock.measure_graphs(graphs, budget_ms)

    def _captured(self, config: KernelConfig, calls: list[Call]) -> Call:
        """A graph of the calls; the default's graph is kept, since graphs own counters for ever."""
        if config != self.default:
            return self.clock.capture(calls)
        if self.default_graph is None:
            self.default_graph = self.clock.capture(calls), calls  # calls keep the memory (D76)
        return self.default_graph[0]


def described() -> dict[str, Any]:
    """The device, its clocks, and versions of driver, CuPy and NVRTC."""
    hardware = present()
    if hardware is None:
        return {"status": "error", "reason": "no NVIDIA device can be used"}
    found = {"status": "ok", "device": hardware.name, "arch": hardware.arch}
    return found | versions() | {"clocks": read_clocks()}


def main() -> None:
    """Answer requests until the parent is gone."""
    opened: list[Bench] = []

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        try:
            if request["do"] == "describe":
                return described()
            if request["do"] == "open":
                opened[:] = [Bench(request)]
                return {"status": "ok", "clocks": read_clocks()}
            if request["do"] == "final":
                return opened[0].final([config_from_json(c) for c in request["configs"]])
            return opened[0].time(config_from_json(request["config"]))
        except Exception as error:
            return {"status": _state_after(), "reason": first_error(f"{error}")[:300]}

    serve(answer)


def _state_after() -> str:
    """Whether the device can still be used after an error."""
    import cupy

    try:
        cupy.cuda.Device().synchronize()
        cupy.zeros(1).get()
    except Exception:
        return "crash"
    return "error"


if __name__ == "__main__":
    main()

"""Tiles for few queries, timed in turns. Lies beside trials/decode/shapes.py and time.py."""
import sys, time, statistics
from pathlib import Path
sys.path.insert(0, str(Path(__file__).parent))
import shapes
from shapes import PATCHES, Trial, _half
from unittest import mock
import importlib.util
spec = importlib.util.spec_from_file_location("tt", Path(__file__).parent / "time.py"); tt = importlib.util.module_from_spec(spec); spec.loader.exec_module(tt)
from cuflash._kernels import forward_sm80
from cuflash._timing.clock import DeviceClock
from benchmarks import decode
T = {64: [(64,96,4,2,2),(64,64,4,3,2),(64,48,4,4,2),(64,96,4,3,2),(32,64,2,5,2),(32,96,2,4,2)],
     128: [(64,64,4,2,2),(64,48,4,2,2),(64,32,4,3,2),(32,64,2,3,2),(32,32,2,4,2),(32,48,2,3,2),(16,64,1,3,2)],
     256: [(64,32,4,2,2),(32,32,2,2,2),(32,16,2,4,2)]}
def rows(d, t):
    return tuple(r._replace(tile=(t,)) if (r.when, r.head_dims) == ("half, general", d) or (d == 256 and r.when == "half" and r.head_dims == 256) else r for r in forward_sm80.ROWS)
for d, ts in T.items():
    for t in ts: PATCHES[f"{d} {t}"] = (lambda d=d, t=t: mock.patch.object(forward_sm80, "ROWS", rows(d, t)),)
S = []
for d in (128, 64):
    own = tuple(f"{d} {t}" for t in T[d])
    S += [Trial(_half(1, 32, 8, 1, 131_072, d=d), 0, own), Trial(_half(1, 32, 8, 1, 131_072, d=d), 16, own), Trial(_half(16, 32, 8, 1, 8192, d=d), 16, own)]
S.append(Trial(_half(1, 32, 32, 1, 65_536, d=256), 0, tuple(f"256 {t}" for t in T[256])))
S.append(Trial(_half(1, 32, 8, 4, 131_072, d=64, causal=True), 0, tuple(f"64 {t}" for t in T[64])))
end = time.monotonic() + float(sys.argv[1])
if len(sys.argv) > 2 and sys.argv[2] != "plans":  # compile ahead
    from cuflash._select import hardware
    from cuflash._select.choose import choose
    from cuflash.tuning._facts import compile_all
    found = {}
    for s in S:
        p = tt.of_pages(s) if s.page_size else s.work.problem()
        for name in s.variants:
            with shapes.variant(name):
                for step in choose(p, hardware.typical("sm_90")): found[step.config] = 1
    import os; os.makedirs(sys.argv[2], exist_ok=True)
    facts = compile_all(list(found), hardware.typical("sm_90"), shared=Path(sys.argv[2]))
    print(len(facts), [str(f.error)[:300] for f in facts.values() if f.error])
    sys.exit()
if len(sys.argv) > 2:
    for s in S: print(s); tt.plans(s)
    sys.exit()
clock = DeviceClock()
copy = decode.copier(clock.cupy, clock)
with clock.scope():
    copy(); ms = statistics.median(clock.once(copy) for _ in range(15))
speed = 2 * decode.COPIED_BYTES / ms
print(f"copy {speed/1e9:.2f} TB/s")
for trial in S:
    if time.monotonic() > end: print("out of time"); break
    print(trial, flush=True)
    with clock.scope(): found = tt.timed(clock, trial)
    for name, own in found.items():
        print(f"  {name:24} {1e3*own.ms:8.2f} us {trial.work.input_bytes('fwd')/own.ms/speed:.3f} of the copy", flush=True)
    clock.cupy.get_default_memory_pool().free_all_blocks()

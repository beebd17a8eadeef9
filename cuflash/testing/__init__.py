"""Property tests of attention: strategies that draw calls, families of inputs, one assertion.

The strategies need Hypothesis, which the extra ``testing`` installs. The rest needs no extra.

>>> from cuflash.testing import assert_attention_close, make_call
>>> import cuflash
>>> call = make_call("normal_times_3", 0, "bfloat16", (8, 32, 16), (8, 48, 16), (8, 48, 16))
>>> result = cuflash.attention(*call.qkv, causal=True, return_lse=True)
>>> assert_attention_close(result, *call.qkv, causal=True)
"""

from typing import TYPE_CHECKING, Any

from cuflash._errors import pip_install
from cuflash.testing._call import Call, make_call
from cuflash.testing._close import assert_attention_close
from cuflash.testing._families import FAMILIES

if TYPE_CHECKING:
    from cuflash.testing._strategies import arrays, calls, options

__all__ = [
    "FAMILIES",
    "Call",
    "arrays",
    "assert_attention_close",
    "calls",
    "make_call",
    "options",
]

Call.__module__ = __name__  # the name that errors and pickles show


def __getattr__(name: str) -> Any:
    """Import the strategies at their first use, because only they need Hypothesis."""
    if name not in ("arrays", "calls", "options"):
        raise AttributeError(f"module 'cuflash.testing' has no attribute {name!r}")
    try:
        from cuflash.testing import _strategies
    except ModuleNotFoundError as error:
        if error.name != "hypothesis":
            raise
        raise ImportError(
            f"cuflash.testing.{name}: needs Hypothesis; {pip_install('testing')}"
        ) from error
    return getattr(_strategies, name)

"""How are errors of a call worded?"""

from __future__ import annotations

from pathlib import Path

_SHOWN = 200  # characters of a value that a message shows
_ROOT = Path(__file__).resolve().parents[1]  # the root of a checkout, or site-packages


class CompileError(RuntimeError):
    """A kernel could not be compiled.

    Attributes
    ----------
    config : object
        The frozen configuration that was being compiled.
    log : str
        The compiler's log.
    source : str or None
        Path of the dumped, self-contained source, if it could be written.

    Examples
    --------
    >>> import cuflash
    >>> error = cuflash.CompileError("it did not compile", config=None, log="line 3", source=None)
    >>> isinstance(error, RuntimeError), error.log
    (True, 'line 3')
    """

    def __init__(self, message: str, *, config: object, log: str, source: str | None) -> None:
        super().__init__(message)
        self.config = config
        self.log = log
        self.source = source


class NoKernel(ValueError):
    """No kernel supports the operands of a call without converting them."""


def problem_with(
    argument: str, kind: type[Exception], *, got: object, expected: str, fix: str = ""
) -> Exception:
    """Build the exception for one bad argument. Every error of a caller has this form."""
    text = got if isinstance(got, str) else shown(got)
    message = f"{argument}: got {text}, expected {expected}"
    return kind(f"{message}; {fix}" if fix else message)


def wrong_type(argument: str, got: object, expected: str, fix: str = "") -> Exception:
    """Build the TypeError for one bad argument."""
    return problem_with(argument, TypeError, got=got, expected=expected, fix=fix)


def wrong_value(argument: str, got: object, expected: str, fix: str = "") -> Exception:
    """Build the ValueError for one bad argument."""
    return problem_with(argument, ValueError, got=got, expected=expected, fix=fix)


def shown(value: object) -> str:
    """The repr of a caller's value in one line; of a long one only the start and the end."""
    try:
        text = " ".join(repr(value).split())
    except ValueError:  # an int with more digits than Python prints
        return f"a {type(value).__name__} too long to show"
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN // 2]} ... {text[-_SHOWN // 2 :]}"


def pip_install(*extras: str) -> str:
    """The pip commands that install one of the extras, for this checkout or for the package."""
    source = f'-e "{_ROOT}' if (_ROOT / "pyproject.toml").is_file() else '"cuflash'
    return " or ".join(f'pip install {source}[{extra}]"' for extra in extras)


def not_yet(argument: str, when: str, instead: str = "") -> NotImplementedError:
    """Build the exception for a valid call that this version does not support."""
    message = f"{argument}: not available in this version, planned for {when}"
    return NotImplementedError(f"{message}; {instead}" if instead else message)

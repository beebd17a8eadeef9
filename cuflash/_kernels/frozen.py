"""How does a class of values come to be without code that is made for it?

What ``dataclasses`` compiles for a class takes a millisecond of every process, and a first call
needs a dozen classes. Here its functions are written once, for all of them; ``fields``, ``replace``
and type checkers see a dataclass. (D71)
"""

from __future__ import annotations

from dataclasses import MISSING, Field, FrozenInstanceError, dataclass, fields
from typing import Any, ClassVar, NoReturn, dataclass_transform


@dataclass_transform(kw_only_default=True, frozen_default=True)
class Frozen:
    """Values by name, all of them given that have no default; equal where class and values are."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]
    _defaults: ClassVar[dict[str, Any]]  # of every field; MISSING where it has none

    def __init_subclass__(cls) -> None:
        dataclass(init=False, repr=False, eq=False, match_args=False)(cls)
        cls._defaults = {field.name: field.default for field in fields(cls)}

    def __init__(self, **values: Any) -> None:
        own = self._defaults | values
        if len(own) != len(self._defaults) or MISSING in own.values():
            wrong = [name for name, value in own.items() if value is MISSING]
            wrong += [name for name in own if name not in self._defaults]
            raise TypeError(f"{type(self).__name__}: missing, or no field: {', '.join(wrong)}")
        vars(self).update(own)
        self.__post_init__()

    def __post_init__(self) -> None:
        """Refuse values that do not fit."""

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise FrozenInstanceError(f"cannot assign to field {name!r}")

    def __delattr__(self, name: str) -> NoReturn:
        raise FrozenInstanceError(f"cannot delete field {name!r}")

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash((type(self), *vars(self).values()))

    def __repr__(self) -> str:
        named = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__}({named})"

"""Every part by its name. A part is registered by its decorator; the built-in ones are found by walking the
package.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import pkgutil
from typing import TypeVar

from paceline.core.part import Part
from paceline.core.parts import AXES
from paceline.errors import MethodError, nearest

P = TypeVar("P", bound=Part)
_parts: dict[str, type[Part]] = {}
_FOLDERS = ("reducers", "syncs", "sharding", "orders", "balances", "memberships")


def register(cls: type[P]) -> type[P]:
    """Class decorator: makes the part known to `prepare`, the command line, the laws and the docs."""
    if not cls.name or cls.axis not in AXES:
        raise MethodError(
            f"{cls.__name__} cannot be registered", why="a part needs a `name` and one of the six axes as its base"
        )
    known = _parts.get(cls.name)
    if known is not None and known.__qualname__ != cls.__qualname__:
        raise MethodError(f"two parts are called {cls.name!r}", why=f"{known} and {cls}", do="rename one of them")
    _parts[cls.name] = cls
    return cls


@functools.cache
def _load() -> None:
    for folder in _FOLDERS:
        package = importlib.import_module(f"paceline.{folder}")
        for module in pkgutil.iter_modules(package.__path__):
            importlib.import_module(f"{package.__name__}.{module.name}")


def parts(axis: str | None = None) -> dict[str, type[Part]]:
    """All parts by name, or those of one axis."""
    _load()
    return {name: cls for name, cls in sorted(_parts.items()) if axis in (None, cls.axis)}


def find(name: str) -> type[Part]:
    """The part of that name, or an error with the nearest one. A built-in one is looked for by its file's name."""
    if name not in _parts and name.isidentifier():
        for folder in _FOLDERS:
            if importlib.util.find_spec(f"paceline.{folder}.{name}") is not None:
                importlib.import_module(f"paceline.{folder}.{name}")
    if name in _parts:
        return _parts[name]
    known = parts()
    if name not in known:
        raise MethodError(f"there is no method {name!r}", do=nearest(name, known))
    return known[name]

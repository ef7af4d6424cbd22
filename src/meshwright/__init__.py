"""meshwright: spread the training of a large model over many devices, and know beforehand what it costs.

The commands are functions, too: ``meshwright.plan(job)``, ``meshwright.train(job, out)``, ``meshwright.check(job)``.
Importing meshwright imports neither torch nor numpy; the first call does what it needs.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshwright.verbs import check, plan, train

from meshwright.version import __version__

__all__ = ["__version__", "check", "plan", "train"]

_ROOMS = ("plan", "train")


class _CallableRoom(ModuleType):
    """A package that is also the function of its name: ``meshwright.plan`` and ``meshwright.train``.

    Importing a package binds it in its parent, where the function would stand; so the package is made callable.
    ``meshwright.verbs`` has the functions, with their signatures.
    """

    def _verb(self) -> Callable[..., Any]:
        from meshwright import verbs

        verb: Callable[..., Any] = getattr(verbs, self.__name__.rpartition(".")[2])
        return verb

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._verb()(*arguments, **named)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._verb())


class _Root(ModuleType):
    """This module: packages that are verbs become callable as they are imported."""

    def __setattr__(self, name: str, value: object) -> None:
        if name in _ROOMS and isinstance(value, ModuleType):
            value.__class__ = _CallableRoom
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Root


def __getattr__(name: str) -> Any:
    """The verbs, found when they are first asked for."""
    if name in _ROOMS:
        return importlib.import_module(f"{__name__}.{name}")
    if name == "check":
        from meshwright import verbs

        return verbs.check
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

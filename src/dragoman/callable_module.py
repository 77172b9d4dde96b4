"""Modules that can be called: `dragoman.train` is a package of the source tree and a function of the public API."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any


class CallableModule(ModuleType):
    """A module whose call is the function of its name, its own or one of api.py.

    Tools see the signature and the docstring of that function, which is looked up late: importing it takes time.
    """

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return _function_of(self)(*arguments, **named)

    @property
    def __signature__(self) -> Any:
        import inspect

        return inspect.signature(_function_of(self))

    @property
    def __doc__(self) -> str | None:  # type: ignore[override]
        return _function_of(self).__doc__


def _function_of(module: ModuleType) -> Callable[..., Any]:
    from dragoman import api

    name = module.__name__.rpartition(".")[2]
    function: Callable[..., Any] = vars(module).get(name) or getattr(api, name)
    return function

"""Stand-ins of packages that a foreign program imports and does not use here: where they are not installed.

PyTorch's own index alone has torchvision without CUDA, and builds of torch for processors come without triton.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class _Name(type):
    """A class whose attributes are such classes."""

    def __getattr__(cls, name: str) -> _Name:
        return _of(cls, name)


class _Module(ModuleType):
    def __getattr__(self, name: str) -> _Name:
        return _of(self, name)


def _of(owner: object, name: str) -> _Name:
    if name.startswith("__"):
        raise AttributeError(name)
    made = _Name(name, (), {"__init__": lambda self, *args, **kwargs: None})
    setattr(owner, name, made)
    return made


class _Finder(MetaPathFinder, Loader):
    def __init__(self, packages: Sequence[str]) -> None:
        self._packages = packages

    def find_spec(self, name: str, path: object, target: ModuleType | None = None) -> ModuleSpec | None:
        is_ours = name.partition(".")[0] in self._packages
        return ModuleSpec(name, self, is_package=True) if is_ours else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None: ...


@contextmanager
def stand_ins(*packages: str) -> Iterator[None]:
    """Imports in the block find these packages, installed or not; every name in one that is not is an empty class."""
    absent = [package for package in packages if importlib.util.find_spec(package) is None]
    finder: Any = _Finder(absent)
    sys.meta_path.append(finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.partition(".")[0] in absent]:
            del sys.modules[name]

"""Import-only stand-in for torchvision in SGLang server processes on machines without CUDA.

SGLang's multimodal modules and transformers' image modules name torchvision while they are imported. A text
model never calls it, and its published wheel is linked against CUDA. Here every ``torchvision.x.y`` imports as an
empty module, and each of its attributes is an inert class that cannot be instantiated. This folder is only on the
server's PYTHONPATH.
"""

import importlib.abc
import importlib.machinery
import sys
from types import ModuleType

__version__ = "0.28.0"


class _InertType(type):
    """Attributes are their own dotted name, which is enough for enum-like constants that are read at import time."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return f"{cls.__name__}.{name}"

    def __call__(cls, *args: object, **kwargs: object) -> object:
        raise RuntimeError(
            f"torchvision's {cls.__name__} was called; without CUDA this server has an import-only stand-in"
        )


def _inert_attribute(name: str) -> type:
    if name.startswith("__"):
        raise AttributeError(name)
    return type.__new__(_InertType, name, (), {})


__getattr__ = _inert_attribute


class _SubmoduleFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Resolves every ``torchvision.*`` import. Attributes alone are not enough, because transformers looks up submodules
    by spec."""

    def find_spec(self, fullname, path=None, target=None):
        if not fullname.startswith("torchvision."):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec):
        return None

    def exec_module(self, module: ModuleType) -> None:
        module.__getattr__ = _inert_attribute


sys.meta_path.append(_SubmoduleFinder())

"""Has transformers imported without what training and `torch.compile` take, neither of which is done here.

Its base imports SciPy for the losses of detectors, and the whole compiler of torch for the sake of decorators that only
tell that compiler something. Both take memory in every process, and a part of the time that imports take.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

_COMPILER = "torch._dynamo"
_DECORATORS = ("allow_in_graph", "assume_constant_result", "disable")
_STANDS_ALONE = f"{_COMPILER}._trace_wrapped_higher_order_op"
"""What transformers' masks import of the compiler. It needs nothing of the rest."""
_FOR_TRAINING = ("scipy", "sklearn")


@contextmanager
def without_training() -> Iterator[None]:
    """What is imported in the block finds no SciPy and no scikit-learn, unless they have been imported before it."""
    hidden = [name for name in _FOR_TRAINING if name not in sys.modules]
    gone: dict[str, Any] = dict.fromkeys(hidden)
    sys.modules.update(gone)  # where there is None, importing and looking for it find nothing
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]
        if (found := sys.modules.get("transformers.utils.import_utils")) is not None:
            for name in hidden:
                if (forget := getattr(getattr(found, f"is_{name}_available", None), "cache_clear", None)) is not None:
                    forget()  # it keeps what it has found


@contextmanager
def deferred_compiler() -> Iterator[None]:
    """In the block torch's compiler is loaded at the first use that is more than to decorate. Imports torch.

    For one thread: two that import parts of the compiler in it may wait for each other for ever.
    """
    spec = find_spec(_COMPILER)
    if spec is None or _COMPILER in sys.modules:
        yield
        return
    deferred = sys.modules[_COMPILER] = _DeferredCompiler(spec)
    finder = _LoadsBeforeItsParts(deferred)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        if not deferred.is_loaded:  # torch looks here for whether it is
            del sys.modules[_COMPILER]


class _DeferredCompiler(ModuleType):
    """The package itself, before its code has run. Its decorators do nothing, and all else runs its code first."""

    def __init__(self, spec: ModuleSpec) -> None:
        super().__init__(spec.name)
        self.__spec__ = spec
        self.__loader__ = spec.loader
        self.__package__ = spec.name
        self.__file__ = spec.origin
        self.__path__ = list(spec.submodule_search_locations or ())
        self.is_loaded = False
        self._loading = threading.RLock()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in _DECORATORS:  # its code has not run, or not so far: else they would be there
            return _decorator
        self.load()
        if name in vars(self):
            return vars(self)[name]
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")

    def load(self) -> None:
        """Run its code, if that is still to do. Raises whatever that does, and then it is to do again."""
        with self._loading:
            if self.is_loaded:
                return
            self.is_loaded = True  # it asks for itself
            try:
                if sys.modules.get(_COMPILER) is self:
                    assert self.__spec__ is not None and self.__spec__.loader is not None
                    self.__spec__.loader.exec_module(self)
                else:  # whoever has kept it asks after the block: the code does not run twice
                    vars(self).update(vars(import_module(_COMPILER)))
            except BaseException:
                self.is_loaded = False
                raise


class _LoadsBeforeItsParts(MetaPathFinder):
    """Finds nothing. It has the package's code run before that of its submodules, whose imports go round in circles
    where it begins with one of them."""

    def __init__(self, package: _DeferredCompiler) -> None:
        self._package = package

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        if fullname.startswith(f"{_COMPILER}.") and fullname != _STANDS_ALONE:
            self._package.load()


def _decorator(fn: Callable[..., Any] | None = None, *_: object, **__: object) -> Any:
    """As `@name` and as `@name(...)`; the function may come by its name."""
    return (lambda decorated: decorated) if fn is None else fn

"""Compiles kernels with numba and keeps the code on disk, so that a machine compiles each of them once.

Numba itself keeps a function's code as long as the function's own file stays the same. But a kernel has the code and
the constants of other files compiled into it. So here the code is kept for the content of the function's file and of
every file of dips that this one imports, directly or not: a change of any of them compiles it again. The key also has
the processor's name and features, and the versions of Python and numba.

The folder is NUMBA_CACHE_DIR if that is set and can be written, else the __pycache__ next to the file, else numba's
folder in the user's cache; where none can be written, code is compiled again at every start, and a warning says so.
One process at a time compiles: the others wait for it at a lock file and load what it made. The lock is the operating
system's, so it ends with the process that holds it.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import IO, Any, ParamSpec, TypeVar

import numba
import xxhash
from numba.core import event, sigutils
from numba.core.caching import (
    CompileResultCacheImpl,
    FunctionCache,
    IndexDataCacheFile,
    InTreeCacheLocator,
    UserProvidedCacheLocator,
    UserWideCacheLocator,
)
from numba.core.ccallback import CFunc
from numba.core.compiler_lock import global_compiler_lock
from numba.core.dispatcher import Dispatcher

P = ParamSpec("P")
R = TypeVar("R")

LOCK_NAME = "dips-kernels.lock"

_log = logging.getLogger("dips.kernels")

# ---- for kernels ----


def compiled(function: Callable[P, R]) -> Callable[P, R]:
    """numba.njit, with the type of the function kept for the type checker; never fastmath."""
    kernel: Any = numba.njit(nogil=True, fastmath=False, error_model="numpy")(function)
    _keep_on_disk(kernel, function)
    result: Callable[P, R] = kernel
    return result


def callback(signature: Any) -> Callable[[Callable[..., Any]], Callable[[], int]]:
    """numba.cfunc: gives the address of a C function, which is compiled or loaded when that is first asked for: at an
    import a process would wait for all that another one compiles, and say nothing to anyone."""

    def wrapped(function: Callable[..., Any]) -> Callable[[], int]:
        kernel: Any = CFunc(function, sigutils.normalize_signature(signature), {}, {})  # type: ignore[no-untyped-call]
        _keep_on_disk(kernel, function)

        def address() -> int:
            if kernel.address is None:
                with global_compiler_lock:
                    if kernel.address is None:  # made twice, the first one would be freed
                        kernel.compile()
            return int(kernel.address)

        return address

    return wrapped


def _keep_on_disk(kernel: Any, function: Callable[..., Any]) -> None:
    try:
        kernel._cache = _Cache(function)
        kernel.compile = _turn.taken_for(kernel.compile)
    except RuntimeError:  # no folder can be written: the same code, compiled again at every start
        kernel.compile = _not_kept(kernel.compile)


def _not_kept(make_code: Callable[..., Any]) -> Callable[..., Any]:
    def compile_and_say_so(*given: Any) -> Any:
        _say_once("no folder for compiled code can be written, so every start compiles it again: set NUMBA_CACHE_DIR")
        return make_code(*given)

    return compile_and_say_so


@functools.cache
def _say_once(sentence: str) -> None:
    _log.warning("kernels: %s", sentence)


# ---- when code is stale ----

_ROOT = Path(__file__).parents[2]
"""The folder of the package dips."""

_IMPORTS = re.compile(r"^(?:from (dips[.\w]*) import (\([^)]*\)|.*)|import (dips[.\w]*))", re.MULTILINE)
_NAMES = re.compile(r"(\w+)(?: as \w+)?")


def sources_of(path: Path) -> list[Path]:
    """The file and every file of dips that it imports when it is imported, directly or not, in a fixed order."""
    found, todo = {path}, [path]
    while todo:
        new = _imports_of(todo.pop()) - found
        found |= new
        todo += new
    return sorted(found)


@functools.cache
def _imports_of(path: Path) -> set[Path]:
    modules: list[str] = []
    for package, names, module in _IMPORTS.findall(_text_of(path).decode()):
        modules += [module] if module else [package, *(f"{package}.{name}" for name in _NAMES.findall(names))]
    places = [_ROOT.parent.joinpath(*module.split(".")) for module in modules]
    files = [file for place in places for file in (place.with_suffix(".py"), place / "__init__.py")]
    return {file for file in files if file.exists()}


@functools.cache
def _text_of(path: Path) -> bytes:
    return path.read_bytes()


@functools.cache
def stamp_of(path: Path) -> str:
    """Changes whenever code that was compiled from this file may be stale."""
    hashed = xxhash.xxh3_128()
    for source in sources_of(path):
        hashed.update(f"{source.relative_to(_ROOT) if source.is_relative_to(_ROOT) else source.name}\0".encode())
        hashed.update(_text_of(source))
    return hashed.hexdigest()


class _Stamped:
    """Next to one of numba's locators, which say in which folder the code of a function is kept."""

    def __init__(self, function: Callable[..., Any], file: str) -> None:
        super().__init__(function, file)  # type: ignore[call-arg]
        self._stamp = stamp_of(Path(file))

    def get_source_stamp(self) -> str:
        return self._stamp

    def ensure_cache_path(self) -> None:
        _ensure(self.get_cache_path())  # type: ignore[attr-defined]


@functools.cache
def _ensure(folder: str) -> None:
    """Raises OSError if the folder cannot be made or nothing can be written into it."""
    os.makedirs(folder, exist_ok=True)
    tempfile.TemporaryFile(dir=folder).close()


class _Beside(_Stamped, InTreeCacheLocator):
    pass


class _Given(_Stamped, UserProvidedCacheLocator):
    pass


class _OfUser(_Stamped, UserWideCacheLocator):
    pass


class _Code(CompileResultCacheImpl):
    _locator_classes = [_Given, _Beside, _OfUser]  # noqa: RUF012 - numba's name and type


class _Files(IndexDataCacheFile):
    """Numba's list of the code of one function, and a file for each piece of code, which says what it is itself.

    Numba writes the list before the code, under names that earlier code had. So a process that ends in between, or
    whose disk is full, leaves a list that names the code of an earlier release, or of other types.
    """

    def save(self, key: Any, data: Any) -> None:
        super().save(key, (*self._is_of(key), data))  # type: ignore[no-untyped-call]

    def load(self, key: Any) -> Any:
        found = super().load(key)  # type: ignore[no-untyped-call]
        return found[-1] if found is not None and found[:-1] == self._is_of(key) else None

    def _is_of(self, key: Any) -> tuple[Any, ...]:
        return self._version, self._source_stamp, key


class _Cache(FunctionCache):
    """The code of one function on disk. What is not there is compiled in turn."""

    _impl_class = _Code

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)  # type: ignore[no-untyped-call]
        impl = self._impl
        self._cache_file = _Files(self.cache_path, impl.filename_base, impl.locator.get_source_stamp())  # type: ignore[no-untyped-call]

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        found = self._load(sig, target_context)
        if found is None and _turn.take():
            found = self._load(sig, target_context)
        return found

    def _load(self, sig: Any, target_context: Any) -> Any:
        try:
            return super().load_overload(sig, target_context)  # type: ignore[no-untyped-call]
        except Exception as error:
            # A machine that lost power leaves half a file, and an earlier release may leave a type that is no longer
            # there: both may end in any error.
            _say_once(f"code in {self.cache_path} cannot be read and is compiled again: {error!r}")
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        save = super().save_overload
        try:
            try:
                save(sig, data)  # type: ignore[no-untyped-call]
            except OSError:
                raise
            except Exception:  # numba adds to the list of what is kept, and cannot read it either (see _load())
                self._cache_file.flush()  # type: ignore[no-untyped-call]
                save(sig, data)  # type: ignore[no-untyped-call]
        except OSError as error:
            _say_once(f"compiled code cannot be kept, so the next start compiles it again: {error}")


# ---- one process at a time ----


class _Turn:
    """The right to compile on this machine, from the first kernel that is not on disk until the outermost compilation
    ends. Used under numba's own lock, which lets one thread of a process compile."""

    def __init__(self) -> None:
        self._file: IO[bytes] | None = None
        self._nested = 0

    def taken_for(self, make_code: Callable[..., Any]) -> Callable[..., Any]:
        """The same function; when it is over, the turn that was taken meanwhile ends, also when it raised."""

        def in_turn(*given: Any) -> Any:
            with global_compiler_lock:
                self._nested += 1
                try:
                    return make_code(*given)
                finally:
                    self._nested -= 1
                    if self._nested == 0 and self._file is not None:
                        self._file.close()
                        self._file = None

        return in_turn

    def take(self) -> bool:
        """Wait for it. False if this process had it already, or if there is nothing to wait at."""
        try:
            import fcntl
        except ImportError:  # as on Windows: two processes may compile the same
            return False
        if self._file is not None:
            return False
        kept_in = folder()
        if kept_in is None:
            return False
        path = kept_in / LOCK_NAME
        try:
            self._file = path.open("ab")
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                _log.info("kernels: another process on this machine compiles them; waiting for it (%s)", path)
                for watcher in _watchers:
                    watcher.waits()
                fcntl.flock(self._file, fcntl.LOCK_EX)
        except OSError as error:  # a file system without locks: then two processes may compile the same
            _log.warning("kernels: %s cannot be locked: %s", path, error)
            return False
        return True


_turn = _Turn()


@functools.cache
def folder() -> Path | None:
    """Where code is kept that is compiled from files next to this one, and the lock of all; None: nowhere."""
    try:
        return Path(_Cache(compiled).cache_path)
    except RuntimeError:
        return None


def where_kept() -> str:
    """Whether later starts find the compiled code, and in which folder: the end of a sentence."""
    kept_in = folder()
    if kept_in is None:
        return "no folder for it can be written, so every start compiles it again: set NUMBA_CACHE_DIR"
    return f"kept in {kept_in} for later starts"


# ---- progress ----

_COMPILES = "numba:compile"

TellKernel = Callable[[str, int, int], None]
"""(name of the kernel that is compiled now, kernels begun, kernels that there are)."""

WAITS = "by another process, waiting"
"""Told instead of a kernel's name: compiling 3 of 34 (by another process, waiting)."""

_watchers: list[_Listener] = []


@contextlib.contextmanager
def watched(tell: TellKernel, *modules: ModuleType) -> Iterator[None]:
    """While this lasts, call `tell` for each kernel of these modules when its compilation begins, on that thread, and
    with WAITS instead of a name when another process's is waited for. Those that are loaded from disk are not reported.
    """
    kernels = {
        found.py_func
        for module in modules
        for found in vars(module).values()
        if isinstance(found, Dispatcher) and found.py_func.__module__ == module.__name__
    }
    listener = _Listener(tell, kernels)
    event.register(_COMPILES, listener)  # type: ignore[no-untyped-call]
    _watchers.append(listener)
    try:
        yield
    finally:
        _watchers.remove(listener)
        event.unregister(_COMPILES, listener)  # type: ignore[no-untyped-call]


class _Listener(event.Listener):
    def __init__(self, tell: TellKernel, kernels: set[Any]) -> None:
        self._tell = tell
        self._kernels = kernels
        self._begun: set[Any] = set()

    def waits(self) -> None:
        self._tell(WAITS, len(self._begun), len(self._kernels))

    def on_start(self, event: Any) -> None:
        function = event.data["dispatcher"].py_func
        if function in self._kernels and function not in self._begun:  # one may be compiled for several types
            self._begun.add(function)
            self._tell(function.__name__.lstrip("_"), len(self._begun), len(self._kernels))

    def on_end(self, event: Any) -> None:
        """Does nothing: the next kernel that begins is the report."""

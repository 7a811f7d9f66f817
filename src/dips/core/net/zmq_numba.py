"""libzmq's C functions for compiled code, which calls them without the interpreter and without its lock.

They are those of the libzmq that pyzmq itself uses, so a socket that pyzmq made can be passed to them: its address is
`socket.underlying`. Names are the C ones, and so are the rules (http://api.zeromq.org): a function that returns -1 left
its reason in zmq_errno(), to be read at once and on the same thread. Addresses are intp, 0 is NULL.

Where available() is False, no function that calls one of these may be run or even compiled: why_not() says why.
Two declarations of zmq.h are written down here again: the size of zmq_msg_t and the fields of zmq_pollitem_t. Both are
the same on all 64-bit Linux machines since libzmq 4.1, and are part of its binary interface.
"""

from __future__ import annotations

import ctypes
import platform
import sys
import weakref
from collections.abc import Callable
from typing import Any

import llvmlite.binding  # type: ignore[import-untyped]
import numpy as np
import zmq
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from dips.core.math.compiling import callback
from dips.core.math.simd_numba import address, address_of, atomic_add, compiled, peek8

MESSAGE_BYTES = 64
"""Of a zmq_msg_t."""

DONTWAIT = int(zmq.DONTWAIT)
SNDMORE = int(zmq.SNDMORE)
SRCFD = int(zmq.SRCFD)
"""For zmq_msg_get: the file number of the connection that a message came by."""

EAGAIN = int(zmq.EAGAIN)
EHOSTUNREACH = int(zmq.EHOSTUNREACH)
ETERM = int(zmq.ETERM)
EINTR = 4

Messages = NDArray[np.uint8]
"""(n, MESSAGE_BYTES): memory of n zmq_msg_t, to be passed by address."""

PollItems = NDArray[Any]
"""(n,) POLL_ITEM."""

POLL_ITEM = np.dtype([("socket", np.intp), ("fd", np.int32), ("events", np.int16), ("revents", np.int16)])
"""zmq_pollitem_t. `fd` counts where `socket` is 0."""

# ---- where they are ----

_PYZMQ_BACKEND = "zmq.backend.cython._zmq"

_SIGNATURES: dict[str, tuple[Any, ...]] = {
    # result, then arguments
    "zmq_msg_init": (types.int32, types.intp),
    "zmq_msg_init_size": (types.int32, types.intp, types.intp),
    "zmq_msg_init_data": (types.int32, types.intp, types.intp, types.intp, types.intp, types.intp),
    "zmq_msg_recv": (types.int32, types.intp, types.intp, types.int32),
    "zmq_msg_send": (types.int32, types.intp, types.intp, types.int32),
    "zmq_msg_move": (types.int32, types.intp, types.intp),
    "zmq_msg_close": (types.int32, types.intp),
    "zmq_msg_data": (types.intp, types.intp),
    "zmq_msg_size": (types.intp, types.intp),
    "zmq_msg_more": (types.int32, types.intp),
    "zmq_msg_get": (types.int32, types.intp, types.int32),
    "zmq_msg_gets": (types.intp, types.intp, types.intp),
    "zmq_send": (types.int32, types.intp, types.intp, types.intp, types.int32),
    "zmq_poll": (types.int32, types.intp, types.int32, types.int64),
    "zmq_errno": (types.int32,),
    "clock_gettime": (types.int32, types.int32, types.intp),
}


_C_TYPES = {types.int32: ctypes.c_int32, types.intp: ctypes.c_ssize_t, types.int64: ctypes.c_int64}


def _linked(name: str) -> str:
    """The name by which compiled code knows a C function: one of our own, so that it is no one else's."""
    return f"dips_{name}"


def _register() -> tuple[str, Any]:
    """Tell LLVM's linker where the functions are. Returns why it cannot be done, or "" and the library.

    A name, unlike an address that stands in the code, lets numba keep the compiled function on disk.
    """
    system, machine = platform.system(), platform.machine()
    if system != "Linux" or machine not in ("x86_64", "aarch64") or sys.maxsize != 2**63 - 1:
        return f"this is {system} on {machine}; compiled loops know zmq.h of 64-bit Linux on x86_64 and aarch64", None
    backend = zmq.backend.Socket.__module__
    if backend != _PYZMQ_BACKEND:
        return f"pyzmq runs on its backend {backend}; only the libzmq of {_PYZMQ_BACKEND} is known", None
    # Asked for by the extension's own handle, the system's linker finds the libzmq that this extension uses: a bundled
    # one, the system's, or one that was linked into it.
    extension = sys.modules[backend].__file__
    assert extension is not None, "an extension module is a file"
    library, own_process = ctypes.CDLL(extension), ctypes.CDLL(None)
    for name, signature in _SIGNATURES.items():
        home = library if name.startswith("zmq_") else own_process
        try:
            function = getattr(home, name)
        except AttributeError:
            return f"{name} is not in the libzmq {zmq.zmq_version()} that {extension} uses", None
        function.restype, *function.argtypes = (_C_TYPES[kind] for kind in signature)
        place = ctypes.cast(function, ctypes.c_void_p).value
        llvmlite.binding.add_symbol(_linked(name), place)
    return "", library


_WHY_NOT, _library = _register()  # at import: before any function that numba has kept on disk is loaded


def available() -> bool:
    """Whether compiled code can call libzmq here."""
    return not _WHY_NOT


def why_not() -> str:
    """The reason why available() is False, a sentence for a log; "" where it is True."""
    return _WHY_NOT


def _external(name: str) -> Any:
    """The C function, to be called from compiled code only."""
    result, *arguments = _SIGNATURES[name]
    return types.ExternalFunction(_linked(name), result(*arguments))


# ---- for compiled code ----

zmq_msg_init = _external("zmq_msg_init")
zmq_msg_init_size = _external("zmq_msg_init_size")
zmq_msg_init_data = _external("zmq_msg_init_data")
"""(message, data, size, free function, hint): sends `data` from where it lies. free function: freed()."""
zmq_msg_recv = _external("zmq_msg_recv")
zmq_msg_send = _external("zmq_msg_send")
zmq_msg_move = _external("zmq_msg_move")
zmq_msg_close = _external("zmq_msg_close")
zmq_msg_data = _external("zmq_msg_data")
zmq_msg_size = _external("zmq_msg_size")
zmq_msg_more = _external("zmq_msg_more")
zmq_msg_get = _external("zmq_msg_get")
zmq_msg_gets = _external("zmq_msg_gets")
zmq_send = _external("zmq_send")
zmq_poll = _external("zmq_poll")
"""(address of the items, how many, milliseconds). Only after a result above 0 do `revents` say anything."""
zmq_errno = _external("zmq_errno")

_CLOCK_MONOTONIC = 1
_USER_ID = np.frombuffer(b"User-Id\0", np.uint8)


def _intrinsic(function: Callable[..., Any]) -> Any:
    return intrinsic(function)


@_intrinsic
def monotonic_ns(typing: Any) -> Any:
    """time.monotonic_ns()."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        i32, i64 = ir.IntType(32), ir.IntType(64)
        timespec = cgutils.alloca_once(builder, ir.ArrayType(i64, 2))  # type: ignore[no-untyped-call]
        kind = ir.FunctionType(i32, [i32, i64])
        clock = cgutils.get_or_insert_function(builder.module, kind, _linked("clock_gettime"))  # type: ignore[no-untyped-call]
        builder.call(clock, [i32(_CLOCK_MONOTONIC), builder.ptrtoint(timespec, i64)])
        seconds, rest = (builder.load(builder.gep(timespec, [i32(0), i32(k)])) for k in (0, 1))
        return builder.add(builder.mul(seconds, i64(10**9)), rest)

    return types.int64(), codegen


@compiled
def now_s() -> float:
    """time.monotonic(), the same bits."""
    return np.float64(monotonic_ns()) / 1e9


@compiled
def is_ready(items: PollItems, index: int) -> bool:
    """Whether zmq_poll() found something at this item: a message, readable bytes, or an error."""
    return bool(items[index].revents != 0)


@compiled
def number_of_user(message: int, users: NDArray[np.uint8]) -> int:
    """Which of these user ids the ZAP handler gave the connection that the received message came by; -1: none of them.

    users (k, n): ids of n bytes each, none of them 0, ascending.
    """
    place = zmq_msg_gets(message, address_of(_USER_ID))
    low, high = 0, len(users) if place != 0 else 0
    while low < high:
        middle = (low + high) // 2
        order = _order(place, users[middle])
        if order == 0:
            return middle
        if order < 0:
            high = middle
        else:
            low = middle + 1
    return -1


@compiled
def _order(place: int, user: NDArray[np.uint8]) -> int:
    """Whether the text at this address comes before the id (-1), is the same (0), or comes after it (1)."""
    for index in range(len(user)):
        byte, its = peek8(place + index), np.uint64(user[index])
        if byte == np.uint64(0) or byte < its:  # a text that ends here comes before: nothing behind its end is read
            return -1
        if byte > its:
            return 1
    return 0 if peek8(place + len(user)) == np.uint64(0) else 1


@callback(types.void(types.intp, types.intp))
def freed(data: int, hint: int) -> None:
    """libzmq calls it, on any of its threads, when it has read a payload that zmq_msg_init_data() took: count it.

    hint: the address of an int64. The counter there, and the payload, must live until the counter shows that it came
    back: long after its socket was closed, perhaps. Its address, freed(), is passed to a compiled loop as an argument:
    in its code it could not be kept on disk.
    """
    atomic_add(hint, 1)


# ---- for Python ----


def new_messages(n: int) -> Messages:
    """Memory for n messages. What lies in it is closed by no one but whoever received it."""
    return np.zeros((n, MESSAGE_BYTES), np.uint8)


def poll_items(*watched: zmq.Socket[bytes] | int) -> PollItems:
    """Items that wait for something to read, from sockets and file numbers, in this order. Keep the sockets open."""
    items = np.zeros(len(watched), POLL_ITEM)
    for item, source in zip(items, watched, strict=True):
        if isinstance(source, int):
            item["fd"] = source
        else:
            item["socket"], item["fd"] = source.underlying, -1
        item["events"] = zmq.POLLIN
    return items


class ReceivedFrame:
    """A frame that compiled code received, with what zmq.Frame offers: buffer, bytes, more, get().

    Its bytes stay where libzmq put them, and are given back when the last view of them is gone.
    """

    def __init__(self, messages: Messages, index: int) -> None:
        """Takes the message out of its place, where an empty one remains that needs no zmq_msg_close()."""
        self._message = new_messages(1)
        place = address(self._message)
        _call("zmq_msg_init", place)
        _call("zmq_msg_move", place, address(messages) + MESSAGE_BYTES * index)
        self._place = place
        n_bytes = _call("zmq_msg_size", place)
        data = (ctypes.c_uint8 * n_bytes).from_address(_call("zmq_msg_data", place)) if n_bytes else ctypes.c_char()
        memory = memoryview(data).toreadonly().cast("B")
        # A view holds `data`, so the finalizer of `data`, not of this object, must give the bytes back.
        weakref.finalize(data, _close, self._message)
        self._data = data
        self.buffer = memory[:n_bytes]
        """The bytes, read-only."""

    @property
    def bytes(self) -> bytes:
        """A copy."""
        return bytes(self.buffer)

    @property
    def more(self) -> bool:
        """Whether the message has further frames."""
        return bool(_call("zmq_msg_more", self._place))

    def get(self, what: int | str) -> int | str:
        """The file number (SRCFD), or a text by its name. Raises zmq.ZMQError where the message has none."""
        if isinstance(what, str):
            name = np.frombuffer(what.encode() + b"\0", np.uint8)
            text = _call("zmq_msg_gets", self._place, address(name))
            if not text:
                raise zmq.ZMQError(zmq.EINVAL)
            return ctypes.string_at(text).decode()
        number = _call("zmq_msg_get", self._place, what)
        if number < 0:
            raise zmq.ZMQError(zmq.EINVAL)
        return number


def _close(message: Messages) -> None:
    _call("zmq_msg_close", address(message))


def _call(name: str, *arguments: int) -> int:
    """A call from Python."""
    answer: int = getattr(_library, name)(*arguments)
    return answer

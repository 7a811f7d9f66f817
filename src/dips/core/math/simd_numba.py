"""Vector operations of 64 bytes for the compiled kernels, where numba's own loops leave vectors to the compiler.

A kernel that must keep eight streams of memory under way names its loads and stores here; `+`, `-` and `*` of two
vectors work on their elements, and each rounds once. The width is one of the language, not of the machine: LLVM cuts a
vector into what the processor has.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, lower_builtin, models, register_model, type_callable
from numba.np.arrayobj import populate_array
from numpy.typing import NDArray

from dips.core.math.compiling import compiled as compiled

VECTOR_BYTES = 64
"""A line of the cache: a vector that is streamed to memory must fill it."""


def _intrinsic(function: Callable[..., Any]) -> Any:
    """numba.extending.intrinsic: called from a kernel, without the typing context and with what it is called on."""
    return intrinsic(function)


class Vector(types.Type):
    """`lanes` elements of type `scalar`, side by side in registers."""

    def __init__(self, scalar: Any) -> None:
        self.scalar = scalar
        self.lanes = VECTOR_BYTES * 8 // scalar.bitwidth
        super().__init__(f"Vector({scalar})")

    def llvm(self) -> Any:
        return ir.VectorType(ir.FloatType() if self.scalar.bitwidth == 32 else ir.DoubleType(), self.lanes)


@register_model(Vector)
class _Model(models.PrimitiveModel):
    def __init__(self, manager: Any, fe_type: Vector) -> None:
        super().__init__(manager, fe_type, fe_type.llvm())  # type: ignore[no-untyped-call]


def _operator(function: Callable[[Any, Any], Any], instruction: str) -> None:
    @type_callable(function)
    def _typed(context: Any) -> Any:
        def typer(a: Any, b: Any) -> Any:
            return a if isinstance(a, Vector) and a == b else None

        return typer

    @lower_builtin(function, Vector, Vector)  # type: ignore[no-untyped-call,untyped-decorator]
    def _lowered(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return getattr(builder, instruction)(*args)


_operator(operator.add, "fadd")
_operator(operator.sub, "fsub")
_operator(operator.mul, "fmul")


def _pointer(context: Any, builder: Any, array_type: Any, array: Any, index: Any, vector: Vector) -> Any:
    """To the vector that begins with array[index]; 1-D, C-contiguous, no bounds are checked."""
    data = context.make_array(array_type)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [index]), vector.llvm().as_pointer())


@_intrinsic
def load(typing: Any, array: Any, index: Any) -> Any:
    """The vector array[index : index + lanes]; at any address."""
    vector = Vector(array.dtype)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(_pointer(context, builder, signature.args[0], args[0], args[1], vector), align=1)

    return vector(array, types.intp), codegen


@_intrinsic
def store(typing: Any, array: Any, index: Any, value: Any) -> Any:
    """array[index : index + lanes] = value; at any address."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(args[2], _pointer(context, builder, signature.args[0], args[0], args[1], value), align=1)
        return context.get_dummy_value()

    return types.void(array, types.intp, value), codegen


@_intrinsic
def stream(typing: Any, array: Any, index: Any, value: Any) -> Any:
    """As store, past the caches: the line is not read before it is overwritten. The address must be a multiple of
    VECTOR_BYTES; call fence() before another thread may read the result."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _pointer(context, builder, signature.args[0], args[0], args[1], value)
        one = builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)])
        builder.store(args[2], pointer, align=VECTOR_BYTES).set_metadata("nontemporal", one)
        return context.get_dummy_value()

    return types.void(array, types.intp, value), codegen


@_intrinsic
def prefetch(typing: Any, array: Any, index: Any) -> Any:
    """Ask for the line of array[index], which may lie beyond the array's end."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        i32, line = ir.IntType(32), ir.IntType(8).as_pointer()
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        function_type = ir.FunctionType(ir.VoidType(), [line, i32, i32, i32])
        name = "llvm.prefetch.p0i8"
        function = cgutils.get_or_insert_function(builder.module, function_type, name)  # type: ignore[no-untyped-call]
        to_read, into_all_caches, data_not_code = i32(0), i32(3), i32(1)
        place = builder.bitcast(builder.gep(data, [args[1]]), line)
        builder.call(function, [place, to_read, into_all_caches, data_not_code])
        return context.get_dummy_value()

    return types.void(array, types.intp), codegen


@_intrinsic
def fence(typing: Any) -> Any:
    """What was streamed before is visible to whoever sees anything that is written after."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), codegen


@_intrinsic
def splat(typing: Any, value: Any) -> Any:
    """The vector whose elements are all `value`."""
    vector = Vector(value)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        one = builder.insert_element(ir.Constant(vector.llvm(), ir.Undefined), args[0], ir.Constant(ir.IntType(32), 0))
        return builder.shuffle_vector(one, one, _lanes([0] * vector.lanes))

    return vector(value), codegen


@_intrinsic
def widen(typing: Any, value: Any) -> Any:
    """The float64 vectors of the lower and of the upper half of a float32 vector."""
    half = Vector(types.float64)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        parts = [range(half.lanes), range(half.lanes, 2 * half.lanes)]
        halves = [builder.shuffle_vector(args[0], args[0], _lanes(list(part))) for part in parts]
        return context.make_tuple(builder, signature.return_type, [builder.fpext(h, half.llvm()) for h in halves])

    return types.UniTuple(half, 2)(value), codegen  # type: ignore[no-untyped-call]


@_intrinsic
def multiply_add(typing: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once or twice, as the processor likes: only for products that are exact anyway."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = a.llvm()
        element = "f32" if a.scalar.bitwidth == 32 else "f64"
        name = f"llvm.fmuladd.v{a.lanes}{element}"
        function_type = ir.FunctionType(kind, [kind] * 3)
        function = cgutils.get_or_insert_function(builder.module, function_type, name)  # type: ignore[no-untyped-call]
        return builder.call(function, args)

    return a(a, a, a), codegen


@_intrinsic
def array_at(typing: Any, address: Any, n_elems: Any, dtype: Any) -> Any:
    """The array of n_elems elements at any address: one type for frames of every alignment, read-only ones too."""
    array_type = types.Array(dtype.dtype, 1, "C", aligned=False)
    n_bytes = dtype.dtype.bitwidth // 8

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array = context.make_array(array_type)(context, builder)
        data = builder.inttoptr(args[0], context.get_data_type(array_type.dtype).as_pointer())
        size = context.get_constant(types.intp, n_bytes)
        parts = {"data": data, "shape": [args[1]], "strides": [size], "itemsize": size, "meminfo": None}
        populate_array(array, **parts)  # type: ignore[no-untyped-call]
        return array._getvalue()

    return array_type(types.intp, types.intp, dtype), codegen


@_intrinsic
def address_of(typing: Any, array: Any) -> Any:
    """The address of the array's first element."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        return builder.ptrtoint(data, context.get_value_type(types.intp))

    return types.intp(array), codegen


# ---- memory by its address ----
#
# Compiled loops work on memory that belongs to C (messages of a socket). Every access of theirs is one of these, or is
# to an array of array_at: so a test can run a loop in the interpreter with twins that check each address. Addresses
# are intp, of any alignment unless it says otherwise; words are uint64 in the machine's order.


def _reads(n_bits: int) -> Callable[..., Any]:
    def read(typing: Any, address: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            found = builder.load(builder.inttoptr(args[0], ir.IntType(n_bits).as_pointer()), align=1)
            return found if n_bits == 64 else builder.zext(found, ir.IntType(64))

        return types.uint64(types.intp), codegen

    return read


peek8 = _intrinsic(_reads(8))
"""peek8(address) -> uint64: the byte there."""

peek32 = _intrinsic(_reads(32))
"""peek32(address) -> uint64: the 4 bytes there."""

peek64 = _intrinsic(_reads(64))
"""peek64(address) -> uint64: the 8 bytes there."""


@_intrinsic
def atomic_add(typing: Any, address: Any, value: Any) -> Any:
    """*(int64*)address += value, as one step for all threads; the value before. The address is a multiple of 8."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", builder.inttoptr(args[0], _I64.as_pointer()), args[1], "seq_cst")

    return types.int64(types.intp, types.int64), codegen


@_intrinsic
def atomic_get(typing: Any, address: Any) -> Any:
    """*(int64*)address; what its writer wrote before is visible after. The address is a multiple of 8."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(builder.inttoptr(args[0], _I64.as_pointer()), "acquire", 8)

    return types.int64(types.intp), codegen


@_intrinsic
def mulhi_fold(typing: Any, a: Any, b: Any) -> Any:
    """The upper xor the lower 64 bits of the 128-bit product of two uint64."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        wide = ir.IntType(128)
        product = builder.mul(builder.zext(args[0], wide), builder.zext(args[1], wide))
        upper = builder.lshr(product, ir.Constant(wide, 64))
        return builder.xor(builder.trunc(product, _I64), builder.trunc(upper, _I64))

    return types.uint64(types.uint64, types.uint64), codegen


# ---- vectors of 8 words of 64 bits, for the checksum ----


class Words(types.Type):
    """8 uint64, side by side in registers: VECTOR_BYTES."""

    def __init__(self) -> None:
        super().__init__("Words")


_I64 = ir.IntType(64)
_WORDS = ir.VectorType(_I64, 8)
words = Words()


@register_model(Words)
class _WordsModel(models.PrimitiveModel):
    def __init__(self, manager: Any, fe_type: Words) -> None:
        super().__init__(manager, fe_type, _WORDS)  # type: ignore[no-untyped-call]


@_intrinsic
def load_words(typing: Any, address: Any) -> Any:
    """The VECTOR_BYTES at any address."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(builder.inttoptr(args[0], _WORDS.as_pointer()), align=1)

    return words(types.intp), codegen


@_intrinsic
def store_words(typing: Any, address: Any, value: Any) -> Any:
    """Writes VECTOR_BYTES at any address."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(args[1], builder.inttoptr(args[0], _WORDS.as_pointer()), align=1)
        return context.get_dummy_value()

    return types.void(types.intp, words), codegen


@_intrinsic
def stream_words(typing: Any, address: Any, value: Any) -> Any:
    """As store_words, past the caches. As for stream: a multiple of VECTOR_BYTES, and a fence() must follow."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        one = builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)])
        place = builder.inttoptr(args[0], _WORDS.as_pointer())
        builder.store(args[1], place, align=VECTOR_BYTES).set_metadata("nontemporal", one)
        return context.get_dummy_value()

    return types.void(types.intp, words), codegen


@_intrinsic
def as_words(typing: Any, value: Any) -> Any:
    """The bytes of a vector of numbers."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], _WORDS)

    return words(value), codegen


@_intrinsic
def step_words(typing: Any, acc: Any, data: Any, secret: Any) -> Any:
    """A stripe of xxh3, for each i: acc[i ^ 1] += data[i]; k = data[i] ^ secret[i]; acc[i] += low32(k) * high32(k)."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        acc, data, secret = args
        swapped = builder.shuffle_vector(data, data, _lanes([1, 0, 3, 2, 5, 4, 7, 6]))
        key = builder.xor(data, secret)
        product = builder.mul(builder.and_(key, _all_words(0xFFFFFFFF)), builder.lshr(key, _all_words(32)))
        return builder.add(builder.add(acc, swapped), product)

    return words(words, words, words), codegen


@_intrinsic
def scramble_words(typing: Any, acc: Any, secret: Any) -> Any:
    """Behind each block of xxh3, for each i: acc[i] = (acc[i] ^ acc[i] >> 47 ^ secret[i]) * 0x9E3779B1."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        acc, secret = args
        mixed = builder.xor(builder.xor(acc, builder.lshr(acc, _all_words(47))), secret)
        prime, half = _all_words(0x9E3779B1), _all_words(32)  # in two halves: processors multiply 32 by 32 bits faster
        low = builder.mul(builder.and_(mixed, _all_words(0xFFFFFFFF)), prime)
        return builder.add(low, builder.shl(builder.mul(builder.lshr(mixed, half), prime), half))

    return words(words, words), codegen


def _all_words(value: int) -> Any:
    return ir.Constant(_WORDS, [value] * 8)


def _lanes(places: list[int]) -> Any:
    return ir.Constant(ir.VectorType(ir.IntType(32), len(places)), places)


def address(array: NDArray[Any]) -> int:
    """The address of the array's first element, to be given to a kernel for array_at; keep the array alive."""
    result: int = array.__array_interface__["data"][0]
    return result

"""Vector operations of 64 bytes for the compiled kernels, where numba's own loops leave vectors to the compiler.

A kernel that must keep eight streams of memory under way names its loads and stores here; `+`, `-` and `*` of two
vectors work on their elements, and each rounds once. The width is one of the language, not of the machine: LLVM cuts a
vector into what the processor has.

Numba's cache notices changes of a kernel's own file only, so kernels carry the checksum of this one (SIMD_XXH3).
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import numba
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, lower_builtin, models, register_model, type_callable
from numba.np.arrayobj import populate_array
from numpy.typing import NDArray

VECTOR_BYTES = 64
"""A line of the cache: a vector that is streamed to memory must fill it."""

P = ParamSpec("P")
R = TypeVar("R")


def compiled(function: Callable[P, R]) -> Callable[P, R]:
    """numba.njit, with the type of the function kept for the type checker; never fastmath."""
    options: dict[str, Any] = {"nogil": True, "fastmath": False, "error_model": "numpy"}
    result: Callable[P, R]
    try:
        result = numba.njit(cache=True, **options)(function)
    except RuntimeError:  # no folder for a cache can be written: the same code, compiled again at every start
        result = numba.njit(**options)(function)
    return result


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


def _lanes(places: list[int]) -> Any:
    return ir.Constant(ir.VectorType(ir.IntType(32), len(places)), places)


def address(array: NDArray[Any]) -> int:
    """The address of the array's first element, to be given to a kernel for array_at; keep the array alive."""
    result: int = array.__array_interface__["data"][0]
    return result

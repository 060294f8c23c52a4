"""Instructions that the DSL does not offer."""

from cutlass import Float32, Int32, Int64, Uint32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import dsl_user_op

REGISTERS = {Int32: "r", Uint32: "r", Int64: "l", Float32: "f"}  # as constraints name them


@dsl_user_op
def ptx(text: str, *operands, gives: tuple = (), early: bool = False, pure: bool = False, loc=None, ip=None) -> tuple:
    """Emits `text`, whose $0, $1, ... are its results, with these types, then its operands.

    `early`: results may be written before the last operand is read. `pure`: the compiler may move it, or leave it out.
    """
    results = [t.mlir_type for t in gives]
    result = llvm.inline_asm(
        (llvm.StructType.get_literal(results) if len(results) > 1 else results[0]) if results else None,
        [x.ir_value(loc=loc, ip=ip) for x in operands],
        text,
        ",".join([("=&" if early else "=") + REGISTERS[t] for t in gives] + [REGISTERS[type(x)] for x in operands]),
        has_side_effects=not pure,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )
    if len(results) < 2:
        return tuple(t(result) for t in gives)
    values = (llvm.extractvalue(t, result, [i], loc=loc, ip=ip) for i, t in enumerate(results))
    return tuple(t(value) for t, value in zip(gives, values, strict=True))

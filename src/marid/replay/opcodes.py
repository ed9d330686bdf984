"""What the instructions of Python's bytecode take and do, so far as ``value_flow.py`` follows them.

Opcodes are those that ``dis`` documents for Python 3.11 to 3.14.
"""

from __future__ import annotations

import dis
from collections.abc import Callable
from types import CodeType

POPS = {
    "NOP": 0, "RESUME": 0, "KW_NAMES": 0, "PUSH_NULL": 0, "COPY_FREE_VARS": 0, "MAKE_CELL": 0, "LOAD_CONST": 0,
    "LOAD_SMALL_INT": 0, "LOAD_DEREF": 0, "LOAD_CLOSURE": 0, "LOAD_GLOBAL": 0, "LOAD_ATTR": 1, "LOAD_METHOD": 1,
    "POP_ITER": 1, "END_FOR": 1, "GET_ITER": 1, "SET_FUNCTION_ATTRIBUTE": 2, "FOR_ITER": 0, "STORE_ATTR": 2,
    "STORE_DEREF": 1, "STORE_GLOBAL": 1, "STORE_SUBSCR": 3, "UNPACK_SEQUENCE": 1, "UNARY_NEGATIVE": 1,
    "UNARY_INVERT": 1, "UNARY_NOT": 1, "TO_BOOL": 1, "BINARY_OP": 2, "BINARY_SUBSCR": 2, "BINARY_SLICE": 3,
    "COMPARE_OP": 2, "CONTAINS_OP": 2, "IS_OP": 2, "LIST_APPEND": 1, "LIST_EXTEND": 1, "SET_ADD": 1, "MAP_ADD": 2,
    "RETURN_VALUE": 1, "RETURN_CONST": 0, "JUMP_FORWARD": 0, "JUMP_BACKWARD": 0, "JUMP_BACKWARD_NO_INTERRUPT": 0,
    "CALL_INTRINSIC_1": 1,
}  # fmt: skip
POPS_BY_COUNT: dict[str, Callable[[int], int]] = {
    "CALL": lambda count: count + 2,
    "CALL_KW": lambda count: count + 3,
    "BUILD_SLICE": lambda count: count,
    "BUILD_TUPLE": lambda count: count,
    "BUILD_LIST": lambda count: count,
    "BUILD_MAP": lambda count: 2 * count,
    "BUILD_CONST_KEY_MAP": lambda count: count + 1,
    "MAKE_FUNCTION": lambda flags: 1 + flags.bit_count(),  # before Python 3.13
}
"""How many entries of the stack an instruction takes; what it gives follows from ``dis.stack_effect``."""
SKIPPED = ("CACHE", "EXTENDED_ARG", "PRECALL", "NOT_TAKEN")
ENDS = ("RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE")
JUMPS = ("JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT")
IN_TURN = ("LOAD_FAST_LOAD_FAST", "LOAD_FAST_BORROW_LOAD_FAST_BORROW")
CLEANS = {"SWAP", "COPY", "POP_TOP", "STORE_FAST", "RERAISE"}
SIGNS = {"+", "-", "*", "/"}
QUIET = (
    *("NOP", "RESUME", "KW_NAMES", "PUSH_NULL", "COPY", "SWAP", "POP_", "LOAD_CONST", "LOAD_SMALL_INT", "LOAD_DEREF"),
    *("LOAD_GLOBAL", "LOAD_FAST", "STORE_FAST", "BUILD_", "LIST_APPEND", "MAP_ADD", "JUMP_", "RETURN_", "DELETE_FAST"),
)
"""How instructions begin that call nothing, so that nothing is written meanwhile."""

_OF_ALL_VARIABLES = {"locals", "vars", "eval", "exec"}


def looks_aside(code: CodeType) -> bool:
    """Whether a function may see its variables in another way than by their names. ``model.eval()`` does not."""
    names = {*code.co_names}
    if {"_getframe", "currentframe", "builtins", "__builtins__"} & names:
        return True
    return bool(_OF_ALL_VARIABLES & names) and any(
        one.argval in _OF_ALL_VARIABLES and one.opname not in ("LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR")
        for one in dis.get_instructions(code)
    )

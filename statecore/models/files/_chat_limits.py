"""What a chat template may use up: it comes with a model, and one that never ends would take the program with it.

Imports Jinja, so it is imported when a template is rendered and not before.
"""

import contextlib
import contextvars
import time
from collections.abc import Iterator
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

# A chat is rendered in milliseconds.
MAX_SECONDS = 10.0
_MAX_SIZE = 10_000_000

_end: contextvars.ContextVar[float] = contextvars.ContextVar("end", default=float("inf"))


@contextlib.contextmanager
def limited_time() -> Iterator[None]:
    """Lets what is rendered inside run for `MAX_SECONDS`."""
    token = _end.set(time.monotonic() + MAX_SECONDS)
    try:
        yield
    finally:
        _end.reset(token)


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox whose loops and macros end in time, and whose values do not outgrow memory."""

    intercepted_binops = frozenset(("+", "*", "**"))

    def compiled(self, source: str):
        """Returns a template that counts what it uses up."""
        tree = _Counted().visit(self.parse(source))
        tree.set_environment(self)
        return self.from_string(tree)

    def check_time(self) -> None:
        """Ends a template that has run for too long."""
        if time.monotonic() > _end.get():
            raise TemplateError(f"it did not end in {MAX_SECONDS:g} seconds")

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Returns the result of an operator, if it is not too large."""
        _check_size(max(_product(left, right), _product(right, left)) if operator == "*" else 0)
        if operator == "**" and isinstance(left, int) and isinstance(right, int):
            _check_size(left.bit_length() * abs(right))
        value = super().call_binop(context, operator, left, right)
        _check_size(_length(value))
        return value

    def joined(self, *parts: Any) -> str:
        """Returns texts one after the other, as `~` has it."""
        value = "".join(map(str, parts))
        _check_size(len(value))
        return value


class _Counted(NodeTransformer):
    """Puts calls of the environment's checks where a template can run long or grow."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        return self._checked(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Macro:
        return self._checked(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Call:
        self.generic_visit(node)
        return _call("joined", node.nodes, node.lineno)

    def _checked(self, node: Any) -> Any:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_call("check_time", [], node.lineno), lineno=node.lineno))
        return node


def _call(name: str, arguments: list, line: int) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(name), arguments, [], None, None, lineno=line)


def _length(value: Any) -> int:
    return len(value) if isinstance(value, str | list | tuple) else 0


def _product(left: Any, right: Any) -> int:
    if isinstance(left, int) and isinstance(right, int):
        return left.bit_length() + right.bit_length()
    return _length(left) * right if isinstance(right, int) else 0


def _check_size(size: int) -> None:
    if size > _MAX_SIZE:
        raise TemplateError(f"it makes a value of {size} parts")

"""The Jinja environment in which chat templates run: no access to Python objects, and bounded work and memory.

A template is code from a model's file. A time limit cannot interrupt a single call into C, so each operation is checked
before it runs: no single one can make a huge value or take long. The rest is counted by a RenderBudget.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from functools import update_wrapper
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedEscapeFormatter, SandboxedFormatter
from jinja2.visitor import NodeTransformer
from markupsafe import Markup

from foretell.tokenizer import bounded_filters, bounded_text
from foretell.tokenizer.render_budget import MAX_INT_BITS, RenderBudget, TemplateLimitError, active, rendering

MAX_SOURCE = 1 << 18  # characters; the longest known templates have a tenth of that
GLOBALS = ("range", "dict", "namespace", "joiner", "cycler")
METHODS: dict[type, frozenset[str]] = {
    str: bounded_text.STRING_METHODS,
    Markup: bounded_text.STRING_METHODS,
    dict: frozenset(("get", "items", "keys", "values", "copy")),
    list: frozenset(("index", "count", "copy")),
    tuple: frozenset(("index", "count")),
    range: frozenset(("index", "count")),
    **dict.fromkeys((int, float, bool, bytes), frozenset(("is_integer", "bit_length"))),
}


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with every operation checked and counted."""

    intercepted_binops = frozenset(("+", "-", "*", "//", "%", "**"))

    def __init__(self) -> None:
        extensions: list[str | type[Extension]] = ["jinja2.ext.loopcontrols", GenerationBlocks]
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=extensions, finalize=finalize)
        self.filters: dict[str, Any] = bounded_filters.bounded_filters() | bounded_filters.INTERNAL
        self.tests: dict[str, Any] = bounded_filters.bounded_tests()
        self.globals = {name: self.globals[name] for name in GLOBALS}

    def compiled(self, source: str) -> jinja2.Template:
        """Return the template, its loops and values counted."""
        if len(source) > MAX_SOURCE:
            raise TemplateLimitError(f"it has {len(source)} characters; at most {MAX_SOURCE} are read")
        tree: nodes.Template = Counted().visit(self.parse(source))
        tree.set_environment(self)
        return self.from_string(tree)

    @staticmethod
    def concat(pieces: Iterable[str]) -> str:
        """Return an output buffer as one string."""
        budget = active()
        found = pieces if isinstance(pieces, list) else list(pieces)
        budget.admit(sum(map(len, found)))
        text: str = budget.made("".join(found))
        return text

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Return whether a method of a plain value is bounded; others are not callable."""
        allowed = METHODS.get(type(obj))
        if allowed is not None and callable(value):
            return attr in allowed
        return super().is_safe_attribute(obj, attr, value)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: B902
        """Call a method, a macro or a function."""
        kwargs.pop("_loop_vars", None)  # of no use to any function here
        kwargs.pop("_block_vars", None)
        budget = active()
        budget.step()
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str):
            return bounded_text.call_method(budget, __obj, args, kwargs)
        if isinstance(__obj, Macro):
            if __obj.catch_varargs or __obj.catch_kwargs:
                budget.size((args, kwargs))
            return super().call(__context, __obj, *args, **kwargs)  # its output is counted as it is joined
        if __obj is jinja2.utils.Namespace:
            budget.size((args, kwargs))
        return budget.made(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Compute an operator after checking the size of its result."""
        budget = active()
        if isinstance(left, str) and operator == "%":
            return bounded_text.percent(budget, left, right)
        CHECKS.get(operator, check_nothing)(budget, left, right)
        result = OPERATORS[operator](left, right)
        joins = operator == "+" and isinstance(result, list | tuple)
        return budget.joined(result, left, right) if joins else budget.made(result)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Return a bounded `str.format`, where the value is one."""
        owner = getattr(value, "__self__", None)
        if not isinstance(owner, str) or getattr(value, "__name__", "") not in ("format", "format_map"):
            return None
        maps = value.__name__ == "format_map"

        def call(*args: Any, **kwargs: Any) -> str:
            given = (), dict(*args) if maps else kwargs
            return bounded_format(self, owner, given[0] if maps else args, given[1])

        return update_wrapper(call, value)


OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "//": operator.floordiv,
    "%": operator.mod,
    "**": operator.pow,
}


def check_nothing(budget: RenderBudget, left: Any, right: Any) -> None:
    """Allow the result: this operator gives none larger than its operands."""


def check_sum(budget: RenderBudget, left: Any, right: Any) -> None:
    """Refuse a concatenation that exceeds the budget."""
    if not isinstance(left, int | float):
        budget.admit(budget.size(left) + budget.size(right))


def check_product(budget: RenderBudget, left: Any, right: Any) -> None:
    """Refuse a huge repetition, or a huge integer."""
    if isinstance(left, int) and isinstance(right, int):
        check_bits(left.bit_length() + right.bit_length())
    elif isinstance(left, int) or isinstance(right, int):
        count, value = (left, right) if isinstance(left, int) else (right, left)
        if isinstance(value, str):
            budget.admit(len(value) * count)
        elif not isinstance(value, float):
            budget.admit(budget.size(value) * count)


def check_power(budget: RenderBudget, left: Any, right: Any) -> None:
    """Refuse a power whose integer would have too many bits."""
    if isinstance(left, int) and isinstance(right, int) and abs(left) > 1:
        check_bits(left.bit_length() * abs(right))


def check_bits(bits: int) -> None:
    if bits > MAX_INT_BITS:
        raise TemplateLimitError(f"an integer has more than {MAX_INT_BITS} bits")


CHECKS = {"+": check_sum, "*": check_product, "**": check_power}


def finalize(value: Any) -> Any:
    """Return what is appended to the output for a value."""
    if isinstance(value, str) or not rendering():
        return value
    return bounded_text.as_text(active(), value)


class BoundedFields:
    """Limits the fields of a `str.format`."""

    written = 0

    def format_field(self, value: Any, spec: str) -> str:
        """Format one field and charge it to the budget."""
        bounded_text.check_spec(spec)
        budget = active()
        budget.admit(budget.size(value))
        text: str = super().format_field(value, spec)  # type: ignore[misc]
        self.written += len(text)
        budget.admit(self.written)
        budget.tick()
        return text


class BoundedFormatter(BoundedFields, SandboxedFormatter): ...


class BoundedEscapeFormatter(BoundedFields, SandboxedEscapeFormatter): ...


def bounded_format(environment: BoundedEnvironment, text: str, args: Any, kwargs: Any) -> str:
    """Return `text.format(*args, **kwargs)` within the budget."""
    if isinstance(text, Markup):
        escaping = BoundedEscapeFormatter(environment, escape=text.escape)
        return Markup(escaping.vformat(text, args, kwargs))
    return BoundedFormatter(environment).vformat(text, args, kwargs)


class Counted(NodeTransformer):
    """Puts the counting into a template: loops and macros, literals, slices, `~`, and costly comparisons."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        if node.test is not None:
            node.test = nodes.And(with_filter(nodes.Const(0), "_step"), node.test, lineno=node.lineno)
        return self._counted(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        return self._counted(self.generic_visit(node))

    visit_CallBlock = visit_Block = visit_Macro

    def _counted(self, node: Any) -> nodes.Node:
        pieces = sum(len(output.nodes) for output in node.find_all(nodes.Output))
        node.body.insert(0, nodes.ExprStmt(with_filter(nodes.Const(pieces), "_step"), lineno=node.lineno))
        result: nodes.Node = node
        return result

    def visit_List(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        store = getattr(node, "ctx", "load") != "load"
        constant = all(isinstance(item, nodes.Const) for item in node.iter_child_nodes())
        return node if store or constant else with_filter(node, "_made")

    visit_Tuple = visit_Dict = visit_List

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return with_filter(nodes.Tuple(node.nodes, "load", lineno=node.lineno), "_concat")

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return with_filter(node, "_part") if isinstance(node.arg, nodes.Slice) else node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        searches = any(operand.op in ("in", "notin") for operand in node.ops)
        sides = (node.expr, *(operand.expr for operand in node.ops))
        cheap = not searches and any(isinstance(side, nodes.Const) for side in sides)
        return node if cheap else with_filter(node, "_timed")

    def visit_Assign(self, node: nodes.Assign) -> nodes.Node:
        self.generic_visit(node)
        if any(True for _ in node.target.find_all(nodes.NSRef)) or isinstance(node.target, nodes.NSRef):
            node.node = with_filter(node.node, "_stored")
        return node

    def visit_ScopedEvalContextModifier(self, node: nodes.Node) -> nodes.Node:
        raise TemplateLimitError("it uses autoescape, which is not supported")

    visit_EvalContextModifier = visit_ScopedEvalContextModifier


def with_filter(node: nodes.Node, name: str) -> nodes.Filter:
    """Return the expression passed through an internal filter, which a template cannot redefine."""
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


class GenerationBlocks(Extension):
    """{% generation %} marks what a model is trained on; in a prompt only its content matters."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)

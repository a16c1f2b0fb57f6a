"""Bounds on what a chat template may do: a template comes with a model from anywhere, and Jinja's sandbox keeps it from
escaping but not from running forever or filling the memory.

A value weighs its characters and elements, nested ones as often as they would be written out. One value, the output
among them, may weigh `MAX_VALUE`; all that a rendering makes, `MAX_TOTAL`; both more where the messages do. A step that
could make much more than it is given (`*`, `replace`, `center` ...) is refused before it is taken. Every step and every
turn of a loop costs a little, and now and then a look at the clock: of the processor, so that a machine which is slow or
paused refuses no template. A process of its own, under the kernel's limits, would cost every row a message there and back.
"""

import functools
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, KeysView, ValuesView
from contextvars import ContextVar
from typing import Any

import jinja2
import jinja2.utils
from jinja2 import nodes, pass_context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_SOURCE_CHARACTERS = 1_000_000
MAX_VALUE = 4_000_000
MAX_TOTAL = 100_000_000
PER_INPUT = 64  # both bounds grow by this times the weight of the messages
MAX_SECONDS = 10.0  # of processor time
MAX_INTEGER_BITS = 4096
ELEMENT, STEP = 8, 50  # what an element of a list weighs, and what a step costs

# Filters and methods that make no more than a few times what they are given, whatever their arguments say.
MAKE_LITTLE = {
    *("attr", "count", "d", "default", "dictsort", "e", "endswith", "escape", "find", "first", "forceescape", "get"),
    *("groupby", "index", "int", "items", "keys", "last", "length", "list", "map", "max", "min", "reject"),
    *("rejectattr", "removeprefix", "removesuffix", "reverse", "safe", "select", "selectattr", "sort", "split"),
    *("startswith", "string", "title", "truncate", "unique", "urlencode", "values", "wordcount"),
}
# Slow, random, or of no use in a chat; no published template has them.
NOT_THERE = {
    *("decode", "encode", "filesizeformat", "pprint", "random"),
    *("striptags", "unescape", "urlize", "wordwrap", "xmlattr"),
}
# A width or precision of a format that is computed, or has four digits and more: of `%`, and of braces.
WIDE_FORMAT = re.compile(r"%(\([^)]*\))?[^a-zA-Z%]*(\*|\d{4})|\{[^{}]*:[^{}]*(\{|\d{4})")


class TemplateLimitError(jinja2.TemplateError):
    """A template wants more than it may have."""


class Budget:
    """What one rendering of `inputs` may still use."""

    def __init__(self, *inputs: Any):
        self._largest: float = math.inf
        given = self.weigh(inputs)
        self._largest, self._left = MAX_VALUE + PER_INPUT * given, MAX_TOTAL + PER_INPUT * given
        self._deadline = time.thread_time() + MAX_SECONDS
        self._steps = 0

    def weigh(self, value: Any) -> int:
        """The weight of a value. Raises TemplateLimitError where it is too heavy."""
        weight, rest = 0, [value]
        while rest and weight <= self._largest:
            item = rest.pop()
            weight += ELEMENT
            if isinstance(item, str):
                weight += len(item)
            elif isinstance(item, dict):
                rest += item
                rest += item.values()
            elif isinstance(item, list | tuple):
                rest += item
            elif isinstance(item, bytes):
                weight += len(item)
            elif isinstance(item, int):
                weight += item.bit_length()
                if item.bit_length() > MAX_INTEGER_BITS:
                    raise TemplateLimitError("it makes an integer of more than a thousand digits")
        return self.allow(weight)

    def allow(self, weight: int) -> int:
        if weight > self._largest:
            raise TemplateLimitError(f"it makes a value of more than {self._largest:,} characters")
        return weight

    def foresee(self, name: str, given: list[Any]) -> list[Any]:
        """Raises TemplateLimitError where what `name` makes of `given[0]` and its other arguments may be too heavy.

        Returns `given`, with lists for iterators, whose weight nobody knows.
        """
        if name in NOT_THERE:
            raise TemplateLimitError(f"it calls {name}, which chat templates have no use for here")
        if name in MAKE_LITTLE:
            return given
        given = [list(value) if isinstance(value, Iterator | KeysView | ValuesView) else value for value in given]
        times = 1 + sum(abs(value) if isinstance(value, int) else self.weigh(value) for value in given[1:])
        if name == "replace":
            text, old, new = [*map(str, given), "", ""][:3]
            self.allow(len(text) + text.count(old) * len(new))
        elif name in ("%", "format", "format_map"):
            if WIDE_FORMAT.search(text := str(given[0])):
                raise TemplateLimitError("it formats to a width of thousands, or one that it computes")
            self.allow(len(text) + (text.count("%") + text.count("{")) * (999 + times))
        else:
            self.allow(self.weigh(given[0]) * times)
        return given

    def made(self, value: Any) -> Any:
        """Counts a step and the value that it has made, and returns the value."""
        if type(value) is str:
            new = self.allow(len(value))
        else:
            new = 0 if value is None or type(value) is bool else self.weigh(value)
            if isinstance(value, list | tuple | dict):  # what is nested deeper was there before
                new = ELEMENT * len(value) + sum(len(item) for item in value if isinstance(item, str))
        self._left -= new + STEP
        self._steps += 1
        if self._left < 0:
            raise TemplateLimitError("it works on and on: the loops are too long, or too much text is made in them")
        if self._steps % 64 == 0 and time.thread_time() > self._deadline:
            raise TemplateLimitError(f"it took more than {MAX_SECONDS:g} seconds of processor time")
        return value

    def gather(self, pieces: Iterable[str]) -> str:
        """The pieces as one string, weighed while they come."""
        kept, weight = [], 0
        for piece in pieces:
            kept.append(piece)
            weight = self.allow(weight + len(piece))
        return self.made("".join(kept))


ACTIVE: ContextVar[Budget] = ContextVar("template_budget")
"""That of the rendering under way."""


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, where everything a template makes counts against the active `Budget`."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self, filters: dict[str, Callable[..., Any]], **options: Any):
        super().__init__(finalize=_finalize, optimized=False, **options)  # nothing is computed while compiling
        self.filters = {name: _counted(name, function) for name, function in {**self.filters, **filters}.items()}
        self.filters["(made)"] = _made
        self.tests = {name: _counted("get", test) for name, test in self.tests.items()}  # which make a boolean
        del self.globals["lipsum"]
        # The type has methods that change a dictionary.
        self.globals |= {"namespace": _Namespace, "dict": lambda *args, **named: dict(*args, **named)}

    def compile_bounded(self, source: str) -> jinja2.Template:
        """Compiles a template. Raises jinja2.TemplateError where it is none."""
        if len(source) > MAX_SOURCE_CHARACTERS:
            raise TemplateLimitError(f"it is longer than {MAX_SOURCE_CHARACTERS:,} characters")
        try:
            code = self.compile(_Counting().visit(self.parse(source)))
            return jinja2.Template.from_code(self, code, dict(self.globals))
        except (RecursionError, MemoryError, SyntaxError) as error:
            raise TemplateLimitError(f"it is nested too deeply ({type(error).__name__})") from None
        except ValueError as error:  # of constants that are computed here, such as a number too long to be written
            raise TemplateLimitError(str(error)) from None

    def concat(self, pieces: Iterable[str]) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return ACTIVE.get().gather(pieces)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        budget = ACTIVE.get()
        if operator != "+":
            are_numbers = isinstance(left, int | float) and isinstance(right, int | float)
            if operator == "**" or not are_numbers:
                budget.foresee(operator, [right, left] if isinstance(left, int) and not are_numbers else [left, right])
        return budget.made(self.binop_table[operator](left, right))

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        budget, owner = ACTIVE.get(), getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)
        given = [*args, *(kwargs[name] for name in kwargs if name not in ("_loop_vars", "_block_vars"))]  # Jinja's own
        if isinstance(owner, str | bytes | int | list | tuple | dict | type):  # Jinja wraps str.format
            args = tuple(budget.foresee(__obj.__name__, [owner, *given])[1 : len(args) + 1])
        else:
            budget.weigh(given)  # a macro sees them as a tuple
        return budget.made(super().call(__context, __obj, *args, **kwargs))


class _Counting(NodeTransformer):
    """Has the parts of a template count that Jinja compiles to plain Python."""

    def generic_visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> nodes.Node:
        node = super().generic_visit(node, *args, **kwargs)
        if isinstance(node, nodes.For):
            # In the body, not around what is looped over: `loop(...)` of a recursive loop begins another one.
            node.body.insert(0, nodes.ExprStmt(_filter("(made)", nodes.Const(None)), lineno=node.lineno))
            node.test = node.test and _filter("(made)", node.test)
        elif isinstance(node, nodes.Concat):
            return _filter("join", nodes.List(node.nodes, lineno=node.lineno))
        is_slice = isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
        is_tuple = isinstance(node, nodes.Tuple) and node.ctx == "load"
        makes = is_slice or is_tuple or isinstance(node, nodes.List | nodes.Dict | nodes.Compare)
        return _filter("(made)", node) if makes else node


def _filter(name: str, node: Any) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter or test whose result is foreseen and counted."""
    first = int(hasattr(function, "jinja_pass_arg"))  # the context or environment comes before the value

    @functools.wraps(function)
    def counted(*given: Any, **named: Any) -> Any:
        budget = ACTIVE.get()
        by_name = [named[key] for key in sorted(named, reverse=True)]  # `old` before `new`
        foreseen = budget.foresee(name, [*given[first:], *by_name])
        return budget.made(function(*given[:first], *foreseen[: len(given) - first], **named))

    return counted


def _made(value: Any) -> Any:
    return ACTIVE.get().made(value)


@pass_context
def _finalize(_: Any, value: Any) -> str:
    return value if isinstance(value, str) else ACTIVE.get().made(str(value))


class _Namespace(jinja2.utils.Namespace):
    """Jinja's, which is not written out: what is in it is not weighed with it."""

    def __repr__(self) -> str:
        raise TemplateLimitError("it writes out a namespace")

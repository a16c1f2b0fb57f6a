"""Limits on the work of a chat template. A template comes with a model from anywhere; Jinja's sandbox keeps it from
escaping, but not from running forever or filling the memory.

The weight of a value is the number of its characters and elements; nested values count as often as they would be
written out. One value (the output included) may weigh `MAX_VALUE`, and all values of a rendering `MAX_TOTAL`; both
limits grow with the messages. An operation whose result could be much larger than its input (`*`, `replace`, `center`
...) is checked before it runs. Every operation and loop iteration also has a small cost, and every 64th checks the
processor time of the thread (so a slow or paused machine rejects no template). Left out: a process with limits of the
kernel, which would add a message exchange to every row.
"""

import functools
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, KeysView, Sequence, ValuesView
from contextvars import ContextVar
from typing import Any, TypedDict, TypeVar, Unpack

import jinja2
import jinja2.utils
from jinja2 import nodes, pass_context
from jinja2.ext import Extension
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_SOURCE_CHARACTERS = 1_000_000
MAX_VALUE = 4_000_000
MAX_TOTAL = 100_000_000
PER_INPUT = 64  # both limits grow by this times the weight of the messages
MAX_SECONDS = 10.0  # of processor time
MAX_INTEGER_BITS = 4096
ELEMENT, STEP = 8, 50  # weight of a list element; cost of an operation

# Filters and methods whose result is at most a few times their input, for any arguments.
MAKE_LITTLE = {
    *("attr", "count", "d", "default", "dictsort", "e", "endswith", "escape", "find", "first", "forceescape", "get"),
    *("groupby", "index", "int", "items", "keys", "last", "length", "list", "map", "max", "min", "reject"),
    *("rejectattr", "removeprefix", "removesuffix", "reverse", "safe", "select", "selectattr", "sort", "split"),
    *("startswith", "string", "title", "truncate", "unique", "urlencode", "values", "wordcount"),
}
# Slow, random, or useless in a chat; no published template calls them.
FORBIDDEN = {
    *("decode", "encode", "filesizeformat", "pprint", "random"),
    *("striptags", "unescape", "urlize", "wordwrap", "xmlattr"),
}
# A format (`%` or braces) with a width or precision that is computed, or has four digits or more.
WIDE_FORMAT = re.compile(r"%(\([^)]*\))?[^a-zA-Z%]*(\*|\d{4})|\{[^{}]*:[^{}]*(\{|\d{4})")


Value = TypeVar("Value")


class TemplateLimitError(jinja2.TemplateError):
    """A template exceeds a limit."""


class Budget:
    """The remaining allowance of one rendering of `inputs`."""

    def __init__(self, *inputs: object):
        self._largest: float = math.inf
        weight = self.weigh(inputs)
        self._largest, self._left = MAX_VALUE + PER_INPUT * weight, MAX_TOTAL + PER_INPUT * weight
        self._deadline = time.thread_time() + MAX_SECONDS
        self._steps = 0

    def weigh(self, value: object) -> int:
        """Return the weight of a value. Raises TemplateLimitError if it is over the limit."""
        weight, rest = 0, [value]
        while rest and weight <= self._largest:
            item = rest.pop()
            weight += ELEMENT
            if isinstance(item, str | bytes):
                weight += len(item)
            elif isinstance(item, dict):
                rest += [*item, *item.values()]
            elif isinstance(item, list | tuple):
                rest += item
            elif isinstance(item, int):
                weight += item.bit_length()
                if item.bit_length() > MAX_INTEGER_BITS:
                    raise TemplateLimitError("it makes an integer of more than a thousand digits")
        return self.allow(weight)

    def allow(self, weight: int) -> int:
        if weight > self._largest:
            raise TemplateLimitError(f"it makes a value of more than {self._largest:,} characters")
        return weight

    def check(self, name: str, values: list[Any]) -> list[Any]:
        """Raise TemplateLimitError if the result of `name` on `values[0]` with the other values as its arguments may be
        over the limit.

        Returns the values with iterators turned into lists, since an iterator cannot be weighed.
        """
        if name in FORBIDDEN:
            raise TemplateLimitError(f"it calls {name}, which is not allowed in chat templates")
        if name in MAKE_LITTLE:
            return values
        values = [list(value) if isinstance(value, Iterator | KeysView | ValuesView) else value for value in values]
        times = 1 + sum(abs(value) if isinstance(value, int) else self.weigh(value) for value in values[1:])
        if name == "replace":
            text, old, new = [*map(str, values), "", ""][:3]
            self.allow(len(text) + text.count(old) * len(new))
        elif name in ("%", "format", "format_map"):
            if WIDE_FORMAT.search(text := str(values[0])):
                raise TemplateLimitError("it formats to a width of thousands of characters, or a computed width")
            self.allow(len(text) + (text.count("%") + text.count("{")) * (999 + times))
        else:
            self.allow(self.weigh(values[0]) * times)
        return values

    def count(self, value: Value) -> Value:
        """Count an operation and its result, and return the result."""
        if type(value) is str:
            new = self.allow(len(value))
        else:
            new = 0 if value is None or type(value) is bool else self.weigh(value)
            if isinstance(value, list | tuple | dict):  # values nested deeper were counted before
                new = ELEMENT * len(value) + sum(len(item) for item in value if isinstance(item, str))
        self._left -= new + STEP
        self._steps += 1
        if self._left < 0:
            raise TemplateLimitError("its loops run too long or produce too much text")
        if self._steps % 64 == 0 and time.thread_time() > self._deadline:
            raise TemplateLimitError(f"it took more than {MAX_SECONDS:g} seconds of processor time")
        return value

    def gather(self, pieces: Iterable[str]) -> str:
        """Join the pieces, weighing them as they come."""
        kept, weight = [], 0
        for piece in pieces:
            kept.append(piece)
            weight = self.allow(weight + len(piece))
        return self.count("".join(kept))


ACTIVE: ContextVar[Budget] = ContextVar("template_budget")
"""The budget of the current rendering."""


class _Options(TypedDict):
    """Options of Jinja's environment."""

    trim_blocks: bool
    lstrip_blocks: bool
    extensions: Sequence[type[Extension]]


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, in which every result counts against the active `Budget`."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self, filters: dict[str, Callable[..., Any]], **options: Unpack[_Options]):
        super().__init__(finalize=_finalize, optimized=False, **options)  # compute nothing while compiling
        self.filters = {name: _limited(name, function) for name, function in {**self.filters, **filters}.items()}
        self.filters["(count)"] = _count
        self.tests = {name: _limited("get", test) for name, test in self.tests.items()}  # results are booleans
        del self.globals["lipsum"]
        # The type `dict` itself has methods that modify a dictionary.
        self.globals |= {"namespace": _Namespace, "dict": lambda *args, **named: dict(*args, **named)}

    def compile_bounded(self, source: str) -> jinja2.Template:
        """Compile a template. Raises jinja2.TemplateError if it is invalid."""
        if len(source) > MAX_SOURCE_CHARACTERS:
            raise TemplateLimitError(f"it is longer than {MAX_SOURCE_CHARACTERS:,} characters")
        try:
            code = self.compile(_Counting().visit(self.parse(source)))
            return jinja2.Template.from_code(self, code, dict(self.globals))
        except (RecursionError, MemoryError, SyntaxError):
            raise TemplateLimitError("it is nested too deeply") from None
        except ValueError as error:  # constants that are computed here, such as a number with too many digits
            raise TemplateLimitError(str(error)) from None

    def concat(self, pieces: Iterable[str]) -> str:
        return ACTIVE.get().gather(pieces)

    def call_binop(self, context: Context, operator: str, left: object, right: object) -> Any:
        budget = ACTIVE.get()
        if operator != "+":
            are_numbers = isinstance(left, int | float) and isinstance(right, int | float)
            if operator == "**" or not are_numbers:
                budget.check(operator, [right, left] if isinstance(left, int) and not are_numbers else [left, right])
        return budget.count(self.binop_table[operator](left, right))

    def call(__self, __context: Context, __obj: Callable[..., Any], *args: object, **kwargs: object) -> Any:
        budget, owner = ACTIVE.get(), getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)
        passed = [
            *args,
            *(kwargs[name] for name in kwargs if name not in ("_loop_vars", "_block_vars")),
        ]  # not Jinja's own
        if isinstance(owner, str | bytes | int | list | tuple | dict | type):  # Jinja wraps str.format
            args = tuple(budget.check(__obj.__name__, [owner, *passed])[1 : len(args) + 1])
        else:
            budget.weigh(passed)  # a macro gets them as a tuple
        return budget.count(super().call(__context, __obj, *args, **kwargs))


class _Counting(NodeTransformer):
    """Adds counting to the parts of a template that Jinja compiles to plain Python."""

    def generic_visit(self, node: nodes.Node, *args: object, **kwargs: object) -> nodes.Node:
        node = super().generic_visit(node, *args, **kwargs)
        if isinstance(node, nodes.For):
            # In the body, not around the iterable, since `loop(...)` of a recursive loop begins another loop.
            node.body.insert(0, nodes.ExprStmt(_filter("(count)", nodes.Const(None)), lineno=node.lineno))
            node.test = node.test and _filter("(count)", node.test)
        elif isinstance(node, nodes.Concat):
            return _filter("join", nodes.List(node.nodes, lineno=node.lineno))
        is_slice = isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
        is_tuple = isinstance(node, nodes.Tuple) and node.ctx == "load"
        makes = is_slice or is_tuple or isinstance(node, nodes.List | nodes.Dict | nodes.Compare)
        return _filter("(count)", node) if makes else node


def _filter(name: str, node: nodes.Node) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _limited(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a filter or test: check it before, and count its result."""
    first = int(hasattr(function, "jinja_pass_arg"))  # the context or environment precedes the value

    @functools.wraps(function)
    def limited(*values: object, **named: object) -> Any:
        budget = ACTIVE.get()
        by_name = [named[key] for key in sorted(named, reverse=True)]  # `old` before `new`
        checked = budget.check(name, [*values[first:], *by_name])
        return budget.count(function(*values[:first], *checked[: len(values) - first], **named))

    return limited


def _count(value: Value) -> Value:
    return ACTIVE.get().count(value)


@pass_context
def _finalize(_: Context, value: object) -> str:
    return value if isinstance(value, str) else ACTIVE.get().count(str(value))


class _Namespace(jinja2.utils.Namespace):
    """Jinja's namespace without a text form, since weighing a namespace does not weigh its contents."""

    def __repr__(self) -> str:
        raise TemplateLimitError("it prints a namespace")

"""Bounds on what a chat template may do: a template comes with a model from anywhere, and Jinja's sandbox keeps it from
escaping but not from running forever or filling the memory.

Every value that a template makes is weighed: characters, and 8 for each element, nested ones as often as they would be
written out. One value may weigh MAX_VALUE, all values of a rendering together MAX_TOTAL, each plus a multiple of the
messages; processor time is bounded besides. That holds because of what is done where a template could make values:

- operators: `+ * ** %` and `~` predict the size of their result;
- filters and methods that can make more than a few times what they are given (`replace`, `join`, `indent`, `center`,
  `format` ...) predict it too, or are not there (`urlize`, `lipsum()`, `str.translate` ...: no published template
  has them);
- results of every call and filter, literal lists and slices are weighed, before anything walks through them;
- a loop's turns, comparisons and tests cost a little each, so that none is free.

Nothing measures the clock on the wall: a machine that is slow or paused refuses no template. What was left out: rendering
in a process of its own, which would bound the same by the kernel and cost each row a message there and back.
"""

import functools
import re
import string
import time
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from typing import Any

import jinja2
from jinja2 import nodes, pass_context, pass_environment
from jinja2.filters import make_attrgetter
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MAX_SOURCE_CHARACTERS = 1_000_000
MAX_VALUE = 4_000_000
MAX_TOTAL = 200_000_000
PER_INPUT = 64  # both bounds grow by this times the weight of the messages
MAX_SECONDS = 10.0  # of processor time
_STEPS_A_LOOK = 64  # at the clock: no step takes more than milliseconds, and a look costs as much as a step
_ELEMENT = 8
_STEP = 100  # what a turn of a loop weighs in the total: about as long as 100 characters take
_MAX_NUMBER = 1_000_000  # as an argument of a filter: a width, a count
_MAX_WIDTH_DIGITS = 3  # of a width or precision in a format
_MAX_INTEGER_BITS = 4096
_MARK = "_lean_ft_bounded"

_NOT_THERE = ("urlize", "wordwrap", "striptags", "xmlattr", "pprint", "random", "filesizeformat")
_METHODS_NOT_THERE = {"translate", "expandtabs", "format_map", "to_bytes", "from_bytes", "maketrans"}
_PERCENT = re.compile(r"%(?:\([^)]*\))?([^a-zA-Z%]*)[a-zA-Z%]")


class TemplateLimitError(jinja2.TemplateError):
    """A template wants more than it may have."""


class Budget:
    """What one rendering may still use. `with Budget(inputs):` makes it the one that counts."""

    def __init__(self, *inputs: Any):
        self._weights: dict[int, int] = {}  # of the containers given: they cannot be changed, and live on
        given = sum(self._remember(value) for value in inputs)
        self.max_value = MAX_VALUE + PER_INPUT * given
        self._left = MAX_TOTAL + PER_INPUT * given
        self._deadline = time.thread_time() + MAX_SECONDS
        self._steps_to_look = _STEPS_A_LOOK

    @staticmethod
    def active() -> "Budget":
        """That of the rendering under way."""
        return _active.get()

    def __enter__(self) -> "Budget":
        self._token = _active.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        _active.reset(self._token)

    def _remember(self, value: Any) -> int:
        if isinstance(value, dict):
            weight = _ELEMENT + sum(self._remember(key) + self._remember(inner) for key, inner in value.items())
        elif isinstance(value, list | tuple):
            weight = _ELEMENT + sum(map(self._remember, value))
        else:
            return _scalar_weight(value)
        self._weights[id(value)] = weight
        return weight

    def weigh(self, value: Any) -> int:
        """The weight of a value. Raises TemplateLimitError above `max_value`."""
        return self._weigh(value)[0]

    def _weigh(self, value: Any) -> tuple[int, int]:
        """The weight of a value, and what of it is new: messages in a list of the template's are only pointed at."""
        if type(value) is str:
            return self.allow(len(value)), len(value)
        weight = pointed_at = 0
        rest = [value]
        while rest and weight <= self.max_value:
            item = rest.pop()
            known = self._weights.get(id(item))
            if known is not None:
                weight += known
                pointed_at += known - _ELEMENT
            elif (inner := _elements(item)) is not None:
                weight += _ELEMENT
                rest.extend(inner)
            else:
                weight += _scalar_weight(item)
        return self.allow(weight), weight - pointed_at

    def allow(self, weight: int) -> int:
        """Raises TemplateLimitError where a value of this weight is too heavy."""
        if weight > self.max_value:
            raise TemplateLimitError(f"it makes a value of more than {self.max_value:,} characters")
        return weight

    def charge(self, value: Any) -> Any:
        """Counts a value that was made, and returns it."""
        kind = type(value)
        if kind is str:
            self.step(self.allow(len(value)))
        elif kind is bool or value is None:
            self.step(_ELEMENT)
        else:
            self.step(self._weigh(value)[1])
        return value

    def step(self, weight: int = 0) -> None:
        """Counts a step that handled `weight`."""
        self._left -= weight + _STEP
        if self._left < 0:
            raise TemplateLimitError("it works on and on: the loops are too long, or too much text is made in them")
        self._steps_to_look -= 1
        if self._steps_to_look == 0:
            self._steps_to_look = _STEPS_A_LOOK
            if time.thread_time() > self._deadline:
                raise TemplateLimitError(f"it took more than {MAX_SECONDS:g} seconds of processor time")

    def text(self, value: Any) -> str:
        """`str(value)` of a value that is not too heavy."""
        if type(value) is not str:
            self.weigh(value)
            value = str(value)
        return value

    def join(self, pieces: Iterable[str], between: str = "") -> str:
        """The pieces in one string, weighed while they come."""
        kept, weight = [], 0
        for piece in pieces:
            kept.append(piece)
            weight = self.allow(weight + len(piece) + len(between))
        self.step(weight)
        return between.join(kept)


_active: ContextVar[Budget] = ContextVar("template_budget")


def _elements(value: Any) -> Iterable[Any] | None:
    if isinstance(value, dict):
        return [*value.keys(), *value.values()]
    if isinstance(value, list | tuple | set | frozenset | type({}.keys()) | type({}.values()) | type({}.items())):
        return value
    if isinstance(value, Namespace):
        return [object.__getattribute__(value, "_Namespace__attrs")]
    return None


def _scalar_weight(value: Any) -> int:
    if isinstance(value, str | bytes):
        return _ELEMENT + len(value)
    if isinstance(value, int) and value.bit_length() > _MAX_INTEGER_BITS:
        raise TemplateLimitError("it makes an integer of more than a thousand digits")
    return _ELEMENT


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, where everything a template makes counts against the active `Budget`."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self, **options: Any):
        super().__init__(finalize=_finalize, optimized=False, **options)  # nothing is computed while compiling
        for name in _NOT_THERE:
            del self.filters[name]
        del self.globals["lipsum"]
        self.filters.update(replace=_replace, join=_join)
        self.filters["(charge)"] = _charge
        self.filters["(concatenate)"] = _concatenate
        self.bound_all()

    def bound_all(self) -> None:
        """Puts bounds around the filters and tests that have none yet."""
        for name, function in self.filters.items():
            if not hasattr(function, _MARK):
                self.filters[name] = _bounded(name, function)
        for name, function in self.tests.items():
            if not hasattr(function, _MARK):
                self.tests[name] = _bounded(name, function)

    def compile_bounded(self, source: str) -> jinja2.Template:
        """Compiles a template. Raises jinja2.TemplateError where it is none."""
        if len(source) > MAX_SOURCE_CHARACTERS:
            raise TemplateLimitError(f"it is longer than {MAX_SOURCE_CHARACTERS:,} characters")
        try:
            tree = _Counting().visit(self.parse(source))
            return jinja2.Template.from_code(self, self.compile(tree), self.make_globals(None))
        except (RecursionError, MemoryError, SyntaxError) as error:
            raise TemplateLimitError(f"it is nested too deeply ({type(error).__name__})") from None
        except ValueError as error:  # of constants that are computed here, such as a number too long to be written
            raise TemplateLimitError(str(error)) from None

    def concat(self, pieces: Iterable[str]) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return _active.get().join(pieces)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        budget = _active.get()
        if operator == "+" and type(left) is str and type(right) is str:  # what templates do most
            budget.step(budget.allow(len(left) + len(right)))
            return left + right
        if operator == "*":
            _allow_product(budget, left, right)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            if right > 0 and left.bit_length() * right > _MAX_INTEGER_BITS:
                raise TemplateLimitError("it makes an integer of more than a thousand digits")
        elif operator == "%" and isinstance(left, str | bytes):
            _allow_percent(budget, left, right)
        elif operator == "+" and not isinstance(left, int | float):
            budget.allow(budget.weigh(left) + budget.weigh(right))
        return budget.charge(super().call_binop(context, operator, left, right))

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        budget = _active.get()
        budget.step()
        # Jinja puts a function around str.format.
        owner: Any = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)
        if isinstance(owner, str | bytes | int | type):
            args = _allow_method(budget, owner, getattr(__obj, "__name__", ""), args, kwargs)
        return budget.charge(super().call(__context, __obj, *args, **kwargs))


class _Counting(NodeTransformer):
    """Has the parts of a template count that Jinja compiles to plain Python."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        # In the body, not around what is looped over: `loop(...)` of a recursive loop begins another one.
        if node.test is not None:
            node.test = _filter("(charge)", node.test)
        node.body.insert(0, nodes.ExprStmt(_filter("(charge)", nodes.Const(0)), lineno=node.lineno))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filter("(concatenate)", nodes.List(node.nodes, lineno=node.lineno))

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        node.expr = _filter("(charge)", node.expr)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return _filter("(charge)", node) if isinstance(node.arg, nodes.Slice) else node

    def visit_List(self, node: nodes.List) -> nodes.Node:
        self.generic_visit(node)
        return _filter("(charge)", node)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return _filter("(charge)", node) if node.ctx == "load" else node

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        return _filter("(charge)", node)


def _filter(name: str, node: Any) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _charge(value: Any) -> Any:
    return _active.get().charge(value)


def _concatenate(values: list[Any]) -> str:
    budget = _active.get()
    return budget.join([budget.text(value) for value in values])


for _own in (_charge, _concatenate):
    setattr(_own, _MARK, True)  # nothing is to be put around what bounds


@pass_context
def _finalize(_: Any, value: Any) -> str:
    return _active.get().text(value)


def _bounded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter or test whose arguments and result are weighed."""
    first = 1 if hasattr(function, "jinja_pass_arg") else 0  # the context or environment comes before the value

    @functools.wraps(function)
    def bounded(*all_given: Any, **kwargs: Any) -> Any:
        budget = _active.get()
        budget.step()
        given = list(all_given[first:])
        for value in given:
            budget.weigh(value)
        for value in [*given[1:], *kwargs.values()]:
            budget.weigh(value)
            if isinstance(value, int) and abs(value) > _MAX_NUMBER and name not in ("default", "d", "int", "float"):
                raise TemplateLimitError(f"it calls the filter {name} with the number {value}")
        if name == "indent":
            width = kwargs.get("width", given[1] if len(given) > 1 else 4)
            num_lines = len(str(given[0]).splitlines()) + 1
            budget.allow(num_lines * (len(width) if isinstance(width, str) else int(width)))
        elif name == "format":
            _allow_percent(budget, given[0], kwargs or given[1:])
        elif name == "round" and any(
            abs(value) > 300 for value in [*given[1:], *kwargs.values()] if type(value) is int
        ):
            raise TemplateLimitError("it rounds to more than 300 places")
        elif name == "sum" and any(
            isinstance(value, str | list | tuple) for value in [*given[2:], kwargs.get("start")]
        ):
            raise TemplateLimitError("it sums what are no numbers")
        return budget.charge(function(*all_given, **kwargs))

    setattr(bounded, _MARK, True)
    return bounded


def _replace(value: Any, old: str, new: str, count: int | None = None) -> str:
    """Jinja's filter, with its result predicted."""
    budget = _active.get()
    text, old, new = budget.text(value), budget.text(old), budget.text(new)
    return text.replace(*_allow_replace(budget, text, (old, new, -1 if count is None else count)))


@pass_environment
def _join(environment: Any, value: Iterable[Any], d: str = "", attribute: Any = None) -> str:
    """Jinja's filter, with its result predicted."""
    budget = _active.get()
    if attribute is not None:
        value = map(make_attrgetter(environment, attribute), value)
    return budget.join((budget.text(item) for item in value), budget.text(d))


def _allow_product(budget: Budget, left: Any, right: Any) -> None:
    for sequence, count in ((left, right), (right, left)):
        if isinstance(count, int) and isinstance(sequence, str | bytes | list | tuple):
            budget.allow(budget.weigh(sequence) * max(0, count))
    both = isinstance(left, int) and isinstance(right, int)
    if both and left.bit_length() + right.bit_length() > _MAX_INTEGER_BITS:
        raise TemplateLimitError("it makes an integer of more than a thousand digits")


def _allow_percent(budget: Budget, template: Any, arguments: Any) -> None:
    specs = _PERCENT.findall(str(template))
    if any("*" in spec or re.search(rf"\d{{{_MAX_WIDTH_DIGITS + 1}}}", spec) for spec in specs):
        raise TemplateLimitError("it formats to a width of thousands, or one that it computes")
    budget.allow(len(str(template)) + len(specs) * (10**_MAX_WIDTH_DIGITS + budget.weigh(arguments)))


def _allow_replace(budget: Budget, text: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    old, new = args[:2]
    if isinstance(old, str) and isinstance(new, str) and isinstance(text, str):
        budget.allow(len(text) + (text.count(old) if old else len(text) + 1) * len(new))
    return args


def _allow_method(
    budget: Budget, owner: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, ...]:
    """The arguments of a method of a plain value, if its result is not too heavy."""
    if name in _METHODS_NOT_THERE or (isinstance(owner, bytes) and name != "decode"):
        raise TemplateLimitError(f"it calls the method {name}, which chat templates have no use for here")
    if name in ("center", "ljust", "rjust", "zfill") and args and isinstance(args[0], int):
        budget.allow(args[0])
    elif name == "replace" and len(args) >= 2:
        return _allow_replace(budget, owner, args)
    elif name == "join" and len(args) == 1:
        pieces = list(args[0])
        budget.allow(sum(len(item) + len(owner) for item in pieces if isinstance(item, str)))
        return (pieces,)
    elif name == "format":
        fields = [spec or "" for _, field, spec, _ in string.Formatter().parse(str(owner)) if field is not None]
        if any("{" in spec or re.search(rf"\d{{{_MAX_WIDTH_DIGITS + 1}}}", spec) for spec in fields):
            raise TemplateLimitError("it formats to a width of thousands, or one that it computes")
        heaviest = budget.weigh([args, kwargs])
        budget.allow(len(owner) + len(fields) * (10**_MAX_WIDTH_DIGITS + heaviest))
    return args

"""Jinja environment for templates of checkpoints: immutable, without access to objects, and bounded in steps.

Every loop iteration and call spends one step from the budget of a rendering; arithmetic with huge results is refused.
NOTE: memory is bounded for products, repetitions and output, not for every filter.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from tandem.text.lookahead import look_ahead_once
from tandem.text.resumable import BEGIN, ENTER, INNER, IS_SHOWN, ITEMS, make_resumable
from tandem.text.resumption import PartialRendering
from tandem.text.seen_messages import ABSENT, SeenMessage, give_up

BUDGET = "_tandem_budget"  # the variable of a template that has its `Budget`
MAX_STEPS = 1_000_000
MAX_REPEATED = 32 * 2**20  # elements or digits of a product
_MAX_BITS = 4096  # of the result of a power


class Budget:
    """The loop iterations and calls that one rendering has left; give it to the template as the variable `BUDGET`."""

    def __init__(self, num_steps: int = MAX_STEPS) -> None:
        self._num_left = num_steps
        self._num_steps = num_steps

    @property
    def num_spent(self) -> int:
        """Steps taken so far."""
        return self._num_steps - self._num_left

    def spend(self) -> None:
        """Counts one step. Raises jinja2.TemplateError when none is left."""
        self._num_left -= 1
        if self._num_left < 0:
            raise jinja2.TemplateError(f"the template takes more than {MAX_STEPS} steps, so it may never end")


class Sandbox(ImmutableSandboxedEnvironment):
    """The Jinja environment of chat templates, as in transformers, with a budget of steps.

    `now` is what `strftime_now` reads, in local time.
    """

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self, now: Callable[[], datetime]) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        self.filters["tojson"] = _to_json
        self.filters[_COUNTED] = _counted
        self.filters |= _FILTERS_OF_LOOP
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda form: now().strftime(form)

    def load(self, source: str) -> jinja2.Template:
        """Compile `source`, with every loop counted. Raises jinja2.TemplateSyntaxError."""
        tree = self.parse(source)
        look_ahead_once(tree)
        return self._compiled(tree)

    def load_resumable(self, source: str) -> jinja2.Template:
        """Compile `source` so that a rendering can be resumed. Raises what `resumable.make_resumable` raises."""
        tree = self.parse(source)
        look_ahead_once(tree)
        make_resumable(tree)
        return self._compiled(tree)

    def _compiled(self, tree: nodes.Template) -> jinja2.Template:
        for loop in list(tree.find_all(nodes.For)):
            loop.iter = nodes.Filter(loop.iter, _COUNTED, [], [], None, None, lineno=loop.lineno)
        return self.from_string(tree)

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Looks up `object.name` in a template.

        NOTE: members of plain dictionaries, loops and namespaces are returned directly, without the error that Jinja's
        search for an attribute would raise and catch first. Attributes of dictionaries, such as `items`, are looked up
        as usual.
        """
        if type(obj) is dict and attribute not in _DICT_ATTRIBUTES and attribute in obj:
            return obj[attribute]
        if (type(obj) is LoopContext and attribute in _LOOP_ATTRIBUTES) or (
            type(obj) is Namespace and not attribute.startswith("_") and hasattr(obj, attribute)
        ):
            return getattr(obj, attribute)
        if type(obj) is SeenMessage:
            if attribute == "get":
                return obj.get
            return give_up(obj) if attribute in _DICT_ATTRIBUTES else self._seen(obj, attribute)
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """Looks up `object[name]` in a template. NOTE: `SeenMessage` objects record what is read of them."""
        return self._seen(obj, argument) if type(obj) is SeenMessage else super().getitem(obj, argument)

    def _seen(self, message: SeenMessage, name: Any) -> Any:
        value = message.get(name, ABSENT) if isinstance(name, str) else give_up(message)
        if value is not ABSENT:
            return value
        return give_up(message) if name in _DICT_ATTRIBUTES else self.undefined(obj={}, name=name)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        _budget_of(__context).spend()
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        size = _repeated_size(left, right) if operator == "*" else _power_bits(left, right)
        if size > (MAX_REPEATED if operator == "*" else _MAX_BITS):
            raise jinja2.TemplateError(f"the template computes something too large with {operator}")
        return super().call_binop(context, operator, left, right)


_COUNTED = "_tandem_counted"
_DICT_ATTRIBUTES = frozenset(dir(dict))
_LOOP_ATTRIBUTES = frozenset({"first", "last", "index", "index0", "length", "previtem", "nextitem"})
_FILTERS_OF_LOOP = {
    BEGIN: PartialRendering.begin,
    ITEMS: lambda rendering: list(rendering.inner),
    IS_SHOWN: PartialRendering.is_shown,
    ENTER: PartialRendering.enter,
    INNER: lambda rendering: rendering.inner,
}


class _Counted:
    """A loop's items; each spends from the budget. Has a length if they have one, as `loop.length` requires."""

    def __init__(self, items: Iterable[Any], budget: Budget) -> None:
        self._items = items
        self._budget = budget

    def __iter__(self) -> Iterator[Any]:
        for item in self._items:
            self._budget.spend()
            yield item

    def __len__(self) -> int:
        return len(self._items)  # type: ignore[arg-type]


@jinja2.pass_context
def _counted(context: Context, items: Iterable[Any]) -> _Counted:
    return _Counted(items, _budget_of(context))


def _budget_of(context: Context) -> Budget:
    budget = context.resolve(BUDGET)
    assert isinstance(budget, Budget), "a template is rendered without a budget"
    return budget


def _repeated_size(left: Any, right: Any) -> int:
    """Number of elements or digits of a product."""
    if isinstance(left, int) and isinstance(right, int):
        return left.bit_length() + right.bit_length()
    for items, count in ((left, right), (right, left)):
        if isinstance(items, (str, list, tuple)) and isinstance(count, int):
            return len(items) * count
    return 0


def _power_bits(left: Any, right: Any) -> int:
    return left.bit_length() * right if isinstance(left, int) and isinstance(right, int) else 0


class _Generation(Extension):
    """`{% generation %}` marks generated text, for training; here it is only a scope."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without HTML escapes, which Jinja's own filter would add."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)

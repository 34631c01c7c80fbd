"""Chat templates whose rendering may begin at a later message, decided from the template's source.

A template qualifies if it is one loop over the messages that keeps nothing from one message to the next, and if what it
writes for a message depends on that message, its neighbours, the first message and variables alone. Then the text
before the last message of a conversation is the same in every conversation that goes on from it.
"""

from collections.abc import Sequence
from typing import Any

from jinja2 import nodes

SHOWN, MARKS = "_tandem_shown", "_tandem_marks"  # variables of a resumable template
_MESSAGES, _LOOP = "messages", "loop"
_OUTER_ATTRIBUTES = frozenset({"first", "last", "index", "index0"})
_INNER_ATTRIBUTES = _OUTER_ATTRIBUTES | {"length", "revindex", "revindex0"}
_FUNCTIONS = frozenset({"raise_exception", "range"})
_METHODS = frozenset(
    {
        "endswith", "get", "items", "keys", "lower", "lstrip", "replace", "rstrip", "split", "startswith", "strip",
        "title", "upper", "values",
    }
)  # fmt: skip
_FILTERS = frozenset(
    {
        "capitalize", "count", "default", "dictsort", "first", "indent", "items", "join", "last", "length", "list",
        "lower", "map", "reject", "rejectattr", "replace", "reverse", "safe", "select", "selectattr", "sort", "string",
        "title", "tojson", "trim", "unique", "upper",
    }
)  # fmt: skip
_PLAIN: tuple[type[nodes.Node], ...] = (
    nodes.Output, nodes.TemplateData, nodes.Const, nodes.If, nodes.Assign, nodes.Test, nodes.Compare, nodes.Operand,
    nodes.Or, nodes.Not, nodes.Neg, nodes.Add, nodes.Sub, nodes.Concat, nodes.CondExpr, nodes.List, nodes.Dict,
    nodes.Pair, nodes.Tuple, nodes.Slice, nodes.Continue, nodes.Keyword,
)  # fmt: skip


class NegativePlaceError(Exception):
    """A template asked for the message before the first, which Python takes for the last one."""


class Messages(list[object]):
    """The messages that a resumable template sees; not to be indexed from the end."""

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, int) and place < 0:
            raise NegativePlaceError
        return super().__getitem__(place)


def make_resumable(tree: nodes.Template) -> bool:
    """Changes a parsed template, if it qualifies, to go over `SHOWN`: the messages, with None for those that are not to
    be written. Before each it writes the text that `MARKS` has for its number.
    """
    loops = [node for node in tree.body if isinstance(node, nodes.For) and _is_name(node.iter, _MESSAGES)]
    if len(loops) != 1:
        return False
    (loop,) = loops
    if not isinstance(loop.target, nodes.Name) or loop.else_ or loop.test is not None or loop.recursive:
        return False
    others = [node for node in tree.body if node is not loop]
    if not _are_pure(others, is_outer=False) or not _are_pure(loop.body, is_outer=True):
        return False
    names = [name for part in loop.body for name in part.find_all(nodes.Name)]
    if any(name.name == loop.target.name and name.ctx != "load" for name in names):
        return False
    line = loop.lineno
    number = nodes.Getattr(nodes.Name(_LOOP, "load", lineno=line), "index0", "load", lineno=line)
    message = nodes.Name(loop.target.name, "load", lineno=line)
    is_shown = nodes.Not(nodes.Test(message, "none", [], [], None, None, lineno=line), lineno=line)
    mark = nodes.Getitem(nodes.Name(MARKS, "load", lineno=line), number, "load", lineno=line)
    loop.iter = nodes.Name(SHOWN, "load", lineno=line)
    loop.body = [nodes.If(is_shown, [nodes.Output([mark], lineno=line), *loop.body], [], [], lineno=line)]
    return True


def _are_pure(parts: Sequence[nodes.Node], *, is_outer: bool) -> bool:
    """`is_outer`: the parts are the body of the loop over the messages, and `loop` is that loop."""
    return all(_is_pure(part, is_outer=is_outer) for part in parts)


def _is_pure(node: nodes.Node, *, is_outer: bool) -> bool:
    match node:
        case nodes.For():
            inside = [node.target, *node.body, *node.else_, *([] if node.test is None else [node.test])]
            return not node.recursive and _is_pure(node.iter, is_outer=is_outer) and _are_pure(inside, is_outer=False)
        case nodes.Name():
            return node.name not in (_MESSAGES, _LOOP)
        case nodes.Getattr() if _is_name(node.node, _LOOP):
            return node.attr in (_OUTER_ATTRIBUTES if is_outer else _INNER_ATTRIBUTES)
        case nodes.Getitem() if _is_name(node.node, _MESSAGES):
            return _is_first(node.arg) or (is_outer and _is_neighbour(node.arg))
        case nodes.And() if _is_name(node.left, _MESSAGES):
            return _is_pure(node.right, is_outer=is_outer)
        case nodes.Call():
            is_known = isinstance(node.node, nodes.Name) and node.node.name in _FUNCTIONS
            is_known |= isinstance(node.node, nodes.Getattr) and node.node.attr in _METHODS
            return is_known and _are_pure(list(node.iter_child_nodes()), is_outer=is_outer)
        case nodes.Filter():
            return node.name in _FILTERS and _are_pure(list(node.iter_child_nodes()), is_outer=is_outer)
        case nodes.And() | nodes.Getattr() | nodes.Getitem():
            return _are_pure(list(node.iter_child_nodes()), is_outer=is_outer)
    return isinstance(node, _PLAIN) and _are_pure(list(node.iter_child_nodes()), is_outer=is_outer)


def _is_first(place: nodes.Node) -> bool:
    return isinstance(place, nodes.Const) and place.value == 0


def _is_neighbour(place: nodes.Node) -> bool:
    if not isinstance(place, (nodes.Add, nodes.Sub)):
        return False
    number, step = place.left, place.right
    is_number = isinstance(number, nodes.Getattr) and _is_name(number.node, _LOOP) and number.attr == "index0"
    return is_number and isinstance(step, nodes.Const) and step.value == 1


def _is_name(node: nodes.Node, name: str) -> bool:
    return isinstance(node, nodes.Name) and node.name == name

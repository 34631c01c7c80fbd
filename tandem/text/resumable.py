"""Rewrites chat templates so that rendering can begin at a later message, if their source allows it.

A template qualifies if one loop over the messages writes them all, and if the loop's body reads only the message, its
neighbours, the first message, and values that can be compared with those of an earlier rendering (`resumption`). The
code before and after the loop may read any single members of messages; `seen_messages` records these.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from jinja2 import nodes

RENDERING = "_tandem_rendering"  # the variable of a resumable template, a `resumption.PartialRendering`
# Filters by which the rewritten loop calls the methods of the `PartialRendering`; `sandbox` defines them.
BEGIN, ITEMS, IS_SHOWN, ENTER, INNER = (f"_tandem_{name}" for name in ("begin", "items", "is_shown", "enter", "inner"))
_MESSAGES, _LOOP, _INDEX = "messages", "loop", "index0"
_OUTER_ATTRIBUTES = frozenset({"first", "last", "index", "index0", "nextitem", "previtem"})
_INNER_ATTRIBUTES = _OUTER_ATTRIBUTES | {"length", "revindex", "revindex0"}
_FUNCTIONS = frozenset({"dict", "namespace", "raise_exception", "range"})
_METHODS = frozenset(
    {
        "endswith", "get", "items", "keys", "lower", "lstrip", "replace", "rstrip", "split", "startswith", "strip",
        "title", "upper", "values",
    }
)  # fmt: skip
_FILTERS = frozenset(
    {
        "abs", "capitalize", "count", "d", "default", "dictsort", "first", "float", "indent", "int", "items", "join",
        "last", "length", "list", "lower", "map", "reject", "rejectattr", "replace", "reverse", "safe", "select",
        "selectattr", "sort", "string", "title", "tojson", "trim", "unique", "upper",
    }
)  # fmt: skip
_PLAIN: tuple[type[nodes.Node], ...] = (
    nodes.Output, nodes.TemplateData, nodes.Const, nodes.If, nodes.Assign, nodes.AssignBlock, nodes.Test, nodes.Compare,
    nodes.Operand, nodes.And, nodes.Or, nodes.Not, nodes.Neg, nodes.Add, nodes.Sub, nodes.Mul, nodes.Mod, nodes.Concat,
    nodes.CondExpr, nodes.List, nodes.Dict, nodes.Pair, nodes.Tuple, nodes.Slice, nodes.Continue, nodes.Keyword,
    nodes.Getattr, nodes.Getitem, nodes.Scope,
)  # fmt: skip
_FOREIGN = (nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends, nodes.Block)


class NotQualifiedError(Exception):
    """A template cannot be resumed; the message says why."""


def make_resumable(tree: nodes.Template) -> None:
    """Changes a parsed template: its loop over the messages calls the `PartialRendering` in the variable `RENDERING`.

    Raises:
        NotQualifiedError: it cannot be resumed.
    """
    if any(tree.find_all(_FOREIGN)):
        raise NotQualifiedError("the template includes others")
    siblings, loop = _main_loop(tree)
    if not isinstance(loop.target, nodes.Name) or loop.else_ or loop.test is not None or loop.recursive:
        raise NotQualifiedError("the template's loop over the messages has a condition, or an else")
    body = _Body(tree, loop)
    line = loop.lineno
    index = nodes.Getattr(nodes.Name(_LOOP, "load", lineno=line), _INDEX, "load", lineno=line)
    begin = _call(BEGIN, line, loop.iter, *body.arguments(line))
    is_shown, enter = _call(IS_SHOWN, line, index), _call(ENTER, line, index)
    shown = nodes.If(is_shown, [nodes.Output([enter], lineno=line), *loop.body], [], [], lineno=line)
    loop.iter, loop.body = _call(ITEMS, line), [shown]
    place = next(number for number, node in enumerate(siblings) if node is loop)
    siblings.insert(place, nodes.Output([begin], lineno=line))


class _Body:
    """Checks the loop's body and the macros it calls, and redirects the places where it indexes the messages."""

    def __init__(self, tree: nodes.Template, loop: nodes.For) -> None:
        self._messages = loop.iter.name if isinstance(loop.iter, nodes.Name) else ""
        self._lists = {_MESSAGES, self._messages}
        own = list(_within(loop.body))
        outside = [node for node in _within([tree]) if id(node) not in {id(each) for each in own}]
        self._macros = {node.name: node for node in outside if isinstance(node, nodes.Macro)}
        self._stored = {node.name for node in own if isinstance(node, nodes.Name) and node.ctx == "store"}
        made = {name for node in own for name in _made_namespaces(node)}
        self._reads: set[str] = set()
        self._compared: dict[str, int] = {}
        self._read_counts: dict[str, int] = {}
        assert isinstance(loop.target, nodes.Name)
        if self._stored & {loop.target.name, _LOOP, *self._lists}:
            raise NotQualifiedError("the template's loop changes the message")
        self._namespaces = {node.name for node in _within([tree]) if isinstance(node, nodes.NSRef)}
        self._called: set[str] = set()
        self._is_in_macro = False
        self._check_all(loop.body, is_outer=True)
        bodies = [own, *(list(_within([self._macros[name]])) for name in self._called)]
        self._carries = sorted(
            {
                (node.name, node.attr)
                for nodes_of in bodies
                for node in nodes_of
                if isinstance(node, nodes.NSRef) and node.name not in _locals_of(nodes_of, made, own)
            }
        )
        assigned = {node.name for node in outside if isinstance(node, nodes.Name) and node.ctx == "store"}
        if made & assigned:
            raise NotQualifiedError(f"the template has two namespaces {min(made & assigned)}")
        self._variables = sorted((self._reads & assigned) - self._lists - self._macros.keys() - self._namespaces)
        self._read_namespaces = sorted(
            ((self._reads & assigned) | {name for name, _ in self._carries}) & self._namespaces
        )

    def arguments(self, line: int) -> list[nodes.Expr]:
        """The arguments of `PartialRendering.begin` after the first one."""
        changed = {f"{name}.{member}" for name, member in self._carries}
        index_bounds = [
            name
            for name, count in self._compared.items()
            if count == self._read_counts.get(name) and name not in changed and name not in self._stored
        ]
        return [
            _names(self._variables, line),
            _names(self._read_namespaces, line),
            nodes.Const(tuple(index_bounds), lineno=line),
            nodes.Const(tuple(self._carries), lineno=line),
        ]

    def _check_all(self, parts: Sequence[nodes.Node], *, is_outer: bool) -> None:
        """Checks nodes. `is_outer`: they belong directly to the loop over the messages, so that `loop` is that loop."""
        for part in parts:
            self._check(part, is_outer=is_outer)

    def _check(self, node: nodes.Node, *, is_outer: bool) -> None:
        match node:
            case nodes.For():
                if node.recursive:
                    raise NotQualifiedError("the template has a loop that calls itself")
                self._check(node.iter, is_outer=is_outer)
                inside = [node.target, *node.body, *node.else_, *([] if node.test is None else [node.test])]
                self._check_all(inside, is_outer=False)
            case nodes.Name():
                self._check_name(node)
            case nodes.NSRef():
                pass
            case nodes.Getattr() if _is_name(node.node, _LOOP):
                if node.attr not in (_OUTER_ATTRIBUTES if is_outer else _INNER_ATTRIBUTES):
                    raise NotQualifiedError(f"what the template writes for a message depends on loop.{node.attr}")
            case nodes.Getattr() if isinstance(node.node, nodes.Name) and node.node.name in self._namespaces:
                self._count(node.node.name, f"{node.node.name}.{node.attr}")
            case nodes.Getitem() if isinstance(node.node, nodes.Name) and node.node.name in self._lists:
                self._check_index(node, is_outer=is_outer)
            case nodes.And() if _is_name(node.left, _MESSAGES) and not self._is_in_macro:
                self._check(node.right, is_outer=is_outer)
            case nodes.Compare() if is_outer and (place := _place_beside_index(node)) is not None:
                self._compared[place] = self._compared.get(place, 0) + 1
                self._check_all(list(node.iter_child_nodes()), is_outer=is_outer)
            case nodes.Call():
                self._check_call(node)
                self._check_all(_without_callee(node), is_outer=is_outer)
            case nodes.Filter() if node.name in _FILTERS:
                self._check_all(list(node.iter_child_nodes()), is_outer=is_outer)
            case _:
                if not isinstance(node, _PLAIN):
                    raise NotQualifiedError(f"the template's loop over the messages has a {type(node).__name__}")
                self._check_all(list(node.iter_child_nodes()), is_outer=is_outer)

    def _check_name(self, node: nodes.Name) -> None:
        if node.name in self._lists or node.name in (_LOOP, "caller", "varargs", "kwargs", "self"):
            raise NotQualifiedError(f"the template's loop over the messages takes {node.name} as a whole")
        if node.ctx == "load":
            if node.name in self._namespaces:
                raise NotQualifiedError(f"the template's loop over the messages takes {node.name} as a whole")
            self._count(node.name, node.name)

    def _count(self, name: str, place: str) -> None:
        self._reads.add(name)
        self._read_counts[place] = self._read_counts.get(place, 0) + 1

    def _check_index(self, node: nodes.Getitem, *, is_outer: bool) -> None:
        assert isinstance(node.node, nodes.Name)
        if self._is_in_macro:
            raise NotQualifiedError("a macro of the template takes messages that are not given to it")
        is_first = isinstance(node.arg, nodes.Const) and node.arg.value == 0 and type(node.arg.value) is int
        if node.node.name != self._messages:
            if not is_first:
                raise NotQualifiedError("the template's loop asks for messages by other numbers than its own")
            return
        if not is_first and not (is_outer and _is_neighbour(node.arg)):
            raise NotQualifiedError("what the template writes for a message depends on others than its neighbours")
        node.node = _call(INNER, node.lineno)

    def _check_call(self, node: nodes.Call) -> None:
        callee = node.node
        if isinstance(callee, nodes.Name) and callee.name in self._macros:
            if callee.name not in self._called:
                self._called.add(callee.name)
                was_in_macro, self._is_in_macro = self._is_in_macro, True
                macro = self._macros[callee.name]
                self._check_all([*macro.body, *macro.defaults], is_outer=False)
                self._is_in_macro = was_in_macro
            return
        if isinstance(callee, nodes.Name) and callee.name in _FUNCTIONS:
            return
        if not (isinstance(callee, nodes.Getattr) and callee.attr in _METHODS):
            raise NotQualifiedError("the template's loop over the messages calls a function that is not known")


def _main_loop(tree: nodes.Template) -> tuple[list[nodes.Node], nodes.For]:
    """The last loop over messages that writes text, and the list of statements that contains it."""
    names = {_MESSAGES}
    for _ in range(4):
        for assign in tree.find_all(nodes.Assign):
            if isinstance(assign.target, nodes.Name) and _mentions(assign.node, names):
                names.add(assign.target.name)
    found = [
        (siblings, node)
        for siblings, node in _statements(tree.body)
        if isinstance(node, nodes.For) and _mentions(node.iter, names) and _writes(node)
    ]
    if not found:
        raise NotQualifiedError("the template has no loop that writes the messages")
    return found[-1]


def _statements(body: list[nodes.Node]) -> Iterator[tuple[list[nodes.Node], nodes.Node]]:
    """Statements that are not in a loop or macro, each with the list that contains it."""
    for node in list(body):
        yield body, node
        if isinstance(node, nodes.If):
            for branch in (node.body, node.else_, *(each.body for each in node.elif_)):
                yield from _statements(branch)
        elif isinstance(node, nodes.Scope):
            yield from _statements(node.body)


def _writes(loop: nodes.For) -> bool:
    for output in loop.find_all(nodes.Output):
        for part in output.nodes:
            is_refusal = isinstance(part, nodes.Call) and _is_name(part.node, "raise_exception")
            is_space = isinstance(part, nodes.TemplateData) and not part.data.strip()
            if not (is_refusal or is_space):
                return True
    return False


def _mentions(node: nodes.Node, names: set[str]) -> bool:
    return any(each.name in names for each in _within([node]) if isinstance(each, nodes.Name))


def _within(parts: Sequence[nodes.Node]) -> Iterator[nodes.Node]:
    """The given nodes and all nodes below them."""
    for part in parts:
        yield part
        yield from part.find_all(nodes.Node)


def _made_namespaces(node: nodes.Node) -> Iterator[str]:
    if not isinstance(node, nodes.Assign) or not isinstance(node.target, nodes.Name):
        return
    if isinstance(node.node, nodes.Call) and _is_name(node.node.node, "namespace"):
        yield node.target.name


def _locals_of(part: Sequence[nodes.Node], made: set[str], own: Sequence[nodes.Node]) -> set[str]:
    """Namespaces that a body or macro creates itself, so that they carry nothing to the next message."""
    if part is own:
        return made
    return {name for node in part for name in _made_namespaces(node)}


def _place_beside_index(node: nodes.Compare) -> str | None:
    """Name of the variable that a comparison compares with the message's number; None if it compares anything else."""
    if len(node.ops) != 1:
        return None
    sides = (node.expr, node.ops[0].expr)
    for number, other in (sides, sides[::-1]):
        if isinstance(number, nodes.Getattr) and _is_name(number.node, _LOOP) and number.attr == _INDEX:
            if isinstance(other, nodes.Name):
                return str(other.name)
            if isinstance(other, nodes.Getattr) and isinstance(other.node, nodes.Name):
                return f"{other.node.name}.{other.attr}"
    return None


def _is_neighbour(place: nodes.Node) -> bool:
    if not isinstance(place, (nodes.Add, nodes.Sub)):
        return False
    number, step = place.left, place.right
    is_number = isinstance(number, nodes.Getattr) and _is_name(number.node, _LOOP) and number.attr == _INDEX
    return is_number and isinstance(step, nodes.Const) and step.value == 1 and type(step.value) is int


def _without_callee(node: nodes.Call) -> list[nodes.Node]:
    """Expressions that a call evaluates: its arguments, and the object whose method is called."""
    object_ = [node.node.node] if isinstance(node.node, nodes.Getattr) else []
    rest = [each for each in node.iter_child_nodes() if each is not node.node]
    return [*object_, *rest]


def _call(name: str, line: int, *arguments: Any) -> nodes.Filter:
    rendering = nodes.Name(RENDERING, "load", lineno=line)
    return nodes.Filter(rendering, name, list(arguments), [], None, None, lineno=line)


def _names(names: Sequence[str], line: int) -> nodes.Dict:
    items = [
        nodes.Pair(nodes.Const(name, lineno=line), nodes.Name(name, "load", lineno=line), lineno=line) for name in names
    ]
    return nodes.Dict(items, lineno=line)


def _is_name(node: nodes.Node, name: str) -> bool:
    return isinstance(node, nodes.Name) and node.name == name

"""Speeds up chat templates that search, for each message, the later messages for one that fulfils a condition.

Such a loop inside the loop over the messages takes quadratic time. It is replaced by one search, before the messages
are written, for the last message that fulfils the condition: a later one exists if the last one is later.
"""

from collections.abc import Iterator

from jinja2 import nodes

_LOOP = "loop"
_TESTS = frozenset({"defined", "undefined", "none", "string", "mapping"})
_LOGIC = (nodes.And, nodes.Or, nodes.Not, nodes.Const)
_COMPARISONS = frozenset({"eq", "ne"})
_MEMBERSHIPS = frozenset({"in", "notin"})


def look_ahead_once(tree: nodes.Template) -> None:
    """Replaces such inner loops in a parsed template; the text that it renders stays the same."""
    number = 0
    for siblings, loop in list(_loops(tree.body)):
        if not isinstance(loop.iter, nodes.Name):
            continue
        for holder, inner in list(_loops(loop.body)):
            if not _is_later_search(inner, loop.iter.name):
                continue
            name = f"_tandem_later{number}"
            number += 1
            place = next(index for index, node in enumerate(siblings) if node is loop)
            siblings[place:place] = _search_statements(name, loop.iter.name, inner)
            _replace(holder, inner, _replacement(name, inner))


def _loops(body: list[nodes.Node]) -> Iterator[tuple[list[nodes.Node], nodes.For]]:
    """Loops that are not in another loop or in a macro, each with the list of statements that contains it."""
    for node in body:
        if isinstance(node, nodes.For):
            yield body, node
        elif isinstance(node, nodes.If):
            for branch in (node.body, node.else_, *(each.body for each in node.elif_)):
                yield from _loops(branch)


def _is_later_search(loop: nodes.For, messages: str) -> bool:
    """Whether a loop goes over the later ones of `messages` and only sets a value where one fulfils a condition."""
    rest = loop.iter
    if not (isinstance(rest, nodes.Getitem) and isinstance(rest.node, nodes.Name) and rest.node.name == messages):
        return False
    part = rest.arg
    if not isinstance(part, nodes.Slice) or part.stop is not None or part.step is not None:
        return False
    start = part.start
    if not isinstance(start, nodes.Getattr) or not _is_name(start.node, _LOOP) or start.attr != "index":
        return False
    if loop.else_ or loop.test is not None or loop.recursive:
        return False
    if not isinstance(loop.target, nodes.Name) or len(loop.body) != 1:
        return False
    (only,) = loop.body
    if not isinstance(only, nodes.If) or only.elif_ or only.else_ or len(only.body) != 1:
        return False
    (done,) = only.body
    is_set = (
        isinstance(done, nodes.Assign) and isinstance(done.target, nodes.NSRef) and isinstance(done.node, nodes.Const)
    )
    return is_set and _reads_only(only.test, loop.target.name)


def _reads_only(condition: nodes.Node, name: str) -> bool:
    """Whether a condition reads only the message `name`, and can be evaluated for every message without an error."""
    match condition:
        case nodes.Compare():
            left, (right,) = condition.expr, condition.ops if len(condition.ops) == 1 else (None,)
            if right is None:
                return False
            if right.op in _MEMBERSHIPS:
                return isinstance(left, nodes.Const) and isinstance(left.value, str) and _is_name(right.expr, name)
            return right.op in _COMPARISONS and all(_is_member(side, name) for side in (left, right.expr))
        case nodes.Test():
            return condition.name in _TESTS and not condition.args and _is_member(condition.node, name)
        case nodes.Getattr():
            return _is_member(condition, name)
    return isinstance(condition, _LOGIC) and all(_reads_only(each, name) for each in condition.iter_child_nodes())


def _is_member(node: nodes.Node, name: str) -> bool:
    if isinstance(node, nodes.Getitem):
        return _is_name(node.node, name) and isinstance(node.arg, nodes.Const) and isinstance(node.arg.value, str)
    return isinstance(node, nodes.Const) or (isinstance(node, nodes.Getattr) and _is_name(node.node, name))


def _search_statements(name: str, messages: str, inner: nodes.For) -> list[nodes.Node]:
    """Statements that set `name.at` to the number of the last message that fulfils the condition; -1: none."""
    line = inner.lineno
    (only,) = inner.body
    assert isinstance(only, nodes.If)
    least = nodes.Keyword("at", nodes.Const(-1, lineno=line), lineno=line)
    made = nodes.Call(nodes.Name("namespace", "load", lineno=line), [], [least], None, None, lineno=line)
    found = nodes.Assign(nodes.NSRef(name, "at", lineno=line), _message_index(line), lineno=line)
    asked = nodes.If(only.test, [found], [], [], lineno=line)
    over = nodes.Name(messages, "load", lineno=line)
    return [
        nodes.Assign(nodes.Name(name, "store", lineno=line), made, lineno=line),
        nodes.For(inner.target, over, [asked], [], None, False, lineno=line),
    ]


def _replacement(name: str, inner: nodes.For) -> nodes.If:
    """Statement that replaces the loop: sets its value if a later message fulfils its condition."""
    line = inner.lineno
    (only,) = inner.body
    assert isinstance(only, nodes.If)
    at = nodes.Getattr(nodes.Name(name, "load", lineno=line), "at", "load", lineno=line)
    is_later = nodes.Compare(at, [nodes.Operand("gt", _message_index(line), lineno=line)], lineno=line)
    return nodes.If(is_later, only.body, [], [], lineno=line)


def _message_index(line: int) -> nodes.Getattr:
    return nodes.Getattr(nodes.Name(_LOOP, "load", lineno=line), "index0", "load", lineno=line)


def _replace(body: list[nodes.Node], node: nodes.Node, other: nodes.Node) -> None:
    body[next(index for index, each in enumerate(body) if each is node)] = other


def _is_name(node: nodes.Node, name: str) -> bool:
    return isinstance(node, nodes.Name) and node.name == name

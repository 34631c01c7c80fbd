"""Templates end: loops, calls and arithmetic have limits, and what ordinary templates do is untouched by them."""

import re
from datetime import datetime

import jinja2
import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tandem.text.sandbox import BUDGET, Budget, Sandbox


def render(source: str, num_steps: int = 100, **variables: object) -> str:
    return Sandbox(datetime.now).load(source).render({**variables, BUDGET: Budget(num_steps)})


@pytest.mark.parametrize(
    "source",
    [
        "{% for x in xs %}{{ loop.index }}/{{ loop.length }}{{ loop.last }}{{ loop.previtem }}{{ x }} {% endfor %}",
        "{% for x in xs if x > 1 %}{{ loop.length }}{{ x }}{% else %}none{% endfor %}",
        "{% for x in [] %}{{ x }}{% else %}none{% endfor %}",
        "{% for x in missing %}{{ x }}{% else %}none{% endfor %}",
        "{% for x in xs | select('odd') %}{{ loop.revindex }}{{ x }}{% endfor %}",
        "{% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{% endfor %}",
        "{% for x in 'abc' recursive %}{{ x }}{% if loop.depth < 2 %}{{ loop('de') }}{% endif %}{% endfor %}",
        "{% macro f(x) %}{% for y in x %}[{{ y }}]{% endfor %}{% endmacro %}{{ f(xs) }}",
        "{{ 2 ** 10 * 3 }} {{ 'ab' * 3 }} {{ 2.5 * 2 }} {{ 2 ** -1 }} {{ [1] * 2 }}",
    ],
)
def test_ordinary_templates_are_untouched(source: str) -> None:
    assert render(source, xs=[1, 2, 3]) == jinja2.Template(source).render(xs=[1, 2, 3])


@pytest.mark.parametrize(
    "name", ["role", "items", "keys", "copy", "update", "missing", "__class__", "__len__", "_private"]
)
def test_members_are_found_as_in_the_sandbox_of_jinja(name: str) -> None:
    """A member of a plain object is taken at once; attributes of dictionaries hide members of their name as ever."""
    source = f"{{{{ x.{name} }}}}|{{{{ x.{name} is defined }}}}|{{{{ x['{name}'] is defined }}}}"
    for x in (
        {},
        {"role": "user", "items": "members", "update": "news", "__class__": "c", "_private": "p"},
        "text",
        [1],
        None,
    ):
        theirs = ImmutableSandboxedEnvironment().from_string(source)
        ours = Sandbox(datetime.now).load(source)
        assert _outcome(ours, x) == _outcome(theirs, x)


def _outcome(template: jinja2.Template, x: object) -> str:
    """Rendered text without addresses of objects, or the error."""
    try:
        return re.sub("0x[0-9a-f]+", "", template.render({"x": x, BUDGET: Budget(100)}))
    except jinja2.TemplateError as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(101) %}{% endfor %}",
        "{% for i in range(11) %}{% for j in range(11) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(20) }}",
    ],
)
def test_steps_run_out(source: str) -> None:
    with pytest.raises(jinja2.TemplateError, match="may never end"):
        render(source)


@pytest.mark.parametrize("source", ["{{ 'x' * 10 ** 12 }}", "{{ 10 ** 12 * [1] }}", "{{ 9 ** (9 ** 9) }}"])
def test_huge_values_are_not_computed(source: str) -> None:
    with pytest.raises(jinja2.TemplateError, match="too large"):
        render(source)


def test_each_rendering_has_its_own_budget() -> None:
    template = Sandbox(datetime.now).load("{% for i in range(60) %}{% endfor %}done")
    assert [template.render({BUDGET: Budget(100)}) for _ in range(3)] == ["done"] * 3

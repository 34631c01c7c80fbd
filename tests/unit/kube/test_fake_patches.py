"""The fake's patches: what contract tests and the planner's tests rely on."""

from typing import Any

import pytest

from tests.helpers.kube_fake.patches import patched

FOUND = {"a": {"b": 1, "c": 2}, "list": [{"name": "x", "v": 1}, {"name": "y", "v": 2}]}


@pytest.mark.parametrize(
    ("kind", "patch", "wanted"),
    [
        ("merge-patch", {"a": {"b": None, "d": 3}}, {"a": {"c": 2, "d": 3}, "list": FOUND["list"]}),
        ("merge-patch", {"list": [{"name": "x"}]}, {"a": FOUND["a"], "list": [{"name": "x"}]}),
        (
            "strategic-merge-patch",
            {"list": [{"name": "y", "v": 9}, {"name": "z"}]},
            {"a": FOUND["a"], "list": [{"name": "x", "v": 1}, {"name": "y", "v": 9}, {"name": "z"}]},
        ),
        (
            "json-patch",
            [
                {"op": "test", "path": "/a/b", "value": 1},
                {"op": "replace", "path": "/a/b", "value": 5},
                {"op": "remove", "path": "/list/0"},
                {"op": "add", "path": "/list/-", "value": 7},
            ],
            {"a": {"b": 5, "c": 2}, "list": [{"name": "y", "v": 2}, 7]},
        ),
    ],
)
def test_each_kind_of_patch(kind: str, patch: Any, wanted: Any) -> None:
    assert patched(FOUND, patch, f"application/{kind}+json") == wanted


def test_a_patch_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="testing path"):
        patched(FOUND, [{"op": "test", "path": "/a/b", "value": 2}], "application/json-patch+json")
    with pytest.raises(ValueError, match="unknown format"):
        patched(FOUND, {}, "application/json")

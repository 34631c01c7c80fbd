"""Makes the settings of gateway, router and worker flags of `tandem up`, which passes them on as variables.

A setting that `tandem up` decides itself, such as an address between its processes, is left out.
"""

import sys
from collections.abc import Callable, Mapping, Set
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, SecretStr, create_model, field_validator
from pydantic.fields import FieldInfo

from tandem.gateway.settings import GatewaySettings
from tandem.process.settings import Settings
from tandem.router.settings import RouterSettings
from tandem.worker.settings import WorkerSettings

_SERVICES: Mapping[str, type[Settings]] = {
    "gateway": GatewaySettings,
    "router": RouterSettings,
    "worker": WorkerSettings,
}
DECIDED_BY_UP = frozenset(
    {
        *("advertise", "bind", "core_board", "kv_port", "metrics_port", "routers", "worker_id", "workers"),
        *("discovery", "kubernetes_namespace", "kubernetes_selector"),
        *("insecure", "tls_dir"),
    }
)


def _passed_fields() -> dict[str, tuple[Any, Any]]:
    """Annotation and field of each setting, by name; None = not set, so that the service's own default counts."""
    infos: dict[str, dict[str, FieldInfo]] = {}
    for service, settings in _SERVICES.items():
        for name, info in settings.model_fields.items():
            if name not in DECIDED_BY_UP and not info.is_required():
                infos.setdefault(name, {})[service] = info
    return {name: _optional(by_service) for name, by_service in infos.items()}


def _optional(by_service: Mapping[str, FieldInfo]) -> tuple[Any, Any]:
    first = next(iter(by_service.values()))
    annotation: Any = first.annotation
    for constraint in first.metadata:
        annotation = Annotated[annotation, constraint]
    return annotation | None, Field(None, description=f"{first.description} ({_owners(by_service)})")


def _validators(names: Set[str]) -> dict[str, Any]:
    """The services' own checks of the settings that are passed on, under unique names."""
    return {
        f"{service}{check}": field_validator(*decorator.info.fields)(partial(_checked_if_set, decorator.func))
        for service, settings in _SERVICES.items()
        for check, decorator in settings.__pydantic_decorators__.field_validators.items()
        if names >= set(decorator.info.fields)
    }


def _checked_if_set(check: Callable[[Any], Any], value: Any) -> Any:
    return None if value is None else check(value)


def _owners(by_service: Mapping[str, FieldInfo]) -> str:
    """The services that have a setting, and their defaults, for its description."""
    services: dict[object, list[str]] = {}
    for service, info in by_service.items():
        services.setdefault(info.default, []).append(service)
    ends = {default: "" if default in (None, "") else f", default: {default}" for default in services}
    return "; ".join(f"{', '.join(names)}{ends[default]}" for default, names in services.items())


if TYPE_CHECKING:
    ServiceSettings = Settings
else:
    _FIELDS = _passed_fields()
    ServiceSettings = create_model(
        "ServiceSettings",
        __base__=Settings,
        __module__=sys.modules[__name__].__name__,
        __validators__=_validators(_FIELDS.keys()),
        **_FIELDS,
    )


def variables(settings: Settings, own: frozenset[str]) -> dict[str, str]:
    """`TANDEM_*` variables for the services: the settings that were given, except `own`, which are passed as flags."""
    return {
        f"TANDEM_{name.upper()}": _text(value)
        for name in ServiceSettings.model_fields
        if name not in own and (value := getattr(settings, name)) is not None
    }


def _text(value: object) -> str:
    if isinstance(value, SecretStr):
        return value.get_secret_value()
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if isinstance(value, str | int | Path) else repr(value)

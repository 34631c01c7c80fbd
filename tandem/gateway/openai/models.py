"""`/v1/models`: one object that OpenAI's and Anthropic's clients both understand. Pure."""

from datetime import UTC, datetime
from typing import Any

from tandem.gateway.model import ServedModel
from tandem.rpc.messages import ModelInfo


def list_models(model: ServedModel, info: ModelInfo | None) -> dict[str, Any]:
    """The models of this gateway. `info`: the description by its workers, if one is known."""
    return {
        "object": "list",
        "data": [_entry(model, info)],
        "has_more": False,
        "first_id": model.name,
        "last_id": model.name,
    }


def one_model(model_id: str, model: ServedModel, info: ModelInfo | None) -> dict[str, Any]:
    """The model of this id. Raises RequestError with status 404 for another id."""
    model.require(model_id)
    return _entry(model, info)


def _entry(model: ServedModel, info: ModelInfo | None) -> dict[str, Any]:
    created = datetime.fromtimestamp(model.created_s, UTC).isoformat().replace("+00:00", "Z")
    return {
        "id": model.name,
        "object": "model",
        "created": model.created_s,
        "owned_by": "tandem",
        "type": "model",
        "display_name": model.name,
        "created_at": created,
        "lifecycle": "active",
        "max_model_len": None if info is None else info.max_model_len,
    }

"""The OpenAPI document's parts: bodies without loose references, answers and errors by path."""

from fastapi import FastAPI
from pydantic import BaseModel

from tandem.gateway.openai.fields import ChatBody
from tandem.gateway.openapi import body_schema, document


class Inner(BaseModel):
    value: int


class Outer(BaseModel):
    """A body with another inside."""

    one: Inner | None = None
    many: list[Inner] = []


def test_a_body_holds_its_nested_models_itself() -> None:
    schema = body_schema(Outer)["requestBody"]["content"]["application/json"]["schema"]
    inner = {"properties": {"value": {"title": "Value", "type": "integer"}}, "required": ["value"], "type": "object"}
    assert schema["properties"]["many"]["items"] == inner | {"title": "Inner"}
    assert schema["properties"]["one"]["anyOf"][0] == inner | {"title": "Inner"}
    assert "$ref" not in str(body_schema(ChatBody))


def test_a_route_that_is_in_no_table_has_its_errors_described() -> None:
    app = FastAPI()

    @app.post("/v1/messages/other")
    async def of_anthropic() -> None: ...

    @app.get("/other")
    async def of_openai(number: int) -> None: ...

    document(app)
    paths = app.openapi()["paths"]
    told = paths["/v1/messages/other"]["post"]["responses"]
    assert told["429"]["content"]["application/json"]["schema"]["$ref"].endswith("AnthropicError")
    assert "529" in told
    assert "503" not in told
    told = paths["/other"]["get"]["responses"]
    assert told["429"]["content"]["application/json"]["schema"]["$ref"].endswith("OpenAIError")
    assert "503" in told
    assert not {"422", "529"} & told.keys()
    assert app.openapi() is app.openapi()

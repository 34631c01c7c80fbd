"""Messages only grow: whatever the previous release can send or read keeps its number, type and meaning of absence."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorSet,
    MethodDescriptorProto,
)

from tandem.simulation.previous_release import NEWER
from tests.helpers.cluster import ROOT
from tests.helpers.releases import PREVIOUS, source_of

PROTOS = Path("tandem") / "rpc" / "v1"
RENAMED: dict[
    str, tuple[str, dict[int, str]]
] = {  # since `PREVIOUS`: messages, and their fields by number; only numbers and types are sent
    "Opening": ("RequestStart", {4: "credit"}),
    "Room": ("Credit", {}),
    "Ending": ("CallStatus", {}),
    "Delivery": ("OtherUpdate", {2: "update", 3: "status"}),
    "LeaseNews": ("LeaseUpdate", {}),
    "ServeRequest": ("ServeRequest", {1: "starts", 2: "credits"}),
}


@pytest.fixture(scope="module")
def former(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `proto` folder of the previous release."""
    return source_of(PREVIOUS, tmp_path_factory.mktemp("former")) / "proto"


def descriptors(include: Path, scratch: Path) -> FileDescriptorSet:
    out = scratch / f"{include.parent.name}.binpb"
    sources = sorted(map(str, (include / PROTOS).glob("*.proto")))
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{include}", f"--descriptor_set_out={out}", *sources]
    subprocess.run(command, check=True)
    return FileDescriptorSet.FromString(out.read_bytes())


def broken_promises(old: FileDescriptorSet, new: FileDescriptorSet) -> list[str]:
    """Everything in `new` that a release which knows `old` would misread or miss."""
    return [
        *_compared("message", _messages(old), _messages(new), _in_message),
        *_compared("enum", _enums(old), _enums(new), _in_enum),
        *_compared("method", _methods(old), _methods(new), _in_method),
    ]


def _compared(kind: str, old, new, differences) -> Iterator[str]:  # type: ignore[no-untyped-def]
    for name, was in old.items():
        if name not in new:
            yield f"{kind} {name} is gone"
        else:
            yield from (f"{name}: {words}" for words in differences(was, new[name]))


def _in_message(old: DescriptorProto, new: DescriptorProto) -> Iterator[str]:
    now = {field.number: field for field in new.field}
    for field in old.field:
        if field.number not in now:
            yield f"field {field.number} ({field.name}) is gone"
        elif _form(field, old) != _form(now[field.number], new):
            yield f"field {field.number} was {_form(field, old)} and is {_form(now[field.number], new)}"
    kept = _reserved(new)
    for number in sorted(_reserved(old)):
        if number in now:
            yield f"field {number} ({now[number].name}) has the number of a field that older releases send"
        elif number not in kept:
            yield f"number {number} is not reserved any more"


def _form(field: FieldDescriptorProto, message: DescriptorProto) -> tuple[object, ...]:
    """Properties that both sides must agree on. The name is for people, and stays for them."""
    oneof = message.oneof_decl[field.oneof_index].name if field.HasField("oneof_index") else ""
    return field.name, field.type, field.type_name, field.label, field.proto3_optional, oneof


def _reserved(message: DescriptorProto) -> set[int]:
    return {number for span in message.reserved_range for number in range(span.start, span.end)}


def _in_enum(old: EnumDescriptorProto, new: EnumDescriptorProto) -> Iterator[str]:
    now = {value.number: value.name for value in new.value}
    for value in old.value:
        if now.get(value.number) != value.name:
            yield f"value {value.number} was {value.name} and is {now.get(value.number)}"


def _in_method(old: MethodDescriptorProto, new: MethodDescriptorProto) -> Iterator[str]:
    if old != new:
        yield "takes or gives another message, or streams otherwise"


def _messages(files: FileDescriptorSet) -> dict[str, DescriptorProto]:
    found = {message.name: message for file in files.file for message in file.message_type}
    nested = {f"{name}.{inner.name}": inner for name, message in found.items() for inner in message.nested_type}
    return found | nested


def _enums(files: FileDescriptorSet) -> dict[str, EnumDescriptorProto]:
    return {enum.name: enum for file in files.file for enum in file.enum_type}


def _methods(files: FileDescriptorSet) -> dict[str, MethodDescriptorProto]:
    services = (service for file in files.file for service in file.service)
    return {f"{service.name}/{method.name}": method for service in services for method in service.method}


def with_new_names(files: FileDescriptorSet) -> FileDescriptorSet:
    """Descriptors of the previous release, by the names of this one."""
    renamed = FileDescriptorSet.FromString(files.SerializeToString())
    for message in (message for file in renamed.file for message in file.message_type):
        for field in message.field:
            kinds = field.type_name.split(".")  # NOTE: of a map, with the message that it is a field of
            field.type_name = ".".join(RENAMED[kind][0] if kind in RENAMED else kind for kind in kinds)
        message.name, names = RENAMED.get(message.name, (message.name, {}))
        for field in message.field:
            field.name = names.get(field.number, field.name)
    return renamed


def test_this_release_keeps_what_the_previous_one_knows(former: Path, tmp_path: Path) -> None:
    old = with_new_names(descriptors(former, tmp_path))
    assert broken_promises(old, descriptors(ROOT / "proto", tmp_path)) == []


def test_the_simulation_knows_what_the_previous_release_does_not(former: Path, tmp_path: Path) -> None:
    old = _messages(with_new_names(descriptors(former, tmp_path)))
    new = _messages(descriptors(ROOT / "proto", tmp_path))
    known = {name: {field.number for field in message.field} for name, message in old.items()}
    newer = {
        name: tuple(field.name for field in message.field if field.number not in known[name])
        for name, message in new.items()
        if name in known
    }
    assert {name: fields for name, fields in newer.items() if fields} == NEWER


CHANGES = {
    "a field less": ("worker.proto", "  uint64 num_fetch_blocks = 11;", "//", "GenerateRequest: field 11"),
    "a reserved field less": (
        *("worker.proto", "  uint64 num_fetch_blocks = 11;", "  reserved 11; //"),
        "GenerateRequest: field 11 (num_fetch_blocks) is gone",
    ),
    "a field of another type": ("worker.proto", "sint64 priority = 5;", "uint64 priority = 5;", "field 5 was"),
    "a field with another number": ("router.proto", "CacheScope scope = 12;", "CacheScope scope = 99;", "field 12"),
    "a list where one was": ("router.proto", "  string policy = 9;", "  repeated string policy = 9;", "field 9 was"),
    "a zero that is not told from nothing": (
        *("router.proto", "optional double max_ttft_ms = 7;", "double max_ttft_ms = 7;"),
        "PairRequest: field 7 was",
    ),
    "a field that left its group": (
        *("worker.proto", "    string stop_text = 9;", "  } optional string stop_text = 9; oneof other { bool u = 99;"),
        "RequestOutput: field 9 was",
    ),
    "a number used again": ("router.proto", "  reserved 5;", "  string again = 5;", "field 5 (again) has the number"),
    "a number given free": ("router.proto", "  reserved 5;", "", "number 5 is not reserved any more"),
    "a map of something else": (
        *("common.proto", "map<string, uint64> blocks = 7;", "map<string, double> blocks = 7;"),
        "WorkerStatus.BlocksEntry: field 2 was",
    ),
    "a value with another number": ("common.proto", "  ROLE_BOTH = 3;", "  ROLE_BOTH = 4;", "value 3 was ROLE_BOTH"),
    "a message less": ("worker.proto", "message ReleaseResponse {}", "message Other {}", "ReleaseResponse is gone"),
    "a method less": ("worker.proto", "  rpc Drain(DrainRequest) returns (DrainResponse);", "", "Drain is gone"),
    "a stream where one answer was": (
        *("worker.proto", "rpc Renew(RenewRequest) returns (", "rpc Renew(RenewRequest) returns (stream "),
        "Worker/Renew: takes or gives",
    ),
}


@pytest.mark.parametrize(("file", "old", "new", "words"), CHANGES.values(), ids=CHANGES)
def test_each_breach_is_found(file: str, old: str, new: str, words: str, tmp_path: Path) -> None:
    changed = tmp_path / "changed" / "proto"
    (changed / PROTOS).mkdir(parents=True)
    for path in (ROOT / "proto" / PROTOS).iterdir():
        text = path.read_text()
        if path.name == file:
            assert old in text
            text = text.replace(old, new, 1).replace("(ReleaseResponse)", f"({_answer_of_release(new)})")
        (changed / PROTOS / path.name).write_text(text)
    found = broken_promises(descriptors(ROOT / "proto", tmp_path), descriptors(changed, tmp_path))
    assert any(words in line for line in found), found


def _answer_of_release(new: str) -> str:
    """The one change that another line depends on."""
    return "Other" if new == "message Other {}" else "ReleaseResponse"


def test_what_is_added_breaks_nothing(tmp_path: Path) -> None:
    grown = tmp_path / "grown" / "proto"
    (grown / PROTOS).mkdir(parents=True)
    for path in (ROOT / "proto" / PROTOS).iterdir():
        text = path.read_text().replace("  ROLE_BOTH = 3;", "  ROLE_BOTH = 3;\n  ROLE_ENCODE = 4;")
        text = text.replace("message StatusRequest {}", "message StatusRequest {\n  optional bool is_short = 1;\n}")
        (grown / PROTOS / path.name).write_text(text)
    old, new = descriptors(ROOT / "proto", tmp_path), descriptors(grown, tmp_path)
    assert old != new
    assert broken_promises(old, new) == []

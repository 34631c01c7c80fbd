"""Structs that Python packs and C++ reads: the same fields in the same order, by the sources of both."""

import re
from dataclasses import fields
from pathlib import Path

import pytest

from tandem.architecture.tensors import MAX_GROUP_RANKS
from tandem.compute.native import bindings
from tandem.compute.native.coded_matrix import CODED_FIELDS
from tandem.compute.native.exchange import GROUP_FIELDS
from tandem.compute.native.sampling import OPTIONS_FIELDS
from tandem.compute.native.stack import LAYER_FIELDS
from tandem.compute.native.structs import FIELDS
from tandem.compute.ops import ExpertWeights

SOURCES = Path(bindings.__file__).parent / "src"
KINDS = {"int64_t": "q", "double": "d"}


def read_sources() -> str:
    return "\n".join(path.read_text() for path in sorted(SOURCES.iterdir()))


def fields_of(source: str, struct: str) -> list[tuple[str, str]]:
    """Name and kind (q: integer or pointer, d: double) of each field, with those of structs inside in their place."""
    source = re.sub(r"//[^\n]*", "", source)
    match = re.search(rf"struct {struct} \{{((?:[^{{}}]|\{{[^{{}}]*\}};?)*)\}};", source)
    assert match is not None, f"no struct {struct}"
    body = re.sub(r"struct \w+ \{[^{}]*\};|\w+ \w+\([^)]*\) const \{[^{}]*\}", "", match[1])
    return [field for declaration in body.split(";") for field in _declared(source, " ".join(declaration.split()))]


def _declared(source: str, declaration: str) -> list[tuple[str, str]]:
    if not declaration:
        return []
    match = re.fullmatch(r"(?:const )?(\w+)(\s?\*)?\s?(.*)", declaration)
    assert match is not None, declaration
    first, *others = match[3].split(",")
    names = [f"{match[2] or ''}{first}", *others]
    return [field for name in names for field in _unfolded(source, match[1], name.strip())]


def _unfolded(source: str, kind: str, name: str) -> list[tuple[str, str]]:
    if name.startswith("*"):
        return [(name.split()[-1].strip("*"), "q")]
    if kind in KINDS:
        return [(name, KINDS[kind])]
    return [(f"{name}.{inner}", code) for inner, code in fields_of(source, kind)]


def declared(fields: str, prefix: str = "") -> list[tuple[str, str]]:
    """Fields that Python declares, in the form in which `fields_of` gives those of C++."""
    pairs = (name.partition(":") for name in fields.split())
    return [(f"{prefix}{name}", kind or "q") for name, _, kind in pairs]


def struct_name(source: str, function: str) -> str:
    match = re.search(rf"{function}\(const (?:tandem::)?(\w+)\*", source)
    assert match is not None, function
    return match[1]


@pytest.mark.parametrize("function", FIELDS)
def test_arguments_are_those_of_the_struct(function: str) -> None:
    source = read_sources()
    assert fields_of(source, struct_name(source, function)) == declared(FIELDS[function])


def test_a_layer_has_the_fields_of_its_struct_in_their_order() -> None:
    assert fields_of(read_sources(), "Layer") == declared(" ".join(LAYER_FIELDS))


def test_a_mixture_is_router_choice_and_experts() -> None:
    choice, experts = (FIELDS[name] for name in ("tandem_choose_experts", "tandem_experts"))
    expected = [*declared("router router_bias"), *declared(choice, "choice."), *declared(experts, "experts.")]
    assert fields_of(read_sources(), "Mixture") == expected


def test_a_matrix_of_codes_has_the_fields_of_its_struct() -> None:
    assert fields_of(read_sources(), "CodedWeights") == declared(CODED_FIELDS)


def test_the_options_of_a_draw_have_the_fields_of_their_struct() -> None:
    assert fields_of(read_sources(), "Options") == declared(OPTIONS_FIELDS)


def test_a_group_of_ranks_has_the_fields_of_its_struct_in_their_order() -> None:
    assert fields_of(read_sources(), "RankGroup") == declared(" ".join(GROUP_FIELDS))


def test_an_expert_has_the_fields_of_its_struct_in_their_order() -> None:
    names = " ".join(field.name for field in fields(ExpertWeights))
    assert fields_of(read_sources(), "ExpertWeights") == declared(names)


def test_a_swapped_or_missing_field_is_found() -> None:
    source = read_sources()
    swapped = source.replace("LinearMap gate, up, down;", "LinearMap up, gate, down;")
    assert swapped != source
    assert fields_of(swapped, "Layer") != declared(" ".join(LAYER_FIELDS))
    shorter = source.replace("double eps, scale, softcap;", "double eps, softcap;")
    assert shorter != source
    assert fields_of(shorter, "StackArguments") != declared(FIELDS["tandem_stack"])
    renamed = source.replace("double eps, scale, softcap;", "double scale, eps, softcap;")
    assert fields_of(renamed, "StackArguments") != declared(FIELDS["tandem_stack"])


def test_every_struct_of_arguments_is_compared() -> None:
    """Functions that Python may call with a struct; three of them used to have no entry."""
    found = set(re.findall(r"TANDEM_EXPORT void (tandem_\w+)\(const (?:tandem::)?\w+\*", read_sources()))
    assert found == {*FIELDS}


def test_exchanges_have_room_for_the_ranks_of_a_worker() -> None:
    """More ranks than the sources have room for would write over other memory."""
    (most,) = re.findall(r"constexpr int64_t kMaxRanks = (\d+);", read_sources())
    assert int(most) == MAX_GROUP_RANKS

from pathlib import Path

import pytest

from tandem.core.errors import InvalidRequestError
from tandem.workload.trace import AZURE_HEADER, TraceRequest, read_trace

MOONCAKE = '{"timestamp": 3000, "input_length": 600, "output_length": 5, "hash_ids": [0, 7]}'


def written(folder: Path, name: str, *lines: str) -> Path:
    path = folder / name
    path.write_text("\n".join(lines) + "\n")
    return path


def test_reads_mooncake(tmp_path: Path) -> None:
    path = written(tmp_path, "a.jsonl", MOONCAKE, "", MOONCAKE.replace("3000", "6000.5"))
    assert list(read_trace(path)) == [TraceRequest(3.0, 600, 5, (0, 7)), TraceRequest(6.0005, 600, 5, (0, 7))]


def test_reads_azure_from_its_first_arrival(tmp_path: Path) -> None:
    lines = ("2023-11-16 23:59:59.6805900,374,44", "2023-11-17 00:00:00.6805901,396,109")
    first, second = read_trace(written(tmp_path, "a.csv", AZURE_HEADER, *lines))
    assert first == TraceRequest(0.0, 374, 44)
    assert second.arrival_s == pytest.approx(1.0)
    assert second.num_prompt_tokens == 396


def test_reads_azure_with_zones(tmp_path: Path) -> None:
    """A zone after a fraction was cut off with it, and one without a fraction was not."""
    times = ("00:00:00.5000000+00:00", "00:00:01+00:00", "00:00:02Z", "01:00:02.0099300+01:00")
    lines = (f"2024-05-10 {time},10,10" for time in times)
    arrivals_s = [request.arrival_s for request in read_trace(written(tmp_path, "a.csv", AZURE_HEADER, *lines))]
    assert arrivals_s == pytest.approx([0.0, 0.5, 1.5, 1.50993])


@pytest.mark.parametrize(("first", "second"), [("+00:00", ""), ("", "+00:00")])
def test_azure_with_zones_on_some_lines_is_refused(tmp_path: Path, first: str, second: str) -> None:
    lines = (f"2024-05-10 00:00:00{first},10,10", f"2024-05-10 00:00:01{second},10,10")
    with pytest.raises(InvalidRequestError, match=r"a\.csv:3: TIMESTAMP='2024-05-10 00:00:01.*every line or none"):
        list(read_trace(written(tmp_path, "a.csv", AZURE_HEADER, *lines)))


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[1]", "not a JSON object"),
        (MOONCAKE.replace("600", '"600"'), "input_length='600'"),
        (MOONCAKE.replace("600", "true"), "input_length=True"),
        (MOONCAKE.replace("600", "-600"), "input_length=-600"),
        (MOONCAKE.replace("600", "1e3"), r"input_length=1000\.0"),
        (MOONCAKE.replace("600", "2000"), "2 hash_ids for input_length=2000; 4 are needed"),
        (MOONCAKE.replace("3000", "NaN"), "timestamp=nan"),
        (MOONCAKE.replace("3000", "-1"), "timestamp=-1"),
        (MOONCAKE.replace("3000", "2000"), "timestamp is 1 s before the line above"),
        (MOONCAKE.replace("[0, 7]", "7"), "hash_ids=7"),
        (MOONCAKE.replace("[0, 7]", '[0, "7"]'), "hash_ids="),
        ("{}", "input_length=None"),
        (MOONCAKE.replace("600", "9" * 5000), "input_length=a very large int|not JSON"),
    ],
)
def test_a_bad_line_of_mooncake_is_named(tmp_path: Path, line: str, told: str) -> None:
    path = written(tmp_path, "a.jsonl", MOONCAKE, line)
    with pytest.raises(InvalidRequestError, match=rf"a\.jsonl:2: .*({told})"):
        list(read_trace(path))


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("2023-11-16 18:15:46,374", "has 2 fields; 3"),
        ("yesterday,374,44", "TIMESTAMP='yesterday'"),
        ("2023-11-17,374,44", "TIMESTAMP='2023-11-17' is not a time"),
        ("2023-11-16 18:15:46,0,44", "ContextTokens=0"),
        ("2023-11-16 18:15:46,374,0", "GeneratedTokens=0; a whole number above zero"),
        ("2023-11-16 18:15:46,374,4.5", r"GeneratedTokens='4\.5'"),
        ("2023-11-16 18:15:46,374,٤", "GeneratedTokens="),
        ("2023-11-16 18:15:44,374,44", "TIMESTAMP is 1 s before"),
    ],
)
def test_a_bad_line_of_azure_is_named(tmp_path: Path, line: str, told: str) -> None:
    path = written(tmp_path, "a.csv", AZURE_HEADER, "2023-11-16 18:15:45,1,1", line)
    with pytest.raises(InvalidRequestError, match=rf"a\.csv:3: .*{told}"):
        list(read_trace(path))


def test_what_is_no_trace_at_all_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match=r"a\.txt.*name it \.jsonl or \.csv"):
        read_trace(tmp_path / "a.txt")
    with pytest.raises(InvalidRequestError, match="cannot be read"):
        list(read_trace(tmp_path / "missing.jsonl"))
    with pytest.raises(InvalidRequestError, match=r"a\.csv:1: header"):
        list(read_trace(written(tmp_path, "a.csv", "time,in,out")))
    (tmp_path / "b.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidRequestError, match="cannot be read"):
        list(read_trace(tmp_path / "b.jsonl"))

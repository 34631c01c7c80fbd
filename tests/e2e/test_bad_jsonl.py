"""`tandem generate --file`: lines that are no requests are named by number, and odd files that are fine are served."""

import json
from pathlib import Path
from typing import Any

import pytest

from tandem.cli.main import main
from tests.helpers.checkpoints import save_tiny_llama
from tests.helpers.tokenizers import NUM_TOKENS, write_byte_tokenizer

FLAGS = ["--dtype", "float32", "--no-native-kernels", "--attention-backend", "reference", "--kv-cache-gib", "0.01"]
GOOD = b'{"prompt": "abc", "max_tokens": 2}'


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    return write_byte_tokenizer(save_tiny_llama(path, vocab_size=NUM_TOKENS, eos_token_id=NUM_TOKENS - 1))


def generate(checkpoint: Path, tmp_path: Path, lines: bytes, *flags: str) -> int:
    source = tmp_path / "in.jsonl"
    source.write_bytes(lines)
    output = ["--output", str(tmp_path / "out.jsonl")]
    return main(["generate", "--model", str(checkpoint), "--file", str(source), *output, *FLAGS, *flags])


def answers(tmp_path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", "not JSON"),
        (b"\xff\xfe", "UTF-8"),
        (b"5", "must be an object"),
        (b"null", "must be an object"),
        (b'{"prompt": 5}', "must be an object"),
        (b'{"prompt": {"a": [1]}}', "must be an object"),
        (b'{"max_tokens": 3}', "must be an object"),
        (b'{"prompt": ""}', "empty"),
        (b'{"prompt": []}', "empty"),
        (b'{"prompt": [[1]]}', "prompt token [1]"),
        (b'{"prompt": [99999]}', "prompt token 99999"),
        (b'{"prompt": "\\ud800"}', "not valid Unicode"),
        (b'{"prompt": "a", "stop": ["\\udc80"]}', "not valid Unicode"),
        (b'{"prompt": "a", "stop": "abc"}', "stop='abc'"),
        (b'{"prompt": "a", "stop": null}', "stop=None"),
        (b'{"prompt": "a", "stop": [[["x"]]]}', "stop holds"),
        (b'{"prompt": "a", "temperature": NaN}', "temperature=nan"),
        (b'{"prompt": "a", "temperature": 1e999}', "temperature=inf"),
        (b'{"prompt": "a", "temperature": 1' + b"0" * 400 + b"}", "temperature="),
        (b'{"prompt": "a", "temperature": "0"}', "temperature='0'"),
        (b'{"prompt": "a", "max_tokens": true}', "max_tokens=True"),
        (b'{"prompt": "a", "n": 1000000000}', "n=1000000000"),
        (b'{"prompt": "a", "logit_bias": {"x": 1}}', "logit_bias"),
        (b'{"prompt": "a", "logit_bias": [1]}', "logit_bias="),
        (b'{"prompt": "a", "bad_words": [1]}', "bad_words"),
        (b'{"prompt": "a", "temprature": 1}', "temprature"),
        (b'{"prompt": "a", "' + b"x" * 10**6 + b'": 1}', "unknown sampling settings"),
        (b'{"prompt": "' + b"x" * 10**7 + b'"}', "10000000 characters"),
    ],
)
def test_a_line_that_is_no_request_is_named(
    checkpoint: Path, tmp_path: Path, line: bytes, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert generate(checkpoint, tmp_path, GOOD + b"\n" + line + b"\n" + GOOD + b"\n") == 2
    error = capsys.readouterr().err
    assert message in error
    assert "line 2" in error or "UTF-8" in message
    assert len(error) < 1500


def test_byte_order_mark_and_windows_line_ends(checkpoint: Path, tmp_path: Path) -> None:
    assert generate(checkpoint, tmp_path, b"\xef\xbb\xbf" + GOOD + b"\r\n\r\n" + GOOD + b"\r\n") == 0
    assert [answer["prompt"] for answer in answers(tmp_path)] == ["abc", "abc"]


def test_line_separators_inside_text_do_not_end_a_line(checkpoint: Path, tmp_path: Path) -> None:
    """U+2028, U+0085 and the like may stand in JSON text as they are; lines were once cut at them."""
    prompt = "a\u2028b\u2029c\x85d"
    line = json.dumps({"prompt": prompt, "max_tokens": 2}, ensure_ascii=False).encode()
    assert generate(checkpoint, tmp_path, line + b"\n") == 0
    assert [answer["prompt"] for answer in answers(tmp_path)] == [prompt]


def test_biases_are_keyed_by_text_as_json_wants(checkpoint: Path, tmp_path: Path) -> None:
    line = json.dumps({"prompt": "abc", "max_tokens": 3, "logit_bias": {"65": 100.0}, "temperature": 0.0}).encode()
    assert generate(checkpoint, tmp_path, line) == 0
    assert answers(tmp_path)[0]["token_ids"] == [65, 65, 65]


def test_more_lines_than_the_queue_holds_are_all_served(checkpoint: Path, tmp_path: Path) -> None:
    """A batch longer than the waiting queue was once refused as if the caller could try again later."""
    assert generate(checkpoint, tmp_path, (GOOD + b"\n") * 40, "--max-num-waiting", "7") == 0
    assert len(answers(tmp_path)) == 40


def test_a_request_wider_than_the_queue_is_refused(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = b'{"prompt": "abc", "n": 8, "max_tokens": 2}'
    assert generate(checkpoint, tmp_path, GOOD + b"\n" + line, "--max-num-waiting", "4") == 2
    assert "max_num_waiting" in capsys.readouterr().err


def test_logprobs_that_a_line_asks_for_are_written(checkpoint: Path, tmp_path: Path) -> None:
    """They were accepted and then dropped."""
    line = b'{"prompt": "abc", "max_tokens": 2, "logprobs": 1, "prompt_logprobs": 0, "ignore_eos": true}'
    assert generate(checkpoint, tmp_path, line) == 0
    answer = answers(tmp_path)[0]
    assert [entry["token_id"] for entry in answer["logprobs"]] == answer["token_ids"]
    assert [len(entry["top"]) for entry in answer["logprobs"]] == [1, 1]
    assert answer["prompt_logprobs"][0] is None
    assert len(answer["prompt_logprobs"]) == 3

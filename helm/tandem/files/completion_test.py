"""Sends one completion, then the same as a stream, and compares. Run by `helm test` with the standard library alone."""

import json
import os
import sys
import time
import urllib.error
import urllib.request
from typing import IO

URL = os.environ["GATEWAY_URL"] + "/v1/completions"
BODY = {"model": os.environ["MODEL"], "prompt": os.environ["PROMPT"], "max_tokens": 16, "temperature": 0}
HEADERS = {"content-type": "application/json"}
if "TANDEM_API_KEY" in os.environ:
    HEADERS["authorization"] = f"Bearer {os.environ['TANDEM_API_KEY']}"
DEADLINE_S = time.monotonic() + float(os.environ.get("TIMEOUT_S", "300"))


def ask(stream: bool) -> IO[bytes]:
    """The answer, asking again while there is no worker."""
    data = json.dumps({**BODY, "stream": stream}).encode()
    while True:
        request = urllib.request.Request(URL, data, HEADERS)
        try:
            return urllib.request.urlopen(request, timeout=60)
        except urllib.error.HTTPError as error:
            if error.code not in (429, 503) or time.monotonic() > DEADLINE_S:
                raise SystemExit(f"{URL} answered {error.code}: {error.read().decode()}") from None
        except OSError as error:
            if time.monotonic() > DEADLINE_S:
                raise SystemExit(f"{URL} cannot be reached: {error}") from None
        time.sleep(1)


def streamed() -> str:
    """The text of a stream that came to its end."""
    frames = [line[6:].strip() for line in ask(stream=True) if line.startswith(b"data: ")]
    if not frames or frames[-1] != b"[DONE]":
        raise SystemExit(f"the stream has no end: {frames[-1:]}")
    return "".join(choice["text"] for frame in frames[:-1] for choice in json.loads(frame)["choices"])


def main() -> None:
    answer = json.load(ask(stream=False))
    text, num_tokens = answer["choices"][0]["text"], answer["usage"]["completion_tokens"]
    if num_tokens < 1:
        raise SystemExit(f"no token was generated: {answer}")
    if (again := streamed()) != text:
        raise SystemExit(f"the stream says {again!r}, the answer {text!r}")
    sys.stdout.write(f"{num_tokens} tokens, streamed alike: {text!r}\n")


main()

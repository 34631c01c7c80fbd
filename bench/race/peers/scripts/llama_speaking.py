"""llama.cpp's own server, asked for one answer at a time; run by the interpreter of the benchmark.

Arguments after `--` are the server's: which drafts it makes.
"""

import argparse
import json
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import suppress

from bench.race.peers.process import HOST, ports
from bench.race.peers.scripts.speaking import speak

_START_LIMIT_S = 120.0
_SETTINGS = {
    "temperature": 0.0,
    "repeat_penalty": 1.0,
    "ignore_eos": True,
    "return_tokens": True,
    "cache_prompt": False,
}


class LlamaVoice:
    """A server of one slot; it ends with this process's input, since the benchmark kills this process's group."""

    def __init__(self, program: str, model: str, num_threads: int, arguments: Sequence[str]) -> None:
        (port,) = ports(1)
        self._url = f"http://{HOST}:{port}"
        command = [program, "--model", model, "--host", HOST, "--port", str(port), "--ctx-size", "4096"]
        command += ["--parallel", "1", "--threads", str(num_threads), "--threads-batch", str(num_threads)]
        self._server = subprocess.Popen([*command, "--no-warmup", "--offline", *arguments])
        self._await_ready()

    def answer(self, prompt: list[int], num_output: int) -> Iterator[Sequence[int]]:
        asked = {"prompt": prompt, "n_predict": num_output, "stream": True, **_SETTINGS}
        body = json.dumps(asked).encode()
        request = urllib.request.Request(
            f"{self._url}/completion", data=body, headers={"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request) as lines:
            for line in lines:
                if line.startswith(b"data: ") and (tokens := json.loads(line[6:]).get("tokens")):
                    yield tokens

    def _await_ready(self) -> None:
        ends_s = time.monotonic() + _START_LIMIT_S
        while time.monotonic() < ends_s and self._server.poll() is None:
            with suppress(urllib.error.URLError):
                urllib.request.urlopen(f"{self._url}/health").close()
                return
            time.sleep(0.1)
        raise RuntimeError(f"llama-server has not become ready in {_START_LIMIT_S:.0f} s; status {self._server.poll()}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--program", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("arguments", nargs="*")
    asked = parser.parse_args()
    speak(lambda: LlamaVoice(asked.program, asked.model, asked.threads, asked.arguments))


if __name__ == "__main__":
    main()

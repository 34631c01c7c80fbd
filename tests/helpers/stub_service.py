"""Stub of a service where only `tandem up` itself is tested: answers over HTTP, prints its flags.

Copied into a directory as `services/ROLE/__main__.py`; imports nothing of ours. Variables tell it to misbehave.
"""

import http.server
import json
import os
import signal
import sys
from types import FrameType


def flag(name: str) -> str | None:
    return sys.argv[sys.argv.index(name) + 1] if name in sys.argv else None


class Handler(http.server.BaseHTTPRequestHandler):
    """Ready at once; one decode worker of eight blocks, and ten tokens more each time it is asked."""

    num_asked = 0

    def do_GET(self) -> None:
        Handler.num_asked += self.path == "/metrics"
        blocks = {"free": 2, "cached": 4, "used": 1, "leased": 1}
        worker = {"role": "decode", "is_alive": True, "num_waiting": 2, "blocks": blocks}
        dead = {"role": "decode", "is_alive": False, "num_waiting": 7, "blocks": {"used": 8}}
        gateway = {"role": "gateway", "is_alive": True, "num_waiting": 5}
        bodies = {
            "/metrics": f"vllm:num_requests_running 3\nvllm:generation_tokens_total {10 * Handler.num_asked}\n",
            "/admin/workers": json.dumps({"workers": [gateway, worker, dead]}),
        }
        self.send_response(200)
        self.end_headers()
        self.wfile.write(bodies.get(self.path, "{}").encode())

    def do_POST(self) -> None:
        """Notes the path in the file `asked` of the working directory, before the answer."""
        with open("asked", "a", encoding="utf-8") as asked:
            asked.write(f"{self.path}\n")
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Nothing."""


def end(number: int, frame: FrameType | None) -> None:
    sys.exit(0)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, end)
    role = os.path.basename(os.path.dirname(os.path.abspath(__file__)))
    seen = sorted(name for name in os.environ if name.startswith("TANDEM_"))
    sys.stdout.write(f"{role} {' '.join(sys.argv[1:])} {seen} pid={os.getpid()}\n")
    sys.stdout.flush()
    if os.environ.get("TANDEM_STUB_REFUSES") == role:
        sys.stderr.write("error: --block-size=7: no\n")
        sys.exit(2)
    port = flag("--port") or flag("--metrics-port")
    http.server.HTTPServer(("127.0.0.1", int(port or 0)), Handler).serve_forever()

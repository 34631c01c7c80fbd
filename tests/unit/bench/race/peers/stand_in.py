"""A server that misbehaves as asked: run as a program, with the port and words for what it should do."""

import http.server
import os
import signal
import subprocess
import sys
import time


class _Ready(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(os.environ.get("OMP_NUM_THREADS", "none").encode())

    def log_message(self, *_: object) -> None:
        """Says nothing."""


def main() -> None:
    port, *words = sys.argv[1:]
    if "deaf" in words:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if "child" in words:
        subprocess.Popen([sys.executable, __file__, "0", "deaf", "mute"])
    if "stray" in words:
        subprocess.Popen([sys.executable, __file__, "0", "deaf", "mute"], start_new_session=True)
    if "dies" in words:
        sys.exit("no such checkpoint")
    if "mute" in words:
        sys.stderr.write("loading\n")
        time.sleep(600)
    http.server.HTTPServer(("127.0.0.1", int(port)), _Ready).serve_forever()


if __name__ == "__main__":
    main()

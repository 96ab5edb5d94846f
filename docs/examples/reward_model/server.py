"""A stand-in for a reward model: it scores a response by the share of its characters that are digits."""

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def score(item: dict) -> float | None:
    """item: prompt, response, reference, text. None: this item cannot be scored."""
    response = item["response"]
    return sum(map(str.isdigit, response)) / len(response) if response else None


class Scores(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        items = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["items"]
        reply = json.dumps({"scores": [score(item) for item in items]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)


if __name__ == "__main__":
    port = int(sys.argv[1]) if len(sys.argv) > 1 else 8000
    ThreadingHTTPServer(("127.0.0.1", port), Scores).serve_forever()

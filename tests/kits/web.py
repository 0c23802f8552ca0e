"""Serves folders to a browser on this machine, isolated as threads in WebAssembly ask for."""

import json
import threading
import time
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from examples.web_demo.build import Handler
from tests.reports.browser import Browser

KIT = Path(__file__).parents[2] / "runtime" / "js"
MODULES = KIT / "node_modules"
FOLDERS = {
    "odtpack": KIT / "dist",
    "flatbuffers": MODULES / "flatbuffers" / "mjs",
    "ort": MODULES / "onnxruntime-web" / "dist",
    "scripts": Path(__file__).parent / "js",
}
IMPORTS = {
    "odtpack": "/odtpack/index.js",
    "#platform": "/odtpack/platform_web.js",
    "flatbuffers": "/flatbuffers/flatbuffers.js",
    "onnxruntime-web": "/ort/ort.wasm.min.mjs",
}
PAGE = f"""<!doctype html><meta charset="utf-8"><title>kit</title><link rel="icon" href="data:,">
<script type="importmap">{json.dumps({"imports": IMPORTS})}</script>
<script>
const {{ Memory }} = WebAssembly; // seen by the test that nothing grows
window.memories = [];
WebAssembly.Memory = class extends Memory {{
  constructor(...options) {{ super(...options); window.memories.push(this); }}
}};
</script>
<script type="module">
import * as ort from 'onnxruntime-web';
import * as kit from 'odtpack';
ort.env.wasm.numThreads = Number(new URLSearchParams(location.search).get('threads') ?? 1);
ort.env.wasm.wasmPaths = '/ort/';
Object.assign(window, {{ ort, kit }});
</script>"""


@contextmanager
def serve(folders, page=PAGE, asked=None):
    """Serve each folder under its name, and a page at the root; ``asked`` gets all paths."""

    class Mapped(Handler):
        def translate_path(self, path: str) -> str:
            name, _, rest = path.split("?", 1)[0].lstrip("/").partition("/")
            found = folders[name] / unquote(rest) if name in folders else Path("/nowhere")
            return "/nowhere" if found.is_dir() else str(found)

        def do_GET(self) -> None:
            if asked is not None:
                asked.append(self.path)
            if self.path.split("?", 1)[0] != "/":
                return super().do_GET()
            data = page.encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)
            return None

    server = ThreadingHTTPServer(("127.0.0.1", 0), Mapped)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def open_kit(browser: Browser, address: str) -> None:
    """Open a page, and wait until it has loaded the kit."""
    browser.open(address)
    wait(browser, "Boolean(window.kit)")


def run(browser: Browser, program: str, given: Any = None) -> Any:
    """What a program of ``js/page.mjs`` returns in a page that has the kit, or its error."""
    browser.evaluate(f"""window.results = null, import('/scripts/page.mjs')
        .then((page) => page.{program}({json.dumps(given, default=str)}))
        .catch((error) => ({{ code: error.code, what: `${{error}}${{error.cause?.stack ?? ''}}` }}))
        .then((found) => {{ window.results = found; }}), 1""")
    wait(browser, "Boolean(window.results)", 900)  # shaders are compiled in software
    return browser.evaluate("window.results")


def wait(browser: Browser, condition: str, seconds: float = 240) -> None:
    """Until a page says so."""
    until = time.monotonic() + seconds
    while not browser.evaluate(condition):
        assert time.monotonic() < until, (condition, browser.console)
        time.sleep(0.05)

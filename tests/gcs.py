"""An object store on loopback that speaks the GCS JSON API, as tests and the fault harness need it.

The store is the packaged `gcp-storage-emulator`. Added here is what TensorStore and gcsfs use and it lacks: conditional
writes and deletes (`ifGenerationMatch`, else 412), the generation in a download's headers, listing between two names,
moving an object, empty objects, several requests at a time. And it can be told to answer 503 for a while, as real
stores do.

As a program: `python tests/gcs.py --port 9000 --bucket runs` prints the environment that points tinypod at it, then
serves until it is ended. `fail_next(url, n)` and `fail_for(url, seconds)` work from any process.
"""

import argparse
import functools
import json
import logging
import math
import os
import socketserver
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable
from functools import partial
from http import HTTPStatus, server
from typing import Any
from urllib.parse import parse_qs, unquote, urlparse

from gcp_storage_emulator import server as emulator
from gcp_storage_emulator.exceptions import NotFound
from gcp_storage_emulator.handlers import buckets, objects
from gcp_storage_emulator.storage import Storage

CONTROL = "/-/fail"  # POST /-/fail?requests=3 or ?seconds=2.5


class Store:
    """A running server with its buckets in memory."""

    def __init__(self, *names: str, port: int = 0) -> None:
        logging.getLogger("gcp_storage_emulator").setLevel(logging.CRITICAL)
        logging.getLogger("api.object").setLevel(logging.CRITICAL)
        self.storage = _Storage(use_memory_fs=True, data_dir="/")
        self.lock = threading.Lock()  # the emulator's own server takes one request at a time
        self.refused = 0  # how many requests got a 503
        self.requests: list[tuple[str, str]] = []  # method and decoded path of each that was answered
        self.recover()
        for name in names:
            self.make_bucket(name)
        self._http = _HttpServer(("127.0.0.1", port), partial(_Handler, self))
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def environment(self) -> dict[str, str]:
        return environment(self.url)

    def make_bucket(self, name: str) -> str:
        buckets.create_bucket(name, self.storage)
        return f"gs://{name}"

    def fail_next(self, requests: int) -> None:
        self._fail_requests = requests

    def fail_for(self, seconds: float) -> None:
        self._fail_until = time.monotonic() + seconds

    def fail_after_writing(self, name: str) -> None:
        """Once there is an object with this end of its name nothing is answered until `recover`."""
        self._last_written = name

    def forbid(self, part: str) -> None:
        """Every request whose URL holds this is answered with 403, until `recover`."""
        self.forbidden = part

    def recover(self) -> None:
        self._last_written, self._fail_requests, self._fail_until, self.forbidden = "", 0, 0.0, ""

    def failing(self) -> bool:
        """Whether the request at hand is refused; called once for each."""
        failing = time.monotonic() < self._fail_until or self._fail_requests > 0
        self._fail_requests = max(self._fail_requests - 1, 0)
        self.refused += failing
        return failing

    def answered(self) -> None:
        """Called after each request, in its turn."""
        written = (name for objects in self.storage.objects.values() for name in objects)
        if self._last_written and any(name.endswith(self._last_written) for name in written):
            self.fail_for(math.inf)

    def files(self, url: str) -> dict[str, bytes]:
        """What lies under a `gs://` URL, by name relative to it."""
        bucket, _, prefix = url.removeprefix("gs://").partition("/")
        prefix = prefix.rstrip("/") + "/" if prefix else ""
        with self.lock:
            names = sorted(name for name in self.storage.objects.get(bucket, {}) if name.startswith(prefix))
            return {name.removeprefix(prefix): self.storage.get_file(bucket, name) for name in names}

    def order(self, url: str) -> list[str]:
        """The same names, in the order in which they were last written."""
        bucket, _, prefix = url.removeprefix("gs://").partition("/")
        with self.lock:
            found = self.storage.objects.get(bucket, {})
            return sorted(
                (name.removeprefix(prefix + "/") for name in found if name.startswith(prefix + "/")),
                key=lambda name: int(found[f"{prefix}/{name}"]["generation"]),
            )

    def put(self, url: str, content: bytes) -> None:
        bucket, _, name = url.removeprefix("gs://").partition("/")
        request = urllib.request.Request(
            f"{self.url}/upload/storage/v1/b/{bucket}/o?uploadType=media&name={urllib.parse.quote(name, safe='')}",
            data=content,
            headers={"Content-Type": "application/octet-stream"},
        )
        urllib.request.urlopen(request).close()

    def remove(self, url: str) -> None:
        bucket, _, name = url.removeprefix("gs://").partition("/")
        with self.lock:
            self.storage.delete_file(bucket, name)

    def close(self) -> None:
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()


def environment(url: str) -> dict[str, str]:
    """What points every library at the store: TensorStore, gcsfs and Google's client; no credentials are looked for."""
    return {
        "TENSORSTORE_GCS_HTTP_URL": url,
        "STORAGE_EMULATOR_HOST": url,
        "GOOGLE_AUTH_TOKEN_FOR_TESTING": "anonymous",
        "FSSPEC_GCS_TOKEN": "anon",
    }


def fail_next(url: str, requests: int) -> None:
    _control(url, f"requests={requests}")


def fail_for(url: str, seconds: float) -> None:
    _control(url, f"seconds={seconds}")


def _control(url: str, query: str) -> None:
    urllib.request.urlopen(urllib.request.Request(f"{url}{CONTROL}?{query}", method="POST")).close()


@functools.cache
def shared() -> Store:
    """One for all tests of this process, which from now on uses it: the libraries remember where they first went."""
    store = Store("tinypod-test")
    os.environ.update(store.environment())
    return store


class _Storage(Storage):
    def _write_config_to_file(self) -> None:
        """After each request all that it knows, as JSON: in memory that serves nothing and takes most of the time."""

    def _object_path(self, bucket_name: str, file_name: str) -> str:
        """A real store takes any name, `../x` too; the file system in memory does not."""
        return super()._object_path(bucket_name, file_name.replace("..", "%2E%2E"))


class _HttpServer(socketserver.ThreadingMixIn, server.HTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def server_bind(self) -> None:  # HTTPServer's asks the resolver for our name
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that was killed in the middle of a request is no error of ours."""


class _Handler(emulator.RequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def __init__(self, store: Store, *args: Any) -> None:
        self.store = store
        super().__init__(store.storage, *args)

    def do_GET(self) -> None:
        self._answer(super().do_GET)

    def do_POST(self) -> None:
        self._answer(super().do_POST)

    def do_PUT(self) -> None:
        self._answer(super().do_PUT)

    def do_PATCH(self) -> None:
        self._answer(super().do_PATCH)

    def do_DELETE(self) -> None:
        self._answer(super().do_DELETE)

    def _answer(self, by_emulator: Callable[[], None]) -> None:
        url = urlparse(self.path)
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if url.path == CONTROL:
            self.store.fail_next(int(query.get("requests", 0)))
            self.store.fail_for(float(query.get("seconds", 0)))
            return self._send(HTTPStatus.OK)
        if self.store.failing():
            return self._send(HTTPStatus.SERVICE_UNAVAILABLE)
        if self.store.forbidden and self.store.forbidden in unquote(self.path):
            return self._send(HTTPStatus.FORBIDDEN)
        self.rfile = _Body(body)  # read already, so that a refused request leaves the connection in order
        with self.store.lock:
            self.store.requests.append((self.command, unquote(url.path)))
            if self._precondition_fails(url.path, query):
                return self._send(HTTPStatus.PRECONDITION_FAILED)
            if not body and query.get("uploadType") == "media":
                return self._insert_empty(url.path, query["name"])
            if self.command == "POST" and "/moveTo/o/" in url.path:
                return self._move(url.path)
            if self.command == "GET" and query.keys() & {"startOffset", "endOffset"}:
                return self._list(url.path, query)
            by_emulator()
            self.store.answered()

    def end_headers(self) -> None:
        found = self._object(urlparse(self.path).path, {}) if self.command == "GET" else None
        if found is not None:
            self.send_header("x-goog-generation", found["generation"])
        super().end_headers()

    def _object(self, path: str, query: dict[str, str]) -> dict[str, Any] | None:
        """The object that a request is about, if there is one."""
        _, _, rest = path.partition("/b/")
        bucket, _, name = rest.partition("/o")
        name = query.get("name") or unquote(name.removeprefix("/"))
        try:
            return self.storage.get_file_obj(bucket, name) if name else None
        except NotFound:
            return None

    def _precondition_fails(self, path: str, query: dict[str, str]) -> bool:
        found = self._object(path, query)
        generation = found["generation"] if found else "0"
        wanted, unwanted = query.get("ifGenerationMatch"), query.get("ifGenerationNotMatch")
        return (wanted is not None and wanted != generation) or (unwanted is not None and unwanted == generation)

    def _insert_empty(self, path: str, name: str) -> None:
        bucket = path.split("/b/")[1].split("/")[0]
        resource = objects._make_object_resource(self.store.url, bucket, name, "application/octet-stream", "0")
        self.storage.create_file(bucket, name, b"", objects._checksums(b"", resource))
        self._send(HTTPStatus.OK, resource)

    def _move(self, path: str) -> None:
        bucket, _, rest = path.split("/b/")[1].partition("/o/")
        source, _, target = rest.partition("/moveTo/o/")
        try:
            moved = objects._copy(self.store.url, self.storage, bucket, unquote(source), bucket, unquote(target))
        except NotFound:
            return self._send(HTTPStatus.NOT_FOUND)
        self.storage.delete_file(bucket, unquote(source))
        self._send(HTTPStatus.OK, moved)

    def _list(self, path: str, query: dict[str, str]) -> None:
        bucket = path.split("/b/")[1].split("/")[0]
        files, prefixes = self.storage.get_file_list(bucket, query.get("prefix"), query.get("delimiter"))
        start, end = query.get("startOffset", ""), query.get("endOffset")
        items = [item for item in files if item["name"] >= start and (end is None or item["name"] < end)]
        self._send(HTTPStatus.OK, {"kind": "storage#objects", "prefixes": sorted(prefixes), "items": items})

    def _send(self, status: HTTPStatus, answer: dict[str, Any] | None = None) -> None:
        content = json.dumps(answer or {"error": {"code": status.value, "message": status.phrase}}).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


class _Body:
    """A request's body, read already."""

    def __init__(self, content: bytes) -> None:
        self._content = content

    def read(self, size: int) -> bytes:
        return self._content[:size]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=0, help="default: one that is free")
    parser.add_argument("--bucket", action="append", default=[], help="a bucket to make; may be repeated")
    arguments = parser.parse_args()
    store = Store(*arguments.bucket, port=arguments.port)
    for name, value in store.environment().items():
        print(f"export {name}={value}", flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()

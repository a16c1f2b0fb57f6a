"""A small Hugging Face Hub on loopback, with the endpoints, headers and errors that the real client uses.

Weights redirect to a signed address, as the Hub redirects to its storage. Source of the protocol: the requests of
huggingface_hub (`HfApi.model_info`, `file_download.py`, `utils/_http.py`).
"""

import base64
import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_ThisTokenMustNeverBeSeen"
SIGNATURE = "ThisSignatureNeither"


@dataclass
class Repository:
    commits: dict[str, dict[str, bytes]]  # commit -> file -> content
    revisions: dict[str, str]  # branch or tag -> commit
    private: bool = False
    gated: bool = False
    license_accepted: bool = False


@dataclass
class Request:
    method: str
    path: str
    range: str | None


@dataclass
class HubServer:
    """Serves `repositories` from another thread inside the `with` block."""

    repositories: dict[str, Repository] = field(default_factory=dict)
    accepted_token: str = TOKEN
    requests: list[Request] = field(default_factory=list)
    # file name -> numbers of bytes after which the connection breaks, one per request
    breaks: dict[str, list[int]] = field(default_factory=dict)
    failing_status: int | None = None  # the error for all requests
    stalled: threading.Event = field(default_factory=threading.Event)  # set when weights are requested
    stalls: bool = False  # never send weights
    token_may_write: bool = True
    lies: dict[str, Any] = field(default_factory=dict)  # a header, or `sha` or `size` of a listing -> a false value
    uploaded: dict[str, bytes] = field(default_factory=dict)  # large files by hash, before their commit

    def __enter__(self) -> "HubServer":
        hub = self

        class Handler(_Handler):
            pass

        Handler.hub = hub
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def fetched(self) -> list[str]:
        """The files whose contents were requested, in order."""
        return [
            r.path.partition("?")[0].rpartition("/")[2]
            for r in self.requests
            if r.method == "GET" and "/api/" not in r.path
        ]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: HubServer

    def log_message(self, *arguments: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._receive()

    def do_PUT(self) -> None:
        self._receive()

    def _receive(self) -> None:
        """Uploads: create a repository, receive large files one by one, then a commit of all files."""
        hub, body = self.hub, self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = unquote(urlsplit(self.path).path)
        hub.requests.append(Request(self.command, self.path, None))
        if hub.failing_status is not None:
            return self._refuse(hub.failing_status)
        if large := re.fullmatch("/storage/([0-9a-f]{64})", path):  # signed, and so without a token
            assert hashlib.sha256(body).hexdigest() == large[1] and SIGNATURE in self.path
            hub.uploaded[large[1]] = body
            return self._send(b"", {})
        if (self.headers.get("Authorization") or "") != f"Bearer {hub.accepted_token}":
            return self._refuse(401, message="Invalid credentials in Authorization header")
        if path == "/api/validate-yaml":
            return self._send_json({"errors": [], "warnings": []})
        if not hub.token_may_write:
            return self._refuse(403, message="Forbidden")
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}"
            if name in hub.repositories:
                return self._send_json({"url": f"{hub.url}/{name}"}, status=409)
            is_private = asked.get("visibility") == "private" or asked.get("private", False)
            hub.repositories[name] = Repository({"0" * 40: {}}, {"main": "0" * 40}, private=is_private)
            return self._send_json({"url": f"{hub.url}/{name}"})
        if re.fullmatch(r"/api/models/[^/]+/[^/]+/preupload/main", path):
            names = [file["path"] for file in json.loads(body)["files"]]
            modes = {name: "lfs" if name.endswith((".safetensors", ".png")) else "regular" for name in names}
            files = [{"path": name, "uploadMode": mode, "shouldIgnore": False} for name, mode in modes.items()]
            return self._send_json({"files": files})
        if path.endswith(".git/info/lfs/objects/batch"):
            objects = json.loads(body)["objects"]
            for one in objects:
                one["actions"] = {"upload": {"href": f"{hub.url}/storage/{one['oid']}?Signature={SIGNATURE}"}}
            return self._send_json({"transfer": "basic", "objects": objects})
        match = re.fullmatch(r"/api/models/([^/]+/[^/]+)/commit/main", path)
        assert match is not None, path
        repository = hub.repositories[match[1]]
        files = dict(repository.commits[repository.revisions["main"]])
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = hub.uploaded[value["oid"]]
        commit = hashlib.sha1(body).hexdigest()
        repository.commits[commit], repository.revisions["main"] = files, commit
        self._send_json({"commitUrl": f"{hub.url}/{match[1]}/commit/{commit}", "commitOid": commit})

    def _send_json(self, value: Any, status: int = 200) -> None:
        self._send(json.dumps(value).encode(), {"Content-Type": "application/json"}, status=status)

    def _answer(self) -> None:
        hub = self.hub
        hub.requests.append(Request(self.command, self.path, self.headers.get("Range")))
        path = unquote(urlsplit(self.path).path)
        if hub.failing_status is not None:
            return self._refuse(hub.failing_status)
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if token and token != hub.accepted_token:
            return self._refuse(401, message="Invalid credentials in Authorization header")
        match = (
            re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?", path)
            or re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
            or re.fullmatch(r"/storage/([^/]+/[^/]+)/([^/]+)/(.+)", path)
        )
        repository = hub.repositories.get(match[1]) if match else None
        if match is None or repository is None or (repository.private and not token):
            # The Hub does not reveal which names exist.
            return self._refuse(404, "RepoNotFound") if token else self._refuse(401, "RepoNotFound")
        revision = match[2] or "main"
        commit = repository.revisions.get(revision, revision)
        if commit not in repository.commits:
            return self._refuse(404, "RevisionNotFound")
        files = repository.commits[commit]
        if path.startswith("/api/"):
            siblings = [{"rfilename": name, "size": len(content)} for name, content in files.items()]
            info = {"id": match[1], "modelId": match[1], "sha": commit, "private": False, "siblings": siblings}
            if "sha" in hub.lies:
                info["sha"] = hub.lies["sha"]
            if "size" in hub.lies:
                siblings[0]["size"] = hub.lies["size"]
            return self._send(json.dumps(info).encode(), {"Content-Type": "application/json"})
        if repository.gated and not (token and repository.license_accepted):
            return self._refuse(403 if token else 401, "GatedRepo")
        name = match[3]
        if name not in files or "missing" in hub.lies:
            return self._refuse(404, "EntryNotFound")
        headers = {"ETag": f'"{hashlib.sha256(files[name]).hexdigest()}"', "X-Repo-Commit": commit}
        if name.endswith(".safetensors") and "/resolve/" in path:
            headers |= {"X-Linked-ETag": headers["ETag"], "X-Linked-Size": str(len(files[name]))}
            headers["Location"] = f"/storage/{match[1]}/{commit}/{name}?Signature={SIGNATURE}"
            return self._send(b"", headers, status=302)
        return self._send(files[name], headers, name=name)

    def _send(self, content: bytes, headers: dict[str, str], status: int = 200, name: str = "") -> None:
        total, start = len(content), 0
        if asked := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or ""):
            start, status = int(asked[1]), 206
            headers |= {"Content-Range": f"bytes {start}-{total - 1}/{total}"}
        self.send_response(status)
        headers |= {
            key: value for key, value in self.hub.lies.items() if key in ("ETag", "X-Linked-ETag", "X-Repo-Commit")
        }
        for key, value in {**headers, "Content-Length": str(total - start), "Accept-Ranges": "bytes"}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if self.hub.stalls and name.endswith(".safetensors"):
            self.hub.stalled.set()
            threading.Event().wait(20)
            return
        breaks = self.hub.breaks.get(name)
        if breaks:
            self.wfile.write(content[start : start + breaks.pop(0)])
            self.wfile.flush()
            self.connection.close()
            self.close_connection = True
            return
        self.wfile.write(content[start:])

    def _refuse(self, status: int, code: str | None = None, message: str | None = None) -> None:
        self.send_response(status)
        if code is not None:
            self.send_header("X-Error-Code", code)
        if "missing" in self.hub.lies:
            self.send_header("X-Repo-Commit", self.hub.lies["missing"])
        self.send_header("X-Error-Message", message or code or "out of order")
        self.send_header("Content-Length", "0")
        self.end_headers()

"""A loopback server that speaks the part of the Hugging Face Hub's HTTP protocol that this project's tests need.

Real clients (huggingface_hub, transformers, sentence-transformers) run in processes of their own and find the server
through ``HF_ENDPOINT``; `HubServer.environment` builds their whole environment. Everything is kept in memory. The
protocol was read off what huggingface_hub (1.5 to 2.4) sends and expects back, and off the git-lfs batch API. Extend it
only where a test of this project needs it.

The storage goes by another host name (``localhost``), so that clients treat it as foreign and send it no token. They
need ``HF_HUB_DISABLE_XET=1``: with hf_xet, huggingface_hub 2.4 uploads through Xet without asking the server.

Every repository can also be read as a dataset, under `/datasets/{repo}` and `/api/datasets/{repo}`. Unlike on the Hub,
which answers 401, a missing or hidden repository is 404 for anonymous clients too.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

# Settings of whoever runs the tests, which must not reach a client process.
_FOREIGN_SETTINGS = re.compile(r"(HF|HUGGINGFACE|HUGGING_FACE|TRANSFORMERS|SENTENCE_TRANSFORMERS)_.*|.*_PROXY", re.I)
_ROLES = {"hf_write": "write", "hf_read": "read"}  # of the tokens that there are, both of the account `user`
_DATE = "2026-01-01T00:00:00.000Z"  # of all commits
_LFS = (".bin", ".onnx", ".safetensors")


@dataclass
class Response:
    """What an endpoint answers."""

    status: int
    headers: dict[str, str]
    body: bytes = b""


def answer(value: object, status: int = 200) -> Response:
    return Response(status, {"Content-Type": "application/json"}, json.dumps(value).encode())


class Request(NamedTuple):
    """A request and its answer, with the numbers of bytes in their bodies."""

    method: str
    path: str
    status: int
    received: int
    sent: int


class HubError(Exception):
    """An error response in the form that huggingface_hub expects."""

    def __init__(self, status: int, message: str, code: str | None = None, commit: Commit | None = None) -> None:
        super().__init__(message)
        headers = {"X-Error-Message": message, "X-Error-Code": code, "X-Repo-Commit": commit and commit.id}
        self.response = answer({"error": message}, status)
        self.response.headers |= {name: value for name, value in headers.items() if value}


@dataclass(frozen=True)
class Blob:
    """A stored file."""

    content: bytes
    lfs: bool = False

    @cached_property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()

    @cached_property
    def git_oid(self) -> str:
        return hashlib.sha1(b"blob %d\0" % len(self.content) + self.content).hexdigest()


@dataclass(frozen=True)
class Commit:
    """A state of a repository's files."""

    id: str  # 40 hexadecimal digits
    files: Mapping[str, Blob]

    def entries(self) -> dict[str, dict[str, Any]]:
        """Every file and folder by path, as the Hub describes it."""
        entries: dict[str, dict[str, Any]] = {}
        for path, blob in sorted(self.files.items()):
            for folder in [str(parent) for parent in PurePosixPath(path).parents][-2::-1]:
                entries[folder] = {"type": "directory", "path": folder, "oid": self.id, "size": 0}
            size = len(blob.content)
            lfs = {"lfs": {"oid": blob.sha256, "size": size, "pointerSize": 134}} if blob.lfs else {}
            entries[path] = {"type": "file", "path": path, "oid": blob.git_oid, "size": size, **lfs}
        return entries


@dataclass
class Repo:
    """A repository with one branch, `main`."""

    private: bool
    commits: list[Commit] = field(default_factory=list)
    objects: dict[str, bytes] = field(default_factory=dict)  # LFS content by sha256

    def at(self, revision: str) -> Commit:
        found = self.commits[-1:] if revision == "main" else [one for one in self.commits if one.id == revision]
        if not found:
            raise HubError(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return found[0]

    def add(self, files: Mapping[str, Blob]) -> Commit:
        """Commits a complete set of files."""
        listing = sorted((path, blob.git_oid) for path, blob in files.items())
        commit_id = hashlib.sha1(repr((len(self.commits), listing)).encode()).hexdigest()
        self.commits.append(Commit(commit_id, dict(files)))
        return self.commits[-1]


class HubServer:
    """The server: a context manager that serves from threads of the test process.

    `faults` makes endpoints, by the names of the methods below, or single paths fail with a status and a message.
    huggingface_hub repeats most requests (not `commit`) up to five times, over some 23 seconds, after 408, 429, 500,
    502, 503 and 504: to make a push fail quickly use another status. `cuts` breaks the next answer to a path off after
    so many bytes.
    """

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.lock = threading.RLock()
        self.faults: dict[str, tuple[int, str]] = {}
        self.cuts: dict[str, int] = {}
        self.requests: list[Request] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Handler, self))
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> HubServer:
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def environment(self, home: Path | str, token: str | None = None) -> dict[str, str]:
        """The environment of a client process: the current one without any other Hub setting."""
        inherited = {name: value for name, value in os.environ.items() if not _FOREIGN_SETTINGS.fullmatch(name)}
        settings = {"HF_ENDPOINT": self.endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}
        quiet = {"HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "NO_PROXY": "*"}
        return {**inherited, **settings, **quiet, **({"HF_TOKEN": token} if token else {})}

    def create_repo(self, repo_id: str, private: bool = False) -> Repo:
        """Creates a repository with the first commit that the Hub makes: a .gitattributes."""
        repo = self.repos[repo_id] = Repo(private)
        repo.add({".gitattributes": Blob(b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n")})
        return repo

    def add_repo(self, repo_id: str, folder: Path | str) -> str:
        """Commits a folder's files, creating the repository if needed; returns the commit's hash."""
        contents = {p.relative_to(folder).as_posix(): p.read_bytes() for p in Path(folder).rglob("*") if p.is_file()}
        repo = self.repos.get(repo_id) or self.create_repo(repo_id)
        blobs = {path: Blob(data, path.endswith(_LFS)) for path, data in contents.items()}
        repo.objects |= {blob.sha256: blob.content for blob in blobs.values() if blob.lfs}
        return repo.add({".gitattributes": repo.at("main").files[".gitattributes"], **blobs}).id

    def files(self, repo_id: str) -> dict[str, bytes]:
        return {path: blob.content for path, blob in self.repos[repo_id].at("main").files.items()}

    def storage(self, repo_id: str, oid: str) -> str:
        return f"{self.endpoint.replace('127.0.0.1', 'localhost')}/storage/{repo_id}/{oid}"


_Endpoint = Callable[..., Response]
_ROUTES: list[tuple[str, re.Pattern[str], _Endpoint]] = []


def _route(method: str, template: str) -> Callable[[_Endpoint], _Endpoint]:
    """Registers a method of `_Handler` as an endpoint; the {names} in its path become arguments."""
    pattern = template.replace("{repo}", "(?P<repo>(?:[^/]+/)?[^/]+)").replace("{path}", "(?P<path>.+)")
    pattern = re.sub(r"\{(\w+)\}", r"(?P<\1>[^/]+)", pattern)

    def register(function: _Endpoint) -> _Endpoint:
        _ROUTES.append((method, re.compile(pattern), function))
        return function

    return register


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def __init__(self, hub: HubServer, *args: Any) -> None:
        self.hub = hub
        self.body = b""
        self.query: dict[str, list[str]] = {}
        super().__init__(*args)

    def do_GET(self) -> None:
        self.body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        try:
            with self.hub.lock:
                response = self._respond()
        except HubError as error:
            response = error.response
        path, body = urlsplit(self.path).path, b"" if self.command == "HEAD" else response.body
        if path in self.hub.cuts:
            body, self.close_connection = body[: self.hub.cuts.pop(path)], True
        self.hub.requests.append(Request(self.command, path, response.status, len(self.body), len(body)))
        self.send_response(response.status)
        for name, value in {**response.headers, "Content-Length": str(len(response.body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    do_HEAD = do_POST = do_PUT = do_GET  # noqa: N815

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Nothing is printed."""

    def _respond(self) -> Response:
        url = urlsplit(self.path)
        self.query = parse_qs(url.query)
        path = re.sub("^(/api)?/datasets/", lambda found: "/api/models/" if found[1] else "/", url.path)
        for method, pattern, endpoint in _ROUTES:
            match = pattern.fullmatch(path)
            if match and method == ("GET" if self.command == "HEAD" else self.command):
                for name in {endpoint.__name__, url.path} & self.hub.faults.keys():
                    raise HubError(*self.hub.faults[name])
                return endpoint(self, **{name: text and unquote(text) for name, text in match.groupdict().items()})
        raise HubError(404, f"HubServer has no endpoint {self.command} {self.path}")

    def _role(self) -> str | None:
        """What the client's token allows; None without one."""
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if token and token not in _ROLES:
            raise HubError(401, "Invalid credentials in Authorization header")
        return _ROLES.get(token)

    def _repo(self, repo_id: str) -> Repo:
        role, repo = self._role(), self.hub.repos.get(repo_id)
        if repo is None or (repo.private and role is None):
            raise HubError(404, "Repository not found", "RepoNotFound")
        return repo

    def _writable(self, repo_id: str) -> str:
        if self._role() != "write" or not repo_id.startswith("user/"):
            raise HubError(403, f"This token has no right to write to {repo_id}")
        return repo_id

    @_route("GET", "/api/whoami-v2")
    def whoami(self) -> Response:
        role = self._role()
        if role is None:
            raise HubError(401, "Invalid username or password.")
        token = {"displayName": "test", "role": role}
        user = {"type": "user", "id": "user", "name": "user", "fullname": "user"}
        return answer({**user, "orgs": [], "auth": {"type": "access_token", "accessToken": token}})

    @_route("POST", "/api/repos/create")
    def create_repo(self) -> Response:
        wish = json.loads(self.body)
        repo_id = self._writable(f"{wish.get('organization') or 'user'}/{wish['name']}")
        about = {"url": f"{self.hub.endpoint}/{repo_id}", "name": repo_id}
        if repo_id in self.hub.repos:
            return answer({**about, "error": "You already created this model repo"}, 409)
        # huggingface_hub 1 sends `private`, huggingface_hub 2 `visibility`
        self.hub.create_repo(repo_id, bool(wish.get("private")) or wish.get("visibility") == "private")
        return answer(about)

    @_route("POST", "/api/validate-yaml")
    def validate_yaml(self) -> Response:
        return answer({"errors": [], "warnings": []})

    @_route("GET", "/api/models/{repo}(?:/revision/{revision})?")
    def model_info(self, repo: str, revision: str | None) -> Response:
        found = self._repo(repo)
        commit = found.at(revision or "main")
        names = {"_id": repo, "id": repo, "modelId": repo, "author": repo.split("/")[0], "sha": commit.id}
        state = {"private": found.private, "gated": False, "disabled": False, "tags": [], "downloads": 0, "likes": 0}
        dates = {"createdAt": _DATE, "lastModified": _DATE}
        return answer({**names, **state, **dates, "siblings": [{"rfilename": path} for path in sorted(commit.files)]})

    @_route("GET", "/api/models/{repo}/tree/{revision}(?:/{path})?")
    def tree(self, repo: str, revision: str, path: str | None) -> Response:
        commit = self._repo(repo).at(revision)
        prefix = f"{path}/" if path else ""
        inside = {p.removeprefix(prefix): entry for p, entry in commit.entries().items() if p.startswith(prefix)}
        if path and not inside:
            raise HubError(404, f"{path} does not exist on {revision}", "EntryNotFound", commit)
        recursive = self.query.get("recursive", [""])[0].lower() in ("true", "1")
        return answer([entry for name, entry in inside.items() if recursive or "/" not in name])

    @_route("GET", "/api/models/{repo}/commits/{revision}")
    def commits(self, repo: str, revision: str) -> Response:
        about = {"date": _DATE, "title": "Add files", "message": "", "authors": [{"user": "user"}]}
        return answer([{"id": commit.id, **about} for commit in reversed(self._repo(repo).commits)])

    @_route("POST", "/api/models/{repo}/preupload/{revision}")
    def preupload(self, repo: str, revision: str) -> Response:
        """Says which files go to LFS, and what is stored already, which the client skips where it has not changed."""
        commit = self._repo(self._writable(repo)).at(revision)
        modes = []
        for path in [file["path"] for file in json.loads(self.body)["files"]]:
            old = commit.files.get(path)
            oid = {"oid": old.sha256 if old.lfs else old.git_oid} if old else {}
            mode = "lfs" if path.endswith(_LFS) else "regular"
            modes.append({"path": path, "uploadMode": mode, "shouldIgnore": False, **oid})
        return answer({"files": modes, "commitOid": commit.id})

    @_route("POST", r"/{repo}\.git/info/lfs/objects/batch")
    def lfs_batch(self, repo: str) -> Response:
        found = self._repo(self._writable(repo))
        objects = [{"oid": wish["oid"], "size": wish["size"]} for wish in json.loads(self.body)["objects"]]
        for entry in objects:
            if entry["oid"] not in found.objects:  # objects that are already stored need no action
                entry["actions"] = {"upload": {"href": self.hub.storage(repo, entry["oid"])}}
        return answer({"transfer": "basic", "objects": objects})

    @_route("POST", "/api/models/{repo}/commit/main")
    def commit(self, repo: str) -> Response:
        found = self._repo(self._writable(repo))
        newest = found.at("main")
        files = dict(newest.files)
        header, *operations = [json.loads(line) for line in self.body.splitlines()]
        if header["value"].get("parentCommit", newest.id) != newest.id:
            raise HubError(412, "A commit has happened since. Please refresh and try again.")
        for operation in operations:
            kind, value = operation["key"], operation["value"]
            if kind == "file":
                files[value["path"]] = Blob(base64.b64decode(value["content"]))
            elif kind == "lfsFile":
                files[value["path"]] = Blob(found.objects[value["oid"]], lfs=True)
            elif kind == "deletedFile":
                del files[value["path"]]
            else:
                raise HubError(501, f"HubServer knows no operation {kind}")
        commit = found.add(files)
        url = f"{self.hub.endpoint}/{repo}/commit/{commit.id}"
        return answer({"success": True, "commitUrl": url, "commitOid": commit.id, "hookOutput": ""})

    @_route("GET", "/{repo}/resolve/{revision}/{path}")
    def resolve(self, repo: str, revision: str, path: str) -> Response:
        commit = self._repo(repo).at(revision)
        blob = commit.files.get(path)
        if blob is None:
            raise HubError(404, "Entry not found", "EntryNotFound", commit)
        headers = {"X-Repo-Commit": commit.id, "ETag": f'"{blob.git_oid}"'}
        if not blob.lfs:
            return Response(200, headers, blob.content)
        linked = {"X-Linked-Etag": f'"{blob.sha256}"', "X-Linked-Size": str(len(blob.content))}
        return Response(302, {**headers, **linked, "Location": self.hub.storage(repo, blob.sha256)})

    @_route("PUT", "/storage/{repo}/{oid}")
    def upload(self, repo: str, oid: str) -> Response:
        if hashlib.sha256(self.body).hexdigest() != oid:
            raise HubError(400, f"The content has not the sha256 {oid}")
        self.hub.repos[repo].objects[oid] = self.body
        return Response(200, {"ETag": f'"{oid}"'})

    @_route("GET", "/storage/{repo}/{oid}")
    def download(self, repo: str, oid: str) -> Response:
        return Response(200, {"ETag": f'"{oid}"'}, self.hub.repos[repo].objects[oid])

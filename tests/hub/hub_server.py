"""A loopback server that speaks the part of the Hugging Face Hub's HTTP protocol that this project's tests need.

Real clients (huggingface_hub, transformers, sentence-transformers) run in processes of their own and find the server
through ``HF_ENDPOINT``; `HubServer.environment` builds their whole environment. Everything is kept in memory. The
protocol was read off what huggingface_hub (1.5 to 2.4) sends and expects back, and off the git-lfs batch API. Extend it
only where a test of this project needs it. The endpoints, by the names that the request log and `HubServer.fail` use:

    whoami         GET  /api/whoami-v2
    create_repo    POST /api/repos/create
    validate_yaml  POST /api/validate-yaml                            accepts every model card
    model_info     GET  /api/models/{repo}[/revision/{revision}]
    tree           GET  /api/models/{repo}/tree/{revision}[/{path}]   also with ?recursive; always one page
    commits        GET  /api/models/{repo}/commits/{revision}
    preupload      POST /api/models/{repo}/preupload/{revision}       which files go to LFS, and what is stored already
    lfs_batch      POST /{repo}.git/info/lfs/objects/batch            signed storage URLs, for the `basic` transfer
    commit         POST /api/models/{repo}/commit/{revision}          NDJSON: file, lfsFile, deletedFile, deletedFolder
    resolve        GET  /{repo}/resolve/{revision}/{path}             an LFS file redirects to the storage
    upload         PUT  /storage/{repo}/{oid}                         checks the sha256
    download       GET  /storage/{repo}/{oid}

GET endpoints answer HEAD too. The storage goes by another host name (``localhost`` instead of ``127.0.0.1``), so that
clients treat it as foreign: they send no token, only the signed URL.

Clients need ``HF_HUB_DISABLE_XET=1`` (`HubServer.environment` sets it): where hf_xet is installed, huggingface_hub 2.4
uploads through Xet without asking the server. Downloads do not need it, nor does huggingface_hub 1.5, which asks first.

Every repository can also be read as a dataset, under `/datasets/{repo}` and `/api/datasets/{repo}`. Unlike on the Hub,
which answers 401, a missing or hidden repository is 404 for anonymous clients too.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import secrets
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from hub.repositories import GIT_ATTRIBUTES, Blob, HubError, Repo, Response, answer

# Settings of whoever runs the tests, which must not reach a client process.
_FOREIGN_SETTINGS = re.compile(r"(HF|HUGGINGFACE|HUGGING_FACE|TRANSFORMERS|SENTENCE_TRANSFORMERS)_.*|.*_PROXY", re.I)


@dataclass(frozen=True)
class Account:
    """The account behind a token, and its rights."""

    name: str
    can_write: bool = True

    def owns(self, repo_id: str) -> bool:
        return repo_id.split("/")[0] == self.name


@dataclass
class Request:
    """An entry of the request log."""

    endpoint: str
    method: str
    path: str
    headers: dict[str, str]  # names in lower case
    status: int = 0


class HubServer:
    """The server: a context manager that serves from threads of the test process.

    The tokens ``hf_write`` and ``hf_read`` belong to the account ``user``, and ``hf_other`` to the account ``other``.
    Any other token is refused with 401. `requests` is the log.
    """

    def __init__(self) -> None:
        user, reader, other = Account("user"), Account("user", can_write=False), Account("other")
        self.accounts = {"hf_write": user, "hf_read": reader, "hf_other": other}
        self.requests: list[Request] = []
        self.repos: dict[str, Repo] = {}
        self.errors: list[str] = []
        self.lock = threading.RLock()
        self._faults: dict[str, tuple[int, str]] = {}
        self._secret = secrets.token_hex()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Handler, self))
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> HubServer:
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        """Errors inside the server are raised here, unless the test has already failed."""
        self._server.shutdown()
        self._server.server_close()
        if self.errors and kind is None:
            raise RuntimeError("HubServer failed to answer:\n" + "\n".join(self.errors))

    def environment(self, home: Path | str, token: str | None = None) -> dict[str, str]:
        """The environment of a client process: the current one without any other Hub setting."""
        inherited = {name: value for name, value in os.environ.items() if not _FOREIGN_SETTINGS.fullmatch(name)}
        settings = {"HF_ENDPOINT": self.endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}
        quiet = {"HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "NO_PROXY": "*"}
        return {**inherited, **settings, **quiet, **({"HF_TOKEN": token} if token else {})}

    def create_repo(self, repo_id: str, private: bool = False) -> Repo:
        """Creates a repository with the first commit that the Hub makes: a .gitattributes."""
        repo = self.repos[repo_id] = Repo(repo_id, private)
        repo.add("main", {".gitattributes": Blob(GIT_ATTRIBUTES)}, "system", "initial commit")
        return repo

    def add_repo(self, repo_id: str, folder: Path | str, private: bool = False) -> str:
        """Commits a folder's files to `main`, creating the repository if needed; returns the commit's hash."""
        contents = {p.relative_to(folder).as_posix(): p.read_bytes() for p in Path(folder).rglob("*") if p.is_file()}
        with self.lock:
            repo = self.repos.get(repo_id) or self.create_repo(repo_id, private)
            blobs = {path: Blob(data, repo.is_lfs("main", path, len(data))) for path, data in contents.items()}
            repo.objects |= {blob.sha256: blob.content for blob in blobs.values() if blob.lfs}
            attributes = {".gitattributes": repo.at("main").files[".gitattributes"]}
            return repo.add("main", {**attributes, **blobs}, repo_id.split("/")[0], "Add folder").id

    def files(self, repo_id: str, revision: str = "main") -> dict[str, bytes]:
        return {path: blob.content for path, blob in self.repos[repo_id].at(revision).files.items()}

    def fail(self, endpoint: str, status: int, message: str) -> None:
        """Makes an endpoint fail with an error status, until `heal`.

        huggingface_hub repeats most requests (not `commit`) up to five times, over some 23 seconds, after 408, 429,
        500, 502, 503 and 504: to make a push fail quickly use another status.
        """
        assert endpoint in [function.__name__ for _, _, function in _ROUTES], endpoint
        self._faults[endpoint] = status, message

    def heal(self) -> None:
        self._faults.clear()

    def sign(self, method: str, repo_id: str, oid: str) -> str:
        """The URL that allows one operation on one stored object without a token."""
        signature = hashlib.sha256(f"{self._secret} {method} {repo_id} {oid}".encode()).hexdigest()
        storage = self.endpoint.replace("127.0.0.1", "localhost")
        return f"{storage}/storage/{repo_id}/{oid}?signature={signature}"


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
        url = urlsplit(self.path)
        method = "GET" if self.command == "HEAD" else self.command
        path = re.sub("^(/api)?/datasets/", lambda found: "/api/models/" if found[1] else "/", url.path)
        matches = [(function, pattern.fullmatch(path)) for m, pattern, function in _ROUTES if m == method]
        endpoint, match = next(((function, match) for function, match in matches if match), (None, None))
        arguments = {name: text and unquote(text) for name, text in match.groupdict().items()} if match else {}
        headers = {name.lower(): value for name, value in self.headers.items()}
        request = Request(endpoint.__name__ if endpoint else "unknown", self.command, self.path, headers)
        self.hub.requests.append(request)
        self.query = parse_qs(url.query)
        fault = self.hub._faults.get(request.endpoint)
        self.body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        response = self._respond(endpoint, arguments, fault)
        self._send(response)
        request.status = response.status

    do_HEAD = do_POST = do_PUT = do_DELETE = do_GET  # noqa: N815

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Nothing is printed."""

    def _respond(
        self, endpoint: _Endpoint | None, arguments: dict[str, str | None], fault: tuple[int, str] | None
    ) -> Response:
        try:
            if fault:
                raise HubError(*fault)
            if "Transfer-Encoding" in self.headers:
                self.close_connection = True
                raise HubError(411, "Content-Length required")
            if endpoint is None:
                raise HubError(404, f"HubServer has no endpoint {self.command} {self.path}")
            with self.hub.lock:
                return endpoint(self, **arguments)
        except HubError as error:
            return error.response
        except Exception:
            self.hub.errors.append(traceback.format_exc())
            return HubError(500, "HubServer failed to answer").response

    def _send(self, response: Response) -> None:
        self.send_response(response.status)
        for name, value in {**response.headers, "Content-Length": str(len(response.body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(b"" if self.command == "HEAD" else response.body)

    def _account(self) -> Account | None:
        token = self.headers.get("Authorization")
        account = self.hub.accounts.get(token.removeprefix("Bearer ")) if token else None
        if token and account is None:
            raise HubError(401, "Invalid credentials in Authorization header")
        return account

    def _known_account(self) -> Account:
        account = self._account()
        if account is None:
            raise HubError(401, "Invalid username or password.")
        return account

    def _writer(self, repo_id: str) -> Account:
        account = self._known_account()
        if not (account.can_write and account.owns(repo_id)):
            raise HubError(403, f"This token has no right to write to {repo_id}")
        return account

    def _repo(self, repo_id: str) -> Repo:
        account, repo = self._account(), self.hub.repos.get(repo_id)
        if repo is None or (repo.private and not (account and account.owns(repo_id))):
            raise HubError(404, "Repository not found", "RepoNotFound")
        return repo

    def _writable_repo(self, repo_id: str) -> Repo:
        repo = self._repo(repo_id)
        self._writer(repo_id)
        return repo

    @_route("GET", "/api/whoami-v2")
    def whoami(self) -> Response:
        account = self._known_account()
        token = {"displayName": "test", "role": "write" if account.can_write else "read"}
        user = {"type": "user", "id": account.name, "name": account.name, "fullname": account.name}
        return answer({**user, "orgs": [], "auth": {"type": "access_token", "accessToken": token}})

    @_route("POST", "/api/repos/create")
    def create_repo(self) -> Response:
        wish = json.loads(self.body)
        repo_id = f"{wish.get('organization') or self._known_account().name}/{wish['name']}"
        self._writer(repo_id)
        if wish.get("type", "model") != "model":
            raise HubError(501, "HubServer holds models only")
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
        dates = {"createdAt": list(commit.history())[-1].date, "lastModified": commit.date}
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
        keys = ("id", "title", "message", "date")
        history = self._repo(repo).at(revision).history()
        return answer([{**{k: getattr(c, k) for k in keys}, "authors": [{"user": c.author}]} for c in history])

    @_route("POST", "/api/models/{repo}/preupload/{revision}")
    def preupload(self, repo: str, revision: str) -> Response:
        found = self._writable_repo(repo)
        stored = found.at(revision).files
        modes = []
        for file in json.loads(self.body)["files"]:
            path, old = file["path"], stored.get(file["path"])
            mode = "lfs" if found.is_lfs(revision, path, file["size"]) else "regular"
            # the oid lets the client skip files that have not changed
            oid = {"oid": old.sha256 if old.lfs else old.git_oid} if old else {}
            modes.append({"path": path, "uploadMode": mode, "shouldIgnore": False, **oid})
        return answer({"files": modes, "commitOid": found.at(revision).id})

    @_route("POST", r"/{repo}\.git/info/lfs/objects/batch")
    def lfs_batch(self, repo: str) -> Response:
        found = self._writable_repo(repo)
        objects = [{"oid": wish["oid"], "size": wish["size"]} for wish in json.loads(self.body)["objects"]]
        for entry in objects:
            if entry["oid"] not in found.objects:  # objects that are already stored need no action
                entry["actions"] = {"upload": {"href": self.hub.sign("PUT", repo, entry["oid"])}}
        return answer({"transfer": "basic", "objects": objects})

    @_route("POST", "/api/models/{repo}/commit/{revision}")
    def commit(self, repo: str, revision: str) -> Response:
        found, author = self._writable_repo(repo), self._writer(repo)
        if "create_pr" in self.query:
            raise HubError(501, "HubServer has no pull requests")
        if revision not in found.branches:
            raise HubError(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        header, *operations = [json.loads(line) for line in self.body.splitlines()]
        about, head = header["value"], found.at(revision)
        if about.get("parentCommit", head.id) != head.id:
            raise HubError(412, "A commit has happened since. Please refresh and try again.")
        files = dict(head.files)
        for operation in operations:
            self._apply(found, files, operation["key"], operation["value"])
        commit = found.add(revision, files, author.name, about["summary"], about.get("description", ""))
        url = f"{self.hub.endpoint}/{repo}/commit/{commit.id}"
        return answer({"success": True, "commitUrl": url, "commitOid": commit.id, "hookOutput": ""})

    def _apply(self, repo: Repo, files: dict[str, Blob], kind: str, value: dict[str, Any]) -> None:
        path = value["path"]
        if kind == "file":
            files[path] = Blob(base64.b64decode(value["content"]))
        elif kind == "lfsFile":
            if value["oid"] not in repo.objects:
                raise HubError(400, f"An LFS pointer points to an object that does not exist: {path}")
            files[path] = Blob(repo.objects[value["oid"]], lfs=True)
        elif kind in ("deletedFile", "deletedFolder"):
            folder = path.rstrip("/") + "/"
            doomed = [p for p in files if (p == path if kind == "deletedFile" else p.startswith(folder))]
            if not doomed:
                raise HubError(404, f"A file with this name doesn't exist: {path}", "EntryNotFound")
            for name in doomed:
                del files[name]
        else:
            raise HubError(501, f"HubServer knows no operation {kind}")

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
        return Response(302, {**headers, **linked, "Location": self.hub.sign("GET", repo, blob.sha256)})

    def _stored(self, method: str, repo: str, oid: str) -> dict[str, bytes]:
        if not self.hub.sign(method, repo, oid).endswith(self.path):
            raise HubError(403, "The signature does not match")
        return self.hub.repos[repo].objects

    @_route("PUT", "/storage/{repo}/{oid}")
    def upload(self, repo: str, oid: str) -> Response:
        objects = self._stored("PUT", repo, oid)
        if hashlib.sha256(self.body).hexdigest() != oid:
            raise HubError(400, f"The content has not the sha256 {oid}")
        objects[oid] = self.body
        return Response(200, {"ETag": f'"{oid}"'})

    @_route("GET", "/storage/{repo}/{oid}")
    def download(self, repo: str, oid: str) -> Response:
        content = self._stored("GET", repo, oid)[oid]
        return Response(200, {"ETag": f'"{oid}"'}, content)

"""Repositories of `hub_server.HubServer`, in memory, and the errors that looking into them has."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from functools import cached_property
from pathlib import PurePosixPath
from typing import Any

LFS_THRESHOLD = 10 * 2**20  # bytes; the Hub takes larger files through LFS only
LFS_PATTERNS = ("*.bin", "*.gguf", "*.h5", "*.model", "*.msgpack", "*.onnx", "*.pt", "*.pth", "*.safetensors")
GIT_ATTRIBUTES = "".join(f"{pattern} filter=lfs diff=lfs merge=lfs -text\n" for pattern in LFS_PATTERNS).encode()


@dataclass
class Response:
    """What an endpoint answers."""

    status: int
    headers: dict[str, str]
    body: bytes = b""


def answer(value: object, status: int = 200) -> Response:
    """A JSON response."""
    return Response(status, {"Content-Type": "application/json"}, json.dumps(value).encode())


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
    def pointer(self) -> bytes:
        """What git stores: the content, or the pointer of an LFS file."""
        lines = f"version https://git-lfs.github.com/spec/v1\noid sha256:{self.sha256}\nsize {len(self.content)}\n"
        return lines.encode() if self.lfs else self.content

    @cached_property
    def git_oid(self) -> str:
        return hashlib.sha1(b"blob %d\0" % len(self.pointer) + self.pointer).hexdigest()


@dataclass(frozen=True)
class Commit:
    """A state of a repository's files."""

    id: str  # 40 hexadecimal digits
    parent: Commit | None
    title: str
    message: str
    author: str
    date: str
    files: Mapping[str, Blob]

    def history(self) -> Iterator[Commit]:
        """Yields this commit and its ancestors, newest first."""
        commit: Commit | None = self
        while commit is not None:
            yield commit
            commit = commit.parent

    def entries(self) -> dict[str, dict[str, Any]]:
        """Every file and folder by path, as the Hub describes it."""
        entries: dict[str, dict[str, Any]] = {}
        for path, blob in sorted(self.files.items()):
            for folder in [str(parent) for parent in PurePosixPath(path).parents][-2::-1]:
                oid = hashlib.sha1(f"{self.id} {folder}".encode()).hexdigest()
                entries[folder] = {"type": "directory", "path": folder, "oid": oid, "size": 0}
            size, pointer_size = len(blob.content), len(blob.pointer)
            lfs = {"lfs": {"oid": blob.sha256, "size": size, "pointerSize": pointer_size}} if blob.lfs else {}
            entries[path] = {"type": "file", "path": path, "oid": blob.git_oid, "size": size, **lfs}
        return entries


@dataclass
class Repo:
    """A model repository."""

    id: str
    private: bool
    commits: dict[str, Commit] = field(default_factory=dict)
    branches: dict[str, Commit] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)  # LFS content by sha256

    def at(self, revision: str) -> Commit:
        """The commit that a branch name or a commit hash stands for."""
        commit = self.branches.get(revision) or self.commits.get(revision)
        if commit is None:
            raise HubError(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return commit

    def add(self, branch: str, files: Mapping[str, Blob], author: str, title: str, message: str = "") -> Commit:
        """Commits a complete set of files to a branch."""
        parent, date = self.branches.get(branch), time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime())
        listing = sorted((path, blob.git_oid) for path, blob in files.items())
        identity = repr((self.id, len(self.commits), parent and parent.id, title, message, author, date, listing))
        commit_id = hashlib.sha1(identity.encode()).hexdigest()
        commit = Commit(commit_id, parent, title, message, author, date, dict(files))
        self.commits[commit_id] = self.branches[branch] = commit
        return commit

    def is_lfs(self, revision: str, path: str, size: int) -> bool:
        """Whether a file of that name and size belongs to LFS, by .gitattributes or by its size."""
        attributes = self.at(revision).files.get(".gitattributes", Blob(b"")).content.decode()
        patterns = [line.split()[0] for line in attributes.splitlines() if "filter=lfs" in line]
        return size > LFS_THRESHOLD or any(fnmatch(PurePosixPath(path).name, pattern) for pattern in patterns)

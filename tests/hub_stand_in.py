"""Hugging Face Hub for tests: real HTTP on loopback, with all content in memory.

It speaks the part of the protocol that `huggingface_hub` and `datasets` use to create a repository,
upload, commit, list and download. What it does not know it answers with 404 and keeps in `unknown`.
By hand: `python tests/hub_stand_in.py --port 8123` prints the environment that clients need.
"""

import argparse
import base64
import contextlib
import fnmatch
import hashlib
import json
import re
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
import yaml
from huggingface_hub import HfApi

USER = "user"
TOKEN = "hf_stand_in"
LFS_PATTERNS = ["*.safetensors", "*.bin", "*.parquet", "*.arrow", "*.png", "*.pt", "*.gz", "*.zip"]
LARGEST_REGULAR_FILE = 10_000_000  # bytes; the Hub wants more than this in LFS
GIT_ATTRIBUTES = "".join(
    f"{p} filter=lfs diff=lfs merge=lfs -text\n" for p in LFS_PATTERNS
).encode()


class HubError(Exception):
    """Error response: status, and the value of X-Error-Code."""

    def __init__(self, status: int, code: str, message: str):
        super().__init__(message)
        self.status = status
        self.code = code


@dataclass
class StoredFile:
    """File of a commit."""

    content: bytes
    is_lfs: bool

    @property
    def git_oid(self) -> str:
        """Git's hash of the file, or of its pointer for a file in LFS."""
        blob = self.content
        if self.is_lfs:
            pointer = (
                f"version https://git-lfs.github.com/spec/v1\noid sha256:{self.sha256}\n"
                f"size {len(self.content)}\n"
            )
            blob = pointer.encode()
        return hashlib.sha1(b"blob %d\0" % len(blob) + blob).hexdigest()

    @property
    def sha256(self) -> str:
        """LFS's hash of the file."""
        return hashlib.sha256(self.content).hexdigest()

    def listing(self, path: str) -> dict:
        """Entry of the file in a tree."""
        entry = {"type": "file", "path": path, "oid": self.git_oid, "size": len(self.content)}
        if self.is_lfs:
            entry["lfs"] = {"oid": self.sha256, "size": len(self.content), "pointerSize": 134}
        return entry


@dataclass
class Commit:
    """Commit: the whole content of a repository at one time."""

    oid: str
    title: str
    files: dict[str, StoredFile]
    parent: str | None
    date: str


@dataclass
class Repository:
    """Repository: commits, branches and tags."""

    repo_id: str
    private: bool
    commits: dict[str, Commit] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)

    def commit(self, branch: str, title: str, files: dict[str, StoredFile]) -> Commit:
        """Commit `files` to a branch."""
        parent = self.branches.get(branch)
        names = sorted(f"{path} {file.git_oid}" for path, file in files.items())
        text = "\n".join([self.repo_id, str(len(self.commits)), str(parent), title, *names])
        oid = hashlib.sha1(text.encode()).hexdigest()
        date = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime())
        self.commits[oid] = Commit(oid, title, files, parent, date)
        self.branches[branch] = oid
        return self.commits[oid]

    def at(self, revision: str) -> Commit:
        """Return the commit of a branch, a tag or an oid."""
        oid = self.branches.get(revision) or self.tags.get(revision) or revision
        if oid not in self.commits:
            raise HubError(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return self.commits[oid]

    def history(self, revision: str) -> Iterator[Commit]:
        """Return the commits, newest first."""
        oid = self.at(revision).oid
        while oid is not None:
            yield self.commits[oid]
            oid = self.commits[oid].parent


class HubStandIn:
    """Server and its content; `running_hub()` starts one.

    Attributes:
        endpoint: What clients want in HF_ENDPOINT.
        repositories: Content, by type ("models", "datasets") and id.
        requests: Every request so far, as "METHOD path".
        unknown: Those of them that the stand-in has no answer for.
        failing: A regular expression; a request that it matches is answered with 500.
    """

    def __init__(self, port: int = 0):
        self.repositories: dict[tuple[str, str], Repository] = {}
        self.lfs_objects: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.unknown: list[str] = []
        self.failing: str | None = None
        handler = type("BoundHandler", (HubHandler,), {"hub": self})
        self.server = ThreadingHTTPServer(("127.0.0.1", port), handler)
        self.server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self.server.server_port}"
        # another origin, like the Hub's content servers: clients must not send the token there
        self.content_endpoint = f"http://localhost:{self.server.server_port}"

    def environment(self, home: str | Path, token: str | None = TOKEN) -> dict[str, str]:
        """Return environment variables that let a process reach only this Hub.

        Args:
            home: Folder for everything the clients cache.
            token: Sent with each request; None for an anonymous client.

        Returns:
            Variables to add to a process's environment.
        """
        variables = {
            "HF_ENDPOINT": self.endpoint,
            "HF_HOME": str(home),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "NO_PROXY": "127.0.0.1,localhost",
        }
        return variables if token is None else {**variables, "HF_TOKEN": token}

    def api(self, token: str | bool = TOKEN) -> HfApi:
        """Return a client in this process; `constants.HF_HUB_DISABLE_XET` must be set."""
        return HfApi(endpoint=self.endpoint, token=token)

    def files(self, repo_id: str, kind: str = "models", revision: str = "main") -> dict[str, bytes]:
        """Return the files of a repository, by path."""
        commit = self.repositories[kind, repo_id].at(revision)
        return {path: file.content for path, file in commit.files.items()}

    def add_folder(self, repo_id: str, folder: str | Path, kind: str = "models"):
        """Add a local folder to the Hub without a client."""
        files = {
            path.relative_to(folder).as_posix(): path.read_bytes()
            for path in sorted(Path(folder).rglob("*"))
            if path.is_file()
        }
        repository = self.create(repo_id, kind, private=False)
        repository.commit(
            "main",
            "add folder",
            {
                path: StoredFile(content, is_lfs(path, len(content)))
                for path, content in files.items()
            },
        )

    def create(self, repo_id: str, kind: str, private: bool) -> Repository:
        """Create an empty repository, with the first commit of every new repository."""
        repository = Repository(repo_id, private)
        repository.commit(
            "main", "initial commit", {".gitattributes": StoredFile(GIT_ATTRIBUTES, False)}
        )
        self.repositories[kind, repo_id] = repository
        return repository


def is_lfs(path: str, size: int) -> bool:
    """Return whether the Hub stores a file outside git."""
    matches = any(fnmatch.fnmatch(path.rsplit("/", 1)[-1], pattern) for pattern in LFS_PATTERNS)
    return matches or size > LARGEST_REGULAR_FILE


def card_metadata(content: str) -> dict:
    """Return the metadata at the top of a README.md."""
    found = re.match(r"---\n(.*?)\n---\n", content, re.DOTALL)
    metadata = {} if found is None else yaml.safe_load(found[1])
    if not isinstance(metadata, dict):
        raise yaml.YAMLError("metadata must be a mapping")
    return metadata


def card_errors(content: str) -> list[str]:
    """Return the error in the metadata at the top of a README.md."""
    try:
        metadata = card_metadata(content)
    except yaml.YAMLError as error:
        return [f"invalid YAML: {error}"]
    errors = [
        f"{key} must be a string or a list of strings"
        for key in ("language", "tags", "datasets", "license", "pipeline_tag", "library_name")
        if not all(
            isinstance(value, str)
            for value in (
                metadata[key] if isinstance(metadata.get(key), list) else [metadata.get(key, "")]
            )
        )
    ]
    for entry in metadata.get("model-index", []):
        for result in entry["results"]:
            if not {"task", "metrics"} <= result.keys() or "type" not in result["task"]:
                errors.append("each result needs a task with a type, and metrics")
            if "dataset" in result and not {"name", "type"} <= result["dataset"].keys():
                errors.append("a result's dataset needs a name and a type")
    return errors


class HubHandler(BaseHTTPRequestHandler):
    """Handler of a connection; each route is a method, listed in `ROUTES`."""

    hub: HubStandIn
    protocol_version = "HTTP/1.1"

    REPO = r"(?P<repo_id>[^/]+/[^/]+)"
    API = rf"/api/(?P<kind>models|datasets)/{REPO}"
    ROUTES: ClassVar[list[tuple[str, str, str]]] = [
        ("GET", r"/api/whoami-v2", "whoami"),
        ("POST", r"/api/validate-yaml", "validate_yaml"),
        ("POST", r"/api/repos/create", "create_repo"),
        ("DELETE", r"/api/repos/delete", "delete_repo"),
        ("GET", API, "info"),
        ("GET", rf"{API}/revision/(?P<revision>[^/]+)", "info"),
        ("GET", rf"{API}/refs", "refs"),
        ("GET", rf"{API}/commits/(?P<revision>[^/]+)", "commits"),
        ("GET", rf"{API}/tree/(?P<revision>[^/]+)(?:/(?P<path>.*))?", "tree"),
        ("POST", rf"{API}/paths-info/(?P<revision>[^/]+)", "paths_info"),
        ("POST", rf"{API}/preupload/(?P<revision>[^/]+)", "preupload"),
        ("POST", rf"{API}/commit/(?P<revision>[^/]+)", "commit"),
        ("POST", rf"{API}/(?P<what>branch|tag)/(?P<revision>[^/]+)", "create_ref"),
        (
            "POST",
            rf"/(?P<kind>datasets/)?{REPO}\.git/info/lfs/objects/(?P<step>batch|verify)",
            "lfs",
        ),
        ("PUT", r"/lfs-objects/(?P<sha256>[0-9a-f]{64})", "receive_lfs_object"),
        ("GET", r"/lfs-objects/(?P<sha256>[0-9a-f]{64})", "send_lfs_object"),
        (
            "GET",
            rf"/(?P<kind>datasets/)?{REPO}/resolve/(?P<revision>[^/]+)/(?P<path>.+)",
            "resolve",
        ),
    ]

    def do_request(self):
        """Answer with the method of the route, or with an error in the form of the Hub."""
        self.body = self._read_body()
        url = urlsplit(self.path)
        self.query = parse_qs(url.query)
        self.hub.requests.append(f"{self.command} {unquote(url.path)}")
        method = "GET" if self.command == "HEAD" else self.command
        try:
            if self.hub.failing is not None and re.search(self.hub.failing, self.hub.requests[-1]):
                raise HubError(500, "InternalError", "the stand-in was told to fail here")
            for route_method, pattern, name in self.ROUTES:
                found = re.fullmatch(pattern, url.path) if route_method == method else None
                if found is not None:
                    given = {k: unquote(v) for k, v in found.groupdict().items() if v is not None}
                    if "repo_id" in given:
                        # download addresses of models have no prefix
                        given["kind"] = given.get("kind", "models").rstrip("/")
                    getattr(self, name)(**given)
                    return
            self.hub.unknown.append(self.hub.requests[-1])
            raise HubError(404, "NotFound", f"the stand-in does not know {self.hub.requests[-1]}")
        except HubError as error:
            self._answer({"error": str(error)}, error.status, error=error)

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = do_request  # noqa: N815

    # the routes

    def whoami(self):
        self._write_access()
        access = {"type": "access_token", "accessToken": {"displayName": "t", "role": "write"}}
        self._answer({"type": "user", "name": USER, "fullname": USER, "orgs": [], "auth": access})

    def validate_yaml(self):
        errors = card_errors(json.loads(self.body)["content"])
        answer = {"errors": [{"message": message} for message in errors], "warnings": []}
        self._answer(answer, 400 if errors else 200)

    def create_repo(self):
        request = json.loads(self.body)
        repo_id = f"{request.get('organization') or USER}/{request['name']}"
        kind = f"{request.get('type') or 'model'}s"
        self._write_access(repo_id)
        url = f"{self.hub.endpoint}/{'' if kind == 'models' else kind + '/'}{repo_id}"
        if (kind, repo_id) in self.hub.repositories:
            self._answer({"error": "You already created this repo", "url": url}, 409)
            return
        private = request.get("visibility") == "private" or request.get("private", False)
        self.hub.create(repo_id, kind, private)
        self._answer({"url": url, "name": repo_id})

    def delete_repo(self):
        request = json.loads(self.body)
        repo_id = f"{request.get('organization') or USER}/{request['name']}"
        kind = f"{request.get('type') or 'model'}s"
        self._write_access(repo_id)
        self._repository(kind, repo_id)
        del self.hub.repositories[kind, repo_id]
        self._answer({})

    def info(self, kind: str, repo_id: str, revision: str = "main"):
        repository = self._repository(kind, repo_id)
        commit = repository.at(revision)
        first = list(repository.history("main"))[-1]
        card = commit.files.get("README.md", StoredFile(b"", is_lfs=False))
        metadata = card_metadata(card.content.decode())
        self._answer(
            {
                "_id": hashlib.sha1(repo_id.encode()).hexdigest()[:24],
                "id": repo_id,
                "author": repo_id.split("/")[0],
                "sha": commit.oid,
                "createdAt": first.date,
                "lastModified": commit.date,
                "private": repository.private,
                "disabled": False,
                "gated": False,
                "downloads": 0,
                "likes": 0,
                "tags": metadata.get("tags", []),
                **{
                    key: metadata[key]
                    for key in ("pipeline_tag", "library_name")
                    if key in metadata
                },
                "siblings": [{"rfilename": path} for path in sorted(commit.files)],
            }
        )

    def refs(self, kind: str, repo_id: str):
        repository = self._repository(kind, repo_id)
        named = {
            key: [
                {"name": name, "ref": f"refs/{prefix}/{name}", "targetCommit": oid}
                for name, oid in names.items()
            ]
            for key, prefix, names in (
                ("branches", "heads", repository.branches),
                ("tags", "tags", repository.tags),
            )
        }
        self._answer({**named, "converts": [], "pullRequests": []})

    def commits(self, kind: str, repo_id: str, revision: str):
        self._answer(
            [
                {
                    "id": commit.oid,
                    "title": commit.title,
                    "message": "",
                    "authors": [{"user": USER}],
                    "date": commit.date,
                }
                for commit in self._repository(kind, repo_id).history(revision)
            ]
        )

    def tree(self, kind: str, repo_id: str, revision: str, path: str = ""):
        commit = self._repository(kind, repo_id).at(revision)
        prefix = f"{path}/" if path else ""
        if path and not any(name.startswith(prefix) for name in commit.files):
            raise HubError(404, "EntryNotFound", f"{path} does not exist on {revision}")
        is_recursive = self.query.get("recursive", ["false"])[0].lower() == "true"
        entries = self._entries(commit, prefix)
        shown = [
            entry
            for name, entry in sorted(entries.items())
            if is_recursive or "/" not in name.removeprefix(prefix)
        ]
        self._answer(shown)

    def paths_info(self, kind: str, repo_id: str, revision: str):
        commit = self._repository(kind, repo_id).at(revision)
        if self.headers["Content-Type"].startswith("application/json"):
            paths = json.loads(self.body)["paths"]
        else:
            paths = parse_qs(self.body.decode())["paths"]
        entries = self._entries(commit, "")
        self._answer([entries[path] for path in paths if path in entries])

    def preupload(self, kind: str, repo_id: str, revision: str):
        self._write_access(repo_id)
        files = self._repository(kind, repo_id).at(revision).files
        answers = []
        for request in json.loads(self.body)["files"]:
            path = request["path"]
            mode = "lfs" if is_lfs(path, request["size"]) else "regular"
            answer = {"path": path, "uploadMode": mode, "shouldIgnore": False}
            if path in files:
                answer["oid"] = files[path].sha256 if files[path].is_lfs else files[path].git_oid
            answers.append(answer)
        self._answer({"files": answers, "commitOid": "0" * 40})

    def lfs(self, kind: str, repo_id: str, step: str):
        self._write_access(repo_id)
        self._repository(kind, repo_id)
        request = json.loads(self.body)
        if step == "verify":
            if len(self.hub.lfs_objects.get(request["oid"], b"")) != request["size"]:
                raise HubError(404, "NotFound", f"no such object: {request['oid']}")
            self._answer({})
            return
        prefix = "" if kind == "models" else f"{kind}/"
        verify = f"{self.hub.endpoint}/{prefix}{repo_id}.git/info/lfs/objects/verify"
        objects = []
        for wanted in request["objects"]:
            if wanted["oid"] not in self.hub.lfs_objects:
                upload = f"{self.hub.content_endpoint}/lfs-objects/{wanted['oid']}"
                wanted["actions"] = {"upload": {"href": upload}, "verify": {"href": verify}}
            objects.append(wanted)
        self._answer({"transfer": "basic", "objects": objects})

    def receive_lfs_object(self, sha256: str):
        if hashlib.sha256(self.body).hexdigest() != sha256:
            raise HubError(400, "BadRequest", "the content does not have the promised sha256")
        self.hub.lfs_objects[sha256] = self.body
        self._answer({})

    def send_lfs_object(self, sha256: str):
        if sha256 not in self.hub.lfs_objects:
            raise HubError(404, "EntryNotFound", f"no such object: {sha256}")
        self._send_content(self.hub.lfs_objects[sha256], {"ETag": f'"{sha256}"'})

    def commit(self, kind: str, repo_id: str, revision: str):
        self._write_access(repo_id)
        if "create_pr" in self.query:
            raise HubError(400, "BadRequest", "the stand-in has no pull requests")
        repository = self._repository(kind, repo_id)
        parent = repository.at(revision)
        if revision not in repository.branches:
            raise HubError(400, "BadRequest", f"{revision} is not a branch")
        files = dict(parent.files)
        title = ""
        for line in self.body.decode().splitlines():
            operation = json.loads(line)
            key, value = operation["key"], operation["value"]
            if key == "header":
                title = value["summary"]
                if value.get("parentCommit", parent.oid) != parent.oid:
                    raise HubError(412, "PreconditionFailed", "a commit has happened since")
            elif key == "file":
                content = base64.b64decode(value["content"])
                if is_lfs(value["path"], len(content)) and content:
                    raise HubError(400, "BadRequest", f"{value['path']} must be sent through LFS")
                files[value["path"]] = StoredFile(content, is_lfs=False)
            elif key == "lfsFile":
                if value["oid"] not in self.hub.lfs_objects:
                    raise HubError(400, "BadRequest", f"{value['path']} was not uploaded before")
                content = self.hub.lfs_objects[value["oid"]]
                files[value["path"]] = StoredFile(content, is_lfs=True)
            elif key in ("deletedFile", "deletedFolder"):
                folder = value["path"].rstrip("/") + "/"
                gone = [name for name in files if name == value["path"] or name.startswith(folder)]
                if not gone:
                    message = f"A file with this name doesn't exist: {value['path']}"
                    raise HubError(404, "EntryNotFound", message)
                for name in gone:
                    del files[name]
            else:
                raise HubError(400, "BadRequest", f"the stand-in does not know {key}")
        commit = repository.commit(revision, title, files)
        url = f"{self.hub.endpoint}/{'' if kind == 'models' else kind + '/'}{repo_id}"
        self._answer(
            {
                "success": True,
                "commitOid": commit.oid,
                "commitUrl": f"{url}/commit/{commit.oid}",
                "hookOutput": "",
            }
        )

    def create_ref(self, kind: str, repo_id: str, what: str, revision: str):
        self._write_access(repo_id)
        repository = self._repository(kind, repo_id)
        request = json.loads(self.body or b"{}")
        # the address names a branch, and the body its start; for a tag, it is the other way round
        if what == "branch":
            name, start, names = revision, request.get("startingPoint", "main"), repository.branches
        else:
            name, start, names = request["tag"], revision, repository.tags
        if name in names:
            raise HubError(409, "Conflict", f"Reference already exists: {name}")
        names[name] = repository.at(start).oid
        self._answer({})

    def resolve(self, kind: str, repo_id: str, revision: str, path: str):
        commit = self._repository(kind, repo_id).at(revision)
        headers = {"X-Repo-Commit": commit.oid}
        if path not in commit.files:
            error = HubError(404, "EntryNotFound", f"{path} does not exist on {revision}")
            self._answer({"error": str(error)}, 404, headers, error)
            return
        file = commit.files[path]
        name = path.rsplit("/", 1)[-1]
        headers["Content-Disposition"] = f"inline; filename=\"{name}\"; filename*=UTF-8''{name}"
        if not file.is_lfs:
            self._send_content(file.content, {**headers, "ETag": f'"{file.git_oid}"'})
            return
        self.hub.lfs_objects[file.sha256] = file.content
        headers |= {
            "X-Linked-Size": str(len(file.content)),
            "X-Linked-ETag": f'"{file.sha256}"',
            "Location": f"{self.hub.content_endpoint}/lfs-objects/{file.sha256}",
        }
        self._answer({}, 302, headers)

    # helpers of the routes

    def _write_access(self, repo_id: str | None = None):
        given = self.headers.get("Authorization")
        if given != f"Bearer {TOKEN}":
            known = "Invalid credentials in Authorization header"
            raise HubError(401, "", "Invalid username or password." if given is None else known)
        if repo_id is not None and repo_id.split("/")[0] != USER:
            raise HubError(403, "", f"You don't have the rights to write to {repo_id}")

    def _repository(self, kind: str, repo_id: str) -> Repository:
        repository = self.hub.repositories.get((kind, repo_id))
        if repository is None or (
            repository.private and self.headers.get("Authorization") != f"Bearer {TOKEN}"
        ):
            raise HubError(404, "RepoNotFound", "Repository not found")
        return repository

    @staticmethod
    def _entries(commit: Commit, prefix: str) -> dict[str, dict]:
        """Return files and folders below a prefix, by path."""
        entries = {}
        for path, file in commit.files.items():
            if path.startswith(prefix):
                entries[path] = file.listing(path)
                for parent in list(Path(path).parents)[:-1]:
                    folder = parent.as_posix()
                    if folder.startswith(prefix):
                        oid = hashlib.sha1(f"{commit.oid}{folder}".encode()).hexdigest()
                        entries[folder] = {
                            "type": "directory",
                            "path": folder,
                            "oid": oid,
                            "size": 0,
                        }
        return entries

    def _read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        chunks = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(chunks)

    def _send_content(self, content: bytes, headers: dict[str, str]):
        status = 200
        headers = {**headers, "Accept-Ranges": "bytes", "Content-Type": "application/octet-stream"}
        wanted = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", ""))
        if wanted is not None:
            size = len(content)
            first = int(wanted[1]) if wanted[1] else max(size - int(wanted[2]), 0)
            last = min(int(wanted[2]), size - 1) if wanted[1] and wanted[2] else size - 1
            if first > last:
                raise HubError(416, "", f"Range not satisfiable: {wanted[0]} of {size}")
            status = 206
            headers["Content-Range"] = f"bytes {first}-{last}/{size}"
            content = content[first : last + 1]
        self._send(status, headers, content)

    def _answer(
        self,
        value: dict | list,
        status: int = 200,
        headers: dict[str, str] | None = None,
        error: HubError | None = None,
    ):
        headers = {"Content-Type": "application/json; charset=utf-8", **(headers or {})}
        if error is not None:
            headers["X-Error-Message"] = str(error)
            if error.code:
                headers["X-Error-Code"] = error.code
        self._send(status, headers, json.dumps(value).encode())

    def _send(self, status: int, headers: dict[str, str], content: bytes):
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *args):
        """Print nothing; `hub.requests` has the requests."""


@contextlib.contextmanager
def running_hub(port: int = 0) -> Iterator[HubStandIn]:
    """Run a Hub during the block.

    Args:
        port: Where to listen; 0 takes a free one.

    Yields:
        The Hub, empty.
    """
    hub = HubStandIn(port)
    thread = threading.Thread(target=hub.server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.server.shutdown()
        hub.server.server_close()
        thread.join()


@pytest.fixture
def hub() -> Iterator[HubStandIn]:
    """Empty Hub for one test; import the name into the test file to use it."""
    with running_hub() as running:
        yield running


def main():
    """Serve until interrupted."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument(
        "--dataset", nargs=2, action="append", default=[], metavar=("REPO_ID", "FOLDER")
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as home, running_hub(arguments.port) as hub:
        for repo_id, folder in arguments.dataset:
            hub.add_folder(repo_id, folder, "datasets")
        variables = hub.environment(home)
        print("export " + " ".join(f"{k}={v}" for k, v in variables.items()), flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            threading.Event().wait()


if __name__ == "__main__":
    main()

"""A Hub on the loopback, in memory: enough of its HTTP interface to create, upload, pin, download and reload models."""

import base64
import hashlib
import json
import re
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlparse

import yaml


LICENSES = {"apache-2.0", "mit", "other", "unknown", "gemma", "llama3.2"}


def card_errors(content):
    """What the Hub refuses in a card's front matter: unknown licenses, base models that are no ids, wrong types."""
    match = re.match(r"---\n(.*?)\n---\n", content, re.DOTALL)
    if match is None:
        return ["no front matter"]
    data, errors = yaml.safe_load(match[1]), []
    if data.get("license") not in LICENSES:
        errors.append(f"license must be one of {sorted(LICENSES)}, got {data.get('license')!r}")
    for name in ("tags", "datasets"):
        if name in data and not isinstance(data[name], list):
            errors.append(f"{name} must be an array")
    base = data.get("base_model")
    if base is not None and not re.fullmatch(r"[\w.-]+/[\w.-]+", str(base)):
        errors.append(f"base_model {base!r} is not a model id")
    if data.get("base_model_relation") not in (None, "finetune", "adapter", "merge", "quantized"):
        errors.append(f"base_model_relation {data['base_model_relation']!r} is unknown")
    for model in data.get("model-index", []):
        for result in model["results"]:
            if not {"task", "dataset", "metrics"} <= result.keys() or not {"type", "name"} <= result["dataset"].keys():
                errors.append(f"model-index has an incomplete result: {result}")
            errors += [f"metric without a value: {x}" for x in result["metrics"] if not isinstance(x["value"], float)]
    return errors


class Hub:
    """The state of a Hub: `repositories[name][revision]` are its files, `private` the names of the private ones."""

    def __init__(self):
        self.repositories, self.commits, self.blobs, self.private = {}, {}, {}, set()
        self.tokens = {"writer": "write", "reader": "read"}
        self.breaks = False  # the connection, in the middle of the upload of a large file
        self.requests = []

    def commit(self, name, revision, files):
        number = hashlib.sha1(f"{name} {len(self.commits)}".encode()).hexdigest()
        self.commits[number] = self.repositories[name][revision] = dict(files)
        return number

    def files(self, name, revision):
        repository = self.repositories.get(name)
        if repository is None:
            return None, None
        files = repository.get(revision, self.commits.get(revision))
        number = next((k for k, v in self.commits.items() if v is files), None) if files is not None else None
        return number, files


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_):
        pass

    def reply(self, status=200, content=None, headers=None):
        content = content if isinstance(content, bytes) else json.dumps(content or {}).encode()
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(content))} | (headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def refuse(self, status, code):
        self.reply(status, {"error": code}, {"X-Error-Code": code, "X-Error-Message": code})

    def body(self):
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        content = b""
        while size := int(self.rfile.readline(), 16):
            content += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return content

    def role(self):
        return self.hub.tokens.get(self.headers.get("Authorization", "").removeprefix("Bearer "))

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        path = unquote(urlparse(self.path).path)
        self.hub.requests.append((self.command, path))
        if path == "/api/whoami-v2":
            if self.role() is None:
                return self.refuse(401, "InvalidToken")
            token = {"displayName": "t", "role": self.role()}
            return self.reply(content={"type": "user", "name": "user", "orgs": [], "auth": {"accessToken": token}})
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/auth-check(/write)?", path):
            if match[1] not in self.hub.repositories:
                return self.refuse(404, "RepoNotFound")
            return self.reply() if match[1].startswith("user/") else self.refuse(403, "Forbidden")
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+)(?:/.*)?)?", path):
            number, files = self.hub.files(match[1], match[3] or "main")
            if files is None:
                return self.refuse(404, "RevisionNotFound" if match[1] in self.hub.repositories else "RepoNotFound")
            if match[2] == "tree":
                entries = [{"type": "file", "path": k, "size": len(v), "oid": sha1(v)} for k, v in files.items()]
                return self.reply(content=entries)
            siblings = [{"rfilename": name} for name in files]
            info = {"_id": "1", "id": match[1], "modelId": match[1], "sha": number, "siblings": siblings, "tags": []}
            return self.reply(content=info | {"private": match[1] in self.hub.private})
        if match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            number, files = self.hub.files(match[1], match[2])
            if files is None:
                return self.refuse(404, "RevisionNotFound" if match[1] in self.hub.repositories else "RepoNotFound")
            if match[3] not in files:
                return self.refuse(404, "EntryNotFound")
            content = files[match[3]]
            return self.reply(content=content, headers={"ETag": f'"{sha1(content)}"', "X-Repo-Commit": number})
        return self.refuse(404, "EntryNotFound")

    def do_POST(self):
        path, body = unquote(urlparse(self.path).path), self.body()
        self.hub.requests.append((self.command, path))
        if path == "/api/validate-yaml":
            errors = card_errors(json.loads(body)["content"])
            return self.reply(400 if errors else 200, {"errors": errors, "warnings": []})
        if self.role() != "write":
            return self.refuse(403, "Forbidden")
        if path == "/api/repos/create":
            settings = json.loads(body)
            name = f"{settings.get('organization') or 'user'}/{settings['name']}"
            url = f"http://{self.headers['Host']}/{name}"
            if name in self.hub.repositories:
                return self.reply(409, {"error": "exists", "url": url})
            self.hub.repositories[name] = {}
            self.hub.commit(name, "main", {})
            self.hub.private |= {name} if settings.get("private") or settings.get("visibility") == "private" else set()
            return self.reply(content={"url": url, "name": name, "id": "1"})
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/preupload/(.+)", path):
            files = [
                {"path": x["path"], "shouldIgnore": False,
                 "uploadMode": "lfs" if x["path"].endswith((".safetensors", ".png")) else "regular"}
                for x in json.loads(body)["files"]
            ]  # fmt: skip
            return self.reply(content={"files": files})
        if path.endswith(".git/info/lfs/objects/batch"):
            objects = []
            for x in json.loads(body)["objects"]:
                actions = {"upload": {"href": f"http://{self.headers['Host']}/lfs/{x['oid']}"}}
                objects.append(x | ({} if x["oid"] in self.hub.blobs else {"actions": actions}))
            return self.reply(content={"transfer": "basic", "objects": objects})
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/commit/(.+)", path):
            return self.write_commit(match[1], match[2], body)
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/branch/(.+)", path):
            self.hub.repositories[match[1]].setdefault(match[2], self.hub.repositories[match[1]]["main"])
            return self.reply()
        return self.refuse(404, "EntryNotFound")

    def write_commit(self, name, revision, body):
        files = dict(self.hub.files(name, revision)[1])
        for line in body.splitlines():
            kind, value = (json.loads(line)[key] for key in ("key", "value"))
            if kind == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif kind == "lfsFile":
                files[value["path"]] = self.hub.blobs[value["oid"]]
            elif kind == "deletedFile":
                files.pop(value["path"])
        if errors := card_errors(files["README.md"].decode()):
            return self.reply(400, {"error": f"README.md: {errors}"})
        number = self.hub.commit(name, revision, files)
        url = f"http://{self.headers['Host']}/{name}/commit/{number}"
        return self.reply(content={"success": True, "commitOid": number, "commitUrl": url, "hookOutput": ""})

    def do_PUT(self):
        if self.hub.breaks:
            self.rfile.read(10)
            self.close_connection = True
            return self.connection.close()
        self.hub.blobs[self.path.rpartition("/")[2]] = self.body()
        return self.reply(headers={"ETag": '"x"'})


def sha1(content):
    return hashlib.sha1(content).hexdigest()


@contextmanager
def running_hub():
    """Yields a Hub and its address."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("HubHandler", (Handler,), {"hub": hub}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield hub, f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()

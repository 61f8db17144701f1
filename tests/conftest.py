"""What the tests of whole runs share: projects, and upstreams made up for them.

    lead      leads; its Dockerfile names engine's tag and trainer's commit, and it keeps a patch
              for engine, which is a layer of that fork
    engine    follows a tag
    trainer   follows a commit

Each pins its first release (lead v1.0); upstream has the next one (lead v1.1) and a pre-release.
"""

import contextlib
import hashlib
import http.server
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import threading
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

# Whoever runs the tests has a configuration of git; the tests have this one. It must be there
# before the first import of rebase.git, which takes the user's environment.
_HOME = tempfile.TemporaryDirectory(prefix="forkman-home-")
for _name in [name for name in os.environ if name.startswith(("GIT_", "XDG_"))]:
    del os.environ[_name]
os.environ |= {"HOME": _HOME.name, "GIT_CONFIG_NOSYSTEM": "1", "COLUMNS": "300"}
os.environ |= {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
Path(_HOME.name, ".gitconfig").write_text(
    "[user]\nname = Ann Maintainer\nemail = maintainer@example.org\n"
    "[init]\ndefaultBranch = main\ntemplateDir =\n[advice]\ndetachedHead = false\n"
)

Files = Mapping[str, str | bytes | None]


def lines(edits: Mapping[int, str | None] | None = None) -> str:
    """A file of thirty lines, some of them edited; None takes one away."""
    text = {number: f"line {number}" for number in range(1, 31)} | dict(edits or {})
    return "".join(f"{line}\n" for line in text.values() if line is not None)


def dockerfile(engine: str, trainer: str) -> str:
    return f"FROM scratch\nARG ENGINE={engine}\nARG TRAINER={trainer}\nRUN git apply engine.patch\n"


# A recipe for a file greet.py that calls greet().
RECIPE = '''"""Every greeting asks the runtime."""

from rebase.recipe import Code, Recipe, Rule, replace

recipe = Recipe(
    subject="Greet from the runtime",
    by="NPU forks <npu-forks@example.com>",
    date="2026-08-01T00:00:00+00:00",
    why="A test.",
    how="One call for another.",
    until="Never.",
    rules=(
        Rule(
            find=Code("greet($WHO)"),
            edit=(replace("slime_npu.greet($WHO)"),),
            expect=("greet.py",),
        ),
    ),
)
'''


class Repo:
    """A repository with a worktree."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def git(self, *args: str, ok: tuple[int, ...] = (0,)) -> str:
        done = subprocess.run(["git", *args], cwd=self.path, capture_output=True)
        assert done.returncode in ok, done.stderr.decode()
        return done.stdout.decode().strip()

    def write(self, files: Files) -> None:
        for name, content in files.items():
            path = self.path / name
            if content is None:
                path.unlink()
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content.encode() if isinstance(content, str) else content)

    def read(self, name: str) -> str:
        return (self.path / name).read_text()

    def commit(self, files: Files, message: str, tag: str | None = None) -> str:
        self.write(files)
        self.git("add", "--all")
        self.git("commit", "--quiet", "--allow-empty", "--message", message)
        if tag:
            self.git("tag", tag)
        return self.git("rev-parse", "HEAD")

    @classmethod
    def new(cls, path: Path) -> "Repo":
        path.mkdir(parents=True)
        made = cls(path)
        made.git("init", "--quiet")
        return made


@dataclass(frozen=True)
class Done:
    """How a run of forkman ended. out: its standard output, err: the rest of what it said."""

    code: int
    out: str
    err: str

    @property
    def said(self) -> str:
        return self.out + self.err


class Project:
    """A project of forkman in `folder`, with its upstreams beside it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.root = folder / "project"

    # -- the world -------------------------------------------------------------------------------

    def upstream(self, fork: str) -> Repo:
        return Repo(self.folder / "upstreams" / fork)

    def branch(self, fork: str) -> Repo:
        """Where the patches of a fork's queue were made: its branch, as a person keeps it."""
        return Repo(self.folder / "branches" / fork)

    def add(self, fork: str, pin: str, more: str = "", layer: bytes = b"") -> None:
        """Add a fork that stands on the tag `pin` of its upstream, with an empty queue."""
        upstream = self.upstream(fork)
        queue = self.root / "forks" / fork
        queue.mkdir(parents=True)
        (queue / "series").write_text("")
        (self.root / "manifests").mkdir(exist_ok=True)
        self.manifest_path(fork).write_text(
            f"# {fork}, as a person writes it\n"
            "[upstream]\n"
            f'url = "../upstreams/{fork}"\n'
            "releases = { tags = 'v(?P<version>.+)' }  # what counts as a release\n"
            f"{more}\n"
            f"[pin]\n"
            f'commit = "{upstream.git("rev-parse", pin)}"\n'
            f'tag = "{pin}"  # the release\n'
            f'[queue]\npath = "forks/{fork}"\n'
            f'[export]\nname = "{fork}.patch"\n'
        )
        branch = self.branch(fork)
        branch.path.parent.mkdir(exist_ok=True)
        upstream.git("clone", "--quiet", str(upstream.path), str(branch.path))
        branch.git("checkout", "--quiet", "-b", "npu", pin)
        if layer:
            branch.write({".layer": layer})
            branch.git("apply", "--index", ".layer")
            branch.git("commit", "--quiet", "--message", "layer")
            branch.write({".layer": None})

    def change(self, fork: str, subject: str, files: Files) -> str:
        """Commit on a fork's branch, and append that to its queue as git writes it."""
        branch = self.branch(fork)
        branch.commit(files, subject)
        name = subject.partition("\n")[0].lower().replace(" ", "-") + ".patch"
        self.queue(fork, name, branch.git("format-patch", "-1", "--stdout") + "\n")
        return name

    def queue(self, fork: str, name: str, content: str) -> None:
        folder = self.root / "forks" / fork
        (folder / name).write_text(content)
        with (folder / "series").open("a") as series:
            series.write(f"{name}\n")

    def queue_as_branch(self, fork: str) -> Repo:
        """Keep a fork's queue as the branch npu of a repository of its own."""
        repo = self.folder / "forks" / f"{fork}.git"
        self.branch(fork).git("clone", "--quiet", "--bare", ".", str(repo))
        shutil.rmtree(self.root / "forks" / fork)
        url = f'url = "../forks/{fork}.git"\nref = "npu"'
        self.edit_manifest(fork, f'path = "forks/{fork}"', url)
        return Repo(repo)

    # -- running ---------------------------------------------------------------------------------

    def forkman(self, *args: str, cwd: Path | None = None) -> Done:
        """Run forkman in this process, as its command does."""
        from rebase import cli

        out, err, code = io.StringIO(), io.StringIO(), 0
        argv, here = sys.argv, Path.cwd()
        sys.argv = ["forkman", *args]
        os.chdir(cwd or self.root)
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                cli.main()
        except SystemExit as exit:
            assert exit.code is None or isinstance(exit.code, int)
            code = exit.code or 0
        finally:
            sys.argv = argv
            os.chdir(here)
        return Done(code, out.getvalue(), err.getvalue())

    def process(self, *args: str, env: Mapping[str, str] | None = None) -> Done:
        """Run forkman in a process of its own."""
        done = subprocess.run(
            [sys.executable, "-m", "rebase.cli", *args],
            cwd=self.root, capture_output=True, env=os.environ | dict(env or {}),
        )  # fmt: skip
        return Done(done.returncode, done.stdout.decode(), done.stderr.decode())

    def ok(self, *args: str) -> Done:
        """Run forkman, which must succeed."""
        done = self.forkman(*args)
        assert done.code == 0, done.said
        return done

    def report(self, *args: str) -> dict[str, Any]:
        """The JSON report of a run, with `forks` by their names."""
        done = self.forkman(*args, "--json")
        assert done.out.startswith("{"), done.said
        found: dict[str, Any] = json.loads(done.out)
        found["forks"] = {fork["fork"]: fork for fork in found["forks"]}
        return found

    # -- what came of it -------------------------------------------------------------------------

    def manifest_path(self, fork: str) -> Path:
        return self.root / "manifests" / f"{fork}.toml"

    def manifest(self, fork: str) -> dict[str, Any]:
        return tomllib.loads(self.manifest_path(fork).read_text())

    def edit_manifest(self, fork: str, old: str, new: str) -> None:
        text = self.manifest_path(fork).read_text()
        assert old in text
        self.manifest_path(fork).write_text(text.replace(old, new))

    def pin(self, fork: str) -> str:
        """The tag of a fork's pin, or else its commit."""
        pin: dict[str, str] = self.manifest(fork)["pin"]
        return pin.get("tag") or pin["commit"]

    def pins(self) -> dict[str, str]:
        return {path.stem: self.pin(path.stem) for path in self.root.glob("forks/*")}

    def series(self, fork: str) -> list[str]:
        return (self.root / "forks" / fork / "series").read_text().split()

    def patch(self, fork: str, name: str) -> str:
        return (self.root / "forks" / fork / name).read_text()

    def export(self, fork: str) -> str:
        return (self.root / "exports" / f"{fork}.patch").read_text()

    def files(self) -> dict[str, bytes]:
        """Every file of the project but what forkman keeps for itself."""
        return {
            str(path.relative_to(self.root)): path.read_bytes()
            for path in sorted(self.root.rglob("*"))
            if path.is_file() and ".forkman" not in path.relative_to(self.root).parts
        }

    def mirror(self, fork: str) -> Repo:
        return Repo(self.root / ".forkman" / "mirrors" / f"{fork}.git")

    def built(self, fork: str, name: str) -> str:
        """A file as a downstream image has it: the pin with its layers and the export applied."""
        pin = self.manifest(fork)["pin"]["commit"]
        with tempfile.TemporaryDirectory() as scratch:
            checkout = Repo.new(Path(scratch, fork))
            checkout.git("fetch", "--quiet", str(self.upstream(fork).path), pin)
            checkout.git("checkout", "--quiet", "--detach", pin)
            for layer in self.manifest(fork).get("layers", []):
                for patch in layer["patches"]:
                    raw = self.upstream(layer["fork"]).git("cat-file", "blob", patch["blob"])
                    checkout.write({".git/layer": raw + "\n"})
                    checkout.git("apply", ".git/layer")
            checkout.git("apply", str(self.root / "exports" / f"{fork}.patch"))
            return checkout.read(name)


def layer_patch(upstream: Repo, files: Files) -> bytes:
    """A patch for `upstream`, as another project keeps it in its tree."""
    upstream.write(files)
    patch = upstream.git("diff") + "\n"
    upstream.git("checkout", "--quiet", ".")
    return patch.encode()


def make_stack(folder: Path) -> None:
    project = Project(folder)
    engine = Repo.new(folder / "upstreams" / "engine")
    engine.commit({"serve.py": lines(), "README": "engine\n"}, "Serve", "v0.5")
    old_layer = layer_patch(engine, {"serve.py": lines({10: "lead 10"})})
    engine.commit({"serve.py": lines({28: "upstream 28"})}, "Serve faster (#7)", "v0.6")
    new_layer = layer_patch(engine, {"serve.py": lines({10: "lead 10 again", 28: "upstream 28"})})

    trainer = Repo.new(folder / "upstreams" / "trainer")
    first = trainer.commit({"train.py": lines()}, "Train", "v0.1")
    taken = {12: "ours 12", 29: "upstream 29"}
    second = trainer.commit({"train.py": lines(taken)}, "Twelve, from the NPU people (#12)")

    lead = Repo.new(folder / "upstreams" / "lead")
    lead.commit(
        {"app.py": lines(), "Dockerfile": dockerfile("v0.5", first), "engine.patch": old_layer},
        "Lead", "v1.0",
    )  # fmt: skip
    lead.commit(
        {
            "app.py": lines({25: "upstream 25"}),
            "Dockerfile": dockerfile("v0.6", second),
            "engine.patch": new_layer,
        },
        "Follow the new engine (#20)", "v1.1",
    )  # fmt: skip
    lead.commit({"app.py": lines({25: "upstream 25", 26: "soon"})}, "Soon", "v2.0rc1")

    project.add("lead", "v1.0")
    project.change("lead", "Rank by device", {"app.py": lines({5: "ours 5"})})
    project.change("lead", "Add the runtime", {"npu.py": "import slime_npu\n"})
    blob = lead.git("rev-parse", "v1.0:engine.patch")
    project.add(
        "engine", "v0.5",
        "[follow]\nfork = \"lead\"\nfile = \"Dockerfile\"\npattern = '^ARG ENGINE=(.+)$'\n"
        '[[layers]]\nfork = "lead"\npath = "engine.patch"\n'
        f'patches = [{{ path = "engine.patch", blob = "{blob}" }}]',
        old_layer,
    )  # fmt: skip
    project.change("engine", "Serve on NPU", {"serve.py": lines({10: "lead 10", 18: "ours 18"})})
    project.add(
        "trainer", "v0.1",
        "[follow]\nfork = \"lead\"\nfile = \"Dockerfile\"\npattern = '^ARG TRAINER=(.+)$'",
    )  # fmt: skip
    project.change("trainer", "Twelve", {"train.py": lines({12: "ours 12"})})
    project.change("trainer", "Four", {"train.py": lines({12: "ours 12", 4: "ours 4"})})
    stack = project.root / "manifests" / "stack.toml"
    stack.write_text('leader = "lead"\n\n[runtime]\ncann = "8.5"\n')


@pytest.fixture(scope="session")
def _stack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stack")
    make_stack(folder)
    return folder


@pytest.fixture
def project(_stack: Path, tmp_path: Path) -> Project:
    """The three forks, never fetched."""
    shutil.copytree(_stack, tmp_path, dirs_exist_ok=True, symlinks=True)
    return Project(tmp_path)


@pytest.fixture
def solo(project: Project) -> Project:
    """The leading fork alone."""
    for fork in ("engine", "trainer"):
        project.manifest_path(fork).unlink()
        shutil.rmtree(project.root / "forks" / fork)
    return project


class Host:
    """A machine on the network: git repositories under /git, and a package index under /simple.

    folder: what it serves: `git/<name>` repositories, `<package>/<file>` archives.
    cut_after: bytes of an answer's body after which its line goes dead; None for never.
    """

    def __init__(self, folder: Path, port: int) -> None:
        self.folder = folder
        self.address = f"http://127.0.0.1:{port}"
        self.cut_after: int | None = None

    def publish(self, package: str, version: str, files: Files) -> None:
        """Put a source archive of a package on the index."""
        path = self.folder / package / f"{package}-{version}.tar.gz"
        path.parent.mkdir(exist_ok=True)
        files = {"PKG-INFO": f"Name: {package}\nVersion: {version}\n", **files}
        with tarfile.open(path, "w:gz") as archive:
            for name, content in files.items():
                assert content is not None
                raw = content.encode() if isinstance(content, str) else content
                member = tarfile.TarInfo(f"{package}-{version}/{name}")
                member.size, member.mtime = len(raw), 1_700_000_000
                archive.addfile(member, io.BytesIO(raw))

    def page(self, package: str) -> bytes:
        links = [
            f'<a href="/{package}/{path.name}#sha256='
            f'{hashlib.sha256(path.read_bytes()).hexdigest()}">{path.name}</a>'
            for path in sorted((self.folder / package).iterdir())
        ]
        return f"<!DOCTYPE html><html><body>{' '.join(links)}</body></html>".encode()


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    folder = tmp_path / "host"
    folder.mkdir()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            parts = self.path.strip("/").split("/")
            if parts[0] == "git":
                self.do_git()
            elif parts[0] == "simple" and (folder / parts[-1]).is_dir():
                self.answer({"Content-Type": "text/html"}, served.page(parts[-1]))
            elif (path := folder / self.path.strip("/")).is_file():
                self.answer({"Content-Type": "application/gzip"}, path.read_bytes())
            else:
                self.send_error(404)

        def do_git(self) -> None:
            path, _, query = self.path.partition("?")
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            done = subprocess.run(
                ["git", "-c", "uploadpack.allowFilter=true", "http-backend"],
                input=body, capture_output=True, check=True,
                env=os.environ | {
                    "GIT_PROJECT_ROOT": str(folder),
                    "GIT_HTTP_EXPORT_ALL": "1",
                    "GIT_PROTOCOL": self.headers.get("Git-Protocol", ""),
                    "PATH_INFO": path,
                    "QUERY_STRING": query,
                    "REQUEST_METHOD": self.command,
                    "CONTENT_TYPE": self.headers.get("Content-Type", ""),
                    "HTTP_CONTENT_ENCODING": self.headers.get("Content-Encoding", ""),
                },
            )  # fmt: skip
            head, _, answer = done.stdout.partition(b"\r\n\r\n")
            self.answer(dict(line.split(": ", 1) for line in head.decode().splitlines()), answer)

        do_POST = do_git

        def answer(self, headers: Mapping[str, str], body: bytes) -> None:
            status = headers.get("Status", "200").partition(" ")[0]
            self.send_response(int(status))
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body[: served.cut_after])

        def log_message(self, format: str, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        served = Host(folder, server.server_address[1])
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield served
        server.shutdown()
        thread.join()

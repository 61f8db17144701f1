"""Release archives: verified, harmless, and the same history on every machine."""

import gzip
import hashlib
import io
import json
import random
import resource
import stat
import tarfile
import threading
import zipfile
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from rebase import archives, refs
from rebase.errors import EnvironmentFault, UsageError
from rebase.git import Git, ObjectId

TAG = "core_v{version}"
TIME = 1_700_000_000

Update = Callable[..., archives.Updated]


def entry(
    name: str, content: bytes | str = "", *, mode: int = 0o644, link: str = "",
    kind: bytes = tarfile.REGTYPE, time: int = TIME,
) -> tuple[tarfile.TarInfo, bytes]:  # fmt: skip
    """A member of a tar archive."""
    data = content.encode() if isinstance(content, str) else content
    info = tarfile.TarInfo(name)
    info.size, info.mode, info.linkname, info.type, info.mtime = len(data), mode, link, kind, time
    return info, data


def tar_gz(members: Sequence[tuple[tarfile.TarInfo, bytes]]) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w:gz", format=tarfile.PAX_FORMAT) as tar:
        for info, data in members:
            tar.addfile(info, io.BytesIO(data) if info.isreg() else None)
    return made.getvalue()


def sdist(version: str, content: str = "", time: int = TIME) -> bytes:
    """An archive as setuptools makes it."""
    top = f"megatron_core-{version}"
    return tar_gz(
        [
            entry(top, mode=0o755, kind=tarfile.DIRTYPE),
            entry(f"{top}/megatron/core/jit.py", content or f"# {version}\n", time=time),
            entry(f"{top}/run.sh", "#!/bin/sh\n", mode=0o755),
            entry(f"{top}/PKG-INFO", f"Version: {version}\n"),
            entry(f"{top}/megatron_core.egg-info/SOURCES.txt", "run.sh\n"),
            entry(f"{top}/setup.cfg", "[egg_info]\ntag_build = \ntag_date = 0\n\n"),
        ]
    )


class Index:
    """A package index on the loopback (PEP 503 and 691) with one package, megatron-core."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.served: dict[str, bytes] = {}  # other bytes than the page promises
        self.yanked: set[str] = set()
        self.without_hash: set[str] = set()
        self.html = False
        self.page: bytes | None = None  # something that is no page of an index
        self.failing = 0  # how many requests are answered with status 500 first
        self.cutting = 0  # how many downloads end in the middle first
        self.asked: list[str] = []
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/simple/"

    def add(self, version: str, archive: bytes | None = None, suffix: str = ".tar.gz") -> None:
        self.files[f"megatron_core-{version}{suffix}"] = archive or sdist(version)

    def project(self) -> tuple[str, bytes]:
        if self.page is not None:
            return "text/html", self.page
        if self.html:
            links = "".join(
                f'<a href="/files/{name}'
                + ("" if name in self.without_hash else f"#sha256={self.sha256(name)}")
                + ('" data-yanked="broken' if name in self.yanked else "")
                + f'">{name}</a>\n'
                for name in self.files
            )
            return "text/html", f"<!DOCTYPE html><html><body>{links}</body></html>".encode()
        files = [
            {
                "filename": name,
                "url": f"/files/{name}",
                "hashes": {} if name in self.without_hash else {"sha256": self.sha256(name)},
                "yanked": name in self.yanked,
                "upload-time": "2026-02-26T10:42:22.462716Z",
                "size": len(data),
            }
            for name, data in self.files.items()
        ]
        page = {
            "meta": {"api-version": "1.1"}, "name": "megatron-core", "files": files,
            "versions": [],
        }  # fmt: skip
        return "application/vnd.pypi.simple.v1+json", json.dumps(page).encode()

    def sha256(self, name: str) -> str:
        return hashlib.sha256(self.files[name]).hexdigest()


@pytest.fixture
def index() -> Iterator[Index]:
    box = Index()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            box.asked.append(self.path)
            status, kind, body, cut = 200, "application/octet-stream", b"", False
            name = self.path.rpartition("/")[2]
            if box.failing:
                box.failing -= 1
                status = 500
            elif self.path == "/simple/megatron-core/":
                kind, body = box.project()
            elif self.path.startswith("/files/") and name in box.files:
                body = box.served.get(name, box.files[name])
                cut = box.cutting > 0
                box.cutting -= cut
            else:
                status = 404
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body[: len(body) // 2] if cut else body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        box.port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield box
        server.shutdown()
        thread.join()


@pytest.fixture
def mirror(tmp_path: Path) -> Path:
    return tmp_path / "mirrors" / "megatron.git"


@pytest.fixture
def update(index: Index, mirror: Path, tmp_path: Path) -> Update:
    def call(**changed: object) -> archives.Updated:
        options = {"index": index.url, "cache": tmp_path / "cache"} | changed
        tag = str(options.pop("tag", TAG))
        at = options.pop("mirror", mirror)
        return archives.update(at, "megatron-core", tag, **options)  # type: ignore[arg-type]

    return call


def tree(mirror: Path, revision: str) -> dict[str, str]:
    """Path → mode and content of a commit's files."""
    git = Git(mirror)
    found = {}
    for line in git.run("ls-tree", "-r", "-z", revision).decode().split("\0")[:-1]:
        about, path = line.split("\t")
        mode, _, id = about.split()
        found[path] = f"{mode} {git.run('cat-file', 'blob', id).decode()}"
    return found


# -- what the index has --------------------------------------------------------------------------


@pytest.mark.parametrize("html", [False, True])
def test_releases_come_in_the_order_of_pep_440(index: Index, html: bool) -> None:
    index.html = html
    for version in ("0.10.0", "0.9.0", "0.10.0rc7", "0.10.0.post1"):
        index.add(version)
    index.add("0.9.1", suffix=".zip")
    index.files["megatron_core-0.11.0-py3-none-any.whl"] = b"no source"
    index.files["megatron_core-junk!.tar.gz"] = b"no version"
    index.yanked.add("megatron_core-0.9.0.tar.gz")
    index.without_hash.add("megatron_core-0.9.1.zip")

    found = archives.available("megatron-core", index.url)

    order = ["0.9.0", "0.9.1", "0.10.0rc7", "0.10.0", "0.10.0.post1"]
    assert [release.version for release in found] == order
    assert [release.yanked for release in found] == [True, False, False, False, False]
    assert found[1].sha256 is None
    assert found[0] == archives.Release(
        version="0.9.0",
        filename="megatron_core-0.9.0.tar.gz",
        url=f"http://127.0.0.1:{index.port}/files/megatron_core-0.9.0.tar.gz",
        sha256=index.sha256("megatron_core-0.9.0.tar.gz"),
        uploaded=None if html else datetime(2026, 2, 26, 10, 42, 22, 462716, tzinfo=UTC),
        yanked=True,
    )


def test_pips_variable_names_the_index(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    index.add("0.16.0")
    monkeypatch.setenv("PIP_INDEX_URL", index.url.rstrip("/"))
    assert [one.version for one in archives.available("megatron-core")] == ["0.16.0"]


def test_an_unknown_package_is_named(index: Index) -> None:
    with pytest.raises(UsageError, match="has no package mindspeed"):
        archives.available("mindspeed", index.url)


def test_a_package_without_source_is_named(index: Index) -> None:
    index.files["megatron_core-0.11.0-py3-none-any.whl"] = b"no source"
    with pytest.raises(UsageError, match="has no source archives of megatron-core"):
        archives.available("megatron-core", index.url)


def test_a_page_that_is_no_index_is_said_to_be_none(index: Index) -> None:
    index.page = b"<html><body>Please log in to the wifi</body></html>"
    with pytest.raises(UsageError, match="has no source archives"):
        archives.available("megatron-core", index.url)


@pytest.mark.parametrize("bad", ["file:///x", "/x", "-x", "ftp://x/", "https://\n", "http://"])
def test_an_index_that_is_no_web_address_is_refused(bad: str) -> None:
    with pytest.raises(UsageError, match="no http or https address"):
        archives.available("megatron-core", bad)


@pytest.mark.parametrize("bad", ["", "../x", "-x", "a b", "a/b", "a\n", "x?y", "[npu]"])
def test_a_name_that_is_no_packages_is_refused(index: Index, bad: str) -> None:
    with pytest.raises(UsageError, match="is no name of a package"):
        archives.available(bad, index.url)
    assert not index.asked


# -- the history ---------------------------------------------------------------------------------


def test_each_release_becomes_a_commit_and_a_tag(
    index: Index, update: Update, mirror: Path
) -> None:
    index.add("0.10.0")
    index.add("0.9.0")

    assert update().new_tags == ("core_v0.9.0", "core_v0.10.0")

    assert list(refs.tags(mirror)) == ["core_v0.10.0", "core_v0.9.0"]
    assert refs.branches(mirror) == {"archives": refs.tags(mirror)["core_v0.10.0"]}
    assert tree(mirror, "core_v0.9.0") == {
        "megatron/core/jit.py": "100644 # 0.9.0\n",
        "run.sh": "100755 #!/bin/sh\n",
    }


def test_a_commit_says_where_it_comes_from_and_has_the_archives_date(
    index: Index, update: Update, mirror: Path
) -> None:
    index.add("0.9.0", sdist("0.9.0", time=TIME + 5))
    update()
    assert Git(mirror).text("cat-file", "commit", "core_v0.9.0").partition("\n")[2] == (
        f"author forkman <> {TIME + 5} +0000\n"
        f"committer forkman <> {TIME + 5} +0000\n"
        "\n"
        "megatron-core 0.9.0\n"
        "\n"
        "Archive: megatron_core-0.9.0.tar.gz\n"
        f"SHA-256: {index.sha256('megatron_core-0.9.0.tar.gz')}"
    )


def test_ids_are_the_same_whatever_else_was_there_at_the_time(
    index: Index, update: Update, mirror: Path, tmp_path: Path
) -> None:
    for version in ("0.15.2", "0.16.0"):
        index.add(version)
    update()
    before = refs.tags(mirror)
    index.add("0.15.3")  # an older series' release, published later
    index.yanked.add("megatron_core-0.15.2.tar.gz")
    update()
    late = refs.tags(mirror)
    assert before.items() < late.items()
    assert refs.branches(mirror) == {"archives": late["core_v0.16.0"]}

    index.html = True  # an index that does not give the dates
    fresh = tmp_path / "fresh.git"
    update(mirror=fresh, cache=tmp_path / "other cache")
    assert refs.tags(fresh).items() < late.items()
    one = tmp_path / "one.git"
    update(mirror=one, versions=["0.16.0"])
    assert refs.tags(one) == {"core_v0.16.0": late["core_v0.16.0"]}


def test_what_is_there_is_not_fetched_again(index: Index, update: Update, mirror: Path) -> None:
    index.add("0.9.0")
    update()
    index.asked.clear()
    assert update().new_tags == ()
    assert index.asked == ["/simple/megatron-core/"]


def test_the_cache_serves_a_new_mirror(index: Index, update: Update, tmp_path: Path) -> None:
    index.add("0.9.0")
    update()
    index.asked.clear()
    update(mirror=tmp_path / "new.git")
    assert index.asked == ["/simple/megatron-core/"]
    [cached] = (tmp_path / "cache").iterdir()
    assert cached.name == index.sha256("megatron_core-0.9.0.tar.gz")


def test_a_damaged_cache_is_not_trusted(index: Index, update: Update, tmp_path: Path) -> None:
    index.add("0.9.0")
    update()
    [cached] = (tmp_path / "cache").iterdir()
    cached.write_bytes(b"damaged")
    update(mirror=tmp_path / "new.git")
    assert cached.read_bytes() == index.files["megatron_core-0.9.0.tar.gz"]


def test_prereleases_come_when_asked_for(index: Index, update: Update) -> None:
    for version in ("0.9.0", "0.10.0rc7", "0.10.0rc0.dev1"):
        index.add(version)
    assert update().new_tags == ("core_v0.9.0",)
    assert update(versions=["0.10.0-RC7"]).new_tags == ("core_v0.10.0rc7",)


def test_yanked_releases_are_skipped_and_named_unless_asked_for(
    index: Index, update: Update
) -> None:
    index.add("0.9.0")
    index.add("0.9.1")
    index.yanked.add("megatron_core-0.9.1.tar.gz")
    done = update()
    assert (done.new_tags, done.skipped) == (
        ("core_v0.9.0",),
        ("megatron-core 0.9.1 was yanked.",),
    )
    done = update(versions=["0.9.1"])
    assert (done.new_tags, done.skipped) == (
        ("core_v0.9.1",),
        ("megatron-core 0.9.1 was yanked, and taken.",),
    )


def test_an_unknown_version_is_named_with_its_neighbours(
    index: Index, update: Update, mirror: Path
) -> None:
    for version in ("0.9.0", "0.9.1", "0.10.0", "0.11.0", "0.12.0"):
        index.add(version)
    for wrong, near in (
        ("0.9.2", "0.9.0, 0.9.1, 0.10.0, 0.11.0"),
        ("0.1", "0.9.0, 0.9.1"),
        ("9", "0.11.0, 0.12.0"),
        ("main", "0.10.0, 0.11.0, 0.12.0"),
    ):
        with pytest.raises(
            UsageError, match=f"no source archive of megatron-core {wrong}"
        ) as raised:
            update(versions=["0.9.0", wrong])
        assert raised.value.todo == f"Near it are {near}."
    assert not mirror.exists()


def test_an_archive_without_a_hash_is_named_and_not_used(index: Index, update: Update) -> None:
    index.add("0.9.0")
    index.add("0.9.1")
    index.without_hash.add("megatron_core-0.9.1.tar.gz")
    done = update()
    assert done.new_tags == ("core_v0.9.0",)
    assert done.skipped == (
        "megatron_core-0.9.1.tar.gz has no SHA-256 on the index: it cannot be verified.",
    )
    assert "/files/megatron_core-0.9.1.tar.gz" not in index.asked


def test_a_release_published_again_does_not_move_its_tag(
    index: Index, update: Update, mirror: Path
) -> None:
    index.add("0.9.0")
    update()
    before = refs.tags(mirror)
    index.add("0.9.0", sdist("0.9.0", "# other\n"))
    done = update()
    assert done.new_tags == ()
    assert "another archive on the index than the one its tag was made from" in done.skipped[0]
    assert refs.tags(mirror) == before


def test_archives_of_a_folder_go_where_upstream_has_it(
    index: Index, update: Update, mirror: Path
) -> None:
    index.add("0.9.0")
    update(prefix="python/src")
    assert set(tree(mirror, "core_v0.9.0")) == {
        "python/src/megatron/core/jit.py",
        "python/src/run.sh",
    }


def test_a_setup_cfg_of_upstreams_own_stays(index: Index, update: Update, mirror: Path) -> None:
    index.add(
        "1.0", tar_gz([entry("x-1.0/setup.cfg", "[flake8]\n"), entry("x-1.0/a/PKG-INFO", "theirs")])
    )
    update()
    assert set(tree(mirror, "core_v1.0")) == {"setup.cfg", "a/PKG-INFO"}


def test_a_zip_gives_the_same_tree_as_a_tar(index: Index, update: Update, mirror: Path) -> None:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as opened:
        for name, content, mode in (
            ("x-1.0/", "", stat.S_IFDIR | 0o755),
            ("x-1.0/a/code.py", "code\n", stat.S_IFREG | 0o644),
            ("x-1.0/run.sh", "#!\n", stat.S_IFREG | 0o755),
            ("x-1.0/link", "a/code.py", stat.S_IFLNK | 0o777),
            ("x-1.0/PKG-INFO", "Version: 1.0", stat.S_IFREG | 0o644),
        ):
            info = zipfile.ZipInfo(name, (2026, 2, 26, 10, 42, 22))
            info.external_attr = mode << 16
            opened.writestr(info, content)
    index.add("1.0", made.getvalue(), ".zip")
    index.add(
        "1.1",
        tar_gz(
            [
                entry("./x-1.1/a/code.py", "code\n"),
                entry("x-1.1/run.sh", "#!\n", mode=0o755),
                entry("x-1.1/link", link="a/code.py", kind=tarfile.SYMTYPE),
                entry("x-1.1/PKG-INFO", "Version: 1.1"),
            ]
        ),
    )
    update()
    assert tree(mirror, "core_v1.0") == {
        "a/code.py": "100644 code\n",
        "link": "120000 a/code.py",
        "run.sh": "100755 #!\n",
    }
    trees = Git(mirror).text("rev-parse", "core_v1.0^{tree}", "core_v1.1^{tree}").split()
    assert trees[0] == trees[1]
    assert " 1772102542 +0000" in Git(mirror).text("cat-file", "commit", "core_v1.0")


def test_a_hard_link_is_a_copy(index: Index, update: Update, mirror: Path) -> None:
    index.add(
        "1.0",
        tar_gz([entry("x/a", "same", mode=0o755), entry("x/b", link="x/a", kind=tarfile.LNKTYPE)]),
    )
    update()
    assert tree(mirror, "core_v1.0") == {"a": "100755 same", "b": "100755 same"}


@pytest.mark.parametrize("time", ["-5", "1e300", "nan", "inf", "99999999999", "1700000000.9"])
def test_no_date_in_an_archive_breaks_git(
    index: Index, update: Update, mirror: Path, time: str
) -> None:
    info, data = entry("x/a", "content", time=0)
    info.pax_headers = {"mtime": time}
    index.add("1.0", tar_gz([(info, data)]))
    update()
    Git(mirror).run("fsck", "--strict")
    date = Git(mirror).text("show", "-s", "--format=%ct", "core_v1.0")
    assert int(date) == {"99999999999": 0xFFFFFFFF, "1700000000.9": TIME}.get(
        time, 0xFFFFFFFF if time == "1e300" else 0
    )


# -- the network ---------------------------------------------------------------------------------


def test_an_index_that_fails_once_is_asked_again(index: Index, update: Update) -> None:
    index.add("0.9.0")
    index.failing = 2
    assert update().new_tags == ("core_v0.9.0",)


def test_a_download_that_ends_early_is_tried_again(
    index: Index, update: Update, tmp_path: Path
) -> None:
    index.add("0.9.0")
    index.cutting = 2
    assert update().new_tags == ("core_v0.9.0",)
    assert len(list((tmp_path / "cache").iterdir())) == 1


def all_refs(mirror: Path) -> bytes:
    return Git(mirror).run("for-each-ref")


@pytest.fixture
def standing(index: Index, update: Update, mirror: Path) -> bytes:
    """A mirror with one release, and a second one to come: the mirror's refs."""
    index.add("0.9.0")
    update()
    index.add("0.9.1")
    return all_refs(mirror)


def test_a_download_that_always_ends_early_leaves_the_old_refs(
    index: Index, update: Update, mirror: Path, tmp_path: Path, standing: bytes
) -> None:
    index.cutting = 100
    with pytest.raises(EnvironmentFault, match=r"megatron-core: the index .* failed") as raised:
        update()
    assert "try again" in raised.value.todo
    assert raised.value.what.isprintable()
    assert all_refs(mirror) == standing
    assert len(list((tmp_path / "cache").iterdir())) == 1
    index.cutting = 0
    assert update().new_tags == ("core_v0.9.1",)


def test_an_index_that_keeps_failing_is_named(
    index: Index, update: Update, mirror: Path, standing: bytes
) -> None:
    index.failing = 100
    with pytest.raises(EnvironmentFault, match=index.url):
        update()
    assert all_refs(mirror) == standing


def test_an_index_that_is_gone_is_named_without_credentials(mirror: Path, tmp_path: Path) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        port = server.server_address[1]  # closed again below: nobody listens
    url = f"http://user:secret@127.0.0.1:{port}/simple/"
    with pytest.raises(EnvironmentFault) as raised:
        archives.update(mirror, "megatron-core", TAG, index=url, cache=tmp_path / "cache")
    assert f"http://127.0.0.1:{port}/simple/" in raised.value.what
    assert "secret" not in raised.value.what


def test_a_full_disk_leaves_the_old_refs(
    index: Index, update: Update, mirror: Path, tmp_path: Path, standing: bytes
) -> None:
    index.add("0.9.1", tar_gz([entry("x/a", random.Random(1).randbytes(200_000))]))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(EnvironmentFault, match=r"the cache .* cannot be written") as raised:
            update()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "disk" in raised.value.todo
    assert all_refs(mirror) == standing
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_bytes_that_the_index_did_not_promise_are_refused(
    index: Index, update: Update, mirror: Path, tmp_path: Path, standing: bytes
) -> None:
    name = "megatron_core-0.9.1.tar.gz"
    index.served[name] = sdist("0.9.1", "# evil\n")
    with pytest.raises(EnvironmentFault, match=f"{name} from .* is not what") as raised:
        update()
    assert index.sha256(name) in raised.value.what
    assert hashlib.sha256(index.served[name]).hexdigest() in raised.value.what
    assert all_refs(mirror) == standing
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_an_update_killed_at_any_release_leaves_the_old_refs(
    index: Index, update: Update, mirror: Path, standing: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    index.add("0.9.2")
    made = archives._import
    for survived in range(3):
        left = [survived]

        def dying(*args: object, left: list[int] = left) -> ObjectId:
            if not left[0]:
                raise KeyboardInterrupt
            left[0] -= 1
            return made(*args)  # type: ignore[arg-type]

        with monkeypatch.context() as patched:
            patched.setattr(archives, "_import" if survived < 2 else "_tag", dying)
            if survived == 2:
                left[0] = 0
            with pytest.raises(KeyboardInterrupt):
                update()
        assert all_refs(mirror) == standing
    assert update().new_tags == ("core_v0.9.1", "core_v0.9.2")
    Git(mirror).run("fsck", "--strict")


# -- hostile archives ----------------------------------------------------------------------------

LINK, HARD = tarfile.SYMTYPE, tarfile.LNKTYPE


@pytest.mark.parametrize(
    ("members", "words"),
    [
        ([entry("/etc/passwd", "x")], "/etc/passwd is no relative path"),
        ([entry("C:/x/y", "x")], "C:/x/y is no relative path"),
        ([entry("x\\..\\y", "x")], "is no relative path"),
        ([entry("x/../../y", "x")], "x/../../y leads out of the archive"),
        ([entry("x/..", kind=tarfile.DIRTYPE)], "x/.. leads out"),
        ([entry("x/.git/config", "x")], "x/.git/config is git's own"),
        ([entry("x/a/.GIT/hooks/post-checkout", "x")], "is git's own"),
        ([entry("x/.git /config", "x")], "is git's own"),
        ([entry("x/.git. ./config", "x")], "is git's own"),
        ([entry("x/git~1/config", "x")], "is git's own"),
        ([entry("x/.git::$INDEX_ALLOCATION/config", "x")], "is git's own"),
        ([entry("x/.g\u200cit/config", "x")], "is git's own"),
        ([entry("x/a\x1b[31m", "x")], "holds control characters"),
        ([entry("x/a\nb", "x")], "holds control characters"),
        ([entry("alone", "x")], "alone is outside the archive's one top folder"),
        ([entry("x/a", link="/etc/passwd", kind=LINK)], "links to /etc/passwd, outside"),
        ([entry("x/a", link="../b", kind=LINK)], "links to ../b, outside"),
        ([entry("x/a/b", link="../../c", kind=LINK)], "links to ../../c, outside"),
        ([entry("x/a", link="b/../../c", kind=LINK)], "links to b/../../c, outside"),
        ([entry("x/a", link=".git/config", kind=LINK)], "links to .git/config, outside"),
        ([entry("x/a", link="", kind=LINK)], "outside"),
        ([entry("x/a", link="/etc/passwd", kind=HARD)], "links to what is not in the archive"),
        ([entry("x/a", link="x/b", kind=HARD), entry("x/b", "x")], "x/a links to what is not"),
        ([entry("x/a", kind=tarfile.CHRTYPE)], "x/a is neither a file nor a link"),
        ([entry("x/a", kind=tarfile.FIFOTYPE)], "x/a is neither a file nor a link"),
        ([entry("x/a", "1"), entry("x/a", "2")], "x/a is there twice"),
        ([entry("x/a", "1"), entry("x/a/b", "2")], "x/a/b is there twice"),
        ([entry("x/a/b", "1"), entry("x/a", "2")], "x/a is there twice"),
        ([entry("x/a", link=".", kind=LINK), entry("x/a/b", "2")], "x/a/b is there twice"),
        ([entry("x/a", "1"), entry("x/A", "2")], "x/A differs only in case from x/a"),
        ([entry("x/d/a", "1"), entry("x/D/b", "2")], "x/D/b differs only in case from x/d"),
        ([entry("x/\u00e9", "1"), entry("x/e\u0301", "2")], "differs only in case"),
        ([entry("x/" + "d/" * 200 + "a", "1")], "too long or too deep"),
        ([entry("x/" + "n" * 300, "1")], "too long or too deep"),
        ([entry("x", kind=tarfile.DIRTYPE)], "it holds no files"),
        ([entry("x/PKG-INFO", "x")], "it holds no files"),
    ],
)
def test_a_hostile_tar_is_refused_by_its_member(
    index: Index, update: Update, mirror: Path, standing: bytes,
    members: list[tuple[tarfile.TarInfo, bytes]], words: str,
) -> None:  # fmt: skip
    index.add("0.9.1", tar_gz(members))
    with pytest.raises(UsageError) as raised:
        update()
    assert "megatron_core-0.9.1.tar.gz is not used: " in raised.value.what
    assert words in raised.value.what
    assert raised.value.what.isprintable()
    assert raised.value.todo == "Leave version 0.9.1 out."
    assert all_refs(mirror) == standing


def zipped(name: str, mode: int = stat.S_IFREG | 0o644, content: str = "x") -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as opened:
        info = zipfile.ZipInfo(name)
        info.external_attr = mode << 16
        opened.writestr(info, content)
    return made.getvalue()


@pytest.mark.parametrize(
    ("archive", "words"),
    [
        (zipped("/etc/passwd"), "is no relative path"),
        (zipped("x/../../y"), "leads out"),
        (zipped("x/.Git/config"), "is git's own"),
        (zipped("x/a", stat.S_IFLNK | 0o777, "../../b"), "outside the archive"),
        (zipped("x/a", stat.S_IFIFO), "neither a plain file nor a link"),
    ],
)
def test_a_hostile_zip_is_refused_by_its_member(
    index: Index, update: Update, mirror: Path, standing: bytes, archive: bytes, words: str
) -> None:
    index.files.pop("megatron_core-0.9.1.tar.gz")
    index.add("0.9.1", archive, ".zip")
    with pytest.raises(UsageError, match=words):
        update()
    assert all_refs(mirror) == standing


@pytest.mark.parametrize("suffix", [".tar.gz", ".zip"])
def test_an_archive_that_unpacks_to_too_much_is_refused_by_its_member(
    index: Index, update: Update, mirror: Path, standing: bytes, monkeypatch: pytest.MonkeyPatch,
    suffix: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(archives, "LARGEST_CONTENT", 1 << 20)
    index.files.pop("megatron_core-0.9.1.tar.gz")
    zeros = "0" * (1 << 20)
    bomb = tar_gz([entry("x/a", "1"), entry("x/bomb", zeros), entry("x/c", "2")])
    index.add(
        "0.9.1", bomb if suffix == ".tar.gz" else zipped("x/bomb", content=zeros + "0"), suffix
    )
    with pytest.raises(UsageError, match="at x/bomb it unpacks to more than 1 MB"):
        update()
    assert all_refs(mirror) == standing


def test_headers_cannot_fill_the_memory(
    index: Index, update: Update, standing: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archives, "LARGEST_CONTENT", 1 << 20)
    monkeypatch.setattr(archives, "MOST_MEMBERS", 100)
    info, data = entry("x/a", "1")
    info.pax_headers = {"comment": "c" * (3 << 20)}
    index.add("0.9.1", tar_gz([entry("x/first", "1"), (info, data)]))
    with pytest.raises(UsageError, match="at x/first it unpacks to more than 1 MB"):
        update()


def test_too_many_members_are_refused(
    index: Index, update: Update, standing: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archives, "MOST_MEMBERS", 100)
    index.add("0.9.1", tar_gz([entry(f"x/{number}", "1") for number in range(101)]))
    with pytest.raises(UsageError, match="at x/100 it has more than 100 members"):
        update()


def test_a_file_that_is_too_large_is_not_downloaded_to_its_end(
    index: Index, update: Update, tmp_path: Path, standing: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archives, "LARGEST_ARCHIVE", 100)
    with pytest.raises(UsageError, match=r"megatron_core-0\.9\.1\.tar\.gz is larger than"):
        update()
    assert len(list((tmp_path / "cache").iterdir())) == 1


@pytest.mark.parametrize(
    "damaged",
    [b"no archive at all", sdist("0.9.1")[:200], gzip.compress(b"no tar"), gzip.compress(b"")],
)
def test_what_cannot_be_read_is_named(
    index: Index, update: Update, mirror: Path, standing: bytes, damaged: bytes
) -> None:
    index.add("0.9.1", damaged)
    with pytest.raises(
        UsageError, match=r"megatron_core-0\.9\.1\.tar\.gz (cannot be read|is not u)"
    ):
        update()
    assert all_refs(mirror) == standing


# -- parameters ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tag",
    ["v", "v{version}{version}", "../{version}", "v {version}", "{version}.lock", "\x1b{version}"],
)
def test_a_tag_that_git_would_not_take_is_refused(update: Update, mirror: Path, tag: str) -> None:
    with pytest.raises(UsageError, match="does not say how releases are tagged") as raised:
        update(tag=tag)
    assert raised.value.what.isprintable()
    assert not mirror.exists()


@pytest.mark.parametrize("prefix", ["..", "/x", ".git", "a/../b"])
def test_a_folder_that_leads_out_is_refused(update: Update, mirror: Path, prefix: str) -> None:
    with pytest.raises(UsageError, match="folder cannot be used"):
        update(prefix=prefix)
    assert not mirror.exists()


def test_archives_do_not_mix_with_a_git_history(index: Index, update: Update, mirror: Path) -> None:
    index.add("0.9.0")
    update()
    refs.move(mirror, {refs.HEADS + "main": refs.tags(mirror)["core_v0.9.0"]})
    with pytest.raises(UsageError, match="holds the history of a git repository"):
        update()


def test_progress_is_told_by_release(index: Index, update: Update) -> None:
    index.add("0.9.0")
    told: list[tuple[str, int, int]] = []
    update(progress=lambda *what: told.append(what))
    size = len(index.files["megatron_core-0.9.0.tar.gz"])
    assert told[-1] == ("downloading megatron-core 0.9.0", size, size)

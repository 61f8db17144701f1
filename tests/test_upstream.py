"""Mirrors: fetched whole or not at all, and never losing what a pin may stand on."""

import contextlib
import os
import re
import resource
import shutil
import socket
import socketserver
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pygit2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rebase import address, patch, refs, upstream
from rebase.errors import EnvironmentFault, UsageError
from rebase.git import Git, ObjectId
from rebase.history import History
from rebase.objects import FILE, Entry, Objects
from rebase.outcome import Status
from rebase.replay import Edit, Step, replay
from rebase.upstream import Gone, Moved

ENV = {
    "PATH": os.environ["PATH"],
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_AUTHOR_NAME": "A",
    "GIT_AUTHOR_EMAIL": "a@example.org",
    "GIT_COMMITTER_NAME": "A",
    "GIT_COMMITTER_EMAIL": "a@example.org",
}


class Source:
    """An upstream repository with a worktree."""

    def __init__(self, path: Path, *init: str) -> None:
        self.path = path
        path.mkdir(parents=True)
        self.git("init", "-q", "-b", "main", *init)

    def git(self, *args: str) -> str:
        done = subprocess.run(
            ["git", *args], cwd=self.path, env=ENV, capture_output=True, check=True
        )
        return done.stdout.decode().strip()

    def commit(self, name: str = "file", content: bytes | str = "x") -> ObjectId:
        data = content.encode() if isinstance(content, str) else content
        (self.path / name).write_bytes(data)
        self.git("add", "-A")
        self.git("commit", "-q", "--allow-empty", "-m", f"{name}: {data[:20]!r}")
        return ObjectId(self.git("rev-parse", "HEAD"))


@pytest.fixture(autouse=True)
def _user(monkeypatch: pytest.MonkeyPatch) -> None:
    """No configuration of whoever runs the tests."""
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")


@pytest.fixture
def source(tmp_path: Path) -> Source:
    made = Source(tmp_path / "source")
    made.commit(content="one")
    made.git("tag", "v1")
    return made


@pytest.fixture
def mirror(tmp_path: Path) -> Path:
    return tmp_path / "mirrors" / "slime.git"


class Host:
    """A git host on the loopback: `git daemon`, one process a connection."""

    def __init__(self, server: socketserver.TCPServer) -> None:
        self.server = server
        self.connections = 0
        self.cut_after: int | None = None  # bytes from upstream before the line goes dead

    def url(self, path: Path) -> str:
        return f"git://127.0.0.1:{self.server.server_address[1]}{path}"


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    class Connection(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            box.connections += 1
            with subprocess.Popen(
                ["git", "daemon", "--inetd", "--export-all", str(tmp_path)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                env=ENV | {"HOME": str(tmp_path)},
            ) as daemon:  # fmt: skip
                assert daemon.stdin and daemon.stdout
                asking = threading.Thread(target=self.ask, args=(daemon.stdin,), daemon=True)
                asking.start()
                left = box.cut_after
                while data := os.read(daemon.stdout.fileno(), 4096):
                    if left is not None:
                        data, left = data[:left], left - len(data[:left])
                    try:
                        self.request.sendall(data)
                    except OSError:
                        break
                    if left == 0:
                        break
                daemon.kill()
                with contextlib.suppress(OSError):
                    self.request.shutdown(socket.SHUT_RDWR)

        def ask(self, pipe: object) -> None:
            try:
                while data := self.request.recv(4096):
                    os.write(pipe.fileno(), data)  # type: ignore[attr-defined]
            except (OSError, ValueError):
                pass  # the daemon is done

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True

    with Server(("127.0.0.1", 0), Connection) as server:
        box = Host(server)
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield box
        server.shutdown()
        thread.join()


def all_refs(mirror: Path) -> str:
    return Git(mirror).run("for-each-ref").decode()


def has(mirror: Path, id: str) -> bool:
    """Whether the mirror itself has an object, without asking anyone for it."""
    repository = pygit2.Repository(str(mirror))
    return pygit2.Oid(hex=id) in repository.odb


# -- what a fetch brings -------------------------------------------------------------------------


def test_the_first_fetch_makes_a_mirror_of_branches_and_tags(source: Source, mirror: Path) -> None:
    source.git("tag", "-a", "-m", "release", "v2")
    source.git("branch", "core_r0.16")

    fetched = upstream.fetch(mirror, str(source.path))

    tip = source.git("rev-parse", "HEAD")
    assert refs.branches(mirror) == {"main": tip, "core_r0.16": tip}
    assert refs.tags(mirror) == {"v1": tip, "v2": tip}  # annotated or not: the commit
    assert (fetched.new_tags, fetched.commits) == (("v1", "v2"), 1)
    assert not Git(mirror).run("for-each-ref", "refs/forkman/")


def test_a_fetch_of_nothing_new_brings_nothing(source: Source, mirror: Path) -> None:
    upstream.fetch(mirror, str(source.path))
    before = all_refs(mirror)

    assert upstream.fetch(mirror, str(source.path)) == upstream.Fetched(str(source.path))
    assert all_refs(mirror) == before


def test_new_commits_tags_and_branches_are_counted(source: Source, mirror: Path) -> None:
    upstream.fetch(mirror, str(source.path))
    source.commit(content="two")
    new = source.commit(content="three")
    source.git("tag", "v2")
    source.git("branch", "dev")

    fetched = upstream.fetch(mirror, str(source.path))

    assert (fetched.commits, fetched.new_tags) == (2, ("v2",))
    assert fetched.gone == fetched.moved_tags == ()
    assert refs.branches(mirror) == {"dev": new, "main": new}


def test_progress_is_told_in_stages(source: Source, mirror: Path) -> None:
    told: list[tuple[str, int, int]] = []
    upstream.fetch(mirror, str(source.path), progress=lambda *what: told.append(what))
    assert ("counting objects", 3, 3) in told


def test_a_relative_path_is_taken_from_the_current_directory(
    source: Source, mirror: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(source.path.parent)
    fetched = upstream.fetch(mirror, "source")
    assert fetched.url == str(source.path)
    assert "main" in refs.branches(mirror)


def test_a_file_address_is_fetched_whole(source: Source, mirror: Path) -> None:
    upstream.fetch(mirror, source.path.as_uri())
    assert has(mirror, source.git("rev-parse", "HEAD:file"))


# -- what a pin may stand on stays ---------------------------------------------------------------


def test_a_tag_that_moved_is_reported_and_not_followed(source: Source, mirror: Path) -> None:
    upstream.fetch(mirror, str(source.path))
    old = ObjectId(source.git("rev-parse", "v1"))
    new = source.commit(content="two")
    source.git("tag", "-f", "v1")

    for _ in range(2):  # as often as one asks
        assert upstream.fetch(mirror, str(source.path)).moved_tags == (Moved("v1", old, new),)
        assert refs.tags(mirror) == {"v1": old}
    assert refs.branches(mirror) == {"main": new}


def test_a_tag_that_moved_is_followed_when_told(source: Source, mirror: Path) -> None:
    source.commit(content="two")
    source.git("tag", "-f", "v1")
    upstream.fetch(mirror, str(source.path))
    old = ObjectId(source.git("rev-parse", "v1"))
    source.git("commit", "-q", "--amend", "-m", "again")
    source.git("tag", "-f", "v1")
    new = ObjectId(source.git("rev-parse", "v1"))
    upstream.fetch(mirror, str(source.path))

    fetched = upstream.fetch(mirror, str(source.path), accept_moved_tags=True)

    assert fetched.moved_tags == (Moved("v1", old, new),)
    assert refs.tags(mirror) == {"v1": new}
    Git(mirror).run("prune", "--expire=now")
    assert refs.resolve(mirror, old) == old


def test_a_tag_made_anew_on_its_commit_has_not_moved(source: Source, mirror: Path) -> None:
    upstream.fetch(mirror, str(source.path))
    source.git("tag", "-f", "-a", "-m", "signed now", "v1")
    assert upstream.fetch(mirror, str(source.path)).moved_tags == ()
    assert refs.tags(mirror) == {"v1": source.git("rev-parse", "HEAD")}


def test_a_deleted_tag_stays(source: Source, mirror: Path) -> None:
    upstream.fetch(mirror, str(source.path))
    source.git("tag", "-d", "v1")
    source.commit(content="two")
    upstream.fetch(mirror, str(source.path))
    assert "v1" in refs.tags(mirror)


def test_a_deleted_tag_that_is_in_the_way_of_a_new_one_is_set_aside(
    source: Source, mirror: Path
) -> None:
    source.git("tag", "rel")
    old = ObjectId(source.git("rev-parse", "rel"))
    upstream.fetch(mirror, str(source.path))
    source.git("tag", "-d", "rel")
    new = source.commit(content="two")
    source.git("tag", "-a", "-m", "first", "rel/1")

    fetched = upstream.fetch(mirror, str(source.path))

    assert (fetched.new_tags, fetched.aside) == (("rel/1",), ("rel",))
    assert refs.tags(mirror) == {"v1": old, "rel": old, "rel/1": new}
    assert (refs.resolve(mirror, "rel"), refs.resolve(mirror, "rel/1")) == (old, new)
    assert upstream.fetch(mirror, str(source.path)).aside == ()  # said once

    # And back: the name that comes again means what it meant, until it is told to move.
    source.git("tag", "-d", "rel/1")
    source.git("tag", "rel")
    for _ in range(2):
        again = upstream.fetch(mirror, str(source.path))
        assert again.moved_tags == (Moved("rel", old, new),)
        assert refs.tags(mirror) == {"v1": old, "rel": old, "rel/1": new}
    accepted = upstream.fetch(mirror, str(source.path), accept_moved_tags=True)
    assert (accepted.moved_tags, accepted.aside) == ((Moved("rel", old, new),), ("rel/1",))
    assert refs.tags(mirror) == {"v1": old, "rel": new, "rel/1": new}
    assert list(refs.aside(mirror)) == ["rel/1"]
    assert refs.resolve(mirror, "rel/1") == new


def test_what_a_force_push_left_behind_stays_in_the_mirror(source: Source, mirror: Path) -> None:
    old = source.commit(content="two")
    upstream.fetch(mirror, str(source.path))
    source.git("reset", "-q", "--hard", "v1")
    new = source.commit(content="other")

    fetched = upstream.fetch(mirror, str(source.path))

    assert fetched.gone == (Gone("main", old, new),)
    Git(mirror).run("prune", "--expire=now")
    assert refs.resolve(mirror, old[:9]) == old
    assert refs.branches(mirror) == {"main": new}


def test_what_a_deleted_branch_held_stays_in_the_mirror(source: Source, mirror: Path) -> None:
    source.git("checkout", "-q", "-b", "dev")
    old = source.commit(content="two")
    upstream.fetch(mirror, str(source.path))
    source.git("checkout", "-q", "main")
    source.git("branch", "-D", "dev")

    assert upstream.fetch(mirror, str(source.path)).gone == (Gone("dev", old, None),)
    assert list(refs.branches(mirror)) == ["main"]
    assert refs.resolve(mirror, old) == old
    assert upstream.fetch(mirror, str(source.path)).gone == ()  # said once


def test_a_deleted_branch_that_was_merged_needs_no_keeping(source: Source, mirror: Path) -> None:
    source.git("branch", "merged")
    upstream.fetch(mirror, str(source.path))
    source.git("branch", "-D", "merged")
    upstream.fetch(mirror, str(source.path))
    assert not Git(mirror).run("for-each-ref", "refs/forkman/")


def test_a_branch_may_become_a_folder_of_branches(source: Source, mirror: Path) -> None:
    source.git("branch", "core")
    upstream.fetch(mirror, str(source.path))
    source.git("branch", "-m", "core", "core/r1")
    upstream.fetch(mirror, str(source.path))
    assert sorted(refs.branches(mirror)) == ["core/r1", "main"]
    source.git("branch", "-m", "core/r1", "core")
    upstream.fetch(mirror, str(source.path))
    assert sorted(refs.branches(mirror)) == ["core", "main"]


# -- when something fails ------------------------------------------------------------------------


def test_a_tag_that_moves_while_it_is_fetched_is_not_followed_either(
    source: Source, mirror: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    upstream.fetch(mirror, str(source.path))
    old = ObjectId(source.git("rev-parse", "v1"))
    new = source.commit(content="two")
    listed = upstream._listed

    def then_it_moves(*args: str) -> dict[str, tuple[ObjectId, ObjectId]]:
        source.git("tag", "-f", "v1")
        return listed(*args)

    monkeypatch.setattr(upstream, "_listed", then_it_moves)
    assert upstream.fetch(mirror, str(source.path)).moved_tags == (Moved("v1", old, new),)
    assert refs.tags(mirror) == {"v1": old}


def test_a_line_that_goes_dead_leaves_the_old_refs(
    source: Source, mirror: Path, host: Host, tmp_path: Path
) -> None:
    bare = tmp_path / "host.git"
    source.git("clone", "-q", "--bare", ".", str(bare))
    source.git("remote", "add", "host", str(bare))
    upstream.fetch(mirror, host.url(bare))
    before = all_refs(mirror)
    source.commit("big", os.urandom(300_000))
    source.git("tag", "v2")
    source.git("push", "-q", "host", "main", "v2")

    for cut in (0, 100, 700, 60_000):
        host.cut_after = cut
        with pytest.raises(EnvironmentFault) as raised:
            upstream.fetch(mirror, host.url(bare))
        assert f"slime: {host.url(bare)} could not be fetched: " in raised.value.what
        assert "try again" in raised.value.todo
        assert all_refs(mirror) == before

    host.cut_after = None
    assert upstream.fetch(mirror, host.url(bare)).new_tags == ("v2",)


def test_a_full_disk_leaves_the_old_refs(source: Source, mirror: Path) -> None:
    upstream.fetch(mirror, str(source.path))
    before = all_refs(mirror)
    source.commit("big", os.urandom(400_000))

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(EnvironmentFault):
            upstream.fetch(mirror, str(source.path))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert all_refs(mirror) == before

    assert upstream.fetch(mirror, str(source.path)).commits == 1


@pytest.mark.parametrize("how", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_a_first_fetch_that_breaks_off_leaves_no_mirror(
    source: Source, mirror: Path, monkeypatch: pytest.MonkeyPatch, how: BaseException
) -> None:
    def broken(*_: object) -> None:
        raise how

    with monkeypatch.context() as patched:
        patched.setattr(upstream, "_move", broken)
        with pytest.raises((KeyboardInterrupt, EnvironmentFault)):
            upstream.fetch(mirror, str(source.path))
    assert list(mirror.parent.iterdir()) == []


def test_what_a_killed_first_fetch_left_is_cleared_away(source: Source, mirror: Path) -> None:
    (mirror.parent / "slime.git.new" / "objects").mkdir(parents=True)
    upstream.fetch(mirror, str(source.path))
    assert [path.name for path in mirror.parent.iterdir()] == ["slime.git"]


def test_a_fetch_killed_at_any_ref_update_is_made_good_by_the_next(
    source: Source, mirror: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.git("branch", "core")
    old = source.commit(content="two")
    upstream.fetch(mirror, str(source.path))
    saved = mirror.with_name("saved.git")
    mirror.rename(saved)
    source.git("reset", "-q", "--hard", "v1")
    new = source.commit(content="other")
    source.git("branch", "-m", "core", "core/r1")
    moves = refs.move

    for survived in range(4):
        shutil.copytree(saved, mirror)
        left = [survived]

        def dying(mirror: Path, what: dict[str, ObjectId | None], left: list[int] = left) -> None:
            if not left[0]:
                raise KeyboardInterrupt
            left[0] -= 1
            moves(mirror, what)

        with monkeypatch.context() as patched:
            patched.setattr(refs, "move", dying)
            try:
                upstream.fetch(mirror, str(source.path))
            except KeyboardInterrupt:
                assert refs.branches(mirror)["main"] == old
            else:
                assert survived == 3  # kept tips, branches in the way, everything else
        upstream.fetch(mirror, str(source.path))
        assert refs.branches(mirror) == {"main": new, "core/r1": source.git("rev-parse", "v1")}
        assert refs.resolve(mirror, old) == old
        assert "incoming" not in all_refs(mirror)
        shutil.rmtree(mirror)


@pytest.mark.parametrize(
    ("address", "words"),
    [("gone", "does not appear to be a git repository"), ("plain", "not appear to be a git repo")],
)
def test_an_upstream_that_is_no_repository(
    tmp_path: Path, mirror: Path, address: str, words: str
) -> None:
    (tmp_path / "plain").mkdir()
    with pytest.raises(EnvironmentFault, match=words) as raised:
        upstream.fetch(mirror, str(tmp_path / address))
    assert f"slime: {tmp_path / address} could not be fetched" in raised.value.what
    assert not mirror.exists()


def test_an_empty_upstream_is_said_to_be_empty(tmp_path: Path, mirror: Path) -> None:
    with pytest.raises(UsageError, match="is empty"):
        upstream.fetch(mirror, str(Source(tmp_path / "empty").path))
    assert not mirror.exists()


def test_a_sha256_repository_is_refused_by_name(tmp_path: Path, mirror: Path) -> None:
    other = Source(tmp_path / "other", "--object-format=sha256")
    other.commit()
    with pytest.raises(UsageError, match="SHA-256"):
        upstream.fetch(mirror, str(other.path))


def test_a_mirror_that_is_no_repository_is_said_to_be_none(source: Source, mirror: Path) -> None:
    mirror.mkdir(parents=True)
    with pytest.raises(EnvironmentFault, match="is no git repository"):
        upstream.fetch(mirror, str(source.path))


def test_another_project_at_the_address_is_refused(
    source: Source, mirror: Path, tmp_path: Path
) -> None:
    upstream.fetch(mirror, str(source.path))
    before, config = all_refs(mirror), (mirror / "config").read_text()
    other = Source(tmp_path / "other")
    other.commit("elsewhere", "entirely")

    with pytest.raises(UsageError, match="is another project") as raised:
        upstream.fetch(mirror, str(other.path))

    assert str(mirror) in raised.value.todo
    assert all_refs(mirror) == before
    assert (mirror / "config").read_text() == config
    assert upstream.fetch(mirror, str(source.path)).commits == 0


def test_a_fork_of_the_project_can_stand_in_for_it(
    source: Source, mirror: Path, tmp_path: Path
) -> None:
    upstream.fetch(mirror, str(source.path))
    source.git("clone", "-q", str(source.path), str(tmp_path / "fork"))
    source.git("-C", str(tmp_path / "fork"), "tag", "-d", "v1")
    source.git("-C", str(tmp_path / "fork"), "commit", "-q", "--amend", "-m", "rewritten")
    source.git("-C", str(tmp_path / "fork"), "commit", "-q", "--allow-empty", "-m", "new root?")
    with pytest.raises(UsageError, match="is another project"):
        upstream.fetch(mirror, str(tmp_path / "fork"))  # its one shared commit was rewritten

    second = source.commit(content="two")
    upstream.fetch(mirror, str(source.path))
    source.git("-C", str(tmp_path / "fork"), "fetch", "-q")
    source.git("-C", str(tmp_path / "fork"), "reset", "-q", "--hard", second)
    source.git("-C", str(tmp_path / "fork"), "commit", "-q", "--allow-empty", "-m", "ours")
    assert upstream.fetch(mirror, str(tmp_path / "fork")).commits == 1


# -- sources that lack something -----------------------------------------------------------------


def test_a_shallow_source_is_named_with_where_its_history_ends(
    source: Source, mirror: Path, tmp_path: Path
) -> None:
    source.commit(content="two")
    end = source.commit(content="three")
    source.git("clone", "-q", "--depth=1", source.path.as_uri(), str(tmp_path / "cut"))

    fetched = upstream.fetch(mirror, str(tmp_path / "cut"))
    assert (fetched.shallow, fetched.commits) == ((end,), 1)
    assert upstream.fetch(mirror, str(tmp_path / "cut")).shallow == (end,)

    whole = upstream.fetch(mirror, str(source.path))
    assert whole.shallow == ()
    assert Git(mirror).text("rev-list", "--count", end) == "3"


def test_a_whole_mirror_does_not_become_shallow(
    source: Source, mirror: Path, tmp_path: Path
) -> None:
    upstream.fetch(mirror, str(source.path))
    before = all_refs(mirror)
    source.commit(content="two")
    source.commit(content="three")
    source.git("clone", "-q", "--depth=1", source.path.as_uri(), str(tmp_path / "cut"))

    with pytest.raises(EnvironmentFault, match=r"did not give 1 .* It may be shallow"):
        upstream.fetch(mirror, str(tmp_path / "cut"))
    assert Git(mirror).text("rev-parse", "--is-shallow-repository") == "false"
    assert all_refs(mirror) == before


def test_a_partial_copy_gives_what_it_has_and_what_it_lacks_is_named(
    source: Source, mirror: Path, tmp_path: Path
) -> None:
    source.commit("large", "l" * 5000)
    tip = ObjectId(source.git("rev-parse", "HEAD"))
    source.git("config", "uploadpack.allowFilter", "true")
    copy = tmp_path / "copy.git"
    source.git("clone", "-q", "--bare", "--filter=blob:limit=1k", source.path.as_uri(), str(copy))
    (copy / "config").write_text("[core]\n\tbare = true\n")  # nobody left to ask
    large = source.git("rev-parse", "HEAD:large")

    upstream.fetch(mirror, str(copy))
    absent = upstream.complete(mirror, [tip])
    assert absent == {large: b"large"}
    [said] = upstream.lacking(absent)
    assert said.endswith("No change can touch what it lacks: large.")
    assert upstream.lacking({}) == ()
    assert has(mirror, source.git("rev-parse", "HEAD:file"))


def test_a_patch_to_a_file_that_a_partial_copy_lacks_is_not_to_blame(
    source: Source, mirror: Path, tmp_path: Path
) -> None:
    tip = source.commit("large", "l\n" * 3000)
    source.git("config", "uploadpack.allowFilter", "true")
    copy = tmp_path / "copy.git"
    source.git("clone", "-q", "--bare", "--filter=blob:limit=1k", source.path.as_uri(), str(copy))
    (copy / "config").write_text("[core]\n\tbare = true\n")  # nobody left to ask
    upstream.fetch(mirror, str(copy))
    change = b"--- a/large\n+++ b/large\n@@ -1,2 +1,2 @@\n-l\n+L\n l\n"
    objects = Objects(mirror)
    with pytest.raises(EnvironmentFault, match="has the content of large") as caught:
        patch.apply(objects, objects.tree_of(tip), change)
    assert source.git("rev-parse", "HEAD:large") in caught.value.what
    assert "forkman fetch --upstream" in caught.value.todo


def test_another_address_counts_even_where_it_has_nothing_new(
    source: Source, mirror: Path, tmp_path: Path
) -> None:
    source.git("config", "uploadpack.allowFilter", "true")
    copy = tmp_path / "copy.git"
    source.git("clone", "-q", "--bare", "--filter=blob:none", source.path.as_uri(), str(copy))
    (copy / "config").write_text("[core]\n\tbare = true\n")
    tip = ObjectId(source.git("rev-parse", "HEAD"))
    upstream.fetch(mirror, str(copy))
    assert list(upstream.complete(mirror, [tip]).values()) == [b"file"]

    upstream.fetch(mirror, str(source.path))
    assert upstream.complete(mirror, [tip]) == {}


@pytest.mark.parametrize(
    ("subject", "number"),
    [
        ("Fix x (#7)", 7),
        ('Revert "Fix x (#12)" (#100)', 100),
        ('Revert "Revert "Fix x (#12)" (#100)" (#101)', 101),
        ('Revert "Fix x (#12)"', None),
        ("Fix (#3) for good (#9) ", 9),
        ("Fix what (#3) broke", 3),
        ("Merge pull request #5 from a/b (#4) c", 5),
        ("!88 merge branch (#2) into main", 88),
        ("See project!12", 12),
        ("Fix #3", None),
    ],
)
def test_a_commits_pull_request_is_its_own(
    source: Source, mirror: Path, subject: str, number: int | None
) -> None:
    old = ObjectId(source.git("rev-parse", "HEAD"))
    (source.path / "file").write_text("two")
    source.git("commit", "-q", "-a", "-m", subject)
    new = ObjectId(source.git("rev-parse", "HEAD"))
    [touch] = History(Git(source.path), old, new).touching(b"file")
    assert touch.commit.pull_request == number


# -- hosts ---------------------------------------------------------------------------------------


def test_a_host_gives_history_first_and_contents_all_at_once(
    source: Source, mirror: Path, host: Host
) -> None:
    for number in range(5):
        source.commit(f"file{number}", f"content {number}")
    tip = ObjectId(source.git("rev-parse", "HEAD"))
    blobs = source.git("ls-tree", "-r", "--format=%(objectname)", tip).split()
    source.git("config", "uploadpack.allowFilter", "true")

    fetched = upstream.fetch(mirror, host.url(source.path))
    assert fetched.commits == 6
    assert not any(has(mirror, blob) for blob in blobs)

    host.connections = 0
    assert upstream.complete(mirror, [tip]) == {}
    assert host.connections == 1
    assert all(has(mirror, blob) for blob in blobs)
    assert upstream.complete(mirror, [tip]) == {}
    assert host.connections == 1

    source.commit("file0", "changed")
    upstream.fetch(mirror, host.url(source.path))
    assert not has(mirror, source.git("rev-parse", "HEAD:file0"))  # blobless it stays


def test_a_replay_on_a_blobless_mirror_asks_once_for_what_upstream_did_in_between(
    source: Source, mirror: Path, host: Host
) -> None:
    source.git("config", "uploadpack.allowFilter", "true")
    lines = [f"line {number}\n" for number in range(40)]
    base = source.commit("file", "".join(lines))
    for number in range(10):
        lines[number] = f"upstream's line {number}\n"
        source.commit("file", "".join(lines))
    lines[30] = "ours\n"
    took = source.commit("file", "".join(lines))
    lines[25] = "and on\n"
    tip = source.commit("file", "".join(lines))
    upstream.fetch(mirror, host.url(source.path))
    upstream.complete(mirror, [base, tip])
    objects = Objects(mirror)
    before = objects.tree_of(base)
    change = b"".join(b"ours\n" if n == 30 else b"line %d\n" % n for n in range(40))
    after = objects.splice(before, {b"file": Entry(FILE, objects.write("blob", change))})
    step = Step("ours.patch", b"A <a@example.org> 0 +0000", b"Ours\n", Edit(before, after))

    host.connections = 0
    [outcome] = replay(objects, [step], tip, History(objects.git, base, tip))
    assert outcome.status is Status.ALREADY_UPSTREAM
    assert [commit.id for commit in outcome.taken[0].by] == [took]
    assert host.connections == 1


def test_a_host_that_cannot_leave_contents_out_gives_all(
    source: Source, mirror: Path, host: Host
) -> None:
    source.git("config", "uploadpack.allowFilter", "false")
    upstream.fetch(mirror, host.url(source.path))
    assert has(mirror, source.git("rev-parse", "HEAD:file"))


def test_contents_that_cannot_be_had_are_an_error_that_names_the_commit(
    source: Source, mirror: Path, host: Host
) -> None:
    source.git("config", "uploadpack.allowFilter", "true")
    upstream.fetch(mirror, host.url(source.path))
    host.cut_after = 0
    tip = ObjectId(source.git("rev-parse", "HEAD"))
    with pytest.raises(EnvironmentFault, match=f"The files of {tip[:9]} could not be fetched"):
        upstream.complete(mirror, [tip])
    with pytest.raises(EnvironmentFault, match=f"lacks commit {'1' * 40}"):
        upstream.complete(mirror, [ObjectId("1" * 40)])


def test_looking_for_a_revision_never_asks_the_network(
    source: Source, mirror: Path, host: Host
) -> None:
    source.git("config", "uploadpack.allowFilter", "true")
    upstream.fetch(mirror, host.url(source.path))
    host.connections = 0
    blob = source.git("rev-parse", "HEAD:file")
    for revision in ("1" * 40, blob, blob[:9], "v9"):
        assert refs.resolve(mirror, revision) is None
    assert host.connections == 0


def test_what_a_host_says_cannot_steer_the_terminal(mirror: Path) -> None:
    class Rude(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.recv(1000)
            said = b"ERR \x1b[31mno \x07such thing"
            self.request.sendall(b"%04x%s" % (len(said) + 4, said))

    with socketserver.TCPServer(("127.0.0.1", 0), Rude) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        with pytest.raises(EnvironmentFault) as raised:
            upstream.fetch(mirror, f"git://127.0.0.1:{server.server_address[1]}/x")
        thread.join()
    assert "such thing" in raised.value.what
    assert raised.value.what.isprintable()


def test_credentials_in_an_address_are_not_shown(mirror: Path) -> None:
    with socketserver.TCPServer(("127.0.0.1", 0), socketserver.BaseRequestHandler) as server:
        port = server.server_address[1]  # closed again below: nobody listens
    with pytest.raises(EnvironmentFault) as raised:
        upstream.fetch(mirror, f"http://user:secret@127.0.0.1:{port}/x.git")
    assert f"http://127.0.0.1:{port}/x.git" in raised.value.what
    assert "secret" not in raised.value.what


# -- the user's configuration and environment ----------------------------------------------------


def test_the_users_insteadof_counts(
    source: Source, mirror: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "gitconfig"
    config.write_text(f'[url "{source.path.parent}/"]\n\tinsteadOf = https://host.invalid/\n')
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(config))
    upstream.fetch(mirror, "https://host.invalid/source")
    assert "main" in refs.branches(mirror)


def test_the_users_hooks_and_logs_stay_out_of_a_mirror(
    source: Source, mirror: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hook = tmp_path / "hooks" / "reference-transaction"
    hook.parent.mkdir()
    hook.write_text("#!/bin/sh\nexit 1\n")
    hook.chmod(0o755)
    config = tmp_path / "gitconfig"
    config.write_text(f"[core]\n\thooksPath = {hook.parent}\n\tlogAllRefUpdates = always\n")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(config))
    upstream.fetch(mirror, str(source.path))
    assert not (mirror / "logs").exists()


def test_a_calling_hooks_variables_point_nowhere_else(
    source: Source, mirror: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Source(tmp_path / "other")
    monkeypatch.setenv("GIT_DIR", str(other.path / ".git"))
    monkeypatch.setenv("GIT_OBJECT_DIRECTORY", str(other.path / ".git" / "objects"))
    monkeypatch.setenv("GIT_INDEX_FILE", str(other.path / ".git" / "index"))
    monkeypatch.setenv("GIT_NAMESPACE", "elsewhere")
    upstream.fetch(mirror, str(source.path))
    tip = source.git("rev-parse", "HEAD")
    assert refs.branches(mirror) == {"main": tip}
    assert has(mirror, tip)
    assert not has(other.path, tip)


# -- names ---------------------------------------------------------------------------------------


def test_a_revision_is_a_full_id_a_tag_a_branch_or_a_short_id(source: Source, mirror: Path) -> None:
    first = ObjectId(source.git("rev-parse", "HEAD"))
    second = source.commit(content="two")
    source.git("branch", "v1", first)
    source.git("tag", "-f", "v1", second)
    source.git("branch", first[:8], second)
    upstream.fetch(mirror, str(source.path))

    assert refs.resolve(mirror, first) == first
    assert refs.resolve(mirror, "v1") == second  # the tag, not the branch
    assert refs.resolve(mirror, "main") == second
    assert refs.resolve(mirror, first[:9]) == first
    assert refs.resolve(mirror, first[:8]) == second  # a branch goes before a short id
    assert refs.resolve(mirror, "main~1") == first


def test_a_short_id_that_names_two_commits_is_refused(source: Source, mirror: Path) -> None:
    seen: dict[str, str] = {}
    tree = source.git("rev-parse", "HEAD^{tree}")
    for number in range(2000):
        id = source.git("commit-tree", tree, "-m", str(number))
        if id[:4] in seen:
            source.git("branch", "one", seen[id[:4]])
            source.git("branch", "two", id)
            break
        seen[id[:4]] = id
    upstream.fetch(mirror, str(source.path))
    with pytest.raises(UsageError, match="2 commits begin with"):
        refs.resolve(mirror, id[:4])


@pytest.mark.parametrize(
    "revision",
    ["", "-h", "--all", "main\n", "a\nmain", "\x1b[31m", "HEAD", "refs/heads/main", ".."],
)
def test_no_revision_at_all(source: Source, mirror: Path, revision: str) -> None:
    upstream.fetch(mirror, str(source.path))
    assert refs.resolve(mirror, revision) is None


def test_tags_of_tags_count_and_tags_of_files_do_not(source: Source, mirror: Path) -> None:
    source.git("tag", "-a", "-m", "inner", "inner")
    source.git("tag", "-a", "-m", "outer", "outer", "inner")
    source.git("tag", "blob", source.git("rev-parse", "HEAD:file"))
    upstream.fetch(mirror, str(source.path))
    tip = source.git("rev-parse", "HEAD")
    assert refs.tags(mirror) == dict.fromkeys(("inner", "outer", "v1"), tip)


@pytest.mark.parametrize(
    "url",
    [
        "https://github.com/THUDM/slime",
        "http://localhost:8080/x.git",
        "ssh://git@host:22/x",
        "git://host/x",
        "git@github.com:THUDM/slime.git",
        "host:path",
        "file:///srv/x.git",
        "/srv/x.git",
        "../x",
        "./a:b",
        "~/x",
        "x",
    ],
)
def test_addresses_that_are_good(url: str) -> None:
    address.check(url)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "  ",
        "ext::sh -c touch% /tmp/x",
        "fd::17",
        "foo::https://host/x",
        "::x",
        "ext://sh",
        "ftp://host/x",
        "--upload-pack=touch x",
        "-x",
        "ssh://-oProxyCommand=touch/x",
        "ssh://git@-oProxyCommand=touch/x",
        "-oProxyCommand=x:path",
        "git@-oProxyCommand=x:path",
        "https://host/\nx",
        "https://host/\x1b[31m",
        "/srv/\x00x",
        "/srv/\x9bx",
        "https://",
    ],
)
def test_addresses_that_are_refused(url: str, mirror: Path) -> None:
    with pytest.raises(UsageError):
        address.check(url)
    with pytest.raises(UsageError):
        upstream.fetch(mirror, url)
    assert not mirror.parent.exists()


@given(st.text(max_size=30))
def test_any_text_is_a_good_address_or_a_usage_error(url: str) -> None:
    try:
        address.check(url)
    except UsageError as error:
        assert error.what.isprintable()
    else:
        assert not re.match(r"[A-Za-z0-9+.-]*::", url)  # what git takes for a helper
        assert not url.startswith("-")


def test_a_mirror_without_contents_opens_in_libgit2(
    source: Source, mirror: Path, host: Host
) -> None:
    source.git("config", "uploadpack.allowFilter", "true")
    upstream.fetch(mirror, host.url(source.path))
    assert pygit2.Repository(str(mirror)).is_bare

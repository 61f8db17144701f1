"""Landing: all or nothing, killed wherever it may be."""

import io
import itertools
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import filelock  # noqa: F401 - so that a child's first lock imports (and compiles) nothing
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rebase.errors import EnvironmentFault, ExitCode, NeedsPerson
from rebase.git import Git, ObjectId
from rebase.landing import Landing, land, lock, recover

Files = Mapping[Path, bytes | None]

# Every function through which landing changes anything (pathlib calls these too).
WRITES = [
    (os, "replace"), (os, "unlink"), (os, "mkdir"), (os, "rmdir"), (os, "fsync"), (os, "fchmod"),
    (io, "open"), (subprocess, "run"),
]  # fmt: skip
UNCOUNTED = {
    "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.chmod", "os.truncate", "os.link",
    "os.symlink", "subprocess.Popen",
}  # fmt: skip


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "project"
    root.mkdir()
    return root


@pytest.fixture
def state(root: Path) -> Path:
    return root / ".forkman" / "landing"


@pytest.fixture
def mirror(root: Path) -> Path:
    """A mirror with two commits in it, known as refs/tags/1 and refs/tags/2."""
    git_dir = root / ".forkman" / "mirrors" / "slime.git"
    git_dir.mkdir(parents=True)
    git = Git(git_dir)
    git.run("init", "--bare")
    roles = ("AUTHOR", "COMMITTER")
    who = {f"GIT_{role}_{what}": "a@b" for role in roles for what in ("NAME", "EMAIL")}
    tree = git.run("mktree").decode().strip()
    for number in "12":
        commit = git.run("commit-tree", "-m", number, tree, env=who).decode().strip()
        git.run("update-ref", f"refs/tags/{number}", commit)
    return git_dir


def write(files: Files) -> None:
    for path, content in files.items():
        if content is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)


def read(paths: Files) -> Files:
    return {path: path.read_bytes() if path.exists() else None for path in paths}


def leftovers(*folders: Path) -> list[Path]:
    """What a finished landing must not leave behind."""
    return [
        path
        for folder in folders
        for path in folder.rglob("*")
        if path.name.startswith(".forkman-")
        or (path.parent.name == "landing" and path.name not in ("lock", "holder"))
    ]


def in_child(work: Callable[[], object]) -> int:
    """Run `work` in a process of its own; its exit status, or minus the signal that killed it."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            work()
            status = 0
        except BaseException:
            with suppress(OSError):
                traceback.print_exc()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def killed_at(number: int, work: Callable[[], object]) -> bool:
    """Run `work` in a child that is killed around its writes: before the first (0), after it (1),
    before the second (2), ... False where it ended before that."""

    def counted() -> None:
        count = depth = 0

        def next_moment() -> None:
            nonlocal count
            if count == number:
                os.kill(os.getpid(), signal.SIGKILL)
            count += 1

        def wrap(real: Callable[..., object]) -> Callable[..., object]:
            def wrapped(*args: object, **named: object) -> object:
                nonlocal depth
                next_moment()
                depth += 1
                try:
                    return real(*args, **named)
                finally:
                    depth -= 1
                    next_moment()

            return wrapped

        def refuse_uncounted_writes(event: str, args: tuple[Any, ...]) -> None:
            writes = event in UNCOUNTED or (
                event == "open" and args[2] & (os.O_WRONLY | os.O_CREAT)
            )
            if writes and depth == 0 and not str(args[0]).endswith("/lock"):
                os._exit(99)

        for module, name in WRITES:
            setattr(module, name, wrap(getattr(module, name)))
        sys.addaudithook(refuse_uncounted_writes)
        work()

    status = in_child(counted)
    assert status in (0, -signal.SIGKILL)
    return status != 0


def every_kill(work: Callable[[], object], start: Callable[[], object]) -> Iterator[int]:
    """Kill `work` at each of its writes in turn, each time from the same start."""
    for number in itertools.count():
        start()
        if not killed_at(number, work):
            assert number > 10, "the writes were not counted"
            return
        yield number


class Project:
    """A project as a sync finds it, and what the sync wants to land."""

    def __init__(self, root: Path, out: Path, mirror: Path) -> None:
        self.state = root / ".forkman" / "landing"
        self.git = Git(mirror)
        one, two = (self.git.resolve(f"refs/tags/{number}") for number in "12")
        assert one and two
        self.old: Files = {
            root / "manifests" / "slime.toml": b"old pin\n",
            root / "forks" / "slime" / "series": b"a.patch\nb.patch\n",
            root / "forks" / "slime" / "a.patch": b"old a\n",
            root / "forks" / "slime" / "b.patch": b"b, upstream by now\n",
            root / "forks" / "slime" / "same.patch": b"unchanged\n",
            root / "forks" / "gone" / "series": b"only file of its folder\n",
            root / "forks" / "new" / "series": None,
            out / "slime.patch": b"old export\n",
            out / "new" / "0001-x.patch": None,
        }
        self.new: Files = {
            root / "manifests" / "slime.toml": b"new pin\n",
            root / "forks" / "slime" / "series": b"a.patch\n",
            root / "forks" / "slime" / "a.patch": b"new a\r\n\xff",
            root / "forks" / "slime" / "b.patch": None,
            root / "forks" / "slime" / "same.patch": b"unchanged\n",
            root / "forks" / "gone" / "series": None,
            root / "forks" / "new" / "series": b"",
            out / "slime.patch": b"new export\n" * 100,
            out / "new" / "0001-x.patch": b"new\n",
        }
        self.old_refs = {"refs/heads/npu": one, "refs/heads/old": one, "refs/heads/new": None}
        self.new_refs = {"refs/heads/npu": two, "refs/heads/old": None, "refs/heads/new": two}
        self.landing = Landing(self.new, {mirror: self.new_refs})
        self.folders = (root, out)

    def restore(self) -> None:
        root, out = self.folders
        for folder in (root / "manifests", root / "forks", out):
            shutil.rmtree(folder, ignore_errors=True)
        write(self.old)
        for ref, id in self.old_refs.items():
            self.git.run("update-ref", *(("-d", ref) if id is None else (ref, id)))

    def land(self) -> None:
        land(self.state, self.landing)

    def recover(self) -> str | None:
        return recover(self.state)

    def refs(self) -> Mapping[str, ObjectId | None]:
        lines = self.git.text("for-each-ref", "--format=%(refname) %(objectname)", "refs/heads")
        found = dict(line.split() for line in lines.splitlines())
        return {ref: found.get(ref) for ref in self.old_refs}

    def assert_nothing_lost(self) -> None:
        now = read(self.old)
        for path, content in now.items():
            assert content in (self.old[path], self.new[path]), f"{path} is torn: {content!r}"
        written = all(now[path] == content for path, content in self.new.items() if content)
        deleted = [path for path, was in self.old.items() if was is not None and now[path] is None]
        assert written or not deleted, "something was deleted before its successor was there"
        assert now == self.new or self.refs() == self.old_refs, "refs moved before their files"

    def assert_old_or_new(self) -> bool:
        """All is old or all is new; True where it is new."""
        new = read(self.new) == self.new
        assert new or read(self.old) == self.old
        assert self.refs() == (self.new_refs if new else self.old_refs)
        for path, content in (self.new if new else self.old).items():
            if path.parent.name in ("new", "gone"):
                assert path.parent.exists() == (content is not None)
        assert leftovers(*self.folders) == []
        return new


@pytest.fixture
def project(root: Path, tmp_path: Path, mirror: Path) -> Project:
    project = Project(root, tmp_path / "exports", mirror)
    project.restore()
    return project


# -- landing -------------------------------------------------------------------------------------


def test_files_deletions_and_refs_land_together(project: Project) -> None:
    project.land()
    assert project.assert_old_or_new()
    assert project.recover() is None


def test_a_file_whose_bytes_stay_is_not_touched(project: Project, root: Path) -> None:
    same = root / "forks" / "slime" / "same.patch"
    before = same.stat()
    project.land()
    assert (same.stat().st_mtime_ns, same.stat().st_ino) == (before.st_mtime_ns, before.st_ino)


def test_landing_what_is_there_already_writes_nothing(root: Path, state: Path) -> None:
    write({root / "a": b"a"})
    with lock(state):
        before = root.stat().st_mtime_ns, state.stat().st_mtime_ns
        land(state, Landing({root / "a": b"a", root / "b": None}))
        assert (root.stat().st_mtime_ns, state.stat().st_mtime_ns) == before


def test_a_file_keeps_its_mode_and_a_new_one_has_the_usual(root: Path, state: Path) -> None:
    write({root / "tool": b"#!/bin/sh\n", root / "usual": b""})
    (root / "tool").chmod(0o750)
    land(state, Landing({root / "tool": b"#!/bin/bash\n", root / "new": b"new"}))
    assert (root / "tool").stat().st_mode & 0o7777 == 0o750
    assert (root / "new").stat().st_mode == (root / "usual").stat().st_mode


def test_a_folder_that_a_deletion_empties_goes_and_others_stay(
    project: Project, root: Path
) -> None:
    (root / "forks" / "empty").mkdir()
    project.land()
    assert sorted(path.name for path in (root / "forks").iterdir()) == ["empty", "new", "slime"]


def test_names_that_are_not_utf_8_or_as_long_as_can_be_land(root: Path, state: Path) -> None:
    files = {root / os.fsdecode(b"\xff\xe4"): b"latin", root / ("n" * 255): b"long"}
    land(state, Landing(files))
    assert read(files) == files


def test_a_landing_crosses_file_systems(root: Path, state: Path) -> None:
    with TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as elsewhere:
        out = Path(elsewhere)
        if out.stat().st_dev == root.stat().st_dev:
            pytest.skip("no second file system here")
        files = {root / "pin": b"1", out / "deep" / "er" / "slime.patch": b"2"}
        land(state, Landing(files))
        assert read(files) == files
        assert leftovers(root, out) == []


def test_each_step_is_safe_on_the_disk_before_the_next(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut may undo whatever was not synced, in any order."""
    created: set[int] = set()  # inodes of files and folders with something that is not safe yet
    renamed: set[int] = set()
    removed: set[int] = set()
    order: list[str] = []
    real = {name: getattr(os, name) for name in ("fsync", "mkdir", "replace", "unlink", "rmdir")}
    real_open = io.open

    def inode(path: Path) -> int:
        return path.stat().st_ino

    def fsync(descriptor: int) -> None:
        real["fsync"](descriptor)
        for pending in (created, renamed, removed):
            pending.discard(os.fstat(descriptor).st_ino)

    def mkdir(path: Path, mode: int) -> None:
        real["mkdir"](path, mode)
        created.add(inode(path.parent))

    def open(path: Any, mode: str = "r", *rest: Any) -> Any:
        if mode == "xb" and path.name != "plan.json":
            assert inode(project.state) not in created, "staged before the plan was safe"
        file = real_open(path, mode, *rest)
        if mode == "xb":
            created.update({inode(path), inode(path.parent)})
        return file

    def replace(source: Path, target: Path) -> None:
        if target.name == "journal.json":
            assert not created, "decided before everything was staged"
        assert inode(project.state) not in renamed, "carried out before the decision was safe"
        real["replace"](source, target)
        renamed.add(inode(target.parent))
        order.append(target.name)

    def unlink(path: Path) -> None:
        if path.name == "journal.json":
            assert not renamed | removed, "forgotten before all of it was safe"
        elif path in project.new:
            assert not renamed, "deleted before its successors were safe"
        real["unlink"](path)
        removed.add(inode(path.parent))
        order.append(path.name)

    def rmdir(path: Path) -> None:
        gone = inode(path)
        real["rmdir"](path)
        removed.discard(gone)  # that it is gone need not be safe: an empty folder is harmless

    with lock(project.state):
        for fake in (fsync, mkdir, replace, unlink, rmdir):
            monkeypatch.setattr(os, fake.__name__, fake)
        monkeypatch.setattr(io, "open", open)
        project.land()
    assert order[0] == order[-1] == "journal.json"
    assert len(order) == 1 + 6 + 2 + 1  # decided, written, deleted, forgotten
    assert not created | renamed | removed


# -- what cannot land, changes nothing -----------------------------------------------------------


@pytest.mark.parametrize("kind", ["link", "dangling link", "folder", "fifo"])
def test_only_plain_files_are_replaced(root: Path, state: Path, kind: str) -> None:
    outside = root.parent / "outside"
    outside.write_bytes(b"mine")
    if kind == "link":
        (root / "target").symlink_to(outside)
    elif kind == "dangling link":
        (root / "target").symlink_to(root.parent / "nowhere")
    elif kind == "folder":
        (root / "target").mkdir()
    else:
        os.mkfifo(root / "target")
    with pytest.raises(EnvironmentFault, match="target is a link or no file"):
        land(state, Landing({root / "a": b"a", root / "target": b"forkman's"}))
    assert not (root / "a").exists()
    assert outside.read_bytes() == b"mine"
    assert not (root.parent / "nowhere").exists()
    assert leftovers(root) == []


def test_a_target_below_a_file_cannot_land(root: Path, state: Path) -> None:
    write({root / "file": b"mine"})
    with pytest.raises(EnvironmentFault, match="file/deep"):
        land(state, Landing({root / "a": b"a", root / "file" / "deep" / "er": b"x"}))
    assert not (root / "a").exists()
    assert leftovers(root) == []


@pytest.mark.parametrize("name", ["a/../../outside", "a"])
def test_targets_that_contradict_each_other_are_a_bug(root: Path, state: Path, name: str) -> None:
    with pytest.raises(ValueError, match="cannot be a target"):
        land(state, Landing({root / "a" / "b": b"", root / name: b""}))
    with pytest.raises(ValueError, match="cannot be a target"):
        land(state, Landing({Path("relative"): b""}))


def test_a_file_edited_while_the_run_worked_is_not_overwritten(root: Path, state: Path) -> None:
    series, pin = root / "series", root / "pin"
    write({series: b"as read\n"})
    decided = Landing({series: b"new\n", pin: b"new\n"}, seen={series: b"as read\n", pin: None})
    series.write_bytes(b"edited\n")
    with pytest.raises(NeedsPerson, match=r"series was edited") as error:
        land(state, decided)
    assert error.value.exit_code == ExitCode.PERSON
    assert read({series: None, pin: None}) == {series: b"edited\n", pin: None}
    series.write_bytes(b"as read\n")
    land(state, decided)
    assert pin.read_bytes() == b"new\n"


def test_refs_that_cannot_move_keep_the_files_back(project: Project, mirror: Path) -> None:
    nowhere = ObjectId("1" * 40)
    bad: Mapping[str, ObjectId | None] = {"refs/heads/npu": nowhere}
    with pytest.raises(EnvironmentFault, match="nonexistent object"):
        land(project.state, Landing(project.new, {mirror: bad}))
    with pytest.raises(EnvironmentFault, match="is gone"):
        land(project.state, Landing(project.new, {mirror / "gone": project.new_refs}))
    assert not project.assert_old_or_new()


def test_a_state_folder_that_cannot_be_written_is_told(root: Path, state: Path) -> None:
    write({state.parent: b"a file where the folder should be"})
    with pytest.raises(EnvironmentFault, match=r"landing cannot be locked") as error:
        land(state, Landing({root / "a": b"a"}))
    assert error.value.exit_code == ExitCode.ENVIRONMENT
    assert not (root / "a").exists()


def test_read_only_folders_are_found_before_anything_changes() -> None:
    with TemporaryDirectory() as folder:
        root = Path(folder)
        write({root / "a": b"old", root / "closed" / "b": b"old"})
        (root / "closed").chmod(0o555)

        def refused(name: str, content: bytes | None) -> None:
            files = {root / "a": b"new", root / "before" / "c": b"new", root / name: content}
            with pytest.raises(EnvironmentFault, match=r"closed is read-only\.") as error:
                land(root / "s", Landing(files))
            assert error.value.todo == f"Make {root / 'closed'} writable, then run this again."

        assert as_nobody(root, partial(refused, "closed/b", b"new")) == 0
        assert as_nobody(root, partial(refused, "closed/b", None)) == 0
        assert as_nobody(root, partial(refused, "closed/new/b", b"new")) == 0
        assert (root / "a").read_bytes() == b"old"
        assert leftovers(root) == []
        assert not (root / "before").exists()


def as_nobody(root: Path, work: Callable[[], object]) -> int:
    """`in_child`, as a user who is not root (root may write anywhere) and who owns `root`."""
    if os.geteuid() != 0:
        return in_child(work)
    for path in (root, *root.rglob("*")):
        os.chown(path, 65534, 65534)

    def dropped() -> None:
        os.setresuid(65534, 65534, 65534)
        work()

    return in_child(dropped)


@pytest.mark.parametrize("closed", ["closed", "s"])
def test_what_an_undecided_landing_left_and_cannot_be_removed_stops_no_reader(closed: str) -> None:
    with TemporaryDirectory() as folder:
        root = Path(folder)
        state = root / "s"
        write({root / "a": b"old", root / "closed" / "b": b"old"})
        landing = Landing({root / "a": b"new", root / "new" / "c": b"", root / "closed/b": b"new"})

        def killed(*_: object) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        def work() -> None:
            os.replace = killed  # type: ignore[assignment]
            land(state, landing)

        assert as_nobody(root, work) == -signal.SIGKILL
        (root / closed).chmod(0o555)

        def later() -> None:
            for _ in range(2):
                said = recover(state)
                assert said
                assert str(root / closed) in said
            assert (root / "new").exists() == (closed == "s")
            with pytest.raises(EnvironmentFault, match=str(root / closed)):
                land(state, landing)

        assert as_nobody(root, later) == 0
        assert (root / "a").read_bytes() == (root / "closed/b").read_bytes() == b"old"
        (root / closed).chmod(0o755)
        assert as_nobody(root, partial(land, state, landing)) == 0
        assert read(landing.files) == landing.files
        assert leftovers(root) == []


# -- killed --------------------------------------------------------------------------------------


def test_killed_at_any_write_all_is_old_or_all_is_new(project: Project) -> None:
    landed = []
    for _ in every_kill(project.land, project.restore):
        project.assert_nothing_lost()
        said = project.recover()
        landed.append(project.assert_old_or_new())
        assert said is None or said.startswith(("Removed what", "Finished a landing"))
        assert project.recover() is None
        project.land()
        assert project.assert_old_or_new()
    # Old up to the decision, new from then on.
    assert landed == sorted(landed)
    assert set(landed) == {False, True}


def kill_at_decision(project: Project, after: bool) -> None:
    """Kill a landing when all is staged and nothing has changed: before or after its decision."""
    real = os.replace

    def replace(source: Path, target: Path) -> None:
        assert target == project.state / "journal.json"
        if after:
            real(source, target)
        os.kill(os.getpid(), signal.SIGKILL)

    def work() -> None:
        os.replace = replace  # type: ignore[assignment]
        project.land()

    assert in_child(work) == -signal.SIGKILL
    assert read(project.old) == project.old


@pytest.mark.parametrize("decided", [False, True])
def test_a_recovery_killed_at_any_write_is_recovered(project: Project, decided: bool) -> None:
    def start() -> None:
        project.restore()
        kill_at_decision(project, after=decided)

    for _ in every_kill(project.recover, start):
        project.assert_nothing_lost()
        project.recover()
        assert project.assert_old_or_new() == decided


def limited(size: int, reaction: signal.Handlers, work: Callable[[], object]) -> None:
    """Run `work` where no file can grow beyond `size` bytes: its process dies, or gets an error."""
    signal.signal(signal.SIGXFSZ, reaction)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    work()


@pytest.mark.parametrize("size", [0, 1, 60, 100, 300, 800, 1500, 4096, 19_999])
def test_killed_within_a_write_all_is_old(root: Path, state: Path, size: int) -> None:
    old = {root / "a": b"old", root / "big": b"old"}
    new = {root / "a": b"new", root / "big": bytes(20_000)}
    write(old)
    work = partial(limited, size, signal.SIG_DFL, partial(land, state, Landing(new)))
    assert in_child(work) == -signal.SIGXFSZ
    assert read(old) == old
    recover(state)
    assert read(old) == old
    assert leftovers(root) == []
    land(state, Landing(new))
    assert read(new) == new


@pytest.mark.parametrize("after", [False, True])
def test_interrupted_at_the_decision_all_is_old_or_all_is_new(
    project: Project, monkeypatch: pytest.MonkeyPatch, after: bool
) -> None:
    """Ctrl-C is no kill: landing itself cleans up, unless the decision was just taken."""
    real = os.replace

    def interrupted(source: Path, target: Path) -> None:
        if after:
            real(source, target)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(os, "replace", interrupted)
        project.land()
    if after:
        project.recover()
    assert project.assert_old_or_new() == after


KEPT = st.none() | st.binary(max_size=20)
NAMES = ["a", "b", "d/x", "d/y", "e/f/z", "e/g"]


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(st.sampled_from(NAMES), st.tuples(KEPT, KEPT), min_size=1),
    st.integers(0, 60),
    st.integers(0, 30),
)
def test_any_landing_killed_anywhere_lands_whole_or_not_at_all(
    contents: dict[str, tuple[bytes | None, bytes | None]], first: int, second: int
) -> None:
    with TemporaryDirectory() as folder:
        root = Path(folder)
        state = root / ".forkman" / "landing"
        old = {root / name: was for name, (was, _) in contents.items()}
        new = {root / name: now for name, (_, now) in contents.items()}
        write(old)
        killed_at(first, partial(land, state, Landing(new)))
        killed_at(second, partial(recover, state))
        for path, content in read(old).items():
            assert content in (old[path], new[path])
        recover(state)
        assert read(old) in (old, new)
        assert leftovers(root) == []
        land(state, Landing(new))
        assert read(new) == new
        assert leftovers(root) == []


# -- a full disk ---------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 60, 300, 1500, 4096])
def test_a_write_that_is_refused_changes_nothing(root: Path, state: Path, size: int) -> None:
    old = {root / "a": b"old", root / "big": None, root / "new" / "b": None}
    new = {root / "a": b"new", root / "big": bytes(20_000), root / "new" / "b": b""}
    write(old)

    def refused() -> None:
        with pytest.raises(EnvironmentFault, match="File too large") as error:
            land(state, Landing(new))
        assert error.value.kept == "Nothing was changed."
        assert "[Errno" not in error.value.what

    assert in_child(partial(limited, size, signal.SIG_IGN, refused)) == 0
    assert read(old) == old
    assert leftovers(root) == []
    assert not (root / "new").exists()
    land(state, Landing(new))
    assert read(new) == new


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(disk)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("only root can mount a small disk")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize("project_there", [False, True])
def test_a_full_disk_changes_nothing(root: Path, small_disk: Path, project_there: bool) -> None:
    if project_there:
        root = small_disk
    state = root / ".forkman" / "landing"
    old = {root / "pin": b"old", small_disk / "slime.patch": b"old"}
    new = {
        root / "pin": b"new",
        small_disk / "a.patch": bytes(50_000),
        small_disk / "slime.patch": bytes(50_000),
    }
    write(old)
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(60_000))
    refused = r"(pin|a\.patch|slime\.patch) cannot be written: No space left on device$"
    with pytest.raises(EnvironmentFault, match=refused) as error:
        land(state, Landing(new))
    assert error.value.kept == "Nothing was changed."
    assert read(old) == old
    assert leftovers(root, small_disk) == []
    ballast.unlink()
    land(state, Landing(new))
    assert read(new) == new


# -- two at once ---------------------------------------------------------------------------------


@pytest.fixture
def other_run(state: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Another process that holds the lock."""
    program = (
        "import sys, time, pathlib; from rebase.landing import lock\n"
        "sys.argv = ['/usr/bin/forkman', 'sync', 'https://user:secret@host']\n"
        f"with lock(pathlib.Path({str(state)!r})): print('held', flush=True); time.sleep(60)"
    )
    run = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert run.stdout and run.stdout.readline() == b"held\n"
    yield run
    run.kill()
    run.wait()


def test_a_second_run_is_refused_at_once(
    root: Path, state: Path, other_run: subprocess.Popen[bytes]
) -> None:
    began = time.monotonic()
    with pytest.raises(EnvironmentFault) as error:
        land(state, Landing({root / "a": b"a"}))
    assert time.monotonic() - began < 1
    assert f"'forkman sync', process {other_run.pid}, since 20" in error.value.what
    assert "secret" not in error.value.what
    assert error.value.kept == "Nothing was done."
    assert not (root / "a").exists()


def test_a_killed_run_blocks_nobody(
    root: Path, state: Path, other_run: subprocess.Popen[bytes]
) -> None:
    other_run.kill()
    other_run.wait()
    land(state, Landing({root / "a": b"a"}))
    assert (root / "a").read_bytes() == b"a"


def test_a_reader_leaves_the_landing_of_a_live_run_alone(
    project: Project, other_run: subprocess.Popen[bytes]
) -> None:
    assert project.recover() is None
    plan = project.state / "plan.json"
    plan.write_bytes(b"{}")
    with pytest.raises(EnvironmentFault, match="Another run is at work"):
        project.recover()
    assert plan.exists()


def test_a_run_may_recover_and_land_within_its_own_lock(project: Project) -> None:
    program = (
        f"import pathlib, rebase.landing as l\nwith l.lock(pathlib.Path({str(project.state)!r})): 0"
    )
    other = partial(subprocess.run, [sys.executable, "-c", program], capture_output=True)
    with lock(project.state):
        project.recover()
        project.land()
        assert b"Another run is at work" in other().stderr, "landing let the lock go"
    assert other().returncode == 0
    assert project.assert_old_or_new()


# -- edited between the kill and the recovery ----------------------------------------------------


@pytest.fixture
def decided(project: Project) -> Project:
    """A landing killed right after its decision: nothing has changed yet."""
    kill_at_decision(project, after=True)
    return project


def edit(project: Project, name: str) -> tuple[Path, Path]:
    """Edit a target; it and the file with its new content, as the error names them."""
    target = next(path for path in project.old if path.name == name)
    target.write_bytes(b"edited\n")
    with pytest.raises(NeedsPerson) as error:
        project.recover()
    staged = next(
        path for path in target.parent.glob(".forkman-*") if str(path) in error.value.what
    )
    assert str(target) in error.value.what
    assert staged.read_bytes() == project.new[target]
    assert read(project.old) == {**project.old, target: b"edited\n"}, "something was landed"
    return target, staged


def test_an_edited_target_is_not_overwritten(decided: Project) -> None:
    edit(decided, "a.patch")
    with pytest.raises(NeedsPerson):
        decided.land()


@pytest.mark.parametrize("put", [os.replace, shutil.copyfile])
def test_putting_the_new_content_there_finishes_the_landing(
    decided: Project, put: Callable[[Path, Path], object]
) -> None:
    target, staged = edit(decided, "a.patch")
    put(staged, target)
    decided.recover()
    assert decided.assert_old_or_new()


def test_removing_the_new_content_keeps_the_edit(decided: Project) -> None:
    target, staged = edit(decided, "a.patch")
    staged.unlink()
    said = decided.recover()
    assert said and f"Left as they are, edited since: {target}" in said
    assert read(decided.new) == {**decided.new, target: b"edited\n"}
    assert leftovers(*decided.folders) == []


def test_a_file_that_was_to_go_and_was_edited_stays(decided: Project) -> None:
    target = next(path for path in decided.old if path.name == "b.patch")
    target.write_bytes(b"edited\n")
    said = decided.recover()
    assert said and str(target) in said
    assert read(decided.new) == {**decided.new, target: b"edited\n"}


def test_a_project_moved_in_between_is_recovered_where_it_is_now(
    root: Path, tmp_path: Path, mirror: Path
) -> None:
    project = Project(root, root / "exports", mirror)
    project.restore()
    kill_at_decision(project, after=True)
    moved = root.rename(tmp_path / "moved")
    project = Project(moved, moved / "exports", moved / mirror.relative_to(root))
    project.recover()
    assert project.assert_old_or_new()


def test_a_mirror_removed_in_between_is_no_obstacle(decided: Project, mirror: Path) -> None:
    shutil.rmtree(mirror)
    decided.recover()
    assert read(decided.new) == decided.new
    assert leftovers(*decided.folders) == []


def test_what_stops_a_decided_landing_is_told_and_the_next_run_goes_on(
    decided: Project, mirror: Path
) -> None:
    obstacle = mirror / "refs" / "heads" / "npu.lock"
    obstacle.touch()
    with pytest.raises(EnvironmentFault, match=r"half-way.*npu\.lock") as error:
        decided.recover()
    assert "journal.json" in error.value.kept
    obstacle.unlink()
    decided.recover()
    assert decided.assert_old_or_new()


def test_a_damaged_journal_is_told(state: Path) -> None:
    state.mkdir(parents=True)
    (state / "journal.json").write_bytes(b"\0" * 100)
    with pytest.raises(EnvironmentFault, match="is damaged"):
        recover(state)


# -- what it costs to do nothing -----------------------------------------------------------------


def test_with_nothing_to_recover_nothing_is_done_quickly(state: Path) -> None:
    times = []
    for _ in range(100):
        began = time.perf_counter()
        assert recover(state) is None
        times.append(time.perf_counter() - began)
    assert min(times) < 0.001
    assert not state.exists()


def test_importing_landing_imports_nothing_heavy() -> None:
    program = "import sys, rebase.landing; print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    heavy = {b"filelock", b"pygit2", b"git", b"rich", b"pydantic", b"tomlkit"}
    assert heavy & set(modules.stdout.split()) == set()

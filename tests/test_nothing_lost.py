"""Whatever ends a run, what was there is there, or what was to come is; and the next run works.

A run is killed before each of its writes in turn, and after each file it opens; what landing does
between those is in test_landing.
"""

import contextlib
import io
import itertools
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from conftest import Host, Project, Repo, lines

from rebase.export import Verification

# -- killing -------------------------------------------------------------------------------------

_WRITES = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.link", "os.symlink"}
_HARMLESS = {  # commands of git that change nothing, or add objects that nothing names yet
    "apply", "cat-file", "diff", "diff-tree", "for-each-ref", "log", "ls-files", "ls-remote",
    "merge-base", "merge-tree", "rev-list", "rev-parse", "status", "update-index",
}  # fmt: skip


def killed_at(project: Project, below: Path, number: int, *command: str) -> bool:
    """Run forkman in a child that is killed at its write `number` below a folder; False where it
    ended before that, done or (as `continue` at the next conflict) with a person needed.
    """
    child = os.fork()
    if not child:
        status = 70
        with contextlib.suppress(BaseException):
            _count(below, number)
            status = project.forkman(*command).code
        os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    fine = (0, 1, -signal.SIGKILL) if command[0] == "continue" else (0, -signal.SIGKILL)
    assert status in fine, f"{command}, at write {number}, ended with {status}"
    return status < 0


def _count(root: Path, number: int) -> None:
    """Make this process kill itself at its write `number` below `root`."""
    moments = itertools.count()
    real_open = io.open

    def moment() -> None:
        if next(moments) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    def inside(path: object) -> bool:
        return isinstance(path, str | os.PathLike) and os.fspath(path).startswith(str(root))

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event == "subprocess.Popen":
            writes = inside(args[2]) and _command(args[1]) not in _HARMLESS
        elif event == "open":
            writes = inside(args[0]) and bool(args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
        else:
            writes = event in _WRITES and inside(args[0])
        if writes:
            moment()

    def opened(path: Any, mode: str = "r", *args: Any, **named: Any) -> Any:
        file = real_open(path, mode, *args, **named)
        if mode[0] != "r" and inside(path):
            moment()
        return file

    io.open = opened  # type: ignore[assignment]
    sys.addaudithook(hook)


def _command(words: Sequence[str]) -> str:
    """Of `git -c key=value fetch …`: fetch."""
    rest = iter(words[1:])
    for word in rest:
        if word == "-c":
            next(rest)
        elif not word.startswith("-"):
            return word
    return ""


class Start:
    """A project as it was before a run that is killed again and again."""

    def __init__(self, project: Project) -> None:
        self.project = project
        self.kept = project.folder / "kept"
        shutil.copytree(project.root, self.kept, symlinks=True)

    def restore(self) -> None:
        shutil.rmtree(self.project.root)
        shutil.copytree(self.kept, self.project.root, symlinks=True)

    def every_kill(
        self, *command: str, below: str = "", part: int = 0, of: int = 1
    ) -> Iterator[int]:
        """Kill the command at each of its writes below a folder; of these, every `of`th."""
        for number in itertools.count(part, of):
            self.restore()
            if not killed_at(self.project, self.project.root / below, number, *command):
                assert number > 5, "the writes were not counted"
                return
            yield number


def states(project: Project) -> dict[str, str]:
    """The branches that the mirrors keep, by fork and pin."""
    return {
        f"{fork} {line.split()[1].rpartition('/')[2]}": line.split()[0]
        for fork in project.pins()
        for line in project.mirror(fork)
        .git("for-each-ref", "--format=%(objectname) %(refname)", "refs/forkman/states/")
        .splitlines()
    }


def leftovers(project: Project) -> list[str]:
    """What a run leaves for itself alone."""
    names = [str(path.relative_to(project.root)) for path in project.root.rglob("*")]
    kept = project.root / ".forkman" / "landing"
    return [name for name in names if ".forkman-" in name or name.endswith((".new", ".lock"))] + [
        path.name for path in kept.iterdir() if path.name not in ("lock", "holder")
    ]


@pytest.fixture
def unverified(monkeypatch: pytest.MonkeyPatch) -> None:
    """Verifying exports takes half of a sync's time, and writes nothing that is not temporary."""
    monkeypatch.setattr(
        "rebase.export.verify", lambda objects, path, fork, base: Verification(fork, (), (), ())
    )


@pytest.fixture
def moving(project: Project) -> Project:
    """lead and engine, landed on their first releases; upstream has the next ones since then."""
    project.manifest_path("trainer").unlink()
    shutil.rmtree(project.root / "forks" / "trainer")
    (project.root / "forks" / "lead" / "series").write_text("rank-by-device.patch\n")
    (project.root / "forks" / "lead" / "add-the-runtime.patch").unlink()
    newer = {fork: project.upstream(fork).git("rev-parse", tag) for fork, tag in
             (("lead", "v1.1"), ("engine", "v0.6"))}  # fmt: skip
    for fork, old in (("lead", "v1.0"), ("engine", "v0.5")):
        upstream = project.upstream(fork)
        upstream.git("checkout", "--quiet", "-B", "main", old)
        tags = set(upstream.git("tag").split()) - {old}
        upstream.git("tag", "--delete", *tags)
    project.ok("sync")
    for fork, tag in (("lead", "v1.1"), ("engine", "v0.6")):
        project.upstream(fork).git("reset", "--quiet", "--hard", newer[fork])
        project.upstream(fork).git("tag", tag)
    return project


@pytest.mark.parametrize("part", range(4))
def test_a_sync_killed_at_any_write_is_all_old_or_all_new(
    moving: Project, unverified: None, part: int
) -> None:
    start = Start(moving)
    old, old_states = moving.files(), states(moving)
    moving.ok("sync")
    new, new_states = moving.files(), states(moving)
    assert moving.pins() == {"lead": "v1.1", "engine": "v0.6"}
    seen = set()

    for number in start.every_kill("sync", part=part, of=4):
        moving.ok("status")  # any command first finishes or removes a landing
        now = moving.files()
        assert now in (old, new), f"write {number}"
        assert states(moving) == (new_states if now == new else old_states), f"write {number}"
        seen.add(now == new)
        moving.ok("sync")
        assert moving.files() == new, f"write {number}"
        assert states(moving) == new_states, f"write {number}"
        assert leftovers(moving) == [], f"write {number}"

    assert seen == {False, True}


def test_a_first_fetch_killed_at_any_write_leaves_no_half_mirror(
    solo: Project, unverified: None
) -> None:
    solo.ok("status")
    for number in Start(solo).every_kill("fetch"):
        mirror = solo.mirror("lead").path
        assert not mirror.exists() or (mirror / "packed-refs").exists(), f"write {number}"
        solo.ok("sync")
        assert solo.pin("lead") == "v1.1"
        assert leftovers(solo) == [], f"write {number}"


def test_a_resolution_survives_a_continue_killed_at_any_write(
    solo: Project, unverified: None
) -> None:
    """Two conflicts; the first is resolved, and `continue` brings the second."""
    solo.change("lead", "Again", {"app.py": lines({5: "ours 5", 15: "ours 15"})})
    theirs = {5: "theirs 5", 15: "theirs 15"}
    lead = solo.upstream("lead")
    lead.commit({"app.py": lines(theirs)}, "Two", "v2.0")
    assert solo.forkman("sync").code == 1
    solo.ok("edit", "lead")
    tree = Repo(solo.root / ".forkman" / "worktrees" / "lead")
    tree.write({"app.py": lines(theirs | {5: "both 5"})})

    for number in Start(solo).every_kill("continue", "lead"):
        if "theirs 15\n=======" not in (tree.read("app.py") if tree.path.exists() else ""):
            done = solo.forkman("continue", "lead")
            assert done.code == 1 and "change 3 of 3 onto v2.0" in done.out
        assert "both 5" in tree.read("app.py"), f"write {number}"
        tree.write({"app.py": lines(theirs | {5: "both 5", 15: "both 15"})})
        done = solo.forkman("continue", "lead")
        if done.out.startswith("lead: again.patch, change 3"):  # it was still being brought
            tree.write({"app.py": lines(theirs | {5: "both 5", 15: "both 15"})})
            done = solo.forkman("continue", "lead")
        assert done.code == 0, f"write {number}: {done.said}"
        assert "+both 5\n" in solo.export("lead") and "+both 15\n" in solo.export("lead")
        assert len(solo.series("lead")) == 3


def test_a_landing_of_a_resolution_killed_at_any_write_does_not_ask_again(
    solo: Project, unverified: None
) -> None:
    lead = solo.upstream("lead")
    lead.commit({"app.py": lines({5: "theirs 5"})}, "Two", "v2.0")
    assert solo.forkman("sync").code == 1
    solo.ok("edit", "lead")
    tree = Repo(solo.root / ".forkman" / "worktrees" / "lead")
    tree.write({"app.py": lines({5: "both 5"})})

    for number in Start(solo).every_kill("continue", "lead", below=".forkman"):
        done = solo.forkman("sync")
        if done.code:  # it was killed before it had taken the resolution
            assert "forkman continue lead" in done.err
            done = solo.forkman("continue", "lead")
        assert done.code == 0, f"write {number}: {done.said}"
        assert "-theirs 5\n+both 5\n" in solo.export("lead")
        assert not tree.path.exists()


def test_locks_of_a_git_that_was_killed_do_not_last(moving: Project) -> None:
    mirror = moving.mirror("lead").path
    locks = [mirror / name for name in ("packed-refs.lock", "config.lock", "refs/tags/v1.1.lock")]
    for lock in locks:
        lock.parent.mkdir(exist_ok=True)
        lock.touch()
        os.utime(lock, (time.time() - 61,) * 2)
    moving.ok("sync")
    assert moving.pins()["lead"] == "v1.1"
    assert not any(lock.exists() for lock in locks)


# -- a full disk ---------------------------------------------------------------------------------


@pytest.fixture
def disk(moving: Project) -> Iterator[Project]:
    """The project on a disk of its own, of 4 MiB."""
    folder = moving.folder / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("only root can mount a small disk")
    try:
        shutil.move(moving.folder / "upstreams", folder / "upstreams")
        shutil.move(moving.root, folder / "project")
        yield Project(folder)
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("left", [0, 4, 8, 16, 32, 64])
def test_a_full_disk_leaves_everything_as_it_was(disk: Project, left: int) -> None:
    before = disk.files()
    ballast = disk.folder / "ballast"
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    os.truncate(ballast, max(0, ballast.stat().st_size - left * 1024))

    done = disk.forkman("sync")

    if done.code == 0:
        assert disk.pins()["lead"] == "v1.1"
    else:
        assert done.code == 3, done.said
        assert "space" in done.said.lower() and "Traceback" not in done.said
        disk.forkman("status")  # finishes a landing, if it can
        assert disk.files() == before or disk.pins() == {"lead": "v1.1", "engine": "v0.6"}
    ballast.unlink()
    disk.ok("sync")
    assert disk.pins() == {"lead": "v1.1", "engine": "v0.6"}
    assert disk.ok("verify").out.count("✓") == 2


# -- the network goes half-way -------------------------------------------------------------------


@pytest.mark.parametrize("cut_after", [0, 30, 200, 300])
def test_a_network_that_goes_half_way_leaves_everything_as_it_was(
    moving: Project, host: Host, cut_after: int
) -> None:
    (host.folder / "git").mkdir()
    lead = moving.upstream("lead")
    lead.git("clone", "--quiet", "--bare", str(lead.path), str(host.folder / "git" / "lead"))
    address = ("--upstream", f"lead={host.address}/git/lead")
    before = moving.files()

    host.cut_after = cut_after
    report = moving.report("sync", *address)

    assert "could not be fetched" in report["forks"]["lead"]["notes"][0]
    assert moving.files() == before
    host.cut_after = None
    moving.ok("sync", *address)
    assert moving.pins() == {"lead": "v1.1", "engine": "v0.6"}


@pytest.mark.parametrize("cut_after", [0, 100, 250])
def test_a_first_fetch_that_is_cut_off_leaves_no_mirror(
    solo: Project, host: Host, cut_after: int
) -> None:
    (host.folder / "git").mkdir()
    lead = solo.upstream("lead")
    lead.git("clone", "--quiet", "--bare", str(lead.path), str(host.folder / "git" / "lead"))
    address = ("--upstream", f"lead={host.address}/git/lead")
    host.cut_after = cut_after
    assert solo.forkman("sync", *address).code == 3
    assert not solo.mirror("lead").path.exists()
    host.cut_after = None
    solo.ok("sync", *address)


@pytest.mark.parametrize("cut_after", [10, 150])
def test_an_archive_that_is_cut_off_is_not_used(
    solo: Project, host: Host, monkeypatch: pytest.MonkeyPatch, cut_after: int
) -> None:
    monkeypatch.setattr("rebase.archives.ATTEMPTS", 1)
    monkeypatch.setenv("PIP_INDEX_URL", f"{host.address}/simple/")
    text = solo.manifest_path("lead").read_text()
    archives = '[archives]\npackage = "lead"\ntag = "v{version}"\npin = "1.0"\n[pin]'
    solo.manifest_path("lead").write_text(text.replace("[pin]", archives))
    host.publish("lead", "1.0", {"app.py": lines()})
    host.publish("lead", "1.1", {"app.py": lines({25: "upstream 25"})})
    shutil.rmtree(solo.upstream("lead").path)
    before = solo.files()

    host.cut_after = cut_after
    assert solo.forkman("sync").code == 3
    assert solo.files() == before
    host.cut_after = None
    solo.ok("sync")
    assert solo.manifest("lead")["archives"]["pin"] == "1.1"


# -- two at once ---------------------------------------------------------------------------------


def test_a_second_run_is_told_who_is_at_work(solo: Project) -> None:
    script = (
        "import sys, time; from pathlib import Path; from rebase.workspace import Workspace\n"
        "with Workspace(Path.cwd()).lock(): print('locked', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], cwd=solo.root,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as other:  # fmt: skip
        assert other.stdout and other.stdin
        other.stdout.readline()
        for command in (["sync"], ["fetch"], ["edit", "lead"], ["abort", "lead"]):
            done = solo.forkman(*command)
            assert done.code == 3
            assert f"process {other.pid}" in done.err
        solo.ok("status")  # looking is no harm
        other.stdin.close()
    solo.ok("sync")


def test_of_two_runs_at_once_one_lands_and_the_other_keeps_out(solo: Project) -> None:
    runs = [
        subprocess.Popen(
            [sys.executable, "-m", "rebase.cli", "sync"],
            cwd=solo.root, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )
        for _ in range(2)
    ]  # fmt: skip
    assert sorted(run.wait() for run in runs) in ([0, 0], [0, 3])
    assert solo.pin("lead") == "v1.1"
    assert "Nothing moved" in solo.ok("sync").out


def test_a_queue_edited_while_a_sync_runs_is_not_overwritten(
    solo: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rebase import export

    path = solo.root / "forks" / "lead" / "rank-by-device.patch"
    verify = export.verify

    def meanwhile(*args: Any) -> export.Verification:
        path.write_text(path.read_text() + "edited\n")
        return verify(*args)

    solo.ok("fetch")
    monkeypatch.setattr(export, "verify", meanwhile)
    done = solo.forkman("sync")
    assert done.code == 1
    assert "rank-by-device.patch was edited while forkman was working" in done.err
    assert path.read_text().endswith("edited\n")
    assert solo.pin("lead") == "v1.0"

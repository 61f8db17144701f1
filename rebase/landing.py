"""Landing: what a run decided is written all together or not at all.

A landing is a set of files (pins, queues, exports) and of refs in the mirrors. It is prepared
beside what it replaces, decided by one rename, then carried out; whoever comes after a killed run
carries it out to the end, or removes what was prepared.

    <root>/.forkman/landing/lock          locked while a run lives; the lock goes with its process
    <root>/.forkman/landing/holder        one line: who has it
    <root>/.forkman/landing/plan.json     a landing being prepared; nothing has changed yet
    <root>/.forkman/landing/journal.json  that file under its second name: decided, carried out
    <folder of a target>/.forkman-<16 hexadecimal digits>-<n>    the new content of a target

Plan and journal are one JSON object (paths in the project are relative to its root, so that it may
be moved or mounted elsewhere; others are absolute):

    begun         when, in local time
    steps         [target, staged, old, new] for each file whose bytes change: the SHA-256 of its
                  content before and after, null where there is none; staged is null for a deletion
    directories   those made for the landing, outermost first
    refs          {git directory: {ref: commit, or null to delete it}}

New content lies in the folder of its target, because only there a rename is certain to work: two
folders of one device can still be two mounts. A full disk therefore shows before the decision.
"""

import json
import os
import stat
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from rebase import refs
from rebase.errors import EnvironmentFault, NeedsPerson
from rebase.git import GitError, ObjectId
from rebase.words import reason

Refs = Mapping[str, ObjectId | None]

_NO_PLAIN_FILE = "no plain file"


@dataclass(frozen=True)
class Landing:
    """What a run decided to write.

    files: absolute path → its new content, None where the file goes; in the project or elsewhere.
    refs: git directory → its refs that move, None where one goes. They are derived from the files.
    seen: absolute path → the content (None: no file) the decision rests on. Where a file is no
        longer that, somebody edited it meanwhile and nothing is landed.
    """

    files: Mapping[Path, bytes | None]
    refs: Mapping[Path, Refs] = field(default_factory=dict)
    seen: Mapping[Path, bytes | None] = field(default_factory=dict)


class _Step(NamedTuple):
    target: Path
    staged: Path | None
    old: str | None
    new: str | None


@dataclass(frozen=True)
class _Plan:
    begun: str
    steps: tuple[_Step, ...]
    directories: tuple[Path, ...]
    refs: Mapping[Path, Refs]


@contextmanager
def lock(state: Path) -> Iterator[None]:
    """Be the only run of this project that writes; again within the same run is no harm.

    state: the folder `<root>/.forkman/landing`, made where it is missing.
    Raises EnvironmentFault at once where another run holds the lock or `state` cannot be written.
    """
    from filelock import FileLock, Timeout  # only runs that write need it

    holder = state / "holder"
    try:
        state.mkdir(parents=True, exist_ok=True)
        held = FileLock(state / "lock", timeout=0, is_singleton=True)
        outermost = not held.is_locked
        held.acquire()
    except Timeout:
        who = ""
        with suppress(OSError):
            who = holder.read_text("utf-8", "replace").strip()
        raise EnvironmentFault(
            f"Another run is at work on this project: {who or 'it does not say which'}.",
            kept="Nothing was done.",
            todo="Run this again when that run has ended.",
        ) from None
    except (OSError, NotImplementedError) as error:  # the latter: a file system without locks
        why = reason(error) if isinstance(error, OSError) else error
        raise EnvironmentFault(f"{state} cannot be locked: {why}") from error
    try:
        if outermost:
            # Not the whole command line: an upstream's address may hold a password.
            command = " ".join([Path(sys.argv[0]).name, *sys.argv[1:2]])
            with _fault(f"{holder} cannot be written"):
                holder.write_text(f"{command!r}, process {os.getpid()}, since {_now()}\n", "utf-8")
        yield
    finally:
        held.release()


def land(state: Path, landing: Landing) -> None:
    """Write all of `landing`; files that have their new content already are not touched.

    A file keeps its mode. Directories are made as needed, and one that a deletion empties goes.
    Raises EnvironmentFault where it cannot be written (before the decision nothing has changed,
    after it `recover` goes on), NeedsPerson where a file that was `seen` was edited meanwhile.
    """
    with lock(state):
        recover(state)
        if (state / "plan.json").exists():  # which recovery let be
            _clear_away(state)
        plan = _prepare(landing)
        if not plan.steps and not plan.refs:
            return
        journal = state / "journal.json"
        try:
            with _fault(f"{state} cannot be written"):
                _stage(state, plan, landing)
                (state / "plan.json").replace(journal)  # the decision
        except BaseException:
            if not journal.exists():
                with suppress(EnvironmentFault):  # the next run tries again; the cause is told
                    _undo(state, plan)
            raise
        _carry_out(state, plan)


def recover(state: Path) -> str | None:
    """Finish a landing that was decided and interrupted, or remove one that was not decided.

    Run it before anything reads or writes project files. Returns what it did, as a sentence; None
    (without any lock) where nothing was to do. What was not decided and cannot be removed stays, as
    the sentence then says: it stops nobody who only reads.
    Raises EnvironmentFault where another run is landing just now or the landing cannot go on, and
    NeedsPerson where a target was edited since: neither version is lost.
    """
    path, journal = state / "plan.json", state / "journal.json"
    if not (path.exists() or journal.exists()):
        return None
    if not journal.exists() and not os.access(state, os.W_OK):
        return f"An interrupted landing cannot be cleared away: {state} is read-only."
    with lock(state):
        if journal.exists():
            try:
                plan = _load(state, journal)
            except ValueError as error:
                raise EnvironmentFault(
                    f"{journal}, which lists a landing that was interrupted, is damaged: {error}",
                    todo="Check the disk. Then remove that file and the .forkman-* files in forks/,"
                    " manifests/ and the exports, look at `git status`, and run `forkman sync`.",
                ) from error
            return _carry_out(state, plan)
        if path.exists():
            try:
                _clear_away(state)
            except EnvironmentFault as error:
                return f"{error.what}. Nothing of it was landed, and it counts for nothing."
            return "Removed what an interrupted landing had prepared; nothing of it was landed."
    return None


def _clear_away(state: Path) -> None:
    """Remove what an undecided landing prepared."""
    try:
        plan = _load(state, state / "plan.json")
    except ValueError:  # killed while writing it, when nothing was staged yet
        plan = _Plan("", (), (), {})
    _undo(state, plan)


# -- before the decision -------------------------------------------------------------------------


def _prepare(landing: Landing) -> _Plan:
    """Compare with what is there, and check that it can be replaced."""
    parents = {parent for path in landing.files for parent in path.parents}
    token = os.urandom(8).hex()
    steps = []
    for path, content in landing.seen.items():
        if _digest(path) != _sha256(content):
            raise NeedsPerson(
                f"{path} was edited while forkman was working.",
                todo="Run the same command again: it will start from the edited file.",
            )
    for number, (path, content) in enumerate(sorted(landing.files.items())):
        if not path.is_absolute() or ".." in path.parts or path in parents:
            raise ValueError(f"{path} cannot be a target")
        old, new = _digest(path), _sha256(content)
        if old == _NO_PLAIN_FILE:
            raise EnvironmentFault(
                f"{path} is a link or no file; forkman replaces only plain files.",
                todo="Move it away, then run this again.",
            )
        folder = next(parent for parent in path.parents if parent.exists())
        if old != new and folder.is_dir() and not os.access(folder, os.W_OK | os.X_OK):
            verb = "deleted" if new is None else "written"
            raise EnvironmentFault(
                f"{path} cannot be {verb}: {folder} is read-only.",
                todo=f"Make {folder} writable, then run this again.",
            )
        staged = None if content is None else path.parent / f".forkman-{token}-{number}"
        if old != new:
            steps.append(_Step(path, staged, old, new))
    missing = {
        parent
        for step in steps
        if step.staged
        for parent in step.target.parents
        if not parent.exists()
    }
    return _Plan(_now(), tuple(steps), tuple(sorted(missing)), landing.refs)


def _stage(state: Path, plan: _Plan, landing: Landing) -> None:
    """Put everything the landing needs on the disks, and try its refs."""
    for git_dir, moves in plan.refs.items():
        with _fault(f"The refs of {git_dir} cannot be moved"):
            refs.move(git_dir, moves, log=True, dry=True)
    _write(state / "plan.json", _dump(state, plan), state / "plan.json")
    _sync([state])
    for directory in plan.directories:
        with _fault(f"{directory} cannot be made"):
            directory.mkdir(exist_ok=True)
    for step in plan.steps:
        content = landing.files[step.target]
        if step.staged and content is not None:
            _write(step.staged, content, step.target)
    _sync([step.target.parent for step in plan.steps])
    _sync([directory.parent for directory in plan.directories])


def _write(path: Path, content: bytes, target: Path) -> None:
    """Write a new file, safe on the disk, with the mode that `target` has."""
    with _fault(f"{target} cannot be written"), path.open("xb") as file:
        if target.exists():
            os.fchmod(file.fileno(), stat.S_IMODE(target.stat().st_mode))
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _undo(state: Path, plan: _Plan) -> None:
    """Remove what was prepared: all that can be; its plan last, when nothing is left."""
    left: list[OSError] = []
    for step in plan.steps:
        if step.staged:
            try:
                _remove(step.staged)
            except OSError as error:
                left.append(error)
    for directory in reversed(plan.directories):
        with suppress(OSError):  # somebody put something there
            directory.rmdir()
    with _fault("What an interrupted landing had prepared cannot be removed"):
        if left:
            raise left[0]
        (state / "plan.json").unlink(missing_ok=True)


# -- after the decision --------------------------------------------------------------------------


def _carry_out(state: Path, plan: _Plan) -> str:
    """Do what of a decided landing is not done yet, and say it; the journal goes last."""
    todo: list[_Step] = []
    edited: list[_Step] = []
    left: list[Path] = []
    for step in plan.steps:
        now = _digest(step.target)
        if now == step.new:
            continue
        if step.staged and step.staged.exists():
            (todo if now == step.old else edited).append(step)
        elif step.staged or now != step.old:
            # Its new content was removed, as told below, or it was to go and was edited.
            left.append(step.target)
        else:
            todo.append(step)
    if edited:
        raise NeedsPerson(
            f"A landing begun {plan.begun} was interrupted, and since then edited: "
            + ", ".join(f"{step.target} (its new content is in {step.staged})" for step in edited),
            kept="Your edits and the new contents are all there; nothing more is landed till then.",
            todo="For each file, either move the new content onto it (a merge of both is fine), or"
            " remove the new content to keep the file as it is. Then run this again.",
        )
    with _fault(
        f"A landing begun {plan.begun} is decided but stopped half-way",
        kept=f"What it lands is safe; {state / 'journal.json'} lists it.",
        todo="Remove the cause, then run any forkman command: it finishes the landing first.",
    ):
        _sync([state])
        for step in todo:
            if step.staged:
                step.staged.replace(step.target)
        _sync([step.target.parent for step in plan.steps])
        for step in plan.steps:  # deletions, now that every successor is safe on the disk
            if step.staged:
                _remove(step.staged)
            elif step.target not in left:
                _remove(step.target)
                with suppress(OSError):  # it holds other files
                    step.target.parent.rmdir()
        _sync([step.target.parent for step in plan.steps])
        for git_dir, moves in plan.refs.items():
            # A mirror removed meanwhile took its branch along; the next replay makes it again.
            if git_dir.exists():
                refs.move(git_dir, moves, log=True)
        (state / "journal.json").unlink()
        _sync([state])
    said = f"Finished a landing begun {plan.begun} that was interrupted."
    if left:
        said += f" Left as they are, edited since: {', '.join(map(str, left))}."
    return said


# -- files ---------------------------------------------------------------------------------------


def _dump(state: Path, plan: _Plan) -> bytes:
    root = state.parent.parent

    def name(path: Path | None) -> str | None:
        if path is None:
            return None
        return str(path.relative_to(root) if path.is_relative_to(root) else path)

    return json.dumps(
        {
            "begun": plan.begun,
            "steps": [[name(s.target), name(s.staged), s.old, s.new] for s in plan.steps],
            "directories": [name(path) for path in plan.directories],
            "refs": {name(git_dir): dict(moves) for git_dir, moves in plan.refs.items()},
        },
        indent=1,
    ).encode()


def _load(state: Path, path: Path) -> _Plan:
    """Read a plan or journal; ValueError where it is not whole."""
    root = state.parent.parent
    with _fault(f"{path} cannot be read"):
        data = json.loads(path.read_bytes())
    return _Plan(
        data["begun"],
        tuple(
            _Step(root / target, staged and root / staged, old, new)
            for target, staged, old, new in data["steps"]
        ),
        tuple(root / name for name in data["directories"]),
        {root / name: moves for name, moves in data["refs"].items()},
    )


def _sha256(content: bytes | None) -> str | None:
    import hashlib  # `recover` runs first in every command and seldom has anything to compare

    return None if content is None else hashlib.sha256(content).hexdigest()


def _digest(path: Path) -> str | None:
    """The SHA-256 of a file, None where there is none, `_NO_PLAIN_FILE` for anything else."""
    with _fault(f"{path} cannot be read"), suppress(FileNotFoundError, NotADirectoryError):
        if not stat.S_ISREG(path.lstat().st_mode):
            return _NO_PLAIN_FILE
        return _sha256(path.read_bytes())
    return None


def _remove(path: Path) -> None:
    # A read-only file system refuses to remove even what is not there.
    with suppress(FileNotFoundError, NotADirectoryError):
        path.lstat()
        path.unlink()


def _sync(directories: Iterable[Path]) -> None:
    """Make the names in these directories safe on the disk."""
    for directory in set(directories):
        with suppress(FileNotFoundError, NotADirectoryError):  # it went with its last file
            descriptor = os.open(directory, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            except OSError as error:
                error.filename = str(directory)
                raise
            finally:
                os.close(descriptor)


@contextmanager
def _fault(what: str, kept: str = "Nothing was changed.", todo: str = "") -> Iterator[None]:
    """Tell what the system or git refuses as an EnvironmentFault."""
    try:
        yield
    except (OSError, GitError) as error:
        why = reason(error) if isinstance(error, OSError) else error
        raise EnvironmentFault(f"{what}: {why}", kept=kept, todo=todo) from error


def _now() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S %z")

"""Exports: the patches downstream applies, and the index that says onto what.

    <out>/<export name>             a fork's whole change as one patch; nothing but the diff
    <out>/<fork>/0001-<slug>.patch  the same as mails for `git am --keep --keep-cr`, one a change
    <out>/index.json                what it all is

The index is JSON in UTF-8, keys sorted, two spaces of indentation, a final newline:

    {"version": 1,
     "forks": {
       "<fork>": {
         "fork":     the same name
         "upstream": the address of upstream's repository
         "source":   "git", or "archives" where the pin is a release unpacked from a package index
         "pin":      {"commit": 40 digits, "tag": name or null}; with archives, of the history
                     that forkman makes of them
         "layers":   [{"fork", "path", "blob"}]: patches that go on the pin before ours, in order;
                     where each lies in another fork's upstream, and its blob
         "before":   the tree of the pin with its layers: what the patch applies to
         "after":    the tree with the patch applied
         "patch":    {"path", "sha256"}: the one patch; paths are relative to the index's folder;
                     null where `after` is `before`, for git apply refuses a patch without a diff
         "series":   [{"path", "sha256"}]: the mails, in order
         "empty":    [name of a change]: those without a diff, at which git am would stop; they are
                     in no file}}}

The same input gives the same bytes on any machine. `verify` applies what was *written* with every
tool downstream may use and compares trees, on a small tree of the touched files. `apply_to` is
downstream's own tool: all of a patch or nothing, in any directory.
"""

import hashlib
import json
import os
import re
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from rebase import mail, patch
from rebase.errors import EnvironmentFault, NeedsPerson, UsageError
from rebase.git import EMPTY_TREE, Git, GitError, ObjectId
from rebase.mail import Mail
from rebase.objects import EXECUTABLE, FILE, SUBMODULE, SYMLINK, TREE, Entry, Objects
from rebase.outcome import Layer, Pin

INDEX = "index.json"
_VERSION = 1


@dataclass(frozen=True)
class ForkExport:
    """A fork that is to be exported.

    upstream: the address of upstream's repository. base: the tree of the pin with its layers;
    tip: the tree of the branch. changes: its commits, each with the name of its file in the series.
    name: of the exported patch.
    """

    fork: str
    upstream: str
    source: Literal["git", "archives"]
    pin: Pin
    layers: tuple[Layer, ...]
    base: ObjectId
    tip: ObjectId
    changes: tuple[tuple[str, Mail], ...]
    name: str


@dataclass(frozen=True)
class File:
    """An exported file; path: relative to the index's folder."""

    path: str
    sha256: str


@dataclass(frozen=True)
class Exported:
    """What the index says of one fork."""

    fork: str
    upstream: str
    source: Literal["git", "archives"]
    pin: Pin
    layers: tuple[Layer, ...]
    before: ObjectId
    after: ObjectId
    patch: File | None
    series: tuple[File, ...]
    empty: tuple[str, ...]

    @property
    def files(self) -> tuple[File, ...]:
        return (self.patch, *self.series) if self.patch else self.series


# -- writing -------------------------------------------------------------------------------------


def export(objects: Objects, fork: ForkExport) -> tuple[Exported, dict[str, bytes]]:
    """One fork's entry in the index, and its files: path relative to the index's folder → content.

    Writing them is the caller's, together with the index.
    """
    whole = patch.diff(objects, fork.base, fork.tip)
    changes = [(name, change) for name, change in fork.changes if change.diff]
    series = {
        f"{fork.fork}/{number:04}-{_slug(name)}.patch": mail.write(change)
        for number, (name, change) in enumerate(changes, 1)
    }
    entry = Exported(
        fork.fork, fork.upstream, fork.source, fork.pin, fork.layers,
        before=fork.base, after=fork.tip,
        patch=File(fork.name, _sha256(whole)) if whole else None,
        series=tuple(File(path, _sha256(content)) for path, content in series.items()),
        empty=tuple(name for name, change in fork.changes if not change.diff),
    )  # fmt: skip
    return entry, ({fork.name: whole} if whole else {}) | series


def index(forks: Iterable[Exported]) -> bytes:
    """The content of `index.json`."""
    content = {"version": _VERSION, "forks": {entry.fork: asdict(entry) for entry in forks}}
    return (json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()


def _slug(name: str) -> str:
    return re.sub(r"\.(patch|py)$", "", name)


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


# -- reading -------------------------------------------------------------------------------------


class DamagedIndex(UsageError):
    """An index that says nothing this forkman can use; only a new export can mend it."""


_HEX = {"sha256": re.compile("[0-9a-f]{64}"), "an object's id": re.compile("[0-9a-f]{40}")}
_SAFE_PATH = re.compile(r"(?!.*(^|/)\.)[^/\\\0-\x1f\x7f]+(/[^/\\\0-\x1f\x7f]+)*")


def read_index(path: Path) -> dict[str, Exported]:
    """The forks of an index, by name. path: the index, or the folder it is in.

    Raises UsageError where there is none, DamagedIndex where it is no index of ours, or names files
    outside its folder.
    """
    from pydantic import TypeAdapter, ValidationError  # only who reads an index pays for it

    path = _index_file(path)
    try:
        content = json.loads(path.read_bytes())
        version = content["version"]
        if version != _VERSION:
            raise DamagedIndex(
                f"{path} is of version {version!r}; this forkman reads version {_VERSION}.",
                todo="Use the forkman that wrote it, or export again.",
            )
        forks = TypeAdapter(dict[str, Exported]).validate_python(content["forks"])
    except OSError as error:
        raise UsageError(f"There is no index to read at {path}: {error.strerror}.") from None
    except ValidationError as error:
        mistakes = (
            f"{'.'.join(map(str, ('forks', *each['loc'])))}: {each['msg']}"
            for each in error.errors(include_url=False)
        )
        raise _bad_index(path, mistakes) from None
    except (ValueError, KeyError, TypeError):
        raise _bad_index(path, ["it is no index of forkman's"]) from None
    if wrong := list(_wrong(path.parent, forks)):
        raise _bad_index(path, wrong)
    return forks


def listed(out: Path, *, all_anew: bool) -> dict[str, Exported]:
    """The forks of the index in the folder `out`, by name; none where there is no index yet.

    all_anew: every fork is exported anew, so a damaged index does not matter and counts as none.
    Otherwise raises DamagedIndex: what it said of the other forks would be lost.
    """
    if not (out / INDEX).exists():
        return {}
    try:
        return read_index(out)
    except DamagedIndex:
        if all_anew:
            return {}
        raise


def _index_file(path: Path) -> Path:
    return path / INDEX if path.is_dir() else path


def _bad_index(path: Path, wrong: Iterable[str]) -> DamagedIndex:
    return DamagedIndex(
        "\n".join(f"{path}: {mistake}" for mistake in wrong),
        todo="Export all forks again: forkman export.",
    )


def _wrong(folder: Path, forks: Mapping[str, Exported]) -> Iterator[str]:
    """What types cannot tell is wrong with an index."""
    for name, entry in forks.items():
        if name != entry.fork:
            yield f"forks.{name!a}.fork: is {entry.fork!a}"
        ids = (entry.before, entry.after, entry.pin.commit, *(layer.blob for layer in entry.layers))
        for what, values in (
            ("an object's id", ids),
            ("sha256", tuple(file.sha256 for file in entry.files)),
        ):
            for value in values:
                if not _HEX[what].fullmatch(value):
                    yield f"forks.{name!a}: {value!a} is no {what.removeprefix('an ')}"
        for file in entry.files:
            inside = _SAFE_PATH.fullmatch(file.path) and (
                (folder / file.path).resolve().is_relative_to(folder.resolve())
            )
            if not inside:
                yield f"forks.{name!a}: the path {file.path!a} leads out of the index's folder"


def _pick(forks: Mapping[str, Exported], fork: str | None, path: Path) -> Exported:
    if fork is None and len(forks) == 1:
        return next(iter(forks.values()))
    if fork is None or fork not in forks:
        asked = "Several forks are" if fork is None else f"No fork {fork!a} is"
        raise UsageError(
            f"{asked} in {path}.", todo=f"Name one of: {', '.join(sorted(forks)) or 'none'}."
        )
    return forks[fork]


# -- verifying -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Finding:
    """What is wrong with an export. file: relative to the index's folder; how: what showed it."""

    file: str
    how: str
    what: str

    def __str__(self) -> str:
        return f"{self.file}: {self.how}: {self.what}"


@dataclass(frozen=True)
class Verification:
    """What came of verifying one fork's export.

    done: the ways of applying it that gave the right tree; skipped: those that were not tried, each
    with why; what is wrong is in `findings`.
    """

    fork: str
    done: tuple[str, ...]
    skipped: tuple[tuple[str, str], ...]
    findings: tuple[Finding, ...]


def verify(objects: Objects, path: Path, fork: str, base: ObjectId) -> Verification:
    """Apply what was written for `fork` in every way downstream may, and compare the trees.

    objects: of upstream's mirror; nothing is written there. path: the index, or its folder.
    base: the tree of the pin with its layers, as the caller made it anew.
    Raises UsageError where the index cannot be used.
    """
    entry = _pick(read_index(path), fork, path)
    folder = _index_file(path).parent
    findings = []
    if base != entry.before:
        findings.append(
            Finding(INDEX, "tree before", f"is {entry.before}, but the pin's with layers is {base}")
        )
    contents: dict[str, bytes] = {}
    for file in entry.files:
        try:
            content = contents[file.path] = (folder / file.path).read_bytes()
            patch.parse(content if file == entry.patch else mail.read(content).diff)
        except OSError as error:
            findings.append(Finding(file.path, "read", error.strerror or "unreadable"))
            continue
        except (UsageError, mail.BadMail) as error:
            findings.append(Finding(file.path, "read", str(error)))
        if _sha256(content) != file.sha256:
            findings.append(Finding(file.path, "sha256", "was changed after it was exported"))
    if any(finding.how == "read" for finding in findings):
        return Verification(fork, (), (), tuple(findings))

    whole = contents.pop(entry.patch.path) if entry.patch else b""
    done, skipped = [], []
    with _bench(objects, base, whole, contents) as bench:
        for how, where, way in _WAYS:
            given = contents if where == "series" else whole
            if not given and base == entry.after:
                skipped.append((how, "there is nothing to apply"))
                continue
            name = entry.patch.path if entry.patch and where == "patch" else fork
            try:
                tree = way(bench) if given else base
            except _Unfit as reason:
                skipped.append((how, str(reason)))
                continue
            except patch.Rejected as error:
                findings += (Finding(name, how, line) for line in str(error).splitlines())
            except UsageError as error:
                findings.append(Finding(name, how, error.what))
            except _Stopped as error:
                findings += (Finding(error.file or name, how, line) for line in error.lines)
            else:
                if tree == entry.after:
                    done.append(how)
                else:
                    findings.append(Finding(name, how, _other(bench.objects, tree, entry.after)))
    return Verification(fork, tuple(done), tuple(skipped), tuple(findings))


class _Unfit(Exception):
    """A patch that one of the ways to apply it is not made for."""


class _Stopped(Exception):
    """A tool stopped; file: at which exported file, where that is known."""

    def __init__(self, file: str | None, said: str) -> None:
        super().__init__(said)
        self.file = file
        self.lines = said.splitlines() or ["stopped"]


@dataclass(frozen=True)
class _Bench:
    """Where an export is tried: a repository that borrows the mirror's objects, and a folder.

    small: `base`, reduced to what is at the touched paths or in their way. What needs a worktree
    works on this one; the rest of the tree would only cost time.
    """

    objects: Objects
    folder: Path
    base: ObjectId
    small: ObjectId
    touched: frozenset[bytes]
    patch: bytes
    series: Mapping[str, bytes]

    def whole(self, small: ObjectId) -> ObjectId:
        """`base`, changed as `small` was."""
        changed = self.objects.changed(self.small, small)
        return self.objects.splice(self.base, {path: now for path, (_, now) in changed.items()})

    def check_out(self) -> tuple[Path, dict[str, str]]:
        """A new worktree of `small`, and the environment in which git works in it."""
        worktree = Path(tempfile.mkdtemp(dir=self.folder))
        env = {
            "GIT_DIR": str(self.objects.git.directory),
            "GIT_WORK_TREE": str(worktree),
            "GIT_INDEX_FILE": f"{worktree}.index",
        }
        self.objects.flush()
        Git(worktree).run("read-tree", "--reset", "-u", self.small, env=env)
        return worktree, env


@contextmanager
def _bench(
    mirror: Objects, base: ObjectId, whole: bytes, series: Mapping[str, bytes]
) -> Iterator[_Bench]:
    touched = patch.paths(whole).union(
        *(patch.paths(mail.read(content).diff) for content in series.values())
    )
    mirror.flush()
    around = patch.around(mirror, base, touched)
    mirror.need(around)  # a partial clone fetches them; a borrower could not
    lender = Path(mirror.repository.path).resolve() / "objects"
    with _scratch(lender) as objects:
        small = objects.splice(EMPTY_TREE, around)
        folder = objects.git.directory.parent
        yield _Bench(objects, folder, base, small, touched, whole, series)


@contextmanager
def _scratch(lender: Path | None = None) -> Iterator[Objects]:
    """An empty repository in a folder that goes with it; lender: objects it sees as its own."""
    with tempfile.TemporaryDirectory(prefix="forkman-") as folder:
        git_dir = Path(folder).resolve() / "scratch.git"
        Git(git_dir.parent).run("init", "--quiet", "--bare", "--template=", str(git_dir))
        if lender:
            alternates = git_dir / "objects" / "info" / "alternates"
            alternates.parent.mkdir(exist_ok=True)
            alternates.write_text(f"{lender}\n")
        try:
            yield Objects(git_dir)
        except OSError as error:
            place = error.filename or folder
            raise EnvironmentFault(f"{place} cannot be written: {error.strerror}.") from error


def _other(objects: Objects, tree: ObjectId, wanted: ObjectId) -> str:
    """In words, how `tree` is not the one that is wanted."""
    if objects.git.resolve(wanted, "tree") is None:
        return f"applies, but gives the tree {tree} instead of {wanted}"
    names = [patch.show(path) for path in sorted(objects.changed(wanted, tree))]
    return "applies, but gives another " + ", ".join(names[:10]) + (", …" if names[10:] else "")


def _git_apply(bench: _Bench) -> ObjectId:
    return patch.apply(bench.objects, bench.base, bench.patch)


def _git_apply_3way(bench: _Bench) -> ObjectId:
    return patch.apply(bench.objects, bench.base, bench.patch, three_way=True)


def _patch_p1(bench: _Bench) -> ObjectId:
    if shutil.which("patch") is None:
        raise _Unfit("patch is not installed")
    _check_fit_for_patch(bench.patch)
    worktree, _ = bench.check_out()
    done = subprocess.run(
        ["patch", "-p1", "--force"],  # asks nothing, and never takes it for a reversed one
        cwd=worktree,
        input=bench.patch,
        capture_output=True,
        env={"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C"},
    )
    if done.returncode:
        said = (done.stdout + done.stderr).split(b"\n")
        failed = [line for line in said if b"hunks FAILED" in line or b"hunk FAILED" in line]
        raise _Stopped(None, "\n".join(map(patch.show, failed or said)))
    return bench.whole(_tree(bench.objects, _look(worktree, bench.touched)))


def _check_fit_for_patch(whole: bytes) -> None:
    """Raise _Unfit where patch(1) cannot be expected to do what git does."""
    files = patch.parse(whole)
    paths = patch.paths(whole)
    if any(path.startswith(other + b"/") for path in paths for other in paths):
        raise _Unfit("a file and a directory change places")
    for file in files:
        modes = set(file.modes) - {None}
        emptied = file.new and not any(hunk.after for hunk in file.hunks)
        if not file.hunks or emptied or modes not in ({FILE}, {EXECUTABLE}):
            raise _Unfit(f"{patch.show(file.path)} is binary, empty, a link, or changes its mode")
        if file.old is None and modes == {EXECUTABLE}:
            raise _Unfit(f"{patch.show(file.path)} is new and executable")
        if not re.fullmatch(rb"[!#-\[\]-~]+", file.path):
            raise _Unfit(f"the name {patch.show(file.path)} is unusual")


def _am_keep(bench: _Bench) -> ObjectId:
    return _am(bench, "--keep", "--keep-cr")


def _am_plain(bench: _Bench) -> ObjectId:
    if any(b"\r\n" in mail.read(content).diff for content in bench.series.values()):
        raise _Unfit("lines end in CR LF, which needs --keep-cr")
    return _am(bench)


_NOBODY = b"forkman <forkman> 0 +0000"
_SWIFT = ("-c", "gc.auto=0", "-c", "maintenance.auto=false", "-c", "core.fsync=none")


def _am(bench: _Bench, *options: str) -> ObjectId:
    """git-am on the mails as they are, in a worktree of `bench.small`."""
    commit = bench.objects.commit(bench.small, [], _NOBODY, b"")
    worktree, env = bench.check_out()
    env |= {"GIT_COMMITTER_NAME": "forkman", "GIT_COMMITTER_EMAIL": "forkman"}
    mails = []
    for number, content in enumerate(bench.series.values(), 1):
        mails.append(f"{worktree}.{number:04}")
        Path(mails[-1]).write_bytes(content)
    git = Git(worktree)
    git.run("update-ref", "HEAD", commit, env=env)
    try:
        git.run(*_SWIFT, "am", "--quiet", *options, *mails, env=env)
    except GitError as error:
        shutil.rmtree(bench.objects.git.directory / "rebase-apply", ignore_errors=True)
        raise _where_it_stopped(bench, error.stderr) from None
    tree = git.run("rev-parse", "HEAD^{tree}", env=env)
    return bench.whole(ObjectId(tree.decode("ascii").strip()))


def _where_it_stopped(bench: _Bench, said: str) -> _Stopped:
    """At which mail, and why; git-am itself says little."""
    tree = bench.base
    for file, content in bench.series.items():
        try:
            tree = patch.apply(bench.objects, tree, mail.read(content).diff)
        except patch.Rejected as rejected:
            return _Stopped(file, str(rejected))
        except UsageError as wrong:
            return _Stopped(file, wrong.what)
    return _Stopped(None, said)


# How it is called, what it applies, and what does it: gives the tree; raises patch.Rejected,
# UsageError, _Stopped, _Unfit.
_WAYS: tuple[tuple[str, Literal["patch", "series"], Callable[[_Bench], ObjectId]], ...] = (
    ("git apply", "patch", _git_apply),
    ("git apply --3way", "patch", _git_apply_3way),
    ("patch -p1", "patch", _patch_p1),
    ("git am --keep --keep-cr", "series", _am_keep),
    ("git am", "series", _am_plain),
)


# -- downstream ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Applied:
    """What `apply_to` did, or with `check` would do.

    changed: the files it changed; none where everything was so already.
    moved: those of them that are not as at the pin, but have the lines that matter.
    """

    fork: str
    changed: tuple[bytes, ...]
    moved: tuple[bytes, ...]


_Content = tuple[int, bytes]  # mode and content of a file
_Files = Mapping[bytes, _Content]


def apply_to(
    path: Path,
    checkout: Path,
    fork: str | None = None,
    *,
    reverse: bool = False,
    check: bool = False,
) -> Applied:
    """Apply a fork's patch to a directory that holds its upstream's source: all of it or nothing.

    path: the index, or its folder. checkout: an unpacked archive, a worktree, a directory inside
    another repository; git is not asked what it is, so attributes (line ends) do not count.
    fork: may be left out where the index has one. reverse: take the patch away. check: change
    nothing.

    A file has the change or lacks it by its content's id; where it has neither content, by
    whether the patch applies to it, exactly, forward or backward. A killed run is completed.
    Raises UsageError, NeedsPerson where the content does not fit, EnvironmentFault.
    """
    entry = _pick(read_index(path), fork, path)
    if not checkout.is_dir():
        raise UsageError(f"{checkout} is no directory.")
    if entry.patch is None:  # the branch is as its pin
        return Applied(entry.fork, (), ())
    whole = _read_whole(_index_file(path).parent, entry.patch)
    checkout = checkout.resolve()
    paths = patch.paths(whole)
    before = _look(checkout, paths)
    parts = patch.split_files(whole)
    with _scratch() as objects:
        tree = _tree(objects, before)
        states = {name: _state(objects, tree, part, reverse) for name, part in parts}
        _refuse_misfits(entry, entry.patch.path, checkout, states, reverse)
        lacking = b"".join(part for name, part in parts if not states[name].has)
        after = patch.apply(objects, tree, lacking, reverse=reverse)
        edits: dict[bytes, _Content | None] = {
            name: now and (now.mode, objects.read(now.id))
            for name, (_, now) in objects.changed(tree, after).items()
        }
    if others := edits.keys() - paths:
        raise NeedsPerson(
            f"{checkout} has other files in a directory that {entry.patch.path} makes a file: "
            f"{', '.join(sorted(map(patch.show, others)))}."
        )
    if edits and not check:
        _write(checkout, before, edits)
    moved = (name for name, state in states.items() if not (state.has or state.exact))
    return Applied(entry.fork, tuple(sorted(edits)), tuple(sorted(moved)))


def _read_whole(folder: Path, file: File) -> bytes:
    path = folder / file.path
    try:
        whole = path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path}, which the index names: {error.strerror}.") from None
    if _sha256(whole) != file.sha256:
        raise NeedsPerson(
            f"{path} is not the patch that was exported: its SHA-256 is another.",
            todo="Get the export again; forkman verify says what was changed.",
        )
    for part in patch.parse(whole):
        if SUBMODULE in part.modes:
            raise UsageError(
                f"{path} moves the submodule {patch.show(part.path)}, which is no file.",
                todo="Apply it in a clone: git apply --index.",
            )
    return whole


@dataclass(frozen=True)
class _State:
    """What a file of a checkout is to its part of the patch.

    has: it is already as asked for. exact: its content is the pin's, or the branch's.
    misfit: why it is neither; empty where it fits.
    """

    has: bool
    exact: bool
    misfit: str = ""


def _state(objects: Objects, tree: ObjectId, part: bytes, reverse: bool) -> _State:
    files = patch.parse(part)
    backward = [file.reversed() for file in files]
    if reverse:
        files, backward = backward, files
    if _fits_exactly(objects, tree, files):
        return _State(has=False, exact=True)
    if _fits_exactly(objects, tree, backward):
        return _State(has=True, exact=True)
    lacks = _misfit(objects, tree, part, reverse)
    has = _misfit(objects, tree, part, not reverse)
    if not lacks and not has:
        lacks = f"{patch.show(files[0].path)}: whether it has the change cannot be told"
        return _State(has=False, exact=False, misfit=lacks)
    return _State(has=not has, exact=False, misfit=lacks if has else "")


def _fits_exactly(objects: Objects, tree: ObjectId, files: Sequence[patch.FilePatch]) -> bool:
    """Whether `tree` has the very content that `files` were made from."""
    wanted: dict[bytes, patch.FilePatch | None] = {}
    for file in files:
        for path in file.paths:
            wanted.setdefault(path, None)
        if file.old:
            wanted[file.old] = file
    for path, was in wanted.items():
        entry = objects.find(tree, path)
        if entry is None or entry.mode == TREE or was is None:
            if was or (entry and entry.mode != TREE):
                return False
            continue
        mode, becomes = was.modes
        blob = was.blobs[0].decode("ascii") if was.blobs else ""
        if not entry.id.startswith(blob) or (mode != becomes and mode != entry.mode):
            return False
    return True


def _misfit(objects: Objects, tree: ObjectId, part: bytes, reverse: bool) -> str:
    """Why a part of a patch does not apply; empty where it does."""
    try:
        patch.apply(objects, tree, part, reverse=reverse)
    except patch.Rejected as rejected:
        return str(rejected)
    return ""


def _refuse_misfits(
    entry: Exported, file: str, checkout: Path, states: Mapping[bytes, _State], reverse: bool
) -> None:
    """Raise NeedsPerson unless every file of the checkout fits, alone and beside the others."""
    onto = " and ".join([str(entry.pin), *(layer.path for layer in entry.layers)])
    todo = f"{file} is made for {entry.fork} at {onto}; use that."
    verb = "taken off" if reverse else "applied to"
    if misfits := [state.misfit for state in states.values() if state.misfit]:
        raise NeedsPerson("\n".join((f"{file} cannot be {verb} {checkout}:", *misfits)), todo=todo)
    having = [patch.show(name) for name, state in states.items() if state.has]
    exact = all(state.exact for state in states.values())
    if 0 < len(having) < len(states) and not exact:
        have = "lack the change" if reverse else "have the change already"
        raise NeedsPerson(
            f"{file} cannot be {verb} {checkout}: some of its files {have}, "
            f"and not all are as they were at the pin or on the branch: {', '.join(having)}.",
            todo=todo,
        )


def _look(folder: Path, paths: Collection[bytes]) -> dict[bytes, _Content]:
    """What is at `paths` below a directory, or in their way.

    Of a directory at one of the paths, the files are listed without their content.
    Raises UsageError where a path leads to what is no file, or through a symbolic link that is not
    itself one of the paths: then the patch may replace it by a directory.
    """
    found: dict[bytes, _Content] = {}
    for path in paths:
        parts = path.split(b"/")
        for depth in range(1, len(parts) + 1):
            here = b"/".join(parts[:depth])
            at = folder / os.fsdecode(here)
            try:
                mode = at.lstat().st_mode
            except FileNotFoundError:
                break
            if stat.S_ISDIR(mode):
                if depth == len(parts):
                    inside = (os.fsencode(file.relative_to(folder)) for file in _files_below(at))
                    found |= {file: (FILE, b"") for file in inside if file not in paths}
                continue
            if stat.S_ISLNK(mode) and here not in paths:
                raise UsageError(
                    f"{at} is a symbolic link, and the patch changes files below it.",
                    todo="Apply the patch to the directory in which those files are.",
                )
            if stat.S_ISLNK(mode):
                found[here] = (SYMLINK, os.fsencode(at.readlink()))
            elif stat.S_ISREG(mode):
                found[here] = (EXECUTABLE if mode & stat.S_IXUSR else FILE, at.read_bytes())
            else:
                raise UsageError(f"{at} is neither a file nor a directory.")
            break
    return found


def _files_below(folder: Path) -> Iterator[Path]:
    for parent, _, names in os.walk(folder):
        yield from (Path(parent, name) for name in names)


def _tree(objects: Objects, files: _Files) -> ObjectId:
    return objects.splice(
        EMPTY_TREE,
        {
            path: Entry(mode, objects.write("blob", content))
            for path, (mode, content) in files.items()
        },
    )


def _write(folder: Path, before: _Files, edits: Mapping[bytes, _Content | None]) -> None:
    """Make the edits, or none of them. Raises EnvironmentFault where the system refuses.

    Both the new files and the old are written beside first: what is left is renaming.
    """
    try:
        with tempfile.TemporaryDirectory(prefix=".forkman-", dir=folder) as staging:
            new = _stage(folder, Path(staging, "new"), edits)
            old = _stage(folder, Path(staging, "old"), {path: before.get(path) for path in edits})
            try:
                _move(folder, new)
            except OSError:
                _move(folder, old)
                raise
    except OSError as error:
        raise EnvironmentFault(
            f"{error.filename or folder} cannot be written: {error.strerror}."
        ) from error


def _stage(
    folder: Path, staging: Path, edits: Mapping[bytes, _Content | None]
) -> dict[Path, Path | None]:
    """Write each file below `staging`: its place in `folder` → where it is now."""
    staging.mkdir()
    staged: dict[Path, Path | None] = {}
    for number, (path, edit) in enumerate(sorted(edits.items())):
        place = folder / os.fsdecode(path)
        staged[place] = None
        if edit is None:
            continue
        mode, content = edit
        staged[place] = file = staging / str(number)
        if mode == SYMLINK:
            file.symlink_to(os.fsdecode(content))
            continue
        file.write_bytes(content)
        if place.is_file() and not place.is_symlink():
            file.chmod(stat.S_IMODE(place.stat().st_mode))
        permissions = stat.S_IMODE(file.stat().st_mode) & ~0o111
        readers = permissions >> 2 & 0o111  # who may read it may run it, as git has it
        file.chmod(permissions | readers if mode == EXECUTABLE else permissions)
    return staged


def _move(folder: Path, staged: Mapping[Path, Path | None]) -> None:
    """Remove what goes, and directories it leaves empty; put the new files in their places."""
    for place, file in staged.items():
        if file:
            continue
        if place.exists() or place.is_symlink():
            place.unlink()
        for parent in place.parents:
            if parent == folder or (parent.is_dir() and any(parent.iterdir())):
                break
            if parent.is_dir():
                parent.rmdir()
    for place, file in staged.items():
        if file:
            place.parent.mkdir(parents=True, exist_ok=True)
            file.replace(place)

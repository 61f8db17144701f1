"""Mirrors: bare repositories that hold an upstream's history, fetched over git.

What a mirror holds is said in `refs`; while a fetch runs, also `refs/forkman/incoming/`.

A fetch first brings objects, under `incoming`. Only when all of them are here do the other refs
move, in one transaction; so a network that goes away leaves every branch and tag as it was. A
mirror is made beside its place and renamed into it by its first whole fetch.

Hosts give history without file contents (`--filter=blob:none`) where they can; `complete` brings
the contents of the commits that are needed, in one go. Local repositories are fetched whole, but
for those that lack contents themselves: they give what they have.

Talking to an upstream is the user's own ground: proxies, credentials and `insteadOf` from their
configuration count, as do variables such as GIT_SSH_COMMAND.
"""

import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rebase import address, refs
from rebase.errors import EnvironmentFault, UsageError
from rebase.git import Git, GitError, ObjectId, check_version
from rebase.words import visible

if TYPE_CHECKING:
    import git as gitpython

Progress = Callable[[str, int, int], None]  # what is being done, how much is done, of how much

_INCOMING = "refs/forkman/incoming/"

# Version 0 with no extensions: libgit2 opens no repository with extensions.partialClone, and git
# does not need it once a remote is marked as the promisor.
_CONFIG = f"""\
[core]
\trepositoryformatversion = 0
\tbare = true
\tautocrlf = false
\thooksPath = {os.devnull}
\tlogAllRefUpdates = always
[gc]
\t# In the foreground, where the project's lock holds; and what a replay made is not garbage.
\tautoDetach = false
\tpruneExpire = never
[protocol "ext"]
\tallow = never
[http]
\t# A connection on which nothing comes for two minutes is dead; git itself would wait for ever.
\tlowSpeedLimit = 1
\tlowSpeedTime = 120
"""  # transfer.fsckObjects stays unset: old histories hold objects it refuses, and git's checkout
# refuses dangerous paths by itself.

# Git looks in these for another repository than the one it is pointed at. A hook or an alias that
# calls forkman exports some; GitPython can set variables, not remove them.
_ELSEWHERE = ("GIT_NAMESPACE", "GIT_ALTERNATE_OBJECT_DIRECTORIES")


@dataclass(frozen=True)
class Moved:
    """A tag that names another commit upstream than it does in the mirror."""

    tag: str
    old: ObjectId
    new: ObjectId


@dataclass(frozen=True)
class Gone:
    """A branch that upstream rewrote (to `new`) or deleted (`new` is None); `old` is kept."""

    branch: str
    old: ObjectId
    new: ObjectId | None


@dataclass(frozen=True)
class Fetched:
    """What a fetch brought.

    url: where from, without credentials. new_tags: in the order of their names.
    commits: how many commits are new.
    moved_tags: tags that moved upstream; in the mirror they stay at `old` unless `fetch` was told
    to accept them. aside: tags that upstream deleted and whose names are in the way of new ones;
    they can be named as before. gone: branches that were rewritten or deleted.
    shallow: the commits at which the history ends, because the source has no more of it.
    """

    url: str
    new_tags: tuple[str, ...] = ()
    commits: int = 0
    moved_tags: tuple[Moved, ...] = ()
    aside: tuple[str, ...] = ()
    gone: tuple[Gone, ...] = ()
    shallow: tuple[ObjectId, ...] = ()


# -- fetching ------------------------------------------------------------------------------------


def create(mirror: Path) -> None:
    """Make an empty mirror, under a name beside `mirror` until it is whole.

    Raises EnvironmentFault where it cannot be written.
    """
    with _new(mirror):
        pass


def fetch(
    mirror: Path,
    url: str,
    *,
    progress: Progress | None = None,
    accept_moved_tags: bool = False,
) -> Fetched:
    """Bring what the upstream at `url` has into `mirror`, which is made where there is none.

    A relative path is taken from the current directory. accept_moved_tags: let tags move.
    Raises UsageError for an address or a repository that cannot be used (none of the mirror's
    commits in its history, SHA-256 objects, no branches), EnvironmentFault when git or the network
    fails; the mirror's branches and tags are then as they were.
    """
    check_version()
    address.check(url)
    if address.is_path(url):
        url = str(Path(url).expanduser().absolute())
    try:
        if mirror.exists():
            return _fetch(mirror, mirror.stem, url, progress, accept_moved_tags)
        with _new(mirror) as fresh:
            return _fetch(fresh, mirror.stem, url, progress, accept_moved_tags)
    except GitError as error:
        failed = f"The mirror {mirror} cannot be read or written"
        raise _fault(mirror.stem, failed, [error.stderr]) from error


def unlock(mirror: Path) -> None:
    """Remove the lock files of a git that was killed in `mirror`: nobody else would.

    For a run that holds the project's lock. A git younger than a minute may have outlived the run
    that started it; its locks stay.
    """
    locks = [*mirror.glob("*.lock"), *(mirror / "refs").rglob("*.lock")]
    for lock in [*locks, *mirror.glob("worktrees/*/*.lock")]:
        with suppress(FileNotFoundError):
            if time.time() - lock.stat().st_mtime > 60:
                lock.unlink()


def complete(
    mirror: Path, commits: Iterable[ObjectId], *, progress: Progress | None = None
) -> dict[ObjectId, bytes]:
    """Bring the file contents of `commits` that a blobless mirror lacks, all at once.

    Returns what the upstream does not have either, being a partial copy itself: blob → a path
    (`lacking` says it). Raises EnvironmentFault where the mirror lacks a commit, or the upstream
    cannot be reached or does not give the contents.
    """
    wanted = list(dict.fromkeys(commits))
    for commit, found in zip(wanted, refs.peel(mirror, wanted), strict=True):
        if not found:
            raise EnvironmentFault(
                f"{mirror.stem}: the mirror lacks commit {commit}.",
                todo="Fetch it: forkman fetch. If it stays away, upstream no longer has it.",
            )
    missing = _missing(mirror, wanted)
    if not missing:
        return {}
    url = _origin(mirror)
    source = address.on_this_machine(url)
    absent = set(missing) - _held(source, missing) if source else set()
    asked = [id for id in missing if id not in absent]
    at = ", ".join(commit[:9] for commit in wanted)
    with _talking(mirror, mirror.stem, url, f"The files of {at} could not be fetched") as repo:
        # As git does it for one object: nothing is negotiated, the contents are named.
        repo.git.set_persistent_git_options(c="fetch.negotiationAlgorithm=noop")
        for start in range(0, len(asked), 2000):  # ids in one command line
            _run_fetch(
                repo, url, asked[start : start + 2000], progress, filter="blob:none",
                no_write_fetch_head=True,
            )  # fmt: skip
    return _paths(mirror, wanted, absent)


def lacking(absent: Mapping[ObjectId, bytes]) -> tuple[str, ...]:
    """What a person must know of `complete`'s answer: nothing, or one sentence."""
    if not absent:
        return ()
    names = [visible(path) for path in sorted(absent.values())]
    some = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if names[5:] else "")
    return (f"Its upstream is a partial copy. No change can touch what it lacks: {some}.",)


def fetch_ref(mirror: Path, url: str, ref: str, into: str) -> ObjectId:
    """Bring one ref of the repository at `url` into `mirror`, as its ref `into`, with all contents.

    url: of upstream, or of a fork of it; the mirror's upstream stays what it is.
    ref: a branch, or a commit's full id, which many hosts also give where no ref names it.
    Raises UsageError for an address that cannot be used and where there is no such ref,
    EnvironmentFault when git or the network fails; the mirror's refs are then as they were.
    """
    address.check(url)
    if address.is_path(url):
        url = str(Path(url).expanduser().absolute())
    shown = address.without_credentials(url)
    try:
        with _talking(mirror, mirror.stem, url, f"{ref} of {shown} could not be fetched") as repo:
            _run_fetch(repo, url, [f"+{ref}:{into}"], None, remote=url, no_filter=True)
    except EnvironmentFault as error:
        if "couldn't find remote ref" not in error.what:
            raise
        raise UsageError(
            f"{mirror.stem}: {shown} has no branch {ref}.",
            todo="Correct queue.url and queue.ref in its manifest, or push the branch there.",
        ) from error
    if commit := Git(mirror).resolve(into):
        return commit
    raise UsageError(f"{mirror.stem}: {ref} of {shown} names no commit.")


def _fetch(
    mirror: Path, fork: str, url: str, progress: Progress | None, accept_moved_tags: bool
) -> Fetched:
    git = Git(mirror)
    shown = address.without_credentials(url)
    failed = f"{shown} could not be fetched"
    with _talking(mirror, fork, url, failed) as repo:
        there = _listed(
            fork, url, str(repo.git.ls_remote("--", url, "refs/heads/*", "refs/tags/*"))
        )
    aside = {refs.TAGS + tag: id for tag, id in refs.aside(mirror).items()}
    here = aside | refs.listed(mirror, refs.HEADS, refs.TAGS, refs.KEPT)
    shallow = _shallow(git)
    moved = _moved(refs.tags(mirror), {ref: commit for ref, (_, commit) in there.items()})
    new = {ref for ref, (id, _) in there.items() if here.get(ref) != id}
    deleted = {ref for ref in here if ref.startswith(refs.HEADS) and ref not in there}
    with _pointed_at(git, url), _talking(mirror, fork, url, failed) as repo:
        if not shallow and not deleted and new <= (set() if accept_moved_tags else set(moved)):
            return Fetched(shown, moved_tags=tuple(moved.values()))
        repo.git.set_persistent_git_options(c="core.logAllRefUpdates=false")
        _run_fetch(
            repo, url,
            [f"+refs/heads/*:{_INCOMING}heads/*", f"+refs/tags/*:{_INCOMING}tags/*"],
            progress, prune=True, no_filter=not _gives_history_only(url),
            # Only a mirror that has no whole history yet takes one that is cut off.
            unshallow=bool(shallow), update_shallow=bool(shallow) or not here,
        )  # fmt: skip
        return _move(git, fork, shown, there.keys(), here, aside.keys(), accept_moved_tags)


def _moved(old: dict[str, ObjectId], new: dict[str, ObjectId]) -> dict[str, Moved]:
    """The tags (name → commit) that name another commit among the `new` refs, by ref."""
    return {
        refs.TAGS + tag: Moved(tag, commit, new[refs.TAGS + tag])
        for tag, commit in old.items()
        if new.get(refs.TAGS + tag, commit) != commit
    }


def _move(
    git: Git,
    fork: str,
    url: str,
    there: Set[str],
    here: dict[str, ObjectId],
    aside: Set[str],
    accept_moved_tags: bool,
) -> Fetched:
    """Let branches and tags follow what is under `incoming`: all the refs that are `there`.

    aside: those of the tags `here` that are set aside.
    """
    mirror = git.directory
    staged = refs.listed(mirror, _INCOMING)
    now = {
        (refs.TAGS if ref.startswith(_INCOMING + "tags/") else refs.HEADS)
        + ref.removeprefix(_INCOMING).partition("/")[2]: id
        for ref, id in staged.items()
    }
    if lacking := sorted(
        ref.removeprefix(refs.HEADS).removeprefix(refs.TAGS) for ref in there - now.keys()
    ):
        raise EnvironmentFault(
            f"{fork}: {url} did not give {len(lacking)} of its branches and tags, such as "
            f"{visible(lacking[0])}. It may be shallow, so that what is new there does not join "
            "the history here.",
            kept="The mirror's branches and tags are as they were.",
            todo="Fetch from a whole repository; from that one, try again.",
        )
    old_tips, new_tips = sorted(set(here.values())), sorted(set(staged.values()))
    commits = _count(git, new_tips, without=old_tips)
    strange = old_tips and commits and not set(old_tips) & set(new_tips)  # no ref is equal
    if strange and commits == _count(git, new_tips):
        refs.move(mirror, dict.fromkeys(staged))
        raise UsageError(
            f"{fork}: {url} is another project: it shares no commit with what was fetched before.",
            kept="The mirror's branches and tags are as they were.",
            todo=f"Correct the address; or, if the project has moved there with a new history, "
            f"remove {mirror} and fetch again.",
        )

    # What came is what counts: tags may have moved since they were listed.
    came = refs.commits(mirror, _INCOMING + "tags/")
    moved = _moved(refs.tags(mirror), {refs.TAGS + tag: commit for tag, commit in came.items()})
    if not accept_moved_tags:
        now |= {ref: here[ref] for ref in moved if ref in now}
    changed = {ref: id for ref, id in now.items() if here.get(ref) != id}
    gone = _gone(git, here, now)
    # A pin may stand on a tip that nothing reaches any more.
    leaving = {one.old for one in gone} | {moved[ref].old for ref in moved if ref in changed}
    staying = {**{ref: id for ref, id in here.items() if not ref.startswith(refs.HEADS)}, **now}
    kept = {refs.KEPT + id: id for id in _unreachable(git, leaving, staying.values())}
    refs.move(mirror, kept)

    # git refuses to make a/b while there is a, even if the same transaction deletes a.
    in_the_way = [
        ref
        for ref in here.keys() - now.keys() - aside
        if ref.startswith((refs.HEADS, refs.TAGS)) and any(_nested(ref, new) for new in changed)
    ]
    blocking = sorted(ref[len(refs.TAGS) :] for ref in in_the_way if ref.startswith(refs.TAGS))
    set_aside = {refs.ref_aside(tag): here[refs.TAGS + tag] for tag in blocking}
    refs.move(mirror, dict.fromkeys(in_the_way) | set_aside)
    deleted = [ref for ref in here if ref.startswith(refs.HEADS) and ref not in now]
    over = [refs.ref_aside(ref[len(refs.TAGS) :]) for ref in aside & changed.keys()]
    refs.move(
        mirror,
        changed | dict.fromkeys([ref for ref in deleted if ref not in in_the_way] + over)
        | dict.fromkeys(staged),
    )  # fmt: skip
    git.run("pack-refs", "--all")
    return Fetched(
        url,
        new_tags=tuple(
            ref[len(refs.TAGS) :]
            for ref in changed
            if ref.startswith(refs.TAGS) and ref not in here
        ),
        commits=commits,
        moved_tags=tuple(moved.values()),
        aside=tuple(blocking),
        gone=gone,
        shallow=_shallow(git),
    )


def _gone(git: Git, here: dict[str, ObjectId], now: dict[str, ObjectId]) -> tuple[Gone, ...]:
    """The branches whose new tip does not hold their old one."""
    gone = []
    for ref, old in here.items():
        new = now.get(ref)
        if not ref.startswith(refs.HEADS) or new == old:
            continue
        if (
            new is None
            or git.call(
                "merge-base", "--is-ancestor", old, new, ok=(0, 1), env=refs.OFFLINE
            ).returncode
        ):
            gone.append(Gone(ref[len(refs.HEADS) :], old, new))
    return tuple(gone)


def _nested(one: str, other: str) -> bool:
    return one.startswith(other + "/") or other.startswith(one + "/")


# -- git, on a mirror ----------------------------------------------------------------------------


def _listed(fork: str, url: str, listing: str) -> dict[str, tuple[ObjectId, ObjectId]]:
    """`git ls-remote`'s output: each ref's object and the commit it peels to."""
    there: dict[str, tuple[ObjectId, ObjectId]] = {}
    for line in listing.splitlines():
        id, tab, ref = line.partition("\t")
        if not tab:
            continue  # a warning of git's
        if len(id) != 40:
            raise UsageError(
                f"{fork}: {address.without_credentials(url)} keeps its objects under SHA-256 ids.",
                todo="forkman works on SHA-1 repositories, as all public hosts keep them.",
            )
        if ref.endswith("^{}"):
            outer = there[ref[:-3]][0]
            there[ref[:-3]] = (outer, ObjectId(id))
        elif ref.startswith(("refs/heads/", refs.TAGS)):
            mine = refs.HEADS + ref[len("refs/heads/") :] if ref.startswith("refs/heads/") else ref
            there[mine] = (ObjectId(id), ObjectId(id))
    if not there:
        raise UsageError(
            f"{fork}: {address.without_credentials(url)} is empty: it has no branches and no tags.",
            todo="Correct the address, or push something there first.",
        )
    return there


def _count(git: Git, tips: Sequence[ObjectId], without: Sequence[ObjectId] = ()) -> int:
    """How many commits the `tips` reach that those of `without` do not."""
    asked = "\n".join([*tips, *(f"^{id}" for id in without)]) + "\n"
    return int(git.run("rev-list", "--count", "--stdin", input=asked.encode(), env=refs.OFFLINE))


def _unreachable(git: Git, tips: set[ObjectId], staying: Iterable[ObjectId]) -> list[ObjectId]:
    """Those of `tips` that nothing in `staying` reaches."""
    if not tips:
        return []
    asked = "\n".join([*tips, *(f"^{id}" for id in staying)]) + "\n"
    found = git.run("rev-list", "--stdin", input=asked.encode(), env=refs.OFFLINE)
    return sorted(tips & set(map(ObjectId, found.decode("ascii").split())))


def _shallow(git: Git) -> tuple[ObjectId, ...]:
    """The commits at which a shallow mirror's history ends."""
    if git.text("rev-parse", "--is-shallow-repository") != "true":
        return ()
    return tuple(map(ObjectId, (git.directory / "shallow").read_text("ascii").split()))


def _missing(mirror: Path, commits: Sequence[ObjectId]) -> list[ObjectId]:
    """The objects in the trees of `commits` that the mirror lacks."""
    listed = Git(mirror).run(
        "rev-list", "--objects", "--no-walk", "--missing=print", "--stdin",
        input="".join(f"{id}\n" for id in commits).encode(), env=refs.OFFLINE,
    )  # fmt: skip
    return [ObjectId(line[1:].decode("ascii")) for line in listed.splitlines() if line[:1] == b"?"]


def _held(repository: Path, ids: Iterable[ObjectId]) -> set[ObjectId]:
    """Those of `ids` that `repository` has."""
    answers = Git(repository).run(
        "cat-file", "--batch-check=%(objectname)", input="".join(f"{id}\n" for id in ids).encode(),
        ok=(0, 128), env=refs.OFFLINE,
    )  # fmt: skip
    return {ObjectId(line) for line in answers.decode("ascii").splitlines() if " " not in line}


def _paths(
    mirror: Path, commits: Iterable[ObjectId], blobs: set[ObjectId]
) -> dict[ObjectId, bytes]:
    """Where in the trees of `commits` the `blobs` are; the first place of each."""
    found: dict[ObjectId, bytes] = {}
    for commit in commits if blobs else ():
        for line in Git(mirror).run("ls-tree", "-r", "-z", commit, env=refs.OFFLINE).split(b"\0"):
            entry, _, path = line.partition(b"\t")
            id = ObjectId(entry[-40:].decode("ascii"))
            if id in blobs:
                found.setdefault(id, path)
    return found


def _origin(mirror: Path) -> str:
    found = Git(mirror).run("config", "--local", "--get", "remote.origin.url", ok=(0, 1))
    return os.fsdecode(found).rstrip("\n")


@contextmanager
def _new(mirror: Path) -> Iterator[Path]:
    """A new mirror that takes its place at the end, unless something failed."""
    beside = mirror.with_name(mirror.name + ".new")
    try:
        mirror.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(beside, ignore_errors=True)  # of a run that was killed
        for name in ("objects", "refs/heads"):
            (beside / name).mkdir(parents=True)
        (beside / "HEAD").write_text("ref: refs/heads/main\n", "ascii")
        (beside / "config").write_text(_CONFIG, "utf-8")
        yield beside
        beside.rename(mirror)
    except OSError as error:
        raise EnvironmentFault(
            f"{mirror.stem}: the mirror {mirror} cannot be made: {error.strerror or error}."
        ) from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _gives_history_only(url: str) -> bool:
    """Whether to ask for history without contents: of hosts, and of copies made like that."""
    source = address.on_this_machine(url)
    return source is None or any((source / "objects" / "pack").glob("*.promisor"))


@contextmanager
def _pointed_at(git: Git, url: str) -> Iterator[None]:
    """The mirror's remote at `url`; where it was before, if what is done with it fails.

    It stays there afterwards, for `complete`, and for git, which fetches what a mirror lacks.
    """
    before = _origin(git.directory)
    if url != before:
        git.run("config", "--local", "remote.origin.url", url)
    if _gives_history_only(url):
        git.run("config", "--local", "remote.origin.promisor", "true")
        git.run("config", "--local", "remote.origin.partialCloneFilter", "blob:none")
    try:
        yield
    except BaseException:
        if before:
            git.run("config", "--local", "remote.origin.url", before)
        raise


@contextmanager
def _talking(mirror: Path, fork: str, url: str, failed: str) -> "Iterator[gitpython.Repo]":
    """The mirror in GitPython, which talks to upstreams; its errors become ours."""
    try:
        import git as gitpython
    except ImportError as error:  # it looks for git when it is imported
        raise EnvironmentFault(
            "git is not installed, or not on PATH.", todo="Install git 2.39 or newer."
        ) from error
    try:
        repo = gitpython.Repo(mirror)
    except gitpython.exc.InvalidGitRepositoryError as error:
        raise EnvironmentFault(
            f"{fork}: the mirror {mirror} is no git repository.", todo="Remove it, and fetch again."
        ) from error
    repo.git.update_environment(
        GIT_DIR=str(mirror),
        GIT_COMMON_DIR=str(mirror),
        GIT_OBJECT_DIRECTORY=str(mirror / "objects"),
        **dict.fromkeys(_ELSEWHERE, ""),
        GIT_TERMINAL_PROMPT="0",
    )
    try:
        yield repo
    except gitpython.exc.UnsafeProtocolError as error:
        raise UsageError(f"{fork}: {visible(str(error))}") from error
    except gitpython.exc.CommandError as error:
        # git's own words, out of GitPython's frame around them
        said = error.stderr.strip().removeprefix("stderr: '").removesuffix("'")
        said = said.replace(url, address.without_credentials(url))
        lines = [line.strip() for line in said.splitlines() if line.strip()]
        raise _fault(fork, failed, lines) from error
    finally:
        repo.close()


def _fault(fork: str, failed: str, lines: Sequence[str]) -> EnvironmentFault:
    words = visible(" / ".join(lines[-4:]))
    return EnvironmentFault(
        f"{fork}: {failed}: {words or 'git said nothing'}",
        kept="The mirror's branches and tags are as they were.",
        todo="Look at the network, the address and the space on the disk, then try again.",
    )


def _run_fetch(
    repo: "gitpython.Repo",
    url: str,
    refspecs: Sequence[str],
    progress: Progress | None,
    remote: str = "origin",
    **options: Any,
) -> None:
    """`git fetch` from the mirror's remote, through GitPython for its checks and its progress.

    remote: another repository's address instead, which is then `url` too.
    """
    import git as gitpython

    class Report(gitpython.RemoteProgress):
        def update(
            self, op_code: int, cur_count: str | float, max_count: str | float | None = None,
            message: str = "",
        ) -> None:  # fmt: skip
            if progress:
                stage = _STAGES.get(op_code & self.OP_MASK, "working")
                progress(stage, int(cur_count or 0), int(max_count or 0))

    report = Report()
    git_dir = Path(repo.git_dir)
    (git_dir / "FETCH_HEAD").touch()  # GitPython reads it afterwards, written or not
    options |= {"no_tags": True, "recurse_submodules": "no", "quiet": True}
    if address.on_this_machine(url):
        # Hosts decide what they give; with a repository of one's own there is nothing to decide.
        options["upload_pack"] = "git -c uploadpack.allowFilter=true upload-pack"
        options["allow_unsafe_options"] = True  # for the line above
    try:
        gitpython.Remote(repo, remote).fetch(list(refspecs), progress=report, **options)
    except gitpython.exc.CommandError as error:
        # What the server said comes as ordinary lines, and says more than git's own last word.
        said = [line for line in report.other_lines if line.startswith("remote:")]
        error.stderr = "\n".join([*said, *(report.error_lines or [error.stderr])])
        raise


_STAGES = {
    4: "counting objects",
    8: "compressing objects",
    32: "receiving objects",
    64: "resolving deltas",
    128: "finding sources",
}

"""The main job: fetch, pick targets, replay, verify, and land pins, queues and exports together.

Everything is decided before anything is written. A fork whose upstream cannot be reached, whose
layer does not apply or whose changes conflict keeps the whole group it was to land with from
landing, and every such thing of every fork is reported in one run.
"""

import shlex
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from rebase import address, archives, branch, export, landing, manifest, refs, upstream
from rebase.errors import EnvironmentFault, ForkmanError, NeedsPerson, UsageError
from rebase.git import Git, GitError, ObjectId
from rebase.history import History
from rebase.inspect import BASES, STATES
from rebase.landing import Refs
from rebase.mail import Mail
from rebase.objects import Objects
from rebase.outcome import ForkReport, Layer, Outcome, Pin, Report
from rebase.queue import Queue, RecipeFile
from rebase.replay import Step, replay
from rebase.workspace import Last, Run, Source, Stand, Target, Workspace
from rebase.worktree import Memory

Progress = Callable[[str, int, int], None]

_QUEUE = "refs/forkman/queue"  # the branch that is a fork's queue, as last fetched

# -- fetching ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fetch:
    """What fetching the upstream of one fork came to.

    source: which of its sources can be used; None where there is none, and `fault` says why.
    """

    fork: str
    source: Source | None
    notes: tuple[str, ...] = ()
    fault: ForkmanError | None = None


def fetch(
    ws: Workspace,
    forks: Sequence[str],
    *,
    progress: Progress | None = None,
    accept_moved_tags: bool = False,
) -> dict[str, Fetch]:
    """Fetch the upstreams of `forks`: over git, and where that fails from release archives."""
    return {fork: _fetch(ws, fork, progress, accept_moved_tags) for fork in forks}


def fetch_all(
    ws: Workspace,
    forks: Sequence[str],
    *,
    progress: Progress | None = None,
    accept_moved_tags: bool = False,
) -> list[Fetch]:
    """`fetch` for the command of that name: all forks where none is named, alone in the project."""
    for fork in forks:
        ws.manifest(fork)
    with ws.lock():
        chosen = forks or list(ws.project.forks)
        found = fetch(ws, chosen, progress=progress, accept_moved_tags=accept_moved_tags)
        return list(found.values())


def _fetch(ws: Workspace, fork: str, progress: Progress | None, accept_moved_tags: bool) -> Fetch:
    mirror, entry = ws.mirror(fork, "git"), ws.manifest(fork)
    try:
        got = upstream.fetch(
            mirror, ws.url(fork), progress=progress, accept_moved_tags=accept_moved_tags
        )
    except UsageError as error:
        return Fetch(fork, None, (error.what,), error)
    except EnvironmentFault as error:
        fault = error
    else:
        return Fetch(fork, "git", _news(got))
    if mirror.is_dir():
        note = f"{fault.what.rstrip('.')}. What was fetched before is used."
        return Fetch(fork, "git", (note,), fault)
    if not entry.archives:
        return Fetch(fork, None, (fault.what,), fault)
    package, mirror = entry.archives.package, ws.mirror(fork, "archives")
    note = f"{fault.what.rstrip('.')}. The release archives of {package} are used instead."
    try:
        updated = archives.update(
            mirror,
            package,
            entry.archives.tag,
            entry.archives.prefix,
            since=entry.archives.pin,
            cache=ws.state / "archives",
            progress=progress,
        )
    except ForkmanError as error:
        if mirror.is_dir() and refs.tags(mirror):
            note = f"{note} {error.what} What was fetched before is used."
            return Fetch(fork, "archives", (note,), fault)
        return Fetch(fork, None, (f"{fault.what} {error.what}",), fault)
    return Fetch(fork, "archives", (note, *updated.skipped))


def _news(got: upstream.Fetched) -> tuple[str, ...]:
    """What of a fetch a maintainer must know."""
    notes = [
        f"Upstream moved the tag {tag.tag} from {tag.old[:9]} to {tag.new[:9]}; it stays here as it"
        " was. To accept it: forkman sync --accept-moved-tags"
        for tag in got.moved_tags
    ]
    notes += [
        f"Upstream {'rewrote' if gone.new else 'deleted'} the branch {gone.branch}; its old tip"
        f" {gone.old[:9]} is kept."
        for gone in got.gone
    ]
    if got.shallow:
        notes.append(f"{got.url} is shallow: its history ends at {got.shallow[0][:9]}.")
    return tuple(notes)


# -- where to go ---------------------------------------------------------------------------------


def targets(
    ws: Workspace,
    found: Mapping[str, Fetch],
    named: Sequence[str],
    to: str | None,
    *,
    accept_moved_tags: bool = False,
) -> list[Target | ForkReport]:
    """Where each fork is to go; a ForkReport with a problem for one that cannot say.

    The leader goes to its newest release, and with it those that follow it; `to` sends the leader,
    or each fork in `named`, elsewhere: a tag, a commit, `latest`, or `main` for upstream's branch.
    """
    new: dict[str, Stand] = {}
    result: list[Target | ForkReport] = []
    for fork in ws.project.forks:
        if named and fork not in named:
            continue
        got = found[fork]
        pin = ws.manifest(fork).pin
        if not got.source:
            result.append(_not_fetched(got, pin))
            continue
        try:
            with _mirror_faults(ws, fork):
                old = ws.stand(fork, got.source)
                target = _target(ws, fork, got.source, old, new, bool(named), to)
            if not accept_moved_tags:
                _refuse_moved_tag(target, to)
        except ForkmanError as error:
            # What it lacks may be what could not be fetched.
            asked = (found.get(each) for each in (fork, *_others(ws, fork)))
            out_of_reach = any(each and each.fault for each in asked)
            stays = ForkReport(fork, got.source, pin, pin, "", notes=got.notes)
            result.append(
                replace(stays, problem=error.what, todo=error.todo, unreachable=out_of_reach)
            )
            continue
        new[fork] = target.new
        result.append(replace(target, notes=got.notes + target.notes))
    return result


@contextmanager
def _mirror_faults(ws: Workspace, fork: str) -> Iterator[None]:
    """Name the fork where git fails on its mirror."""
    try:
        yield
    except GitError as error:
        raise EnvironmentFault(
            f"{fork}: git failed on its mirror: {error.stderr}",
            todo="Look at the disk. If the mirror is damaged, remove"
            f" {ws.mirror(fork, ws.source(fork))} and fetch again.",
        ) from error


def _target(
    ws: Workspace,
    fork: str,
    source: Source,
    old: Stand,
    new: Mapping[str, Stand],
    named: bool,
    to: str | None,
) -> Target:
    entry, leader = ws.manifest(fork), ws.project.stack.leader
    notes: tuple[str, ...] = ()
    if to and (named or fork == leader):
        pin, how = _asked(ws, fork, source, to), "as asked"
    elif source == "archives":
        pin, how = _newest(ws, fork, source), "newest release"
    elif fork == leader or (named and not entry.follow):
        pin, how = _newest(ws, fork, source), "leads" if fork == leader else "newest release"
    elif entry.follow:
        pin, how = _followed(ws, entry, new), f"follows {entry.follow.fork} {entry.follow.file}"
    else:
        pin, how = old.pin, "stays"
    if how in ("leads", "newest release") and _is_behind(ws, fork, source, pin, old.pin):
        pin, how = old.pin, f"{how}; stays, as {pin} is behind it"
    layers: tuple[tuple[Layer, ...], ...] = ()
    if source == "git":
        layers = _layers(ws, entry, new)
    elif entry.layers:
        others = " and ".join(sorted({layer.fork for layer in entry.layers}))
        notes = (f"Without the layers from {others}, which release archives do not hold.",)
    return Target(fork, old, Stand(source, pin, layers), how, notes)


def _asked(ws: Workspace, fork: str, source: Source, to: str) -> Pin:
    if to == "latest":
        return _newest(ws, fork, source)
    mirror = ws.mirror(fork, source)
    if commit := refs.resolve(mirror, to):
        names = refs.tags(mirror)
        return Pin(commit, to if names.get(to) == commit else _tag_at(ws, fork, source, commit))
    if to == "main":  # whatever upstream calls it
        for name in ("master", "archives"):
            if commit := refs.branches(mirror).get(name):
                return Pin(commit)
    raise UsageError(
        f"{fork}: upstream has no {to!r}.",
        todo=f"Name a tag, a branch or a commit of {ws.url(fork)}"
        + (" (only its release archives can be reached)." if source == "archives" else "."),
    )


def _newest(ws: Workspace, fork: str, source: Source) -> Pin:
    mirror, entry = ws.mirror(fork, source), ws.manifest(fork)
    tagged = source == "archives" or entry.upstream.releases.refs == "tags"
    names = refs.tags(mirror) if tagged else refs.branches(mirror)
    if name := manifest.newest(entry, names):
        return Pin(names[name], name if tagged else None)
    raise UsageError(
        f"{fork}: no {'tag' if tagged else 'branch'} of upstream is a release by the pattern"
        f" {entry.upstream.releases.pattern.pattern!r}.",
        todo=f"Correct upstream.releases in {entry.path.name}, or say where to go: --to",
    )


def _tag_at(ws: Workspace, fork: str, source: Source, commit: ObjectId) -> str | None:
    """The release tag of a commit, if it has one."""
    tags = refs.tags(ws.mirror(fork, source))
    return manifest.newest(
        ws.manifest(fork), (name for name, at in tags.items() if at == commit), prereleases=True
    )


def _followed(ws: Workspace, entry: manifest.Manifest, new: Mapping[str, Stand]) -> Pin:
    assert entry.follow
    content = _file(ws, entry.follow.fork, entry.follow.file, new)
    name = manifest.followed(entry, content)
    commit = refs.resolve(ws.mirror(entry.fork, "git"), name)
    if not commit:
        raise UsageError(
            f"{entry.fork}: {entry.follow.fork}'s {entry.follow.file} names {name}, which"
            f" {ws.url(entry.fork)} does not have.",
            todo="Fetch from a repository that has it: --upstream"
            f" {entry.fork}=URL, or go elsewhere: --to",
        )
    tags = refs.tags(ws.mirror(entry.fork, "git"))
    return Pin(commit, name if name in tags else _tag_at(ws, entry.fork, "git", commit))


def _layers(
    ws: Workspace, entry: manifest.Manifest, new: Mapping[str, Stand]
) -> tuple[tuple[Layer, ...], ...]:
    """The layers of a fork as they are where the other forks go."""
    found: list[tuple[Layer, ...]] = []
    for layer in entry.layers:
        order = _file(ws, layer.fork, layer.order.file, new) if layer.order else None
        patches = []
        for path in manifest.layer_paths(layer, order):
            stand = new.get(layer.fork) or ws.stand(layer.fork, "git")
            objects = ws.objects(layer.fork, "git")
            at = objects.find(objects.tree_of(stand.pin.commit), path.encode())
            if not at:
                raise UsageError(
                    f"{entry.fork}: its layer {path} is not in {layer.fork} {stand.pin}.",
                    todo=f"See how {layer.fork} keeps its patches there, and correct layers in"
                    f" {entry.path.name}.",
                )
            patches.append(Layer(layer.fork, path, at.id))
        found.append(tuple(patches))
    return tuple(found)


def _file(ws: Workspace, fork: str, path: str, new: Mapping[str, Stand]) -> bytes:
    """A file of another fork's upstream, where that fork goes or stands."""
    stand = new.get(fork) or ws.stand(fork, "git")
    objects = ws.objects(fork, "git")
    entry = objects.find(objects.tree_of(stand.pin.commit), path.encode())
    if entry:
        return objects.read(entry.id)
    raise UsageError(
        f"{fork} {stand.pin} has no {path}.", todo="Correct the manifest that names it."
    )


def _refuse_moved_tag(target: Target, to: str | None) -> None:
    """Raise NeedsPerson where the pin's own tag names another commit than it did.

    The manifest says what the tag was, also where the mirror is new and never saw it move.
    """
    old, new = target.old.pin, target.new.pin
    if not new.tag or new.tag != old.tag or new.commit == old.commit:
        return
    if not (to and new.commit.startswith(to)):
        raise NeedsPerson(
            f"{target.fork}: upstream's tag {new.tag} names {new.commit} now, and the pin says that"
            f" it is {old.commit}.",
            todo=f"See what upstream says about it. To move there: forkman sync {target.fork}"
            f" --to {new.commit[:9]}, or all with --accept-moved-tags",
        )


def _is_behind(ws: Workspace, fork: str, source: Source, old: Pin, new: Pin) -> bool:
    if old.commit == new.commit:
        return False
    git = ws.objects(fork, source).git
    done = git.call("merge-base", "--is-ancestor", old.commit, new.commit, ok=(0, 1, 128))
    return done.returncode == 0


# -- carrying one fork ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Replayable:
    """A fork ready to be replayed: its steps on the old base, the new base, what lies between."""

    objects: Objects
    old: ObjectId
    new: ObjectId
    history: History
    steps: tuple[Step, ...]
    queue: Queue | ObjectId  # the folder's, or the tip of the branch that it is
    merges: tuple[ObjectId, ...] = ()


def prepare(ws: Workspace, target: Target) -> Replayable:
    """Make the bases and the steps of a fork. Raises where a layer or a patch does not apply."""
    fork = target.fork
    objects = ws.objects(fork, target.new.source)
    pins = [stand.pin.commit for stand in (target.old, target.new)]
    for commit in pins:
        if not objects.git.resolve(commit):
            _bring(ws, target, commit)
    upstream.complete(objects.git.directory, pins)

    def content(layer: Layer) -> bytes:
        return ws.objects(layer.fork, "git").read(layer.blob)

    old, new = (
        branch.base(objects, stand.pin.commit, stand.patches, content)
        for stand in (target.old, target.new)
    )
    history = History(objects.git, old, new)
    if target.new.source == "archives":
        history = History(objects.git, *_in_line(ws, target, objects))
    where = ws.manifest(fork).queue
    if isinstance(where, manifest.QueueFolder):
        queue = ws.queue(fork)
        steps = branch.steps(objects, fork, old, queue)
        return Replayable(objects, old, new, history, tuple(steps), queue)
    url = address.locate(where.url, ws.root)
    tip = upstream.fetch_ref(objects.git.directory, url, where.ref, _QUEUE)
    on_pin = objects.git.call("merge-base", "--is-ancestor", pins[0], tip, ok=(0, 1))
    if on_pin.returncode:
        raise NeedsPerson(
            f"{fork}: its queue, the branch {where.ref} of {where.url}, does not stand on the pin"
            f" {target.old.pin}.",
            todo=f"Push what the last sync made of it: {_push(ws, target.old, fork, where, tip)}",
        )
    steps, merges = branch.branch_steps(objects, old, tip)
    return Replayable(objects, old, new, history, tuple(steps), tip, tuple(merges))


def _in_line(ws: Workspace, target: Target, objects: Objects) -> tuple[ObjectId, ObjectId]:
    """The releases between two pins as a history, each on the one before: its two ends.

    Releases made of archives have no parents, so that their ids depend on nothing else.
    """
    tags = refs.tags(objects.git.directory)
    names = manifest.releases(ws.manifest(target.fork), tags, prereleases=True)
    first, last = (names.index(stand.pin.tag or "") for stand in (target.old, target.new))
    line: list[ObjectId] = []
    for name in names[first : last + 1] if first <= last else (names[first], names[last]):
        head, _, message = objects.read(tags[name]).partition(b"\n\n")
        author = head.partition(b"\nauthor ")[2].partition(b"\n")[0]
        line.append(objects.commit(objects.tree_of(tags[name]), line[-1:], author, message))
    objects.flush()
    return line[0], line[-1]


def _bring(ws: Workspace, target: Target, commit: ObjectId) -> None:
    """Ask for a commit that no branch or tag of upstream reaches; many hosts still have it."""
    fork, mirror = target.fork, ws.mirror(target.fork, target.new.source)
    try:
        upstream.fetch_ref(mirror, ws.url(fork), commit, refs.KEPT + commit)
    except ForkmanError:
        raise UsageError(
            f"{fork}: {ws.url(fork)} does not have the commit {commit}, its pin.",
            todo=f"Fetch from a repository that has it: --upstream {fork}=URL. If upstream threw it"
            f" away, write what stands in its place into {ws.manifest(fork).path.name}; the queue's"
            " patches must apply there.",
        ) from None


def _push(
    ws: Workspace, stand: Stand, fork: str, where: manifest.QueueBranch, tip: ObjectId
) -> str:
    """The command that gives the fork's own repository its branch as it is on `stand`."""
    url = address.locate(where.url, ws.root)
    lease = f"--force-with-lease={where.ref}:{tip}"
    refspec = f"{STATES}{stand.pin}:{where.ref}"
    mirror = str(ws.mirror(fork, stand.source))
    return shlex.join(["git", "-C", mirror, "push", lease, url, refspec])


@dataclass(frozen=True)
class Carried:
    """One fork carried to its target: the report, and what it would land."""

    target: Target
    report: ForkReport
    made: Replayable | None = None
    mails: tuple[tuple[Outcome, Mail], ...] = ()


def carry(ws: Workspace, target: Target, resolved: Sequence[Outcome] | None = None) -> Carried:
    """Replay one fork onto its target. resolved: the outcomes, where a person made them."""
    report = ForkReport(
        target.fork,
        target.new.source,
        target.old.pin,
        target.new.pin,
        target.how,
        notes=target.notes,
    )
    try:
        with _mirror_faults(ws, target.fork):
            made = prepare(ws, target)
            outcomes = tuple(resolved or ()) or tuple(
                replay(made.objects, made.steps, made.new, made.history, Memory(made.objects))
            )
            made.objects.flush()
            mails = branch.mails(made.objects, made.steps, outcomes, made.new)
    except ForkmanError as error:
        out_of_reach = isinstance(error, EnvironmentFault)
        report = replace(report, problem=error.what, todo=error.todo, unreachable=out_of_reach)
        return Carried(target, report)
    notes = target.notes
    if made.merges:
        merged = ", ".join(id[:9] for id in made.merges)
        notes += (f"Merges in the queue's branch are left out, as git rebase does: {merged}.",)
    return Carried(target, replace(report, outcomes=outcomes, notes=notes), made, tuple(mails))


# -- landing -------------------------------------------------------------------------------------


def sync(
    ws: Workspace,
    named: Sequence[str] = (),
    *,
    to: str | None = None,
    dry: bool = False,
    out: Path | None = None,
    accept_moved_tags: bool = False,
    progress: Progress | None = None,
) -> Report:
    """Fetch, pick targets, replay and verify the forks (all, or those in `named`), then land.

    dry: everything but the landing. out: where exports go, `exports/` by default.
    """
    from rebase import resolve

    for fork in named:
        ws.manifest(fork)
    with ws.lock():
        resolve.refuse_open(ws, named or list(ws.project.forks), but_resolved=True)
        needed = [*named, *_needed(ws, named)] if named else list(ws.project.forks)
        found = fetch(ws, needed, progress=progress, accept_moved_tags=accept_moved_tags)
        where = targets(ws, found, named, to, accept_moved_tags=accept_moved_tags)
        command = " ".join(("sync", *named, *(("--to", to) if to else ())))
        return move(ws, where, command, dry=dry, out=out, progress=progress)


def rebase(
    ws: Workspace,
    fork: str,
    onto: str,
    *,
    dry: bool = False,
    out: Path | None = None,
    progress: Progress | None = None,
) -> Report:
    """Replay one fork onto an upstream revision and land it; fetches only what is not here yet."""
    from rebase import resolve

    ws.manifest(fork)
    with ws.lock():
        resolve.refuse_open(ws, [fork], but_resolved=True)
        source: Source = "git"
        if ws.mirror(fork, "archives").is_dir() and not ws.mirror(fork, "git").is_dir():
            source = "archives"
        found = {fork: Fetch(fork, source)}
        mirror = ws.mirror(fork, source)
        known = mirror.is_dir() and (onto == "latest" or refs.resolve(mirror, onto))
        if not known:
            found = fetch(ws, [fork], progress=progress)
        where = targets(ws, found, [fork], onto)
        command = f"rebase {fork} --onto {onto}"
        return move(ws, where, command, dry=dry, out=out, progress=progress)


def export_forks(
    ws: Workspace,
    forks: Sequence[str] = (),
    *,
    out: Path | None = None,
    progress: Progress | None = None,
) -> Report:
    """Write the exports of `forks`, or of all, as they stand; what was never fetched is fetched."""
    with ws.lock():
        where: list[Target | ForkReport] = []
        for fork in forks or ws.project.forks:
            ws.manifest(fork)
            got = Fetch(fork, "git")
            if not ws.mirror(fork, "git").is_dir():
                got = fetch(ws, [fork], progress=progress)[fork]
            where.append(_staying(ws, got))
        command = " ".join(("export", *forks))
        return move(ws, where, command, out=out, remember=False, progress=progress)


def _staying(ws: Workspace, got: Fetch) -> Target | ForkReport:
    """The target that leaves a fork where it is."""
    pin = ws.manifest(got.fork).pin
    if not got.source:
        return _not_fetched(got, pin)
    try:
        stand = ws.stand(got.fork, got.source)
    except ForkmanError as error:
        return ForkReport(got.fork, got.source, pin, pin, "", (), error.what, error.todo)
    return Target(got.fork, stand, stand, "stays", got.notes)


def _not_fetched(got: Fetch, pin: Pin) -> ForkReport:
    assert got.fault
    what, todo = " ".join(got.notes), got.fault.todo
    out_of_reach = isinstance(got.fault, EnvironmentFault)
    return ForkReport(got.fork, "git", pin, pin, "", (), what, todo, out_of_reach)


def verify_exports(
    ws: Workspace, index: Path | None = None, *, progress: Progress | None = None
) -> list[export.Verification]:
    """Verify what was exported to `index`, by default the project's, for every fork in it."""
    if not index:
        index = ws.exports / export.INDEX
        if not index.exists():
            raise UsageError("Nothing is exported yet.", todo="Export it: forkman export")
    found: list[export.Verification] = []
    entries = export.read_index(index)
    for number, (fork, entry) in enumerate(entries.items()):
        if progress:
            progress(f"verify {fork}", number, len(entries))
        objects = ws.objects(fork, entry.source)
        layers = entry.layers

        def content(layer: Layer) -> bytes:
            return ws.objects(layer.fork, "git").read(layer.blob)

        if not objects.git.resolve(entry.pin.commit):
            raise UsageError(
                f"{fork}: its mirror does not have the commit {entry.pin.commit} that the export"
                " is for.",
                todo=f"Fetch it: forkman fetch {fork}",
            )
        upstream.complete(objects.git.directory, [entry.pin.commit])
        base = branch.base(objects, entry.pin.commit, layers, content)
        objects.flush()
        found.append(export.verify(objects, index, fork, objects.tree_of(base)))
    return found


def _needed(ws: Workspace, named: Sequence[str]) -> list[str]:
    """The forks whose trees say where those in `named` go, and that were never fetched."""
    others = {other for fork in named for other in _others(ws, fork)}
    return [fork for fork in others - set(named) if not ws.mirror(fork, "git").is_dir()]


def _others(ws: Workspace, fork: str) -> set[str]:
    """The forks whose trees say where this one goes, or what goes on before its changes."""
    entry = ws.manifest(fork)
    follow = {entry.follow.fork} if entry.follow else set()
    return follow | {layer.fork for layer in entry.layers}


def move(
    ws: Workspace,
    where: Sequence[Target | ForkReport],
    command: str,
    *,
    dry: bool = False,
    out: Path | None = None,
    remember: bool = True,
    progress: Progress | None = None,
) -> Report:
    """Carry every fork to its target and land them together, or say why not.

    remember: keep what the replays found, for `log` and `edit`.
    """
    from rebase import resolve

    out = out or ws.exports
    tell = progress or (lambda text, done, total: None)
    carried: list[Carried] = []
    reports: list[ForkReport] = []
    for number, target in enumerate(where):
        if isinstance(target, ForkReport):
            reports.append(target)
            continue
        tell(f"replay {target.fork}", number, len(where))
        done = carry(ws, target, resolve.finished(ws, target))
        carried.append(done)
        reports.append(done.report)
    if remember:
        without = tuple(report.fork for report in reports if report.problem)
        run = Run(command, tuple(done.target for done in carried), without, str(out))
        for done in carried:
            if not done.report.problem:
                ws.remember(Last(run, done.target, done.report.outcomes))
    if any(report.problem or report.conflicts for report in reports):
        return Report(command, tuple(reports), landed=False, dry=dry)
    tell("verify", len(where), len(where))
    entries, exports = _together(ws, carried, out)
    index = export.index(entries.values())
    failed = _verified(carried, index, exports)
    reports = [
        replace(each, problem=failed[each.fork]) if each.fork in failed else each
        for each in reports
    ]
    written = _all_files(ws, carried, out, exports | {export.INDEX: index})
    changed = tuple(
        _shown(ws, path) for path, content in sorted(written.files.items()) if content != _now(path)
    )
    if dry or failed:
        return Report(command, tuple(reports), landed=False, dry=dry, written=changed)
    old, new = _states(carried)
    for mirror, states in old.items():  # without a reflog, which tells in what order states landed
        upstream.move_refs(Git(mirror), list(states.items()))
    landing.land(ws.landing, landing.Landing(written.files, new, written.seen))
    for each in carried:
        if each.target.new != each.target.old:
            resolve.close(ws, each.target.fork)
    to_push = {each.target.fork: _to_push(ws, each) for each in carried}
    reports = [replace(each, notes=each.notes + to_push[each.fork]) for each in reports]
    return Report(command, tuple(reports), landed=True, written=changed)


def _to_push(ws: Workspace, done: Carried) -> tuple[str, ...]:
    """What a person has to do where the queue is a branch, which landed in the mirror only."""
    where, made = ws.manifest(done.target.fork).queue, done.made
    if not made or isinstance(made.queue, Queue) or made.old == made.new:
        return ()
    assert isinstance(where, manifest.QueueBranch)
    command = _push(ws, done.target.new, done.target.fork, where, made.queue)
    return (f"Push its branch {where.ref}, before the next sync: {command}",)


def _shown(ws: Workspace, path: Path) -> str:
    return str(path.relative_to(ws.root) if path.is_relative_to(ws.root) else path)


def _now(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None


def _together(
    ws: Workspace, carried: Sequence[Carried], out: Path
) -> tuple[dict[str, export.Exported], dict[str, bytes]]:
    """The index's entries, other forks' as they are there already, and the files of `carried`."""
    entries: dict[str, export.Exported] = {}
    if (out / export.INDEX).exists():
        entries = {
            fork: entry
            for fork, entry in export.read_index(out).items()
            if fork in ws.project.forks
        }
    files: dict[str, bytes] = {}
    for done in carried:
        entries[done.target.fork], its = _exported(ws, done)
        files |= its
    return entries, files


def _all_files(
    ws: Workspace, carried: Sequence[Carried], out: Path, exports: Mapping[str, bytes]
) -> "_Written":
    """Everything a landing writes: manifests, queues, exports; exports that are no more go."""
    files: dict[Path, bytes | None] = {}
    seen: dict[Path, bytes | None] = {}
    before = export.read_index(out) if (out / export.INDEX).exists() else {}
    for done in carried:
        if entry := before.get(done.target.fork):
            files |= {out / file.path: None for file in entry.files}
        written = _project_files(ws, done)
        files |= written.files
        seen |= written.seen
    files |= {out / name: content for name, content in exports.items()}
    return _Written(files, seen)


@dataclass(frozen=True)
class _Written:
    """What a run would write: absolute path → content or None; and what it was decided on."""

    files: dict[Path, bytes | None]
    seen: dict[Path, bytes | None]


def _queue(queue: Queue, done: Carried) -> Queue:
    """The queue as it is after a replay: patches for the new base, without what upstream has."""
    assert done.made
    if done.made.old == done.made.new:
        return queue
    mails = {outcome.change: mail for outcome, mail in done.mails}
    for change in queue.changes:
        if isinstance(change, RecipeFile):
            continue  # it finds its place anew wherever it goes
        if change.name in mails:
            queue = queue.with_change(change.name, mails[change.name])
        else:
            queue = queue.without(change.name)
    return queue


def _project_files(ws: Workspace, done: Carried) -> _Written:
    """The manifest and the queue of a fork after a replay."""
    assert done.made
    target, entry = done.target, ws.manifest(done.target.fork)
    text = entry.path.read_bytes()
    if target.new.source == "git":
        patches = [
            [manifest.LayerPatch(layer.path, layer.blob) for layer in layers]
            for layers in target.new.layers
        ]
        content = manifest.with_pin(text, target.new.pin, patches)
    else:
        assert entry.archives and target.new.pin.tag
        before, _, after = entry.archives.tag.partition("{version}")
        version = target.new.pin.tag.removeprefix(before).removesuffix(after)
        content = manifest.with_pin(text, archive=version)
    files: dict[Path, bytes | None] = {entry.path: content}
    seen: dict[Path, bytes | None] = {entry.path: text}
    was = done.made.queue
    if isinstance(was, Queue) and isinstance(entry.queue, manifest.QueueFolder):
        folder = ws.root / entry.queue.path
        old, new = was.files(), _queue(was, done).files()
        seen |= {folder / name: text for name, text in old.items()}
        files |= {folder / name: new.get(name) for name in old.keys() | new.keys()}
    return _Written(files, seen)


def _exported(ws: Workspace, done: Carried) -> tuple[export.Exported, dict[str, bytes]]:
    """The export of one fork: its entry in the index, and its files."""
    assert done.made
    target, objects = done.target, done.made.objects
    outcomes = done.report.outcomes
    base = objects.tree_of(done.made.new)
    entry = ws.manifest(target.fork)
    address = entry.upstream.url
    if target.new.source == "archives":
        assert entry.archives
        address = f"pkg:pypi/{entry.archives.package}"
    return export.export(
        objects,
        export.ForkExport(
            target.fork,
            address,
            target.new.source,
            target.new.pin,
            target.new.patches,
            base,
            outcomes[-1].tree if outcomes else base,
            tuple((outcome.change, mail) for outcome, mail in done.mails),
            entry.export,
        ),
    )


def _verified(
    carried: Sequence[Carried], index: bytes, files: Mapping[str, bytes]
) -> dict[str, str]:
    """Verify exports before they land: fork → what is wrong; nothing for those that hold."""
    failed: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="forkman-") as scratch:
        for name, content in {export.INDEX: index, **files}.items():
            path = Path(scratch, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        for done in carried:
            assert done.made
            base = done.made.objects.tree_of(done.made.new)
            result = export.verify(done.made.objects, Path(scratch), done.target.fork, base)
            if result.findings:
                failed[done.target.fork] = "The export does not hold: " + "; ".join(
                    map(str, result.findings)
                )
    return failed


def _states(carried: Sequence[Carried]) -> tuple[dict[Path, Refs], dict[Path, Refs]]:
    """The branch of each fork as it was and as it is, as refs for `forkman diff`."""
    old: dict[Path, Refs] = {}
    new: dict[Path, Refs] = {}
    for done in carried:
        assert done.made
        made, mirror = done.made, done.made.objects.git.directory
        was, now = str(done.target.old.pin), str(done.target.new.pin)
        if was != now:
            tip = branch.chain(made.objects, made.old, made.steps)
            old[mirror] = {BASES + was: made.old, STATES + was: tip}
        commits = [outcome.commit for outcome in done.report.outcomes if outcome.commit]
        tip = commits[-1] if commits else made.new
        new[mirror] = {BASES + now: made.new, STATES + now: tip}
        made.objects.flush()
    return old, new

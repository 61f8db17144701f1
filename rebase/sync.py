"""The main job: fetch, pick targets, replay, verify, and land pins, queues and exports together.

Everything is decided before anything is written. A fork whose upstream cannot be reached, whose
layer does not apply or whose changes conflict keeps the whole group it was to land with from
landing, and every such thing of every fork is reported in one run.
"""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rebase import archives, branch, export, landing, manifest, upstream
from rebase.errors import EnvironmentFault, ForkmanError, UsageError
from rebase.git import ObjectId
from rebase.history import History
from rebase.inspect import BASES, STATES
from rebase.mail import Mail
from rebase.objects import Objects
from rebase.outcome import ForkReport, Layer, Outcome, Pin, Report
from rebase.queue import Queue, RecipeFile
from rebase.replay import Step, replay
from rebase.workspace import Last, Source, Stand, Target, Workspace
from rebase.worktree import Memory

Progress = Callable[[str, int, int], None]

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
    except EnvironmentFault as error:
        fault = error
    else:
        return Fetch(fork, "git", _news(got))
    if mirror.is_dir():
        note = f"{fault.what} What was fetched before is used."
        return Fetch(fork, "git", (note,), fault)
    if entry.archives:
        try:
            updated = archives.update(
                ws.mirror(fork, "archives"),
                entry.archives.package,
                entry.archives.tag,
                entry.archives.prefix,
                cache=ws.state / "archives",
                progress=progress,
            )
        except EnvironmentFault as error:
            return Fetch(fork, None, (f"{fault.what} {error.what}",), fault)
        note = f"{fault.what} The release archives of {entry.archives.package} are used instead."
        return Fetch(fork, "archives", (note, *updated.skipped))
    return Fetch(fork, None, (fault.what,), fault)


def _news(got: upstream.Fetched) -> tuple[str, ...]:
    """What of a fetch a maintainer must know."""
    notes = [
        f"Upstream moved the tag {tag.tag} from {tag.old[:9]} to {tag.new[:9]}; it stays here as it"
        " was. To accept it: forkman fetch --accept-moved-tags"
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
    ws: Workspace, found: Mapping[str, Fetch], named: Sequence[str], to: str | None
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
            assert got.fault
            result.append(
                ForkReport(fork, "git", pin, pin, "", (), " ".join(got.notes), got.fault.todo, True)
            )
            continue
        try:
            old = ws.stand(fork, got.source)
            target = _target(ws, fork, got.source, old, new, bool(named), to)
        except ForkmanError as error:
            result.append(
                ForkReport(
                    fork, got.source, pin, pin, "", (), error.what, error.todo, notes=got.notes
                )
            )
            continue
        new[fork] = target.new
        result.append(replace(target, notes=got.notes + target.notes))
    return result


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
        pin, how = _newest(ws, fork, source), "newest release archive"
    elif fork == leader or (named and not entry.follow):
        pin, how = _newest(ws, fork, source), "leads" if fork == leader else "newest release"
    elif entry.follow:
        pin, how = _followed(ws, entry, new), f"follows {entry.follow.fork} {entry.follow.file}"
    else:
        pin, how = old.pin, "stays"
    if how in ("leads", "newest release") and _is_ancestor(ws, fork, source, pin, old.pin):
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
    if commit := upstream.resolve(mirror, to):
        names = upstream.tags(mirror)
        return Pin(commit, to if names.get(to) == commit else _tag_at(ws, fork, source, commit))
    if to == "main":  # whatever upstream calls it
        for name in ("master", "archives"):
            if commit := upstream.branches(mirror).get(name):
                return Pin(commit)
    raise UsageError(
        f"{fork}: upstream has no {to!r}.",
        todo=f"Name a tag, a branch or a commit of {ws.url(fork)}"
        + (" (only its release archives can be reached)." if source == "archives" else "."),
    )


def _newest(ws: Workspace, fork: str, source: Source) -> Pin:
    mirror, entry = ws.mirror(fork, source), ws.manifest(fork)
    tagged = source == "archives" or entry.upstream.releases.refs == "tags"
    names = upstream.tags(mirror) if tagged else upstream.branches(mirror)
    if name := manifest.newest(entry, names):
        return Pin(names[name], name if tagged else None)
    raise UsageError(
        f"{fork}: no {'tag' if tagged else 'branch'} of upstream is a release by the pattern"
        f" {entry.upstream.releases.pattern.pattern!r}.",
        todo=f"Correct upstream.releases in {entry.path.name}, or say where to go: --to",
    )


def _tag_at(ws: Workspace, fork: str, source: Source, commit: ObjectId) -> str | None:
    """The release tag of a commit, if it has one."""
    tags = upstream.tags(ws.mirror(fork, source))
    return manifest.newest(
        ws.manifest(fork), (name for name, at in tags.items() if at == commit), prereleases=True
    )


def _followed(ws: Workspace, entry: manifest.Manifest, new: Mapping[str, Stand]) -> Pin:
    assert entry.follow
    content = _file(ws, entry.follow.fork, entry.follow.file, new)
    name = manifest.followed(entry, content)
    commit = upstream.resolve(ws.mirror(entry.fork, "git"), name)
    if not commit:
        raise UsageError(
            f"{entry.fork}: {entry.follow.fork}'s {entry.follow.file} names {name}, which"
            f" {ws.url(entry.fork)} does not have.",
            todo="Fetch from a repository that has it: --upstream"
            f" {entry.fork}=URL, or go elsewhere: --to",
        )
    tags = upstream.tags(ws.mirror(entry.fork, "git"))
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


def _is_ancestor(ws: Workspace, fork: str, source: Source, old: Pin, new: Pin) -> bool:
    git = ws.objects(fork, source).git
    done = git.call("merge-base", "--is-ancestor", old.commit, new.commit, ok=(0, 1, 128))
    return done.returncode == 0


# -- carrying one fork ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Replayable:
    """A fork ready to be replayed: its steps on the old base, and the new base."""

    objects: Objects
    old: ObjectId
    new: ObjectId
    steps: tuple[Step, ...]
    queue: Queue | None  # None where it is a branch
    merges: tuple[ObjectId, ...] = ()

    @property
    def history(self) -> History:
        return History(self.objects.git, self.old, self.new)


def prepare(ws: Workspace, target: Target) -> Replayable:
    """Make the bases and the steps of a fork. Raises where a layer or a patch does not apply."""
    fork = target.fork
    objects = ws.objects(fork, target.new.source)
    pins = [stand.pin.commit for stand in (target.old, target.new)]
    for stand in (target.old, target.new):
        if not objects.git.resolve(stand.pin.commit):
            raise UsageError(
                f"{fork}: {ws.url(fork)} does not have the commit {stand.pin.commit}.",
                todo="If upstream rewrote its history, say where to go now: --to; if this is"
                " another repository, see the upstream's address.",
            )
    upstream.complete(objects.git.directory, pins)

    def content(layer: Layer) -> bytes:
        return ws.objects(layer.fork, "git").read(layer.blob)

    old, new = (
        branch.base(objects, stand.pin.commit, stand.patches, content)
        for stand in (target.old, target.new)
    )
    where = ws.manifest(fork).queue
    if isinstance(where, manifest.QueueFolder):
        queue = ws.queue(fork)
        return Replayable(objects, old, new, tuple(branch.steps(objects, fork, old, queue)), queue)
    tip = upstream.fetch_ref(objects.git.directory, where.url, where.ref)
    steps, merges = branch.branch_steps(objects, old, tip)
    return Replayable(objects, old, new, tuple(steps), None, tuple(merges))


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
        made = prepare(ws, target)
        outcomes = tuple(resolved or ()) or tuple(
            replay(made.objects, made.steps, made.new, made.history, Memory(made.objects))
        )
        made.objects.flush()
        mails = branch.mails(made.objects, made.steps, outcomes, made.new)
    except ForkmanError as error:
        return Carried(target, replace(report, problem=error.what, todo=error.todo))
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
    progress: Progress | None = None,
) -> Report:
    """Fetch, pick targets, replay and verify the forks (all, or those in `named`), then land.

    dry: everything but the landing. out: where exports go, `exports/` by default.
    """
    from rebase import resolve

    for fork in named:
        ws.manifest(fork)
    with ws.lock():
        resolve.refuse_open(ws, named or list(ws.project.forks))
        needed = [*named, *_needed(ws, named)] if named else list(ws.project.forks)
        found = fetch(ws, needed, progress=progress)
        where = targets(ws, found, named, to)
        return move(ws, where, " ".join(("sync", *named)), dry=dry, out=out, progress=progress)


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
    ws.manifest(fork)
    with ws.lock():
        source: Source = "git"
        if ws.mirror(fork, "archives").is_dir() and not ws.mirror(fork, "git").is_dir():
            source = "archives"
        found = {fork: Fetch(fork, source)}
        mirror = ws.mirror(fork, source)
        known = mirror.is_dir() and (onto == "latest" or upstream.resolve(mirror, onto))
        if not known:
            found = fetch(ws, [fork], progress=progress)
        where = targets(ws, found, [fork], onto)
        return move(ws, where, f"rebase {fork}", dry=dry, out=out, progress=progress)


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
        return move(ws, where, " ".join(("export", *forks)), out=out, progress=progress)


def _staying(ws: Workspace, got: Fetch) -> Target | ForkReport:
    """The target that leaves a fork where it is."""
    pin = ws.manifest(got.fork).pin
    if not got.source:
        return _unreachable(got, pin)
    try:
        stand = ws.stand(got.fork, got.source)
    except ForkmanError as error:
        return ForkReport(got.fork, got.source, pin, pin, "", (), error.what, error.todo)
    return Target(got.fork, stand, stand, "stays", got.notes)


def _unreachable(got: Fetch, pin: Pin) -> ForkReport:
    assert got.fault
    what, todo = " ".join(got.notes), got.fault.todo
    return ForkReport(got.fork, "git", pin, pin, "", (), what, todo, unreachable=True)


def verify_exports(
    ws: Workspace, index: Path, *, progress: Progress | None = None
) -> list[export.Verification]:
    """Verify what was exported to `index` for every fork in it."""
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
    others: set[str] = set()
    for fork in named:
        entry = ws.manifest(fork)
        others |= {layer.fork for layer in entry.layers}
        if entry.follow:
            others.add(entry.follow.fork)
    return [fork for fork in others - set(named) if not ws.mirror(fork, "git").is_dir()]


def move(
    ws: Workspace,
    where: Sequence[Target | ForkReport],
    command: str,
    *,
    dry: bool = False,
    out: Path | None = None,
    progress: Progress | None = None,
) -> Report:
    """Carry every fork to its target and land them together, or say why not."""
    from rebase import resolve

    out = out or ws.exports
    tell = progress or (lambda text, done, total: None)
    carried: list[Carried] = []
    reports: list[ForkReport] = []
    group = tuple(each.fork for each in where)
    for number, target in enumerate(where):
        if isinstance(target, ForkReport):
            reports.append(target)
            continue
        tell(f"replay {target.fork}", number, len(where))
        done = carry(ws, target, resolve.finished(ws, target))
        if not done.report.problem:
            ws.remember(Last(command, group, str(out), target, done.report.outcomes))
        carried.append(done)
        reports.append(done.report)
    order = {fork: number for number, fork in enumerate(group)}
    reports.sort(key=lambda report: order[report.fork])
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
    landing.land(ws.landing, landing.Landing(written.files, _refs(carried), written.seen))
    for each in carried:
        resolve.close(ws, each.target.fork)
    return Report(command, tuple(reports), landed=True, written=changed)


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
    for done in carried:
        folder = out / done.target.fork
        files |= dict.fromkeys(folder.glob("*.patch"))
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


def _queue(made: Replayable, outcomes: Sequence[tuple[Outcome, Mail]]) -> Queue | None:
    """The queue as it is after a replay: patches for the new base, without what upstream has."""
    if made.queue is None:
        return None
    mails = {outcome.change: mail for outcome, mail in outcomes}
    queue = made.queue
    for change in made.queue.changes:
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
    if (queue := _queue(done.made, done.mails)) and isinstance(entry.queue, manifest.QueueFolder):
        assert done.made.queue
        folder = ws.root / entry.queue.path
        old, new = done.made.queue.files(), queue.files()
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


def _refs(carried: Sequence[Carried]) -> dict[Path, dict[str, ObjectId | None]]:
    """The branch of each fork where it was and where it is, for `forkman diff`."""
    refs: dict[Path, dict[str, ObjectId | None]] = {}
    for done in carried:
        assert done.made
        made = done.made
        commits = [outcome.commit for outcome in done.report.outcomes if outcome.commit]
        states = {
            str(done.target.old.pin): (made.old, branch.chain(made.objects, made.old, made.steps)),
            str(done.target.new.pin): (made.new, commits[-1] if commits else made.new),
        }
        made.objects.flush()
        refs[made.objects.git.directory] = {
            ref + name: id
            for name, (base, tip) in states.items()
            for ref, id in ((BASES, base), (STATES, tip))
        }
    return refs

"""The audit: what a replay that conflicts nowhere may still hide.

- *Residue*: CUDA-only code on the NPU run's path, which a textual rebase says nothing of. It is
  looked for in the branch as the replay makes it; see `rebase.residue`.
- *Contracts*: what our code relies on upstream, held against upstream with its layers; see
  `rebase.contracts`. A broken one names the upstream commit that broke it.
- *Validity*: every Python file that our changes touch parses under the fork's Python, `python` in
  `[runtime]` of `manifests/stack.toml` (as far as `ast.parse` tells versions apart).

A fork whose manifest has no `[audit]` is not audited. A sync (or rebase) that moves a fork audits
it where it goes, and what upstream brought since the old pin, accepted by nobody, is a finding: a
person is needed, and nothing lands. A fork in conflict is audited once that is resolved, for until
then its branch is not the one that would land.
"""

import ast
import sys
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rebase import branch, contracts, landing, residue, targets, upstream
from rebase.carry import Carried, carry
from rebase.errors import NeedsPerson, UsageError
from rebase.git import ObjectId
from rebase.manifest import QueueFolder
from rebase.objects import Objects
from rebase.outcome import Audit, Broken, ForkReport, Outcome, Site, Unparsed
from rebase.targets import Progress
from rebase.workspace import Target, Workspace


def folder(ws: Workspace, fork: str) -> Path:
    """Where a fork's accepted sites, contracts and needs lie: beside its queue."""
    queue = ws.manifest(fork).queue
    return ws.root / (queue.path if isinstance(queue, QueueFolder) else Path("forks", fork))


# -- the command -----------------------------------------------------------------------------------


def audit(
    ws: Workspace,
    forks: Sequence[str] = (),
    *,
    at: str | None = None,
    progress: Progress | None = None,
) -> list[Audit]:
    """Audit `forks`, or every fork that has `[audit]`, at their pins or at the revision `at`.

    Findings are all that nobody accepted. Fetches nothing. Raises UsageError where a named fork has
    no `[audit]` or was never fetched, NeedsPerson where its branch cannot be made.
    """
    for fork in forks:
        if not ws.manifest(fork).audit:
            raise UsageError(
                f"{fork}: its manifest has no [audit], so there is nothing to look at.",
                todo=f"Name what runs on the NPU in {ws.manifest(fork).path.name}:"
                ' [audit] paths = ["…"]',
            )
    chosen = forks or [fork for fork, entry in ws.project.forks.items() if entry.audit]
    found: list[Audit] = []
    with ws.lock():
        for number, fork in enumerate(chosen):
            if progress:
                progress(f"audit {fork}", number, len(chosen))
            found.append(_audit(ws, carried(ws, fork, at)))
    return found


@dataclass(frozen=True)
class Accepted:
    """What `accept` did: the file, how many sites it gained, and the findings that are left."""

    fork: str
    path: Path
    sites: int
    left: Audit


def accept(ws: Workspace, fork: str, reason: str, *, at: str | None = None) -> Accepted:
    """Accept, with a reason, all residue of a fork that nobody accepted yet."""
    if not reason.strip() or not reason.isprintable():
        raise UsageError("The reason for accepting is empty, or no line of text.")
    [found] = audit(ws, [fork], at=at)
    path = folder(ws, fork) / residue.FILE
    with ws.lock():
        old = path.read_bytes() if path.exists() else None
        if found.residue:
            lead = f"{old.decode().rstrip()}\n\n" if old and old.strip() else ""
            new = (lead + residue.rendered(found.residue, reason)).encode()
            landing.land(ws.landing, landing.Landing({path: new}, seen={path: old}))
    count = len(found.residue)
    left = replace(found, residue=(), accepted=found.accepted + count)
    return Accepted(fork, path, count, left)


def standing(ws: Workspace, fork: str, at: str | None) -> Target:
    """Where a fork stands, or would stand at the upstream revision `at`, with its present layers.

    Layers that do not fit there are left out, and its notes say so. Raises UsageError where the
    mirror does not have that revision.
    """
    source = ws.source(fork)
    stand = ws.stand(fork, source)
    if at is None:
        return Target(fork, stand, stand, "stays")
    [there] = targets.targets(ws, {fork: targets.Fetch(fork, source)}, [fork], at)
    if isinstance(there, ForkReport):
        raise UsageError(there.problem, todo=f"{there.todo} Newer ones: forkman fetch {fork}")
    objects, new = ws.objects(fork, source), there.new
    upstream.complete(objects.git.directory, [new.pin.commit])
    try:
        branch.base(objects, new.pin.commit, new.patches, ws.layer)
    except UsageError:
        names = ", ".join(layer.path for layer in new.patches)
        note = f"Without {names}, which does not fit {new.pin}."
        there = replace(there, new=replace(new, layers=()), notes=(*there.notes, note))
    return there


def carried(ws: Workspace, fork: str, at: str | None) -> Carried:
    """A fork's branch at its pin, or at the revision `at`. Raises NeedsPerson where there is none.

    Changes in conflict there are left out, and its report says so.
    """
    done = carry(ws, standing(ws, fork, at))
    if done.report.problem:
        raise NeedsPerson(done.report.problem, todo=done.report.todo)
    return done


# -- one fork --------------------------------------------------------------------------------------


def _audit(ws: Workspace, done: Carried) -> Audit:
    """All that is to be said of a branch."""
    made, fork = done.made, done.target.fork
    assert made
    tip = _tip(made.objects, made.new, done.report.outcomes)
    scan = residue.Scan(made.objects, ws.manifest(fork).audit)
    sifted = residue.sift(scan.sites(tip), residue.load(folder(ws, fork)))
    newly, before, kept = _contracts(ws, done)
    notes = [*done.report.notes]
    if conflicts := [outcome.change for outcome in done.report.conflicts]:
        notes.append(f"In conflict there, and left out: {', '.join(conflicts)}.")
    notes += _missing(scan, tip)
    return Audit(
        fork,
        done.target.new.pin,
        sifted.new,
        (*newly, *before),
        _unparsed(ws, made.objects, made.new, done.report.outcomes),
        sifted.accepted,
        kept,
        stale=sifted.stale,
        notes=tuple(notes),
    )


def moved(ws: Workspace, done: Carried) -> Audit | None:
    """The audit of a fork that a sync carried: its findings are what upstream brought.

    None where the fork is not audited, stays where it is, or is in conflict. Raises UsageError
    where its files of accepted sites or contracts are wrong.
    """
    made, target = done.made, done.target
    paths = ws.manifest(target.fork).audit
    if not made or not paths or target.old == target.new or done.report.conflicts:
        return None
    tip = _tip(made.objects, made.new, done.report.outcomes)
    was = made.objects.tree_of(branch.chain(made.objects, made.old, made.steps))
    scan = residue.Scan(made.objects, paths)
    accepted = residue.load(folder(ws, target.fork))
    sifted = residue.sift(scan.sites(tip), accepted)
    new = _not_in(sifted.new, residue.sift(scan.sites(was), accepted).new)
    newly, before, kept = _contracts(ws, done)
    return Audit(
        target.fork,
        target.new.pin,
        new,
        tuple(newly),
        _unparsed(ws, made.objects, made.new, done.report.outcomes),
        sifted.accepted,
        kept,
        len(sifted.new) - len(new) + len(before),
        sifted.stale,
        tuple(_missing(scan, tip)),
    )


def _missing(scan: residue.Scan, tree: ObjectId) -> list[str]:
    return [f"The tree has no {path}, which [audit] names." for path in scan.missing(tree)]


def _tip(objects: Objects, base: ObjectId, outcomes: Sequence[Outcome]) -> ObjectId:
    """The tree of a branch."""
    return outcomes[-1].tree if outcomes else objects.tree_of(base)


def _not_in(sites: Sequence[Site], before: Sequence[Site]) -> tuple[Site, ...]:
    """The sites that were not there before, whatever their lines."""
    had = Counter((site.name, site.code) for site in before)
    now = Counter((site.name, site.code) for site in sites)
    new = []
    for site in sites:
        key = site.name, site.code
        now[key] -= 1
        if now[key] >= had[key]:
            new.append(site)
    return tuple(new)


def _contracts(ws: Workspace, done: Carried) -> tuple[list[Broken], list[Broken], int]:
    """The contracts that broke since the old pin, those that were broken there, how many hold."""
    made = done.made
    assert made
    modules = contracts.Modules(made.objects)
    old, new = (modules.tree(made.objects.tree_of(base)) for base in (made.old, made.new))
    newly: list[Broken] = []
    before: list[Broken] = []
    every = contracts.load(folder(ws, done.target.fork))
    for contract in every:
        if not (detail := new.broken(contract)):
            continue
        broken = Broken(str(contract), contract.why, detail)
        if old.broken(contract):
            before.append(broken)
        else:
            by = contracts.culprit(modules, contract, old.seen, made.history)
            newly.append(replace(broken, by=by))
    return newly, before, len(every) - len(newly) - len(before)


def _unparsed(
    ws: Workspace, objects: Objects, base: ObjectId, outcomes: Sequence[Outcome]
) -> tuple[Unparsed, ...]:
    """The Python files that the changes touch, and that do not parse after them."""
    python = _python(ws)
    touched: dict[bytes, list[str]] = {}
    tree = start = objects.tree_of(base)
    for outcome in outcomes:
        for path in objects.changed(tree, outcome.tree):
            touched.setdefault(path, []).append(outcome.change)
        tree = outcome.tree
    found = []
    for path, changes in touched.items():
        entry = objects.find(tree, path)
        if not path.endswith((b".py", b".pyi")) or not entry or not entry.is_file:
            continue
        if error := _syntax_error(objects.read(entry.id), python):
            line, detail = error
            was = objects.find(start, path)
            if was and was.is_file and _syntax_error(objects.read(was.id), python):
                detail += "; upstream's own file does not parse either"
            shown = path.decode("utf-8", "backslashreplace")
            found.append(Unparsed(shown, line, detail, tuple(dict.fromkeys(changes))))
    return tuple(found)


def _python(ws: Workspace) -> tuple[int, int]:
    """The Python the forks run on; a newer one than ours is taken for ours."""
    said = ws.project.stack.runtime.get("python", "")
    try:
        major, minor = map(int, said.split(".")[:2])
    except ValueError:
        return sys.version_info[:2]
    return min((major, minor), sys.version_info[:2])


def _syntax_error(content: bytes, python: tuple[int, int]) -> tuple[int, str] | None:
    """Where a file does not parse under that Python, and why; None where it does."""
    try:
        with warnings.catch_warnings(action="ignore"):
            ast.parse(content, feature_version=python)
    except SyntaxError as error:
        return error.lineno or 1, error.msg
    except (ValueError, RecursionError, MemoryError) as error:
        return 1, str(error)
    return None

"""A mirror's refs: what an upstream has, as last fetched. Never asks the network.

refs/upstream/heads/*     upstream's branches, as they are there now
refs/tags/*               its tags; those it deleted stay, for a pin may name one
refs/forkman/tags/<name>  tags it deleted whose names are in the way of new ones (`a` of `a/b`);
they count as tags. <name> is quoted as in an address, so that none of these is in another's way
refs/forkman/kept/<id>    tips that upstream rewrote, deleted or moved away from, and that no
branch or tag reaches any more: a pin may stand on one
"""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import quote, unquote

from rebase.errors import UsageError
from rebase.git import Git, ObjectId

HEADS, TAGS, KEPT = "refs/upstream/heads/", "refs/tags/", "refs/forkman/kept/"
_ASIDE = "refs/forkman/tags/"

# A blobless mirror must not go to the network because it was asked whether it has an object.
# Older gits ignore the first; the second leaves them no transport to fetch with.
OFFLINE = {"GIT_NO_LAZY_FETCH": "1", "GIT_ALLOW_PROTOCOL": "none"}


def tags(mirror: Path) -> dict[str, ObjectId]:
    """The mirror's tags and the commits they name; tags of other things are left out."""
    found = _commits(mirror, _ASIDE, TAGS)
    return {
        _unquoted(ref[len(_ASIDE) :]) if ref.startswith(_ASIDE) else ref[len(TAGS) :]: commit
        for ref, commit in sorted(found.items())  # those set aside first: others take their place
    }


def aside(mirror: Path) -> dict[str, ObjectId]:
    """The tags that were set aside, by name, and their objects."""
    return {_unquoted(ref[len(_ASIDE) :]): id for ref, id in listed(mirror, _ASIDE).items()}


def ref_aside(tag: str) -> str:
    """The ref of a tag that is set aside."""
    return _ASIDE + quote(os.fsencode(tag), safe="")


def _unquoted(name: str) -> str:
    return unquote(name, errors="surrogateescape")


def branches(mirror: Path) -> dict[str, ObjectId]:
    """Upstream's branches and their tips."""
    return commits(mirror, HEADS)


def resolve(mirror: Path, revision: str) -> ObjectId | None:
    """The commit that `revision` names in the mirror, or None; never asks the network.

    In this order: a full id, a tag, an upstream branch, an abbreviated id.
    Raises UsageError for an abbreviated id that several commits share.
    """
    if not revision.isprintable() or not revision or revision.startswith("-"):
        return None
    names = [TAGS + revision, ref_aside(revision), HEADS + revision]
    if re.fullmatch(r"[0-9a-f]{40}", revision):
        names.insert(0, revision)
    if found := next((id for id in peel(mirror, names) if id), None):
        return found
    if not re.fullmatch(r"[0-9a-f]{4,39}", revision):
        return None
    # Of objects of all kinds whose ids begin so, the commits; git's own look-up of a short id does
    # not tell none from several.
    alike = Git(mirror).run("rev-parse", f"--disambiguate={revision}", env=OFFLINE)
    commits = {id for id in peel(mirror, alike.decode("ascii").split()) if id}
    if len(commits) > 1:
        raise UsageError(
            f"{mirror.stem}: the ids of {len(commits)} commits begin with {revision}.",
            todo="Give more of the id's digits.",
        )
    return min(commits, default=None)


def listed(mirror: Path, *under: str) -> dict[str, ObjectId]:
    """The refs below `under`, with their whole names, and their objects."""
    lines = Git(mirror).run("for-each-ref", "--format=%(objectname) %(refname)", *under)
    return {
        ref: ObjectId(id)
        for id, _, ref in (line.partition(" ") for line in os.fsdecode(lines).splitlines())
    }


def move(
    mirror: Path, moves: Mapping[str, ObjectId | None], *, log: bool = False, dry: bool = False
) -> None:
    """Move all these refs or none; None deletes. Raises GitError where one cannot be moved.

    log: write reflogs. dry: only try whether it would work.
    """
    if not moves:
        return
    commands = [
        f"update {ref}\0{id}\0\0" if id else f"delete {ref}\0\0" for ref, id in moves.items()
    ]
    script = "".join(["start\0", *commands, "prepare\0", "abort\0" if dry else "commit\0"])
    Git(mirror).run(
        *(() if log else ("-c", "core.logAllRefUpdates=false")), "update-ref", "--stdin", "-z",
        input=os.fsencode(script),
    )  # fmt: skip


def commits(mirror: Path, under: str) -> dict[str, ObjectId]:
    """The refs below `under`, without it, and the commits they name."""
    return {ref[len(under) :]: commit for ref, commit in _commits(mirror, under).items()}


def _commits(mirror: Path, *under: str) -> dict[str, ObjectId]:
    """The refs below `under`, with their whole names, and the commits they name."""
    listed = Git(mirror).run(
        "for-each-ref",
        "--format=%(objecttype) %(objectname) %(*objecttype) %(*objectname) %(refname)",
        *under,
        env=OFFLINE,
    )
    found: dict[str, ObjectId] = {}
    nested = []
    for line in os.fsdecode(listed).splitlines():
        kind, id, inner_kind, inner_id, ref = line.split(" ", 4)
        if kind == "commit":
            found[ref] = ObjectId(id)
        elif inner_kind == "commit":
            found[ref] = ObjectId(inner_id)
        elif inner_kind == "tag":  # a tag of a tag, which git before 2.45 peels once only
            nested.append(ref)
    for ref, peeled in zip(nested, peel(mirror, nested), strict=True):
        if peeled:
            found[ref] = peeled
    return found


def peel(mirror: Path, names: Sequence[str]) -> list[ObjectId | None]:
    """For each name the commit it names, if any."""
    if not names:
        return []
    asked = "".join(f"{name}^{{commit}}\n" for name in names)
    # git stops with an error where a blobless mirror lacks an object it was promised
    answers = Git(mirror).run(
        "cat-file", "--batch-check=%(objectname)", input=os.fsencode(asked), ok=(0, 128),
        env=OFFLINE,
    ).decode("utf-8", "replace").splitlines()  # fmt: skip
    answers += [" missing"] * (len(names) - len(answers))
    return [None if " " in answer else ObjectId(answer) for answer in answers]

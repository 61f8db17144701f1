"""Patches as text, between trees: make one, apply one, take one apart.

`diff` gives the same bytes on every machine. Text comes from git's diff, with everything that a
version or a configuration could change fixed on its command line. Binary content is written here,
because git deflates it and zlib's versions deflate differently: a `GIT binary patch` (git-apply
reads it, in both directions) whose zlib stream holds the content as it is, in stored blocks.
Renames are written as a deletion and a creation: `patch -p1` understands nothing else.

`apply` is git-apply's, on an index that holds the touched paths only, so no worktree and no time
for the rest of the tree. It is exact: lines may have moved, but each hunk's context must be there.
Why a hunk was refused is found here, since git names only its line.
"""

import base64
import itertools
import re
import struct
import tempfile
import zlib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from rebase.errors import EnvironmentFault, UsageError
from rebase.git import ObjectId
from rebase.objects import SUBMODULE, TREE, Entry, Objects
from rebase.words import split_lines

# -- making a patch ------------------------------------------------------------------------------

_DIFF = (
    "-c", "core.quotePath=true",  # file names in ASCII, as octal escapes
    "-c", "diff.suppressBlankEmpty=false",  # an empty context line keeps its space; has no option
    "diff-tree",
    "-p",
    "--full-index",  # abbreviations grow with the repository
    "--no-renames",  # patch(1) knows none, and their detection changes with limits and versions
    "--text",  # what is binary is decided here, not by attributes
    "--no-ext-diff",
    "--no-textconv",
    "--no-color",
    "--ws-error-highlight=none",
    "--diff-algorithm=myers",  # histogram and minimal changed in git 2.52; this one never did
    "--indent-heuristic",
    "--unified=3",  # also against GIT_DIFF_OPTS
    "--inter-hunk-context=0",
    "--no-function-context",
    "--src-prefix=a/",  # against diff.noprefix, diff.mnemonicPrefix, diff.srcPrefix
    "--dst-prefix=b/",
    "--line-prefix=",
    "--no-relative",
    "-O/dev/null",  # against diff.orderFile
    "--submodule=short",
    "--ignore-submodules=none",
)  # fmt: skip


def diff(objects: Objects, old: ObjectId, new: ObjectId) -> bytes:
    """The patch from `old` to `new`, trees or commits; empty where they are the same.

    The same two trees give the same bytes whatever git, locale or configuration.
    """
    objects.flush()
    patch = objects.git.run(*_DIFF, old, new)
    if b"\0" not in patch:
        return patch
    return b"".join(
        _with_binary(objects, file.text) if b"\0" in file.text else file.text
        for file in parse(patch)
    )


def _with_binary(objects: Objects, text: bytes) -> bytes:
    """One file's diff with its hunks replaced by the file's content, new then old."""
    header, _, _ = text.partition(b"\n--- ")
    ids = _INDEX.search(header)
    assert ids  # --full-index, and a file with hunks
    old, new = (
        b"" if set(id) == {ord("0")} else objects.read(ObjectId(id.decode("ascii")))
        for id in ids.groups()
    )
    return header + b"\nGIT binary patch\n" + _literal(new) + _literal(old)


def _literal(content: bytes) -> bytes:
    """`content` as a `literal` block: its length, base85 lines led by theirs, an empty line."""
    deflated = _stored(content)
    lines = [b"literal %d\n" % len(content)]
    for at in range(0, len(deflated), 52):
        part = deflated[at : at + 52]
        length = ord("A") - 1 + len(part) if len(part) <= 26 else ord("a") - 27 + len(part)
        lines.append(b"%c%s\n" % (length, base64.b85encode(part, pad=True)))
    return b"".join(lines) + b"\n"


def _stored(content: bytes) -> bytes:
    """`content` as a zlib stream (RFC 1950) of stored blocks (RFC 1951, 3.2.4)."""
    stream = [b"\x78\x01"]
    for at in range(0, len(content) or 1, 0xFFFF):
        block = content[at : at + 0xFFFF]
        last = at + 0xFFFF >= len(content)
        stream += (struct.pack("<BHH", last, len(block), len(block) ^ 0xFFFF), block)
    stream.append(struct.pack(">I", zlib.adler32(content)))
    return b"".join(stream)


# -- taking a patch apart ------------------------------------------------------------------------

_INDEX = re.compile(rb"^index ([0-9a-f]{4,64})\.\.([0-9a-f]{4,64})", re.MULTILINE)
_HUNK = re.compile(rb"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
_EXTENDED = re.compile(
    rb"(?:old mode|new mode|deleted file mode|new file mode|copy from|copy to|rename from"
    rb"|rename to|rename old|rename new|similarity index|dissimilarity index|index) "
)
_ESCAPE = re.compile(rb'\\([abtnvfr"\\]|[0-3][0-7]{2})')
_ESCAPED = dict(zip(b'abtnvfr"\\', b'\a\b\t\n\v\f\r"\\', strict=True))


@dataclass(frozen=True)
class PatchHunk:
    """One hunk: where it starts in the old and the new file (from 1), and what it replaces."""

    line: int
    new_line: int
    before: tuple[bytes, ...]
    after: tuple[bytes, ...]
    trailing: bool  # ends with context; without it a hunk belongs at the end of the file


@dataclass(frozen=True)
class FilePatch:
    """What a patch does to one file.

    old, new: its path before and after; None where it is created or deleted.
    text: this file's part of the patch, from its first header line on.
    modes: before and after; None where the patch does not say, or there is no file.
    blobs: the (abbreviated) ids of its content before and after, where the patch says so.
    """

    old: bytes | None
    new: bytes | None
    text: bytes
    hunks: tuple[PatchHunk, ...]
    modes: tuple[int | None, int | None]
    blobs: tuple[bytes, bytes] | None
    binary: bool

    @property
    def path(self) -> bytes:
        """The path after, or before where the file is deleted."""
        path = self.new or self.old
        assert path
        return path

    @property
    def paths(self) -> frozenset[bytes]:
        return frozenset(path for path in (self.old, self.new) if path)

    def reversed(self) -> "FilePatch":
        """What takes this one back; its text stays."""
        hunks = tuple(
            replace(
                hunk, line=hunk.new_line, new_line=hunk.line, before=hunk.after, after=hunk.before
            )
            for hunk in self.hunks
        )
        return replace(
            self,
            old=self.new,
            new=self.old,
            hunks=hunks,
            modes=(self.modes[1], self.modes[0]),
            blobs=self.blobs and (self.blobs[1], self.blobs[0]),
        )


def parse(patch: bytes) -> list[FilePatch]:
    """The files of a patch, in order. Text around them (mail, signatures) is left out.

    Hunks are read by their line counts, because a line of a file may look like a header.
    Raises UsageError where the patch is damaged or names a path outside the tree.
    """
    lines = split_lines(patch)
    files = []
    at = 0
    while at < len(lines):
        if not (lines[at].startswith(b"diff --git ") or _is_plain_header(lines[at : at + 3])):
            at += 1
            continue
        file, at = _parse_file(lines, at)
        if file:
            files.append(file)
    return files


def split_files(patch: bytes) -> list[tuple[bytes, bytes]]:
    """A squashed diff as one diff a file: (path, diff), in order.

    Both names of a rename or a copy, and a file that changes its type, stay in one diff: apart
    they would not apply. Raises UsageError like `parse`.
    """
    groups: list[list[FilePatch]] = []
    for file in parse(patch):
        related = [group for group in groups if any(other.paths & file.paths for other in group)]
        if not related:
            groups.append([file])
            continue
        first, *rest = related
        for group in rest:
            first += group
            groups.remove(group)
        first.append(file)
    return [(group[0].path, b"".join(_complete(file.text) for file in group)) for group in groups]


def paths(patch: bytes) -> frozenset[bytes]:
    """Every path a patch touches, both names of renames and copies. Raises UsageError."""
    return frozenset(path for file in parse(patch) for path in file.paths)


def _complete(text: bytes) -> bytes:
    return text if text.endswith(b"\n") else text + b"\n"


def _is_plain_header(lines: Sequence[bytes]) -> bool:
    """Whether a diff without git's header begins here, as git-apply decides it."""
    return (
        len(lines) == 3
        and lines[0].startswith(b"--- ")
        and lines[1].startswith(b"+++ ")
        and _HUNK.match(lines[2]) is not None
    )


def _parse_file(lines: Sequence[bytes], start: int) -> tuple[FilePatch | None, int]:
    """The file whose header is at `start`, and where the next may begin.

    None for a header with nothing after it, which is no patch.
    """
    at = start
    named: dict[bytes, bytes] = {}  # header → its value
    if lines[at].startswith(b"diff --git "):
        at += 1
        while at < len(lines) and (key := _EXTENDED.match(lines[at])):
            named[key[0].rstrip()] = lines[at][key.end() :].rstrip(b"\n")
            at += 1
    if at + 1 < len(lines) and lines[at][:4] == b"--- " and lines[at + 1][:4] == b"+++ ":
        named[b"---"], named[b"+++"] = (lines[at + side][4:].rstrip(b"\n") for side in (0, 1))
        at += 2
    hunks = []
    binary = False
    if b"+++" in named:
        while at < len(lines) and _HUNK.match(lines[at]):
            hunk, at = _parse_hunk(lines, at)
            hunks.append(hunk)
    elif at < len(lines) and lines[at].rstrip() == b"GIT binary patch":
        binary = True
        at += 1
        while at < len(lines) and lines[at].startswith((b"literal ", b"delta ")):
            while at < len(lines) and lines[at] != b"\n":
                at += 1
            at += 1
    elif at < len(lines) and re.match(rb"(Binary f|F)iles .* differ$", lines[at].rstrip(b"\r\n")):
        raise UsageError(
            f"The patch says that {show(lines[at].strip())}, but does not hold the content.",
            todo="Make it again with git diff --binary.",
        )
    if not named:
        return None, at
    old, new = _names(lines[start], named)
    text = b"".join(lines[start:at])
    ids = _INDEX.match(b"index " + named.get(b"index", b""))
    blobs = (ids[1], ids[2]) if ids else None
    same = named.get(b"index", b"").partition(b" ")[2]
    modes = (
        _mode(named.get(b"old mode") or named.get(b"deleted file mode") or same),
        _mode(named.get(b"new mode") or named.get(b"new file mode") or same),
    )
    return FilePatch(old, new, text, tuple(hunks), modes, blobs, binary), at


def _mode(octal: bytes) -> int | None:
    return int(octal, 8) if re.fullmatch(rb"[0-7]{6}\s*", octal) else None


def _parse_hunk(lines: Sequence[bytes], start: int) -> tuple[PatchHunk, int]:
    header = _HUNK.match(lines[start])
    assert header
    line, new_line = int(header[1]), int(header[3])
    old_left, new_left = int(header[2] or b"1"), int(header[4] or b"1")
    before: list[bytes] = []
    after: list[bytes] = []
    at = start + 1
    mark = b""
    while old_left > 0 or new_left > 0 or (at < len(lines) and lines[at][:2] == b"\\ "):
        text = lines[at] if at < len(lines) else b"end"
        if text[:1] == b"\\":  # "\ No newline at end of file": of the line before
            for side, marks in ((before, b" -"), (after, b" +")):
                if mark and mark in marks and side:
                    side[-1] = side[-1].removesuffix(b"\n")
            at += 1
            continue
        mark = b" " if text == b"\n" else text[:1]
        content = text if text == b"\n" else text[1:]
        if mark not in (b" ", b"-", b"+"):
            raise UsageError(
                f"The patch is damaged: the hunk {show(lines[start].strip())} ends early, "
                f"in its line {at + 1}.",
                todo="Make it again; editors and mail programs cut and wrap lines.",
            )
        if mark != b"+":
            before.append(content)
            old_left -= 1
        if mark != b"-":
            after.append(content)
            new_left -= 1
        at += 1
    return PatchHunk(line, new_line, tuple(before), tuple(after), trailing=mark == b" "), at


def _names(first: bytes, named: Mapping[bytes, bytes]) -> tuple[bytes | None, bytes | None]:
    """A file's path before and after, from its header lines."""
    _check_prefixes(first, named)
    if b"+++" in named:
        old, new = (_strip(named[side].partition(b"\t")[0]) for side in (b"---", b"+++"))
    else:
        old = new = _common_name(first)
    for move in (b"rename", b"copy"):
        if move + b" to" in named and move + b" from" in named:
            old, new = _unquote(named[move + b" from"]), _unquote(named[move + b" to"])
    if b"new file mode" in named:
        old = None
    if b"deleted file mode" in named:
        new = None
    for path in (old, new):
        if path is not None:
            check_path(path)
    if not (old or new):
        raise UsageError(f"The patch is damaged: {show(first.strip())} names no file.")
    return old, new


def _check_prefixes(first: bytes, named: Mapping[bytes, bytes]) -> None:
    """Raise UsageError for a patch without `a/` and `b/`: read as `-p1` it is for other files."""
    sides = [named[side].partition(b"\t")[0] for side in (b"---", b"+++") if side in named]
    sides = [side for side in sides if side != b"/dev/null"]
    header = first.removeprefix(b"diff --git ").rstrip(b"\n")
    half = header[: len(header) // 2]
    bare = [name for name in sides if b"/" not in name]
    if header == half + b" " + half:  # with prefixes the two differ
        bare.append(half)
    for move in (b"rename", b"copy"):
        if header == b" ".join(named.get(move + end, b"") for end in (b" from", b" to")):
            bare.append(named[move + b" from"])
    if not first.startswith(b"diff --git ") and len(sides) == 2 and sides[0] == sides[1]:
        bare.append(sides[0])
    if bare and not _unquote(bare[0]).startswith((b"a/", b"b/", b"/")):
        raise UsageError(
            f"The patch names {show(_unquote(bare[0]))} without the prefixes a/ and b/.",
            todo="Make it again with them: git -c diff.noprefix=false diff (or format-patch).",
        )


def _common_name(first: bytes) -> bytes | None:
    """The name in `diff --git a/NAME b/NAME`, which may hold spaces; None where they differ."""
    rest = first.removeprefix(b"diff --git ").rstrip(b"\n")
    if quoted := re.match(rb'("(?:[^"\\]|\\.)*") ', rest):
        return _strip(quoted[1])
    for space in (found.start() for found in re.finditer(rb" ", rest)):
        name = _strip(rest[:space])
        if name and name == _strip(rest[space + 1 :]):
            return name
    return None


def _strip(name: bytes) -> bytes | None:
    """A header's name without its first directory, as `-p1` has it; None for /dev/null."""
    name = _unquote(name)
    if name == b"/dev/null":
        return None
    return name if name.startswith(b"/") else name.partition(b"/")[2]


def _unquote(name: bytes) -> bytes:
    """A name as git writes it: in quotes, C's escapes inside, where it is unusual."""
    if not (len(name) > 1 and name[:1] == name[-1:] == b'"'):
        return name
    return _ESCAPE.sub(
        lambda found: bytes([_ESCAPED[found[1][0]] if len(found[1]) == 1 else int(found[1], 8)]),
        name[1:-1],
    )


def check_path(path: bytes) -> None:
    """Raise UsageError for a path that no tree of git's may hold or that leaves the tree."""
    parts = path.split(b"/")
    if b"\0" in path or any(part in (b"", b".", b"..") or _is_git(part) for part in parts):
        raise UsageError(
            f'The path "{show(path)}" leaves the tree, or is git\'s own.',
            todo="Do not use this patch before you know where it comes from.",
        )


def _is_git(name: bytes) -> bool:
    """Whether some file system takes `name` for `.git`, as NTFS and HFS+ do; git's own check."""
    plain = name.decode("utf-8", "replace").casefold()
    plain = re.sub("[\u200c-\u200f\u202a-\u202e\u206a-\u206f\ufeff]", "", plain)
    return plain.partition(":")[0].rstrip(". ") in (".git", "git~1")


# -- applying a patch ----------------------------------------------------------------------------

_APPLY = (
    "apply",
    "--cached",  # the index, no worktree
    "--whitespace=nowarn",  # against apply.whitespace=fix, which edits
    "--no-ignore-whitespace",
)  # fmt: skip


@dataclass(frozen=True)
class RejectedHunk:
    """Why one hunk of a file does not apply.

    number: counted from 1; line: where the patch expects it, in the old file.
    expected: the first line it needs that is not there, None for the end of the file;
    found: what the file has instead, None for its end; found_line: where that is.
    reason: where there is more to say.
    """

    number: int
    line: int
    expected: bytes | None
    found: bytes | None
    found_line: int
    reason: str = ""

    def __str__(self) -> str:
        head = f"hunk {self.number} (line {self.line})"
        if self.reason:
            return f"{head}: {self.reason}"
        return (
            f"{head}: expected {_quoted(self.expected)}, "
            f"the file has {_quoted(self.found)} in line {self.found_line}"
        )


@dataclass(frozen=True)
class RejectedFile:
    """Why a patch does not apply to one file: `hunks`, or a `reason` for the file as a whole."""

    path: bytes
    hunks: tuple[RejectedHunk, ...]
    reason: str = ""

    def __str__(self) -> str:
        reasons = [str(hunk) for hunk in self.hunks] or [self.reason]
        return "\n".join(f"{show(self.path)}: {reason}" for reason in reasons)


class Rejected(Exception):
    """A patch does not apply. As text: one line a hunk."""

    def __init__(self, files: tuple[RejectedFile, ...]) -> None:
        super().__init__("\n".join(map(str, files)))
        self.files = files


def apply(
    objects: Objects,
    tree: ObjectId,
    patch: bytes,
    *,
    three_way: bool = False,
    reverse: bool = False,
) -> ObjectId:
    """`tree` with `patch` applied; the same tree for an empty patch.

    three_way: where a hunk's context is not there, merge with the blob the patch was made from,
    named in its `index` lines, as `git apply --3way` does. reverse: take the patch back.
    Raises Rejected, UsageError where the patch is damaged or its paths leave the tree, and
    EnvironmentFault where the repository lacks a file or cannot be written.
    """
    (result,) = apply_series(objects, tree, [patch], three_way=three_way, reverse=reverse)
    return result


def apply_series(
    objects: Objects,
    tree: ObjectId,
    patches: Iterable[bytes],
    *,
    three_way: bool = False,
    reverse: bool = False,
) -> Iterator[ObjectId]:
    """`apply` one patch after another on one index: yields the tree after each.

    Every patch is parsed before the first is applied. Raises as `apply` does, at the patch that
    is at fault, and EnvironmentFault where the repository lacks a file or cannot be written.
    """
    series = [(patch, parse(patch)) for patch in patches]
    touched = {path for _, files in series for file in files for path in file.paths}
    before = around(objects, tree, touched)
    options = [*(["--3way"] if three_way else []), *(["-R"] if reverse else [])]
    objects.flush()
    with tempfile.TemporaryDirectory(prefix="forkman-") as scratch:
        env = {"GIT_INDEX_FILE": f"{scratch}/index"}
        objects.need({path: entry for path, entry in before.items() if path in touched})
        objects.git.run(
            "update-index", "-z", "--index-info", env=env,
            input=b"".join(
                b"%o %s\t%s\0" % (entry.mode, entry.id.encode(), path)
                for path, entry in before.items()
            ),
        )  # fmt: skip
        for patch, files in series:
            if files:
                if reverse:
                    files = [file.reversed() for file in files]
                after = _apply_to_index(objects, tree, patch, files, env, options)
                if reverse:
                    after |= _created(files, after)
                tree = objects.splice(
                    tree,
                    {
                        path: after.get(path)
                        for path in before.keys() | after.keys()
                        if before.get(path) != after.get(path)
                    },
                )
                before = after
            elif patch.strip():
                raise UsageError("There is no diff in the patch.")
            yield tree


def _created(files: Sequence[FilePatch], entries: Mapping[bytes, Entry]) -> dict[bytes, Entry]:
    """What reversed `files` create, as it must be: git 2.47 makes plain files of all of it."""
    found: dict[bytes, Entry] = {}
    for file in files:
        if file.old is None and file.new and file.new in entries and file.modes[1]:
            id = entries[file.new].id
            if file.modes[1] == SUBMODULE:  # its one line is `Subproject commit <id>`
                id = ObjectId(file.hunks[0].after[0].split()[-1].decode("ascii"))
            found[file.new] = Entry(file.modes[1], id)
    return found


def around(objects: Objects, tree: ObjectId, paths: Collection[bytes]) -> dict[bytes, Entry]:
    """What of `tree` decides whether `paths` can be written: they, and what is in their way."""
    found: dict[bytes, Entry] = {}
    for path in paths:
        parts = path.split(b"/")
        for upper in itertools.accumulate(parts, lambda left, right: left + b"/" + right):
            entry = objects.find(tree, upper)
            if entry is None:
                break
            if entry.mode != TREE:
                found[upper] = entry
                break
        else:
            assert entry  # the path is a directory
            found.update(objects.walk(entry.id, path + b"/"))
    return found


def _apply_to_index(
    objects: Objects,
    tree: ObjectId,
    patch: bytes,
    files: Sequence[FilePatch],
    env: dict[str, str],
    options: Sequence[str],
) -> dict[bytes, Entry]:
    """Apply one patch to the index `env` names; the index's entries after it."""
    done = objects.git.call(*_APPLY, *options, input=patch, env=env, ok=(0, 1, 128))
    if done.returncode == 128:
        words = re.sub(rb"^(error|fatal): ", b"", done.stderr, flags=re.M).splitlines()
        said = "; ".join(map(show, words))
        # Is it the patch, or the world around it? On an empty index git reads the patch only.
        empty = env | {"GIT_INDEX_FILE": env["GIT_INDEX_FILE"] + ".empty"}
        tried = objects.git.call(
            *_APPLY, "--check", *options, input=patch, env=empty, ok=(0, 1, 128)
        )
        if tried.returncode == 128:
            raise UsageError(f"The patch is damaged: {said}.")
        raise EnvironmentFault(
            f"git cannot apply a patch in {objects.git.directory}: {said}.",
            todo="Look at who may write there and at the space on the disk, then run this again.",
        )
    listed = objects.git.run("ls-files", "--stage", "-z", env=env)
    entries: dict[bytes, Entry] = {}
    conflicts = set()
    for line in filter(None, listed.split(b"\0")):
        info, _, path = line.partition(b"\t")
        mode, id, stage = info.split(b" ")
        entries[path] = Entry(int(mode, 8), ObjectId(id.decode("ascii")))
        if stage != b"0":
            conflicts.add(path)
    if done.returncode:
        raise _rejected(objects, tree, files, done.stderr, conflicts, "--3way" in options)
    return entries


# -- why a patch does not apply ------------------------------------------------------------------


def _rejected(
    objects: Objects,
    tree: ObjectId,
    files: Sequence[FilePatch],
    stderr: bytes,
    conflicts: Collection[bytes],
    three_way: bool,
) -> Rejected:
    """Find out why git refused `files`; `stderr` is what it said."""
    said = [
        line.removeprefix(b"error: ").removeprefix(b"patch failed: ")
        for line in stderr.split(b"\n")
        if line.startswith((b"error: ", b"fatal: ")) or line.endswith(b" with conflicts.")
    ]

    def about(file: FilePatch) -> list[bytes]:
        return [
            line
            for line in said
            if any(line.startswith(path + b":") or b"'%s'" % path in line for path in file.paths)
        ]

    guilty = [file for file in files if file.paths & set(conflicts) or about(file)]
    found = []
    for file in guilty or files:
        hunks, reason = _why(objects, tree, file)
        if three_way and (missing := _missing_blob(objects, file)):
            reason = f"blob {missing}, which the patch was made from, is not in the repository"
            hunks = ()
        if hunks or reason:
            found.append(RejectedFile(file.path, hunks, reason))
        elif file in guilty:
            found.append(RejectedFile(file.path, (), show(b"; ".join(about(file) or said))))
    return Rejected(tuple(found) or (RejectedFile(files[0].path, (), show(b"; ".join(said))),))


def _missing_blob(objects: Objects, file: FilePatch) -> str | None:
    """The abbreviated id of the blob a three-way merge of `file` starts from, if we lack it."""
    if file.old is None or file.blobs is None:
        return None
    id = file.blobs[0].decode("ascii")
    return None if objects.git.resolve(id, "blob") else id


def _why(objects: Objects, tree: ObjectId, file: FilePatch) -> tuple[tuple[RejectedHunk, ...], str]:
    """Why `file` does not apply to `tree`: its hunks, or a reason; neither where git knows more."""
    entry = objects.find(tree, file.old or file.path)
    if file.old is None:
        if entry is None:
            return (), ""
        if entry.mode == TREE:
            return (), "a directory is in its place"
        wanted = b"".join(line for hunk in file.hunks for line in hunk.after)
        same = entry.is_file and not file.binary and objects.read(entry.id) == wanted
        return (), f"is to be created, but exists, with {'the same' if same else 'other'} content"
    if entry is None:
        return (), "does not exist"
    if not entry.is_file:
        return (), ""
    if file.binary:
        return (), "is binary, and is not the version the patch was made from"
    return _failed_hunks(split_lines(objects.read(entry.id)), file.hunks), ""


def _failed_hunks(image: list[bytes], hunks: Sequence[PatchHunk]) -> tuple[RejectedHunk, ...]:
    """Apply `hunks` to a file's lines in order, as git-apply does; those that do not."""
    failed = []
    for number, hunk in enumerate(hunks, 1):
        at = _position(image, hunk.before, hunk)
        if at is not None:
            image[at : at + len(hunk.before)] = hunk.after
        else:
            failed.append(_explain(image, number, hunk))
    return tuple(failed)


def _position(image: list[bytes], wanted: Sequence[bytes], hunk: PatchHunk) -> int | None:
    """Where `wanted` is in the file, nearest to where the hunk expects it; None if nowhere."""
    last = len(image) - len(wanted)
    fits: Iterable[int] = range(last + 1)
    if hunk.line <= 1:
        fits = [at for at in fits if at == 0]
    if not hunk.trailing:
        fits = [at for at in fits if at == last]
    matching = (at for at in fits if image[at : at + len(wanted)] == list(wanted))
    return min(matching, key=lambda at: abs(at - (hunk.new_line - 1)), default=None)


def _explain(image: list[bytes], number: int, hunk: PatchHunk) -> RejectedHunk:
    """The first line that differs where most of the hunk's lines are found."""
    where: dict[bytes, list[int]] = {}
    for at, line in enumerate(image):
        where.setdefault(line, []).append(at)
    expected_at = max(hunk.new_line - 1, 0)
    shifts = Counter(
        at - index
        for index, line in enumerate(hunk.before)
        if line.strip()
        for at in where.get(line, ())
    )
    start = max(
        (shift for shift in shifts if shift >= 0),
        key=lambda shift: (shifts[shift], -abs(shift - expected_at)),
        default=expected_at,
    )
    reason = ""
    if hunk.after and _position(image, hunk.after, hunk) is not None:
        reason = "the file already has this change"
    for at, expected in enumerate(hunk.before, start):
        found = image[at] if at < len(image) else None
        if found != expected:
            return RejectedHunk(number, hunk.line, expected, found, at + 1, reason)
    # All of its lines are there, and not where they must be: at the beginning or the end.
    if hunk.line <= 1 and start and hunk.before:
        reason = reason or f"begins the file in the patch; here its lines begin in line {start + 1}"
        return RejectedHunk(number, hunk.line, hunk.before[0], image[0], 1, reason)
    end = start + len(hunk.before)
    found = image[end] if end < len(image) else None
    return RejectedHunk(number, hunk.line, None, found, end + 1, reason)


# -- as text -------------------------------------------------------------------------------------


def show(content: bytes) -> str:
    """Bytes as text for people: control characters and what is no UTF-8 as escapes."""
    text = content.decode("utf-8", "backslashreplace")
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def _quoted(line: bytes | None) -> str:
    """A line with all of its white space, for that may be the difference."""
    if line is None:
        return "its end"
    text, end, _ = line.partition(b"\n")
    return f'"{show(text)}"' + ("" if end else " without a line end")

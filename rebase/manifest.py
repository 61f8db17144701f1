r"""Manifests: where each upstream stands. One TOML file a fork, and `stack.toml` for all of them.

`manifests/<fork>.toml`; the file's name is the fork's, `?` marks what may be left out:

    [upstream]
    url = "https://…"             https, http, ssh, host:path, file, or a path (from the project)
    releases = { tags = 'v(?P<version>.+)' }
                                  the whole name matches; `version` sorts as PEP 440 says.
                                  `branches` instead of `tags` where branches are the releases;
                                  `prereleases = true` to take those too
    [archives]?                   upstream's releases on a package index
    package = "megatron-core"     the package there
    tag = "core_v{version}"       the tag a release gets in the history made from its archive
    prefix = "python"?            where the archive's root lies in upstream's tree
    pin = "0.16.0"                the release the fork stands on where only archives can be reached
    [pin]
    commit = "<40 digits>"        the upstream commit the fork stands on
    tag = "v0.2.2"?               its tag
    [follow]?                     the pin is the one that another fork's tree names:
    fork = "slime"                that fork,
    file = "docker/Dockerfile"    a file in its tree at its pin,
    pattern = '^ARG X=(\S+)$'     and what finds a tag or commit there: one group, ^ and $ at lines
    [[layers]]?                   patches from another fork's tree that go on before ours
    fork = "slime"                that fork,
    path = "docker/patch/{}"      the patch in its tree at its pin; {} is a name that `order` finds
    order = { file = "docker/Dockerfile", pattern = 'apply (\S+)' }?
                                  each different match is a patch, in the order of first places
    patches = [{ path = "…", blob = "<40 digits>" }]
                                  what the layer is at the present pins: a path alone does not say
                                  which patch, for such files are edited after their release
    [audit]?                      what of upstream runs on the NPU, and is looked at for residue:
    paths = ["megatron/core"]     files and folders of its tree (see `rebase.audit`)
    [queue]
    path = "forks/slime"          a folder of the project; or a branch of a repository: `url`, `ref`
    [export]
    name = "slime.patch"          the file downstream applies

`manifests/stack.toml`:

    leader = "slime"              the fork whose releases move the stack
    [runtime]                     what the stack runs on: a name and a version each

Everything is checked when it is read, and all mistakes of all files are told at once.

`forkman status` reads manifests each time it starts, so what is imported here counts. pydantic's
core does the checking without its models, which take five times as long to import; tomlkit is
imported only where a file is written.
"""

import re
import reprlib
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any, Literal

from packaging.version import InvalidVersion, Version
from pydantic_core import SchemaValidator, ValidationError
from pydantic_core.core_schema import (
    CoreSchema,
    bool_schema,
    dict_schema,
    list_schema,
    no_info_after_validator_function,
    str_schema,
    typed_dict_field,
    typed_dict_schema,
)

from rebase import address
from rebase.errors import UsageError
from rebase.git import ObjectId
from rebase.outcome import Pin

FOLDER, STACK = "manifests", "stack.toml"
_CORRECT = "Correct the manifests, then run this again."


@dataclass(frozen=True)
class Releases:
    """Which refs of upstream are releases: names that `pattern` matches in full."""

    refs: Literal["tags", "branches"]
    pattern: re.Pattern[str]
    prereleases: bool = False

    def version(self, name: str) -> Version | None:
        """The version that the tag or branch `name` releases, None where it is no release."""
        if found := self.pattern.fullmatch(name):
            try:
                return Version(found["version"] or "")
            except InvalidVersion:
                pass  # v2.1.0_core_r0.8.0 looks like a release of another line
        return None


@dataclass(frozen=True)
class Upstream:
    """Where upstream's repository is, as the manifest says it (see `address`)."""

    url: str
    releases: Releases


@dataclass(frozen=True)
class Archives:
    """Upstream's releases on a package index. tag: with `{version}` where the version goes."""

    package: str
    tag: str
    pin: str
    prefix: str = ""

    def tag_of(self, version: str) -> str:
        """The tag that the release `version` has in the history made from archives."""
        return self.tag.replace("{version}", version)


@dataclass(frozen=True)
class Follow:
    """Which file of which fork's tree names our pin; the pattern has one group."""

    fork: str
    file: str
    pattern: re.Pattern[str]


@dataclass(frozen=True)
class Order:
    """Which file names a layer's patches, in their order; the pattern has one group."""

    file: str
    pattern: re.Pattern[str]


@dataclass(frozen=True)
class LayerPatch:
    """One patch of a layer: where it lies in the other fork's tree, and which content it is."""

    path: str
    blob: ObjectId


@dataclass(frozen=True)
class Layer:
    """Patches from the tree of `fork` that go on before ours. path: with {} if there is order."""

    fork: str
    path: str
    patches: tuple[LayerPatch, ...]
    order: Order | None = None


@dataclass(frozen=True)
class QueueFolder:
    """A queue kept in the project, in a folder whose path is relative to the project's root."""

    path: PurePosixPath


@dataclass(frozen=True)
class QueueBranch:
    """A queue that is the branch `ref` of the fork repository at `url`."""

    url: str
    ref: str


@dataclass(frozen=True)
class Manifest:
    """One fork. path: its manifest's file; export: the name of the file downstream applies.

    audit: the files and folders of upstream that run on the NPU; without any, there is no audit.
    """

    fork: str
    path: Path
    upstream: Upstream
    pin: Pin
    queue: QueueFolder | QueueBranch
    export: str
    archives: Archives | None = None
    follow: Follow | None = None
    layers: tuple[Layer, ...] = ()
    audit: tuple[str, ...] = ()


@dataclass(frozen=True)
class Stack:
    """What the forks share. runtime: names and versions, in the file's order."""

    leader: str
    runtime: Mapping[str, str]


@dataclass(frozen=True)
class Project:
    """All manifests of a project. forks: each one after those it follows or takes layers from."""

    root: Path
    stack: Stack
    forks: Mapping[str, Manifest]


def _shown(text: str) -> str:
    """`text` for a message: no control characters, which reach terminals."""
    return text if text.isprintable() else repr(text)


def _where(path: Path) -> str:
    return _shown(f"{FOLDER}/{path.name}")


# Reading


def find_root(start: Path) -> Path:
    """The project `start` lies in: the nearest folder upwards that has `manifests/stack.toml`.

    Raises UsageError where there is none.
    """
    for folder in (start.absolute(), *start.absolute().parents):
        if (folder / FOLDER / STACK).is_file():
            return folder
    raise UsageError(
        f"{_shown(str(start))} is in no forkman project: neither it nor a folder above it "
        f"has {FOLDER}/{STACK}.",
        todo="Run forkman inside the project.",
    )


def load(root: Path) -> Project:
    """Read every manifest of the project at `root`.

    Raises UsageError whose `what` lists all mistakes of all files, one a line.
    """
    mistakes: list[str] = []
    stack: Stack | None = None
    read: dict[str, Manifest] = {}
    files = sorted(file for file in (root / FOLDER).glob("*.toml") if not file.name.startswith("."))
    for file in files:
        try:
            content = file.read_bytes()
            if file.name == STACK:
                stack = _parse(_STACK, content, file)
            else:
                read[file.stem] = parse(content, file)
        except OSError as error:
            mistakes.append(f"{_where(file)}: cannot be read: {error.strerror}")
        except UsageError as error:
            mistakes.append(error.what)
    if root / FOLDER / STACK not in files:
        mistakes.append(f"{FOLDER}/{STACK}: missing; it names the fork that leads")
    # A fork whose own file is wrong is there all the same: no second mistake for those who name it.
    names = {file.stem for file in files if file.name != STACK}
    mistakes += _misfits(root, stack, read, names)
    if stack and not mistakes:
        try:
            return Project(root, stack, MappingProxyType(_ordered(stack.leader, read)))
        except CycleError as error:
            mistakes.append(
                f"{FOLDER}: {' → '.join(error.args[1])}: each waits for the other; the one that "
                "leads can take nothing from forks that follow it"
            )
    raise UsageError("\n".join(mistakes), todo=_CORRECT)


def parse(content: bytes, path: Path) -> Manifest:
    """The manifest whose file has this content. path: the file; its stem names the fork.

    Raises UsageError whose `what` lists all mistakes, one a line.
    """
    fields = _parse(_MANIFEST, content, path)
    return Manifest(fork=path.stem, path=path, **fields)


def _parse(schema: CoreSchema, content: bytes, path: Path) -> Any:
    mistakes = []
    if path.name != STACK and (wrong := _no_slug(path.stem)):
        mistakes.append(f"the name of the file {wrong}, and it is the fork's name")
    try:
        checked = SchemaValidator(schema).validate_python(tomllib.loads(content.decode("utf-8")))
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        mistakes.append(f"line {line} is not UTF-8, which TOML is written in")
    except tomllib.TOMLDecodeError as error:
        mistakes.append(str(error))  # it ends with line and column
    except ValidationError as error:
        mistakes += [_mistake(schema, details) for details in error.errors(include_url=False)]
    if mistakes:
        raise UsageError(
            "\n".join(f"{_where(path)}: {mistake}" for mistake in mistakes), todo=_CORRECT
        )
    return checked


def _misfits(
    root: Path, stack: Stack | None, read: Mapping[str, Manifest], names: set[str]
) -> Iterator[str]:
    """What is wrong between the files, or between them and the project."""
    if stack and stack.leader not in names:
        yield f"{FOLDER}/{STACK}: leader: {_no_fork(stack.leader, names)}"
    taken: dict[str, str] = {}
    for fork, manifest in read.items():
        where = _where(manifest.path)
        if manifest.follow:
            if manifest.follow.fork not in names - {fork}:
                yield f"{where}: follow.fork: {_no_fork(manifest.follow.fork, names - {fork})}"
            if stack and fork == stack.leader:
                yield f"{where}: follow: {fork} leads ({FOLDER}/{STACK}), so it follows nobody"
        for index, layer in enumerate(manifest.layers):
            if layer.fork not in names - {fork}:
                yield f"{where}: layers[{index}].fork: {_no_fork(layer.fork, names - {fork})}"
        claims = [("export.name", manifest.export)]
        if isinstance(manifest.queue, QueueFolder):
            claims.append(("queue.path", str(manifest.queue.path)))
            if not (root / manifest.queue.path).resolve().is_relative_to(root.resolve()):
                yield (
                    f"{where}: queue.path: {_shown(str(manifest.queue.path))} leads out of the "
                    "project through a symbolic link; queues are folders of the project"
                )
        for key, name in claims:  # whatever their case: some file systems do not tell it apart
            if other := taken.get(name.casefold()):
                yield f"{where}: {key}: {_shown(name)} is {other}'s already; each fork has its own"
            taken.setdefault(name.casefold(), fork)


def _ordered(leader: str, forks: Mapping[str, Manifest]) -> dict[str, Manifest]:
    order = TopologicalSorter[str]({leader: ()})
    for fork, manifest in forks.items():
        if fork != leader:
            order.add(fork, leader)
        order.add(fork, *(layer.fork for layer in manifest.layers))
        if manifest.follow:
            order.add(fork, manifest.follow.fork)
    order.prepare()
    ordered: dict[str, Manifest] = {}
    while order.is_active():
        ready = sorted(order.get_ready())
        ordered |= {fork: forks[fork] for fork in ready}
        order.done(*ready)
    return ordered


# Using


def releases(
    manifest: Manifest, names: Iterable[str], prereleases: bool | None = None
) -> list[str]:
    """Those of `names` that are releases, oldest first.

    names: short names of upstream's tags, or of its branches where those are the releases.
    prereleases: whether they count; None: as the manifest says.
    """
    rule = manifest.upstream.releases
    if prereleases is None:
        prereleases = rule.prereleases
    found = ((rule.version(name), name) for name in set(names))
    # Equal versions (v1.0, v1.0.0) sort by name: the same answer on every machine.
    return [
        name
        for version, name in sorted((v, n) for v, n in found if v is not None)
        if prereleases or not version.is_prerelease
    ]


def newest(manifest: Manifest, names: Iterable[str], prereleases: bool | None = None) -> str | None:
    """The newest of `releases`, None where there is none."""
    return next(reversed(releases(manifest, names, prereleases)), None)


def followed(manifest: Manifest, content: bytes) -> str:
    """The tag or commit (it may be abbreviated) that a followed file names.

    content: of `manifest.follow.file`. Raises UsageError where the pattern finds nothing, several
    different things, or what can be no revision.
    """
    follow = manifest.follow
    assert follow, f"{manifest.fork} follows nobody"
    found = _matches(follow.pattern, content)
    if not found:
        wrong = f"nothing there matches {follow.pattern.pattern!r}"
    elif len(found) > 1:
        wrong = f"{follow.pattern.pattern!r} finds {', '.join(map(repr, found))} there, not one"
    elif reason := _no_ref(found[0]):
        wrong = f"it says {found[0]!r}, and that {reason}"
    else:
        return found[0]
    raise UsageError(
        f"{manifest.fork} follows {follow.fork}'s {_shown(follow.file)}: {wrong}.",
        todo=f"See what the file says, and correct follow.pattern in {_where(manifest.path)}.",
    )


def layer_paths(layer: Layer, order_content: bytes | None) -> list[str]:
    """The paths of a layer's patches in the other fork's tree, in the order they go on.

    order_content: of the layer's order file; None where the layer has no order.
    Raises UsageError where the order file names no patches, or paths that lead elsewhere.
    """
    if layer.order is None:
        return [layer.path]
    source = f"{layer.fork}'s {_shown(layer.order.file)}"
    todo = f"See how {layer.fork} applies its patches now, and correct the layer's order."
    found = _matches(layer.order.pattern, order_content or b"")
    if not found:
        raise UsageError(
            f"{source} gives the order of {_shown(layer.path)}, and nothing there matches "
            f"{layer.order.pattern.pattern!r}.",
            todo=todo,
        )
    paths = [layer.path.replace("{}", name) for name in found]
    for path in paths:
        if wrong := _no_tree_path(path):
            raise UsageError(f"{source} names the patch {path!r}, and that {wrong}.", todo=todo)
    return paths


def _matches(pattern: re.Pattern[str], content: bytes) -> list[str]:
    """What the pattern's group finds, each once, in the order of the first places."""
    text = content.decode("utf-8", "surrogateescape")
    return list(dict.fromkeys(match[1] for match in pattern.finditer(text) if match[1]))


# Writing


def with_pin(
    content: bytes,
    pin: Pin | None = None,
    layers: Sequence[Sequence[LayerPatch]] | None = None,
    archive: str | None = None,
) -> bytes:
    """A manifest's content with new pins; comments, order and quotes stay.

    pin: the new one, with its tag or without. layers: for each layer of the manifest its patches.
    archive: the version for `archives.pin`. None leaves as it is.
    """
    import tomlkit

    document: Any = tomlkit.parse(content.decode("utf-8"))
    if pin:
        table = document["pin"]
        _put(table, "commit", pin.commit)
        if pin.tag and "tag" in table:
            _put(table, "tag", pin.tag)
        elif pin.tag:
            _add_tag(table, pin.tag)
        elif "tag" in table:
            del table["tag"]
    if archive:
        _put(document["archives"], "pin", archive)
    if layers is not None:
        for layer, patches in zip(document.get("layers", ()), layers, strict=True):
            _put_patches(layer, patches)
    return tomlkit.dumps(document).encode("utf-8")


def _put_patches(layer: Any, patches: Sequence[LayerPatch]) -> None:
    import tomlkit

    if len(layer["patches"]) == len(patches):
        for entry, patch in zip(layer["patches"], patches, strict=True):
            _put(entry, "path", patch.path)
            _put(entry, "blob", patch.blob)
        return
    array = tomlkit.array().multiline(True)
    for patch in patches:
        entry = tomlkit.inline_table()
        entry.update({"path": patch.path, "blob": str(patch.blob)})
        array.append(entry)
    layer["patches"] = array


def _put(table: Any, key: str, value: str) -> None:
    """Set `key`, which the table has, to `value`, in the quotes it has."""
    import tomlkit

    if table[key] != value:
        literal = table[key].as_string().startswith("'")
        table[key] = tomlkit.string(value, literal=literal)


def _add_tag(table: Any, tag: str) -> None:
    import tomlkit
    from tomlkit.items import Table

    if isinstance(table, Table) and not table.is_super_table():
        # tomlkit would add it behind the comments that lead to the next table, not to the commit.
        around = table["commit"].trivia
        line = f"{around.indent}tag = {tomlkit.string(tag).as_string()}"
        around.trail = (around.trail or "\n") + line + around.trail
    else:
        table.add("tag", tag)  # pin = { commit = … } or pin.commit = …


# Checking: what is wrong with a text and what would be right, None where nothing is wrong.

_Check = Callable[[str], str | None]

# What git check-ref-format refuses.
_NO_REF = re.compile(r"^[-/.]|[\s~^:?*\[\\]|\.\.|@\{|//|/\.|\.lock(?:/|$)|[/.]$|^@?$")


def _like(pattern: str, rule: str) -> _Check:
    return lambda text: None if re.fullmatch(pattern, text) else rule


_no_slug = _like(
    "[a-z0-9]+(?:[-_][a-z0-9]+)*", "is no slug; lower-case letters and digits, - or _ between"
)
_no_object_id = _like(
    "[0-9a-f]{40}", "is no full object id; 40 hexadecimal digits, as git rev-parse prints them"
)
_no_export = _like(
    r"[a-z0-9][a-z0-9._-]*\.patch",
    "is no name for an export; lower-case letters, digits and ._-, ending in .patch",
)
_no_package = _like(
    "[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?", "is no package's name, like megatron-core"
)
_no_name = _like(r"\S(?:.*\S)?", "is empty or has space around it")


def _no_ref(name: str) -> str | None:
    if name.isprintable() and not _NO_REF.search(name):
        return None
    return "is no name that git gives to a tag or branch"


def _no_tree_path(path: str) -> str | None:
    parts = path.split("/")
    if path.isprintable() and not any(p in ("", ".", "..") or p.lower() == ".git" for p in parts):
        return None
    return (
        "is no path in a tree; one starts at the root and has no / before or behind, no .. or .git"
    )


def _no_queue_path(path: str) -> str | None:
    if not _no_tree_path(path) and path.startswith("forks/") and "\\" not in path:
        return None
    return "is no folder for a queue; they lie under forks/, like forks/slime"


def _no_tag_template(tag: str) -> str | None:
    if tag.count("{version}") != 1:
        return "is no tag for every release; it has {version} once, like v{version}"
    return _no_ref(tag.replace("{version}", "1"))


def _no_version(version: str) -> str | None:
    try:
        Version(version)
    except InvalidVersion:
        return "is no version that a package index has (PEP 440), like 0.16.0"
    return None


# The form of a file, for pydantic's core. A reader that finds a mistake raises ValueError.


def _text(wrong: _Check) -> CoreSchema:
    def read(text: str) -> str:
        if reason := wrong(text):
            raise ValueError(f"{text!r} {reason}")
        return text

    return no_info_after_validator_function(read, str_schema(strict=True))


def _pattern(wrong: Callable[[re.Pattern[str]], str | None], flags: re.RegexFlag) -> CoreSchema:
    def read(text: str) -> re.Pattern[str]:
        try:
            pattern = re.compile(text, flags)
        except re.error as error:
            raise ValueError(f"{text!r} is no regular expression: {error}") from error
        if reason := wrong(pattern):
            raise ValueError(f"{text!r} {reason}")
        return pattern

    return no_info_after_validator_function(read, str_schema(strict=True))


def _table(
    make: Callable[..., object],
    required: Mapping[str, CoreSchema],
    optional: Mapping[str, CoreSchema] | None = None,
) -> CoreSchema:
    fields = {key: typed_dict_field(schema) for key, schema in required.items()} | {
        key: typed_dict_field(schema, required=False) for key, schema in (optional or {}).items()
    }
    return no_info_after_validator_function(
        lambda values: make(**values),
        typed_dict_schema(fields, strict=True, extra_behavior="forbid"),
    )


def _releases(
    tags: re.Pattern[str] | None = None,
    branches: re.Pattern[str] | None = None,
    prereleases: bool = False,
) -> Releases:
    if tags and not branches:
        return Releases("tags", tags, prereleases)
    if branches and not tags:
        return Releases("branches", branches, prereleases)
    raise ValueError("needs tags or branches, one of the two, like tags = 'v(?P<version>.+)'")


def _queue(
    path: str | None = None, url: str | None = None, ref: str | None = None
) -> QueueFolder | QueueBranch:
    if path and not url and not ref:
        return QueueFolder(PurePosixPath(path))
    if url and ref and not path:
        return QueueBranch(url, ref)
    raise ValueError('needs path, or url and ref, like path = "forks/slime"')


def _layer(fork: str, path: str, patches: list[LayerPatch], order: Order | None = None) -> Layer:
    if order and path.count("{}") != 1:
        raise ValueError(f"path {path!r} needs one {{}}, for the names that order finds")
    if not order and "{}" in path:
        raise ValueError(f"path {path!r} has {{}}, and no order says what stands there")
    form = re.escape(path).replace(re.escape("{}"), ".+")
    for patch in patches:
        if not re.fullmatch(form, patch.path):
            raise ValueError(f"patches has {patch.path!r}, which path {path!r} does not make")
    if len({patch.path for patch in patches}) < len(patches):
        raise ValueError("patches has a path more than once")
    return Layer(fork, path, tuple(patches), order)


def _manifest(**fields: Any) -> dict[str, Any]:
    archives, allowed = fields.get("archives"), fields["upstream"].releases
    if archives and allowed.version(tag := archives.tag_of(archives.pin)) != Version(archives.pin):
        raise ValueError(
            f"archives.tag: makes {tag!r} of {archives.pin}, which is no such release by "
            f"upstream.releases ({allowed.pattern.pattern!r})"
        )
    return fields | {"layers": tuple(fields.get("layers", ()))}


def _release_pattern(pattern: re.Pattern[str]) -> str | None:
    return None if "version" in pattern.groupindex else "has no group (?P<version>…)"


def _finder(pattern: re.Pattern[str]) -> str | None:
    return None if pattern.groups == 1 else "has not one group (…), which is what it finds"


_FORK, _ID, _REF = _text(_no_slug), _text(_no_object_id), _text(_no_ref)
_URL, _TREE_PATH = _text(address.fault), _text(_no_tree_path)
_RELEASES = _pattern(_release_pattern, re.NOFLAG)
_FINDER = _pattern(_finder, re.MULTILINE)

_MANIFEST = _table(
    _manifest,
    {
        "upstream": _table(
            Upstream,
            {
                "url": _URL,
                "releases": _table(
                    _releases,
                    {},
                    {
                        "tags": _RELEASES,
                        "branches": _RELEASES,
                        "prereleases": bool_schema(strict=True),
                    },
                ),
            },
        ),
        "pin": _table(Pin, {"commit": _ID}, {"tag": _REF}),
        "queue": _table(_queue, {}, {"path": _text(_no_queue_path), "url": _URL, "ref": _REF}),
        "export": _table(lambda name: name, {"name": _text(_no_export)}),
    },
    {
        "archives": _table(
            Archives,
            {
                "package": _text(_no_package),
                "tag": _text(_no_tag_template),
                "pin": _text(_no_version),
            },
            {"prefix": _text(lambda path: _no_tree_path(path) if path else None)},
        ),
        "follow": _table(Follow, {"fork": _FORK, "file": _TREE_PATH, "pattern": _FINDER}),
        "audit": _table(
            lambda paths: tuple(paths),
            {"paths": list_schema(_TREE_PATH, min_length=1, strict=True)},
        ),
        "layers": list_schema(
            _table(
                _layer,
                {
                    "fork": _FORK,
                    "path": _TREE_PATH,
                    "patches": list_schema(
                        _table(LayerPatch, {"path": _TREE_PATH, "blob": _ID}),
                        min_length=1,
                        strict=True,
                    ),
                },
                {"order": _table(Order, {"file": _TREE_PATH, "pattern": _FINDER})},
            ),
            strict=True,
        ),
    },
)
_STACK = _table(
    lambda leader, runtime: Stack(leader, MappingProxyType(runtime)),
    {
        "leader": _FORK,
        "runtime": dict_schema(_text(_no_slug), _text(_no_name), strict=True),
    },
)


_FORMS = {"str": "a text in quotes", "bool": "true or false", "list": "an array", "dict": "a table"}


def _mistake(schema: Any, details: Any) -> str:
    """What pydantic's core found wrong, with its key: `layers[0].path: …`."""
    kind, location = details["type"], [step for step in details["loc"] if step != "[key]"]
    key = "".join(f"[{s}]" if isinstance(s, int) else f".{_shown(s)}" for s in location)[1:]
    if kind == "value_error":
        reason = str(details["ctx"]["error"])
    elif kind == "missing":
        missing = _at(schema, location)
        fields = ", ".join(missing.get("fields", ()))
        reason = f"missing; {_FORMS.get(missing['type'], 'a table of ' + fields)} is needed here"
    elif kind == "extra_forbidden":
        known = list(_at(schema, location[:-1])["fields"])
        reason = f"no such key; {_nearest(str(location[-1]), known)}"
    elif form := _FORMS.get(kind.removesuffix("_type").replace("string", "str")):
        reason = f"{reprlib.repr(details['input'])} is not {form}"
    else:
        reason = details["msg"]
    return f"{key}: {reason}" if key else reason


def _at(schema: Any, location: Sequence[str | int]) -> Any:
    """The form of what is at `location`."""
    for step in (None, *location):
        if step is not None:
            schema = schema["items_schema"] if isinstance(step, int) else schema["fields"][step]
        while "schema" in schema:  # functions read what it holds
            schema = schema["schema"]
    return schema


def _no_fork(name: str, names: Iterable[str]) -> str:
    return f"{name!r} is no fork that fits here; {_nearest(name, sorted(names))}"


def _nearest(name: str, known: Sequence[str]) -> str:
    from difflib import get_close_matches

    close = get_close_matches(name, known, n=1)
    return f"did you mean {close[0]}?" if close else f"there are: {', '.join(known) or 'none'}"

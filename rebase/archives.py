"""Release archives: the source a project publishes on a package index, as a git history.

Where no git host can be reached but a package index can, its source distributions are the upstream.
`update` turns each into one commit with one tag, in a mirror of their own:

    refs/tags/<tag>                  one a release, named as upstream's own tag would be
    refs/upstream/heads/archives     the newest of them

A release's commit is a function of its archive alone: the archive's files, less what the build
generated; the date of its newest file; a message that gives package, version, file and hash; no
parent. So its id is the same on every machine, whichever other releases were there at the time,
were yanked since, or come later (0.15.3 was published after 0.16.0), and a tag never moves. A chain
of releases could promise none of that: each id would hang on all before it. What came between two
releases is the difference of their trees, and archives cannot give more.

Archives are verified by the index's SHA-256 while they come, kept by that hash, and verified again
when they are used. Their members are written to no disk: each becomes a git object, and one that
git or a checkout must not be given (a path that leads out, `.git`, a device) refuses the archive.
"""

import contextlib
import gzip
import hashlib
import math
import os
import re
import ssl
import stat
import tarfile
import unicodedata
import zipfile
import zlib
from calendar import timegm
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rebase import address, refs, upstream
from rebase.errors import EnvironmentFault, UsageError
from rebase.git import Git, GitError, ObjectId
from rebase.objects import EXECUTABLE, FILE, SYMLINK, Entry, Objects
from rebase.words import visible

if TYPE_CHECKING:
    import pypi_simple
    from packaging.version import Version

BRANCH = refs.HEADS + "archives"
TIMEOUT = (10.0, 60.0)  # seconds to connect, and between two packets
ATTEMPTS = 3  # at one request, and at one download
LARGEST_ARCHIVE = 256 << 20  # bytes; today's largest is 5 MB
LARGEST_CONTENT = 1 << 30  # bytes an archive may unpack to
MOST_MEMBERS = 100_000


@dataclass(frozen=True)
class Release:
    """One release's archive, as the index describes it.

    sha256: None where the index gives none; such an archive is never used.
    uploaded: None where the index does not say (only newer ones do).
    """

    version: str
    filename: str
    url: str
    sha256: str | None
    uploaded: datetime | None
    yanked: bool


@dataclass(frozen=True)
class Updated:
    """What an update brought.

    url: the package's page on the index, without credentials. new_tags: oldest release first.
    skipped: what was not taken and why, in a sentence each.
    """

    url: str
    new_tags: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()


def available(package: str, index: str | None = None) -> list[Release]:
    """The releases of which the index has source, oldest first (PEP 440), pre-releases included.

    index: its address; by default pip's PIP_INDEX_URL, else PyPI.
    Raises UsageError where the index does not know the package or has no source of it,
    EnvironmentFault where it cannot be reached or understood.
    """
    with _client(package, index) as client:
        return _available(client, package)


def update(
    mirror: Path,
    package: str,
    tag: str,
    prefix: str = "",
    *,
    index: str | None = None,
    versions: Collection[str] | None = None,
    since: str = "0",
    cache: Path,
    progress: upstream.Progress | None = None,
) -> Updated:
    """Give `mirror`, made where there is none, a commit and a tag for each release it lacks.

    tag: how upstream names a release's tag, with `{version}` in it: `core_v{version}`.
    prefix: the folder of upstream's tree that the archives hold (`python` for SGLang).
    versions: the releases to take; by default those from `since` on that are neither pre-release
    nor yanked.
    cache: the folder that keeps archives, by hash.

    All tags come in one step at the end. Raises UsageError for parameters, unknown versions and
    archives that cannot be used, EnvironmentFault where the index fails or gives other bytes than
    it promised; the mirror's tags are then as they were.
    """
    folder = _folder(prefix)
    _check_tag(tag)
    with _client(package, index) as client:
        releases = _available(client, package)
        chosen, skipped = _choose(package, releases, versions, since)
        if not mirror.exists():
            upstream.create(mirror)
        try:
            known = _known(mirror, package, tag)
            made: dict[str, ObjectId] = {}
            objects = Objects(mirror)
            for release in chosen:
                if release.version in known:
                    if (release.sha256 or "").encode() not in known[release.version]:
                        skipped.append(
                            f"{package} {release.version} is another archive on the index than the "
                            "one its tag was made from; the tag stays as it is."
                        )
                elif release.sha256 is None:
                    skipped.append(
                        f"{release.filename} has no SHA-256 on the index: it cannot be verified."
                    )
                else:
                    with _asking(client, package):
                        archive = _download(client, package, release, cache, progress)
                    made[release.version] = _import(objects, package, release, archive, folder)
                    objects.flush()
            if made:
                _tag(mirror, tag, made)
        except GitError as error:
            raise EnvironmentFault(
                f"{package}: git could not write to {mirror}: {error.stderr}",
                kept="The mirror's tags are as they were.",
            ) from error
        url = address.without_credentials(client.get_project_url(package))
    return Updated(url, tuple(_name(tag, version) for version in made), tuple(skipped))


# -- the index -----------------------------------------------------------------------------------


@contextlib.contextmanager
def _client(package: str, index: str | None) -> "Iterator[pypi_simple.PyPISimple]":
    """The index, asked with the system's certificates, patiently but not for ever."""
    import pypi_simple
    import requests
    import truststore
    from requests.adapters import HTTPAdapter
    from urllib3.util import Retry

    class System(HTTPAdapter):
        def init_poolmanager(self, *args: Any, **kwargs: Any) -> None:
            kwargs["ssl_context"] = truststore.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            super().init_poolmanager(*args, **kwargs)

    if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?", package):
        raise UsageError(f"{package!r} is no name of a package.")
    index_url = index or os.environ.get("PIP_INDEX_URL") or pypi_simple.PYPI_SIMPLE_ENDPOINT
    shown = address.without_credentials(index_url)
    if not re.match(r"https?://[^/]", index_url, re.IGNORECASE) or not index_url.isprintable():
        raise UsageError(
            f"The package index {shown!r} is no http or https address.",
            todo="Give one like https://pypi.org/simple/.",
        )
    session = requests.Session()
    retry = Retry(
        ATTEMPTS, backoff_factor=0.2, status_forcelist=(429, 500, 502, 503, 504),
        respect_retry_after_header=False,  # it may ask for hours
    )  # fmt: skip
    for scheme, adapter in (("https://", System), ("http://", HTTPAdapter)):
        session.mount(scheme, adapter(max_retries=retry))
    with pypi_simple.PyPISimple(index_url, session=session) as client:
        yield client


@contextlib.contextmanager
def _asking(client: "pypi_simple.PyPISimple", package: str) -> Iterator[None]:
    """Errors of the index, the network and the disk become ours."""
    import pypi_simple
    import requests

    shown = address.without_credentials(client.endpoint)
    kept = "The mirror's tags are as they were."
    try:
        yield
    except pypi_simple.NoSuchProjectError as error:
        raise UsageError(f"The index {shown} has no package {package}.", kept=kept) from error
    except requests.RequestException as error:
        reason = visible(str(error)).replace(client.endpoint, shown)
        raise EnvironmentFault(
            f"{package}: the index {shown} failed: {reason}",
            kept=kept,
            todo="Look at the network and the address, then try again.",
        ) from error
    except OSError as error:
        raise EnvironmentFault(
            f"{package}: the cache {error.filename or ''} cannot be written: {error.strerror}.",
            kept=kept,
            todo="Look at the space on the disk, then try again.",
        ) from error
    except (ValueError, pypi_simple.UnsupportedRepoVersionError) as error:
        raise EnvironmentFault(
            f"{package}: {shown} does not answer like a package index: {visible(str(error))}",
            kept=kept,
            todo="Give the address of a simple index, such as https://pypi.org/simple/.",
        ) from error


def _available(client: "pypi_simple.PyPISimple", package: str) -> list[Release]:
    with _asking(client, package):
        page = client.get_project_page(package, timeout=TIMEOUT)
    found: dict[Version, Release] = {}
    for file in page.packages:
        version = _version(file.version)
        suffix = ".tar.gz" if file.filename.endswith(".tar.gz") else ".zip"
        if file.package_type != "sdist" or version is None or not file.filename.endswith(suffix):
            continue
        sha256 = file.digests.get("sha256", "").lower()
        release = Release(
            version=str(version),
            filename=file.filename,
            url=file.url,
            sha256=sha256 if re.fullmatch(r"[0-9a-f]{64}", sha256) else None,
            uploaded=file.upload_time,
            yanked=file.is_yanked,
        )
        if version not in found or suffix == ".tar.gz":
            found[version] = release
    if not found:
        raise UsageError(
            f"The index {address.without_credentials(client.endpoint)} has no source archives of "
            f"{package}."
        )
    return [found[version] for version in sorted(found)]


def _version(text: str | None) -> "Version | None":
    from packaging.version import InvalidVersion, Version

    try:
        return Version(text or "")
    except InvalidVersion:
        return None


def _choose(
    package: str, releases: list[Release], versions: Collection[str] | None, since: str
) -> tuple[list[Release], list[str]]:
    """The releases to take, oldest first, and what is left out and why."""
    if versions is None:
        from packaging.version import Version

        final = [
            one
            for one in releases
            if not Version(one.version).is_prerelease and Version(one.version) >= Version(since)
        ]
        yanked = [f"{package} {one.version} was yanked." for one in final if one.yanked]
        return [one for one in final if not one.yanked], yanked
    known = {_version(one.version): one for one in releases}
    wanted = {text: _version(text) for text in versions}
    for text, version in wanted.items():
        if version not in known:
            names = [one.version for one in releases]
            older = [] if version is None else [v for v in known if v is not None and v < version]
            near = names[max(0, len(older) - 2) : len(older) + 2] if older else names[:2]
            if version is None:
                near = names[-3:]
            raise UsageError(
                f"The index has no source archive of {package} {text}.",
                todo=f"Near it are {', '.join(near)}.",
            )
    chosen = [one for version, one in known.items() if version in wanted.values()]
    # Asked for by name it is taken, as pip does; a pin may stand on it.
    return chosen, [
        f"{package} {one.version} was yanked, and taken." for one in chosen if one.yanked
    ]


def _download(
    client: "pypi_simple.PyPISimple",
    package: str,
    release: Release,
    cache: Path,
    progress: upstream.Progress | None,
) -> Path:
    """The release's archive in the cache, with the bytes that the index promised."""
    import pypi_simple
    import requests

    assert release.sha256
    kept = cache / release.sha256
    if kept.is_file():
        with kept.open("rb") as content:
            if hashlib.file_digest(content, "sha256").hexdigest() == release.sha256:
                return kept
    file = pypi_simple.DistributionPackage(
        filename=release.filename, url=release.url, project=package, version=release.version,
        package_type="sdist", digests={"sha256": release.sha256}, requires_python=None,
        has_sig=None,
    )  # fmt: skip
    coming = kept.with_name(f".{kept.name}.{os.getpid()}")
    for attempt in range(1, ATTEMPTS + 1):
        try:
            client.download_package(
                file, coming, timeout=TIMEOUT,
                progress=lambda total: _Counting(package, release, total, progress),
            )  # fmt: skip
            coming.replace(kept)
            return kept
        except pypi_simple.DigestMismatchError as error:
            raise EnvironmentFault(
                f"{release.filename} from {address.without_credentials(release.url)} is not what "
                f"the index promised: its SHA-256 is {error.actual_digest}, not {release.sha256}.",
                kept="It was thrown away; the mirror's tags are as they were.",
                todo="Try again, or another index: a mirror or a proxy changed or cut the file.",
            ) from error
        except requests.RequestException:
            if attempt == ATTEMPTS:
                raise
        finally:
            coming.unlink(missing_ok=True)
    raise AssertionError("the last attempt returns or raises")


class _Counting:
    """What `download_package` reports to; stops an archive that grows too large."""

    def __init__(
        self, package: str, release: Release, total: int | None, progress: upstream.Progress | None
    ) -> None:
        self._release, self._total, self._progress = release, total or 0, progress
        self._stage = f"downloading {package} {release.version}"
        self._done = 0

    def __enter__(self) -> "_Counting":
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def update(self, increment: int) -> None:
        self._done += increment
        if max(self._done, self._total) > LARGEST_ARCHIVE:
            raise UsageError(
                f"{self._release.filename} is larger than {LARGEST_ARCHIVE >> 20} MB.",
                todo=f"Leave version {self._release.version} out.",
            )
        if self._progress:
            self._progress(self._stage, self._done, self._total)


# -- from archive to commit ----------------------------------------------------------------------


class _Member(NamedTuple):
    """A file or symbolic link of an archive. time: seconds since 1970."""

    name: str
    mode: int
    content: bytes
    time: int


class _Unfit(Exception):
    """Why an archive is not used, naming the member."""


# What setuptools writes into a source distribution that has no setup.cfg.
_GENERATED_SETUP_CFG = b"[egg_info]\ntag_build = \ntag_date = 0\n\n"


def _import(
    objects: Objects, package: str, release: Release, archive: Path, folder: bytes
) -> ObjectId:
    """The commit of a release."""
    edits: dict[bytes, Entry | None] = {}
    places = _Places()
    newest = 0
    try:
        read = _tar if release.filename.endswith(".tar.gz") else _zip
        for member in read(archive):
            parts = _parts(member.name)
            if len(parts) < 2:
                raise _Unfit(f"{_shown(member.name)} is outside the archive's one top folder")
            places.add(member.name, parts)
            newest = max(newest, member.time)
            if member.mode == SYMLINK:
                _check_link(member, parts)
            if not _generated(parts[1:], member.content):
                path = folder + os.fsencode("/".join(parts[1:]))
                edits[path] = Entry(member.mode, objects.write("blob", member.content))
        if not edits:
            raise _Unfit("it holds no files")
    except _Unfit as error:
        raise UsageError(
            f"{release.filename} is not used: {error}.",
            kept="The mirror's tags are as they were.",
            todo=f"Leave version {release.version} out.",
        ) from error
    except (tarfile.TarError, zipfile.BadZipFile, gzip.BadGzipFile, zlib.error, EOFError,
            NotImplementedError) as error:  # fmt: skip
        raise UsageError(
            f"{release.filename} cannot be read: {visible(str(error))}.",
            kept="The mirror's tags are as they were.",
            todo=f"The index publishes it so; leave version {release.version} out.",
        ) from error
    tree = objects.splice(objects.tree({}), edits)
    message = (
        f"{package} {release.version}\n\nArchive: {release.filename}\nSHA-256: {release.sha256}\n"
    )
    # 32 bits of seconds: no date that an archive can claim breaks git's
    author = b"forkman <> %d +0000" % min(max(newest, 0), 0xFFFFFFFF)
    return objects.commit(tree, [], author, message.encode())


def _tar(archive: Path) -> Iterator[_Member]:
    """The files of a .tar.gz, read as a stream, so that a size is checked before it is believed."""
    with _Limited(archive) as limited, tarfile.open(fileobj=limited, mode="r|") as tar:
        files: dict[str, _Member] = {}
        for info in tar:
            limited.member = info.name
            _check_size(info.name, limited.done + info.size, len(files))
            time = int(info.mtime) if math.isfinite(info.mtime) else 0
            if info.isdir():
                _parts(info.name)
                continue
            if info.issym():
                member = _Member(info.name, SYMLINK, os.fsencode(info.linkname), time)
            elif info.islnk():
                target = files.get(info.linkname)
                if target is None:
                    raise _Unfit(f"{_shown(info.name)} links to what is not in the archive")
                member = target._replace(name=info.name, time=time)
            elif info.isreg() and not info.issparse():
                content = tar.extractfile(info)
                assert content is not None  # a regular file has content
                mode = EXECUTABLE if info.mode & stat.S_IXUSR else FILE
                member = _Member(info.name, mode, content.read(), time)
            else:
                raise _Unfit(f"{_shown(info.name)} is neither a file nor a link")
            files[info.name] = member
            yield member


def _zip(archive: Path) -> Iterator[_Member]:
    """The files of a .zip."""
    size = 0
    with zipfile.ZipFile(archive) as opened:
        for count, info in enumerate(opened.infolist()):
            size += info.file_size
            _check_size(info.filename, size, count)
            kind = stat.S_IFMT(info.external_attr >> 16)
            if info.is_dir():
                _parts(info.filename)
                continue
            if kind not in (0, stat.S_IFREG, stat.S_IFLNK) or info.flag_bits & 1:
                raise _Unfit(f"{_shown(info.filename)} is neither a plain file nor a link")
            mode = SYMLINK if kind == stat.S_IFLNK else FILE
            if mode == FILE and info.external_attr >> 16 & stat.S_IXUSR:
                mode = EXECUTABLE
            time = 0
            with contextlib.suppress(ValueError):  # a month 0, which zip can hold
                time = timegm((*info.date_time, 0, 0, 0))
            yield _Member(info.filename, mode, opened.read(info), time)


class _Limited(gzip.GzipFile):
    """A compressed stream that ends with an error before it fills the memory."""

    done = 0
    member = "its beginning"  # what is being read

    def read(self, size: int | None = -1) -> bytes:
        data = super().read(size)
        self.done += len(data)
        # headers come on top of the contents
        _check_size(self.member, self.done - (MOST_MEMBERS << 10), 0)
        return data


def _check_size(name: str, size: int, members: int) -> None:
    if size > LARGEST_CONTENT:
        raise _Unfit(f"at {_shown(name)} it unpacks to more than {LARGEST_CONTENT >> 20} MB")
    if members >= MOST_MEMBERS:
        raise _Unfit(f"at {_shown(name)} it has more than {MOST_MEMBERS} members")


def _parts(name: str) -> list[str]:
    """The components of a member's path, or _Unfit where no tree of git's should hold it."""
    if name.startswith("/") or "\\" in name or re.match(r"[A-Za-z]:", name):
        raise _Unfit(f"{_shown(name)} is no relative path")
    parts = [part for part in name.split("/") if part not in ("", ".")]
    for part in parts:
        if part == "..":
            raise _Unfit(f"{_shown(name)} leads out of the archive")
        if any(ord(char) < 32 or ord(char) == 127 for char in part):
            raise _Unfit(f"{_shown(name)} holds control characters")
        if _is_dot_git(part):
            raise _Unfit(f"{_shown(name)} is git's own")
        if len(part.encode("utf-8", "surrogateescape")) > 255 or len(parts) > 100:
            raise _Unfit(f"{_shown(name)[:80]}… is too long or too deep")
    return parts


@lru_cache(1000)  # most components come again and again
def _is_dot_git(part: str) -> bool:
    """Whether some file system takes `part` for `.git`, as git's own checks have it.

    HFS+ ignores case and invisible characters, NTFS case, a tail of dots and blanks, and what
    follows a colon; `git~1` is its short name.
    """
    seen = "".join(char for char in part if unicodedata.category(char) != "Cf").casefold()
    return seen.partition(":")[0].rstrip(" .") in (".git", "git~1")


class _Places:
    """The paths an archive has filled: each once, whatever a file system thinks of case."""

    def __init__(self) -> None:
        self._taken: dict[str, str] = {}  # a path as a file system may see it → the path
        self._folders: set[str] = set()

    def add(self, name: str, parts: list[str]) -> None:
        """Take a place; _Unfit where another member has it, or one that looks the same."""
        for depth in range(1, len(parts)):
            folder = "/".join(parts[:depth])
            if folder not in self._folders:
                self._take(name, folder)
                self._folders.add(folder)
        self._take(name, "/".join(parts))

    def _take(self, name: str, path: str) -> None:
        key = unicodedata.normalize("NFC", unicodedata.normalize("NFC", path).casefold())
        if key in self._taken:
            other = self._taken[key]
            how = (
                "is there twice" if other == path else f"differs only in case from {_shown(other)}"
            )
            raise _Unfit(f"{_shown(name)} {how}")
        self._taken[key] = path


def _check_link(member: _Member, parts: list[str]) -> None:
    """Refuse a symbolic link that leads out of the archive's top folder.

    `..` may only come first: after a name it would start from wherever that name links to.
    """
    target = os.fsdecode(member.content)
    steps = target.split("/")
    up = 0
    while up < len(steps) and steps[up] == "..":
        up += 1
    try:
        _parts("/".join(steps[up:]))
    except _Unfit:
        up = len(parts)
    if not target or target.startswith("/") or up > len(parts) - 2:
        raise _Unfit(f"{_shown(member.name)} links to {_shown(target)}, outside the archive")


def _generated(parts: list[str], content: bytes) -> bool:
    """Whether the build made a file, so that upstream's own tree does not have it."""
    return (
        parts == ["PKG-INFO"]
        or any(part.endswith(".egg-info") for part in parts[:-1])
        or (parts == ["setup.cfg"] and content == _GENERATED_SETUP_CFG)
    )


def _shown(name: str) -> str:
    return visible(name) or "a member without a name"


# -- tags ----------------------------------------------------------------------------------------


def _folder(prefix: str) -> bytes:
    """The prefix of the paths in the tree: empty, or with a slash at its end."""
    try:
        parts = _parts(prefix)
    except _Unfit as error:
        raise UsageError(f"The archives' folder cannot be used: {error}.") from error
    return os.fsencode("".join(f"{part}/" for part in parts))


def _name(tag: str, version: str) -> str:
    return tag.replace("{version}", version)


def _check_tag(tag: str) -> None:
    ref = refs.TAGS + _name(tag, "1.0")
    if (
        tag.count("{version}") != 1
        or not ref.isprintable()
        or Git(Path.cwd()).call("check-ref-format", ref, ok=(0, 1)).returncode
    ):
        raise UsageError(
            f"{visible(tag)!r} does not say how releases are tagged.",
            todo="Give a tag's name with {version} in it, such as v{version}.",
        )


def _known(mirror: Path, package: str, tag: str) -> dict[str, bytes]:
    """The releases that have a tag, and the messages of their commits."""
    git = Git(mirror)
    if others := refs.branches(mirror).keys() - {BRANCH[len(refs.HEADS) :]}:
        raise UsageError(
            f"{mirror.stem}: {mirror} holds the history of a git repository (branch "
            f"{min(others)}); releases of {package} cannot go in with it.",
            todo="Give release archives a mirror of their own.",
        )
    before, after = (refs.TAGS + tag).split("{version}")
    known: dict[str, bytes] = {}
    for record in git.run("for-each-ref", "--format=%(refname)%00%(contents)%00", "refs/tags/") \
            .split(b"\0\n"):  # fmt: skip
        ref, _, message = record.partition(b"\0")
        name = os.fsdecode(ref)
        if name.startswith(before) and name.endswith(after):
            known[name[len(before) : len(name) - len(after)]] = message
    return known


def _tag(mirror: Path, tag: str, made: dict[str, ObjectId]) -> None:
    """Name the new commits, and let the branch follow the newest release there is."""
    new = {refs.TAGS + _name(tag, version): commit for version, commit in made.items()}
    tagged = {refs.TAGS + name: commit for name, commit in refs.tags(mirror).items()} | new
    before, after = (refs.TAGS + tag).split("{version}")
    releases = {
        version: commit
        for ref, commit in tagged.items()
        if (version := _version(ref[len(before) : len(ref) - len(after)]))
    }
    refs.move(mirror, new | {BRANCH: releases[max(releases)]})

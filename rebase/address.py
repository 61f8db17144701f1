"""Addresses of git repositories: which ones git may be given, and where they lead."""

import re
from pathlib import Path

from rebase.errors import UsageError

_HELPER = re.compile(r"[\w+.-]*::")
_SCHEME = re.compile(r"([\w+.-]+)://([^/]*)(.*)", re.DOTALL)
_SCP = re.compile(r"(?:[^/]*@)?(\[[^/\]]*\]|[^/:\[]*):(.*)", re.DOTALL)
_SCHEMES = ("https", "http", "ssh", "git", "file")


def fault(url: str) -> str | None:
    """What is wrong with an address, and what would be right; None for a good one.

    Good are https, http, ssh, git and file addresses, `[user@]host:path`, and paths.
    """
    if not url.strip() or not url.isprintable():
        return "is no address of a repository; it is empty or has control characters"
    option = "would be taken for an option; an address or its host does not begin with -"
    if url.startswith("-"):
        return option
    if _HELPER.match(url):
        return "starts a remote helper, which may run anything; use https, ssh, file or a path"
    if found := _SCHEME.match(url):
        scheme, host = found[1].lower(), found[2].rpartition("@")[2]
        if scheme not in _SCHEMES:
            return f"cannot be fetched from; use {', '.join(_SCHEMES)}, host:path or a path"
        if not host and (scheme != "file" or not found[3]):
            return "names no host"
        return option if found[2].startswith("-") or host.startswith("-") else None
    if found := _SCP.match(url):
        if not found[1] or not found[2]:
            return "names no host or no path; host:path has both"
        return option if found[1].startswith("-") or found[2].startswith("-") else None
    return None


def check(url: str) -> None:
    """Raise UsageError unless git may be given `url`."""
    if wrong := fault(url):
        raise UsageError(f"{without_credentials(url)!r} {wrong}.")


def is_path(url: str) -> bool:
    """Whether git takes `url` for a path (it does unless a colon comes before any slash)."""
    return not _SCHEME.match(url) and not _SCP.match(url)


def locate(url: str, base: Path) -> str:
    """`url` as git takes it from anywhere: a relative path starts at `base`."""
    return str(base.absolute() / Path(url).expanduser()) if is_path(url) else url


def on_this_machine(url: str) -> Path | None:
    """The git directory of the repository at `url` where it is on this machine."""
    from urllib.parse import unquote

    if not is_path(url) and not url.lower().startswith("file://"):
        return None
    path = Path(url if is_path(url) else unquote(url[len("file://") :]))
    for git_dir in (path / ".git", path, Path(f"{path}.git")):
        if (git_dir / "objects").is_dir():
            return git_dir
    return path


def without_credentials(url: str) -> str:
    """The address as it may be shown."""
    return re.sub(r"(?<=://)[^/@]*@", "", url)

r"""Residue: code of upstream that only CUDA has an answer for, and which of it a person accepted.

It is found by structure (comments, docstrings and messages are no code), in these kinds:

    torch.cuda      torch.cuda.…, and imports of it
    cuda            "cuda", "cuda:0" and f"cuda:{n}" as a device, and .cuda()
    nccl            "nccl", also in "cpu:gloo,cuda:nccl"
    num_gpus        num_gpus=…, "num_gpus", "GPU" and get_gpu_ids: what Ray calls the devices
    torch.compile   torch.compile, as decorator or call
    jit_fuser       @jit_fuser
    triton          @triton.jit
    pynvml          imports and uses of it
    environment     "CUDA_VISIBLE_DEVICES", "NCCL_ALGO", "NVTE_FLASH_ATTN" and their like

A site is known by its file, the definition it is in and its code, not by its line, so it stays the
same site when code around it moves. The accepted ones stand in `forks/<fork>/accepted.toml`:

    [[accepted]]                  sites one by one:
    reason = "transfer_to_npu redirects it"
    [accepted.sites]              where, then what, then how often it is there
    "megatron/core/utils.py:Memory.get" = { "torch.cuda.current_device" = 2 }

    [[accepted]]                  or whatever there is in a file or folder:
    reason = "no kernel of these runs on NPU: the fused path is off"
    where = "megatron/core/fusions"
    kind = "triton"?              of this kind alone
    code = ["torch.cuda.nv*"]?    and where the code is one of these (globs)

The same site may stand in several tables: the numbers add up. `forkman audit FORK --accept REASON`
appends one with all that is there; what is gone from upstream stays until a person takes it out,
for a fork goes back and forth between revisions.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rebase import tables
from rebase.objects import Objects
from rebase.outcome import Site, Stale
from rebase.recipe import Place, Source

if TYPE_CHECKING:
    from rebase.git import ObjectId

FILE = "accepted.toml"

# kind, the syntax node, and what its text looks like
_ATTRIBUTE, _STRING, _NAME = "attribute", "string_content", "dotted_name"
_FORMS = (
    ("torch.cuda", _ATTRIBUTE, r"^torch\.cuda(\.\w+)*$|^torch\.version\.cuda$"),
    ("torch.cuda", _NAME, r"^torch\.cuda\b"),
    ("torch.cuda", "import_from_statement", r"^from\s+torch\s+import\b[^#]*\bcuda\b"),
    ("torch.compile", _ATTRIBUTE, r"^torch\.compile$"),
    ("pynvml", _ATTRIBUTE, r"^pynvml\.\w+$"),
    ("pynvml", _NAME, r"^pynvml\b"),
    ("num_gpus", _ATTRIBUTE, r"\.get_gpu_ids$"),
    ("num_gpus", _STRING, r"^(num_gpus|GPU)$"),
    ("num_gpus", "keyword_argument", r"^num_gpus\s*="),
    ("cuda", _STRING, r"^cuda(:\d*)?$"),
    ("cuda", _ATTRIBUTE, r"\.cuda$"),
    ("nccl", _STRING, r"^([\w:]+,)*(\w+:)?nccl(,[\w:]+)*$"),
    ("jit_fuser", "decorator", r"^@\s*([\w.]+\.)?jit_fuser\b"),
    ("triton", "decorator", r"^@\s*triton\.jit\b"),
    ("environment", _STRING, r"^([A-Z0-9]+_)*(CUDA|CUBLAS|CUDNN|NCCL|NVIDIA|NVTE)(_[A-Z0-9]+)+$"),
)
KINDS = tuple(dict.fromkeys(kind for kind, _, _ in _FORMS))
_RULE: Any = {"any": [{"kind": node, "regex": text} for _, node, text in _FORMS]}
_WORDS = re.compile(
    rb"\bcuda|CUDA|CUBLAS|CUDNN|nccl|NCCL|NVIDIA_|NVTE_|pynvml|num_gpus|gpu_ids|GPU|torch\.compile"
    rb"|jit_fuser|triton\.jit"
)


# -- finding it ------------------------------------------------------------------------------------


class Scan:
    """Looks for residue in trees of one repository; a file that two trees share is read once."""

    def __init__(self, objects: Objects, paths: Sequence[str]) -> None:
        """paths: the files and folders of upstream to look at."""
        self._objects = objects
        self._under = tuple(path.encode() for path in paths)
        self._known: dict[ObjectId, tuple[Site, ...]] = {}

    def sites(self, tree: "ObjectId") -> list[Site]:
        """The residue of a tree, by path and line."""
        files = {
            path: entry.id
            for path, entry in self._objects.walk(tree)
            if entry.is_file
            and path.endswith((b".py", b".pyi"))
            and any(path == under or path.startswith(under + b"/") for under in self._under)
        }
        self._objects.bring(list(files.values()))
        found: list[Site] = []
        for path, blob in sorted(files.items()):
            if blob not in self._known:
                self._known[blob] = tuple(_sites(path, self._objects.read(blob)))
            shown = path.decode("utf-8", "backslashreplace")
            found += (_at(shown, site) for site in self._known[blob])
        return found

    def missing(self, tree: "ObjectId") -> list[str]:
        """The paths to look at that a tree does not have."""
        gone = (path for path in self._under if self._objects.find(tree, path) is None)
        return [path.decode() for path in gone]


def _at(path: str, site: Site) -> Site:
    return site if site.path == path else Site(path, site.line, site.scope, site.kind, site.code)


def _sites(path: bytes, content: bytes) -> Iterable[Site]:
    """The residue of one file, by line."""
    if not _WORDS.search(content):
        return
    source = Source(path, content)
    shown = path.decode("utf-8", "backslashreplace")
    last = -1  # torch.cuda.Stream holds torch.cuda, from the same position on
    for node in source.root.find_all({"rule": _RULE}):
        text = node.text()
        kind, form = next(
            (kind, form)
            for kind, form, looks in _FORMS
            if node.kind() == form and re.search(looks, text)
        )
        parent = node.parent()
        assert parent  # a module is none of these
        start = node.range().start.index
        if form == _ATTRIBUTE:
            if start == last:
                continue
            last = start
        if kind == "cuda" and form == _ATTRIBUTE:
            if parent.kind() != "call":
                continue  # a field that is called cuda
            text = ".cuda()"
        elif form == _STRING:
            outer = parent.parent()
            if outer and outer.kind() == "expression_statement":
                continue
            text = f'"{source.text[node.range().start.index : _inner_end(parent)]}"'
        elif form == "keyword_argument":
            text = "num_gpus="
        elif form == "import_from_statement":
            text = "from torch import cuda"
        place: Place = source.place(parent if form == "decorator" else node)
        yield Site(shown, source.line(start), place.scope, kind, " ".join(text.split()))


def _inner_end(string: Any) -> int:
    """Where the content of a string ends, its quotes left out."""
    last = string.children()[-1]
    span = last.range()
    end: int = span.start.index if last.kind() == "string_end" else span.end.index
    return end


# -- what is accepted ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Accepted:
    """One table of the file, as the module's docstring describes it."""

    reason: str
    sites: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    where: str = ""
    kind: str = ""
    code: tuple[str, ...] = ()
    __pydantic_config__ = tables.FORM

    def __post_init__(self) -> None:
        if not self.reason.strip():
            raise ValueError("reason is empty")
        if bool(self.sites) == bool(self.where):
            raise ValueError("needs sites, or where, one of the two")
        if self.sites and (self.kind or self.code):
            raise ValueError("kind and code go with where, not with sites")
        if self.kind and self.kind not in KINDS:
            raise ValueError(f"kind {self.kind!r} is none of {', '.join(KINDS)}")
        for name, codes in self.sites.items():
            if ":" not in name:
                raise ValueError(f"sites: {name!r} is no place; one is path:Outer.inner, or path:")
            if any(count < 1 for count in codes.values()):
                raise ValueError(f"sites: {name!r}: a count is 1 or more")

    def parts(self) -> "Iterable[Accepted]":
        """What it accepts of a file or folder, one by one."""
        if self.where:
            yield from (replace(self, code=(code,)) for code in self.code) if self.code else (self,)

    def covers(self, site: Site) -> bool:
        """Whether it accepts what is in a file or folder, and the site is of it."""
        where = self.where.rstrip("/")
        return (
            bool(where)
            and (site.path == where or site.path.startswith(f"{where}/"))
            and self.kind in ("", site.kind)
            and (not self.code or any(fnmatchcase(site.code, code) for code in self.code))
        )

    def __str__(self) -> str:
        what = f"{self.kind or 'all'} in {self.where}"
        return f"{what}: {', '.join(self.code)}" if self.code else what


@dataclass(frozen=True)
class _File:
    accepted: tuple[Accepted, ...] = ()
    __pydantic_config__ = tables.FORM


@dataclass(frozen=True)
class Sifted:
    """Sites held against what is accepted: those that are not, how many are, and what is gone."""

    new: tuple[Site, ...]
    accepted: int
    stale: tuple[Stale, ...]


def load(folder: Path) -> tuple[Accepted, ...]:
    """What is accepted for a fork. folder: of its queue. Raises UsageError with all mistakes."""
    return tables.read(folder / FILE, _File).accepted


def sift(sites: Iterable[Site], accepted: Sequence[Accepted]) -> Sifted:
    """Hold sites against what is accepted.

    Where a definition has more of the same than that, the last ones are the new ones.
    """
    left: Counter[tuple[str, str]] = Counter()
    for table in accepted:
        for name, codes in table.sites.items():
            left.update({(name, code): count for code, count in codes.items()})
    folders = [part for table in accepted for part in table.parts()]
    unused = list(folders)
    new: list[Site] = []
    known = 0
    for site in sites:
        if left[site.name, site.code]:
            left[site.name, site.code] -= 1
        elif covering := next((table for table in folders if table.covers(site)), None):
            unused = [table for table in unused if table is not covering]
        else:
            new.append(site)
            continue
        known += 1
    stale = [Stale(str(table), table.reason) for table in unused]
    for table in accepted:
        for name, codes in table.sites.items():
            for code, count in codes.items():
                if gone := min(count, left[name, code]):
                    left[name, code] -= gone
                    times = f" ({gone} of {count})" if count > 1 else ""
                    stale.append(Stale(f"{name} {code}{times}", table.reason))
    return Sifted(tuple(new), known, tuple(stale))


def rendered(sites: Iterable[Site], reason: str) -> str:
    """The table that accepts these sites."""
    from tomlkit import string

    def quoted(text: str) -> str:
        return string(text, literal='"' in text and "'" not in text).as_string()

    where: dict[str, Counter[str]] = {}
    for site in sites:
        where.setdefault(site.name, Counter())[site.code] += 1
    lines = ["[[accepted]]", f"reason = {quoted(reason)}", "[accepted.sites]"]
    for name, codes in sorted(where.items()):
        counted = ", ".join(f"{quoted(code)} = {n}" for code, n in sorted(codes.items()))
        lines.append(f"{quoted(name)} = {{ {counted} }}")
    return "\n".join(lines) + "\n"

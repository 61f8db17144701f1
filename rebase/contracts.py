"""Contracts: what our code relies on upstream, declared beside it, held against a tree.

`forks/<fork>/contracts.toml`; `?` marks what may be left out:

    [[contract]]
    name = "megatron.core.jit.jit_fuser"    module and definition, dotted, as an import finds it
    kind = "function"                       function, class, attribute or module
    parameters = ["config", "name"]?        what our call passes, by upstream's names: each must be
                                            there, and there must be no other without a default
    positional = 1?                         how many of these go by position: the first ones there
    when = "megatron/core/jit.py"?          checked only where the tree has this file or folder
    why = "forks/megatron/eager_jit.py sets it"

    [[contract]]
    flag = "--sequence-parallel"            a command-line flag that our examples pass
    path = "megatron"                       the file or folder that declares it
    why = "examples/…"

For a class the parameters are those of its constructor. `self` and `cls` do not count.

Trees are read statically, by griffe, module by module as names ask for them: imports inside the
tree are followed, and so are base classes. What is imported from elsewhere is there, and nobody can
say more of it. A flag is declared by a call whose name says `arg` (add_argument), by `arg_names`,
or by a field of a class from which arguments are made (`sequence_parallel: bool`).
"""

import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import griffe

from rebase import tables
from rebase.history import History
from rebase.objects import Objects
from rebase.outcome import UpstreamCommit
from rebase.recipe import Source

if TYPE_CHECKING:
    from rebase.git import ObjectId

FILE = "contracts.toml"
_MOST_STEPS = 20  # imports of imports, and bases of bases
_MOST_COMMITS = 200
_RECORDS = ("msgspec.Struct", "pydantic.BaseModel", "typing.NamedTuple")


@dataclass(frozen=True)
class Contract:
    """One table of the file, as the module's docstring describes it."""

    why: str
    name: str = ""
    kind: Literal["function", "class", "attribute", "module", ""] = ""
    parameters: tuple[str, ...] | None = None
    positional: int = 0
    flag: str = ""
    path: str = ""
    when: str = ""
    __pydantic_config__ = tables.FORM

    def __post_init__(self) -> None:
        if not self.why.strip():
            raise ValueError("why is empty")
        if bool(self.name) == bool(self.flag):
            raise ValueError("needs name or flag, one of the two")
        if self.name and not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*", self.name):
            raise ValueError(f"name {self.name!r} is no dotted name")
        if self.name and not self.kind:
            raise ValueError("a name needs its kind: function, class, attribute or module")
        if self.flag and not re.fullmatch(r"--?\w[\w.-]*", self.flag):
            raise ValueError(f"flag {self.flag!r} is no flag, like --sequence-parallel")
        if bool(self.flag) != bool(self.path):
            raise ValueError("a flag needs path, the file or folder that declares it")
        if self.kind not in ("function", "class") and self.parameters is not None:
            raise ValueError("parameters are of a function or a class")
        if not 0 <= self.positional <= len(self.parameters or ()):
            raise ValueError("positional counts parameters, so there are not more of it")

    def __str__(self) -> str:
        return self.name or self.flag


@dataclass(frozen=True)
class _File:
    contract: tuple[Contract, ...] = ()
    __pydantic_config__ = tables.FORM


def load(folder: Path) -> tuple[Contract, ...]:
    """The contracts of a fork. folder: of its queue. Raises UsageError with all mistakes."""
    return tables.read(folder / FILE, _File).contract


# -- a tree as modules -----------------------------------------------------------------------------


class Modules:
    """The modules of trees of one repository; a file that two trees share is read once."""

    def __init__(self, objects: Objects) -> None:
        self.objects = objects
        self._read: dict[tuple[ObjectId, str], griffe.Module | str] = {}
        self._flags: dict[ObjectId, frozenset[str]] = {}
        self._trees: dict[ObjectId, Tree] = {}

    def tree(self, id: "ObjectId") -> "Tree":
        if id not in self._trees:
            self._trees[id] = Tree(self, id)
        return self._trees[id]

    def module(self, blob: "ObjectId", name: str, path: str) -> griffe.Module | str:
        """A module of this content and name, or what makes it unreadable."""
        if (blob, name) not in self._read:
            parent: griffe.Module | None = None
            for part in name.split(".")[:-1]:
                parent = griffe.Module(part, filepath=Path(part, "__init__.py"), parent=parent)
            try:
                module = griffe.visit(
                    name.rpartition(".")[2],
                    filepath=Path(path),
                    code=Source(b"", self.objects.read(blob)).text,
                    parent=parent,
                )
            except (SyntaxError, ValueError, RecursionError) as error:
                self._read[blob, name] = f"{path} does not parse: {error}"
            else:
                self._read[blob, name] = module
        return self._read[blob, name]

    def flags(self, blob: "ObjectId", path: bytes) -> frozenset[str]:
        """The command-line flags that a file of this content declares."""
        if blob not in self._flags:
            self._flags[blob] = frozenset(_flags(Source(path, self.objects.read(blob))))
        return self._flags[blob]


_FLAG_RULE: Any = {
    "any": [
        {"kind": "string_content", "regex": r"^--?\w[\w.-]*$"},
        {
            "kind": "assignment",
            "has": {"field": "type", "kind": "type"},
            "inside": {
                "kind": "expression_statement",
                "inside": {"kind": "block", "inside": {"kind": "class_definition"}},
            },
        },
    ]
}


def _flags(source: Source) -> Iterator[str]:
    for node in source.root.find_all({"rule": _FLAG_RULE}):
        if node.kind() == "assignment":
            name = node.field("left")
            if name and name.kind() == "identifier":
                flag = name.text().replace("_", "-")
                yield from (f"--{flag}", f"--no-{flag}")
            continue
        string = node.parent()
        outer = string and string.parent()
        if outer and outer.kind() == "list":
            pair = outer.parent()
            key = pair and pair.field("key")
            if key and "arg_names" in key.text():
                yield node.text()
        elif outer and outer.kind() == "argument_list":
            call = outer.parent()
            function = call and call.field("function")
            if function and "arg" in function.text().rpartition(".")[2]:
                yield node.text()


@dataclass(frozen=True)
class _Found:
    """What a name stands for. outside: imported from there, which is not in the tree."""

    object: griffe.Object | None = None
    outside: str = ""


class _Missing(Exception):
    """A name stands for nothing; the message says where the search ended."""


class Tree:
    """One tree; `seen` gathers the paths that decided an answer."""

    def __init__(self, modules: Modules, id: "ObjectId") -> None:
        self._modules = modules
        self.id = id
        self.files = {
            path.decode("utf-8", "backslashreplace"): (path, entry.id)
            for path, entry in modules.objects.walk(id)
            if entry.is_file
        }
        self._roots: dict[str, str] = {}
        self.seen: set[str] = set()
        for path in sorted(self.files, key=lambda path: (path.count("/"), path)):
            if path.endswith(".py"):  # of two, the one nearest to the root is what is installed
                *above, name = path.removesuffix(".py").split("/")
                for depth, part in enumerate((*above, name)):
                    self._roots.setdefault(part, "".join(f"{each}/" for each in above[:depth]))

    def broken(self, contract: Contract) -> str | None:
        """What is wrong with a contract here; None where it is kept, or is not for this tree."""
        self.seen = set()
        if contract.when and not self.has(contract.when):
            return None
        if contract.flag:
            return self._flag(contract)
        try:
            found = self._find(contract.name)
        except _Missing as missing:
            return str(missing)
        if found.object is None:
            if contract.kind == "module" or contract.parameters is not None:
                return self._outside(found)
            return None
        if isinstance(found.object, griffe.Attribute) and contract.kind != "attribute":
            with suppress(_Missing):
                found = self._stands_for(found.object, 0)
                if found.object is None:
                    return None if contract.parameters is None else self._outside(found)
        assert found.object
        kind = found.object.kind.value.replace("type alias", "attribute")
        if kind != contract.kind:
            return f"is a {kind} in {self._where(found.object)}, not a {contract.kind}"
        if contract.parameters is None:
            return None
        return self._call(found.object, contract.parameters, contract.positional)

    def _outside(self, found: _Found) -> str:
        return f"is imported from {found.outside}, which is not in this tree"

    def has(self, path: str) -> bool:
        """Whether the tree has this file or folder."""
        folder = path.rstrip("/") + "/"
        return path in self.files or any(each.startswith(folder) for each in self.files)

    def _flag(self, contract: Contract) -> str | None:
        folder = contract.path.rstrip("/") + "/"
        wanted = {
            raw: blob
            for path, (raw, blob) in self.files.items()
            if path.endswith(".py") and (path == contract.path or path.startswith(folder))
        }
        if not wanted:
            return f"{contract.path} is not in the tree"
        self._modules.objects.bring(list(wanted.values()))
        for path, blob in wanted.items():
            if contract.flag in self._modules.flags(blob, path):
                self.seen = {path.decode("utf-8", "backslashreplace")}
                return None
        return f"nothing in {contract.path} declares it"

    def _path(self, name: str) -> str | None:
        """The file of a module."""
        stem = self._roots.get(name.partition(".")[0], "") + name.replace(".", "/")
        both = (f"{stem}.py", f"{stem}/__init__.py")
        return next((path for path in both if path in self.files), None)

    def _module(self, name: str) -> griffe.Module | None:
        path = self._path(name)
        if path is None:
            return None
        self.seen.add(path)
        read = self._modules.module(self.files[path][1], name, path)
        if isinstance(read, str):
            raise _Missing(read)
        return read

    def _find(self, name: str, steps: int = 0) -> _Found:
        """What a dotted name stands for. Raises _Missing."""
        parts = name.split(".")
        for end in range(len(parts), 0, -1):
            if (module := self._module(".".join(parts[:end]))) is not None:
                found = _Found(module)
                for part in parts[end:]:
                    if found.object is None:
                        return found
                    found = self._member(found.object, part, steps)
                return found
        if steps:
            return _Found(outside=name)
        raise _Missing("no module of the tree has it")

    def _member(self, of: griffe.Object, name: str, steps: int) -> _Found:
        if steps > _MOST_STEPS:
            raise _Missing(f"{name}: its imports lead round in a circle")
        if isinstance(of, griffe.Attribute):  # mpu = parallel_state
            found = self._stands_for(of, steps)
            return self._member(found.object, name, steps + 1) if found.object else found
        member = of.members.get(name)
        if isinstance(member, griffe.Alias):
            if of.is_module and member.target_path == f"{of.path}.{name}":
                member = None  # `from . import name` in the package itself
            else:
                return self._find(member.target_path, steps + 1)
        if member is not None:
            assert isinstance(member, griffe.Object)
            return _Found(member)
        for other in self._others(of):
            with suppress(_Missing):
                found = self._find(other, steps + 1)
                if found.object is not None:
                    return self._member(found.object, name, steps + 1)
                # what a base elsewhere (torch.nn.Module) may have is nothing upstream promises
        if of.is_module and (inner := self._module(f"{of.path}.{name}")):
            return _Found(inner)
        raise _Missing(f"there is no {name} in {self._where(of)}")

    def _stands_for(self, of: griffe.Attribute, steps: int) -> _Found:
        """What an attribute is another name for. Raises _Missing where it is none."""
        if isinstance(of.value, griffe.ExprName | griffe.ExprAttribute):
            return self._find(of.value.canonical_path, steps + 1)
        raise _Missing(f"there is nothing known of {self._where(of)}")

    def _others(self, of: griffe.Object) -> Iterator[str]:
        """Where else a member may come from: base classes, and modules of which all is imported."""
        if isinstance(of, griffe.Class):
            for base in of.bases:
                yield base if isinstance(base, str) else base.canonical_path
        for member in of.members.values():
            if isinstance(member, griffe.Alias) and member.wildcard:
                yield member.wildcard

    def _where(self, object: griffe.Object) -> str:
        path = self._path(object.module.path) or ""
        if isinstance(object, griffe.Module):
            return path or object.path
        return f"{path}:{object.lineno}" if object.lineno else path

    def _call(self, object: griffe.Object, passed: Sequence[str], positional: int) -> str | None:
        if isinstance(object, griffe.Class):
            found = self._constructor(object)
            if found is None:
                return (
                    None if not passed else f"{self._where(object)} has no constructor of its own"
                )
            parameters, where = found, self._where(object)
        else:
            assert isinstance(object, griffe.Function)
            parameters, where = list(object.parameters), self._where(object)
            if isinstance(object.parent, griffe.Class) and "staticmethod" not in object.labels:
                parameters = parameters[1:]
        kinds = griffe.ParameterKind
        named = [p for p in parameters if p.kind not in (kinds.var_positional, kinds.var_keyword)]
        names = {p.name: p for p in named}
        takes_any = any(p.kind is kinds.var_keyword for p in parameters)
        wrong = []
        by_position = [p.name for p in named if p.kind is not kinds.keyword_only]
        first, rest = passed[:positional], passed[positional:]
        takes_more = any(p.kind is kinds.var_positional for p in parameters)
        if not (by_position[: len(first)] == list(first) or (takes_more and not by_position)):
            wrong.append(f"begins with ({', '.join(by_position[: len(first)])})")
        gone = [
            name
            for name in rest
            if not takes_any and (name not in names or names[name].kind is kinds.positional_only)
        ]
        if gone:
            wrong.append(f"takes no {', '.join(gone)}")
        if missing := [p.name for p in named if p.required and p.name not in passed]:
            wrong.append(f"needs {', '.join(missing)} too")
        return f"{where} {'; '.join(wrong)}" if wrong else None

    def _constructor(self, of: griffe.Class) -> list[griffe.Parameter] | None:
        """The parameters of a class's constructor; None where this tree has none of it."""
        if "dataclass" in of.labels or any(_is_dataclass(each) for each in of.decorators):
            return self._fields(of)
        with suppress(_Missing):
            found = self._member(of, "__init__", 0)
            if isinstance(found.object, griffe.Function):
                return list(found.object.parameters)[1:]
        return self._fields(of) if self._is_record(of) else None

    def _is_record(self, of: griffe.Class, steps: int = 0) -> bool:
        """Whether a base from elsewhere makes the constructor of the fields, as dataclass does."""
        for base in self._others(of):
            if base in _RECORDS:
                return True
            with suppress(_Missing):
                inner = self._find(base, steps + 1).object
                if isinstance(inner, griffe.Class) and steps < _MOST_STEPS:
                    return self._is_record(inner, steps + 1)
        return False

    def _fields(self, of: griffe.Class, steps: int = 0) -> list[griffe.Parameter]:
        """What a dataclass takes: its fields, its bases' first."""
        fields: dict[str, griffe.Parameter] = {}
        for base in reversed(list(self._others(of))) if steps < _MOST_STEPS else ():
            try:
                found = self._find(base, steps + 1)
            except _Missing:
                continue
            if isinstance(found.object, griffe.Class):
                fields |= {p.name: p for p in self._fields(found.object, steps + 1)}
        for name, member in of.members.items():
            if isinstance(member, griffe.Attribute) and member.annotation is not None:
                if "property" in member.labels:
                    continue
                if member.value is not None and "class-attribute" not in member.labels:
                    continue  # set by a method
                if str(member.annotation).startswith(("ClassVar", "typing.ClassVar")):
                    continue
                value = str(member.value) if member.value is not None else None
                if value and re.search(r"\binit\s*=\s*False\b", value):
                    continue
                if value and value.startswith("field(") and "default" not in value:
                    value = None
                kind = griffe.ParameterKind.positional_or_keyword
                fields[name] = griffe.Parameter(name, kind=kind, default=value)
        return list(fields.values())


def _is_dataclass(decorator: griffe.Decorator) -> bool:
    return decorator.callable_path.rpartition(".")[2] == "dataclass"


# -- who broke it ----------------------------------------------------------------------------------


def culprit(
    modules: Modules, contract: Contract, seen: Collection[str], history: History
) -> tuple[UpstreamCommit, ...]:
    """The upstream commit after which a contract is broken, and before which it was kept.

    seen: the paths that decided that it was kept at the old pin. Empty where the history does not
    say: it is a merge, or lies on a branch.
    """
    objects = modules.objects
    paths = [path.encode() for path in seen]
    history.load(paths)
    tried: set[str] = set()
    for path in paths:
        for touch in history.touching(path)[:_MOST_COMMITS]:
            if touch.commit.id in tried:
                continue
            tried.add(touch.commit.id)
            around = (*objects.parents_of(touch.commit.id)[:1], touch.commit.id)
            kept = [Tree(modules, objects.tree_of(id)).broken(contract) is None for id in around]
            if kept == [True, False]:
                return (touch.commit,)
    return ()

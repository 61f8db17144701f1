"""Declared changes of other packages' objects, while a process runs.

A `Patch` says which object it replaces, why, and until when. It is applied at most once, only onto
an object with the signature it was written for; a module's function is replaced in every module
that has it by its name too, as `from module import name` before the patch would keep the old one;
and it can be undone. `applied()` lists what is in force.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import logging
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

_log = logging.getLogger(__name__)
_lock = threading.RLock()
_applied: dict[str, _Applied] = {}


class PatchError(RuntimeError):
    """A patch cannot be applied or undone; nothing was changed."""


@dataclass(frozen=True)
class Patch:
    """One declared change of somebody else's object.

    target   "module:name", "module:Class.name"
    make     called with the object that is there (the function itself, where it is a static or
             class method), gives what takes its place
    what, why, until
             what changes, why it must, and when the patch can go; for people
    expects  the signature the target must have, "(self, x, *, dim=-1)", or several of which it
             must have one. Annotations do not count, and a default of `...` is any default. None
             for a target that has no signature
    """

    target: str
    make: Callable[[Any], Any] = field(repr=False, compare=False)
    what: str
    why: str
    until: str
    expects: str | tuple[str, ...] | None

    def __post_init__(self) -> None:
        """Raise ValueError where `expects` is no signature."""
        for text in (self.expects,) if isinstance(self.expects, str) else self.expects or ():
            try:
                _parameters(text)
            except SyntaxError:
                raise ValueError(
                    f"{self.target}: expects {text!r}, which is no signature"
                ) from None
        if self.expects == ():
            raise ValueError(f"{self.target}: expects nothing; None is for what has no signature")

    def apply(self) -> bool:
        """Replace the target; False where this patch is in force already.

        Raises PatchError where the target does not exist, has another signature, or is held by
        another patch.
        """
        with _lock:
            there = _applied.get(self.target)
            if there is not None and there.patch == self:
                return False
            if there is not None:
                raise PatchError(f"{self.target}: another patch holds it ({there.patch.what})")
            owner, name, raw = self._find()
            wrapper = type(raw) if isinstance(raw, staticmethod | classmethod) else None
            original = raw.__func__ if wrapper else raw
            self._check(original)
            made = self.make(original)
            replacement = wrapper(made) if wrapper else made
            inherited = name not in vars(owner)
            try:
                _rebind(owner, name, raw, replacement)
            except TypeError as error:  # a compiled class
                raise PatchError(f"{self.target} cannot be replaced: {error}") from error
            _applied[self.target] = _Applied(self, owner, name, raw, inherited, replacement)
            _log.info("patched %s: %s", self.target, self.what)
            return True

    def undo(self) -> bool:
        """Put back what was there; False where this patch is not in force.

        Raises PatchError where somebody else has replaced the target since.
        """
        with _lock:
            there = _applied.get(self.target)
            if there is None or there.patch != self:
                return False
            if vars(there.owner).get(there.name) is not there.replacement:
                raise PatchError(
                    f"{self.target} was replaced again since it was patched ({self.what}); undo "
                    f"that first"
                )
            if there.inherited:
                delattr(there.owner, there.name)
            else:
                _rebind(there.owner, there.name, there.replacement, there.original)
            del _applied[self.target]
            return True

    def _find(self) -> tuple[Any, str, Any]:
        """The object that holds the target, the target's name in it, and the target itself."""
        module, _, path = self.target.partition(":")
        try:
            target: Any = importlib.import_module(module)
        except ImportError as error:
            raise PatchError(f"{self.target}: {module} does not import: {error}") from error
        for name in path.split("."):
            owner = target
            try:
                target = _raw(owner, name)
            except AttributeError:
                raise PatchError(
                    f"{self.target}: {getattr(owner, '__name__', owner)} has no {name!r}; upstream "
                    f"moved or renamed it, so this patch ({self.what}) has to follow"
                ) from None
        return owner, name, target

    def _check(self, original: Any) -> None:
        """Raise PatchError where the target's signature is none of those expected."""
        found = _signature(original)
        expected = (self.expects,) if isinstance(self.expects, str) else self.expects
        if expected is None:
            if found is not None:
                raise PatchError(
                    f"{self.target} has the signature {found}; a patch of it has to expect one"
                )
            return
        if found is None:
            raise PatchError(f"{self.target} has no signature; expected {' or '.join(expected)}")
        has = [_Parameter(p.name, p.kind.description, _shown(p)) for p in found.parameters.values()]
        differences = [_differences(has, _parameters(text)) for text in expected]
        if all(differences):
            nearest = min(differences, key=lambda these: len(these))
            raise PatchError(
                f"{self.target} is {found}, not {' or '.join(expected)}: "
                f"{'; '.join(nearest)}. Nothing was changed; this patch "
                f"({self.what}) has to be read against the new upstream"
            )


def applied() -> list[Patch]:
    """The patches in force, in the order in which they were applied."""
    with _lock:
        return [there.patch for there in _applied.values()]


@dataclass(frozen=True)
class _Applied:
    patch: Patch
    owner: Any
    name: str
    original: Any
    inherited: bool
    replacement: Any


@dataclass(frozen=True)
class _Parameter:
    name: str
    kind: str
    default: str | None


def _raw(owner: Any, name: str) -> Any:
    """What `owner` binds to `name`: a static method itself, not what it wraps."""
    return getattr(owner, name) if inspect.ismodule(owner) else inspect.getattr_static(owner, name)


def _rebind(owner: Any, name: str, old: Any, new: Any) -> None:
    """Bind `name` to `new` in `owner`, and in the modules that imported it from there."""
    setattr(owner, name, new)
    if inspect.ismodule(owner) and callable(old):
        for module in list(sys.modules.values()):
            if getattr(module, "__dict__", {}).get(name) is old:
                setattr(module, name, new)


def _signature(target: Any) -> inspect.Signature | None:
    """The target's signature without annotations; None where it has none."""
    try:
        found = inspect.signature(target)
    except (TypeError, ValueError):  # not callable, or compiled without a signature
        return None
    bare = [p.replace(annotation=p.empty) for p in found.parameters.values()]
    return found.replace(parameters=bare, return_annotation=found.empty)


def _parameters(text: str) -> list[_Parameter]:
    """What a signature written as text declares."""
    function = ast.parse(f"def f{text}: pass").body[0]
    assert isinstance(function, ast.FunctionDef)
    a, kind = function.args, inspect.Parameter
    positional = a.posonlyargs + a.args
    defaults: list[ast.expr | None] = [None] * (len(positional) - len(a.defaults))
    declared: list[tuple[ast.arg, Any, ast.expr | None]] = []
    for p, default in zip(positional, [*defaults, *a.defaults], strict=True):
        only = p in a.posonlyargs
        declared.append((p, kind.POSITIONAL_ONLY if only else kind.POSITIONAL_OR_KEYWORD, default))
    if a.vararg:
        declared.append((a.vararg, kind.VAR_POSITIONAL, None))
    for p, default in zip(a.kwonlyargs, a.kw_defaults, strict=True):
        declared.append((p, kind.KEYWORD_ONLY, default))
    if a.kwarg:
        declared.append((a.kwarg, kind.VAR_KEYWORD, None))
    return [
        _Parameter(p.arg, k.description, None if default is None else _text(default))
        for p, k, default in declared
    ]


def _text(default: ast.expr) -> str:
    """A default as its value would show itself, so that 1e-5 and 0.00001 are the same."""
    try:
        return repr(ast.literal_eval(default))
    except ValueError:
        return ast.unparse(default)


def _shown(parameter: inspect.Parameter) -> str | None:
    return None if parameter.default is parameter.empty else repr(parameter.default)


def _differences(has: list[_Parameter], wanted: list[_Parameter]) -> list[str]:
    """What sets the parameters found apart from those expected, for people; [] for nothing."""
    found, expected = {p.name: p for p in has}, {p.name: p for p in wanted}
    differences = [f"{name!r} is new" for name in found if name not in expected]
    differences += [f"{name!r} is gone" for name in expected if name not in found]
    for p, q in ((p, expected[p.name]) for p in has if p.name in expected):
        if p.kind != q.kind:
            differences.append(f"{p.name!r} is {p.kind}, not {q.kind}")
        any_default = p.default is not None and q.default == "Ellipsis"
        if p.default != q.default and not any_default:
            differences.append(f"{p.name!r} has {_default(p)}, not {_default(q)}")
    if not differences and list(found) != list(expected):
        differences.append("the parameters stand in another order")
    return differences


def _default(parameter: _Parameter) -> str:
    if parameter.default is None:
        return "no default"
    return "a default" if parameter.default == "Ellipsis" else f"the default {parameter.default}"

"""Declared patches: checked, applied at most once, undone without a trace."""

import inspect
import itertools
import sys
import types

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_npu import patching
from slime_npu.patching import Patch, PatchError

pytestmark = pytest.mark.plumbing

names = itertools.count()

UPSTREAM = """
RATE = 1

def scale(x: int, *, by: float = 2.0) -> float:
    return x * by

class Base:
    def inherited(self, x):
        return x

class Layer(Base):
    def forward(self, x, mask=None):
        return x + 1

    @staticmethod
    def norm(x, eps=1e-05):
        return x

    @classmethod
    def build(cls, size=4):
        return cls, size

    @property
    def width(self):
        return 4
"""


@pytest.fixture
def upstream():
    """A freshly imported module of somebody else's, gone after the test."""
    module = types.ModuleType(f"upstream_{next(names)}")
    exec(UPSTREAM, vars(module))
    sys.modules[module.__name__] = module
    before = len(patching.applied())
    yield module
    for patch in patching.applied()[before:]:
        patch.undo()
    del sys.modules[module.__name__]


def declared(module, name, make, expects, what="a test's change"):
    return Patch(
        target=f"{module.__name__}:{name}",
        make=make,
        what=what,
        why="the test wants it",
        until="the test ends",
        expects=expects,
    )


def doubled(original):
    return lambda *args, **kwargs: 2 * original(*args, **kwargs)


FORWARD = "(self, x, mask=None)"


def test_a_method_is_replaced_and_given_back(upstream):
    before = vars(upstream.Layer)["forward"]
    patch = declared(upstream, "Layer.forward", doubled, FORWARD)
    assert patch.apply()
    assert upstream.Layer().forward(3) == 8
    assert patch.undo()
    assert vars(upstream.Layer)["forward"] is before


def test_a_patch_is_applied_at_most_once(upstream):
    patch = declared(upstream, "Layer.forward", doubled, FORWARD)
    assert [patch.apply(), patch.apply(), patch.apply()] == [True, False, False]
    assert upstream.Layer().forward(3) == 8


def test_a_patch_declared_again_is_the_same_patch(upstream):
    for _ in range(2):
        declared(upstream, "Layer.forward", lambda f: doubled(f), FORWARD).apply()
    assert upstream.Layer().forward(3) == 8


def test_undoing_twice_changes_nothing(upstream):
    patch = declared(upstream, "scale", doubled, "(x, *, by=2.0)")
    assert not patch.undo()
    patch.apply()
    assert [patch.undo(), patch.undo()] == [True, False]
    assert upstream.scale(3) == 6


def test_a_patch_can_be_applied_again_after_it_was_undone(upstream):
    patch = declared(upstream, "scale", doubled, "(x, *, by=2.0)")
    assert [patch.apply(), patch.undo(), patch.apply()] == [True, True, True]
    assert upstream.scale(3) == 12


def test_another_patch_of_the_same_target_is_refused(upstream):
    declared(upstream, "Layer.forward", doubled, FORWARD).apply()
    other = declared(upstream, "Layer.forward", doubled, FORWARD, what="something else")
    with pytest.raises(PatchError, match=r"another patch holds it \(a test's change\)"):
        other.apply()
    assert upstream.Layer().forward(3) == 8


def test_what_is_applied_is_listed_in_order(upstream):
    first = declared(upstream, "scale", doubled, "(x, *, by=2.0)")
    second = declared(upstream, "Layer.forward", doubled, FORWARD)
    assert not {first, second} & set(patching.applied())
    first.apply()
    second.apply()
    assert patching.applied()[-2:] == [first, second]
    first.undo()
    assert patching.applied()[-1] == second
    assert first not in patching.applied()


def test_modules_that_imported_the_function_before_get_the_new_one_and_the_old_one_back(upstream):
    user = types.ModuleType(f"user_{next(names)}")
    sys.modules[user.__name__] = user
    exec(f"from {upstream.__name__} import scale\nkept = scale", vars(user))
    try:
        patch = declared(upstream, "scale", doubled, "(x, *, by=2.0)")
        patch.apply()
        assert user.scale(3) == 12
        assert user.kept(3) == 6  # under another name it is somebody's way to the original
        patch.undo()
        assert user.scale(3) == 6
    finally:
        del sys.modules[user.__name__]


def test_modules_that_import_a_patched_function_get_the_old_one_back_too(upstream):
    patch = declared(upstream, "scale", doubled, "(x, *, by=2.0)")
    patch.apply()
    user = types.ModuleType(f"user_{next(names)}")
    sys.modules[user.__name__] = user
    exec(f"from {upstream.__name__} import scale", vars(user))
    try:
        patch.undo()
        assert user.scale(3) == 6
    finally:
        del sys.modules[user.__name__]


def test_a_static_method_stays_one(upstream):
    before = vars(upstream.Layer)["norm"]
    patch = declared(upstream, "Layer.norm", doubled, "(x, eps=0.00001)")
    patch.apply()
    assert upstream.Layer.norm(3) == upstream.Layer().norm(3) == 6
    patch.undo()
    assert vars(upstream.Layer)["norm"] is before


def test_a_class_method_stays_one(upstream):
    def make(original):
        return lambda cls, size=8: original(cls, size)

    declared(upstream, "Layer.build", make, "(cls, size=4)").apply()
    assert upstream.Layer.build() == (upstream.Layer, 8)


def test_an_inherited_method_is_replaced_in_the_named_class_only(upstream):
    patch = declared(upstream, "Layer.inherited", doubled, "(self, x)")
    patch.apply()
    assert (upstream.Layer().inherited(3), upstream.Base().inherited(3)) == (6, 3)
    patch.undo()
    assert "inherited" not in vars(upstream.Layer)
    assert upstream.Layer().inherited(3) == 3


def test_what_has_no_signature_is_replaced_without_one(upstream):
    declared(upstream, "RATE", lambda rate: rate + 1, None).apply()
    declared(upstream, "Layer.width", lambda p: property(lambda self: 8), None).apply()
    assert (upstream.RATE, upstream.Layer().width) == (2, 8)


def test_one_of_several_signatures_is_enough(upstream):
    both = ("(self, x)", FORWARD)
    assert declared(upstream, "Layer.forward", doubled, both).apply()


@pytest.mark.parametrize(
    ("expects", "difference"),
    [
        ("(self, x)", "'mask' is new"),
        ("(self, x, mask=None, cp_group=None)", "'cp_group' is gone"),
        ("(self, x, mask=False)", "'mask' has the default None, not the default False"),
        ("(self, x, *, mask=None)", "'mask' is positional or keyword, not keyword-only"),
        ("(self, mask=None, x=...)", "'x' has no default, not a default"),
        (("(self)", "(self, x)"), "'mask' is new. Nothing"),
    ],
)
def test_another_signature_is_an_error_that_names_the_difference(upstream, expects, difference):
    before = vars(upstream.Layer)["forward"]
    patch = declared(upstream, "Layer.forward", doubled, expects)
    with pytest.raises(PatchError) as error:
        patch.apply()
    message = str(error.value)
    assert difference in message
    assert "(self, x, mask=None)" in message
    assert "Nothing was changed" in message
    assert vars(upstream.Layer)["forward"] is before
    assert patch not in patching.applied()


def test_parameters_in_another_order_are_an_error(upstream):
    with pytest.raises(PatchError, match="the parameters stand in another order"):
        declared(upstream, "Layer.forward", doubled, "(x, self, mask=None)").apply()


def test_any_default_is_one_where_dots_stand(upstream):
    assert declared(upstream, "Layer.forward", doubled, "(self, x, mask=...)").apply()


def test_a_signature_where_none_is_expected_is_an_error(upstream):
    with pytest.raises(PatchError, match="a patch of it has to expect one"):
        declared(upstream, "scale", doubled, None).apply()


def test_a_signature_expected_of_what_has_none_is_an_error(upstream):
    with pytest.raises(PatchError, match=r"has no signature; expected \(x\)"):
        declared(upstream, "RATE", doubled, "(x)").apply()


@pytest.mark.parametrize("name", ["forward", "Layer.fwd", "Layer.forward.deeper"])
def test_a_target_that_is_gone_is_an_error(upstream, name):
    with pytest.raises(PatchError, match="upstream moved or renamed it"):
        declared(upstream, name, doubled, FORWARD).apply()


@pytest.mark.parametrize("expects", ["(x, y=1", "", ()])
def test_what_expects_no_signature_cannot_be_declared(expects):
    with pytest.raises(ValueError, match="a:b: expects"):
        Patch("a:b", lambda f: f, "what", "why", "until", expects)


def test_a_module_that_does_not_import_is_an_error():
    patch = Patch("no_such_module:f", doubled, "a change", "no reason", "never", "(x)")
    with pytest.raises(PatchError, match="no_such_module does not import"):
        patch.apply()


def test_a_compiled_class_cannot_be_patched():
    patch = Patch("builtins:str.upper", doubled, "a change", "no reason", "never", "(self, /)")
    with pytest.raises(PatchError, match="cannot be replaced"):
        patch.apply()
    assert "a".upper() == "A"
    assert patch not in patching.applied()


def test_a_failing_replacement_leaves_everything_as_it_was(upstream):
    before = vars(upstream.Layer)["forward"]
    patch = declared(upstream, "Layer.forward", lambda original: 1 / 0, FORWARD)
    with pytest.raises(ZeroDivisionError):
        patch.apply()
    assert vars(upstream.Layer)["forward"] is before
    assert patch not in patching.applied()


def test_undoing_under_somebody_elses_replacement_is_an_error(upstream):
    patch = declared(upstream, "Layer.forward", doubled, FORWARD)
    patch.apply()
    ours = upstream.Layer.forward
    upstream.Layer.forward = doubled(ours)
    with pytest.raises(PatchError, match="was replaced again since it was patched"):
        patch.undo()
    assert upstream.Layer().forward(3) == 16
    upstream.Layer.forward = ours
    assert patch.undo()


defaults = st.sampled_from(["", "=None", "=-1", "=1e-05", "='half'", "=(1, 2)", "=True"])


@st.composite
def signatures(draw):
    """Signatures as people write them, of every kind of parameter."""
    free = iter("abcdefgh")
    positional = [next(free) for _ in range(draw(st.integers(0, 3)))]
    only = draw(st.integers(0, len(positional)))
    values = [draw(defaults) for _ in positional]
    first = next((i for i, v in enumerate(values) if v), len(values))
    values[first:] = [v or "=0" for v in values[first:]]
    parts = [n + v for n, v in zip(positional, values, strict=True)]
    if only:
        parts.insert(only, "/")
    keywords = [next(free) + draw(defaults) for _ in range(draw(st.integers(0, 2)))]
    if draw(st.booleans()):
        parts.append("*args")
    elif keywords:
        parts.append("*")
    parts += keywords
    if draw(st.booleans()):
        parts.append("**kwargs")
    return f"({', '.join(parts)})"


@given(signatures(), signatures())
def test_a_written_signature_fits_exactly_the_functions_that_have_it(has, expects):
    scope = {}
    exec(f"def f{has}: pass\ndef g{expects}: pass", scope)
    f, g = scope["f"], scope["g"]
    module = types.ModuleType(f"law_{next(names)}")
    module.f = f
    sys.modules[module.__name__] = module
    patch = declared(module, "f", lambda _: g, expects)
    try:
        if inspect.signature(f) == inspect.signature(g):
            assert patch.apply()
            assert module.f is g
            assert patch.undo()
        else:
            with pytest.raises(PatchError):
                patch.apply()
        assert module.f is f
    finally:
        del sys.modules[module.__name__]


def test_a_real_method_of_torchs_is_patched_and_given_back():
    import torch

    def named(original):
        return lambda self, *args, **kwargs: f"patched {original(self, *args, **kwargs)}"

    assert "type" not in vars(torch.Tensor)
    patch = Patch("torch:Tensor.type", named, "a test's change", "a test", "it ends", None)
    patch.apply()
    try:
        assert torch.ones(1).type() == "patched torch.FloatTensor"
    finally:
        patch.undo()
    assert "type" not in vars(torch.Tensor)
    assert torch.ones(1).type() == "torch.FloatTensor"

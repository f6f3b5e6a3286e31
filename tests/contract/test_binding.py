"""What pluggy would silently drop, accept or evaluate is refused, or left alone, when an engine is bound."""

from __future__ import annotations

import pytest

from engines import create
from engines.contract import BaseEngine, behaviour, hookimpl
from engines.engine import Engine
from engines.engine.binding import HOOKS
from engines.errors import ContractError
from support.bigram import MODEL, BigramEngine, registered, sequences


def variant(**members: object) -> type[BigramEngine]:
    """The engine with other members."""
    return type("Faulty", (BigramEngine,), members)


def refusal(engine_class: type, **fields: object) -> str:
    with registered(engine_class, **fields), pytest.raises(ContractError) as error:
        create(MODEL, {"strategy": "bigram"})
    return str(error.value)


def default(self, forward_only=False): ...
def keyword_only(self, *, forward_only): ...
def keywords(self, forward_only, **rest): ...
def positions(self, *arguments): ...
def positional_only(self, forward_only, /): ...
def leaves_out(self): ...
def misspelt(self, forward_onyl): ...
def too_many(self, forward_only, extra): ...


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (default, "parameter forward_only has a default"),
        (keyword_only, "parameter forward_only is keyword-only"),
        (keywords, "parameter rest is variadic keyword"),
        (positions, "parameter arguments is variadic positional"),
        (positional_only, "is positional-only"),
        (leaves_out, "leaves out forward_only"),
        (misspelt, 'unknown parameter forward_onyl. Did you mean "forward_only"?'),
        (too_many, "unknown parameter extra. The hook takes (self, forward_only)"),
        (property(leaves_out), "is a property; it must be a plain method"),
        (staticmethod(leaves_out), "is a staticmethod; it must be a plain method"),
        (classmethod(leaves_out), "is a classmethod; it must be a plain method"),
        (None, "is a NoneType; it must be a plain method"),
    ],
    ids=lambda value: value if isinstance(value, str) else getattr(value, "__name__", type(value).__name__),
)
def test_signatures_that_would_lose_arguments(function, said):
    message = refusal(variant(micro_batch_rules=function))
    assert message.startswith("in-process: ") and "test_binding.Faulty.micro_batch_rules" in message
    assert said in message
    assert "\n" not in message


def test_misspelt_hook():
    engine = type("Faulty", (BaseEngine,), {**_hooks_but("step"), "setp": BigramEngine.step})
    lines = refusal(engine).splitlines()
    assert "Faulty.step is missing: every engine must have it, with (self)" in lines[0]
    assert 'Faulty.setp is a public method that the contract doesn\'t know. Did you mean "step"?' in lines[1]
    assert len(lines) == 2


def test_unknown_public_method():
    assert "Helpers of an engine begin with an underscore" in refusal(variant(gather_everything=lambda self: None))


@pytest.mark.parametrize("kind", [staticmethod, classmethod])
def test_unknown_public_method_of_another_kind(kind):
    assert "gather_everything is a public method" in refusal(variant(gather_everything=kind(lambda *_: None)))


def test_private_helpers_and_public_data_are_the_authors_own():
    with registered(variant(_helper=lambda self: None, answer=42, Inner=type("Inner", (), {}))):
        create(MODEL, {"strategy": "bigram"}).close()


@pytest.mark.parametrize("name", sorted(name for name, hook in HOOKS.items() if hook.__engines_capability__ is None))
def test_missing_hook(name):
    assert f"Faulty.{name} is missing" in refusal(type("Faulty", (BaseEngine,), _hooks_but(name)))


@pytest.mark.parametrize(("capability", "name"), [("offload", "move"), ("lora", "set_adapter_enabled")])
def test_hook_of_a_declared_capability(capability, name):
    message = refusal(BigramEngine, capabilities=[capability])
    assert f"BigramEngine.{name} is missing: the manifest declares {capability}" in message


def test_not_an_engine():
    assert "is not a subclass of engines.BaseEngine" in refusal(type("Stranger", (), {}))


def test_every_fault_is_told_at_once():
    faulty = variant(step=default, zero_grad=keyword_only, sumbit=leaves_out)
    assert [line.split("Faulty.")[1].split(":")[0].split()[0] for line in refusal(faulty).splitlines()] == [
        "zero_grad",
        "step",
        "sumbit",
    ]


def test_faults_are_found_before_the_engine_is_constructed():
    def construct(self, ctx):
        raise AssertionError("constructed")

    assert "has a default" in refusal(variant(__init__=construct, micro_batch_rules=default))


def test_properties_are_not_evaluated():
    def early(self):
        raise RuntimeError("asked before initialize")

    with registered(variant(lr=property(early), parameters=property(early))):
        engine = create(MODEL, {"strategy": "bigram"}, {"lr": 0.1})
        engine.initialize()
        with pytest.raises(RuntimeError, match="asked before initialize"):
            _ = engine.lr


def test_engine_is_final():
    with pytest.raises(TypeError, match="Engine is final: subclass BaseEngine"):
        type("MyEngine", (Engine,), {})


def test_the_authors_object_is_not_handed_out():
    with registered():
        engine = create(MODEL, {"strategy": "bigram"})
    public = [getattr(engine, name) for name in dir(engine) if not name.startswith("_") and name != "lr"]
    assert not any(isinstance(value, BaseEngine) for value in public)


class _Refused:
    """Wrappers whose hooks would not take part as they think."""

    class Unknown:
        @hookimpl(wrapper=True)
        def setp(self):
            yield

    class NoWrapper:
        @hookimpl
        def step(self): ...

    class OldStyle:
        @hookimpl(hookwrapper=True)
        def step(self):
            yield

    class Default:
        @hookimpl(wrapper=True)
        def micro_batch_rules(self, forward_only=False):
            return (yield)

    class KeywordOnly:
        @hookimpl(wrapper=True)
        def micro_batch_rules(self, *, forward_only):
            return (yield)

    class Misspelt:
        @hookimpl(wrapper=True)
        def micro_batch_rules(self, forward_onyl):
            return (yield)

    class NoGenerator:
        @hookimpl(wrapper=True)
        def step(self):
            return None

    class Nothing:
        def step(self):
            return None


@pytest.mark.parametrize(
    ("wrapper", "said"),
    [
        (_Refused.Unknown, 'setp is no hook. Did you mean "step"?'),
        (_Refused.NoWrapper, "step must be marked @hookimpl(wrapper=True)"),
        (_Refused.OldStyle, "step must be marked @hookimpl(wrapper=True)"),
        (_Refused.Default, "parameter forward_only has a default"),
        (_Refused.KeywordOnly, "parameter forward_only is keyword-only"),
        (_Refused.Misspelt, 'unknown parameter forward_onyl. Did you mean "forward_only"?'),
        (_Refused.NoGenerator, "step must be a generator"),
        (_Refused.Nothing, "wraps no hook"),
    ],
)
def test_refused_wrappers(wrapper, said):
    with registered():
        engine = create(MODEL, {"strategy": "bigram"}, {"lr": 0.1})
        good = _Good()
        with pytest.raises(ContractError, match=r"^wrapper ") as error:
            engine.wrap(good, wrapper())
        assert said in str(error.value)
        engine.initialize()
        engine.infer_batch(sequences(3))
        assert good.seen == 0, "with one wrapper refused, none is put around the engine"


class _Good:
    def __init__(self) -> None:
        self.seen = 0

    @hookimpl(wrapper=True)
    def forward_micro_batch(self):
        self.seen += 1
        return (yield)


def test_hooks_are_about_a_dozen_behaviours():
    assert set(HOOKS) == {name for name, member in vars(BaseEngine).items() if callable(member) and name[0] != "_"}
    assert behaviour(capability="lora")(lambda: None).__engines_capability__ == "lora"


def _hooks_but(name: str) -> dict[str, object]:
    own = {key: value for key, value in vars(BigramEngine).items() if not key.startswith("__") and key != name}
    return {**own, "__init__": BigramEngine.__init__}

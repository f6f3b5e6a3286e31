"""Device first, then the owner, with the reasons for every candidate."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from engines.devices import BUILT_IN, DeviceSpec, presence
from engines.errors import ConfigError, EngineNotFound, LaunchError
from engines.registry import EngineFields, Registry


class Engine:
    pass


class Config:
    pass


FAST = DeviceSpec("fast", 50, (), "torch", "gloo", None, "cpu")
FASTER = DeviceSpec("faster", 60, (), "torch", "gloo", None, "cpu")


def fields(backend: str, device: str | list[str] = "cpu", priority: int = 100, **more: object) -> EngineFields:
    base = {"backend": backend, "model_type": "language_model", "device": device, "priority": priority}
    return base | {"engine": Engine, "config": Config} | more  # type: ignore[return-value]


@pytest.fixture
def registry(empty_registry: Registry) -> Registry:
    return empty_registry


class TestDevice:
    @pytest.fixture(autouse=True)
    def _here(self, registry: Registry, tmp_path_factory: pytest.TempPathFactory) -> None:
        """Two devices that are present, as their nodes exist, and cuda and npu, which may not be."""
        node = tmp_path_factory.mktemp("dev") / "node"
        node.touch()
        present = [
            DeviceSpec(spec.name, spec.rank, (str(node),), "torch", "gloo", f"{spec.name.upper()}_VISIBLE", "none")
            for spec in (FAST, FASTER)
        ]
        registry.register(**fields("wide", ["cpu", "fast", "faster"], devices=present))
        registry.register(**fields("slow", ["cpu", "fast"]))
        registry.register(**fields("plain", "cpu"))

    @pytest.mark.parametrize(("backend", "device"), [("wide", "faster"), ("slow", "fast"), ("plain", "cpu")])
    def test_the_highest_ranked_that_is_supported(self, registry: Registry, backend: str, device: str) -> None:
        assert registry.resolve("language_model", backend).device == device

    def test_torch_says_nothing_of_a_device_on_host_memory(
        self, registry: Registry, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It always knows the CPU, so a process that has imported torch must not choose otherwise than one before."""
        monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cpu=SimpleNamespace(is_available=lambda: True)))
        assert not presence(FAST).present
        monkeypatch.setenv("ENGINES_DEVICE", "fast")
        assert presence(FAST).present

    def test_torch_cuda_answered_by_another_device(self, registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
        """MindSpeed puts that of `torch.npu` there, so that others' code runs on NPUs; no cuda is here for it."""
        cuda = BUILT_IN["cuda"]
        asked = SimpleNamespace(is_available=lambda: True)
        monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=asked))
        asked.is_available.__module__ = "torch_npu.npu"
        assert not presence(cuda).present and "torch_npu.npu" in presence(cuda).how
        asked.is_available.__module__ = "torch.cuda"
        assert presence(cuda).present

    def test_hidden_devices_are_not_present(self, registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
        for hidden in ("", "-1", " "):
            monkeypatch.setenv("FASTER_VISIBLE", hidden)
            assert registry.resolve("language_model", "wide").device == "fast"
        monkeypatch.setenv("FASTER_VISIBLE", "0,1")
        assert registry.resolve("language_model", "wide").device == "faster"

    def test_argument_before_environment_before_configuration(
        self, registry: Registry, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert registry.resolve("language_model", "wide", configured="cpu").device == "cpu"
        monkeypatch.setenv("ENGINES_DEVICE", "fast")
        chosen = registry.resolve("language_model", "wide", configured="cpu")
        assert chosen.device == "fast"
        assert "named by ENGINES_DEVICE over engine.device=cpu" in chosen.explain()
        chosen = registry.resolve("language_model", "wide", "faster", configured="cpu")
        assert chosen.device == "faster"
        assert "named by the argument over ENGINES_DEVICE=fast and engine.device=cpu" in chosen.explain()

    def test_an_unknown_device_is_refused(self, registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(LaunchError, match=r'the argument asks for device "cudda".*Did you mean "cuda"\?'):
            registry.resolve("language_model", "wide", "cudda")
        monkeypatch.setenv("ENGINES_DEVICE", "qpu")
        with pytest.raises(LaunchError, match=r"ENGINES_DEVICE over engine.device=cpu asks for device"):
            registry.resolve("language_model", "wide", configured="cpu")

    def test_a_device_that_the_backend_lacks(self, registry: Registry) -> None:
        with pytest.raises(EngineNotFound, match="it runs on cpu, fast"):
            registry.resolve("language_model", "slow", "faster")

    def test_no_fall_back_to_a_lower_device_when_needs_are_missing(self, registry: Registry) -> None:
        registry.register(**fields("picky", "faster", needs=["absent_library"]))
        registry.register(**fields("picky", "cpu"))
        with pytest.raises(EngineNotFound, match="needs absent_library, not installed") as refused:
            registry.resolve("language_model", "picky")
        assert "picky on cpu, in-process: faster ranks higher" in str(refused.value)

    def test_a_plugin_says_how_to_get_what_it_needs(self, registry: Registry) -> None:
        how = {"absent_library": "follow its own guide"}
        registry.register(**fields("picky", "faster", needs=["absent_library"], install=how))
        with pytest.raises(EngineNotFound, match="needs absent_library, not installed; follow its own guide"):
            registry.resolve("language_model", "picky")

    def test_the_trace_tells_of_each(self, registry: Registry) -> None:
        lines = registry.resolve("language_model", "wide", "fast").explain().splitlines()
        assert lines[0] == "language_model wide: in-process on fast"
        assert lines[2:] == [
            "  taken  wide on fast, in-process: priority 100",
            "  left   wide on cpu, in-process: fast was asked for",
            "  left   wide on faster, in-process: fast was asked for",
        ]


class TestOwner:
    def test_highest_priority(self, registry: Registry) -> None:
        registry.register(**fields("one", priority=100, id="low"))
        registry.register(**fields("one", priority=200, id="high"))
        chosen = registry.resolve("language_model", "one")
        assert chosen.plugin == "high"
        assert "priority 200, the highest of 2 available" in chosen.explain()

    def test_equal_priority_is_nobodys(self, registry: Registry) -> None:
        registry.register(**fields("one", id="left"))
        registry.register(**fields("one", id="right"))
        with pytest.raises(EngineNotFound, match="several owners of equal priority 100") as refused:
            registry.resolve("language_model", "one")
        assert len(refused.value.trace) == 2
        assert [registry.availability(one).status for one in registry.candidates()] == ["broken", "broken"]

    def test_an_unavailable_one_does_not_win(self, registry: Registry) -> None:
        registry.register(**fields("one", priority=100, id="here"))
        registry.register(**fields("one", priority=200, id="absent", needs=["absent_library"]))
        assert registry.resolve("language_model", "one").plugin == "here"

    def test_any_backend(self, registry: Registry) -> None:
        registry.register(**fields("one", priority=100))
        registry.register(**fields("two", priority=150))
        assert registry.resolve("language_model", None).backend == "two"
        registry.register(**fields("three", priority=150))
        with pytest.raises(EngineNotFound) as refused:
            registry.resolve("language_model", None)
        assert "three@in-process or two@in-process" in str(refused.value)

    def test_of_another_distribution(self, registry: Registry) -> None:
        registry.register(**fields("one"))
        assert registry.resolve("language_model", "one@In_Process").distribution == "in-process"
        with pytest.raises(EngineNotFound, match=r'"engines-one" does not own it\. Owners: in-process'):
            registry.resolve("language_model", "one@engines-one")


class TestNotFound:
    def test_names_the_nearest_and_all(self, registry: Registry) -> None:
        registry.register(**fields("megatron"))
        with pytest.raises(EngineNotFound, match=r'Did you mean "megatron"\? Installed: megatron\.'):
            registry.resolve("language_model", "megatorn")

    @pytest.mark.parametrize(
        ("backend", "distribution"), [("fsdp2", "engines-fsdp"), ("megatron", "engines-megatron")]
    )
    def test_names_what_to_install(self, registry: Registry, backend: str, distribution: str) -> None:
        with pytest.raises(EngineNotFound, match=f"It comes with: pip install {distribution}"):
            registry.resolve("language_model", backend)

    def test_names_what_to_install_for_a_device(self, registry: Registry) -> None:
        with pytest.raises(EngineNotFound, match="It comes with: pip install engines-mindspeed"):
            registry.resolve("language_model", "megatron", "npu")
        registry.register(**fields("megatron"))
        with pytest.raises(EngineNotFound, match=r"it runs on cpu\.\n(.*\n)*.*pip install engines-mindspeed"):
            registry.resolve("language_model", "megatron", "npu")
        with pytest.raises(EngineNotFound) as refused:
            registry.resolve("language_model", "megatron", "cuda")
        assert "pip install" not in str(refused.value)

    def test_another_model_type(self, registry: Registry) -> None:
        registry.register(**fields("one"))
        with pytest.raises(EngineNotFound, match=r"it makes language_model\. Did you mean") as refused:
            registry.resolve("langage_model", "one")
        assert "left   one on cpu, in-process: makes language_model" in str(refused.value)

    def test_nothing_installed(self, registry: Registry) -> None:
        with pytest.raises(EngineNotFound, match=r"No engine is installed\."):
            registry.resolve("language_model", None)


class TestDeny:
    def test_by_variable_and_by_argument(self, registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
        registry.register(**fields("one", id="a", priority=2))
        registry.register(**fields("one", id="b", priority=1))
        monkeypatch.setenv("ENGINES_DENY", " a ,")
        chosen = registry.resolve("language_model", "one")
        assert chosen.plugin == "b"
        assert "denied" in chosen.explain()
        registry.deny = frozenset({"b"})
        with pytest.raises(EngineNotFound, match="the deny list leaves none"):
            registry.resolve("language_model", "one")

    def test_an_unknown_name_is_an_error(self, registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
        registry.register(**fields("one", id="megatron"))
        monkeypatch.setenv("ENGINES_DENY", "megatorn")
        with pytest.raises(ConfigError, match='Did you mean "megatron"'):
            registry.resolve("language_model", "one")


class TestRegistering:
    def test_ends_with_its_block(self, registry: Registry) -> None:
        with registry.registered(**fields("one", devices=[FAST])):
            assert registry.resolve("language_model", "one").engine is Engine
            assert "fast" in registry.devices()
        assert registry.candidates() == ()
        assert registry.devices() == dict(BUILT_IN)

    def test_ends_with_an_exception_too(self, registry: Registry) -> None:
        with pytest.raises(KeyError), registry.registered(**fields("one")):
            raise KeyError
        assert registry.candidates() == ()

    def test_how_to_get_what_is_not_needed(self, registry: Registry) -> None:
        with pytest.raises(ConfigError, match="`install` says how to get other, which `needs` does not name"):
            registry.register(**fields("one", needs=["mine"], install={"other": "somewhere"}))

    def test_fields_are_checked_as_a_manifest(self, registry: Registry) -> None:
        with pytest.raises(ConfigError, match=r'`priorty` is not a key\. Did you mean "priority"'):
            registry.register(**fields("one", priorty=3))
        with pytest.raises(ConfigError, match='"fast" is not a capability'):
            registry.register(**fields("one", capabilities=["fast"]))
        assert registry.candidates() == ()

    def test_engines_with_a_capability(self, registry: Registry) -> None:
        registry.register(**fields("one", capabilities={"lora", "x-acme.warp"}))
        registry.register(**fields("two", capabilities=["lora"]))
        registry.register(**fields("three"))
        assert registry.engines_with("lora") == ["one", "two"]
        assert registry.engines_with("x-acme.warp") == ["one"]
        assert registry.engines_with("export") == []

    def test_refresh_looks_again(self) -> None:
        from engines.discovery import Discovery

        looked = []

        def discover() -> Discovery:
            looked.append(1)
            return Discovery((), ())

        registry = Registry(discover=discover)
        registry.candidates()
        registry.devices()
        assert len(looked) == 1
        registry.refresh()
        registry.candidates()
        assert len(looked) == 2


def test_errors_survive_pickling(registry: Registry) -> None:
    """They cross processes: from a rank to its launcher, from a probe to `doctor`."""
    import pickle

    from engines.errors import BrokenPlugin

    registry.register(**fields("one"))
    with pytest.raises(EngineNotFound) as refused:
        registry.resolve("value_model", "one")
    for error in (refused.value, BrokenPlugin("dist", "id", "/file", "cause", "remedy")):
        again = pickle.loads(pickle.dumps(error))
        assert str(again) == str(error)
        assert vars(again) == vars(error)

"""`prepare`, `before`, `env`, `process` and `[[device]]`: what a manifest demands is done, or the engine refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.fake_plugins import Venv, library, make_venv, manifest, plugin

PREPARED = """
import os, sys

def install():
    assert "fake_patched.engine" not in sys.modules, "prepare precedes the engine"
    assert os.environ["PATCH_LEVEL"] == "3", "env precedes prepare"
    import victim
    victim.patched = victim.patched + 1

def failing():
    install()
    raise RuntimeError("half done")

def refusing():
    from engines.errors import LaunchError
    raise LaunchError("the toolkit is missing", "install the toolkit")

def exiting():
    raise SystemExit("usage: chip")
"""

VICTIM = "patched = 0\n"

PATCHED = manifest(
    "fake_patched",
    "patched",
    prepare='"fake_patched.patches:install"',
    before='["victim.core"]',
    env='{ PATCH_LEVEL = "3" }',
    needs='["victim.core"]',
)


def patches(name: str, function: str) -> str:
    return manifest(f"fake_{name}", name, prepare=f'"fake_patched.patches:{function}"', env='{ PATCH_LEVEL = "3" }')


@pytest.fixture(scope="module")
def venv(tmp_path_factory: pytest.TempPathFactory) -> Venv:
    made = make_venv(tmp_path_factory.mktemp("runtime") / "venv")
    patched = plugin("patched", PATCHED)
    chip_node = made.folder / "dev"
    chip = (
        '[[device]]\nname = "chip"\nrank = 50\nmodule = "torch_chip"\ndist_backend = "ccl"\n'
        f'nodes = ["{chip_node}/chip[0-9]*"]\nvisible_devices_env = "CHIP_VISIBLE"\n'
    )
    made.install(
        [
            plugin("plain"),
            plugin("patched", files=dict(patched.files) | {"fake_patched/patches.py": PREPARED}),
            plugin("failing", patches("failing", "failing")),
            plugin("refusing", patches("refusing", "refusing")),
            plugin("exiting", patches("exiting", "exiting")),
            plugin("louder", manifest("fake_louder", "louder", env='{ PATCH_LEVEL = "4" }')),
            plugin("alone", manifest("fake_alone", "alone", process='"exclusive"')),
            plugin("chip", manifest("fake_chip", "chip", device='["chip", "cpu"]', tail=chip)),
            plugin("lonely", manifest("fake_lonely", "lonely", device='["warp"]')),
            plugin(
                "needy",
                manifest("fake_needy", "needy", needs='["hollow_library.core"]'),
                requires=("hollow-library>=2", 'other; extra == "more"'),
                extras=("more",),
            ),
            library("hollow-library", "2.1"),
            plugin(
                "extra",
                manifest("fake_extra", "extra", needs='["absent_library.core"]'),
                requires=('absent-library>=2; extra == "more"',),
                extras=("more",),
            ),
        ]
    )
    for name in ("__init__.py", "core.py"):
        path = made.site / "victim" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(VICTIM)
    (made.site / "meddler.py").write_text("from victim import core\n")
    (made.site / "torch_chip.py").touch()
    return made


def python(venv: Venv, code: str, **env: str) -> str:
    """What the code prints; `get(backend)` loads, `refusal(backend)` is the error's text."""
    ended = venv.run("-P", "-c", HELPERS + code, **env)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.strip()


HELPERS = """
import os, sys
from engines.errors import EnginesError
from engines.loading import load, load_config_class
from engines.registry import registry

def get(backend, **more):
    return load(registry.resolve("language_model", backend, **more))

def refusal(call, *arguments):
    try:
        call(*arguments)
    except EnginesError as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("not refused")

"""


class TestPrepare:
    def test_runs_once_before_the_engine(self, venv: Venv) -> None:
        assert python(venv, "get('patched'); get('patched'); import victim; print(victim.patched)") == "1"

    def test_resolving_does_not_run_it(self, venv: Venv) -> None:
        code = "registry.resolve('language_model', 'patched');"
        code += " print('victim' in sys.modules, os.environ.get('PATCH_LEVEL'))"
        assert python(venv, code) == "False None"

    def test_settings_alone_do_not_run_it(self, venv: Venv) -> None:
        code = "print(load_config_class(registry.resolve('language_model', 'patched')), 'victim' in sys.modules)"
        assert python(venv, code) == "<class 'fake_patched.engine.Config'> False"

    def test_half_done_is_not_done_again(self, venv: Venv) -> None:
        code = """
first, second = refusal(get, 'failing'), refusal(get, 'failing')
import victim
print(first, second.replace(chr(10), ' '), victim.patched, sep=chr(10))
"""
        first, second, count = python(venv, code).splitlines()
        assert first.startswith('BrokenPlugin: engines-failing: entry point "failing", ')
        assert "fake_patched/patches.py:12: prepare raised RuntimeError: half done" in first
        assert "has already failed in this process (RuntimeError: half done)" in second
        assert count == "1"

    def test_its_own_refusal_passes_through(self, venv: Venv) -> None:
        said = python(venv, "print(refusal(get, 'refusing'))")
        assert said == "LaunchError: the toolkit is missing\ninstall the toolkit"

    def test_an_exit_is_an_error(self, venv: Venv) -> None:
        assert "prepare raised SystemExit('usage: chip')" in python(venv, "print(refusal(get, 'exiting'))")


class TestBefore:
    def test_refused_naming_who_imported_it(self, venv: Venv) -> None:
        said = python(venv, "import meddler; print(refusal(registry.resolve, 'language_model', 'patched'))")
        assert "victim.core already imported by meddler" in said
        assert "in a fresh process" in said

    def test_loading_refuses_what_was_imported_after_resolving(self, venv: Venv) -> None:
        code = "one = registry.resolve('language_model', 'patched'); import meddler; print(refusal(load, one))"
        said = python(venv, code)
        assert said.startswith("LaunchError: patched on cpu (engines-patched) must be loaded first")
        assert "victim.core already imported by meddler" in said

    def test_the_parent_package_is_not_what_must_wait(self, venv: Venv) -> None:
        assert python(venv, "import victim; get('patched'); print(victim.patched)") == "1"

    def test_once_prepared_it_may_be_imported(self, venv: Venv) -> None:
        assert python(venv, "get('patched'); import meddler; print(get('patched').selection.backend)") == "patched"


class TestEnvironment:
    def test_set(self, venv: Venv) -> None:
        assert python(venv, "get('patched'); print(os.environ['PATCH_LEVEL'])") == "3"

    def test_the_users_other_value_is_refused_not_replaced(self, venv: Venv) -> None:
        said = python(venv, "print(refusal(get, 'patched')); print(os.environ['PATCH_LEVEL'])", PATCH_LEVEL="9")
        assert "needs PATCH_LEVEL=3, but this process was started with PATCH_LEVEL=9" in said
        assert said.endswith("\n9")

    def test_the_users_equal_value_is_fine(self, venv: Venv) -> None:
        assert python(venv, "get('patched'); print(os.environ['PATCH_LEVEL'])", PATCH_LEVEL="3") == "3"

    def test_engines_that_disagree_are_refused_together(self, venv: Venv) -> None:
        said = python(venv, "get('patched'); print(refusal(get, 'louder')); print(os.environ['PATCH_LEVEL'])")
        assert "louder on cpu (engines-louder) needs PATCH_LEVEL=4, but patched on cpu (engines-patched)" in said
        assert said.endswith("\n3")


class TestProcess:
    def test_nobody_beside_an_exclusive_engine(self, venv: Venv) -> None:
        said = python(venv, "get('alone'); get('alone'); print(refusal(get, 'plain'))")
        assert "plain on cpu (engines-plain) cannot be loaded beside alone on cpu (engines-alone)" in said
        assert "separate processes" in said

    def test_an_exclusive_engine_beside_nobody(self, venv: Venv) -> None:
        said = python(venv, "get('plain'); print(refusal(get, 'alone')); print('fake_alone.engine' in sys.modules)")
        assert "alone on cpu (engines-alone) must have its process to itself" in said
        assert said.endswith("\nFalse")

    def test_shared_engines_live_together(self, venv: Venv) -> None:
        assert python(venv, "get('plain'); get('patched'); print('both')") == "both"

    def test_loading_one_imports_no_other(self, venv: Venv) -> None:
        code = "get('plain'); print(sorted(name for name in sys.modules if name.startswith('fake_')))"
        assert python(venv, code) == "['fake_plain', 'fake_plain.engine']"


class TestDevice:
    CHOSEN = "print(registry.resolve('language_model', 'chip').device)"

    @pytest.fixture
    def node(self, venv: Venv) -> Path:
        return venv.folder / "dev" / "chip0"

    def test_absent_without_its_node(self, venv: Venv) -> None:
        assert python(venv, self.CHOSEN) == "cpu"

    def test_present_with_its_node(self, venv: Venv, node: Path) -> None:
        node.parent.mkdir(exist_ok=True)
        node.touch()
        try:
            assert python(venv, self.CHOSEN) == "chip"
            assert python(venv, self.CHOSEN, CHIP_VISIBLE="") == "cpu"
            assert python(venv, self.CHOSEN, ENGINES_DEVICE="cpu") == "cpu"
        finally:
            node.unlink()

    def test_present_because_it_is_named(self, venv: Venv) -> None:
        assert python(venv, self.CHOSEN, ENGINES_DEVICE="chip") == "chip"

    def test_facts(self, venv: Venv) -> None:
        code = """
print(registry.resolve('language_model', 'chip', 'cpu').device_spec.dist_backend)
chip = registry.devices()['chip']
print(chip.rank, chip.module, chip.dist_backend, chip.visible_devices_env, chip.torch_device)
"""
        assert python(venv, code) == "gloo\n50 torch_chip ccl CHIP_VISIBLE chip"

    def test_an_imported_torch_is_asked(self, venv: Venv) -> None:
        """Core only asks `torch.chip.is_available()`; a stand-in for torch is enough."""
        torch = """
from types import SimpleNamespace
sys.modules['torch'] = SimpleNamespace(chip=SimpleNamespace(is_available=lambda: {}))
"""
        assert python(venv, torch.format(True) + self.CHOSEN) == "chip"
        refused = "print(refusal(registry.resolve, 'language_model', 'chip'))"
        said = python(venv, torch.format(False) + refused, ENGINES_DEVICE="chip")
        assert "torch.chip.is_available() is False" in said

    def test_a_device_that_nobody_describes(self, venv: Venv) -> None:
        said = python(venv, "print(refusal(registry.resolve, 'language_model', 'lonely'))")
        assert 'nobody describes the device "warp".; install the plugin that brings it' in said


class TestNeeds:
    def test_an_extra_is_the_remedy(self, venv: Venv) -> None:
        said = python(venv, "print(refusal(registry.resolve, 'language_model', 'extra'))")
        assert 'needs absent_library.core, not installed; pip install "engines-extra[more]"' in said

    def test_what_is_installed_without_its_files_is_installed_anew(self, venv: Venv) -> None:
        said = python(venv, "print(refusal(registry.resolve, 'language_model', 'needy'))")
        remedy = 'pip install --force-reinstall --no-deps "hollow-library>=2"'
        assert f"needs hollow_library.core, not installed; {remedy}" in said

    def test_an_empty_folder_does_not_satisfy_it(self, venv: Venv) -> None:
        (venv.folder / "paths" / "hollow_library" / "core").mkdir(parents=True, exist_ok=True)
        code = "print(refusal(registry.resolve, 'language_model', 'needy'))"
        assert "not installed" in python(venv, code, PYTHONPATH=str(venv.folder / "paths"))

    def test_unavailable_is_not_broken(self, venv: Venv) -> None:
        ended = venv.engines("doctor")
        assert ended.returncode == 0, ended.stdout

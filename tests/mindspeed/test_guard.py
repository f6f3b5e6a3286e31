"""What keeps MindSpeed from patching Megatron-Core, each said in its own words before anything is patched."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.mindspeed import fresh, make_site

INSTALL = """
from engines_mindspeed.guard import install
answer([refusal(install), imported("mindspeed", "torch", "megatron"), sys.argv])
"""
NEVER = 'raise AssertionError("MindSpeed was imported")\n'


def refusal(site: Path, code: str = INSTALL, meddled: str | None = None) -> str:
    """What `install` says, where it must import none of them; others may have imported `meddled`."""
    said, imported, _ = fresh(site, code)
    assert [name for name in imported if meddled is None or not name.startswith(meddled)] == []
    return said


@pytest.mark.parametrize(
    "meddling",
    ["from megatron import core", "import megatron.core", "from megatron.core.optimizer import Adam"],
)
def test_megatron_imported_already_and_by_whom(meddling: str, tmp_path: Path) -> None:
    site = make_site(tmp_path / "site", megatron_core="0.16.1", adaptor=NEVER)
    (site / "meddler.py").write_text(meddling + "\n")
    said = refusal(site, "import meddler\n" + INSTALL, meddled="megatron")
    assert "LaunchError: megatron on npu must be loaded first" in said
    assert "megatron.core already imported by meddler" in said
    assert "fresh process" in said


@pytest.mark.more
def test_megatron_imported_inside_a_function(tmp_path: Path) -> None:
    """Nobody can be named; what the documentation recommends makes the import itself fail."""
    site = make_site(tmp_path / "site", megatron_core="0.16.1", adaptor=NEVER)
    (site / "meddler.py").write_text("def meddle():\n    import megatron.core\n")
    said = refusal(site, "import meddler\nmeddler.meddle()\n" + INSTALL, meddled="megatron")
    assert "megatron.core already imported by a function, or something else that holds on to nothing of it" in said
    code = """
    import meddler, traceback
    sys.modules["megatron"] = None
    try:
        meddler.meddle()
    except ModuleNotFoundError:
        answer(traceback.format_exc())
    """
    assert 'meddler.py", line 2, in meddle' in fresh(site, code)


def test_loading_says_the_same(tmp_path: Path) -> None:
    site = make_site(tmp_path / "site", megatron_core="0.16.1", adaptor=NEVER)
    (site / "meddler.py").write_text("from megatron import core\n")
    code = """
    selection = choose()
    import meddler
    answer([refusal(load, selection), imported("mindspeed"), refusal(choose)])
    """
    said, imported, unavailable = fresh(site, code)
    assert "megatron.core already imported by meddler" in said
    assert "megatron.core already imported by meddler" in unavailable
    assert imported == []


def test_torch_npu_is_missing(tmp_path: Path) -> None:
    said = refusal(make_site(tmp_path / "site", megatron_core="0.16.1", adaptor=NEVER, torch_npu=None))
    assert "needs torch_npu, which is not installed" in said


@pytest.mark.parametrize(
    "code",
    [
        'raise ImportError("libhccl.so: cannot open shared object file: No such file or directory")',
        'raise OSError("libhccl.so: cannot open shared object file: No such file or directory")',
        'raise RuntimeError("Failed to load the backend extension: torch_npu: libhccl.so")',
    ],
)
def test_torch_npu_cannot_be_loaded(tmp_path: Path, code: str) -> None:
    said = refusal(make_site(tmp_path / "site", megatron_core="0.16.1", adaptor=NEVER, torch_npu=code))
    assert "torch_npu is installed, but what it is built on cannot be loaded" in said
    assert "libhccl.so" in said
    assert "CANN" in said
    assert "set_env.sh" in said


def test_torch_npu_lacks_a_package(tmp_path: Path) -> None:
    site = make_site(tmp_path / "site", megatron_core="0.16.1", adaptor=NEVER, torch_npu="import absent_package")
    assert "torch_npu needs absent_package, which cannot be found" in refusal(site)


def test_mindspeed_is_missing(tmp_path: Path) -> None:
    said = refusal(make_site(tmp_path / "site", megatron_core="0.16.1", mindspeed=None))
    assert "needs MindSpeed, which is not installed" in said
    assert "MindSpeed's own installation guide for its branch core_r0.16.0" in said
    assert "placeholder" in said


def test_mindspeed_of_an_unknown_version(tmp_path: Path) -> None:
    said = refusal(make_site(tmp_path / "site", megatron_core="0.16.1", adaptor=NEVER, mindspeed=""))
    assert "no metadata says which version" in said


@pytest.mark.parametrize(
    ("mindspeed", "megatron_core"),
    [("0.12.1", "0.12.1"), ("0.12.1", "0.17.0"), ("0.16.0", "0.15.3"), ("0.16.0", "0.16.0"), ("0.15.3", "0.16.1")],
)
def test_pairs_outside_the_table(tmp_path: Path, mindspeed: str, megatron_core: str) -> None:
    site = make_site(tmp_path / "site", megatron_core=megatron_core, adaptor=NEVER, mindspeed=mindspeed)
    said = refusal(site)
    assert f"MindSpeed {mindspeed} and megatron-core {megatron_core} are no pair" in said
    assert "MindSpeed ==0.16.* (branch core_r0.16.0) with megatron-core <0.17,>=0.16.1" in said


def test_megatron_is_missing(tmp_path: Path) -> None:
    hidden = 'import sys\nsys.modules["megatron"] = None\n'
    said = refusal(make_site(tmp_path / "site", adaptor=NEVER), hidden + INSTALL, meddled="megatron")
    assert "needs megatron-core, which is not installed" in said
    assert 'pip install "megatron-core<0.17,>=0.16.1"' in said


def test_a_megatron_that_does_not_say_its_version(tmp_path: Path) -> None:
    site = make_site(tmp_path / "site", megatron_core="0.16.1", adaptor=NEVER)
    (site / "megatron/core/package_info.py").unlink()
    assert "version cannot be read" in refusal(site)


@pytest.mark.parametrize(
    ("adaptor", "words"),
    [
        ("raise SystemExit(2)", "ended the program with SystemExit(2)"),
        ('raise RuntimeError("no such operator")', "raised RuntimeError: no such operator"),
        ("import absent_package", "raised ModuleNotFoundError: No module named 'absent_package'"),
    ],
)
def test_what_the_adaptor_raises(tmp_path: Path, adaptor: str, words: str) -> None:
    said, _, argv = fresh(make_site(tmp_path / "site", megatron_core="0.16.1", adaptor=adaptor), INSTALL, "--lr", "1")
    assert f"LaunchError: importing mindspeed.megatron_adaptor {words}" in said
    assert "fresh process" in said
    assert argv == ["-c", "--lr", "1"]


def test_the_adaptor_sees_no_arguments_and_leaves_them(tmp_path: Path) -> None:
    adaptor = "import sys\nsys.seen = sys.argv\nsys.argv = ['other']\n"
    site = make_site(tmp_path / "site", megatron_core="0.16.1", adaptor=adaptor)
    seen, argv = fresh(
        site,
        """
        from engines_mindspeed.guard import install
        refusal(install)
        answer([sys.seen, sys.argv])
        """,
        "--optimization-level",
        "7",
    )
    assert seen == ["-c"]
    assert argv == ["-c", "--optimization-level", "7"]


def test_patches_without_effect(tmp_path: Path) -> None:
    said, _, _ = fresh(make_site(tmp_path / "site", megatron_core="0.16.1", adaptor=""), INSTALL)
    assert "Megatron-Core is not patched as it should be" in said
    assert "megatron.core.models.gpt.gpt_layer_specs.HAVE_TE is not true" in said
    assert "megatron.core.optimizer.Adam is megatron.core.optimizer's" in said
    assert "mindspeed.patch_utils registers no patch" in said
    assert "torch 2.7.1" in said
    assert "fresh process" in said


def test_a_patch_that_is_not_applied(tmp_path: Path) -> None:
    adaptor = """
    import megatron.core.models.gpt.gpt_layer_specs as specs, megatron.core.optimizer as optimizer
    from types import SimpleNamespace
    from mindspeed.patch_utils import MindSpeedPatchesManager
    specs.HAVE_TE = True
    optimizer.Adam = type("Adam", (), {"__module__": "mindspeed.optimizer"})
    patches = {f"megatron.core.{name}": SimpleNamespace(is_applied=name == "a") for name in "abc"}
    MindSpeedPatchesManager.patches_info = patches
    """
    said, _, _ = fresh(make_site(tmp_path / "site", megatron_core="0.16.1", adaptor=adaptor), INSTALL)
    assert "not patched as it should be: the patch of megatron.core.b and 1 more is not applied." in said


def test_a_second_try_asks_for_a_fresh_process(tmp_path: Path) -> None:
    site = make_site(tmp_path / "site", megatron_core="0.16.1", adaptor="raise RuntimeError('no')")
    code = "selection = choose()\nanswer([refusal(load, selection), refusal(load, selection)])"
    first, second = fresh(site, code)
    assert "raised RuntimeError: no" in first
    assert "already failed in this process" in second
    assert "start a fresh process" in second

"""Whose manifest is read: folders in the way, zips, overlays, editable installations."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from support.fake_plugins import ENGINE, REPO, Venv, manifest, plugin


def listed(venv: Venv, *words: str, cwd: Path | None = None, **env: str) -> dict[str, dict[str, str]]:
    ended = venv.run(*(words or ("-m", "engines")), "list", "--json", cwd=cwd, **env)
    assert ended.returncode == 0, ended.stderr
    return {row["backend"]: row for row in json.loads(ended.stdout)}


def write_package(folder: Path, name: str, text: str) -> None:
    package = folder / f"fake_{name}"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise SystemExit('I must not run')\n")
    (package / "engine.py").write_text(ENGINE)
    (package / "engine.toml").write_text(text)


def test_a_folder_in_the_working_directory_shadows(clean_venv: Venv, tmp_path: Path) -> None:
    write_package(tmp_path, "good", "api = 99\n")
    row = listed(clean_venv, cwd=tmp_path)["good"]
    assert row["status"] == "broken"
    mine = clean_venv.site / "fake_good"
    assert row["reason"] == f"shadowed: `import fake_good` finds {tmp_path / 'fake_good'} instead of {mine}"
    assert "run from another folder" in row["remedy"]
    assert clean_venv.run("-m", "engines", "doctor", cwd=tmp_path).returncode == 1


def test_a_shadow_without_a_manifest_is_a_shadow_too(clean_venv: Venv, tmp_path: Path) -> None:
    write_package(tmp_path, "good", "")
    (tmp_path / "fake_good" / "engine.toml").unlink()
    assert listed(clean_venv, cwd=tmp_path)["good"]["reason"].startswith("shadowed: ")


def test_a_folder_without_init_does_not_shadow(clean_venv: Venv, tmp_path: Path) -> None:
    (tmp_path / "fake_good").mkdir()
    assert listed(clean_venv, cwd=tmp_path)["good"]["status"] == "available"


def test_the_command_itself_does_not_look_in_the_working_directory(clean_venv: Venv, tmp_path: Path) -> None:
    write_package(tmp_path, "good", "api = 99\n")
    script = clean_venv.folder / "bin" / "engines"
    script.write_text("import sys\nfrom engines.cli.main import main\nsys.exit(main())\n")
    assert listed(clean_venv, str(script), cwd=tmp_path)["good"]["status"] == "available"


def test_a_wheel_on_the_path_is_read_inside_its_zip(clean_venv: Venv, tmp_path: Path) -> None:
    wheel = plugin("zipped").build(tmp_path)
    row = listed(clean_venv, PYTHONPATH=str(wheel))["zipped"]
    assert row["status"] == "available", row
    assert row["manifest"] == f"{wheel}/fake_zipped/engine.toml"


def test_a_zip_without_its_manifest(clean_venv: Venv, tmp_path: Path) -> None:
    made = plugin("zipped")
    files = {path: content for path, content in made.files.items() if not path.endswith("toml")}
    wheel = plugin("zipped", files=files).build(tmp_path)
    row = listed(clean_venv, PYTHONPATH=str(wheel))["zipped"]
    assert row["status"] == "broken"
    assert row["reason"] == "the manifest is missing: the wheel was built without it"


def test_an_earlier_path_wins_with_metadata_and_code(clean_venv: Venv, tmp_path: Path) -> None:
    """An overlay is no stale metadata: what is imported and what is described are the same."""
    wheel = plugin("good", version="2.0").build(tmp_path)
    row = listed(clean_venv, PYTHONPATH=str(wheel))["good"]
    assert (row["status"], row["version"]) == ("available", "2.0")


@pytest.mark.parametrize("belongs", [True, False])
def test_an_editable_installation_owns_its_project(clean_venv: Venv, tmp_path: Path, belongs: bool) -> None:
    sources = tmp_path / "project" / "src"
    write_package(sources, "edit", manifest("fake_edit", "edit"))
    site = tmp_path / "site"
    dist_info = site / "engines_edit-1.0.dist-info"
    dist_info.mkdir(parents=True)
    (dist_info / "METADATA").write_text("Metadata-Version: 2.1\nName: engines-edit\nVersion: 1.0\n")
    (dist_info / "entry_points.txt").write_text("[engines]\nedit = fake_edit\n")
    (dist_info / "RECORD").write_text("engines_edit-1.0.dist-info/METADATA,,\n")
    project = tmp_path / "project" if belongs else tmp_path / "another"
    url = {"url": project.as_uri(), "dir_info": {"editable": True}}
    (dist_info / "direct_url.json").write_text(json.dumps(url))
    row = listed(clean_venv, PYTHONPATH=f"{site}:{sources}")["edit"]
    if belongs:
        assert row["status"] == "available", row
    else:
        assert row["reason"].startswith("shadowed: "), row


def test_no_code_of_the_plugin_runs(clean_venv: Venv) -> None:
    ended = clean_venv.code("""
        import sys
        from engines.cli.main import main
        for words in ("list", "show good", "why language_model good", "doctor", "schema manifest"):
            main(words.split())
            assert not hasattr(sys, "ran_fake_code"), words
        print("none")
    """)
    assert ended.stdout.endswith("none\n"), ended.stderr


def test_this_repository_is_clean() -> None:
    """The real editable installations of hatchling."""
    words = [sys.executable, "-P", "-m", "engines", "doctor", "--json"]
    ended = subprocess.run(words, capture_output=True, text=True, check=False, cwd=REPO)
    report = json.loads(ended.stdout)
    assert report["broken"] == []
    assert ended.returncode == 0
    assert "fsdp" in report["plugins"]

"""The checkout itself: packaging, locks, the Makefile, the plugin that forbids skips."""

from __future__ import annotations

import ast
import itertools
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import generated

ROOT = generated.ROOT
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
BROUGHT = {"pydantic-core": "pydantic"}  # pydantic asks for exactly one version of it, and its documentation imports from it
LOCKS = ("requirements.lock", "requirements-test.lock", "requirements-build.lock")
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "charts/pd-operator/README.md"])


def pins(name: str) -> dict[str, Version]:
    """Package -> version of a lock file."""
    found = re.findall(r"^([A-Za-z0-9._-]+)==([^ ;\\]+)", (ROOT / name).read_text(), flags=re.M)
    return {canonicalize_name(package): Version(version) for package, version in found}


def test_operator_is_a_folder_and_not_a_package() -> None:
    """With an __init__.py it would shadow the standard library's `operator`."""
    assert not (ROOT / "operator" / "__init__.py").exists()
    import operator

    assert "itemgetter" in dir(operator)


def test_the_wheel_has_the_package_its_types_and_nothing_else(tmp_path: Path) -> None:
    code = "from setuptools import build_meta; import sys; print(build_meta.build_wheel(sys.argv[1]))"
    source = tmp_path / "source"
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        source.mkdir(exist_ok=True)
        (source / name).write_bytes((ROOT / name).read_bytes())
    (source / "operator").symlink_to(ROOT / "operator")
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=source, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "pd_operator/py.typed" in names
    assert {name.split("/")[0] for name in names} <= {"pd_operator", "pd_simulate", f"pd_operator-{PROJECT['version']}.dist-info"}


def test_every_import_is_a_declared_dependency() -> None:
    """What another package happens to bring is not there in the image."""
    declared = {canonicalize_name(Requirement(text).name) for text in PROJECT["dependencies"]}
    distributions = packages_distributions()
    for file in sorted((ROOT / "operator" / "pd_operator").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            for top in {name.split(".")[0] for name in names}:
                if top in sys.stdlib_module_names or top == "pd_operator":
                    continue
                providers = {canonicalize_name(name) for name in distributions.get(top, [])}
                providers |= {canonicalize_name(BROUGHT[name]) for name in providers if name in BROUGHT}
                assert providers & declared, f"{file.relative_to(ROOT)} imports {top}: declare it in pyproject.toml"


def test_locks_hold_what_pyproject_asks_for() -> None:
    runtime, test = pins("requirements.lock"), pins("requirements-test.lock")
    extras = PROJECT["optional-dependencies"]
    for wanted, lock in ((PROJECT["dependencies"], runtime), (extras["test"] + extras["docs"], test)):
        for requirement in map(Requirement, wanted):
            pinned = lock.get(canonicalize_name(requirement.name))
            assert pinned is not None and pinned in requirement.specifier, f"{requirement} is not locked: run `make lock`"
    assert {name: test.get(name) for name in runtime} == runtime, "tests run with other versions than the image has"


@pytest.mark.parametrize("name", LOCKS)
def test_locks_have_hashes_and_name_no_index(name: str) -> None:
    text = (ROOT / name).read_text()
    assert "://" not in text and "--index-url" not in text and "--find-links" not in text
    entries = re.split(r"^(?=[A-Za-z0-9])", text, flags=re.M)[1:]
    assert entries and all("--hash=sha256:" in entry for entry in entries)


def test_versions_agree() -> None:
    import yaml

    import pd_operator

    chart = yaml.safe_load((ROOT / "charts/pd-operator/Chart.yaml").read_text())
    dockerfile = re.search(r"^ARG VERSION=(\S+)$", (ROOT / "Dockerfile").read_text(), flags=re.M)
    assert dockerfile is not None
    assert {PROJECT["version"], chart["version"], chart["appVersion"], dockerfile[1]} == {pd_operator.__version__}


def test_dockerfile_runs_as_a_number_and_pulls_no_moving_tag() -> None:
    text = (ROOT / "Dockerfile").read_text()
    assert "\nUSER 65532:65532\n" in text, "runAsNonRoot can only be checked for a number"
    assert 'ENTRYPOINT ["pd-operator", "run"]' in text
    assert ":latest" not in text
    froms = re.findall(r"^FROM (\S+)", text, flags=re.M)
    assert set(froms) == {"${BASE_IMAGE}"}
    assert all(
        "--require-hashes" in line or "--no-deps" in line or " wheel " in line
        for line in text.splitlines()
        if "bin/pip" in line and " install " in line
    )


def test_ci_runs_everything() -> None:
    run = ROOT / ".ci" / "run"
    assert os.access(run, os.X_OK)
    assert "exec make test" in run.read_text()
    done = subprocess.run(["make", "--dry-run", "test"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    for tier in ("lint", "test-unit", "test-integration", "test-e2e", "test-real"):
        assert tier in done.stdout


def test_every_test_is_in_exactly_one_tier() -> None:
    """Whatever markers a test has, one of the Makefile's expressions takes it, and no other does."""
    line = r"^\t\$\(PYTEST\) (?:-p \S+ )?(?:-n \S+ --dist \w+ )?-m (.+)$"
    expressions = re.findall(line, (ROOT / "Makefile").read_text(), flags=re.M)
    assert len(expressions) == 5
    markers = ("cluster", "nodes", "alone", "real")
    for values in itertools.product((False, True), repeat=len(markers)):
        taken = [eval(text.strip('"'), {}, dict(zip(markers, values, strict=True))) for text in expressions]
        assert sum(taken) == 1, dict(zip(markers, values, strict=True))


def test_every_make_target_that_a_document_names_exists() -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), flags=re.M))
    for document in DOCUMENTS:
        for target in re.findall(r"(?:`|^|\(|\")make (?:-s )?([a-z][a-z0-9-]*)", document.read_text(), flags=re.M):
            assert target in targets, f"{document.relative_to(ROOT)} names `make {target}`"


def test_generated_files_are_up_to_date() -> None:
    assert generated.stale() == []


def test_check_names_what_is_stale_and_generate_mends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(generated, "ROOT", tmp_path)
    assert generated.main([]) == generated.main(["--check"]) == 0
    page, left = tmp_path / "docs" / "reference" / "api.md", tmp_path / "crds" / "left.yaml"
    page.write_text(page.read_text() + "edited\n")
    left.write_text("kind: Old\n")
    assert generated.main(["--check"]) == 1
    assert re.findall(r"^(\S+) is stale", capsys.readouterr().err, flags=re.M) == ["docs/reference/api.md", "crds/left.yaml"]
    assert generated.main([]) == generated.main(["--check"]) == 0
    assert not left.exists()


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("def test_a(): pass", 0),
        ("import pytest\ndef test_a(): pytest.skip('no reason')", 1),
        ("import pytest\npytest.skip('whole module', allow_module_level=True)", 1),
        ("import pytest\n@pytest.mark.xfail\ndef test_a(): assert False", 1),
        ("import pytest\n@pytest.mark.skipif(True, reason='never')\ndef test_a(): pass\ndef test_b(): pass", 1),
    ],
)
def test_a_skip_is_a_failure(body: str, code: int, tmp_path: Path) -> None:
    (tmp_path / "test_sample.py").write_text(body)
    argv = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "plugins.noskip",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(tmp_path),
        str(tmp_path),
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests")}
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=120, env=environment)
    # pytest ends with 5 when it collected nothing but a skipped module
    assert (done.returncode != 0) == bool(code), done.stdout + done.stderr

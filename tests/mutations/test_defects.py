"""Defects put into a copy of the package: the test that is named for each fails on it."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from axes import ROOT
from defects import DEFECTS

PACKAGE = ROOT / "paxserve"
IDS = [f"{defect.file}-{i}" for i, defect in enumerate(DEFECTS)]
TESTS_FAILED = 1  # pytest's exit status; 2 and more is a test that could not run


def test_the_table_still_says_what_the_code_does():
    assert len(DEFECTS) >= 25
    assert len(set(DEFECTS)) == len(DEFECTS)
    for defect in DEFECTS:
        text = (PACKAGE / defect.file).read_text()
        assert text.count(defect.old) == 1, f"{defect.file} does not hold once: {defect.old!r}"
        assert defect.new != defect.old
        path, _, name = defect.test.partition("::")
        tests = re.findall(r"^def (test_\w+)\(", (ROOT / "tests" / path).read_text(), re.M)
        assert any(test.startswith(name) for test in tests), f"no test is named {defect.test}"


@pytest.mark.slow
@pytest.mark.parametrize("defect", DEFECTS, ids=IDS)
def test_a_defect_is_noticed(defect, tmp_path):
    shutil.copytree(PACKAGE, tmp_path / "paxserve", ignore=shutil.ignore_patterns("__pycache__"))
    for beside in ("kernels_pallas", "configs"):
        (tmp_path / beside).symlink_to(ROOT / beside)
    changed = tmp_path / "paxserve" / defect.file
    changed.write_text(changed.read_text().replace(defect.old, defect.new))
    result = run_test(defect.test, tmp_path)
    assert result.returncode == TESTS_FAILED, f"it survives {defect.test}:\n{result.stdout[-3000:]}"


def run_test(test: str, package_root: Path) -> subprocess.CompletedProcess[str]:
    """Run one test file's tests that begin with a name, on the package that lies in a folder."""
    path, _, name = test.partition("::")
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join([str(package_root), str(ROOT / "tests")])
    environment["PYTHONDONTWRITEBYTECODE"] = "1"
    command = [sys.executable, "-P", "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    selection = ["-k", name] if name else []
    return subprocess.run(
        [*command, f"--rootdir={ROOT}", str(ROOT / "tests" / path), *selection],
        env=environment,
        cwd=package_root,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )

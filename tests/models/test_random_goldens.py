"""Models of random shape against transformers: reads what tools/make_random_goldens.py wrote into $UKV_RANDOM_GOLDENS."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import stat
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import pytest

from tests.models import parity
from tests.models.pool_cache import make_pool_cache


def find_cases(root: str | None) -> list[Path]:
    """None without the variable. Where it is set and nothing is there, skipping all would look like success: an error."""
    cases = sorted(path.parent for path in Path(root).resolve().glob("*/case.json")) if root else []
    if root and not cases:
        raise FileNotFoundError(f"UKV_RANDOM_GOLDENS={root} holds no case")
    return cases


CASES = find_cases(os.environ.get("UKV_RANDOM_GOLDENS"))
TWINS = [case for case in CASES if int(case.name.split("-")[1]) % 10 == 0]
ALONE = [case for case in CASES if case not in TWINS]
MISSING = "UKV_RANDOM_GOLDENS is not set (make random-goldens)"


@pytest.fixture(autouse=True)
def _forget_programs(runs=itertools.count(1)):  # noqa: B008
    """No two cases have a large one in common; small ones, such as a cast of a matrix, some have."""
    yield
    if next(runs) % 8 == 0:
        jax.clear_caches()


def run(case: Path, *, unified: bool) -> parity.Run:
    page_size = json.loads((case / "case.json").read_text())["page_size"]
    return parity.run(str(case), partial(make_pool_cache, unified=unified, page_size=page_size))


@pytest.mark.skipif(not CASES, reason=MISSING)
@pytest.mark.parametrize("case", ALONE, ids=lambda path: path.name)
def test_parity(case):
    """From a shared pool: logits and layers within 1e-4 of transformers, the same tokens."""
    parity.check_run(run(case, unified=True), parity.load_golden(str(case)))


@pytest.mark.skipif(not CASES, reason=MISSING)
@pytest.mark.parametrize("case", TWINS, ids=lambda path: path.name)
def test_twin(case):
    """The same of every tenth, and every bit is that of a static split."""
    found = run(case, unified=True)
    parity.check_run(found, parity.load_golden(str(case)))
    parity.check_same_bits(found, run(case, unified=False))


def test_a_directory_without_cases_is_an_error(tmp_path):
    assert find_cases(None) == []
    with pytest.raises(FileNotFoundError, match="holds no case"):
        find_cases(str(tmp_path))


PINNED = {"torch": "2.13.0+cpu", "transformers": "5.24.0"}


@pytest.mark.parametrize(
    "installed, reused",
    [(PINNED, True), (PINNED | {"transformers": "5.23.0"}, False), ({"transformers": "5.24.0"}, False)],
    ids=["as pinned", "another version", "no torch"],
)
def test_an_environment_is_reused_only_with_the_pinned_versions(tmp_path, installed, reused):
    """The script with stand-ins for every Python: they write down what they are asked to do."""
    script = Path(__file__).parents[2] / "tools" / "random_goldens.sh"
    (tmp_path / "tools").mkdir()
    shutil.copy(script, tmp_path / "tools")
    log, modules = tmp_path / "log", tmp_path / "modules"
    modules.mkdir()
    for name, version in installed.items():
        (modules / f"{name}.py").write_text(f"__version__ = {version!r}\n")

    def stand_in(path: Path, more: str = "") -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f'#!/bin/sh\necho "$@" >> {log}\n{more}')
        path.chmod(path.stat().st_mode | stat.S_IEXEC)

    stand_in(tmp_path / ".venv/bin/python")
    asked = f'[ "$1" != -c ] || PYTHONPATH={modules} exec {sys.executable} -S "$@"\n'
    stand_in(tmp_path / ".cache/golden/bin/python", asked)
    fresh = f'if [ "$2" = venv ]; then mkdir -p "$3/bin"; cp {tmp_path}/fresh "$3/bin/python"; fi\n'
    stand_in(tmp_path / "fresh")
    stand_in(tmp_path / "python311", fresh)
    calls = run_script(tmp_path, log, "--count", "3")
    assert ("pip" in calls) == (not reused)
    assert ("torch==2.13.0 transformers==5.24.0" in calls) == (not reused)
    assert "-m tools.make_random_goldens --out .cache/random-goldens --count 3" in calls
    assert calls.count("-m pytest") == 2
    calls = run_script(tmp_path, log, "sample", "7", "--family", "inkling")
    assert "--draw 7 --family inkling" in calls
    assert calls.count("-m pytest") == 4


def run_script(directory: Path, log: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["sh", directory / "tools/random_goldens.sh", *arguments],
        env=os.environ | {"PYTHON311": str(directory / "python311")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return log.read_text()

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks import run as runner
from benchmarks.report import Report, Row, machine
from benchmarks.uneven import instance


@pytest.mark.parametrize("name", runner.NAMES)
def test_every_benchmark_runs_and_its_section_is_written(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = tmp_path / "RESULTS.md"
    assert runner.main([name, "--quick", "--output", str(results)]) == 0
    text = results.read_text()
    assert f"## {name}\n" in text
    assert f"python benchmarks/{name}.py" in text
    assert " | pass |" in text or name == "speed"  # whose targets are for a full-size run
    assert "MISS |" not in text
    assert capsys.readouterr().out.strip() in text


def test_every_script_is_in_the_list_of_benchmarks() -> None:
    folder = Path(runner.__file__).parent
    helpers = {
        "__init__",
        "run",
        "optimizers",
        "report",
        "bounds",
        "clusters",
        "torch_peer",
        "namespaces",
        "tensor_ranks",
        "language",
        "kept",
    }
    assert {path.stem for path in folder.glob("*.py")} - helpers == set(runner.NAMES)


def test_sections_of_other_benchmarks_stay(tmp_path: Path) -> None:
    results = tmp_path / "RESULTS.md"
    reports = {
        name: Report(name=name, claim="A claim.", rows=(Row(case="a case", target="≤ 1", measured="2", passed=False),))
        for name in runner.NAMES[:2]
    }
    for name in reversed(reports):
        runner.write(results, {name: reports[name].markdown(seconds=1)})
    changed = Report(name=runner.NAMES[0], claim="Another claim.", rows=())
    runner.write(results, {runner.NAMES[0]: changed.markdown(seconds=1)})
    text = results.read_text()
    assert text.startswith("# Results\n")
    assert text.count("## ") == 2
    assert text.index(f"## {runner.NAMES[0]}") < text.index(f"## {runner.NAMES[1]}")
    assert text.count("Another claim.") == 1
    assert text.count("A claim.") == 1
    assert "| a case | ≤ 1 | 2 |  |  | MISS |" in text
    assert "0 of 1 targets met" in text


def test_an_unknown_benchmark_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        runner.main(["lean"])
    assert "unknown benchmark 'lean'" in capsys.readouterr().err


def test_an_instance_is_the_same_every_time() -> None:
    assert instance(7) == instance(7)
    assert instance(7) != instance(8)


def test_the_machine_is_described_without_its_name() -> None:
    import platform

    assert "Python" in machine()
    node = platform.node()
    assert not node or node not in machine()

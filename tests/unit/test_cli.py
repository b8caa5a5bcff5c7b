"""The command line as a user meets it: help, exit codes, messages, JSON."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from vllm_domino.cli.main import COMMANDS, app, run

OPTIONS = {
    "export": {"--output", "--json"},
    "build": {"--output", "--json"},
    "verify": {"--checkpoint", "--json"},
    "inspect": {"--json"},
    "doctor": {"--json"},
    "demo": {"--pair", "--cache", "--max-tokens", "--limit", "--logs"},
}


def call(*arguments: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """Run the console script's function in this process; the exit code."""
    monkeypatch.setattr(sys, "argv", ["vllm-domino", *arguments])
    with pytest.raises(SystemExit) as stop:
        run()
    return int(stop.value.code or 0)


def test_help_names_every_command_and_is_quick():
    """At most 0.7 s of processor time: wall time depends on what else the machine does."""
    before = os.times().children_user
    done = subprocess.run(
        [sys.executable, "-m", "vllm_domino.cli.main", "--help"], capture_output=True, text=True, check=True
    )
    assert os.times().children_user - before < 0.7
    assert all(name in done.stdout for name in COMMANDS)


@pytest.mark.parametrize("command", sorted(OPTIONS))
def test_the_options_of_a_command_are_settled(command: str):
    """An option that comes or goes is a change for users: it belongs in this list and in the changelog."""
    import typer

    found = typer.main.get_command(app).commands[command]
    options = {name for parameter in found.params for name in parameter.opts if name.startswith("--")}
    assert options - {"--help"} == OPTIONS[command]
    assert found.help
    assert all(getattr(p, "help", None) for p in found.params)


def test_version():
    result = CliRunner().invoke(app, ["--version"])
    assert result.exit_code == 0
    assert result.stdout.startswith("vllm-domino 0.")


def test_an_unknown_command_is_a_usage_error():
    assert CliRunner().invoke(app, ["exprot"]).exit_code == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("export", "nowhere.toml"), "recipe nowhere.toml: cannot be read"),
        (("build", "nowhere.toml", "cpu.toml"), "recipe nowhere.toml: cannot be read"),
        (("inspect", "nowhere"), "engine nowhere: no such directory; build it with `vllm-domino build"),
        (("verify", "nowhere"), "engine nowhere: no such directory; build it with `vllm-domino build"),
        (("demo", "--pair", "nowhere"), "nowhere/target: no config.json"),
    ],
)
def test_a_mistake_is_one_paragraph_and_exit_code_1(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert call(*arguments, monkeypatch=monkeypatch) == 1
    printed = capsys.readouterr()
    assert message in printed.err
    assert "Traceback" not in printed.err
    assert printed.out == ""
    assert list(tmp_path.iterdir()) == []


def test_debug_shows_the_traceback(monkeypatch, tmp_path):
    monkeypatch.setenv("VLLM_DOMINO_DEBUG", "1")
    monkeypatch.setattr(sys, "argv", ["vllm-domino", "inspect", str(tmp_path / "nowhere")])
    with pytest.raises(ValueError, match="no such directory"):
        run()


def test_one_output_for_many_engines_is_refused(tmp_path, monkeypatch, capsys):
    code = call(
        "build", "a.toml", "b.toml", "c.toml", "--output", str(tmp_path / "x"), monkeypatch=monkeypatch
    )
    assert code == 1
    assert "2 engine recipes were given" in capsys.readouterr().err


def test_doctor_as_json(tmp_path: Path):
    """In a process of its own: it imports torch, onnxruntime and TensorRT, but never vLLM."""
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "engine.json").write_text('{"schema_version": 99}')
    code = "import sys\nfrom vllm_domino.cli.main import app\n"
    code += "try:\n    app(['doctor', '--json', sys.argv[1]])\nfinally:\n    print('vllm' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False
    )
    line, imported_vllm = done.stdout.splitlines()
    found = json.loads(line)
    assert imported_vllm == "False"
    assert {"python", "vllm", "torch", "onnx", "onnxruntime", "tensorrt", "tensorrt_rtx"} <= set(
        found["versions"]
    )
    assert found["plugin"]["entry point"] == "vllm_domino.plugin.register:register"
    (engine,) = [e for e in found["engines"] if e["folder"] == str(tmp_path / "broken")]
    assert engine["fits"] is False
    assert "manifest version 99" in engine["reason"]
    assert done.returncode == (1 if found["problems"] else 0)


@pytest.mark.parametrize(
    ("variables", "problem"),
    [
        ({"VLLM_PLUGINS": "other"}, "VLLM_PLUGINS is 'other' and leaves the plugin out"),
        ({"VLLM_PLUGINS": "other,domino"}, None),
    ],
)
def test_doctor_says_what_keeps_the_plugin_out(variables, problem, monkeypatch):
    from vllm_domino.cli.diagnosis import diagnose

    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    problems = diagnose([]).problems
    assert any(problem in p for p in problems) if problem else not any("VLLM_PLUGINS" in p for p in problems)


@pytest.mark.parametrize(("version", "refused"), [("0.31.4", True), ("0.34.0", True), ("0.33.1+cpu", False)])
def test_doctor_checks_the_window(version, refused, monkeypatch):
    from vllm_domino.cli.diagnosis import diagnose

    monkeypatch.setattr("vllm_domino.plugin.version.installed_vllm", lambda: version)
    found = diagnose([])
    assert any("outside the supported" in p for p in found.problems) is refused
    assert found.versions["vllm"] == version

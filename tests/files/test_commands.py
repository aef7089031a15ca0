"""``tensorwire ls`` and ``tensorwire mount`` as people type them, and what tells people of a job's folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from tensorwire.errors import MissingPackage, Unsupported
from tensorwire.files import mounting
from tests.files.conftest import SIZE, Keys
from tests.harness.sandbox import Sandbox


def test_ls_lists_the_folder_and_what_is_in_it(keys: Keys, sandbox: Sandbox) -> None:
    def said(path: str) -> list[str]:
        result = sandbox.launch("ls", path).finish()
        assert (result.status, result.err) == (0, "")
        return result.out.splitlines()

    found = said(keys.name)
    while not any("model" in line for line in found):
        found = said(keys.name)
    assert [line.split()[0] for line in found] == [
        *("name", "control/", "model.safetensors", "params", "push/", "versions/")
    ]
    (line,) = [line for line in said(f"{keys.name}/params") if line.startswith("w ")]
    assert " 0.1." in line
    assert f"{SIZE / 1024:.0f}"[:3] in line
    assert [line.split()[0] for line in said(f"{keys.name}/params/w")] == ["name", "params/w"]
    result = sandbox.launch("ls", f"{keys.name}/nothing").finish()
    assert result.status == 2
    assert result.one_line() == f"tensorwire: {keys.name}/nothing: No such file or directory"
    result = sandbox.launch("ls", "nothing", "--timeout", "0").finish()
    assert "no job 'nothing'" in result.one_line()


def test_the_job_says_once_how_it_is_found(keys: Keys) -> None:
    keys.publish()
    keys.say("end")
    result = keys.program.finish()
    assert result.one_line() == f"tensorwire: job {keys.name} publishes its weights: tensorwire ls {keys.name}"


def test_machines_that_cannot_mount_say_what_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("mfusepy")
    nothing = tmp_path / "fuse"
    monkeypatch.setattr(mounting, "_DEVICE", nothing)
    with pytest.raises(Unsupported, match="modprobe fuse"):
        mounting.check_can_mount()
    nothing.write_text("")
    nothing.chmod(0)
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    monkeypatch.setattr("shutil.which", lambda _: None)
    with pytest.raises(Unsupported, match="fusermount3"):
        mounting.check_can_mount()
    monkeypatch.setattr("shutil.which", lambda _: "/usr/bin/fusermount3")
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(Unsupported, match="chmod 0666"):
        mounting.check_can_mount()
    monkeypatch.setitem(__import__("sys").modules, "mfusepy", None)
    with pytest.raises(MissingPackage, match=r"pip install '.\[files\]'"):
        mounting.check_can_mount()

"""``tensorwire audit``: what adds up, and what does not."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from tensorwire.cli.audit import audit
from tensorwire.cli.run import run
from tensorwire.errors import ArgumentError
from tensorwire.store.fates import Fate, FateLog, Fates, Line, Produced
from tensorwire.trace.push_fates import problems, read_fates, totals

GOOD: list[Line] = [
    Fate("store/0", 0, 0, 0, 2, "merged", 1, 0.5),
    Fate("store/0", 0, 0, 1, 2, "merged", 1, 0.5),
    Fate("store/0", 0, 0, 1, 3, "discarded", reason="the norm is not finite"),
    Fate("store/0", 0, 0, 0, 4, "applied", 2),
    Produced("store/0", 0, 0, 2),
    Produced("store/0", 0, 1, 2),
]


def write(folder: Path, lines: list[Line], end: bytes = b"") -> None:
    (folder / "store-0-server-0.jsonl").write_bytes(msgspec.json.Encoder().encode_lines(lines) + end)


def test_what_adds_up() -> None:
    assert problems(GOOD) == []
    first, second = totals(GOOD)
    assert (first.produced, first.applied, first.merged, first.discarded) == (2, 1, 1, 0)
    assert (second.produced, second.merged, second.discarded, second.reasons) == (2, 1, 1, ("the norm is not finite",))


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([*GOOD, GOOD[3]], "store/0: worker 0's push of round 4, bucket 0 of server 0, has two fates"),
        (GOOD[1:], "store/0: worker 0 sent 2 pushes, and 1 have a fate"),
        (GOOD[:-1], "store/0: worker 1 left no total: it was killed, or still runs"),
        (
            [*GOOD[:3], Fate("store/0", 0, 0, 0, 4, "applied", 3), *GOOD[4:]],
            "store/0: bucket 0 of server 0 has no version 2",
        ),
        (
            [*GOOD[:3], Fate("store/0", 0, 0, 1, 5, "applied", 2), *GOOD[3:5], Produced("store/0", 0, 1, 3)],
            "store/0: bucket 0 of server 0: 2 pushes were applied as version 2",
        ),
    ],
)
def test_what_does_not_add_up(lines: list[Line], message: str) -> None:
    assert message in problems(lines)


def test_the_command(tmp_path: Path) -> None:
    write(tmp_path, GOOD)
    good = CliRunner().invoke(audit, [str(tmp_path)], standalone_mode=False)
    assert (good.return_value, good.output.splitlines()[-1]) == (0, "every push has one fate")
    file = CliRunner().invoke(audit, [str(next(tmp_path.iterdir()))], standalone_mode=False)
    assert file.output == good.output
    write(tmp_path, GOOD[1:])
    bad = CliRunner().invoke(audit, [str(tmp_path)], standalone_mode=False)
    assert bad.return_value == 1
    assert "worker 0 sent 2 pushes, and 1 have a fate" in bad.output


def test_a_line_that_a_killed_process_left_torn_is_none(tmp_path: Path) -> None:
    write(tmp_path, GOOD, b'{"type":"fate","sto')
    assert read_fates([tmp_path]) == GOOD


def test_other_files_are_refused(tmp_path: Path) -> None:
    write(tmp_path, GOOD, b'{"type":"fate"}\n')
    with pytest.raises(ArgumentError, match=r"line 7, is not a fate"):
        read_fates([tmp_path])
    with pytest.raises(ArgumentError, match="holds no fates: was --fates or TENSORWIRE_FATES set to it"):
        read_fates([tmp_path / "nowhere"])


def test_a_folder_with_fates_of_another_job_is_refused(tmp_path: Path) -> None:
    write(tmp_path, GOOD)
    refused = CliRunner().invoke(run, ["--fates", str(tmp_path), "--", "true"])
    assert refused.exit_code == 2
    assert "has fates of another job: name a new folder" in refused.output


def test_a_folder_that_cannot_be_written_to_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TENSORWIRE_FATES", str(tmp_path / "file" / "folder"))
    with pytest.raises(ArgumentError, match=r"TENSORWIRE_FATES: cannot write to .*: Not a directory"):
        FateLog("store/0", "server 0")


def test_lines_go_to_the_file_and_close_is_idempotent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORWIRE_FATES", str(tmp_path))
    fates = Fates("store/0", 0)
    fates.merged(0, [0, 1], 2, 1, 0.5)
    fates.discarded(0, [1], 3, "the norm is not finite")
    fates.closed(0, 2, [(0, 4)], [1.0], [0], alone=True)
    fates.close()
    fates.close()
    assert read_fates([tmp_path]) == GOOD[:4]

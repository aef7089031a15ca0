"""``tensorwire audit``: what adds up, and what does not."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from tensorwire.cli.audit import audit
from tensorwire.cli.run import run
from tensorwire.control.frames import Welcome
from tensorwire.errors import ArgumentError
from tensorwire.store.fates import Begun, Ended, Fate, FateLog, Fates, GaveUp, Line, Produced, Sent
from tensorwire.trace.push_fates import by_job, problems, read_fates, totals

WELCOME = Welcome("abc", 0, workers=2, servers=1, beat=1.0, lost_after=10.0)
NAMES = ("worker 0", "worker 1", "server 0")
BEGUN: list[Line] = [Begun("abc", "store/0", name, 2, 1) for name in NAMES]
ENDED: list[Line] = [Ended("store/0", name) for name in NAMES]
FATES: list[Line] = [
    Fate("store/0", 0, 0, 0, 2, "merged", 1, 0.5),
    Fate("store/0", 0, 0, 1, 2, "merged", 1, 0.5),
    Fate("store/0", 0, 0, 1, 3, "discarded", reason="the norm is not finite"),
    Fate("store/0", 0, 0, 0, 4, "applied", 2),
    Produced("store/0", 0, 0, 2),
    Produced("store/0", 0, 1, 2),
]
GOOD = [*BEGUN, *FATES, *ENDED]


def write(folder: Path, lines: list[Line], end: bytes = b"") -> None:
    (folder / "store-0-server-0.jsonl").write_bytes(msgspec.json.Encoder().encode_lines(lines) + end)


def test_what_adds_up() -> None:
    assert problems(GOOD) == []
    first, second = totals(GOOD)
    assert (first.produced, first.applied, first.merged, first.discarded) == (2, 1, 1, 0)
    assert (second.produced, second.merged, second.discarded, second.reasons) == (2, 1, 1, ("the norm is not finite",))


LOST: list[Line] = [
    *BEGUN,
    *FATES[:4],
    Produced("store/0", 0, 0, 2),
    GaveUp("store/0", 0, 1, 0),
    ENDED[0],
    ENDED[2],
]


@pytest.mark.parametrize(("sent", "lost"), [(2, 0), (3, 1)])
def test_a_worker_that_was_lost_adds_up(sent: int, lost: int) -> None:
    lines = [*LOST, Produced("store/0", 0, 1, sent)]
    assert problems(lines) == []
    assert totals(lines)[1].lost == lost


@pytest.mark.parametrize("sent", [1, 4])
def test_a_lost_worker_does_not_explain_everything(sent: int) -> None:
    """One bucket, and one push of it that may have been on its way."""
    (problem,) = problems([*LOST, Produced("store/0", 0, 1, sent)])
    assert f"{sent - 2} pushes of worker 1 to shard 0 are lost with it, and 1 can have been on their way" in problem


def test_counts_outlive_their_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORWIRE_FATES", str(tmp_path))
    again = msgspec.structs.replace(WELCOME, incarnation=1)
    for welcome, sent in ((WELCOME, 5), (again, 7)):
        log = FateLog(welcome, "store/0", "worker 1")
        log.counts(1, 2)[1] += sent
        assert log._file is not None
        log._file.close()  # and no end
    lines = by_job(read_fates([tmp_path]))["abc"]
    assert [line for line in lines if isinstance(line, Produced) and line.pushes] == [
        Produced("store/0", 1, 1, 7, 1),
        Produced("store/0", 1, 1, 5, 0),
    ]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([*FATES, FATES[3]], "store/0: worker 0's push of round 4, bucket 0 of shard 0, has two fates"),
        (FATES[1:], "store/0: worker 0 sent 2 pushes, and 1 have a fate"),
        (
            [*FATES[:3], Fate("store/0", 0, 0, 0, 4, "applied", 300_000_000), *FATES[4:]],
            "store/0: bucket 0 of shard 0 has no version 2",
        ),
        (
            [*FATES[:3], Fate("store/0", 0, 0, 1, 5, "applied", 2), *FATES[3:5], Produced("store/0", 0, 1, 3)],
            "store/0: bucket 0 of shard 0: 2 pushes were applied as version 2",
        ),
    ],
)
def test_what_does_not_add_up(lines: list[Line], message: str) -> None:
    assert message in problems([*BEGUN, *lines, *ENDED])


@pytest.mark.parametrize("name", NAMES)
def test_a_log_that_is_missing_or_has_no_end(name: str) -> None:
    unended = [line for line in GOOD if line != Ended("store/0", name)]
    why = f"store/0: the log of {name} has no end: it still runs, or it failed or was killed"
    assert problems(unended) == [why]
    missing = [line for line in unended if line != Begun("abc", "store/0", name, 2, 1)]
    why = f"store/0: {name} has no log here: was it on another machine, or did the job end before?"
    assert problems(missing) == [why]
    assert problems(unended[:-1] if name == NAMES[0] else unended[1:]) != [why]


def test_a_server_has_a_log_for_each_of_its_shards() -> None:
    server = Begun("abc", "store/0", "server 0", 2, 1)
    assert server in BEGUN
    why = "store/0: the log of server 0 has no end: it still runs, or it failed or was killed"
    assert problems([server, *GOOD]) == [why]
    assert problems([server, *GOOD, Ended("store/0", "server 0")]) == []


def test_what_a_running_job_has_not_written_yet_accuses_nobody() -> None:
    server = "store/0: the log of server 0 has no end: it still runs, or it failed or was killed"
    assert problems([*BEGUN, *FATES[4:], *ENDED[:2]]) == [server]


def test_the_command(tmp_path: Path) -> None:
    write(tmp_path, GOOD)
    good = CliRunner().invoke(audit, [str(tmp_path)], standalone_mode=False)
    assert (good.return_value, good.output.splitlines()[-1]) == (0, "every push has one fate")
    file = CliRunner().invoke(audit, [str(next(tmp_path.iterdir()))], standalone_mode=False)
    assert file.output == good.output
    write(tmp_path, [*BEGUN, *FATES[1:], *ENDED])
    bad = CliRunner().invoke(audit, [str(tmp_path)], standalone_mode=False)
    assert bad.return_value == 1
    assert "worker 0 sent 2 pushes, and 1 have a fate" in bad.output


def test_jobs_that_share_a_folder_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORWIRE_FATES", str(tmp_path))
    for welcome in (WELCOME, Welcome("def", 0, workers=2, servers=1, beat=1.0, lost_after=10.0)):
        for name in NAMES:
            log = FateLog(welcome, "store/0", name)
            log.add(*{"worker 0": FATES[4:], "worker 1": [], "server 0": FATES[:4]}[name])
            log.close()
    unended = tmp_path / "abc-store-0-server-0.jsonl"
    unended.write_bytes(b"".join(unended.read_bytes().splitlines(keepends=True)[:-1]))
    jobs = by_job(read_fates([tmp_path]))
    assert [len(problems(lines)) for lines in jobs.values()] == [1, 0]
    both = CliRunner().invoke(audit, [str(tmp_path)], standalone_mode=False)
    assert both.return_value == 1
    assert [line for line in both.output.splitlines() if line.startswith("job")] == ["job abc", "job def"]


def test_a_line_that_a_killed_process_left_torn_is_none(tmp_path: Path) -> None:
    write(tmp_path, GOOD, b'{"type":"fate","sto')
    assert read_fates([tmp_path]) == GOOD


def test_other_files_are_refused(tmp_path: Path) -> None:
    write(tmp_path, GOOD, b'{"type":"fate"}\n')
    with pytest.raises(ArgumentError, match=r"line 13, is not a fate"):
        read_fates([tmp_path])
    with pytest.raises(ArgumentError, match="holds no fates: was --fates or TENSORWIRE_FATES set to it"):
        read_fates([tmp_path / "nowhere"])
    with pytest.raises(ArgumentError, match="/proc/self/mem cannot be read: Input/output error"):
        read_fates(["/proc/self/mem"])
    write(tmp_path, FATES)
    with pytest.raises(ArgumentError, match="does not begin as a log of fates does"):
        read_fates([tmp_path])
    (tmp_path / "empty.txt").touch()
    with pytest.raises(ArgumentError, match=r"empty\.txt does not begin as a log of fates does"):
        read_fates([tmp_path / "empty.txt"])


def test_a_folder_with_fates_of_another_job_is_refused(tmp_path: Path) -> None:
    write(tmp_path, GOOD)
    refused = CliRunner().invoke(run, ["--fates", str(tmp_path), "--", "true"])
    assert refused.exit_code == 2
    assert "has fates of another job: name a new folder" in refused.output


def test_a_folder_that_cannot_be_written_to_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TENSORWIRE_FATES", str(tmp_path / "file" / "folder"))
    with pytest.raises(ArgumentError, match=r"TENSORWIRE_FATES: cannot write to .*: Not a directory"):
        FateLog(WELCOME, "store/0", "server 0")


def test_lines_go_to_the_file_and_close_is_idempotent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORWIRE_FATES", str(tmp_path))
    fates = Fates(WELCOME, "store/0", 0)
    assert read_fates([tmp_path]) == BEGUN[2:]  # a process that is killed leaves this much
    fates.merged(0, [Sent(0, 0, 2), Sent(1, 0, 2)], 1, 0.5)
    fates.discarded(0, [Sent(1, 0, 3)], "the norm is not finite")
    fates.closed(0, 2, [Sent(0, 0, 4)], [1.0], [0], alone=True)
    fates.close()
    fates.close()
    assert read_fates([tmp_path]) == [BEGUN[2], *FATES[:4], ENDED[2]]

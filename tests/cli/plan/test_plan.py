"""``tensorwire plan``: the papers' figures, what is written, and what is refused."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from torch._subclasses.fake_tensor import FakeTensorMode

from tensorwire.cli.plan import llama
from tests.levels import mostly_long

# As the papers' authors give them: MiB, variables, parameters, mean, median, largest, below 4 KiB, from 1 MiB on.
PAPERS = {
    "alexnet": ("176.42", 16, 46_247_882, "11 MiB", "53.4 KiB", "100 MiB", 6, 6),
    "inception": ("92.90", 196, 24_353_332, "485 KiB", "3.19 KiB", "9.38 MiB", 99, 21),
    "vgg16": ("512.32", 32, 134_301_514, "16 MiB", "16 KiB", "392 MiB", 14, 11),
    "lstm": ("35.93", 14, 9_417_704, "2.57 MiB", "4 MiB", "4 MiB", 1, 9),
    "gru": ("27.92", 11, 7_319_528, "2.54 MiB", "4 MiB", "4 MiB", 1, 7),
    "fcn5": ("204.47", 10, 53_600_266, "20.4 MiB", "88 KiB", "64 MiB", 1, 4),
}


@pytest.mark.parametrize("name", mostly_long([*PAPERS], ["lstm"]))
def test_the_papers_figures(plan: Any, tmp_path: Path, name: str) -> None:
    file = tmp_path / "plan.json"
    status, out, _ = plan(name, "--inference", "--batch", "2", "--json", str(file))
    mib, variables, parameters, mean, median, largest, small, large = PAPERS[name]
    assert status == 0
    first, second = out.splitlines()[:2]
    assert first == f"{name}: {parameters:,} parameters in {variables} variables, {mib} MiB"
    assert second == f"mean {mean}, median {median}, largest {largest}"
    written = json.loads(file.read_text())
    assert (written["parameters"], written["variables"]) == (parameters, variables)
    assert sum(c["variables"] for c in written["histogram"]) == variables
    assert sum(c["variables"] for c in written["histogram"] if c["below"] == 4096) == small
    assert sum(c["variables"] for c in written["histogram"] if c["from"] >= 2**20) == large
    assert len(written["tensors"]) == variables
    assert written["graphs"][0]["edges"]


SCRIPT = """\
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(64, 64)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(LAYERS))
        self.head = nn.Linear(64, 8)

    def forward(self, x):
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x).sum()

def model():
    return Net()

def inputs(batch=8):
    return (torch.zeros(batch, 64),)
"""


def script(folder: Path, layers: int = 4, text: str = SCRIPT) -> str:
    path = folder / f"net{layers}.py"
    path.write_text(text.replace("LAYERS", str(layers)))
    return str(path)


def test_a_model_whose_constructor_reads_tensors(plan: Any, tmp_path: Path) -> None:
    """As those of timm do for the rates of stochastic depth: it is planned like any other."""
    reads = SCRIPT.replace(
        "        self.stem", "        self.rates = [x.item() for x in torch.linspace(0, 1, 3)]\n        self.stem"
    )
    outputs = [plan(script(tmp_path, 4, text), "--workers", "2") for text in (SCRIPT, reads)]
    (status, one, _), (_, other, _) = outputs
    assert status == 0
    assert [re.sub(r"traced in .*", "", text) for text in (one, other)] == [re.sub(r"traced in .*", "", one)] * 2


def crossing(file: Path) -> list[tuple[Any, ...]]:
    return [
        (edge["source"], edge["targets"], edge["kind"], edge["nbytes"], edge["copied"] or "born")
        for graph in json.loads(file.read_text())["graphs"]
        for edge in graph["edges"]
    ]


def test_a_script_cut_where_the_user_says(plan: Any, tmp_path: Path) -> None:
    files = tmp_path / "plan.json", tmp_path / "plan.png"
    places = ("--place", "layers.1=1", "--place", "layers.2=1")
    status, out, _ = plan(script(tmp_path), "--json", str(files[0]), "--plot", str(files[1]), "--batch", "4", *places)
    assert status == 0
    a, b, activation = "worker 0", "worker 1", 4 * 64 * 4
    assert crossing(files[0]) == [
        (a, [b], "static", activation, "born"),
        (b, [a], "static", activation, "born"),
        (a, [b], "value", 4, "the caller gets it"),
        (a, [b], "static", activation, "born"),
        (b, [a], "static", activation, "born"),
    ]
    assert "backward: " in out
    assert "worker 0  all others" in out
    assert [graph["copies"] for graph in json.loads(files[0].read_text())["graphs"]] == [[], []]
    assert re.search(r"copies a step, in the steady state\n.*\nworker 0 +0 +0 +0\nworker 1 +0 +0 +0\n", out)
    assert files[1].read_bytes().startswith(b"\x89PNG")


def test_hundreds_of_edges_are_folded(plan: Any, tmp_path: Path) -> None:
    places = [part for i in range(0, 40, 2) for part in ("--place", f"layers.{i}=1")]
    status, out, _ = plan(script(tmp_path, 40), "--inference", *places)
    assert status == 0
    assert "forward: " in out
    assert [re.split("  +", line.strip()) for line in out.splitlines() if line.endswith("yes")] == [
        ["20", "worker 0", "worker 1", "static", "40,960", "yes"],
        ["20", "worker 1", "worker 0", "static", "40,960", "yes"],
    ]


def mistakes(folder: Path) -> dict[str, tuple[list[str], str]]:
    net = script(folder)
    broken = folder / "broken.py"
    broken.write_text("def model():\n    raise ValueError('no weights')\n\ndef inputs():\n    return ()\n")
    empty = folder / "empty.py"
    empty.write_text("")
    garbage = folder / "garbage.py"
    garbage.write_bytes(bytes(range(256)))
    wrong = folder / "wrong.py"
    wrong.write_text("def model(:\n")
    fixed = folder / "fixed.py"
    fixed.write_text("def model(): return 3\ndef inputs(): return ()\n")
    narrow = folder / "narrow.py"
    narrow.write_text(SCRIPT.replace("LAYERS", "1").replace("batch, 64", "batch, 63"))
    return {
        "no name": (["alexnot"], "there is no model 'alexnot': it is alexnet, "),
        "no file": (["nothing.py"], "there is no script nothing.py"),
        "folder": ([str(folder)], "there is no script"),
        "no function": ([str(empty)], "has no function model(): see tensorwire plan --help"),
        "raises": ([str(broken)], "broken.py, line 2: ValueError: no weights"),
        "syntax": ([str(wrong)], "wrong.py, line 1: SyntaxError"),
        "no module": ([str(fixed)], "model() must return a torch.nn.Module, not int"),
        "no batch": ([str(fixed), "--batch", "3"], "--batch 3: inputs() of "),
        "one worker": ([net, "--workers", "1"], "--workers 1: a model is cut over two or more"),
        "no worker": ([net, "--place", "layers.1=2"], "there is no worker 2: give ranks below 2, or more --workers"),
        "no place": ([net, "--place", "layers.1"], "--place takes PATH=RANK, not 'layers.1'"),
        "no path": (
            [net, "--place", "layer.1=1"],
            "'layer.1' is not a module of the model, as its named_modules() names them; close to it: 'layers.1'",
        ),
        "part of a name": ([net, "--place", "lay=1"], "'lay' is not a module of the model"),
        "workers": ([net, "--workers", "9"], "9 workers need as many modules with parameters; the model has 6"),
        "large batch": (["fcn5", "--batch", str(2**30)], "--batch 1073741824: its inputs take 3,"),
        "larger batch": (
            ["fcn5", "--batch", "9" * 14],
            "'--batch': 99999999999999 is not in the range 1<=x<=1073741824",
        ),
        "tokens": (["llama-70b", "--batch", str(2**30)], "--batch 1073741824: its inputs take 16,384.0 GiB"),
        "no script": (["/etc/passwd"], "/etc/passwd is not a Python file: its name must end with .py"),
        "bytes": ([str(garbage)], "garbage.py: "),
        "picture": (
            [net, "--plot", "plan.gif"],
            "--plot plan.gif: the name of a picture must end with .png, .svg, .pdf",
        ),
        "no folder": ([net, "--json", "no/plan.json"], "--json no/plan.json: there is no folder "),
        "cannot run": ([str(narrow)], "Net cannot be traced: a and b must have same reduction dim"),
    }


def test_a_mistake_is_one_line(plan: Any, tmp_path: Path) -> None:
    for name, (arguments, why) in mistakes(tmp_path).items():
        status, out, err = plan(*arguments)
        assert (status, out, err.count("\n")) == (2, "", 1), (name, err)
        assert err.startswith("tensorwire: "), name
        assert why in err, name


def test_help_shows_a_script(plan: Any) -> None:
    status, out, _ = plan("--help")
    assert status == 0
    for part in ("def model(): return MyModel()", "tensorwire plan vgg16", "llama-70b"):
        assert part in out


def test_seventy_billion_parameters_take_no_memory() -> None:
    pytest.importorskip("transformers")
    with FakeTensorMode():
        sizes = [p.numel() for p in llama.model().parameters()]
    assert (sum(sizes), len(sizes)) == (70_553_706_496, 723)


LLAMA = """\
from tensorwire.cli.plan import llama

def model():
    return llama.model(8)

def inputs():
    return llama.tokens(1)
"""


@pytest.mark.long
def test_layers_hand_their_hidden_state_on(plan: Any, tmp_path: Path) -> None:
    """Eight of the eighty layers of Llama 3 70B."""
    pytest.importorskip("transformers")
    file = tmp_path / "plan.json"
    status, _, _ = plan(script(tmp_path, text=LLAMA), "--workers", "3", "--inference", "--json", str(file))
    assert status == 0
    hidden = 2048 * 8192 * 4
    handed_on = [(one[0], one[1]) for one in crossing(file) if one[3] == hidden]
    assert handed_on == [(f"worker {i}", [f"worker {i + 1}"]) for i in range(2)]


def test_without_transformers_it_is_refused(plan: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    status, _, err = plan("llama-70b")
    assert (status, err) == (2, "tensorwire: llama-70b needs transformers: pip install transformers\n")


def test_a_script_that_says_where(plan: Any, tmp_path: Path) -> None:
    said = 'workers = {"layers.1": 1}\n'
    found = []
    for text, more in ((SCRIPT + said, ()), (SCRIPT, ("--place", "layers.1=1"))):
        file = tmp_path / "plan.json"
        status, _, err = plan(script(tmp_path, text=text), "--json", str(file), *more)
        assert (status, err) == (0, "")
        found.append((crossing(file), json.loads(file.read_text())["placement"]))
    assert found[0] == found[1]


def test_tied_parameters_are_listed(plan: Any, tmp_path: Path) -> None:
    tie = "        self.layers[1][0].weight = self.stem.weight\n\n    def forward"
    status, _, err = plan(script(tmp_path, text=SCRIPT.replace("    def forward", tie, 1)), "--place", "layers=1")
    assert status == 0
    assert err.startswith(
        "tensorwire: stem.weight of worker 0 is tied to layers.1.0.weight of worker 1: its 16,384 bytes"
    )


def test_the_documentation_shows_what_is_printed(plan: Any, tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "plan.md").read_text()
    code, text, store = re.findall(r"^```(?:python|console)\n(.*?)^```", page, re.M | re.S)
    (tmp_path / "mlp.py").write_text(code)
    _, out, _ = plan(str(tmp_path / "mlp.py"))

    def lines(printed: str) -> list[str]:
        return [line for line in printed.strip().splitlines() if not line.startswith("traced in")]

    assert lines(out) == lines(text)
    _, out, _ = plan(str(tmp_path / "mlp.py"), "--store", "--device", "--dtype", "bfloat16")
    assert lines(out)[2:-1] == lines(store)

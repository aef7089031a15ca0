"""The common parts of all pictures: formats, the parts of a step as bars, and saving the file."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tensorwire.errors import ArgumentError, MissingPackage
from tensorwire.extras import how_to_install
from tensorwire.observe.files import check_file, save_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = ("png", "svg", "pdf")
DPI = 150
# Colours of Okabe and Ito, which people with any colour vision tell apart, from dark to light. Hatches tell parts apart
# in a grey print.
PART_STYLES: Mapping[str, Mapping[str, Any]] = {
    "compute": {"facecolor": "#0072B2"},
    "update": {"facecolor": "#D55E00", "hatch": "////"},
    "exposed": {"facecolor": "#E69F00", "hatch": "xxxx"},
    "idle": {"facecolor": "#F2F2F2", "hatch": "...."},
    "hidden": {"facecolor": "#9CCFEA", "hatch": "----"},
}
PART_NAMES = {"exposed": "exposed communication", "hidden": "hidden communication (beside compute)"}
OUTLINE: Mapping[str, Any] = {"edgecolor": "#333333", "linewidth": 0.6}


def check_picture(path: str | Path, *, option: str) -> None:
    """Refuses early a picture that could not be drawn.

    Args:
        path: The picture; its suffix says its format.
        option: What people gave the path to, such as ``--plot``, for the message.

    Raises:
        ArgumentError: It is of another format, or cannot be written there.
        MissingPackage: matplotlib is not installed.
    """
    if _format(path) not in FORMATS:
        raise ArgumentError(f"{option} {path}: the name of a picture must end with .{', .'.join(FORMATS)}")
    check_file(path, option=option)
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise MissingPackage(f"{option} needs matplotlib: {how_to_install('plot')}") from None


def save_picture(figure: Figure, path: str | Path, *, option: str, dpi: float = DPI) -> None:
    """Writes ``figure``, the same bytes for the same picture. Raises `ArgumentError` where that is impossible."""
    import matplotlib

    picture = io.BytesIO()
    dates = {"png": {}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}[_format(path)]
    with matplotlib.rc_context({"svg.hashsalt": "tensorwire"}):
        figure.savefig(picture, format=_format(path), dpi=dpi, metadata=dates)
    save_file(path, picture.getvalue(), option=option)


def _format(path: str | Path) -> str:
    return Path(path).suffix.lower().removeprefix(".")

"""The base class of all results: a table, a figure, a page, LaTeX with a line to cite, and files."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from howsmooth.errors import StoreError
from howsmooth.rounding import COLUMNS_IN_DIGITS, interval_in_digits

if TYPE_CHECKING:
    import pandas as pd

    from howsmooth.results.curves import Curve
    from howsmooth.results.drawing import Figure

__all__ = ["Result", "in_interval", "intervals", "made_by"]

_ON_PAGE = 60  # rows whose details a page shows; the tables have all
_IN_NOTEBOOK = 3


class Result:
    """Base class of all results, which have a table, a figure, a page and files.

    Imports of pandas, matplotlib and jinja stand in the methods: a measurement alone does not need them.
    """

    #: The name of the page, the figure and the table, such as ``profile``.
    NAME: ClassVar[str]
    #: The title of the page.
    TITLE: ClassVar[str]
    #: The column of the table against which ``plot`` draws the values.
    AXIS: ClassVar[str] = ""
    #: How the columns of the table whose names end so are written in LaTeX.
    FORMATS: ClassVar[Mapping[str, Callable[[float], str]]] = COLUMNS_IN_DIGITS

    if TYPE_CHECKING:

        @property
        def table(self) -> pd.DataFrame:
            """What was found, row by row."""

    @property
    def citation(self) -> str:
        """One line to cite the result: what is printed, and the versions of the libraries."""
        return f"{self!r}; {made_by('torch')}; digest {self.digest}."

    def plot(self) -> Figure:
        """Draw the result as a figure; values that did not converge are hollow."""
        from howsmooth.results.curves import Panel, add_legend, draw
        from howsmooth.results.drawing import STYLE, rc_context

        with rc_context(STYLE):
            panel = Panel(self._curves(), x=self.AXIS, scales=("linear", "log"))
            figure, _ = draw([[panel]], (5.4, 3.4))
            add_legend(figure, 3)
        return figure

    def _curves(self) -> list[Curve]:
        return [intervals(self.table, self.AXIS)]

    @property
    def digest(self) -> str:
        """The first 12 digits of a SHA-256 hash of the table without its seconds, and of the model if there
        is one. It changes if the seed or a weight of the model changes.
        """
        table = self.table.drop(columns="seconds", errors="ignore").to_csv(index=False, lineterminator="\n")
        return hashlib.sha256(f"{getattr(self, 'fingerprint', '')}\n{table}".encode()).hexdigest()[:12]

    def to_latex(self, path: str | os.PathLike[str] | None = None) -> str | None:
        """Write the table (of a profile, its ranking) as LaTeX to a file; without ``path``, return the text.
        A StoreError says that the file cannot be written.

        It uses the package booktabs. Its caption contains the digest, its label is ``tab:howsmooth-`` with
        the digest, and the whole citation is a comment above it.
        """
        table, caption = self._in_latex()
        written_by = f"howsmooth {version('howsmooth')}, digest {self.digest}"
        forms = {n: form for end, form in self.FORMATS.items() for n in map(str, table) if n.endswith(end)}
        tabular = table.to_latex(
            index=False,
            float_format="%.6g",
            formatters=forms,
            na_rep="",
            escape=True,
            caption=re.sub(r"([&%$#_{}])", r"\\\1", f"{caption} ({written_by})."),
            label=f"tab:howsmooth-{self.digest}",
        )
        words = f"% {' '.join(self.citation.split())}\n{tabular}"
        if path is None:
            return words
        try:
            Path(path).write_text(words, encoding="utf-8", newline="\n")
        except OSError as error:
            raise StoreError(f"path: {path} cannot be written ({error.strerror}).") from error
        return None

    def described(self) -> dict[str, Any]:
        """Return the result as a dict for JSON; subclasses add settings and rows."""
        return {"citation": self.citation}

    # ---- what subclasses may say better

    @property
    def title(self) -> str:
        """The title of the page."""
        return self.TITLE

    def _in_latex(self) -> tuple[pd.DataFrame, str]:
        """Return the table that ``to_latex`` writes, and its caption without the final full stop."""
        return self.table, self.title

    def _tables(self) -> dict[str, pd.DataFrame]:
        """Return the tables to write, by the names of their files without suffix."""
        return {self.NAME: self.table}

    def _figures(self) -> dict[str, Figure]:
        """Return the figures to write and to show, by the names of their files without suffix."""
        return {self.NAME: self.plot()}

    def _parts(self, images: Mapping[str, str], most: int) -> list[str]:
        """Return the HTML parts of the page, with at most ``most`` rows; ``images`` are data URLs by name."""
        from howsmooth.results.page import frame, parts

        picture = parts().picture(images[self.NAME], f"{self.title}; the numbers are in the table.")
        few = [parts().words(f"{most} of {len(self.table)} rows are shown here.", "note")]
        return [picture, frame(self.table.head(most)), *(few if most < len(self.table) else [])]

    # ---- pages, notebooks and files

    def page(self, images: Mapping[str, str] | None = None) -> str:
        """Return the result as one HTML file without scripts; ``images`` are the figures as data URLs."""
        from howsmooth.results.page import page, parts

        body = [parts().head(self.title), *self._parts(images or self._images(), _ON_PAGE)]
        return page(self.title, [*body, parts().words(self.citation, "soft")])

    def _repr_html_(self) -> str:
        """Return the figure and the first rows as HTML, for notebooks."""
        from howsmooth.results.page import style_of_parts

        body = "".join(self._parts(self._images(), _IN_NOTEBOOK))
        return f'<div class="howsmooth"><style>{style_of_parts()}</style>{body}</div>'

    def _images(self) -> dict[str, str]:
        from howsmooth.results.drawing import data_url, png

        return {name: data_url(png(figure)) for name, figure in self._figures().items()}

    def write(self, folder: str | os.PathLike[str], *, parquet: bool = False) -> list[Path]:
        """Write the page, the figures (PNG and PDF) and the tables (CSV) into a folder; return the paths.

        With ``parquet`` the tables are also written as parquet files. A StoreError says that the folder
        cannot be written, an ArgumentError that pandas has no engine for parquet.
        """
        from howsmooth.files import csv_of, replace_file, writable_folder, write_parquet
        from howsmooth.results.drawing import data_url, save

        with writable_folder(folder) as folder:
            page = folder / f"{self.NAME}.html"
            figures = self._figures()
            saved = {name: save(figure, folder, name, self.title) for name, figure in figures.items()}
            images = {name: data_url(image.read_bytes()) for name, (image, _) in saved.items()}
            replace_file(page, self.page(images))
            paths = [page, *saved[self.NAME]]
            for name, table in self._tables().items():
                paths.append(folder / f"{name}.csv")
                replace_file(paths[-1], csv_of(table))
                if parquet:
                    paths.append(folder / f"{name}.parquet")
                    write_parquet(table, paths[-1], self.citation)
            return paths + [path for name, both in saved.items() if name != self.NAME for path in both]


def made_by(*libraries: str) -> str:
    """Return the versions of howsmooth and of other libraries as a phrase."""
    return ", ".join(f"{name} {version(name)}" for name in ("howsmooth", *libraries))


def in_interval(value: float, lower: float, upper: float, *, converged: bool) -> str:
    """Return a phrase that states a constant and its interval."""
    status = "" if converged else " (not converged)"
    return f"{value:.6g} in {interval_in_digits(lower, upper)}{status}"


def intervals(table: pd.DataFrame, x: str, label: str = "measured", column: str = "", **look: Any) -> Curve:
    """Return a curve of a table's constants, with intervals as bars; unconverged constants are hollow."""
    from howsmooth.results.curves import Curve

    names = [f"{column}_{end}" if column else end for end in ("lower", "upper", "converged")]
    low, high, converged = (table[name] for name in names)
    filled = converged.fillna(value=True).astype(bool)
    usual: dict[str, Any] = {"mark": "o", "colour": "#3b528b", "filled": filled, "spread": (low, high)}
    return Curve(table[x], table[column or "value"], label, **(usual | look))

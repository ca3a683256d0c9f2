"""The base classes of the results of profiles, with their files, web page and notebook view."""

from __future__ import annotations

import hashlib
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar

import jinja2
import pandas as pd
from markupsafe import Markup
from matplotlib.figure import Figure

from howsmooth.rounding import COLUMNS_IN_DIGITS, interval_in_digits
from howsmooth.study.figures.drawing import save
from howsmooth.study.file_writing import (
    csv_of,
    replace_file,
    writable_folder,
    write_parquet,
)
from howsmooth.study.html_assets import data_url, digest, png, style_sheet, templates_of
from howsmooth.study.text_formatting import counted

__all__ = ["Result", "in_interval"]

_ON_PAGE = 60  # rows whose details a page shows; the tables have all
_IN_NOTEBOOK = 3


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Result(ABC):
    """Base class of results at one input of a model, with a table, a figure and a web page."""

    #: What was found, row by row.
    table: pd.DataFrame
    #: The name of the model or of its folder, or the name of its class.
    model: str
    #: Where the weights come from; empty for a model that was not loaded by its name.
    source: str
    #: SHA-256 of the model.
    fingerprint: str
    #: The input in words.
    input: str
    #: Number of tokens.
    n: int
    #: The dtype in which the weights are stored.
    stored: str
    #: The dtype in which the model was computed.
    computed: str

    #: The name of the result's page, figure, table and template, such as ``profile``.
    NAME: ClassVar[str]
    #: The title of the page, which is followed by the name of the model.
    TITLE: ClassVar[str]
    #: How the columns of the table whose names end so are written in LaTeX.
    FORMATS: ClassVar[Mapping[str, Callable[[float], str]]] = COLUMNS_IN_DIGITS

    @property
    @abstractmethod
    def citation(self) -> str:
        """One line to cite the result, with its most important numbers and how they were computed."""

    @abstractmethod
    def plot(self) -> Figure:
        """Draw the result as a figure."""

    def to_latex(self, path: str | os.PathLike[str] | None = None) -> str | None:
        """Write the table as LaTeX to a file, or return it as text if no path is given.

        The table uses the package booktabs. Its caption is one sentence that contains the digest. Its label
        is ``tab:howsmooth-`` followed by the digest. The whole citation is a comment above the table. The
        table of a profile is its ranking.
        """
        table, caption = self._in_latex()
        made_by = f"howsmooth {version('howsmooth')}, digest {self.digest}"
        tabular = table.to_latex(
            index=False,
            float_format="%.6g",
            formatters={
                name: form
                for end, form in self.FORMATS.items()
                for name in map(str, table)
                if name.endswith(end)
            },
            na_rep="",
            escape=True,
            caption=re.sub(r"([&%$#_{}])", r"\\\1", f"{caption} ({made_by})."),
            label=f"tab:howsmooth-{self.digest}",
        )
        words = f"% {' '.join(self.citation.split())}\n{tabular}"
        if path is None:
            return words
        Path(path).write_text(words, encoding="utf-8", newline="\n")
        return None

    def _in_latex(self) -> tuple[pd.DataFrame, str]:
        """Return the table that ``to_latex`` writes, and the sentence of its caption without a full stop."""
        return self.table, f"{self.TITLE} of {self.model} at one input of {self.length}"

    @property
    def length(self) -> str:
        """The number of tokens in words, such as "3 tokens"."""
        return counted(self.n, "token")

    @property
    def precision(self) -> str:
        """A phrase that names the dtype of the stored weights and the dtype of the computation."""
        computed = "" if self.stored == self.computed else f", computed in {self.computed}"
        return f"weights in {self.stored}{computed}"

    @property
    def digest(self) -> str:
        """The first 12 hexadecimal digits of a SHA-256 hash of the table, and of the weights and settings of
        the model.

        The digest changes with the seed, because the intervals depend on it, and with every weight, even in
        layers that are not measured. The seconds that rows took are left out.
        """
        table = csv_of(self.table.drop(columns="seconds", errors="ignore"))
        return hashlib.sha256(f"{self.fingerprint}\n{table}".encode()).hexdigest()[:12]

    @property
    def _made_by(self) -> str:
        """The end of a citation: dtypes, versions of the libraries, and hashes of weights and table."""
        versions = ", ".join(f"{name} {version(name)}" for name in ("howsmooth", "torch", "transformers"))
        return f"{self.precision}; {versions}; weights {self.fingerprint[:12]}, digest {self.digest}."

    def described(self) -> dict[str, Any]:
        """Return the settings and the citation of the result, as a dict for JSON. Subclasses add the rows."""
        names = ("model", "source", "fingerprint", "input", "n", "stored", "computed", "citation")
        return {name: getattr(self, name) for name in names}

    # ---- files, pages and notebooks

    def _tables(self) -> dict[str, pd.DataFrame]:
        """Return the tables to write, as a dict whose keys are the names of the files without ``.csv``."""
        return {self.NAME: self.table}

    def _shown(self, most: int) -> dict[str, Any]:
        """Return the values that the page's template shows, with details of at most ``most`` rows."""
        return {}

    def _body(self, image: str, most: int) -> Markup:
        body = _template(f"{self.NAME}.html.jinja")
        return Markup(body.render(found=self, image=image, **self._shown(most)))

    def page(self, image: str) -> str:
        """Return the result as a web page: the text of one HTML file without scripts.

        Parameters
        ----------
        image
            The figure as a data URL.

        """
        style = style_sheet(_template("page.css").render())
        return _template("page.html.jinja").render(
            found=self, style=Markup(style), style_digest=digest(style), body=self._body(image, _ON_PAGE)
        )

    def _repr_html_(self) -> str:
        """Return the figure and the first rows as HTML, for notebooks."""
        style = _template("page.css").render()
        body = self._body(data_url(png(self.plot())), _IN_NOTEBOOK)
        return f'<div class="howsmooth"><style>{style}</style>{body}</div>'

    def write(self, folder: str | os.PathLike[str], *, parquet: bool = False) -> list[Path]:
        """Write the page, the figure (PNG and PDF) and the tables (CSV) into a folder; return the paths.

        With ``parquet`` the tables are also written as parquet files.

        Raises
        ------
        StoreError
            If the folder cannot be written.
        ArgumentError
            If pandas has no engine for parquet.

        """
        with writable_folder(folder) as folder:
            page = folder / f"{self.NAME}.html"
            image, vector = save(self.plot(), folder, self.NAME, self.model)
            replace_file(page, self.page(data_url(image.read_bytes())))
            paths = [page, image, vector]
            for name, table in self._tables().items():
                paths.append(folder / f"{name}.csv")
                replace_file(paths[-1], csv_of(table))
                if parquet:
                    paths.append(folder / f"{name}.parquet")
                    write_parquet(table, paths[-1], self.citation)
        return paths


def _template(name: str) -> jinja2.Template:
    return templates_of("howsmooth.profiling").get_template(name)


def in_interval(value: float, lower: float, upper: float, *, converged: bool) -> str:
    """Return a phrase that states a constant and its interval."""
    status = "" if converged else " (not converged)"
    return f"{value:.6g} in {interval_in_digits(lower, upper)}{status}"

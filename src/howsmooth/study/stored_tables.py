"""Read the rows of any store as pandas tables."""

from __future__ import annotations

import os
from pathlib import Path

import pandas as pd

from howsmooth.errors import StoreError
from howsmooth.printed_table import PrintedTable
from howsmooth.study.store import STORE_NAME, Store

__all__ = ["read"]


def read(folder: str | os.PathLike[str]) -> dict[str, pd.DataFrame]:
    """Return the tables of a store by their names, while other processes may write to it.

    Parameters
    ----------
    folder
        The ``--out`` folder of ``howsmooth measure``, ``study``, ``attack`` or ``flow``, the folder of a
        figure in that of ``howsmooth reproduce``, or the file ``study.sqlite`` in it.

    Returns
    -------
    dict
        Every table that has rows: ``measurements`` (a row for each constant, with its interval and status),
        ``models``, ``texts``, ``bounds``, ``sensitivities``, ``failures``, ``attacks``,
        ``frames``, ``growths``, ``figure_rows`` and others. The classes in :mod:`howsmooth.study.records`
        explain the columns; ``run`` is the number of the run that wrote a row.

    Raises
    ------
    StoreError
        If there is no store in the folder, or it is damaged.

    """
    place = Path(folder)
    if place.name == STORE_NAME and place.is_file():
        place = place.parent
    if not Store.exists(place):
        raise StoreError(
            f"folder: expected the output folder of a howsmooth command, with a store, got {place}. Give the "
            "folder that --out named."
        )
    with Store.open(place, write=False) as store:
        return {name: PrintedTable(table) for name, table in store.tables().items()}

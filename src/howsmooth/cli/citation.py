"""Write BibTeX entries with which to cite the paper and the software."""

from __future__ import annotations

from importlib.metadata import version

__all__ = ["bibtex"]

_BIBTEX = r"""@inproceedings{castin2024smooth,
  title     = {How Smooth Is Attention?},
  author    = {Castin, Val{\'e}rie and Ablin, Pierre and Peyr{\'e}, Gabriel},
  booktitle = {Proceedings of the 41st International Conference on Machine Learning},
  series    = {Proceedings of Machine Learning Research},
  volume    = {235},
  year      = {2024}
}

@software{howsmooth,
  title   = {howsmooth: the local Lipschitz constant of self-attention,
             with an interval},
  author  = {{The howsmooth developers}},
  version = {VERSION},
  license = {Apache-2.0}
}"""


def bibtex() -> str:
    """Return a BibTeX entry of the paper and one of the installed version of the software."""
    return _BIBTEX.replace("VERSION", version("howsmooth"))

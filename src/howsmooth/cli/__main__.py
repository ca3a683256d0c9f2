"""Run the command line with ``python -m howsmooth.cli``."""

from __future__ import annotations

import sys

from howsmooth.cli import main

sys.exit(main())

"""What is collected: negative controls that need engines of their own are run when they are asked for (docs/development.md)."""

import os

collect_ignore = [] if os.environ.get("PDD_REAL_CONTROLS") == "1" else ["test_controls_real.py"]

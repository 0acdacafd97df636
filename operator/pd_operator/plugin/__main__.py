"""`python -m pd_operator.plugin`."""

import sys

from pd_operator.plugin.cli import main

sys.exit(main())

"""`python -m statecore.cli` is the command `statecore`."""

import sys

from statecore.cli import main

sys.exit(main())

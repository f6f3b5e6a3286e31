"""`python -m engines`, the same as the command `engines`."""

import sys

from engines.cli.main import main

sys.exit(main())

"""`python -m vua.cli`: the command `vua` if its script is not on the path."""

import sys

from vua.cli import main

sys.exit(main())

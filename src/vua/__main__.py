"""`python -m vua`: the command `vua` where its script is not on the path."""

import sys

from vua.cli import main

sys.exit(main())

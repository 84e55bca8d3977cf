"""`python -m tilewise` is the `tilewise` command."""

import sys

from tilewise.cli import main

sys.exit(main())

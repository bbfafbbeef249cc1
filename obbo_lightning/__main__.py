"""``python -m obbo_lightning``."""

import sys

from obbo_lightning.cli import main

sys.exit(main())

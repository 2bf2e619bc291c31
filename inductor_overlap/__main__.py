"""``python -m inductor_overlap``: the command ``inductor-overlap``, for torchrun's ``-m``."""

import sys

from inductor_overlap.cli import main

if __name__ == "__main__":
    sys.exit(main())

"""`python -m infembed_ray.cli`: the command without its script."""

import sys

from infembed_ray.cli.main import main

if __name__ == "__main__":
    sys.exit(main())

"""Submit with: ray job submit --working-dir . -- python jobs/index.py --config FILE key=value ...

`python jobs/index.py compact index=DIR` makes the next version of an index from it and its document changes.
"""

import sys

from infembed_ray.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["index", *sys.argv[1:]]))

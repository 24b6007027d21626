"""Submit with: ray job submit --working-dir . -- python jobs/index.py --config FILE key=value ...

With `compact index=DIR` after jobs/index.py, an index and the changes made to it become its next version.
"""

import sys

from infembed_ray.cli import main

if __name__ == "__main__":
    sys.exit(main(["index", *sys.argv[1:]]))

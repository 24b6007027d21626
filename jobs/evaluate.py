"""Submit with: ray job submit --working-dir . -- python jobs/evaluate.py --config FILE key=value ..."""

import sys

from infembed_ray.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["evaluate", *sys.argv[1:]]))

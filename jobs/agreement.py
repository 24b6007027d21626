"""Submit with: ray job submit --working-dir . -- python jobs/agreement.py --config FILE key=value ..."""

import sys

from infembed_ray.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["agreement", *sys.argv[1:]]))

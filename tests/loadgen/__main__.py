"""python -m loadgen: install the load generator into the cache, unless it is there."""

from loadgen import installed

if __name__ == "__main__":
    print(installed.ensure())

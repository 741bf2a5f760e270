"""`python -m ucp`: the command line, found as the shell finds it."""

from importlib.metadata import entry_points

if __name__ == "__main__":
    command, *_ = entry_points(group="console_scripts", name="ucp")  # of two installations the first, as for imports
    command.load()()

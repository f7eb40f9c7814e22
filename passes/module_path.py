"""Which module of the user's model a node comes from."""

import re

from torch import fx

_NOISE = re.compile(r"L\['\w+'\]\.?|_modules|\.?_orig_mod\.?|\[['\"]|['\"]\]|[\[\]]")


def module_path(node: fx.Node) -> str:
    """Path of the innermost module that made `node`, e.g. "blocks.3.mlp"; "" if unknown."""
    for key in ("nn_module_stack", "fwd_nn_module_stack"):
        stack = node.meta.get(key)
        if stack:
            path, _ = next(reversed(stack.values()))
            return re.sub(r"\.+", ".", _NOISE.sub(".", str(path))).strip(".")
    return ""

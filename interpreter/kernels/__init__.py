"""The part of the interpreter that knows this project's kernels: their launches, operands and answers."""

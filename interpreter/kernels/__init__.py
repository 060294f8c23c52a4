"""What the interpreter knows of this project's kernels: their launches, operands and answers."""

"""The interpreter's commands.

    python -m interpreter mha_fwd_sm_90a_d128_bf      a kernel of this project: who did what when
    python -m interpreter run script.py               a script of anybody's, whose CuTe DSL functions run here

With --help, either says more.
"""

import sys


def main(argv: list[str]) -> int:
    if argv[:1] == ["run"]:  # which needs no kernel of this project, nor JAX
        from .cute import script

        return script.main(argv[1:])
    from .kernels import command

    return command.main(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
